"""Plans whose steps have a given number of samples or tokens, each in groups of several buckets.

Letters: N samples, K buckets, S steps.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from jaxtyping import Int64, Integer

from jvarlen._common.checks import UserError
from jvarlen.planning import packing as packings
from jvarlen.planning._kernels import take_segments
from jvarlen.planning.buckets import AnyBucket, Bucket, Buckets, CountedSamples
from jvarlen.planning.budget import Budget
from jvarlen.planning.group_shapes import choose_group_shapes, spread_lengths
from jvarlen.planning.grouping import first_buckets, move_steps, sum_segments
from jvarlen.planning.lengths import FittedLengths, apply_overlong, check_features, is_cut_by, sample_sizes
from jvarlen.planning.make_buckets import choose_any_buckets
from jvarlen.planning.order import order_samples
from jvarlen.planning.packing import Packing
from jvarlen.planning.placing import RowSizes, place_in_rows
from jvarlen.planning.plan import Plan, check_plan
from jvarlen.planning.rules import PlanRules
from jvarlen.planning.step_groups import StepGroups, group_steps, permute_steps
from jvarlen.planning.step_sizes import OrderedSamples, StepSizes

__all__ = ["plan_packed_steps", "plan_sized_steps", "put_samples_into_rows"]


def plan_sized_steps(
    lengths: Int64[np.ndarray, " N *sides"],
    bucketing: Buckets[AnyBucket] | Budget,
    rules: PlanRules,
    step_sizes: StepSizes,
) -> Plan:
    """The plan of samples of checked lengths, one sample a row, in steps of these sizes."""
    overlong, buckets = rules.overlong, _holding_buckets(lengths, bucketing, rules)
    check_features(buckets.shapes, lengths)
    longest = buckets.lengths[-1]
    is_cut = is_cut_by(overlong) and lengths.ndim == 1
    cut_lengths = np.minimum(lengths, longest) if is_cut else lengths
    bucket = first_buckets(cut_lengths, buckets.lengths, overlong)
    is_long = lengths > longest if is_cut else bucket == len(buckets.shapes)
    sizes = sample_sizes(lengths, buckets.size)
    cut_sizes = cut_lengths if lengths.ndim == 1 else sizes

    def fitting(ids: Int64[np.ndarray, " m"]) -> OrderedSamples:
        kept = ids[~is_long[ids]] if overlong == "drop" else ids
        return OrderedSamples(kept, cut_sizes[kept])

    ids = _ids_of(sizes, rules, step_sizes)
    long_ids = ids[is_long[ids]]
    num_fitting = len(ids) - len(long_ids)
    num_dropped, num_truncated = apply_overlong(overlong, long_ids, lengths[long_ids], longest.tolist(), num_fitting)
    samples = fitting(ids)
    offsets = step_sizes.cut(
        samples, rules.epoch, lambda epoch: fitting(_ids_of(sizes, rules._replace(epoch=epoch), step_sizes))
    )
    in_order = cut_lengths[samples.ids]
    if isinstance(bucketing, Budget):
        buckets = choose_group_shapes(
            buckets, in_order, offsets, bucketing, lengths_given=not _chooses_lengths(lengths, bucketing)
        )
    bucket = first_buckets(in_order, buckets.lengths, overlong)
    groups = group_steps(offsets, in_order, samples.tokens, bucket, buckets)
    plan = _plan_of(groups, samples.tokens, buckets, rules, len(lengths))
    return dataclasses.replace(
        plan,
        sample_ids=samples.ids[plan.sample_ids],
        overlong=overlong,
        num_dropped=num_dropped,
        num_truncated=num_truncated,
    )


def plan_packed_steps(
    lengths: Int64[np.ndarray, " N *sides"],
    buckets: Buckets[AnyBucket],
    rules: PlanRules,
    step_sizes: StepSizes,
    limits: Budget | None = None,
) -> Plan:
    """The plan of samples that are packed step by step, in steps of these sizes; limits choose the rows of groups."""
    if rules.order.sample_blocks is not None:
        raise UserError(f"block_size ({rules.order.block_size}): {step_sizes.name} packs every step by itself")
    is_wrapped = rules.packing == "wrapped"
    if is_wrapped and step_sizes.group_ids is not None:
        raise UserError(
            'group_ids keep samples in one step, and wrapped rows cut them at its end: give packing="best_fit"'
        )
    if (is_wrapped or rules.overlong == "split") and not step_sizes.counts_tokens:
        raise UserError(f"wrapped rows and split samples are cut: give tokens_per_step in place of {step_sizes.name}")
    sizes = _row_sizes(buckets, rules)
    totals = sample_sizes(lengths)

    def fit(epoch: int) -> tuple[Int64[np.ndarray, " m"], FittedLengths]:
        ids = _ids_of(totals, rules._replace(epoch=epoch), step_sizes)
        if is_wrapped:
            return ids, FittedLengths(lengths[ids], np.arange(len(ids)))
        return ids, packings.fit_rows(lengths[ids], sizes, rules.overlong, ids)

    def samples_of(ids: Int64[np.ndarray, " m"], fitted: FittedLengths) -> OrderedSamples:
        return OrderedSamples(ids[fitted.place], sample_sizes(fitted.lengths))

    ids, fitted = fit(rules.epoch)
    offsets = step_sizes.cut(
        samples_of(ids, fitted), rules.epoch, lambda epoch: samples_of(*fit(epoch)), splits=is_wrapped
    )
    if is_wrapped:
        fitted, rows = packings.lay_end_to_end(fitted.lengths, offsets[1:], sizes)
    else:
        rows = place_in_rows(fitted.lengths, offsets[1:], sizes, carries=False)
    packing = packings.make_packing(lengths, ids, fitted, rows, sizes, rules)
    tokens = packing.num_tokens
    begins = np.cumulative_sum(tokens, include_initial=True) if is_wrapped else packing.row_offsets
    rows_of_steps = np.searchsorted(begins, offsets)
    if limits is not None:
        buckets = choose_group_shapes(buckets, tokens, rows_of_steps, limits, lengths_given=True)
    bucket = first_buckets(tokens, buckets.lengths, "error")
    groups = group_steps(rows_of_steps, tokens, sample_sizes(tokens), bucket, buckets)
    plan = put_samples_into_rows(_plan_of(groups, sample_sizes(tokens), buckets, rules, len(lengths)), packing)
    check_plan(plan)
    return plan


def _chooses_lengths(lengths: Int64[np.ndarray, " N *sides"], limits: Budget) -> bool:
    """Whether lengths are chosen for the steps, and not by a strategy, or several lengths for all samples at once."""
    return lengths.ndim == 1 and limits.strategy == "optimal"


def _holding_buckets(
    lengths: Int64[np.ndarray, " N *sides"], bucketing: Buckets[AnyBucket] | Budget, rules: PlanRules
) -> Buckets[AnyBucket]:
    """Buckets that hold all samples: the given ones, those of a strategy, or of the lengths that steps choose from."""
    if isinstance(bucketing, Buckets):
        return bucketing
    if not _chooses_lengths(lengths, bucketing):
        return choose_any_buckets(lengths, bucketing, rules.overlong)
    counted = CountedSamples(lengths, bucketing, rules.overlong)
    rounded = counted.histogram.rounded
    counted.most_rows(rounded)  # raises ValueError where none fits
    chosen = spread_lengths(counted.histogram, bucketing.max_shapes)
    return Buckets(tuple(Bucket(1, length) for length in chosen.tolist()), bucketing.num_microbatches)


def _row_sizes(buckets: Buckets[AnyBucket], rules: PlanRules) -> RowSizes:
    """The rows that are packed for buckets, some of which have the same lengths."""
    lengths = [bucket.lengths for bucket in buckets.shapes]
    most = dict(zip(lengths, packings.check_samples_per_row(rules.samples_per_row, lengths).tolist(), strict=True))
    row_lengths = list(itertools.chain.from_iterable(most))
    given = None if rules.samples_per_row is None else list(most.values())
    return packings.row_sizes_of(row_lengths, rules._replace(samples_per_row=given), is_pairs=len(lengths[0]) == 2)


def _ids_of(sizes: Int64[np.ndarray, " N"], rules: PlanRules, step_sizes: StepSizes) -> Int64[np.ndarray, " m"]:
    """The order of samples of an epoch."""
    if rules.pacing is not None or rules.order.new_shape_every:
        raise UserError(f"pacing and new_shape_every take steps by their buckets: {step_sizes.name} excludes them")
    ids = order_samples(sizes, rules.order, difficulty=rules.difficulty, seed=rules.seed, epoch=rules.epoch)
    return ids if step_sizes.group_ids is None else step_sizes.group_ids.bring_together(ids)


def _plan_of(
    groups: StepGroups,
    tokens: Integer[np.ndarray, " n"],
    buckets: Buckets[AnyBucket],
    rules: PlanRules,
    num_samples: int,
) -> Plan:
    """The plan of rows with these tokens, whose `sample_ids` are their places."""
    emitted = move_steps(
        np.arange(len(groups.step_groups) - 1),
        groups.bucket,
        groups.step_groups[:-1],
        rules,
        num_samples,
        buckets.row_sizes,
        shuffles=rules.order.shuffle_steps,
    )
    groups = permute_steps(groups, emitted)
    return Plan(
        buckets=buckets,
        num_microbatches=buckets.num_microbatches,
        group_bucket=groups.bucket,
        group_offsets=groups.offsets,
        group_tokens=sum_segments(tokens, groups.offsets, groups.places),
        step_groups=groups.step_groups,
        sample_ids=groups.places,
    )


def put_samples_into_rows(plan_of_rows: Plan, packing: Packing) -> Plan:
    """The plan with the samples of each row in place of the row."""
    rows = plan_of_rows.sample_ids
    row_offsets = np.cumulative_sum(np.diff(packing.row_offsets)[rows], include_initial=True)

    def take_rows(values: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " m"]:
        return take_segments(values, packing.row_offsets, rows, row_offsets)

    return dataclasses.replace(
        plan_of_rows,
        sample_ids=take_rows(packing.sample_ids),
        chunk_starts=None if packing.chunk_starts is None else take_rows(packing.chunk_starts),
        group_offsets=row_offsets[plan_of_rows.group_offsets],
        row_offsets=row_offsets,
        overlong=packing.overlong,
        num_dropped=packing.num_dropped,
        num_truncated=packing.num_truncated,
        samples_per_row=packing.samples_per_row([bucket.lengths for bucket in plan_of_rows.buckets.shapes]),
    )
