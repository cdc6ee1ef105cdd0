"""Cuts grouped samples into steps, and puts the steps of an epoch in order.

NumPy only. Letters: n samples (or rows), S steps, K buckets, M microbatches a step.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer, Shaped

from jvarlen.planning._kernels import paced_arrival
from jvarlen.planning.grouping import Ordering
from jvarlen.planning.order import CHUNK, random_keys, stable_argsort
from jvarlen.planning.pacing import Pacing, ValuePacing, num_admitted

__all__ = ["CanonicalSteps", "canonical_steps", "emitted_steps", "paced_ranks", "sum_segments"]

_LATE = 2**62  # no schedule is longer, and adding the steps of an epoch does not overflow


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
    """Cuts the samples of each bucket into steps; only a bucket's last step can be short.

    Args:
      num_samples: int64[K], samples of each bucket.
      rows_per_step: int64[K], M × rows of each.

    Returns:
      `CanonicalSteps`.
    """
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
    place: Int64[np.ndarray, " n"] | None,
    num_samples: int,
    shuffle_steps: bool,
    longest_first_by: Int64[np.ndarray, " K"] | None,
) -> Int64[np.ndarray, " S"]:
    """The canonical steps in the order in which they are taken.

    Args:
      steps: of samples grouped by bucket.
      ordering: of the samples.
      place: int64[n], the place of each grouped sample in the order; None where they are grouped by it anyway.
      num_samples: N, how many values of the random stream the samples take.
      shuffle_steps: whether to permute them at random.
      longest_first_by: int64[K], lengths of the buckets, to swap a step of the longest one to the front; None not to.

    Returns:
      int64[S], indices of canonical steps.
    """
    order = ordering.order
    emits_by_arrival = not isinstance(order, str) or order == "dataset" or not ordering.is_plain
    num_steps = len(steps.bucket)
    if emits_by_arrival and place is not None:
        emitted = _by_arrival(steps, place)
    elif isinstance(order, str) and order == "length_descending":
        emitted = np.argsort(-steps.bucket, kind="stable")
    else:
        emitted = np.arange(num_steps)
    if shuffle_steps or (not emits_by_arrival and order == "shuffle"):
        # The values of the stream after those of the samples.
        keys = random_keys(num_steps, seed=ordering.seed, epoch=ordering.epoch, start=num_samples)
        emitted = emitted[stable_argsort(keys)]
    if longest_first_by is not None:
        length = longest_first_by[steps.bucket]
        longest = steps.bucket[np.flatnonzero(length == length.max())[-1]]
        first = int((steps.bucket[emitted] == longest).argmax())
        emitted[[0, first]] = emitted[[first, 0]]
    return emitted


def _by_arrival(steps: CanonicalSteps, place: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " S"]:
    """Full steps in order of the arrival of their last sample, then the short ones as they are.

    Args:
      steps: of samples grouped by bucket.
      place: int64[n], the place of each grouped sample in the order.

    Returns:
      int64[S], indices of canonical steps.
    """
    last_place = place[steps.offsets[1:] - 1]
    return np.argsort(np.where(steps.is_full, last_place, np.iinfo(np.int64).max), kind="stable")


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

    Args:
      bucket_of_rank: integers[n], the bucket of each sample, easiest first.
      ids: int64[n], the same samples.
      difficulty: ints or floats[N], by id, to which a bound of the pacing applies.
      rows_per_step: int64[K], M × rows of each bucket.
      pacing: by share or by value.
      seed: 0 ≤ seed < 2**63.
      epoch: 0 ≤ epoch < 2**63.

    Returns:
      int64[n] of ranks.

    Raises:
      ValueError: what `num_admitted` refuses.
    """
    num_samples = np.bincount(bucket_of_rank, minlength=len(rows_per_step))
    num_steps = int((-(-num_samples // rows_per_step)).sum())
    steps = min(epoch * num_steps, _LATE) + np.arange(num_steps)
    admitted = num_admitted(pacing, steps, difficulty[ids])
    keys = random_keys(len(bucket_of_rank), seed=seed, epoch=epoch)
    return paced_arrival(bucket_of_rank.astype(np.int64), rows_per_step, admitted, keys)
