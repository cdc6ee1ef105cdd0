"""Figures of one or several runs, overlaid.

`run_lines` decides how a run is drawn. Letters: S steps of one run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from jvarlen.reports.run_lines import (
    MOST_POINTS,
    colour_of,
    draw_curve,
    draw_line,
    draw_steps,
    finish_steps,
    how_drawn,
    is_long,
    look_of,
    range_starts,
    where_known,
)
from jvarlen.reports.run_records import BucketUse, Run, bucket_uses
from jvarlen.reports.svg_figures import COLOURS, count_ticks, drawing_settings, new_figure, to_svg

__all__ = ["RunFigure", "draw_runs", "runs_legend"]

_MARKERS = "osD^v*PXph<>"  # of kinds of evaluations
_MOST_BUCKETS = 96
_MOST_LABELS = 16
_SHAPES = {"bucket length": "bucket_length", "rows": "bucket_rows"}  # fields by what they are called
_BITS = 1 / math.log(2)  # a nat


class RunFigure(NamedTuple):
    """A picture.

    Attributes:
      name: of letters and hyphens, unlike that of any other.
      title: what it shows.
      caption: how to read it.
      svg: an `<svg>` element without namespaces, for an HTML page; empty if no run has the data for it.
      runs: indices of the runs that are in it.
    """

    name: str
    title: str
    caption: str
    svg: str
    runs: tuple[int, ...]


def runs_legend(names: Sequence[str], places: Sequence[int], text: Callable[[str], str]) -> str:
    """HTML that names the lines of runs.

    Args:
      names: of all runs, plain text.
      places: the runs to name.
      text: makes HTML of plain text.
    """
    entries = []
    for place in places:
        look = look_of(place)
        dashes = " ".join(f"{2 * each:g}" for each in look.dashes)
        entries.append(
            f'<li><svg viewBox="0 0 28 10" aria-hidden="true"><path d="M0 5H28" stroke="var(--{look.colour})" '
            f'stroke-width="3" stroke-dasharray="{dashes or "none"}"/></svg><span>{text(names[place])}</span></li>'
        )
    return f'<ul class="legend">{"".join(entries)}</ul>\n'


def draw_runs(runs: Sequence[Run]) -> list[RunFigure]:
    """Draws the pictures of runs, all runs in the same pictures.

    Args:
      runs: at least one.

    Returns:
      A list of `RunFigure`.
    """
    with drawing_settings():
        return [*_of_training(runs), *_of_steps(runs), *_of_buckets(runs), *_of_memory(runs)]


def _of_training(runs: Sequence[Run]) -> Iterator[RunFigure]:
    tokens = [run.tokens_so_far for run in runs]
    yield _loss(runs, "loss-tokens", "Loss against real tokens", "real tokens", tokens)
    yield _loss(runs, "loss-time", "Loss against time", "seconds of training", [run.steps["time_s"] for run in runs])
    if any(run.evaluations for run in runs):
        yield _evaluations(runs, tokens)
    yield _learning_rates(runs)


def _of_steps(runs: Sequence[Run]) -> Iterator[RunFigure]:
    seconds = [run.seconds for run in runs]
    yield _over_steps(
        runs,
        "shapes",
        "Shapes over the steps",
        {field: [run.steps[name] for run in runs] for field, name in _SHAPES.items()},
    )
    yield _over_steps(
        runs, "sequences", "Samples of each step", {"samples": [run.steps["num_sequences"] for run in runs]}
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        padding = [100 * (1 - run.steps["num_tokens"] / run.steps["num_positions"]) for run in runs]
        throughput = [run.steps["num_tokens"] / time for run, time in zip(runs, seconds, strict=True)]
        waits = [100 * run.steps["data_wait_s"] / run.steps["step_s"] for run in runs]
    yield _over_steps(
        runs,
        "throughput",
        "Throughput",
        {"real tokens a second": throughput},
        weights=seconds,
        more="By the time from one step to the next.",
    )
    yield _over_steps(
        runs,
        "data-wait",
        "Waiting for data",
        {"wait in % of the step": waits},
        weights=[run.steps["step_s"] for run in runs],
    )
    yield _over_steps(
        runs,
        "step-padding",
        "Padding over the steps",
        {"padding in %": padding},
        weights=[run.steps["num_positions"] for run in runs],
    )


def _of_buckets(runs: Sequence[Run]) -> Iterator[RunFigure]:
    uses = [bucket_uses(run) for run in runs]
    yield _per_bucket(
        "bucket-padding",
        "Padding of each bucket",
        "padding in %",
        [{use.shape: None if use.padding is None else 100 * use.padding for use in of_run} for of_run in uses],
        "Share of the positions of the steps so far that held no token.",
    )
    yield _per_bucket(
        "bucket-time",
        "Time in each bucket",
        "seconds",
        [{use.shape: use.seconds for use in of_run} for of_run in uses],
        "All steps so far.",
    )
    yield _per_bucket(
        "bucket-compile",
        "Compiling each bucket",
        "seconds",
        [{use.shape: _compile_s(use) for use in of_run} for of_run in uses],
        "Lowering, and compiling or reading what was compiled before; known at the end of a run.",
    )


def _of_memory(runs: Sequence[Run]) -> Iterator[RunFigure]:
    memory = {
        label: [run.steps[name] / 1e6 for run in runs]
        for label, name in (("host, MB", "host_memory_bytes"), ("device, MB", "device_memory_bytes"))
        if any(np.isfinite(run.steps[name]).any() for run in runs)
    }
    if memory:
        yield _over_steps(runs, "memory", "Memory over the steps", memory, more="MB: 10⁶ bytes.")


def _loss(
    runs: Sequence[Run], name: str, title: str, label: str, places: Sequence[Float64[np.ndarray, " _"]]
) -> RunFigure:
    figure, (axis,) = new_figure()
    drawn = []
    for place, (run, x) in enumerate(zip(runs, places, strict=True)):
        y = run.steps["loss"] * _BITS
        is_known = np.isfinite(x) & np.isfinite(y)
        x, y = x[is_known], y[is_known]
        if not len(y):
            continue
        drawn.append(place)
        draw_curve(axis, x, y, place, runs)
    axis.set(xlabel=label, ylabel="loss, bits a token")
    count_ticks(axis.xaxis, integer=False)
    count_ticks(axis.yaxis, integer=False)
    caption = (
        how_drawn(runs) if is_long(runs) else "Strong line: the mean of neighbouring steps; faint line: the steps."
    )
    return _finished(figure, name, title, caption, drawn)


def _evaluations(runs: Sequence[Run], tokens: Sequence[Float64[np.ndarray, " _"]]) -> RunFigure:
    figure, (axis,) = new_figure()
    kinds = list(dict.fromkeys(name for run in runs for name in run.evaluations))
    drawn = []
    for place, (run, so_far) in enumerate(zip(runs, tokens, strict=True)):
        for name, (step, bits) in run.evaluations.items():
            before_all = 0.0 * so_far[0] if len(so_far) else 0.0  # NaN where tokens are not known
            x = np.append(before_all, so_far)[np.searchsorted(run.steps["step"], step)]
            is_known = np.flatnonzero(np.isfinite(x) & np.isfinite(bits))
            every = math.ceil(len(is_known) / MOST_POINTS) or 1
            shown = is_known[::-1][::every][::-1]  # the last one in any case
            if len(shown):
                drawn.append(place)
                marker = _MARKERS[kinds.index(name) % len(_MARKERS)]
                draw_line(axis, x[shown], bits[shown], place, marker=marker, markersize=4 if len(shown) < 50 else 2)
    axis.set(xlabel="real tokens", ylabel="bits a token")
    count_ticks(axis.xaxis, integer=False)
    count_ticks(axis.yaxis, integer=False)
    markers = {"o": "circles", "s": "squares", "D": "diamonds", "^": "triangles", "v": "triangles down", "*": "stars"}
    named = [f"{markers.get(mark, f'mark {mark}')}: {kind}" for kind, mark in zip(kinds, _MARKERS, strict=False)]
    return _finished(figure, "evaluations", "Evaluations", f"Marks: {'; '.join(named)}.", list(dict.fromkeys(drawn)))


def _learning_rates(runs: Sequence[Run]) -> RunFigure:
    figure, (axis,) = new_figure()
    drawn = []
    for place, run in enumerate(runs):
        in_force = draw_steps(axis, run.steps["step"], run.steps["learning_rate"], place, runs)
        step, base = where_known(run.steps["step"], run.steps["base_learning_rate"])
        if len(base):
            shown = np.append(range_starts(len(base), MOST_POINTS), len(base) - 1)
            colour = COLOURS["second"] if len(runs) == 1 else colour_of(place)
            axis.plot(step[shown], base[shown], color=COLOURS["ink"], linewidth=2.6, alpha=0.25)
            axis.plot(step[shown], base[shown], color=colour, linewidth=1.4)
        if in_force or len(base):
            drawn.append(place)
    finish_steps(axis, "learning rate")
    base_lines, how = "Orange" if len(runs) == 1 else "Lines with a shade", how_drawn(runs)
    caption = f"{base_lines}: the base rate. The rate in force: {how[0].lower()}{how[1:]}"
    return _finished(figure, "learning-rate", "Learning rate", caption, drawn)


def _over_steps(
    runs: Sequence[Run],
    name: str,
    title: str,
    values: dict[str, list[Float64[np.ndarray, " _"]]],
    *,
    weights: Sequence[Float64[np.ndarray, " _"]] | None = None,
    more: str = "",
) -> RunFigure:
    """A picture of one axis for each label; several steps that are drawn together count by their weights."""
    figure, axes = new_figure(len(values), sharex=True)
    drawn = set()
    for axis, (label, of_runs) in zip(axes, values.items(), strict=True):
        for place, (run, y) in enumerate(zip(runs, of_runs, strict=True)):
            if draw_steps(axis, run.steps["step"], y, place, runs, None if weights is None else weights[place]):
                drawn.add(place)
        finish_steps(axis, label)
    for axis in axes[:-1]:
        axis.set_xlabel("")
    return _finished(figure, name, title, f"{how_drawn(runs)} {more}".strip(), sorted(drawn))


def _per_bucket(
    name: str,
    title: str,
    label: str,
    of_runs: Sequence[dict[tuple[int, ...], float | None]],
    caption: str,
) -> RunFigure:
    """Bars side by side, of each run that knows something; buckets by length, then rows."""
    figure, (axis,) = new_figure()
    known = [{shape: value for shape, value in of_run.items() if value is not None} for of_run in of_runs]
    shapes = sorted({shape for of_run in known for shape in of_run}, key=lambda shape: (shape[1:], shape[0]))
    left_out = len(shapes) - _MOST_BUCKETS
    shapes = shapes[:_MOST_BUCKETS]
    drawn = [place for place, of_run in enumerate(known) if of_run]
    width = 0.8 / max(len(drawn), 1)
    for slot, place in enumerate(drawn):
        heights = [known[place].get(shape, 0.0) for shape in shapes]
        offsets = np.arange(len(shapes)) + (slot - (len(drawn) - 1) / 2) * width
        axis.bar(offsets, heights, width, color=colour_of(place), alpha=0.75)
    shown = np.arange(0, len(shapes), math.ceil(len(shapes) / _MOST_LABELS) or 1)
    labels = [f"{shapes[k][0]}×{'+'.join(map(str, shapes[k][1:]))}" for k in shown]
    axis.set_xticks(shown, labels, rotation=90 if len(shown) > 4 else 0)
    room = max(len(shapes), 4) / 2 + 0.1  # one or two bars shall not fill the picture
    axis.set(xlabel="rows × length", ylabel=label, xlim=((len(shapes) - 1) / 2 - room, (len(shapes) - 1) / 2 + room))
    count_ticks(axis.yaxis, integer=False)
    if left_out > 0:
        caption += f" {left_out:,} more buckets are not drawn."
    return _finished(figure, name, title, caption, drawn)


def _finished(figure: Any, name: str, title: str, caption: str, drawn: Sequence[int]) -> RunFigure:
    return RunFigure(name, title, caption, to_svg(figure, name) if drawn else "", tuple(drawn))


def _compile_s(use: BucketUse) -> float | None:
    return None if use.row is None else use.row.lower_s + use.row.compile_s
