"""Samples of a stream that wait, the steps made of them, one sample a row or packed, and shapes for the first ones.

Letters: K buckets, M microbatches per step, B rows, P samples of a row, T length, n samples.
"""

from __future__ import annotations

import bisect
import fractions
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from jvarlen._common.checks import UserError, is_integer
from jvarlen.planning._kernels import fill_pair_rows, fill_stream_rows
from jvarlen.planning.buckets import AnyBucket, Buckets
from jvarlen.planning.budget import Budget, broken_by_one_row, bucket_costs, caps_of
from jvarlen.planning.lengths import COUNTS, check_sample_lengths
from jvarlen.planning.make_buckets import make_buckets
from jvarlen.planning.order import Order
from jvarlen.planning.row_lengths import choose_packed_buckets
from jvarlen.planning.rules import PlanRules, SamplesPerRow

__all__ = [
    "MOST_PACKED", "PackedSamples", "StreamLength", "StreamStep", "WaitingSamples", "bucket_finder", "check_length",
    "cut_length", "estimate_buckets", "estimate_packed_buckets",
]  # fmt: skip

StreamLength = int | tuple[int, ...]  # of a sample of one length, or of several

_STEPS_AHEAD = 4  # of the largest bucket, whose tokens are held to pack from
MOST_PACKED = 2**60  # tokens of a step, so that those ahead fit int64
_TIMES_FULL = 2  # the samples that fit a bucket should fill a step of it


class StreamStep(NamedTuple):
    """A step of a stream.

    Attributes:
      bucket_index: the index of the bucket.
      bucket: its shape.
      ids: int64[M, B], the place of each sample in the stream, counted from 0; −1 for a padding row. Row j of the step
        is in microbatch j mod M, slot j // M. Packed, int64[M, B, P], the samples of each row from its beginning, and
        then −1.
      lengths: int64, as `ids`: tokens of each sample, cut at the bucket; 0 for none. Samples of two lengths have both
        along one more axis.
      starts: int64, as `lengths`: the token of its sample with which each begins; −1 for none. None where all begin
        with the first.
      whole_lengths: int64, as `lengths`: the tokens of each sample before it was cut; None where none is.
    """

    bucket_index: int
    bucket: AnyBucket
    ids: Int64[np.ndarray, "M B *P"]
    lengths: Int64[np.ndarray, "M B *P_sides"]
    starts: Int64[np.ndarray, "M B *P_sides"] | None = None
    whole_lengths: Int64[np.ndarray, "M B *P_sides"] | None = None


def check_length(i: int, length: Any, num_lengths: int) -> StreamLength:
    """The length of a sample as an integer, or its lengths as a tuple of them."""
    if num_lengths == 1:
        if is_integer(length) and 1 <= length < 2**63:
            return int(length)
        raise UserError(
            f"lengths of a stream must be integers of at least 1 and below 2**63: id {i}: {length!r}; {COUNTS}"
        )
    values = tuple(length) if isinstance(length, Sequence | np.ndarray) else ()
    is_allowed = len(values) == num_lengths and all(map(is_integer, values))
    if not is_allowed or values[0] < 1 or min(values) < 0 or max(values) > (2**63 - 1) // num_lengths:
        raise UserError(
            f"lengths of a stream must be {num_lengths} integers each, the first at least 1, all at least 0 "
            f"and at most {(2**63 - 1) // num_lengths}: id {i}: {length!r}; {COUNTS}"
        )
    return tuple(map(int, values))


def cut_length(length: StreamLength, longest: tuple[int, ...]) -> StreamLength:
    """The length of a sample, at most the longest, along all that it has."""
    return tuple(map(min, length, longest)) if isinstance(length, tuple) else min(length, *longest)


def bucket_finder(buckets: Buckets[AnyBucket]) -> Callable[[StreamLength], int]:
    """A function from the length or lengths of a sample to the first bucket that holds it; K where none does."""
    lengths_of_buckets = [bucket.lengths for bucket in buckets.shapes]
    if len(lengths_of_buckets[0]) == 1:
        return functools.partial(bisect.bisect_left, [length for (length,) in lengths_of_buckets])

    @functools.lru_cache(2**16)
    def find(lengths: tuple[int, ...]) -> int:
        holds = (all(a <= b for a, b in zip(lengths, each, strict=True)) for each in lengths_of_buckets)
        return next(itertools.compress(itertools.count(), holds), len(lengths_of_buckets))

    return find


class WaitingSamples:
    """Samples in the order of the stream, in a queue for each bucket; a full queue is a step, one sample a row."""

    def __init__(
        self,
        buckets: Buckets[AnyBucket],
        max_waiting: int | None,
        ids: Sequence[Sequence[int]],
        lengths: Sequence[Sequence[StreamLength]],
    ):
        self.ids, self.lengths = [list(each) for each in ids], [list(each) for each in lengths]
        self._buckets, self._max_waiting = buckets, max_waiting

    @property
    def num_waiting(self) -> int:
        """How many samples wait."""
        return sum(map(len, self.ids))

    def steps(self, samples: Iterator[tuple[int, Any]]) -> Iterator[StreamStep]:
        """All steps; the loop does little for each sample, because there can be very many."""
        find, capacities = bucket_finder(self._buckets), self._capacities
        room = self._room()
        for i, length in samples:
            k = find(length)
            ids = self.ids[k]
            ids.append(i)
            self.lengths[k].append(length)
            room -= 1
            if len(ids) == capacities[k]:
                yield self._emit(k)
                room = self._room()
            elif room < 0:
                fill = list(map(fractions.Fraction, map(len, self.ids), capacities))
                yield self._emit(fill.index(max(fill)))  # the fullest; of equal ones the first
                room = self._room()
        for k, ids in enumerate(self.ids):
            if ids:
                yield self._emit(k)

    @property
    def _capacities(self) -> list[int]:
        return [self._buckets.num_microbatches * bucket.rows for bucket in self._buckets.shapes]

    def _room(self) -> int:
        """How many more samples may wait."""
        return sys.maxsize if self._max_waiting is None else self._max_waiting - self.num_waiting

    def _emit(self, k: int) -> StreamStep:
        """The step of all samples that wait for a bucket."""
        ids, lengths = np.array(self.ids[k], np.int64), np.array(self.lengths[k], np.int64)
        self.ids[k].clear()
        self.lengths[k].clear()
        return _make_step(self._buckets, k, slice(len(ids)), ids, lengths)


class PackedSamples:
    """Samples that are held to be packed; a step takes some of them when they are enough."""

    def __init__(
        self,
        buckets: Buckets[AnyBucket],
        samples_per_row: Sequence[int],
        max_waiting: int | None,
        ids: Sequence[int],
        lengths: Sequence[StreamLength],
    ):
        self._buckets, self._most, self._max_waiting = buckets, samples_per_row, max_waiting
        self._lengths_of_rows = np.array([bucket.lengths for bucket in buckets.shapes], np.int64)
        rows = np.array([[bucket.rows] for bucket in buckets.shapes], np.int64)
        self._capacities = buckets.num_microbatches * rows * self._lengths_of_rows
        self._enough = _STEPS_AHEAD * self._capacities.max(axis=0)
        self._ids, self._lengths = np.empty(0, np.int64), np.empty((0, *self._lengths_of_rows.shape[1:]), np.int64)
        self._new_ids, self._new_lengths = list(ids), list(lengths)

    @property
    def ids(self) -> list[list[int]]:
        """The samples that are held, in the order in which they came; one list, as of one queue."""
        return [[*self._ids.tolist(), *self._new_ids]]

    @property
    def lengths(self) -> list[list[StreamLength]]:
        """Their lengths."""
        held = self._lengths[:, 0].tolist() if self._lengths.shape[1] == 1 else map(tuple, self._lengths.tolist())
        return [[*held, *self._new_lengths]]

    @property
    def num_waiting(self) -> int:
        """How many samples are held."""
        return len(self._ids) + len(self._new_ids)

    def steps(self, samples: Iterator[tuple[int, Any]]) -> Iterator[StreamStep]:
        """All steps."""
        self._take_new()
        while self._read(samples) or len(self._ids):
            yield self._emit()

    def _read(self, samples: Iterator[tuple[int, Any]]) -> bool:
        """Reads until what is held makes a step; false where the stream ends before."""
        ids, lengths = self._new_ids, self._new_lengths
        if self._max_waiting is not None:
            for i, length in itertools.islice(samples, max(0, self._max_waiting + 1 - len(self._ids))):
                ids.append(i)
                lengths.append(length)
            is_enough = self.num_waiting > self._max_waiting
        else:
            rooms = (self._enough - self._lengths.sum(axis=0)).tolist()
            is_enough = min(rooms) <= 0 or _read_tokens(samples, rooms, ids, lengths)
        self._take_new()
        return is_enough

    def _take_new(self) -> None:
        """Moves what was read to what is held."""
        if self._new_ids:
            new = np.array(self._new_lengths, np.int64).reshape(-1, self._lengths.shape[1])
            self._ids = np.append(self._ids, np.array(self._new_ids, np.int64))
            self._lengths = np.concatenate([self._lengths, new])
            self._new_ids.clear()
            self._new_lengths.clear()

    def _choose_bucket(self) -> int:
        """The bucket that holds the first sample and is fullest by what fits it; in a tie the shortest."""
        if len(self._capacities) == 1:
            return 0
        ordered = np.sort(self._lengths[:, 0])
        tokens = np.append(0, np.cumsum(ordered))[np.searchsorted(ordered, self._lengths_of_rows[:, 0], side="right")]
        first = int(np.searchsorted(self._lengths_of_rows[:, 0], self._lengths[0, 0]))
        sums = zip(tokens.tolist(), self._capacities[:, 0].tolist(), strict=True)
        fill = [fractions.Fraction(min(held, _TIMES_FULL * capacity), capacity) for held, capacity in sums]
        return fill.index(max(fill[first:]), first)

    def _emit(self) -> StreamStep:
        """A step of rows, each of which begins with the first sample that is left."""
        k = self._choose_bucket()
        bucket, lengths = self._buckets.shapes[k], self._lengths
        most_rows = self._buckets.num_microbatches * bucket.rows
        backwards = np.arange(len(lengths) - 1, -1, -1)  # so that of equal samples the first comes last
        if lengths.shape[1] == 1:
            ascending = backwards[np.argsort(lengths[::-1, 0], kind="stable")]
            placed, row = fill_stream_rows(lengths[:, 0].copy(), ascending, bucket.lengths[0], self._most[k], most_rows)
        else:
            ascending = backwards[np.lexsort(lengths[::-1].T[::-1])]
            places, row = fill_pair_rows(
                lengths[ascending], self._lengths_of_rows[k], self._most[k], ascending, most_rows
            )
            placed = ascending[places]
        at = row * self._most[k] + np.arange(len(row)) - np.searchsorted(row, row)
        step = _make_step(self._buckets, k, at, self._ids[placed], lengths[placed], (self._most[k],))
        is_left = np.ones(len(lengths), bool)
        is_left[placed] = False
        self._ids, self._lengths = self._ids[is_left], lengths[is_left]
        return step


def _read_tokens(samples: Iterator[tuple[int, Any]], rooms: list[int], ids: list[int], lengths: list[Any]) -> bool:
    """Reads samples until their tokens fill one of these rooms; false where they end before."""
    if len(rooms) == 1:
        (room,) = rooms
        for i, length in samples:
            ids.append(i)
            lengths.append(length)
            room -= length
            if room <= 0:
                return True
        return False
    for i, each in samples:
        ids.append(i)
        lengths.append(each)
        rooms = [room - length for room, length in zip(rooms, each, strict=True)]
        if min(rooms) <= 0:
            return True
    return False


def _make_step(
    buckets: Buckets[AnyBucket],
    k: int,
    places: slice | Int64[np.ndarray, " n"],
    ids: Int64[np.ndarray, " n"],
    lengths: Int64[np.ndarray, " n *sides"],
    samples_per_row: tuple[int, ...] = (),
) -> StreamStep:
    """The step with these samples at these places of its rows, which are on its microbatches in turn."""
    bucket = buckets.shapes[k]
    shape = bucket.rows, buckets.num_microbatches, *samples_per_row
    sides = lengths.shape[1:] if len(bucket.lengths) > 1 else ()
    all_ids, all_lengths = np.empty(shape, np.int64), np.zeros((*shape, *sides), np.int64)
    all_ids.fill(-1)
    all_ids.reshape(-1)[places] = ids
    all_lengths.reshape(-1, *sides)[places] = lengths.reshape(-1, *sides)
    return StreamStep(k, bucket, all_ids.swapaxes(0, 1), all_lengths.swapaxes(0, 1))


def estimate_buckets(first: Sequence[StreamLength], budget: Budget) -> Buckets[AnyBucket]:
    """Lengths as the first samples want them; rows as the budget allows, for nobody knows how many samples follow."""
    lengths = check_sample_lengths(first)
    # The rule of the stream for long samples comes when it is read.
    if lengths.ndim == 2:
        shapes = make_buckets(lengths, budget, overlong="drop").shapes
        return _with_all_rows([bucket.lengths for bucket in shapes], budget)
    longest = None if budget.max_length is None else budget.of_length().round_lengths(budget.max_length)
    if longest is not None and budget.row_caps(np.array([longest]))[0] < 1:
        raise UserError(f"{broken_by_one_row(budget, longest)} leaves no row for max_length, {longest} tokens")
    chosen = [bucket.length for bucket in make_buckets(lengths, budget, max_length=longest, overlong="truncate").shapes]
    if longest is not None and chosen[-1] < longest:
        chosen = _extend(chosen, longest, lengths, budget)
    return _with_all_rows([(length,) for length in chosen], budget)


def estimate_packed_buckets(
    first: Sequence[StreamLength], budget: Budget, samples_per_row: SamplesPerRow | None
) -> tuple[Buckets[AnyBucket], tuple[int, ...]]:
    """The buckets of packed rows, with all rows that the budget allows, and the most samples of a row of each."""
    rules = PlanRules(Order("dataset"), overlong="truncate", packing="best_fit", samples_per_row=samples_per_row)
    buckets, packing = choose_packed_buckets(check_sample_lengths(first), budget, rules)
    row_lengths = [bucket.lengths for bucket in buckets.shapes]
    return _with_all_rows(row_lengths, budget), packing.samples_per_row(row_lengths)


def _with_all_rows(row_lengths: Sequence[tuple[int, ...]], budget: Budget) -> Buckets[AnyBucket]:
    """Buckets of these lengths with as many rows as the budget allows."""
    lengths = np.array(row_lengths, np.int64)
    rows = caps_of(budget, lengths if lengths.shape[1] > 1 else lengths[:, 0])
    return Buckets(np.column_stack([rows, lengths]).tolist(), budget.num_microbatches, budget.size)


def _extend(lengths: list[int], longest: int, first: Int64[np.ndarray, " n"], budget: Budget) -> list[int]:
    """Bucket lengths up to `longest`: it takes the place of the last, or follows fewer ones, whichever costs least."""
    if budget.given_lengths is not None:
        return [*lengths, longest]
    replaced = [*lengths[:-1], longest]
    if budget.max_shapes == 1 or budget.strategy == "pad_to_max":
        return replaced
    fewer = make_buckets(first, budget, max_shapes=budget.max_shapes - 1, max_length=longest, overlong="truncate")

    def cost_of_first(lengths: list[int]) -> float:
        bucket_lengths = np.array(lengths)
        num_held = np.bincount(np.searchsorted(bucket_lengths, first), minlength=len(lengths))
        return sum(bucket_costs(budget, num_held, budget.row_caps(bucket_lengths), bucket_lengths).tolist())

    with_longest = [*(bucket.length for bucket in fewer.shapes), longest]
    return min(replaced, with_longest, key=cost_of_first)  # if equal, the fewer
