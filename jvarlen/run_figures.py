"""Figures of runs: in go records of one or several runs, out come pictures in which they lie over each other.

A long run is drawn by neighbouring steps taken together, so that the size of a picture does not depend on their number.
Letters: S steps of one run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from jvarlen.run_records import BucketUse, Run, bucket_uses
from jvarlen.svg_figures import COLOURS, count_ticks, drawing_settings, new_figure, to_svg

__all__ = ["Look", "RunFigure", "draw_runs", "look_of", "runs_legend"]

_COLOUR_NAMES = ("first", "second", "third", "fourth", "fifth", "sixth")
# In points: what is drawn, and what is not, along a line. The second half of the runs looks different from the first.
_DASHES = ((), (5.0, 2.0), (1.0, 1.5), (5.0, 1.5, 1.0, 1.5))
_MARKERS = "osD^v*PXph<>"  # of kinds of evaluations
_MOST_POINTS = 500  # steps that are drawn one by one, of all runs together
_MOST_RANGES = 300  # of steps that are drawn together, where it is one run
_POINT_SIZE = 3.0
_MOST_BANDS = 2  # more of them hide each other
_FEW_RANGES = 50  # where it is several, and of a short run
_MOST_BUCKETS = 96
_MOST_LABELS = 16
_BITS = 1 / math.log(2)  # a nat


class Look(NamedTuple):
    """How a run is drawn.

    Attributes:
      colour: a name of `COLOURS`.
      dashes: points drawn and left out in turn; none for a whole line.
    """

    colour: str
    dashes: tuple[float, ...]


class RunFigure(NamedTuple):
    """A picture.

    Attributes:
      name: of letters and hyphens, unlike that of any other.
      title: what it shows.
      caption: how to read it.
      svg: an `<svg>` element without namespaces, to stand in an HTML page; empty where no run knows what it would show.
      runs: places of the runs that are in it.
    """

    name: str
    title: str
    caption: str
    svg: str
    runs: tuple[int, ...]


def look_of(place: int) -> Look:
    """How the run at a place of the list is drawn; as many look different as there are colours times dashes.

    Example:
      >>> look_of(0), look_of(7)
      (Look(colour='first', dashes=()), Look(colour='second', dashes=(5.0, 2.0)))
    """
    dashes, colour = divmod(place, len(_COLOUR_NAMES))
    return Look(_COLOUR_NAMES[colour], _DASHES[dashes % len(_DASHES)])


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
    """Draws what there is to see of runs, all in the same pictures.

    Args:
      runs: at least one.

    Returns:
      A list of `RunFigure`.
    """
    with drawing_settings():
        return list(_figures(runs))


def _figures(runs: Sequence[Run]) -> Iterator[RunFigure]:
    tokens, seconds = [run.tokens_so_far for run in runs], [run.seconds for run in runs]
    yield _loss(runs, "loss-tokens", "Loss against real tokens", "real tokens", tokens)
    yield _loss(runs, "loss-time", "Loss against time", "seconds of training", [run.steps["time_s"] for run in runs])
    if any(run.evaluations for run in runs):
        yield _evaluations(runs, tokens)
    yield _learning_rates(runs)
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
    memory = {
        label: [run.steps[name] / 1e6 for run in runs]
        for label, name in (("host, MB", "host_memory_bytes"), ("device, MB", "device_memory_bytes"))
        if any(np.isfinite(run.steps[name]).any() for run in runs)
    }
    if memory:
        yield _over_steps(runs, "memory", "Memory over the steps", memory, more="MB: 10⁶ bytes.")


_SHAPES = {"bucket length": "bucket_length", "rows": "bucket_rows"}


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
        if _is_long(runs):
            _draw_ranges(axis, x, y, place, runs)
        else:
            axis.plot(x, y, color=_colour(place), alpha=0.35, linewidth=0.8)
            starts = _starts(len(y), _FEW_RANGES)
            _line(axis, _means(x, starts), _means(y, starts), place)
    axis.set(xlabel=label, ylabel="loss, bits a token")
    count_ticks(axis.xaxis, integer=False)
    count_ticks(axis.yaxis, integer=False)
    caption = (
        _how_drawn(runs) if _is_long(runs) else "Strong line: the mean of neighbouring steps; faint line: the steps."
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
            every = math.ceil(len(is_known) / _MOST_POINTS) or 1
            shown = is_known[::-1][::every][::-1]  # the last one in any case
            if len(shown):
                drawn.append(place)
                marker = _MARKERS[kinds.index(name) % len(_MARKERS)]
                _line(axis, x[shown], bits[shown], place, marker=marker, markersize=4 if len(shown) < 50 else 2)
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
        in_force = _draw_steps(axis, run.steps["step"], run.steps["learning_rate"], place, runs)
        step, base = _known(run.steps["step"], run.steps["base_learning_rate"])
        if len(base):
            shown = np.append(_starts(len(base), _MOST_POINTS), len(base) - 1)
            colour = COLOURS["second"] if len(runs) == 1 else _colour(place)
            axis.plot(step[shown], base[shown], color=COLOURS["ink"], linewidth=2.6, alpha=0.25)
            axis.plot(step[shown], base[shown], color=colour, linewidth=1.4)
        if in_force or len(base):
            drawn.append(place)
    _finish_steps(axis, "learning rate")
    base_lines, how = "Orange" if len(runs) == 1 else "Lines with a shade", _how_drawn(runs)
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
            if _draw_steps(axis, run.steps["step"], y, place, runs, None if weights is None else weights[place]):
                drawn.add(place)
        _finish_steps(axis, label)
    for axis in axes[:-1]:
        axis.set_xlabel("")
    return _finished(figure, name, title, f"{_how_drawn(runs)} {more}".strip(), sorted(drawn))


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
        axis.bar(offsets, heights, width, color=_colour(place), alpha=0.75)
    shown = np.arange(0, len(shapes), math.ceil(len(shapes) / _MOST_LABELS) or 1)
    labels = [f"{shapes[k][0]}×{'+'.join(map(str, shapes[k][1:]))}" for k in shown]
    axis.set_xticks(shown, labels, rotation=90 if len(shown) > 4 else 0)
    room = max(len(shapes), 4) / 2 + 0.1  # one or two bars shall not fill the picture
    axis.set(xlabel="rows × length", ylabel=label, xlim=((len(shapes) - 1) / 2 - room, (len(shapes) - 1) / 2 + room))
    count_ticks(axis.yaxis, integer=False)
    if left_out > 0:
        caption += f" {left_out:,} more buckets are not drawn."
    return _finished(figure, name, title, caption, drawn)


def _draw_steps(
    axis: Any,
    x: Float64[np.ndarray, " S"],
    y: Float64[np.ndarray, " S"],
    place: int,
    runs: Sequence[Run],
    weights: Float64[np.ndarray, " S"] | None = None,
) -> bool:
    """A point a step where they are few, else ranges; whether there was anything to draw."""
    if weights is None:
        weights = np.ones(len(y))
    x, y, weights = _known(x, y, weights)
    if not len(y):
        return False
    if _is_long(runs):
        _draw_ranges(axis, x, y, place, runs, weights)
    else:
        _draw_points(axis, x, y, place)
    return True


def _draw_ranges(
    axis: Any,
    x: Float64[np.ndarray, " S"],
    y: Float64[np.ndarray, " S"],
    place: int,
    runs: Sequence[Run],
    weights: Float64[np.ndarray, " S"] | None = None,
) -> None:
    """The mean of neighbouring steps and, where runs are few, their least and their most."""
    starts = _starts(len(y), _most_ranges(runs))
    centres = _means(x, starts)
    if len(runs) <= _MOST_BANDS:
        low, high = np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)
        axis.fill_between(centres, low, high, color=_colour(place), alpha=0.25, linewidth=0)
    _line(axis, centres, _means(y, starts, weights), place)


def _means(
    values: Float64[np.ndarray, " S"], starts: np.ndarray, weights: Float64[np.ndarray, " S"] | None = None
) -> np.ndarray:
    """float64[ranges], NaN where all weights of a range are 0."""
    if weights is None:
        weights = np.ones(len(values))
    of_range = np.add.reduceat(weights, starts)
    return np.add.reduceat(values * weights, starts) / np.where(of_range > 0, of_range, np.nan)


def _draw_points(axis: Any, x: Float64[np.ndarray, " S"], y: Float64[np.ndarray, " S"], place: int) -> None:
    """Lines of no length with round ends: a tenth of the text that as many markers are in SVG."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    twice = np.repeat(np.stack([x, y], axis=1), 2, axis=0)
    path = Path(twice, np.tile([Path.MOVETO, Path.LINETO], len(x)))
    path.should_simplify = False  # which would leave out what has no length
    axis.add_patch(
        PathPatch(path, fill=False, edgecolor=_colour(place), alpha=0.75, linewidth=_POINT_SIZE, capstyle="round")
    )
    axis.autoscale_view()


def _line(axis: Any, x: np.ndarray, y: np.ndarray, place: int, **options: Any) -> None:
    style: Any = (0, look_of(place).dashes) if look_of(place).dashes else "-"
    axis.plot(x, y, color=_colour(place), linestyle=style, linewidth=1.6, **options)


def _known(*values: Float64[np.ndarray, " S"]) -> list[Float64[np.ndarray, " n"]]:
    """Where all are known."""
    is_known = np.isfinite(np.stack(values)).all(axis=0)
    return [each[is_known] for each in values]


def _starts(num_steps: int, most: int) -> np.ndarray:
    return np.linspace(0, num_steps, min(num_steps, most), endpoint=False).astype(np.int64)


def _is_long(runs: Sequence[Run]) -> bool:
    """Whether steps are drawn together: of all runs, which are to be compared."""
    return max(run.num_steps for run in runs) > max(_MOST_POINTS // len(runs), _FEW_RANGES)


def _most_ranges(runs: Sequence[Run]) -> int:
    return _MOST_RANGES if len(runs) == 1 else _FEW_RANGES


def _finish_steps(axis: Any, label: str) -> None:
    axis.set(xlabel="step", ylabel=label)
    highest = axis.dataLim.y1
    axis.set_ylim(0, 1.05 * highest if highest > 0 and np.isfinite(highest) else 1)
    count_ticks(axis.xaxis)
    count_ticks(axis.yaxis, integer=False)


def _how_drawn(runs: Sequence[Run]) -> str:
    if not _is_long(runs):
        return "A point a step."
    together = math.ceil(max(run.num_steps for run in runs) / _most_ranges(runs))
    mean = f"Line: the mean of up to {together:,} neighbouring steps"
    return f"{mean}; band: their least to most." if len(runs) <= _MOST_BANDS else f"{mean}."


def _finished(figure: Any, name: str, title: str, caption: str, drawn: Sequence[int]) -> RunFigure:
    return RunFigure(name, title, caption, to_svg(figure, name) if drawn else "", tuple(drawn))


def _colour(place: int) -> str:
    return COLOURS[look_of(place).colour]


def _compile_s(use: BucketUse) -> float | None:
    return None if use.row is None else use.row.lower_s + use.row.compile_s
