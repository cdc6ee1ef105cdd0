"""What is measured of every step and shown of it, and a profiler trace of some."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
from tqdm import tqdm

from jvarlen.planning.buckets import AnyBucket

__all__ = ["StepDisplay", "StepMeter", "StepProfiler", "host_memory_bytes"]

T = TypeVar("T")

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_BAR_S = 0.5  # between two changes of what a bar tells of the steps
_LINE_S = 10.0  # between two lines in a log


class StepMeter:
    """Seconds and memory of each step, as the loop around the steps sees them. Nothing waits for the device.

    The loop takes a batch, dispatches a step, and reads the metrics of the previous step. A step ends here when its
    metrics have been read. Its time is from the end of the previous step to its own end, so the times add up to that of
    the loop. The first step begins with the meter. `train_s` and `data_wait_s` are the sums so far.

    Example:
      >>> batches = iter("abc")
      >>> meter = StepMeter()
      >>> meter.next(batches)
      'a'
      >>> figures = meter.end_step()
      >>> figures["step_s"] >= figures["data_wait_s"] > 0
      True
    """

    def __init__(self, train_s: float = 0.0, data_wait_s: float = 0.0) -> None:
        self.train_s, self.data_wait_s = train_s, data_wait_s
        self._device = jax.local_devices()[0]
        self._last_end, self._wait_s = time.perf_counter(), 0.0

    def next(self, batches: Iterator[T]) -> T:
        """The next batch; the time that it takes counts as waiting for data."""
        start = time.perf_counter()
        batch = next(batches)
        self._wait_s += time.perf_counter() - start
        return batch

    def end_step(self) -> dict[str, Any]:
        """The figures of a step whose metrics have just been read.

        `data_wait_s` are the seconds that `next` took: usually for the batch of the following step, as that step is
        dispatched before this one's metrics are read. `device_memory_bytes` is None if the backend reports none.
        """
        now, wait_s, memory = time.perf_counter(), self._wait_s, self._device.memory_stats()
        step_s = now - self._last_end
        self.train_s += step_s
        self.data_wait_s += wait_s
        self._last_end, self._wait_s = now, 0.0
        return {
            "time_s": self.train_s,
            "step_s": step_s,
            "data_wait_s": wait_s,
            "host_memory_bytes": host_memory_bytes(),
            "device_memory_bytes": memory.get("bytes_in_use") if memory else None,
        }

    def skip(self) -> None:
        """Excludes the time since the last end, such as that of an evaluation, from all steps."""
        self._last_end, self._wait_s = time.perf_counter(), 0.0


def host_memory_bytes() -> int:
    """Bytes that this process holds (its resident set, proc_pid_statm(5)); without /proc, the most it ever held."""
    try:
        return int(_STATM.read_bytes().split()[1]) * _PAGE_BYTES
    except FileNotFoundError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


class StepDisplay:
    """Shows the progress of training: a bar on a terminal, otherwise a plain line now and then. A context manager.

    A line has the step and the number of steps, the loss, real tokens a second and the share of time spent waiting for
    data (both since the previous line), the learning rate in force, the bucket, and the seconds of training so far.
    The first and the last step have one each. Lines go to standard error, like bars.
    """

    def __init__(self, num_steps: int, num_steps_done: int = 0, *, progress: bool = True, in_bits: bool = True):
        is_bar = progress and sys.stderr.isatty()
        self._is_shown = progress
        self._num_steps = num_steps
        self._in_bits = in_bits
        self._bar = tqdm(total=num_steps, initial=num_steps_done, desc="train", unit="step", disable=not is_bar)
        self._seconds = _BAR_S if is_bar else _LINE_S
        self._next_line = -math.inf
        self._unshown: tuple[Mapping[str, Any], Sequence[AnyBucket]] | None = (
            None  # the latest, where no line told of it
        )
        self._num_tokens, self._step_s, self._data_wait_s = 0, 0.0, 0.0  # since the line before

    def __enter__(self) -> StepDisplay:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._unshown is not None:
            self._show(*self._unshown)
        self._bar.close()

    def update(self, record: Mapping[str, Any], *, pending: Sequence[AnyBucket] = ()) -> None:
        """Shows the record of a finished training step, and which buckets are still to be compiled."""
        if not self._is_shown:
            return
        self._num_tokens += record["num_tokens"]
        self._step_s += record["step_s"]
        self._data_wait_s += record["data_wait_s"]
        now = time.monotonic()
        self._unshown = record, pending
        if now >= self._next_line:
            self._show(record, pending)
            self._next_line = now + self._seconds
        self._bar.update()

    def _show(self, record: Mapping[str, Any], pending: Sequence[AnyBucket]) -> None:
        step_s = max(self._step_s, 1e-9)
        figures = (
            f"loss {record['loss'] / math.log(2):.3f} bits/token" if self._in_bits else f"loss {record['loss']:.4g}",
            f"{self._num_tokens / step_s:,.0f} tokens/s",
            *([f"lr {record['learning_rate']:.1e}"] if "learning_rate" in record else []),
            f"{record['bucket_rows']}×{record['bucket_length']}",
            f"wait {self._data_wait_s / step_s:.1%}".replace("%", " %"),
            *([f"compiling {pending[0]}, {len(pending)} to go"] if pending else []),
        )
        if self._bar.disable:
            line = (f"step {record['step'] + 1:,}/{self._num_steps:,}", *figures, f"{record['time_s']:,.0f} s")
            print(*line, sep=" · ", file=sys.stderr, flush=True)
        else:
            self._bar.set_postfix_str(" · ".join(figures), refresh=False)
        self._unshown = None
        self._num_tokens, self._step_s, self._data_wait_s = 0, 0.0, 0.0


class StepProfiler:
    """A trace of some steps, each annotated with its bucket, for TensorBoard's profiler, XProf or Perfetto.

    The first steps are left out, because the first use of an executable loads it. It waits for the device twice, before
    the trace starts and after its last step; the other steps run as usual. A context manager: a trace that is still
    running at the end of the block is written too, below `directory` to `plugins/profile/<time>/`.

    References:
      https://docs.jax.dev/en/latest/profiling.html
    """

    def __init__(self, directory: Path, num_steps: int, *, steps_left: int, start_after: int = 10):
        self._directory = directory
        self._num_left = num_steps
        self._num_before = max(0, min(start_after, steps_left - num_steps))
        self._is_tracing = False

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def step(self, bucket: str, step_num: int, state: Any) -> contextlib.AbstractContextManager[None]:
        """A block around the dispatch of a step from `state`, the result of the previous one: arrays to wait for."""
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
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # every call of Python would slow the loop down, and crowd out the steps
            jax.profiler.start_trace(self._directory, profiler_options=options)
            self._is_tracing = True
        self._num_left -= 1
        return jax.profiler.StepTraceAnnotation(f"train {bucket}", step_num=step_num)

    def _stop(self) -> None:
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()
