"""Loops over samples that NumPy cannot express, compiled by numba where it is installed.

A greedy batch begins where the previous one ended, so each sample depends on the one before: 10 million samples take
seconds in a Python loop and tens of milliseconds compiled. A few samples run as Python, which takes less time than
importing numba.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer, UInt64

__all__ = [
    "Kernel",
    "close_by_budget",
    "close_by_capacity",
    "in_parts",
    "paced_arrival",
    "scaled_key",
    "take_segments",
    "take_segments_with_sums",
]

_FEW = 2**16  # samples


class Kernel:
    """A function of arrays that is compiled on its first call with many samples, for the next process as well.

    Attributes:
      py_func: the function as it stands.
    """

    def __init__(self, py_func: Callable[..., Any]):
        self.py_func = py_func
        functools.update_wrapper(self, py_func)

    def __call__(self, *args: Any) -> Any:
        if "compiled" not in self.__dict__ and np.size(args[0]) < _FEW:
            return self.py_func(*args)
        return self.compiled(*args)

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        """The compiled function, calling compiled ones; the function as it stands where numba is missing."""
        if importlib.util.find_spec("numba") is None:
            return self.py_func
        import numba

        called = {name: globals().get(name) for name in self.py_func.__code__.co_names}
        kernels = {name: kernel.compiled for name, kernel in called.items() if isinstance(kernel, Kernel)}
        function = types.FunctionType(self.py_func.__code__, globals() | kernels, self.py_func.__name__)
        function.__qualname__, function.__module__ = self.py_func.__qualname__, self.py_func.__module__
        return numba.njit(cache=True, nogil=True)(function)


@Kernel
def close_by_budget(
    lengths: Int64[np.ndarray, " n"], max_tokens: int, max_sequences: int, multiple: int, is_padded: bool
) -> Int64[np.ndarray, " b"]:
    """Where the greedy batches of an order end.

    Args:
      lengths: int64[n], in order, each at most `max_tokens`.
      max_tokens: the most that a batch costs: sequences × longest where `is_padded`, else the sum of lengths.
      max_sequences: the most samples of a batch.
      multiple: a batch has fewer samples, or a multiple of it.
      is_padded: which cost.

    Returns:
      int64[b], the exclusive end of every batch, ascending.
    """
    num_samples = len(lengths)
    ends = np.empty(num_samples, np.int64)
    num_batches = 0
    # The open batch is start..end, a size that is allowed; samples after it are the tail, which waits for the next
    # multiple. Sizes are the longest length or the sum of lengths.
    start = end = 0
    batch_size = tail_size = 0
    for place in range(num_samples):
        length = lengths[place]
        count = place + 1 - start
        if is_padded:
            tail_size = max(tail_size, length)
            whole_size = max(batch_size, tail_size)
            cost = whole_size * count
        else:
            tail_size += length
            whole_size = batch_size + tail_size
            cost = whole_size
        overflows = cost > max_tokens or count > max_sequences
        if overflows:
            ends[num_batches] = end
            num_batches += 1
            tail_cost = tail_size * (place + 1 - end) if is_padded else tail_size
            if tail_cost > max_tokens:  # the tail cannot take the new sample: it is a batch of its own
                ends[num_batches] = place
                num_batches += 1
                end = place
                tail_size = length
            start = end
            whole_size = tail_size
        if overflows or count < multiple or count % multiple == 0:
            end = place + 1
            batch_size = whole_size
            tail_size = 0
    ends[num_batches] = end
    num_batches += 1
    if end < num_samples:
        ends[num_batches] = num_samples
        num_batches += 1
    return ends[:num_batches].copy()


@Kernel
def close_by_capacity(capacity: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " b"]:
    """Where greedy batches end that take samples while their count is at most the least capacity among them.

    Args:
      capacity: int64[n], each ≥ 1, in order: the most rows of a batch that holds this sample.

    Returns:
      int64[b], the exclusive end of every batch, ascending.
    """
    num_samples = len(capacity)
    ends = np.empty(num_samples, np.int64)
    num_batches = 0
    start = 0
    least = capacity[0]
    for place in range(num_samples):
        least = min(least, capacity[place])
        if place + 1 - start > least:
            ends[num_batches] = place
            num_batches += 1
            start = place
            least = capacity[place]
    ends[num_batches] = num_samples
    return ends[: num_batches + 1].copy()


@Kernel
def take_segments(
    values: Int64[np.ndarray, " n"],
    offsets: Int64[np.ndarray, " S_plus_1"],
    taken: Int64[np.ndarray, " T"],
    taken_offsets: Int64[np.ndarray, " T_plus_1"],
) -> Int64[np.ndarray, " m"]:
    """Joins the segments `values[offsets[i]:offsets[i+1]]` for each i of `taken`.

    Args:
      values: int64[n].
      offsets: int64[S+1], where segments begin and end.
      taken: int64[T], which segments.
      taken_offsets: int64[T+1], where they begin and end in the result.

    Returns:
      int64[m].
    """
    joined = np.empty(taken_offsets[-1], values.dtype)
    for i, segment in enumerate(taken):
        joined[taken_offsets[i] : taken_offsets[i + 1]] = values[offsets[segment] : offsets[segment + 1]]
    return joined


@Kernel
def take_segments_with_sums(
    ids: Int64[np.ndarray, " n"],
    values: Integer[np.ndarray, " N"],
    offsets: Int64[np.ndarray, " S_plus_1"],
    taken: Int64[np.ndarray, " T"],
    taken_offsets: Int64[np.ndarray, " T_plus_1"],
    joined: Int64[np.ndarray, " m"],
    sums: Int64[np.ndarray, " T"],
) -> None:
    """Joins segments of ids as `take_segments` does, and sums the values of their ids on the way.

    Args:
      ids: int64[n], each below N.
      values: integers[N].
      offsets: int64[S+1], where segments begin and end.
      taken: int64[T], which segments.
      taken_offsets: int64[T+1], where they begin and end in the result.
      joined: int64[m], filled with the ids.
      sums: int64[T], filled with the sum of each segment's values.
    """
    for i, segment in enumerate(taken):
        ids_of_segment = ids[offsets[segment] : offsets[segment + 1]]
        joined[taken_offsets[i] : taken_offsets[i + 1]] = ids_of_segment
        sums[i] = values[ids_of_segment].astype(np.int64).sum()


@Kernel
def paced_arrival(
    bucket_of_rank: Integer[np.ndarray, " n"],
    samples_per_step: Int64[np.ndarray, " K"],
    admitted: Int64[np.ndarray, " S"],
    keys: UInt64[np.ndarray, " n"],
) -> Int64[np.ndarray, " n"]:
    """Draws samples in random order from those that are admitted, more of them with every step that gets full.

    This is the shuffle of Fisher and Yates, each draw restricted to the ranks that are admitted so far. Where none of
    these is left, the next one is admitted early.

    Args:
      bucket_of_rank: integers[n], the bucket of each sample, samples by rank.
      samples_per_step: int64[K], how many samples of a bucket make a step.
      admitted: int64[S], never falling: while step t is next, ranks below `admitted[t]` may come. After the last of
        them it stays.
      keys: uint64[n], each below 2**32; n ≤ 2**32.

    Returns:
      int64[n], the ranks in order of arrival.
    """
    num_samples = len(bucket_of_rank)
    pool = np.arange(num_samples)
    waiting = np.zeros(len(samples_per_step), np.int64)
    step = 0
    for place in range(num_samples):
        end = min(max(admitted[step], place + 1), num_samples)
        drawn = place + scaled_key(keys[place], end - place)
        rank = pool[drawn]
        pool[drawn] = pool[place]
        pool[place] = rank
        bucket = bucket_of_rank[rank]
        waiting[bucket] += 1
        if waiting[bucket] == samples_per_step[bucket]:
            waiting[bucket] = 0
            step = min(step + 1, len(admitted) - 1)
    return pool


@Kernel
def scaled_key(key: np.uint64, width: int) -> np.int64:
    """⌊key · width / 2**32⌋: an integer in [0, width) from a key below 2**32; 1 ≤ width ≤ 2**32."""
    # Unsigned, for the product can need all 64 bits, and all of one type, for numba makes a float of mixed signs.
    return np.int64((np.uint64(key) * np.uint64(width)) >> np.uint64(32))


_MOST_THREADS = 4  # the work is bound by memory

_LEAST_PART = 2**19  # samples; starting a thread costs more than less work than that


def in_parts(work: Callable[[int, int], object], num_samples: int) -> None:
    """Calls `work(start, end)` for consecutive parts of 0 to `num_samples`, which touch nothing in common."""
    num_parts = max(1, min(_MOST_THREADS, os.cpu_count() or 1, num_samples // _LEAST_PART))
    cuts = [num_samples * part // num_parts for part in range(num_parts + 1)]
    if num_parts == 1:
        work(0, num_samples)
        return
    with ThreadPoolExecutor(num_parts) as threads:
        for done in [threads.submit(work, start, end) for start, end in pairwise(cuts)]:
            done.result()
