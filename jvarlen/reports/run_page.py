"""Run directories, read and shown: a table, a page that overlays runs, and the picture that a run leaves behind.

Runs that are still going or were interrupted are shown as far as they are known. Letters: S steps, E evaluations.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float64, Int64

from jvarlen._common.checks import UserError, is_number
from jvarlen._common.files import check_run_format, read_object, regular_file
from jvarlen._common.terminal import text_table
from jvarlen._common.types import JsonObject
from jvarlen.reports import figures
from jvarlen.reports.figures import Page, Picture, Table

__all__ = [
    "CompiledBucket", "Run", "RunReport", "RunSummary", "draw_runs", "plot_curves", "read_metrics", "read_run",
    "read_runs", "run_of_records",
]  # fmt: skip

_UNKNOWN = "not known"
_LAST_STEPS = 50  # whose mean loss is shown
_PNG_DPI = 200
_Column = Float64[np.ndarray, " _"]
# The fields of records that pages show; only records of steps have a loss.
_STEP_FIELDS = (
    *("step", "loss", "num_tokens", "padded_tokens", "num_sequences", "bucket_rows", "bucket_length"),
    "bucket_target_length",  # of pairs alone
    *("base_learning_rate", "learning_rate", "step_s", "data_wait_s", "stall_s"),
)
_T = TypeVar("_T")


class RunSummary(NamedTuple):
    """The part of a summary that pages show."""

    num_steps: float
    interrupted: bool
    compile_s: float
    compile_cpu_s: float


class CompiledBucket(NamedTuple):
    """The part of a row of a compile report that pages show."""

    lower_s: float
    compile_s: float
    cache_hit: bool
    planned_steps: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The content of a run directory; parts are empty until their files are there."""

    path: Path = Path()
    steps: Mapping[str, Float64[np.ndarray, " S"]]  # by field of `metrics.jsonl`; NaN where it is null or missing
    evaluations: Mapping[str, Float64[np.ndarray, "2 E"]]  # by name: training steps done before, and the loss
    loss_unit: str  # "nats a token", or "" for a loss of the user
    summary: RunSummary | None = None
    compiled: Mapping[tuple[int, ...], CompiledBucket] = dataclasses.field(default_factory=dict)  # by bucket
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)  # as JSON, by dotted name

    @functools.cached_property
    def buckets(self) -> Int64[np.ndarray, "S D"]:
        """Rows and length, of pairs both lengths, of each step."""
        names = ["bucket_rows", "bucket_length", "bucket_target_length"]
        is_pairs = np.isfinite(self.steps[names[-1]]).any() or any(len(bucket) == 3 for bucket in self.compiled)
        return np.nan_to_num(np.stack([self.steps[name] for name in names[: 2 + is_pairs]], axis=1)).astype(np.int64)

    @property
    def num_steps(self) -> int:
        """Steps that were logged."""
        return len(self.steps["step"])

    @property
    def state(self) -> str:
        """Whether it ended; a resumed run still has the summary of its first part."""
        if self.summary is None or (self.num_steps and self.summary.num_steps <= self.steps["step"][-1]):
            return "going on, or broken off"
        return "interrupted" if self.summary.interrupted else "ended"


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
        steps={name: np.array(column, np.float64) for name, column in steps.items()},
        evaluations={name: np.array(each, np.float64).T for name, each in evaluations.items()},
        loss_unit=unit,
    )


def _read_summary(path: Path) -> RunSummary | None:
    number = functools.partial(_number, read_object(path))
    return RunSummary(number("num_steps"), bool(number("interrupted")), number("compile_s"), number("compile_cpu_s"))


def _read_compiled(path: Path) -> dict[tuple[int, ...], CompiledBucket]:
    compiled = {}
    for row in read_object(path)["rows"]:
        number = functools.partial(_number, row)
        bucket = CompiledBucket(
            number("lower_s"), number("compile_s"), bool(number("cache_hit")), row.get("planned_steps")
        )
        compiled[tuple(map(int, row["bucket"]))] = bucket
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


class RunReport(NamedTuple):
    """Runs that are shown together, each with a unique name."""

    runs: tuple[Run, ...]
    names: tuple[str, ...]

    @property
    def figures(self) -> list[tuple[str, list[str]]]:
        """Names of key figures, with their values for each run."""
        unit = _loss_unit(self.runs)
        columns = [_key_figures(run, unit) for run in self.runs]
        kinds = dict.fromkeys(kind for run in self.runs for kind in run.evaluations)
        evaluations = [(f"Evaluation {kind}{unit}", [_evaluation(run, kind) for run in self.runs]) for kind in kinds]
        return [*((name, [column[name] for column in columns]) for name in columns[0]), *evaluations]

    def table(self) -> str:
        """Lines of text: the key figures of each run, and the buckets of a single run, or settings that differ."""
        others = self._bucket_tables() if len(self.runs) == 1 else [self._settings_table()]
        tables = [[each.header, *each.rows] for each in (self._figures_table(), *others) if each.rows]
        return "\n\n".join(text_table([list(map(figures.printable, row)) for row in table]) for table in tables)

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a page with the table and pictures of all runs; its size hardly depends on the number of steps."""
        steps = sum(run.num_steps for run in self.runs)
        Page(
            title=f"Run {self.names[0]}" if len(self.runs) == 1 else f"{len(self.runs):,} runs",
            summary=f"{steps:,} steps.",
            first_table=self._figures_table(),
            pictures=draw_runs(self.runs),
            names=self.names,
            tables=[*self._bucket_tables(), self._settings_table()],
        ).write(path)

    def _figures_table(self) -> Table:
        note = (
            "Stalls are waits for the compiler or a checkpoint, and no part of the seconds of steps. Wait for data: "
            "share of the seconds of steps."
        )
        rows = [[name, *values] for name, values in self.figures]
        return Table("runs", "Figures", ["", *self.names], rows, note=note, is_wide=True)

    def _settings_table(self) -> Table:
        """All settings of one run; of several those that differ."""
        names = dict.fromkeys(name for run in self.runs for name in run.settings)
        rows = [[name, *(run.settings.get(name, _UNKNOWN) for run in self.runs)] for name in names]
        title, is_one = "Settings", len(self.runs) == 1
        if not is_one:
            title, rows = "Settings that differ", [row for row in rows if len(set(row[1:])) > 1]
        return Table("settings", title, ["Setting", *self.names], rows, is_wide=True, is_closed=is_one)

    def _bucket_tables(self) -> list[Table]:
        """How each run used its buckets."""
        header = ["Rows × length", "Steps", "Planned steps", "Tokens", "Padding", "Seconds", "ms per step"]
        header += ["Lower s", "Compile s", "From cache"]
        note = (
            "Planned steps are of the first epoch, ms per step the median. Lower, compile: seconds of threads that "
            "compile at once; known at the end of a run."
        )
        is_one = len(self.runs) == 1
        titles = ["Buckets"] if is_one else [f"Buckets of {name}" for name in self.names]
        return [
            Table(f"buckets-{place}", title, header, _bucket_rows(run), note=note, is_closed=not is_one)
            for place, (run, title) in enumerate(zip(self.runs, titles, strict=True))
        ]


def read_runs(run_dirs: Sequence[str | os.PathLike[str]]) -> RunReport:
    """Reads runs to show them together, under names below the directory that they have in common."""
    if not run_dirs:
        raise UserError("a report needs the directory of at least one run")
    runs = tuple(map(read_run, run_dirs))
    paths = [run.path for run in runs]
    if twice := sorted({str(path) for path in paths if paths.count(path) > 1}):
        raise UserError(f"each run can be shown once; given more than once: {', '.join(twice)}")
    shared = os.path.commonpath([path.parent for path in paths])
    return RunReport(runs, tuple(figures.printable(os.path.relpath(path, shared)) for path in paths))


def _loss_unit(runs: Iterable[Run]) -> str:
    """The unit of the losses of runs, to follow a label; empty for losses of the user."""
    units = {run.loss_unit and f", {run.loss_unit}" for run in runs}
    return units.pop() if len(units) == 1 else ", nats a token or own"


def _figure(value: float, form: str) -> str:
    return format(value, form) if np.isfinite(value) else _UNKNOWN


def _key_figures(run: Run, unit: str) -> dict[str, str]:
    steps = run.steps
    names = "num_tokens", "padded_tokens", "step_s", "data_wait_s", "stall_s"
    tokens, padded, step_s, wait_s, stall_s = (np.nansum(steps[name]) for name in names)
    losses, last = (each[np.isfinite(each)] for each in (steps["loss"], steps["loss"][-_LAST_STEPS:]))
    compiling = _UNKNOWN
    if run.summary is not None:
        compiling = f"{run.summary.compile_s:,.1f}, {run.summary.compile_cpu_s:,.1f}"
    return {
        "State": run.state,
        "Steps": f"{run.num_steps:,}",
        "Tokens": f"{tokens:,.0f}",
        "Padding": _figure(1 - tokens / padded if padded else np.nan, ".2%"),
        "Shapes": f"{len(_bucket_rows(run)):,}",
        f"Last loss{unit}": f"{losses[-1]:.3f}" if len(losses) else _UNKNOWN,
        f"Mean loss of up to {_LAST_STEPS} last steps{unit}": f"{last.mean():.3f}" if len(last) else _UNKNOWN,
        "Tokens per second": _figure(tokens / step_s if step_s else np.nan, ",.0f"),
        "Wait for data": _figure(wait_s / step_s if step_s else np.nan, ".2%"),
        "Seconds of steps": f"{step_s:,.1f}",
        "Seconds of stalls": f"{stall_s:,.1f}",
        "Seconds of compiling, wall and CPU": compiling,
    }


def _evaluation(run: Run, kind: str) -> str:
    """The first value, and the last."""
    if kind not in run.evaluations:
        return _UNKNOWN
    _, loss = run.evaluations[kind]
    return ", then ".join(_figure(value, ".3f") for value in (loss[0], *loss[1:][-1:]))


def _bucket_rows(run: Run) -> list[list[str]]:
    """How a run used each bucket, in the log and in the compile report, by length."""
    cells = []
    for bucket in sorted({*run.compiled, *map(tuple, run.buckets.tolist())}, key=lambda bucket: bucket[::-1]):
        in_bucket = (run.buckets == bucket).all(axis=1)
        tokens, padded, step_s = (run.steps[name][in_bucket] for name in ("num_tokens", "padded_tokens", "step_s"))
        row, (rows, *lengths) = run.compiled.get(bucket), bucket
        planned, of_compiler = None, [_UNKNOWN] * 3
        if row is not None:
            planned = row.planned_steps
            of_compiler = [f"{row.lower_s:,.2f}", f"{row.compile_s:,.2f}", "yes" if row.cache_hit else "no"]
        padding, median_s = np.nan, np.nan
        if len(step_s):
            padding, median_s = 1 - tokens.sum() / padded.sum(), np.median(step_s)
        cells.append(
            [
                f"{rows:,} × {'+'.join(f'{length:,}' for length in lengths)}",
                f"{len(step_s):,}",
                _UNKNOWN if planned is None else f"{planned:,}",
                f"{tokens.sum():,.0f}",
                _figure(padding, ".2%"),
                f"{step_s.sum():,.2f}",
                _figure(1e3 * median_s, ",.2f"),
                *of_compiler,
            ]
        )
    return cells


def draw_runs(runs: Sequence[Run]) -> list[Picture]:
    """The pictures of runs, all runs in the same pictures; pictures without data are left out."""
    if not any(run.num_steps for run in runs):
        return []

    def column(name: str) -> list[_Column]:
        return [run.steps[name] for run in runs]

    def picture(
        name: str,
        title: str,
        lines: dict[str, list[_Column]],
        *,
        x: list[_Column] | None = None,
        xlabel: str = "step",
        weights: list[_Column] | None = None,
        is_log: bool = False,
    ) -> list[Picture]:
        """Over the steps, or a curve over `x`; lines without data are left out."""
        as_curve, x = x is not None, x or column("step")
        known = {
            label: list(zip(x, of_runs, strict=True))
            for label, of_runs in lines.items()
            if any(np.isfinite(each).any() for each in of_runs)
        }
        if not known:
            return []
        return [
            figures.series_picture(name, title, known, xlabel=xlabel, weights=weights, as_curve=as_curve, is_log=is_log)
        ]

    unit, step_s = _loss_unit(runs), column("step_s")
    tokens, seconds = ([each.cumsum() for each in columns] for columns in (column("num_tokens"), step_s))
    losses = {f"loss{unit}": column("loss")}
    rates = {"rate in force": column("learning_rate"), "base rate": column("base_learning_rate")}
    shapes = {"bucket length": list(map(_bucket_length, runs)), "rows": column("bucket_rows")}
    speed = {"tokens per second": [a / b for a, b in zip(column("num_tokens"), step_s, strict=True)]}
    with figures.drawing_settings():
        return [
            *picture("loss-tokens", "Loss against tokens", losses, x=tokens, xlabel="tokens"),
            *picture("loss-time", "Loss against time", losses, x=seconds, xlabel="seconds of steps"),
            *_evaluations(runs, tokens),
            *picture("learning-rate", "Learning rate", rates),
            *picture("shapes", "Shapes over the steps", shapes, is_log=True),
            *picture("throughput", "Throughput", speed, weights=step_s),
        ]


def _evaluations(runs: Sequence[Run], tokens: list[_Column]) -> list[Picture]:
    """The losses of each evaluation set, by the tokens trained on before."""
    lines: dict[str, list[tuple[_Column, _Column]]] = {}
    for kind in dict.fromkeys(kind for run in runs for kind in run.evaluations):
        found = [run.evaluations.get(kind, np.empty((2, 0))) for run in runs]
        lines[figures.printable(kind) + _loss_unit(runs)] = [
            (np.append(0.0, x)[np.searchsorted(run.steps["step"], step)], loss)
            for run, x, (step, loss) in zip(runs, tokens, found, strict=True)
        ]
    if not lines:
        return []
    return [figures.series_picture("evaluations", "Evaluations", lines, xlabel="tokens", as_curve=True)]


def plot_curves(metrics: Iterable[JsonObject], path: Path) -> None:
    """Plots loss, learning rate, batch size and bucket length of records of steps into a PNG file."""
    run = run_of_records(metrics)
    step = run.steps["step"]
    with figures.drawing_settings():
        figure, axes = figures.new_figure(4, share_x=True)
        figures.draw_series(axes[0], f"loss{_loss_unit([run])}", [(step, run.steps["loss"])], as_curve=True)
        figures.draw_series(axes[1], "learning rate", [(step, run.steps["learning_rate"])])
        axes[1].plot(step, run.steps["base_learning_rate"], color=figures.COLOURS["ink"], linewidth=1)
        figures.draw_series(axes[2], "samples", [(step, run.steps["num_sequences"])])
        figures.draw_series(axes[3], "bucket length", [(step, _bucket_length(run))], is_log=True)
        axes[3].set_xlabel("step")
        figure.savefig(path, dpi=_PNG_DPI, facecolor="white")


def _bucket_length(run: Run) -> _Column:
    """The length of a row of each step; of pairs both lengths together."""
    return run.steps["bucket_length"] + np.nan_to_num(run.steps["bucket_target_length"])
