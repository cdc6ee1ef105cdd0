"""Compilation: in go a step function and buckets, out comes a callable that has every bucket's executable, and no more.

Everything is compiled before the first step; what was not planned is refused, and `no_recompiles` proves that nothing
is compiled afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from jvarlen.buckets import AnyBucket, check_buckets
from jvarlen.collate import token_batch_spec
from jvarlen.distributed import batch_shardings
from jvarlen.interrupts import raise_if_interrupted

__all__ = [
    "CompiledBuckets",
    "LedgerRow",
    "RecompileCount",
    "RecompileError",
    "UnplannedShapeError",
    "compile_buckets",
    "no_recompiles",
    "use_compilation_cache",
]

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


class UnplannedShapeError(ValueError):
    """A batch has a structure, shape or dtype that no bucket was compiled for."""


class RecompileError(RuntimeError):
    """Something was compiled inside `no_recompiles`."""


class LedgerRow(NamedTuple):
    """What a bucket's executable cost.

    Attributes:
      bucket: its shape.
      lower_s: seconds of tracing and lowering.
      compile_s: seconds in the compiler, or of reading from the persistent cache.
      cache_hit: whether the executable came from the persistent cache.
      flops: floating-point operations of a step on one device, by the compiler's count; NaN where it gives none.
      argument_bytes: bytes of state and batch on one device.
      output_bytes: bytes of what comes back.
      alias_bytes: bytes of the output that lie where donated arguments lay.
      temp_bytes: bytes of everything in between.
    """

    bucket: AnyBucket
    lower_s: float
    compile_s: float
    cache_hit: bool
    flops: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes that one device holds during a step."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


class CompiledBuckets:
    """One executable a bucket, chosen by the shapes and dtypes of the batch: `state, metrics = compiled(state, batch)`.

    The state is donated: use the one that comes back.

    Attributes:
      ledger: a `LedgerRow` for each bucket, in the order of compilation.
      specs: the pytree of `jax.ShapeDtypeStruct` that each bucket's batches have.
      microbatches_per_step: M.
      device: number and kind of the devices that it was compiled for.
    """

    def __init__(
        self,
        executables: dict[Any, Callable],
        specs: dict[AnyBucket, Any],
        ledger: tuple[LedgerRow, ...],
        microbatches_per_step: int,
        device: str,
    ):
        self._executables = executables
        self.specs = specs
        self.ledger = ledger
        self.microbatches_per_step = microbatches_per_step
        self.device = device

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Runs the step of the batch's bucket; raises `UnplannedShapeError` where there is none."""
        try:
            executable = self._executables[_signature(batch)]
        except (KeyError, AttributeError):  # a Python number has no shape
            raise UnplannedShapeError(_explain_unplanned(batch, self.specs)) from None
        return executable(state, batch)


def compile_buckets(
    step_fn: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    buckets: Sequence[tuple[int, ...]],
    *,
    microbatches_per_step: int = 1,
    mesh: Mesh | None = None,
    batch_spec: Callable[[Any, int], Any] = token_batch_spec,
    progress: bool = True,
) -> CompiledBuckets:
    """Compiles the step for every bucket, the largest first, so that running out of memory shows at once.

    Args:
      step_fn: `step_fn(state, batch) -> (state, metrics)`: plain, not jitted. The state keeps its structure and shapes.
      state: a pytree of arrays, or of `jax.ShapeDtypeStruct`.
      buckets: (rows, length) pairs, lengths strictly ascending; or (rows, source length, target length).
      microbatches_per_step: M.
      mesh: batches come spread over its axis "data"; state that is not placed on a mesh is replicated. None: one
        device.
      batch_spec: `batch_spec(bucket, M)` gives the batch's pytree of `jax.ShapeDtypeStruct`.
      progress: whether to show a progress bar that names the bucket.

    Returns:
      `CompiledBuckets`.

    Raises:
      ValueError: buckets that are not as described, or shards of the mesh that do not divide M.

    Example:
      >>> def count(state, batch):
      ...     return state + batch.num_sequences, {}
      >>> compiled = compile_buckets(count, np.float32(0), [(2, 4), (1, 8)], progress=False)
      >>> [row.bucket.length for row in compiled.ledger]
      [4, 8]
    """
    state_spec = jax.tree.map(lambda leaf: _state_spec(leaf, mesh), state)
    state_shardings = None if mesh is None else jax.tree.map(lambda leaf: leaf.sharding, state_spec)
    executables: dict[Any, Callable] = {}
    specs: dict[AnyBucket, Any] = {}
    ledger = []
    largest_first = sorted(check_buckets(buckets), key=lambda bucket: -bucket.num_positions)
    with tqdm(
        largest_first, desc=f"compile {getattr(step_fn, '__name__', 'step')}", unit="bucket", disable=not progress
    ) as bar:
        for bucket in bar:
            raise_if_interrupted()
            bar.set_postfix_str(str(bucket))
            specs[bucket] = spec = _placed(batch_spec(bucket, microbatches_per_step), mesh)
            # A jitted function of its own for each bucket: only so can an executable be freed on its own.
            jitted = jax.jit(step_fn, donate_argnums=0, out_shardings=(state_shardings, None))
            start = time.perf_counter()
            lowered = jitted.lower(state_spec, spec)
            lowered_at = time.perf_counter()
            with _counting() as count:
                executables[_signature(spec)] = executable = lowered.compile()
            compile_s = time.perf_counter() - lowered_at
            memory, operations = executable.memory_analysis(), executable.cost_analysis() or {}
            ledger.append(
                LedgerRow(
                    bucket,
                    lowered_at - start,
                    compile_s,
                    count.num_cache_hits > 0,
                    float(operations.get("flops", math.nan)),
                    *(getattr(memory, f"{kind}_size_in_bytes", 0) for kind in ("argument", "output", "alias", "temp")),
                )
            )
    devices = jax.devices()[:1] if mesh is None else mesh.devices.flatten().tolist()
    kinds = sorted({device.device_kind for device in devices})
    device = f"{len(devices)} × {', '.join(kinds)}"
    return CompiledBuckets(executables, specs, tuple(ledger), microbatches_per_step, device)


def use_compilation_cache(directory: Path) -> None:
    """Keeps compiled programs on disk, those that compile fast included, and takes them from there.

    This is a setting of JAX for the whole process. Where the directory cannot be made, a warning says so.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warnings.warn(f"compiled programs are not kept for the next time: {error}", stacklevel=2)
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@dataclasses.dataclass
class RecompileCount:
    """What was compiled inside `no_recompiles`.

    Attributes:
      functions: the name of every function that was compiled, or taken from the persistent cache, in order.
      num_cache_hits: how many of them came from the persistent cache.
    """

    functions: list[str] = dataclasses.field(default_factory=list)
    num_cache_hits: int = 0

    @property
    def num_compilations(self) -> int:
        """Programs that were compiled or taken from the persistent cache."""
        return len(self.functions)


@contextlib.contextmanager
def no_recompiles(action: Literal["raise", "warn", "count"] = "raise") -> Iterator[RecompileCount]:
    """Guards a region in which nothing may be compiled, eager operations and other threads included.

    A program that comes from the persistent cache counts as well: whether it is there is chance, that it was not
    planned is the mistake.

    Args:
      action: `"raise"` raises where the compilation happens (and at the end of the region, where that was in another
        thread); `"warn"` warns there; `"count"` only counts.

    Yields:
      A `RecompileCount` that goes on counting inside the region.

    Raises:
      RecompileError: under `"raise"`; it names the function.
      ValueError: an unknown action.

    Example:
      >>> import jax.numpy as jnp
      >>> with no_recompiles("count") as count:
      ...     _ = jax.jit(lambda x: x * 3)(jnp.ones(7))
      >>> count.num_compilations > 0
      True
    """
    if action not in ("raise", "warn", "count"):
        raise ValueError(f'action must be "raise", "warn" or "count", not {action!r}')
    with _counting(action) as count:
        yield count
    if action == "raise" and count.functions:
        raise RecompileError(_explain_recompile(count.functions[0]))


class _Guard(NamedTuple):
    counter: RecompileCount
    action: str


_guards: list[_Guard] = []  # those of all threads: a data thread that compiles delays the step as well
_guards_lock = threading.Lock()


@contextlib.contextmanager
def _counting(action: str = "count") -> Iterator[RecompileCount]:
    guard = _Guard(RecompileCount(), action)
    with _guards_lock:
        if not _guards:  # listeners stay only while they are needed
            jax.monitoring.register_event_duration_secs_listener(_on_duration)
            jax.monitoring.register_event_listener(_on_event)
        _guards.append(guard)
    try:
        yield guard.counter
    finally:
        with _guards_lock:
            _guards[:] = [other for other in _guards if other is not guard]
            if not _guards:
                jax.monitoring.unregister_event_duration_listener(_on_duration)
                jax.monitoring.unregister_event_listener(_on_event)


def _on_duration(event: str, duration_secs: float, **details: Any) -> None:
    if event != _COMPILE_EVENT:
        return
    function = str(details.get("fun_name", "an unnamed function"))
    with _guards_lock:
        actions = {guard.action for guard in _guards}
        for guard in _guards:
            guard.counter.functions.append(function)
    if "warn" in actions:
        warnings.warn(_explain_recompile(function), stacklevel=2)
    if "raise" in actions:
        raise RecompileError(_explain_recompile(function))


def _on_event(event: str, **details: Any) -> None:
    if event == _CACHE_HIT_EVENT:
        with _guards_lock:
            for guard in _guards:
                guard.counter.num_cache_hits += 1


def _explain_recompile(function: str) -> str:
    return f"{function!r} was compiled inside no_recompiles(): its shapes or dtypes were not seen before"


def _signature(batch: Any) -> Any:
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple([(leaf.shape, leaf.dtype) for leaf in leaves])


def _state_spec(leaf: Any, mesh: Mesh | None) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    if mesh is not None and not isinstance(sharding, NamedSharding):
        sharding = NamedSharding(mesh, PartitionSpec())
    elif mesh is None:
        sharding = None
    return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding)


def _placed(spec: Any, mesh: Mesh | None) -> Any:
    if mesh is None:
        return spec
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        spec,
        batch_shardings(spec, mesh),
    )


def _explain_unplanned(batch: Any, specs: dict[AnyBucket, Any]) -> str:
    """Every leaf that differs from the bucket whose axes are nearest, by ratio."""
    given = _leaves_by_name(batch)
    planned_by_bucket = {bucket: _leaves_by_name(spec) for bucket, spec in specs.items()}

    def distance(bucket: AnyBucket) -> float:
        planned = planned_by_bucket[bucket]
        return sum(_distance(planned.get(name), given.get(name)) for name in planned | given)

    nearest = min(specs, key=distance)
    planned = planned_by_bucket[nearest]
    differing = [
        f"{name} is {_describe(given.get(name))}, planned was {_describe(planned.get(name))}"
        for name in planned | given
        if _describe(given.get(name)) != _describe(planned.get(name))
    ]
    buckets = ", ".join(map(str, sorted(specs, key=lambda bucket: bucket.lengths)))
    return (
        f"no bucket was compiled for this batch. Nearest is {nearest}: "
        f"{'; '.join(differing) or 'the containers of the leaves differ'}. Buckets: {buckets}"
    )


def _leaves_by_name(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _distance(planned: Any, given: Any) -> float:
    """How far two leaves' shapes lie apart; the same for all leaves that cannot be compared."""
    planned_shape, given_shape = np.shape(planned), np.shape(given)
    if planned is None or given is None or len(planned_shape) != len(given_shape):
        return 1.0
    return sum(abs(math.log(max(a, 1) / max(b, 1))) for a, b in zip(planned_shape, given_shape, strict=True))


def _describe(leaf: Any) -> str:
    if leaf is None:
        return "absent"
    if not hasattr(leaf, "shape"):
        return f"a Python {type(leaf).__name__}"
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
