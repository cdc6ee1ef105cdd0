"""The style of all figures: Matplotlib, as SVG for pages or as PNG files.

A line's place in a list decides its colour and dashes. Letters: K buckets, n points.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Real

__all__ = [
    "COLOURS",
    "DARK",
    "Picture",
    "bars_picture",
    "colour_of",
    "draw_series",
    "drawing_settings",
    "format_ticks",
    "look_of",
    "new_figure",
    "scale_by_ratio",
    "series_picture",
    "style_of_colours",
    "to_svg",
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
# In points: what is drawn, and what is not, along a line. From the seventh run on, lines are dashed.
_DASHES = ((), (5.0, 2.0), (1.0, 1.5), (5.0, 1.5, 1.0, 1.5))

_WIDTH, _HEIGHT = 4.4, 2.7  # inches of 72 points
_MOST_POINTS = 500  # steps that are drawn one by one, of all lines together
_FEW_RANGES = 50  # of steps that are drawn together, where it is several lines, and of a short one
_MOST_RANGES = 300  # where it is one line
_MOST_LABELS = 16  # of bars side by side
_LEVEL_CHARACTERS = 24  # of all labels, if they are to stand level
_FEWEST_VALUES = 10  # of which some may be outliers: a hundredth, or one
_MOST_OUTLIERS = 0.01
_MOST_MARKS = 50
_OUTLIER_SPANS = 3.0  # beyond the middle nine tenths of the values, in units of their range
_NARROW = 6.0  # highest over lowest, up to which an axis has no decades to mark
_WIDE = 200.0  # from which on it marks nothing else


class Picture(NamedTuple):
    """A picture of a page."""

    name: str  # of letters and hyphens, unlike that of any other
    title: str
    caption: str
    svg: str  # as from `to_svg`


@contextlib.contextmanager
def drawing_settings() -> Iterator[None]:
    """A block in which figures are drawn and written in one style, with text as text."""
    import matplotlib as mpl  # here: what prints no page does without matplotlib

    settings: dict[Any, Any] = {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "jvarlen",  # the same picture from the same figures
        "text.parse_math": False,  # names may have dollars
        "path.simplify": False,  # which leaves out lines as short as points
        "font.sans-serif": ["DejaVu Sans"],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": COLOURS["muted"],
        "axes.labelcolor": COLOURS["ink"],
        "xtick.color": COLOURS["muted"],
        "xtick.labelcolor": COLOURS["ink"],
        "ytick.color": COLOURS["muted"],
        "ytick.labelcolor": COLOURS["ink"],
        "text.color": COLOURS["ink"],
        "legend.frameon": False,
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


def look_of(place: int) -> tuple[str, tuple[float, ...]]:
    """The name of the colour, and the dashes, of the line at a place of a list; they differ for 24 places."""
    dashes, colour = divmod(place, len(_OF_LINES))
    return _OF_LINES[colour], _DASHES[dashes % len(_DASHES)]


def colour_of(place: int) -> str:
    """The colour of the line at a place of the list, for Matplotlib."""
    return COLOURS[look_of(place)[0]]


def draw_series(
    axis: Any,
    label: str,
    lines: Sequence[tuple[Real[np.ndarray, " _"], Real[np.ndarray, " _"]]],
    *,
    weights: Sequence[np.ndarray] | None = None,
    as_curve: bool = False,
    is_log: bool = False,
) -> str:
    """Draws x and y of each run, of many steps the mean, least and most of ranges; returns what is drawn, in words.

    The axis leaves out a few values far beyond the others, which are marked at its end.
    """
    num_steps = max(len(x) for x, _ in lines)
    is_long = num_steps > max(_MOST_POINTS // len(lines), _FEW_RANGES)
    num_ranges = _MOST_RANGES if len(lines) == 1 and is_long else _FEW_RANGES
    for place, (x, y) in enumerate(lines):
        known = np.stack([x, y, np.ones(len(y)) if weights is None else weights[place]]).astype(np.float64)
        x, y, weight = known[:, np.isfinite(known).all(axis=0)]
        if not len(y):
            continue
        colour = colour_of(place)
        if not is_long and not as_curve:
            _draw_points(axis, x, y, colour)
            continue
        starts = np.linspace(0, len(y), min(len(y), num_ranges), endpoint=False).astype(np.int64)
        means = [np.add.reduceat(each * weight, starts) / np.add.reduceat(weight, starts) for each in (x, y)]
        if not is_long:
            axis.plot(x, y, color=colour, alpha=0.35, linewidth=0.8)
        elif len(lines) == 1:
            low, high = np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)
            axis.fill_between(means[0], low, high, color=colour, alpha=0.25, linewidth=0)
        style: Any = (0, look_of(place)[1] or None)
        marker = "." if len(y) < _FEW_RANGES else ""
        axis.plot(*means, color=colour, linewidth=1.6, linestyle=style, marker=marker, markersize=5)
    axis.set_ylabel(label)
    if is_log:
        scale_by_ratio(axis, "y")
    else:
        if not as_curve:
            axis.set_ylim(0, 1.05 * axis.dataLim.y1 if 0 < axis.dataLim.y1 < np.inf else 1)
        _leave_out_outliers(axis, lines)
    if not as_curve:
        axis.xaxis.get_major_locator().set_params(integer=True)
    format_ticks(axis.xaxis, axis.yaxis)
    if not is_long:
        return "Strong line: the mean of neighbours; faint line: each of them." if as_curve else "A point a step."
    mean = f"Line: the mean of up to {math.ceil(num_steps / num_ranges):,} neighbouring steps"
    return f"{mean}; band: their least to most." if len(lines) == 1 else f"{mean}."


def _leave_out_outliers(axis: Any, lines: Sequence[tuple[Real[np.ndarray, " _"], Real[np.ndarray, " _"]]]) -> None:
    """Ends the axis before a few values that would flatten the others, and marks where they are."""
    values = np.concatenate([y[np.isfinite(x) & np.isfinite(y)] for x, y in lines])
    if len(values) < _FEWEST_VALUES:
        return
    low, high = np.quantile(values, [0.05, 0.95])
    reach = _OUTLIER_SPANS * (high - low)
    is_beyond = (values > high + reach) | (values < low - reach)
    if not 0 < is_beyond.sum() <= max(1, _MOST_OUTLIERS * len(values)) or not reach:
        return
    kept = values[~is_beyond]
    margin = 0.05 * np.ptp(kept)
    bottom, top = axis.get_ylim()
    bottom, top = max(bottom, kept.min() - margin), min(top, kept.max() + margin)
    axis.set_ylim(bottom, top)
    for place, (x, y) in enumerate(lines):
        for is_out, end, marker in ((y > top, top, "^"), (y < bottom, bottom, "v")):
            look: dict[str, Any] = {"color": colour_of(place), "markersize": 5, "clip_on": False}
            out = x[is_out]
            marked = out[np.linspace(0, len(out) - 1, min(len(out), _MOST_MARKS)).astype(int)]
            axis.plot(marked, np.full(len(marked), end), marker, **look)
    beyond = values[is_beyond]
    furthest = beyond[np.abs(beyond - np.median(values)).argmax()]
    told = f"beyond the axis: {len(beyond):,}, the furthest at {furthest:.4g}"
    axis.set_title(told, loc="right", fontsize="small", color=COLOURS["muted"])


def scale_by_ratio(axis: Any, which: str) -> None:
    """A logarithmic axis with readable numbers, also where it spans less than a decade."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    axis.set(**{f"{which}scale": "log"})
    low, high = axis.get_ylim() if which == "y" else axis.get_xlim()
    subs = (1.0, 2.0, 5.0) if high < _WIDE * low else (1.0,)
    locator = MaxNLocator(5, integer=True) if high < _NARROW * low else LogLocator(subs=subs, numticks=12)
    ticks = axis.yaxis if which == "y" else axis.xaxis
    ticks.set_major_locator(locator)
    format_ticks(ticks)


def _draw_points(axis: Any, x: Float64[np.ndarray, " n"], y: Float64[np.ndarray, " n"], colour: str) -> None:
    """Lines with round ends and hardly any length, which take a tenth of the text of markers in SVG."""
    length = 1e-10 * (np.ptp(x) or np.abs(x).max() or 1.0)  # PNG shows no lines of length 0
    points = np.stack([x, x + length, np.full(len(x), np.nan)], axis=1).ravel()
    look: dict[str, Any] = {"linewidth": 3.0, "solid_capstyle": "round", "snap": False}
    axis.plot(points, np.repeat(y, 3), color=colour, alpha=0.75, **look)


def series_picture(
    name: str,
    title: str,
    lines: Mapping[str, Sequence[tuple[Real[np.ndarray, " _"], Real[np.ndarray, " _"]]]],
    *,
    xlabel: str = "step",
    more: str = "",
    **options: Any,
) -> Picture:
    """A picture of one axis for each label, with lines of x and y; `options` are those of `draw_series`."""
    figure, axes = new_figure(len(lines), sharex=True)
    captions = [draw_series(axis, *each, **options) for axis, each in zip(axes, lines.items(), strict=True)]
    axes[-1].set_xlabel(xlabel)
    return Picture(name, title, f"{captions[0]} {more}".strip(), to_svg(figure))


def bars_picture(
    name: str,
    title: str,
    caption: str,
    labels: Sequence[str],
    bars: Sequence[Real[np.ndarray, " K"]],
    *,
    xlabel: str,
    ylabel: str,
    line: float | None = None,
) -> Picture:
    """Bars of each bucket on top of each other, none where a height is NaN."""
    figure, (axis,) = new_figure()
    places, bottom = np.arange(len(labels)), np.zeros(len(labels))
    for slot, heights in enumerate(np.nan_to_num(bars)):
        axis.bar(places, heights, 0.8, bottom, color=colour_of(slot))
        bottom = bottom + heights
    if line is not None:
        axis.axhline(line, color=COLOURS["second"], linewidth=1)
    every = math.ceil(len(labels) / _MOST_LABELS)
    shown = labels[::every]
    is_level = sum(map(len, shown)) <= _LEVEL_CHARACTERS
    axis.set_xticks(places[::every], shown, rotation=0 if is_level else 90)
    middle, room = (len(labels) - 1) / 2, max(len(labels), 4) / 2 + 0.1  # one or two bars shall not fill the picture
    axis.set(xlabel=xlabel, ylabel=ylabel, xlim=(middle - room, middle + room))
    format_ticks(axis.yaxis)
    return Picture(name, title, caption, to_svg(figure))


def format_ticks(*axes: Any) -> None:
    """Readable tick numbers: 20k rather than 20,000.0 or 2e4."""
    from matplotlib.ticker import EngFormatter, NullFormatter

    short = EngFormatter(sep="")
    for axis in axes:
        axis.set_major_formatter(lambda value, _: short(value) if abs(value) >= 1e4 else f"{value:g}")
        axis.set_minor_formatter(NullFormatter())
