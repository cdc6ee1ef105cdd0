"""Reads a run directory: its records as arrays, its compile report, summary and settings.

Letters: S steps, E evaluations.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from jvarlen._common.checks import UserError, is_number, list_first
from jvarlen._common.files import check_run_format, read_object, regular_file
from jvarlen.compiling.report import CompileReport

__all__ = ["Run", "loss_unit", "read_metrics", "read_run", "run_names", "run_of_records"]

# What is read of the records of steps; the loss is what makes a record one of a step.
_STEP_FIELDS = (
    *("step", "loss", "num_tokens", "padded_tokens", "num_sequences", "bucket_rows", "bucket_length"),
    "bucket_target_length",  # of pairs alone
    *("base_learning_rate", "learning_rate", "time_s", "step_s", "data_wait_s", "stall_s"),
    *("host_memory_bytes", "device_memory_bytes"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The content of a run directory; None for files that are not there yet."""

    path: Path = Path()
    steps: Mapping[str, Float64[np.ndarray, " S"]]  # by field of `metrics.jsonl`; NaN where it is null or missing
    evaluations: Mapping[str, Float64[np.ndarray, "2 E"]]  # by name: training steps done before, and the loss
    loss_unit: str  # "nats a token", or "" of a loss of the user's own
    summary: Mapping[str, Any] | None = None
    report: CompileReport | None = None
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)  # as JSON, by dotted name

    @functools.cached_property
    def buckets(self) -> Int64[np.ndarray, "S D"]:
        """Rows and length, of pairs both lengths, of each step; 0 where they are not known."""
        names = ["bucket_rows", "bucket_length", "bucket_target_length"]
        is_pairs = np.isfinite(self.steps[names[-1]]).any() or any(len(row.bucket) == 3 for row in self.report or ())
        shapes = np.stack([self.steps[name] for name in names[: 2 + bool(is_pairs)]], axis=1)
        return np.where(np.abs(shapes) < 2**31, shapes, 0).astype(np.int64)

    @property
    def num_steps(self) -> int:
        """Steps that were logged."""
        return len(self.steps["step"])

    @property
    def state(self) -> str:
        """Whether it ended; a resumed run still has the summary of its first part."""
        if self.summary is None or (self.num_steps and self.summary["num_steps"] <= self.steps["step"][-1]):
            return "going on, or broken off"
        return "interrupted" if self.summary["interrupted"] else "ended"


def read_run(run_dir: str | os.PathLike[str]) -> Run:
    """Reads the directory of a run, which may still be running."""
    path = Path(run_dir)
    names = ("config.json", "metrics.jsonl", "summary.json", "compile_report.json")
    config, metrics, summary, report = (path / name for name in names)
    for file in (config, metrics):
        if not file.is_file():
            raise FileNotFoundError(f"{path} is not the directory of a run: there is no {file}")
    try:
        recorded = run_of_records(_iterate_metrics(metrics))
    except UserError:
        raise
    except (TypeError, ValueError, LookupError, OverflowError) as error:
        raise UserError(f"{metrics} is damaged: {error!r}") from None
    return dataclasses.replace(
        recorded,
        path=path.resolve(),
        summary=_read_summary(summary) if summary.exists() else None,
        report=CompileReport.load(report) if report.exists() else None,
        settings=_read_settings(config),
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`, in order, without an incomplete last line.

    Args:
      path: the file.

    Returns:
      One record a line.

    Raises:
      ValueError: any other line is not a JSON object with a step; it is named.
    """
    return list(_iterate_metrics(path))


def _iterate_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of `read_metrics`, one at a time."""
    wrong: ValueError | None = None
    with regular_file(path).open(errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if wrong is not None:
                raise wrong
            try:
                row = json.loads(line)
                if not is_number(row["step"]):
                    raise TypeError(f"step is {row['step']!r}")
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                wrong = UserError(f"{path}, line {number}, is no record of a step: {error!r}")
            else:
                yield row


def run_of_records(records: Iterable[Mapping[str, Any]]) -> Run:
    """A run of which nothing is known but its records, as from `read_metrics`."""
    steps = {name: array("d") for name in _STEP_FIELDS}  # of a long log, only numbers are held
    evaluations: dict[str, list[tuple[float, float]]] = {}
    unit = "nats a token"
    for record in records:
        if "loss" in record:
            for name, column in steps.items():
                value = record.get(name)
                column.append(math.nan if value is None else value)
        elif "evaluation" in record:
            figure = "mean_loss" if "mean_loss" in record else "nats_per_token"
            unit = "" if figure == "mean_loss" else unit
            loss = math.nan if record[figure] is None else record[figure]
            evaluations.setdefault(str(record["evaluation"]), []).append((record["step"], loss))
    return Run(
        steps={name: np.array(column) for name, column in steps.items()},
        evaluations={name: np.array(each, np.float64).T for name, each in evaluations.items()},
        loss_unit=unit,
    )


def run_names(paths: Sequence[Path]) -> list[str]:
    """Names of directories, below the one that they have in common."""
    if twice := sorted({str(path) for path in paths if paths.count(path) > 1}):
        raise UserError(f"each run can be shown once; given more than once: {', '.join(twice)}")
    shared = os.path.commonpath([path.parent for path in paths])
    return [os.path.relpath(path, shared) for path in paths]


def loss_unit(runs: Iterable[Run]) -> str:
    """The unit of the losses of runs, to follow a label; empty for losses of the user's own."""
    units = {run.loss_unit and f", {run.loss_unit}" for run in runs}
    return units.pop() if len(units) == 1 else ", nats a token or own"


def _read_settings(path: Path) -> dict[str, str]:
    """Settings as JSON, by name; those of a group by `group.name`."""
    settings = read_object(path)
    try:
        check_run_format(settings)
    except UserError as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    return {name: json.dumps(value, ensure_ascii=False) for name, value in flat.items()}


def _read_summary(path: Path) -> dict[str, Any]:
    """What a run ended with, of which reports take some figures."""
    summary = read_object(path)
    names = ("num_steps", "compile_s", "compile_cpu_s")
    wrong = [name for name in names if not is_number(summary.get(name)) or abs(summary[name]) >= 2**63]
    wrong += ["interrupted"] * (not isinstance(summary.get("interrupted"), bool))
    if wrong:
        raise UserError(f"{path} is damaged: {list_first(wrong)}: missing or of another type")
    return summary
