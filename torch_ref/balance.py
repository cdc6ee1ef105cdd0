"""Deals work to ranks so that the slowest one finishes early."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torch_ref.checks import MAX_LISTED, check_integer

__all__ = ["assign_microbatches"]

_SEARCHED_UP_TO = 12
_UNIT_BITS = 32


def assign_microbatches(costs: ArrayLike, num_ranks: int) -> NDArray[np.int64]:
    """Assign microbatches to ranks by Graham's rule, and the fewest of them exactly.

    From the most to the least costly one, ties by index, a microbatch goes to the rank with the least work so far, ties
    by rank. Of at most 12 microbatches it is then known whether any assignment has less work on its slowest rank. If
    one has, the result is the best one, and of equal ones that whose ranks, from the most to the least costly
    microbatch, come first as a list.

    Args:
        costs: [n] numbers >= 0, counted in 2**-32 of the next power of two above the largest, to the nearest integer.
        num_ranks: how many ranks there are; some may stay without work.

    Returns:
        int64[n], ranks.

    Raises:
        ValueError: if a cost is negative or not finite (the first are listed by index), or there is no rank.

    Example:
        >>> assign_microbatches([3, 3, 2, 2, 2], 2).tolist()
        [0, 0, 1, 1, 1]
    """
    units = _in_units(_check_costs("costs", costs))
    used = min(check_integer("num_ranks", num_ranks), len(units))
    order = sorted(range(len(units)), key=lambda i: (-units[i], i))
    falling = [units[i] for i in order]
    ranks = _longest_first(falling, used)
    if len(units) <= _SEARCHED_UP_TO:
        ranks = _shorten(falling, used, ranks)
    result = np.zeros(len(units), dtype=np.int64)
    result[order] = ranks
    return result


def _check_costs(name: str, costs: ArrayLike) -> NDArray[np.float64]:
    """Return costs as float64[n].

    Args:
        name: what a message calls them.
        costs: [n] numbers.

    Returns:
        The same numbers.

    Raises:
        ValueError: if there are none or they aren't 1-D, or if some are negative or not finite; these are listed.
    """
    array: NDArray[Any] = np.asarray(costs)
    if array.ndim != 1 or len(array) == 0 or array.dtype.kind not in "iuf":
        raise ValueError(f"{name} must be a 1-D array of numbers, got shape {array.shape} and dtype {array.dtype}")
    values = array.astype(np.float64)
    bad = [i for i, value in enumerate(values.tolist()) if not 0 <= value < np.inf]
    if bad:
        more = f" and {len(bad) - MAX_LISTED} more" if len(bad) > MAX_LISTED else ""
        listed = ", ".join(f"id {i}: {values[i]}" for i in bad[:MAX_LISTED])
        raise ValueError(f"{name} must be finite and not negative: {listed}{more}")
    return values


def _in_units(costs: NDArray[np.float64]) -> list[int]:
    """Return costs as integers, of which sums are exact.

    Args:
        costs: float64[n], finite, at least 0.

    Returns:
        n integers of at most 2**32.
    """
    _, exponent = math.frexp(costs.max())
    whole = np.ldexp(costs, _UNIT_BITS - exponent).tolist()
    return [round(value) for value in whole]  # halves to even, as in IEEE 754


def _longest_first(falling: Sequence[int], num_ranks: int) -> list[int]:
    work = [0] * num_ranks
    ranks = []
    for cost in falling:
        idlest = work.index(min(work))
        work[idlest] += cost
        ranks.append(idlest)
    return ranks


def _shorten(falling: Sequence[int], num_ranks: int, ranks: list[int]) -> list[int]:
    """Ask for less work on the slowest rank until no assignment has it."""
    while True:
        work = [0] * num_ranks
        for cost, rank in zip(falling, ranks, strict=True):
            work[rank] += cost
        shorter = _first_within(falling, num_ranks, max(work) - 1)
        if shorter is None:
            return ranks
        ranks = shorter


def _first_within(falling: Sequence[int], num_ranks: int, limit: int) -> list[int] | None:
    """Return the first list of ranks, if any, by which no rank has more work than the limit."""
    if sum(falling) > limit * num_ranks:
        return None
    hopeless: set[tuple[int, ...]] = set()  # sorted work of the ranks, after as many microbatches as that took

    def extend(ranks: list[int], work: tuple[int, ...]) -> list[int] | None:
        if len(ranks) == len(falling):
            return ranks
        state = (len(ranks), *sorted(work))
        if state in hopeless:
            return None
        cost = falling[len(ranks)]
        for rank in range(num_ranks):
            if work[rank] + cost <= limit and work[rank] not in work[:rank]:
                found = extend([*ranks, rank], (*work[:rank], work[rank] + cost, *work[rank + 1 :]))
                if found is not None:
                    return found
        hopeless.add(state)
        return None

    return extend([], (0,) * num_ranks)
