"""Buckets: in go lengths and a token budget, out comes a small tuple of static shapes (rows, length).

NumPy only. Letters: N samples, D distinct (rounded) lengths, K buckets, M microbatches a step, B rows, T length, n
samples of a bucket, s its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64, Int64, Shaped

from jvarlen.lengths import check_at_least_one, check_lengths, ends_to_offsets, list_offenders, offenders_where

__all__ = ["Bucket", "CostFn", "Strategy", "check_buckets", "make_buckets", "num_steps_and_rows"]

Strategy = Literal["pad_to_max", "powers_of_two", "geometric", "quantile", "equal_tokens", "optimal"]
CostFn = Callable[[np.ndarray, np.ndarray], npt.ArrayLike]


class Bucket(NamedTuple):
    """A static shape: `rows` × `length` tokens."""

    rows: int
    length: int


def make_buckets(
    lengths: npt.ArrayLike,
    max_tokens: int,
    *,
    strategy: Strategy = "optimal",
    max_shapes: int = 16,
    max_length: int | None = None,
    microbatches_per_step: int = 1,
    row_multiple: int = 1,
    length_multiple: int = 1,
    cost: CostFn | None = None,
    compile_seconds: float | None = None,
) -> tuple[Bucket, ...]:
    """Chooses the static shapes for a dataset.

    Args:
      lengths: integers[N], tokens a sample.
      max_tokens: budget of one microbatch in tokens, padding included: rows × length never exceeds it.
      strategy: how the lengths of the buckets are chosen. `"optimal"`: the cheapest set, exactly. `"pad_to_max"`: one
        bucket. `"powers_of_two"`: ignores `max_shapes`. `"geometric"`: equal ratios from the shortest to the longest.
        `"quantile"`: equal samples a bucket. `"equal_tokens"`: equal tokens a bucket.
      max_shapes: the most buckets.
      max_length: the longest bucket in tokens; longer samples count as cut to it here, and what becomes of them is
        the choice of `make_plan(overlong=)`. None: the longest sample.
      microbatches_per_step: M, the microbatches of one optimizer update.
      row_multiple: rows are a multiple of it, where the budget allows one.
      length_multiple: bucket lengths are rounded up to a multiple of it.
      cost: for `"optimal"`, cost(rows, length) of one microbatch: takes int64 arrays that broadcast and gives float64,
        finite and at least 0; seconds, say. None: rows × length tokens, in int64.
      compile_seconds: for `"optimal"` with a `cost` in seconds, what compiling one bucket adds; it then decides how
        many of the `max_shapes` are worth having.

    Returns:
      A tuple of `Bucket`, lengths strictly ascending; the last holds the longest sample. A bucket that holds no sample
      (`"geometric"` and `"powers_of_two"` can make such) has as many rows as the budget allows.

    Raises:
      ValueError: lengths or options that are not as described; samples longer than `max_tokens` are listed as id,
        value, limit.

    Example:
      >>> make_buckets([3, 4, 4, 9, 16], max_tokens=32, max_shapes=2)
      (Bucket(rows=3, length=4), Bucket(rows=2, length=16))

    References:
      Dynamic programming over the sorted lengths is the exact one-dimensional clustering of Wang and Song 2011,
      "Ckmeans.1d.dp"; here the cost of a cluster is that of the padded steps it takes.
    """
    _check_options(strategy, max_tokens, max_shapes, max_length, microbatches_per_step, row_multiple, length_multiple)
    if compile_seconds is not None and (cost is None or not compile_seconds >= 0):
        raise ValueError(f"compile_seconds ({compile_seconds}) must be at least 0 and needs a cost in seconds")
    lengths = check_lengths(lengths)
    values, counts = _histogram(lengths if max_length is None else np.minimum(lengths, max_length))
    rounded, counts_of_rounded = _round_up(values, counts, length_multiple)
    _check_budget(lengths, int(rounded[-1]), max_tokens, max_length, length_multiple)
    budget = _Budget(max_tokens, microbatches_per_step, row_multiple)
    if strategy == "optimal":
        edges = _optimal_edges(rounded, counts_of_rounded, max_shapes, budget, cost, compile_seconds)
    else:
        chosen = np.array(_EDGES[strategy](values, counts, max_shapes), np.int64)
        edges = np.unique(-(-chosen // length_multiple) * length_multiple)
    samples_up_to = np.cumsum(counts_of_rounded)[np.searchsorted(rounded, edges, side="right") - 1]
    num_samples = np.diff(samples_up_to, prepend=0)
    _, rows = num_steps_and_rows(num_samples, edges, budget)
    return tuple(Bucket(b, t) for b, t in zip(rows.tolist(), edges.tolist(), strict=True))


def check_buckets(buckets: Sequence[tuple[int, int]]) -> tuple[Bucket, ...]:
    """Checks buckets made elsewhere: (rows, length) pairs of integers ≥ 1 with strictly ascending lengths.

    Raises:
      ValueError: not so; the buckets at fault are listed.
    """
    pairs = np.array([tuple(bucket) for bucket in buckets])
    if pairs.ndim != 2 or pairs.shape[1] != 2 or not np.issubdtype(pairs.dtype, np.integer):
        raise ValueError(f"buckets must be at least one (rows, length) pair of integers, not {list(buckets)!r}")
    if pairs.min() < 1:
        raise ValueError(f"rows and length must be at least 1: {[tuple(p) for p in pairs.tolist() if min(p) < 1]}")
    descends = np.flatnonzero(np.diff(pairs[:, 1]) <= 0)
    if len(descends):
        wrong = [tuple(map(tuple, pairs[i : i + 2].tolist())) for i in descends.tolist()]
        raise ValueError(f"bucket lengths must strictly ascend: {wrong}")
    return tuple(Bucket(rows, length) for rows, length in pairs.tolist())


class _Budget(NamedTuple):
    max_tokens: int
    microbatches_per_step: int
    row_multiple: int


def num_steps_and_rows(
    num_samples: Int64[np.ndarray, " *n"], length: Int64[np.ndarray, " *n"], budget: _Budget
) -> tuple[Int64[np.ndarray, " *n"], Int64[np.ndarray, " *n"]]:
    """How many steps a bucket takes and how many rows it then needs.

    The cap is what the budget allows, a multiple of `row_multiple` where one remains. Trimming the rows to what the
    steps need turns one nearly empty last step into steps that are all nearly full.

    Args:
      num_samples: int64[...], samples of each bucket.
      length: int64[...], tokens a row; at most `max_tokens`.
      budget: tokens a microbatch, M, and the multiple of rows.

    Returns:
      steps and rows, int64[...] each.
    """
    max_tokens, microbatches, multiple = budget
    cap = max_tokens // length
    cap = np.where(cap >= multiple, cap - cap % multiple, cap)
    steps = -(-num_samples // (microbatches * cap))
    needed = -(-num_samples // (microbatches * np.maximum(steps, 1)))
    rows = np.minimum(cap, -(-needed // multiple) * multiple)
    return steps, np.where(num_samples > 0, rows, cap)


def _optimal_edges(
    rounded: Int64[np.ndarray, " D"],
    counts: Int64[np.ndarray, " D"],
    max_shapes: int,
    budget: _Budget,
    cost: CostFn | None,
    compile_seconds: float | None,
) -> Int64[np.ndarray, " K"]:
    """The cheapest at most `max_shapes` of the `rounded` lengths, the last included, by dynamic programming.

    cheapest[k, j] is the least cost of putting the shortest j lengths into exactly k + 1 buckets. It follows from every
    cheapest[k - 1, i] with i < j and the cost of one bucket for the lengths between; the ceilings in that cost break
    the monotonicity that faster recurrences need, so all i are tried: O(K D²) time, O(K D) memory. Of equal costs the
    first i wins, which is the smaller edge.
    """
    num_lengths = len(rounded)
    max_shapes = min(max_shapes, num_lengths)
    samples_below = ends_to_offsets(np.cumsum(counts))
    dtype = np.int64 if cost is None else np.float64
    # An integer that no sum of costs reaches, and that stays an integer when a bucket's cost is added to it.
    unreachable = np.iinfo(np.int64).max // 2 if cost is None else np.inf
    cheapest = np.full((max_shapes, num_lengths + 1), unreachable, dtype)
    previous = np.zeros((max_shapes, num_lengths + 1), np.int32)
    for j in range(1, num_lengths + 1):
        num_samples = samples_below[j] - samples_below[:j]
        bucket_cost = _bucket_cost(num_samples, np.full(j, rounded[j - 1]), budget, cost, compile_seconds)
        cheapest[0, j] = bucket_cost[0]
        totals = cheapest[:-1, :j] + bucket_cost
        first = totals.argmin(axis=1)
        previous[1:, j] = first
        cheapest[1:, j] = totals[np.arange(max_shapes - 1), first]
    edges = []
    j = num_lengths
    for k in range(int(cheapest[:, num_lengths].argmin()), -1, -1):
        edges.append(rounded[j - 1])
        j = int(previous[k, j])
    return np.array(edges[::-1], np.int64)


def _bucket_cost(
    num_samples: Int64[np.ndarray, " i"],
    length: Int64[np.ndarray, " i"],
    budget: _Budget,
    cost: CostFn | None,
    compile_seconds: float | None,
) -> Shaped[np.ndarray, " i"]:
    steps, rows = num_steps_and_rows(num_samples, length, budget)
    microbatches = steps * budget.microbatches_per_step
    if cost is None:
        return microbatches * (rows * length)
    seconds = _checked_cost(cost, rows, length)
    total = microbatches.astype(np.float64) * seconds
    return total if compile_seconds is None else total + compile_seconds


def _checked_cost(
    cost: CostFn, rows: Int64[np.ndarray, " i"], length: Int64[np.ndarray, " i"]
) -> Float64[np.ndarray, " i"]:
    seconds = np.broadcast_to(np.asarray(cost(rows, length), np.float64), rows.shape)
    wrong = ~(np.isfinite(seconds) & (seconds >= 0))
    if wrong.any():
        i = int(wrong.argmax())
        raise ValueError(f"cost(rows={rows[i]}, length={length[i]}) is {seconds[i]}; it must be finite and at least 0")
    return seconds


def _pad_to_max_edges(values: np.ndarray, counts: np.ndarray, max_shapes: int) -> list[int]:
    return [int(values[-1])]


def _powers_of_two_edges(values: np.ndarray, counts: np.ndarray, max_shapes: int) -> list[int]:
    shortest, longest = int(values[0]), int(values[-1])
    powers = [2**k for k in range((shortest - 1).bit_length(), (longest - 1).bit_length() + 1)]
    return [*powers[:-1], longest]


def _geometric_edges(values: np.ndarray, counts: np.ndarray, max_shapes: int) -> list[int]:
    shortest, longest = int(values[0]), int(values[-1])
    powers = [shortest ** (max_shapes - k) * longest**k for k in range(1, max_shapes + 1)]
    return [_ceil_root(power, max_shapes, shortest, longest) for power in powers]


def _ceil_root(power: int, degree: int, low: int, high: int) -> int:
    """The smallest integer e in [low, high] with e**degree ≥ power; Python integers, so that it is exact."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if middle**degree >= power else (middle + 1, high)
    return low


def _quantile_edges(values: np.ndarray, counts: np.ndarray, max_shapes: int) -> list[int]:
    ends = np.cumsum(counts)
    positions = [-(-k * int(ends[-1]) // max_shapes) for k in range(1, max_shapes + 1)]
    return values[np.searchsorted(ends, positions)].tolist()


def _equal_tokens_edges(values: np.ndarray, counts: np.ndarray, max_shapes: int) -> list[int]:
    tokens = np.cumsum(values * counts)
    targets = [-(-k * int(tokens[-1]) // max_shapes) for k in range(1, max_shapes + 1)]
    return values[np.searchsorted(tokens, targets)].tolist()


_EDGES: dict[str, Callable[[np.ndarray, np.ndarray, int], list[int]]] = {
    "pad_to_max": _pad_to_max_edges,
    "powers_of_two": _powers_of_two_edges,
    "geometric": _geometric_edges,
    "quantile": _quantile_edges,
    "equal_tokens": _equal_tokens_edges,
}


def _histogram(lengths: Int64[np.ndarray, " N"]) -> tuple[Int64[np.ndarray, " D"], Int64[np.ndarray, " D"]]:
    """Distinct lengths, ascending, and how many samples have each."""
    if lengths.max() <= max(2**20, 4 * len(lengths)):
        counts = np.bincount(lengths)
        values = np.flatnonzero(counts)
        return values, counts[values]
    return np.unique(lengths, return_counts=True)


def _round_up(
    values: Int64[np.ndarray, " D"], counts: Int64[np.ndarray, " D"], multiple: int
) -> tuple[Int64[np.ndarray, " R"], Int64[np.ndarray, " R"]]:
    rounded, first = np.unique(-(-values // multiple) * multiple, return_index=True)
    return rounded, np.add.reduceat(counts, first)


def _check_options(
    strategy: str,
    max_tokens: int,
    max_shapes: int,
    max_length: int | None,
    microbatches_per_step: int,
    row_multiple: int,
    length_multiple: int,
) -> None:
    if strategy not in get_args(Strategy):
        raise ValueError(f"strategy must be one of {', '.join(get_args(Strategy))}, not {strategy!r}")
    check_at_least_one(
        max_tokens=max_tokens,
        max_shapes=max_shapes,
        max_length=1 if max_length is None else max_length,
        microbatches_per_step=microbatches_per_step,
        row_multiple=row_multiple,
        length_multiple=length_multiple,
    )


def _check_budget(
    lengths: Int64[np.ndarray, " N"], longest_edge: int, max_tokens: int, max_length: int | None, multiple: int
) -> None:
    if max_length is not None and longest_edge > max_length:
        raise ValueError(
            f"max_length {max_length} would be rounded up to {longest_edge}: make it a multiple of length_multiple"
        )
    if longest_edge > max_tokens:
        # Rounded lengths exceed the budget where lengths exceed the last multiple within it.
        ids, values = offenders_where(lengths > max_tokens // multiple * multiple, lengths)
        raise ValueError(
            f"max_tokens {max_tokens} is below the longest bucket, {longest_edge} tokens, so that not one row fits: "
            f"{list_offenders(ids, values, max_tokens)}"
        )
