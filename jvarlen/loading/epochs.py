"""Reads epochs one after the other, ahead in a thread, by itself or from worker processes, and moves their batches."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from fractions import Fraction
from typing import TYPE_CHECKING, TypeAlias

import jax
import numpy as np
import numpy.typing as npt

from jvarlen._common.checks import UserError, is_number, list_first
from jvarlen._common.interrupts import without_interrupts
from jvarlen._common.types import Array, Batch
from jvarlen.data.samples import AnyDataset
from jvarlen.distributed.placement import Placement
from jvarlen.loading import reading
from jvarlen.loading.batch_form import BatchForm
from jvarlen.loading.plan_source import LoaderPlace, PlanSource, ReadStep, SkippedSample
from jvarlen.planning.steps import PlannedSteps

if TYPE_CHECKING:
    from jvarlen._common.workers import WorkerPool

__all__ = ["Epochs", "ReadAhead", "Steps", "of_epochs", "put"]

Steps: TypeAlias = Generator[ReadStep, None, None]

_DEVICE_BUFFER = 2  # steps that wait on the device
_STEPS_PER_WORKER = 3  # submitted and not yet taken
_GRACE_S = 5.0  # for a sample that is read in the thread


def of_epochs(
    plan: PlannedSteps | Callable[[int], PlannedSteps],
    dataset: AnyDataset | Callable[[int], AnyDataset],
    epoch: int,
    num_epochs: int | None,
    lengths: npt.ArrayLike | None,
) -> tuple[Callable[[int], PlannedSteps], Callable[[int], AnyDataset]]:
    """The functions from an epoch to its plan and dataset; raises ValueError where an epoch would have none."""
    is_one = not callable(plan) and (num_epochs or 1) == 1
    is_one = is_one and (num_epochs is None or getattr(plan, "plan_epoch", None) is None)
    if is_one and epoch:
        raise UserError(f"a plan alone is one epoch: epoch={epoch} needs num_epochs=, or a function to its plan")
    if isinstance(dataset, Iterator) and not is_one:
        raise UserError(
            f"a {type(dataset).__name__} gives its samples once: for any number of epochs, load needs an iterable that "
            "starts over for each, or a function from the epoch to its dataset"
        )
    is_drawn = callable(dataset) and not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__"))
    if is_drawn and lengths is not None:
        raise UserError("lengths= are of one dataset, and a function gives each epoch another")
    plan_of: Callable[[int], PlannedSteps] | None
    plan_of = plan if callable(plan) else (lambda _: plan) if is_one else getattr(plan, "of_epoch", None)
    if plan_of is None:
        raise UserError(f"num_epochs={num_epochs} needs a function from the epoch to its plan, for such a plan")
    return plan_of, dataset if is_drawn else lambda _: dataset


@dataclasses.dataclass
class Epochs:
    """Reads epochs one after the other; each is planned in a thread while the epoch before it is loaded."""

    plan_of: Callable[[int], PlannedSteps]
    dataset_of: Callable[[int], AnyDataset]
    lengths: npt.ArrayLike | None
    make_source: Callable[..., PlanSource]
    placement: Placement | None
    num_workers: int
    max_bad_fraction: float
    last_epoch: int | None
    microbatches: bool = True
    _planner: ThreadPoolExecutor | None = None
    _next: tuple[int, Future[tuple[PlannedSteps, AnyDataset]]] | None = None

    def __post_init__(self):
        if not is_number(self.max_bad_fraction) or not 0 <= self.max_bad_fraction <= 1:
            raise UserError(f"max_bad_fraction must be between 0 and 1, not {self.max_bad_fraction!r}")
        self._plans: dict[int, Future[PlannedSteps]] = {}  # of epochs to come
        self._sizes: dict[int, tuple[int, int]] = {}  # of epochs: steps, and the most rows of one

    def num_steps(self) -> int:
        """The steps of all epochs; TypeError without an end."""
        if self.last_epoch is None:
            raise TypeError("these batches have no end: give num_epochs=")
        self._plan_all(self.last_epoch)
        return sum(steps for steps, _ in self._sizes.values())

    def rows_per_step(self) -> int:
        """The most rows of a step of all epochs; without an end, of those that were read."""
        if self.last_epoch is not None:
            self._plan_all(self.last_epoch)
        return max(rows for _, rows in self._sizes.values())

    def _plan_ahead(self, epoch: int) -> None:
        """Starts to plan an epoch, unless it is after the last."""
        self._next = None
        if self.last_epoch is None or epoch <= self.last_epoch:
            plan = self._plan(epoch)
            self._next = epoch, self._thread().submit(lambda: (plan.result(), self.dataset_of(epoch)))

    def _plan(self, epoch: int) -> Future[PlannedSteps]:
        """The plan of an epoch to come, which is made once: functions of users may draw its data."""
        if epoch not in self._plans:
            self._plans[epoch] = self._thread().submit(self.plan_of, epoch)
        return self._plans[epoch]

    def _plan_all(self, last_epoch: int) -> None:
        for epoch in [epoch for epoch in range(last_epoch + 1) if epoch not in self._sizes]:
            plan = self._plan(epoch).result()
            self._sizes[epoch] = plan.num_steps, plan.rows_per_step
            if self._next is None or epoch < self._next[0]:
                del self._plans[epoch]  # it is not read

    def _thread(self) -> ThreadPoolExecutor:
        self._planner = self._planner or ThreadPoolExecutor(max_workers=1, thread_name_prefix="plan")
        return self._planner

    def read_next(self) -> ReadAhead:
        """Starts to read the next epoch; raises StopIteration after the last."""
        if self._next is None:
            raise StopIteration
        epoch, planned = self._next
        self._plans.pop(epoch)
        return self.read(*planned.result(), epoch, 0)

    def close(self) -> None:
        """Ends the thread once it has finished its current plan."""
        if self._planner is not None:
            self._planner.shutdown(wait=False, cancel_futures=True)
        self._planner, self._next, self._plans = None, None, {}

    def place_of(self, plan: PlannedSteps, epoch: int, step: int) -> LoaderPlace:
        """The place of a step; the end of an epoch is the start of the next one, unless it was the last."""
        is_next = step == plan.num_steps and epoch != self.last_epoch
        return LoaderPlace(epoch + 1, 0) if is_next else LoaderPlace(epoch, step)

    def read(self, plan: PlannedSteps, dataset: AnyDataset, epoch: int, start_step: int) -> ReadAhead:
        """Starts to read an epoch, and to plan the next one."""
        self._sizes[epoch] = plan.num_steps, plan.rows_per_step
        placement = self.placement
        shard = ([0], 1) if placement is None else (placement.local_shards.tolist(), placement.layout.data)
        form = BatchForm.of(shard=shard, microbatches=self.microbatches)
        is_part = placement is not None and placement.mesh.is_multi_process
        if is_part:
            from jvarlen.distributed.processes import agree

            agree("the plan", plan.digest)
        if reading.only_iterates(dataset):
            if self.num_workers:
                raise UserError(
                    f"num_workers={self.num_workers} needs random access, and this dataset can only be iterated"
                )
            num_lengths = None if self.lengths is None else len(self.lengths)  # type: ignore[arg-type]
            dataset = reading.reader_of_plan(dataset, plan, form.rows, start_step, num_lengths)
        source = self.make_source(plan, dataset, shard=shard)
        num_samples = int(int(plan.num_sequences.sum()) * form.share)
        all_skipped: list[SkippedSample] = []

        def deliver(step: ReadStep) -> ReadStep:
            bad = sorted(step.bad.items())
            skipped = tuple(SkippedSample(epoch, step.step, step.ids.item(place), why) for place, why in bad)
            all_skipped.extend(skipped)
            if skipped and len(all_skipped) > self.max_bad_fraction * num_samples:
                listed = list_first((f"id {each.id} (step {each.step}): {each.reason}" for each in all_skipped), "; ")
                raise UserError(
                    f"{len(all_skipped):,} bad samples of {num_samples:,} in epoch {epoch} are more than "
                    f"max_bad_fraction={self.max_bad_fraction:g}: {listed}"
                )
            batch = put(step.batch, placement, form.share if is_part else None)
            return step._replace(batch=batch, skipped=skipped, following=self.place_of(plan, epoch, step.step + 1))

        self._plan_ahead(epoch + 1)
        steps = range(start_step, plan.num_steps)
        if self.num_workers:
            from jvarlen._common.workers import WorkerPool

            workers = WorkerPool(source, min(self.num_workers, max(len(steps), 1)))
            return ReadAhead(_read_in_workers(workers, steps), deliver, workers)
        return ReadAhead((source.read(step) for step in steps), deliver)


def put(batch: Batch, placement: Placement | None, share: Fraction | None = None) -> Batch:
    """The batch on its devices; this process may have only a share of its first axis."""
    batch = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "shape") else np.asarray(leaf), batch)
    if placement is None or share is None:
        return jax.device_put(batch, None if placement is None else placement.batch_shardings(batch))

    def whole(part: Array) -> jax.ShapeDtypeStruct:
        shape = (int(part.shape[0] / share), *part.shape[1:]) if part.shape else ()
        return jax.ShapeDtypeStruct(shape, part.dtype)

    shapes = jax.tree.map(whole, batch)
    return jax.tree.map(
        lambda part, shape, sharding: jax.make_array_from_process_local_data(sharding, part, shape.shape),
        batch,
        shapes,
        placement.batch_shardings(shapes),
    )


class ReadAhead(Iterator[ReadStep]):
    """Steps that a thread reads and delivers, a few ahead of the consumer, until nothing refers to this object."""

    def __init__(self, steps: Steps, deliver: Callable[[ReadStep], ReadStep], workers: WorkerPool | None = None):
        # A reference in the thread would keep this object alive.
        self._found: queue.SimpleQueue[tuple[ReadStep | None, BaseException | None]] = queue.SimpleQueue()
        self._room = threading.Semaphore(_DEVICE_BUFFER - 1)
        is_closed = threading.Event()
        thread = threading.Thread(
            target=_read, args=(steps, deliver, self._found, self._room, is_closed), name="read-ahead", daemon=True
        )
        with without_interrupts():  # Ctrl-C is for the main thread to handle; workers would die of it
            thread.start()
        self.close = weakref.finalize(self, _close, thread, self._room, is_closed, workers)

    def __next__(self) -> ReadStep:
        """The next step; StopIteration after the last."""
        step, error = self._found.get()
        if error is not None:
            raise error
        self._room.release()
        return step  # type: ignore[return-value]  # None only beside an error


def _close(
    thread: threading.Thread, room: threading.Semaphore, is_closed: threading.Event, workers: WorkerPool | None
) -> None:
    is_closed.set()
    room.release()
    if workers is not None:
        workers.kill_processes()  # so that no step is waited for
    if thread is not threading.current_thread():
        thread.join(_GRACE_S)


def _read(
    steps: Steps,
    deliver: Callable[[ReadStep], ReadStep],
    found: queue.SimpleQueue[tuple[ReadStep | None, BaseException | None]],
    room: threading.Semaphore,
    is_closed: threading.Event,
) -> None:
    try:
        with contextlib.closing(steps):
            for step in steps:
                found.put((deliver(step), None))
                del step
                room.acquire()
                if is_closed.is_set():
                    return
    except BaseException as error:  # otherwise the consumer would wait forever
        found.put((None, error))
    else:
        found.put((None, StopIteration()))


def _read_in_workers(pool: WorkerPool, steps: range) -> Steps:
    """The steps of the `PlanSource` that the workers hold, in their order."""
    limit = _STEPS_PER_WORKER * pool.num_workers
    submitted: collections.deque[Future[ReadStep]] = collections.deque()
    left = iter(steps)
    with pool:
        for step in steps:
            try:
                for next_step in itertools.islice(left, limit - len(submitted)):
                    submitted.append(pool.apply(PlanSource.read, next_step))
                read = submitted.popleft().result()
            except BrokenExecutor as error:
                raise RuntimeError(
                    f"a worker process {pool.kill()} before step {step} was read. If memory ran out, use fewer "
                    "workers; otherwise see its output"
                ) from error
            yield read
