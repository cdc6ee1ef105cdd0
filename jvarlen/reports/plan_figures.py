"""Pictures of a plan.

Everything is counted before it is drawn, so the size of a picture does not depend on the number of samples or steps.
Letters: N samples, n of them in the plan, S steps, K buckets, R rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float, Int64, Real

from jvarlen.planning.buckets import PairBucket
from jvarlen.planning.budget import CostFn
from jvarlen.planning.edges import Histogram
from jvarlen.planning.plan import Plan
from jvarlen.planning.steps import bucket_figures
from jvarlen.reports.figures import (
    COLOURS,
    Detail,
    Picture,
    draw_bars,
    draw_steps,
    drawing_settings,
    finish_bars,
    finish_steps,
    format_ticks,
    new_figure,
    range_starts,
    to_svg,
)

__all__ = ["draw_plan", "integer_bins"]

_MOST_BINS = 48
_MOST_LINES = 16  # of buckets, drawn strongly
_WIDE = 6  # longest over median, from which on lengths are drawn by ratio


def draw_plan(
    plan: Plan,
    lengths: Int64[np.ndarray, " N *sides"],
    learning_rates: Float[np.ndarray, " S"] | None = None,
    cost: CostFn | None = None,
) -> list[Picture]:
    """Draws the pictures of a plan.

    Args:
      plan: the plan.
      lengths: int64[N], tokens a sample; int64[N, 2] of pairs.
      learning_rates: float64[S].
      cost: cost(rows, length) of one microbatch in seconds.

    Returns:
      A list of `Picture`.
    """
    with drawing_settings():
        return list(_figures(plan, lengths, learning_rates, cost))


def _figures(
    plan: Plan,
    lengths: Int64[np.ndarray, " N *sides"],
    learning_rates: Float[np.ndarray, " S"] | None,
    cost: CostFn | None,
) -> Iterator[Picture]:
    yield _length_histogram(plan, lengths)
    if plan.is_packed:
        yield _row_fill(plan, lengths)
    yield from _per_bucket(plan, cost)
    yield _shapes(plan)
    yield _per_step("sequences", "Samples of each step", "samples", plan.num_sequences)
    if learning_rates is not None:
        yield _per_step("learning-rate", "Learning rate of each step", "learning rate", learning_rates)
    if plan.num_steps > 1:
        yield _neighbours(plan)


def _length_histogram(plan: Plan, lengths: Int64[np.ndarray, " N *sides"]) -> Picture:
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
        axis.vlines(np.unique(edge), 0, top, color=COLOURS["second"], linewidth=1 if len(edge) <= _MOST_LINES else 0.6)
        axis.set(xscale="log" if by_ratio else "linear", ylim=(0, top), ylabel="samples")
        axis.set_xlabel(f"tokens of the {side}" if side else "tokens")
        format_ticks(axis.xaxis, axis.yaxis, integer=True)
    what = "row" if plan.is_packed else "bucket"
    return Picture(
        "lengths",
        "Lengths of the samples",
        f"Bars: samples by their length, before any is cut. Lines: the longest that each {what} holds.",
        to_svg(figure),
    )


def _row_fill(plan: Plan, lengths: Int64[np.ndarray, " N"]) -> Picture:
    assert plan.row_offsets is not None
    bucket_length = np.array([bucket.lengths[0] for bucket in plan.buckets])
    rows_per_step = np.diff(np.searchsorted(plan.row_offsets, plan.step_offsets))
    num_tokens = np.add.reduceat(plan.planned_lengths(lengths), plan.row_offsets[:-1])
    fill = num_tokens / np.repeat(bucket_length[plan.step_bucket], rows_per_step)
    counts, bins = np.histogram(fill, np.linspace(0, 1, _MOST_BINS + 2))
    figure, (axis,) = new_figure()
    axis.stairs(counts, 100 * bins, fill=True, color=COLOURS["first"], alpha=0.75, baseline=0.5)
    axis.set(xlabel="fill of a row in %", ylabel="rows", yscale="log", xlim=(0, 100))
    axis.set_ylim(0.5, 2 * counts.max())
    format_ticks(axis.yaxis, integer=True)
    return Picture(
        "row-fill",
        "How full the rows are",
        f"Rows by the share of them that holds tokens, on a logarithmic scale; {fill.mean():.2%} on average.",
        to_svg(figure),
    )


def _per_bucket(plan: Plan, cost: CostFn | None) -> Iterator[Picture]:
    figures = bucket_figures(plan, cost)
    figure, (axis,) = new_figure()
    draw_bars(axis, 100 * np.nan_to_num(figures.padding), COLOURS["first"])
    axis.axhline(100 * plan.padding, color=COLOURS["second"], linewidth=1)
    yield _of_buckets(
        figure,
        plan,
        "padding",
        "Padding of each bucket",
        f"Share of the positions that holds no token; line: {plan.padding:.2%} of all.",
        "padding in %",
    )
    figure, (axis,) = new_figure()
    draw_bars(axis, figures.num_tokens, COLOURS["first"])
    draw_bars(axis, figures.num_positions - figures.num_tokens, COLOURS["second"], bottom=figures.num_tokens)
    caption = "Positions of all steps of a bucket: tokens in blue, padding above them in orange."
    yield _of_buckets(figure, plan, "positions", "Positions of each bucket", caption, "positions")
    if figures.seconds is not None:
        figure, (axis,) = new_figure()
        draw_bars(axis, figures.seconds, COLOURS["first"])
        caption = f"All steps of a bucket; {figures.seconds.sum():,.1f} s in all."
        yield _of_buckets(figure, plan, "seconds", "Predicted seconds of each bucket", caption, "seconds")


def _of_buckets(figure: Any, plan: Plan, name: str, title: str, caption: str, label: str) -> Picture:
    (axis,) = figure.axes
    axis.set_ylabel(label)
    finish_bars(
        axis, ["+".join(f"{length:,}" for length in bucket.lengths) for bucket in plan.buckets], "bucket length"
    )
    format_ticks(axis.yaxis, integer=label == "positions")
    return Picture(name, title, caption, to_svg(figure))


def _shapes(plan: Plan) -> Picture:
    figure, axes = new_figure(2, sharex=True)
    sides = np.array([bucket.lengths for bucket in plan.buckets])[plan.step_bucket].T
    rows = np.array([bucket.rows for bucket in plan.buckets])[plan.step_bucket]
    for axis, label, values in ((axes[0], "bucket length", sides), (axes[1], "rows", rows[None])):
        _over_steps(axis, label, values)
    axes[0].set_xlabel("")
    both = " Blue: source; orange: target." if isinstance(plan.buckets[0], PairBucket) else ""
    return Picture("shapes", "Shapes over the steps", f"{Detail(plan.num_steps).caption}{both}", to_svg(figure))


def _per_step(name: str, title: str, label: str, values: Real[np.ndarray, " S"]) -> Picture:
    figure, (axis,) = new_figure()
    _over_steps(axis, label, values[None])
    number = "{:,}" if np.issubdtype(values.dtype, np.integer) else "{:.3g}"
    least, most = number.format(values.min()), number.format(values.max())
    reach = f"{least} to {most}" if least != most else f"{least} in each"
    return Picture(name, title, f"{reach}. {Detail(len(values)).caption}", to_svg(figure))


def _over_steps(axis: Any, label: str, lines: Real[np.ndarray, "lines S"]) -> None:
    num_steps = lines.shape[1]
    for place, values in enumerate(lines):
        draw_steps(axis, np.arange(num_steps), values, Detail(num_steps), place)
    finish_steps(axis, label, integer=np.issubdtype(lines.dtype, np.integer))


def _neighbours(plan: Plan) -> Picture:
    mean_length = plan.num_tokens / plan.num_sequences
    shown = range_starts(plan.num_steps - 1)
    figure, (axis,) = new_figure()
    draw_steps(axis, mean_length[shown], mean_length[shown + 1], Detail(len(shown)))
    axis.set(xlabel="mean tokens a sample in a step", ylabel="in the next step")
    format_ticks(axis.xaxis, axis.yaxis)
    correlation = plan.neighbour_correlation
    said = "has no value here" if math.isnan(correlation) else f"is {correlation:+.3f}"
    drawn = "" if len(shown) == plan.num_steps - 1 else f" {len(shown):,} of them are drawn."
    return Picture(
        "neighbours",
        "Neighbouring steps",
        f"The correlation {said}: near 1 in a curriculum, near 0 where steps come at random.{drawn}",
        to_svg(figure),
    )


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
