"""Buckets for pairs of source and target: the cheapest static shapes with two lengths.

Letters: a and b candidate lengths of sources and of targets, K shapes. Two families of buckets are searched: chains, in
which both lengths ascend together, and nested ones, where source lengths cut the samples into classes and each class
has its target lengths. A cell (i, j) is the bucket of the first i sources and first j targets, counted from 1.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, Unpack

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from torch_ref.checks import INT64_MAX, check_integer, to_tensor
from torch_ref.planning.buckets import Buckets, PairBucket, make_buckets
from torch_ref.planning.budget import Budget, BudgetFields, as_budget, checked_costs, takes_budget
from torch_ref.planning.lengths import check_pair_lengths, list_pairs, row_sizes, sample_sizes

__all__ = ["check_pair_fields", "make_pair_buckets"]

_FIELDS = (
    "max_tokens",
    "max_shapes",
    "max_length",
    "num_microbatches",
    "row_multiple",
    "length_multiple",
    "max_sequences",
    "cost",
    "compile_seconds",
    "size",
)
_UNREACHABLE = 2**61  # two of them still fit int64


@takes_budget
def make_pair_buckets(
    lengths: ArrayLike,
    max_tokens: int | Budget,
    *,
    max_candidates: int = 64,
    overlong: str = "error",
    **budget: Unpack[BudgetFields],
) -> Buckets:
    """Choose the static shapes for a list of samples of two lengths, with the least cost in all.

    Args:
        lengths: [N, 2] integers, source (>= 1) and target (>= 0), in tokens.
        max_tokens: the budget of a microbatch, rows times `size`; or a `Budget`.
        max_candidates: at most this many lengths of each side are tried: the buckets that `make_buckets` finds for it.
        overlong: pairs with a side above `max_length`: "error" | "drop" (not counted).
        budget: other fields of `Budget` as keywords: `size`, `cost` and `compile_seconds`, `max_shapes`,
            `max_length` (of a side), `num_microbatches`, `row_multiple`, `length_multiple` and `max_sequences`;
            no others.

    Returns:
        The buckets by ascending (source length, target length). A sample belongs to the first that holds it.

    Raises:
        ValueError: if an argument is out of its range, or if no buckets hold all samples; those that do not fit a
            microbatch alone are listed.

    Example:
        >>> make_pair_buckets([[2, 3], [2, 9], [8, 3], [2, 3]], 24, max_shapes=2).shapes
        (PairBucket(rows=2, source_length=2, target_length=3), PairBucket(rows=1, source_length=8, target_length=9))
    """
    checked = check_pair_lengths(lengths)
    limits = as_budget(max_tokens, budget)
    check_pair_fields(limits)
    checked = _within(checked, limits.max_length, overlong)
    max_tokens, max_shapes, length_multiple = limits.max_tokens, limits.max_shapes, limits.length_multiple
    max_candidates = check_integer("max_candidates", max_candidates)
    sample_sizes(checked, limits.size)
    sources, targets = (_candidates(side, limits, max_candidates) for side in checked.T)
    shapes = np.stack(np.meshgrid(sources, targets, indexing="ij"), axis=-1)
    sizes = row_sizes(shapes, limits.size).clip(min=1)  # of short ones that hold no sample it may be 0
    table = _Table(
        before=_count(np.searchsorted(sources, checked[:, 0]), np.searchsorted(targets, checked[:, 1]), sizes.shape),
        lengths=to_tensor(shapes),
        caps=replace(limits, cost=None, compile_seconds=None).caps(to_tensor(sizes)),
        sizes=to_tensor(sizes),
        budget=limits,
    )
    chain, nested = _cheapest_chain(table, max_shapes), _cheapest_nested(table, max_shapes)
    least = chain if chain.cost <= nested.cost else nested
    if least.cost == table.unreachable:
        rounded = -(-checked.clip(min=1) // length_multiple) * length_multiple
        alone = np.flatnonzero(row_sizes(rounded, limits.size) > max_tokens)
        listed = f"these samples do not fit alone: {list_pairs(alone, rounded[alone])}"
        others = "every sample fits alone, but not in one of the lengths tried"
        raise ValueError(
            f"no {max_shapes} buckets of max_tokens={max_tokens} hold all samples, lengths rounded up to a "
            f"multiple of {length_multiple}: {listed if len(alone) else others}"
        )
    cells = [PairBucket(table.rows(held, i, j), int(sources[i - 1]), int(targets[j - 1])) for held, i, j in least.cells]
    return Buckets(tuple(cells), limits.num_microbatches, limits.size)


def _candidates(side: NDArray[np.int64], limits: Budget, max_candidates: int) -> NDArray[np.int64]:
    """Return the best lengths of one side, int64[n], none of them 0."""
    lengths = side.clip(min=1)
    alone = replace(limits, max_shapes=max_candidates, cost=None, compile_seconds=None, size="sum")
    if limits.size not in ("sum", "larger"):
        # One length says nothing of what a pair counts: those with the least padding of this side, row by row.
        longest = -(-int(lengths.max()) // limits.length_multiple) * limits.length_multiple
        alone = replace(alone, max_tokens=longest, max_sequences=1, num_microbatches=1)
    return np.array([length for _, length in make_buckets(lengths, alone).shapes])


def check_pair_fields(budget: Budget, *, packed: bool = False) -> None:
    """Raise ValueError for a budget with fields that are not for pairs, or not for rows of them."""
    names = [name for name in _FIELDS if not packed or name not in ("cost", "compile_seconds", "size")]
    others = [field for field in fields(Budget) if field.name not in names]
    if unfit := [field.name for field in others if getattr(budget, field.name) != field.default]:
        what = "packed rows" if packed else "buckets"
        raise ValueError(f"{what} of pairs are chosen by {', '.join(names)}, not by {', '.join(unfit)}")


def _within(pairs: NDArray[np.int64], max_length: int | None, overlong: str) -> NDArray[np.int64]:
    """Return the pairs without those that have a side above `max_length`, which only "drop" allows."""
    if overlong not in ("error", "drop"):
        raise ValueError(f"overlong of pairs must be error or drop, got {overlong!r}")
    too_long = pairs.max(axis=1) > (INT64_MAX if max_length is None else max_length)
    ids = np.flatnonzero(too_long)
    if len(ids) and (overlong == "error" or len(ids) == len(pairs)):
        left = "" if overlong == "error" else 'overlong="drop" leaves no sample: '
        raise ValueError(
            f"{left}{len(ids)} pairs have a side above max_length={max_length}: {list_pairs(ids, pairs[ids])}"
        )
    return pairs[~too_long]


class _Choice(NamedTuple):
    """A total cost, and the cells it takes in ascending order as (samples held, i, j)."""

    cost: float
    cells: list[tuple[int, int, int]]


@dataclass(frozen=True, kw_only=True)
class _Table:
    """What the dynamic program reads.

    Attributes:
        before: int64[a + 1, b + 1], samples among the i first sources and the e first targets.
        lengths: int64[a, b, 2], of each bucket.
        caps: int64[a, b], the most rows of a bucket; 0 where none fits.
        sizes: int64[a, b], what a row counts.
        budget: the rule of rows, and the cost.
    """

    before: Tensor
    lengths: Tensor
    caps: Tensor
    sizes: Tensor
    budget: Budget

    @property
    def unreachable(self) -> float:
        """More than any total cost: an integer without a cost function, whose values are floats."""
        return _UNREACHABLE if self.budget.cost is None else math.inf

    def _costs(self, i: int, j: int, held: Tensor) -> Tensor:
        """Return the costs of bucket (i, j), counted from 0, for these numbers of samples, int64 or float64."""
        if self.caps[i, j] < 1:
            return torch.full(held.shape, self.unreachable)
        rows, steps = self.budget.rows_and_steps(held, self.caps[i, j])
        microbatches = steps * self.budget.num_microbatches
        if self.budget.cost is None:
            return microbatches * rows * self.sizes[i, j]
        each = checked_costs("cost", self.budget.cost, rows, *self.lengths[i, j])
        return microbatches.to(torch.float64) * each + (self.budget.compile_seconds or 0.0)

    def held(self, j: int) -> Tensor:
        """int64[j + 1, b + 1, b + 1]: samples of sources i..j and targets d..e - 1, by i, d and e (0 where d >= e)."""
        column = self.before[j + 1] - self.before[: j + 1]
        return (column[:, None, :] - column[:, :, None]).clamp(min=0)

    def costs(self, j: int) -> Tensor:
        """int64[j + 1, b + 1, b + 1]: the cost of such a bucket, unreachable where d >= e or no row fits."""
        held = self.held(j)
        padded = torch.full(held.shape, self.unreachable)
        for e in range(1, held.shape[2]):
            padded[:, :e, e] = self._costs(j, e - 1, held[:, :e, e])
        return padded

    def chained_costs(self, i: int, j: int) -> Tensor:
        """int64[i + 1, j + 1]: the cost of cell (i, j) after each cell before it, unreachable where no row fits."""
        costs = self._costs(i - 1, j - 1, self.before[i, j] - self.before[: i + 1, : j + 1])
        costs[i, j] = self.unreachable
        return costs

    def rows(self, num_held: int, i: int, j: int) -> int:
        """Return the rows of the cell (i, j) when it holds this many samples."""
        return int(self.budget.rows_and_steps(torch.tensor(num_held), self.caps[i - 1, j - 1])[0])


def _cheapest_chain(table: _Table, max_shapes: int) -> _Choice:
    """Find the cheapest cells that ascend on both sides, the last of them the largest."""
    num_sources, num_targets = table.caps.shape
    max_shapes = min(max_shapes, num_sources + num_targets - 1)
    # total[k, i, j]: the least cost of a chain of exactly k cells that ends with (i, j); previous: the cell before it.
    total = np.full((max_shapes + 1, num_sources + 1, num_targets + 1), table.unreachable)
    previous = np.zeros((max_shapes + 1, num_sources + 1, num_targets + 1), dtype=np.int64)
    total[0, 0, 0] = 0
    for i in range(1, num_sources + 1):
        for j in range(1, num_targets + 1):
            sums = (total[:-1, : i + 1, : j + 1] + table.chained_costs(i, j).numpy()).reshape(max_shapes, -1)
            # The first of equals: the smaller source, then the smaller target.
            place = sums.argmin(axis=1)
            previous[1:, i, j] = place
            total[1:, i, j] = np.minimum(np.take_along_axis(sums, place[:, None], axis=1)[:, 0], table.unreachable)
    left = int(total[:, -1, -1].argmin())
    cost, cells = total[left, -1, -1].item(), []
    i, j = num_sources, num_targets
    while cost < table.unreachable and left:
        before = divmod(int(previous[left, i, j]), j + 1)
        cells.append((int(table.before[i, j] - table.before[before]), i, j))
        i, j = before
        left -= 1
    return _Choice(cost, cells[::-1])


def _cheapest_nested(table: _Table, max_shapes: int) -> _Choice:
    """Find the cheapest classes of sources, each cut into buckets by targets."""
    num_sources, num_targets = table.caps.shape
    max_shapes = min(max_shapes, num_sources * num_targets)
    # total[j, k]: the least cost of the j first sources in exactly k buckets; choice[j, k]: the sources before the last
    # class among them, and its number of buckets.
    total = np.full((num_sources + 1, max_shapes + 1), table.unreachable)
    choice = np.zeros((num_sources + 1, max_shapes + 1, 2), dtype=np.int64)
    total[0, 0] = 0
    for j in range(num_sources):
        best, _ = _target_costs(table, j, max_shapes)
        for k in range(1, max_shapes + 1):
            # By first source, then by the buckets of the class: argmin takes the widest class, then the fewest buckets.
            sums = total[: j + 1, k - 1 :: -1][:, :k] + best[:, 1 : k + 1]
            place = int(sums.argmin())
            total[j + 1, k] = min(sums.flat[place], table.unreachable)
            choice[j + 1, k] = place // k, place % k + 1
    left = int(total[-1].argmin())
    cost, cells = total[-1, left].item(), []
    end = num_sources if cost < table.unreachable else 0
    while end:
        first, num_buckets = choice[end, left].tolist()
        bucket_lengths = _target_lengths(table, first, end - 1, num_buckets)
        held = table.held(end - 1)[first]
        spans = zip([0, *bucket_lengths[:-1]], bucket_lengths, strict=True)
        cells.append([(int(held[lower, upper]), end, upper) for lower, upper in spans])
        end, left = first, left - num_buckets
    return _Choice(cost, [cell for group in cells[::-1] for cell in group])


def _target_costs(table: _Table, j: int, max_shapes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the cheapest target lengths of all classes that end with source j.

    Returns:
        The least costs int64[j + 1, K + 1] of sources i..j in exactly m buckets, by i and m; and for each of these and
        each number of first targets the start of the last bucket, int64[K + 1, j + 1, b + 1].
    """
    costs = table.costs(j).numpy()
    num_classes, num_ends, _ = costs.shape
    reach = np.full((max_shapes + 1, num_classes, num_ends), table.unreachable)
    start = np.zeros((max_shapes + 1, num_classes, num_ends), dtype=np.int64)
    reach[0, :, 0] = 0
    for m in range(1, min(max_shapes, num_ends - 1) + 1):
        sums = reach[m - 1][:, :, None] + costs
        # The first of equals: the smallest length below.
        start[m] = sums.argmin(axis=1)
        reach[m] = np.minimum(np.take_along_axis(sums, start[m][:, None], axis=1)[:, 0], table.unreachable)
    ends = [_last_target(table, i, j) for i in range(num_classes)]
    return reach[:, np.arange(num_classes), ends].T, start


def _target_lengths(table: _Table, i: int, j: int, num_buckets: int) -> list[int]:
    """Return the ends of the buckets of sources i..j, as numbers of first targets, ascending."""
    _, start = _target_costs(table, j, num_buckets)
    ends = [_last_target(table, i, j)]
    for m in range(num_buckets, 1, -1):
        ends.append(int(start[m, i, ends[-1]]))
    return ends[::-1]


def _last_target(table: _Table, i: int, j: int) -> int:
    """Return how many first targets hold all samples of sources i..j."""
    column = table.before[j + 1] - table.before[i]
    return int(torch.searchsorted(column, column[-1:]))


def _count(source: NDArray[np.int64], target: NDArray[np.int64], shape: tuple[int, ...]) -> Tensor:
    """Return int64[a + 1, b + 1], how many samples have a source below i and a target below e, from their indices."""
    before = torch.zeros((shape[0] + 1, shape[1] + 1), dtype=torch.int64)
    before[1:, 1:] = to_tensor(np.bincount(source * shape[1] + target, minlength=shape[0] * shape[1]).reshape(shape))
    return before.cumsum(dim=0).cumsum(dim=1)
