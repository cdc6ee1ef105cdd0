"""Loops over samples that NumPy cannot express, compiled by numba where it is installed.

A few samples run as Python, which takes less time than importing numba.
"""

from __future__ import annotations

import functools
import importlib.util
import types
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Int64, Integer, UInt64

from jvarlen._common.threads import in_parts

__all__ = [
    "Kernel",
    "close_by_budget",
    "close_by_capacity",
    "fill_joint_rows",
    "halved_order",
    "paced_arrival",
    "scaled_key",
    "take_segments",
]

_FEW = 2**16  # samples
_FEW_SEARCHED = 2**12  # lengths in a search tree, where Python takes far longer


class Kernel:
    """A function of arrays, compiled on its first call where the first argument has at least `few` values."""

    def __init__(self, py_func: Callable[..., Any], few: int = _FEW):
        self.py_func, self._few = py_func, few
        functools.update_wrapper(self, py_func)

    def __call__(self, *args: Any) -> Any:
        if "compiled" not in self.__dict__ and np.size(args[0]) < self._few:
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
    """Where the greedy batches of an order end."""
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
    """Where greedy batches end that take samples while their count is at most the least capacity among them."""
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


def take_segments(
    values: Int64[np.ndarray, " n"],
    offsets: Int64[np.ndarray, " S_plus_1"],
    taken: Int64[np.ndarray, " T"],
    taken_offsets: Int64[np.ndarray, " T_plus_1"],
) -> Int64[np.ndarray, " m"]:
    """Joins the segments `values[offsets[i]:offsets[i+1]]` for each i of `taken`."""
    joined = np.empty(taken_offsets[-1], values.dtype)

    def copy(begin: int, end: int) -> None:
        first, last = np.searchsorted(taken_offsets[:-1], [begin, end])
        _copy_segments(values, offsets, taken[first:last], taken_offsets[first : last + 1], joined)

    in_parts(copy, len(joined))
    return joined


@Kernel
def _copy_segments(
    values: Int64[np.ndarray, " n"],
    offsets: Int64[np.ndarray, " S_plus_1"],
    taken: Int64[np.ndarray, " T"],
    taken_offsets: Int64[np.ndarray, " T_plus_1"],
    joined: Int64[np.ndarray, " m"],
) -> None:
    for i, segment in enumerate(taken):
        # A copy: numba takes a second to compile an assignment to a slice.
        np.positive(values[offsets[segment] : offsets[segment + 1]], joined[taken_offsets[i] : taken_offsets[i + 1]])


@Kernel
def paced_arrival(
    bucket_of_rank: Integer[np.ndarray, " n"],
    samples_per_step: Int64[np.ndarray, " K"],
    admitted: Int64[np.ndarray, " S"],
    keys: UInt64[np.ndarray, " n"],
) -> Int64[np.ndarray, " n"]:
    """Draws samples in random order from those that are admitted, more of them with every step that gets full."""
    # The shuffle of Fisher and Yates, each draw restricted to the ranks that are admitted so far. Where none of these
    # is left, the next one is admitted early.
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


# The samples that are left, by their lengths, in a search tree of V vectors of D lengths. Node i has the children 2i
# and 2i + 1, the last V nodes are the vectors. A node has the least and the greatest of each length of what is left
# below it.
_DEEPEST = 64  # levels
_FACTOR_BITS = 40
_NOTHING = 2**62  # above all lengths
_Vectors: TypeAlias = Int64[np.ndarray, "V D"]
_OfVectors: TypeAlias = Int64[np.ndarray, " V"]
_Boxes: TypeAlias = Int64[np.ndarray, "nodes D"]
_Lengths: TypeAlias = Int64[np.ndarray, " D"]


def halved_order(vectors: _Vectors) -> _OfVectors:
    """The order of a power of two of vectors in a tree that halves them along the side in which they differ most."""
    # NumPy, as numba takes seconds to compile a sort.
    order, size = np.arange(len(vectors)), len(vectors)
    while size > 1:
        nodes = order.reshape(-1, size)
        side = np.ptp(vectors[nodes], axis=1).argmax(axis=1)
        by_side = vectors[nodes, side[:, None]].argsort(axis=1)
        order, size = np.take_along_axis(nodes, by_side, axis=1).reshape(-1), size // 2
    return order


@Kernel
def _update_box(node: int, least: _Boxes, greatest: _Boxes) -> None:
    """Sets the least and greatest lengths of a node from those of its children."""
    for d in range(least.shape[1]):
        least[node, d] = min(least[2 * node, d], least[2 * node + 1, d])
        greatest[node, d] = max(greatest[2 * node, d], greatest[2 * node + 1, d])


@Kernel
def _take(place: int, number: int, left: _OfVectors, least: _Boxes, greatest: _Boxes) -> None:
    """Takes samples of one vector; where none is left, it leaves the tree."""
    left[place] -= number
    if left[place]:
        return
    node = len(left) + place
    for d in range(least.shape[1]):
        least[node, d], greatest[node, d] = _NOTHING, 0
    while node > 1:
        node //= 2
        _update_box(node, least, greatest)


@Kernel
def _most_product(low: _Lengths, high: _Lengths, room: _Lengths, factors: _Lengths) -> np.int64:
    """At least the product of the factors with any vector between two that fits; −1 if none can fit."""
    product = np.int64(0)
    for d in range(len(room)):
        if low[d] > room[d]:
            return np.int64(-1)
        product += min(high[d], room[d]) * factors[d]
    return product


@Kernel
def _best_that_fits(room: _Lengths, factors: _Lengths, order: _OfVectors, least: _Boxes, greatest: _Boxes) -> int:
    """The place of the vector that is left, fits, and has the largest product with the factors; −1 if none fits."""
    # Among equals the one that is last in `order` wins. Nodes that cannot hold a better one are skipped.
    best, best_product = -1, np.int64(-1)
    nodes, products = np.empty(_DEEPEST, np.int64), np.empty(_DEEPEST, np.int64)  # still to be searched
    nodes[0], products[0], waiting = 1, _most_product(least[1], greatest[1], room, factors), 1
    while waiting:
        waiting -= 1
        node, product = nodes[waiting], products[waiting]
        if product < 0 or product < best_product:
            continue
        place = node - len(order)
        if place >= 0:
            if product > best_product or order[place] > order[best]:
                best, best_product = place, product
            continue
        one = _most_product(least[2 * node], greatest[2 * node], room, factors)
        other = _most_product(least[2 * node + 1], greatest[2 * node + 1], room, factors)
        first = 2 * node if one >= other else 2 * node + 1
        nodes[waiting], products[waiting] = 4 * node + 1 - first, min(one, other)
        nodes[waiting + 1], products[waiting + 1] = first, max(one, other)  # the better half comes first
        waiting += 2
    return best


@functools.partial(Kernel, few=_FEW_SEARCHED)
def fill_joint_rows(
    vectors: _Vectors, counts: _OfVectors, row_lengths: _Lengths, max_samples: int, order: _OfVectors
) -> tuple[Int64[np.ndarray, " m"], Int64[np.ndarray, " G_plus_1"], Int64[np.ndarray, " G"]]:
    """Fills rows of several features, one after the other, by the rule of `pack_samples`."""
    # Vectors are a power of two, some of them without samples; `order` is that of `halved_order`.
    vectors, left = vectors[order], counts[order]
    least, greatest = np.concatenate((vectors, vectors)), np.concatenate((vectors, vectors))
    num_left, tokens_left, in_row = 0, np.zeros_like(row_lengths), np.zeros_like(left)
    for place in range(len(vectors)):
        num_left += left[place]
        tokens_left += left[place] * vectors[place]
        if left[place] == 0:
            for d in range(len(row_lengths)):
                least[len(left) + place, d], greatest[len(left) + place, d] = _NOTHING, 0
    for node in range(len(vectors) - 1, 0, -1):
        _update_box(node, least, greatest)
    kinds, ends, numbers = np.empty(1024, np.int64), np.zeros(1024, np.int64), np.empty(1024, np.int64)
    num_kinds = num_rows = 0
    while num_left:
        # Too many samples to fill rows up to the limit: the rest of the row is shared evenly.
        is_shared = num_left > max_samples
        for d in range(len(row_lengths)):
            is_shared &= -(-num_left // max_samples) * row_lengths[d] > tokens_left[d]
        first_kind, space = num_kinds, row_lengths.copy()
        while num_kinds - first_kind < max_samples:
            factors = (space << _FACTOR_BITS) // row_lengths**2
            place = -1
            if is_shared and num_kinds > first_kind:
                share = space // (max_samples - (num_kinds - first_kind))
                place = _best_that_fits(share, factors, order, least, greatest)
            if place < 0:
                place = _best_that_fits(space, factors, order, least, greatest)
            if place < 0:
                break
            if num_kinds == len(kinds):
                kinds = np.append(kinds, np.empty_like(kinds))
            kinds[num_kinds] = place
            num_kinds += 1
            space -= vectors[place]
            _take(place, 1, left, least, greatest)
        row = kinds[first_kind:num_kinds]
        # The same row again, as often as its samples are left.
        for place in row:
            in_row[place] += 1
        again = left[row[0]]
        for place in row:
            again = min(again, left[place] // in_row[place])
        for place in row:
            in_row[place] = 0
            tokens_left -= (1 + again) * vectors[place]
            if again:
                _take(place, again, left, least, greatest)
        num_left -= (1 + again) * len(row)
        if num_rows + 1 == len(ends):
            ends, numbers = np.append(ends, np.empty_like(ends)), np.append(numbers, np.empty_like(numbers))
        num_rows += 1
        ends[num_rows], numbers[num_rows - 1] = num_kinds, 1 + again
    return order[kinds[:num_kinds]], ends[: num_rows + 1].copy(), numbers[:num_rows].copy()
