"""A plan as one HTML file that loads nothing and works offline. Letters: N samples, S steps, K buckets."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from jaxtyping import Int64

from jvarlen._common.checks import UserError
from jvarlen.planning.budget import CostFn
from jvarlen.planning.compare import StrategyFigures, comparison_cells
from jvarlen.planning.lengths import check_sample_lengths, sample_sizes
from jvarlen.planning.plan import Plan
from jvarlen.planning.steps import BucketFigures, bucket_figures
from jvarlen.reports import figures
from jvarlen.reports.figures import COLOURS, Page, Picture, Table
from jvarlen.targets.report import SOURCE

if TYPE_CHECKING:
    from jvarlen.targets.row_choice import RowChoice
    from jvarlen.training.rates import StepsOfRun

__all__ = ["draw_plan", "integer_bins", "write_html_report"]

_MOST_BINS = 48
_MOST_LINES = 16  # of buckets, drawn strongly


def write_html_report(
    path: str | os.PathLike[str],
    plan: Plan,
    lengths: npt.ArrayLike,
    *,
    cost: CostFn | None = None,
    comparison: Sequence[StrategyFigures] | None = None,
    by_memory: RowChoice | None = None,
    steps: StepsOfRun | None = None,
) -> None:
    """Writes a page that shows a plan: key figures, pictures, and a table of its buckets.

    The page is one file without scripts that loads nothing. Its size hardly depends on that of the plan.

    Args:
      path: the file; its directory must exist, and an existing file is replaced.
      plan: the plan.
      lengths: integers[N], tokens of every sample before truncation and packing; integers[N, 2] for pairs.
      cost: cost(rows, length) of one microbatch in seconds; its prediction is shown.
      comparison: as from `compare_strategies`, shown as a table.
      by_memory: as from `choose_rows`: bytes of each bucket are drawn against the limit, with the reason for its rows.
      steps: every step of the whole run, whose size, tokens and rate are drawn.

    Raises:
      ValueError: lengths that are not those of the plan.
    """
    num_lengths = len(plan.buckets.shapes[0].lengths)
    if num_lengths > 2:
        raise UserError(f"the page shows plans of one or two lengths, not of {num_lengths}: plan.report() shows them")
    checked = check_sample_lengths(lengths, num_lengths)
    if plan.largest_id >= len(checked):
        raise UserError(f"the plan has a sample of id {plan.largest_id}, but there are only {len(checked):,} lengths")
    num_tokens = int(sample_sizes(plan.planned_lengths(checked), plan.size).sum())
    planned = int(plan.num_tokens.sum())
    if num_tokens != planned:
        raise UserError(
            "these are not the lengths that the plan was made for: its samples have "
            f"{num_tokens:,} tokens by them, {planned:,} by the plan"
        )
    by_bucket, what = bucket_figures(plan, cost, checked), "pair" if num_lengths == 2 else "sample"
    tables = [_bucket_table(plan, by_bucket)]
    if comparison is not None:
        header, rows = comparison_cells(comparison)
        tables.append(Table("comparison", "Compared with other ways to batch", header, rows, best=0))
    if by_memory is not None:
        header, *cells = by_memory.bucket_cells()
        report, limit = by_memory.report, by_memory.max_bytes / 1e9
        of_bytes = f"{report.layout} on {report.target}, {limit:.4g} GB a device. {SOURCE}"
        tables.append(Table("rows", "Rows by memory", header, cells, note=of_bytes))
        header, *cells = by_memory.plan_cells()
        tables.append(Table("tokens", "The best single budget of tokens", header, cells, note="Seconds are estimates."))
    Page(
        title=f"Plan of {plan.num_samples:,} {what}s in {_count(len(plan.buckets.shapes), 'shape')}",
        summary=f"{_count(plan.num_steps, 'step')} an epoch, every {what} exactly once. Longer than the longest "
        f"bucket: {plan.num_truncated:,} cut, {plan.num_dropped:,} dropped.",
        key_figures=_key_figures(plan, by_bucket),
        pictures=[*draw_plan(plan, checked, by_bucket, by_memory), *([] if steps is None else [_draw_run(steps)])],
        tables=tables,
        digest=plan.digest,
    ).write(path)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _key_figures(plan: Plan, by_bucket: BucketFigures) -> list[tuple[str, str, str]]:
    num_tokens, padded_tokens = int(plan.num_tokens.sum()), int(plan.padded_tokens_per_step.sum())
    microbatches, largest = plan.num_microbatches, int(plan.buckets.padded_tokens.max())
    grouped, packed, predicted, sizes = [], [], [], plan.num_sequences
    of_microbatches = f"of {microbatches:,} microbatch{'' if microbatches == 1 else 'es'}"
    if plan.has_many_groups:
        mean = f"{plan.num_groups / plan.num_steps:.1f}"
        grouped = [("Groups per step", mean, f"mean; at most {plan.most_groups:,}, {of_microbatches}")]
    if plan.is_packed:
        packed = [("Samples per row", f"{plan.num_samples / plan.num_rows:.2f}", f"in {plan.num_rows:,} rows")]
    if by_bucket.seconds is not None:
        seconds = by_bucket.seconds.sum()
        predicted = [("Predicted", f"{seconds:,.1f} s", f"{seconds / plan.num_steps:.3g} s per step")]
    return [
        ("Padding", f"{plan.padding:.2%}", f"{padded_tokens - num_tokens:,} of {padded_tokens:,} {plan.buckets.unit}"),
        ("Shapes", f"{len(plan.buckets.shapes):,}", f"up to {largest:,} tokens with padding"),
        ("Steps", f"{plan.num_steps:,}", f"of {plan.num_groups:,} groups" if grouped else of_microbatches),
        *grouped,
        ("Samples per step", f"{np.median(sizes):,.0f}", f"median; {sizes.min():,} to {sizes.max():,}"),
        ("Tokens", f"{num_tokens:,}", f"{num_tokens / plan.num_steps:,.0f} per step"),
        *packed,
        *predicted,
    ]


def _bucket_table(plan: Plan, by_bucket: BucketFigures) -> Table:
    seconds = by_bucket.seconds
    runs = "Groups" if plan.has_many_groups else "Steps"
    header = ["Rows × length", "Samples", runs, "Tokens", "With padding", "Padding"]
    rows = []
    for k, bucket in enumerate(plan.buckets.shapes):
        padding = f"{by_bucket.padding[k]:.2%}" if by_bucket.num_groups[k] else "–"
        counts = (
            by_bucket.num_samples[k],
            by_bucket.num_groups[k],
            by_bucket.num_tokens[k],
            by_bucket.padded_tokens[k],
        )
        rows.append([f"{bucket.rows:,} × {plan.buckets.lengths_of(bucket)}", *(f"{n:,}" for n in counts), padding])
    totals = (plan.num_samples, plan.num_groups, int(plan.num_tokens.sum()), int(plan.padded_tokens_per_step.sum()))
    total = ["Total", *(f"{n:,}" for n in totals), f"{plan.padding:.2%}"]
    if seconds is not None:
        header.append("Predicted s")
        rows = [[*row, f"{value:,.1f}"] for row, value in zip(rows, seconds, strict=True)]
        total.append(f"{seconds.sum():,.1f}")
    return Table("buckets", "Buckets", header, rows, foot=total, note="Tokens are real ones, cut samples as cut.")


def draw_plan(
    plan: Plan, lengths: Int64[np.ndarray, " N *sides"], by_bucket: BucketFigures, by_memory: RowChoice | None = None
) -> list[Picture]:
    """The pictures of a plan; samples and steps are counted before they are drawn."""
    with figures.drawing_settings():
        pictures = [_length_histogram(plan, lengths), *_bars_of_buckets(plan, by_bucket), _shapes_over_steps(plan)]
        return pictures if by_memory is None else [*pictures, _draw_bytes(by_memory)]


def _length_histogram(plan: Plan, lengths: Int64[np.ndarray, " N *sides"]) -> Picture:
    edges = np.array([bucket.lengths for bucket in plan.buckets.shapes], np.int64)
    labels = ["tokens"] if lengths.ndim == 1 else ["tokens of the source", "tokens of the target"]
    figure, axes = figures.new_figure(len(labels))
    num_empty = int((lengths == 0).sum())
    for label, axis, all_values, edge in zip(labels, axes, lengths.reshape(len(lengths), -1).T, edges.T, strict=True):
        values = all_values[all_values > 0]
        counts, bins = np.histogram(values, integer_bins(int(values.min()), int(values.max())))
        axis.stairs(counts, bins, fill=True, color=COLOURS["first"], alpha=0.6)
        top = 1.05 * counts.max()
        axis.vlines(np.unique(edge), 0, top, color=COLOURS["second"], linewidth=1 if len(edge) <= _MOST_LINES else 0.6)
        axis.set(ylim=(0, top), xlabel=label, ylabel="samples")
        figures.scale_by_ratio(axis, "x")
        figures.format_ticks(axis.yaxis)
    what = "row" if plan.is_packed else "bucket"
    caption = (
        "Bars: samples by their length, before any is cut, on a logarithmic scale. "
        f"Lines: the longest that each {what} holds.{f' Not shown: {num_empty:,} of length 0.' if num_empty else ''}"
    )
    return Picture("lengths", "Lengths of the samples", caption, figures.to_svg(figure))


def _bars_of_buckets(plan: Plan, by_bucket: BucketFigures) -> list[Picture]:
    labels = [plan.buckets.lengths_of(bucket) for bucket in plan.buckets.shapes]
    bars = functools.partial(figures.bars_picture, labels=labels, xlabel="bucket length")
    padding = f"Share of the tokens that are padding; line: {plan.padding:.2%} of all."
    shares, line = [100 * by_bucket.padding], 100 * plan.padding
    runs = "groups" if plan.has_many_groups else "steps"
    tokens = f"All {runs} of a bucket: tokens in blue, padding above them in orange."
    counts = [by_bucket.num_tokens, by_bucket.padded_tokens - by_bucket.num_tokens]
    pictures = [
        bars("padding", "Padding of each bucket", padding, bars=shares, ylabel="padding in %", line=line),
        bars("tokens", "Tokens of each bucket", tokens, bars=counts, ylabel="tokens"),
    ]
    if (seconds := by_bucket.seconds) is not None:
        caption = f"All {runs} of a bucket; {seconds.sum():,.1f} s in all."
        pictures.append(bars("seconds", "Predicted seconds of each bucket", caption, bars=[seconds], ylabel="seconds"))
    return pictures


def _draw_bytes(by_memory: RowChoice) -> Picture:
    caption = f"GB of a device during a step of each bucket; the line is the limit. {SOURCE}"
    names, limit = [str(row.bucket) for row in by_memory.rows], by_memory.max_bytes / 1e9
    sizes = [np.array([row.num_bytes / 1e9 for row in by_memory.rows])]
    title = "Memory of a step"
    return figures.bars_picture("bytes", title, caption, names, sizes, xlabel="bucket", ylabel="GB", line=limit)


def _shapes_over_steps(plan: Plan) -> Picture:
    step = np.repeat(np.arange(plan.num_steps), np.diff(plan.step_groups))
    shapes = np.array(plan.buckets.shapes)[plan.group_bucket]
    lines = {"bucket length": [(step, side) for side in shapes.T[1:]], "rows": [(step, shapes[:, 0])]}
    about = "Blue: source; orange: target." if len(plan.buckets.shapes[0].lengths) == 2 else ""
    return figures.series_picture("shapes", "Shapes over the steps", lines, more=about, is_log=True)


def _draw_run(steps: StepsOfRun) -> Picture:
    numbers = np.arange(len(steps.num_tokens))
    lines = {
        "samples a step": steps.num_sequences,
        "tokens so far": np.cumsum(steps.num_tokens),
        "learning rate": steps.learning_rates,
    }
    about = f"{len(numbers):,} steps and {int(steps.num_tokens.sum()):,} tokens in all."
    with figures.drawing_settings():
        return figures.series_picture(
            "run", "The whole run", {label: [(numbers, values)] for label, values in lines.items()}, more=about
        )


def integer_bins(shortest: int, longest: int) -> Int64[np.ndarray, " bins_plus_1"]:
    """Bins between integers that grow by about equal ratios, none narrower than the one before it."""
    ratio = ((longest + 1) / shortest) ** (1 / _MOST_BINS)
    bins = [shortest]
    while bins[-1] <= longest:
        bins.append(max(bins[-1] + 1, math.ceil(bins[-1] * ratio)))
    return np.array(bins)
