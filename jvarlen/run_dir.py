"""Run directory: in go settings and a plan, out come the directory of a run, held by a lock, and its log of metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import itertools
import json
import os
import re
import shutil
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jvarlen.config import FitConfig, PlanConfig, differing_settings, load_config, save_config
from jvarlen.files import write_atomically
from jvarlen.plan import Plan
from jvarlen.report import read_metrics

__all__ = ["MetricsLog", "lock_run_dir", "new_run_dir", "point_latest_to", "resumed_run_dir"]

# Settings that say how far and where a run goes, not which run it is.
_MAY_CHANGE = {
    "max_steps",
    "num_epochs",
    "num_workers",
    "checkpoint_every",
    "runs_dir",
    "resume",
    "compile",
    "progress",
    "devices",
    "distributed",
    "coordinator",
    "num_processes",
    "process_id",
}
# What file systems without locks answer, such as Lustre mounted without them.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class MetricsLog:
    """`metrics.jsonl`: one JSON object a line. A context manager; readers see a line as soon as it is written.

    Args:
      path: the file; None writes nothing, as all but one of several processes do.
    """

    def __init__(self, path: Path | None):
        self._path = path

    def __enter__(self) -> MetricsLog:
        if self._path is None:
            self._file = open(os.devnull, "a")  # closed at the exit
            return self
        self._path.touch()
        self._file = self._path.open("a")
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, record: dict[str, Any]) -> None:
        """Appends one line."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def cut_to(self, num_steps_done: int) -> None:
        """Removes what was logged after the checkpoint that training continues from."""
        if self._path is None:
            return
        kept = [row for row in read_metrics(self._path) if row["step"] < num_steps_done]
        self._file.close()
        with write_atomically(self._path) as file:
            file.write("".join(json.dumps(row) + "\n" for row in kept).encode())
        self._file = self._path.open("a")


@contextlib.contextmanager
def lock_run_dir(run_dir: Path) -> Iterator[None]:
    """A block in which no other run, of this process or another, uses the directory.

    The lock is the kernel's, on the file `lock`: it ends with the process, whatever ends that. The file stays, and says
    who had it last. Over a network, the server ends the lock of a host that is lost, after a while (NFS 4: its lease,
    about 90 s). Where a file system is mounted with locks of each host alone, two hosts do not see each other.

    Args:
      run_dir: an existing directory.

    Raises:
      ValueError: a run that has not ended has the directory.
      OSError: the file cannot be written.

    References:
      flock(2), of Linux.
    """
    # Neither replaced nor removed, ever: a lock is on the file, not on its name.
    descriptor = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    with open(descriptor, "r+", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{run_dir} is in use by a run that has not ended ({file.read() or 'which has just begun'}): two at "
                "once would spoil it; wait for that run, or end it, and resume then"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            warnings.warn(
                f"{run_dir}: its file system has no locks ({error.strerror}); do not start a second run there",
                stacklevel=2,
            )
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def new_run_dir(config: FitConfig, plan: Plan, held: contextlib.ExitStack) -> Path:
    """Makes a directory named by the time and the plan, and puts settings and plan there; `held` holds its lock."""
    name = f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{plan.digest[:8]}"
    config.runs_dir.mkdir(parents=True, exist_ok=True)
    for attempt in itertools.count(1):
        run_dir = config.runs_dir / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            run_dir.mkdir()
            break
        except FileExistsError:
            continue
    held.enter_context(lock_run_dir(run_dir))
    _save(dataclasses.replace(config, plan=_with_own_models(config.plan, run_dir)), run_dir)
    plan.save(run_dir / "plan.npz")
    return run_dir


def point_latest_to(run_dir: Path) -> None:
    """Lets the link `latest` beside a run directory point to it."""
    link = run_dir.parent / f".latest-{os.getpid()}"
    link.symlink_to(run_dir.name)
    try:
        link.replace(run_dir.parent / "latest")
    except OSError:
        link.unlink()
        raise


def resumed_run_dir(config: FitConfig, run_dir: Path, plan: Plan, held: contextlib.ExitStack) -> tuple[Path, list[str]]:
    """The directory of a run to continue, its settings brought up to date, and which of them changed.

    `held` holds its lock.

    Raises:
      FileNotFoundError: there is no run, or no plan in it.
      ValueError: the run has not ended; its files are damaged; it has another plan; or settings differ that would make
        it another run. They are listed.
    """
    run_dir = run_dir.resolve()
    config_path = run_dir / "config.json"
    saved = load_config(config_path)  # first: what is no run gets no lock file
    held.enter_context(lock_run_dir(run_dir))
    config = dataclasses.replace(config, resume=saved.resume)
    differing = differing_settings(saved, config)
    refused = [setting for setting in differing if re.split("[.:]", setting)[0] not in _MAY_CHANGE]
    if refused:
        raise ValueError(f"{run_dir} can only be resumed with its own settings; these differ: {'; '.join(refused)}")
    saved_plan = Plan.load(run_dir / "plan.npz")
    if saved_plan.digest != plan.digest:
        raise ValueError(
            f"{run_dir} was planned with digest {saved_plan.digest[:12]}…, these data give {plan.digest[:12]}…: "
            "a run can only be resumed with its own plan, and the data differ"
        )
    _save(config, run_dir)
    return run_dir, differing


def _save(config: FitConfig, run_dir: Path) -> None:
    """Keeps the settings; with which processes it ran is no default for the next time."""
    anywhere = dataclasses.replace(config, distributed=False, coordinator=None, num_processes=None, process_id=None)
    save_config(anywhere, run_dir / "config.json")


def _with_own_models(plan: PlanConfig, run_dir: Path) -> PlanConfig:
    """The settings with copies of the cost models, so that a run does not change with files that are measured anew."""
    copies: dict[str, Any] = {}
    for name in ("cost_model", "memory_model"):
        source = getattr(plan, name)
        if source is not None:
            copies[name] = Path(shutil.copyfile(source, (run_dir / f"{name}.json").absolute()))
    return dataclasses.replace(plan, **copies)
