"""Packs the samples of a stream that are held into rows, the first to come first."""

import operator
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

from torch_ref.planning.buckets import Buckets
from torch_ref.planning.joint import fill_pair_rows

__all__ = ["MAX_TOKENS", "HeldSamples", "Lengths"]

Lengths = tuple[int, ...]

MAX_TOKENS = 2**60  # of a step
_STEPS_HELD = 4
_TIMES_FULL = 2


class HeldSamples:
    """Samples that no step has yet, in the order in which they came.

    Attributes:
        samples: their ids and lengths, cut to the longest bucket.
    """

    def __init__(
        self,
        buckets: Buckets,
        most: Sequence[int],
        max_waiting: int | None,
        samples: Sequence[tuple[int, Lengths]],
    ) -> None:
        """Take the shapes, the most samples of a row of each, and what is held."""
        self.samples = list(samples)
        self._buckets, self._most, self._max_waiting = buckets, most, max_waiting
        self._row_lengths: list[Lengths] = [bucket[1:] for bucket in buckets.shapes]
        self._num_rows = [buckets.num_microbatches * bucket.rows for bucket in buckets.shapes]
        shapes = list(zip(self._num_rows, self._row_lengths, strict=True))
        self._enough = [
            _STEPS_HELD * max(rows * row[side] for rows, row in shapes) for side in range(len(shapes[0][1]))
        ]
        self._tokens = [0] * len(self._enough)
        for _, lengths in samples:
            self._count(lengths, 1)

    def _shapes(self) -> Iterator[tuple[int, Lengths]]:
        return zip(self._num_rows, self._row_lengths, strict=True)

    def put(self, number: int, lengths: Lengths) -> None:
        """Hold one more."""
        self.samples.append((number, lengths))
        self._count(lengths, 1)

    def is_enough(self) -> bool:
        """Return whether a step is to be taken before another sample is read."""
        if self._max_waiting is not None:
            return len(self.samples) > self._max_waiting
        return any(map(operator.ge, self._tokens, self._enough))

    def take_step(self) -> tuple[int, list[list[tuple[int, Lengths]]]]:
        """Return a bucket and the samples of its rows, which are no longer held."""
        index = self._choose()
        row_length, most, max_rows = self._row_lengths[index], self._most[index], self._num_rows[index]
        lengths = [each for _, each in self.samples]
        if len(row_length) == 1:
            rows = _fill_rows([length for (length,) in lengths], row_length[0], most, max_rows)
        else:
            rows = fill_pair_rows(np.array(lengths), np.array(row_length), most, max_rows, from_first=True)
        taken = {place for row in rows for place in row}
        step = [[self.samples[place] for place in row] for row in rows]
        for place in taken:
            self._count(lengths[place], -1)
        self.samples = [sample for place, sample in enumerate(self.samples) if place not in taken]
        return index, step

    def _count(self, lengths: Lengths, sign: int) -> None:
        self._tokens = [tokens + sign * length for tokens, length in zip(self._tokens, lengths, strict=True)]

    def _choose(self) -> int:
        """Return the fullest of the buckets that hold the first sample; fuller than twice does not count."""
        if len(self._row_lengths) == 1:
            return 0
        first, best, fullest = self.samples[0][1][0], -1, Fraction(-1)
        for index, (row_length,) in enumerate(self._row_lengths):
            held = sum(length for _, (length,) in self.samples if length <= row_length)
            full = min(Fraction(held, self._num_rows[index] * row_length), Fraction(_TIMES_FULL))
            if first <= row_length and full > fullest:
                best, fullest = index, full
        return best


def _fill_rows(lengths: Sequence[int], size: int, most: int, max_rows: int) -> list[list[int]]:
    """Return rows of places; each begins with the first one left, and goes on with the longest that fits."""
    by_length = sorted((length, -place) for place, length in enumerate(lengths) if length <= size)
    coming = iter(sorted(-negative for _, negative in by_length))
    rows: list[list[int]] = []
    taken: set[int] = set()
    while by_length and len(rows) < max_rows:
        first = next(place for place in coming if place not in taken)
        del by_length[bisect_left(by_length, (lengths[first], -first))]
        row, space = [first], size - lengths[first]
        while len(row) < most and (num_fitting := bisect_left(by_length, (space + 1, -len(lengths)))):
            length, negative = by_length.pop(num_fitting - 1)
            row.append(-negative)
            space -= length
        taken.update(row)
        rows.append(row)
    return rows
