"""Chooses the lengths of packed rows by the cost of their plans."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import combinations, count, takewhile
from math import comb
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from torch_ref.buckets import Bucket, Buckets, Cheapest, PairBucket, make_buckets
from torch_ref.budget import Budget, as_budget
from torch_ref.checks import check_integer
from torch_ref.costs import CostModel
from torch_ref.fitting import fit_budget
from torch_ref.joint import MAX_SIZE, fill_joint_rows, fit_joint
from torch_ref.lengths import check_lengths, check_pair_lengths, list_pairs
from torch_ref.order import Order
from torch_ref.packing import Packing, pack_samples, split_samples
from torch_ref.pairs import check_pair_fields
from torch_ref.placing import fill_rows

__all__ = ["bucket_of_packed_pairs", "choose_packed_buckets", "choose_row_lengths"]

# Where lengths of rows are among the distinct ones, ascending.
_Places = tuple[int, ...]

_MOST_SETS = 4096
_MOST_SETS_TIMES_LENGTHS = 2**20
_MOST_SETS_TIMES_LENGTHS_IF_LIMITED = 2**16
_MOST_ADDED = 16
_MOST_PAIRS = 2048


def choose_row_lengths(
    lengths: ArrayLike,
    max_tokens: int | Budget,
    *,
    max_samples_per_row: int | None = None,
    overlong: str = "error",
    **budget: Any,
) -> tuple[int, ...]:
    """Choose the lengths of packed rows, by what the plan of these rows costs.

    That plan has the rows of `pack_samples(lengths, row_lengths)`, in buckets of these lengths as `make_buckets` gives
    them to the rows, `strategy=row_lengths`, with the other arguments as here. All positions of its steps count, those
    of rows that are not full and of padding rows too, or the cost of its microbatches; `compile_seconds` once a length.
    A `CostModel` is taken without its quadratic term, whose sum is that of the samples in any rows; `max_cost` limits
    rows as if each held one sample.
    Equal costs: the fewest lengths, then, from the longest down, the smaller ones.

    Row lengths are rounded lengths of samples, D distinct ones, the longest always among them; of more than 5,000,
    those that `make_buckets` tries, for samples as long as these. With V distinct lengths before rounding, at most
    4,096 sets, and at most 2**20 / V (2**16 / V with `max_samples_per_row`), are tried; all, if there are no more.
    Otherwise these are the sets of local searches, which leave out, move or add a length as long as this is
    cheaper, in moves of D / 8 places at first and of one in the end. They start from the longest length alone, from
    the dynamic program over the rows that each class of samples needs at least, and from the best of an even grid
    of lengths.

    Pairs get one length for the sources of a row and one for its targets: that of the longest, rounded up. But of the
    side that is full sooner, by the sums over all pairs, longer ones are tried: for k = 14, ..., 19, k / 16 of the
    tokens that this side has where those of the other fill their length, rounded up. The one with which rows take the
    fewest tokens is chosen, or the shortest of several. At most 2,048 pairs are packed for it, every n-th in ascending
    order (source, target), the last one among them. Both lengths together are at most `max_tokens`, each at most
    `max_length`.

    Args:
        lengths: [N] integers >= 1, in tokens; or [N, 2], those of pairs.
        max_tokens: rows times length of a microbatch never exceed it; or a `Budget`.
        max_samples_per_row: as in `pack_samples`.
        overlong: samples above `max_length`: "error" | "drop" (not counted) | "truncate" (counted as cut to it) |
            "split" (counted as chunks of that length, and the rest).
        budget: other fields of `Budget` as keywords: at most `max_shapes` lengths, none above `max_length`.
            `max_sequences` counts packed rows, not the samples in them. There is no other strategy than "optimal".

    Returns:
        The lengths, strictly ascending; of pairs those of both sides.

    Raises:
        ValueError: as in `make_buckets`.

    Example:
        >>> choose_row_lengths([2, 2, 3, 3, 90], 100, max_shapes=2)
        (3, 90)
    """
    limits = as_budget(max_tokens, budget)
    if np.ndim(lengths) == 2:
        most = None if max_samples_per_row is None else check_integer("max_samples_per_row", max_samples_per_row)
        return _pair_row_lengths(check_pair_lengths(lengths), limits, most, overlong)
    if limits.strategy != "optimal":
        raise ValueError(f'row lengths are chosen by their cost: strategy must be "optimal", got {limits.strategy!r}')
    most_tried, max_shapes = _MOST_SETS_TIMES_LENGTHS, limits.max_shapes
    if max_samples_per_row is not None:
        max_samples_per_row = check_integer("max_samples_per_row", max_samples_per_row)
        most_tried = _MOST_SETS_TIMES_LENGTHS_IF_LIMITED
    if overlong == "split":
        overlong = "error"
        if limits.max_length is not None:
            checked = check_lengths(lengths)
            lengths = split_samples(checked, np.arange(len(checked)), limits.max_length)[0].lengths
    fitting = fit_budget(lengths, overlong, limits, every=True)
    cost = limits.cost
    cheapest = Cheapest(fitting, cost=replace(cost, quadratic=0.0) if isinstance(cost, CostModel) else cost)
    ordered, before = fitting.candidates(fitting.ordered), cheapest.before
    tokens_before = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(ordered, dim=0)])[before]

    def num_rows(last: int) -> Tensor:
        length = cheapest.distinct[last]
        by_tokens = -(-(tokens_before[last + 1] - tokens_before[: last + 1]) // length)
        # The lengths ascend: those of at most half a row come before all longer ones.
        halves = torch.searchsorted(ordered, length // 2, right=True)
        return torch.maximum(by_tokens, before[last + 1] - before[: last + 1].clamp(min=halves))

    distinct = cheapest.distinct.tolist()
    values, numbers = (column.flip(0).tolist() for column in torch.unique(ordered, return_counts=True))

    def plan_cost(places: _Places) -> float:
        rows = fill_rows(tuple(distinct[place] for place in places), values, numbers, max_samples_per_row)
        return cheapest.total(places, rows.num_held())

    def best_by_class() -> _Places:
        return tuple(torch.searchsorted(cheapest.distinct, cheapest.bucket_lengths(max_shapes, num_rows)).tolist())

    most = min(_MOST_SETS, max(1, most_tried // len(torch.unique(fitting.ordered))))
    return tuple(distinct[place] for place in _Search(len(distinct), max_shapes, most, plan_cost).run(best_by_class))


def choose_packed_buckets(
    lengths: ArrayLike, budget: Budget, overlong: str, order: Order | ArrayLike | str, seed: int, method: str
) -> tuple[Bucket, ...] | tuple[PairBucket, ...]:
    """Choose the buckets of the packed rows of epoch 0, of one length without a cost and a given list of lengths."""
    if np.ndim(lengths) == 2:
        source, target = choose_row_lengths(lengths, budget, overlong=overlong)
        packed = pack_samples(lengths, (source, target), method=method, order=order, seed=seed, overlong=overlong)
        return bucket_of_packed_pairs(packed, budget)
    sizes = budget.given_lengths
    if sizes is None and method == "wrapped":
        sizes = [_wrapped_length(lengths, budget)]
    elif sizes is None:
        limits = budget if budget.cost is not None else replace(budget, max_shapes=1)
        sizes = list(choose_row_lengths(lengths, limits, overlong=overlong))
    tokens = pack_samples(lengths, sizes, method=method, order=order, seed=seed, overlong=overlong).num_tokens
    return make_buckets(tokens, replace(budget, strategy=sizes, max_length=None))


def bucket_of_packed_pairs(packed: Packing, budget: Budget) -> Buckets:
    """Return the bucket of rows of pairs, which have one shape."""
    check_pair_fields(budget, packed=True)
    source, target = packed.row_lengths
    cap = budget.max_tokens // (source + target)
    if not cap:
        raise ValueError(f"max_tokens {budget.max_tokens} leaves no row of {source}+{target} tokens")
    cap = cap if budget.max_sequences is None else min(cap, budget.max_sequences)
    cap -= cap % budget.row_multiple if cap >= budget.row_multiple else 0
    rows, _ = budget.rows_and_steps(torch.tensor(packed.num_rows), torch.tensor(cap))
    return Buckets([PairBucket(int(rows), source, target)], budget.microbatches_per_step)


def _pair_row_lengths(
    pairs: NDArray[np.int64], limits: Budget, max_samples_per_row: int | None, overlong: str
) -> tuple[int, ...]:
    """Choose one length for each side of packed pairs."""
    check_pair_fields(limits, packed=True)
    if limits.max_length is not None:
        whole, ids = np.full(2, limits.max_length), np.arange(len(pairs))
        pairs = fit_joint(pairs, ids, whole, overlong).lengths
    multiple, most = limits.length_multiple, min(limits.max_length or MAX_SIZE, MAX_SIZE)
    longest = [-(-max(1, length) // multiple) * multiple for length in pairs.max(axis=0).tolist()]
    if max(longest) > most or sum(longest) > limits.max_tokens:
        alone = np.flatnonzero(pairs.sum(axis=1) > limits.max_tokens)
        listed = f"; these pairs do not fit alone: {list_pairs(alone, pairs[alone])}" if len(alone) else ""
        raise ValueError(
            f"rows for the longest sides, {longest}, must take at most max_tokens={limits.max_tokens} together and "
            f"{most} each{listed}"
        )
    sums = pairs.sum(axis=0).tolist()
    sooner = 0 if sums[0] * longest[1] > sums[1] * longest[0] else 1
    other = 1 - sooner
    lengths = {longest[sooner]}
    if sums[other]:
        for sixteenths in range(14, 20):
            tokens = -(-longest[other] * sums[sooner] * sixteenths // (16 * sums[other]))
            lengths.add(max(longest[sooner], -(-tokens // multiple) * multiple))
    every = -(-len(pairs) // _MOST_PAIRS)
    ascending = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    distinct, counts = np.unique(ascending[::-1][::every], axis=0, return_counts=True)
    costs = {}
    for length in sorted(lengths):
        sides = (length, longest[1]) if sooner == 0 else (longest[0], length)
        if max(sides) <= most and sum(sides) <= limits.max_tokens:
            rows = fill_joint_rows(distinct, counts.tolist(), np.array(sides), max_samples_per_row)
            costs[sides] = sum(row.number for row in rows) * sum(sides)
    return min(costs, key=costs.__getitem__)


def _wrapped_length(lengths: ArrayLike, budget: Budget) -> int:
    if budget.strategy != "optimal":
        raise ValueError(f'wrapped rows are as long as max_length: strategy must be "optimal", got {budget.strategy!r}')
    multiple = budget.length_multiple
    length = budget.max_length or -(-int(check_lengths(lengths).max()) // multiple) * multiple
    if length % multiple:
        raise ValueError(f"max_length={length} must be a multiple of length_multiple={multiple}")
    if length > budget.max_tokens:
        raise ValueError(f"max_tokens={budget.max_tokens} holds no wrapped row of {length} tokens: give max_length")
    return length


class _Search:
    """What sets of places cost; the last place is in all of them.

    Args:
        num_lengths: D, how many places there are.
        max_shapes: the most places of a set.
        most: how many sets are tried at most.
        plan_cost: the cost of a set.
    """

    def __init__(self, num_lengths: int, max_shapes: int, most: int, plan_cost: Callable[[_Places], float]) -> None:
        self._num_lengths, self._max_shapes, self._most = num_lengths, max_shapes, most
        self._plan_cost = plan_cost
        self._tried: dict[_Places, tuple[float, int, _Places]] = {}

    def run(self, best_by_class: Callable[[], _Places]) -> _Places:
        """Return the cheapest set that is tried; one of the starts is given, for when there is a search."""
        last = self._num_lengths - 1
        if self._num_sets(last) <= self._most:
            self._try_all(range(last))
        else:
            self._follow((last,))
            self._follow(best_by_class())
            half = (self._most - len(self._tried)) // 2
            cells = max(1, sum(1 for _ in takewhile(lambda places: self._num_sets(places) <= half, count(0))))
            self._follow(self._try_all(cell * self._num_lengths // cells - 1 for cell in range(1, cells)))
        return min(self._tried, key=self._rank)

    def _try_all(self, places: Iterable[int]) -> _Places:
        """Return the cheapest set of some of these places."""
        inner = list(places)
        sizes = range(min(self._max_shapes, len(inner) + 1))
        sets = [(*chosen, self._num_lengths - 1) for size in sizes for chosen in combinations(inner, size)]
        return min(sets, key=self._rank)

    def _follow(self, places: _Places) -> None:
        """Change a set for the first cheaper one until no change helps, in ever smaller steps."""
        distance = self._num_lengths // 8
        while distance:
            target = self._rank(places)
            for changed in _changes(places, distance, self._max_shapes):
                if len(self._tried) >= self._most:
                    return
                if self._rank(changed) < target:
                    places = changed
                    break
            else:
                distance //= 2

    def _num_sets(self, num_places: int) -> int:
        return sum(comb(num_places, size) for size in range(min(self._max_shapes, num_places + 1)))

    def _rank(self, places: _Places) -> tuple[float, int, _Places]:
        if places not in self._tried:
            self._tried[places] = (self._plan_cost(places), len(places), places[::-1])
        return self._tried[places]


def _changes(places: _Places, distance: int, max_shapes: int) -> Iterator[_Places]:
    """Yield sets one step away: without a place, with one moved, and while the steps are large with one added."""
    *inner, last = places
    for place in inner:
        yield tuple(other for other in places if other != place)
    for place in inner:
        for moved in (place - distance, place + distance):
            if 0 <= moved < last and moved not in inner:
                yield tuple(sorted({*places, moved} - {place}))
    if len(places) < max_shapes and last // distance <= _MOST_ADDED:
        for added in range(distance - 1, last, distance):
            if added not in inner:
                yield tuple(sorted({*places, added}))
