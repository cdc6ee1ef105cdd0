"""Buckets for samples of several lengths: the cheapest static shapes, such as those of pairs of source and target.

Letters: D lengths of a sample, n candidates for each, K shapes. Two families of buckets are searched: chains, in which
all lengths ascend together, and nested ones, where first lengths cut the samples into classes, second lengths cut each
class anew, and so on. A cell (i, j, ...) is the bucket of the first i, j, ... candidates, counted from 1.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_ref.checks import INT64_MAX, check_integer, to_tensor
from torch_ref.planning.buckets import Buckets, choose_of_one_length
from torch_ref.planning.budget import Budget, checked_costs
from torch_ref.planning.costs import CostModel
from torch_ref.planning.lengths import list_several, row_sizes, sample_sizes

__all__ = ["check_fields_of_several", "choose_of_several_lengths"]

_FIELDS = (
    "max_tokens",
    "max_shapes",
    "max_length",
    "num_microbatches",
    "row_multiple",
    "length_multiple",
    "length_offset",
    "max_sequences",
    "cost",
    "compile_seconds",
    "size",
)
_UNREACHABLE = 2**61  # two of them still fit int64
_MOST_CELLS = 4096


def choose_of_several_lengths(
    lengths: NDArray[np.int64], limits: Budget, overlong: str, max_candidates: int | None
) -> Buckets:
    """Choose the static shapes for checked lengths int64[N, D], with the least cost in all."""
    check_fields_of_several(limits)
    num_lengths = lengths.shape[1]
    of_sides = [limits.of_side(side, num_lengths) for side in range(num_lengths)]
    if max_candidates is None:
        max_candidates = max(n for n in range(1, 65) if n**num_lengths <= _MOST_CELLS)
    check_integer("max_candidates", max_candidates)
    checked = _within(lengths, limits.max_length, overlong)
    sample_sizes(checked, limits.size)
    ends = [_candidates(side, of_side, max_candidates) for side, of_side in zip(checked.T, of_sides, strict=True)]
    shapes = np.stack(np.meshgrid(*ends, indexing="ij"), axis=-1)
    sizes = row_sizes(shapes, limits.size).clip(min=1)  # of short ones that hold no sample it may be 0
    table = _Table(
        before=_count(
            [np.searchsorted(of_end, side) for of_end, side in zip(ends, checked.T, strict=True)], sizes.shape
        ),
        lengths=to_tensor(shapes),
        caps=replace(limits, cost=None, compile_seconds=None).caps(to_tensor(sizes)),
        sizes=to_tensor(sizes),
        budget=limits,
    )
    chain, nested = _cheapest_chain(table, limits.max_shapes), _cheapest_nested(table, limits.max_shapes)
    least = chain if chain.cost <= nested.cost else nested
    if least.cost == table.unreachable:
        rounded = np.stack(
            [of_side.round_lengths(side) for side, of_side in zip(checked.clip(min=1).T, of_sides, strict=True)], axis=1
        )
        alone = np.flatnonzero(row_sizes(rounded, limits.size) > limits.max_tokens)
        listed = f"these samples do not fit alone: {list_several(alone, rounded[alone])}"
        others = "every sample fits alone, but not in one of the lengths tried"
        raise ValueError(
            f"no {limits.max_shapes} buckets of max_tokens={limits.max_tokens} hold all samples, lengths rounded up to "
            f"{limits.form_of_lengths}: {listed if len(alone) else others}"
        )
    cells = [
        (table.rows(held, cell), *(int(end[i - 1]) for end, i in zip(ends, cell, strict=True)))
        for held, cell in least.cells
    ]
    return Buckets(tuple(cells), limits.num_microbatches, limits.size)


def _candidates(side: NDArray[np.int64], limits: Budget, max_candidates: int) -> NDArray[np.int64]:
    """Return the best lengths of one side, int64[n], none of them 0."""
    lengths = side.clip(min=1)
    alone = replace(limits, max_shapes=max_candidates, cost=None, compile_seconds=None, size="sum")
    if limits.size not in ("sum", "larger"):
        # One length says nothing of what a sample counts: those with the least padding of this side, row by row.
        longest = int(limits.round_lengths(lengths.max()))
        alone = replace(alone, max_tokens=longest, max_sequences=1, num_microbatches=1)
    return np.array([length for _, length in choose_of_one_length(lengths, alone, "error").shapes])


def check_fields_of_several(budget: Budget, *, packed: bool = False) -> None:
    """Raise ValueError for a budget with fields that are not for several lengths, or not for packed rows of them."""
    names = [name for name in _FIELDS if not packed or name not in ("cost", "compile_seconds", "size")]
    others = [field for field in fields(Budget) if field.name not in names]
    if unfit := [field.name for field in others if getattr(budget, field.name) != field.default]:
        what = "packed rows" if packed else "buckets"
        raise ValueError(f"{what} of several lengths are chosen by {', '.join(names)}, not by {', '.join(unfit)}")
    if isinstance(budget.cost, CostModel):
        raise ValueError("cost is a CostModel, which knows one length: pass a function of rows and of all lengths")


def _within(lengths: NDArray[np.int64], max_length: int | None, overlong: str) -> NDArray[np.int64]:
    """Return the samples without those that have a length above `max_length`, which only "drop" allows."""
    if overlong not in ("error", "drop"):
        raise ValueError(f"overlong of samples of several lengths must be error or drop, got {overlong!r}")
    too_long = lengths.max(axis=1) > (INT64_MAX if max_length is None else max_length)
    ids = np.flatnonzero(too_long)
    if len(ids) and (overlong == "error" or len(ids) == len(lengths)):
        left = "" if overlong == "error" else 'overlong="drop" leaves no sample: '
        raise ValueError(
            f"{left}{len(ids)} samples have a length above max_length={max_length}: {list_several(ids, lengths[ids])}"
        )
    return lengths[~too_long]


class _Choice(NamedTuple):
    """A total cost, and the cells it takes in ascending order, each with the samples it holds."""

    cost: float
    cells: list[tuple[int, tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class _Table:
    """What the dynamic program reads. Arrays of a part of the samples lack the axes of the lengths that cut it off.

    Attributes:
        before: int64[n + 1, ...], samples among the first candidates of each length.
        lengths: int64[n, ..., D], of each bucket.
        caps: int64[n, ...], the most rows of a bucket; 0 where none fits.
        sizes: int64[n, ...], what a row counts.
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

    def part(self, i: int, j: int) -> "_Table":
        """The samples whose first length is one of i..j, counted from 0, up to the longest of their second ones."""
        before = self.before[j + 1] - self.before[i]
        up_to = before.flatten(1)[:, -1].contiguous()
        end = int(torch.searchsorted(up_to, up_to[-1:]))
        return _Table(
            before=before[: end + 1],
            lengths=self.lengths[j, :end],
            caps=self.caps[j, :end],
            sizes=self.sizes[j, :end],
            budget=self.budget,
        )

    def _costs(self, cell: tuple[int, ...], held: Tensor) -> Tensor:
        """Return the costs of a bucket, counted from 0, for these numbers of samples, int64 or float64."""
        if self.caps[cell] < 1:
            return torch.full(held.shape, self.unreachable)
        rows, steps = self.budget.rows_and_steps(held, self.caps[cell])
        microbatches = steps * self.budget.num_microbatches
        if self.budget.cost is None:
            return microbatches * rows * self.sizes[cell]
        each = checked_costs("cost", self.budget.cost, rows, *self.lengths[cell])
        return microbatches.to(torch.float64) * each + (self.budget.compile_seconds or 0.0)

    def held(self, j: int) -> Tensor:
        """int64[j + 1, b + 1, b + 1]: samples of first i..j and second d..e - 1, by i, d and e (0 where d >= e)."""
        column = self.before[j + 1] - self.before[: j + 1]
        return (column[:, None, :] - column[:, :, None]).clamp(min=0)

    def costs(self, j: int) -> Tensor:
        """int64[j + 1, b + 1, b + 1]: the cost of such a bucket, unreachable where d >= e or no row fits."""
        held = self.held(j)
        padded = torch.full(held.shape, self.unreachable)
        for e in range(1, held.shape[2]):
            padded[:, :e, e] = self._costs((j, e - 1), held[:, :e, e])
        return padded

    def chained_costs(self, cell: tuple[int, ...]) -> Tensor:
        """int64[i + 1, j + 1, ...]: the cost of a cell after each cell before it, unreachable where no row fits."""
        inside = tuple(slice(i + 1) for i in cell)
        costs = self._costs(tuple(i - 1 for i in cell), self.before[cell] - self.before[inside])
        costs[cell] = self.unreachable
        return costs

    def rows(self, num_held: int, cell: tuple[int, ...]) -> int:
        """Return the rows of the cell when it holds this many samples."""
        return int(self.budget.rows_and_steps(torch.tensor(num_held), self.caps[tuple(i - 1 for i in cell)])[0])


def _cheapest_chain(table: _Table, max_shapes: int) -> _Choice:
    """Find the cheapest cells that ascend in all lengths, the last of them the largest."""
    largest = tuple(table.caps.shape)
    max_shapes = min(max_shapes, sum(largest) - len(largest) + 1)
    # total[k, i, j]: the least cost of a chain of exactly k cells that ends with (i, j); previous: the cell before it.
    total: NDArray[Any] = np.full((max_shapes + 1, *table.before.shape), table.unreachable)
    previous: NDArray[np.int64] = np.zeros(total.shape, dtype=np.int64)
    total[(0, *[0] * len(largest))] = 0
    for index in np.ndindex(*largest):
        cell = tuple(i + 1 for i in index)
        chained = table.chained_costs(cell).numpy()
        before = total[:-1, *(slice(i + 1) for i in cell)]
        sums = (before + chained).reshape(max_shapes, -1)
        # The first of equals: the smaller first length, then the smaller second, and so on.
        place = sums.argmin(axis=1)
        previous[1:, *cell] = place
        least = np.minimum(np.take_along_axis(sums, place[:, None], axis=1)[:, 0], table.unreachable)
        total[1:, *cell] = least
    cell = largest
    left = int(total.reshape(max_shapes + 1, -1)[:, -1].argmin())
    cost, cells = total[(left, *cell)].item(), []
    while cost < table.unreachable and left:
        place = np.unravel_index(int(previous[(left, *cell)]), [i + 1 for i in cell])
        below = tuple(int(i) for i in place)
        cells.append((int(table.before[cell] - table.before[below]), cell))
        cell, left = below, left - 1
    return _Choice(cost, cells[::-1])


def _cheapest_nested(table: _Table, max_shapes: int) -> _Choice:
    """Find the cheapest classes of first lengths, each cut into buckets by the others."""
    max_shapes = min(max_shapes, table.caps.numel())
    total, choice = _nested_totals(table, max_shapes)
    left = int(total[-1].argmin())
    cost = total[-1, left].item()
    return _Choice(cost, _nested_cells(table, choice, left) if cost < table.unreachable else [])


def _nested_totals(table: _Table, max_shapes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the least costs of the samples of the first candidates, and what the last class of each begins with.

    Returns:
        total[j, k]: the least cost of the j first candidates of the first length in exactly k buckets; choice[j, k]:
        the candidates before the last class among them, and its number of buckets.
    """
    num_ends = table.caps.shape[0]
    total = np.full((num_ends + 1, max_shapes + 1), table.unreachable)
    choice = np.zeros((num_ends + 1, max_shapes + 1, 2), dtype=np.int64)
    total[0, 0] = 0
    for j in range(num_ends):
        if table.caps.ndim == 2:
            best, _ = _last_costs(table, j, max_shapes)
        else:
            best = np.stack([_nested_totals(table.part(i, j), max_shapes)[0][-1] for i in range(j + 1)])
        for k in range(1, max_shapes + 1):
            # By first candidate, then by the buckets of the class: argmin takes the widest class, then the fewest
            # buckets.
            sums = total[: j + 1, k - 1 :: -1][:, :k] + best[:, 1 : k + 1]
            place = int(sums.argmin())
            total[j + 1, k] = min(sums.flat[place], table.unreachable)
            choice[j + 1, k] = place // k, place % k + 1
    return total, choice


def _nested_cells(table: _Table, choice: NDArray[np.int64], num_buckets: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return the best cells of a table in exactly so many buckets, as `_nested_totals` chose them."""
    classes: list[list[tuple[int, tuple[int, ...]]]] = []
    end = table.caps.shape[0]
    while end:
        first, of_class = choice[end, num_buckets].tolist()
        if table.caps.ndim == 2:
            ends = _last_ends(table, first, end - 1, of_class)
            held = table.held(end - 1)[first]
            spans = zip([0, *ends[:-1]], ends, strict=True)
            classes.append([(int(held[lower, upper]), (end, upper)) for lower, upper in spans])
        else:
            part = table.part(first, end - 1)
            of_part = _nested_cells(part, _nested_totals(part, of_class)[1], of_class)
            classes.append([(held, (end, *cell)) for held, cell in of_part])
        end, num_buckets = first, num_buckets - of_class
    return [cell for group in classes[::-1] for cell in group]


def _last_costs(table: _Table, j: int, max_shapes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the cheapest last lengths of all classes that end with j, of a table of two lengths.

    Returns:
        The least costs int64[j + 1, K + 1] of i..j in exactly m buckets, by i and m; and for each of these and each
        number of last lengths the start of the last bucket, int64[K + 1, j + 1, b + 1].
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
    ends = [_last_end(table, i, j) for i in range(num_classes)]
    return reach[:, np.arange(num_classes), ends].T, start


def _last_ends(table: _Table, i: int, j: int, num_buckets: int) -> list[int]:
    """Return the ends of the buckets of first lengths i..j, as numbers of last lengths, ascending."""
    _, start = _last_costs(table, j, num_buckets)
    ends = [_last_end(table, i, j)]
    for m in range(num_buckets, 1, -1):
        ends.append(int(start[m, i, ends[-1]]))
    return ends[::-1]


def _last_end(table: _Table, i: int, j: int) -> int:
    """Return how many last lengths hold all samples of first lengths i..j."""
    column = table.before[j + 1] - table.before[i]
    return int(torch.searchsorted(column, column[-1:]))


def _count(places: list[NDArray[np.int64]], shape: tuple[int, ...]) -> Tensor:
    """Return int64[n + 1, ...], how many samples are below each candidate in all lengths, from their indices."""
    before = torch.zeros([n + 1 for n in shape], dtype=torch.int64)
    found = np.bincount(np.ravel_multi_index(places, shape), minlength=math.prod(shape)).reshape(shape)
    before[(slice(1, None),) * len(shape)] = to_tensor(found)
    for dim in range(len(shape)):
        before = before.cumsum(dim=dim)
    return before
