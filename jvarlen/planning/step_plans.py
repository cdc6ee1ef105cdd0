"""Plans whose steps have a given number of samples or tokens, each in groups of several buckets.

Letters: N samples, K buckets, S steps.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from jaxtyping import Int64, Integer

from jvarlen._common.checks import UserError
from jvarlen.planning.buckets import AnyBucket, Bucket, Buckets, CountedSamples, choose_buckets
from jvarlen.planning.budget import Budget
from jvarlen.planning.group_shapes import choose_group_rows, choose_group_shapes
from jvarlen.planning.grouping import Ordering, first_buckets, move_steps, sum_segments
from jvarlen.planning.lengths import (
    FittedLengths,
    Overlong,
    PackedOverlong,
    apply_overlong,
    check_features,
    is_cut_by,
    sample_sizes,
)
from jvarlen.planning.order import order_samples
from jvarlen.planning.packed_plans import put_samples_into_rows
from jvarlen.planning.packing import (
    PackingMethod,
    SamplesPerRow,
    check_samples_per_row,
    fit_rows,
    lay_end_to_end,
    make_packing,
    row_sizes_of,
)
from jvarlen.planning.placing import RowSizes, place_in_rows
from jvarlen.planning.plan import Plan, check_plan
from jvarlen.planning.several_lengths import choose_joint_buckets
from jvarlen.planning.step_groups import StepGroups, group_steps, permute_steps
from jvarlen.planning.step_sizes import OrderedSamples, StepSizes

__all__ = ["plan_packed_steps", "plan_sized_steps"]


def plan_sized_steps(
    lengths: Int64[np.ndarray, " N *sides"],
    bucketing: Buckets[AnyBucket] | Budget,
    ordering: Ordering,
    overlong: Overlong,
    step_sizes: StepSizes,
) -> Plan:
    """The plan of samples of checked lengths, one sample a row, in steps of these sizes."""
    buckets = _holding_buckets(lengths, bucketing, overlong)
    check_features(buckets.shapes, lengths)
    bucket_lengths = _lengths_of(buckets, lengths.ndim)
    is_cut = is_cut_by(overlong) and lengths.ndim == 1
    cut_lengths = np.minimum(lengths, bucket_lengths[-1]) if is_cut else lengths
    bucket = first_buckets(cut_lengths, bucket_lengths, overlong)
    is_long = lengths > bucket_lengths[-1] if is_cut else bucket == len(bucket_lengths)
    sizes = sample_sizes(lengths, buckets.size)
    cut_sizes = cut_lengths if lengths.ndim == 1 else sizes

    def fitting(ids: Int64[np.ndarray, " m"]) -> OrderedSamples:
        kept = ids[~is_long[ids]] if overlong == "drop" else ids
        return OrderedSamples(kept, cut_sizes[kept])

    ids = _ids_of(sizes, ordering, ordering.epoch, step_sizes)
    long_ids = ids[is_long[ids]]
    num_fitting = len(ids) - len(long_ids)
    num_dropped, num_truncated = apply_overlong(
        overlong, long_ids, lengths[long_ids], bucket_lengths[-1].tolist(), num_fitting
    )
    samples = fitting(ids)
    offsets = step_sizes.cut(
        samples, ordering.epoch, lambda epoch: fitting(_ids_of(sizes, ordering, epoch, step_sizes))
    )
    if isinstance(bucketing, Budget):
        if _chooses_lengths(lengths, bucketing):
            buckets = choose_group_shapes(lengths, samples.ids, offsets, bucketing, overlong)
        else:
            buckets = choose_group_rows(buckets, lengths, samples.ids, offsets, bucketing)
        bucket = first_buckets(cut_lengths, _lengths_of(buckets, lengths.ndim), overlong)
    groups = group_steps(offsets, cut_lengths[samples.ids], samples.tokens, bucket[samples.ids], buckets)
    plan = _plan_of(groups, samples.tokens, buckets, ordering, len(lengths))
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
    method: PackingMethod,
    samples_per_row: SamplesPerRow | None,
    ordering: Ordering,
    overlong: PackedOverlong,
    step_sizes: StepSizes,
    limits: Budget | None = None,
) -> Plan:
    """The plan of samples that are packed step by step, in steps of these sizes; limits choose the rows of groups."""
    if ordering.order.sample_blocks is not None:
        raise UserError(f"block_size ({ordering.order.block_size}): {step_sizes.name} packs every step by itself")
    is_wrapped = method == "wrapped"
    if is_wrapped and step_sizes.group_ids is not None:
        raise UserError(
            'group_ids keep samples in one step, and wrapped rows cut them at its end: give packing="best_fit"'
        )
    if (is_wrapped or overlong == "split") and not step_sizes.counts_tokens:
        raise UserError(f"wrapped rows and split samples are cut: give tokens_per_step in place of {step_sizes.name}")
    sizes = _row_sizes(buckets, method, overlong, samples_per_row)
    totals = sample_sizes(lengths)

    def fit(epoch: int) -> tuple[Int64[np.ndarray, " m"], FittedLengths]:
        ids = _ids_of(totals, ordering, epoch, step_sizes)
        if is_wrapped:
            return ids, FittedLengths(lengths[ids], np.arange(len(ids)))
        return ids, fit_rows(lengths[ids], sizes, overlong, ids)

    def samples_of(ids: Int64[np.ndarray, " m"], fitted: FittedLengths) -> OrderedSamples:
        return OrderedSamples(ids[fitted.place], sample_sizes(fitted.lengths))

    ids, fitted = fit(ordering.epoch)
    offsets = step_sizes.cut(
        samples_of(ids, fitted), ordering.epoch, lambda epoch: samples_of(*fit(epoch)), splits=is_wrapped
    )
    if is_wrapped:
        fitted, rows = lay_end_to_end(fitted.lengths, offsets[1:], sizes)
    else:
        rows = place_in_rows(fitted.lengths, offsets[1:], sizes, carries=False)
    packing = make_packing(lengths, ids, fitted, rows, sizes, method, overlong)
    tokens = packing.num_tokens
    begins = np.cumulative_sum(tokens, include_initial=True) if is_wrapped else packing.row_offsets
    rows_of_steps = np.searchsorted(begins, offsets)
    if limits is not None:
        buckets = choose_group_rows(buckets, tokens, np.arange(len(tokens)), rows_of_steps, limits)
    bucket = first_buckets(tokens, _lengths_of(buckets, tokens.ndim), "error")
    groups = group_steps(rows_of_steps, tokens, sample_sizes(tokens), bucket, buckets)
    plan = put_samples_into_rows(_plan_of(groups, sample_sizes(tokens), buckets, ordering, len(lengths)), packing)
    check_plan(plan)
    return plan


def _chooses_lengths(lengths: Int64[np.ndarray, " N *sides"], limits: Budget) -> bool:
    """Whether lengths are chosen for the steps, and not by a strategy, or several lengths for all samples at once."""
    return lengths.ndim == 1 and limits.strategy == "optimal"


def _holding_buckets(
    lengths: Int64[np.ndarray, " N *sides"], bucketing: Buckets[AnyBucket] | Budget, overlong: Overlong
) -> Buckets[AnyBucket]:
    """Buckets that hold all samples: the given ones, or those of a strategy; the longest where steps are to decide."""
    if isinstance(bucketing, Buckets):
        return bucketing
    if lengths.ndim == 2:
        return choose_joint_buckets(lengths, bucketing, overlong)
    if not _chooses_lengths(lengths, bucketing):
        return choose_buckets(lengths, bucketing, overlong)
    counted = CountedSamples(lengths, bucketing, overlong)
    rounded = counted.histogram.rounded
    rows = counted.most_rows(rounded)
    return Buckets((Bucket(int(rows[-1]), int(rounded[-1])),), bucketing.num_microbatches)


def _lengths_of(buckets: Buckets[AnyBucket], ndim: int) -> Int64[np.ndarray, " K *sides"]:
    """The lengths of buckets, for samples of so many axes."""
    lengths = np.array([bucket.lengths for bucket in buckets.shapes], np.int64)
    return lengths if ndim == 2 else lengths[:, 0]


def _row_sizes(
    buckets: Buckets[AnyBucket], method: PackingMethod, overlong: PackedOverlong, samples_per_row: SamplesPerRow | None
) -> RowSizes:
    """The rows that are packed for buckets, some of which have the same lengths."""
    lengths = [bucket.lengths for bucket in buckets.shapes]
    most = dict(zip(lengths, check_samples_per_row(samples_per_row, lengths).tolist(), strict=True))
    row_lengths = list(itertools.chain.from_iterable(most))
    given = None if samples_per_row is None else list(most.values())
    return row_sizes_of(row_lengths, method, overlong, given, is_pairs=len(lengths[0]) == 2)


def _ids_of(
    sizes: Int64[np.ndarray, " N"], ordering: Ordering, epoch: int, step_sizes: StepSizes
) -> Int64[np.ndarray, " m"]:
    """The order of samples of an epoch."""
    if ordering.pacing is not None or ordering.order.new_shape_every:
        raise UserError(f"pacing and new_shape_every take steps by their buckets: {step_sizes.name} excludes them")
    ids = order_samples(sizes, ordering.order, difficulty=ordering.difficulty, seed=ordering.seed, epoch=epoch)
    return ids if step_sizes.group_ids is None else step_sizes.group_ids.bring_together(ids)


def _plan_of(
    groups: StepGroups,
    tokens: Integer[np.ndarray, " n"],
    buckets: Buckets[AnyBucket],
    ordering: Ordering,
    num_samples: int,
) -> Plan:
    """The plan of rows with these tokens, whose `sample_ids` are their places."""
    emitted = move_steps(
        np.arange(len(groups.step_groups) - 1),
        groups.bucket,
        groups.step_groups[:-1],
        ordering,
        num_samples,
        buckets.row_sizes,
        shuffles=ordering.order.shuffle_steps,
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
