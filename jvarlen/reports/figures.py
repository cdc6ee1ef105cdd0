"""The style of all figures: Matplotlib, as SVG for pages or as PNG files.

A line's place in a list decides its colour and dashes. Neighbouring steps of a long run are drawn together, so the size
of a figure does not depend on their number. Letters: S steps, K buckets.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int64, Real

__all__ = [
    "COLOURS",
    "DARK",
    "Detail",
    "Look",
    "Picture",
    "colour_of",
    "draw_bars",
    "draw_line",
    "draw_steps",
    "drawing_settings",
    "finish_bars",
    "finish_steps",
    "format_ticks",
    "look_of",
    "new_figure",
    "range_starts",
    "style_of_colours",
    "to_svg",
    "where_known",
]

_PALETTE = {
    "ink": ("#1d232b", "#e7eaef"),
    "muted": ("#5a6573", "#9ea9b6"),
    "line": ("#d6dbe2", "#38404b"),
    "first": ("#2a6ebb", "#74b0f0"),
    "second": ("#c8590a", "#f5a25d"),
    "third": ("#1d8348", "#6fce93"),
    "fourth": ("#8e44ad", "#c9a2f2"),
    "fifth": ("#c2255c", "#f78fb3"),
    "sixth": ("#0b7f8c", "#5fd3dc"),
}
COLOURS = {name: light for name, (light, _) in _PALETTE.items()}  # in which figures are drawn
DARK = {name: dark for name, (_, dark) in _PALETTE.items()}  # what SVG shows where surroundings are dark
_OF_LINES = ("first", "second", "third", "fourth", "fifth", "sixth")
# In points: what is drawn, and what is not, along a line. The second half of the runs looks different from the first.
_DASHES = ((), (5.0, 2.0), (1.0, 1.5), (5.0, 1.5, 1.0, 1.5))

_WIDTH, _HEIGHT = 4.4, 2.7  # inches of 72 points
_MOST_POINTS = 500  # steps that are drawn one by one, of all lines together
_FEW_RANGES = 50  # of steps that are drawn together, where it is several lines, and of a short one
_MOST_RANGES = 300  # where it is one line
_MOST_BANDS = 2  # more of them hide each other
_POINT_SIZE = 3.0
_MOST_LABELS = 16  # of bars side by side
_LEVEL_CHARACTERS = 24  # of all labels, if they are to stand level


class Picture(NamedTuple):
    """A picture of a page."""

    name: str  # of letters and hyphens, unlike that of any other
    title: str
    caption: str
    svg: str  # as from `to_svg`; empty if there is nothing to show
    runs: tuple[int, ...] = ()  # places of the runs that are in it


class Look(NamedTuple):
    """How a line is drawn."""

    colour: str  # a name of `COLOURS`
    dashes: tuple[float, ...]  # points drawn and left out in turn; none for a whole line


class Detail(NamedTuple):
    """How finely steps are drawn: the same for all lines of a figure, which are to be compared."""

    num_steps: int  # of the longest line
    num_lines: int = 1

    @property
    def is_long(self) -> bool:
        """Whether neighbouring steps are drawn together."""
        return self.num_steps > max(_MOST_POINTS // self.num_lines, _FEW_RANGES)

    @property
    def num_ranges(self) -> int:
        """Ranges of neighbouring steps, if they are drawn together."""
        return _MOST_RANGES if self.num_lines == 1 else _FEW_RANGES

    @property
    def has_bands(self) -> bool:
        """Whether the least and the most of each range are drawn."""
        return self.num_lines <= _MOST_BANDS

    @property
    def caption(self) -> str:
        """What `draw_steps` draws, in words."""
        if not self.is_long:
            return "A point a step."
        mean = f"Line: the mean of up to {math.ceil(self.num_steps / self.num_ranges):,} neighbouring steps"
        return f"{mean}; band: their least to most." if self.has_bands else f"{mean}."


@contextlib.contextmanager
def drawing_settings() -> Iterator[None]:
    """A block in which figures are drawn and written in one style, with text as text."""
    import matplotlib as mpl  # here: what prints no page does without matplotlib

    settings: dict[Any, Any] = {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "jvarlen",  # the same picture from the same figures
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 10,
        "axes.labelsize": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": COLOURS["muted"],
        "axes.labelcolor": COLOURS["ink"],
        "xtick.color": COLOURS["muted"],
        "xtick.labelcolor": COLOURS["ink"],
        "ytick.color": COLOURS["muted"],
        "ytick.labelcolor": COLOURS["ink"],
        "text.color": COLOURS["ink"],
        "grid.color": COLOURS["line"],
        "legend.facecolor": "white",
        "legend.edgecolor": "none",
        "legend.fontsize": "small",
        "axes.axisbelow": True,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
    }
    with mpl.rc_context(settings):
        yield


def new_figure(num_axes: int = 1, **options: Any) -> tuple[Any, Any]:
    """A figure as wide as a phone, with axes below each other; `options` are those of `Figure.subplots`."""
    from matplotlib.figure import Figure

    height = _HEIGHT if num_axes == 1 else 0.65 * num_axes * _HEIGHT
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots(num_axes, squeeze=False, **options)[:, 0]


def to_svg(figure: Any) -> str:
    """The figure, drawn with `drawing_settings`, as an SVG file that suits light and dark surroundings."""
    file = io.StringIO()
    # Without the metadata, which hold the date.
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    for name, value in COLOURS.items():
        svg = svg.replace(value, f"var(--{name})")
    style = f"svg{{{style_of_colours(COLOURS)}}}@media (prefers-color-scheme:dark){{svg{{{style_of_colours(DARK)}}}}}"
    return svg.replace(">", f"><style>{style}</style>", 1)


def style_of_colours(colours: Mapping[str, str]) -> str:
    """CSS that declares colours as custom properties: `--ink:#1d232b;--muted:#5a6573`."""
    return ";".join(f"--{name}:{value}" for name, value in colours.items())


def look_of(place: int) -> Look:
    """How the line at a place of the list is drawn; there are as many looks as colours times dashes."""
    dashes, colour = divmod(place, len(_OF_LINES))
    return Look(_OF_LINES[colour], _DASHES[dashes % len(_DASHES)])


def colour_of(place: int) -> str:
    """The colour of the line at a place of the list, for Matplotlib."""
    return COLOURS[look_of(place).colour]


def draw_line(axis: Any, x: np.ndarray, y: np.ndarray, place: int = 0, **options: Any) -> None:
    """A line in the look of its place; `options` are those of `axis.plot`."""
    style: Any = (0, look_of(place).dashes) if look_of(place).dashes else "-"
    axis.plot(x, y, **{"color": colour_of(place), "linestyle": style, "linewidth": 1.6} | options)


def draw_steps(
    axis: Any,
    x: Real[np.ndarray, " S"],
    y: Real[np.ndarray, " S"],
    detail: Detail,
    place: int = 0,
    weights: Float64[np.ndarray, " S"] | None = None,
    *,
    label: str | None = None,
    as_curve: bool = False,
) -> bool:
    """Draws a point a step, or the weighted mean, least and most of ranges of steps; False if all are NaN.

    Few steps of a curve are a faint line, with the mean of neighbours on top.
    """
    x, y, weights = where_known(x, y, np.ones(len(y)) if weights is None else weights)
    if not len(y):
        return False
    if not detail.is_long and not as_curve:
        _draw_points(axis, x, y, place, label)
        return True
    starts = range_starts(len(y), detail.num_ranges if detail.is_long else _FEW_RANGES)
    centres = _means(x, starts, np.ones(len(x)))
    if not detail.is_long:
        axis.plot(x, y, color=colour_of(place), alpha=0.35, linewidth=0.8)
    elif detail.has_bands:
        low, high = np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)
        axis.fill_between(centres, low, high, color=colour_of(place), alpha=0.25, linewidth=0)
    draw_line(axis, centres, _means(y, starts, weights), place, label=label)
    return True


def draw_bars(
    axis: Any,
    heights: Real[np.ndarray, " K"],
    colour: str,
    *,
    bottom: Real[np.ndarray, " K"] | float = 0.0,
    slot: int = 0,
    num_slots: int = 1,
) -> None:
    """One of `num_slots` bars of each bucket, none where a height is NaN."""
    known = np.isfinite(heights)
    width = 0.8 / num_slots
    places = np.arange(len(heights)) + (slot - (num_slots - 1) / 2) * width
    axis.bar(places[known], heights[known], width, np.broadcast_to(bottom, known.shape)[known], color=colour)


def finish_bars(axis: Any, labels: Sequence[str], name: str) -> None:
    """Names the buckets below their bars, not all of them where they are many, and the axis."""
    every = math.ceil(len(labels) / _MOST_LABELS) or 1
    shown = list(labels)[::every]
    is_level = sum(map(len, shown)) <= _LEVEL_CHARACTERS
    axis.set_xticks(range(0, len(labels), every), shown, rotation=0 if is_level else 90)
    middle, room = (len(labels) - 1) / 2, max(len(labels), 4) / 2 + 0.1  # one or two bars shall not fill the picture
    axis.set(xlabel=name, xlim=(middle - room, middle + room))


def finish_steps(axis: Any, label: str, *, integer: bool = False) -> None:
    """Names an axis over steps and sets its ticks; it begins at 0."""
    axis.set(xlabel="step", ylabel=label)
    highest = axis.dataLim.y1
    axis.set_ylim(0, 1.05 * highest if highest > 0 and np.isfinite(highest) else 1)
    format_ticks(axis.xaxis, integer=True)
    format_ticks(axis.yaxis, integer=integer)


def format_ticks(*axes: Any, integer: bool = False) -> None:
    """Readable tick numbers: 20k rather than 20,000.0 or 2e4, and no fractions of samples."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for axis in axes:

        def label(value: float, _: int, axis: Any = axis) -> str:
            is_log = axis.get_scale() == "log"
            return _short_number(value, value if is_log else max(map(abs, axis.get_view_interval())))

        axis.set_major_formatter(FuncFormatter(label))
        axis.set_minor_formatter(NullFormatter())
        if axis.get_scale() == "linear":
            axis.get_major_locator().set_params(integer=integer, min_n_ticks=1)


def range_starts(num_steps: int, most: int = _MOST_POINTS) -> Int64[np.ndarray, " ranges"]:
    """Where ranges of neighbouring steps begin, at most this many and about equally long."""
    return np.linspace(0, num_steps, min(num_steps, most), endpoint=False).astype(np.int64)


def where_known(*values: Real[np.ndarray, " S"]) -> list[Float64[np.ndarray, " n"]]:
    """Where all are known."""
    stacked = np.stack(values).astype(np.float64, copy=False)
    return list(stacked[:, np.isfinite(stacked).all(axis=0)])


def _draw_points(
    axis: Any, x: Float64[np.ndarray, " S"], y: Float64[np.ndarray, " S"], place: int, label: str | None
) -> None:
    """Lines with round ends and hardly any length, which take a tenth of the text of SVG markers."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    length = 1e-10 * (np.ptp(x) or np.abs(x).max() or 1.0)  # PNG shows no lines of length 0
    ends = np.stack([np.stack([x, y], axis=1), np.stack([x + length, y], axis=1)], axis=1).reshape(-1, 2)
    path = Path(ends, np.tile([Path.MOVETO, Path.LINETO], len(x)))
    path.should_simplify = False  # which would leave out such lines, as would snapping to pixels
    look: dict[str, Any] = {"alpha": 0.75, "linewidth": _POINT_SIZE, "capstyle": "round", "snap": False}
    axis.add_artist(PathPatch(path, fill=False, edgecolor=colour_of(place), **look))
    axis.update_datalim(np.stack([x, y], axis=1))
    axis.plot([], [], ".", color=colour_of(place), alpha=0.75, label=label)  # for a legend
    axis.autoscale_view()


def _means(
    values: Float64[np.ndarray, " S"], starts: np.ndarray, weights: Float64[np.ndarray, " S"]
) -> Float64[np.ndarray, " ranges"]:
    """Of each range; NaN where all weights are 0."""
    of_range = np.add.reduceat(weights, starts)
    return np.add.reduceat(values * weights, starts) / np.where(of_range > 0, of_range, np.nan)


def _short_number(value: float, largest: float) -> str:
    """In thousands, millions and so on, by the largest number next to it."""
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value and largest >= max(size, 1e4):
            return f"{value / size:g}{suffix}"
    return f"{value:g}"
