"""Where to cut a causal sequence, so that its slices go through a pipeline in the least time. NumPy only.

Letters: T tokens, K slices, n units, S stages, M microbatches.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64, Int64

from jvarlen._common.checks import UserError, check_at_least_one, list_first

__all__ = ["SliceCostFn", "Slices", "choose_slices", "slice_seconds", "slices_of"]

SliceCostFn = Callable[[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]], npt.ArrayLike]
Slices = int | Mapping[int, Sequence[int]] | Callable[[int], Sequence[int]]


def choose_slices(
    length: int, num_stages: int, num_microbatches: int, cost: SliceCostFn, *, unit: int = 1
) -> Int64[np.ndarray, " K"]:
    """The slices of a sequence with the least time in a pipeline: M · (sum of their costs) + (S − 1) · (largest cost).

    That is the exact time of `token_slices` in mode `"mpmd"`, forward or backward. Stages are alike, so M · K slices
    pass S machines that need the same time for the same slice: the last stage ends after all slices one after another,
    and S − 1 times the slowest. Forward and backward follow each other. `cost` may be their sum if one is a multiple of
    the other. Synchronous ticks last a little longer, unless all slices cost the same.

    Dynamic programming finds the smallest sum with no slice above a limit. The limit starts at infinity, and then is
    below the largest cost of the previous solution, until no gain is left: time O(n²) for each limit.

    Args:
      length: T, at least 1.
      num_stages: S, at least 1.
      num_microbatches: M, at least 1; of one length.
      cost: cost(num_tokens, num_earlier_tokens) -> seconds of one slice on one stage. It takes int64 arrays of one
        shape and returns numbers, finite and at least 0.
      unit: slices are a multiple of this, which must divide T. n = T / unit.

    Returns:
      int64[K], tokens of each slice, from the first; they sum to T. If times are equal, those with the smaller
      sum of costs.

    Raises:
      ValueError: a number below 1, a unit that does not divide T, or a cost that is negative or not finite.

    Example:
      >>> def seconds(num_tokens, num_earlier):  # the later tokens attend to more
      ...     return 1 + num_tokens * (1 + (num_earlier + num_tokens / 2) / 8)
      >>> choose_slices(16, 4, 2, seconds).tolist()
      [4, 3, 2, 2, 2, 2, 1]

    References:
      Li et al. 2021, "TeraPipe: Token-Level Pipeline Parallelism for Training Large-Scale Language Models",
      section 3.4.
    """
    check_at_least_one(length=length, num_stages=num_stages, num_microbatches=num_microbatches, unit=unit)
    if length % unit:
        raise UserError(f"length ({length}) must be a multiple of unit ({unit})")
    edges = np.arange(0, length + 1, unit)
    costs = _costs(cost, edges)
    best, chosen, limit = np.inf, edges[:0], np.inf
    while True:
        cuts, total = _smallest_sum(costs, limit)
        # Lower limits give no smaller sum, and this alone is no gain.
        if num_microbatches * total >= best:
            return np.diff(chosen)
        slowest = costs[cuts[:-1], cuts[1:]].max()
        seconds = num_microbatches * total + (num_stages - 1) * slowest
        if seconds < best:
            best, chosen = seconds, edges[cuts]
        limit = slowest


def slice_seconds(
    slices: Sequence[int] | Int64[np.ndarray, " K"], length: int, cost: SliceCostFn
) -> Float64[np.ndarray, " K"]:
    """The cost of each slice of a sequence: with an axis in front, costs of a kind for `Schedule.simulate`.

    Args:
      slices: tokens of each slice, at least 1 each.
      length: T, to which they must sum.
      cost: as for `choose_slices`.

    Returns:
      float64[K].

    Raises:
      ValueError: slices that are below 1 or do not sum to T; a cost that is negative or not finite.

    Example:
      >>> slice_seconds([4, 2], 6, lambda num_tokens, num_earlier: num_tokens * (1 + num_earlier)).tolist()
      [4.0, 10.0]
    """
    num_tokens = _check_lengths(slices, length)
    return _check_seconds(cost, num_tokens, np.cumsum(num_tokens) - num_tokens)


def slices_of(slices: Slices, length: int) -> tuple[int, ...]:
    """The slices of rows of one length.

    Args:
      slices: their number K, for lengths that differ by 1 at most, the longer ones first; or tokens of each slice for
        every length of rows, by a mapping or a function.
      length: T.

    Returns:
      Tokens of each slice, from the first.

    Raises:
      ValueError: slices that are below 1 or do not sum to T, more slices than tokens, or a length that is not in the
        mapping.

    Example:
      >>> slices_of(4, 10), slices_of({10: (6, 4)}, 10)
      ((3, 3, 2, 2), (6, 4))
    """
    if isinstance(slices, numbers.Integral):
        slices = int(slices)
        check_at_least_one(slices=slices, length=length)
        if slices > length:
            raise UserError(f"rows of {length} tokens do not make {slices} slices: a slice has at least one token")
        shorter, num_longer = divmod(length, slices)
        return (shorter + 1,) * num_longer + (shorter,) * (slices - num_longer)
    if isinstance(slices, Mapping):
        if length not in slices:
            raise UserError(f"there are no slices for rows of {length} tokens, only for {list_first(sorted(slices))}")
        return tuple(_check_lengths(slices[length], length).tolist())
    if not callable(slices):
        raise UserError(f"slices are a number, a mapping or a function of the length, not {slices!r}")
    return tuple(_check_lengths(slices(length), length).tolist())


def _check_lengths(slices: Sequence[int] | Int64[np.ndarray, " K"], length: int) -> Int64[np.ndarray, " K"]:
    check_at_least_one(length=length, **{f"slices[{k}]": num_tokens for k, num_tokens in enumerate(slices)})
    num_tokens = np.array(slices, np.int64)
    if num_tokens.sum() != length:
        raise UserError(f"slices {list_first(num_tokens)} sum to {num_tokens.sum()} tokens; length is {length}")
    return num_tokens


def _costs(cost: SliceCostFn, edges: Int64[np.ndarray, " n_plus_1"]) -> Float64[np.ndarray, "n_plus_1 n_plus_1"]:
    """The cost of the slice from edge i to edge j; infinite unless i < j."""
    first, last = np.triu_indices(len(edges), k=1)
    costs = np.full((len(edges), len(edges)), np.inf)
    costs[first, last] = _check_seconds(cost, edges[last] - edges[first], edges[first])
    return costs


def _smallest_sum(
    costs: Float64[np.ndarray, "n_plus_1 n_plus_1"], limit: float
) -> tuple[Int64[np.ndarray, " cuts"], float]:
    """The cuts, both ends included, with the smallest sum of costs that are all below the limit; infinite if none."""
    below = np.where(costs < limit, costs, np.inf).T  # a row for each last edge
    sums, previous = np.zeros(len(below)), np.zeros(len(below), np.int64)
    for j in range(1, len(below)):
        candidates = sums[:j] + below[j, :j]
        previous[j] = candidates.argmin()
        sums[j] = candidates[previous[j]]
    cuts = [len(below) - 1]
    while cuts[-1]:
        cuts.append(int(previous[cuts[-1]]))
    return np.array(cuts[::-1], np.int64), float(sums[-1])


def _check_seconds(
    cost: SliceCostFn, num_tokens: Int64[np.ndarray, " n"], num_earlier: Int64[np.ndarray, " n"]
) -> Float64[np.ndarray, " n"]:
    values = np.broadcast_to(np.asarray(cost(num_tokens, num_earlier), np.float64), num_tokens.shape)
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(wrong):
        listed = [f"cost({num_tokens[i]}, {num_earlier[i]}) = {values[i]}" for i in wrong]
        raise UserError(f"costs of slices must be finite and at least 0: {list_first(listed)}")
    return values
