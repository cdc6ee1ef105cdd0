"""Reads steps ahead in a thread, by itself or from worker processes."""

from __future__ import annotations

import collections
import contextlib
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import BrokenExecutor, Future
from typing import TYPE_CHECKING, TypeAlias

from jvarlen._common.interrupts import without_interrupts
from jvarlen.loading.plan_source import PlanSource, ReadStep

if TYPE_CHECKING:
    from jvarlen._common.workers import WorkerPool

__all__ = ["ReadAhead", "Steps", "read_in_workers"]

Steps: TypeAlias = Generator[ReadStep, None, None]

_DEVICE_BUFFER = 2  # steps that wait on the device
_STEPS_PER_WORKER = 3  # submitted and not yet taken
_GRACE_S = 5.0  # for a sample that is read in the thread


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


def read_in_workers(pool: WorkerPool, steps: range) -> Steps:
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
