"""Buckets for pairs of source and target: static shapes (rows, source, target).

Letters: N samples, S and T candidates for the lengths of the two sides, K buckets, M microbatches per step.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from typing import Literal, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt
from jaxtyping import Int64, Shaped

from jvarlen._common.checks import UserError, check_at_least_one, check_choices, list_offenders, offenders_where
from jvarlen.planning import budget as budgets
from jvarlen.planning.buckets import Buckets, PairBucket, choose_buckets
from jvarlen.planning.budget import Budget, BudgetFields, as_budget, round_up, takes_budget
from jvarlen.planning.lengths import Overlong, check_pair_lengths, fit_lengths, row_sizes, sample_sizes

__all__ = ["check_pair_fields", "choose_pair_buckets", "make_pair_buckets"]

_UNUSED = ("strategy", "max_cost", "max_bytes", "memory")
_TOO_LONG = 'pairs with a side above max_length (overlong="drop" allows them)'
_UNREACHABLE = np.iinfo(np.int64).max // 4


@takes_budget
def make_pair_buckets(
    lengths: npt.ArrayLike,
    max_tokens: int | Budget,
    *,
    max_candidates: int = 64,
    overlong: Literal["error", "drop"] = "error",
    **budget: Unpack[BudgetFields],
) -> Buckets[PairBucket]:
    """Chooses the static shapes for a dataset of samples of two lengths, such as translations or images.

    Two families are searched, each exactly by dynamic programming; the set that costs least wins.
    In a chain, both lengths grow from bucket to bucket, which suits sides of nearly the same length. In a nested set,
    source lengths cut the samples into classes with separate target lengths, which suits hardly correlated sides.

    Args:
      lengths: integers[N, 2], tokens of source and target, or height and width; the second may be 0.
      max_tokens: budget of one microbatch, padding included: rows × `size`. Or a `Budget`.
      max_candidates: how many lengths of each side are tried: the best ones for that side alone. Time grows with its
        fourth power, and with the square of the number of distinct lengths of a side, which `length_multiple` lowers.
      overlong: what happens to pairs with a side above `max_length`: `"error"`, or `"drop"`, which does not
        count them. Pass the same to `make_plan`.
      budget: other fields of `Budget`, as keywords: `size`, what a sample counts (the sum of both lengths);
        `cost`, cost(rows, first, second) of a microbatch (rows × `size`), and `compile_seconds`; `max_shapes`,
        `max_length` of each side, `num_microbatches`, `row_multiple`, `length_multiple`, `max_sequences`; others
        are refused.

    Returns:
      `Buckets`, whose `shapes` are a tuple of `PairBucket`, ascending by source, then target. They know
      `num_microbatches` and `size`.

    Raises:
      ValueError: arguments that are not as described; pairs above the budget are listed as id, lengths, limit.

    Example:
      >>> list(map(str, make_pair_buckets([[3, 9], [3, 4], [8, 8], [2, 4]], 32, max_shapes=3).shapes))
      ['2×(3, 4)', '1×(3, 9)', '1×(8, 8)']
      >>> of_images = make_pair_buckets([[3, 9], [3, 4], [8, 8], [2, 4]], 64, max_shapes=2, size="product")
      >>> list(map(str, of_images.shapes))
      ['2×(3, 9)', '1×(8, 8)']

    References:
      Two-dimensional buckets for translation: Tensor2Tensor and lhotse, whose boundaries are quantiles.
    """
    check_at_least_one(max_candidates=max_candidates)
    return choose_pair_buckets(check_pair_lengths(lengths), as_budget(max_tokens, budget), overlong, max_candidates)


def choose_pair_buckets(
    lengths: Int64[np.ndarray, "N 2"], limits: Budget, overlong: Overlong, max_candidates: int = 64
) -> Buckets[PairBucket]:
    """`make_pair_buckets` for checked lengths."""
    check_choices(overlong=(overlong, Literal["error", "drop"]))
    check_pair_fields(limits)
    max_tokens, max_shapes = limits.max_tokens, limits.max_shapes
    lengths = fit_lengths(lengths, limits.max_length, overlong, problem=_TOO_LONG).lengths
    sample_sizes(lengths, limits.size)  # raises ValueError for samples that count nothing
    sources, targets = (_candidates(side, limits, max_candidates) for side in lengths.T)
    cells = np.stack(np.broadcast_arrays(sources[:, None], targets), axis=-1)
    sizes = np.maximum(row_sizes(cells, limits.size), 1)  # the shortest ones may hold no sample
    caps = budgets.round_caps(limits, max_tokens // sizes)
    histogram = np.zeros(caps.shape, np.int64)
    np.add.at(histogram, (np.searchsorted(sources, lengths[:, 0]), np.searchsorted(targets, lengths[:, 1])), 1)
    problem = _Problem(
        sources, targets, histogram, caps, sizes, limits, _UNREACHABLE if limits.cost is None else np.inf
    )
    cost, chosen = min(_best_chain(problem, max_shapes), _best_nested(problem, max_shapes), key=operator.itemgetter(0))
    if cost >= problem.unreachable:
        rounded = round_up(np.maximum(lengths, 1), limits.length_multiple)
        alone = offenders_where(row_sizes(rounded, limits.size) > max_tokens, lengths)
        raise UserError(
            f"max_tokens {max_tokens} leaves no row for some pairs, with at most {max_shapes} shapes and "
            f"{max_candidates} candidates a side; too long by themselves: "
            f"{list_offenders(*alone, max_tokens) if len(alone[0]) else 'none'}"
        )
    return Buckets(chosen, limits.num_microbatches, limits.size)


def _candidates(side: Int64[np.ndarray, " N"], limits: Budget, max_candidates: int) -> Int64[np.ndarray, " n"]:
    """The best lengths of a side alone; no bucket is shorter than 1."""
    side = np.maximum(side, 1)
    alone = dataclasses.replace(limits, max_shapes=max_candidates, cost=None, compile_seconds=None, size="sum")
    if limits.size not in ("sum", "larger"):  # a length alone has no size then: the least padding of the side
        longest = int(round_up(side.max(), limits.length_multiple))
        alone = dataclasses.replace(alone, max_tokens=longest, max_sequences=1, num_microbatches=1)
    return np.array([bucket.length for bucket in choose_buckets(side, alone).shapes])


def check_pair_fields(budget: Budget, *, packed: bool = False) -> None:
    """Raises ValueError for fields of a budget that pairs, or packed pairs, do not use."""
    names = (*_UNUSED, "cost", "compile_seconds", "size") if packed else _UNUSED
    defaults = {field.name: field.default for field in dataclasses.fields(Budget)}
    if unfit := [name for name in names if getattr(budget, name) != defaults[name]]:
        raise UserError(f"{'packed rows' if packed else 'buckets'} of pairs are not chosen by {', '.join(unfit)}")


_Found = tuple[float, tuple[PairBucket, ...]]  # what all steps cost, and the buckets


class _Problem(NamedTuple):
    """The input of the dynamic program."""

    sources: Int64[np.ndarray, " S"]  # candidates, ascending
    targets: Int64[np.ndarray, " T"]
    histogram: Int64[np.ndarray, "S T"]  # samples whose smallest candidates these are
    caps: Int64[np.ndarray, "S T"]  # the most rows of such a bucket, 0 where none fits
    sizes: Int64[np.ndarray, "S T"]  # what a row of it counts
    budget: Budget
    unreachable: float  # no sum of costs reaches it, and adding some of it does not overflow

    def costs(self, i: int, j: int, num_samples: Int64[np.ndarray, " *n"]) -> Shaped[np.ndarray, " *n"]:
        """The cost of the bucket of source i and target j with `num_samples` samples."""
        caps, sides = np.full_like(num_samples, self.caps[i, j]), (self.sources[i], self.targets[j])
        return budgets.bucket_costs(self.budget, num_samples, caps, self.sizes[i, j], sides)


class _Classes(NamedTuple):
    """The best target buckets of the classes that end at one source candidate and begin after each i before it."""

    cost: Shaped[np.ndarray, "j m"]  # of class i in exactly m + 1 buckets
    previous: np.ndarray  # int16[m, j, T+1], where the last of m + 1 buckets over the first targets begins
    num_targets: Int64[np.ndarray, " j"]  # up to the longest of the class


def _best_chain(problem: _Problem, max_shapes: int) -> _Found:
    """The cheapest buckets that ascend on both sides."""
    # A bucket holds the samples that fit it and do not fit the one before. cheapest[k, i, j] is the least cost of the
    # samples within the first i sources and j targets in exactly k buckets, the last of which ends there.
    sources, targets, unreachable = problem.sources, problem.targets, problem.unreachable
    max_shapes = min(max_shapes, len(sources) + len(targets) - 1)
    within = np.zeros((len(sources) + 1, len(targets) + 1), np.int64)
    within[1:, 1:] = problem.histogram.cumsum(axis=0).cumsum(axis=1)
    cheapest = np.full((max_shapes + 1, *within.shape), unreachable)
    cheapest[0, 0, 0] = 0
    previous = np.zeros(cheapest.shape, np.int64)
    for i, j in np.argwhere(problem.caps > 0) + 1:
        one = problem.costs(i - 1, j - 1, within[i, j] - within[: i + 1, : j + 1])
        totals = (cheapest[:-1, : i + 1, : j + 1] + one).reshape(max_shapes, -1)
        previous[1:, i, j] = first = totals.argmin(axis=1)
        cheapest[1:, i, j] = np.minimum(totals[np.arange(max_shapes), first], unreachable)
    k = int(cheapest[:, -1, -1].argmin())
    cost = cheapest[k, -1, -1].item()
    buckets: list[PairBucket] = []
    i, j = within.shape[0] - 1, within.shape[1] - 1
    while k and cost < unreachable:
        before = divmod(int(previous[k, i, j]), j + 1)
        _, rows = budgets.steps_and_rows(problem.budget, within[i, j] - within[before], problem.caps[i - 1, j - 1])
        buckets.append(PairBucket(int(rows), int(sources[i - 1]), int(targets[j - 1])))
        (i, j), k = before, k - 1
    return cost, tuple(buckets[::-1])


def _best_nested(problem: _Problem, max_shapes: int) -> _Found:
    """The cheapest nested buckets."""
    # cheapest[k, j] is the least cost of the samples of the first j sources in exactly k buckets. Among equal costs the
    # widest last class wins, then the one with the fewest buckets.
    num_sources = len(problem.sources)
    max_shapes = min(max_shapes, problem.histogram.size)
    max_targets = min(max_shapes, len(problem.targets))
    cheapest = np.full((max_shapes + 1, num_sources + 1), problem.unreachable)
    cheapest[0, 0] = 0
    last_class = np.zeros((max_shapes + 1, num_sources + 1, 2), np.int64)  # where it begins, its buckets
    classes = []
    for j in range(1, num_sources + 1):
        classes.append(_best_targets(problem, j, max_targets))
        for k in range(1, max_shapes + 1):
            num_buckets = np.arange(1, min(k, max_targets) + 1)
            totals = cheapest[k - num_buckets, :j].T + classes[-1].cost[:, : len(num_buckets)]
            begin, fewer = divmod(int(totals.argmin()), len(num_buckets))
            cheapest[k, j] = min(totals[begin, fewer], problem.unreachable)
            last_class[k, j] = begin, fewer + 1
    k, j = int(cheapest[:, num_sources].argmin()), num_sources
    cost = cheapest[k, j].item()
    buckets: list[PairBucket] = []
    while j and cost < problem.unreachable:
        begin, num_buckets = last_class[k, j].tolist()
        ends = [int(classes[j - 1].num_targets[begin])]  # of the target buckets, among the candidates, from the last
        for m in range(num_buckets - 1, -1, -1):
            ends.append(int(classes[j - 1].previous[m, begin, ends[-1]]))
        spans = list(itertools.pairwise(ends[::-1]))
        counts = problem.histogram[begin:j].sum(axis=0)
        num_samples = np.array([counts[low:high].sum() for low, high in spans])
        last_targets = np.array([high - 1 for _, high in spans])
        _, rows = budgets.steps_and_rows(problem.budget, num_samples, problem.caps[j - 1, last_targets])
        source = int(problem.sources[j - 1])
        of_class = zip(rows.tolist(), problem.targets[last_targets].tolist(), strict=True)
        buckets = [PairBucket(b, source, target) for b, target in of_class] + buckets
        k, j = k - num_buckets, begin
    return cost, tuple(buckets)


def _best_targets(problem: _Problem, j: int, max_buckets: int) -> _Classes:
    """The one-dimensional program over targets, for all classes that end at source j at once."""
    num_targets = len(problem.targets)
    per_class = np.cumsum(problem.histogram[j - 1 :: -1] if j > 1 else problem.histogram[:1], axis=0)[::-1]
    below = np.zeros((j, num_targets + 1), np.int64)  # samples of the class with one of the first t targets
    np.cumsum(per_class, axis=1, out=below[:, 1:])
    cost = np.full((max_buckets, j, num_targets + 1), problem.unreachable)
    previous = np.zeros((max_buckets, j, num_targets + 1), np.int16)
    for t in range(1, num_targets + 1):
        if problem.caps[j - 1, t - 1] < 1:
            continue
        one = problem.costs(j - 1, t - 1, below[:, t, None] - below[:, :t])
        cost[0, :, t] = one[:, 0]
        totals = cost[:-1, :, :t] + one
        first = totals.argmin(axis=2)
        previous[1:, :, t] = first
        cost[1:, :, t] = np.minimum(np.take_along_axis(totals, first[..., None], 2)[..., 0], problem.unreachable)
    last = num_targets - (per_class[:, ::-1] > 0).argmax(axis=1)
    return _Classes(cost[:, np.arange(j), last].T, previous, last)
