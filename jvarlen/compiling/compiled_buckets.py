"""The callable that `compile_buckets` returns: it runs each batch with the executable of its bucket."""

from __future__ import annotations

import collections
import dataclasses
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from operator import attrgetter

import jax
import numpy as np
from jax.sharding import Mesh

from jvarlen._common.checks import UserError
from jvarlen._common.types import Array, Batch, PyTree, Shapes
from jvarlen.batches.batches import StepBatch
from jvarlen.batches.shapes import BatchShapes
from jvarlen.compiling.programs import LOSS, UPDATE, ProgramKey, StepPart, gradients_of
from jvarlen.compiling.queue import CompileQueue
from jvarlen.compiling.recompiles import note_dispatch
from jvarlen.compiling.report import CompileReport
from jvarlen.compiling.step_clock import StepClock
from jvarlen.compiling.unplanned import (
    UnplannedShapeError,
    check_deleted,
    explain_batch,
    explain_state,
    is_deleted,
    without_aliases,
)
from jvarlen.planning.buckets import AnyBucket

__all__ = ["CompiledBuckets"]


class CompiledBuckets:
    """One executable per bucket, chosen by the shapes and dtypes of a batch: `state, metrics = compiled(state, batch)`.

    A step of several groups, in a `StepBatch`, runs that of each group, and one for the update. The state is donated:
    continue with the returned one. An array that the state holds twice, or the batch too, is copied first.

    Attributes:
      specs: the pytree of `jax.ShapeDtypeStruct` that each bucket's batches have.
    """

    def __init__(self, queue: CompileQueue, *, time_steps: bool):
        """Made by `compile_buckets`."""
        self._queue, self._step_compiler = queue, queue.step_compiler
        buckets = [key for key in queue.keys if not isinstance(key, StepPart)]
        self.specs: dict[AnyBucket, Shapes] = {bucket: self.shapes.spec(bucket) for bucket in buckets}
        self._bucket_of: dict[Hashable, AnyBucket] = {_signature(spec): bucket for bucket, spec in self.specs.items()}
        self._times_used: collections.Counter[ProgramKey] = collections.Counter()
        self._stall_s: dict[ProgramKey, float] = dict.fromkeys((*queue.keys, *queue.step_compiler.once_a_step), 0.0)
        self._groups_left: collections.Counter[AnyBucket] = collections.Counter()  # before it is released
        self._failure: BaseException | None = None
        # Weak references to the leaves of the last new state, which share no memory. Ids may become those of others.
        self._returned: list[Callable[[], Array]] = []
        self._clock = StepClock() if time_steps else None
        # Results of the last two programs. XLA's devices on one CPU share threads, which deadlock where some 30
        # programs with a collective wait for their turn.
        splits_cpu = self._step_compiler.device.platform == "cpu" and len(self._step_compiler.own_devices) > 1
        self._in_flight: collections.deque[PyTree] | None = collections.deque(maxlen=2) if splits_cpu else None

    @property
    def shapes(self) -> BatchShapes:
        """The shapes that were compiled."""
        return self._step_compiler.shapes

    @property
    def mesh(self) -> Mesh | None:
        """The mesh on which steps run; None means the default device."""
        return self._step_compiler.mesh

    @property
    def device(self) -> str:
        """Number and kind of the devices that it was compiled for."""
        devices = self._step_compiler.devices
        return f"{len(devices)} × {', '.join(sorted({device.device_kind for device in devices}))}"

    @property
    def pending(self) -> tuple[ProgramKey, ...]:
        """Programs that are not compiled yet, in the order in which they will be: buckets, and parts of steps."""
        return self._queue.pending

    @property
    def report(self) -> CompileReport:
        """The cost and the use of each compiled program, in order; waits for what is pending."""
        self.wait()
        seconds = {} if self._clock is None else self._clock.median_seconds()
        rows = (
            dataclasses.replace(
                row,
                times_used=self._times_used[key],
                step_s=seconds.get(key, row.step_s),
                stall_s=self._stall_s[key],
                is_live=key in self._queue.executables,
            )
            for key in self._stall_s
            if (row := self._queue.rows.get(key)) is not None
        )
        report = CompileReport(rows, *self._step_compiler.clock.seconds)
        return report if self.shapes.plan is None else report.with_plan(self.shapes.plan)

    def __call__(self, state: PyTree, batch: Batch | StepBatch) -> tuple[PyTree, PyTree]:
        """Runs a step, once its programs are compiled; raises `UnplannedShapeError` if a batch has no bucket.

        An error in the background is raised by the next call, before that runs, so that no state is lost.
        """
        self._raise_failure()
        groups = self._planned_groups(batch)
        ending: ProgramKey = UPDATE if self._step_compiler.halves is not None else groups[0][0]
        state = self._safe_to_run(ending, state, batch)
        if self._step_compiler.halves is None:
            [(_, group)] = groups
            outputs = self._run(ending, state, group)
        else:
            sums = self._zeros(state)
            for bucket, group in groups:
                sums, _ = self._run(bucket, state, group, sums)
            if self._step_compiler.has_two_passes:
                sums, _ = self._run(LOSS, state, sums)
                for bucket, group in groups:
                    sums, _ = self._run(gradients_of(bucket), state, group, sums)
            outputs = self._run(ending, state, sums)
        self._groups_left.subtract(bucket for bucket, _ in groups)  # a step that fails may be taken again
        for bucket in {bucket for bucket, _ in groups if not self._groups_left[bucket]}:
            self._release(bucket)
        if ending not in self._queue.keeping_state:
            self._returned = [*map(weakref.ref, jax.tree.leaves(outputs[0]))]
        return outputs

    def passes_over(self, state: PyTree, batch: Batch) -> list[Callable[[PyTree], tuple[PyTree, PyTree]]]:
        """The programs of a batch's bucket, to time them: a whole step, or the passes over a group, without an update.

        Args:
          state: as for a call; a whole step donates it.
          batch: of one group.

        Returns:
          A function for each program, which takes what it returned before; None at first.
        """
        bucket, batch = self._planned(batch)

        def first(before: PyTree) -> tuple[PyTree, PyTree]:
            if self._step_compiler.halves is None:
                return self._run(bucket, state if before is None else before[0], batch)
            return self._run(bucket, state, batch, self._zeros(state) if before is None else before[0])

        def again(before: PyTree) -> tuple[PyTree, PyTree]:
            sums, _ = self._run(LOSS, state, self._zeros(state)) if before is None else before
            return self._run(gradients_of(bucket), state, batch, sums)

        return [first, again] if self._step_compiler.has_two_passes else [first]

    def wait(self, bucket: tuple[int, ...] | None = None, *, timeout: float | None = None) -> bool:
        """Waits until all that a step of a bucket runs is compiled, which then comes first, or until all is.

        Args:
          bucket: None for all.
          timeout: seconds that a single bucket may take; None waits as long as it takes.

        Returns:
          Whether it is compiled; always True without a timeout.

        Raises:
          ValueError: no such bucket; a program that needs more memory than the device has.
          Exception: an error of the compiler, with a note that names the bucket.
        """
        self._raise_failure()
        if bucket is None:
            self._queue.wait_for_all()
            return True
        (known,) = self._find([bucket])
        end = None if timeout is None else time.perf_counter() + timeout
        keys = (*self._step_compiler.passes(known), *self._step_compiler.once_a_step)
        return all(self._wait_for(key, None if end is None else max(end - time.perf_counter(), 0.0)) for key in keys)

    def advance(self) -> None:
        """Continues with what is pending, if a thread is free: lowers a program here. Every step does this."""
        self._queue.advance()

    def close(self) -> None:
        """Ends compiling in the background: what is not compiled yet never will be."""
        self._queue.close()

    def release_after(self, num_groups: Mapping[AnyBucket, int]) -> None:
        """Releases the executables of each bucket once it has run the given number of further groups.

        For the rest of a plan: `compiled.release_after(plan.groups_of_buckets(start_step))`.

        Args:
          num_groups: by bucket; those with 0 are released now, and those that are missing stay.
        """
        for bucket, groups in zip(self._find(num_groups), num_groups.values(), strict=True):
            self._groups_left[bucket] = int(groups)
            if groups <= 0:
                self._release(bucket)

    def program_text(self, bucket: tuple[int, ...] | None) -> str:
        """The compiled program of a bucket, in XLA's HLO; ValueError where it was not compiled or was released.

        Args:
          bucket: a compiled bucket; where a step may have several groups, its pass for gradients, and None for the
            update.

        Returns:
          The text.
        """
        key: ProgramKey = UPDATE
        if bucket is not None:
            key = self._step_compiler.passes(self._find([bucket])[0])[-1]
        elif self._step_compiler.halves is None:
            raise UserError("each step is one program here, that of its bucket: it has no update apart")
        self._wait_for(key)
        if key not in self._queue.executables:
            raise UserError(f"the executable of {key} was released")
        return self._queue.executables[key].as_text() or ""

    def _planned_groups(self, batch: Batch | StepBatch) -> list[tuple[AnyBucket, Batch]]:
        """The groups of a step and their buckets; raises `UnplannedShapeError` for what was not compiled."""
        if not isinstance(batch, StepBatch):
            return [self._planned(batch)]
        compiler = self._step_compiler
        if compiler.halves is None and len(batch.groups) > 1:
            takes = "a step of make_train_step or make_eval_step, compiled for the plan of these batches"
            raise UnplannedShapeError(
                f"{compiler.name} was compiled for steps of one group, and this batch is a StepBatch of "
                f"{len(batch.groups)}, which takes {takes} or with BatchShapes(…, has_many_groups=True)"
            )
        groups = []
        for i, group in enumerate(batch.groups):
            try:
                groups.append(self._planned(group))
            except UnplannedShapeError as error:
                raise UnplannedShapeError(f"group {i} of {len(batch.groups)} of the step: {error}") from None
        if not groups:
            raise UnplannedShapeError("a StepBatch has one group at least, and this one has none")
        rows = self.shapes.num_microbatches * sum(bucket.rows for bucket, _ in groups)
        if compiler.most_rows is not None and rows > compiler.most_rows:
            raise UnplannedShapeError(
                f"the step has {rows:,} rows, and at most {compiler.most_rows:,} were planned: BatchShapes(…, "
                "rows_per_step=) says how many"
            )
        return groups

    def _planned(self, batch: Batch) -> tuple[AnyBucket, Batch]:
        """The bucket of a group, and the group in the types that its programs take."""
        try:
            if (bucket := self._bucket_of.get(_signature(batch))) is not None:
                return bucket, batch
            return self._bucket_of[_signature(batch := _canonical(batch))], batch
        except (KeyError, AttributeError):  # a Python number has no shape
            raise UnplannedShapeError(explain_batch(batch, self.specs)) from None

    def _zeros(self, state: PyTree) -> PyTree:
        """The sums of a step before its first group."""
        try:
            return self._step_compiler.zeros(state)
        except (TypeError, ValueError, RuntimeError) as error:
            self._explain(UPDATE, error, state)
            raise

    def _run(self, key: ProgramKey, state: PyTree, *taken: PyTree) -> tuple[PyTree, PyTree]:
        """Runs a program, once it is compiled: the next state or sums, and what no later program writes over."""
        self._wait_for(key)
        if key not in self._queue.executables:
            self._raise_failure()
            raise UnplannedShapeError(f"the executable of {key} was released, as no step was to use it")
        if self._in_flight is not None and len(self._in_flight) == 2:
            metrics = jax.tree.leaves(self._in_flight[0])  # some may have been donated since
            jax.block_until_ready([leaf for leaf in metrics if not is_deleted(leaf)])
        bucket = key.bucket if isinstance(key, StepPart) else key
        if bucket is not None:
            note_dispatch(bucket)
        started = time.perf_counter()
        try:
            outputs = self._queue.executables[key](state, *taken)
        except (TypeError, ValueError, RuntimeError) as error:
            self._explain(key, error, state, *taken)
            raise
        if key in self._queue.keeping_state:
            outputs = state, outputs
        if self._in_flight is not None:
            self._in_flight.append(outputs[1])
        if self._clock is not None:
            self._clock.step(key, started, outputs[1])
        self._times_used[key] += 1
        try:
            self.advance()
        except (Exception, KeyboardInterrupt) as error:
            self._failure = self._failure or error
        return outputs

    def _release(self, bucket: AnyBucket) -> None:
        for key in self._step_compiler.passes(bucket):
            self._queue.release(key)

    def _wait_for(self, key: ProgramKey, timeout: float | None = None) -> bool:
        """Waits until a program is compiled, and returns whether it is."""
        if key in self._queue.executables:
            return True
        start = time.perf_counter()
        is_compiled = self._queue.wait_for(key, timeout)
        self._stall_s[key] += time.perf_counter() - start
        return is_compiled

    def _safe_to_run(self, ending: ProgramKey, state: PyTree, batch: PyTree) -> PyTree:
        """The state, with copies of arrays that are donated and used elsewhere too; raises for deleted arrays."""
        # On several devices, JAX may end the process for either, instead of raising.
        leaves, batch_leaves = jax.tree.leaves(state), jax.tree.leaves(batch)
        is_returned = len(leaves) == len(self._returned) and all(
            returned() is leaf and not leaf.is_deleted() for returned, leaf in zip(self._returned, leaves, strict=True)
        )
        if (
            is_returned
            and not any(map(is_deleted, batch_leaves))
            and {*map(id, batch_leaves)}.isdisjoint(map(id, leaves))
        ):
            return state  # as in most steps: finding the memory of each array takes milliseconds
        check_deleted(state, batch)
        donates = self._step_compiler.donate and ending not in self._queue.keeping_state
        return without_aliases(state, batch_leaves) if donates else state

    def _raise_failure(self) -> None:
        """Raises once what went wrong after a program had run."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _explain(self, key: ProgramKey, error: Exception, state: PyTree, *taken: PyTree) -> None:
        """Raises an error that names what the executable rejected: deleted arrays, or what was not planned."""
        device, spec = self._step_compiler.device, self._step_compiler.state_spec
        bucket = key.bucket if isinstance(key, StepPart) else key
        batch = None if bucket is None else taken[0]
        check_deleted(state, batch, error)
        difference = (
            (bucket and explain_batch(batch, {bucket: self.specs[bucket]}, device))
            or explain_state(jax.eval_shape(lambda state: state, state), spec)
            or explain_state(state, spec, device)
        )
        if difference:
            raise UnplannedShapeError(difference) from error

    def _find(self, buckets: Iterable[tuple[int, ...]]) -> list[AnyBucket]:
        by_shape = {tuple(bucket): bucket for bucket in self.specs}
        if unknown := [tuple(bucket) for bucket in buckets if tuple(bucket) not in by_shape]:
            raise UserError(f"buckets were not compiled: {unknown}")
        return [by_shape[tuple(bucket)] for bucket in buckets]


_shape_and_dtype = attrgetter("shape", "dtype")


def _signature(batch: Batch) -> Hashable:
    """The key of a batch's executable: its containers, and the shape and dtype of every leaf."""
    leaves, structure = jax.tree.flatten(batch)
    return structure, *map(_shape_and_dtype, leaves)


def _canonical(batch: Batch) -> PyTree:
    """The batch with counts on the host in the types that they have on a device, such as float32 for float64."""

    def cast(leaf: Array) -> Array:
        if not isinstance(leaf, np.ndarray | np.generic) or leaf.ndim:
            return leaf
        return np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))

    return jax.tree.map(cast, batch)
