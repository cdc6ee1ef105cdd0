"""Plans whose steps have a given number of samples or tokens, each in groups of several buckets.

Letters: N samples, K buckets, S steps.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64

from jvarlen._common.checks import UserError
from jvarlen.planning.buckets import AnyBucket, Buckets
from jvarlen.planning.grouping import Ordering, first_buckets, sum_segments
from jvarlen.planning.lengths import Overlong, apply_overlong, check_features, sample_sizes
from jvarlen.planning.order import order_samples, random_keys, stable_argsort
from jvarlen.planning.plan import Plan
from jvarlen.planning.step_groups import StepGroups, group_steps, permute_steps
from jvarlen.planning.step_sizes import OrderedSamples, StepSizes

__all__ = ["plan_sized_steps"]


def plan_sized_steps(
    lengths: Int64[np.ndarray, " N *sides"],
    buckets: Buckets[AnyBucket],
    ordering: Ordering,
    overlong: Overlong,
    step_sizes: StepSizes,
) -> Plan:
    """The plan of samples of checked lengths, one sample a row, in steps of these sizes."""
    check_features(buckets.shapes, lengths)
    if ordering.pacing is not None or ordering.order.new_shape_every:
        raise UserError(f"pacing and new_shape_every take steps by their buckets: {step_sizes.name} excludes them")
    bucket_lengths = np.array([bucket.lengths for bucket in buckets.shapes], np.int64)
    bucket_lengths = bucket_lengths if lengths.ndim == 2 else bucket_lengths[:, 0]
    is_cut = overlong == "truncate" and lengths.ndim == 1
    cut_lengths = np.minimum(lengths, bucket_lengths[-1]) if is_cut else lengths
    bucket = first_buckets(cut_lengths, bucket_lengths, overlong)
    is_long = lengths > bucket_lengths[-1] if is_cut else bucket == len(bucket_lengths)
    sizes = sample_sizes(lengths, buckets.pair_size)
    cut_sizes = cut_lengths if lengths.ndim == 1 else sizes

    def ids_of(epoch: int) -> Int64[np.ndarray, " m"]:
        difficulty, seed = ordering.difficulty, ordering.seed
        return order_samples(sizes, ordering.order, difficulty=difficulty, seed=seed, epoch=epoch)

    def fitting(ids: Int64[np.ndarray, " m"]) -> OrderedSamples:
        kept = ids[~is_long[ids]] if overlong == "drop" else ids
        return OrderedSamples(kept, cut_sizes[kept])

    ids = ids_of(ordering.epoch)
    long_ids = ids[is_long[ids]]
    num_fitting = len(ids) - len(long_ids)
    counts = apply_overlong(overlong, long_ids, lengths[long_ids], bucket_lengths[-1].tolist(), num_fitting)
    samples = fitting(ids)
    offsets = step_sizes.cut(samples, ordering.epoch, lambda epoch: fitting(ids_of(epoch)))
    groups = group_steps(offsets, cut_lengths[samples.ids], samples.tokens, bucket[samples.ids], buckets)
    groups = permute_steps(groups, _emitted_steps(groups, ordering, len(lengths), buckets))
    ids = samples.ids[groups.places]
    return Plan(
        buckets=buckets,
        num_microbatches=buckets.num_microbatches,
        group_bucket=groups.bucket,
        group_offsets=groups.offsets,
        group_tokens=sum_segments(cut_sizes, groups.offsets, ids),
        step_groups=groups.step_groups,
        sample_ids=ids,
        overlong=overlong,
        num_dropped=counts[0],
        num_truncated=counts[1],
    )


def _emitted_steps(
    groups: StepGroups, ordering: Ordering, num_samples: int, buckets: Buckets[AnyBucket]
) -> Int64[np.ndarray, " S"]:
    """The steps in the order in which they are taken."""
    emitted = np.arange(len(groups.step_groups) - 1)
    if ordering.order.shuffle_steps:
        keys = random_keys(len(emitted), seed=ordering.seed, epoch=ordering.epoch, start=num_samples)
        emitted = stable_argsort(keys)
    if ordering.order.longest_first:
        size = buckets.row_sizes[groups.bucket]
        longest = groups.bucket[size == size.max()].max()
        has_longest = np.logical_or.reduceat(groups.bucket == longest, groups.step_groups[:-1])
        first = int(has_longest[emitted].argmax())
        emitted[[0, first]] = emitted[[first, 0]]
    return emitted
