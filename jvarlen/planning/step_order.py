"""Cuts the samples of each bucket into steps, and puts the steps of an epoch in order.

Letters: n samples, S steps, K buckets, M microbatches a step.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer

from jvarlen.planning.grouping import Ordering
from jvarlen.planning.order import CHUNK, is_by, random_keys, stable_argsort

__all__ = ["CanonicalSteps", "canonical_steps", "emitted_steps", "sum_segments"]


class CanonicalSteps(NamedTuple):
    """Steps by bucket ascending, then position.

    Attributes:
      bucket: int32[S].
      offsets: int64[S+1] into the grouped samples.
      is_full: bool[S], whether all rows are real.
    """

    bucket: Int32[np.ndarray, " S"]
    offsets: Int64[np.ndarray, " S_plus_1"]
    is_full: Bool[np.ndarray, " S"]


def canonical_steps(num_samples: Int64[np.ndarray, " K"], rows_per_step: Int64[np.ndarray, " K"]) -> CanonicalSteps:
    """Cuts the samples of each bucket into steps; only a bucket's last step can be short."""
    num_steps = -(-num_samples // rows_per_step)
    bucket = np.repeat(np.arange(len(rows_per_step), dtype=np.int32), num_steps)
    sizes = rows_per_step[bucket]
    has_steps = num_steps > 0
    last = np.cumsum(num_steps)[has_steps] - 1
    sizes[last] = (num_samples - (num_steps - 1) * rows_per_step)[has_steps]
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return CanonicalSteps(bucket, offsets, sizes == rows_per_step[bucket])


def sum_segments(values: Integer[np.ndarray, " n"], offsets: Int64[np.ndarray, " S_plus_1"]) -> Int64[np.ndarray, " S"]:
    """int64[S], the sum of `values[offsets[i]:offsets[i+1]]` for each i; no segment is empty."""
    sums = np.empty(len(offsets) - 1, np.int64)
    # NumPy converts all that it sums to int64 at once, so it gets one part after the other.
    cuts = np.unique(np.searchsorted(offsets, np.arange(0, offsets[-1], CHUNK)))
    for first, last in itertools.pairwise([*cuts.tolist(), len(sums)]):
        start, end = offsets[first], offsets[last]
        sums[first:last] = np.add.reduceat(values[start:end], offsets[first:last] - start, dtype=np.int64)
    return sums


def emitted_steps(
    steps: CanonicalSteps,
    ordering: Ordering,
    last_place: Int64[np.ndarray, " S"] | None,
    num_samples: int,
    bucket_lengths: Int64[np.ndarray, " K"],
) -> Int64[np.ndarray, " S"]:
    """The canonical steps in the order in which they are taken."""
    order, num_steps = ordering.order, len(steps.bucket)
    if ordering.emits_by_arrival and last_place is not None:
        # Full steps in order of the arrival of their last sample, then the short ones as they are.
        emitted = np.argsort(np.where(steps.is_full, last_place, np.iinfo(np.int64).max), kind="stable")
    elif is_by(order, "length_descending"):
        emitted = np.argsort(-steps.bucket, kind="stable")
    else:
        emitted = np.arange(num_steps)
    if order.shuffle_steps or (not ordering.emits_by_arrival and order.by == "shuffle"):
        # The values of the stream after those of the samples.
        keys = random_keys(num_steps, seed=ordering.seed, epoch=ordering.epoch, start=num_samples)
        emitted = emitted[stable_argsort(keys)]
    if order.longest_first:
        length = bucket_lengths[steps.bucket]
        longest = steps.bucket[np.flatnonzero(length == length.max())[-1]]
        first = int((steps.bucket[emitted] == longest).argmax())
        emitted[[0, first]] = emitted[[first, 0]]
    if order.new_shape_every:
        emitted = emitted[_shapes_one_by_one(steps.bucket[emitted], int(order.new_shape_every))]
    return emitted


def _shapes_one_by_one(step_bucket: Int32[np.ndarray, " S"], spacing: int) -> Int64[np.ndarray, " S"]:
    """Steps in an order in which shape n comes no earlier than step n·spacing, unless those before it are used up.

    Shapes are numbered by their first step. Until the next shape may come, the steps of all shapes so far come in
    order.
    """
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
