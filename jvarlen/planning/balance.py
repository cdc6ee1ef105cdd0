"""Work dealt to ranks so that none waits long for the slowest.

NumPy only. Costs are floats of any unit. They are compared as integers: multiples of 2**-32 of the power of two above
the largest, so that sums are exact and ties are decided the same everywhere. Letters: n microbatches, p ranks.
"""

from __future__ import annotations

import functools
import heapq

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64, Int64

from jvarlen._common.checks import UserError, check_at_least_one, list_offenders, offenders_where

__all__ = ["assign_microbatches"]

_COST_BITS = 32
_MOST_SEARCHED = 12  # microbatches, for an exact search


def assign_microbatches(costs: npt.ArrayLike, num_ranks: int) -> Int64[np.ndarray, " n"]:
    """Assigns microbatches to ranks so that the slowest rank has little to do.

    Longest first: microbatches by descending cost, ties by index, each to the rank that has the least so far, ties by
    rank. Up to 12 microbatches are then searched exactly (branch and bound): where an assignment has a lower slowest
    rank than that, the result is, of all with the lowest, the one whose ranks in the order of descending cost come
    first lexicographically. The search takes some ms at most, mostly below one.

    Args:
      costs: floats[n], what each microbatch costs, in any unit, finite and at least 0. They are rounded to multiples of
        2**-32 of the power of two above the largest.
      num_ranks: p. It may be above n: some ranks then get nothing.

    Returns:
      int64[n], the rank of each microbatch.

    Raises:
      ValueError: costs that are negative, NaN or infinite, listed by index; no ranks.

    Example:
      >>> assign_microbatches([7, 2, 5, 4, 6], 2).tolist()
      [0, 1, 0, 1, 1]

    References:
      Longest first: Graham 1969, "Bounds on Multiprocessing Timing Anomalies". Its slowest rank has at most 4/3 −
      1/(3p) of the least possible.
    """
    check_at_least_one(num_ranks=num_ranks)
    units = _in_units(_checked_costs(costs, "costs"))
    descending = np.argsort(-units, kind="stable")
    ranks = np.empty(len(units), np.int64)
    ranks[descending] = _ranks_of_descending(tuple(units[descending].tolist()), min(int(num_ranks), len(units)))
    return ranks


def _checked_costs(costs: npt.ArrayLike, name: str) -> Float64[np.ndarray, " n"]:
    values = np.asarray(costs)
    if values.ndim != 1 or values.size == 0 or values.dtype.kind not in "iuf":
        raise UserError(f"{name} must be 1-D with at least one number, not {values.dtype}{list(values.shape)}")
    values = values.astype(np.float64)
    wrong = ~(np.isfinite(values) & (values >= 0))
    if wrong.any():
        raise UserError(f"{name} must be finite and at least 0: {list_offenders(*offenders_where(wrong, values))}")
    return values


def _in_units(costs: Float64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
    """Costs as multiples of 2**-32 of the power of two above the largest, so that integers below 2**32 are exact."""
    _, exponent = np.frexp(costs.max())
    return np.rint(np.ldexp(costs, _COST_BITS - int(exponent))).astype(np.int64)


@functools.lru_cache(maxsize=2**12)  # steps of few shapes repeat
def _ranks_of_descending(costs: tuple[int, ...], num_ranks: int) -> tuple[int, ...]:
    """The rank of each of the descending costs."""
    loads = [(0, rank) for rank in range(num_ranks)]
    ranks = []
    for cost in costs:
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + cost, rank))
        ranks.append(rank)
    if len(costs) <= _MOST_SEARCHED:
        return _Search(costs, num_ranks, ranks, max(loads)[0]).ranks
    return tuple(ranks)


class _Search:
    """Depth first over the ranks of each cost; `ranks` are the first that have a lower slowest rank than all before."""

    def __init__(self, costs: tuple[int, ...], num_ranks: int, ranks: list[int], slowest: int):
        self._costs, self._slowest = costs, slowest
        self._loads, self._chosen = [0] * num_ranks, [0] * len(costs)
        shared = sum(costs[num_ranks - 1 : num_ranks + 1]) if len(costs) > num_ranks else 0  # two costs share a rank
        self._least = max(costs[0], -(-sum(costs) // num_ranks), shared)
        self.ranks = tuple(ranks)
        self._place(0)

    def _place(self, k: int) -> None:
        if self._slowest <= self._least or max(self._loads) >= self._slowest:
            return
        if k == len(self._costs):
            self.ranks, self._slowest = tuple(self._chosen), max(self._loads)
            return
        tried = set()
        for rank, load in enumerate(self._loads):
            if load in tried or load + self._costs[k] >= self._slowest:
                continue  # ranks with equal loads are alike
            tried.add(load)
            self._chosen[k] = rank
            self._loads[rank] = load + self._costs[k]
            self._place(k + 1)
            self._loads[rank] = load
