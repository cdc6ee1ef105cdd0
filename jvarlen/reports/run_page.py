"""Runs shown: a table, a page that overlays runs, and the picture that a run leaves behind.

Letters: S steps, G shapes of steps.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from jvarlen._common.checks import UserError
from jvarlen._common.terminal import text_table
from jvarlen._common.types import JsonObject
from jvarlen.reports import figures
from jvarlen.reports.figures import Page, Picture, Table
from jvarlen.reports.run_records import Run, read_run, run_of_records

__all__ = ["RunReport", "draw_runs", "plot_curves", "read_runs"]

_UNKNOWN = "not known"
_LAST_STEPS = 50  # whose mean loss is shown
_PNG_DPI = 200
_Column = Float64[np.ndarray, " _"]


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
        note = (
            "What is planned is of the first epoch, ms the median. Lower, compile: seconds of threads that compile at "
            "once; known at the end of a run."
        )
        is_one = len(self.runs) == 1
        titles = ["Buckets"] if is_one else [f"Buckets of {name}" for name in self.names]
        tables = []
        for place, (run, title) in enumerate(zip(self.runs, titles, strict=True)):
            rows = _bucket_rows(run)
            header, cells = [*rows[0]] if rows else [], [[*row.values()] for row in rows]
            tables.append(Table(f"buckets-{place}", title, header, cells, note=note, is_closed=not is_one))
        return tables


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


def _figure(value: float | None, form: str, factor: float = 1.0) -> str:
    return _UNKNOWN if value is None or not np.isfinite(value) else format(factor * value, form)


def _key_figures(run: Run, unit: str) -> dict[str, str]:
    steps = run.steps
    names = "num_tokens", "padded_tokens", "step_s", "data_wait_s", "stall_s"
    tokens, padded, step_s, wait_s, stall_s = (np.nansum(steps[name]) for name in names)
    losses, last = (each[np.isfinite(each)] for each in (steps["loss"], steps["loss"][-_LAST_STEPS:]))
    compiling = _UNKNOWN
    if run.summary is not None:
        compiling = f"{run.summary['compile_s']:,.1f}, {run.summary['compile_cpu_s']:,.1f}"
    return {
        "State": run.state,
        "Steps": f"{run.num_steps:,}",
        "Groups per step": _groups_per_step(run),
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


def _groups_per_step(run: Run) -> str:
    """The mean, and the most."""
    if not run.has_groups:
        return "1" if run.num_steps else _UNKNOWN
    groups = run.steps["num_groups"]
    return f"{np.nanmean(groups):.1f}, at most {np.nanmax(groups):.0f}"


def _bucket_rows(run: Run) -> list[dict[str, str]]:
    """How a run used each bucket, in the log and in the compile report, by length; cells by their header."""
    table = []
    for bucket in sorted({*run.compiled, *map(tuple, run.buckets.tolist())}, key=lambda bucket: bucket[::-1]):
        place, number = run.shapes[(run.buckets == bucket).all(axis=1), :2].T
        row, (rows, *lengths) = run.compiled.get(bucket), bucket
        planned = _UNKNOWN if row is None or row.planned_steps is None else f"{row.planned_steps:,}"
        cells = {"Rows × length": f"{rows:,} × {'+'.join(f'{length:,}' for length in lengths)}"}
        if run.has_groups:
            padding, median_s = (None, None) if row is None else (row.padding, row.step_s)
            cells |= {"Groups": f"{number.sum():,}", "Planned groups": planned}
            cells |= {"Padding": _figure(padding, ".2%"), "ms per group": _figure(median_s, ",.2f", 1e3)}
        else:
            tokens, padded, step_s = (run.steps[name][place] for name in ("num_tokens", "padded_tokens", "step_s"))
            padding, median_s = (1 - tokens.sum() / padded.sum(), np.median(step_s)) if len(step_s) else (None, None)
            cells |= {"Steps": f"{len(step_s):,}", "Planned steps": planned, "Tokens": f"{tokens.sum():,.0f}"}
            cells |= {"Padding": _figure(padding, ".2%"), "Seconds": f"{step_s.sum():,.2f}"}
            cells |= {"ms per step": _figure(median_s, ",.2f", 1e3)}
        of_compiler = [_UNKNOWN] * 3
        if row is not None:
            of_compiler = [f"{row.lower_s:,.2f}", f"{row.compile_s:,.2f}", "yes" if row.cache_hit else "no"]
        table.append(cells | dict(zip(("Lower s", "Compile s", "From cache"), of_compiler, strict=True)))
    return table


def draw_runs(runs: Sequence[Run]) -> list[Picture]:
    """The pictures of runs, all runs in the same pictures; pictures and lines without data are left out."""
    if not any(run.num_steps for run in runs):
        return []

    def column(name: str) -> list[_Column]:
        return [run.steps[name] for run in runs]

    step_s = column("step_s")
    tokens, seconds = ([each.cumsum() for each in columns] for columns in (column("num_tokens"), step_s))
    losses = {f"loss{_loss_unit(runs)}": column("loss")}
    rates = {"rate in force": column("learning_rate"), "base rate": column("base_learning_rate")}
    speed = {"tokens per second": [a / b for a, b in zip(column("num_tokens"), step_s, strict=True)]}
    pictures = []
    with figures.drawing_settings():
        for name, title, lines, x, options in (
            ("loss-tokens", "Loss against tokens", losses, tokens, {"xlabel": "tokens", "as_curve": True}),
            ("loss-time", "Loss against time", losses, seconds, {"xlabel": "seconds of steps", "as_curve": True}),
            ("learning-rate", "Learning rate", rates, column("step"), {}),
            ("throughput", "Throughput", speed, column("step"), {"weights": step_s}),
        ):
            known = {label: of_runs for label, of_runs in lines.items() if np.isfinite(np.concatenate(of_runs)).any()}
            drawn = {label: list(zip(x, of_runs, strict=True)) for label, of_runs in known.items()}
            pictures += [figures.series_picture(name, title, drawn, **options)] if drawn else []
        return [*pictures, *_evaluations(runs, tokens), *_shapes_over_steps(runs)]


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


def _shapes_over_steps(runs: Sequence[Run]) -> list[Picture]:
    """Length and rows of every shape of each step."""
    if not any(len(run.shapes) for run in runs):
        return []
    lines = {"bucket length": list(map(_lengths_over_steps, runs))}
    lines["rows"] = [(steps, run.shapes[:, 2]) for run, (steps, _) in zip(runs, lines["bucket length"], strict=True)]
    return [figures.series_picture("shapes", "Shapes over the steps", lines, is_log=True)]


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
        figures.draw_series(axes[3], "bucket length", [_lengths_over_steps(run)], is_log=True)
        axes[3].set_xlabel("step")
        figure.savefig(path, dpi=_PNG_DPI, facecolor="white")


def _lengths_over_steps(run: Run) -> tuple[_Column, Int64[np.ndarray, " G"]]:
    """The step of each shape, and its length; of pairs both lengths together."""
    return run.steps["step"][run.shapes[:, 0]], run.shapes[:, 3:].sum(axis=1)
