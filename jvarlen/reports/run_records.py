"""Run directories, read: their records, settings, summary and compile report.

Runs that are still going or were interrupted are known as far as their files are there. Letters: S steps, G shapes of
steps, E evaluations.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float64, Int64

from jvarlen._common.checks import UserError, is_number
from jvarlen._common.files import check_run_format, read_object, regular_file
from jvarlen._common.types import JsonObject

__all__ = ["CompiledBucket", "Run", "read_metrics", "read_run", "run_of_records"]

# The fields of records that pages show; only records of steps have a loss.
_STEP_FIELDS = (
    *("step", "loss", "num_tokens", "padded_tokens", "num_sequences", "num_groups"),
    *("base_learning_rate", "learning_rate", "step_s", "data_wait_s", "stall_s"),
)
_T = TypeVar("_T")


class CompiledBucket(NamedTuple):
    """The part of a row of a compile report that pages show."""

    lower_s: float
    compile_s: float
    cache_hit: bool
    planned_steps: float | None  # or groups
    padding: float | None  # as planned
    step_s: float | None  # median seconds of a step, or of a group


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The content of a run directory; parts are empty until their files are there."""

    path: Path = Path()
    steps: Mapping[str, Float64[np.ndarray, " S"]]  # by field of `metrics.jsonl`; NaN where it is null or missing
    shapes: Int64[np.ndarray, "G 5"]  # place of the step, groups of a shape, its rows, length, target length
    evaluations: Mapping[str, Float64[np.ndarray, "2 E"]]  # by name: training steps done before, and the loss
    loss_unit: str  # "nats a token", or "" for a loss of the user
    summary: Mapping[str, float] | None = None  # the part that pages show
    compiled: Mapping[tuple[int, ...], CompiledBucket] = dataclasses.field(default_factory=dict)  # by bucket
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)  # as JSON, by dotted name

    @functools.cached_property
    def buckets(self) -> Int64[np.ndarray, "G D"]:
        """Rows and length, of pairs both lengths, of each of `shapes`."""
        is_pairs = self.shapes[:, 4].any() or any(len(bucket) == 3 for bucket in self.compiled)
        return self.shapes[:, 2 : 4 + is_pairs]

    @property
    def has_groups(self) -> bool:
        """Whether its steps have several groups."""
        return bool(np.isfinite(self.steps["num_groups"]).any())

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
    for name in ("config.json", "metrics.jsonl"):
        if not (path / name).is_file():
            raise FileNotFoundError(f"{path} is not the directory of a run: there is no {path / name}")

    def read(name: str, how: Callable[[Path], _T], missing: _T) -> _T:
        try:
            return how(path / name) if (path / name).exists() else missing
        except UserError:
            raise
        except (TypeError, ValueError, LookupError, OverflowError) as error:
            raise UserError(f"{path / name} is damaged: {error!r}") from None

    return dataclasses.replace(
        read("metrics.jsonl", lambda file: run_of_records(_iterate_metrics(file)), run_of_records([])),
        path=path.resolve(),
        summary=read("summary.json", _read_summary, None),
        compiled=read("compile_report.json", _read_compiled, {}),
        settings=read("config.json", _read_settings, {}),
    )


def read_metrics(path: Path) -> list[JsonObject]:
    """The records of a `metrics.jsonl`, in order, without an incomplete last line.

    Args:
      path: the file.

    Returns:
      One record a line.

    Raises:
      ValueError: any other line is not a JSON object with a step; it is named.
    """
    return list(_iterate_metrics(path))


def _iterate_metrics(path: Path) -> Iterator[JsonObject]:
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
                wrong = UserError(f"{path}, line {number}, is not a record of a step: {error!r}")
            else:
                yield row


def run_of_records(records: Iterable[JsonObject]) -> Run:
    """A run with only its records, as from `read_metrics`."""
    steps: dict[str, list[float]] = {name: [] for name in _STEP_FIELDS}
    shapes: list[list[float]] = []
    evaluations: dict[str, list[tuple[float, float]]] = {}
    unit = "nats a token"
    for record in records:
        if "loss" in record:
            shapes += ([len(steps["step"]), *shape] for shape in _shapes_of(record))
            for name, column in steps.items():
                value = record.get(name)
                column.append(math.nan if value is None else value)
        elif "evaluation" in record:
            figure = "mean_loss" if "mean_loss" in record else "nats_per_token"
            unit = "" if figure == "mean_loss" else unit
            loss = math.nan if record[figure] is None else record[figure]
            evaluations.setdefault(str(record["evaluation"]), []).append((record["step"], loss))
    return Run(
        steps={name: np.array(column, np.float64) for name, column in steps.items()},
        shapes=np.array(shapes, np.int64).reshape(-1, 5),
        evaluations={name: np.array(each, np.float64).T for name, each in evaluations.items()},
        loss_unit=unit,
    )


def _shapes_of(record: JsonObject) -> list[tuple[int, int, int, int]]:
    """The shapes of a step: how many groups it has, their rows and lengths."""
    groups = record.get("groups")
    if groups is None and "bucket_rows" in record:
        groups = [{name.removeprefix("bucket_"): value for name, value in record.items()}]
    return [
        (group.get("num_groups", 1), group["rows"], group["length"], group.get("target_length", 0))
        for group in groups or ()
    ]


def _read_summary(path: Path) -> Mapping[str, float] | None:
    number = functools.partial(_number, read_object(path))
    return {name: number(name) for name in ("num_steps", "interrupted", "compile_s", "compile_cpu_s")}


def _read_compiled(path: Path) -> dict[tuple[int, ...], CompiledBucket]:
    compiled: dict[tuple[int, ...], CompiledBucket] = {}
    for row in read_object(path)["rows"]:
        if row["bucket"] is None:  # the update of steps of several groups
            continue
        number, shape = functools.partial(_number, row), tuple(map(int, row["bucket"]))
        lower_s, compile_s, is_hit, step_s = number("lower_s"), number("compile_s"), row["cache_hit"], row.get("step_s")
        if (other := compiled.get(shape)) is not None:  # another pass over its groups
            lower_s, compile_s, is_hit = (
                other.lower_s + lower_s,
                other.compile_s + compile_s,
                other.cache_hit and is_hit,
            )
            step_s = None if None in (step_s, other.step_s) else other.step_s + step_s
        planned = {name: row.get(name) for name in ("planned_steps", "padding")}
        compiled[shape] = CompiledBucket(lower_s, compile_s, bool(is_hit), **planned, step_s=step_s)
    return compiled


def _number(fields: JsonObject, name: str) -> float:
    """A field; raises TypeError or LookupError if it is not a number."""
    return 0 + fields[name]


def _read_settings(path: Path) -> dict[str, str]:
    """Settings as JSON, by name, in a group by `group.name`."""
    settings = read_object(path)
    check_run_format(settings, path)
    flat: JsonObject = {}
    for name, value in settings.items():
        flat |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    return {name: json.dumps(value, ensure_ascii=False) for name, value in flat.items()}
