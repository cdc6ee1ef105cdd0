"""Groups samples by bucket, in the order in which they arrive.

Planning spends most of its time here, so the common orders have shortcuts that give the same result.
Letters: N samples (or rows), n of them in the plan, K buckets, M microbatches a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, Integer, Shaped

from jvarlen._common.checks import UserError, check_choices
from jvarlen.planning._kernels import in_parts, paced_arrival
from jvarlen.planning.lengths import Overlong, apply_overlong
from jvarlen.planning.order import (
    CHUNK,
    Difficulty,
    Order,
    pack_with_index,
    random_key_chunks,
    random_keys,
    sample_order,
)
from jvarlen.planning.pacing import Pacing, ValuePacing, num_admitted

__all__ = [
    "Arrive",
    "BucketTable",
    "GroupedSamples",
    "Ordering",
    "group_by_bucket",
    "paced_ranks",
]

_LARGEST_TABLE = 2**24  # entries; longer buckets are looked up by bisection
_KEY_BITS = 32
_LATE = 2**62  # no schedule is longer, and adding the steps of an epoch does not overflow

# From the bucket and the id of each sample, in order, to the order in which they arrive.
Arrive = Callable[[Integer[np.ndarray, " n"], Int64[np.ndarray, " n"]], Int64[np.ndarray, " n"]]


class Ordering(NamedTuple):
    """What decides the order of samples and steps.

    Attributes:
      order: as in `make_plan`.
      difficulty: as in `sample_order`; None where it is the length.
      seed: as in `sample_order`.
      epoch: as in `sample_order`.
      arrive: reorders the samples that a bucket holds; None leaves them in order.
    """

    order: Order
    difficulty: Difficulty | None
    seed: int
    epoch: int
    arrive: Arrive | None = None

    @property
    def is_plain(self) -> bool:
        """Whether samples come by a word alone."""
        return (
            isinstance(self.order.by, str)
            and self.order.block_size is None
            and self.difficulty is None
            and self.arrive is None
        )

    @property
    def emits_by_arrival(self) -> bool:
        """Whether a step comes when its last sample does."""
        return not self.is_plain or self.order.by == "dataset"


class GroupedSamples(NamedTuple):
    """Samples by bucket ascending, and in order within a bucket.

    Attributes:
      ids: int64[n].
      lengths: integers[n], cut at the longest bucket; None where they would have to be gathered.
      lengths_by_id: integers[N], the same by id, in a small type; of pairs, the sum of both.
      num_samples: int64[K], samples of each bucket.
      place: int64[n], the place of each in the order; None where the order is that of the groups, or random.
      num_dropped: samples left out because they are longer than the longest bucket.
      num_truncated: samples cut to it.
    """

    ids: Int64[np.ndarray, " n"]
    lengths: Integer[np.ndarray, " n"] | None
    lengths_by_id: Integer[np.ndarray, " N"] | None
    num_samples: Int64[np.ndarray, " K"]
    place: Int64[np.ndarray, " n"] | None
    num_dropped: int
    num_truncated: int


def group_by_bucket(
    lengths: Int64[np.ndarray, " N *sides"],
    edges: Int64[np.ndarray, " K *sides"],
    ordering: Ordering,
    overlong: Overlong,
) -> GroupedSamples:
    """Groups the samples of an order by the smallest bucket that holds them."""
    check_choices(overlong=(overlong, Overlong))
    is_pairs = lengths.ndim == 2
    if is_pairs and overlong == "truncate":
        raise UserError('overlong="truncate" is for samples of one length; pairs are refused or dropped')
    order, seed, epoch = ordering.order, ordering.seed, ordering.epoch
    if ordering.is_plain and not is_pairs:
        if order.by == "length" and (grouped := _by_length(lengths, edges, overlong)):
            return grouped
        if order.by == "shuffle" and (grouped := _by_random_key(lengths, edges, seed, epoch, overlong)):
            return grouped
    totals = lengths.sum(axis=1) if is_pairs else lengths
    ids = sample_order(totals, order, difficulty=ordering.difficulty, seed=seed, epoch=epoch)
    bucket_by_id = _first_that_holds(lengths, edges) if is_pairs else BucketTable(edges, overlong)(lengths)
    bucket = bucket_by_id[ids]
    if ordering.arrive is not None:
        has_bucket = bucket < len(edges)
        arrived = np.concatenate(
            [
                np.flatnonzero(has_bucket)[ordering.arrive(bucket[has_bucket], ids[has_bucket])],
                np.flatnonzero(~has_bucket),
            ]
        )
        ids, bucket = ids[arrived], bucket[arrived]
    place = np.argsort(bucket, kind="stable")  # radix sort: the type is as small as K allows
    num_samples = np.bincount(bucket, minlength=len(edges) + 1)
    return _grouped(lengths, edges, ids[place], num_samples, place, overlong)


def _by_length(
    lengths: Int64[np.ndarray, " N"], edges: Int64[np.ndarray, " K"], overlong: Overlong
) -> GroupedSamples | None:
    """Sorted by (length, id), samples are grouped: one sort does both, and the lengths come out sorted as well."""
    packed = pack_with_index(lengths)
    if packed is None:
        return None
    packed.keys.sort()
    num_samples = np.diff(packed.num_up_to(edges), prepend=0, append=len(lengths))
    ids, ordered = packed.unpack(max_key=int(edges[-1]))
    return _grouped(lengths, edges, ids, num_samples, None, overlong, ordered)


def _by_random_key(
    lengths: Int64[np.ndarray, " N"], edges: Int64[np.ndarray, " K"], seed: int, epoch: int, overlong: Overlong
) -> GroupedSamples | None:
    """Bucket, random key and id in one integer: one sort groups and shuffles."""
    index_bits = max(1, (len(lengths) - 1).bit_length())
    if len(edges).bit_length() + _KEY_BITS + index_bits > 64:
        return None
    bucket_of_length = BucketTable(edges, overlong)
    first_of_bucket = np.arange(1, len(edges) + 1, dtype=np.uint64) << np.uint64(_KEY_BITS + index_bits)
    bucket_bits = np.append(np.uint64(0), first_of_bucket)
    packed = np.empty(len(lengths), np.uint64)

    def pack(first: int, end: int) -> None:
        for start, keys in random_key_chunks(end - first, seed=seed, epoch=epoch, start=first):
            chunk = slice(first + start, first + start + len(keys))
            np.left_shift(keys, np.uint64(index_bits), out=packed[chunk])
            packed[chunk] |= np.arange(chunk.start, chunk.stop, dtype=np.uint64)
            packed[chunk] |= bucket_bits[bucket_of_length(lengths[chunk])]

    in_parts(pack, len(lengths))
    packed.sort()
    num_samples = np.diff(np.searchsorted(packed, first_of_bucket), prepend=0, append=len(packed))
    packed &= np.uint64(2**index_bits - 1)
    return _grouped(lengths, edges, packed.view(np.int64), num_samples, None, overlong)


def _grouped(
    lengths: Int64[np.ndarray, " N *sides"],
    edges: Int64[np.ndarray, " K *sides"],
    ids: Int64[np.ndarray, " n"],
    num_samples: Int64[np.ndarray, " K_plus_1"],
    place: Int64[np.ndarray, " n"] | None,
    overlong: Overlong,
    ordered: Integer[np.ndarray, " n"] | None = None,
) -> GroupedSamples:
    """Applies the rule for samples longer than all buckets, which are the last group, or cut in the one before it."""
    max_length, is_pairs = edges[-1].tolist(), lengths.ndim == 2
    num_fitting = len(ids) - int(num_samples[-1])
    if overlong == "truncate":
        num_samples = np.append(num_samples[:-2], num_samples[-2:].sum())
        long_ids = ids[len(ids) - num_samples[-1] :]
        long_ids = long_ids[lengths[long_ids] > max_length]
    else:
        num_samples, long_ids = num_samples[:-1], ids[num_fitting:]
    of_pairs = {"problem": 'samples longer than the longest bucket (overlong="drop" allows them)'} if is_pairs else {}
    counts = apply_overlong(overlong, long_ids, lengths[long_ids], max_length, num_fitting, **of_pairs)
    num_left = len(ids) - counts[0]
    ids = ids[:num_left]
    place = None if place is None else place[:num_left]
    ordered = None if ordered is None else ordered[:num_left]
    by_id = None
    if ordered is None:
        by_id = np.empty(len(lengths), np.min_scalar_type(edges.sum(axis=1).max() if is_pairs else max_length))
        for start in range(0, len(lengths), CHUNK):
            part = lengths[start : start + CHUNK]
            by_id[start : start + CHUNK] = part.sum(axis=1) if is_pairs else np.minimum(part, max_length)
    return GroupedSamples(ids, ordered, by_id, num_samples, place, *counts)


def _first_that_holds(lengths: Int64[np.ndarray, "N 2"], edges: Int64[np.ndarray, "K 2"]) -> Integer[np.ndarray, " N"]:
    """The index of the first bucket that holds both lengths of each pair, in the smallest type; K where none does."""
    bucket = np.full(len(lengths), len(edges), np.min_scalar_type(len(edges)))
    for k in range(len(edges) - 1, -1, -1):
        bucket[(lengths[:, 0] <= edges[k, 0]) & (lengths[:, 1] <= edges[k, 1])] = k
    return bucket


class BucketTable:
    """The index of the smallest bucket that holds a length, in the smallest type.

    Where none does it is K, so that those samples form the last group, or K − 1 where they are cut.
    """

    def __init__(self, edges: Int64[np.ndarray, " K"], overlong: Overlong):
        self._edges = edges
        self._last = len(edges) - 1 if overlong == "truncate" else len(edges)
        self._dtype = np.min_scalar_type(len(edges))
        self._table = self._look_up(np.arange(edges[-1] + 2)) if edges[-1] <= _LARGEST_TABLE else None

    def __call__(self, lengths: Integer[np.ndarray, " n"]) -> Integer[np.ndarray, " n"]:
        """Integers[n], the index for each length."""
        return self._look_up(lengths) if self._table is None else self._table.take(lengths, mode="clip")

    def _look_up(self, lengths: Int64[np.ndarray, " n"]) -> Integer[np.ndarray, " n"]:
        return np.minimum(np.searchsorted(self._edges, lengths), self._last).astype(self._dtype)


def paced_ranks(
    bucket_of_rank: Integer[np.ndarray, " n"],
    ids: Int64[np.ndarray, " n"],
    difficulty: Shaped[np.ndarray, " N"],
    rows_per_step: Int64[np.ndarray, " K"],
    pacing: Pacing | ValuePacing,
    seed: int,
    epoch: int,
) -> Int64[np.ndarray, " n"]:
    """The order in which samples arrive when they are admitted little by little.

    Every arriving sample is drawn at random from those that are admitted and left; where none is left, the next one is
    admitted early. A step is taken once all of its samples have arrived, so none is in a step that does not admit it.
    """
    num_samples = np.bincount(bucket_of_rank, minlength=len(rows_per_step))
    num_steps = int((-(-num_samples // rows_per_step)).sum())
    steps = min(epoch * num_steps, _LATE) + np.arange(num_steps)
    admitted = num_admitted(pacing, steps, difficulty[ids])
    keys = random_keys(len(bucket_of_rank), seed=seed, epoch=epoch)
    return paced_arrival(bucket_of_rank.astype(np.int64), rows_per_step, admitted, keys)
