"""The programs of a step: lowered and compiled for any bucket, and those that are compiled."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import platform
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jvarlen._common.checks import UserError
from jvarlen._common.pytree import check_arrays, describe, have_same_containers, leaves_by_name
from jvarlen.batches.shapes import BatchShapes
from jvarlen.compiling.clock import COMPILING, CompileClock
from jvarlen.compiling.compile_options import CompileOptions
from jvarlen.compiling.compile_row import CompileRow, row_of
from jvarlen.compiling.program_store import deserialized, serialized, without_compilation_cache
from jvarlen.compiling.recompiles import counting_in_thread, uncounted_in_thread
from jvarlen.distributed import BucketBytes
from jvarlen.distributed.mesh import axes_in, devices_of, replicate, with_auto_axes
from jvarlen.planning.buckets import AnyBucket

__all__ = [
    "CompiledBucket",
    "LoweredBucket",
    "Programs",
    "StepCompiler",
    "check_compiler_options",
    "known_options",
    "largest_first",
    "make_step_compiler",
]

_HOISTED_FROM_BYTES = 2**20  # what a step closes over in all, from which on its arrays become arguments of programs
_CONSTANT_BYTES = 2**12  # an array up to here stays a constant


def largest_first(buckets: Sequence[AnyBucket]) -> list[AnyBucket]:
    """Buckets by tokens with padding, descending."""
    return sorted(buckets, key=lambda bucket: -bucket.padded_tokens)


class LoweredBucket(NamedTuple):
    """The program of a bucket before compilation."""

    bucket: AnyBucket
    program: jax.stages.Lowered  # of state, batch, and constants; gives state and metrics, or metrics alone
    constants: tuple[jax.Array, ...]  # arrays that the step closes over, on the devices that it runs on
    keeps_state: bool  # whether the step returns the very state that it takes, so that the program gives metrics alone
    seconds: float  # of tracing and lowering
    jaxpr: ClosedJaxpr  # what was lowered


class CompiledBucket(NamedTuple):
    """The program of a bucket, and what it cost."""

    row: CompileRow
    executable: jax.stages.Compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCompiler:
    """Lowers and compiles a step for any bucket."""

    step_fn: Callable[[Any, Any], tuple[Any, Any]]  # not jitted
    state_spec: Any  # pytree of `jax.ShapeDtypeStruct`
    shapes: BatchShapes
    devices: list[jax.Device]  # those of other processes included
    compiler_options: Mapping[str, Any]
    donate: bool = True  # whether a step writes the next state over the one that it takes
    grad_buckets: BucketBytes | None = None  # in which gradients are reduced; None: all together
    is_timed: bool = False  # whether a step has to return something that can be waited for
    only_compiles: bool = False  # whether nothing is placed on the devices, which need not be here
    clock: CompileClock = dataclasses.field(default_factory=CompileClock, repr=False)
    _placed: dict[int, tuple[Any, Any]] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def mesh(self) -> Mesh | None:
        """Where a step runs; None: the default device."""
        return None if self.shapes.placement is None else self.shapes.placement.mesh

    @property
    def name(self) -> str:
        """The name of the step function."""
        return getattr(self.step_fn, "__name__", "step")

    @property
    def own_devices(self) -> list[jax.Device]:
        """Those of this process."""
        return [device for device in self.devices if device.process_index == jax.process_index()]

    @property
    def device(self) -> jax.Device:
        """The first of this process."""
        return self.own_devices[0]

    @property
    def bytes_limit(self) -> int | None:
        """Bytes of memory of a device; None where it does not tell."""
        return (self.device.memory_stats() or {}).get("bytes_limit")

    @property
    def device_text(self) -> str:
        """Number and kind of the devices."""
        kinds = sorted({device.device_kind for device in self.devices})
        return f"{len(self.devices)} × {', '.join(kinds)}"

    @property
    def environment(self) -> dict[str, Any]:
        """What must be the same where programs are compiled and where they are run, by name."""
        client = self.devices[0].client
        return {
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "platform": client.platform,
            "platform version": client.platform_version,
            "device kinds": [device.device_kind for device in self.devices],
            "device ids": [device.id for device in self.devices],
            "CPU": _cpu_kind(),
            "processes": jax.process_count(),
            "process": jax.process_index(),
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
            "compiler options": dict(self.compiler_options),
        }

    def _buckets_in_force(self) -> contextlib.AbstractContextManager[None]:
        """A block in which steps are traced with these gradient buckets."""
        if self.grad_buckets is None:
            return contextlib.nullcontext()
        from jvarlen.distributed.grad_buckets import with_grad_buckets

        return with_grad_buckets(self.grad_buckets)

    def lower(self, bucket: AnyBucket) -> LoweredBucket:
        """Traces and lowers the step for a bucket, in the user's thread, whose settings of JAX count."""
        keeps_state = False

        # A function of its own for each bucket: JAX keeps an executable as long as the function that was jitted lives.
        def step(state: Any, batch: Any) -> tuple[Any, Any]:
            nonlocal keeps_state
            outputs = self.step_fn(state, batch)
            self._check_outputs(outputs)
            pairs = zip(jax.tree.leaves(state), jax.tree.leaves(outputs[0]), strict=True)
            keeps_state = all(given is returned for given, returned in pairs)
            return outputs

        start = time.perf_counter()
        with COMPILING, self.clock, self._buckets_in_force():
            traced = self._jitted(step).trace(self.state_spec, self.shapes.spec(bucket))
            hoisted = self._hoisted(traced.jaxpr)
            constants = tuple(hoisted.values())
            if keeps_state or constants:
                whole = _retraced(traced, tuple(hoisted), metrics_only=keeps_state)
                again = self._jitted(whole, keeps_state=keeps_state)
                traced = again.trace(self.state_spec, self.shapes.spec(bucket), *([constants] if constants else []))
            lowered = traced.lower()
        return LoweredBucket(bucket, lowered, constants, keeps_state, time.perf_counter() - start, traced.jaxpr)

    def _jitted(self, step: Callable[..., Any], *, keeps_state: bool = False) -> Any:
        step.__name__ = step.__qualname__ = self.name
        shardings: Any = None
        if self.mesh is not None and not keeps_state:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state_spec), None
        return jax.jit(step, donate_argnums=0 if self.donate and not keeps_state else (), out_shardings=shardings)

    def _hoisted(self, closed: ClosedJaxpr) -> dict[int, jax.Array]:
        """Which constants become arguments, by their place, on the devices of the step."""
        sizes = {i: getattr(constant, "nbytes", 0) for i, constant in enumerate(closed.consts)}
        if sum(sizes.values()) < _HOISTED_FROM_BYTES:
            return {}
        return {i: self._place(closed.consts[i]) for i, size in sizes.items() if size > _CONSTANT_BYTES}

    def _place(self, constant: Any) -> Any:
        """One copy for all buckets; its shape where it can be placed nowhere."""
        if id(constant) not in self._placed:
            if self.mesh is None:
                placed = jax.device_put(constant)
            elif self.only_compiles:
                spec = getattr(getattr(constant, "sharding", None), "spec", PartitionSpec())
                is_there = {*axes_in(spec)} <= {*self.mesh.axis_names}
                where = NamedSharding(self.mesh, spec if is_there else PartitionSpec())
                placed = jax.ShapeDtypeStruct(constant.shape, constant.dtype, sharding=where)
            elif isinstance(sharding := getattr(constant, "sharding", None), NamedSharding):
                placed = jax.device_put(constant, with_auto_axes(sharding))
            else:
                placed = replicate(constant, self.mesh)
            self._placed[id(constant)] = constant, placed
        return self._placed[id(constant)][1]

    def compile(self, lowered: LoweredBucket) -> CompiledBucket:
        """Compiles what `lower` gave, in whatever thread."""
        start = time.perf_counter()
        with COMPILING, self.clock, counting_in_thread() as count:
            executable = lowered.program.compile(compiler_options=dict(self.compiler_options) or None)
        seconds = time.perf_counter() - start
        hit = count.num_cache_hits > 0
        return CompiledBucket(row_of(lowered.bucket, executable, lowered.seconds, seconds, hit), executable)

    def _check_outputs(self, outputs: Any) -> None:
        if not (isinstance(outputs, tuple) and len(outputs) == 2):
            raise UserError(f"{self.name} must return (state, metrics), not {type(outputs).__name__}")
        if self.is_timed and not jax.tree.leaves(outputs[1]):
            raise UserError(f"time_steps waits for the metrics of a step, and those of {self.name} hold no array")
        given, returned = (
            {name: describe(jax.typeof(leaf)) for name, leaf in leaves_by_name(state).items()}
            for state in (self.state_spec, outputs[0])
        )
        changed = [name for name in {**given, **returned} if given.get(name) != returned.get(name)]
        if changed or not have_same_containers(self.state_spec, outputs[0]):
            listed = "; ".join(f"{name or 'it'}: {given.get(name)} -> {returned.get(name)}" for name in changed[:5])
            raise UserError(
                f"{self.name} returns a state that differs from its input: {listed or 'its containers differ'}"
            )


def make_step_compiler(
    step_fn: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    shapes: BatchShapes,
    options: CompileOptions,
    *,
    donate: bool = True,
    only_compiles: bool = False,
) -> StepCompiler:
    """What compiles a step, with the arguments of `compile_buckets`."""
    num_shards = 1 if shapes.placement is None else shapes.placement.layout.data
    if num_shards > 1 and getattr(step_fn, "placement", shapes.placement) is None:
        raise UserError(
            f"the step was made for one device and is compiled for {num_shards} shards, each of which would compute "
            "the whole step: give make_train_step, or make_eval_step, the same layout"
        )
    mesh = None if shapes.placement is None else shapes.placement.mesh
    devices = devices_of(mesh)
    where = devices[0].platform, len(devices)
    step_compiler = StepCompiler(
        step_fn=step_fn,
        state_spec=_spec_of_state(state, mesh),
        shapes=shapes,
        devices=devices,
        compiler_options=options.compiler_options(*where),
        donate=donate,
        grad_buckets=options.grad_buckets,
        is_timed=bool(options.time_steps),
        only_compiles=only_compiles,
    )
    defaults = dataclasses.replace(
        options, command_buffers=None, latency_hiding_scheduler=None, all_reduce_combine_bytes=None, xla_options=()
    ).compiler_options(*where)
    known = known_options(step_compiler.compiler_options, defaults, step_compiler.device)
    return dataclasses.replace(step_compiler, compiler_options=known)


def known_options(options: Mapping[str, Any], defaults: Mapping[str, Any], device: jax.Device) -> dict[str, Any]:
    """The options but for defaults that the installed compiler does not know; raises ValueError for others."""
    try:
        check_compiler_options(options, device)
        return dict(options)
    except UserError:
        known = {}
        for name, value in options.items():
            try:
                check_compiler_options({name: value}, device)
                known[name] = value
            except UserError:
                if defaults.get(name) != value:
                    raise
        check_compiler_options(known, device)
        return known


def check_compiler_options(options: Mapping[str, Any], device: jax.Device) -> None:
    """Raises ValueError for options that the installed jaxlib does not take, by compiling an empty program."""
    if not options:
        return
    try:
        with uncounted_in_thread(), jax.default_device(device):
            jax.jit(lambda: 0).lower().compile(compiler_options=dict(options))
    except (jax.errors.JaxRuntimeError, TypeError, ValueError) as error:
        listed = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise UserError(f"jaxlib {jaxlib.__version__} does not support these options: {listed} ({error})") from error


def _retraced(traced: jax.stages.Traced, hoisted: tuple[int, ...], *, metrics_only: bool) -> Callable[..., Any]:
    """A traced step as a function that also takes the constants at these places, and may leave the state out."""
    closed, structure = traced.jaxpr, jax.tree.structure(traced.out_info)

    def step(state: Any, batch: Any, constants: tuple[Any, ...] = ()) -> Any:
        consts = list(closed.consts)
        for place, constant in zip(hoisted, constants, strict=True):
            consts[place] = constant
        outputs = jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*jax.tree.leaves((state, batch)))
        state, metrics = jax.tree.unflatten(structure, outputs)
        return metrics if metrics_only else (state, metrics)

    return step


def _spec_of_state(state: Any, mesh: Mesh | None) -> Any:
    """Shapes and dtypes of a state as a step takes it; what is not placed on a mesh is replicated over it."""
    check_arrays(state, "the state")

    def spec(leaf: Any, abstract: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding: Any = getattr(leaf, "sharding", None)
        if mesh is None:
            sharding = None
        elif isinstance(sharding, NamedSharding):
            sharding = with_auto_axes(sharding)
        else:
            sharding = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(abstract.shape, abstract.dtype, sharding=sharding)

    return jax.tree.map(spec, state, jax.eval_shape(lambda state: state, state))


def _cpu_kind() -> str:
    """The kind of the host's CPU; where the system tells, with what it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return f"{platform.machine()} {hashlib.sha256(''.join(features).encode()).hexdigest()[:16]}"


class Programs:
    """The compiled programs of a step: at most `max_live` on the devices, others on the host until they are used."""

    def __init__(self, step_compiler: StepCompiler, max_live: int | None = None):
        self.rows: dict[AnyBucket, CompileRow] = {}
        self.constants: dict[AnyBucket, tuple[jax.Array, ...]] = {}
        self.texts: dict[AnyBucket, str] = {}  # of the largest and the smallest, by which saved sets are told apart
        self.keeping_state: set[AnyBucket] = set()  # buckets whose program gives metrics alone
        self._step_compiler = step_compiler
        self._max_live = max_live
        self._live: OrderedDict[AnyBucket, jax.stages.Compiled] = OrderedDict()  # least recently used first
        self._stored: dict[AnyBucket, tuple[bytes, Any, Any]] = {}

    def lowered(self, lowered: LoweredBucket, *, with_text: bool) -> None:
        """Takes note of what a program takes and gives."""
        if lowered.constants:
            self.constants[lowered.bucket] = lowered.constants
        if lowered.keeps_state:
            self.keeping_state.add(lowered.bucket)
        if with_text:
            self.texts[lowered.bucket] = lowered.program.as_text()

    def add(
        self, row: CompileRow, executable: jax.stages.Compiled, stored: tuple[bytes, Any, Any] | None = None
    ) -> None:
        """Takes a program, and, where that is known, what `serialized` gave for it."""
        self.rows[row.bucket] = row
        if self._max_live is not None:
            self._stored[row.bucket] = stored or serialized(executable)
        self._hold(row.bucket, executable)

    def get(self, bucket: AnyBucket) -> jax.stages.Compiled:
        """A program that was not released, loaded again where it had made room; nothing is compiled."""
        if bucket in self._live:
            self._live.move_to_end(bucket)
        else:
            self._hold(bucket, deserialized(*self._stored[bucket], self._step_compiler.devices))
        return self._live[bucket]

    def _hold(self, bucket: AnyBucket, executable: jax.stages.Compiled) -> None:
        while self._max_live is not None and len(self._live) >= self._max_live:
            self._live.popitem(last=False)
        self._live[bucket] = executable

    def run(self, bucket: AnyBucket, state: Any, batch: Any) -> tuple[Any, Any]:
        """Runs a program: the next state, and the metrics."""
        constants = self.constants.get(bucket)
        outputs = self.get(bucket)(state, batch, *([constants] if constants else []))
        return (state, outputs) if bucket in self.keeping_state else outputs

    def serialized(self, bucket: AnyBucket) -> tuple[bytes, Any, Any]:
        """A program that was not released, as `serialized` gives it."""
        if bucket in self._stored:
            return self._stored[bucket]
        if self._step_compiler.device.platform == "cpu" and self.rows[bucket].cache_hit:
            # XLA's CPU backend leaves the code of what it read out, and only running it shows that.
            with without_compilation_cache():
                return serialized(self._step_compiler.compile(self._step_compiler.lower(bucket)).executable)
        return serialized(self._live[bucket])

    def has(self, bucket: AnyBucket) -> bool:
        """Whether a program is compiled and was not released."""
        return bucket in self._live or bucket in self._stored

    def is_live(self, bucket: AnyBucket) -> bool:
        """Whether a program is on the devices."""
        return bucket in self._live

    def release(self, bucket: AnyBucket) -> None:
        """Lets a program go for good; a step that still runs it is not disturbed."""
        self._live.pop(bucket, None)
        self._stored.pop(bucket, None)

    def fingerprint(self, buckets: Sequence[AnyBucket]) -> str:
        """SHA-256 of the buckets, and of the lowered programs of the largest and the smallest."""
        ordered = largest_first(buckets)
        shapes = self._step_compiler.shapes.microbatches_per_step, [tuple(bucket) for bucket in ordered]
        digest = hashlib.sha256(repr(shapes).encode())
        for bucket in dict.fromkeys((ordered[0], ordered[-1])):
            digest.update(hashlib.sha256(self.texts[bucket].encode()).digest())
        return digest.hexdigest()
