"""Chooses the lengths of packed rows by the cost of their plans."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from torch_ref.checks import as_array
from torch_ref.planning.buckets import Buckets, Cheapest
from torch_ref.planning.budget import Budget, BudgetFields, as_budget, takes_budget
from torch_ref.planning.costs import CostModel
from torch_ref.planning.fitting import fit_budget
from torch_ref.planning.joint import MAX_SIZE, fit_joint
from torch_ref.planning.lengths import check_ascending, check_lengths, check_several_lengths, fit_lengths, list_several
from torch_ref.planning.make_buckets import make_buckets
from torch_ref.planning.order import Order
from torch_ref.planning.packer import split_samples
from torch_ref.planning.packing import Packing, pack_samples
from torch_ref.planning.placing import fill_rows
from torch_ref.planning.several_lengths import check_fields_of_several

__all__ = ["choose_packed_buckets", "choose_row_lengths", "row_length_for"]

_MOST_TRIED = 32


@takes_budget
def choose_row_lengths(
    lengths: ArrayLike,
    max_tokens: int | Budget,
    *,
    overlong: str = "error",
    **budget: Unpack[BudgetFields],
) -> tuple[int, ...]:
    """Choose the lengths of packed rows, by what the plan of these rows costs.

    That plan has the rows of `pack_samples(lengths, row_lengths)`, in buckets of these lengths as `make_buckets` gives
    them to the rows, `strategy=row_lengths`, with the other arguments as here. All positions of its steps count, those
    of rows that are not full and of padding rows too, or the cost of its microbatches; `compile_seconds` once a length.
    A `CostModel` is taken without its quadratic term, whose sum is that of the samples in any rows; `max_cost` limits
    rows as if each held one sample.

    The first row length is that of `row_length_for`. While this is cheaper, one more is added, with which the rows
    cost least, the shortest among equals. Every k-th of the D - 1 shorter rounded lengths of samples is tried, from the
    longest down, for the least k that leaves at most 32. (If there are more than 5,000 distinct lengths, those that
    `make_buckets` tries, for samples as long as these.)

    Pairs get one length for the sources of a row and one for its targets: that of the longest, rounded up. But the side
    that is full sooner, by the sums over all pairs, gets the tokens that it has where those of the other fill their
    length, rounded up, if `max_tokens` and `max_length` allow that. Then both grow in proportion, rounded down: the
    longer one to `max_length`; or without it, or if that is above `max_tokens`, to the tokens of as many rows as share
    `max_tokens` evenly and have room for both sides twice, or else to all of `max_tokens`.

    Args:
        lengths: [N] integers >= 1, in tokens; or [N, 2], those of pairs.
        max_tokens: rows times length of a microbatch never exceed it; or a `Budget`.
        overlong: samples above `max_length`: "error" | "drop" (not counted) | "truncate" (counted as cut to it) |
            "split" (counted as chunks of that length, and the rest).
        budget: other fields of `Budget` as keywords: at most `max_shapes` lengths, none above `max_length`.
            `max_sequences` counts packed rows, not the samples in them. There is no other strategy than "optimal".

    Returns:
        The lengths, strictly ascending; of pairs those of both sides.

    Raises:
        ValueError: as in `make_buckets`.

    Example:
        >>> choose_row_lengths([2, 2, 3, 3, 90], 100, max_shapes=2, max_length=90)
        (3, 90)
    """
    limits = as_budget(max_tokens, budget)
    if as_array("lengths", lengths).ndim == 2:
        return _pair_row_lengths(check_several_lengths(lengths), limits, overlong)
    if limits.strategy != "optimal":
        raise ValueError(f'row lengths are chosen by their cost: strategy must be "optimal", got {limits.strategy!r}')
    if overlong == "split":
        overlong = "error"
        if limits.max_length is not None:
            checked = check_lengths(lengths)
            lengths = split_samples(checked, np.arange(len(checked)), limits.max_length)[0].lengths
    elif limits.max_length is not None:
        checked = check_lengths(lengths)
        fit_lengths(checked, np.arange(len(checked)), limits.max_length, overlong, name="max_length", is_packed=True)
    fitting = fit_budget(lengths, overlong, limits, every=True)
    cost = limits.cost
    cheapest = Cheapest(fitting, cost=replace(cost, quadratic=0.0) if isinstance(cost, CostModel) else cost)
    ordered, distinct = fitting.candidates(fitting.ordered), cheapest.distinct.tolist()
    longest_first = ordered.flip(0).tolist()

    def plan_cost(sizes: list[int]) -> float:
        return cheapest.total(sizes, fill_rows(sizes, longest_first).count_by_size(sizes))

    last = len(distinct) - 1
    chosen = [row_length_for(int(fitting.lengths.max()), limits)]
    least = plan_cost(chosen)
    tried = [distinct[place] for place in sorted(range(last - 1, -1, -max(1, -(-last // _MOST_TRIED))))]
    while len(chosen) < limits.max_shapes and len(chosen) <= len(tried):
        costs = {size: plan_cost(sorted([*chosen, size])) for size in tried if size not in chosen}
        best = min(costs, key=lambda size: costs[size])
        if costs[best] >= least:
            break
        chosen, least = sorted([*chosen, best]), costs[best]
    return tuple(chosen)


def row_length_for(longest: int, budget: Budget) -> int:
    """Return the length of packed rows that no argument gives.

    That is `max_length`. Without one, or if a limit allows no such row, as many rows as possible share `max_tokens`
    evenly, each with room for two of the longest samples; where there is no such row, one row takes all of it. Both are
    rounded down to `length_multiple`. If a limit allows neither, rows are as long as the longest sample, rounded up.
    """
    multiple = _multiple_of_rows(budget)
    return _grow_sides([-(-longest // multiple) * multiple], -(-2 * longest // multiple) * multiple, budget)[0]


def _multiple_of_rows(budget: Budget) -> int:
    if not isinstance(budget.length_multiple, int) or budget.length_offset != 0:
        raise ValueError(
            "rows of packed samples have one length_multiple and no length_offset, got "
            f"{budget.length_multiple} and {budget.length_offset}"
        )
    return budget.length_multiple


def _grow_sides(sides: list[int], room_for_two: int, budget: Budget, most: int | None = None) -> tuple[int, ...]:
    """Return the lengths of the sides of a row, grown in proportion from the needed ones, which are multiples.

    `room_for_two` is the tokens of a row with room for the longest twice. No side is longer than `most`.
    """
    share = budget.max_tokens // max(budget.max_tokens // room_for_two, 1)
    for numerator, denominator in ((budget.max_length, max(sides)), (share, sum(sides))):
        if numerator is None or numerator < denominator:
            continue
        multiple = _multiple_of_rows(budget)
        grown = [side * numerator // denominator // multiple * multiple for side in sides]
        if (most is None or max(grown) <= most) and not budget.refusals(sum(grown)):
            return tuple(grown)
    return tuple(sides)


def choose_packed_buckets(
    lengths: ArrayLike,
    budget: Budget,
    row_lengths: Sequence[int] | None,
    *,
    method: str,
    order: Order,
    seed: int,
    overlong: str,
    samples_per_row: int | Sequence[int] | None,
) -> Buckets:
    """Choose the buckets of the packed rows of epoch 0: of the given lengths, or of one length without a cost."""
    _multiple_of_rows(budget)
    is_pairs = as_array("lengths", lengths).ndim == 2
    if row_lengths is not None and not is_pairs:
        budget = replace(budget, strategy=check_ascending("row_lengths", row_lengths))
    sizes = row_lengths if is_pairs else budget.given_lengths
    if sizes is not None and not is_pairs and (limits := budget.refusals(sizes[-1])):
        named = ", ".join(f"{name}={limit}" for name, limit in limits.items())
        raise ValueError(f"{named} leaves no row of {sizes[-1]} tokens")
    if sizes is None and method == "wrapped" and not is_pairs:
        sizes = [_choose_wrapped_length(lengths, budget)]
    elif sizes is None:
        budget_of_rows = budget if is_pairs or budget.cost is not None else replace(budget, max_shapes=1)
        sizes = choose_row_lengths(lengths, budget_of_rows, overlong=overlong)
    packed = pack_samples(
        lengths,
        sizes,
        method=method,
        order=order,
        seed=seed,
        overlong=overlong,
        samples_per_row=samples_per_row,
    )
    if is_pairs:
        return _bucket_of_packed_pairs(packed, budget)
    return make_buckets(packed.num_tokens, replace(budget, strategy=sizes, max_length=None))


def _bucket_of_packed_pairs(packed: Packing, budget: Budget) -> Buckets:
    """Return the bucket of rows of pairs, which have one shape."""
    check_fields_of_several(budget, packed=True)
    source, target = packed.row_lengths
    cap = budget.max_tokens // (source + target)
    if not cap:
        raise ValueError(f"max_tokens {budget.max_tokens} leaves no row of {source}+{target} tokens")
    cap = cap if budget.max_sequences is None else min(cap, budget.max_sequences)
    cap -= cap % budget.row_multiple if cap >= budget.row_multiple else 0
    rows, _ = budget.rows_and_steps(torch.tensor(packed.num_rows), torch.tensor(cap))
    return Buckets(((int(rows), source, target),), budget.num_microbatches)


def _pair_row_lengths(pairs: NDArray[np.int64], limits: Budget, overlong: str) -> tuple[int, ...]:
    """Choose one length for each side of packed pairs."""
    check_fields_of_several(limits, packed=True)
    if pairs.shape[1] > 2:
        raise ValueError(f"packed rows hold samples of one or two lengths, got {pairs.shape[1]}")
    if limits.max_length is not None:
        whole, ids = np.full(2, limits.max_length), np.arange(len(pairs))
        pairs = fit_joint(pairs, ids, whole, overlong).lengths
    multiple, most = _multiple_of_rows(limits), min(limits.max_length or MAX_SIZE, MAX_SIZE)
    longest = [-(-max(1, length) // multiple) * multiple for length in pairs.max(axis=0).tolist()]
    if max(longest) > most or sum(longest) > limits.max_tokens:
        alone = np.flatnonzero(pairs.sum(axis=1) > limits.max_tokens)
        listed = f"; these pairs do not fit alone: {list_several(alone, pairs[alone])}" if len(alone) else ""
        raise ValueError(
            f"rows for the longest sides, {longest}, must take at most max_tokens={limits.max_tokens} together and "
            f"{most} each{listed}"
        )
    sums = pairs.sum(axis=0).tolist()
    sooner = 0 if sums[0] * longest[1] > sums[1] * longest[0] else 1
    other = 1 - sooner
    if sums[other]:
        tokens = -(-longest[other] * sums[sooner] // sums[other])
        tokens = -(-tokens // multiple) * multiple
        if tokens > longest[sooner] and tokens <= most and tokens + longest[other] <= limits.max_tokens:
            longest[sooner] = tokens
    return _grow_sides(longest, 2 * sum(longest), limits, most)


def _choose_wrapped_length(lengths: ArrayLike, budget: Budget) -> int:
    if budget.strategy != "optimal":
        raise ValueError(f'wrapped rows are as long as max_length: strategy must be "optimal", got {budget.strategy!r}')
    multiple = _multiple_of_rows(budget)
    length = budget.max_length or row_length_for(int(check_lengths(lengths).max()), budget)
    if length % multiple:
        raise ValueError(f"max_length={length} must be a multiple of length_multiple={multiple}")
    if length > budget.max_tokens:
        raise ValueError(f"max_tokens={budget.max_tokens} holds no wrapped row of {length} tokens: give max_length")
    return length
