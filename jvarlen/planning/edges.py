"""Bucket lengths from the histogram of lengths.

Letters: D distinct (rounded) lengths, K buckets, M microbatches a step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Int64, Shaped

from jvarlen.planning.budget import Budget, round_up
from jvarlen.planning.lengths import ends_to_offsets

__all__ = [
    "CLOSED_FORMS",
    "Histogram",
    "least_rows_when_packed",
    "optimal_edges",
    "trimmed_costs",
]

# How many samples (or rows) lie in the buckets that end at rounded length j and begin after each i < j.
NumHeld = Callable[[int], Int64[np.ndarray, " j"]]
# What these buckets cost: int64 or float64, infinite for those that must not be.
BucketCosts = Callable[[int], Shaped[np.ndarray, " j"]]


class Histogram:
    """Distinct lengths, and distinct lengths rounded up.

    Args:
      lengths: int64[N], each ≥ 1.
      length_multiple: what lengths are rounded up to a multiple of.
      counts: int64[N], samples of each; None: one.

    Attributes:
      values: int64[V], distinct lengths, ascending.
      counts: int64[V], samples of each.
      rounded: int64[D], distinct rounded lengths, ascending.
      samples_below: int64[D+1], samples shorter than or equal to the rounded length before.
      tokens_below: int64[D+1], their tokens.
    """

    def __init__(
        self,
        lengths: Int64[np.ndarray, " N"],
        length_multiple: int,
        counts: Int64[np.ndarray, " N"] | None = None,
    ):
        if counts is not None:
            self.values, place = np.unique(lengths, return_inverse=True)
            self.counts = np.zeros(len(self.values), np.int64)
            np.add.at(self.counts, place, counts)
        elif lengths.max() <= max(2**20, 4 * len(lengths)):
            of_length = np.bincount(lengths)
            self.values = np.flatnonzero(of_length)
            self.counts = of_length[self.values]
        else:
            self.values, self.counts = np.unique(lengths, return_counts=True)
        self.rounded, first = np.unique(round_up(self.values, length_multiple), return_index=True)
        self.samples_below = ends_to_offsets(np.cumsum(np.add.reduceat(self.counts, first)))
        self.tokens_below = ends_to_offsets(np.cumsum(np.add.reduceat(self.counts * self.values, first)))

    def num_samples(self, edges: Int64[np.ndarray, " K"]) -> Int64[np.ndarray, " K"]:
        """Samples of each bucket, where a sample belongs to the smallest that holds it."""
        return np.diff(self.samples_below[np.searchsorted(self.rounded, edges, side="right")], prepend=0)

    def num_samples_between(self, j: int) -> Int64[np.ndarray, " j"]:
        """Samples of the buckets that end at rounded length j (from 1) and begin after each i < j."""
        return self.samples_below[j] - self.samples_below[:j]


def least_rows_when_packed(histogram: Histogram) -> NumHeld:
    """How many rows the samples of a bucket need at least when they are packed.

    All tokens must find room, and no two samples longer than half a row share one.
    """
    doubled, samples_up_to = 2 * histogram.values, ends_to_offsets(np.cumsum(histogram.counts))

    def rows_between(j: int) -> Int64[np.ndarray, " j"]:
        edge = histogram.rounded[j - 1]
        num_short = samples_up_to[np.searchsorted(doubled, edge, side="right")]
        num_long = histogram.samples_below[j] - np.maximum(histogram.samples_below[:j], num_short)
        tokens = histogram.tokens_below[j] - histogram.tokens_below[:j]
        return np.maximum(-(-tokens // edge), num_long)

    return rows_between


def trimmed_costs(
    rounded: Int64[np.ndarray, " D"], num_held: NumHeld, caps: Int64[np.ndarray, " D"], budget: Budget
) -> BucketCosts:
    """What buckets cost with the rows that they need."""
    return lambda j: budget.bucket_costs(num_held(j), np.full(j, caps[j - 1]), np.full(j, rounded[j - 1]))


def optimal_edges(
    lengths: Int64[np.ndarray, " D"], bucket_costs: BucketCosts, max_shapes: int, num_last: int = 1
) -> Int64[np.ndarray, " K"]:
    """The cheapest at most `max_shapes` of the lengths, one of the last included, by dynamic programming.

    cheapest[k, j] is the least cost of putting the shortest j lengths into exactly k + 1 buckets. It follows from every
    cheapest[k - 1, i] with i < j and the cost of one bucket for the lengths between; the ceilings in that cost break
    the monotonicity that faster recurrences need, so all i are tried: O(K D²) time, O(K D) memory. Of equal costs the
    first i wins, which is the smaller edge.
    """
    num_lengths = len(lengths)
    max_shapes = min(max_shapes, num_lengths)
    dtype = bucket_costs(1).dtype
    # An integer that no sum of costs reaches, and that stays an integer when a bucket's cost is added to it.
    unreachable = np.iinfo(np.int64).max // 2 if dtype == np.int64 else np.inf
    cheapest = np.full((max_shapes, num_lengths + 1), unreachable, dtype)
    previous = np.zeros((max_shapes, num_lengths + 1), np.int32)
    for j in range(1, num_lengths + 1):
        bucket_cost = bucket_costs(j)
        cheapest[0, j] = bucket_cost[0]
        totals = cheapest[:-1, :j] + bucket_cost
        first = totals.argmin(axis=1)
        previous[1:, j] = first
        cheapest[1:, j] = totals[np.arange(max_shapes - 1), first]
    edges = []
    fewest, shortest = divmod(int(cheapest[:, -num_last:].argmin()), num_last)
    j = num_lengths - num_last + 1 + shortest
    for k in range(fewest, -1, -1):
        edges.append(lengths[j - 1])
        j = int(previous[k, j])
    return np.array(edges[::-1], np.int64)


def _pad_to_max(histogram: Histogram, max_shapes: int) -> list[int]:
    return [int(histogram.values[-1])]


def _powers_of_two(histogram: Histogram, max_shapes: int) -> list[int]:
    shortest, longest = int(histogram.values[0]), int(histogram.values[-1])
    powers = [2**k for k in range((shortest - 1).bit_length(), (longest - 1).bit_length() + 1)]
    return [*powers[:-1], longest]


def _geometric(histogram: Histogram, max_shapes: int) -> list[int]:
    shortest, longest = int(histogram.values[0]), int(histogram.values[-1])
    powers = [shortest ** (max_shapes - k) * longest**k for k in range(1, max_shapes + 1)]
    return [_ceil_root(power, max_shapes, shortest, longest) for power in powers]


def _ceil_root(power: int, degree: int, low: int, high: int) -> int:
    """The smallest integer e in [low, high] with e**degree ≥ power; Python integers, so that it is exact."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if middle**degree >= power else (middle + 1, high)
    return low


def _quantile(histogram: Histogram, max_shapes: int) -> list[int]:
    ends = np.cumsum(histogram.counts)
    positions = [-(-k * int(ends[-1]) // max_shapes) for k in range(1, max_shapes + 1)]
    return histogram.values[np.searchsorted(ends, positions)].tolist()


def _equal_tokens(histogram: Histogram, max_shapes: int) -> list[int]:
    tokens = np.cumsum(histogram.values * histogram.counts)
    targets = [-(-k * int(tokens[-1]) // max_shapes) for k in range(1, max_shapes + 1)]
    return histogram.values[np.searchsorted(tokens, targets)].tolist()


# Edges before rounding, which need neither be distinct nor ascend strictly.
CLOSED_FORMS: dict[str, Callable[[Histogram, int], list[int]]] = {
    "pad_to_max": _pad_to_max,
    "powers_of_two": _powers_of_two,
    "geometric": _geometric,
    "quantile": _quantile,
    "equal_tokens": _equal_tokens,
}
