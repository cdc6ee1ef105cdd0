"""Balances the rows of steps over ranks: longest processing time first (LPT), then pairwise swaps.

Letters: p ranks, M microbatches per step, S steps, R rows of a plan, n of a step. G steps of n rows are dealt at once,
to W ranks.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64, Int64

from jvarlen._common.checks import UserError, check_at_least_one, list_offenders, offenders_where
from jvarlen._common.keywords import check_keywords
from jvarlen.planning._kernels import take_segments
from jvarlen.planning.buckets import Bucket, rows_of_steps
from jvarlen.planning.cost_model import CostModel
from jvarlen.planning.plan import Plan

__all__ = ["balance_plan", "costs_in_units", "packed_row_costs", "rank_costs"]

_COST_BITS = 32
_MOST_SWEEPS = 8  # of swaps; more of them hardly gain
_MOST_SWAPPED = 16  # rows of a rank, above which dealing alone is even enough
_FULL = np.iinfo(np.int64).max


@check_keywords
def balance_plan(plan: Plan, cost: npt.ArrayLike, num_ranks: int | None = None) -> Plan:
    """Deals the rows of each step to ranks so that they wait little for each other.

    Row j of a group is in microbatch j mod M, and rank r of p computes the microbatches from r·M/p up to (r + 1)·M/p.
    Only which row of a group is where changes, and with it the digest.

    Rows are dealt from the costliest to the cheapest, each to the rank with the least so far that is not full. Where
    ranks of a short step have different numbers of rows, those with more first get the cheapest. Ranks with at most 16
    rows then swap, in at most 8 sweeps: the costliest rank with the cheapest, the second with the second and so on;
    each pair swaps the two rows, if any, that bring them closest. Ties go by place in the plan, then by rank. A step
    that would not get faster is left alone.

    The groups of a step are dealt one by one, from the last, each to ranks that have the costs of those before, so that
    ranks are even over the step. Rows stay in their group.

    Without `num_ranks` the plan does not depend on devices: every microbatch counts as a rank. The microbatches of full
    steps of one group are then paired, the costliest with the cheapest, the second with the second and so on, then the
    pairs in the same way while their number is even, so that ranks of 2, 4, 8, … microbatches are even too.

    Args:
      plan: of samples or of packed rows.
      cost: floats[N] by sample id; of packed rows floats[R] in order of steps. Finite, at least 0, in any unit.
      num_ranks: p, of data parallelism; it divides M. None balances for any number of ranks.

    Returns:
      Another plan of the same samples.

    Raises:
      ValueError: costs that are negative, NaN or infinite, or too few or many; ranks that do not divide M. Offenders
        are listed.

    Example:
      >>> from jvarlen.planning.make_plan import make_plan
      >>> plan = make_plan([4, 4, 4, 4], [(2, 4)], num_microbatches=2, order="dataset")
      >>> cost = [8.0, 1.0, 7.0, 2.0]
      >>> rank_costs(plan, cost, 2).tolist(), rank_costs(balance_plan(plan, cost, 2), cost, 2).tolist()
      ([[15.0, 3.0]], [[9.0, 9.0]])

    References:
      Longest first: Graham 1969, "Bounds on Multiprocessing Timing Anomalies".
    """
    num_microbatches = plan.num_microbatches
    ranks = num_microbatches if num_ranks is None else num_ranks
    units = costs_in_units(_costs_of_rows(plan, cost, ranks))
    rows = _deal_steps(plan, units, ranks)
    if num_ranks is None:
        first_row, num_rows = plan.first_rows, np.diff(plan.first_rows)
        capacities = rows_of_steps(plan.buckets)[plan.group_bucket]
        is_alone = np.repeat(np.diff(plan.step_groups) == 1, np.diff(plan.step_groups))
        is_full = (num_rows == capacities) & is_alone
        for number in np.unique(num_rows[is_full]).tolist():
            places_GxN = first_row[:-1][is_full & (num_rows == number)][:, None] + np.arange(number)
            rows[places_GxN] = _pair_microbatches(rows[places_GxN], units, num_microbatches)
    balanced = _reorder_rows(plan, rows)
    if plan.plan_epoch is None or plan.is_packed:  # packed rows of another epoch have other costs
        return dataclasses.replace(balanced, plan_epoch=None)
    return dataclasses.replace(balanced, plan_epoch=lambda epoch: balance_plan(plan.of_epoch(epoch), cost, num_ranks))


def packed_row_costs(plan: Plan, lengths: npt.ArrayLike, cost: CostModel) -> Float64[np.ndarray, " R"]:
    """The cost of each packed row: linear·T + quadratic·Σ l².

    T is the length of the row's bucket, l are the tokens of its samples, whose pairs alone `attend` computes.

    Args:
      plan: of packed rows of one feature.
      lengths: integers[N], tokens of the samples by id, as they were packed.
      cost: of a microbatch; its constant is that of all rows together. `CostModel(0, 1, 1 / c)` counts in tokens: c is
        the length of a sample at which attention costs as much as everything else. Counted in multiplications, that is
        12·d for a transformer of width d with 12·d² parameters a layer and causal attention.

    Returns:
      float64[R], in the order of the plan's steps and rows: the `cost` of `balance_plan`.

    Raises:
      ValueError: a plan of pairs or without packed rows; a cost that is not a `CostModel`; lengths of another plan.

    Example:
      >>> from jvarlen.planning.make_plan import make_plan
      >>> plan = make_plan([8, 2, 3, 3], [(2, 8)], packing="best_fit", order="length")
      >>> packed_row_costs(plan, [8, 2, 3, 3], CostModel(constant=0, linear=1, quadratic=0.25)).tolist()
      [24.0, 13.5]
    """
    if not isinstance(cost, CostModel):
        raise UserError(f"packed_row_costs needs a CostModel, which tells tokens from pairs of tokens, not {cost!r}")
    pairs_of_samples = plan.pairs_of_samples(lengths)
    assert plan.row_offsets is not None
    pairs = np.add.reduceat(pairs_of_samples, plan.row_offsets[:-1])
    row_length = np.array([bucket.length for bucket in plan.buckets.shapes if isinstance(bucket, Bucket)], np.float64)
    of_rows = np.repeat(row_length[plan.group_bucket], np.diff(plan.first_rows))
    return cost.linear * of_rows + cost.quadratic * pairs


def rank_costs(plan: Plan, cost: npt.ArrayLike, num_ranks: int) -> Float64[np.ndarray, "S p"]:
    """The cost of each rank in each step; the slowest rank decides how long a step takes.

    Args:
      plan: as in `balance_plan`.
      cost: as in `balance_plan`.
      num_ranks: as in `balance_plan`.

    Returns:
      float64[S, p], sums of the costs of the rows of a rank; 0 where a short step has no row for it.
    """
    costs = _costs_of_rows(plan, cost, num_ranks)
    num_rows = np.diff(plan.first_rows)
    place = np.arange(len(costs)) - np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
    rank = _rank_of(place, plan.num_microbatches, num_ranks)
    step = np.repeat(np.arange(plan.num_steps), np.diff(plan.step_groups))  # of each group
    cell = np.repeat(step, num_rows) * num_ranks + rank
    return np.bincount(cell, costs, plan.num_steps * num_ranks).reshape(plan.num_steps, num_ranks)


def _costs_of_rows(plan: Plan, cost: npt.ArrayLike, num_ranks: int) -> Float64[np.ndarray, " R"]:
    """The cost of every row in the order of the steps; raises ValueError for what `balance_plan` rejects."""
    check_at_least_one(num_ranks=num_ranks)
    if plan.num_microbatches % num_ranks:
        raise UserError(
            f"{num_ranks} ranks do not divide the {plan.num_microbatches} microbatches of a step, "
            "so that they cannot share it evenly"
        )
    values = np.asarray(cost)
    if values.ndim != 1 or values.size == 0 or values.dtype.kind not in "iuf":
        raise UserError(f"cost must be 1-D with at least one number, not {values.dtype}{list(values.shape)}")
    costs = values.astype(np.float64)
    wrong = ~(np.isfinite(costs) & (costs >= 0))
    if wrong.any():
        raise UserError(f"cost must be finite and at least 0: {list_offenders(*offenders_where(wrong, costs))}")
    if plan.is_packed:
        if len(costs) != plan.num_rows:
            raise UserError(f"cost must have one value for each of {plan.num_rows:,} rows, not {len(costs):,}")
        return costs
    if len(unknown := plan.sample_ids[plan.sample_ids >= len(costs)]):
        raise UserError(f"cost has {len(costs):,} values, the plan more samples: {list_offenders(unknown)}")
    return costs[plan.sample_ids]


def _reorder_rows(plan: Plan, rows: Int64[np.ndarray, " R"]) -> Plan:
    """The plan with the rows of its steps in another order."""
    row_offsets = plan.row_offsets
    places, moved_offsets = rows, None  # of samples
    if row_offsets is not None:
        moved_offsets = np.cumulative_sum(np.diff(row_offsets)[rows], include_initial=True)
        places = take_segments(np.arange(plan.num_samples), row_offsets, rows, moved_offsets)
    starts = plan.chunk_starts
    return dataclasses.replace(
        plan,
        sample_ids=plan.sample_ids[places],
        row_offsets=moved_offsets,
        chunk_starts=None if starts is None else starts[places],
    )


def _rank_of(places: Int64[np.ndarray, " n"], num_microbatches: int, num_ranks: int) -> Int64[np.ndarray, " n"]:
    """The rank that computes the rows at these places of a step."""
    return places % num_microbatches // (num_microbatches // num_ranks)


def _deal_steps(plan: Plan, units: Int64[np.ndarray, " R"], num_ranks: int) -> Int64[np.ndarray, " R"]:
    """The rows of the plan, dealt group by group; those of a step that would not be faster keep their order."""
    first_row, num_rows = plan.first_rows, np.diff(plan.first_rows)
    groups_of_step = np.diff(plan.step_groups)
    step = np.repeat(np.arange(plan.num_steps), groups_of_step)  # of each group
    until_last = plan.step_groups[1:][step] - 1 - np.arange(plan.num_groups)
    rows = np.arange(len(units))
    if num_ranks == 1:
        return rows
    dealt, step_of_row = rows.copy(), np.repeat(step, num_rows)
    before, loads_SxP = np.zeros((2, plan.num_steps, num_ranks), np.int64)
    place = rows - np.repeat(first_row[:-1], num_rows)
    np.add.at(before, (step_of_row, _rank_of(place, plan.num_microbatches, num_ranks)), units)
    for turn in range(int(groups_of_step.max())):
        for number in np.unique(num_rows[until_last == turn]).tolist():
            groups = np.flatnonzero((until_last == turn) & (num_rows == number))
            places_GxN = first_row[groups][:, None] + np.arange(number)
            rank_of_place = _rank_of(np.arange(number), plan.num_microbatches, num_ranks)
            dealt[places_GxN], loads_SxP[step[groups]] = _deal_rows(
                places_GxN, units, rank_of_place, loads_SxP[step[groups]]
            )
    is_faster = loads_SxP.max(axis=1) < before.max(axis=1)
    return np.where(is_faster[step_of_row], dealt, rows)


def _deal_rows(
    rows_GxN: Int64[np.ndarray, "G n"],
    units: Int64[np.ndarray, " R"],
    rank_of_place: Int64[np.ndarray, " n"],
    loads_GxP: Int64[np.ndarray, "G p"],
) -> tuple[Int64[np.ndarray, "G n"], Int64[np.ndarray, "G p"]]:
    """Deals the rows of groups of equal size to ranks with these loads; also gives the loads that they then have."""
    by_rank = np.argsort(rank_of_place, kind="stable")
    counts = np.bincount(rank_of_place)
    dealt_GxN = np.empty_like(rows_GxN)
    rank_of_row, loads_GxW = _assign_ranks(units[rows_GxN], counts, loads_GxP[:, : len(counts)])
    dealt_GxN[:, by_rank] = np.take_along_axis(rows_GxN, np.argsort(rank_of_row, axis=1, kind="stable"), axis=1)
    return dealt_GxN, np.concatenate([loads_GxW, loads_GxP[:, len(counts) :]], axis=1)


def _pair_microbatches(
    rows_GxN: Int64[np.ndarray, "G n"], units: Int64[np.ndarray, " R"], num_microbatches: int
) -> Int64[np.ndarray, "G n"]:
    """Full steps whose microbatches are paired, the costliest with the cheapest, then the pairs in the same way."""
    rows_GxBxM = rows_GxN.reshape(len(rows_GxN), -1, num_microbatches)
    load_GxM = units[rows_GxBxM].sum(axis=1)
    group_GxKxW = np.tile(np.arange(num_microbatches)[:, None], (len(rows_GxN), 1, 1))
    while (half := group_GxKxW.shape[1] // 2) * 2 == group_GxKxW.shape[1]:
        load_GxK = np.take_along_axis(load_GxM[:, None], group_GxKxW, axis=2).sum(axis=2)
        by_load = np.argsort(-load_GxK, axis=1, kind="stable")[:, :, None]
        costly, cheap = by_load[:, :half], by_load[:, ::-1][:, :half]
        group_GxKxW = np.concatenate(
            [np.take_along_axis(group_GxKxW, each, axis=1) for each in (costly, cheap)], axis=2
        )
    return np.take_along_axis(rows_GxBxM, group_GxKxW.reshape(len(rows_GxN), 1, -1), axis=2).reshape(rows_GxN.shape)


def _assign_ranks(
    costs: Int64[np.ndarray, "G n"], counts: Int64[np.ndarray, " W"], loads: Int64[np.ndarray, "G W"]
) -> tuple[Int64[np.ndarray, "G n"], Int64[np.ndarray, "G W"]]:
    """The rank that each row is dealt to, the costliest first, each to the rank with the least; and their loads."""
    num_groups = len(costs)
    num_ranks, per_rank = len(counts), int(counts[-1])
    by_cost = np.argsort(-costs, axis=1, kind="stable")
    ranks = np.empty_like(by_cost)
    loads = loads.copy()
    start = num_ranks * per_rank
    for round_ in range(per_rank, int(counts[0])):
        to_rank = np.flatnonzero(counts > round_)
        dealt = by_cost[:, start : start + len(to_rank)]
        np.put_along_axis(ranks, dealt, to_rank[None], axis=1)
        loads[:, to_rank] += np.take_along_axis(costs, dealt, axis=1)
        start += len(to_rank)
    rows_GxWxQ = np.empty((num_groups, num_ranks, per_rank), np.int64)
    num_dealt = np.zeros((num_groups, num_ranks), np.int64)
    group = np.arange(num_groups)
    for dealt in by_cost.T[: num_ranks * per_rank]:
        to_rank = np.where(num_dealt < per_rank, loads, _FULL).argmin(axis=1)
        rows_GxWxQ[group, to_rank, num_dealt[group, to_rank]] = dealt
        num_dealt[group, to_rank] += 1
        loads[group, to_rank] += costs[group, dealt]
    _swap(rows_GxWxQ, costs, loads)
    np.put_along_axis(
        ranks, rows_GxWxQ.reshape(num_groups, -1), np.repeat(np.arange(num_ranks), per_rank)[None], axis=1
    )
    return ranks, loads


def _swap(rows: Int64[np.ndarray, "G W q"], costs: Int64[np.ndarray, "G n"], loads: Int64[np.ndarray, "G W"]) -> None:
    """Swaps rows between ranks, in place, so that costly and cheap ones come closer."""
    num_groups, num_ranks, per_rank = rows.shape
    if per_rank > _MOST_SWAPPED or num_ranks < 2:
        return
    num_pairs = num_ranks // 2
    group = np.arange(num_groups)[:, None]
    for _ in range(_MOST_SWEEPS):
        by_load = np.argsort(-loads, axis=1, kind="stable")
        high, low = by_load[:, :num_pairs], by_load[:, : -num_pairs - 1 : -1]
        high_GxPxQ, low_GxPxQ = rows[group, high], rows[group, low]
        low_costs = costs[group[:, None], low_GxPxQ]
        apart = np.take_along_axis(loads, high, axis=1) - np.take_along_axis(loads, low, axis=1)
        closest, place_of_high, place_of_low = apart, np.zeros_like(apart), np.zeros_like(apart)
        for place in range(per_rank):
            moved = np.take_along_axis(costs, high_GxPxQ[:, :, place], axis=1)[:, :, None] - low_costs
            left = np.abs(apart[:, :, None] - 2 * moved)
            best = left.argmin(axis=2)
            left = np.take_along_axis(left, best[:, :, None], axis=2)[:, :, 0]
            is_closer = left < closest
            closest = np.where(is_closer, left, closest)
            place_of_high = np.where(is_closer, place, place_of_high)
            place_of_low = np.where(is_closer, best, place_of_low)
        g, pair = np.nonzero(closest < apart)
        if not len(g):
            return
        to_high, to_low = (g, high[g, pair], place_of_high[g, pair]), (g, low[g, pair], place_of_low[g, pair])
        rows[to_high], rows[to_low] = rows[to_low], rows[to_high]
        gained = costs[g, rows[to_low]] - costs[g, rows[to_high]]
        loads[g, high[g, pair]] -= gained
        loads[g, low[g, pair]] += gained


def costs_in_units(costs: Float64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
    """Costs as multiples of 2**-32 of the power of two above the largest, so that integers below 2**32 are exact."""
    _, exponent = np.frexp(costs.max())
    return np.rint(np.ldexp(costs, _COST_BITS - int(exponent))).astype(np.int64)
