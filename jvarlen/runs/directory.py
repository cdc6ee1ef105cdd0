"""The directory of a run: its lock, its settings, and the summary that it ends with."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import itertools
import json
import os
import secrets
import socket
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from jvarlen._common.checks import UserError
from jvarlen._common.files import save_dataclass, write_atomically
from jvarlen._common.text_table import text_table
from jvarlen.compiling.report import CompileReport
from jvarlen.data.split import HELD_OUT
from jvarlen.planning.plan import Plan
from jvarlen.reports.run_page import plot_curves, read_metrics
from jvarlen.runs.bad_samples import write_bad_records
from jvarlen.runs.config import Change, FitConfig, changes_between, is_run_dir, load_config, save_config
from jvarlen.runs.model import copy_files
from jvarlen.runs.plan_config import SHAPES_FILE, ChosenShapes

__all__ = [
    "Summary",
    "continue_run",
    "lock_run_dir",
    "new_run_dir",
    "point_latest_to",
    "resumed_run_dir",
    "write_summary",
]

# What file systems without locks answer, such as Lustre mounted without them.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


@contextlib.contextmanager
def lock_run_dir(run_dir: Path) -> Iterator[None]:
    """A block in which no other run, of this process or another, uses the directory.

    The lock is the kernel's, on the file `lock`: it ends with the process, however that ends. The file stays, and says
    who held it last. On a network disk the server ends the lock of a lost host after a while (NFS 4: its lease, about
    90 s). Where locks are local to a host, two hosts do not see each other.

    Args:
      run_dir: an existing directory.

    Raises:
      ValueError: a running run holds the directory.
    """
    path = run_dir / "lock"
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(FileLock(path, blocking=False, fallback_to_soft=False))
        except Timeout as error:
            raise UserError(
                f"{run_dir} is in use by a run that has not ended "
                f"({path.read_text(errors='replace') or 'which has just begun'}): two at once would spoil it; wait for "
                "that run, or end it, and resume then"
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
    bad_records: Sequence[dict[str, Any]] = (),
) -> Path:
    """Creates the directory of a new run with what a resumed run is compared with; `held` gets the lock."""
    run_dir = config.directory.run_dir or _make_dir(config.directory.runs_dir, plan)
    run_dir.mkdir(parents=True, exist_ok=True)
    held.enter_context(lock_run_dir(run_dir))
    if is_run_dir(run_dir) or any((run_dir / "checkpoints").glob("[0-9]*")):
        raise UserError(f"{run_dir} holds a run already: resume it, or take another directory")
    plan.save(run_dir / "plan.npz")
    save_dataclass(shapes, run_dir / SHAPES_FILE)
    with write_atomically(run_dir / "data.json") as file:
        file.write((json.dumps(content_keys, indent=2) + "\n").encode())
    write_bad_records(run_dir, bad_records)
    copy_files(config, run_dir)
    # Last: what has settings is a run, and can be resumed.
    save_config(config, run_dir / "config.json")
    return run_dir


def _make_dir(runs_dir: Path, plan: Plan) -> Path:
    """A new directory, named by the time and the plan."""
    name = f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{plan.digest[:8]}"
    for ending in itertools.chain([""], (f"-{attempt}" for attempt in itertools.count(2))):
        with contextlib.suppress(FileExistsError):
            (runs_dir / (name + ending)).mkdir(parents=True)
            return runs_dir / (name + ending)
    raise AssertionError


def point_latest_to(run_dir: Path) -> None:
    """Points the link `latest` beside a run directory to it, or warns."""
    latest = run_dir.resolve().parent / "latest"
    if latest.exists() and not latest.is_symlink():
        return  # something of the user's
    link = latest.with_name(f".latest-{secrets.token_hex(4)}")
    try:
        link.symlink_to(run_dir.resolve().name)
        link.replace(latest)
    except OSError as error:
        link.unlink(missing_ok=True)
        warnings.warn(f"{latest} does not point to the latest run: {error}", stacklevel=2)


def resumed_run_dir(
    config: FitConfig, run_dir: Path, plan: Plan, held: contextlib.ExitStack
) -> tuple[Path, list[Change], FitConfig]:
    """The directory of a run to resume, settings that changed, and all for `continue_run`; ValueError for another plan.

    It writes nothing but the lock: the checkpoint may still be refused.
    """
    run_dir = run_dir.resolve()
    saved = load_config(run_dir / "config.json")  # first: a directory without a run gets no lock file
    held.enter_context(lock_run_dir(run_dir))
    config = dataclasses.replace(config, compile=dataclasses.replace(config.compile, cache_dir=saved.compile.cache_dir))
    changes = changes_between(saved, config)
    if refused := [str(change) for change in changes if change.scope == "run"]:
        raise UserError(f"{run_dir} can only be resumed with its own settings; these differ: {'; '.join(refused)}")
    saved_plan = Plan.load(run_dir / "plan.npz")
    if saved_plan.digest != plan.digest:
        raise UserError(
            f"{run_dir} was planned with digest {saved_plan.digest[:12]}…, these data give {plan.digest[:12]}…: "
            "a run can only be resumed with its own plan; the data differ, or the version of jvarlen that planned"
        )
    return run_dir, changes, config


def continue_run(run_dir: Path, config: FitConfig, *, has_steps_left: bool) -> None:
    """Keeps the settings with which a run is resumed, once nothing can refuse them."""
    save_config(config, run_dir / "config.json")
    if has_steps_left:  # until it logs a step, it would look as if it had ended
        (run_dir / "summary.json").unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of a run; `summary.json` holds the same.

    Attributes:
      held_out_before: the evaluation on held-out samples before the first step, in `evaluated_in`; None if none of
        their tokens has weight in the loss.
      held_out_after: the same after the last step; None also if the run was interrupted.
      evaluations: the same for every evaluation set, by name; empty if the run was interrupted.
      num_steps: steps done.
      num_tokens: tokens trained on, without padding.
      tokens_per_s: these over `train_s`, stalls left out.
      padding: share of the tokens with padding that are none.
      num_shapes: buckets compiled for training.
      compile_s: wall-clock seconds in which something was compiled.
      compile_cpu_s: seconds of CPU time of this process meanwhile: of all compiling threads, and of steps that ran.
      num_cache_hits: executables that came from the persistent cache.
      train_s: seconds from the first step to the last; interruptions and evaluations are left out.
      stall_s: how many of these steps waited for the compiler, or for a checkpoint.
      data_wait: share of the others spent waiting for data.
      num_skipped: bad samples of all processes that were left out of steps, each as often as steps should have had it.
      num_skipped_evaluation: bad samples of all processes that were left out of evaluations, each counted once.
      num_skipped_records: records of the data files that are no samples, and were left out before planning.
      num_without_target: samples of process 0 that had no token with weight in the loss, as those that are cut before
        their first learned token; `num_sequences` counts them. Unknown, 0, with a `collate` of your own.
      num_steps_without_weight: steps in which no sample had one: they have no loss, and a gradient of 0.
      num_nonfinite_grads: steps whose gradient was not finite, which the optimizer rejected.
      compilations_after_first_step: programs compiled after the first step; 0, or the run would have stopped.
      interrupted: whether the run was stopped before its end.
      evaluated_in: the unit of evaluations: `"nats a token"`, or `"loss"` for a loss of your own.
    """

    held_out_before: float | None
    held_out_after: float | None
    evaluations: dict[str, float | None]
    num_steps: int
    num_tokens: int
    tokens_per_s: float
    padding: float
    num_shapes: int
    compile_s: float
    compile_cpu_s: float
    num_cache_hits: int
    train_s: float
    stall_s: float
    data_wait: float
    num_without_target: int
    num_steps_without_weight: int
    num_nonfinite_grads: int
    compilations_after_first_step: int
    interrupted: bool
    evaluated_in: Literal["nats a token", "loss"]
    num_skipped: int = 0
    num_skipped_evaluation: int = 0
    num_skipped_records: int = 0

    def __str__(self) -> str:
        unit = "" if self.evaluated_in == "loss" else f" {self.evaluated_in}"
        others = {name: loss for name, loss in self.evaluations.items() if name != HELD_OUT}
        counts = {
            "bad samples skipped in steps": self.num_skipped,
            "bad samples not evaluated": self.num_skipped_evaluation,
            "bad records skipped in files": self.num_skipped_records,
            "samples without a target": self.num_without_target,
            "steps without weight": self.num_steps_without_weight,
            "steps rejected": self.num_nonfinite_grads,
        }
        lines = {
            "held-out loss before": _told(self.held_out_before, unit),
            "held-out loss after": "– (interrupted)" if self.interrupted else _told(self.held_out_after, unit),
            **{f"loss on {name}": _told(loss, unit) for name, loss in others.items()},
            "steps": f"{self.num_steps:,}",
            "tokens": f"{self.num_tokens:,}",
            "tokens per second": f"{self.tokens_per_s:,.0f}",
            "padding": f"{self.padding:.2%}",
            "shapes": f"{self.num_shapes}",
            "compile seconds": f"{self.compile_s:.1f} wall, {self.compile_cpu_s:.1f} CPU "
            f"({self.num_cache_hits} programs from the cache)",
            "step seconds": f"{self.train_s - self.stall_s:.1f} ({self.data_wait:.2%} waiting for data)",
            "stall seconds": f"{self.stall_s:.1f} (waiting for the compiler or a checkpoint)",
            **{name: f"{count:,}" for name, count in counts.items() if count},
            "compilations after the first step": f"{self.compilations_after_first_step}",
        }
        return text_table(list(lines.items()), align="<", least_widths=(34,), gap=" ")


def _told(loss: float | None, unit: str) -> str:
    return "– (no token has weight)" if loss is None else f"{loss:.3f}{unit}"


def write_summary(run_dir: Path, summary: Summary, report: CompileReport) -> None:
    """Writes `curves.png`, if the run took steps `compile_report.json`, and last, when all is done, `summary.json`."""
    plot_curves(read_metrics(run_dir / "metrics.jsonl"), run_dir / "curves.png")
    if report.times_used or not (run_dir / "compile_report.json").exists():
        report.save(run_dir / "compile_report.json")
    with write_atomically(run_dir / "summary.json") as file:
        file.write((json.dumps(dataclasses.asdict(summary), indent=2) + "\n").encode())
