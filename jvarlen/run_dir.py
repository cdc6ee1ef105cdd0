"""Run directory: in go settings and a plan, out come the directory of a run and its log of metrics."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import os
from pathlib import Path
from typing import Any

from jvarlen.config import FitConfig, differing_settings, load_config, save_config
from jvarlen.plan import Plan
from jvarlen.report import read_metrics

__all__ = ["MetricsLog", "new_run_dir", "resumed_run_dir"]


class MetricsLog:
    """`metrics.jsonl`: one JSON object a line. A context manager; readers see a line as soon as it is written."""

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self) -> MetricsLog:
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
        kept = [row for row in read_metrics(self._path) if row["step"] < num_steps_done]
        self._file.truncate(0)
        for row in kept:
            self.write(row)

    def first(self, name: str) -> Any:
        """The first value of that name."""
        return next(row[name] for row in read_metrics(self._path) if name in row)


def new_run_dir(config: FitConfig, plan: Plan) -> Path:
    """Makes a directory named by the time and the plan, puts settings and plan there, and lets `latest` point to it."""
    name = f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{plan.digest[:8]}"
    config.runs_dir.mkdir(parents=True, exist_ok=True)
    for attempt in itertools.count(1):
        run_dir = config.runs_dir / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            run_dir.mkdir()
            break
        except FileExistsError:
            continue
    save_config(config, run_dir / "config.json")
    plan.save(run_dir / "plan.npz")
    link = config.runs_dir / f".latest-{os.getpid()}"
    link.symlink_to(run_dir.name)
    link.replace(config.runs_dir / "latest")
    return run_dir


def resumed_run_dir(config: FitConfig, run_dir: Path, plan: Plan) -> Path:
    """The directory of a run to continue.

    Raises:
      FileNotFoundError: there is no run, or no plan in it.
      ValueError: its files are damaged, or it was planned otherwise than `plan`; the settings that differ are listed.
    """
    run_dir = run_dir.resolve()
    saved = load_config(run_dir / "config.json")
    saved_plan = Plan.load(run_dir / "plan.npz")
    if saved_plan.digest != plan.digest:
        differing = differing_settings(saved, dataclasses.replace(config, resume=saved.resume))
        raise ValueError(
            f"{run_dir} was planned with digest {saved_plan.digest[:12]}…, these settings and data give "
            f"{plan.digest[:12]}…: a run can only be resumed with its own plan. Settings that differ: "
            f"{'; '.join(differing) or 'none, so the data differ'}"
        )
    return run_dir
