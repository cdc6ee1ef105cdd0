"""The programs of a step for its buckets: lowered, and compiled in a queue.

Programs are lowered in the caller's thread, whose settings of JAX count; only the compiler runs elsewhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple, TypeAlias

import jax
import jaxlib
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from jvarlen._common.checks import UserError
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen._common.pytree import check_arrays, describe, have_same_containers, leaves_by_name
from jvarlen._common.types import Array, Batch, PyTree, Shapes
from jvarlen.batches.shapes import BatchShapes
from jvarlen.compiling.compile_options import CompileOptions, OptionValue
from jvarlen.compiling.recompiles import counting_in_thread, uncounted_in_thread
from jvarlen.compiling.report import CompileRow, row_of
from jvarlen.distributed.mesh import devices_of, with_auto_axes
from jvarlen.planning.buckets import AnyBucket

__all__ = [
    "CompileClock", "CompileQueue", "CompiledBucket", "LoweredBucket", "Step", "StepCompiler", "known_options",
    "largest_first", "make_step_compiler",
]  # fmt: skip

Step: TypeAlias = Callable[[PyTree, Batch], tuple[PyTree, PyTree]]
"""`step(state, batch) -> (state, metrics)`."""

_POLL_S = 0.02  # between two looks at whether Ctrl-C came


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


class LoweredBucket(NamedTuple):
    """The program of a bucket before compilation."""

    bucket: AnyBucket
    program: jax.stages.Lowered  # of state and batch; gives state and metrics, or metrics alone
    keeps_state: bool  # whether the step returns the very state that it takes, so that the program gives metrics alone
    seconds: float  # of tracing and lowering
    jaxpr: ClosedJaxpr  # what was lowered


class CompiledBucket(NamedTuple):
    """The program of a bucket, and its cost."""

    row: CompileRow
    executable: jax.stages.Compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCompiler:
    """Lowers and compiles a step for any bucket."""

    step_fn: Step  # not jitted
    state_spec: Shapes
    shapes: BatchShapes
    devices: list[jax.Device]  # those of other processes included
    compiler_options: Mapping[str, OptionValue]
    donate: bool = True  # whether a step writes the next state over the one that it takes
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

    def lower(self, bucket: AnyBucket) -> LoweredBucket:
        """Traces and lowers the step for a bucket, in the user's thread, whose settings of JAX count."""
        keeps_state = False

        # A new function for each bucket: JAX keeps an executable as long as the function that was jitted lives.
        def step(state: PyTree, batch: Batch) -> tuple[PyTree, PyTree]:
            nonlocal keeps_state
            outputs = self.step_fn(state, batch)
            self._check_outputs(outputs)
            pairs = zip(jax.tree.leaves(state), jax.tree.leaves(outputs[0]), strict=True)
            keeps_state = all(given is returned for given, returned in pairs)
            return outputs

        def metrics_alone(state: PyTree, batch: Batch) -> PyTree:
            outputs = jaxpr_as_fun(whole.jaxpr)(*jax.tree.leaves((state, batch)))
            return jax.tree.unflatten(jax.tree.structure(whole.out_info), outputs)[1]

        start = time.perf_counter()
        with self.clock:
            specs = self.state_spec, self.shapes.spec(bucket)
            traced = whole = self._jit(step).trace(*specs)
            if keeps_state:
                traced = self._jit(metrics_alone, keeps_state=True).trace(*specs)
            lowered = traced.lower()
        return LoweredBucket(bucket, lowered, keeps_state, time.perf_counter() - start, traced.jaxpr)

    def _jit(self, step: Callable[[PyTree, Batch], PyTree], *, keeps_state: bool = False) -> jax.stages.Wrapped:
        step.__name__ = step.__qualname__ = self.name
        shardings = None
        if self.mesh is not None and not keeps_state:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state_spec), None
        return jax.jit(step, donate_argnums=0 if self.donate and not keeps_state else (), out_shardings=shardings)

    def compile(self, lowered: LoweredBucket) -> CompiledBucket:
        """Compiles the result of `lower`, in any thread."""
        start = time.perf_counter()
        with self.clock, counting_in_thread() as count:
            executable = lowered.program.compile(compiler_options=dict(self.compiler_options) or None)
        seconds = time.perf_counter() - start
        hit = count.num_cache_hits > 0
        return CompiledBucket(row_of(lowered.bucket, executable, lowered.seconds, seconds, hit), executable)

    def _check_outputs(self, outputs: PyTree) -> None:
        if not (isinstance(outputs, tuple) and len(outputs) == 2):
            raise UserError(f"{self.name} must return (state, metrics), not {type(outputs).__name__}")
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
    step_fn: Step, state: PyTree, shapes: BatchShapes, options: CompileOptions, *, donate: bool = True
) -> StepCompiler:
    """The compiler of a step, from the arguments of `compile_buckets`."""
    num_shards = 1 if shapes.placement is None else shapes.placement.layout.data
    if num_shards > 1 and getattr(step_fn, "placement", shapes.placement) is None:
        raise UserError(
            f"the step was made for one device and is compiled for {num_shards} shards, each of which would compute "
            "the whole step: give make_train_step, or make_eval_step, the same layout"
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
    )


class CompileQueue:
    """Compiles buckets in their order, except that a bucket which is waited for comes before the others.

    Attributes:
      step_compiler: lowers and compiles.
      buckets: all, in the order of compilation.
      rows: the cost of each compiled bucket.
      executables: those that are held.
      keeping_state: buckets whose program returns metrics alone.
      digest: of the buckets and of the largest and the smallest program, which several processes compare.
    """

    def __init__(
        self,
        step_compiler: StepCompiler,
        buckets: Sequence[AnyBucket],
        options: CompileOptions,
        num_threads: int,
        bar: tqdm,
    ):
        self.step_compiler, self.buckets = step_compiler, tuple(buckets)
        self.rows: dict[AnyBucket, CompileRow] = {}
        self.executables: dict[AnyBucket, jax.stages.Compiled] = {}
        self.keeping_state: set[AnyBucket] = set()
        self.digest = hashlib.sha256(repr(list(buckets)).encode())
        self._compared = (buckets[0], buckets[-1]) if jax.process_count() > 1 else ()
        self._bar = bar
        self._as_planned = uncounted_in_thread if options.in_background else contextlib.nullcontext
        self._to_lower = list(buckets)
        self._compiling: dict[AnyBucket, Future[CompiledBucket]] = {}
        # In the background, one more thread is for what a step waits for; ahead, one more program waits for a thread.
        self._threads = ThreadPoolExecutor(num_threads + options.in_background, thread_name_prefix="compile")
        self._most_compiling = num_threads + (not options.in_background)

    @property
    def pending(self) -> tuple[AnyBucket, ...]:
        """Buckets that are not compiled yet, in the order in which they will be."""
        return *self._compiling, *self._to_lower

    def advance(self) -> None:
        """Collects compiled programs, and lowers a bucket here if a thread is free."""
        self._collect()
        if self._to_lower and len(self._compiling) < self._most_compiling:
            self._submit(self._to_lower[0])

    def wait_for_all(self) -> None:
        """Waits until every bucket is compiled."""
        while self.pending:
            raise_if_interrupted()
            self.advance()
            if not self._to_lower or len(self._compiling) >= self._most_compiling:
                futures.wait(self._compiling.values(), _POLL_S, futures.FIRST_COMPLETED)

    def wait_for(self, bucket: AnyBucket, timeout: float | None = None) -> bool:
        """Waits some seconds, or as long as it takes, until this bucket is compiled; returns whether it is."""
        if bucket in self._to_lower:
            self._submit(bucket)
        if bucket in self._compiling:
            futures.wait([self._compiling[bucket]], timeout)
        self._collect()
        return bucket not in self._compiling

    def release(self, bucket: AnyBucket) -> None:
        """Lets a program go for good; a step that still runs it is not disturbed."""
        self.executables.pop(bucket, None)
        if bucket in self._to_lower:
            self._to_lower.remove(bucket)
        elif bucket in self._compiling:
            self._compiling.pop(bucket).cancel()

    def close(self) -> None:
        """Ends compiling: what is not compiled yet never will be."""
        self._to_lower, self._compiling = [], {}
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._bar.close()

    def _submit(self, bucket: AnyBucket) -> None:
        """Lowers a bucket here, and has a thread compile it."""
        self._bar.set_postfix_str(str(bucket))
        with self._close_on_error(bucket), self._as_planned():
            lowered = self.step_compiler.lower(bucket)
        self._to_lower.remove(bucket)
        if lowered.keeps_state:
            self.keeping_state.add(bucket)
        if bucket in self._compared:
            self.digest.update(lowered.program.as_text().encode())

        def compile_lowered() -> CompiledBucket:
            with self._as_planned():
                return self.step_compiler.compile(lowered)

        self._compiling[bucket] = self._threads.submit(compile_lowered)

    def _collect(self) -> None:
        for bucket in [bucket for bucket, future in self._compiling.items() if future.done()]:
            with self._close_on_error(bucket):
                row, executable = self._compiling.pop(bucket).result()
                limit = self.step_compiler.bytes_limit
                if limit is not None and row.total_bytes > limit:
                    raise UserError(f"it needs {row.total_bytes:,} bytes on each device, which has {limit:,}")
            self.rows[bucket], self.executables[bucket] = row, executable
            self._bar.update()
            if not self.pending:
                self.close()

    @contextlib.contextmanager
    def _close_on_error(self, bucket: AnyBucket) -> Iterator[None]:
        """A block whose errors name the bucket, and end the compilation of the others."""
        try:
            yield
        except Exception as error:
            error.add_note(f"while compiling {self.step_compiler.name} for bucket {bucket}")
            self.close()
            raise


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
