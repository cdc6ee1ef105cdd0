"""Pages and figures: one HTML file that loads nothing, and Matplotlib's SVG or PNG in one style.

`page.html.jinja` is the template of pages. Jinja2 escapes all text. A line's place in a list decides its colour.
Letters: K buckets, n points.
"""

from __future__ import annotations

import base64
import contextlib
import io
import math
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Real

from jvarlen._common import __version__
from jvarlen._common.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from jvarlen.estimates.memory import MemoryEstimate
    from jvarlen.parallel.schedules import Timeline

__all__ = [
    "COLOURS", "DARK", "LINES", "Page", "Picture", "Table", "bars_picture", "colour_of", "draw_layout_bars",
    "draw_memory", "draw_series", "draw_timelines", "drawing_settings", "format_ticks", "new_figure", "printable",
    "scale_by_ratio", "series_picture", "style_of_colours", "to_svg",
]  # fmt: skip

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
COLOURS = {name: light for name, (light, _) in _PALETTE.items()}  # of drawn figures
DARK = {name: dark for name, (_, dark) in _PALETTE.items()}  # of SVG in dark surroundings
LINES = ("first", "second", "third", "fourth", "fifth", "sixth")

_WIDTH, _HEIGHT = 4.4, 2.7  # inches of 72 points
_MOST_POINTS = 300  # steps that are drawn one by one; of more, as many means of neighbours
_FEW_POINTS = 50
_MOST_LABELS = 16  # of bars side by side
_LEVEL_CHARACTERS = 24  # of all labels, if they are to stand level
_NARROW = 6.0  # highest over lowest; a narrower axis has no decades to mark
_WIDE = 200.0  # a wider one marks only decades


class Picture(NamedTuple):
    """A picture of a page."""

    name: str  # of letters and hyphens, unlike that of any other
    title: str
    caption: str
    svg: str  # as from `to_svg`


def drawing_settings() -> contextlib.AbstractContextManager[None]:
    """A block in which figures are drawn and written in one style, with text as text."""
    import matplotlib as mpl  # here: what prints no page does without matplotlib

    return mpl.rc_context(
        {
            "svg.fonttype": "none",  # text stays text
            "svg.hashsalt": "jvarlen",  # the same picture from the same figures
            "text.parse_math": False,  # names may have dollars
            "path.simplify": False,  # it would leave out lines as short as points
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
    )


def new_figure(
    num_axes: int = 1, *, share_x: bool = False, height_ratios: Sequence[float] | None = None
) -> tuple[Figure, list[Axes]]:
    """A figure as wide as a phone, with axes below each other, which may share the range of x."""
    from matplotlib.figure import Figure

    height = _HEIGHT if num_axes == 1 else 0.65 * num_axes * _HEIGHT
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, [*figure.subplots(num_axes, squeeze=False, sharex=share_x, height_ratios=height_ratios)[:, 0]]


def to_svg(figure: Figure) -> str:
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


def colour_of(place: int) -> str:
    """The colour of the line at a place of the list, for Matplotlib."""
    return COLOURS[LINES[place % len(LINES)]]


def draw_series(
    axis: Axes,
    label: str,
    lines: Sequence[tuple[Real[np.ndarray, " _"], Real[np.ndarray, " _"]]],
    *,
    weights: Sequence[np.ndarray] | None = None,
    as_curve: bool = False,
    is_log: bool = False,
) -> str:
    """Draws x and y of each run, or means of neighbours if there are many; describes the result in words."""
    from matplotlib.ticker import MaxNLocator

    num_steps = max(len(x) for x, _ in lines)
    for place, (x, y) in enumerate(lines):
        known = np.stack([x, y, np.ones(len(y)) if weights is None else weights[place]]).astype(np.float64)
        x, y, weight = known[:, np.isfinite(known).all(axis=0)]
        if not len(y):
            continue
        starts = np.linspace(0, len(y), min(len(y), _MOST_POINTS), endpoint=False).astype(np.int64)
        means = [np.add.reduceat(each * weight, starts) / np.add.reduceat(weight, starts) for each in (x, y)]
        marker = "." if len(y) < _FEW_POINTS or (not as_curve and num_steps <= _MOST_POINTS) else ""
        line = "-" if as_curve or num_steps > _MOST_POINTS else "none"
        axis.plot(*means, color=colour_of(place), marker=marker, markersize=5, linestyle=line)
    axis.set_ylabel(label)
    if is_log:
        scale_by_ratio(axis, "y")
    elif not as_curve:
        axis.set_ylim(0, 1.05 * axis.dataLim.y1 if 0 < axis.dataLim.y1 < np.inf else 1)
    if not as_curve:
        axis.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    format_ticks(axis.xaxis, axis.yaxis)
    if num_steps <= _MOST_POINTS:
        return "Each step."
    return f"Line: the mean of up to {math.ceil(num_steps / _MOST_POINTS):,} neighbouring steps."


def scale_by_ratio(axis: Axes, which: str) -> None:
    """A logarithmic axis with readable numbers, also where it spans less than a decade."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    axis.set(**{f"{which}scale": "log"})
    low, high = axis.get_ylim() if which == "y" else axis.get_xlim()
    subs = (1.0, 2.0, 5.0) if high < _WIDE * low else (1.0,)
    locator = MaxNLocator(5, integer=True) if high < _NARROW * low else LogLocator(subs=subs, numticks=12)
    ticks = axis.yaxis if which == "y" else axis.xaxis
    ticks.set_major_locator(locator)
    format_ticks(ticks)


def series_picture(
    name: str,
    title: str,
    lines: Mapping[str, Sequence[tuple[Real[np.ndarray, " _"], Real[np.ndarray, " _"]]]],
    *,
    xlabel: str = "step",
    more: str = "",
    weights: Sequence[np.ndarray] | None = None,
    as_curve: bool = False,
    is_log: bool = False,
) -> Picture:
    """A picture of one axis for each label, with lines of x and y, drawn as `draw_series` does."""
    figure, axes = new_figure(len(lines), share_x=True)
    captions = [
        draw_series(axis, *each, weights=weights, as_curve=as_curve, is_log=is_log)
        for axis, each in zip(axes, lines.items(), strict=True)
    ]
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


def format_ticks(*axes: Axis) -> None:
    """Readable tick numbers: 20k rather than 20,000.0 or 2e4."""
    from matplotlib.ticker import EngFormatter, NullFormatter

    short = EngFormatter(sep="")
    for axis in axes:
        axis.set_major_formatter(lambda value, _: short(value) if abs(value) >= 1e4 else f"{value:g}")
        axis.set_minor_formatter(NullFormatter())


class Table(NamedTuple):
    """A table in a box that scrolls where the window is narrow. All text is plain."""

    name: str  # of letters, digits and hyphens, unlike that of any other
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]  # of cells: the first names the row, the last fills a row that is short
    foot: Sequence[str] = ()  # the last row, set apart
    note: str = ""  # a line below
    best: int | None = None  # the place of a row that is set apart
    is_wide: bool = False  # cells hold text that may be long, and is wrapped
    texts: Sequence[str] = ()  # headers of columns of text, wrapped at spaces and slashes only, in a wide window
    is_closed: bool = False  # only the title shows until it is clicked


class Page(NamedTuple):
    """The content of a page, from top to bottom."""

    title: str
    summary: str
    pictures: Sequence[Picture]
    tables: Sequence[Table]
    key_figures: Sequence[tuple[str, str, str]] = ()  # a name, a value and a note each
    first_table: Table | None = None
    names: Sequence[str] = ()  # of runs, for a legend
    digest: str = ""

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the page as one HTML file, atomically."""
        import jinja2  # here: what prints no page does without

        environment = jinja2.Environment(
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            finalize=lambda value: printable(value) if type(value) is str else value,  # a Markup is another type
        )
        environment.filters["base64"] = lambda plain: base64.b64encode(str(plain).encode()).decode()
        template = resources.files(__package__).joinpath("page.html.jinja").read_text(encoding="utf-8")
        text = environment.from_string(template).render(
            **self._asdict(),
            lines=LINES,
            light=style_of_colours(COLOURS),
            dark=style_of_colours(DARK),
            version=__version__,
        )
        with write_atomically(Path(path)) as file:
            file.write(text.encode())


def printable(plain: str) -> str:
    """Text without characters that act on terminals or browsers: controls, direction marks, lone surrogates."""
    return "".join(character if character.isprintable() else "\ufffd" for character in plain)


_TIMELINE_WIDTH, _BARS_WIDTH = 7.2, 6.2  # inches, as are all sizes here
_STAGE, _ABOVE_STAGES = 0.26, 0.55
_LAYOUT, _BESIDE_LAYOUTS = 0.4, 1.0
_CHARACTER = 0.075
_COLOURS = {"F": "first", "B": "second", "W": "third"}
_MIB = 2**20
_BAR = 0.45  # of the height of a layout
_CRUMB = 1e-3  # of everything


def draw_timelines(*timelines: Timeline) -> str:
    """Timelines below each other, on one axis of time.

    Forward passes are blue, backward passes orange, weight gradients green; later virtual stages are darker. Bars have
    the number of the microbatch where there is room.

    Args:
      timelines: one or more, from `Schedule.simulate`.

    Returns:
      An SVG file that suits light and dark surroundings.

    Example:
      >>> from jvarlen.parallel import make_schedule
      >>> svg = draw_timelines(make_schedule("gpipe", 2, 3).simulate({"F": 1, "B": 2}))
      >>> svg[:4], "gpipe, synchronous: 12, bubble 25.0%" in svg
      ('<svg', True)
    """
    with drawing_settings():
        heights = [_STAGE * timeline.schedule.num_stages + _ABOVE_STAGES for timeline in timelines]
        figure, axes = new_figure(len(timelines), share_x=True, height_ratios=heights)
        figure.set_size_inches(_TIMELINE_WIDTH, sum(heights) + 0.2)
        longest = max(timeline.makespan for timeline in timelines)
        for axis, timeline in zip(axes, timelines, strict=True):
            _draw(axis, timeline, (_TIMELINE_WIDTH - 0.8) / (longest or 1))
        axes[-1].set(xlabel="time", xlim=(0, longest or 1))
        format_ticks(axes[-1].xaxis)
        return to_svg(figure)


def _draw(axis: Axes, timeline: Timeline, inches_per_unit: float) -> None:
    from matplotlib.colors import to_rgba

    schedule = timeline.schedule
    name = f"{schedule.name}, {timeline.mode}"
    axis.set_title(f"{name}: {timeline.makespan:g}, bubble {timeline.bubble:.1%}", loc="left", fontsize=10)
    axis.set(ylabel="stage", ylim=(schedule.num_stages - 0.45, -0.55))
    axis.set_yticks(range(schedule.num_stages))
    axis.spines["left"].set_visible(False)
    axis.tick_params(axis="y", length=0)
    lasts = timeline.ends - timeline.starts
    for code, kind in enumerate(schedule.kinds):
        colour = COLOURS[_COLOURS[kind]]
        for virtual in range(schedule.num_virtual):
            opacity = 0.2 + 0.45 * virtual / max(schedule.num_virtual - 1, 1)
            stage, a = np.nonzero((schedule.actions[..., 0] == code) & (schedule.actions[..., 2] == virtual))
            axis.barh(
                stage,
                lasts[stage, a],
                left=timeline.starts[stage, a],
                height=0.8,
                facecolor=to_rgba(colour, opacity),
                edgecolor=colour,
                linewidth=0.7,
            )
    for (s, a), last in np.ndenumerate(lasts):
        label = f"{schedule.actions[s, a, 1]}"
        if len(label) * _CHARACTER <= last * inches_per_unit:
            middle = timeline.starts[s, a] + last / 2
            axis.text(middle, s, label, ha="center", va="center_baseline", fontsize=8)


def draw_memory(estimates: Mapping[str, MemoryEstimate]) -> str:
    """Bars of the parts of memory estimates, one below the other.

    Args:
      estimates: by name, such as the texts of layouts; at least one.

    Returns:
      An SVG file that suits light and dark surroundings.

    Example:
      >>> from jvarlen.estimates.memory import MemoryEstimate
      >>> draw_memory({"data4": MemoryEstimate(2**20, 2**20, 0, 2**21, 0, None)})[:4]
      '<svg'
    """
    parts = {
        name: np.array([getattr(estimate, name) or 0 for estimate in estimates.values()]) / _MIB
        for name in next(iter(estimates.values()))._fields
    }
    return draw_layout_bars(list(estimates), parts, "MiB on a device")


def draw_layout_bars(
    names: Sequence[str], parts: Mapping[str, Real[np.ndarray, " C"]], xlabel: str, *, limit: float | None = None
) -> str:
    """An SVG file of a bar for each layout, under its name, without its smallest parts, and a line at the limit."""
    total = np.sum(list(parts.values()), axis=0)
    rows, left = np.arange(len(names)), np.zeros(len(names))
    with drawing_settings():
        figure, (axis,) = new_figure()
        figure.set_size_inches(_BARS_WIDTH, _BESIDE_LAYOUTS + _LAYOUT * len(names))
        for place, (part, sizes) in enumerate(parts.items()):
            if sizes.sum() > _CRUMB * total.sum():
                colour = colour_of(place) if place < len(LINES) else COLOURS["muted"]
                axis.barh(rows, sizes, left=left, height=_BAR, color=colour, alpha=0.75, label=part)
            left = left + sizes
        for row, name in enumerate(names):
            shown = f"{total[row]:,.1f}" if total[row] > 100 else f"{total[row]:.4g}"
            axis.text(0, row - _BAR / 2 - 0.06, f"{name}: {shown}", fontsize=8, va="bottom")
        if limit is not None:
            axis.axvline(limit, color=COLOURS["second"], linewidth=2.5)
        most = max(total.max(), limit or 0.0)
        axis.set(xlabel=xlabel, xlim=(0, 1.05 * most or 1), ylim=(len(names) - 0.5, -0.8), yticks=[])
        axis.spines["left"].set_visible(False)
        if len(parts) > 1:
            figure.legend(loc="outside upper right", ncols=4)
        return to_svg(figure)
