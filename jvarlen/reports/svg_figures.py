"""Turns Matplotlib figures into SVG that takes its colours from the page."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

__all__ = ["COLOURS", "count_ticks", "drawing_settings", "new_figure", "to_svg"]

# What is drawn in these colours takes those of the page's style sheet, so that a dark page has light ink.
COLOURS = {
    "ink": "#010101",
    "muted": "#020202",
    "line": "#030303",
    "first": "#040404",
    "second": "#050505",
    "third": "#060606",
    "fourth": "#070707",
    "fifth": "#080808",
    "sixth": "#090909",
}

_WIDTH, _HEIGHT = 4.4, 2.7  # inches of 72 points
_SVG = "http://www.w3.org/2000/svg"
_HREF = "{http://www.w3.org/1999/xlink}href"


@contextlib.contextmanager
def drawing_settings() -> Iterator[None]:
    """A block in which figures are drawn in the colours of the page, with text as text."""
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
        "axes.axisbelow": True,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
    }
    with mpl.rc_context(settings):
        yield


def new_figure(num_axes: int = 1, **options: Any) -> tuple[Any, Any]:
    """A figure as wide as a phone, with axes below each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _HEIGHT if num_axes == 1 else 1.3 * _HEIGHT), layout="constrained")
    return figure, figure.subplots(num_axes, squeeze=False, **options)[:, 0]


def count_ticks(axis: Any, *, integer: bool = True) -> None:
    """Readable tick numbers: 20k rather than 20,000.0 or 2e4, and no fractions of samples."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    def label(value: float, _: int) -> str:
        is_log = axis.get_scale() == "log"
        return _short_number(value, value if is_log else max(map(abs, axis.get_view_interval())))

    axis.set_major_formatter(FuncFormatter(label))
    axis.set_minor_formatter(NullFormatter())
    if axis.get_scale() == "linear":
        axis.get_major_locator().set_params(integer=integer, min_n_ticks=1)


def _short_number(value: float, largest: float) -> str:
    """In thousands, millions and so on, by the largest number next to it."""
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value and largest >= max(size, 1e4):
            return f"{value / size:g}{suffix}"
    return f"{value:g}"


def to_svg(figure: Any, name: str) -> str:
    """The figure as an `<svg>` element without namespaces, with unique ids and the colours of the page.

    Args:
      figure: a Matplotlib figure, drawn with `drawing_settings`.
      name: of letters and hyphens, unlike that of any other on the page.
    """
    file = io.BytesIO()
    # Without the metadata, which link to vocabularies and hold the date.
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    root = ElementTree.fromstring(file.getvalue())
    referred = set()
    for element in root.iter():
        element.tag = element.tag.removeprefix(f"{{{_SVG}}}")
        if target := element.attrib.pop(_HREF, None):
            element.set("href", f"#{name}-{target[1:]}")
            referred.add(target[1:])
        for key in ("clip-path", "style"):
            _, is_url, target = element.get(key, "").partition("url(#")
            if is_url:
                referred.add(target.partition(")")[0])
                element.set(key, element.attrib[key].replace("url(#", f"url(#{name}-"))
    for element in root.iter():
        if (own := element.attrib.pop("id", None)) in referred:
            element.set("id", f"{name}-{own}")
    for definitions in root.findall("defs"):
        for style in definitions.findall("style"):
            definitions.remove(style)  # it would hold for the whole page
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-title")
    text = ElementTree.tostring(root, encoding="unicode")
    for colour, value in COLOURS.items():
        text = text.replace(value, f"var(--{colour})")
    return text
