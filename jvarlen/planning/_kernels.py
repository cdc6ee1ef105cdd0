"""Loops that NumPy cannot express, compiled by numba where it is installed and the samples are worth importing it."""

from __future__ import annotations

import functools
import importlib.util
import types
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer, UInt64

from jvarlen._common.threads import in_parts

__all__ = [
    "Kernel", "best_fit", "close_by_budget", "close_by_capacity", "fill_blocks", "fill_pair_rows", "fill_stream_rows",
    "paced_arrival", "scaled_key", "take_segments", "wrapped_rows",
]  # fmt: skip

_FEW = 2**16  # samples
_FEW_PACKED = 2**18  # samples of blocks: numba takes 2.5 s for them, Python 6 µs per sample
_FEW_WAITING = 2**20  # samples of streams, of which a step packs about a quarter: Python takes 1 µs for each
_FEW_LENGTHS = 2**15  # placed by best fit, where Python takes longer
_FEW_PAIRS = 2**9  # the time is quadratic in them
_FACTOR_BITS = 40  # lengths below 2**23 times such factors fit int64


class Kernel:
    """A function of arrays, compiled where the first argument has at least `few` values, or all so far (`adds_up`)."""

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
        """The function compiled by numba, with the kernels that it calls; without numba the Python function."""
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
            if tail_cost > max_tokens:  # the tail cannot take the new sample, and becomes a batch
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


@functools.partial(Kernel, few=_FEW_PAIRS, adds_up=True)
def fill_pair_rows(
    pairs: Int64[np.ndarray, "n 2"],
    row_lengths: Int64[np.ndarray, " 2"],
    most: int,
    arrivals: Int64[np.ndarray, " a"],
    most_rows: int,
) -> tuple[Int64[np.ndarray, " m"], Int64[np.ndarray, " m"]]:
    """Fills rows of pairs: the places of pairs in the order of placing, and the row of each."""
    # By the rule of `pack_samples`. Pairs ascend by their lengths; of equal ones the last is placed first. With
    # `arrivals`, a row begins with the pair that arrived first.
    num_pairs = len(pairs)
    first, second, which = pairs[:, 0].copy(), pairs[:, 1].copy(), np.arange(num_pairs)
    placed, row_of = np.empty(num_pairs, np.int64), np.empty(num_pairs, np.int64)
    row, spaces, num_in_row = 0, row_lengths.copy(), 0
    for num_placed in range(num_pairs):
        best = -1
        while best < 0:
            factors = (spaces << _FACTOR_BITS) // row_lengths**2
            best_product = np.int64(-num_pairs)
            for place in range((num_pairs - num_placed) * (num_in_row < most)):
                product = first[place] * factors[0] + second[place] * factors[1]
                if num_in_row == 0 and len(arrivals) > 0:
                    product = -arrivals[which[place]]
                if product >= best_product and first[place] <= spaces[0] and second[place] <= spaces[1]:
                    best, best_product = place, product
            if best < 0:
                row, spaces, num_in_row = row + 1, row_lengths.copy(), 0
            if row == most_rows:
                return placed[:num_placed], row_of[:num_placed]
        num_in_row += 1
        placed[num_placed], row_of[num_placed] = which[best], row
        spaces[0] -= first[best]
        spaces[1] -= second[best]
        for place in range(best, num_pairs - num_placed - 1):
            first[place], second[place], which[place] = first[place + 1], second[place + 1], which[place + 1]
    return placed, row_of


@functools.partial(Kernel, few=_FEW_WAITING, adds_up=True)
def fill_stream_rows(
    lengths: Int64[np.ndarray, " n"], ascending: Int64[np.ndarray, " n"], row_length: int, most: int, most_rows: int
) -> tuple[Int64[np.ndarray, " m"], Int64[np.ndarray, " m"]]:
    """Fills rows from samples that wait: those that are placed, in the order of placing, and the row of each."""
    # A row begins with the first sample, and then takes the longest that fits; `ascending` has the first of equal
    # ones last. `at_most[p]` leads to the last place below p of a sample that is left, and one more.
    num_samples, num_placed, first = len(lengths), 0, 0
    placed, row_of = np.empty(num_samples, np.int64), np.empty(num_samples, np.int64)
    ordered, at_most, place_of = lengths[ascending], np.arange(num_samples + 1), np.empty(num_samples, np.int64)
    place_of[ascending] = np.arange(num_samples)
    for row in range(most_rows):
        while first < num_samples and (lengths[first] > row_length or at_most[place_of[first] + 1] <= place_of[first]):
            first += 1
        if first == num_samples:
            break
        space, num_in_row, place = row_length, 0, place_of[first] + 1
        while place > 0:
            sample = ascending[place - 1]
            at_most[place] = place - 1
            placed[num_placed], row_of[num_placed] = sample, row
            num_placed, num_in_row, space = num_placed + 1, num_in_row + 1, space - lengths[sample]
            place = np.searchsorted(ordered, space, side="right") if num_in_row < most else 0
            while at_most[place] != place:
                at_most[place] = at_most[at_most[place]]
                place = at_most[place]
    return placed[:num_placed], row_of[:num_placed]


@Kernel
def _queue_entry(
    queues: Int64[np.ndarray, "3 s"], entries: Int64[np.ndarray, "e 6"], num_queues: int, entry: int, space: int
) -> int:
    """Puts an entry of `best_fit` into the queue of those with the same space; the number of queues then."""
    at = np.searchsorted(queues[0, :num_queues], space)
    if at < num_queues and queues[0, at] == space:
        entries[queues[2, at], 4] = entry
        queues[2, at] = entry
        return num_queues
    for field in queues:
        for k in range(num_queues, at, -1):
            field[k] = field[k - 1]
    queues[0, at], queues[1, at], queues[2, at] = space, entry, entry
    return num_queues + 1


@functools.partial(Kernel, few=_FEW_LENGTHS, adds_up=True)
def best_fit(
    lengths: Int64[np.ndarray, " V"],
    counts: Int64[np.ndarray, " V"],
    sizes: Int64[np.ndarray, " K"],
    most: Int64[np.ndarray, " K"],
    room: int,
) -> tuple[Int64[np.ndarray, "r 4"], Int64[np.ndarray, "e 6"]]:
    """Places samples of descending lengths, each into the row with the least space that holds it.

    Returns runs of equal samples in the order of placing: first row, samples a row, samples, and the length of the rows
    if they were opened for them; and rows in turn that have or had space left: first row, how many still have it, their
    length, the space, a link, and how many samples they may still take of the `most` of their length. Nothing if either
    were more than `room`; twice the samples and two are always enough.
    """
    # A row that took a sample and still holds another of that length is again the one with the least space that does,
    # so each row takes as many as it holds before the next one is looked at. Open rows with the same space are in a
    # queue of entries, each several rows in turn, the one that has had it longest first. Rows that may take no more
    # samples are in no queue. `queues` has the space, the first and the last entry of each, by ascending space.
    runs, entries = np.empty((room, 4), np.int64), np.empty((room, 6), np.int64)
    queues = np.empty((3, room), np.int64)
    num_runs = num_entries = num_queues = num_rows = 0
    for i in range(len(lengths)):
        length, left = lengths[i], counts[i]
        while left > 0:
            if max(num_runs, num_entries) + 2 > room:
                return runs[:0], entries[:0]
            at = np.searchsorted(queues[0, :num_queues], length)
            if at < num_queues:
                space, entry = queues[0, at], queues[1, at]
                row, num_alike, size = entries[entry, 0], entries[entry, 1], entries[entry, 2]
                opened, may_take = 0, entries[entry, 5]
                per_row = min(space // length, may_take)
                used = min(num_alike, -(-left // per_row))
                entries[entry, 0] += used
                entries[entry, 1] -= used
                if used == num_alike and entry != queues[2, at]:
                    queues[1, at] = entries[entry, 4]
                elif used == num_alike:
                    num_queues -= 1
                    for field in queues:
                        for k in range(at, num_queues):
                            field[k] = field[k + 1]
            else:
                which = np.searchsorted(sizes, length)
                size, may_take = sizes[which], most[which]
                row, space, opened = num_rows, size, size
                per_row = min(space // length, may_take)
                used = -(-left // per_row)
                num_rows += used
            number = min(left, used * per_row)
            left -= number
            runs[num_runs, 0], runs[num_runs, 1], runs[num_runs, 2], runs[num_runs, 3] = row, per_row, number, opened
            num_runs += 1
            full, rest = number // per_row, number % per_row
            for part in range(2):
                alike, each = (full, per_row) if part == 0 else (min(rest, 1), rest)
                space_left = space - each * length
                if alike == 0 or space_left == 0:
                    continue
                if each < may_take:
                    num_queues = _queue_entry(queues, entries, num_queues, num_entries, space_left)
                entries[num_entries, 0], entries[num_entries, 1] = row + part * full, alike
                entries[num_entries, 2], entries[num_entries, 3] = size, space_left
                entries[num_entries, 5] = may_take - each
                num_entries += 1
    return runs[:num_runs].copy(), entries[:num_entries].copy()


@Kernel
def wrapped_rows(
    begins: Int64[np.ndarray, " n_plus_1"], step_ends: Int64[np.ndarray, " S"], row_length: int, most: int
) -> Int64[np.ndarray, " R"]:
    """Where rows begin that samples fill end to end, at most so many a row; the end of a step ends a row."""
    # A row begins in a sample, or with one; `begins` are those of samples, and the end of the last.
    rows = np.empty(begins[-1] // row_length + len(begins) // most + len(step_ends) + 1, np.int64)
    num_rows = begin = sample = 0
    for step_end in step_ends:
        while begin < step_end:
            rows[num_rows] = begin
            num_rows += 1
            while begins[sample + 1] <= begin:
                sample += 1
            begin = min(begin + row_length, step_end, begins[min(sample + most, len(begins) - 1)])
    return rows[:num_rows].copy()


@functools.partial(Kernel, few=_FEW_PACKED, adds_up=True)
def fill_blocks(
    lengths: Int64[np.ndarray, " n"],
    descending: Int64[np.ndarray, " n"],
    ends: Int64[np.ndarray, " b"],
    sizes: Int64[np.ndarray, " K"],
    most: Int64[np.ndarray, " K"],
    most_rows: int,
    carries: bool,
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " R"], Int64[np.ndarray, " R"]]:
    """Packs blocks by best fit: their samples in rows, where rows end, and the capacity of these."""
    # `descending` has the samples of each block in the order of placing. With `carries`, those of the last row of a
    # block go to the next block. Nothing comes back as soon as there must be more than `most_rows`.
    samples, row_ends, capacity = np.empty_like(lengths), np.empty_like(lengths), np.empty_like(lengths)
    num_out = num_rows = begin = 0
    tokens_later, carried = lengths.sum(), descending[:0]
    for end in ends:
        num_here, num_taken, num_values = len(carried) + end - begin, 0, 0
        placed, counts = np.empty(num_here, np.int64), np.zeros(num_here, np.int64)
        values = np.empty(num_here, np.int64)
        for place in range(num_here):
            if begin == end or (num_taken < len(carried) and lengths[carried[num_taken]] >= lengths[descending[begin]]):
                sample = carried[num_taken]
                num_taken += 1
            else:
                sample = descending[begin]
                begin += 1
            placed[place] = sample
            if place == 0 or lengths[sample] != values[num_values - 1]:
                values[num_values] = lengths[sample]
                num_values += 1
            counts[num_values - 1] += 1
            tokens_later -= lengths[sample]
        runs, _ = best_fit(values[:num_values], counts[:num_values], sizes, most, 2 * num_here + 2)
        row_of, num_in_row, opened, place = values, counts, 0, 0  # their memory serves again
        num_in_row[:] = 0
        for run in range(len(runs)):
            row, per_row, number, size = runs[run, 0], runs[run, 1], runs[run, 2], runs[run, 3]
            for k in range(number):
                row_of[place] = row + k // per_row
                num_in_row[row_of[place]] += 1
                place += 1
            while size and opened <= row_of[place - 1]:
                capacity[num_rows + opened] = size
                opened += 1
        first = num_out
        for row in range(opened):
            first, num_out = num_out, num_out + num_in_row[row]
            row_ends[num_rows + row] = num_out
            num_in_row[row] = first
        for place in range(num_here):
            row = row_of[place]
            samples[num_in_row[row]] = placed[place]
            num_in_row[row] += 1
        num_rows += opened
        if carries and end < len(lengths):
            num_rows -= 1
            carried, num_out = samples[first:num_out].copy(), first
            tokens_later += lengths[carried].sum()
        if num_rows - (-tokens_later // sizes[-1]) > most_rows:
            return samples[:0], row_ends[:0], capacity[:0]
    return samples, row_ends[:num_rows].copy(), capacity[:num_rows].copy()
