"""Reports of runs: a table as text, one HTML page that loads nothing, and the pictures that a run leaves behind.

Runs that are still going, were interrupted, or were written by an older version are shown as far as they are known.
Letters: S steps of one run, K buckets.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from jvarlen._common.checks import UserError
from jvarlen._common.text_table import text_table
from jvarlen.reports.figures import (
    COLOURS,
    Detail,
    Picture,
    colour_of,
    draw_bars,
    draw_line,
    draw_steps,
    drawing_settings,
    finish_bars,
    finish_steps,
    format_ticks,
    new_figure,
    range_starts,
    to_svg,
    where_known,
)
from jvarlen.reports.page import Table, printable, write_page
from jvarlen.reports.run_records import (
    BucketUse,
    Run,
    bucket_uses,
    differing_settings_of,
    loss_unit,
    read_run,
    run_names,
    run_of_records,
)

__all__ = ["RunReport", "draw_runs", "plot_curves", "read_runs"]

_UNKNOWN = "not known"
_LAST_STEPS = 50  # of which the last loss is the mean
_MOST_BUCKETS = 256
_MARKERS = {"o": "circles", "s": "squares", "D": "diamonds", "^": "triangles", "v": "triangles down", "*": "stars"}
_MOST_BARS = 96
_MOST_MARKS = 500  # of evaluations
_PNG_DPI = 200
_BUCKET_HEADER = ["Rows × length", "Steps", "Planned steps", "Real tokens", "Padding", "Seconds", "ms a step"]
_BUCKET_HEADER += ["Lower s", "Compile s", "From cache"]


class RunReport(NamedTuple):
    """Runs that are shown together.

    Attributes:
      runs: at least one.
      names: a unique name for each.
    """

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
        tables: list[list[Sequence[str]]] = [[["", *self.names], *([name, *values] for name, values in self.figures)]]
        note = ""
        if len(self.runs) == 1:
            rows, note = _bucket_rows(bucket_uses(self.runs[0]))
            tables += [[_BUCKET_HEADER, *rows]] if rows else []
        elif differing := self._differing():
            tables.append([["setting", *self.names], *differing])
        texts = [text_table([list(map(printable, row)) for row in table]) for table in tables]
        return "\n\n".join([*texts, *([note] if note else [])])

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a page with the table and pictures of all runs; its size hardly depends on the number of steps.

        Args:
          path: the file; its directory must exist, and an existing file is replaced.

        Raises:
          OSError: the file cannot be written; an existing file stays.
        """
        is_one = len(self.runs) == 1
        pictures = []
        for each in draw_runs(self.runs):
            without = [self.names[place] for place in range(len(self.runs)) if place not in each.runs]
            unknown = f" Not known of: {', '.join(without)}." if without and each.runs else ""
            pictures.append(each._replace(caption=each.caption + unknown))
        note = f"Last loss: mean of the last {_LAST_STEPS} steps. Wait for data: share of the time of all steps."
        figures = [[name, *values] for name, values in self.figures]
        tables = []
        if differing := self._differing():
            tables.append(Table("differing", "Settings that differ", ["Setting", *self.names], differing, is_wide=True))
        for place, (run, name) in enumerate(zip(self.runs, self.names, strict=True)):
            title = "Buckets" if is_one else f"Buckets of {name}"
            rows, left_out = _bucket_rows(bucket_uses(run))
            about = f"{left_out} Planned steps: of the first epoch. Lower, compile: seconds. Known at the end of a run."
            buckets = Table(f"buckets-{place}", title, _BUCKET_HEADER, rows, note=about.strip(), is_closed=not is_one)
            tables.append(buckets)
        names = dict.fromkeys(name for run in self.runs for name in run.settings)
        settings = [[name, *(run.settings.get(name, _UNKNOWN) for run in self.runs)] for name in names]
        header = ["Setting", *self.names]
        tables.append(Table("settings", "All settings", header, settings, is_wide=True, is_closed=True))
        steps = sum(run.num_steps for run in self.runs)
        write_page(
            path,
            title=f"Run {self.names[0]}" if is_one else f"{len(self.runs):,} runs",
            summary=f"{steps:,} steps{'' if is_one else ' in all'}.",
            first_table=Table("runs", "Figures", ["", *self.names], figures, note=note, is_wide=True),
            pictures=pictures,
            names=self.names,
            tables=tables,
        )

    def _differing(self) -> list[list[str]]:
        return [
            [name, *(_UNKNOWN if value is None else value for value in values)]
            for name, values in differing_settings_of(self.runs)
        ]


def read_runs(run_dirs: Sequence[str | os.PathLike[str]]) -> RunReport:
    """Reads runs to show them together.

    Args:
      run_dirs: run directories, at least one, none twice.

    Returns:
      `RunReport`; print its `table()`, and see `write_html`.

    Raises:
      ValueError: there is no directory, or one is given twice; or a file is damaged; the message has the file and the
        line.
      OSError: a path is not a run directory, or cannot be read; it is named.
    """
    if not run_dirs:
        raise UserError("a report needs the directory of at least one run")
    runs = tuple(map(read_run, run_dirs))
    return RunReport(runs, tuple(printable(name) for name in run_names([run.path for run in runs])))


def _key_figures(run: Run, unit: str) -> dict[str, str]:
    steps, summary = run.steps, run.summary or {}
    tokens, positions = steps["num_tokens"].sum(), steps["num_positions"].sum()
    step_s, wait_s = steps["step_s"].sum(), steps["data_wait_s"].sum()
    time_s = steps["time_s"][-1] if run.num_steps else 0.0
    last = run.losses[-_LAST_STEPS:]
    last = last[np.isfinite(last)]
    shapes = {use.shape for use in bucket_uses(run)}
    rates = steps["learning_rate"][np.isfinite(steps["learning_rate"])]
    with np.errstate(divide="ignore", invalid="ignore"):
        padding, throughput, wait = 1 - tokens / positions, tokens / time_s, wait_s / step_s
    return {
        "State": ("interrupted" if run.is_interrupted else "ended") if run.has_ended else "going on, or broken off",
        "Steps": f"{run.num_steps:,}",
        "Real tokens": _number(tokens, "{:,.0f}"),
        "Padding": _number(padding, "{:.2%}"),
        "Shapes": f"{len(shapes):,}" if shapes else _UNKNOWN,
        f"Last loss{unit}": _number(last.mean() if len(last) else np.nan, "{:.3f}"),
        "Learning rate": f"{rates.min():.3g} to {rates.max():.3g}" if len(rates) else _UNKNOWN,
        "Real tokens a second": _number(throughput, "{:,.0f}"),
        "Wait for data": _number(wait, "{:.2%}"),
        "Seconds of training": _number(time_s, "{:,.1f}"),
        "Seconds of compiling": _number(summary.get("compile_s"), "{:,.1f}"),
    }


def _evaluation(run: Run, kind: str) -> str:
    """The first value, and the last."""
    if kind not in run.evaluations:
        return _UNKNOWN
    loss = run.evaluations[kind].loss
    return ", then ".join(_number(value, "{:.3f}") for value in (loss[0], *loss[1:][-1:]))


def _bucket_rows(uses: Sequence[BucketUse]) -> tuple[list[list[str]], str]:
    """Table rows of the buckets, and a note on what is left out, if anything."""
    rows = []
    for use in uses[:_MOST_BUCKETS]:
        row = use.row
        ms = None if use.seconds is None or not use.num_steps else 1e3 * use.seconds / use.num_steps
        rows.append(
            [
                f"{use.shape[0]:,} × {'+'.join(f'{length:,}' for length in use.shape[1:])}",
                f"{use.num_steps:,}",
                _number(row and row.planned_steps, "{:,}"),
                _number(use.num_tokens, "{:,.0f}"),
                _number(use.padding, "{:.2%}"),
                _number(use.seconds, "{:,.2f}"),
                _number(ms, "{:,.2f}"),
                _number(row and row.lower_s, "{:,.2f}"),
                _number(row and row.compile_s, "{:,.2f}"),
                _UNKNOWN if row is None else ("yes" if row.cache_hit else "no"),
            ]
        )
    left_out = len(uses) - len(rows)
    return rows, f"{left_out:,} more buckets are left out." if left_out else ""


def _number(value: object, form: str) -> str:
    """A number in a form; `_UNKNOWN` for None, NaN and infinity."""
    if not isinstance(value, int | float) or not np.isfinite(value):
        return _UNKNOWN
    return form.format(value)


def draw_runs(runs: Sequence[Run]) -> list[Picture]:
    """The pictures of runs, all runs in the same pictures."""
    tokens, times = [run.tokens_so_far for run in runs], [run.steps["time_s"] for run in runs]
    with drawing_settings():
        return [
            _loss(runs, "loss-tokens", "Loss against real tokens", "real tokens", tokens),
            _loss(runs, "loss-time", "Loss against time", "seconds of training", times),
            *([_evaluations(runs, tokens)] if any(run.evaluations for run in runs) else []),
            _learning_rates(runs),
            *_of_steps(runs),
            *_of_buckets(runs),
        ]


def plot_curves(metrics: Iterable[dict[str, Any]], path: Path) -> None:
    """Plots loss, learning rate, batch size and bucket length of records of steps into a PNG file."""
    run = run_of_records(metrics)
    with drawing_settings():
        figure, axes = new_figure(4, sharex=True)
        _draw_losses(axes[0], [run.steps["step"]], [run])
        if _draw_rates(axes[1], [run]):
            axes[1].legend()
        finish_steps(axes[1], "learning rate")
        for axis, label, name in ((axes[2], "samples", "num_sequences"), (axes[3], "bucket length", "bucket_length")):
            draw_steps(axis, run.steps["step"], run.steps[name], Detail(run.num_steps))
            finish_steps(axis, label)
        for axis in axes[:-1]:
            axis.set_xlabel("")
        figure.savefig(path, dpi=_PNG_DPI, facecolor="white")


def _of_steps(runs: Sequence[Run]) -> Iterator[Picture]:
    def of_steps(name: str) -> list[Float64[np.ndarray, " _"]]:
        return [run.steps[name] for run in runs]

    seconds = [run.seconds for run in runs]
    tokens, positions, step_s = map(of_steps, ("num_tokens", "num_positions", "step_s"))
    with np.errstate(divide="ignore", invalid="ignore"):
        padding = [100 * (1 - n / of) for n, of in zip(tokens, positions, strict=True)]
        throughput = [n / time for n, time in zip(tokens, seconds, strict=True)]
        waits = [100 * wait / of for wait, of in zip(of_steps("data_wait_s"), step_s, strict=True)]
    shapes = {"bucket length": of_steps("bucket_length"), "rows": of_steps("bucket_rows")}
    yield _over_steps(runs, "shapes", "Shapes over the steps", shapes)
    yield _over_steps(runs, "sequences", "Samples of each step", {"samples": of_steps("num_sequences")})
    by_time = "By the time from one step to the next."
    values = {"real tokens a second": throughput}
    yield _over_steps(runs, "throughput", "Throughput", values, weights=seconds, more=by_time)
    yield _over_steps(runs, "data-wait", "Waiting for data", {"wait in % of the step": waits}, weights=step_s)
    yield _over_steps(runs, "step-padding", "Padding over the steps", {"padding in %": padding}, weights=positions)
    memory = {
        label: [each / 1e6 for each in of_steps(name)]
        for label, name in (("host, MB", "host_memory_bytes"), ("device, MB", "device_memory_bytes"))
        if any(np.isfinite(each).any() for each in of_steps(name))
    }
    if memory:
        yield _over_steps(runs, "memory", "Memory over the steps", memory, more="MB: 10⁶ bytes.")


def _of_buckets(runs: Sequence[Run]) -> Iterator[Picture]:
    uses = [bucket_uses(run) for run in runs]

    def bars(name: str, title: str, label: str, value: Callable[[BucketUse], float | None], caption: str) -> Picture:
        return _per_bucket(name, title, label, [{use.shape: value(use) for use in of_run} for of_run in uses], caption)

    yield bars(
        "bucket-padding",
        "Padding of each bucket",
        "padding in %",
        lambda use: None if use.padding is None else 100 * use.padding,
        "Share of padding among the tokens of the steps so far.",
    )
    yield bars("bucket-time", "Time in each bucket", "seconds", lambda use: use.seconds, "All steps so far.")
    yield bars(
        "bucket-compile",
        "Compiling each bucket",
        "seconds",
        lambda use: None if use.row is None else use.row.lower_s + use.row.compile_s,
        "Lowering, and compiling or reading what was compiled before; known at the end of a run.",
    )


def _loss(
    runs: Sequence[Run], name: str, title: str, label: str, places: Sequence[Float64[np.ndarray, " _"]]
) -> Picture:
    figure, (axis,) = new_figure()
    drawn = _draw_losses(axis, places, runs)
    axis.set_xlabel(label)
    format_ticks(axis.xaxis)
    few = "Strong line: the mean of neighbouring steps; faint line: the steps."
    detail = _detail(runs)
    return _finished(figure, name, title, detail.caption if detail.is_long else few, drawn)


def _draw_losses(axis: Any, places: Sequence[Float64[np.ndarray, " _"]], runs: Sequence[Run]) -> list[int]:
    """Draws losses at these places of the axis; returns which runs are drawn."""
    losses = enumerate(zip(places, runs, strict=True))
    drawn = [k for k, (x, run) in losses if draw_steps(axis, x, run.losses, _detail(runs), k, as_curve=True)]
    axis.set_ylabel(f"loss{loss_unit(runs)}")
    format_ticks(axis.yaxis)
    return drawn


def _evaluations(runs: Sequence[Run], tokens: Sequence[Float64[np.ndarray, " _"]]) -> Picture:
    figure, (axis,) = new_figure()
    kinds = list(dict.fromkeys(name for run in runs for name in run.evaluations))
    marks = dict(zip(kinds, itertools.cycle(_MARKERS)))
    drawn = []
    for place, (run, so_far) in enumerate(zip(runs, tokens, strict=True)):
        for name, (step, loss) in run.evaluations.items():
            before_all = 0.0 * so_far[0] if len(so_far) else 0.0  # NaN where tokens are not known
            x = np.append(before_all, so_far)[np.searchsorted(run.steps["step"], step)]
            x, loss = where_known(x, loss)
            every = math.ceil(len(x) / _MOST_MARKS) or 1
            x, loss = x[::-1][::every][::-1], loss[::-1][::every][::-1]  # the last one in any case
            if len(x):
                drawn.append(place)
                draw_line(axis, x, loss, place, marker=marks[name], markersize=4 if len(x) < 50 else 2)
    axis.set(xlabel="real tokens", ylabel=f"loss{loss_unit(runs)}")
    format_ticks(axis.xaxis, axis.yaxis)
    named = [f"{_MARKERS[mark]}: {kind}" for kind, mark in marks.items()]
    return _finished(figure, "evaluations", "Evaluations", f"Marks: {'; '.join(named)}.", list(dict.fromkeys(drawn)))


def _learning_rates(runs: Sequence[Run]) -> Picture:
    figure, (axis,) = new_figure()
    drawn = _draw_rates(axis, runs)
    finish_steps(axis, "learning rate")
    base_lines, how = "Orange" if len(runs) == 1 else "Lines with a shade", _detail(runs).caption
    caption = f"{base_lines}: the base rate. The rate in force: {how[0].lower()}{how[1:]}"
    return _finished(figure, "learning-rate", "Learning rate", caption, drawn)


def _draw_rates(axis: Any, runs: Sequence[Run]) -> list[int]:
    """Draws base rates as lines, and rates in force; returns which runs are drawn."""
    drawn = []
    for place, run in enumerate(runs):
        steps, detail = run.steps, _detail(runs)
        in_force = draw_steps(axis, steps["step"], steps["learning_rate"], detail, place, label="in force")
        step, base = where_known(steps["step"], steps["base_learning_rate"])
        if len(base):
            shown = np.append(range_starts(len(base)), len(base) - 1)
            colour = COLOURS["second"] if len(runs) == 1 else colour_of(place)
            axis.plot(step[shown], base[shown], color=COLOURS["ink"], linewidth=2.6, alpha=0.25)
            axis.plot(step[shown], base[shown], color=colour, linewidth=1.4, label="base")
        if in_force or len(base):
            drawn.append(place)
    return drawn


def _over_steps(
    runs: Sequence[Run],
    name: str,
    title: str,
    values: dict[str, list[Float64[np.ndarray, " _"]]],
    *,
    weights: Sequence[Float64[np.ndarray, " _"]] | None = None,
    more: str = "",
) -> Picture:
    """A picture of one axis for each label; several steps that are drawn together count by their weights."""
    figure, axes = new_figure(len(values), sharex=True)
    drawn = set()
    for axis, (label, of_runs) in zip(axes, values.items(), strict=True):
        for place, (run, y) in enumerate(zip(runs, of_runs, strict=True)):
            of_run = None if weights is None else weights[place]
            if draw_steps(axis, run.steps["step"], y, _detail(runs), place, of_run):
                drawn.add(place)
        finish_steps(axis, label)
    for axis in axes[:-1]:
        axis.set_xlabel("")
    return _finished(figure, name, title, f"{_detail(runs).caption} {more}".strip(), sorted(drawn))


def _per_bucket(
    name: str, title: str, label: str, of_runs: Sequence[dict[tuple[int, ...], float | None]], caption: str
) -> Picture:
    """Bars side by side, of each run that knows something; buckets by length, then rows."""
    figure, (axis,) = new_figure()
    known = [{shape: value for shape, value in of_run.items() if value is not None} for of_run in of_runs]
    shapes = sorted({shape for of_run in known for shape in of_run}, key=lambda shape: (shape[1:], shape[0]))
    left_out = len(shapes) - _MOST_BARS
    shapes = shapes[:_MOST_BARS]
    drawn = [place for place, of_run in enumerate(known) if of_run]
    for slot, place in enumerate(drawn):
        heights = np.array([known[place].get(shape, np.nan) for shape in shapes])
        draw_bars(axis, heights, colour_of(place), slot=slot, num_slots=len(drawn))
    finish_bars(axis, [f"{rows}×{'+'.join(map(str, lengths))}" for rows, *lengths in shapes], "rows × length")
    axis.set_ylabel(label)
    format_ticks(axis.yaxis)
    if left_out > 0:
        caption += f" {left_out:,} more buckets are not drawn."
    return _finished(figure, name, title, caption, drawn)


def _finished(figure: Any, name: str, title: str, caption: str, drawn: Sequence[int]) -> Picture:
    return Picture(name, title, caption, to_svg(figure) if drawn else "", tuple(drawn))


def _detail(runs: Sequence[Run]) -> Detail:
    return Detail(max(run.num_steps for run in runs), len(runs))
