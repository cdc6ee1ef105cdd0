"""Seconds of compiling, which several threads do at once: wall-clock and CPU."""

from __future__ import annotations

import threading
import time
from types import TracebackType

__all__ = ["COMPILING", "CompileClock"]


class CompileClock:
    """Adds up the seconds in which at least one thread is inside a block, and the CPU time of the process meanwhile."""

    # Not the CPU time of threads: XLA compiles in threads of its own.

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                self._wall_s += time.perf_counter() - self._start
                self._cpu_s += time.process_time() - self._cpu_start


COMPILING = CompileClock()  # of all steps of this process
