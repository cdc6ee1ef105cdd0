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
    "fill_blocks",
    "fill_joint_rows",
    "halved_order",
    "paced_arrival",
    "scaled_key",
    "take_segments",
]

_FEW = 2**16  # samples
_FEW_PACKED = 2**18  # samples of blocks, likewise: numba takes 2.5 s for them, Python 6 µs a sample
_FEW_SEARCHED = 2**12  # lengths in a search tree, where Python takes far longer


class Kernel:
    """A function of arrays, compiled on its first call where the first argument has at least `few` values.

    With `adds_up`, those of all calls so far: epochs of a long training may all be small.
    """

    def __init__(self, py_func: Callable[..., Any], few: int = _FEW, *, adds_up: bool = False):
        self.py_func, self._few = py_func, few
        self._adds_up, self._num_seen = adds_up, 0
        functools.update_wrapper(self, py_func)

    def __call__(self, *args: Any) -> Any:
        if "compiled" not in self.__dict__:
            self._num_seen = np.size(args[0]) + self._adds_up * self._num_seen
            if self._num_seen < self._few:
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


@Kernel
def _place_of(space: int, spaces: Int64[np.ndarray, " s"], num_spaces: int) -> int:
    """The place of the first of the ascending spaces that is at least this large."""
    low, high = 0, num_spaces
    while low < high:
        middle = (low + high) // 2
        if spaces[middle] < space:
            low = middle + 1
        else:
            high = middle
    return low


@functools.partial(Kernel, few=_FEW_PACKED, adds_up=True)
def fill_blocks(
    lengths: Int64[np.ndarray, " n"],
    descending: Int64[np.ndarray, " n"],
    ends: Int64[np.ndarray, " b"],
    sizes: Int64[np.ndarray, " K"],
    most_rows: int,
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " R"], Int64[np.ndarray, " R"]]:
    """Packs blocks by best fit, each with the samples of the last row of the one before, which is not kept.

    `descending` has the samples of each block in the order of placing. Returns them in rows, where rows end, and their
    capacity; nothing as soon as there must be more than `most_rows`.
    """
    num_samples = len(lengths)
    samples, row_ends, capacity = np.empty_like(lengths), np.empty_like(lengths), np.empty_like(lengths)
    num_out = num_rows = num_carried = room = 0
    tokens_later = lengths.sum()
    carried = placed = row_of = descending[:0]  # places of this block's samples, and their rows
    # Open rows: those with the same space in a queue, the one that has had it longest first. An entry is several rows
    # in turn.
    spaces = queue_head = queue_tail = first_row = num_alike = next_entry = carried
    begin = 0
    for end in ends:
        num_here = num_carried + end - begin
        if num_here > room:
            room = 2 * num_here
            spaces, queue_head, queue_tail = (
                np.empty(room, np.int64),
                np.empty(room, np.int64),
                np.empty(room, np.int64),
            )
            first_row, num_alike, next_entry = (
                np.empty(2 * room, np.int64),
                np.empty(2 * room, np.int64),
                np.empty(2 * room, np.int64),
            )
            placed, row_of = np.empty(room, np.int64), np.empty(room, np.int64)
        i = 0
        for place in range(num_here):
            if begin == end or (i < num_carried and lengths[carried[i]] >= lengths[descending[begin]]):
                placed[place] = carried[i]
                i += 1
            else:
                placed[place] = descending[begin]
                tokens_later -= lengths[descending[begin]]
                begin += 1
        num_spaces = num_entries = opened = start = 0
        while start < num_here:
            length = lengths[placed[start]]
            stop = start + 1
            while stop < num_here and lengths[placed[stop]] == length:
                stop += 1
            while start < stop:
                at = _place_of(length, spaces, num_spaces)
                if at < num_spaces:
                    space, entry = spaces[at], queue_head[at]
                    row = first_row[entry]
                    per_row = space // length
                    used = min(num_alike[entry], -((start - stop) // per_row))
                    first_row[entry] += used
                    num_alike[entry] -= used
                    if num_alike[entry] == 0:
                        if entry == queue_tail[at]:
                            num_spaces -= 1
                            for k in range(at, num_spaces):
                                spaces[k] = spaces[k + 1]
                                queue_head[k] = queue_head[k + 1]
                                queue_tail[k] = queue_tail[k + 1]
                        else:
                            queue_head[at] = next_entry[entry]
                else:
                    size = 0
                    while sizes[size] < length:
                        size += 1
                    space, row = sizes[size], opened
                    per_row = space // length
                    used = -((start - stop) // per_row)
                    for k in range(opened, opened + used):
                        capacity[num_rows + k] = space
                    opened += used
                number = min(stop - start, used * per_row)
                for k in range(number):
                    row_of[start + k] = row + k // per_row
                start += number
                full, rest = number // per_row, number % per_row
                for part in range(2):
                    alike, each = (full, per_row) if part == 0 else (min(rest, 1), rest)
                    left = space - each * length
                    if alike == 0 or left == 0:
                        continue
                    first_row[num_entries], num_alike[num_entries] = row + part * full, alike
                    at = _place_of(left, spaces, num_spaces)
                    if at < num_spaces and spaces[at] == left:
                        next_entry[queue_tail[at]] = num_entries
                    else:
                        for k in range(num_spaces, at, -1):
                            spaces[k] = spaces[k - 1]
                            queue_head[k] = queue_head[k - 1]
                            queue_tail[k] = queue_tail[k - 1]
                        num_spaces += 1
                        spaces[at], queue_head[at] = left, num_entries
                    queue_tail[at] = num_entries
                    num_entries += 1
        # Into rows, in order; `spaces` counts what each holds.
        for row in range(opened):
            spaces[row] = 0
        for place in range(num_here):
            spaces[row_of[place]] += 1
        for row in range(opened):
            begins, num_out = num_out, num_out + spaces[row]
            row_ends[num_rows + row] = num_out
            spaces[row] = begins
        for place in range(num_here):
            row = row_of[place]
            samples[spaces[row]] = placed[place]
            spaces[row] += 1
        num_rows += opened
        num_carried = 0
        if end < num_samples:
            num_rows -= 1
            first = row_ends[num_rows - 1] if num_rows else 0
            num_carried, carried, num_out = num_out - first, samples[first:num_out].copy(), first
        tokens_carried = 0
        for place in range(num_carried):
            tokens_carried += lengths[carried[place]]
        if num_rows - (-(tokens_later + tokens_carried) // sizes[-1]) > most_rows:
            return samples[:0], row_ends[:0], capacity[:0]
    return samples, row_ends[:num_rows].copy(), capacity[:num_rows].copy()
