"""The lengths of packed rows, and whether to pack: what costs least, compiling included.

Letters: N samples, K buckets.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple, Unpack

import numpy as np
import numpy.typing as npt
from jaxtyping import Int64

from jvarlen._common.checks import UserError, is_integer, list_first, list_offenders, offenders_where
from jvarlen.planning import budget as budgets
from jvarlen.planning import packing as packings
from jvarlen.planning.buckets import AnyBucket, Buckets, CountedSamples, MultiLengthBucket, choose_buckets
from jvarlen.planning.budget import Budget, BudgetFields, as_budget, evaluate_cost, round_up, takes_budget
from jvarlen.planning.cost_model import CostModel
from jvarlen.planning.lengths import PackedOverlong, check_sample_lengths, fit_lengths, split_lengths
from jvarlen.planning.make_buckets import check_budget_of_several
from jvarlen.planning.packing import Packing, pack_by_method
from jvarlen.planning.placing import NO_MOST, RowSizes, rows_by_tokens
from jvarlen.planning.rules import PackingChoice, PlanRules, RowPacking

__all__ = [
    "ShapeCandidate", "choose_candidate", "choose_packed_buckets", "choose_row_lengths", "decide_packing",
    "row_length_for",
]  # fmt: skip

_MOST_TRIED = 32  # lengths that may be added
_LEAST_GAIN = 1e-9  # as a share, so that rounding decides nothing
_LEAST_PADDING = 0.01  # of one packed shape that others are worth trying for


@takes_budget
def choose_row_lengths(
    lengths: npt.ArrayLike,
    max_tokens: int | Budget,
    *,
    overlong: PackedOverlong = "error",
    **budget: Unpack[BudgetFields],
) -> tuple[int, ...]:
    """Chooses a few row lengths for packing, so that the plan of the packed rows costs little.

    The cost of a plan of `pack_samples(lengths, row_lengths, …)` is the sum over all microbatches of rows × length,
    padding rows included, or of `cost(rows, length)`, plus `compile_seconds` for every length. From a `CostModel` only
    the constant and the tokens count here, since the samples have the same pairs of tokens in any rows; where it limits
    a microbatch (`max_cost`), a row counts as one sample.

    The set begins with `max_length`, rounded down. Without one, or if a row of it is above a limit, it begins with the
    length of r rows that fill `max_tokens`, rounded down, with the most r for which a row is at least twice as long as
    the longest sample; if there is none, at least as long. (If another limit allows no such row either, it begins with
    the longest sample, rounded up.) As long as that is cheaper, the set gets one more length: that with which it costs
    least, of equal ones the shortest. Tried are every ⌈(D − 1) / 32⌉-th of the D distinct rounded lengths of samples,
    counted down from the longest, which does not count. (If there are more than 5,000 distinct lengths, D is the number
    of the candidates of `make_buckets`, in the rows of samples as long as these.)

    For pairs, the rows of all have one length for each side. It is that of the longest, rounded; but the side that
    would fill up first is, where `max_tokens` and `max_length` allow it, as long as the mean pair needs beside the
    other side, rounded up. Both are then enlarged alike, and rounded down: until the longer one is `max_length` long;
    without one, or if that is above `max_tokens`, until r rows fill `max_tokens`, by the same rule as above, which
    counts both sides.

    Args:
      lengths: as in `make_buckets`, one or two a sample.
      max_tokens: as in `make_buckets`.
      overlong: as in `make_buckets`, or `"split"`: samples above `max_length` count as the chunks that they come in.
      budget: the other fields of `Budget`, as keywords; `max_shapes` is the most row lengths.

    Returns:
      Row lengths, strictly ascending; the last holds the longest sample. For pairs, those of source and target.

    Raises:
      ValueError: as in `make_buckets`.

    Example:
      >>> choose_row_lengths([3, 5, 8, 8], max_tokens=100, max_shapes=1)
      (16,)
      >>> choose_row_lengths([[3, 9], [3, 4], [8, 8], [2, 4]], max_tokens=42)
      (16, 26)
    """
    return _row_lengths_of(check_sample_lengths(lengths), as_budget(max_tokens, budget), overlong)


def _row_lengths_of(
    lengths: Int64[np.ndarray, " N *sides"], limits: Budget, overlong: PackedOverlong
) -> tuple[int, ...]:
    """`choose_row_lengths` for checked lengths."""
    if lengths.ndim == 2:
        return _pair_row_lengths(lengths, limits, overlong)
    if limits.strategy != "optimal":
        raise UserError(f"row lengths are chosen by their cost: strategy must be 'optimal', not {limits.strategy!r}")
    if overlong == "split":
        overlong = "error"
        if limits.max_length is not None:
            lengths = split_lengths(lengths, limits.max_length).lengths
    fit_lengths(lengths, limits.max_length, overlong, is_packed=True)
    counted = CountedSamples(lengths, limits, overlong)
    histogram, _ = counted.candidates()
    longest_row = row_length_for(int(counted.histogram.values[-1]), limits)
    shorter = histogram.rounded[:-1]
    tried = np.append(shorter[:: -max(1, -(-len(shorter) // _MOST_TRIED))][::-1], longest_row)
    caps = limits.row_caps(tried)
    if isinstance(limits.cost, CostModel):
        limits = dataclasses.replace(limits, cost=dataclasses.replace(limits.cost, quadratic=0.0))
    values, counts = histogram.values[::-1].copy(), histogram.counts[::-1].copy()

    def plan_cost(chosen: Int64[np.ndarray, " K"]) -> float:
        tokens, num_rows = rows_by_tokens(values, counts, RowSizes(chosen, np.full(len(chosen), NO_MOST)))
        rows_held = np.zeros(len(chosen), np.int64)
        np.add.at(rows_held, np.searchsorted(chosen, tokens), num_rows)
        costs = budgets.bucket_costs(limits, rows_held, caps[np.searchsorted(tried, chosen)], chosen)
        return math.fsum(costs.tolist())

    chosen = np.array([longest_row])
    least = plan_cost(chosen)
    while len(chosen) < limits.max_shapes:
        more = [np.union1d(chosen, length) for length in tried if length not in chosen]
        cost, place = min(((plan_cost(each), place) for place, each in enumerate(more)), default=(least, 0))
        if cost >= least:
            break
        chosen, least = more[place], cost
    return tuple(chosen.tolist())


def row_length_for(longest: int, limits: Budget) -> int:
    """The length of packed rows of samples up to `longest` tokens, by the rule of `choose_row_lengths`."""
    multiple = _multiple_of_rows(limits)
    return _enlarge([round_up(longest, multiple)], round_up(2 * longest, multiple), limits)[0]


def _multiple_of_rows(limits: Budget) -> int:
    """What all lengths of packed rows are a multiple of."""
    if not is_integer(limits.length_multiple) or limits.length_offset != 0:
        raise UserError(
            f"packed rows have one length_multiple, and length_offset 0, not {limits.length_multiple} and "
            f"{limits.length_offset}"
        )
    return limits.length_multiple


def _enlarge(sides: list[int], room_for_two: int, limits: Budget, most: int | None = None) -> tuple[int, ...]:
    """The lengths of a row's sides, enlarged alike from the least ones; `room_for_two` is what two such rows take."""
    multiple = _multiple_of_rows(limits)
    num_rows = max(limits.max_tokens // room_for_two, 1)  # of one sample only where one row is all
    for wanted, least in ((limits.max_length or 0, max(sides)), (limits.max_tokens // num_rows, sum(sides))):
        lengths = [side * wanted // least // multiple * multiple for side in sides]
        within = wanted >= least and (most is None or max(lengths) <= most)
        if within and limits.row_caps(np.array(sum(lengths))) >= 1:
            return tuple(lengths)
    return tuple(sides)


def choose_packed_buckets(
    lengths: Int64[np.ndarray, " N *sides"], budget: Budget, rules: PlanRules
) -> tuple[Buckets[AnyBucket], Packing]:
    """The buckets of packed rows, of the given lengths, else of `choose_row_lengths`; and the rows of epoch 0."""
    # Without a cost they have only the longest length, since packed rows leave little padding to save.
    is_pairs, row_lengths = lengths.ndim == 2, rules.row_lengths
    _multiple_of_rows(budget)
    if row_lengths is not None and not is_pairs:
        budgets.check_bucket_lengths(row_lengths, "row_lengths")
        budget = dataclasses.replace(budget, strategy=row_lengths)
    if not is_pairs and budget.given_lengths is not None:
        row_lengths = tuple(budget.given_lengths.tolist())
        if broken := budgets.broken_by_one_row(budget, row_lengths[-1]):
            raise UserError(f"{broken} leaves no row of {row_lengths[-1]} tokens")
    elif not is_pairs and rules.packing == "wrapped":
        row_lengths = (_wrapped_row_length(lengths, budget),)
    elif row_lengths is None:
        limits = budget if budget.cost or is_pairs else dataclasses.replace(budget, max_shapes=1)
        row_lengths = _row_lengths_of(lengths, limits, rules.overlong)
    rows = pack_by_method(lengths, row_lengths, packings.rules_of_packing(rules)[0]._replace(epoch=0))
    if is_pairs:
        return _bucket_of_packed_pairs(rows, budget), rows
    return choose_buckets(rows.num_tokens, dataclasses.replace(budget, strategy=row_lengths, max_length=None)), rows


def _bucket_of_packed_pairs(rows: Packing, budget: Budget) -> Buckets[MultiLengthBucket]:
    """The bucket of packed rows of pairs, which all have one shape."""
    check_budget_of_several(budget, packed=True)
    source, target = rows.row_lengths
    cap = budgets.round_caps(budget, np.array(budget.max_tokens // (source + target)))
    if not cap:
        raise UserError(f"max_tokens {budget.max_tokens} leaves no row of {source}+{target} tokens")
    _, num_rows = budgets.steps_and_rows(budget, np.array(rows.num_rows), cap)
    return Buckets((MultiLengthBucket((int(num_rows), source, target)),), budget.num_microbatches)


def _pair_row_lengths(lengths: Int64[np.ndarray, "N 2"], limits: Budget, overlong: PackedOverlong) -> tuple[int, ...]:
    """`choose_row_lengths` for pairs."""
    check_budget_of_several(limits, packed=True)
    if lengths.shape[1] > 2:
        raise UserError(f"packed rows hold samples of one or two lengths, not of {lengths.shape[1]}")
    multiple = _multiple_of_rows(limits)
    pairs = fit_lengths(lengths, limits.max_length, overlong, is_packed=True).lengths
    longest: list[int] = round_up(np.maximum(pairs.max(axis=0), 1), multiple).tolist()
    most = min(limits.max_length or packings.MAX_PAIR_ROW, packings.MAX_PAIR_ROW)
    if max(longest) > most or sum(longest) > limits.max_tokens:
        of_longest = offenders_where((pairs == pairs.max(axis=0)).any(axis=1), pairs)
        raise UserError(
            f"rows of {longest} tokens, as the longest samples of both sides need, must be within max_tokens together, "
            f"and {most} each: {list_offenders(*of_longest, limits.max_tokens)}"
        )
    totals: list[int] = pairs.sum(axis=0).tolist()
    side = int(longest[0] * totals[1] >= longest[1] * totals[0])  # that fills up first
    if totals[1 - side]:
        needed = round_up(-(-longest[1 - side] * totals[side] // totals[1 - side]), multiple)
        if longest[side] < needed <= min(most, limits.max_tokens - longest[1 - side]):
            longest[side] = needed
    return _enlarge(longest, 2 * sum(longest), limits, most)


def _wrapped_row_length(lengths: Int64[np.ndarray, " N"], budget: Budget) -> int:
    """`max_length`, which rows are filled up to; else that of `row_length_for`."""
    if budget.strategy != "optimal":
        raise UserError(f"strategy {budget.strategy!r} chooses lengths for single samples: wrapped rows are max_length")
    row_length = budget.max_length or row_length_for(int(lengths.max()), budget)
    if row_length % (multiple := _multiple_of_rows(budget)):
        raise UserError(f"max_length ({row_length}) is not a multiple of length_multiple ({multiple})")
    if budget.row_caps(np.array([row_length]))[0] < 1:
        which = "max_length" if budget.max_length else "the longest sample: give max_length, the length of rows"
        raise UserError(f"max_tokens ({budget.max_tokens}) has no room for a row of {row_length} tokens, {which}")
    return row_length


class ShapeCandidate(NamedTuple):
    """Shapes, and what training in them takes."""

    buckets: Buckets[AnyBucket]
    method: RowPacking
    seconds: float

    def __str__(self) -> str:
        number = len(self.buckets.shapes)
        return f"{number} {'padded' if self.method == 'padded' else 'packed'} shape{'s' * (number > 1)}"


def choose_candidate(
    lengths: Int64[np.ndarray, " N *sides"], budget: Budget, rules: PlanRules, num_epochs: float = 1.0
) -> tuple[ShapeCandidate, str]:
    """The candidate that takes the fewest seconds, and why; a tie goes to padded shapes, then to one packed shape."""
    if lengths.ndim == 2:
        raise UserError(
            f'packing="auto" is for samples of one length each, not of {lengths.shape[1]}: say "padded", or of two '
            '"best_fit"'
        )
    if budget.cost is None:
        raise UserError('packing="auto" chooses by seconds: it needs a cost of microbatches in seconds (cost=)')
    if budget.compile_seconds is not None:
        budget = dataclasses.replace(budget, compile_seconds=budget.compile_seconds / num_epochs)
    candidates: list[ShapeCandidate] = []
    if rules.packing != "best_fit":
        padded = choose_buckets(lengths, budget, rules.overlong)
        fitted = fit_lengths(lengths, padded.shapes[-1].length, rules.overlong).lengths
        candidates.append(ShapeCandidate(padded, "padded", _predict_epoch(fitted, padded, budget)[0]))
    for max_shapes in () if rules.packing == "padded" else (1, budget.max_shapes):
        limits = dataclasses.replace(budget, max_shapes=max_shapes)
        buckets, packing = choose_packed_buckets(lengths, limits, rules._replace(packing="best_fit"))
        seconds, padding = _predict_epoch(packing, buckets, budget)
        candidates.append(ShapeCandidate(buckets, "best_fit", seconds))
        if isinstance(budget.cost, CostModel) and padding <= _LEAST_PADDING:
            break  # with pairs of tokens that are the same in all rows, others save no more than that
    candidates = [each._replace(seconds=num_epochs * each.seconds) for each in candidates]
    least = min(each.seconds for each in candidates) * (1 + _LEAST_GAIN)
    chosen = next(each for each in candidates if each.seconds <= least)
    listed = dict.fromkeys(f"{each.seconds:,.1f} in {each}" for each in candidates)
    return chosen, f"{chosen}: predicted seconds, compiling included, are {', '.join(listed)}"


def _predict_epoch(
    rows_of: Int64[np.ndarray, " N"] | Packing, buckets: Buckets[AnyBucket], budget: Budget
) -> tuple[float, float]:
    """Seconds of an epoch of samples or packed rows, compiling included, and the share of padding."""
    assert budget.cost is not None
    rows, length = np.array(buckets.shapes, np.int64).T
    num_tokens = rows_of.num_tokens if isinstance(rows_of, Packing) else rows_of
    bucket_of_row = np.searchsorted(length, num_tokens)
    held = np.bincount(bucket_of_row, minlength=len(length))
    num_microbatches = budget.num_microbatches * budgets.num_steps(budget, held, rows)
    each = evaluate_cost(budget.cost, rows, length)
    if isinstance(rows_of, Packing) and isinstance(budget.cost, CostModel):
        of_rows = np.add.reduceat(rows_of.sample_lengths**2, rows_of.row_offsets[:-1])
        pairs = np.bincount(bucket_of_row, of_rows, len(length)) / np.maximum(num_microbatches, 1)
        each = budget.cost(rows, length, pairs=pairs)
    seconds = float((num_microbatches * each).sum()) + len(buckets.shapes) * (budget.compile_seconds or 0.0)
    return seconds, 1 - int(num_tokens.sum()) / int((num_microbatches * rows * length).sum())


def decide_packing(for_packed: Sequence[str], for_single: Sequence[str]) -> tuple[PackingChoice, str]:
    """The packing that settings require which only packed rows or only single samples have, and why; else auto."""
    packed, single = list_first(for_packed), list_first(for_single)
    if packed and single:
        raise UserError(f"{packed}: only packed rows have that; {single}: only single samples have that; leave one out")
    if packed:
        return "best_fit", f"packed rows, as {packed} asks for"
    return ("padded", f"one sample a row, as {single} asks for") if single else ("auto", "")
