"""Shows the progress of training, on a terminal or in a log."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from jvarlen.planning.buckets import AnyBucket

__all__ = ["StepDisplay"]

_BAR_S = 0.5  # between two changes of what a bar tells of the steps
_LINE_S = 10.0  # between two lines in a log


class StepDisplay:
    """Shows the progress of training: a bar on a terminal, otherwise a plain line now and then. A context manager.

    A line has the step and the number of steps, the loss, real tokens a second and the share of time spent waiting for
    data (both since the previous line), the learning rate in force, the bucket, and the seconds of training so far.
    The first and the last step have one each. Lines go to standard error, like bars.

    Args:
      num_steps: of the whole training.
      num_steps_done: of the earlier part, if training was resumed.
      progress: False shows nothing.
      in_bits: whether the loss is in nats a token and shown in bits.

    Example:
      >>> with StepDisplay(10, progress=False) as display:
      ...     display.update({"step": 0})
    """

    def __init__(
        self,
        num_steps: int,
        num_steps_done: int = 0,
        *,
        progress: bool = True,
        in_bits: bool = True,
    ):
        is_bar = progress and sys.stderr.isatty()
        self._is_shown = progress
        self._num_steps = num_steps
        self._in_bits = in_bits
        self._bar = tqdm(total=num_steps, initial=num_steps_done, desc="train", unit="step", disable=not is_bar)
        self._seconds = _BAR_S if is_bar else _LINE_S
        self._next_line = -math.inf
        self._pending: Sequence[AnyBucket] = ()
        self._unshown: Mapping[str, Any] | None = None  # the latest record, where no line told of it
        self._num_tokens, self._step_s, self._data_wait_s = 0, 0.0, 0.0  # since the line before

    def __enter__(self) -> StepDisplay:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._unshown is not None:
            self._show(self._unshown)
        self._bar.close()

    def update(self, record: Mapping[str, Any], *, pending: Sequence[AnyBucket] = ()) -> None:
        """Shows the record of a finished training step, and which buckets are still to be compiled."""
        self._pending = pending
        if not self._is_shown:
            return
        self._num_tokens += record["num_tokens"]
        self._step_s += record["step_s"]
        self._data_wait_s += record["data_wait_s"]
        now = time.monotonic()
        if now >= self._next_line:
            self._show(record)
            self._next_line = now + self._seconds
        else:
            self._unshown = record  # the end shows it
        self._bar.update()

    def _show(self, record: Mapping[str, Any]) -> None:
        step_s = max(self._step_s, 1e-9)
        figures = (
            f"loss {record['loss'] / math.log(2):.3f} bits/token" if self._in_bits else f"loss {record['loss']:.4g}",
            f"{self._num_tokens / step_s:,.0f} tokens/s",
            *([f"lr {record['learning_rate']:.1e}"] if "learning_rate" in record else []),
            f"{record['bucket_rows']}×{record['bucket_length']}",
            f"wait {self._data_wait_s / step_s:.1%}".replace("%", " %"),
            *([f"compiling {self._pending[0]}, {len(self._pending)} to go"] if self._pending else []),
        )
        if self._bar.disable:
            line = (f"step {record['step'] + 1:,}/{self._num_steps:,}", *figures, f"{record['time_s']:,.0f} s")
            print(*line, sep=" · ", file=sys.stderr, flush=True)
        else:
            self._bar.set_postfix_str(" · ".join(figures), refresh=False)
        self._unshown = None
        self._num_tokens, self._step_s, self._data_wait_s = 0, 0.0, 0.0
