"""Trackers: `metrics.jsonl`, and whatever else receives the records of a run.

`metrics.jsonl` is always written; `charts` and a user's own trackers get the same records.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jvarlen._common.checks import UserError
from jvarlen._common.files import write_atomically
from jvarlen.reports.run_records import read_metrics
from jvarlen.runs.charts import TensorBoardTracker, WandbTracker
from jvarlen.runs.config import TrackerName

__all__ = ["MetricsLog", "Tracker", "Trackers", "open_trackers"]


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


class MetricsLog:
    """`metrics.jsonl`: one JSON object a line. A context manager; readers see a line as soon as it is written.

    JSON has no NaN and no infinity: they are written as null.

    Args:
      path: the file; None writes nothing, for all but one of several processes.

    Raises:
      OSError: the file cannot be written, here or later.
    """

    def __init__(self, path: Path | None):
        self._path = path
        self._file = open(os.devnull if path is None else path, "a")  # noqa: SIM115, closed by close

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def log(self, record: Mapping[str, Any]) -> None:
        """Appends one line."""
        finite = {name: value if _is_writable(value) else None for name, value in record.items()}
        try:
            self._file.write(json.dumps(finite, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(f"{self._path} cannot be written: {error.strerror}") from error

    def sync(self) -> None:
        """Returns when everything written would survive a power cut."""
        if self._path is not None:
            os.fsync(self._file.fileno())

    def cut_to(self, num_steps_done: int) -> None:
        """Removes what was logged after the checkpoint from which training continues."""
        if self._path is None:
            return
        try:
            kept = [row for row in read_metrics(self._path) if row["step"] < num_steps_done]
        except TypeError as error:
            raise UserError(f"{self._path} holds a step that is no number: {error}") from None
        num_steps = sum("evaluation" not in row for row in kept)
        if num_steps != num_steps_done:
            warnings.warn(f"{self._path} tells of {num_steps:,} of {num_steps_done:,} steps done", stacklevel=3)
        self._file.close()
        with write_atomically(self._path) as file:
            file.write("".join(json.dumps(row) + "\n" for row in kept).encode())
        self._file = self._path.open("a")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


@contextlib.contextmanager
def open_trackers(
    names: Sequence[TrackerName],
    run_dir: Path | None,
    *,
    start_step: int = 0,
    config: Mapping[str, Any] | None = None,
    others: Mapping[str, Tracker] | None = None,
) -> Iterator[Trackers]:
    """A block with one tracker that passes every record to `metrics.jsonl`, and then to the named trackers.

    Charts must not stop a training: a tracker that fails inside the block is named in a warning and gets no more
    records, while the run continues; `metrics.jsonl` has them all. If `metrics.jsonl` itself cannot be written, or a
    tracker cannot be opened, that is an error.

    Args:
      names: trackers beside `metrics.jsonl`.
      run_dir: an existing directory; None writes nothing, for all but one of several processes.
      start_step: steps done before; records of later steps are removed.
      config: settings to show with the run, as JSON values.
      others: more trackers, by the names used in warnings; closed with the rest.

    Yields:
      All of them as one tracker; it is closed at the end of the block.

    Raises:
      ValueError: a package is not installed; the message names the extra. Or a line of `metrics.jsonl` is not a record.
      OSError: a file cannot be written.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     with open_trackers([], Path(directory)) as tracker:
      ...         tracker.log({"step": 0, "loss": 2.5})
      ...     print((Path(directory) / "metrics.jsonl").read_text(), end="")
      {"step": 0, "loss": 2.5}
    """
    with contextlib.ExitStack() as held:
        metrics = held.enter_context(MetricsLog(None if run_dir is None else run_dir / "metrics.jsonl"))
        metrics.cut_to(start_step)
        opened = dict(others or {})
        tracker = Trackers(metrics, opened)
        held.callback(tracker.close)
        if run_dir is not None:
            for name in dict.fromkeys(names):
                if name == "tensorboard":
                    opened[name] = TensorBoardTracker(run_dir / "tensorboard", start_step=start_step)
                else:
                    opened[name] = WandbTracker(run_dir, config or {})
        yield tracker


class Trackers:
    """Passes records to the log of metrics, and to others as long as they do not fail; made by `open_trackers`."""

    def __init__(self, metrics: MetricsLog, others: dict[str, Tracker]):
        self._metrics = metrics
        self._others = others

    def log(self, record: Mapping[str, Any]) -> None:
        """Passes a record on; raises OSError if `metrics.jsonl` cannot be written."""
        self._metrics.log(record)
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
        self._metrics.sync()

    def close(self) -> None:
        """Closes the others; one that fails is named in a warning."""
        while self._others:
            name, tracker = self._others.popitem()
            try:
                tracker.close()
            except Exception as error:
                _warn(f"{name} failed at the end ({error!r}); it may lack the last records")


def _is_writable(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _warn(text: str) -> None:
    warnings.warn(f"the tracker {text}; metrics.jsonl has them all", stacklevel=4)
