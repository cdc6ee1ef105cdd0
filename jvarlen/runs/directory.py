"""The directory of a run: its lock, settings, metrics and list of bad samples."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import importlib.util
import json
import math
import os
import secrets
import socket
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

import jax
from filelock import FileLock, Timeout

from jvarlen._common.checks import UserError
from jvarlen._common.files import append_lines, regular_file, save_dataclass, save_json, write_atomically
from jvarlen._common.terminal import show_line
from jvarlen._common.types import JsonObject
from jvarlen.distributed.processes import broadcast_text, gather_texts, is_main_process, together
from jvarlen.loading.plan_source import SkippedSample
from jvarlen.planning.plan import Plan
from jvarlen.reports.run_records import read_metrics
from jvarlen.runs.config import FitConfig, TrackerName, is_run_dir
from jvarlen.runs.model import copy_files
from jvarlen.runs.saved_config import Change, changes_between, load_config, save_config
from jvarlen.runs.shapes import SHAPES_FILE, ChosenShapes

__all__ = [
    "BAD_SAMPLES", "BadSamples", "TensorBoardTracker", "Tracker", "Trackers", "lock_run_dir",
    "new_run_dir", "open_bad_samples", "open_trackers", "point_latest_to", "resumed_run_dir", "write_bad_records"
]  # fmt: skip

# What file systems without locks answer, such as Lustre mounted without them.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


@contextlib.contextmanager
def lock_run_dir(run_dir: Path) -> Iterator[None]:
    """A block in which no other run, of this process or another, uses the directory; ValueError if one does.

    The kernel's lock on the file `lock` ends with the process. On a network disk the server ends the lock of a lost
    host after a while (NFS 4: about 90 s). Where locks are local to a host, two hosts do not see each other.

    Args:
      run_dir: an existing directory.
    """
    path = run_dir / "lock"
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(FileLock(path, blocking=False, fallback_to_soft=False))
        except Timeout as error:
            raise UserError(
                f"{run_dir} is in use by a run that has not ended "
                f"({path.read_text(errors='replace') or 'which has just begun'}): two at once would damage it; wait "
                "for that run, or end it, and resume then"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            warnings.warn(
                f"{run_dir}: its file system has no locks ({error.strerror}); do not start a second run there",
                stacklevel=2,
            )
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield


def new_run_dir(
    config: FitConfig,
    shapes: ChosenShapes,
    plan: Plan,
    content_keys: dict[str, str],
    held: contextlib.ExitStack,
    bad_records: Sequence[JsonObject] = (),
) -> Path:
    """Creates the directory of a new run with the files that a resumed run is compared with; `held` gets the lock."""
    name = f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{plan.digest[:8]}-{secrets.token_hex(2)}"
    run_dir = config.directory.run_dir or config.directory.runs_dir / name
    run_dir.mkdir(parents=True, exist_ok=True)
    held.enter_context(lock_run_dir(run_dir))
    if is_run_dir(run_dir) or any((run_dir / "checkpoints").glob("[0-9]*")):
        raise UserError(f"{run_dir} holds a run already: resume it, or take another directory")
    plan.save(run_dir / "plan.npz")
    save_dataclass(shapes, run_dir / SHAPES_FILE)
    save_json(content_keys, run_dir / "data.json")
    write_bad_records(run_dir, bad_records)
    copy_files(config.model, config.data.tokenizer, run_dir)
    # Last: what has settings is a run, and can be resumed.
    save_config(config, run_dir / "config.json")
    return run_dir


def point_latest_to(run_dir: Path) -> None:
    """Points the link `latest` beside a run directory to it, or warns."""
    latest = run_dir.resolve().parent / "latest"
    if latest.exists() and not latest.is_symlink():
        return  # something of the user's
    try:
        latest.unlink(missing_ok=True)
        latest.symlink_to(run_dir.resolve().name)
    except OSError as error:
        warnings.warn(f"{latest} does not point to the latest run: {error}", stacklevel=2)


def resumed_run_dir(
    config: FitConfig, run_dir: Path, plan: Plan, held: contextlib.ExitStack
) -> tuple[Path, list[Change]]:
    """The directory of a run to resume, and the settings that changed; ValueError for another plan.

    It writes only the lock: the checkpoint may still be refused.
    """
    run_dir = run_dir.resolve()
    saved = load_config(run_dir / "config.json")  # first: a directory without a run gets no lock file
    held.enter_context(lock_run_dir(run_dir))
    changes = changes_between(saved, config)
    if refused := [str(change) for change in changes if change.scope == "run"]:
        raise UserError(f"{run_dir} can only be resumed with its own settings; these differ: {'; '.join(refused)}")
    saved_plan = Plan.load(run_dir / "plan.npz")
    if saved_plan.digest != plan.digest:
        raise UserError(
            f"{run_dir} was planned with digest {saved_plan.digest[:12]}…, these data give {plan.digest[:12]}…: "
            "a run can only be resumed with its own plan; the data differ, or the version of jvarlen that planned"
        )
    return run_dir, changes


class Tracker(Protocol):
    """The interface of an object that receives the records of a run."""

    def log(self, record: JsonObject) -> None:
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
        trackers = Trackers(held.enter_context(open(path or os.devnull, "ab", buffering=0)), opened)
        held.callback(trackers.close)
        if run_dir is not None and "tensorboard" in names:
            opened["tensorboard"] = TensorBoardTracker(run_dir / "tensorboard", start_step=start_step)
        yield trackers


def _keep_before(num_steps_done: int, path: Path) -> None:
    """Removes what was logged after the checkpoint from which training continues."""
    kept = [row for row in read_metrics(path) if row["step"] < num_steps_done] if path.exists() else []
    num_steps = sum("evaluation" not in row for row in kept)
    if num_steps != num_steps_done:
        warnings.warn(f"{path} has records of {num_steps:,} of {num_steps_done:,} steps done", stacklevel=4)
    _write_lines(path, kept)


class Trackers:
    """Passes records to the open `metrics.jsonl`, and to others until they fail: charts must not stop a training."""

    def __init__(self, metrics: IO[bytes], others: dict[str, Tracker]):
        self._metrics = metrics
        self._others = others

    def log(self, record: JsonObject) -> None:
        """Passes a record on, which readers of the file see at once; OSError if it cannot be written."""
        # JSON has no NaN and no infinity.
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        append_lines(self._metrics, [json.dumps(finite, allow_nan=False)])
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

    def log(self, record: JsonObject) -> None:
        """Writes an event."""
        group = f"eval/{record['evaluation']}" if "evaluation" in record else "train"
        figures = {name: value for name, value in record.items() if name != "step" and isinstance(value, int | float)}
        values = [self._summary.Value(tag=f"{group}/{name}", simple_value=value) for name, value in figures.items()]
        self._write(step=record["step"], summary=self._summary(value=values))

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()

    def _write(self, **content: object) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), **content))
        self._writer.flush()


BAD_SAMPLES = "bad_samples.jsonl"  # of process 0; process 1 has bad_samples.1.jsonl

_MOST_SHOWN = 5  # all are in the file


@dataclasses.dataclass
class BadSamples:
    """Writes the samples that a process skips; `num_in_files`, `num_in_steps` and so on count what the files list."""

    _file: IO[bytes] | None
    num_in_files: int
    _num_in_steps: int
    _evaluated: set[tuple[str, int]]  # evaluations and ids of samples that the lists of all processes have
    _num_evaluated_before: int
    _progress: bool
    _num_shown: int = 0

    def log(self, num_steps_done: int, skipped: Sequence[SkippedSample]) -> None:
        """Lists the samples that a step has left out; OSError if the list cannot be written."""
        if self._file is not None:
            self._num_in_steps += len(skipped)
            self._add(f"step {num_steps_done + 1:,}", [one._asdict() | {"step": num_steps_done} for one in skipped])

    def log_evaluation(self, name: str, skipped: Sequence[SkippedSample]) -> None:
        """Lists what a step of an evaluation has left out, if it is not in the list yet; raises OSError as `log`."""
        new = {one.id: one.reason for one in skipped if (name, one.id) not in self._evaluated}
        self._evaluated |= {(name, i) for i in new}
        rows = [{"step": None, "evaluation": name, "id": i, "reason": reason} for i, reason in new.items()]
        self._add(f"evaluation on {name}", rows)

    def _add(self, where: str, rows: Sequence[JsonObject]) -> None:
        if not rows or self._file is None:
            return
        append_lines(self._file, map(json.dumps, rows))
        for row in rows[: _MOST_SHOWN - self._num_shown]:
            self._num_shown += 1
            show_line(f"{where} leaves out sample {row['id']}: {row['reason']}", progress=self._progress)

    def sync(self) -> None:
        """Returns when the list would survive a power cut."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def num_in_steps(self) -> int:
        """Samples that the steps of all processes have left out, those before a resume too; all processes call it."""
        return sum(map(int, gather_texts("the number of bad samples", str(self._num_in_steps))))

    def num_in_evaluations(self) -> int:
        """Samples that the evaluations of all processes have left out, each once; all processes call it."""
        before, now = self._num_evaluated_before, len(self._evaluated)
        return before + sum(map(int, gather_texts("the number of bad samples of evaluations", str(now - before))))


def write_bad_records(run_dir: Path, records: Sequence[JsonObject]) -> None:
    """Begins the list of bad samples with the bad records of files."""
    if records:
        _write_lines(run_dir / BAD_SAMPLES, records)


@contextlib.contextmanager
def open_bad_samples(run_dir: Path, *, start_step: int, skips: bool, progress: bool) -> Iterator[BadSamples]:
    """A block with the lists of all processes, without what `start_step` and later steps have left out.

    Samples that evaluations have left out stay, so that they are listed once.
    """
    num_in_files = num_in_steps = 0
    evaluated = set[tuple[str, int]]()
    with together("open the lists of bad samples"):
        for path in sorted(run_dir.glob("bad_samples*.jsonl")) if is_main_process() else ():
            kept = [row for row in _rows(path) if row["step"] is None or row["step"] < start_step]
            _write_lines(path, kept)
            evaluated |= {(row["evaluation"], row["id"]) for row in kept if "evaluation" in row}
            num_in_steps += sum(row["step"] is not None for row in kept)
            num_in_files += sum(row["step"] is None and "evaluation" not in row for row in kept)
    shared = json.loads(broadcast_text("the bad samples of evaluations", json.dumps(sorted(evaluated))))
    index = jax.process_index()
    path = run_dir / (BAD_SAMPLES if index == 0 else f"bad_samples.{index}.jsonl")
    with path.open("ab", buffering=0) if skips else contextlib.nullcontext() as file:
        yield BadSamples(file, num_in_files, num_in_steps, {(name, i) for name, i in shared}, len(shared), progress)


def _write_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    with write_atomically(path) as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows).encode())


def _rows(path: Path) -> list[JsonObject]:
    """The rows of a list, without an incomplete last line."""
    try:
        rows = list(map(json.loads, regular_file(path).read_text().split("\n")[:-1]))
        if wrong := [row for row in rows if not isinstance(row, dict) or "step" not in row]:
            raise ValueError(f"{wrong[0]} is not a bad sample")
        return rows
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None
