"""Times every step in a thread of its own, so that the training loop never waits."""

from __future__ import annotations

import atexit
import queue
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Hashable
from types import TracebackType
from typing import Any, Generic, TypeVar

import jax

from jvarlen._common.checks import UserError
from jvarlen._common.interrupts import without_interrupts

__all__ = ["StepClock"]

Key = TypeVar("Key", bound=Hashable)

_NUM_KEPT = 1001  # seconds of a key that the median is over: odd, so that it is one of them


class StepClock(Generic[Key]):
    """Times every step in a thread of its own, which waits for the results instead of the caller.

    A step is timed from its dispatch to its end, or from the end of the previous step if the device was still busy with
    that. The time includes whatever the device waited for in between, such as input.

    The clock ends with its `with` block, by `close()`, or when nothing refers to it any more. The measurements can
    still be read afterwards.

    Example:
      >>> step = jax.jit(lambda x: (x, x.sum()), donate_argnums=0)
      >>> state = jax.numpy.ones(5)
      >>> with StepClock() as clock:
      ...     for _ in range(3):
      ...         started = time.perf_counter()
      ...         state, metrics = step(state)
      ...         clock.step("five", started, metrics)
      ...     clock.wait()
      >>> clock.num_steps
      {'five': 3}
      >>> clock.median_seconds()["five"] > 0
      True
    """

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue = queue.SimpleQueue()
        self._record: _Record[Key] = _Record()
        self._thread: _Waiter | None = None  # started by the first step
        self._start_lock = threading.Lock()
        self._end = weakref.finalize(self, self._steps.put, None)
        self._end.atexit = False  # there is _end_threads for that

    def step(self, key: Key, started: float, outputs: Any) -> None:
        """Takes note of a step that has just been dispatched; returns at once.

        Args:
          key: what the seconds are grouped by, such as the bucket.
          started: `time.perf_counter()` from before the dispatch.
          outputs: a pytree of the step's results, without those that are donated to the next step. One of its arrays is
            held until it is ready. A step that fails is left out.

        Raises:
          ValueError: there is no `jax.Array` in `outputs`.
          RuntimeError: the clock is closed.
        """
        for leaf in jax.tree.leaves(outputs):
            if isinstance(leaf, jax.Array):
                break
        else:
            raise UserError(f"a step without an array in its outputs cannot be timed: {jax.tree.structure(outputs)}")
        if not self._end.alive:
            raise RuntimeError("the clock is closed")
        if self._thread is None:
            self._start()
        self._steps.put((key, started, leaf))

    def wait(self) -> None:
        """Returns when all steps handed in so far have ended and are recorded."""
        if self._thread is None:
            return
        if not self._end.alive or _exiting.is_set():
            self._thread.join()
            return
        recorded = threading.Event()
        self._steps.put(recorded)
        recorded.wait()

    def median_seconds(self) -> dict[Key, float]:
        """The median of the seconds of each key, over its last 1,001 steps.

        No step is left out, but a median ignores single slow ones: the first use of an executable, which loads it, or a
        step during which a checkpoint was written.
        """
        return self._record.median_seconds()

    @property
    def num_steps(self) -> dict[Key, int]:
        """How many steps of each key have been recorded."""
        return self._record.num_steps()

    def close(self) -> None:
        """Ends the thread once it has recorded what was handed in; does not wait for that."""
        self._end()

    def __enter__(self) -> StepClock[Key]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        with self._start_lock:
            if self._thread is None:
                thread = _Waiter(self._steps, self._record)
                with without_interrupts():  # Ctrl-C is for the main thread to handle
                    thread.start()
                _threads.add(thread)
                self._thread = thread


class _Record(Generic[Key]):
    """Seconds by key; belongs to a clock and to its thread, which does not keep the clock alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_seconds: dict[Key, deque[float]] = {}
        self._num_steps: dict[Key, int] = {}

    def add(self, key: Key, seconds: float) -> None:
        with self._lock:
            self._last_seconds.setdefault(key, deque(maxlen=_NUM_KEPT)).append(seconds)
            self._num_steps[key] = self._num_steps.get(key, 0) + 1

    def median_seconds(self) -> dict[Key, float]:
        with self._lock:
            last = {key: list(seconds) for key, seconds in self._last_seconds.items()}
        return {key: statistics.median(seconds) for key, seconds in last.items()}

    def num_steps(self) -> dict[Key, int]:
        with self._lock:
            return dict(self._num_steps)


class _Waiter(threading.Thread):
    """Takes (key, started, array) from a queue until a None comes; an Event is set when its turn comes."""

    def __init__(self, steps: queue.SimpleQueue, record: _Record):
        super().__init__(name="step clock", daemon=True)
        self.steps = steps
        self._record = record

    def run(self) -> None:
        ready = 0.0  # when the step before was
        while (item := self.steps.get()) is not None and not _exiting.is_set():
            if isinstance(item, threading.Event):
                item.set()
                continue
            key, started, array = item
            try:
                jax.block_until_ready(array)
                failed = False
            except Exception:  # whoever reads the outputs is told
                failed = True
            before, ready = ready, time.perf_counter()
            if not failed:
                self._record.add(key, ready - max(started, before))
            del item, array  # not held while the next step is waited for


_threads: weakref.WeakSet[_Waiter] = weakref.WeakSet()
_exiting = threading.Event()


@atexit.register
def _end_threads() -> None:
    """Lets each thread end by itself: one that the interpreter ends while it waits for a device takes the process down.

    That is when the step which it waits for ends. JAX waits for all steps at exit, whoever else does.
    """
    _exiting.set()
    for thread in list(_threads):
        thread.steps.put(None)
        thread.join()
