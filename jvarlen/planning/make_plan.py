"""Makes plans: from samples, from rows that samples are packed into, and of one step of samples that are new in it.

Letters: N samples, n of them in the plan, R rows, S steps, K buckets, M microbatches per step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Unpack

import numpy as np
import numpy.typing as npt
from jaxtyping import Int64, UInt64

from jvarlen._common.checks import UserError, check_at_least_one, check_choices, if_given, list_first, list_offenders
from jvarlen._common.keywords import check_keywords
from jvarlen.planning._kernels import take_segments
from jvarlen.planning.balance import balance_plan, packed_row_costs
from jvarlen.planning.buckets import (
    AnyBucket,
    Buckets,
    check_buckets,
    check_distinct_lengths,
    resolve_buckets,
    rows_of_steps,
)
from jvarlen.planning.budget import Budget, CostFn, PlanBudgetFields, evaluate_cost, takes_budget
from jvarlen.planning.cost_model import CostModel
from jvarlen.planning.grouping import canonical_steps, emitted_steps, first_buckets, group_by_bucket, sum_segments
from jvarlen.planning.lengths import Overlong, PackedOverlong, check_features, check_sample_lengths, sample_sizes
from jvarlen.planning.make_buckets import choose_any_buckets
from jvarlen.planning.order import Order, Pacing, as_order, check_difficulty, check_seed
from jvarlen.planning.packing import Packing, pack_by_method, row_sizes_of, rules_of_packing
from jvarlen.planning.placing import num_rows_at_once
from jvarlen.planning.plan import Plan, check_plan
from jvarlen.planning.row_lengths import choose_candidate, choose_packed_buckets, decide_packing
from jvarlen.planning.rules import PackingChoice, PlanRules, RowPacking, SamplesPerRow
from jvarlen.planning.step_plans import plan_packed_steps, plan_sized_steps, put_samples_into_rows
from jvarlen.planning.step_sizes import StepSize, StepSizes, step_sizes_of
from jvarlen.planning.windows import window_starts

__all__ = ["make_plan", "plan_rows", "plan_samples", "plan_step"]


@takes_budget
def make_plan(
    lengths: npt.ArrayLike,
    buckets: Buckets[AnyBucket] | Sequence[tuple[int, ...]] | Budget | None = None,
    *,
    order: str | Order | npt.ArrayLike = "shuffle",
    difficulty: npt.ArrayLike | None = None,
    pacing: Pacing | None = None,
    packing: PackingChoice = "padded",
    row_lengths: Sequence[int] | None = None,
    overlong: PackedOverlong = "error",
    sequences_per_step: StepSize | None = None,
    tokens_per_step: StepSize | None = None,
    group_ids: npt.ArrayLike | None = None,
    samples_per_row: SamplesPerRow | None = None,
    seed: int = 0,
    epoch: int = 0,
    **budget: Unpack[PlanBudgetFields],
) -> Plan:
    """Plans an epoch: every sample exactly once, in steps of the buckets' shapes.

    A sample goes to the smallest bucket that holds it. The samples of a bucket, in order, are cut into steps of M ×
    rows; only a bucket's last step can be short, and padding rows fill it.

    With `sequences_per_step` or `tokens_per_step`, the samples in their order are cut into steps, and a step is one
    group or several, of M microbatches of one bucket each. From the longest length down, while samples of that length
    are left, they open a group of the most rows while it fills, then one of the least rows that hold the rest, whose
    free rows take the longest samples still left. Groups of a step come by bucket, rows of a group in the step's order.
    Buckets that are not given are chosen for these steps: lengths and rows by a search that counts the groups of up to
    128 of the steps; of packed rows and of several lengths only the rows, where one length may come with several
    numbers of them.

    Args:
      lengths: integers[N], tokens per sample. Integers[N, D], D ≥ 2 lengths per sample: source and target, or frames,
        height and width; all but the first may be 0.
      buckets: `Buckets` of `make_buckets` or of another plan. Or, with M = 1, (rows, length) pairs, lengths strictly
        ascending; or (rows, first length, second length, …). One length may have several numbers of rows,
        ascending, where steps have several groups. None, or a `Budget`: they are chosen as `make_buckets` does.
      order: a word or an array of sample ids, as in `sample_order`, or an `Order`. A sample of several lengths is as
        long as its `size`. Steps come, with `"length"`, by bucket, ascending; with `"length_descending"`, descending;
        with `"shuffle"`, at random; with `"dataset"`, an array, or any order with a difficulty other than the length,
        a block size or pacing, when their last sample arrives, and short steps at the end.
      difficulty: as in `sample_order`.
      pacing: a function from the step, counted over all epochs, to the share of the samples that it may draw from,
        easiest first, as `linear_pacing` makes. As long as admitted samples are left, no step holds
        another. Needs order `"length"` or `"length_descending"`, and nothing else that orders steps.
      packing: `"padded"`: each sample is a row. `"best_fit"` and `"wrapped"`: rows hold several samples, as
        `pack_samples` packs them; with `"shuffle"`, every epoch packs them differently. Rows of `"wrapped"` otherwise
        come in the order of the samples. Packed samples take no difficulty, no pacing, and a block size only with
        `"shuffle"`. With steps of a given size, each step is packed by itself, without blocks. `"auto"`: padded or
        `"best_fit"`, whichever takes fewer seconds an epoch by the `cost`, compiling included; a setting that only one
        of them has, such as `row_lengths`, decides. `Plan.reason` says why. It excludes steps of a given size.
      row_lengths: the lengths of packed rows, strictly ascending, where the buckets are not given; for pairs the two
        lengths that all rows have. None: `choose_row_lengths` chooses them; without a cost, and for `"wrapped"`, there
        is one.
      overlong: what happens to samples longer than the longest bucket: `"error"`, `"drop"`, or for packed samples
        `"split"`. Or they are cut to it: `"truncate"` keeps their beginning, `"truncate_start"` their end, and
        `"truncate_random"` a window that the seed draws anew in every epoch. Samples of several lengths are cut
        only where they are packed, each length by itself, and are not split.
      sequences_per_step: how many samples a step has, the last one of an epoch fewer: an integer; integers, one for
        each step of all epochs; or f(step, tokens_seen), from the steps and tokens before it in all epochs. It excludes
        pacing and `new_shape_every`. `shuffle_steps` and `longest_first` move whole steps after they are cut: sizes of
        arrays and functions are in the order of cutting.
      tokens_per_step: likewise, how many tokens a step has at most; no sample may be longer. Wrapped rows and split
        samples, whose samples are cut, take this alone; steps of wrapped rows have exactly so many.
      group_ids: integers[N] of at least 0, of samples that share a step: rollouts of a prompt, a query with its
        negatives. In the order, the samples of a group id come together, where the first of them came. A step then has
        at most `sequences_per_step` samples: it ends before the group id for which it has no room. Samples that are
        dropped leave their group id. It needs a step of a given size, and excludes wrapped rows.
      samples_per_row: the most samples of a packed row, an integer or one for each bucket, ascending; a row that holds
        so many is full. Plans of other samples then have the same shapes. None: as many as fit.
      seed: 0 ≤ seed < 2**63.
      epoch: 0 ≤ epoch < 2**63.
      budget: the fields of a `Budget` as keywords, to choose the buckets; with given buckets only `size` and
        `num_microbatches`, M, the microbatches of one optimizer update, in place of those of the `Buckets`.

    Returns:
      A `Plan`, which depends on M, but not on the number of devices or processes.

    Raises:
      ValueError: arguments that are not as described, or exclude each other; samples are listed as id, value, limit.

    Example:
      >>> plan = make_plan([3, 1, 4, 2, 8], [(2, 4), (1, 8)], order="length", num_microbatches=2)
      >>> plan.num_steps, plan.rows(0).tolist()
      (2, [[1, 0], [3, 2]])
      >>> make_plan([3, 1, 4, 2, 8], max_tokens=8, max_shapes=2).buckets.shapes
      (Bucket(rows=2, length=4), Bucket(rows=1, length=8))

    References:
      Batches of near-equal lengths, shuffled: Ott et al. 2019, "fairseq". Pacing: Platanios et al. 2019,
      "Competence-based Curriculum Learning for Neural Machine Translation".
    """
    if isinstance(lengths, Packing) or isinstance(packing, Packing):
        raise UserError(
            'make_plan takes no Packing: give it the lengths of the samples and packing="best_fit" or "wrapped", with '
            "row_lengths= for those of the rows"
        )
    order = as_order(order)
    check_seed(seed, epoch)
    check_choices(packing=(packing, PackingChoice))
    bucketing = resolve_buckets(buckets, budget)
    checked = check_sample_lengths(lengths)
    others = order.sample_blocks, order.shuffle_steps, order.new_shape_every
    if pacing is not None and (not order.is_by("length", "length_descending") or any(others)):
        raise UserError(
            "pacing decides when samples come: it needs order 'length' or 'length_descending' without block_size, "
            f"shuffle_steps and new_shape_every, not {order}"
        )
    if samples_per_row is not None and packing == "padded":
        raise UserError(f"samples_per_row ({samples_per_row}) is for packed rows: a row holds one sample otherwise")
    if row_lengths is not None and (packing == "padded" or isinstance(bucketing, Buckets)):
        raise UserError(f"row_lengths ({row_lengths}) is for packed rows, whose buckets are chosen by a budget")
    step_sizes = step_sizes_of(sequences_per_step, tokens_per_step, group_ids, len(checked))
    rules = PlanRules(
        order, difficulty, int(seed), int(epoch), pacing, overlong, packing, row_lengths, samples_per_row, step_sizes
    )
    if packing != "auto":
        return _plan_epoch(checked, bucketing, rules, "")
    if step_sizes is not None:
        raise UserError(
            f'packing="auto" does not go with {step_sizes.name}: give packing="padded", "best_fit" or "wrapped"'
        )
    decided, bucketing, reason = _choose_packing(checked, bucketing, rules)
    return _plan_epoch(checked, bucketing, rules._replace(packing=decided), reason)


@check_keywords
def plan_step(
    lengths: npt.ArrayLike,
    buckets: Buckets[AnyBucket] | Sequence[tuple[int, ...]],
    *,
    max_tokens: int | None = None,
    num_microbatches: int | None = None,
    packing: RowPacking = "padded",
    samples_per_row: SamplesPerRow | None = None,
    cost: CostFn | None = None,
) -> Plan:
    """Plans one step of all samples, in microbatches of given buckets: for data that are new in every step.

    It is a plan of `make_plan` with all samples in one step, in their order. Its groups are those of
    `sequences_per_step`. Every rank computes as many microbatches of each group. Every process must give the lengths of
    all samples, those of all processes in the order of ranks.

    Args:
      lengths: integers[N] or integers[N, 2], as in `make_plan`; N ≥ 1.
      buckets: as in `make_plan`, given.
      max_tokens: the most tokens of a microbatch, padding included; larger buckets are an error. None for no limit.
      num_microbatches: M; None: that of the `Buckets`, or 1.
      packing: as in `make_plan`, but not `"auto"`.
      samples_per_row: as in `make_plan`. Packed steps have the same shapes whatever the lengths only where it is given.
      cost: as in `Budget`, to balance the rows of the step over ranks, as `balance_plan` does, by the cost of a row as
        long as its sample; packed rows need a `CostModel`. None: rows are dealt in order.

    Returns:
      A `Plan` of one step, whose `sample_ids` are places in `lengths`.

    Raises:
      ValueError: arguments that are not as described; no samples; samples that no bucket holds are listed as id, value,
        limit.

    Example:
      >>> plan = plan_step([3, 7, 2, 6, 1], [(2, 4), (1, 8)])
      >>> [plan.rows(group).tolist() for group in plan.groups(0)]
      [[[0, 2]], [[4, -1]], [[1]], [[3]]]
    """
    check_choices(packing=(packing, RowPacking))
    check_at_least_one(**if_given(max_tokens=max_tokens))
    checked, given = check_sample_lengths(lengths), check_buckets(buckets, num_microbatches)
    check_features(given.shapes, checked)
    limit = np.inf if max_tokens is None else max_tokens
    padded = given.padded_tokens.tolist()
    if wrong := [f"{each}: {n:,}" for each, n in zip(given.shapes, padded, strict=True) if n > limit]:
        raise UserError(f"buckets of more tokens than max_tokens ({max_tokens:,}): {list_first(wrong)}")
    is_long = first_buckets(checked, given.lengths, "error") == len(given.shapes)
    if packing != "wrapped" and is_long.any():
        listed = list_offenders(np.flatnonzero(is_long), checked[is_long], given.lengths[-1].tolist())
        raise UserError(f"samples that no bucket holds: {listed}")
    step_sizes = StepSizes("tokens_per_step", int(sample_sizes(checked, given.size).sum()))
    rules = PlanRules(Order("dataset"), packing=packing, samples_per_row=samples_per_row, step_sizes=step_sizes)
    if packing == "padded":
        if samples_per_row is not None:
            raise UserError(f"samples_per_row ({samples_per_row}) is for packed rows: a row holds one sample otherwise")
        plan = plan_samples(checked, given, rules)
    else:
        plan = plan_packed_steps(checked, given, rules, step_sizes)
    plan = dataclasses.replace(plan, sized_by="plan_step")
    if cost is None:
        return plan
    if packing != "padded":
        if not isinstance(cost, CostModel):
            raise UserError(f"packed rows are balanced by a CostModel, not {cost!r}")
        return balance_plan(plan, packed_row_costs(plan, checked, cost))
    sides = [checked] if checked.ndim == 1 else list(checked.T)
    return balance_plan(plan, evaluate_cost(cost, np.ones(len(checked), np.int64), *sides))


def _plan_epoch(
    lengths: Int64[np.ndarray, " N *sides"], bucketing: Buckets[AnyBucket] | Budget, rules: PlanRules, reason: str
) -> Plan:
    """The plan of an epoch, which plans others in its buckets."""
    step_sizes = rules.step_sizes
    if step_sizes is not None and isinstance(bucketing, Budget) and rules.epoch > 0:
        # Shapes are chosen for the steps of epoch 0, so that all epochs have the same.
        bucketing = _plan_epoch(lengths, bucketing, rules._replace(epoch=0), reason).buckets
    plan = (plan_samples if rules.packing == "padded" else _pack_and_plan)(lengths, bucketing, rules)
    starts = window_starts(plan.sample_ids, lengths, plan.longest, rules)
    starts = plan.chunk_starts if starts is None else starts
    plan = dataclasses.replace(plan, reason=reason, chunk_starts=starts, epoch=rules.epoch)
    if step_sizes is not None:
        group_ids = None if step_sizes.group_ids is None else step_sizes.group_ids.of_samples
        plan = dataclasses.replace(plan, sized_by="make_plan", group_ids=group_ids)

    def plan_epoch(epoch: int) -> Plan:
        if epoch == rules.epoch:
            return plan
        return _plan_epoch(lengths, plan.buckets, rules._replace(row_lengths=None, epoch=epoch), reason)

    return dataclasses.replace(plan, plan_epoch=plan_epoch)


def plan_samples(
    lengths: Int64[np.ndarray, " N *sides"], bucketing: Buckets[AnyBucket] | Budget, rules: PlanRules
) -> Plan:
    """The plan of samples of checked lengths, one sample a row."""
    if rules.overlong == "split":
        raise UserError('overlong="split" is for packed rows: give packing="best_fit", or another overlong')
    check_choices(overlong=(rules.overlong, Overlong))
    if rules.step_sizes is not None:
        plan = plan_sized_steps(lengths, bucketing, rules, rules.step_sizes)
    else:
        if isinstance(bucketing, Budget):
            bucketing = choose_any_buckets(lengths, bucketing, rules.overlong)
        plan = _plan_lengths(lengths, bucketing, rules)
    check_plan(plan)
    return plan


def plan_rows(packing: Packing, buckets: Buckets[AnyBucket], rules: PlanRules) -> Plan:
    """The plan of packed rows in the order of the rules."""
    if buckets.size != "sum":
        raise UserError(f"size ({buckets.size!r}) is for samples of several lengths each that are not packed")
    plan = put_samples_into_rows(_plan_lengths(packing.num_tokens, buckets, rules), packing)
    check_plan(plan)
    return plan


def _pack_and_plan(
    lengths: Int64[np.ndarray, " N *sides"], bucketing: Buckets[AnyBucket] | Budget, rules: PlanRules
) -> Plan:
    """The plan of samples that are packed by a method."""
    if lengths.ndim == 2 and lengths.shape[1] > 2:
        raise UserError(f'samples of {lengths.shape[1]} lengths are not packed: rows hold one, packing="padded"')
    if rules.difficulty is not None or rules.pacing is not None:
        raise UserError(
            "packed rows mix samples, so they take neither difficulty nor pacing: give order=ids and tokens_per_step="
        )
    rules_of_samples, rules_of_rows = rules_of_packing(rules)
    limits = packing = None
    if isinstance(bucketing, Buckets):
        buckets = bucketing
        check_features(buckets.shapes, lengths)
    else:
        limits = bucketing
        buckets, packing = choose_packed_buckets(lengths, limits, rules)
    if rules.step_sizes is not None:
        return plan_packed_steps(lengths, buckets, rules, rules.step_sizes, limits)
    is_shuffled = rules.order.is_by("shuffle")
    if packing is None or (rules.epoch > 0 and is_shuffled):
        check_distinct_lengths(buckets)
        row_lengths = [length for bucket in buckets.shapes for length in bucket.lengths]
        packing = pack_by_method(lengths, row_lengths, rules_of_samples)
    plan = plan_rows(packing, buckets, rules_of_rows)
    if rules.packing == "wrapped":
        return plan
    repacking = _Repacking(lengths, packing, rules_of_samples) if is_shuffled else _UNORDERED
    return dataclasses.replace(plan, repacking=repacking)


def _choose_packing(
    lengths: Int64[np.ndarray, " N *sides"], bucketing: Buckets[AnyBucket] | Budget, rules: PlanRules
) -> tuple[RowPacking, Buckets[AnyBucket] | Budget, str]:
    """Chooses what packing="auto" stands for: the method, the buckets or what chooses them, and why."""
    if isinstance(bucketing, Buckets):
        raise UserError('packing="auto" chooses the buckets: give max_tokens and cost= in their place')
    order = rules.order
    for_packed = {
        "row_lengths": rules.row_lengths is not None,
        "samples_per_row": rules.samples_per_row is not None,
        'overlong="split"': rules.overlong == "split",
    }
    for_single = {
        "difficulty": rules.difficulty is not None,
        "pacing": rules.pacing is not None,
        "order": not order.is_by("shuffle"),
        "block_size": order.sample_blocks is not None,
        "strategy": bucketing.strategy != "optimal" and isinstance(bucketing.strategy, str),
    }
    decided, reason = decide_packing(*([name for name in each if each[name]] for each in (for_packed, for_single)))
    if decided != "auto":
        return decided, bucketing, reason
    candidate, reason = choose_candidate(lengths, bucketing, rules)
    return candidate.method, candidate.buckets, reason


def _plan_lengths(lengths: Int64[np.ndarray, " N *sides"], buckets: Buckets[AnyBucket], rules: PlanRules) -> Plan:
    """The plan of rows of these lengths."""
    check_distinct_lengths(buckets)
    check_features(buckets.shapes, lengths)
    sizes = sample_sizes(lengths, buckets.size)
    difficulty = rules.difficulty
    if difficulty is not None and np.array_equal(check_difficulty(difficulty, len(lengths)), sizes):
        rules = rules._replace(difficulty=None)
    rows_per_step = rows_of_steps(buckets)
    samples = group_by_bucket(lengths, sizes, buckets.lengths, rows_per_step, rules)
    steps = canonical_steps(samples.num_samples, rows_per_step)
    last_place = None if samples.place is None else samples.place[steps.offsets[1:] - 1]
    emitted = emitted_steps(steps, rules, last_place, len(lengths), buckets.row_sizes)
    offsets, ids = steps.offsets, samples.ids
    if (np.diff(emitted) != 1).any():
        offsets = np.cumulative_sum(np.diff(steps.offsets)[emitted], include_initial=True)
        ids = take_segments(samples.ids, steps.offsets, emitted, offsets)
    return Plan(
        buckets=buckets,
        num_microbatches=buckets.num_microbatches,
        group_bucket=steps.bucket[emitted],
        group_offsets=offsets,
        sample_ids=ids,
        group_tokens=sum_segments(samples.lengths_by_id, steps.offsets, samples.ids)[emitted],
        overlong=rules.overlong,
        num_dropped=samples.num_dropped,
        num_truncated=samples.num_truncated,
        new_shape_every=int(rules.order.new_shape_every),
    )


_UNORDERED = "a row has samples from anywhere in the order, so steps do not follow it; with tokens_per_step= they do"


@dataclasses.dataclass(frozen=True, eq=False)
class _Repacking:
    """Shuffled samples, which every epoch packs differently; the text says how much the rows differ."""

    lengths: Int64[np.ndarray, " N *sides"]
    packing: Packing
    rules: PlanRules

    def __str__(self) -> str:
        what, block_size = "pairs" if self.lengths.ndim == 2 else "samples", self.packing.block_size
        rules = self.rules._replace(order=Order(block_size=block_size))
        of_epochs = (rules._replace(epoch=epoch) for epoch in (0, 1))
        first, second = (pack_by_method(self.lengths, self.packing.row_lengths, each) for each in of_epochs)
        parts = ["packed all at once" if block_size is None else f"packed in blocks of {block_size:,} {what}"]
        if block_size is not None and what == "samples":  # the time is quadratic in pairs
            sizes = row_sizes_of(first.row_lengths, rules._replace(overlong="error"), is_pairs=False)
            more = first.num_rows - num_rows_at_once(first.sample_lengths, sizes)
            parts.append(f"rows more than all at once: {more:,}")
        keys = np.random.default_rng(0).integers(1, 2**63, len(self.lengths), dtype=np.uint64)
        here, there = (_sums_of_rows(packing, keys) for packing in (first, second))
        recurring = (
            f"rows of several {what} that recur in epoch 1: {np.isin(here, there).mean():.1%}" if len(here) else ""
        )
        return "; ".join([*parts, recurring or f"no row holds several {what}"])


def _sums_of_rows(packing: Packing, keys: UInt64[np.ndarray, " N"]) -> UInt64[np.ndarray, " r"]:
    """Sums of the keys of the samples in each row of several samples; they identify rows."""
    chunk_keys = keys[packing.sample_ids]
    if packing.chunk_starts is not None:
        chunk_keys *= (2 * packing.chunk_starts + 1).view(np.uint64)
    return np.add.reduceat(chunk_keys, packing.row_offsets[:-1])[np.diff(packing.row_offsets) > 1]
