"""Compares a plan with training without one, and draws histograms of lengths, as text.

NumPy only. Letters: N samples, S steps, M microbatches per step.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import NamedTuple, Unpack

import numpy as np
import numpy.typing as npt
from jaxtyping import Int64

from jvarlen._common.terminal import text_table
from jvarlen.planning.batching import batch_by_tokens
from jvarlen.planning.budget import Budget, BudgetFields, as_budget, evaluate_cost, takes_budget
from jvarlen.planning.lengths import check_lengths
from jvarlen.planning.make_plan import plan_rows, plan_samples
from jvarlen.planning.order import Order
from jvarlen.planning.plan import Plan
from jvarlen.planning.row_lengths import choose_packed_buckets
from jvarlen.planning.rules import PlanRules
from jvarlen.planning.steps import bucket_figures

__all__ = ["StrategyFigures", "compare_strategies", "comparison_cells", "comparison_table", "length_histogram"]

_MOST_BINS = 14
_BAR = 40  # characters of the longest bar


class StrategyFigures(NamedTuple):
    """Figures of an epoch.

    Attributes:
      name: "this plan", or what is done in its place.
      num_shapes: shapes to compile.
      num_steps: steps of an epoch.
      padded_tokens: tokens with padding of all steps.
      padding: the share of these that hold no token.
      seconds: predicted by the cost for all steps, compiling included where its seconds are given; None without a cost.
      relative: seconds, or tokens with padding without a cost, over those of this plan.
    """

    name: str
    num_shapes: int
    num_steps: int
    padded_tokens: int
    padding: float
    seconds: float | None
    relative: float = 1.0


@takes_budget
def compare_strategies(
    plan: Plan, lengths: npt.ArrayLike, max_tokens: int | Budget, **budget: Unpack[BudgetFields]
) -> list[StrategyFigures]:
    """Figures of a plan, and of other ways to train on the same tokens without it, in steps of one shape.

    - The budget's buckets, beside a plan whose steps have several groups; not where rows are packed.
    - Buckets whose lengths are powers of two.
    - Packing into rows of one length, as `choose_row_lengths` has it; not beside a packed plan.
    - Dataset order, in batches of as many samples as `max_tokens` allows, each padded to its longest sample.

    Args:
      plan: a plan of samples of one length; chunks of split samples count as samples.
      lengths: integers[N], tokens per sample, those that the plan was made for.
      max_tokens: budget of one microbatch in tokens, padding included; or a `Budget`. With a cost, all is compared by
        seconds, not tokens with padding.
      budget: the other fields of `Budget`, as keywords.

    Returns:
      Figures of the plan, then of the others.

    Example:
      >>> from jvarlen.planning.make_plan import make_plan
      >>> lengths = [3, 16, 4, 9, 4, 15, 12]
      >>> plan = make_plan(lengths, max_tokens=32)
      >>> for each in compare_strategies(plan, lengths, 32):
      ...     print(each.name, each.num_shapes, round(each.relative, 2))
      this plan 6 1.0
      lengths powers of two 3 1.21
      packed rows 1 1.02
      dataset order, padded to each batch's longest 3 1.41
    """
    given = dataclasses.replace(as_budget(max_tokens, budget), num_microbatches=plan.num_microbatches)
    of_rows = dataclasses.replace(given, strategy="optimal", max_shapes=1)
    limits, by_length = dataclasses.replace(of_rows, max_length=None), PlanRules(Order("length"))
    tokens = plan.planned_lengths(check_lengths(lengths))[np.argsort(plan.sample_ids, kind="stable")]
    figures = [_figures_of("this plan", plan, lengths, limits)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the cost model was measured")  # which was said of this plan
        if plan.has_many_groups and not plan.is_packed:
            figures.append(_figures_of("steps of one shape", plan_samples(tokens, given, by_length), tokens, limits))
        powers = dataclasses.replace(limits, strategy="powers_of_two")
        figures.append(_figures_of("lengths powers of two", plan_samples(tokens, powers, by_length), tokens, limits))
        if not plan.is_packed:
            packed, rows = choose_packed_buckets(tokens, of_rows, PlanRules(Order("dataset"), packing="best_fit"))
            figures.append(_figures_of("packed rows", plan_rows(rows, packed, by_length), tokens, limits))
    figures.append(_in_dataset_order(tokens, limits))
    base = figures[0].seconds or figures[0].padded_tokens
    return [each._replace(relative=(each.seconds or each.padded_tokens) / base) for each in figures]


def _figures_of(name: str, plan: Plan, lengths: npt.ArrayLike, budget: Budget) -> StrategyFigures:
    of_steps = bucket_figures(plan, budget.cost, lengths).seconds
    seconds = None if of_steps is None else float(of_steps.sum())
    padded_tokens = int(plan.padded_tokens_per_step.sum())
    figures = StrategyFigures(name, len(plan.buckets.shapes), plan.num_steps, padded_tokens, plan.padding, seconds)
    return _add_compiling(figures, budget)


def _in_dataset_order(tokens: Int64[np.ndarray, " n"], budget: Budget) -> StrategyFigures:
    rounded = budget.of_length().round_lengths(tokens)
    batches = batch_by_tokens(
        rounded, budget.max_tokens, max_sequences=budget.max_sequences, sequence_multiple=budget.row_multiple
    )
    rows, longest = batches.num_sequences, np.maximum.reduceat(rounded, batches.offsets[:-1])
    seconds = None if budget.cost is None else float(evaluate_cost(budget.cost, rows, longest).sum())
    num_shapes = len(np.unique(np.stack([rows, longest]), axis=1).T)
    num_steps, padded_tokens = -(-len(rows) // budget.num_microbatches), int((rows * longest).sum())
    name, padding = "dataset order, padded to each batch's longest", 1.0 - int(tokens.sum()) / padded_tokens
    return _add_compiling(StrategyFigures(name, num_shapes, num_steps, padded_tokens, padding, seconds), budget)


def _add_compiling(figures: StrategyFigures, budget: Budget) -> StrategyFigures:
    if figures.seconds is None:
        return figures
    return figures._replace(seconds=figures.seconds + figures.num_shapes * (budget.compile_seconds or 0.0))


def comparison_table(figures: Sequence[StrategyFigures]) -> str:
    """The figures as aligned text.

    Args:
      figures: as from `compare_strategies`.

    Returns:
      Lines: a header, and one of each.
    """
    header, rows = comparison_cells(figures)
    return text_table([header, *rows], align="<" + ">" * (len(header) - 1))


def comparison_cells(figures: Sequence[StrategyFigures]) -> tuple[list[str], list[list[str]]]:
    """A header, and cells of each line."""
    has_seconds = figures[0].seconds is not None
    header = ["", "shapes", "steps", "padding", "tokens with padding", *["predicted s"] * has_seconds, "× this plan"]
    rows = [
        [
            each.name,
            f"{each.num_shapes:,}",
            f"{each.num_steps:,}",
            f"{each.padding:.2%}",
            f"{each.padded_tokens:,}",
            *([] if each.seconds is None else [f"{each.seconds:,.1f}"]),
            f"{each.relative:.2f}",
        ]
        for each in figures
    ]
    return header, rows


def length_histogram(lengths: Int64[np.ndarray, " N"]) -> str:
    """A histogram of lengths as text, with bins that grow by equal ratios.

    Args:
      lengths: int64[N], each ≥ 1.

    Returns:
      One line a bin, with its range, number of samples, share of all tokens, and a bar; then a line of figures.
    """
    edges = np.unique(np.geomspace(lengths.min(), lengths.max() + 1, _MOST_BINS + 1).round().astype(np.int64))
    bin_of_sample = np.searchsorted(edges, lengths, side="right") - 1
    samples = np.bincount(bin_of_sample, minlength=len(edges) - 1)
    tokens = np.bincount(bin_of_sample, lengths, len(edges) - 1)
    rows = [["length", "samples", "of tokens"]]
    for low, high, count, share in zip(edges, edges[1:] - 1, samples, tokens / tokens.sum(), strict=False):
        bar = "█" * round(_BAR * count / samples.max())
        rows.append([f"{low:>6,} – {high:>6,}", f"{count:,}", f"{share:.1%}", bar])
    table = text_table(rows, align=">", least_widths=(15, 10, 10), gap=" ")
    return (
        f"{table}\n{len(lengths):,} samples, {lengths.sum():,} tokens; shortest {lengths.min():,}, "
        f"median {int(np.median(lengths)):,}, 99 % up to {int(np.percentile(lengths, 99)):,}, longest {lengths.max():,}"
    )
