"""Seconds and bytes of every step, and a profiler trace of some of them."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax

from jvarlen._common.checks import UserError

__all__ = ["StepMeter", "StepProfiler", "host_memory_bytes"]

T = TypeVar("T")

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class StepMeter:
    """Seconds and memory of each step, as the loop around the steps sees them. Nothing waits for the device.

    The loop takes a batch, dispatches a step, and reads the metrics of the previous step. A step ends here when its
    metrics have been read. Its time is from the end of the previous step to its own end, so the times add up to that of
    the loop. The first step begins with the meter.

    Example:
      >>> batches = iter("abc")
      >>> meter = StepMeter()
      >>> meter.next(batches)
      'a'
      >>> figures = meter.end_step()
      >>> figures["step_s"] >= figures["data_wait_s"] > 0
      True
    """

    def __init__(self) -> None:
        self._device = jax.local_devices()[0]
        self._data_wait_s = 0.0
        self._last_end = time.perf_counter()

    def next(self, batches: Iterator[T]) -> T:
        """The next batch; the time that it takes counts as waiting for data."""
        start = time.perf_counter()
        batch = next(batches)
        self._data_wait_s += time.perf_counter() - start
        return batch

    def end_step(self) -> dict[str, Any]:
        """The figures of a step whose metrics have just been read.

        Returns:
          `step_s`: float, seconds since the end of the previous step. It includes whatever the loop did meanwhile, such
          as logging or starting a save.
          `data_wait_s`: float, how many of these `next` took: usually for the batch of the following step, since that
          step is dispatched before this one's metrics are read.
          `host_memory_bytes`: int, from `host_memory_bytes`.
          `device_memory_bytes`: int, in use on the first device of this process; None if the backend reports none.
        """
        now = time.perf_counter()
        memory = self._device.memory_stats()
        figures = {
            "step_s": now - self._last_end,
            "data_wait_s": self._data_wait_s,
            "host_memory_bytes": host_memory_bytes(),
            "device_memory_bytes": memory.get("bytes_in_use") if memory else None,
        }
        self._last_end, self._data_wait_s = now, 0.0
        return figures

    def skip(self) -> None:
        """Excludes the time since the last end, such as that of an evaluation, from all steps."""
        self._last_end, self._data_wait_s = time.perf_counter(), 0.0


def host_memory_bytes() -> int:
    """Bytes of memory that this process holds (its resident set); without /proc, the most that it ever held.

    Example:
      >>> host_memory_bytes() > 1_000_000
      True

    References:
      proc_pid_statm(5), of Linux.
    """
    try:
        return int(_STATM.read_bytes().split()[1]) * _PAGE_BYTES
    except FileNotFoundError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


class StepProfiler:
    """A trace of some steps, each annotated with its bucket, for TensorBoard's profiler, XProf or Perfetto.

    The first steps are left out, because the first use of an executable loads it. It waits for the device twice, before
    the trace starts and after its last step; the other steps run as usual. A context manager: a trace that is still
    running at the end of the block is written too.

    Args:
      directory: the trace is written below it, to `plugins/profile/<time>/`, as `*.xplane.pb` and `*.trace.json.gz`.
      num_steps: steps to trace; 0 for no trace.
      steps_left: steps that training will take.
      start_after: steps before the trace; fewer if training is too short.

    Raises:
      ValueError: a negative number.

    Example:
      >>> with StepProfiler(Path("/nowhere"), 0, steps_left=3) as profiler:
      ...     with profiler.step("2×8", 0, state=None):
      ...         pass

    References:
      https://docs.jax.dev/en/latest/profiling.html
    """

    def __init__(self, directory: Path, num_steps: int, *, steps_left: int, start_after: int = 10):
        negative = {"num_steps": num_steps, "steps_left": steps_left, "start_after": start_after}
        negative = {name: value for name, value in negative.items() if value < 0}
        if negative:
            raise UserError(f"must not be negative: {negative}")
        self._directory = directory
        self._num_left = num_steps
        self._num_before = max(0, min(start_after, steps_left - num_steps))
        self._is_tracing = False

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def step(self, bucket: object, step_num: int, state: Any) -> contextlib.AbstractContextManager[None]:
        """A block around the dispatch of a step.

        Args:
          bucket: names the annotation, "train 12×344".
          step_num: the number of the step.
          state: the input of the step, and so the result of the previous one: arrays to wait for.
        """
        if not self._num_left:
            if self._is_tracing:
                jax.block_until_ready(state)
                self._stop()
            return contextlib.nullcontext()
        if self._num_before:
            self._num_before -= 1
            return contextlib.nullcontext()
        if not self._is_tracing:
            jax.block_until_ready(state)
            self._start()
        self._num_left -= 1
        return jax.profiler.StepTraceAnnotation(f"train {bucket}", step_num=step_num)

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of Python would slow the loop down, and crowd out the steps
        jax.profiler.start_trace(self._directory, profiler_options=options)
        self._is_tracing = True

    def _stop(self) -> None:
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()
