"""Reports of runs: a table as text, one HTML page that loads nothing, and the pictures that a run leaves behind.

Runs that are still going or were interrupted are shown as far as they are known. Letters: S steps of one run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from jvarlen._common.checks import UserError
from jvarlen._common.text_table import text_table
from jvarlen.reports.figures import (
    COLOURS,
    Picture,
    draw_series,
    drawing_settings,
    new_figure,
    series_picture,
    to_svg,
)
from jvarlen.reports.page import Table, printable, write_page
from jvarlen.reports.run_records import BucketUse, Run, bucket_uses, loss_unit, read_run, run_names, run_of_records

__all__ = ["RunReport", "draw_runs", "plot_curves", "read_runs"]

_UNKNOWN = "not known"
_LAST_STEPS = 50  # of which a mean loss is shown
_LONGEST_STALLS = 3  # that are named
_MOST_BASE_RATES = 500  # that are drawn
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
            "Seconds of steps, tokens a second: without stalls. A stall is a wait for the compiler or a checkpoint, or "
            "what a step takes beyond the median of its bucket where it takes 5 times that; from 0.1 s on. Steps count "
            "from 0. Wait for data: share of the time of all steps."
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
            "Planned steps: of the first epoch. Seconds: without stalls. ms a step: the median. Lower, compile: "
            "seconds of threads that compile at once; known at the end of a run."
        )
        is_one = len(self.runs) == 1
        return [
            Table(
                f"buckets-{place}",
                "Buckets" if is_one else f"Buckets of {name}",
                header,
                [_bucket_row(use) for use in bucket_uses(run)],
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


def _key_figures(run: Run, unit: str) -> dict[str, str]:
    steps = run.steps
    tokens, padded, step_s, wait_s = (
        steps[name].sum() for name in ("num_tokens", "padded_tokens", "step_s", "data_wait_s")
    )
    own_s = run.own_s.sum()
    losses, last, rates = (
        each[np.isfinite(each)] for each in (steps["loss"], steps["loss"][-_LAST_STEPS:], steps["learning_rate"])
    )
    compiling = _UNKNOWN
    if run.summary:
        compiling = f"{run.summary['compile_s']:,.1f}, {run.summary['compile_cpu_s']:,.1f}"
    return {
        "State": run.state,
        "Steps": f"{run.num_steps:,}",
        "Tokens": f"{tokens:,.0f}",
        "Padding": f"{1 - tokens / padded:.2%}" if padded else _UNKNOWN,
        "Shapes": f"{len(bucket_uses(run)):,}",
        f"Last loss{unit}": f"{losses[-1]:.3f}" if len(losses) else _UNKNOWN,
        f"Mean loss of up to {_LAST_STEPS} last steps{unit}": f"{last.mean():.3f}" if len(last) else _UNKNOWN,
        "Learning rate": f"{rates.min():.3g} to {rates.max():.3g}" if len(rates) else _UNKNOWN,
        "Tokens a second": f"{tokens / own_s:,.0f}" if own_s else _UNKNOWN,
        "Wait for data": f"{wait_s / step_s:.2%}" if step_s else _UNKNOWN,
        "Seconds of steps": f"{own_s:,.1f}",
        "Stalls": _stalls(run),
        "Seconds of compiling, wall and CPU": compiling,
    }


def _stalls(run: Run) -> str:
    """How many there were, how long they took, and the longest."""
    stalls = run.stalls_s
    places = np.argsort(-stalls, kind="stable")[: np.count_nonzero(stalls)]
    if not len(places):
        return "none"
    longest = ", ".join(f"{stalls[i]:,.1f} s at step {run.steps['step'][i]:,.0f}" for i in places[:_LONGEST_STALLS])
    return (
        f"{len(places):,} of {stalls.sum():,.1f} s{', the longest' if len(places) > _LONGEST_STALLS else ''}: {longest}"
    )


def _evaluation(run: Run, kind: str) -> str:
    """The first value, and the last."""
    if kind not in run.evaluations:
        return _UNKNOWN
    _, loss = run.evaluations[kind]
    return ", then ".join(_UNKNOWN if math.isnan(value) else f"{value:.3f}" for value in (loss[0], *loss[1:][-1:]))


def _bucket_row(use: BucketUse) -> list[str]:
    row, (rows, *lengths) = use.row, use.bucket
    compiled = [_UNKNOWN] * 3
    if row is not None:
        compiled = [f"{row.lower_s:,.2f}", f"{row.compile_s:,.2f}", "yes" if row.cache_hit else "no"]
    return [
        f"{rows:,} × {'+'.join(f'{length:,}' for length in lengths)}",
        f"{use.num_steps:,}",
        _UNKNOWN if row is None or row.planned_steps is None else f"{row.planned_steps:,}",
        f"{use.num_tokens:,.0f}",
        _UNKNOWN if math.isnan(use.padding) else f"{use.padding:.2%}",
        f"{use.seconds:,.2f}",
        _UNKNOWN if math.isnan(use.median_s) else f"{1e3 * use.median_s:,.2f}",
        *compiled,
    ]


def draw_runs(runs: Sequence[Run]) -> list[Picture]:
    """The pictures of runs, all runs in the same pictures; without those of which nothing is known."""
    if not any(run.num_steps for run in runs):
        return []
    with drawing_settings():
        return [
            *_losses(runs),
            *([_learning_rates(runs)] if any(np.isfinite(run.steps["learning_rate"]).any() for run in runs) else []),
            *_over_steps(runs),
        ]


def plot_curves(metrics: Iterable[dict[str, Any]], path: Path) -> None:
    """Plots loss, learning rate, batch size and bucket length of records of steps into a PNG file."""
    run = run_of_records(metrics)
    step = run.steps["step"]
    with drawing_settings():
        figure, axes = new_figure(4, sharex=True)
        draw_series(axes[0], f"loss{loss_unit([run])}", [(step, run.steps["loss"])], as_curve=True)
        _draw_rates(axes[1], [run])
        draw_series(axes[2], "samples", [(step, run.steps["num_sequences"])])
        draw_series(axes[3], "bucket length", [(step, _bucket_length(run))], is_log=True)
        axes[3].set_xlabel("step")
        figure.savefig(path, dpi=_PNG_DPI, facecolor="white")


def _bucket_length(run: Run) -> _Column:
    """The length of a row of each step; of pairs both lengths together."""
    return run.steps["bucket_length"] + np.nan_to_num(run.steps["bucket_target_length"])


def _losses(runs: Sequence[Run]) -> list[Picture]:
    """Training losses by tokens and by time, and evaluations by tokens."""
    unit = loss_unit(runs)
    tokens = [run.steps["num_tokens"].cumsum() for run in runs]
    evaluations: dict[str, list[tuple[_Column, _Column]]] = {}
    for kind in dict.fromkeys(kind for run in runs for kind in run.evaluations):
        found = [run.evaluations.get(kind, np.empty((2, 0))) for run in runs]
        evaluations[printable(kind) + unit] = [
            (np.append(0.0, x)[np.searchsorted(run.steps["step"], step)], loss)
            for run, x, (step, loss) in zip(runs, tokens, found, strict=True)
        ]

    def curves(name: str, title: str, xlabel: str, lines: dict[str, list[tuple[_Column, _Column]]]) -> Picture:
        return series_picture(name, title, lines, xlabel=xlabel, as_curve=True)

    by_tokens = [(x, run.steps["loss"]) for x, run in zip(tokens, runs, strict=True)]
    by_time = [(run.own_s.cumsum(), run.steps["loss"]) for run in runs]
    return [
        curves("loss-tokens", "Loss against tokens", "tokens", {f"loss{unit}": by_tokens}),
        curves("loss-time", "Loss against time", "seconds of steps, without stalls", {f"loss{unit}": by_time}),
        *([curves("evaluations", "Evaluations", "tokens", evaluations)] if evaluations else []),
    ]


def _learning_rates(runs: Sequence[Run]) -> Picture:
    figure, (axis,) = new_figure()
    caption = f"Dark line: the base rate. In colour: the rate in force. {_draw_rates(axis, runs)}"
    axis.set_xlabel("step")
    return Picture("learning-rate", "Learning rate", caption, to_svg(figure))


def _draw_rates(axis: Any, runs: Sequence[Run]) -> str:
    """Draws base rates as dark lines, and rates in force in the colours of their runs."""
    drawn = draw_series(axis, "learning rate", [(run.steps["step"], run.steps["learning_rate"]) for run in runs])
    for run in runs:
        shown = np.linspace(0, run.num_steps - 1, min(run.num_steps, _MOST_BASE_RATES)).astype(int)
        base = run.steps["base_learning_rate"][shown]
        axis.plot(run.steps["step"][shown], base, color=COLOURS["ink"], linewidth=1)
    return drawn


def _over_steps(runs: Sequence[Run]) -> list[Picture]:
    """What steps held, and what they took; several steps that are drawn together count by their weights."""

    def column(name: str) -> list[_Column]:
        return [run.steps[name] for run in runs]

    def ratio(above: list[_Column], below: list[_Column]) -> list[_Column]:
        return [a / b for a, b in zip(above, below, strict=True)]

    def picture(name: str, title: str, values: dict[str, list[_Column]], weights: Any = None) -> Picture:
        lines = {label: list(zip(column("step"), of_runs, strict=True)) for label, of_runs in values.items()}
        return series_picture(name, title, lines, weights=weights, is_log=name == "shapes")

    step_s, own_s = column("step_s"), [run.own_s for run in runs]
    shapes = {"bucket length": [_bucket_length(run) for run in runs], "rows": column("bucket_rows")}
    waits = {"wait in % of the step": [100 * wait for wait in ratio(column("data_wait_s"), step_s)]}
    memory = {
        f"{where}, MB": [each / 1e6 for each in column(f"{where}_memory_bytes")]
        for where in ("host", "device")
        if any(np.isfinite(each).any() for each in column(f"{where}_memory_bytes"))
    }
    return [
        picture("shapes", "Shapes over the steps", shapes),
        picture("sequences", "Samples of each step", {"samples": column("num_sequences")}),
        picture("throughput", "Throughput", {"tokens a second": ratio(column("num_tokens"), own_s)}, own_s),
        picture("data-wait", "Waiting for data", waits, step_s),
        *([picture("memory", "Memory over the steps", memory)] if memory else []),
    ]
