"""Reads steps ahead in a thread, from any iterator or from worker processes of Grain.

One thread owns the iterator: it starts it, with the worker processes of one of Grain, takes steps from it, and ends it.
A consumer that waits for a step regularly checks that the workers are alive. Workers check that a step fits into
/dev/shm.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import queue
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import jax
import numpy as np

from jvarlen._common.interrupts import without_interrupts
from jvarlen.loading.plan_source import ReadStep

__all__ = ["ReadAhead", "check_room", "end_with_parent"]

_DEVICE_BUFFER = 2  # steps that wait on the device
_LOOK_S = 1.0  # between two looks at workers while nothing comes
_LOOKS_IF_ALL_ENDED = 2  # what a worker said before it ended is still on its way at the first
_LOOKS_IF_SOME_ENDED = 30  # Grain ends a worker whose error waits for its turn, behind the steps of slow ones
_GRACE_S = 5.0  # for workers to end by themselves before they are killed
_SHARED_MEMORY = "/dev/shm"
_PAGE_BYTES = 4096
_MOST_STEPS = 10  # of a worker: those in Grain's two buffers of 4, one that is written, and one that is taken
_STARTING = threading.Lock()  # so that each knows the workers which are its own


class _Shared(NamedTuple):
    """State shared by the reading thread and its owner; the thread must not keep the owner alive.

    Attributes:
      found: (step, None) or (None, the error that ended reading); a StopIteration at the regular end.
      room: how many more steps may wait in `found`.
      is_closed: whether the owner takes no more.
    """

    found: queue.SimpleQueue[tuple[Any, BaseException | None]]
    room: threading.Semaphore
    is_closed: threading.Event


class ReadAhead(Iterator[Any]):
    """Reads the steps of an epoch in a thread, a few ahead of the consumer.

    Without `close`, the thread and its workers end when nothing refers to this object any more.
    """

    def __init__(
        self,
        steps: Iterable[Any],
        deliver: Callable[[Any], Any],
        *,
        first_step: int,
        num_steps: int,
        num_workers: int,
    ):
        self._shared = shared = _Shared(queue.SimpleQueue(), threading.Semaphore(_DEVICE_BUFFER), threading.Event())
        self._next_step = first_step
        self._thread = threading.Thread(
            target=_read,
            args=(num_workers, steps, deliver, first_step, num_steps, shared),
            name="read-ahead",
            daemon=True,
        )
        self._workers: set[BaseProcess] = set()
        with _STARTING, without_interrupts():  # Ctrl-C is for the main thread to handle; workers would die of it
            before = _grain_workers()
            self._thread.start()
            while len(self._workers) < num_workers and shared.found.empty():
                time.sleep(0.002)
                self._workers = _grain_workers() - before
        weakref.finalize(self, _close, shared).atexit = False
        _OPEN.add(self)
        _THREADS.add(self._thread)

    def __next__(self) -> Any:
        """The next step; StopIteration after the last."""
        num_looks = 0
        while True:
            try:
                step, error = self._shared.found.get(timeout=_LOOK_S)
                break
            except queue.Empty:
                num_ended = len(self._exit_codes())
                num_looks += num_ended > 0
                if num_looks >= (_LOOKS_IF_ALL_ENDED if num_ended == len(self._workers) else _LOOKS_IF_SOME_ENDED):
                    raise self._worker_error() from None
        if error is None:
            self._shared.room.release()
            self._next_step += 1
            return step
        if any(self._exit_codes()) and _is_of_dead_worker(error):
            raise self._worker_error() from error
        raise error

    def close(self) -> None:
        """Ends the thread and the worker processes; those that do not end by themselves within seconds are killed."""
        _close(self._shared)
        self._thread.join(_GRACE_S)
        for worker in self._workers:
            worker.kill()
        self._thread.join(2 * _LOOK_S)  # it notices within a second; only a sample read in the thread can hold it
        for worker in self._workers:
            worker.join()
        with contextlib.suppress(queue.Empty):
            while True:
                self._shared.found.get_nowait()
        _OPEN.discard(self)

    def _exit_codes(self) -> list[int]:
        return [worker.exitcode for worker in self._workers if worker.exitcode is not None]

    def _worker_error(self) -> RuntimeError:
        code = max(self._exit_codes(), key=abs)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        advice = "If memory ran out, use fewer workers; otherwise see its output"
        if code == -signal.SIGBUS:  # several workers may find room for one step
            advice = f"It wrote to a file in memory that had no room, or was cut: {_describe_room()}"
        return RuntimeError(f"a worker process {how} before step {self._next_step} was read. {advice}")


def end_with_parent(worker_index: int, num_workers: int) -> None:
    """Makes this worker process end when its parent dies, whatever the reason."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def check_room(step: ReadStep) -> ReadStep:
    """Checks in a worker process that the arrays of a step fit into shared memory, and returns the step.

    The kernel grants more memory than there is, and then kills the process that writes to it.
    """
    arrays = [leaf for leaf in jax.tree.leaves(step) if isinstance(leaf, np.ndarray)]
    needed_bytes = sum(-(-array.nbytes // _PAGE_BYTES) * _PAGE_BYTES for array in arrays)
    free_bytes, total_bytes = _room()
    if total_bytes and needed_bytes > free_bytes:
        raise RuntimeError(f"step {step.step} needs {needed_bytes:,} bytes of shared memory: {_describe_room()}")
    return step


def _describe_room() -> str:
    """How much room there is, and what to do if that is too little."""
    free_bytes, total_bytes = _room()
    return (
        f"{_SHARED_MEMORY} has {free_bytes:,} of {total_bytes:,} bytes free. Make it larger (docker: --shm-size), to "
        f"hold {_MOST_STEPS} steps a worker, or load with num_workers=0, which needs none of it"
    )


def _room() -> tuple[int, int]:
    """Free and total bytes; a total of 0 where there is no limit, or no such directory."""
    try:
        room = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return 0, 0
    return room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize


_OPEN: weakref.WeakSet[ReadAhead] = weakref.WeakSet()
_THREADS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Closes what a program that ends by an error left open; otherwise memory shared with workers would stay behind.

    Threads that were told to end are waited for: one that frees an array while the interpreter ends takes the process
    down.
    """
    for reading in list(_OPEN):
        reading.close()
    for thread in list(_THREADS):
        thread.join(_GRACE_S)


def _close(shared: _Shared) -> None:
    shared.is_closed.set()
    shared.room.release()


def _grain_workers() -> set[BaseProcess]:
    """Best effort: Grain does not hand out its worker processes, so they are told by their names."""
    return {process for process in multiprocessing.active_children() if process.name.startswith("grain")}


def _is_of_dead_worker(error: BaseException) -> bool:
    """Best effort: whether Grain says that a worker process ended, which it does in words only."""
    return str(error).startswith("Worker process was terminated")


def _read(num_workers: int, *args: Any) -> None:
    _take(num_workers, *args)
    if num_workers:
        # Grain's iterators refer to each other and to the last step; until they are collected, the shared memory and
        # the semaphores of an epoch stay in /dev/shm.
        gc.collect()


def _take(
    num_workers: int,
    steps: Iterable[Any],
    deliver: Callable[[Any], Any],
    first_step: int,
    num_steps: int,
    shared: _Shared,
) -> None:
    with contextlib.ExitStack() as held:
        try:
            iterator: Any = iter(steps)
            held.callback(iterator.close)
            for step in range(first_step, first_step + num_steps):
                shared.room.acquire()
                if shared.is_closed.is_set():
                    return
                try:
                    found = next(iterator)
                except StopIteration:
                    raise RuntimeError(f"reading ended before step {step} was read; {num_steps} were planned") from None
                except Exception as error:
                    if num_workers:  # the worker's own traceback is a note; this one would keep Grain's iterators
                        error.__traceback__ = None
                    raise
                shared.found.put((deliver(found), None))
                del found
        except BaseException as error:  # whoever waits would wait for ever
            shared.found.put((None, error))
        else:
            shared.found.put((None, StopIteration()))
