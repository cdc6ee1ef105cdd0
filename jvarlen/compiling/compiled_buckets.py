"""The callable that `compile_buckets` returns: it compiles buckets, and runs each batch with its executable.

Programs are lowered in the caller's thread, whose settings of JAX count; only the compiler runs elsewhere.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import math
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from operator import attrgetter
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding
from tqdm import tqdm

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen._common.pytree import describe, have_same_containers, leaves_by_name
from jvarlen.batches.shapes import BatchShapes
from jvarlen.compiling import recompiles
from jvarlen.compiling.compile_options import CompileOptions
from jvarlen.compiling.lowering import CompiledBucket, StepCompiler
from jvarlen.compiling.measure import StepClock
from jvarlen.compiling.recompiles import uncounted_in_thread
from jvarlen.compiling.report import CompileReport, CompileRow
from jvarlen.planning.buckets import AnyBucket

__all__ = ["CompiledBuckets", "UnplannedShapeError"]

_POLL_S = 0.02  # between two looks at whether Ctrl-C came


class CompiledBuckets:
    """One executable a bucket, chosen by the shapes and dtypes of the batch: `state, metrics = compiled(state, batch)`.

    The state is donated: continue with the returned one. An array that the state holds twice, or the batch too, is
    copied first.

    Attributes:
      specs: the pytree of `jax.ShapeDtypeStruct` that each bucket's batches have.
    """

    def __init__(
        self,
        step_compiler: StepCompiler,
        buckets: Sequence[AnyBucket],
        options: CompileOptions,
        num_threads: int,
        bar: tqdm,
    ):
        """Made by `compile_buckets`; compiles in this order, but that what a step waits for comes beside the others."""
        self._step_compiler = step_compiler
        self._rows: dict[AnyBucket, CompileRow] = {}  # what each compiled bucket cost
        self._executables: dict[AnyBucket, jax.stages.Compiled] = {}  # those that are held
        self._keeping_state: set[AnyBucket] = set()  # buckets whose program gives metrics alone
        # Of the largest and the smallest program, which several processes compare.
        self.digest = hashlib.sha256(repr(list(buckets)).encode())
        self._compared = (buckets[0], buckets[-1]) if jax.process_count() > 1 else ()
        self._bar = bar
        self._planned = uncounted_in_thread if options.in_background else contextlib.nullcontext
        self._to_lower = list(buckets)
        self._compiling: dict[AnyBucket, Future[CompiledBucket]] = {}
        # In the background, a thread more is for what a step waits for; ahead, a program more waits for a thread.
        self._threads = ThreadPoolExecutor(num_threads + options.in_background, thread_name_prefix="compile")
        self._most_compiling = num_threads + (not options.in_background)
        self.specs = {bucket: step_compiler.shapes.spec(bucket) for bucket in buckets}
        self._bucket_of: dict[Hashable, AnyBucket] = {_signature(spec): bucket for bucket, spec in self.specs.items()}
        self._times_used = dict.fromkeys(self.specs, 0)
        self._stall_s = dict.fromkeys(self.specs, 0.0)
        self._last_use: dict[AnyBucket, int] = {}
        self._failure: BaseException | None = None
        # Weak references to the leaves of the last new state, which share no memory. Ids may become those of others.
        self._returned: list[Callable[[], Any]] = []
        self._clock = StepClock() if options.time_steps else None
        # The metrics of the last two steps. XLA's devices on one CPU share threads, which deadlock where some 30 steps
        # with a collective wait for their turn.
        splits_cpu = step_compiler.device.platform == "cpu" and len(step_compiler.own_devices) > 1
        self._in_flight: collections.deque[Any] | None = collections.deque(maxlen=2) if splits_cpu else None

    @property
    def shapes(self) -> BatchShapes:
        """What was compiled."""
        return self._step_compiler.shapes

    @property
    def mesh(self) -> Mesh | None:
        """Where a step runs; None: the default device."""
        return self._step_compiler.mesh

    @property
    def device(self) -> str:
        """Number and kind of the devices that it was compiled for."""
        return self._step_compiler.device_text

    @property
    def report(self) -> CompileReport:
        """What each compiled bucket has cost and how often it was used, in order; waits for what is pending."""
        self.wait()
        seconds = {} if self._clock is None else self._clock.median_seconds()
        rows = (
            dataclasses.replace(
                row,
                times_used=self._times_used[bucket],
                step_s=seconds.get(bucket, row.step_s),
                stall_s=self._stall_s[bucket],
                is_live=bucket in self._executables,
            )
            for bucket in self.specs
            if (row := self._rows.get(bucket)) is not None
        )
        report = CompileReport(rows, *self._step_compiler.clock.seconds)
        plan = self._step_compiler.shapes.plan
        return report if plan is None else report.with_plan(plan)

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Runs the step of the batch's bucket, once that is compiled; raises `UnplannedShapeError` if there is none.

        What fails in the background is raised by the next call, before that runs, so that no state is lost.
        """
        self._raise_failure()
        try:
            bucket = self._bucket_of.get(_signature(batch)) or self._bucket_of[_signature(batch := _canonical(batch))]
        except (KeyError, AttributeError):  # a Python number has no shape
            raise UnplannedShapeError(_explain_unplanned(batch, self.specs)) from None
        self.wait(bucket)
        if bucket not in self._executables:
            raise UnplannedShapeError(f"the executable of {bucket} was released, as no step was to use it")
        state = self._safe_to_run(bucket, state, batch)
        if self._in_flight is not None and len(self._in_flight) == 2:
            metrics = jax.tree.leaves(self._in_flight[0])  # some may have been donated since
            jax.block_until_ready([leaf for leaf in metrics if not _is_deleted(leaf)])
        recompiles.dispatched(bucket)
        started = time.perf_counter()
        try:
            outputs = self._executables[bucket](state, batch)
        except (TypeError, ValueError, RuntimeError) as error:
            self._explain(state, batch, bucket, error)
            raise
        if bucket in self._keeping_state:
            outputs = state, outputs
        else:
            self._returned = [*map(weakref.ref, jax.tree.leaves(outputs[0]))]
        if self._in_flight is not None:
            self._in_flight.append(outputs[1])
        if self._clock is not None:
            self._clock.step(bucket, started, outputs[1])
        self._times_used[bucket] += 1
        if self._times_used[bucket] == self._last_use.get(bucket):
            self._release(bucket)
        try:
            self.advance()
        except (Exception, KeyboardInterrupt) as error:
            self._failure = error
        return outputs

    def _safe_to_run(self, bucket: AnyBucket, state: Any, batch: Any) -> Any:
        """The state, with copies of arrays that are donated and used elsewhere too; raises for deleted arrays."""
        # On several devices, JAX may end the process for either, instead of raising.
        leaves, of_batch = jax.tree.leaves(state), jax.tree.leaves(batch)
        is_returned = len(leaves) == len(self._returned) and all(
            returned() is leaf and not leaf.is_deleted() for returned, leaf in zip(self._returned, leaves, strict=True)
        )
        if is_returned and not any(map(_is_deleted, of_batch)) and {*map(id, of_batch)}.isdisjoint(map(id, leaves)):
            return state  # as in most steps: to look where each array lies takes milliseconds
        _check_deleted(state, batch)
        donates = self._step_compiler.donate and bucket not in self._keeping_state
        return _without_aliases(state, of_batch) if donates else state

    def _raise_failure(self) -> None:
        """Raises once what went wrong after a step had run."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def advance(self) -> None:
        """Continues with what is pending, if a thread is free: lowers a bucket here. Every step does this."""
        self._collect()
        if self._to_lower and len(self._compiling) < self._most_compiling:
            self._lower(self._to_lower[0])

    @property
    def pending(self) -> tuple[AnyBucket, ...]:
        """Buckets that are not compiled yet, in the order in which they will be."""
        return *self._compiling, *self._to_lower

    def wait(self, bucket: tuple[int, ...] | None = None, *, timeout: float | None = None) -> bool:
        """Waits until a bucket is compiled, which then comes before the others, or until all are.

        Args:
          bucket: None for all.
          timeout: seconds that a single bucket may take; None waits as long as it takes.

        Returns:
          Whether it is compiled; always True without a timeout.

        Raises:
          ValueError: no such bucket; a program that needs more memory than the device has.
          Exception: what the compiler raised, with a note that names the bucket.
        """
        self._raise_failure()
        if bucket is None:
            while self.pending:
                raise_if_interrupted()
                self.advance()
                if not self._to_lower or len(self._compiling) >= self._most_compiling:
                    futures.wait(self._compiling.values(), _POLL_S, futures.FIRST_COMPLETED)
            return True
        (known,) = self._known([bucket])
        if known in self._executables:
            return True
        start = time.perf_counter()
        if known in self._to_lower:
            self._lower(known)
        if known in self._compiling:
            futures.wait([self._compiling[known]], timeout)
        self._collect()
        self._stall_s[known] += time.perf_counter() - start
        return known not in self._compiling

    def close(self) -> None:
        """Ends compiling in the background: what is not compiled yet never will be."""
        self._to_lower, self._compiling = [], {}
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._bar.close()

    def release_after(self, num_steps: Mapping[Any, int]) -> None:
        """Releases the executable of each bucket once it has run the given number of further steps.

        For the rest of a plan: `compiled.release_after(plan.steps_of_buckets(start_step))`.

        Args:
          num_steps: by bucket; those with 0 are released now, and those that are missing stay.
        """
        for bucket, steps in zip(self._known(num_steps), num_steps.values(), strict=True):
            self._last_use[bucket] = self._times_used[bucket] + int(steps)
            if steps <= 0:
                self._release(bucket)

    def program_text(self, bucket: tuple[int, ...]) -> str:
        """The compiled program of a bucket, in XLA's HLO; ValueError where it was not compiled or was released.

        Args:
          bucket: a compiled bucket.

        Returns:
          The text.
        """
        (known,) = self._known([bucket])
        self.wait(known)
        if known not in self._executables:
            raise UserError(f"the executable of {known} was released")
        return self._executables[known].as_text() or ""

    def _explain(self, state: Any, batch: Any, bucket: AnyBucket, error: Exception) -> None:
        """Raises an error that names what the executable rejected: deleted arrays, or what was not planned."""
        _check_deleted(state, batch, error)
        device, spec = self._step_compiler.device, self._step_compiler.state_spec
        difference = (
            _explain_unplanned(batch, {bucket: self.specs[bucket]}, device)
            or _explain_unplanned_state(jax.eval_shape(lambda state: state, state), spec)
            or _explain_unplanned_state(state, spec, device)
        )
        if difference:
            raise UnplannedShapeError(difference) from error

    def _known(self, buckets: Iterable[tuple[int, ...]]) -> list[AnyBucket]:
        by_shape = {tuple(bucket): bucket for bucket in self.specs}
        unknown = [tuple(bucket) for bucket in buckets if tuple(bucket) not in by_shape]
        if unknown:
            raise UserError(f"buckets were not compiled: {unknown}")
        return [by_shape[tuple(bucket)] for bucket in buckets]

    def _release(self, bucket: AnyBucket) -> None:
        """Lets a program go for good; a step that still runs it is not disturbed."""
        self._executables.pop(bucket, None)
        if bucket in self._to_lower:
            self._to_lower.remove(bucket)
        elif bucket in self._compiling:
            self._compiling.pop(bucket).cancel()

    def _lower(self, bucket: AnyBucket) -> None:
        self._bar.set_postfix_str(str(bucket))
        with self._telling(bucket), self._planned():
            lowered = self._step_compiler.lower(bucket)
        self._to_lower.remove(bucket)
        if lowered.keeps_state:
            self._keeping_state.add(bucket)
        if bucket in self._compared:
            self.digest.update(lowered.program.as_text().encode())

        def compile_it() -> CompiledBucket:
            with self._planned():
                return self._step_compiler.compile(lowered)

        self._compiling[bucket] = self._threads.submit(compile_it)

    def _collect(self) -> None:
        for bucket in [bucket for bucket, future in self._compiling.items() if future.done()]:
            with self._telling(bucket):
                row, executable = self._compiling.pop(bucket).result()
                limit = self._step_compiler.bytes_limit
                if limit is not None and row.total_bytes > limit:
                    raise UserError(f"it needs {row.total_bytes:,} bytes on each device, which has {limit:,}")
            self._rows[bucket], self._executables[bucket] = row, executable
            self._bar.update()
            if not self.pending:
                self.close()

    @contextlib.contextmanager
    def _telling(self, bucket: AnyBucket) -> Iterator[None]:
        """A block whose errors name the bucket, and end the compilation of the others."""
        try:
            yield
        except Exception as error:
            error.add_note(f"while compiling {self._step_compiler.name} for bucket {bucket}")
            self.close()
            raise


_shape_and_dtype = attrgetter("shape", "dtype")


class UnplannedShapeError(UserError):
    """No executable was compiled for the structure, shape, dtype or sharding of a batch or a state."""


def _signature(batch: Any) -> Hashable:
    """What decides which executable a batch belongs to: its containers, and the shape and dtype of every leaf."""
    leaves, structure = jax.tree.flatten(batch)
    return structure, *map(_shape_and_dtype, leaves)


def _canonical(batch: Any) -> Any:
    """The batch with counts on the host in the types that they have on a device, such as float32 for float64."""

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray | np.generic) or leaf.ndim:
            return leaf
        return np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))

    return jax.tree.map(cast, batch)


def _without_aliases(state: Any, of_batch: Iterable[Any]) -> Any:
    """The state with copies of arrays that it holds twice, or that the batch holds too."""
    seen = {buffer for leaf in of_batch for buffer in _buffers(leaf)}

    def own(leaf: Any) -> Any:
        buffers = _buffers(leaf)
        if seen.isdisjoint(buffers):
            seen.update(buffers)
            return leaf
        # On the array's own devices, with the same freedom to move; nothing is compiled for it.
        return jax.device_put(leaf, leaf.sharding if leaf.committed else None, may_alias=False)

    return jax.tree.map(own, state)


def _check_deleted(state: Any, batch: Any, error: Exception | None = None) -> None:
    """Raises an error that names the arrays that were deleted, if there are any."""
    if not any(map(_is_deleted, jax.tree.leaves((state, batch)))):
        return
    gone = [
        f"{name}{path}"
        for name, tree in (("state", state), ("batch", batch))
        for path, leaf in leaves_by_name(tree).items()
        if _is_deleted(leaf)
    ]
    raise UserError(
        f"{list_first(gone)} of the arguments {'was' if len(gone) == 1 else 'were'} donated: a step wrote its results "
        "there. Use the state that the step returned, or compile_buckets(…, donate=False)"
    ) from error


def _buffers(leaf: Any) -> list[Any]:
    """A key by which arrays that share memory are found."""
    if not isinstance(leaf, jax.Array) or leaf.size == 0 or leaf.is_deleted():
        return []
    return [(shard.device.id, shard.data.unsafe_buffer_pointer()) for shard in leaf.addressable_shards]


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def _explain_unplanned(batch: Any, specs: Mapping[AnyBucket, Any], device: jax.Device | None = None) -> str | None:
    """Every leaf that differs from the bucket whose axes are nearest, by ratio; None if the batch is as planned."""
    # Leaves without a planned sharding belong on the device; None: placement is not looked at.
    given = leaves_by_name(batch)

    def distance(bucket: AnyBucket) -> float:
        planned = leaves_by_name(specs[bucket])
        return sum(_distance(planned.get(name), given.get(name)) for name in planned | given)

    nearest = min(specs, key=distance)
    difference = _difference(batch, specs[nearest], device)
    if difference is None:
        return None
    buckets = ", ".join(map(str, sorted(specs, key=lambda bucket: bucket.lengths)))
    return f"no bucket was compiled for this batch. Nearest is {nearest}: {difference}. Buckets: {buckets}"


def _explain_unplanned_state(state: Any, spec: Any, device: jax.Device | None = None) -> str | None:
    """Every leaf of the state that differs from what was compiled for; None where nothing does."""
    difference = _difference(state, spec, device)
    return difference and f"the state is not the one that the step was compiled for: {difference}"


def _distance(planned: Any, given: Any) -> float:
    """How far two leaves' shapes lie apart; the same for all leaves that cannot be compared."""
    planned_shape, given_shape = np.shape(planned), np.shape(given)
    if planned is None or given is None or len(planned_shape) != len(given_shape):
        return 1.0
    return sum(abs(math.log(max(a, 1) / max(b, 1))) for a, b in zip(planned_shape, given_shape, strict=True))


def _difference(given: Any, planned: Any, device: jax.Device | None) -> str | None:
    """The leaves whose shape, dtype or sharding differs, or that only containers do; None where nothing does."""
    given_leaves, planned_leaves = leaves_by_name(given), leaves_by_name(planned)
    differing = []
    for name in {**planned_leaves, **given_leaves}:
        leaf: Any = given_leaves.get(name)
        wanted = planned_leaves.get(name)
        texts = describe(leaf), describe(wanted)
        if texts[0] == texts[1]:
            if not getattr(leaf, "committed", False):  # it goes wherever it is wanted
                continue
            place: Any = getattr(wanted, "sharding", None) or (device and SingleDeviceSharding(device))
            if place is None or leaf.sharding.is_equivalent_to(place, leaf.ndim):
                continue
            texts = f"{texts[0]} {_place(leaf.sharding)}", f"{texts[1]} {_place(place)}"
        differing.append(f"{name or 'it'} is {texts[0]}, planned was {texts[1]}")
    if differing:
        return "; ".join(differing)
    return None if have_same_containers(given, planned) else "the containers of the leaves differ"


def _place(sharding: Any) -> str:
    devices = sorted(device.id for device in sharding.device_set)
    spec = getattr(sharding, "spec", None)
    text = f"on device{'s' * (len(devices) > 1)} {', '.join(map(str, devices))}"
    return f"{text} as {tuple(spec)}" if spec else text
