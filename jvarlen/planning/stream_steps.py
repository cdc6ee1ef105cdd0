"""Samples of a stream that wait, the steps made of them, one sample a row or packed, and shapes for the first ones.

Letters: K buckets, M microbatches per step, B rows, P samples of a row, T length, n samples.
"""

from __future__ import annotations

import bisect
import dataclasses
import fractions
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from jvarlen._common.checks import UserError
from jvarlen.planning.buckets import Bucket, Buckets
from jvarlen.planning.budget import Budget, broken_by_one_row, bucket_costs
from jvarlen.planning.lengths import check_lengths
from jvarlen.planning.make_buckets import make_buckets
from jvarlen.planning.order import Order
from jvarlen.planning.row_lengths import choose_packed_buckets
from jvarlen.planning.rules import PlanRules

__all__ = ["PackedSamples", "StreamStep", "WaitingSamples", "estimate_buckets", "estimate_packed_bucket"]

_STEPS_AHEAD = 4  # whose tokens are held to pack from


class StreamStep(NamedTuple):
    """A step of a stream.

    Attributes:
      bucket_index: the index of the bucket.
      bucket: its shape.
      ids: int64[M, B], the place of each sample in the stream, counted from 0; −1 for a padding row. Row j of the step
        is in microbatch j mod M, slot j // M. Packed, int64[M, B, P], the samples of each row from its beginning, and
        then −1.
      lengths: int64, as `ids`: tokens of each sample, cut at the longest bucket; 0 for none.
    """

    bucket_index: int
    bucket: Bucket
    ids: Int64[np.ndarray, "M B *P"]
    lengths: Int64[np.ndarray, "M B *P"]


class WaitingSamples:
    """Samples in the order of the stream, in a queue for each bucket; a full queue is a step, one sample a row."""

    def __init__(
        self,
        buckets: Buckets[Bucket],
        max_waiting: int | None,
        ids: Sequence[Sequence[int]],
        lengths: Sequence[Sequence[int]],
    ):
        self.ids, self.lengths = [list(each) for each in ids], [list(each) for each in lengths]
        self._buckets, self._max_waiting = buckets, max_waiting

    def steps(self, samples: Iterator[tuple[int, int]]) -> Iterator[StreamStep]:
        """All steps; the loop does little for each sample, because there can be very many."""
        row_lengths = self._buckets.lengths.tolist()
        capacities = [self._buckets.num_microbatches * bucket.rows for bucket in self._buckets.shapes]
        room = self._room()
        for i, length in samples:
            k = bisect.bisect_left(row_lengths, length)
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

    def _room(self) -> int:
        """How many more samples may wait."""
        return sys.maxsize if self._max_waiting is None else self._max_waiting - sum(map(len, self.ids))

    def _emit(self, k: int) -> StreamStep:
        """The step of all samples that wait for a bucket."""
        rows = [[place] for place in range(len(self.ids[k]))]
        step = _make_step(self._buckets, k, rows, self.ids[k], self.lengths[k])
        self.ids[k].clear()
        self.lengths[k].clear()
        return step


class PackedSamples:
    """Samples that are held, in one queue, to be packed; a step takes some of them when they are enough."""

    def __init__(
        self,
        buckets: Buckets[Bucket],
        samples_per_row: int,
        max_waiting: int | None,
        ids: Sequence[Sequence[int]],
        lengths: Sequence[Sequence[int]],
    ):
        self.ids, self.lengths = [list(each) for each in ids], [list(each) for each in lengths]
        self._buckets, self._most, self._max_waiting = buckets, samples_per_row, max_waiting
        self._num_tokens = sum(self.lengths[0])

    def steps(self, samples: Iterator[tuple[int, int]]) -> Iterator[StreamStep]:
        """All steps."""
        (ids,), (lengths,) = self.ids, self.lengths
        while self._is_enough():
            yield self._emit()
        for i, length in samples:
            ids.append(i)
            lengths.append(length)
            self._num_tokens += length
            while self._is_enough():
                yield self._emit()
        while ids:
            yield self._emit()

    def _is_enough(self) -> bool:
        if self._max_waiting is not None:
            return len(self.ids[0]) > self._max_waiting
        (bucket,) = self._buckets.shapes
        return self._num_tokens >= _STEPS_AHEAD * self._buckets.num_microbatches * bucket.padded_tokens

    def _emit(self) -> StreamStep:
        """A step of rows, each of which begins with the first sample that is left."""
        (ids,), (lengths,), (bucket,) = self.ids, self.lengths, self._buckets.shapes
        rows = _fill_rows(lengths, bucket.length, self._most, self._buckets.num_microbatches * bucket.rows)
        step = _make_step(self._buckets, 0, rows, ids, lengths, self._most)
        is_left = np.ones(len(ids), bool)
        is_left[list(itertools.chain.from_iterable(rows))] = False
        ids[:], lengths[:] = itertools.compress(ids, is_left), itertools.compress(lengths, is_left)
        self._num_tokens -= int(step.lengths.sum())
        return step


def _fill_rows(lengths: Sequence[int], row_length: int, most: int, most_rows: int) -> list[list[int]]:
    """Places of samples by row: the first that is left, then the longest that fits, of equal ones the first."""
    places = sorted(range(len(lengths) - 1, -1, -1), key=lengths.__getitem__)  # of equal ones the first comes last
    ascending, is_left, first = [lengths[place] for place in places], [True] * len(lengths), 0
    rows: list[list[int]] = []
    while places and len(rows) < most_rows:
        while not is_left[first]:
            first += 1
        row, space, num_fitting = list[int](), row_length, bisect.bisect_right(ascending, lengths[first])
        while num_fitting and len(row) < most:
            place = places.pop(num_fitting - 1)
            space -= ascending.pop(num_fitting - 1)
            is_left[place] = False
            row.append(place)
            num_fitting = bisect.bisect_right(ascending, space)
        rows.append(row)
    return rows


def _make_step(
    buckets: Buckets[Bucket],
    k: int,
    rows: Sequence[Sequence[int]],
    ids: Sequence[int],
    lengths: Sequence[int],
    most: int | None = None,
) -> StreamStep:
    """The step of samples at these places, by row; rows are on its microbatches in turn."""
    bucket, num_in_row = buckets.shapes[k], np.array(list(map(len, rows)))
    shape = bucket.rows, buckets.num_microbatches, *([] if most is None else [most])
    all_ids, all_lengths = np.full(shape, -1), np.zeros(shape, np.int64)
    placed = list(itertools.chain.from_iterable(rows))
    at = np.repeat(np.arange(len(rows)) * (most or 1) - (np.cumsum(num_in_row) - num_in_row), num_in_row)
    at += np.arange(len(at))
    all_ids.reshape(-1)[at] = [ids[place] for place in placed]
    all_lengths.reshape(-1)[at] = [lengths[place] for place in placed]
    return StreamStep(k, bucket, all_ids.swapaxes(0, 1), all_lengths.swapaxes(0, 1))


def estimate_buckets(first: Sequence[int], budget: Budget) -> Buckets[Bucket]:
    """Lengths as the first samples want them; rows as the budget allows, for nobody knows how many samples follow."""
    lengths = check_lengths(first)
    longest = None if budget.max_length is None else budget.of_length().round_lengths(budget.max_length)
    if longest is not None and budget.row_caps(np.array([longest]))[0] < 1:
        raise UserError(f"{broken_by_one_row(budget, longest)} leaves no row for max_length, {longest} tokens")
    # The rule of the stream for long samples comes when it is read.
    chosen = [bucket.length for bucket in make_buckets(lengths, budget, max_length=longest, overlong="truncate").shapes]
    if longest is not None and chosen[-1] < longest:
        chosen = _extend(chosen, longest, lengths, budget)
    return _with_all_rows(chosen, budget)


def estimate_packed_bucket(
    first: Sequence[int], budget: Budget, samples_per_row: int | None
) -> tuple[Buckets[Bucket], int]:
    """The bucket of packed rows, with all rows that the budget allows, and the most samples of a row."""
    rules = PlanRules(Order("dataset"), overlong="truncate", packing="best_fit", samples_per_row=samples_per_row)
    limits = dataclasses.replace(budget, max_shapes=1)
    buckets, packing = choose_packed_buckets(check_lengths(first), limits, rules)
    row_lengths = [bucket.lengths for bucket in buckets.shapes]
    most, *_ = packing.samples_per_row(row_lengths)
    return _with_all_rows([length for (length,) in row_lengths], budget), most


def _with_all_rows(lengths: Sequence[int], budget: Budget) -> Buckets[Bucket]:
    """Buckets of these lengths with as many rows as the budget allows."""
    rows = budget.row_caps(np.array(lengths)).tolist()
    return Buckets(tuple(map(Bucket, rows, lengths)), budget.num_microbatches, budget.size)


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
