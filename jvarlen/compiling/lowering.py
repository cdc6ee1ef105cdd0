"""The programs of a step, lowered and compiled.

Programs are lowered in the caller's thread, whose settings of JAX count; only the compiler runs elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import jax
import jaxlib
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jvarlen._common.checks import UserError
from jvarlen._common.pytree import check_arrays
from jvarlen._common.types import Array, Batch, PyTree, Shapes, StepHalves
from jvarlen.batches.shapes import BatchShapes
from jvarlen.compiling.compile_options import CompileOptions, OptionValue
from jvarlen.compiling.programs import (
    LOSS,
    UPDATE,
    ProgramKey,
    Step,
    StepPart,
    check_same,
    gradients_of,
    with_mark,
)
from jvarlen.compiling.recompiles import counting_in_thread, uncounted_in_thread
from jvarlen.compiling.report import CompileRow, Program, row_of
from jvarlen.distributed.mesh import devices_of, with_auto_axes
from jvarlen.planning.buckets import AnyBucket

__all__ = [
    "CompileClock", "CompiledProgram", "LoweredProgram", "StepCompiler", "known_options", "largest_first",
    "make_step_compiler",
]  # fmt: skip


class CompileClock:
    """Adds up the seconds in which at least one thread is inside a block, and the CPU time of the process meanwhile."""

    # Not the CPU time of threads: XLA compiles in other threads.

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._start = self._wall_s = self._cpu_s = 0.0

    @property
    def seconds(self) -> tuple[float, float]:
        """Wall-clock and CPU seconds of blocks that have ended."""
        return self._wall_s, self._cpu_s

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_inside:
                self._start, self._cpu_start = time.perf_counter(), time.process_time()
            self._num_inside += 1

    def __exit__(self, *exception: type[BaseException] | BaseException | TracebackType | None) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                self._wall_s += time.perf_counter() - self._start
                self._cpu_s += time.process_time() - self._cpu_start


def largest_first(buckets: Sequence[AnyBucket]) -> list[AnyBucket]:
    """Buckets by tokens with padding, descending."""
    return sorted(buckets, key=lambda bucket: -bucket.padded_tokens)


class LoweredProgram(NamedTuple):
    """A program before compilation."""

    key: ProgramKey
    program: jax.stages.Lowered  # of a whole step or an update: gives state and metrics, or metrics alone
    keeps_state: bool  # whether the step returns the very state that it takes, so that the program gives metrics alone
    seconds: float  # of tracing and lowering
    jaxpr: ClosedJaxpr  # what was lowered


class CompiledProgram(NamedTuple):
    """A program, and its cost."""

    row: CompileRow
    executable: jax.stages.Compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCompiler:
    """Lowers and compiles the programs of a step: one for a bucket, or those of its halves."""

    step_fn: Step  # not jitted
    state_spec: Shapes
    shapes: BatchShapes
    devices: list[jax.Device]  # those of other processes included
    compiler_options: Mapping[str, OptionValue]
    donate: bool = True  # whether a step writes the next state over the one that it takes
    halves: StepHalves | None = None  # None: a step is one program
    clock: CompileClock = dataclasses.field(default_factory=CompileClock, repr=False)

    @property
    def mesh(self) -> Mesh | None:
        """The mesh on which steps run; None means the default device."""
        return None if self.shapes.placement is None else self.shapes.placement.mesh

    @property
    def name(self) -> str:
        """The name of the step function."""
        return getattr(self.step_fn, "__name__", "step")

    @property
    def own_devices(self) -> list[jax.Device]:
        """The devices of this process."""
        return [device for device in self.devices if device.process_index == jax.process_index()]

    @property
    def device(self) -> jax.Device:
        """The first of this process."""
        return self.own_devices[0]

    @property
    def bytes_limit(self) -> int | None:
        """Bytes of memory of a device; None where it does not say."""
        return (self.device.memory_stats() or {}).get("bytes_limit")

    @property
    def has_two_passes(self) -> bool:
        """Whether each group of a step is taken twice, for a loss of the whole step."""
        return self.halves is not None and self.halves.between is not None

    @functools.cached_property
    def most_rows(self) -> int | None:
        """The rows for which the sums of a step have room; None where that is any number."""
        if self.halves is None or self.halves.holds_rows is None:
            return None
        shapes = self.shapes
        return shapes.most_rows if self.halves.holds_rows(self.state_spec, shapes.spec(shapes.buckets[0])) else None

    def passes(self, bucket: AnyBucket) -> tuple[ProgramKey, ...]:
        """The programs of a bucket, in the order in which a step runs them."""
        return (bucket, gradients_of(bucket)) if self.has_two_passes else (bucket,)

    @property
    def once_a_step(self) -> tuple[ProgramKey, ...]:
        """The programs that a step runs once, whatever its buckets."""
        return () if self.halves is None else (LOSS, UPDATE) if self.has_two_passes else (UPDATE,)

    def lower(self, key: ProgramKey) -> LoweredProgram:
        """Traces and lowers a program, in the user's thread, whose settings of JAX count."""
        start = time.perf_counter()
        with self.clock:
            traced, keeps_state = self.trace(key)
            lowered = traced.lower()
        return LoweredProgram(key, lowered, keeps_state, time.perf_counter() - start, traced.jaxpr)

    def compile(self, lowered: LoweredProgram) -> CompiledProgram:
        """Compiles the result of `lower`, in any thread."""
        start = time.perf_counter()
        with self.clock, counting_in_thread() as count:
            executable = lowered.program.compile(compiler_options=dict(self.compiler_options) or None)
        seconds = time.perf_counter() - start
        hit = count.num_cache_hits > 0
        key = lowered.key
        row = functools.partial(row_of, compiled=executable, lower_s=lowered.seconds, compile_s=seconds, cache_hit=hit)
        return CompiledProgram(row(*self.program_of(key)), executable)

    def program_of(self, key: ProgramKey) -> tuple[Program, AnyBucket | None]:
        """What a program does, as reports name it, and its bucket."""
        if isinstance(key, StepPart):
            return key.name, key.bucket
        return ("step" if self.halves is None else "accumulation"), key

    @functools.cached_property
    def zeros(self) -> jax.stages.Compiled:
        """The program that makes the sums of a step before its first group, from the state."""
        halves, shapes, most_rows = self._halves, self.shapes, self.most_rows or 0

        def zeros(state: PyTree) -> PyTree:
            return halves.zeros(state, shapes.spec(shapes.buckets[0]), most_rows)

        with self.clock:
            lowered = self._jit(zeros, "zeros").lower(self.state_spec)
            return lowered.compile(compiler_options=dict(self.compiler_options) or None)

    @functools.cached_property
    def between(self) -> CompiledProgram:
        """The program between the two passes over the groups of a step."""
        return self.compile(self.lower(LOSS))

    @functools.cached_property
    def sums_spec(self) -> Shapes:
        """The sums of a step in its first pass."""
        return _spec_of_results(self.zeros.out_info, self.zeros.output_shardings, self.mesh)

    @functools.cached_property
    def last_sums_spec(self) -> Shapes:
        """The sums of a step in its last pass."""
        if not self.has_two_passes:
            return self.sums_spec
        between = self.between.executable
        return _spec_of_results(between.out_info[0], between.output_shardings[0], self.mesh)

    @property
    def _halves(self) -> StepHalves:
        assert self.halves is not None
        return self.halves

    def trace(self, key: ProgramKey) -> tuple[jax.stages.Traced, bool]:
        """A traced program, and whether it is one that returns the very state that it takes."""
        if self.halves is None and not isinstance(key, StepPart):
            return self._trace_to_state(self.step_fn, "", self.shapes.spec(key))
        if key == UPDATE:
            return self._trace_to_state(self._halves.update, "update", self.last_sums_spec)
        if key == LOSS:
            assert self._halves.between is not None
            between = with_mark(self._halves.between)
            return self._jit(between, "loss", keep_unused=True).trace(self.state_spec, self.sums_spec), False
        return self._trace_pass(key), False

    def _trace_pass(self, key: ProgramKey) -> jax.stages.Traced:
        """A pass over a group: sums with those of the group added."""
        name, bucket = key if isinstance(key, StepPart) else ("accumulate", key)
        assert bucket is not None
        accumulate, sums_spec = self._halves.accumulate, self.sums_spec
        if isinstance(key, StepPart):
            assert self._halves.accumulate_again is not None
            accumulate, sums_spec = self._halves.accumulate_again, self.last_sums_spec

        def checked(state: PyTree, batch: Batch, sums: PyTree) -> PyTree:
            returned = accumulate(state, batch, sums)
            check_same(self.name, f"sums of {bucket} that differ from those of the step", sums, returned)
            return returned

        shardings = None if self.mesh is None else (_shardings(sums_spec), None)
        # What it does not read, as the optimizer's state, is held all the same, and counts.
        program = self._jit(with_mark(checked), name, donate_argnums=2, out_shardings=shardings, keep_unused=True)
        return program.trace(self.state_spec, self.shapes.spec(bucket), sums_spec)

    def _trace_to_state(
        self, function: Callable[[PyTree, PyTree], PyTree], name: str, spec: Shapes
    ) -> tuple[jax.stages.Traced, bool]:
        """A whole step or an update, which makes the next state; and whether that is the one which it takes."""
        keeps_state = False

        def step(state: PyTree, taken: PyTree) -> tuple[PyTree, PyTree]:
            nonlocal keeps_state
            outputs = function(state, taken)
            if not (isinstance(outputs, tuple) and len(outputs) == 2):
                raise UserError(f"{self.name} must return (state, metrics), not {type(outputs).__name__}")
            check_same(self.name, "a state that differs from its input", self.state_spec, outputs[0])
            pairs = zip(jax.tree.leaves(state), jax.tree.leaves(outputs[0]), strict=True)
            keeps_state = all(given is returned for given, returned in pairs)
            return outputs

        def metrics_alone(state: PyTree, taken: PyTree) -> PyTree:
            outputs = jaxpr_as_fun(whole.jaxpr)(*jax.tree.leaves((state, taken)))
            return jax.tree.unflatten(jax.tree.structure(whole.out_info), outputs)[1]

        shardings = None if self.mesh is None else (_shardings(self.state_spec), None)
        donated = 0 if self.donate else ()
        whole = self._jit(step, name, donate_argnums=donated, out_shardings=shardings).trace(self.state_spec, spec)
        if not keeps_state:
            return whole, False
        return self._jit(metrics_alone, name).trace(self.state_spec, spec), True

    def _jit(self, function: Callable[..., PyTree], name: str, **options: Any) -> jax.stages.Wrapped:
        """A new function for each program: JAX keeps an executable as long as the function that was jitted lives."""
        function.__name__ = function.__qualname__ = f"{self.name}_{name}" if name else self.name
        return jax.jit(function, **options)


def _shardings(spec: Shapes) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.sharding, spec)


def _spec_of_results(shapes: Shapes, shardings: PyTree, mesh: Mesh | None) -> Shapes:
    """Results of a program as others take them; their places count on several devices alone."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding if mesh else None),
        shapes,
        shardings,
    )


def make_step_compiler(
    step_fn: Step, state: PyTree, shapes: BatchShapes, options: CompileOptions, *, donate: bool = True
) -> StepCompiler:
    """The compiler of a step, from the arguments of `compile_buckets`."""
    num_shards = 1 if shapes.placement is None else shapes.placement.layout.data
    if num_shards > 1 and getattr(step_fn, "placement", shapes.placement) is None:
        raise UserError(
            f"the step was made for one device and is compiled for {num_shards} shards, each of which would compute "
            "the whole step: give make_train_step, or make_eval_step, the same layout"
        )
    halves: StepHalves | None = getattr(step_fn, "halves", None)
    if halves is None and (shapes.has_many_groups or (shapes.plan is not None and shapes.plan.has_many_groups)):
        raise UserError(
            "steps of this plan may have several groups, which takes a step of make_train_step or make_eval_step: a "
            "function step(state, batch) takes steps of one group"
        )
    mesh = None if shapes.placement is None else shapes.placement.mesh
    devices = devices_of(mesh)
    platform = devices[0].platform
    placement = getattr(step_fn, "placement", None) or shapes.placement
    has_grad_buckets = placement is not None and placement.layout.grad_bucket_bytes > 0
    given, defaults = (
        each.compiler_options(platform, len(devices), has_grad_buckets=has_grad_buckets)
        for each in (options, dataclasses.replace(options, xla_options=()))
    )
    local_devices = [device for device in devices if device.process_index == jax.process_index()]
    return StepCompiler(
        step_fn=step_fn,
        state_spec=_spec_of_state(state, mesh),
        shapes=shapes,
        devices=devices,
        compiler_options=known_options(given, defaults, local_devices[0]),
        donate=donate,
        halves=halves if shapes.may_have_many_groups else None,
    )


def known_options(
    options: Mapping[str, OptionValue], defaults: Mapping[str, OptionValue], device: jax.Device
) -> dict[str, OptionValue]:
    """The options without defaults that jaxlib does not know; raises ValueError for other unknown ones."""

    def error_with(tried: Mapping[str, OptionValue]) -> Exception | None:
        """The error of compiling an empty program with these options."""
        try:
            with uncounted_in_thread(), jax.default_device(device):
                jax.jit(lambda: 0).lower().compile(compiler_options=dict(tried))
        except (jax.errors.JaxRuntimeError, TypeError, ValueError) as error:
            return error
        return None

    if not options or error_with(options) is None:
        return dict(options)
    errors = {name: error_with({name: value}) for name, value in options.items()}
    unknown = {name: value for name, value in options.items() if errors[name] is not None}
    wrong = [name for name, value in unknown.items() if defaults.get(name) != value]
    if wrong:
        listed = ", ".join(f"{name}={unknown[name]!r} ({errors[name]})" for name in wrong)
        raise UserError(f"jaxlib {jaxlib.__version__} does not support these options: {listed}")
    return {name: value for name, value in options.items() if name not in unknown}


def _spec_of_state(state: PyTree, mesh: Mesh | None) -> Shapes:
    """Shapes and dtypes of a state as a step takes it; what is not placed on a mesh is replicated over it."""
    check_arrays(state, "the state")

    def spec(leaf: Array, abstract: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None)
        if mesh is None:
            sharding = None
        elif isinstance(sharding, NamedSharding):
            sharding = with_auto_axes(sharding)
        else:
            sharding = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(abstract.shape, abstract.dtype, sharding=sharding)

    return jax.tree.map(spec, state, jax.eval_shape(lambda state: state, state))
