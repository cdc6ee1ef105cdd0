"""Groups samples by bucket in the order in which they arrive, cuts them into steps, and puts the steps in order.

Letters: N samples (or rows), n of them in the plan, K buckets, S steps, G groups, M microbatches per step.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer

from jvarlen._common.checks import UserError, list_offenders
from jvarlen._common.threads import in_parts
from jvarlen.planning._kernels import paced_arrival
from jvarlen.planning.lengths import PackedOverlong, apply_overlong, is_cut_by
from jvarlen.planning.order import CHUNK, Pacing, order_samples, random_key_chunks, random_keys, stable_argsort
from jvarlen.planning.rules import PlanRules

__all__ = [
    "BucketTable", "CanonicalSteps", "GroupedSamples", "canonical_steps", "emitted_steps", "first_buckets",
    "group_by_bucket", "move_steps", "sum_segments",
]  # fmt: skip

_LARGEST_TABLE = 2**24  # entries; longer buckets are looked up by bisection
_KEY_BITS = 32
_LATE = 2**62  # no schedule is longer, and adding the steps of an epoch does not overflow


class GroupedSamples(NamedTuple):
    """Samples by bucket ascending, and in order within a bucket."""

    ids: Int64[np.ndarray, " n"]
    lengths_by_id: Integer[np.ndarray, " N"]  # cut at the longest bucket, in a small type; of several, their size
    num_samples: Int64[np.ndarray, " K"]
    place: Int64[np.ndarray, " n"] | None  # in the order; None where that is the order of the groups, or random
    num_dropped: int
    num_truncated: int


def group_by_bucket(
    lengths: Int64[np.ndarray, " N *sides"],
    sizes: Int64[np.ndarray, " N"],
    bucket_lengths: Int64[np.ndarray, " K *sides"],
    rows_per_step: Int64[np.ndarray, " K"],
    rules: PlanRules,
) -> GroupedSamples:
    """Groups the samples of an order by the first bucket that holds them; sizes are what they count."""
    has_several, overlong = lengths.ndim == 2, rules.overlong
    order = rules.order
    place, key_bits = None, len(bucket_lengths).bit_length() + _KEY_BITS + len(lengths).bit_length()
    if rules.is_plain and not has_several and order.by == "length":  # sorted by (length, id), samples are grouped
        ids = stable_argsort(lengths)
        num_up_to = np.searchsorted(lengths, bucket_lengths, side="right", sorter=ids)
        num_samples = np.diff(num_up_to, prepend=0, append=len(lengths))
    elif rules.is_plain and not has_several and order.by == "shuffle" and key_bits <= 64:
        ids, num_samples = _sort_by_random_key(lengths, bucket_lengths, rules)
    else:
        ids = order_samples(sizes, order, difficulty=rules.difficulty, seed=rules.seed, epoch=rules.epoch)
        bucket = first_buckets(lengths, bucket_lengths, overlong)[ids]
        if rules.pacing is not None:
            has_bucket = bucket < len(bucket_lengths)
            ranks = _paced_ranks(bucket[has_bucket], rows_per_step, rules)
            arrived = np.concatenate([np.flatnonzero(has_bucket)[ranks], np.flatnonzero(~has_bucket)])
            ids, bucket = ids[arrived], bucket[arrived]
        place = np.argsort(bucket, kind="stable")  # radix sort: the type is as small as K allows
        ids, num_samples = ids[place], np.bincount(bucket, minlength=len(bucket_lengths) + 1)
    # Samples longer than all buckets are the last group, or cut in the one before it.
    max_length = bucket_lengths[-1].tolist()
    num_fitting = len(ids) - int(num_samples[-1])
    if is_cut_by(overlong):
        num_samples = np.append(num_samples[:-2], num_samples[-2:].sum())
        long_ids = ids[len(ids) - num_samples[-1] :]
        long_ids = long_ids[lengths[long_ids] > max_length]
    else:
        num_samples, long_ids = num_samples[:-1], ids[num_fitting:]
    counts = apply_overlong(overlong, long_ids, lengths[long_ids], max_length, num_fitting)
    num_left = len(ids) - counts[0]
    by_id = sizes
    if not has_several:
        by_id = np.empty(len(lengths), np.min_scalar_type(max_length))
        np.minimum(lengths, max_length, out=by_id, casting="unsafe")
    return GroupedSamples(ids[:num_left], by_id, num_samples, None if place is None else place[:num_left], *counts)


def _sort_by_random_key(
    lengths: Int64[np.ndarray, " N"], bucket_lengths: Int64[np.ndarray, " K"], rules: PlanRules
) -> tuple[Int64[np.ndarray, " N"], Int64[np.ndarray, " K_plus_1"]]:
    """Ids by bucket and random key, and how many each bucket has: bucket, key and id are one integer, sorted once."""
    index_bits = len(lengths).bit_length()
    bucket_of_length = BucketTable(bucket_lengths, rules.overlong)
    first_of_bucket = np.arange(1, len(bucket_lengths) + 1, dtype=np.uint64) << np.uint64(_KEY_BITS + index_bits)
    bucket_bits = np.append(np.uint64(0), first_of_bucket)
    packed = np.empty(len(lengths), np.uint64)

    def pack(first: int, end: int) -> None:
        for start, keys in random_key_chunks(end - first, seed=rules.seed, epoch=rules.epoch, start=first):
            chunk = slice(first + start, first + start + len(keys))
            np.left_shift(keys, np.uint64(index_bits), out=packed[chunk])
            packed[chunk] |= np.arange(chunk.start, chunk.stop, dtype=np.uint64)
            packed[chunk] |= bucket_bits[bucket_of_length(lengths[chunk])]

    in_parts(pack, len(lengths))
    packed.sort()
    num_samples = np.diff(np.searchsorted(packed, first_of_bucket), prepend=0, append=len(packed))
    packed &= np.uint64(2**index_bits - 1)
    return packed.view(np.int64), num_samples


def first_buckets(
    lengths: Int64[np.ndarray, " N *sides"], bucket_lengths: Int64[np.ndarray, " K *sides"], overlong: PackedOverlong
) -> Integer[np.ndarray, " N"]:
    """The first bucket that holds each sample, in the smallest type; where none does K, or K − 1 if samples are cut."""
    if lengths.ndim == 1:
        return BucketTable(bucket_lengths, overlong)(lengths)
    if is_cut_by(overlong):
        raise UserError(f'overlong="{overlong}" is for samples of one length; those of several are refused or dropped')
    bucket = np.full(len(lengths), len(bucket_lengths), np.min_scalar_type(len(bucket_lengths)))
    for k in range(len(bucket_lengths) - 1, -1, -1):
        bucket[functools.reduce(np.logical_and, (lengths <= bucket_lengths[k]).T)] = k
    return bucket


class BucketTable:
    """The index of the smallest bucket that holds a length; where none does K, the last group, or K − 1 if cut."""

    def __init__(self, bucket_lengths: Int64[np.ndarray, " K"], overlong: PackedOverlong):
        self._bucket_lengths = bucket_lengths
        self._last = len(bucket_lengths) - 1 if is_cut_by(overlong) else len(bucket_lengths)
        self._dtype = np.min_scalar_type(len(bucket_lengths))
        self._table = self._look_up(np.arange(bucket_lengths[-1] + 2)) if bucket_lengths[-1] <= _LARGEST_TABLE else None

    def __call__(self, lengths: Integer[np.ndarray, " n"]) -> Integer[np.ndarray, " n"]:
        """Integers[n], the index for each length."""
        return self._look_up(lengths) if self._table is None else self._table.take(lengths, mode="clip")

    def _look_up(self, lengths: Int64[np.ndarray, " n"]) -> Integer[np.ndarray, " n"]:
        return np.minimum(np.searchsorted(self._bucket_lengths, lengths), self._last).astype(self._dtype)


def _paced_ranks(
    bucket_of_rank: Integer[np.ndarray, " n"], rows_per_step: Int64[np.ndarray, " K"], rules: PlanRules
) -> Int64[np.ndarray, " n"]:
    """The order in which samples, the easiest first, arrive when they are admitted little by little."""
    # A step is taken once all of its samples have arrived, so none is in a step that does not admit it.
    assert rules.pacing is not None
    num_samples = np.bincount(bucket_of_rank, minlength=len(rows_per_step))
    num_steps = int((-(-num_samples // rows_per_step)).sum())
    steps = min(rules.epoch * num_steps, _LATE) + np.arange(num_steps)
    admitted = _num_admitted(rules.pacing, steps, len(bucket_of_rank))
    keys = random_keys(len(bucket_of_rank), seed=rules.seed, epoch=rules.epoch)
    return paced_arrival(bucket_of_rank.astype(np.int64), rows_per_step, admitted, keys)


def _num_admitted(pacing: Pacing, steps: Int64[np.ndarray, " S"], num_samples: int) -> Int64[np.ndarray, " S"]:
    """How many samples, easiest first, each step may draw from."""
    try:
        values = np.asarray(pacing(steps))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"pacing takes all steps of the epoch at once, an int64 array, and gives one number for each: {error}"
        ) from error
    if values.shape != steps.shape or values.dtype.kind not in "iuf":
        raise UserError(f"pacing must give one number a step, {len(steps)}, not {values.dtype} of shape {values.shape}")
    if (wrong := ~((values >= 0) & (values <= 1))).any():
        listed = list_offenders(steps[wrong], values[wrong], name="step")
        raise UserError(f"pacing must give fractions between 0 and 1: {listed}")
    return np.maximum.accumulate(np.ceil(values.astype(np.float64) * num_samples).astype(np.int64))


class CanonicalSteps(NamedTuple):
    """Steps by bucket ascending, then position."""

    bucket: Int32[np.ndarray, " S"]
    offsets: Int64[np.ndarray, " S_plus_1"]  # into the grouped samples
    is_full: Bool[np.ndarray, " S"]  # all rows are real


def canonical_steps(num_samples: Int64[np.ndarray, " K"], rows_per_step: Int64[np.ndarray, " K"]) -> CanonicalSteps:
    """Cuts the samples of each bucket into steps; only a bucket's last step can be short."""
    num_steps = -(-num_samples // rows_per_step)
    bucket = np.repeat(np.arange(len(rows_per_step), dtype=np.int32), num_steps)
    sizes = rows_per_step[bucket]
    has_steps = num_steps > 0
    last = np.cumsum(num_steps)[has_steps] - 1
    sizes[last] = (num_samples - (num_steps - 1) * rows_per_step)[has_steps]
    return CanonicalSteps(bucket, np.cumulative_sum(sizes, include_initial=True), sizes == rows_per_step[bucket])


def sum_segments(
    values: Integer[np.ndarray, " N"],
    offsets: Int64[np.ndarray, " S_plus_1"],
    ids: Int64[np.ndarray, " n"] | None = None,
) -> Int64[np.ndarray, " S"]:
    """int64[S], the sum of segments of values, or of the values of ids; no segment is empty."""
    sums, starts = np.empty(len(offsets) - 1, np.int64), offsets[:-1]

    def add(begin: int, end: int) -> None:
        # NumPy converts all that it sums to int64 at once, so it gets one chunk after the other.
        cuts = np.unique(np.searchsorted(starts, [*range(begin, end, CHUNK), end]))
        for first, last in itertools.pairwise(cuts.tolist()):
            here = slice(offsets[first], offsets[last])
            part = values[here] if ids is None else values.take(ids[here], mode="clip")  # twice as fast
            sums[first:last] = np.add.reduceat(part, starts[first:last] - here.start, dtype=np.int64)

    in_parts(add, int(offsets[-1]))
    return sums


def emitted_steps(
    steps: CanonicalSteps,
    rules: PlanRules,
    last_place: Int64[np.ndarray, " S"] | None,
    num_samples: int,
    bucket_sizes: Int64[np.ndarray, " K"],
) -> Int64[np.ndarray, " S"]:
    """The canonical steps in the order in which they are taken."""
    order, num_steps = rules.order, len(steps.bucket)
    if rules.emits_by_arrival and last_place is not None:
        # Full steps in order of the arrival of their last sample, then the short ones as they are.
        emitted = np.argsort(np.where(steps.is_full, last_place, np.iinfo(np.int64).max), kind="stable")
    elif order.is_by("length_descending"):
        emitted = np.argsort(-steps.bucket, kind="stable")
    else:
        emitted = np.arange(num_steps)
    shuffles = order.shuffle_steps or (not rules.emits_by_arrival and order.by == "shuffle")
    emitted = move_steps(
        emitted, steps.bucket, np.arange(num_steps), rules, num_samples, bucket_sizes, shuffles=shuffles
    )
    if order.new_shape_every:
        emitted = emitted[_shapes_one_by_one(steps.bucket[emitted], int(order.new_shape_every))]
    return emitted


def move_steps(
    emitted: Int64[np.ndarray, " S"],
    group_bucket: Int32[np.ndarray, " G"],
    first_group: Int64[np.ndarray, " S"],
    rules: PlanRules,
    num_samples: int,
    bucket_sizes: Int64[np.ndarray, " K"],
    *,
    shuffles: bool,
) -> Int64[np.ndarray, " S"]:
    """Shuffles emitted steps, whose groups begin at `first_group`, and puts one with the longest bucket first."""
    if shuffles:  # by the values of the stream after those of the samples
        keys = random_keys(len(emitted), seed=rules.seed, epoch=rules.epoch, start=num_samples)
        emitted = emitted[stable_argsort(keys)]
    if rules.order.longest_first:
        size = bucket_sizes[group_bucket]
        longest = group_bucket[size == size.max()].max()
        has_longest = np.logical_or.reduceat(group_bucket == longest, first_group)
        first = int(has_longest[emitted].argmax())
        emitted[[0, first]] = emitted[[first, 0]]
    return emitted


def _shapes_one_by_one(step_bucket: Int32[np.ndarray, " S"], spacing: int) -> Int64[np.ndarray, " S"]:
    """Steps in an order in which shape n comes no earlier than step n·spacing, unless those before it are used up."""
    # Until the next shape may come, the steps of all shapes so far come in order.
    shapes = dict.fromkeys(step_bucket.tolist())  # by their first step
    num_spaced = len(shapes) * spacing  # the other steps come after these, in order
    left = np.zeros(0, np.int64)
    taken: list[Int64[np.ndarray, " t"]] = []
    num_taken = 0
    for num_shapes, shape in enumerate(shapes, start=1):
        of_shape = np.flatnonzero(step_bucket == shape)[:num_spaced]
        left = np.sort(np.concatenate([left[:num_spaced], of_shape]), kind="stable")  # merges two ascending runs
        num_until_next = num_shapes * spacing - num_taken
        taken.append(left[:num_until_next])
        left = left[num_until_next:]
        num_taken += len(taken[-1])
    is_left = np.ones(len(step_bucket), bool)
    is_left[np.concatenate(taken)] = False
    return np.concatenate([*taken, np.flatnonzero(is_left)])
