"""Bucketing strategies and unplanned batching compared on the same lengths, and histograms of lengths, as text.

NumPy only. Letters: N samples, S steps, K buckets, M microbatches a step, b batches.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64, Int64

from jvarlen._common.checks import UserError
from jvarlen._common.text_table import text_table
from jvarlen.planning.batching import batch_by_tokens
from jvarlen.planning.buckets import Bucket, make_buckets
from jvarlen.planning.budget import Budget, Strategy, as_budget, checked_cost, round_up
from jvarlen.planning.lengths import FittedLengths, Overlong, check_lengths, fit_lengths
from jvarlen.planning.order import Order
from jvarlen.planning.packing import pack_samples
from jvarlen.planning.packings import Packing
from jvarlen.planning.plan import make_plan
from jvarlen.planning.row_lengths import choose_packed_buckets

__all__ = ["StrategyFigures", "compare_strategies", "comparison_cells", "comparison_table", "length_histogram"]

_PROBLEM_WIDTH = 100  # characters
_MOST_BINS = 14
_BAR = 40  # characters of the longest bar


class StrategyFigures(NamedTuple):
    """Figures of a strategy on the given lengths. All are 0, NaN or None where its plan cannot be made.

    Attributes:
      name: a strategy of `make_buckets`, "packed", or "no plan, ..." for batching without a plan.
      is_plan: whether all its shapes are known, and few, before the first step.
      num_shapes: shapes to compile.
      num_steps: steps of an epoch.
      padded_tokens: tokens with padding of all steps.
      padding: the share of these that hold no token.
      seconds: predicted for an epoch by the cost, compiling included where its seconds are given; None without a cost.
      relative: seconds, or tokens with padding without a cost, over those of the best plan.
      unevenness: seconds, or tokens with padding without a cost, of the largest step over the mean step.
      num_samples: samples of an epoch.
      num_dropped: samples left out because they are too long.
      num_truncated: samples cut because they are too long.
      problem: why it cannot be made, in brief; empty where it can.
    """

    name: str
    is_plan: bool
    num_shapes: int = 0
    num_steps: int = 0
    padded_tokens: int = 0
    padding: float = float("nan")
    seconds: float | None = None
    relative: float = float("nan")
    unevenness: float = float("nan")
    num_samples: int = 0
    num_dropped: int = 0
    num_truncated: int = 0
    problem: str = ""


class _Steps(NamedTuple):
    """An epoch: its shapes, and the tokens with padding and cost of each step."""

    num_shapes: int
    padded_tokens: Int64[np.ndarray, " S"]
    seconds: Float64[np.ndarray, " S"] | None


def compare_strategies(
    lengths: npt.ArrayLike,
    max_tokens: int | Budget,
    *,
    overlong: Overlong = "error",
    **budget: Any,
) -> list[StrategyFigures]:
    """Plans an epoch by every strategy, and by none, and gives the figures of each.

    Packed rows have only the longest length, or with a cost those of `choose_row_lengths`. Two lines show batching
    without a plan, each batch padded to its own longest sample: samples sorted by length, in batches as large as
    `max_tokens` allows (`batch_by_tokens`), and dataset order, in batches that fit the budget if all are the longest.

    Args:
      lengths: integers[N], tokens a sample.
      max_tokens: budget of one microbatch in tokens, padding included; or a `Budget`. With a cost, strategies are
        compared by seconds, not tokens with padding.
      overlong: what happens to samples longer than `max_length`: `"error"`, `"drop"` or `"truncate"`.
      budget: the other fields of `Budget`, as keywords.

    Returns:
      Figures of every strategy of `make_buckets`, packed rows, and the two without a plan, or why there are none.

    Example:
      >>> figures = compare_strategies([3, 4, 4, 9, 16], 32, max_shapes=2)
      >>> [(each.name, each.num_shapes, round(each.relative, 2)) for each in figures[:2]]
      [('optimal', 2, 1.0), ('pad_to_max', 1, 2.18)]
    """
    limits = as_budget(max_tokens, budget)
    lengths = check_lengths(lengths)  # of all samples, so that errors tell their ids
    fitted = fit_lengths(lengths, limits.max_length, overlong)
    rounded = round_up(fitted.lengths, limits.length_multiple)

    def in_buckets(strategy: Strategy) -> _Steps:
        return _planned(fitted.lengths, make_buckets(lengths, limits, strategy=strategy, overlong=overlong), limits)

    def in_packed_rows() -> _Steps:
        buckets, _ = choose_packed_buckets(lengths, limits, overlong, order=Order("length"), seed=0)
        return _planned(pack_samples(fitted.lengths, [bucket.length for bucket in buckets]), buckets, limits)

    def in_sorted_batches() -> _Steps:
        ascending, most = np.sort(rounded), limits.max_sequences
        multiple = limits.row_multiple
        batches = batch_by_tokens(ascending, limits.max_tokens, max_sequences=most, sequence_multiple=multiple)
        return _batched(ascending, batches.offsets[:-1], limits)

    def in_fixed_batches() -> _Steps:
        rows = int(limits.row_caps(rounded.max(keepdims=True))[0])  # at least 1, or no bucket held the longest
        return _batched(rounded, np.arange(0, len(rounded), rows), limits)

    figures: list[StrategyFigures] = []
    errors: list[UserError] = []

    def add(name: str, is_plan: bool, make: Callable[[], _Steps]) -> None:
        try:
            figures.append(_figures_of(name, is_plan, make(), fitted, limits.compile_seconds))
        except UserError as error:
            errors.append(error)
            problem = textwrap.shorten(str(error), _PROBLEM_WIDTH, placeholder=" …")
            figures.append(StrategyFigures(name, is_plan, problem=problem))

    for strategy in sorted(get_args(Strategy), key="optimal".__ne__):  # the default comes first
        add(strategy, True, functools.partial(in_buckets, strategy))
    add("packed", True, in_packed_rows)
    if len(errors) == len(figures):
        raise errors[0]
    add("no plan, sorted", False, in_sorted_batches)
    add("no plan, dataset order", False, in_fixed_batches)
    least = min(_spent(each) for each in figures if each.is_plan and not each.problem)
    return [each if each.problem else each._replace(relative=_spent(each) / least) for each in figures]


def _planned(rows: Int64[np.ndarray, " n"] | Packing, buckets: tuple[Bucket, ...], budget: Budget) -> _Steps:
    plan = make_plan(rows, buckets, order="length", microbatches_per_step=budget.microbatches_per_step)
    seconds = None
    if budget.cost is not None:
        per_microbatch = checked_cost(budget.cost, *np.array(buckets, np.int64).T)
        seconds = plan.microbatches_per_step * per_microbatch[plan.step_bucket]
    return _Steps(len(buckets), plan.padded_tokens_per_step, seconds)


def _batched(ordered: Int64[np.ndarray, " n"], starts: Int64[np.ndarray, " b"], budget: Budget) -> _Steps:
    """M consecutive batches a step, each padded to its own longest; the last step may have fewer."""
    rows, longest = np.diff(starts, append=len(ordered)), np.maximum.reduceat(ordered, starts)
    step_starts = np.arange(0, len(starts), budget.microbatches_per_step)
    seconds = None
    if budget.cost is not None:
        seconds = np.add.reduceat(checked_cost(budget.cost, rows, longest), step_starts)
    num_shapes = len(np.unique(np.stack([rows, longest]), axis=1).T)
    return _Steps(num_shapes, np.add.reduceat(rows * longest, step_starts), seconds)


def _figures_of(
    name: str, is_plan: bool, steps: _Steps, fitted: FittedLengths, compile_seconds: float | None
) -> StrategyFigures:
    padded_tokens = int(steps.padded_tokens.sum())
    per_step, seconds = steps.padded_tokens, None
    if steps.seconds is not None:
        per_step, seconds = steps.seconds, float(steps.seconds.sum()) + steps.num_shapes * (compile_seconds or 0.0)
    return StrategyFigures(
        name=name,
        is_plan=is_plan,
        num_shapes=steps.num_shapes,
        num_steps=len(steps.padded_tokens),
        padded_tokens=padded_tokens,
        padding=1.0 - int(fitted.lengths.sum()) / padded_tokens,
        seconds=seconds,
        unevenness=float(per_step.max() / per_step.mean()),
        num_samples=len(fitted.lengths),
        num_dropped=fitted.num_dropped,
        num_truncated=fitted.num_truncated,
    )


def _spent(figures: StrategyFigures) -> float:
    """The figure that strategies are compared by."""
    return float(figures.padded_tokens) if figures.seconds is None else figures.seconds


def comparison_table(figures: Sequence[StrategyFigures]) -> str:
    """The figures as aligned text.

    Args:
      figures: as from `compare_strategies`.

    Returns:
      Lines: a header, a line a strategy with the best plan marked, the number of samples, and what is compared.
    """
    header, cells, best, note = comparison_cells(figures)
    header = [name[0].lower() + name[1:] for name in header]
    rows = [[*row, "← best"] if place == best else row for place, row in enumerate(cells)]
    counted = figures[best]
    samples = f"{counted.num_samples:,} samples; {counted.num_truncated:,} cut, {counted.num_dropped:,} dropped"
    return f"{text_table([header, *rows])}\n{samples}\n{note}"


def comparison_cells(figures: Sequence[StrategyFigures]) -> tuple[list[str], list[list[str]], int, str]:
    """A header, cells of each strategy, the place of the best plan, and a note; ValueError if no plan can be made."""
    possible = [place for place, each in enumerate(figures) if each.is_plan and not each.problem]
    if not possible:
        raise UserError("none of the figures is of a plan that can be made")
    best = min(possible, key=lambda place: _spent(figures[place]))
    has_seconds = figures[best].seconds is not None
    what = "seconds" if has_seconds else "tokens with padding"
    note = f"× best: {what} over those of the best plan; uneven: {what} of the largest step over the mean step"
    header = ["Strategy", "Shapes", "Steps", "Padding", "With padding", "× best", "Uneven"]
    header[5:5] = ["Predicted s"] if has_seconds else []
    rows = [
        [each.name, f"not possible: {each.problem}"]
        if each.problem
        else [
            each.name,
            f"{each.num_shapes:,}",
            f"{each.num_steps:,}",
            f"{each.padding:.2%}",
            f"{each.padded_tokens:,}",
            *([] if each.seconds is None else [f"{each.seconds:,.1f}"]),
            f"{each.relative:.3f}",
            f"{each.unevenness:.2f}",
        ]
        for each in figures
    ]
    return header, rows, best, note


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
