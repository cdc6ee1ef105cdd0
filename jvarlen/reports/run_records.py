"""Reads a run directory: its records as arrays, its compile report, summary and settings.

A file that was cut or damaged is an error with its path. Values that an older version did not write are unknown, NaN
or None. Letters: S steps, E evaluations, K buckets.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from jvarlen._common.checks import UserError
from jvarlen._common.files import check_run_format
from jvarlen.compiling.report import CompileReport, CompileRow

__all__ = [
    "BucketUse",
    "Evaluations",
    "Run",
    "bucket_uses",
    "differing_settings_of",
    "loss_unit",
    "read_metrics",
    "read_run",
    "run_names",
    "run_of_records",
]

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
_OWN_LOSS = "mean_loss"  # what evaluations of a loss of the user's own have in place of bits
_EVALUATION_FIELDS = ("step", "bits_per_token", _OWN_LOSS)
_SUMMARY_FIELDS = ("num_steps", "compile_s", "evaluated_in")
_MOST_CHARACTERS = 60  # of a setting


class Evaluations(NamedTuple):
    """Evaluations of one name, such as those of the held-out samples."""

    step: Float64[np.ndarray, " E"]  # training steps done before
    loss: Float64[np.ndarray, " E"]  # in the unit of the run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The content of a run directory; None for files that are not there yet."""

    path: Path
    steps: Mapping[str, Float64[np.ndarray, " S"]]  # by field of `metrics.jsonl`; NaN where unknown
    evaluations: Mapping[str, Evaluations]  # by name
    in_bits: bool  # whether losses are shown in bits a token: they are in nats unless the run has a loss of its own
    summary: Mapping[str, Any] | None = None
    is_interrupted: bool = False
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
    def has_ended(self) -> bool:
        """Whether the summary covers all these steps; a resumed run still has the summary of its first part."""
        steps = self.steps["step"]
        return self.summary is not None and not (self.num_steps and (self.summary["num_steps"] or 0) <= steps[-1])

    @property
    def tokens_so_far(self) -> Float64[np.ndarray, " S"]:
        """Real tokens up to and including each step; NaN from the first unknown one on."""
        return np.cumsum(self.steps["num_tokens"])

    @property
    def seconds(self) -> Float64[np.ndarray, " S"]:
        """From the end of one step to the end of the next, whatever came between; NaN where unknown."""
        seconds = np.diff(self.steps["time_s"], prepend=0.0)
        return np.where(seconds > 0, seconds, np.nan)


class BucketUse(NamedTuple):
    """How a run used a bucket; None for unknown figures."""

    shape: tuple[int, ...]  # rows, and length or lengths
    num_steps: int = 0  # that were logged, as are the tokens
    num_tokens: float | None = None
    num_positions: float | None = None
    padding: float | None = None  # share of the tokens with padding that is padding
    seconds: float | None = None  # of all these steps; not timed one by one, the report's median times their number
    row: CompileRow | None = None


def read_run(run_dir: str | os.PathLike[str]) -> Run:
    """Reads the directory of a run, which may still be running."""
    path = Path(run_dir)
    if not path.is_dir():
        raise FileNotFoundError(f"there is no directory {path} of a run")
    missing = [name for name in ("config.json", "metrics.jsonl") if not (path / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{path} is not the directory of a run: there is no {' and no '.join(missing)}")
    metrics, summary_path, report_path = (
        path / name for name in ("metrics.jsonl", "summary.json", "compile_report.json")
    )
    steps, evaluations, in_bits = _columns_of(_iterate_metrics(metrics), f"{metrics} is damaged: ")
    summary = _read_object(summary_path) if summary_path.exists() else None
    return Run(
        path=path.resolve(),
        steps=steps,
        evaluations=evaluations,
        in_bits=in_bits and not (summary and summary.get("evaluated_in") == "loss"),
        summary=None if summary is None else {name: summary.get(name) for name in _SUMMARY_FIELDS},
        is_interrupted=bool(summary and summary.get("interrupted")),
        report=CompileReport.load(report_path) if report_path.exists() else None,
        settings=_read_settings(path / "config.json"),
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
    with path.open(errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if wrong is not None:
                raise wrong
            try:
                row = json.loads(line)
                row["step"]
            except (ValueError, KeyError, TypeError) as error:
                wrong = UserError(f"{path}, line {number}, is no record of a step: {error!r}")
            else:
                yield row


def run_of_records(records: Iterable[Mapping[str, Any]]) -> Run:
    """A run of which nothing is known but its records, as from `read_metrics`."""
    steps, evaluations, in_bits = _columns_of(records)
    return Run(path=Path(), steps=steps, evaluations=evaluations, in_bits=in_bits)


def run_names(paths: Sequence[Path]) -> list[str]:
    """Names of directories; equal names get as much of the path as tells them apart.

    Example:
      >>> run_names([Path("/a/runs/1"), Path("/b/runs/1"), Path("/b/runs/2")])
      ['a/runs/1', 'b/runs/1', '2']
    """
    twice = sorted({str(path) for path in paths if paths.count(path) > 1})
    if twice:
        raise UserError(f"each run can be shown once; given more than once: {', '.join(twice)}")

    def ending(path: Path, num_parts: int) -> str:
        return os.path.join(*path.parts[-num_parts:])

    def own_ending(path: Path) -> str:
        others = [other for other in paths if other != path]
        endings = ((ending(path, n), {ending(other, n) for other in others}) for n in itertools.count(1))
        return next(own for own, of_others in endings if own not in of_others)

    return [own_ending(path) for path in paths]


def loss_unit(runs: Iterable[Run]) -> str:
    """The unit of the losses of runs, to follow a label; empty for losses of the user's own."""
    units = {", bits a token" if run.in_bits else "" for run in runs}
    return units.pop() if len(units) == 1 else ", bits a token or own"


def differing_settings_of(runs: Sequence[Run]) -> list[tuple[str, list[str | None]]]:
    """Settings in which runs differ, and their values in each run; None if a run has none."""
    names = dict.fromkeys(itertools.chain.from_iterable(run.settings for run in runs))
    values = [(name, [run.settings.get(name) for run in runs]) for name in names]
    return [(name, of_runs) for name, of_runs in values if len(set(of_runs)) > 1]


def bucket_uses(run: Run) -> list[BucketUse]:
    """How a run used its buckets, in the log and in the compile report, by length."""
    shapes = np.stack([run.steps["bucket_rows"], run.steps["bucket_length"]], axis=1)
    is_known = np.isfinite(shapes).all(axis=1)
    unique, place = np.unique(shapes[is_known].astype(np.int64), axis=0, return_inverse=True)
    num_steps = np.bincount(place.ravel(), minlength=len(unique)).tolist()

    def sums(name: str) -> list[float | None]:
        totals = np.bincount(place.ravel(), run.steps[name][is_known], len(unique))
        return [float(total) if np.isfinite(total) else None for total in totals]

    rows = {tuple(row.bucket): row for row in run.report or ()}
    uses = {shape: BucketUse(shape, row=row) for shape, row in rows.items()}
    figures = (num_steps, sums("num_tokens"), sums("num_positions"), sums("step_s"))
    for shape, steps, tokens, positions, seconds in zip(map(tuple, unique.tolist()), *figures, strict=True):
        row = rows.get(shape)
        padding = None if tokens is None or not positions else 1.0 - tokens / positions
        if seconds is None and row is not None and row.step_s == row.step_s:
            seconds = steps * row.step_s
        uses[shape] = BucketUse(shape, steps, tokens, positions, padding, seconds, row)
    return sorted(uses.values(), key=lambda use: (use.shape[1:], use.shape[0]))


def _columns_of(
    records: Iterable[Mapping[str, Any]], of_file: str = ""
) -> tuple[dict[str, Float64[np.ndarray, " S"]], dict[str, Evaluations], bool]:
    """The fields of steps, the evaluations by name, and whether losses are in nats; errors begin with `of_file`."""
    steps = {name: array("d") for name in _STEP_FIELDS}  # of a long log, only numbers are held
    evaluations: dict[str, dict[str, array]] = {}
    in_bits = True
    for number, record in enumerate(records, start=1):
        if "loss" in record:
            columns = steps
        elif "evaluation" in record:
            columns = evaluations.setdefault(
                str(record["evaluation"]), {name: array("d") for name in _EVALUATION_FIELDS}
            )
            in_bits &= _OWN_LOSS not in record
        else:
            continue
        for name, column in columns.items():
            value = record.get(name)
            try:
                column.append(math.nan if value is None else value)
            except (TypeError, OverflowError):
                raise UserError(f"{of_file}line {number}: {name} is no number, but {json.dumps(value)}") from None
    step = np.array(steps["step"])
    backwards = np.flatnonzero(np.diff(step) <= 0)
    if len(backwards):
        before, after = (f"{step[place]:.0f}" for place in (backwards[0], backwards[0] + 1))
        raise UserError(f"{of_file}out of order: step {after} comes after step {before}")
    of_loss = "bits_per_token" if in_bits else _OWN_LOSS
    return (
        {name: np.array(column) for name, column in steps.items()},
        {name: Evaluations(np.array(each["step"]), np.array(each[of_loss])) for name, each in evaluations.items()},
        in_bits,
    )


def _read_settings(path: Path) -> dict[str, str]:
    """Settings as JSON, cut where it is long, by name; those of a group by `group.name`."""

    def shown(value: Any) -> str:
        text = json.dumps(value, ensure_ascii=False)
        return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"

    flat: dict[str, str] = {}
    settings = _read_object(path)
    try:
        check_run_format(settings)
    except UserError as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    for name, value in settings.items():
        of_group = {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
        flat |= {key: shown(each) for key, each in of_group.items()}
    return flat


def _read_object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    if not isinstance(document, dict):
        raise UserError(f"{path} is damaged: it holds no JSON object")
    return document
