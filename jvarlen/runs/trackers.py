"""Trackers: `metrics.jsonl`, which is always written, TensorBoard, and a user's own; all get the same records."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

from jvarlen._common.checks import UserError
from jvarlen._common.files import write_atomically
from jvarlen.reports.run_page import read_metrics
from jvarlen.runs.config import TrackerName

__all__ = ["TensorBoardTracker", "Tracker", "Trackers", "open_trackers", "scalars_of"]

# Where charts show what stands in a record; what is not listed goes to train/.
_GROUPED_NAMES = {
    "base_learning_rate": "rate/base",
    "learning_rate_scale": "rate/scale",
    "learning_rate": "rate/in_force",
    "num_tokens": "data/num_tokens",
    "padded_tokens": "data/padded_tokens",
    "num_sequences": "data/num_sequences",
    "padding": "data/padding",
    "bucket_rows": "data/bucket_rows",
    "bucket_length": "data/bucket_length",
    "bucket_target_length": "data/bucket_target_length",
    "data_wait_s": "data/wait_s",
    "host_memory_bytes": "memory/host_bytes",
    "device_memory_bytes": "memory/device_bytes",
}


@runtime_checkable
class Tracker(Protocol):
    """The interface of an object that receives the records of a run."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Logs a record of a training step or, with the key "evaluation", of an evaluation.

        Args:
          record: figures by their names; one is "step".
        """

    def close(self) -> None:
        """Writes remaining records, and ends."""


@contextlib.contextmanager
def open_trackers(
    names: Sequence[TrackerName],
    run_dir: Path | None,
    *,
    start_step: int = 0,
    others: Mapping[str, Tracker] | None = None,
) -> Iterator[Trackers]:
    """A block with `metrics.jsonl`, without records of `start_step` and later, the named trackers, and `others`."""
    path = None if run_dir is None else run_dir / "metrics.jsonl"  # None: not the process that writes
    if path is not None:
        _keep_before(start_step, path)
    with contextlib.ExitStack() as held:
        opened = dict(others or {})
        trackers = Trackers(held.enter_context(open(path or os.devnull, "a")), opened)
        held.callback(trackers.close)
        if run_dir is not None and "tensorboard" in names:
            opened["tensorboard"] = TensorBoardTracker(run_dir / "tensorboard", start_step=start_step)
        yield trackers


def _keep_before(num_steps_done: int, path: Path) -> None:
    """Removes what was logged after the checkpoint from which training continues."""
    kept = [row for row in read_metrics(path) if row["step"] < num_steps_done] if path.exists() else []
    num_steps = sum("evaluation" not in row for row in kept)
    if num_steps != num_steps_done:
        warnings.warn(f"{path} tells of {num_steps:,} of {num_steps_done:,} steps done", stacklevel=4)
    with write_atomically(path) as file:
        file.write("".join(json.dumps(row) + "\n" for row in kept).encode())


class Trackers:
    """Passes records to the open `metrics.jsonl`, and to others until they fail: charts must not stop a training."""

    def __init__(self, metrics: IO[str], others: dict[str, Tracker]):
        self._metrics = metrics
        self._others = others

    def log(self, record: Mapping[str, Any]) -> None:
        """Passes a record on, which readers of the file see at once; OSError if it cannot be written."""
        # JSON has no NaN and no infinity.
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        try:
            self._metrics.write(json.dumps(finite, allow_nan=False) + "\n")
            self._metrics.flush()
        except OSError as error:
            raise OSError(f"{self._metrics.name} cannot be written: {error.strerror}") from error
        for name, tracker in list(self._others.items()):
            try:
                tracker.log(record)
            except Exception as error:
                del self._others[name]
                with contextlib.suppress(Exception):
                    tracker.close()
                _warn(f"{name} failed at step {record['step']:,} ({error!r}) and gets no more records")

    def sync(self) -> None:
        """Returns when the content of `metrics.jsonl` would survive a power cut."""
        if self._metrics.name != os.devnull:
            os.fsync(self._metrics.fileno())

    def close(self) -> None:
        """Closes the others; one that fails is named in a warning."""
        while self._others:
            name, tracker = self._others.popitem()
            try:
                tracker.close()
            except Exception as error:
                _warn(f"{name} failed at the end ({error!r}); it may lack the last records")


def _warn(text: str) -> None:
    warnings.warn(f"the tracker {text}; metrics.jsonl has them all", stacklevel=4)


class TensorBoardTracker:
    """Scalars for TensorBoard. A session log hides records of `start_step` and later in earlier files."""

    def __init__(self, directory: Path, *, start_step: int = 0):
        if importlib.util.find_spec("tensorboardX") is None:
            raise UserError("the tracker tensorboard needs tensorboardX: pip install 'jvarlen[tensorboard]'")
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        # Not its SummaryWriter: that takes an event for each scalar, and waits for ever where the disk is full.
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        directory.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(directory / "events"), f".{os.getpid()}.{start_step:012d}")
        self._write(step=start_step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def log(self, record: Mapping[str, Any]) -> None:
        """Writes an event."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars_of(record).items()]
        self._write(step=record["step"], summary=self._summary(value=values))

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()

    def _write(self, **content: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), **content))
        self._writer.flush()


def scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a record except the step, under names that charts group by."""
    group = f"eval/{record['evaluation']}/" if "evaluation" in record else None
    return {
        group + name if group else _GROUPED_NAMES.get(name, f"train/{name}"): float(value)
        for name, value in record.items()
        if name != "step" and isinstance(value, int | float)
    }
