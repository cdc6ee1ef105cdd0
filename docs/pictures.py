"""Draws the SVG pictures of the pages, and of the READMEs of experimental features.

`python docs/pictures.py` writes them all. Pictures of the example are drawn here, and are byte-identical everywhere.
Pictures of the built-in corpus depend on the Python version, because the corpus is its standard library. Letters: N
samples, M microbatches per step, B rows, T length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

import jvarlen
from jvarlen.data.measure import find_lengths
from jvarlen.data.stdlib_corpus import stdlib_functions
from jvarlen.experimental import token_slices
from jvarlen.parallel import make_schedule
from jvarlen.planning.steps import bucket_figures
from jvarlen.reports import figures
from jvarlen.reports.figures import COLOURS, draw_timelines, drawing_settings, new_figure, style_of_colours, to_svg
from jvarlen.reports.plan_page import draw_plan

__all__ = [
    "DARK",
    "EXAMPLE",
    "LIGHT",
    "draw_corpus",
    "draw_example",
    "draw_layouts",
    "draw_schedules",
    "draw_simulation",
    "to_file",
]

FOLDER = Path(__file__).parent / "pictures"

LIGHT = {"page": "#ffffff"} | COLOURS
DARK = {"page": "#131416"} | figures.DARK
OF_BUCKET = ("first", "third", "fourth", "sixth")

EXAMPLE = [5, 3, 12, 7, 4, 9, 21, 6, 3, 14, 8, 5, 30, 4, 11, 6, 2, 17, 9, 4, 7, 26, 5, 10]
EXAMPLE_SETTINGS = {"max_tokens": 40, "max_shapes": 4, "num_microbatches": 2}

_TOKEN = 8  # pixels, in pictures of steps
_ROW = 17


def draw_example() -> Iterator[tuple[str, str]]:
    """The name and the SVG of each picture of the 24 samples, and of the ring."""
    lengths = np.array(EXAMPLE)
    buckets = jvarlen.make_buckets(lengths, **EXAMPLE_SETTINGS)
    plan = jvarlen.make_plan(lengths, buckets, order="length", num_microbatches=2)
    yield "lengths", _order_picture(lengths, jvarlen.sample_order(lengths))
    yield "buckets", _strategies_picture(lengths, ("pad_to_max", "powers_of_two", "quantile", "optimal"))
    yield "steps", _steps_picture(plan, lengths)
    yield "ring", _ring_picture(4)


def draw_corpus() -> Iterator[tuple[str, str]]:
    """The name and the SVG of each picture of the built-in corpus."""
    lengths = find_lengths(stdlib_functions())
    settings = {"max_tokens": 8192, "max_length": 1024, "length_multiple": 8, "num_microbatches": 8}
    settings |= {"overlong": "truncate"}
    buckets = jvarlen.make_buckets(lengths, **settings, max_shapes=12)
    plan = jvarlen.make_plan(lengths, buckets, order="length", num_microbatches=8, overlong="truncate")
    cut = np.minimum(lengths, 1024)
    library = {figure.name: figure.svg for figure in draw_plan(plan, cut, bucket_figures(plan, lengths=cut))}
    for name in ("lengths", "tokens"):
        yield f"corpus-{name}", library[name]
    yield "corpus-padding", _padding_picture(lengths, settings)


def draw_schedules() -> Iterator[tuple[str, str]]:
    """The name and the SVG of each picture of pipeline schedules."""
    costs, split = {"F": 1, "B": 2}, {"F": 1, "B": 1, "W": 1}
    synchronous = [make_schedule(name, 4, 8).simulate(costs) for name in ("gpipe", "1f1b", "eager_1f1b")]
    yield "schedules-synchronous", draw_timelines(*synchronous, make_schedule("zero_bubble", 4, 8).simulate(split))

    def seconds(num_tokens: np.ndarray, num_earlier: np.ndarray) -> np.ndarray:
        return 1 + num_tokens * (1 + (num_earlier + num_tokens / 2) / 1024) / 128

    sliced = []
    for slices in ([2048], [512] * 4, token_slices.choose_slices(2048, 4, 1, seconds, unit=128)):
        forward = token_slices.slice_seconds(slices, 2048, seconds)[None]
        schedule = token_slices.token_slices(4, 1, len(slices))
        sliced.append(schedule.simulate({"F": forward, "B": 2 * forward}, "mpmd"))
    yield "schedules-slices", draw_timelines(*sliced)


def draw_layouts() -> Iterator[tuple[str, str]]:
    """The name and the SVG of the picture of layouts. What JAX keeps for the backward pass depends on its version."""
    yield "layouts-memory", _run_guide("layouts.md")["svg"]


def draw_simulation() -> Iterator[tuple[str, str]]:
    """The name and the SVG of the run that the README on simulation simulates."""
    yield "simulation", _run_guide("../jvarlen/experimental/simulation/README.md")["svg"]


def _run_guide(page: str) -> dict[str, Any]:
    """The names that the blocks of a page define."""
    names: dict[str, Any] = {}
    for script in re.findall(r"```python\n(.*?)```", (FOLDER.parent / page).read_text(), re.DOTALL):
        exec(script, names)
    return names


def to_file(svg: str) -> str:
    """A picture that stands alone: on a page of its own, light or dark as what surrounds it."""
    light, dark = style_of_colours(LIGHT), style_of_colours(DARK)
    style = f"svg{{{light};background:var(--page)}}@media (prefers-color-scheme:dark){{svg{{{dark}}}}}"
    if "xmlns=" not in svg:
        svg = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return svg.replace(">", f"><style>{style}</style>", 1)


def _order_picture(lengths: np.ndarray, order: np.ndarray) -> str:
    """Bars of the lengths, in dataset order and in order of length."""
    shapes = []
    for top, title, ids in ((20, "dataset", np.arange(len(lengths))), (190, "length", order)):
        shapes.append(_text(0, top - 6, f'order="{title}"', anchor="start"))
        base = top + 4 * lengths.max()
        for place, i in enumerate(ids):
            height = 4 * lengths[i]
            shapes.append(_rect(26 * place + 2, base - height, 22, height, "first"))
            shapes.append(_text(26 * place + 13, base + 13, i, colour="muted"))
    return _svg(26 * len(lengths), 330, shapes)


def _strategies_picture(lengths: np.ndarray, strategies: Iterable[str]) -> str:
    """For each strategy, the samples in order of length with their padding."""
    shapes: list[str] = []
    ordered = np.sort(lengths)
    for place, strategy in enumerate(strategies):
        left, top = 330 * (place % 2), 180 * (place // 2) + 36
        buckets = jvarlen.make_buckets(lengths, **EXAMPLE_SETTINGS, strategy=strategy)
        padding = jvarlen.make_plan(lengths, buckets, order="length", num_microbatches=2).padding
        edges = np.array([bucket.length for bucket in buckets.shapes])
        shapes.append(_text(left, top - 20, strategy, anchor="start", weight="bold"))
        says = f"{' '.join(map(str, buckets.shapes))}: {padding:.1%} padding"
        shapes.append(_text(left, top - 5, says, anchor="start", colour="muted"))
        base = top + 4 * lengths.max()
        for j, length in enumerate(ordered):
            bucket = int(np.searchsorted(edges, length))
            x, edge = left + 13 * j, edges[bucket]
            shapes.append(_padding(x, base - 4 * edge, 11, 4 * (edge - length)))
            shapes.append(_rect(x, base - 4 * length, 11, 4 * length, OF_BUCKET[bucket % len(OF_BUCKET)]))
    return _svg(330 + 13 * len(lengths), 346, shapes)


def _steps_picture(plan: jvarlen.Plan, lengths: np.ndarray) -> str:
    """The steps as rectangles of B × T, with their microbatches side by side."""
    shapes = []
    left, gap = 108, 28
    right = left + plan.num_microbatches * (int(lengths.max()) * _TOKEN + gap)
    for m in range(plan.num_microbatches):
        x = left + m * (int(lengths.max()) * _TOKEN + gap)
        shapes.append(_text(x, 12, f"microbatch {m}", anchor="start", colour="muted"))
    top = 22
    for step in range(plan.num_steps):
        bucket = plan.buckets.shapes[plan.step_bucket[step]]
        colour = OF_BUCKET[plan.step_bucket[step]]
        shapes.append(_text(0, top + 12, f"step {step}: {bucket}", anchor="start"))
        for m, ids in enumerate(plan.rows(step)):
            x = left + m * (int(lengths.max()) * _TOKEN + gap)
            for b, i in enumerate(ids):
                y = top + _ROW * b
                length = int(lengths[i]) if i >= 0 else 0
                shapes.append(_padding(x + _TOKEN * length, y, _TOKEN * (bucket.length - length), _ROW - 2))
                if i >= 0:
                    shapes.append(_rect(x, y, _TOKEN * length, _ROW - 2, colour))
                    shapes.append(_text(x + _TOKEN * length / 2, y + 11, i, colour="page", size=10))
                else:
                    middle = x + _TOKEN * bucket.length / 2
                    shapes.append(_text(middle, y + 11, "dummy", colour="muted", size=10))
        top += _ROW * bucket.rows + 14
    return _svg(right, top, shapes)


def _ring_picture(num_devices: int) -> str:
    """What each device holds after each round of an all-reduce: of every chunk, the sum over some devices."""
    cell, gap, left = 30, 26, 170
    width = num_devices * cell + gap
    shapes = [_text(left + width * d, 12, f"device {d}", anchor="start", weight="bold") for d in range(num_devices)]
    num_summed = np.ones((num_devices, num_devices), int)  # by device and chunk
    for r in range(2 * num_devices - 1):
        top = 24 + r * (cell + 14)
        first = r < num_devices
        says = "at the start" if r == 0 else f"{r}: reduce-scatter" if first else f"{r}: all-gather"
        shapes.append(_text(0, top + 20, says, anchor="start", colour="muted"))
        before = num_summed.copy()
        for d in range(num_devices):
            arrived = (d - 1 - r) % num_devices if r else None
            if arrived is not None:
                num_summed[d, arrived] = before[d - 1, arrived] + first
            for chunk in range(num_devices):
                x, count = left + width * d + cell * chunk, int(num_summed[d, chunk])
                height = (cell - 2) * count / num_devices
                shapes.append(_padding(x, top, cell - 2, cell - 2))
                colour = "third" if chunk == arrived else "first"
                shapes.append(_rect(x, top + cell - 2 - height, cell - 2, height, colour))
                is_low = height < 12  # the number does not fit into the bar
                shapes.append(
                    _text(
                        x + cell / 2 - 1, top + (14 if is_low else cell - 5), count, colour="ink" if is_low else "page"
                    )
                )
    return _svg(left + width * num_devices - gap, top + cell + 4, shapes)


def _padding_picture(lengths: np.ndarray, settings: dict[str, Any]) -> str:
    """Padding by the number of shapes, for strategies that take this number."""
    with drawing_settings():
        figure, (axis,) = new_figure()
        numbers = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
        for colour, strategy in (("second", "geometric"), ("fourth", "quantile"), ("first", "optimal")):
            padding = [_padding_of(lengths, settings, strategy, number) for number in numbers]
            axis.plot(numbers, padding, ".-", color=COLOURS[colour], label=strategy)
        powers = _padding_of(lengths, settings, "powers_of_two", 1)
        num_powers = len(jvarlen.make_buckets(lengths, **settings, strategy="powers_of_two").shapes)
        axis.plot([num_powers], [powers], "x", color=COLOURS["third"], label="powers_of_two")
        axis.set(xlabel="most shapes", ylabel="padding in %", xscale="log", ylim=(0, None))
        axis.set_xticks(numbers, map(str, numbers))
        axis.minorticks_off()
        axis.legend(frameon=False)
        return to_svg(figure)


def _padding_of(lengths: np.ndarray, settings: dict[str, Any], strategy: Any, number: int) -> float:
    buckets = jvarlen.make_buckets(lengths, **settings, strategy=strategy, max_shapes=number)
    num_microbatches = settings["num_microbatches"]
    plan = jvarlen.make_plan(lengths, buckets, order="length", num_microbatches=num_microbatches, overlong="truncate")
    return 100 * plan.padding


def _svg(width: float, height: float, shapes: Iterable[str]) -> str:
    return f'<svg width="{width + 8}" viewBox="-4 0 {width + 8} {height}">\n' + "\n".join(shapes) + "\n</svg>"


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="var(--{colour})"/>'


def _padding(x: float, y: float, width: float, height: float) -> str:
    """The rectangle of the padding, or nothing if there is none."""
    if not width or not height:
        return ""
    return (
        f'<rect x="{x + 0.5}" y="{y + 0.5}" width="{width - 1}" height="{height - 1}" fill="var(--line)" '
        'fill-opacity="0.45" stroke="var(--muted)" stroke-width="0.7" stroke-dasharray="3 2"/>'
    )


def _text(
    x: float,
    y: float,
    what: Any,
    *,
    anchor: str = "middle",
    colour: str = "ink",
    size: int = 12,
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x}" y="{y}" fill="var(--{colour})" text-anchor="{anchor}" font-size="{size}" '
        f'font-weight="{weight}" font-family="system-ui, sans-serif">{escape(str(what))}</text>'
    )


def main() -> None:
    """Writes all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name, svg in [*draw_example(), *draw_schedules(), *draw_layouts(), *draw_simulation(), *draw_corpus()]:
        (FOLDER / f"{name}.svg").write_text(to_file(svg) + "\n")


if __name__ == "__main__":
    main()
