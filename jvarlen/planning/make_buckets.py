"""Chooses the static shapes of a dataset, for samples of one length, or of several: (rows, first, second, …).

Letters: N samples, D lengths of each, K buckets, M microbatches per step, n classes of samples.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from typing import Any, Literal, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt
from jaxtyping import Int64, Shaped

from jvarlen._common.checks import UserError, check_at_least_one, check_choices, list_offenders, offenders_where
from jvarlen.planning import budget as budgets
from jvarlen.planning.buckets import AnyBucket, Buckets, MultiLengthBucket, choose_buckets
from jvarlen.planning.budget import Budget, BudgetFields, as_budget, takes_budget
from jvarlen.planning.cost_model import CostModel
from jvarlen.planning.lengths import (
    Overlong,
    PackedOverlong,
    check_sample_lengths,
    fit_lengths,
    row_sizes,
    sample_sizes,
)

__all__ = ["check_budget_of_several", "choose_any_buckets", "make_buckets"]

_UNUSED = ("strategy", "max_cost", "max_bytes", "memory")
_TOO_LONG = 'samples with a length above max_length (overlong="drop" allows them)'
_UNREACHABLE = np.iinfo(np.int64).max // 4
_MOST_CELLS = 2**12  # combinations of candidates of all lengths


@takes_budget
def make_buckets(
    lengths: npt.ArrayLike,
    max_tokens: int | Budget,
    *,
    counts: npt.ArrayLike | None = None,
    max_candidates: int | None = None,
    overlong: Overlong = "error",
    **budget: Unpack[BudgetFields],
) -> Buckets[Any]:
    """Chooses the static shapes for a dataset.

    `"optimal"` finds the cheapest of all sets of rounded lengths; of D > 5,000, of every ⌈D / 5,000⌉-th.

    For samples of several lengths, two families of sets are searched, each exactly by dynamic programming; the set that
    costs least wins, in a tie the first. In a chain, all lengths grow from bucket to bucket, which suits lengths that
    grow together. In a nested set, the first length cuts the samples into classes, in each of which the second cuts
    anew, and so on, which suits hardly correlated lengths. A class ends with the longest of its samples. Ties go to
    fewer buckets. Then, chains go from the last bucket to the smaller lengths; nested sets from the last class to the
    wider one, then to the one of fewer buckets, and so within it. Tried are the lengths of buckets that are optimal for
    that length alone; with size "product", those with the least padding of it.

    Args:
      lengths: integers[N], tokens per sample. Or integers[N, D], D ≥ 2 lengths per sample, such as source and target,
        or frames, height and width; all but the first may be 0.
      max_tokens: budget of one microbatch in tokens, padding included: rows × length never exceeds it, or for several
        lengths rows × `size`. Or a `Budget`.
      counts: integers[N], how many samples have each of the `lengths`, one a sample, which then are a histogram; None
        means one each.
      max_candidates: how many of each of several lengths are tried: the best ones for that length alone. None: the most
        with n**D ≤ 4,096, which is 64 of two lengths and 16 of three. Time grows with n**(2 D), and with the square of
        the number of distinct lengths, which `length_multiple` lowers.
      overlong: how samples above `max_length` count here: `"error"` raises, `"drop"` leaves them out, `"truncate"`
        counts them as cut to it, which samples of several lengths cannot be. Pass the same to `make_plan`.
      budget: the other fields of `Budget`, as keywords: `max_shapes`, `strategy`, `cost` and so on. Several lengths
        have no other `strategy` than `"optimal"`, no `max_cost` and no `memory`; `max_length` is that of each.

    Returns:
      `Buckets`, whose `shapes` are a tuple of `Bucket`, lengths strictly ascending; the last holds the longest sample.
      For several lengths it is one of `MultiLengthBucket`, ascending by their first length, then their second, and so
      on. A bucket without samples (possible with given lengths, `"geometric"` and `"powers_of_two"`) has as many rows
      as the budget allows. They know M, their `num_microbatches`, and `size`, which `make_plan` takes from them.

    Raises:
      ValueError: arguments that are not as described; samples above the budget are listed as id, value, limit.

    Warns:
      UserWarning: buckets more than twice as large as all that a `CostModel` of the budget was measured with.

    Example:
      >>> make_buckets([3, 4, 4, 9, 16], max_tokens=32, max_shapes=2).shapes
      (Bucket(rows=3, length=4), Bucket(rows=2, length=16))
      >>> list(map(str, make_buckets([[3, 9], [3, 4], [8, 8], [2, 4]], 32, max_shapes=3).shapes))
      ['2×(3, 4)', '1×(3, 9)', '1×(8, 8)']
      >>> videos = [[8, 3, 4], [16, 3, 4], [8, 6, 2], [16, 6, 2]]
      >>> list(map(str, make_buckets(videos, 400, max_shapes=3, size="product").shapes))
      ['2×(16, 3, 4)', '2×(16, 6, 2)']

    References:
      Dynamic programming over sorted lengths: Wang and Song 2011, "Ckmeans.1d.dp"; a cluster costs its padded steps.
      Two-dimensional buckets for translation: Tensor2Tensor and lhotse, whose boundaries are quantiles.
    """
    checked, limits = check_sample_lengths(lengths), as_budget(max_tokens, budget)
    if checked.ndim == 1:
        if max_candidates is not None:
            raise UserError(f"max_candidates ({max_candidates}) is for samples of several lengths; these have one")
        return choose_buckets(checked, limits, overlong, counts)
    if counts is not None:
        raise UserError("counts are of samples of one length: give one row of lengths for each sample of several")
    return _choose_joint_buckets(checked, limits, overlong, max_candidates)


def choose_any_buckets(
    lengths: Int64[np.ndarray, " N *sides"], limits: Budget, overlong: PackedOverlong
) -> Buckets[AnyBucket]:
    """`make_buckets` for checked lengths, one a sample or several."""
    return (choose_buckets if lengths.ndim == 1 else _choose_joint_buckets)(lengths, limits, overlong)


def _choose_joint_buckets(
    lengths: Int64[np.ndarray, "N D"], limits: Budget, overlong: PackedOverlong, max_candidates: int | None = None
) -> Buckets[MultiLengthBucket]:
    """`make_buckets` for checked lengths, several a sample."""
    check_choices(overlong=(overlong, Literal["error", "drop"]))
    check_budget_of_several(limits)
    num_lengths = lengths.shape[1]
    by_length = [limits.of_length(side, num_lengths) for side in range(num_lengths)]
    if max_candidates is None:
        max_candidates = next(n for n in range(math.isqrt(_MOST_CELLS), 0, -1) if n**num_lengths <= _MOST_CELLS)
    check_at_least_one(max_candidates=max_candidates)
    lengths = fit_lengths(lengths, limits.max_length, overlong, problem=_TOO_LONG).lengths
    sample_sizes(lengths, limits.size)  # raises ValueError for samples that count nothing
    candidates = tuple(
        _candidates(side, of_side, max_candidates) for side, of_side in zip(lengths.T, by_length, strict=True)
    )
    cells = np.stack(np.meshgrid(*candidates, indexing="ij"), axis=-1)
    sizes = np.maximum(row_sizes(cells, limits.size), 1)  # the shortest ones may hold no sample
    caps = budgets.round_caps(limits, limits.max_tokens // sizes)
    histogram = np.zeros(caps.shape, np.int64)
    np.add.at(histogram, tuple(map(np.searchsorted, candidates, lengths.T)), 1)
    unreachable = _UNREACHABLE if limits.cost is None else np.inf
    problem = _Problem(candidates, histogram, caps, sizes, limits, unreachable)
    found = _best_chain(problem, limits.max_shapes), _best_nested(problem, limits.max_shapes)
    cost, chosen = min(found, key=operator.itemgetter(0))
    if cost >= problem.unreachable:
        rounded = limits.round_lengths(np.maximum(lengths, 1))
        alone = offenders_where(row_sizes(rounded, limits.size) > limits.max_tokens, lengths)
        raise UserError(
            f"max_tokens {limits.max_tokens} leaves no row for some samples, with at most {limits.max_shapes} shapes "
            f"and {max_candidates} candidates a length; too long by themselves: "
            f"{list_offenders(*alone, limits.max_tokens) if len(alone[0]) else 'none'}"
        )
    return Buckets(chosen, limits.num_microbatches, limits.size)


def _candidates(side: Int64[np.ndarray, " N"], limits: Budget, max_candidates: int) -> Int64[np.ndarray, " n"]:
    """The best bucket lengths for one length of the samples alone; no bucket is shorter than 1."""
    side = np.maximum(side, 1)
    alone = dataclasses.replace(limits, max_shapes=max_candidates, cost=None, compile_seconds=None, size="sum")
    if limits.size not in ("sum", "larger"):  # a length alone has no size then: the least padding of the side
        longest = int(limits.round_lengths(side.max()))
        alone = dataclasses.replace(alone, max_tokens=longest, max_sequences=1, num_microbatches=1)
    return np.array([bucket.length for bucket in choose_buckets(side, alone).shapes])


def check_budget_of_several(budget: Budget, *, packed: bool = False) -> None:
    """Raises ValueError for fields of a budget that samples of several lengths, or packed rows of them, do not use."""
    names = (*_UNUSED, "cost", "compile_seconds", "size") if packed else _UNUSED
    defaults = {field.name: field.default for field in dataclasses.fields(Budget)}
    if unfit := [name for name in names if getattr(budget, name) != defaults[name]]:
        what = "packed rows" if packed else "buckets"
        raise UserError(f"{what} of several lengths are not chosen by {', '.join(unfit)}")
    if isinstance(budget.cost, CostModel):
        raise UserError(
            "a CostModel is of samples of one length: of several, cost= is a function of rows and each length"
        )


_Cell = tuple[int, ...]  # which candidate of each length
_Found = tuple[float, tuple[MultiLengthBucket, ...]]  # what all steps cost, and the buckets


class _Problem(NamedTuple):
    """The input of the dynamic programs; arrays have one axis for the candidates of each length."""

    candidates: tuple[Int64[np.ndarray, " _"], ...]  # of each length, ascending
    histogram: Int64[np.ndarray, " *cells"]  # samples whose smallest candidates these are
    caps: Int64[np.ndarray, " *cells"]  # the most rows of such a bucket, 0 where none fits
    sizes: Int64[np.ndarray, " *cells"]  # what a row of it counts
    budget: Budget
    unreachable: float  # no sum of costs reaches it, and adding some of it does not overflow

    def costs(self, cell: _Cell, num_samples: Int64[np.ndarray, " *n"]) -> Shaped[np.ndarray, " *n"]:
        """The cost of the bucket of a cell with `num_samples` samples."""
        if self.caps[cell] < 1:
            return np.full(num_samples.shape, self.unreachable)
        caps = np.full_like(num_samples, self.caps[cell])
        lengths = tuple(of_length[i] for of_length, i in zip(self.candidates, cell, strict=True))
        return budgets.bucket_costs(self.budget, num_samples, caps, self.sizes[cell], lengths)

    def bucket(self, cell: _Cell, num_samples: int) -> MultiLengthBucket:
        """The bucket of a cell that holds these samples."""
        _, rows = budgets.steps_and_rows(self.budget, np.array(num_samples), self.caps[cell])
        lengths = (int(of_length[i]) for of_length, i in zip(self.candidates, cell, strict=True))
        return MultiLengthBucket((int(rows), *lengths))


def _best_chain(problem: _Problem, max_shapes: int) -> _Found:
    """The cheapest buckets that ascend in all lengths."""
    # A bucket holds the samples that fit it and do not fit the one before. cheapest[k, i, j, …] is the least cost of
    # the samples within the first i, j, … candidates in exactly k buckets, the last of which ends there.
    shape, unreachable = problem.caps.shape, problem.unreachable
    max_shapes = min(max_shapes, sum(shape) - len(shape) + 1)
    within = np.pad(problem.histogram, [(1, 0)] * len(shape))
    for axis in range(len(shape)):
        within = within.cumsum(axis=axis)
    cheapest = np.full((max_shapes + 1, *within.shape), unreachable)
    cheapest.flat[0] = 0
    previous = np.zeros(cheapest.shape, np.int64)
    for cell in zip(*(axis.tolist() for axis in np.nonzero(problem.caps)), strict=True):
        end, inside = tuple(i + 1 for i in cell), tuple(slice(i + 2) for i in cell)
        one = problem.costs(cell, within[end] - within[inside])
        totals = (cheapest[:-1, *inside] + one).reshape(max_shapes, -1)
        previous[1:, *end] = first = totals.argmin(axis=1)
        cheapest[1:, *end] = np.minimum(totals[np.arange(max_shapes), first], unreachable)
    end = shape
    k = int(cheapest[:, *end].argmin())
    cost = cheapest[k, *end].item()
    buckets: list[MultiLengthBucket] = []
    while k and cost < unreachable:
        before = tuple(map(int, np.unravel_index(previous[k, *end], [i + 1 for i in end])))
        buckets.append(problem.bucket(tuple(i - 1 for i in end), within[end] - within[before]))
        end, k = before, k - 1
    return cost, tuple(buckets[::-1])


def _best_nested(problem: _Problem, max_shapes: int) -> _Found:
    """The cheapest nested buckets: the first length cuts the samples into classes, in each the second, and so on."""
    cut = _cut_classes(problem, problem.histogram[None], (), max_shapes)
    num_buckets = int(cut.costs[0].argmin()) + 1
    cost = cut.costs[0, num_buckets - 1].item()
    if cost >= problem.unreachable:
        return cost, ()
    cells = _trace(problem, problem.histogram, (), num_buckets, cut)
    return cost, tuple(itertools.starmap(problem.bucket, cells))


class _Cut(NamedTuple):
    """The best buckets of n classes of samples, each cut by the first of the lengths that are left."""

    costs: Shaped[np.ndarray, "n m"]  # of each class in exactly m + 1 buckets
    begins: Int64[np.ndarray, "m n ends"]  # of the samples up to an end in m buckets: where the last part begins,
    of_last: Int64[np.ndarray, "m n ends"]  # and how many of the buckets it has
    ends: Int64[np.ndarray, " n"]  # up to the longest of the class


def _cut_classes(problem: _Problem, counts: Int64[np.ndarray, " n *cells"], first: _Cell, max_shapes: int) -> _Cut:
    """The least costs of classes, whose buckets have these first lengths, by the numbers of their samples."""
    # cheapest[k, c, j] is the least cost of the samples of class c within the first j candidates in exactly k buckets.
    # Among equal costs the widest last part wins, then the one with the fewest buckets.
    num_classes, num_ends = counts.shape[:2]
    max_shapes = min(max_shapes, math.prod(counts.shape[1:]))
    cheapest = np.full((max_shapes + 1, num_classes, num_ends + 1), problem.unreachable)
    cheapest[0, :, 0] = 0
    begins, of_last = np.zeros((2, *cheapest.shape), np.int64)
    below = np.cumulative_sum(counts, axis=1, include_initial=True)
    for j in range(1, num_ends + 1):
        cell = (*first, j - 1)
        if not (problem.caps[cell] > 0).any():
            continue
        parts = below[:, j, None] - below[:, :j]  # from each begin i < j
        if len(cell) == problem.caps.ndim:
            costs = problem.costs(cell, parts)[..., None]
        else:
            of_parts = parts.reshape(num_classes * j, *parts.shape[2:])
            costs = _cut_classes(problem, of_parts, cell, max_shapes).costs.reshape(num_classes, j, -1)
        for m in range(costs.shape[2]):  # the buckets of the last part, less one
            totals = cheapest[: max_shapes - m, :, :j] + costs[..., m]
            begin, least = totals.argmin(axis=2), np.minimum(totals.min(axis=2), problem.unreachable)
            if m:
                known = cheapest[m + 1 :, :, j]
                is_better = (least < known) | ((least == known) & (begin < begins[m + 1 :, :, j]))
                least, begin = np.where(is_better, least, known), np.where(is_better, begin, begins[m + 1 :, :, j])
            cheapest[m + 1 :, :, j], begins[m + 1 :, :, j] = least, begin
            of_last[m + 1 :, :, j] = np.where(is_better, m + 1, of_last[m + 1 :, :, j]) if m else 1
    is_held = counts.reshape(num_classes, num_ends, -1).max(axis=2) > 0
    ends = num_ends - is_held[:, ::-1].argmax(axis=1)
    return _Cut(cheapest[1:, np.arange(num_classes), ends].T, begins, of_last, ends)


def _trace(
    problem: _Problem, counts: Int64[np.ndarray, " *cells"], first: _Cell, num_buckets: int, cut: _Cut | None = None
) -> list[tuple[_Cell, int]]:
    """The cells of the best buckets of one class in so many buckets, ascending, and how many samples each holds."""
    if not counts.ndim:
        return [(first, int(counts))]
    cut = cut or _cut_classes(problem, counts[None], first, num_buckets)
    end, cells = int(cut.ends[0]), list[tuple[_Cell, int]]()
    while num_buckets:
        begin, of_last = int(cut.begins[num_buckets, 0, end]), int(cut.of_last[num_buckets, 0, end])
        cells = _trace(problem, counts[begin:end].sum(axis=0), (*first, end - 1), of_last) + cells
        end, num_buckets = begin, num_buckets - of_last
    return cells
