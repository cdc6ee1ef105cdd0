"""Bucket lengths from sorted lengths, by closed forms or by exact dynamic programming."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from torch_ref.planning.budget import ceil_div

__all__ = ["CLOSED_FORM", "optimal_lengths"]


def optimal_lengths(distinct: Tensor, max_shapes: int, bucket_costs: Callable[[int], Tensor]) -> Tensor:
    """Choose at most `max_shapes` of the distinct lengths int64[D] for buckets, with the least total cost, int64[k].

    `bucket_costs` gives, for an index j, the costs of the buckets that hold the lengths i..j, for i = 0..j: [j + 1] of
    int64 or float64, each >= 0, infinite where there may be no such bucket. Among equal totals the fewest buckets come
    first, then, from the longest down, the smaller lengths.

    With K shapes it takes O(K * D**2) time and O(K * D) memory. The row rule's ceilings make the cost neither monotone
    nor convex in the bucket's ends, so every end is tried.
    """
    num_distinct, max_shapes = len(distinct), min(max_shapes, len(distinct))
    # total[k, j]: the least cost of the j shortest lengths in exactly k buckets, summed from the shortest bucket up.
    kind = bucket_costs(0).numpy().dtype
    unreachable = np.inf if kind == np.float64 else 2**62
    total = np.full((max_shapes + 1, num_distinct + 1), unreachable, dtype=kind)
    total[0, 0] = 0
    sums = np.empty((max_shapes, num_distinct), dtype=kind)
    # NumPy in the loop: these arrays are just large enough for torch to hand them to its threads, which costs more
    # than the arithmetic where cores are shared, and NumPy's minimum is several times faster.
    for last in range(num_distinct):
        # The last bucket holds lengths i..last, for every i <= last at once.
        np.add(total[:-1, : last + 1], bucket_costs(last).numpy(), out=sums[:, : last + 1])
        total[1:, last + 1] = np.minimum(sums[:, : last + 1].min(axis=1), unreachable)
    num_buckets = int(total[1:, num_distinct].argmin())  # less one: the fewest come first
    bucket_lengths = []
    end = num_distinct
    for k in range(num_buckets, -1, -1):
        bucket_lengths.append(int(distinct[end - 1]))
        # argmin gives the first of equals: the bucket that starts earliest, so that the next length down is smallest.
        end = int((total[k, :end] + bucket_costs(end - 1).numpy()).argmin())
    return torch.tensor(bucket_lengths[::-1])


def _pad_to_max(ordered: Tensor, max_shapes: int) -> Tensor:
    return ordered[-1:]


def _powers_of_two(ordered: Tensor, max_shapes: int) -> Tensor:
    shortest, longest = int(ordered[0]), int(ordered[-1])
    # (n - 1).bit_length() is the exponent of the first power of two that is at least n.
    exponents = range((shortest - 1).bit_length(), (longest - 1).bit_length())
    return torch.tensor([*(2**exponent for exponent in exponents), longest])


def _geometric(ordered: Tensor, max_shapes: int) -> Tensor:
    shortest, longest = int(ordered[0]), int(ordered[-1])
    powers = (shortest ** (max_shapes - k) * longest**k for k in range(1, max_shapes + 1))
    return torch.tensor([_ceil_root(power, max_shapes, shortest, longest) for power in powers])


def _ceil_root(power: int, degree: int, low: int, high: int) -> int:
    """Return the smallest integer e in [low, high] with e**degree >= power, by bisection: floats would round."""
    while low < high:
        middle = (low + high) // 2
        if middle**degree >= power:
            high = middle
        else:
            low = middle + 1
    return low


def _quantile(ordered: Tensor, max_shapes: int) -> Tensor:
    parts = torch.arange(1, max_shapes + 1)
    return ordered[ceil_div(parts * len(ordered), max_shapes) - 1]


def _equal_tokens(ordered: Tensor, max_shapes: int) -> Tensor:
    cumulative = torch.cumsum(ordered, dim=0)
    total = int(cumulative[-1])
    targets = torch.tensor([-(-k * total // max_shapes) for k in range(1, max_shapes + 1)])
    return ordered[torch.searchsorted(cumulative, targets)]


# Each takes the sorted lengths int64[N] and the number of shapes K, and gives ascending lengths int64[<= K], repeats
# included ("powers_of_two" as many as it needs).
CLOSED_FORM: dict[str, Callable[[Tensor, int], Tensor]] = {
    "pad_to_max": _pad_to_max,
    "powers_of_two": _powers_of_two,
    "geometric": _geometric,
    "quantile": _quantile,
    "equal_tokens": _equal_tokens,
}
