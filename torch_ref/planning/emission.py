"""Cuts ordered samples with known buckets into steps, and orders the steps."""

import heapq
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ref.checks import to_tensor
from torch_ref.planning.order import random_keys, stable_argsort

__all__ = ["Steps", "emit_steps"]


class Steps(NamedTuple):
    """Steps in some order.

    Attributes:
        bucket: int64[S], the bucket of each step.
        num_sequences: int64[S], the samples of each step, at least 1.
        places: int64[n], the places of the samples of step 0, 1, ... in the ordered list of samples.
    """

    bucket: Tensor
    num_sequences: Tensor
    places: Tensor


def emit_steps(
    sample_bucket: Tensor,
    rows_per_step: Tensor,
    *,
    by_arrival: bool,
    descending: bool = False,
    shuffle_stream: tuple[int, int, int] | None = None,
    longest_first: Tensor | None = None,
    new_shape_every: int = 0,
) -> Steps:
    """Cut each bucket's samples into steps and put the steps in order.

    Args:
        sample_bucket: int64[n], the bucket of each sample, in the order of the samples.
        rows_per_step: int64[K], rows of a step in each bucket, over all microbatches.
        by_arrival: steps come when their last sample does, those that never fill at the end; otherwise by bucket.
        descending: with steps by bucket, the last bucket comes first.
        shuffle_stream: permute the steps by the random keys from here on, as (seed, epoch, position).
        longest_first: int64[K], the length of each bucket: swap the first step of the longest one in use (the last
            such bucket) with step 0.
        new_shape_every: at last, let the n-th bucket to come wait until step n times this, or until nothing else is
            left; 0 does not.
    """
    steps = _canonical_steps(sample_bucket, rows_per_step)
    num_steps = len(steps.bucket)
    if by_arrival:
        emitted = _by_arrival(steps, rows_per_step)
    elif descending:
        emitted = torch.sort(steps.bucket, stable=True, descending=True).indices
    else:
        emitted = torch.arange(num_steps)
    if shuffle_stream is not None:
        seed, epoch, position = shuffle_stream
        emitted = emitted[to_tensor(stable_argsort(random_keys(seed, epoch, position, num_steps)))]
    if longest_first is not None:
        buckets = steps.bucket[emitted]
        longest = buckets[longest_first[buckets] == longest_first[buckets].max()].max()
        first = int(torch.nonzero(buckets == longest)[0])
        emitted[[0, first]] = emitted[[first, 0]]
    if new_shape_every > 0:
        emitted = emitted[_one_by_one(steps.bucket[emitted], new_shape_every)]
    return _select(steps, emitted)


def _canonical_steps(sample_bucket: Tensor, rows_per_step: Tensor) -> Steps:
    """Cut the samples into steps, by bucket ascending, then by position."""
    places = torch.sort(sample_bucket, stable=True).indices
    num_samples = torch.bincount(sample_bucket, minlength=len(rows_per_step))
    num_steps = -(-num_samples // rows_per_step)
    bucket = torch.repeat_interleave(num_steps)
    index = torch.arange(len(bucket)) - _starts(num_steps)[bucket]
    left = num_samples[bucket] - index * rows_per_step[bucket]
    return Steps(bucket, torch.minimum(left, rows_per_step[bucket]), places)


def _by_arrival(steps: Steps, rows_per_step: Tensor) -> Tensor:
    """Return the order in which steps fill up; those that never do come last, by bucket ascending."""
    last_arrival = steps.places[torch.cumsum(steps.num_sequences, dim=0) - 1]
    partial = steps.num_sequences < rows_per_step[steps.bucket]
    # At most one step of a bucket is partial, and buckets ascend: a stable sort keeps these in their places.
    never = len(steps.places)
    return torch.sort(torch.where(partial, never, last_arrival), stable=True).indices


def _one_by_one(buckets: Tensor, spacing: int) -> Tensor:
    """Return an order of steps of buckets int64[S] in which the n-th bucket to come waits until step n * spacing."""
    queues: dict[int, deque[int]] = {}
    for step, bucket in enumerate(buckets.tolist()):
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
    ordered += sorted(step for queue in heap for step in queue)
    return torch.tensor(ordered)


def _select(steps: Steps, emitted: Tensor) -> Steps:
    sizes = steps.num_sequences[emitted]
    shift = _starts(steps.num_sequences)[emitted] - _starts(sizes)
    source = torch.arange(len(steps.places)) + torch.repeat_interleave(shift, sizes)
    return Steps(steps.bucket[emitted], sizes, steps.places[source])


def _starts(sizes: Tensor) -> Tensor:
    return torch.cumsum(sizes, dim=0) - sizes
