"""A plan as one HTML file that loads nothing and works offline: key figures, pictures, tables.

Letters: N samples, S steps, K buckets.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from jaxtyping import Float, Int64, Real

from jvarlen._common.checks import UserError
from jvarlen.planning.buckets import Bucket, Histogram, PairBucket
from jvarlen.planning.budget import CostFn
from jvarlen.planning.lengths import check_lengths, check_pair_lengths
from jvarlen.planning.plan import Plan
from jvarlen.planning.steps import bucket_figures
from jvarlen.reports.compare import StrategyFigures, comparison_cells
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
from jvarlen.reports.page import Table, write_page

__all__ = ["draw_plan", "integer_bins", "write_html_report"]

_MOST_BINS = 48
_MOST_LINES = 16  # of buckets, drawn strongly
_WIDE = 6  # longest over median, from which on lengths are drawn by ratio


def write_html_report(
    path: str | os.PathLike[str],
    plan: Plan,
    lengths: npt.ArrayLike,
    *,
    learning_rates: npt.ArrayLike | None = None,
    cost: CostFn | None = None,
    comparison: Sequence[StrategyFigures] | None = None,
) -> None:
    """Writes a page that shows a plan: key figures, pictures, and a table of its buckets.

    The page is one file without scripts that loads nothing. Its size hardly depends on the number of samples and steps,
    since everything is counted before it is drawn.

    Args:
      path: the file; its directory must exist, and an existing file is replaced.
      plan: the plan.
      lengths: integers[N], the tokens of every sample that it was made for, before truncation and packing; integers[N,
        2] for pairs.
      learning_rates: floats[S], as from `lr_sequence`.
      cost: cost(rows, length) of one microbatch in seconds; its prediction is shown.
      comparison: as from `compare_strategies`, shown as a table.

    Raises:
      ValueError: lengths that are not those of the plan, another number of learning rates than of steps, or a
        comparison without any possible plan.
      OSError: the file cannot be written; an existing file stays.
    """
    checked = _checked_lengths(plan, lengths)
    rates = None if learning_rates is None else np.asarray(learning_rates, np.float64)
    if rates is not None and (rates.shape != (plan.num_steps,) or not np.isfinite(rates).all()):
        raise UserError(f"learning rates must be {plan.num_steps} finite numbers, one a step; shape {rates.shape}")
    shapes = "1 shape" if len(plan.buckets) == 1 else f"{len(plan.buckets):,} shapes"
    what = "pairs" if isinstance(plan.buckets[0], PairBucket) else "samples"
    title = f"Plan of {plan.num_samples:,} {what} in {shapes}"
    steps = "1 step" if plan.num_steps == 1 else f"{plan.num_steps:,} steps"
    left_out = f"{plan.num_truncated:,} cut, {plan.num_dropped:,} dropped"
    summary = f"{steps} an epoch, every {what[:-1]} exactly once. Longer than the longest bucket: {left_out}."
    tables = [_bucket_table(plan, cost)]
    if comparison is not None:
        tables.append(_comparison_table(comparison))
    write_page(
        path,
        title=title,
        summary=summary,
        key_figures=_key_figures(plan, cost),
        pictures=draw_plan(plan, checked, rates, cost),
        tables=tables,
        digest=plan.digest,
    )


def _checked_lengths(plan: Plan, lengths: npt.ArrayLike) -> Int64[np.ndarray, " N *sides"]:
    is_pairs = isinstance(plan.buckets[0], PairBucket)
    checked = check_pair_lengths(lengths) if is_pairs else check_lengths(lengths)
    largest_id = plan.largest_id
    if largest_id >= len(checked):
        raise UserError(f"the plan has a sample of id {largest_id}, but there are only {len(checked):,} lengths")
    num_tokens = int(plan.planned_lengths(checked).sum())
    if num_tokens != plan.num_tokens.sum():
        raise UserError(
            f"these are not the lengths that the plan was made for: its samples have {num_tokens:,} tokens by "
            f"them, {int(plan.num_tokens.sum()):,} by the plan"
        )
    return checked


def _key_figures(plan: Plan, cost: CostFn | None) -> list[tuple[str, str, str]]:
    num_sequences = plan.num_sequences
    least, most = int(num_sequences.min()), int(num_sequences.max())
    num_tokens, padded_tokens = int(plan.num_tokens.sum()), int(plan.padded_tokens_per_step.sum())
    correlation, m = plan.neighbour_correlation, plan.microbatches_per_step
    figures = [
        ("Padding", f"{plan.padding:.2%}", f"{padded_tokens - num_tokens:,} of {padded_tokens:,} tokens"),
        (
            "Shapes",
            f"{len(plan.buckets):,}",
            f"up to {max(b.padded_tokens for b in plan.buckets):,} tokens with padding",
        ),
        ("Steps", f"{plan.num_steps:,}", f"of {m:,} microbatch{'' if m == 1 else 'es'}"),
        ("Samples a step", f"{np.median(num_sequences):,.0f}", f"median; {least:,} to {most:,}"),
        ("Tokens", f"{num_tokens:,}", f"{num_tokens / plan.num_steps:,.0f} a step"),
    ]
    if plan.is_packed:
        figures.append(("Samples a row", f"{plan.num_samples / plan.num_rows:.2f}", f"in {plan.num_rows:,} rows"))
    if cost is not None:
        seconds = bucket_figures(plan, cost).seconds
        assert seconds is not None
        per_step = float(seconds.sum()) / plan.num_steps
        figures.append(("Predicted", f"{seconds.sum():,.1f} s", f"{per_step:.3g} s a step"))
    said = "–" if math.isnan(correlation) else f"{correlation:+.3f}"
    return [*figures, ("Neighbour correlation", said, "of mean length, step to step")]


def _bucket_table(plan: Plan, cost: CostFn | None) -> Table:
    figures = bucket_figures(plan, cost)
    seconds = figures.seconds
    header = ["Rows × length", "Samples", "Steps", "Tokens", "With padding", "Padding"]
    rows = []
    for k, bucket in enumerate(plan.buckets):
        padding = f"{figures.padding[k]:.2%}" if figures.num_steps[k] else "–"
        counts = (figures.num_samples[k], figures.num_steps[k], figures.num_tokens[k], figures.padded_tokens[k])
        rows.append([f"{bucket.rows:,} × {_length_of(bucket)}", *(f"{count:,}" for count in counts), padding])
    totals = (plan.num_samples, plan.num_steps, int(plan.num_tokens.sum()), int(plan.padded_tokens_per_step.sum()))
    total = ["Total", *(f"{count:,}" for count in totals), f"{plan.padding:.2%}"]
    if seconds is not None:
        header.append("Predicted s")
        rows = [[*row, f"{value:,.1f}"] for row, value in zip(rows, seconds, strict=True)]
        total.append(f"{seconds.sum():,.1f}")
    return Table("buckets", "Buckets", header, rows, foot=total, note="Tokens are real ones, cut samples as cut.")


def _comparison_table(comparison: Sequence[StrategyFigures]) -> Table:
    header, rows, best = comparison_cells(comparison)
    what = "tokens with padding" if comparison[best].seconds is None else "seconds"
    note = (
        f"Best plan: {comparison[best].name}. × best: {what} over those of the best plan. Uneven: {what} of the "
        "largest step over the mean step."
    )
    return Table("comparison", "Strategies compared", header, rows, note=note, best=best)


def draw_plan(
    plan: Plan,
    lengths: Int64[np.ndarray, " N *sides"],
    learning_rates: Float[np.ndarray, " S"] | None = None,
    cost: CostFn | None = None,
) -> list[Picture]:
    """The pictures of a plan; samples and steps are counted before they are drawn."""
    with drawing_settings():
        pictures = [_length_histogram(plan, lengths)]
        if plan.is_packed:
            pictures.append(_row_fill(plan, lengths))
        pictures += [*_per_bucket(plan, cost), _shapes(plan)]
        pictures.append(_per_step("sequences", "Samples of each step", "samples", plan.num_sequences))
        if learning_rates is not None:
            pictures.append(_per_step("learning-rate", "Learning rate of each step", "learning rate", learning_rates))
        return [*pictures, _neighbours(plan)] if plan.num_steps > 1 else pictures


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
    caption = f"Share of the tokens that are padding; line: {plan.padding:.2%} of all."
    padding = {"first": 100 * np.nan_to_num(figures.padding)}
    mean = 100 * plan.padding
    yield _bucket_bars(plan, "padding", "Padding of each bucket", caption, "padding in %", padding, line=mean)
    caption = "All steps of a bucket: tokens in blue, padding above them in orange."
    tokens = {"first": figures.num_tokens, "second": figures.padded_tokens - figures.num_tokens}
    yield _bucket_bars(plan, "tokens", "Tokens of each bucket", caption, "tokens", tokens)
    if figures.seconds is not None:
        caption = f"All steps of a bucket; {figures.seconds.sum():,.1f} s in all."
        seconds = {"first": figures.seconds}
        yield _bucket_bars(plan, "seconds", "Predicted seconds of each bucket", caption, "seconds", seconds)


def _bucket_bars(
    plan: Plan,
    name: str,
    title: str,
    caption: str,
    label: str,
    parts: dict[str, Real[np.ndarray, " K"]],
    *,
    line: float | None = None,
) -> Picture:
    """Bars of parts on top of each other, by colour."""
    figure, (axis,) = new_figure()
    bottom: Any = 0.0
    for colour, heights in parts.items():
        draw_bars(axis, heights, COLOURS[colour], bottom=bottom)
        bottom = bottom + heights
    if line is not None:
        axis.axhline(line, color=COLOURS["second"], linewidth=1)
    axis.set_ylabel(label)
    finish_bars(axis, [_length_of(bucket) for bucket in plan.buckets], "bucket length")
    format_ticks(axis.yaxis, integer=label == "tokens")
    return Picture(name, title, caption, to_svg(figure))


def _length_of(bucket: Bucket | PairBucket) -> str:
    return "+".join(f"{length:,}" for length in bucket.lengths)


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
