"""The groups of a step: which of its samples go into microbatches of which bucket.

From the longest length down, while samples of that length are left: a group of the most rows while it fills, then the
least rows that hold what is left. Free rows of that group take the longest samples still left.

Letters: n samples, S steps, K buckets, r of them of one length, G groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64, Integer

from jvarlen.planning._kernels import take_segments
from jvarlen.planning.buckets import AnyBucket, Buckets, rows_of_steps
from jvarlen.planning.order import stable_argsort

__all__ = ["StepGroups", "group_steps", "permute_steps"]


class StepGroups(NamedTuple):
    """The groups of steps: by step, then by bucket, then in the order in which they were opened."""

    bucket: Int32[np.ndarray, " G"]
    offsets: Int64[np.ndarray, " G_plus_1"]  # the samples before each group
    step_groups: Int64[np.ndarray, " S_plus_1"]  # the groups before each step
    places: Int64[np.ndarray, " n"]  # of the samples of each group in their order, ascending


class _Opened(NamedTuple):
    """The groups that the samples of one length open in each step."""

    num_full: Int64[np.ndarray, " S"]  # groups of the most rows
    rest_bucket: Int64[np.ndarray, " S"]  # of the group of what is left
    rest_number: Int64[np.ndarray, " S"]  # of that group among those of its bucket
    has_rest: Int64[np.ndarray, " S"]  # 1 or 0
    free: Int64[np.ndarray, " S"]  # rows of that group


def group_steps(
    step_offsets: Int64[np.ndarray, " S_plus_1"],
    lengths: Int64[np.ndarray, " n *sides"],
    sizes: Integer[np.ndarray, " n"],
    bucket: Integer[np.ndarray, " n"],
    buckets: Buckets[AnyBucket],
) -> StepGroups:
    """Groups steps of consecutive samples, of which `bucket` is the first that holds each, and `sizes` what they count.

    `step_offsets` are the samples before each step.
    """
    num_steps, num_buckets = len(step_offsets) - 1, len(buckets.shapes)
    step = np.repeat(np.arange(num_steps), np.diff(step_offsets))
    num_groups = np.zeros((num_steps, num_buckets), np.int64)
    to_bucket, number = np.zeros((2, len(step)), np.int64)  # the bucket of each sample's group, and which of these
    is_left = np.ones(len(step), bool)
    left = _longest_first(step, sizes)
    for start, rows in _lengths_descending(buckets):
        most_rows = start + len(rows) - 1
        own = np.sort(left[bucket[left] == start])  # in the order of the step
        if not len(own):
            continue
        of_step, nth, counts = _count_within_steps(step[own], num_steps)
        opened = _open(counts, start, rows)
        num_groups[:, most_rows] += opened.num_full
        num_groups[np.arange(num_steps), opened.rest_bucket] += opened.has_rest
        full = nth // rows[-1]
        is_rest = full == opened.num_full[of_step]
        to_bucket[own] = np.where(is_rest, opened.rest_bucket[of_step], most_rows)
        number[own] = np.where(is_rest, opened.rest_number[of_step], full)
        is_left[own] = False
        left = left[is_left[left]]
        if opened.free.any():
            fitting = left
            if lengths.ndim == 2:  # a longer side can come with a shorter one
                fitting = left[(lengths[left] <= buckets.shapes[start].lengths).all(axis=1)]
            of_step, nth, _ = _count_within_steps(step[fitting], num_steps)
            is_taken = nth < opened.free[of_step]
            taken, of_step = fitting[is_taken], of_step[is_taken]
            to_bucket[taken], number[taken] = opened.rest_bucket[of_step], opened.rest_number[of_step]
            is_left[taken] = False
            left = left[is_left[left]]
    first_groups = np.cumulative_sum(num_groups.reshape(-1), include_initial=True)
    group = first_groups[step * num_buckets + to_bucket] + number
    return StepGroups(
        bucket=np.repeat(np.tile(np.arange(num_buckets, dtype=np.int32), num_steps), num_groups.reshape(-1)),
        offsets=np.cumulative_sum(np.bincount(group), include_initial=True),
        step_groups=first_groups[::num_buckets].copy(),
        places=stable_argsort(group),
    )


def permute_steps(groups: StepGroups, steps: Int64[np.ndarray, " S"]) -> StepGroups:
    """The same groups with their steps in another order."""
    step_groups = np.cumulative_sum(np.diff(groups.step_groups)[steps], include_initial=True)
    taken = take_segments(np.arange(len(groups.bucket)), groups.step_groups, steps, step_groups)
    offsets = np.cumulative_sum(np.diff(groups.offsets)[taken], include_initial=True)
    places = take_segments(groups.places, groups.offsets, taken, offsets)
    return StepGroups(groups.bucket[taken], offsets, step_groups, places)


def _lengths_descending(buckets: Buckets[AnyBucket]) -> Iterator[tuple[int, Int64[np.ndarray, " r"]]]:
    """The first bucket of each length, and the rows of a group of each bucket of this length, ascending."""
    rows = rows_of_steps(buckets)
    alike = itertools.groupby(range(len(rows)), lambda k: buckets.shapes[k].lengths)
    for start, *others in reversed([[*which] for _, which in alike]):
        yield start, rows[start : start + 1 + len(others)]


def _open(counts: Int64[np.ndarray, " S"], start: int, rows: Int64[np.ndarray, " r"]) -> _Opened:
    """Opens groups for samples of one length, whose first bucket is `start`."""
    num_full, rest = np.divmod(counts, rows[-1])
    least, has_rest = np.searchsorted(rows, rest), (rest > 0).astype(np.int64)
    number = np.where(least == len(rows) - 1, num_full, 0)
    return _Opened(num_full, start + least, number, has_rest, has_rest * (rows[least] - rest))


def _longest_first(step: Int64[np.ndarray, " n"], sizes: Integer[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
    """Samples by step, then by descending size, then by place."""
    widest = int(sizes.max())
    if (int(step[-1]) + 1) * (widest + 1) < 2**62:
        return stable_argsort(step * (widest + 1) + (widest - sizes))
    return np.lexsort([-sizes, step])


def _count_within_steps(
    step: Int64[np.ndarray, " m"], num_steps: int
) -> tuple[Int64[np.ndarray, " m"], Int64[np.ndarray, " m"], Int64[np.ndarray, " S"]]:
    """The steps of samples, which ascend, the number of each sample within its step, and how many a step has."""
    counts = np.bincount(step, minlength=num_steps)
    return step, np.arange(len(step)) - (np.cumsum(counts) - counts)[step], counts
