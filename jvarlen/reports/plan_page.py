"""A plan as one HTML file that loads nothing and works offline."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from jaxtyping import Int64

from jvarlen._common.checks import UserError
from jvarlen.planning.buckets import PairBucket
from jvarlen.planning.budget import CostFn
from jvarlen.planning.lengths import check_lengths, check_pair_lengths
from jvarlen.planning.plan import Plan
from jvarlen.planning.steps import bucket_figures
from jvarlen.reports.compare import StrategyFigures, best_of
from jvarlen.reports.page import Table, write_page
from jvarlen.reports.plan_figures import draw_plan

__all__ = ["write_html_report"]


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
    num_tokens, num_positions = int(plan.num_tokens.sum()), int(plan.positions_per_step.sum())
    correlation = plan.neighbour_correlation
    figures = [
        ("Padding", f"{plan.padding:.2%}", f"{num_positions - num_tokens:,} of {num_positions:,} positions"),
        ("Shapes", f"{len(plan.buckets):,}", f"up to {max(b.num_positions for b in plan.buckets):,} positions"),
        ("Steps", f"{plan.num_steps:,}", f"of {plan.microbatches_per_step:,} microbatch{_es(plan)}"),
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


def _es(plan: Plan) -> str:
    return "" if plan.microbatches_per_step == 1 else "es"


def _bucket_table(plan: Plan, cost: CostFn | None) -> Table:
    figures = bucket_figures(plan, cost)
    seconds = figures.seconds
    header = ["Rows × length", "Samples", "Steps", "Tokens", "Positions", "Padding"]
    rows = []
    for k, bucket in enumerate(plan.buckets):
        padding = f"{figures.padding[k]:.2%}" if figures.num_steps[k] else "–"
        counts = (figures.num_samples[k], figures.num_steps[k], figures.num_tokens[k], figures.num_positions[k])
        length = "+".join(f"{length:,}" for length in bucket.lengths)
        rows.append([f"{bucket.rows:,} × {length}", *(f"{count:,}" for count in counts), padding])
    totals = (plan.num_samples, plan.num_steps, int(plan.num_tokens.sum()), int(plan.positions_per_step.sum()))
    total = ["Total", *(f"{count:,}" for count in totals), f"{plan.padding:.2%}"]
    if seconds is not None:
        header.append("Predicted s")
        rows = [[*row, f"{value:,.1f}"] for row, value in zip(rows, seconds, strict=True)]
        total.append(f"{seconds.sum():,.1f}")
    return Table("buckets", "Buckets", header, rows, foot=total, note="Tokens are real ones, cut samples as cut.")


def _comparison_table(comparison: Sequence[StrategyFigures]) -> Table:
    best = best_of(comparison)
    has_seconds = best.seconds is not None
    header = ["Strategy", "× best", "Shapes", "Steps", "Padding", "Uneven", "Positions"]
    header += ["Predicted s"] if has_seconds else []
    rows = []
    for each in comparison:
        if each.problem:
            rows.append([each.name, f"Not possible: {each.problem}"])
            continue
        cells = [each.name, f"{each.relative:.3f}", f"{each.num_shapes:,}", f"{each.num_steps:,}"]
        cells += [f"{each.padding:.2%}", f"{each.unevenness:.2f}", f"{each.num_positions:,}"]
        cells += [] if each.seconds is None else [f"{each.seconds:,.1f}"]
        rows.append(cells)
    what = "seconds" if has_seconds else "positions"
    note = (
        f"Best plan: {best.name}. × best: {what} over those of the best plan. Uneven: {what} of the largest step over "
        "the mean step."
    )
    place = next(place for place, each in enumerate(comparison) if each is best)
    return Table("comparison", "Strategies compared", header, rows, note=note, best=place)
