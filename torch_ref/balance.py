"""Deals work to ranks so that the slowest one finishes early."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from torch_ref.checks import MAX_LISTED, check_integer
from torch_ref.costs import CostModel
from torch_ref.lengths import check_lengths, check_pair_lengths, row_sizes
from torch_ref.plan import Plan

__all__ = ["assign_microbatches", "balance_plan", "packed_row_costs", "rank_costs"]

_UNIT_BITS = 32
_SWEEPS = 8
_EXCHANGED_UP_TO = 16  # rows of a rank


def assign_microbatches(costs: ArrayLike, num_ranks: int) -> NDArray[np.int64]:
    """Assign microbatches to ranks by Graham's rule.

    From the most to the least costly, ties by index, each microbatch goes to the rank with the least work so far, ties
    by rank.

    Args:
        costs: [n] numbers >= 0, counted in 2**-32 of the next power of two above the largest, to the nearest integer.
        num_ranks: how many ranks there are; some may stay without work.

    Returns:
        int64[n], ranks.

    Raises:
        ValueError: if a cost is negative or not finite (the first are listed by index), or there is no rank.

    Example:
        >>> assign_microbatches([3, 3, 2, 2, 2], 2).tolist()
        [0, 1, 0, 1, 0]
    """
    units = _in_units(_check_costs("costs", costs))
    used = min(check_integer("num_ranks", num_ranks), len(units))
    order = sorted(range(len(units)), key=lambda i: (-units[i], i))
    falling = [units[i] for i in order]
    result = np.zeros(len(units), dtype=np.int64)
    result[order] = _longest_first(falling, used)
    return result


def balance_plan(
    plan: Plan,
    cost: ArrayLike,
    num_ranks: int | None = None,
    *,
    over: str = "step",
    sync_every: str = "step",
    lengths: ArrayLike | None = None,
) -> Plan:
    """Deal the rows of each step to its ranks so that none of them has much more to do than the others.

    Rank r of p computes the microbatches from r * M / p to (r + 1) * M / p - 1 of every step. Buckets and steps stay
    what they are, and so does how many rows each rank has in each step.

    From the costliest on, each row goes to the rank with the least work, of those that have not all of their rows yet.
    (If ranks have different numbers of rows, the cheapest rows are set aside for those that have more.) Then ranks of
    at most 16 rows exchange rows, eight times at most: the one with the most work with the one with the least, the
    second with the second last, and so on, one row each, those that leave their work least apart. Ranks that wait for
    each other after every microbatch are dealt the costliest rows for their first ones, the next costly rows for their
    second ones, and so on. A step stays as it was if that does not make it shorter. Of equals, what comes first in the
    plan comes first.

    Over the epoch, the rows of all full steps of a bucket are dealt to all ranks of all these steps, or to all their
    microbatches if these are waited for, one row to each at a time. They are then sorted by their work, and consecutive
    ones, as many as there are ranks, belong together, those with the most work first. Steps, or microbatches, are
    ordered by the mean place of their rows in the old plan. So no order of samples is left within a bucket. Where steps
    are not faster than if dealt one by one, those are taken.

    With no number of ranks, rows are dealt to all M microbatches of a step, and the microbatches of full steps are then
    arranged for all divisors of M: by falling work, they take the places whose digits, to the base of the prime factors
    of M from the largest to the smallest and the first of them the least significant, are a reflected Gray code.

    Args:
        plan: of samples, or of packed rows.
        cost: [N] numbers >= 0 by sample, or [R] by packed row in the order of the steps.
        num_ranks: the ranks that share a step, a divisor of M; None for a plan that serves any divisor.
        over: "step" deals each step, "epoch" all full steps of a bucket at once.
        sync_every: ranks wait for the slowest after every "step" or after every "microbatch".
        lengths: [N] integers (or [N, D]), what the plan was made of; only needed over the epoch.

    Returns:
        A plan of the same samples with a digest of its own.

    Raises:
        ValueError: if an argument is out of its range, if costs or lengths are not those of this plan, or if the ranks
            cannot share a step evenly; offenders are listed.

    Example:
        >>> from torch_ref.plan import make_plan
        >>> plan = make_plan([5, 5, 5, 5], [(2, 5)], microbatches_per_step=2, order="dataset")
        >>> balance_plan(plan, [3, 1, 4, 2], 2).sample_ids.tolist()
        [1, 0, 2, 3]
    """
    for name, given in (("over", over), ("sync_every", sync_every)):
        words = ("step", "epoch" if name == "over" else "microbatch")
        if given not in words:
            raise ValueError(f'{name} must be "{words[0]}" or "{words[1]}", got {given!r}')
    ranks = plan.microbatches_per_step if num_ranks is None else num_ranks
    units = torch.tensor(_in_units(_row_costs(plan, cost, ranks)))
    tokens = None if over == "step" else _sample_tokens(plan, lengths)
    first_rows = _step_rows(plan)
    order = torch.arange(plan.num_rows)
    full_steps: dict[int, list[int]] = {}
    for step, bucket in enumerate(plan.step_bucket.tolist()):
        begin, end = first_rows[step : step + 2].tolist()
        shares = _Shares(plan, end - begin, ranks, sync_every)
        dealt = begin + _deal_step(units[begin:end], shares)
        if shares.waits(units[dealt]) < shares.waits(units[begin:end]):
            order[begin:end] = dealt
        if end - begin == plan.buckets[bucket].rows * plan.microbatches_per_step:
            full_steps.setdefault(bucket, []).append(step)
    for steps in full_steps.values():
        begins = first_rows[steps].tolist()
        shares = _Shares(plan, int(np.diff(first_rows)[steps[0]]), ranks, sync_every)
        if over == "epoch":
            _deal_over(begins, units, order, shares)
        for begin in begins if num_ranks is None else ():
            rows = order[begin : begin + len(shares.rank)].view(-1, plan.microbatches_per_step)
            work = units[rows].sum(dim=0)
            if int(work.max()) > int(work.min()):
                places = torch.tensor(_gray_places(_prime_factors(plan.microbatches_per_step)))
                arranged = torch.empty_like(rows)
                arranged[:, places] = rows[:, torch.argsort(work, descending=True, stable=True)]
                order[begin : begin + len(shares.rank)] = arranged.flatten()
    return _reorder(plan, order.numpy(), tokens)


def packed_row_costs(plan: Plan, lengths: ArrayLike, cost: CostModel) -> NDArray[np.float64]:
    """Return the costs of packed rows if attention leaves out what lies between samples.

    Args:
        plan: of packed rows of one feature.
        lengths: [N] integers, the samples' lengths.
        cost: of a microbatch, whose constant no row has alone.

    Returns:
        float64[R] by row, in the order of the steps: the bucket's length times `cost.linear`, and the squared lengths
        of the samples times `cost.quadratic`.

    Raises:
        ValueError: if rows are not packed or have several features, if the cost is no `CostModel`, or if the lengths
            are not those of this plan.

    Example:
        >>> from torch_ref.packing import pack_samples
        >>> from torch_ref.plan import make_plan
        >>> plan = make_plan(pack_samples([3, 1], 4), [(1, 4)], order="length")
        >>> packed_row_costs(plan, [3, 1], CostModel(constant=0, linear=1, quadratic=0.5)).tolist()
        [9.0]
    """
    if plan.row_offsets is None or len(plan.buckets[0]) != 2:
        raise ValueError("packed_row_costs needs a plan of packed rows of one feature")
    if not isinstance(cost, CostModel):
        raise ValueError(f"packed_row_costs needs a CostModel, whose terms tell attention from the rest, got {cost!r}")
    squares = np.concatenate([[0], np.cumsum(_sample_tokens(plan, lengths) ** 2)])
    row_lengths = np.array([length for _, length in plan.buckets], dtype=np.float64)[plan.step_bucket]
    of_tokens: NDArray[np.float64] = cost.linear * np.repeat(row_lengths, np.diff(_step_rows(plan)))
    return of_tokens + cost.quadratic * np.diff(squares[plan.row_offsets])


def rank_costs(plan: Plan, cost: ArrayLike, num_ranks: int) -> NDArray[np.float64]:
    """Return how much work each rank has in each step.

    Args:
        plan: as in `balance_plan`.
        cost: as in `balance_plan`.
        num_ranks: as in `balance_plan`.

    Returns:
        float64[S, num_ranks], 0 for a rank that has only padding rows in a short step.

    Raises:
        ValueError: as `balance_plan` does.
    """
    costs = torch.from_numpy(_row_costs(plan, cost, num_ranks))
    work = torch.zeros(plan.num_steps, num_ranks, dtype=torch.float64)
    bounds = _step_rows(plan).tolist()
    for step in range(plan.num_steps):
        rows = slice(bounds[step], bounds[step + 1])
        work[step].index_add_(0, _owners(plan, rows.stop - rows.start, num_ranks), costs[rows])
    return work.numpy()


def _row_costs(plan: Plan, cost: ArrayLike, num_ranks: int) -> NDArray[np.float64]:
    """Return the cost of each row in the order of the steps."""
    check_integer("num_ranks", num_ranks)
    if plan.microbatches_per_step % num_ranks:
        raise ValueError(
            f"num_ranks must divide the microbatches of a step: {num_ranks} do not divide {plan.microbatches_per_step}"
        )
    costs = _check_costs("cost", cost)
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


def _step_rows(plan: Plan) -> NDArray[np.int64]:
    """Return int64[S + 1], the rows before each step."""
    offsets = np.arange(plan.num_samples + 1) if plan.row_offsets is None else plan.row_offsets
    return np.searchsorted(offsets, plan.step_offsets)


def _sample_tokens(plan: Plan, lengths: ArrayLike | None) -> NDArray[np.int64]:
    """Return the tokens of each of the plan's samples, or pieces, in its order."""
    if lengths is None:
        raise ValueError('lengths are needed with over="epoch": steps will have other numbers of tokens')
    values = check_pair_lengths(lengths) if np.ndim(lengths) == 2 else check_lengths(lengths)[:, None]
    if values.shape[1] != len(plan.buckets[0]) - 1:
        raise ValueError(f"lengths of shape {np.shape(lengths)} do not go with buckets like {tuple(plan.buckets[0])}")
    _check_ids(plan, len(values), "lengths")
    if plan.piece_starts is None or plan.piece_ends is None:
        edges = np.array(plan.buckets)[:, 1:].max(axis=0)
        tokens = row_sizes(np.minimum(values[plan.sample_ids], edges), plan.pair_size)
    else:
        tokens = np.minimum(values[plan.sample_ids, 0], plan.piece_ends) - plan.piece_starts
    found = np.diff(np.concatenate([[0], np.cumsum(tokens)])[plan.step_offsets])
    other = np.flatnonzero(found != plan.num_tokens)
    if len(other):
        listed = ", ".join(f"step {i}: {found[i]} for {plan.num_tokens[i]}" for i in other[:MAX_LISTED])
        more = f" and {len(other) - MAX_LISTED} more" if len(other) > MAX_LISTED else ""
        raise ValueError(f"the plan was made with other lengths: by these, tokens are {listed}{more}")
    return tokens


def _owners(plan: Plan, num_rows: int, num_ranks: int) -> Tensor:
    """Return the rank of each row of a step."""
    shape = (-1, num_ranks, plan.microbatches_per_step // num_ranks)
    ranks = torch.arange(num_ranks)[None, :, None]
    slots = -(-num_rows // plan.microbatches_per_step)
    return ranks.expand(slots, *shape[1:]).reshape(-1)[:num_rows]


class _Shares:
    """Whose each row of a step is, and when: turns are what ranks wait for each other after.

    Attributes:
        rank: int64[n], by place.
        turn: int64[n], 0 if ranks wait only after the step.
    """

    def __init__(self, plan: Plan, num_rows: int, num_ranks: int, sync_every: str) -> None:
        self.rank = _owners(plan, num_rows, num_ranks)
        per_rank = plan.microbatches_per_step // num_ranks
        self.turn = torch.arange(num_rows) % per_rank if sync_every == "microbatch" else torch.zeros_like(self.rank)
        self.num_turns = int(self.turn.max()) + 1
        self.num_ranks = int(self.rank.max()) + 1

    def places(self) -> Tensor:
        """Return int64[n], the places by turn, then by rank."""
        return torch.argsort(self.turn * self.num_ranks + self.rank, stable=True)

    def waits(self, units: Tensor) -> int:
        """Return the work of the slowest rank of each turn, summed."""
        work = torch.zeros(self.num_turns, self.num_ranks, dtype=torch.int64)
        return int(work.index_put_((self.turn, self.rank), units, accumulate=True).max(dim=1).values.sum())


def _deal_step(units: Tensor, shares: _Shares) -> Tensor:
    """Return which row comes to each place."""
    falling = torch.argsort(units, descending=True, stable=True)
    rows = torch.empty_like(falling)
    for turn, places in enumerate(shares.places().split(torch.bincount(shares.turn).tolist())):
        first = int((shares.turn < turn).sum())
        own = torch.sort(falling[first : first + len(places)]).values
        owners = _deal(units[own], torch.bincount(shares.rank[places]), in_rounds=False)
        rows[places] = own[torch.argsort(owners, stable=True)]
    return rows


def _deal_over(begins: list[int], units: Tensor, order: Tensor, shares: _Shares) -> None:
    """Change the order of the rows of full steps of one bucket, if dealing them all at once makes steps faster."""
    num_ranks, num_turns, size = shares.num_ranks, shares.num_turns * len(begins), len(shares.rank)
    rows = torch.cat([torch.arange(begin, begin + size) for begin in begins])
    per_rank = len(rows) // (num_turns * num_ranks)
    owners = _deal(units[rows], torch.full((num_turns * num_ranks,), per_rank), in_rounds=True)
    hands = torch.argsort(owners, stable=True).view(-1, per_rank)
    by_work = torch.argsort(units[rows][hands].sum(dim=1), descending=True, stable=True)
    turns = hands[by_work].view(num_turns, -1)
    turns = turns[torch.argsort(turns.sum(dim=1), stable=True)]
    dealt = torch.empty(len(begins), size, dtype=torch.int64)
    dealt[:, shares.places()] = rows[turns].view(len(begins), -1)
    before = sum(shares.waits(units[order[one]]) for one in rows.view(len(begins), -1))
    if sum(shares.waits(units[one]) for one in dealt) < before:
        order[rows] = dealt.view(-1)


def _prime_factors(number: int) -> list[int]:
    """Return the prime factors, from the largest to the smallest."""
    least = next((factor for factor in range(2, number + 1) if number % factor == 0), None)
    return [] if least is None else [*_prime_factors(number // least), least]


def _gray_places(factors: list[int]) -> list[int]:
    """Return the numbers below the product of the factors so that, digit by digit, neighbours differ by one."""
    if not factors:
        return [0]
    first, *rest = factors
    inner = _gray_places(rest)
    return [digit + first * place for digit in range(first) for place in (inner[::-1] if digit % 2 else inner)]


def _deal(units: Tensor, counts: Tensor, *, in_rounds: bool) -> Tensor:
    """Return the owner of each row.

    Args:
        units: int64[n], costs of rows.
        counts: int64[W], how many rows each of W owners gets, n in all.
        in_rounds: one row to every owner before the next ones, not to the idlest that can have more.
    """
    fewest = int(counts.min())
    falling = torch.argsort(units, descending=True, stable=True)
    num_even = fewest * len(counts)
    more = [torch.nonzero(counts - fewest > i).flatten() for i in range(int(counts.max()) - fewest)]
    owners = torch.empty_like(units)
    owners[falling[num_even:]] = torch.cat([*more, torch.empty(0, dtype=torch.int64)])
    work = torch.zeros(len(counts), dtype=torch.int64)
    work.index_add_(0, owners[falling[num_even:]], units[falling[num_even:]])
    hands = torch.empty(len(counts), fewest, dtype=torch.int64)
    if in_rounds:
        for turn, rows in enumerate(falling[:num_even].view(fewest, len(counts))):
            idlest = torch.argsort(work, stable=True)
            hands[idlest, turn] = rows
            work[idlest] += units[rows]
    else:
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
    return owners


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


def _reorder(plan: Plan, order: NDArray[np.int64], tokens: NDArray[np.int64] | None) -> Plan:
    """Return the plan with other rows in its places; `tokens` of its samples, where steps get other ones."""
    offsets = np.arange(plan.num_samples + 1) if plan.row_offsets is None else plan.row_offsets
    sizes = np.diff(offsets)[order]
    ends = np.cumsum(sizes)
    samples = np.arange(len(plan.sample_ids)) + np.repeat(offsets[:-1][order] - (ends - sizes), sizes)
    row_offsets = np.concatenate([[0], ends])
    step_offsets = row_offsets[_step_rows(plan)]
    num_tokens = plan.num_tokens
    if tokens is not None:
        num_tokens = np.diff(np.concatenate([[0], np.cumsum(tokens[samples])])[step_offsets])
    return replace(
        plan,
        sample_ids=plan.sample_ids[samples],
        piece_starts=None if plan.piece_starts is None else plan.piece_starts[samples],
        row_offsets=None if plan.row_offsets is None else row_offsets,
        step_offsets=step_offsets,
        num_tokens=num_tokens,
    )


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
