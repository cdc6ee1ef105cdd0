"""Work dealt to ranks so that none waits long for the slowest.

Letters: n microbatches, p ranks, M microbatches a step, S steps, R rows of a plan, n of a step. G groups of n rows are
dealt at once, each to W shares of q rows: the ranks of a step, or those of all steps.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from typing import Literal

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64, Int64

from jvarlen._common.checks import (
    UserError,
    check_at_least_one,
    check_choices,
    list_first,
    list_offenders,
    offenders_where,
)
from jvarlen.planning._kernels import take_segments
from jvarlen.planning.buckets import Bucket
from jvarlen.planning.cost_model import CostModel
from jvarlen.planning.lengths import check_lengths, check_pair_lengths, ends_to_offsets, sample_sizes
from jvarlen.planning.order import stable_argsort
from jvarlen.planning.plan import Plan
from jvarlen.planning.steps import PlannedSteps

__all__ = ["assign_microbatches", "balance_plan", "packed_row_costs", "rank_costs", "sample_pairs"]

Over = Literal["step", "epoch"]
SyncEvery = Literal["step", "microbatch"]

_COST_BITS = 32
_MOST_SWEEPS = 8  # of swaps; more of them hardly gain
_MOST_SWAPPED = 16  # rows of a rank, above which dealing alone is even enough
_FULL = np.iinfo(np.int64).max


def assign_microbatches(costs: npt.ArrayLike, num_ranks: int) -> Int64[np.ndarray, " n"]:
    """Assigns microbatches to ranks so that the slowest rank has little to do.

    Longest first: microbatches by descending cost, ties by index, each to the rank that has the least so far, ties by
    rank.

    Args:
      costs: floats[n], what each microbatch costs, in any unit, finite and at least 0. They are rounded to multiples of
        2**-32 of the power of two above the largest.
      num_ranks: p. It may be above n: some ranks then get nothing.

    Returns:
      int64[n], the rank of each microbatch.

    Raises:
      ValueError: costs that are negative, NaN or infinite, listed by index; no ranks.

    Example:
      >>> assign_microbatches([7, 2, 5, 4, 6], 2).tolist()
      [0, 0, 1, 0, 1]

    References:
      Longest first: Graham 1969, "Bounds on Multiprocessing Timing Anomalies". Its slowest rank has at most 4/3 −
      1/(3p) of the least possible.
    """
    check_at_least_one(num_ranks=num_ranks)
    units = _in_units(_checked_costs(costs, "costs"))
    descending = np.argsort(-units, kind="stable")
    loads = [(0, rank) for rank in range(min(int(num_ranks), len(units)))]
    ranks = np.empty(len(units), np.int64)
    for index in descending.tolist():
        load, ranks[index] = loads[0]
        heapq.heapreplace(loads, (load + int(units[index]), int(ranks[index])))
    return ranks


def balance_plan(
    plan: Plan,
    cost: npt.ArrayLike,
    num_ranks: int | None = None,
    *,
    over: Over = "step",
    sync_every: SyncEvery = "step",
    lengths: npt.ArrayLike | None = None,
) -> Plan:
    """Deals the rows of a plan to ranks so that those of a step wait little for each other.

    Row j of a step is in microbatch j mod M, and rank r of p computes the microbatches from r·M/p up to (r + 1)·M/p.
    Ranks wait for the slowest at the end of a step, or in every microbatch: then the i-th microbatches of all ranks
    start together. The buckets and their steps, the real rows of each step and rank, and the padding rows stay as they
    are; only which row is where changes, and with it the digest.

    Rows are dealt from the costliest to the cheapest, each to the rank with the least so far that is not full. Where
    ranks of a short step have different numbers of rows, those with more first get the cheapest. Ranks with at most 16
    rows then swap, in at most 8 sweeps: the costliest rank with the cheapest, the second with the second and so on;
    each pair swaps the two rows, if any, that bring them closest. Ranks that meet in every microbatch share the
    costliest rows in the first one, the next ones in the second, and so on. Ties go by place in the plan, then by rank.
    A step that would not get faster is left alone.

    Over an epoch, the full steps of a bucket share their rows. These are dealt to the ranks of all its steps, or of all
    their microbatches, as many rows at a time as there are such ranks. Those that got nearly the same start together.
    Steps, or microbatches, come in the order of the mean place that their rows had before. So a curriculum within a
    bucket is lost, steps of a shuffled plan mix costly and cheap rows evenly, and pieces of split samples can leave
    their order. Buckets for which that isn't faster, and short steps, are dealt within steps.

    Without `num_ranks` the plan does not depend on devices: every microbatch is dealt as a rank of its own. The
    microbatches of a full step are then placed so that any number of ranks waits little for the slowest, whenever they
    meet: in the order of a reflected Gray code of their costs, last digit first, of which the digits are the prime
    factors of M, the largest first. If that and M are powers of two, i-th microbatches have neighbouring costs, and
    ranks take turns at the costliest.

    It saves time only if the cost of a row depends on its samples: see `packed_row_costs`.

    Args:
      plan: of samples or of packed rows.
      cost: floats[N] by sample id; of packed rows floats[R] in order of steps. Finite, at least 0, in any unit.
      num_ranks: p, of data parallelism; it divides M. None: for any number of them.
      over: `"step"`: rows stay in their steps. `"epoch"`: they move between steps of the same bucket.
      sync_every: when ranks wait for each other: once a `"step"`, or in every `"microbatch"`, as with ZeRO-2 and 3.
      lengths: integers[N] or [N, D], tokens of the samples as the plan was made with; needed over an epoch.

    Returns:
      Another plan of the same samples.

    Raises:
      ValueError: costs that are negative, NaN or infinite, or too few or many; ranks that do not divide M; lengths that
        are missing or are not those of the plan. Offenders are listed.

    Example:
      >>> from jvarlen.planning.plan import make_plan
      >>> plan = make_plan([4, 4, 4, 4], [(2, 4)], microbatches_per_step=2, order="dataset")
      >>> cost = [8.0, 1.0, 7.0, 2.0]
      >>> rank_costs(plan, cost, 2).tolist(), rank_costs(balance_plan(plan, cost, 2), cost, 2).tolist()
      ([[15.0, 3.0]], [[9.0, 9.0]])

    References:
      Longest first: as in `assign_microbatches`. Microbatches by cost: TorchTitan's load balancing of steps, 2026.
      Reflected digits: Gray 1953, "Pulse Code Communication".
    """
    check_choices(over=(over, Over), sync_every=(sync_every, SyncEvery))
    num_microbatches = plan.microbatches_per_step
    ranks = num_microbatches if num_ranks is None else num_ranks
    units = _in_units(_costs_of_rows(plan, cost, ranks))
    if over == "epoch" and lengths is None:
        raise UserError('over="epoch" needs lengths, because the tokens of steps change')
    tokens = None if over == "step" or lengths is None else _tokens_of_samples(plan, lengths)
    first_row = _first_rows(plan)
    num_rows = np.diff(first_row)
    rows = np.arange(plan.num_rows)
    full = num_microbatches * np.array([bucket.rows for bucket in plan.buckets])[plan.step_bucket]
    for kind in np.unique(np.stack([plan.step_bucket, num_rows], axis=1), axis=0).tolist():
        steps = np.flatnonzero((plan.step_bucket == kind[0]) & (num_rows == kind[1]))
        places_GxN = first_row[steps][:, None] + np.arange(kind[1])
        costs_GxN = units[places_GxN]
        dealing = _Dealing(kind[1], num_microbatches, ranks, sync_every)
        taken_GxN = dealing.within_steps(costs_GxN)
        dealt_GxN = np.take_along_axis(places_GxN, taken_GxN, axis=1)
        is_full = kind[1] == full[steps[0]]
        if over == "epoch" and len(steps) > 1 and is_full:
            over_GxN = places_GxN.reshape(-1)[dealing.over_steps(costs_GxN)]
            if dealing.waited(units[over_GxN]).sum() < dealing.waited(units[dealt_GxN]).sum():
                dealt_GxN = over_GxN
        if num_ranks is None and is_full:
            dealt_GxN = _for_any_ranks(dealt_GxN, units, num_microbatches)
        rows[places_GxN] = dealt_GxN
    return _with_rows(plan, rows, tokens)


def packed_row_costs(plan: Plan, lengths: npt.ArrayLike, cost: CostModel) -> Float64[np.ndarray, " R"]:
    """What each packed row costs: linear·T + quadratic·Σ l².

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
      ValueError: a plan of pairs or without packed rows; a cost that is no `CostModel`; lengths of another plan.

    Example:
      >>> from jvarlen.planning.packing import pack_samples
      >>> from jvarlen.planning.plan import make_plan
      >>> plan = make_plan(pack_samples([8, 2, 3, 3], 8), [(2, 8)], order="length")
      >>> packed_row_costs(plan, [8, 2, 3, 3], CostModel(constant=0, linear=1, quadratic=0.25)).tolist()
      [24.0, 13.5]
    """
    if not isinstance(cost, CostModel):
        raise UserError(f"packed_row_costs needs a CostModel, which tells tokens from pairs of tokens, not {cost!r}")
    pairs_of_samples = sample_pairs(plan, lengths)
    assert plan.row_offsets is not None
    pairs = np.add.reduceat(pairs_of_samples, plan.row_offsets[:-1])
    row_length = np.array([bucket.length for bucket in plan.buckets if isinstance(bucket, Bucket)], np.float64)
    of_rows = np.repeat(row_length[plan.step_bucket], np.diff(_first_rows(plan)))
    return cost.linear * of_rows + cost.quadratic * pairs


def sample_pairs(plan: PlannedSteps, lengths: npt.ArrayLike | None) -> Int64[np.ndarray, " n"]:
    """The pairs of tokens, l², of each of `plan.sample_ids`, packed into rows of one feature."""
    if not isinstance(plan, Plan) or plan.row_offsets is None or len(plan.buckets[0].lengths) > 1:
        raise UserError("pairs of tokens are counted of packed rows of one feature, as from make_plan(pack_samples(…))")
    if lengths is None:
        raise UserError("what packed rows cost depends on their samples: give lengths, the tokens of each")
    return _tokens_of_samples(plan, lengths) ** 2


def rank_costs(plan: Plan, cost: npt.ArrayLike, num_ranks: int) -> Float64[np.ndarray, "S p"]:
    """What each rank has to do in each step; the slowest of a step decides how long it takes.

    Args:
      plan: as in `balance_plan`.
      cost: as in `balance_plan`.
      num_ranks: as in `balance_plan`.

    Returns:
      float64[S, p], sums of the costs of the rows of a rank; 0 where a short step has no row for it.
    """
    costs = _costs_of_rows(plan, cost, num_ranks)
    num_rows = np.diff(_first_rows(plan))
    place = np.arange(len(costs)) - np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
    rank = _rank_of(place, plan.microbatches_per_step, num_ranks)
    cell = np.repeat(np.arange(plan.num_steps), num_rows) * num_ranks + rank
    return np.bincount(cell, costs, plan.num_steps * num_ranks).reshape(plan.num_steps, num_ranks)


def _costs_of_rows(plan: Plan, cost: npt.ArrayLike, num_ranks: int) -> Float64[np.ndarray, " R"]:
    """The cost of every row in the order of the steps; raises ValueError for what `balance_plan` rejects."""
    check_at_least_one(num_ranks=num_ranks)
    if plan.microbatches_per_step % num_ranks:
        raise UserError(
            f"{num_ranks} ranks do not divide the {plan.microbatches_per_step} microbatches of a step, "
            "so that they cannot share it evenly"
        )
    costs = _checked_costs(cost, "cost")
    if plan.is_packed:
        if len(costs) != plan.num_rows:
            raise UserError(
                f"cost has {len(costs):,} values, one for each of the plan's {plan.num_rows:,} rows is needed"
            )
        return costs
    _check_known(plan, len(costs), "cost")
    return costs[plan.sample_ids]


def _check_known(plan: Plan, num_known: int, name: str) -> None:
    unknown = plan.sample_ids[plan.sample_ids >= num_known]
    if len(unknown):
        raise UserError(f"{name} has {num_known:,} values, the plan more samples: {list_offenders(unknown)}")


def _first_rows(plan: Plan) -> Int64[np.ndarray, " S_plus_1"]:
    """The rows before each step."""
    return plan.step_offsets if plan.row_offsets is None else np.searchsorted(plan.row_offsets, plan.step_offsets)


def _tokens_of_samples(plan: Plan, lengths: npt.ArrayLike) -> Int64[np.ndarray, " n"]:
    """The planned tokens of each of `plan.sample_ids`; raises ValueError if the lengths are not those of the plan."""
    checked = check_pair_lengths(lengths) if np.ndim(lengths) == 2 else check_lengths(lengths)
    num_sides = 1 if checked.ndim == 1 else checked.shape[1]
    if num_sides != len(plan.buckets[0].lengths):
        raise UserError(f"lengths of shape {checked.shape} do not go with buckets like {tuple(plan.buckets[0])}")
    _check_known(plan, len(checked), "lengths")
    tokens = plan.planned_lengths(checked)
    tokens = sample_sizes(tokens, plan.pair_size)
    found = np.add.reduceat(tokens, plan.step_offsets[:-1])
    if wrong := np.flatnonzero(found != plan.num_tokens).tolist():
        listed = list_first(f"step {step} has {plan.num_tokens[step]} tokens, not {found[step]}" for step in wrong)
        raise UserError(f"the plan was made with other lengths: {listed}")
    return tokens


def _with_rows(plan: Plan, rows: Int64[np.ndarray, " R"], tokens: Int64[np.ndarray, " n"] | None) -> Plan:
    """The plan with its rows in another order; with the tokens of its samples, if rows change steps."""
    row_offsets = np.arange(plan.num_rows + 1) if plan.row_offsets is None else plan.row_offsets
    moved_offsets = ends_to_offsets(np.cumsum(np.diff(row_offsets)[rows]))
    step_offsets = moved_offsets[_first_rows(plan)]

    def moved(values: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        return take_segments(values, row_offsets, rows, moved_offsets)

    return dataclasses.replace(
        plan,
        sample_ids=moved(plan.sample_ids),
        row_offsets=None if plan.row_offsets is None else moved_offsets,
        step_offsets=step_offsets,
        piece_starts=None if plan.piece_starts is None else moved(plan.piece_starts),
        num_tokens=plan.num_tokens if tokens is None else np.add.reduceat(moved(tokens), step_offsets[:-1]),
    )


def _rank_of(places: Int64[np.ndarray, " n"], microbatches_per_step: int, num_ranks: int) -> Int64[np.ndarray, " n"]:
    """The rank that computes the rows at these places of a step."""
    return places % microbatches_per_step // (microbatches_per_step // num_ranks)


class _Dealing:
    """Which row comes to which place of steps with equally many rows; a unit is what ranks start together."""

    def __init__(self, num_rows: int, num_microbatches: int, num_ranks: int, sync_every: SyncEvery):
        places, per_rank = np.arange(num_rows), num_microbatches // num_ranks
        self._rank = _rank_of(places, num_microbatches, num_ranks)
        self._unit = places % num_microbatches % per_rank if sync_every == "microbatch" else np.zeros_like(places)
        self._by_rank = np.lexsort([self._rank, self._unit])
        is_first = np.diff(self._unit[self._by_rank] * num_ranks + self._rank[self._by_rank], prepend=-1) != 0
        self._first_of_rank = np.flatnonzero(is_first)
        self._first_rank = np.flatnonzero(np.diff(self._unit[self._by_rank][is_first], prepend=-1))

    def waited(self, costs: Int64[np.ndarray, "G n"]) -> Int64[np.ndarray, " G"]:
        """What the slowest rank of each unit has to do, summed over the units of each step."""
        of_ranks = np.add.reduceat(costs[:, self._by_rank], self._first_of_rank, axis=1)
        return np.maximum.reduceat(of_ranks, self._first_rank, axis=1).sum(axis=1)

    def within_steps(self, costs: Int64[np.ndarray, "G n"]) -> Int64[np.ndarray, "G n"]:
        """The row that comes to each place of each step, by its old place."""
        by_cost = np.argsort(-costs, axis=1, kind="stable")
        taken_GxN = np.empty_like(by_cost)
        ends = np.cumsum(np.bincount(self._unit))
        for start, end in itertools.pairwise([0, *ends.tolist()]):
            places = self._by_rank[start:end]
            shared = np.sort(by_cost[:, start:end], axis=1)
            rank = _deal(np.take_along_axis(costs, shared, axis=1), np.bincount(self._rank[places]), at_once=1)
            taken_GxN[:, places] = np.take_along_axis(shared, np.argsort(rank, axis=1, kind="stable"), axis=1)
        is_faster = self.waited(np.take_along_axis(costs, taken_GxN, axis=1)) < self.waited(costs)
        return np.where(is_faster[:, None], taken_GxN, np.arange(costs.shape[1]))

    def over_steps(self, costs: Int64[np.ndarray, "S n"]) -> Int64[np.ndarray, "S n"]:
        """The row that comes to each place of each full step, by its old place, counted over all steps."""
        num_shares = len(costs) * len(self._first_of_rank)
        num_units = len(costs) * len(self._first_rank)
        share = _deal(costs.reshape(1, -1), np.full(num_shares, costs.size // num_shares), at_once=num_shares)[0]
        rows_of_share = stable_argsort(share).reshape(num_shares, -1)
        load = costs.reshape(-1)[rows_of_share].sum(axis=1)
        # Neighbours in what they have to do become a unit, which is the least that slowest ranks can sum up to.
        rows_of_unit = rows_of_share[stable_argsort(-load)].reshape(num_units, -1)
        taken = np.empty_like(rows_of_unit.reshape(costs.shape))
        taken[:, self._by_rank] = rows_of_unit[stable_argsort(rows_of_unit.sum(axis=1))].reshape(costs.shape)
        return taken


def _for_any_ranks(
    rows: Int64[np.ndarray, "G n"], costs: Int64[np.ndarray, " R"], num_microbatches: int
) -> Int64[np.ndarray, "G n"]:
    """The microbatches of full steps in an order that suits any number of ranks."""
    rows_GxBxM = rows.reshape(len(rows), -1, num_microbatches)
    load = costs[rows_GxBxM].sum(axis=1)
    cheaper = np.argsort(-load, axis=1, kind="stable")
    order = np.empty_like(cheaper)
    order[:, _reflected_places(num_microbatches)] = cheaper
    order = np.where(np.ptp(load, axis=1)[:, None] > 0, order, np.arange(num_microbatches))
    return np.take_along_axis(rows_GxBxM, order[:, None], axis=2).reshape(rows.shape)


def _reflected_places(number: int) -> Int64[np.ndarray, " number"]:
    """The places of 0, 1, …: their reflected Gray code, last digit first."""
    values, place, weight, prefix = np.arange(number), np.zeros(number, np.int64), 1, np.zeros(number, np.int64)
    for factor in _prime_factors(number):
        digit = values // (number // weight // factor) % factor
        place += weight * np.where(prefix % 2, factor - 1 - digit, digit)
        prefix, weight = prefix * factor + digit, weight * factor
    return place


def _prime_factors(number: int) -> list[int]:
    """Largest first, each as often as it divides."""
    factors, factor = [], 2
    while number > 1:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return factors[::-1]


def _deal(
    costs: Int64[np.ndarray, "G n"], counts: Int64[np.ndarray, " W"], *, at_once: int
) -> Int64[np.ndarray, "G n"]:
    """The rank that each row is dealt to: the costliest first, so many at a time to as many ranks with the least."""
    num_groups = len(costs)
    num_ranks, per_rank = len(counts), int(counts[-1])
    by_cost = np.argsort(-costs, axis=1, kind="stable")
    ranks = np.empty_like(by_cost)
    loads = np.zeros((num_groups, num_ranks), np.int64)
    start = num_ranks * per_rank
    for round_ in range(per_rank, int(counts[0])):
        to_rank = np.flatnonzero(counts > round_)
        dealt = by_cost[:, start : start + len(to_rank)]
        np.put_along_axis(ranks, dealt, to_rank[None], axis=1)
        loads[:, to_rank] += np.take_along_axis(costs, dealt, axis=1)
        start += len(to_rank)
    rows_GxWxQ = np.empty((num_groups, num_ranks, per_rank), np.int64)
    num_dealt = np.zeros((num_groups, num_ranks), np.int64)
    group = np.arange(num_groups)[:, None]
    for start in range(0, num_ranks * per_rank, at_once):
        dealt = by_cost[:, start : start + at_once]
        open_loads = np.where(num_dealt < per_rank, loads, _FULL)
        to_rank = open_loads.argmin(axis=1)[:, None] if at_once == 1 else np.argsort(open_loads, axis=1, kind="stable")
        rows_GxWxQ[group, to_rank, num_dealt[group, to_rank]] = dealt
        num_dealt[group, to_rank] += 1
        loads[group, to_rank] += costs[group, dealt]
    _swap(rows_GxWxQ, costs, loads)
    np.put_along_axis(
        ranks, rows_GxWxQ.reshape(num_groups, -1), np.repeat(np.arange(num_ranks), per_rank)[None], axis=1
    )
    return ranks


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


def _checked_costs(costs: npt.ArrayLike, name: str) -> Float64[np.ndarray, " n"]:
    values = np.asarray(costs)
    if values.ndim != 1 or values.size == 0 or values.dtype.kind not in "iuf":
        raise UserError(f"{name} must be 1-D with at least one number, not {values.dtype}{list(values.shape)}")
    values = values.astype(np.float64)
    wrong = ~(np.isfinite(values) & (values >= 0))
    if wrong.any():
        raise UserError(f"{name} must be finite and at least 0: {list_offenders(*offenders_where(wrong, values))}")
    return values


def _in_units(costs: Float64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
    """Costs as multiples of 2**-32 of the power of two above the largest, so that integers below 2**32 are exact."""
    _, exponent = np.frexp(costs.max())
    return np.rint(np.ldexp(costs, _COST_BITS - int(exponent))).astype(np.int64)
