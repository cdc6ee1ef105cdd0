"""Reports of runs: a table as text, one HTML page that loads nothing, and the pictures that a run leaves behind.

Runs that are still going or were interrupted are shown as far as they are known. Letters: S steps of one run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from jvarlen._common.checks import UserError
from jvarlen._common.text_table import text_table
from jvarlen.reports.figures import COLOURS, Picture, draw_series, drawing_settings, new_figure, series_picture
from jvarlen.reports.page import Table, printable, write_page
from jvarlen.reports.run_records import Run, loss_unit, read_run, run_names, run_of_records

__all__ = ["RunReport", "draw_runs", "plot_curves", "read_runs"]

_UNKNOWN = "not known"
_LAST_STEPS = 50  # of which a mean loss is shown
_PNG_DPI = 200
_Column = Float64[np.ndarray, " _"]


class RunReport(NamedTuple):
    """Runs that are shown together, each with a unique name."""

    runs: tuple[Run, ...]
    names: tuple[str, ...]

    @property
    def figures(self) -> list[tuple[str, list[str]]]:
        """Names of key figures, with their values for each run."""
        unit = loss_unit(self.runs)
        columns = [_key_figures(run, unit) for run in self.runs]
        kinds = dict.fromkeys(kind for run in self.runs for kind in run.evaluations)
        evaluations = [(f"Evaluation {kind}{unit}", [_evaluation(run, kind) for run in self.runs]) for kind in kinds]
        return [*((name, [column[name] for column in columns]) for name in columns[0]), *evaluations]

    def table(self) -> str:
        """Lines of text: the key figures of each run, the buckets of a single run, and settings that differ."""
        others = self._bucket_tables() if len(self.runs) == 1 else [self._settings_table(is_whole=False)]
        tables = [[each.header, *each.rows] for each in (self._figures_table(), *others) if each.rows]
        return "\n\n".join(text_table([list(map(printable, row)) for row in table]) for table in tables)

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a page with the table and pictures of all runs; its size hardly depends on the number of steps."""
        is_one = len(self.runs) == 1
        steps = sum(run.num_steps for run in self.runs)
        differing = self._settings_table(is_whole=False)
        write_page(
            path,
            title=f"Run {self.names[0]}" if is_one else f"{len(self.runs):,} runs",
            summary=f"{steps:,} steps{'' if is_one else ' in all'}.",
            first_table=self._figures_table(),
            pictures=draw_runs(self.runs),
            names=self.names,
            tables=[
                *([differing] if differing.rows else []),
                *self._bucket_tables(),
                self._settings_table(is_whole=True),
            ],
        )

    def _figures_table(self) -> Table:
        rows = [[name, *values] for name, values in self.figures]
        note = (
            "Stalls are waits for the compiler or a checkpoint, and no part of the seconds of steps. Wait for data: "
            "share of the seconds of steps."
        )
        return Table("runs", "Figures", ["", *self.names], rows, note=note, is_wide=True)

    def _settings_table(self, *, is_whole: bool) -> Table:
        """All settings, or those that differ."""
        names = dict.fromkeys(name for run in self.runs for name in run.settings)
        rows = [[name, *(run.settings.get(name, _UNKNOWN) for run in self.runs)] for name in names]
        header = ["Setting", *self.names]
        if is_whole:
            return Table("settings", "All settings", header, rows, is_wide=True, is_closed=True)
        differing = [row for row in rows if len(set(row[1:])) > 1]
        return Table("differing", "Settings that differ", header, differing, is_wide=True)

    def _bucket_tables(self) -> list[Table]:
        """How each run used its buckets."""
        header = ["Rows × length", "Steps", "Planned steps", "Tokens", "Padding", "Seconds", "ms a step"]
        header += ["Lower s", "Compile s", "From cache"]
        note = (
            "Planned steps: of the first epoch. ms a step: the median. Lower, compile: seconds of threads that compile "
            "at once; known at the end of a run."
        )
        is_one = len(self.runs) == 1
        return [
            Table(
                f"buckets-{place}",
                "Buckets" if is_one else f"Buckets of {name}",
                header,
                _bucket_rows(run),
                note=note,
                is_closed=not is_one,
            )
            for place, (run, name) in enumerate(zip(self.runs, self.names, strict=True))
        ]


def read_runs(run_dirs: Sequence[str | os.PathLike[str]]) -> RunReport:
    """Reads runs to show them together; errors name the directory or file."""
    if not run_dirs:
        raise UserError("a report needs the directory of at least one run")
    runs = tuple(map(read_run, run_dirs))
    return RunReport(runs, tuple(printable(name) for name in run_names([run.path for run in runs])))


def _figure(value: float, form: str) -> str:
    return format(value, form) if np.isfinite(value) else _UNKNOWN


def _key_figures(run: Run, unit: str) -> dict[str, str]:
    steps = run.steps
    names = "num_tokens", "padded_tokens", "step_s", "data_wait_s", "stall_s"
    tokens, padded, step_s, wait_s, stall_s = (np.nansum(steps[name]) for name in names)
    losses, last = (each[np.isfinite(each)] for each in (steps["loss"], steps["loss"][-_LAST_STEPS:]))
    compiling = _UNKNOWN
    if run.summary:
        compiling = f"{run.summary['compile_s']:,.1f}, {run.summary['compile_cpu_s']:,.1f}"
    return {
        "State": run.state,
        "Steps": f"{run.num_steps:,}",
        "Tokens": f"{tokens:,.0f}",
        "Padding": _figure(1 - tokens / padded if padded else np.nan, ".2%"),
        "Shapes": f"{len(_bucket_rows(run)):,}",
        f"Last loss{unit}": f"{losses[-1]:.3f}" if len(losses) else _UNKNOWN,
        f"Mean loss of up to {_LAST_STEPS} last steps{unit}": f"{last.mean():.3f}" if len(last) else _UNKNOWN,
        "Tokens a second": _figure(tokens / step_s if step_s else np.nan, ",.0f"),
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
    compiled = {tuple(row.bucket): row for row in run.report or ()}
    cells = []
    for bucket in sorted({*compiled, *map(tuple, run.buckets.tolist())}, key=lambda bucket: bucket[::-1]):
        is_own = (run.buckets == bucket).all(axis=1)
        tokens, padded, step_s = (run.steps[name][is_own] for name in ("num_tokens", "padded_tokens", "step_s"))
        row, (rows, *lengths) = compiled.get(bucket), bucket
        of_compiler = [_UNKNOWN] * 3
        if row is not None:
            of_compiler = [f"{row.lower_s:,.2f}", f"{row.compile_s:,.2f}", "yes" if row.cache_hit else "no"]
        padding, median_s = np.nan, np.nan
        if len(step_s):
            padding, median_s = 1 - tokens.sum() / padded.sum(), np.median(step_s)
        cells.append(
            [
                f"{rows:,} × {'+'.join(f'{length:,}' for length in lengths)}",
                f"{len(step_s):,}",
                _UNKNOWN if row is None or row.planned_steps is None else f"{row.planned_steps:,}",
                f"{tokens.sum():,.0f}",
                _figure(padding, ".2%"),
                f"{step_s.sum():,.2f}",
                _figure(1e3 * median_s, ",.2f"),
                *of_compiler,
            ]
        )
    return cells


def draw_runs(runs: Sequence[Run]) -> list[Picture]:
    """The pictures of runs, all runs in the same pictures; without those of which nothing is known."""
    if not any(run.num_steps for run in runs):
        return []

    def column(name: str, unit: float = 1.0) -> list[_Column]:
        return [run.steps[name] / unit for run in runs]

    def ratio(above: list[_Column], below: list[_Column]) -> list[_Column]:
        return [a / b for a, b in zip(above, below, strict=True)]

    def picture(name: str, title: str, lines: dict[str, list[_Column]], **options: Any) -> list[Picture]:
        """Over the steps, or over `x`; lines of which nothing is known are left out."""
        x = options.pop("x", column("step"))
        known = {
            label: list(zip(x, of_runs, strict=True))
            for label, of_runs in lines.items()
            if any(np.isfinite(each).any() for each in of_runs)
        }
        return [series_picture(name, title, known, **options)] if known else []

    unit, step_s = loss_unit(runs), column("step_s")
    tokens = [each.cumsum() for each in column("num_tokens")]
    losses = {f"loss{unit}": column("loss")}
    rates = {"rate in force": column("learning_rate"), "base rate": column("base_learning_rate")}
    shapes = {"bucket length": list(map(_bucket_length, runs)), "rows": column("bucket_rows")}
    memory = {f"{where}, MB": column(f"{where}_memory_bytes", 1e6) for where in ("host", "device")}
    with drawing_settings():
        return [
            *picture("loss-tokens", "Loss against tokens", losses, x=tokens, xlabel="tokens", as_curve=True),
            *picture(
                "loss-time",
                "Loss against time",
                losses,
                x=[each.cumsum() for each in step_s],
                xlabel="seconds of steps",
                as_curve=True,
            ),
            *_evaluations(runs, tokens),
            *picture("learning-rate", "Learning rate", rates),
            *picture("shapes", "Shapes over the steps", shapes, is_log=True),
            *picture(
                "throughput",
                "Throughput",
                {"tokens a second": ratio(column("num_tokens"), step_s)},
                weights=step_s,
            ),
            *picture(
                "data-wait",
                "Waiting for data",
                {"wait in % of the step": [100 * each for each in ratio(column("data_wait_s"), step_s)]},
                weights=step_s,
            ),
            *picture("memory", "Memory over the steps", memory),
        ]


def _evaluations(runs: Sequence[Run], tokens: list[_Column]) -> list[Picture]:
    """The losses of each evaluation set, by the tokens trained on before."""
    lines: dict[str, list[tuple[_Column, _Column]]] = {}
    for kind in dict.fromkeys(kind for run in runs for kind in run.evaluations):
        found = [run.evaluations.get(kind, np.empty((2, 0))) for run in runs]
        lines[printable(kind) + loss_unit(runs)] = [
            (np.append(0.0, x)[np.searchsorted(run.steps["step"], step)], loss)
            for run, x, (step, loss) in zip(runs, tokens, found, strict=True)
        ]
    if not lines:
        return []
    return [series_picture("evaluations", "Evaluations", lines, xlabel="tokens", as_curve=True)]


def plot_curves(metrics: Iterable[dict[str, Any]], path: Path) -> None:
    """Plots loss, learning rate, batch size and bucket length of records of steps into a PNG file."""
    run = run_of_records(metrics)
    step = run.steps["step"]
    with drawing_settings():
        figure, axes = new_figure(4, sharex=True)
        draw_series(axes[0], f"loss{loss_unit([run])}", [(step, run.steps["loss"])], as_curve=True)
        draw_series(axes[1], "learning rate", [(step, run.steps["learning_rate"])])
        axes[1].plot(step, run.steps["base_learning_rate"], color=COLOURS["ink"], linewidth=1)
        draw_series(axes[2], "samples", [(step, run.steps["num_sequences"])])
        draw_series(axes[3], "bucket length", [(step, _bucket_length(run))], is_log=True)
        axes[3].set_xlabel("step")
        figure.savefig(path, dpi=_PNG_DPI, facecolor="white")


def _bucket_length(run: Run) -> _Column:
    """The length of a row of each step; of pairs both lengths together."""
    return run.steps["bucket_length"] + np.nan_to_num(run.steps["bucket_target_length"])
