"""Assigns work to ranks so that the slowest one finishes early."""

import heapq
import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from torch_ref.checks import MAX_LISTED, check_integer, known_keywords
from torch_ref.planning.costs import CostModel
from torch_ref.planning.lengths import check_lengths
from torch_ref.planning.plan import Plan

__all__ = ["balance_plan", "packed_row_costs", "rank_costs"]

_UNIT_BITS = 32
_SWEEPS = 8
_EXCHANGED_UP_TO = 16  # rows of a rank


@known_keywords
def balance_plan(plan: Plan, cost: ArrayLike, num_ranks: int | None = None) -> Plan:
    """Deal the rows of each step to its ranks so that none of them has much more to do than the others.

    The algorithm is that of the longest processing time first (LPT) with a fixed number of rows a rank, and then
    pairwise exchanges. Rank r of p computes the microbatches from r * M / p to (r + 1) * M / p - 1 of every group.
    Buckets, groups and steps stay as they are, and so does the number of rows of each rank in each group.

    From the costliest on, each row goes to the rank with the least work that has room for a row. (If ranks have
    different numbers of rows, the cheapest rows are set aside for those that have more.) Then ranks of at most 16 rows
    exchange rows, eight times at most: the one with the most work with the one with the least, the second with the
    second last, and so on, one row each, those that leave their work least apart. A step stays as it was if that does
    not make it shorter. Among equals, the first in the plan comes first.

    The groups of a step are dealt one after the other, from the last to the first, and the work of those that are dealt
    counts.

    Without a number of ranks, rows are dealt to all M microbatches. Those of full steps of one group are then joined in
    pairs, the costliest and the cheapest first, and the pairs in pairs again, as long as their number is even.

    Args:
        plan: of samples, or of packed rows.
        cost: [N] numbers >= 0 by sample, or [R] by packed row in the order of the steps.
        num_ranks: the ranks that share a group, a divisor of M; None for a plan that serves any divisor.

    Returns:
        A plan of the same samples, with another digest if rows moved.

    Raises:
        ValueError: if an argument is out of its range, if costs are not those of this plan, or if the ranks cannot
            share a step evenly; offenders are listed.

    Example:
        >>> from torch_ref.planning.make_plan import make_plan
        >>> plan = make_plan([5, 5, 5, 5], [(2, 5)], num_microbatches=2, order="dataset")
        >>> balance_plan(plan, [3, 1, 4, 2], 2).sample_ids.tolist()
        [1, 0, 2, 3]
    """
    size = plan.num_microbatches
    ranks = size if num_ranks is None else num_ranks
    units = torch.tensor(_in_units(_row_costs(plan, cost, ranks)))
    first_rows = _group_rows(plan).tolist()
    order = torch.arange(plan.num_rows)
    for step in range(plan.num_steps):
        groups = plan.groups(step)
        first, last = first_rows[groups.start], first_rows[groups.stop]
        dealt, work, before = order[first:last].clone(), *torch.zeros(2, ranks, dtype=torch.int64)
        for group in reversed(groups):
            begin, end = first_rows[group : group + 2]
            owners = _owners(plan, end - begin, ranks)
            before.index_add_(0, owners, units[begin:end])
            counts = torch.bincount(owners)
            new_owners, work[: len(counts)] = _deal(units[begin:end], counts, work[: len(counts)])
            of_group = dealt[begin - first : end - first]
            of_group[torch.argsort(owners, stable=True)] = begin + torch.argsort(new_owners, stable=True)
        if work.max() < before.max():
            order[first:last] = dealt
        bucket = plan.buckets.shapes[plan.group_bucket[groups.start]]
        if num_ranks is None and len(groups) == 1 and last - first == bucket.rows * size:
            rows = order[first:last].view(-1, size)
            order[first:last] = rows[:, _pair_up(units[rows].sum(dim=0).tolist())].flatten()
    balanced = _reorder(plan, order.numpy())
    if plan.plan_epoch is None or plan.row_offsets is not None:  # packed rows of another epoch cost something else
        return balanced
    return replace(balanced, plan_epoch=lambda epoch: balance_plan(plan.of_epoch(epoch), cost, num_ranks))


def _pair_up(work: list[int]) -> list[int]:
    """Return the microbatches in an order in which those of ranks of 2, 4, 8 and so on balance each other."""
    groups = [[place] for place in range(len(work))]
    while len(groups) % 2 == 0:
        groups.sort(key=lambda group: -sum(work[place] for place in group))
        groups = [[*groups[i], *groups[-1 - i]] for i in range(len(groups) // 2)]
    return [place for group in groups for place in group]


@known_keywords
def packed_row_costs(plan: Plan, lengths: ArrayLike, cost: CostModel) -> NDArray[np.float64]:
    """Return the costs of packed rows if attention skips pairs of tokens of different samples.

    Args:
        plan: of packed rows of one feature.
        lengths: [N] integers, the samples' lengths.
        cost: of a microbatch; its constant is no row's.

    Returns:
        float64[R] by row, in the order of the steps: the bucket's length times `cost.linear`, and the squared lengths
        of the samples times `cost.quadratic`.

    Raises:
        ValueError: if rows are not packed or have several features, if the cost is no `CostModel`, or if the lengths
            are not those of this plan.

    Example:
        >>> from torch_ref.planning.make_plan import make_plan
        >>> plan = make_plan([3, 1], [(1, 4)], packing="best_fit", order="length")
        >>> packed_row_costs(plan, [3, 1], CostModel(constant=0, linear=1, quadratic=0.5)).tolist()
        [9.0]
    """
    if plan.row_offsets is None or len(plan.buckets.shapes[0]) != 2:
        raise ValueError("packed_row_costs needs a plan of packed rows of one feature")
    if not isinstance(cost, CostModel):
        raise ValueError(f"packed_row_costs needs a CostModel, which has a term for attention, got {cost!r}")
    squares = np.concatenate([[0], np.cumsum(_sample_tokens(plan, lengths) ** 2)])
    row_lengths = np.array([length for _, length in plan.buckets.shapes], dtype=np.float64)[plan.group_bucket]
    of_tokens: NDArray[np.float64] = cost.linear * np.repeat(row_lengths, np.diff(_group_rows(plan)))
    return of_tokens + cost.quadratic * np.diff(squares[plan.row_offsets])


def rank_costs(plan: Plan, cost: ArrayLike, num_ranks: int) -> NDArray[np.float64]:
    """Return how much work each rank has in each step, from the arguments of `balance_plan`.

    Args:
        plan: of samples, or of packed rows.
        cost: as in `balance_plan`.
        num_ranks: the ranks that share a step.

    Returns:
        float64[S, num_ranks], 0 for a rank that has only padding rows in a short step.

    Raises:
        ValueError: as `balance_plan` does.
    """
    costs = torch.from_numpy(_row_costs(plan, cost, num_ranks))
    work = torch.zeros(plan.num_steps, num_ranks, dtype=torch.float64)
    bounds = _group_rows(plan).tolist()
    for step in range(plan.num_steps):
        for group in plan.groups(step):
            rows = slice(bounds[group], bounds[group + 1])
            work[step].index_add_(0, _owners(plan, rows.stop - rows.start, num_ranks), costs[rows])
    return work.numpy()


def _row_costs(plan: Plan, cost: ArrayLike, num_ranks: int) -> NDArray[np.float64]:
    """Return the cost of each row in the order of the steps."""
    check_integer("num_ranks", num_ranks)
    if plan.num_microbatches % num_ranks:
        raise ValueError(
            f"num_ranks must divide the microbatches of a step: {num_ranks} do not divide {plan.num_microbatches}"
        )
    costs = _check_costs(cost)
    if plan.row_offsets is None:
        _check_ids(plan, len(costs), "cost")
        return costs[plan.sample_ids]
    if len(costs) != plan.num_rows:
        raise ValueError(f"cost must have {plan.num_rows} values, one for each packed row, got {len(costs)}")
    return costs


def _check_ids(plan: Plan, num_values: int, name: str) -> None:
    beyond = plan.sample_ids[plan.sample_ids >= num_values]
    if len(beyond):
        listed = ", ".join(f"id {number}" for number in beyond[:MAX_LISTED].tolist())
        more = f" and {len(beyond) - MAX_LISTED} more" if len(beyond) > MAX_LISTED else ""
        raise ValueError(f"{name} has only {num_values} values, the plan has {listed}{more}")


def _group_rows(plan: Plan) -> NDArray[np.int64]:
    """Return int64[G + 1], the rows before each group."""
    offsets = np.arange(plan.num_samples + 1) if plan.row_offsets is None else plan.row_offsets
    return np.searchsorted(offsets, plan.group_offsets)


def _sample_tokens(plan: Plan, lengths: ArrayLike) -> NDArray[np.int64]:
    """Return the tokens of each of the plan's samples, or chunks, in its order."""
    values = check_lengths(lengths)
    _check_ids(plan, len(values), "lengths")
    tokens = np.minimum(values[plan.sample_ids], plan.longest[0])
    if plan.is_split and plan.chunk_starts is not None and plan.chunk_ends is not None:
        tokens = np.minimum(values[plan.sample_ids], plan.chunk_ends) - plan.chunk_starts
    found = np.diff(np.concatenate([[0], np.cumsum(tokens)])[plan.step_offsets])
    other = np.flatnonzero(found != plan.num_tokens)
    if len(other):
        listed = ", ".join(f"step {i}: {found[i]} for {plan.num_tokens[i]}" for i in other[:MAX_LISTED])
        more = f" and {len(other) - MAX_LISTED} more" if len(other) > MAX_LISTED else ""
        raise ValueError(f"the plan was made with other lengths: by these, tokens are {listed}{more}")
    return tokens


def _owners(plan: Plan, num_rows: int, num_ranks: int) -> Tensor:
    """Return the rank of each row of a group."""
    shape = (-1, num_ranks, plan.num_microbatches // num_ranks)
    ranks = torch.arange(num_ranks)[None, :, None]
    slots = -(-num_rows // plan.num_microbatches)
    return ranks.expand(slots, *shape[1:]).reshape(-1)[:num_rows]


def _deal(units: Tensor, counts: Tensor, work: Tensor) -> tuple[Tensor, Tensor]:
    """Return the owner of each of n rows, so that W owners get `counts` rows, and the `work` that they then have."""
    fewest = int(counts.min())
    falling = torch.argsort(units, descending=True, stable=True)
    num_even = fewest * len(counts)
    more = [torch.nonzero(counts - fewest > i).flatten() for i in range(int(counts.max()) - fewest)]
    owners = torch.empty_like(units)
    owners[falling[num_even:]] = torch.cat([*more, torch.empty(0, dtype=torch.int64)])
    work = work.clone()
    work.index_add_(0, owners[falling[num_even:]], units[falling[num_even:]])
    hands = torch.empty(len(counts), fewest, dtype=torch.int64)
    idle = [(done, owner, 0) for owner, done in enumerate(work.tolist())]
    heapq.heapify(idle)
    for row, unit in zip(falling[:num_even].tolist(), units[falling[:num_even]].tolist(), strict=True):
        done, owner, number = heapq.heappop(idle)
        hands[owner, number] = row
        work[owner] = done + unit
        if number + 1 < fewest:
            heapq.heappush(idle, (done + unit, owner, number + 1))
    if fewest <= _EXCHANGED_UP_TO:
        _exchange(hands, work, units)
    owners[hands] = torch.arange(len(counts))[:, None].expand_as(hands)
    return owners, work


def _exchange(hands: Tensor, work: Tensor, units: Tensor) -> None:
    """Exchange rows between owners with much and with little work, in place."""
    half, size = len(work) // 2, hands.shape[1]
    for _ in range(_SWEEPS if half else 0):
        by_work = torch.argsort(work, descending=True, stable=True)
        busy, idle = by_work[:half], by_work.flip(0)[:half]
        gap = work[busy] - work[idle]
        freed = units[hands[busy]][:, :, None] - units[hands[idle]][:, None, :]
        apart = (gap[:, None, None] - 2 * freed).abs().flatten(1)
        choice = torch.argmin(apart, dim=1)  # the first of several
        useful = apart.gather(1, choice[:, None])[:, 0] < gap
        busy, idle, choice = busy[useful], idle[useful], choice[useful]
        given, taken = hands[busy, choice // size], hands[idle, choice % size]
        hands[busy, choice // size], hands[idle, choice % size] = taken, given
        work[busy] += units[taken] - units[given]
        work[idle] += units[given] - units[taken]


def _reorder(plan: Plan, order: NDArray[np.int64]) -> Plan:
    """Return the plan with other rows in its places."""
    offsets = np.arange(plan.num_samples + 1) if plan.row_offsets is None else plan.row_offsets
    sizes = np.diff(offsets)[order]
    ends = np.cumsum(sizes)
    samples = np.arange(len(plan.sample_ids)) + np.repeat(offsets[:-1][order] - (ends - sizes), sizes)
    return replace(
        plan,
        sample_ids=plan.sample_ids[samples],
        chunk_starts=None if plan.chunk_starts is None else plan.chunk_starts[samples],
        row_offsets=None if plan.row_offsets is None else np.concatenate([[0], ends]),
        plan_epoch=None,
    )


def _check_costs(costs: ArrayLike) -> NDArray[np.float64]:
    """Return costs as float64[n].

    Raises:
        ValueError: if there are none or they aren't 1-D, or if some are negative or not finite; these are listed.
    """
    array: NDArray[Any] = np.asarray(costs)
    if array.ndim != 1 or len(array) == 0 or array.dtype.kind not in "iuf":
        raise ValueError(f"costs must be a 1-D array of numbers, got shape {array.shape} and dtype {array.dtype}")
    values = array.astype(np.float64)
    bad = [i for i, value in enumerate(values.tolist()) if not 0 <= value < np.inf]
    if bad:
        more = f" and {len(bad) - MAX_LISTED} more" if len(bad) > MAX_LISTED else ""
        listed = ", ".join(f"id {i}: {values[i]}" for i in bad[:MAX_LISTED])
        raise ValueError(f"costs must be finite and not negative: {listed}{more}")
    return values


def _in_units(costs: NDArray[np.float64]) -> list[int]:
    """Return finite costs >= 0 as integers of at most 2**32, whose sums are exact."""
    _, exponent = math.frexp(costs.max())
    whole = np.ldexp(costs, _UNIT_BITS - exponent).tolist()
    return [round(value) for value in whole]  # halves to even, as in IEEE 754
