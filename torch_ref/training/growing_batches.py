"""Seesaw: batches that grow where a schedule would lower the learning rate."""

import bisect
import itertools
from collections.abc import Callable
from typing import NamedTuple

from torch_ref.checks import check_integer, check_number, known_keywords

__all__ = ["Seesaw", "seesaw"]

_GRID = 10_000
_SLACK = 1 + 1e-9  # two values of a schedule this close are equal


class Seesaw(NamedTuple):
    """The size of a step, and the base rate, by what came before."""

    batch_sizes: Callable[[int, int], int]
    """The size of a step, by the steps and tokens before it."""
    schedule: Callable[[int], float]
    """The base rate by tokens seen."""


@known_keywords
def seesaw(
    schedule: Callable[[int], float],
    num_tokens: int,
    batch_size: int,
    *,
    factor: float = 2.0,
    max_batch_size: int | None = None,
) -> Seesaw:
    """Return batch sizes that grow by `factor` wherever the schedule has fallen by another `factor` from its peak.

    The schedule is held between these places, until batches have `max_batch_size`. With the rule "sqrt" for the base
    batch size `batch_size`, rates then fall by the square root of `factor` (arXiv:2510.14717).

    Args:
        schedule: the base rate by the real tokens seen: warm-up to a peak, then decay.
        num_tokens: real tokens of all epochs.
        batch_size: the first size, in samples or tokens.
        factor: >= 1.01.
        max_batch_size: the largest size, or None.

    Returns:
        `batch_sizes(step, tokens_seen)` for `make_plan`, and `schedule(tokens_seen)` for `lr_sequence`, counted in
        tokens.

    Raises:
        ValueError: if an argument is out of its range, or the schedule rises after its peak.

    Example:
        >>> ramp = seesaw(lambda tokens: 0.5 ** (tokens // 40), 120, 1)
        >>> [(ramp.batch_sizes(0, tokens), ramp.schedule(tokens)) for tokens in (0, 39, 40, 119)]
        [(1, 1.0), (1, 1.0), (2, 0.5), (4, 0.25)]
    """
    total = check_integer("num_tokens", num_tokens)
    size = check_integer("batch_size", batch_size)
    most = max(size, total) if max_batch_size is None else check_integer("max_batch_size", max_batch_size, size)
    if check_number("factor", factor, above=1) < 1.01:
        raise ValueError(f"factor must be at least 1.01, got {factor!r}")
    peak = _peak(schedule, total)
    starts, sizes = [peak], [size]
    for power in itertools.count(1):
        if sizes[-1] >= most:
            break
        limit = schedule(peak) / factor**power * _SLACK
        start = bisect.bisect_left(range(total), -limit, lo=peak, key=lambda tokens: -schedule(tokens))
        if start == total:
            break
        starts.append(start)
        sizes.append(min(round(size * factor**power), most))
    free_from = starts[-1] if max_batch_size is not None and sizes[-1] == most else total

    def stage(tokens_seen: int) -> int:
        return max(bisect.bisect_right(starts, tokens_seen) - 1, 0)

    def held(tokens_seen: int) -> float:
        is_held = peak <= tokens_seen < free_from
        return float(schedule(starts[stage(tokens_seen)] if is_held else tokens_seen))

    return Seesaw(lambda step, tokens_seen: sizes[stage(tokens_seen)], held)


def _peak(schedule: Callable[[int], float], total: int) -> int:
    """Return the first count with the highest rate; a ValueError unless the schedule falls from there on."""
    places = range(total)
    while len(places) > 1:
        inner = places[:: max(len(places) // _GRID, 1)]
        best = max(range(len(inner)), key=lambda i: check_number("schedule", schedule(inner[i])))
        if len(inner) == len(places):
            places = inner[best : best + 1]
        else:
            places = range(inner[max(best - 1, 0)], inner[best + 1] if best + 1 < len(inner) else total)
    peak = places[0]
    after = [*range(peak, total, max((total - peak) // _GRID, 1)), total - 1]
    rises = [(a, b) for a, b in itertools.pairwise(after) if schedule(b) > schedule(a) * _SLACK]
    if rises:
        raise ValueError(f"the schedule must not rise after its peak, at {peak} tokens: between tokens {rises[:3]}")
    check_number("the peak of the schedule", schedule(peak), above=0)
    return peak
