"""Cuts ordered samples with known buckets into steps, and orders the steps."""

import heapq
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from torch_ref.planning.order import random_keys, stable_argsort

__all__ = ["Steps", "emit_steps"]


class Steps(NamedTuple):
    """Steps in some order.

    Attributes:
        bucket: int32[S], the bucket of each step.
        num_sequences: int64[S], the samples of each step, at least 1.
        places: int64[n], the places of the samples of step 0, 1, ... in the ordered list of samples.
    """

    bucket: NDArray[np.int32]
    num_sequences: NDArray[np.int64]
    places: NDArray[np.int64]


def emit_steps(
    sample_bucket: Tensor,
    rows_per_step: Sequence[int],
    *,
    by_arrival: bool,
    descending: bool = False,
    shuffle_stream: tuple[int, int, int] | None = None,
    longest_first: Sequence[int] | None = None,
    new_shape_every: int = 0,
) -> Steps:
    """Cut each bucket's samples into steps and put the steps in order.

    Args:
        sample_bucket: int64[n], the bucket of each sample, in the order of the samples.
        rows_per_step: rows of a step in each bucket, over all microbatches.
        by_arrival: steps come when their last sample does, those that never fill at the end; otherwise by bucket.
        descending: with steps by bucket, the last bucket comes first.
        shuffle_stream: permute the steps by the random keys from here on, as (seed, epoch, position).
        longest_first: the length of each bucket: swap the first step of the longest one in use (the last
            such bucket) with step 0.
        new_shape_every: at last, let the n-th bucket to come wait until step n times this, or until nothing else is
            left; 0 does not.
    """
    waiting: list[list[int]] = [[] for _ in rows_per_step]
    steps: list[tuple[int, list[int]]] = []
    for place, bucket in enumerate(sample_bucket.tolist()):
        waiting[bucket].append(place)
        if len(waiting[bucket]) == rows_per_step[bucket]:
            steps.append((bucket, waiting[bucket]))
            waiting[bucket] = []
    steps += [(bucket, places) for bucket, places in enumerate(waiting) if places]
    if not by_arrival:
        steps.sort(key=lambda step: step[0], reverse=descending)
    if shuffle_stream is not None:
        seed, epoch, position = shuffle_stream
        steps = [steps[i] for i in stable_argsort(random_keys(seed, epoch, position, len(steps)))]
    if longest_first is not None:
        longest = max((longest_first[bucket], bucket) for bucket, _ in steps)[1]
        first = next(i for i, (bucket, _) in enumerate(steps) if bucket == longest)
        steps[0], steps[first] = steps[first], steps[0]
    if new_shape_every > 0:
        steps = [steps[i] for i in _hold_back_shapes([bucket for bucket, _ in steps], new_shape_every)]
    return Steps(
        np.array([bucket for bucket, _ in steps], dtype=np.int32),
        np.array([len(places) for _, places in steps]),
        np.concatenate([places for _, places in steps]),
    )


def _hold_back_shapes(buckets: list[int], spacing: int) -> list[int]:
    """Return an order of steps of these buckets in which the n-th bucket to come waits until step n * spacing."""
    queues: dict[int, deque[int]] = {}
    for step, bucket in enumerate(buckets):
        queues.setdefault(bucket, deque()).append(step)
    waiting = deque(queues.values())
    heap: list[deque[int]] = []  # of the buckets that have come, by the next step of each
    ordered: list[int] = []
    while waiting:
        num_come = len(queues) - len(waiting)
        if not heap or len(ordered) >= num_come * spacing:
            heapq.heappush(heap, waiting.popleft())
            continue
        queue = heapq.heappop(heap)
        ordered.append(queue.popleft())
        if queue:
            heapq.heappush(heap, queue)
    return ordered + sorted(step for queue in heap for step in queue)
