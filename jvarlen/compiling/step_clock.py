"""A clock for the steps of a loop, whose caller never waits."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor

import jax

from jvarlen._common.interrupts import without_interrupts
from jvarlen._common.types import PyTree

__all__ = ["StepClock"]

_NUM_KEPT = 1001  # seconds of a key, for their median: odd, so that it is one of them


class StepClock:
    """Times steps from their dispatch, or from the end of the step before if that is later; the caller never waits."""

    def __init__(self) -> None:
        self._seconds: dict[Hashable, deque[float]] = {}
        self._ready = 0.0  # when the step before was
        # Its thread ends once nothing refers to it. At exit Python waits for the thread: ending it while it waits for a
        # device would take the process down.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="step clock")
        with without_interrupts():  # Ctrl-C is for the main thread to handle
            self._thread.submit(int)

    def step(self, key: Hashable, started: float, outputs: PyTree) -> None:
        """Takes note of a step that has just been dispatched, and of outputs that the next step does not overwrite."""
        arrays = [leaf for leaf in jax.tree.leaves(outputs) if isinstance(leaf, jax.Array)]
        if arrays:
            self._thread.submit(self._wait, key, started, arrays[0])

    def _wait(self, key: Hashable, started: float, array: jax.Array) -> None:
        before = self._ready
        try:
            jax.block_until_ready(array)
        finally:
            self._ready = time.perf_counter()
        self._seconds.setdefault(key, deque(maxlen=_NUM_KEPT)).append(self._ready - max(started, before))

    def median_seconds(self) -> dict[Hashable, float]:
        """The median seconds of the last steps of each key, without failed ones, once all steps so far have ended."""
        self._thread.submit(int).result()
        return {key: statistics.median(seconds) for key, seconds in self._seconds.items()}
