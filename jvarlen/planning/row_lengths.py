"""Chooses the lengths of packed rows so that their plan costs least, by trying many sets on the histogram.

Letters: V distinct lengths, D distinct rounded lengths, K lengths of rows.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jvarlen._common.checks import UserError, check_at_least_one, if_given, list_offenders, offenders_where
from jvarlen.planning.buckets import (
    Buckets,
    CountedSamples,
    PairBucket,
    least_rows_when_packed,
    make_buckets,
    optimal_lengths,
    trimmed_costs,
)
from jvarlen.planning.budget import Budget, as_budget, bucket_costs, round_up, rounded_caps, steps_and_rows
from jvarlen.planning.cost_model import CostModel
from jvarlen.planning.lengths import PackedOverlong, check_lengths, check_pair_lengths, fit_lengths
from jvarlen.planning.order import Order
from jvarlen.planning.packing import MAX_ROW_LENGTH, orders_of_packing, pack_samples, split_lengths
from jvarlen.planning.packings import Packing, PackingMethod
from jvarlen.planning.pair_buckets import check_pair_fields
from jvarlen.planning.placing import distinct_joint_rows, rows_by_tokens

__all__ = ["bucket_of_packed_pairs", "choose_packed_buckets", "choose_row_lengths"]

# Sets of row lengths that are tried at most; trying one takes time in proportion to the distinct lengths.
_MAX_SETS = 2**12
_MAX_SETS_TIMES_LENGTHS = 2**20
_MAX_SETS_TIMES_LENGTHS_ROW_BY_ROW = 2**16  # with a limit on the samples of a row, packing takes longer
_WIDEST_GRID = 16
_MOST_PAIRS_PACKED = 2**11


def choose_row_lengths(
    lengths: npt.ArrayLike,
    max_tokens: int | Budget,
    *,
    max_samples_per_row: int | None = None,
    overlong: PackedOverlong = "error",
    **budget: Any,
) -> tuple[int, ...]:
    """Chooses a few row lengths for packing, so that the plan of the packed rows costs least.

    For a set of row lengths, the plan is that of `pack_samples(lengths, row_lengths, …)` in the buckets of
    `make_buckets(packing.num_tokens, max_tokens, strategy=row_lengths, …)`. Its cost is the sum over all microbatches
    of rows × length, padding rows included, or of `cost(rows, length)`, plus `compile_seconds` for every length. Of a
    `CostModel` only the constant and the tokens count here, since the samples have the same pairs of tokens in any
    rows; where it limits a microbatch (`max_cost`), a row counts as one sample. A set consists of rounded lengths of
    samples (of more than 5,000, of the candidates of `make_buckets`, in the rows of samples as long as these) and
    always includes the longest. Among equal costs the fewest lengths win, then, from the longest down, the smaller
    ones.

    If there are at most 4,096 sets, and at most 2**20 / V for V distinct lengths (2**16 / V with
    `max_samples_per_row`), every set is tried. If there are more, that many are tried, by local search from three sets:
    the longest length alone; the best set under the assumption that samples between two row lengths have rows of their
    own, as few as possible (an exact dynamic program); and the best set of an even grid. The search removes a length,
    moves one among the D rounded lengths, or adds one, as long as that is cheaper; it moves by D / 8 places at first
    and by one at the end.

    For pairs, the rows of all have one length for each side. It is that of the longest, rounded; but the side that
    would fill up first may be longer: then its length is, of those between 14/16 and 19/16 of what the mean pair needs
    beside the other side, in steps of 1/16, rounded up, the one with which packed rows have the fewest tokens, with
    padding; among equals the shortest. Of more than 2,048 pairs, every ⌈N/2,048⌉-th is packed to tell, from the longest
    down. Both together stay within `max_tokens`, and each within `max_length`.

    Args:
      lengths: as in `make_buckets`, or as in `make_pair_buckets`.
      max_tokens: as in `make_buckets`.
      max_samples_per_row: as in `pack_samples`.
      overlong: as in `make_buckets`, or `"split"`: samples above `max_length` count as the chunks that they come in.
      budget: the other fields of `Budget`, as keywords; `max_shapes` is the most row lengths.

    Returns:
      Row lengths, strictly ascending; the last holds the longest sample. For pairs, those of source and target.

    Raises:
      ValueError: as in `make_buckets`.

    Example:
      >>> choose_row_lengths([3, 5, 8, 8], max_tokens=32)
      (8,)
      >>> choose_row_lengths([[3, 9], [3, 4], [8, 8], [2, 4]], max_tokens=32)
      (8, 9)
    """
    limits = as_budget(max_tokens, budget)
    check_at_least_one(**if_given(max_samples_per_row=max_samples_per_row))
    if np.ndim(lengths) == 2:
        return _pair_row_lengths(lengths, limits, max_samples_per_row, overlong)
    if limits.strategy != "optimal":
        raise UserError(f"row lengths are chosen by their cost: strategy must be 'optimal', not {limits.strategy!r}")
    if overlong == "split":
        overlong = "error"
        if limits.max_length is not None:
            _, _, lengths = split_lengths(check_lengths(lengths), limits.max_length)
    counted = CountedSamples(lengths, limits.max_length, overlong, limits.length_multiple)
    histogram, caps = counted.candidates(limits)
    if isinstance(limits.cost, CostModel):
        limits = dataclasses.replace(limits, cost=dataclasses.replace(limits.cost, quadratic=0.0))
    descending, counts = histogram.values[::-1].tolist(), histogram.counts[::-1].tolist()

    def plan_cost(chosen: tuple[int, ...]) -> float:
        rows_held = np.zeros(len(chosen), np.int64)
        for tokens, num_rows in rows_by_tokens(descending, counts, chosen, max_samples_per_row).items():
            rows_held[bisect.bisect_left(chosen, tokens)] += num_rows
        length = np.array(chosen)
        costs = bucket_costs(limits, rows_held, caps[np.searchsorted(histogram.rounded, length)], length)
        return functools.reduce(lambda total, each: total + each, costs.tolist())  # `sum` rounds by Python's version

    most = _MAX_SETS_TIMES_LENGTHS if max_samples_per_row is None else _MAX_SETS_TIMES_LENGTHS_ROW_BY_ROW
    max_sets = min(_MAX_SETS, max(most // len(counted.histogram.counts), 1))
    search = _SetSearch(histogram.rounded.tolist(), limits.max_shapes, max_sets, plan_cost)
    if not search.try_all():
        costs = trimmed_costs(histogram.rounded, least_rows_when_packed(histogram), caps, limits)
        [by_class] = optimal_lengths(histogram.rounded, costs, [limits.max_shapes])
        search.descend(())
        search.descend(tuple(np.searchsorted(histogram.rounded, by_class[:-1]).tolist()))
        search.descend(search.best_of_grid())
    return search.cheapest()


def choose_packed_buckets(
    lengths: npt.ArrayLike,
    budget: Budget,
    overlong: PackedOverlong,
    max_samples_per_row: int | None = None,
    *,
    order: Order,
    seed: int,
    method: PackingMethod = "best_fit",
) -> tuple[tuple[Any, ...], Packing]:
    """The buckets of packed rows, of the given lengths, else of `choose_row_lengths`; and the rows of epoch 0."""
    # Without a cost they have only the longest length, since packed rows leave little padding to save.
    is_pairs = np.ndim(lengths) == 2
    if budget.given_lengths is not None and not is_pairs:
        row_lengths = tuple(budget.given_lengths.tolist())
    elif method == "wrapped":
        row_lengths = (_wrapped_row_length(lengths, budget),)
    else:
        limits = budget if budget.cost or is_pairs else dataclasses.replace(budget, max_shapes=1)
        row_lengths = choose_row_lengths(lengths, limits, max_samples_per_row=max_samples_per_row, overlong=overlong)
    rows = pack_samples(
        lengths,
        row_lengths,
        method=method,
        max_samples_per_row=max_samples_per_row,
        order=orders_of_packing(order, method)[0],
        seed=seed,
        overlong=overlong,
    )
    if not is_pairs:
        return make_buckets(rows.num_tokens, budget, strategy=row_lengths, max_length=None), rows
    return bucket_of_packed_pairs(rows, budget), rows


def bucket_of_packed_pairs(rows: Packing, budget: Budget) -> tuple[PairBucket, ...]:
    """The bucket of packed rows of pairs, which all have one shape."""
    check_pair_fields(budget, packed=True)
    source, target = rows.row_lengths
    cap = rounded_caps(budget, np.array(budget.max_tokens // (source + target)))
    if not cap:
        raise UserError(f"max_tokens {budget.max_tokens} leaves no row of {source}+{target} tokens")
    _, num_rows = steps_and_rows(budget, np.array(rows.num_rows), cap)
    return Buckets([PairBucket(int(num_rows), source, target)], budget.microbatches_per_step)


def _pair_row_lengths(
    lengths: npt.ArrayLike, limits: Budget, max_samples_per_row: int | None, overlong: PackedOverlong
) -> tuple[int, ...]:
    """`choose_row_lengths` for pairs."""
    check_pair_fields(limits, packed=True)
    checked = check_pair_lengths(lengths)
    pairs = fit_lengths(checked, limits.max_length, overlong).lengths
    longest: list[int] = round_up(np.maximum(pairs.max(axis=0), 1), limits.length_multiple).tolist()
    most = min(limits.max_length or MAX_ROW_LENGTH, MAX_ROW_LENGTH)
    if max(longest) > most or sum(longest) > limits.max_tokens:
        alone = offenders_where(pairs.sum(axis=1) > limits.max_tokens, pairs)
        raise UserError(
            f"rows of {longest[0]} and {longest[1]} tokens, for the longest of both sides, must be within max_tokens "
            f"({limits.max_tokens}) together, and {most} each; pairs too long by themselves: "
            f"{list_offenders(*alone, limits.max_tokens) if len(alone[0]) else 'none'}"
        )
    totals: list[int] = pairs.sum(axis=0).tolist()
    side = int(longest[0] * totals[1] >= longest[1] * totals[0])  # that fills up first
    candidates = {tuple(longest)}
    for sixteenths in range(14, 20) if totals[1 - side] else ():
        needed = -(-longest[1 - side] * totals[side] * sixteenths // (16 * totals[1 - side]))
        length = max(longest[side], round_up(needed, limits.length_multiple))
        candidates.add((length, longest[1]) if side == 0 else (longest[0], length))
    every = -(-len(pairs) // _MOST_PAIRS_PACKED)
    codes = np.sort(pairs[:, 0] * (longest[1] + 1) + pairs[:, 1])[::-every]
    tried = np.stack(np.divmod(codes, longest[1] + 1), axis=1)

    def num_tokens(row_lengths: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        rows, _ = distinct_joint_rows(tried, np.array(row_lengths), max_samples_per_row)
        return int(rows.counts.sum()) * sum(row_lengths), row_lengths

    within = [each for each in candidates if max(each) <= most and sum(each) <= limits.max_tokens]
    return min(within, key=num_tokens)


def _wrapped_row_length(lengths: npt.ArrayLike, budget: Budget) -> int:
    """`max_length`, which rows are filled up to; else the longest sample."""
    if budget.strategy != "optimal":
        raise UserError(f"strategy {budget.strategy!r} chooses lengths for single samples: wrapped rows are max_length")
    longest = int(round_up(check_lengths(lengths).max(), budget.length_multiple))
    row_length = budget.max_length or longest
    if row_length % budget.length_multiple:
        raise UserError(f"max_length ({row_length}) is no multiple of length_multiple ({budget.length_multiple})")
    if budget.row_caps(np.array([row_length]))[0] < 1:
        which = "max_length" if budget.max_length else "the longest sample: give max_length, the length of rows"
        raise UserError(f"max_tokens ({budget.max_tokens}) has no room for a row of {row_length} tokens, {which}")
    return row_length


class _SetSearch:
    """Tries sets of ascending lengths, always with the last; a set is the places of the others."""

    def __init__(self, lengths: list[int], max_shapes: int, max_sets: int, cost_of: Callable[[tuple[int, ...]], float]):
        self._lengths, self._last = lengths, len(lengths) - 1
        self._max_shapes, self._max_sets, self._cost_of = max_shapes, max_sets, cost_of
        self._ranks: dict[tuple[int, ...], tuple[float, int, tuple[int, ...]]] = {}

    def cheapest(self) -> tuple[int, ...]:
        """The lengths of the cheapest set so far."""
        return self._lengths_at(min(self._ranks, key=self._rank))

    def try_all(self) -> bool:
        """Tries all sets; False if there are too many."""
        if self._num_sets(self._last) > self._max_sets:
            return False
        self._best_of(range(self._last))
        return True

    def best_of_grid(self) -> tuple[int, ...]:
        """The cheapest set of the finest even grid for which half of the sets that are left are enough."""
        half = (self._max_sets - len(self._ranks)) // 2
        num_cells = max(bisect.bisect_right(range(self._last), half, key=self._num_sets), 1)
        return self._best_of([i * len(self._lengths) // num_cells - 1 for i in range(1, num_cells)])

    def descend(self, places: tuple[int, ...]) -> None:
        """Goes from a set to the first cheaper one near it, again and again."""
        step = len(self._lengths) // 8
        while step:
            cheaper = self._first_cheaper(places, step)
            places, step = (places, step // 2) if cheaper is None else (cheaper, step)

    def _first_cheaper(self, places: tuple[int, ...], step: int) -> tuple[int, ...] | None:
        own_rank = self._rank(places)
        for near in _sets_near(places, step, self._last, self._max_shapes):
            if len(self._ranks) >= self._max_sets:
                return None
            if self._rank(near) < own_rank:
                return near
        return None

    def _best_of(self, grid: Sequence[int]) -> tuple[int, ...]:
        sizes = range(min(self._max_shapes, len(grid) + 1))
        return min(itertools.chain(*(itertools.combinations(grid, size) for size in sizes)), key=self._rank)

    def _num_sets(self, num_places: int) -> int:
        return sum(math.comb(num_places, size) for size in range(min(self._max_shapes, num_places + 1)))

    def _lengths_at(self, places: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._lengths[place] for place in (*places, self._last))

    def _rank(self, places: tuple[int, ...]) -> tuple[float, int, tuple[int, ...]]:
        if places not in self._ranks:
            chosen = self._lengths_at(places)
            self._ranks[places] = self._cost_of(chosen), len(chosen), chosen[::-1]
        return self._ranks[places]


def _sets_near(places: tuple[int, ...], step: int, last: int, max_shapes: int) -> Iterator[tuple[int, ...]]:
    """Sets with a place less, with a place moved by the step, and, if the grid of the step is coarse, with one more."""
    for i in range(len(places)):
        yield places[:i] + places[i + 1 :]
    for i, place in enumerate(places):
        for moved in (place - step, place + step):
            if 0 <= moved < last and moved not in places:
                yield tuple(sorted((*places[:i], moved, *places[i + 1 :])))
    if len(places) + 1 < max_shapes and last // step <= _WIDEST_GRID:
        for added in range(step - 1, last, step):
            if added not in places:
                yield tuple(sorted((*places, added)))
