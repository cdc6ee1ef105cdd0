"""Lengths and a token budget in, static shapes (rows, length) out; six strategies choose the lengths."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from torch_ref.checks import MAX_LISTED, check_integer, list_offenders, to_tensor
from torch_ref.edges import CLOSED_FORM, ceil_div, optimal_edges
from torch_ref.lengths import check_lengths

Cost = Callable[[NDArray[np.int64], NDArray[np.int64]], ArrayLike]


class Bucket(NamedTuple):
    """A static shape: `rows` samples of up to `length` tokens each."""

    rows: int
    length: int


@dataclass(frozen=True, kw_only=True)
class RowRule:
    """How many rows a microbatch gets, from the budget and from how many samples its bucket holds.

    Attributes:
        max_tokens: the budget of a microbatch, rows times length.
        microbatches_per_step: M.
        row_multiple: rows are a multiple of it wherever the budget leaves at least one multiple.
    """

    max_tokens: int
    microbatches_per_step: int
    row_multiple: int

    def rows_and_steps(self, num_samples: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of a microbatch and the steps that the samples take.

        Args:
            num_samples: int64, samples in the bucket; 0 gives as many rows as the budget allows, and no step.
            length: int64 of a shape that broadcasts, in tokens, at most `max_tokens`.

        Returns:
            (rows, steps), two int64 tensors of the common shape.
        """
        cap = self.max_tokens // length
        cap = torch.where(cap >= self.row_multiple, cap - cap % self.row_multiple, cap)
        # ceil(ceil(n / M) / x) = ceil(n / (M * x)), without a product that could overflow.
        share = ceil_div(num_samples, self.microbatches_per_step)
        steps = ceil_div(share, cap)
        rows = ceil_div(ceil_div(share, steps.clamp(min=1)), self.row_multiple) * self.row_multiple
        return torch.where(steps > 0, torch.minimum(rows, cap), cap), steps


def make_buckets(
    lengths: ArrayLike,
    max_tokens: int,
    *,
    strategy: str = "optimal",
    max_shapes: int = 16,
    max_length: int | None = None,
    microbatches_per_step: int = 1,
    row_multiple: int = 1,
    length_multiple: int = 1,
    cost: Cost | None = None,
    compile_seconds: float | None = None,
) -> tuple[Bucket, ...]:
    """Choose the static shapes for a list of lengths.

    Args:
        lengths: [N] integers >= 1, in tokens.
        max_tokens: the budget: rows times length of a microbatch never exceed it.
        strategy: "pad_to_max" | "powers_of_two" | "geometric" | "quantile" | "equal_tokens" | "optimal". "optimal"
            finds the least total cost exactly, in time quadratic in the number of distinct lengths.
        max_shapes: at most this many buckets ("powers_of_two" takes as many as it needs).
        max_length: samples above it count as samples of this length.
        microbatches_per_step: M.
        row_multiple: rows are a multiple of it wherever the budget leaves at least one multiple.
        length_multiple: bucket lengths are multiples of it.
        cost: for "optimal", the cost of a microbatch: called as cost(rows, length) with int64 arrays that broadcast,
            gives float64 >= 0. None counts positions, rows times length.
        compile_seconds: what each further bucket costs, in the unit of `cost`; only together with it.

    Returns:
        The buckets by strictly ascending length. A bucket that holds no sample has the most rows the budget allows.

    Raises:
        ValueError: if an argument is out of its range, if a sample does not fit the budget (the first are listed),
            or if `max_length` cannot hold the longest length rounded up to `length_multiple`.

    Example:
        >>> make_buckets([2, 2, 3, 9], 18, max_shapes=2)
        (Bucket(rows=3, length=3), Bucket(rows=1, length=9))
    """
    lengths = check_lengths(lengths)
    max_shapes = check_integer("max_shapes", max_shapes)
    length_multiple = check_integer("length_multiple", length_multiple)
    rule = RowRule(
        max_tokens=check_integer("max_tokens", max_tokens),
        microbatches_per_step=check_integer("microbatches_per_step", microbatches_per_step),
        row_multiple=check_integer("row_multiple", row_multiple),
    )
    _check_cost(cost, compile_seconds)
    ordered = torch.sort(to_tensor(_clip(lengths, max_length, rule.max_tokens, length_multiple))).values
    if strategy == "optimal":
        distinct, counts = torch.unique_consecutive(_round_up(ordered, length_multiple), return_counts=True)
        edges = optimal_edges(distinct, counts, max_shapes, _bucket_cost(rule, cost, compile_seconds))
    elif strategy in CLOSED_FORM:
        edges = torch.unique(_round_up(CLOSED_FORM[strategy](ordered, max_shapes), length_multiple))
    else:
        raise ValueError(f"strategy must be one of {', '.join([*CLOSED_FORM, 'optimal'])}, got {strategy!r}")
    num_samples = torch.bincount(torch.bucketize(ordered, edges), minlength=len(edges))
    rows, _ = rule.rows_and_steps(num_samples, edges)
    return tuple(Bucket(*pair) for pair in zip(rows.tolist(), edges.tolist(), strict=True))


def check_buckets(buckets: Sequence[tuple[int, int]]) -> tuple[Bucket, ...]:
    """Check buckets that a caller made.

    Args:
        buckets: (rows, length) pairs.

    Returns:
        The same as `Bucket`s of Python ints.

    Raises:
        ValueError: if there are none, if one is not a pair of integers >= 1, or if lengths do not strictly ascend.
    """
    checked = []
    for index, pair in enumerate(buckets):
        if len(pair) != 2:
            raise ValueError(f"bucket {index} must be a pair (rows, length), got {pair!r}")
        rows, length = pair
        checked.append(
            Bucket(check_integer(f"rows of bucket {index}", rows), check_integer(f"length of bucket {index}", length))
        )
    lengths = [bucket.length for bucket in checked]
    if not checked or any(after <= before for before, after in pairwise(lengths)):
        raise ValueError(f"buckets must be at least one, of strictly ascending lengths, got lengths {lengths}")
    return tuple(checked)


def _clip(lengths: NDArray[np.int64], max_length: int | None, max_tokens: int, multiple: int) -> NDArray[np.int64]:
    """Cut the lengths to `max_length` and refuse those that then fit no microbatch."""
    clipped = lengths
    if max_length is not None:
        clipped = np.minimum(lengths, check_integer("max_length", max_length))
        longest = -(-int(clipped.max()) // multiple) * multiple
        if longest > max_length:
            raise ValueError(
                f"the longest bucket would be {longest}, above max_length={max_length}: "
                f"make max_length a multiple of length_multiple={multiple}"
            )
    ids = np.flatnonzero(clipped > max_tokens // multiple * multiple)
    if len(ids):
        # Python integers: rounding up the largest int64 would overflow.
        rounded = [-(-int(length) // multiple) * multiple for length in clipped[ids[:MAX_LISTED]]]
        raise ValueError(
            f"samples do not fit a microbatch of max_tokens={max_tokens}, lengths rounded up to a multiple of "
            f"{multiple}: {list_offenders(ids, rounded, max_tokens)}"
        )
    return clipped


def _check_cost(cost: Cost | None, compile_seconds: float | None) -> None:
    if cost is not None and not callable(cost):
        raise ValueError(f"cost must be a function of (rows, length), got {cost!r}")
    if compile_seconds is None:
        return
    if cost is None:
        raise ValueError("compile_seconds needs a cost in seconds")
    if not 0 <= compile_seconds < float("inf"):
        raise ValueError(f"compile_seconds must be finite and at least 0, got {compile_seconds!r}")


def _bucket_cost(rule: RowRule, cost: Cost | None, compile_seconds: float | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the cost of whole buckets, from num_samples int64[n] and length int64[1] to int64[n] or float64[n]."""

    def positions(num_samples: Tensor, length: Tensor) -> Tensor:
        rows, steps = rule.rows_and_steps(num_samples, length)
        return steps * rule.microbatches_per_step * rows * length

    def seconds(num_samples: Tensor, length: Tensor) -> Tensor:
        assert cost is not None
        rows, steps = rule.rows_and_steps(num_samples, length)
        microbatches = (steps * rule.microbatches_per_step).to(torch.float64)
        each = _checked_cost(cost(rows.numpy(), length.numpy()), rows, length)
        return microbatches * each + (0.0 if compile_seconds is None else compile_seconds)

    return positions if cost is None else seconds


def _checked_cost(values: Any, rows: Tensor, length: Tensor) -> Tensor:
    costs = np.asarray(values)
    if costs.dtype.kind not in "iuf":
        raise ValueError(f"cost must return float64, got dtype {costs.dtype}")
    costs = np.broadcast_to(costs, rows.shape).astype(np.float64)
    bad = np.flatnonzero(~(np.isfinite(costs) & (costs >= 0)))
    if len(bad):
        shapes = ", ".join(f"{int(rows[i])} x {int(length)}: {costs[i]}" for i in bad[:MAX_LISTED])
        raise ValueError(f"cost must be finite and at least 0; rows x length: {shapes}")
    return to_tensor(costs)


def _round_up(values: Tensor, multiple: int) -> Tensor:
    return ceil_div(values, multiple) * multiple
