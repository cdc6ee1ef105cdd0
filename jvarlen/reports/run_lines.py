"""Draws the steps of runs as points or ranges, each run in its own style.

Neighbouring steps of a long run are drawn together, so the size of a picture does not depend on their number. Letters:
S steps of one run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from jvarlen.reports.run_records import Run
from jvarlen.reports.svg_figures import COLOURS, count_ticks

__all__ = [
    "MOST_POINTS",
    "Look",
    "colour_of",
    "draw_curve",
    "draw_line",
    "draw_steps",
    "finish_steps",
    "how_drawn",
    "is_long",
    "look_of",
    "range_starts",
    "where_known",
]

MOST_POINTS = 500  # steps that are drawn one by one, of all runs together
_FEW_RANGES = 50  # of steps that are drawn together, where it is several runs, and of a short one
_MOST_RANGES = 300  # where it is one run
_MOST_BANDS = 2  # more of them hide each other
_POINT_SIZE = 3.0
_COLOUR_NAMES = ("first", "second", "third", "fourth", "fifth", "sixth")
# In points: what is drawn, and what is not, along a line. The second half of the runs looks different from the first.
_DASHES = ((), (5.0, 2.0), (1.0, 1.5), (5.0, 1.5, 1.0, 1.5))


class Look(NamedTuple):
    """How a run is drawn.

    Attributes:
      colour: a name of `COLOURS`.
      dashes: points drawn and left out in turn; none for a whole line.
    """

    colour: str
    dashes: tuple[float, ...]


def look_of(place: int) -> Look:
    """How the run at a place of the list is drawn; there are as many looks as colours times dashes.

    Example:
      >>> look_of(0), look_of(7)
      (Look(colour='first', dashes=()), Look(colour='second', dashes=(5.0, 2.0)))
    """
    dashes, colour = divmod(place, len(_COLOUR_NAMES))
    return Look(_COLOUR_NAMES[colour], _DASHES[dashes % len(_DASHES)])


def colour_of(place: int) -> str:
    """The colour of the run at a place of the list, for Matplotlib."""
    return COLOURS[look_of(place).colour]


def draw_steps(
    axis: Any,
    x: Float64[np.ndarray, " S"],
    y: Float64[np.ndarray, " S"],
    place: int,
    runs: Sequence[Run],
    weights: Float64[np.ndarray, " S"] | None = None,
) -> bool:
    """Draws one point a step if steps are few, otherwise ranges; returns whether there was anything to draw."""
    if weights is None:
        weights = np.ones(len(y))
    x, y, weights = where_known(x, y, weights)
    if not len(y):
        return False
    if is_long(runs):
        _draw_ranges(axis, x, y, place, runs, weights)
    else:
        _draw_points(axis, x, y, place)
    return True


def draw_curve(
    axis: Any, x: Float64[np.ndarray, " S"], y: Float64[np.ndarray, " S"], place: int, runs: Sequence[Run]
) -> None:
    """Draws ranges if runs are long; otherwise the steps as a faint line, with the mean of neighbours on top."""
    if is_long(runs):
        _draw_ranges(axis, x, y, place, runs)
        return
    axis.plot(x, y, color=colour_of(place), alpha=0.35, linewidth=0.8)
    starts = range_starts(len(y), _FEW_RANGES)
    draw_line(axis, _means(x, starts), _means(y, starts), place)


def _draw_ranges(
    axis: Any,
    x: Float64[np.ndarray, " S"],
    y: Float64[np.ndarray, " S"],
    place: int,
    runs: Sequence[Run],
    weights: Float64[np.ndarray, " S"] | None = None,
) -> None:
    """The mean of neighbouring steps and, where runs are few, their least and their most."""
    starts = range_starts(len(y), _most_ranges(runs))
    centres = _means(x, starts)
    if len(runs) <= _MOST_BANDS:
        low, high = np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)
        axis.fill_between(centres, low, high, color=colour_of(place), alpha=0.25, linewidth=0)
    draw_line(axis, centres, _means(y, starts, weights), place)


def _draw_points(axis: Any, x: Float64[np.ndarray, " S"], y: Float64[np.ndarray, " S"], place: int) -> None:
    """Zero-length lines with round ends, which take a tenth of the text of SVG markers."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    twice = np.repeat(np.stack([x, y], axis=1), 2, axis=0)
    path = Path(twice, np.tile([Path.MOVETO, Path.LINETO], len(x)))
    path.should_simplify = False  # which would leave out what has no length
    axis.add_patch(
        PathPatch(path, fill=False, edgecolor=colour_of(place), alpha=0.75, linewidth=_POINT_SIZE, capstyle="round")
    )
    axis.autoscale_view()


def draw_line(axis: Any, x: np.ndarray, y: np.ndarray, place: int, **options: Any) -> None:
    """A line in the look of a run; `options` are those of `axis.plot`."""
    style: Any = (0, look_of(place).dashes) if look_of(place).dashes else "-"
    axis.plot(x, y, color=colour_of(place), linestyle=style, linewidth=1.6, **options)


def finish_steps(axis: Any, label: str) -> None:
    """Names an axis over steps and sets its ticks; it begins at 0."""
    axis.set(xlabel="step", ylabel=label)
    highest = axis.dataLim.y1
    axis.set_ylim(0, 1.05 * highest if highest > 0 and np.isfinite(highest) else 1)
    count_ticks(axis.xaxis)
    count_ticks(axis.yaxis, integer=False)


def how_drawn(runs: Sequence[Run]) -> str:
    """A caption for what `draw_steps` draws."""
    if not is_long(runs):
        return "A point a step."
    together = math.ceil(max(run.num_steps for run in runs) / _most_ranges(runs))
    mean = f"Line: the mean of up to {together:,} neighbouring steps"
    return f"{mean}; band: their least to most." if len(runs) <= _MOST_BANDS else f"{mean}."


def is_long(runs: Sequence[Run]) -> bool:
    """Whether steps are drawn together: of all runs, which are to be compared."""
    return max(run.num_steps for run in runs) > max(MOST_POINTS // len(runs), _FEW_RANGES)


def range_starts(num_steps: int, most: int) -> Int64[np.ndarray, " ranges"]:
    """Where ranges of neighbouring steps begin, about equally long, at most so many."""
    return np.linspace(0, num_steps, min(num_steps, most), endpoint=False).astype(np.int64)


def _means(
    values: Float64[np.ndarray, " S"], starts: np.ndarray, weights: Float64[np.ndarray, " S"] | None = None
) -> np.ndarray:
    """float64[ranges], NaN where all weights of a range are 0."""
    if weights is None:
        weights = np.ones(len(values))
    of_range = np.add.reduceat(weights, starts)
    return np.add.reduceat(values * weights, starts) / np.where(of_range > 0, of_range, np.nan)


def where_known(*values: Float64[np.ndarray, " S"]) -> list[Float64[np.ndarray, " n"]]:
    """Where all are known."""
    is_known = np.isfinite(np.stack(values)).all(axis=0)
    return [each[is_known] for each in values]


def _most_ranges(runs: Sequence[Run]) -> int:
    return _MOST_RANGES if len(runs) == 1 else _FEW_RANGES
