"""SVG figures of a plan, in the colours of the page around them.

Everything is counted before it is drawn, so the size of a picture does not depend on the number of samples or steps.
Letters: N samples, n of them in the plan, S steps, K buckets, R rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int64, Real

from jvarlen.planning.buckets import PairBucket
from jvarlen.planning.budget import CostFn
from jvarlen.planning.edges import Histogram
from jvarlen.planning.plan import Plan
from jvarlen.planning.steps import bucket_figures
from jvarlen.reports.svg_figures import COLOURS, count_ticks, drawing_settings, new_figure, to_svg

__all__ = ["PlanFigure", "draw_plan", "integer_bins"]

_MOST_BINS = 48
_MOST_POINTS = 500  # of steps that are drawn one by one
_MOST_RANGES = 160  # of steps that are drawn together
_MOST_LABELS = 16
_WIDE = 6  # longest over median, from which on lengths are drawn by ratio


class PlanFigure(NamedTuple):
    """A picture.

    Attributes:
      name: of letters and hyphens, unlike that of any other.
      title: what it shows.
      caption: how to read it.
      svg: an `<svg>` element without namespaces, for an HTML page.
    """

    name: str
    title: str
    caption: str
    svg: str


def draw_plan(
    plan: Plan,
    lengths: Int64[np.ndarray, " N *sides"],
    learning_rates: Float[np.ndarray, " S"] | None = None,
    cost: CostFn | None = None,
) -> list[PlanFigure]:
    """Draws the pictures of a plan.

    Args:
      plan: the plan.
      lengths: int64[N], tokens a sample; int64[N, 2] of pairs.
      learning_rates: float64[S].
      cost: cost(rows, length) of one microbatch in seconds.

    Returns:
      A list of `PlanFigure`.
    """
    with drawing_settings():
        return list(_figures(plan, lengths, learning_rates, cost))


def _figures(
    plan: Plan,
    lengths: Int64[np.ndarray, " N *sides"],
    learning_rates: Float[np.ndarray, " S"] | None,
    cost: CostFn | None,
) -> Iterator[PlanFigure]:
    yield _length_histogram(plan, lengths)
    if plan.is_packed:
        yield _row_fill(plan, lengths)
    yield from _per_bucket(plan, cost)
    yield _shapes(plan)
    yield _per_step("sequences", "Samples of each step", "samples", plan.num_sequences, "first")
    if learning_rates is not None:
        yield _per_step("learning-rate", "Learning rate of each step", "learning rate", learning_rates, "second")
    if plan.num_steps > 1:
        yield _neighbours(plan)


def _length_histogram(plan: Plan, lengths: Int64[np.ndarray, " N *sides"]) -> PlanFigure:
    edges = np.array([bucket.lengths for bucket in plan.buckets], np.int64)
    sides = ["source", "target"] if lengths.ndim == 2 else [""]
    figure, axes = new_figure(len(sides))
    for side, axis, values, edge in zip(sides, axes, lengths.reshape(len(lengths), -1).T, edges.T, strict=True):
        histogram = Histogram(values, length_multiple=1)
        middle = np.searchsorted(np.cumsum(histogram.counts), len(values) / 2)
        by_ratio = bool(histogram.values[-1] > _WIDE * histogram.values[middle])
        bins = integer_bins(int(histogram.values[0]), int(histogram.values[-1]), by_ratio)
        counts, _ = np.histogram(histogram.values, bins, weights=histogram.counts)
        axis.stairs(counts, bins, fill=True, color=COLOURS["first"], alpha=0.6)
        top = 1.05 * counts.max()
        axis.vlines(np.unique(edge), 0, top, color=COLOURS["second"], linewidth=1 if len(edge) <= _MOST_LABELS else 0.6)
        axis.set(xscale="log" if by_ratio else "linear", ylim=(0, top), ylabel="samples")
        axis.set_xlabel(f"tokens of the {side}" if side else "tokens")
        count_ticks(axis.xaxis)
        count_ticks(axis.yaxis)
    what = "row" if plan.is_packed else "bucket"
    return PlanFigure(
        "lengths",
        "Lengths of the samples",
        f"Bars: samples by their length, before any is cut. Lines: the longest that each {what} holds.",
        to_svg(figure, "lengths"),
    )


def _row_fill(plan: Plan, lengths: Int64[np.ndarray, " N"]) -> PlanFigure:
    assert plan.row_offsets is not None
    bucket_length = np.array([bucket.lengths[0] for bucket in plan.buckets])
    rows_per_step = np.diff(np.searchsorted(plan.row_offsets, plan.step_offsets))
    num_tokens = np.add.reduceat(np.minimum(lengths[plan.sample_ids], bucket_length[-1]), plan.row_offsets[:-1])
    fill = num_tokens / np.repeat(bucket_length[plan.step_bucket], rows_per_step)
    counts, bins = np.histogram(fill, np.linspace(0, 1, _MOST_BINS + 2))
    figure, (axis,) = new_figure()
    axis.stairs(counts, 100 * bins, fill=True, color=COLOURS["first"], alpha=0.75, baseline=0.5)
    axis.set(xlabel="fill of a row in %", ylabel="rows", yscale="log", xlim=(0, 100))
    axis.set_ylim(0.5, 2 * counts.max())
    count_ticks(axis.yaxis)
    return PlanFigure(
        "row-fill",
        "How full the rows are",
        f"Rows by the share of them that holds tokens, on a logarithmic scale; {fill.mean():.2%} on average.",
        to_svg(figure, "row-fill"),
    )


def _per_bucket(plan: Plan, cost: CostFn | None) -> Iterator[PlanFigure]:
    figures = bucket_figures(plan, cost)
    figure, (axis,) = new_figure()
    _bars(plan, axis, 100 * np.nan_to_num(figures.padding), "first")
    axis.axhline(100 * plan.padding, color=COLOURS["second"], linewidth=1)
    axis.set_ylabel("padding in %")
    yield PlanFigure(
        "padding",
        "Padding of each bucket",
        f"Share of the positions that holds no token; line: {plan.padding:.2%} of all.",
        to_svg(figure, "padding"),
    )
    figure, (axis,) = new_figure()
    _bars(plan, axis, figures.num_tokens, "first")
    _bars(plan, axis, figures.num_positions - figures.num_tokens, "second", bottom=figures.num_tokens)
    axis.set_ylabel("positions")
    count_ticks(axis.yaxis)
    yield PlanFigure(
        "positions",
        "Positions of each bucket",
        "Positions of all steps of a bucket: tokens in blue, padding above them in orange.",
        to_svg(figure, "positions"),
    )
    if figures.seconds is not None:
        figure, (axis,) = new_figure()
        _bars(plan, axis, figures.seconds, "first")
        axis.set_ylabel("seconds")
        count_ticks(axis.yaxis, integer=False)
        yield PlanFigure(
            "seconds",
            "Predicted seconds of each bucket",
            f"All steps of a bucket; {figures.seconds.sum():,.1f} s in all.",
            to_svg(figure, "seconds"),
        )


def _shapes(plan: Plan) -> PlanFigure:
    figure, axes = new_figure(2, sharex=True)
    colours = ("first", "second")
    sides = np.array([bucket.lengths for bucket in plan.buckets])[plan.step_bucket].T
    for colour, side in zip(colours, sides, strict=False):
        _over_steps(axes[0], side, colour)
    rows = np.array([bucket.rows for bucket in plan.buckets])[plan.step_bucket]
    _over_steps(axes[1], rows, "first")
    axes[0].set_ylabel("bucket length")
    axes[1].set_ylabel("rows")
    axes[1].set_xlabel("step")
    both = " Blue: source; orange: target." if isinstance(plan.buckets[0], PairBucket) else ""
    return PlanFigure(
        "shapes", "Shapes over the steps", f"{_how_drawn(plan.num_steps)}{both}", to_svg(figure, "shapes")
    )


def _per_step(name: str, title: str, label: str, values: Real[np.ndarray, " S"], colour: str) -> PlanFigure:
    figure, (axis,) = new_figure()
    _over_steps(axis, values, colour)
    axis.set(xlabel="step", ylabel=label)
    number = "{:,}" if np.issubdtype(values.dtype, np.integer) else "{:.3g}"
    least, most = number.format(values.min()), number.format(values.max())
    reach = f"{least} to {most}" if least != most else f"{least} in each"
    return PlanFigure(name, title, f"{reach}. {_how_drawn(len(values))}", to_svg(figure, name))


def _neighbours(plan: Plan) -> PlanFigure:
    mean_length = plan.num_tokens / plan.num_sequences
    every = math.ceil((plan.num_steps - 1) / _MOST_POINTS)
    figure, (axis,) = new_figure()
    axis.plot(mean_length[:-1:every], mean_length[1::every], ".", color=COLOURS["first"], markersize=4, alpha=0.6)
    axis.set(xlabel="mean tokens a sample in a step", ylabel="in the next step")
    count_ticks(axis.xaxis, integer=False)
    count_ticks(axis.yaxis, integer=False)
    correlation = plan.neighbour_correlation
    said = "has no value here" if math.isnan(correlation) else f"is {correlation:+.3f}"
    shown = "" if every == 1 else f" One in {every:,} is drawn."
    return PlanFigure(
        "neighbours",
        "Neighbouring steps",
        f"The correlation {said}: near 1 in a curriculum, near 0 where steps come at random.{shown}",
        to_svg(figure, "neighbours"),
    )


def _bars(plan: Plan, axis: Any, values: np.ndarray, colour: str, bottom: Any = 0) -> None:
    num_buckets = len(plan.buckets)
    axis.bar(np.arange(num_buckets), values, bottom=bottom, color=COLOURS[colour], alpha=0.75)
    shown = np.arange(0, num_buckets, math.ceil(num_buckets / _MOST_LABELS))
    labels = ["+".join(f"{length:,}" for length in plan.buckets[k].lengths) for k in shown]
    axis.set_xticks(shown, labels, rotation=90 if len(shown) > 6 else 0)
    room = max(num_buckets, 4) / 2 + 0.1  # one or two bars shall not fill the picture
    axis.set(xlabel="bucket length", xlim=((num_buckets - 1) / 2 - room, (num_buckets - 1) / 2 + room))


def _over_steps(axis: Any, values: Real[np.ndarray, " S"], colour: str) -> None:
    """One point a step if steps are few; otherwise the range and the mean of groups of neighbours."""
    num_steps = len(values)
    if num_steps <= _MOST_POINTS:
        axis.plot(np.arange(num_steps), values, ".", color=COLOURS[colour], markersize=4)
    else:
        starts = np.linspace(0, num_steps, _MOST_RANGES, endpoint=False).astype(np.int64)
        sizes = np.diff(starts, append=num_steps)
        centres = starts + (sizes - 1) / 2
        low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
        axis.fill_between(centres, low, high, color=COLOURS[colour], alpha=0.3, linewidth=0)
        axis.plot(centres, np.add.reduceat(values, starts) / sizes, color=COLOURS[colour], linewidth=1.5)
    axis.set_ylim(0, 1.05 * values.max() or 1)
    count_ticks(axis.xaxis)
    count_ticks(axis.yaxis, integer=np.issubdtype(values.dtype, np.integer))


def _how_drawn(num_steps: int) -> str:
    if num_steps <= _MOST_POINTS:
        return "A point a step."
    return f"Line: the mean of about {round(num_steps / _MOST_RANGES):,} neighbouring steps; band: their least to most."


def integer_bins(shortest: int, longest: int, by_ratio: bool) -> Int64[np.ndarray, " bins_plus_1"]:
    """Bins between integers, of one width, or none narrower than the one before it."""
    if not by_ratio:
        covered = longest + 1 - shortest
        widths = -(-covered // np.arange(_MOST_BINS, _MOST_BINS // 2, -1))
        width = int(widths[np.argmin(-covered % widths / widths)])  # so that the last bin is as full as the others
        return np.arange(shortest, longest + 1 + width, width)
    ratio = ((longest + 1) / shortest) ** (1 / _MOST_BINS)
    bins = [shortest]
    while bins[-1] <= longest:
        bins.append(max(bins[-1] + 1, math.ceil(bins[-1] * ratio)))
    return np.array(bins)
