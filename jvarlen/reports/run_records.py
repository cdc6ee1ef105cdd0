"""Reads a run directory: its records as arrays, its compile report, summary and settings.

Letters: S steps, E evaluations.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from jvarlen._common.checks import UserError, is_number, list_first
from jvarlen._common.files import check_run_format, read_object, regular_file
from jvarlen.compiling.report import CompileReport, CompileRow

__all__ = ["BucketUse", "Run", "bucket_uses", "loss_unit", "read_metrics", "read_run", "run_names", "run_of_records"]

# What is read of the records of steps; the loss is what makes a record one of a step.
_STEP_FIELDS = (
    "step",
    "loss",
    "num_tokens",
    "num_positions",
    "num_sequences",
    "bucket_rows",
    "bucket_length",
    "base_learning_rate",
    "learning_rate",
    "time_s",
    "step_s",
    "data_wait_s",
    "host_memory_bytes",
    "device_memory_bytes",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The content of a run directory; None for files that are not there yet."""

    path: Path = Path()
    steps: Mapping[str, Float64[np.ndarray, " S"]]  # by field of `metrics.jsonl`; NaN where it is null or missing
    evaluations: Mapping[str, Float64[np.ndarray, "2 E"]]  # by name: training steps done before, and the loss
    in_bits: bool  # whether losses are shown in bits a token: they are in nats unless the run has a loss of its own
    summary: Mapping[str, Any] | None = None
    report: CompileReport | None = None
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)  # as JSON, by dotted name

    @property
    def losses(self) -> Float64[np.ndarray, " S"]:
        """Of each step, in bits a token if it is shown so."""
        return self.steps["loss"] / math.log(2) if self.in_bits else self.steps["loss"]

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


class BucketUse(NamedTuple):
    """How a run used a bucket: sums over the logged steps, and its row of the compile report, if there is one."""

    bucket: tuple[int, int]  # rows and length
    num_steps: int
    num_tokens: float
    num_positions: float
    seconds: float
    row: CompileRow | None

    @property
    def padding(self) -> float:
        """The share of the tokens with padding that is padding; NaN without steps."""
        return 1.0 - self.num_tokens / self.num_positions if self.num_positions else math.nan

    @property
    def compiling_s(self) -> float:
        """Seconds of lowering and compiling; 0 where they are not known."""
        return 0.0 if self.row is None else self.row.lower_s + self.row.compile_s


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
        reason = str(error) if isinstance(error, TypeError) else repr(error)
        raise UserError(f"{metrics} is damaged: {reason}") from None
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
    in_bits = True
    for record in records:
        if "loss" in record:
            for name, column in steps.items():
                value = record.get(name)
                column.append(math.nan if value is None else value)
        elif "evaluation" in record:
            in_bits &= "bits_per_token" in record
            loss = record["bits_per_token" if in_bits else "mean_loss"]
            evaluations.setdefault(str(record["evaluation"]), []).append(
                (record["step"], math.nan if loss is None else loss)
            )
    return Run(
        steps={name: np.array(column) for name, column in steps.items()},
        evaluations={name: np.array(each, np.float64).T for name, each in evaluations.items()},
        in_bits=in_bits,
    )


def run_names(paths: Sequence[Path]) -> list[str]:
    """Names of directories, below the one that they have in common."""
    if twice := sorted({str(path) for path in paths if paths.count(path) > 1}):
        raise UserError(f"each run can be shown once; given more than once: {', '.join(twice)}")
    shared = os.path.commonpath([path.parent for path in paths])
    return [os.path.relpath(path, shared) for path in paths]


def loss_unit(runs: Iterable[Run]) -> str:
    """The unit of the losses of runs, to follow a label; empty for losses of the user's own."""
    units = {", bits a token" if run.in_bits else "" for run in runs}
    return units.pop() if len(units) == 1 else ", bits a token or own"


def bucket_uses(run: Run) -> list[BucketUse]:
    """How a run used its buckets, in the log and in the compile report, by length."""
    logged = np.stack([run.steps["bucket_rows"], run.steps["bucket_length"]], axis=1)
    shapes = np.where(np.abs(logged) < 2**31, logged, 0).astype(np.int64)  # 0 where it is not known
    rows = {tuple(row.bucket): row for row in run.report or ()}
    uses = []
    for bucket in sorted({*rows, *map(tuple, shapes.tolist())}, key=lambda bucket: bucket[::-1]):
        is_own = (shapes == bucket).all(axis=1)
        tokens, positions, seconds = (
            float(run.steps[name][is_own].sum()) for name in ("num_tokens", "num_positions", "step_s")
        )
        uses.append(BucketUse(bucket, int(is_own.sum()), tokens, positions, seconds, rows.get(bucket)))
    return uses


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
    wrong = [
        name for name in ("num_steps", "compile_s") if not is_number(summary.get(name)) or abs(summary[name]) >= 2**63
    ]
    wrong += [name for name in ("interrupted",) if not isinstance(summary.get(name), bool)]
    if wrong:
        raise UserError(f"{path} is damaged: {list_first(wrong)}: missing or of another type")
    return summary
