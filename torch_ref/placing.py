"""Fills rows with samples, on the histogram: by best fit, or row by row if rows are limited.

Letters: n samples in R rows.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["fill_rows"]


class _Placing(NamedTuple):
    """Equal samples that went into rows `first_row`, ...: `per_row` into each, one row after the other."""

    length: int
    first_row: int
    num_samples: int
    per_row: int

    @property
    def end_row(self) -> int:
        """The row after the last."""
        return self.first_row + self.num_samples // self.per_row


def fill_rows(
    sizes: tuple[int, ...], lengths: Sequence[int], counts: Sequence[int], max_samples_per_row: int | None
) -> "_BestFit | _RowByRow":
    """Return rows of these sizes with `counts[i]` samples of `lengths[i]`, which descend."""
    if max_samples_per_row is not None:
        return _RowByRow(sizes, dict(zip(lengths, counts, strict=True)), max_samples_per_row)
    rows = _BestFit(sizes)
    for length, count in zip(lengths, counts, strict=True):
        rows.place(length, count)
    return rows


class _RowByRow:
    """Rows of a limited number of samples: equal ones as one row and how often it is there.

    Args:
        sizes: the lengths that rows can have, ascending.
        counts: the number of samples by length.
        most: samples of a row.
    """

    def __init__(self, sizes: tuple[int, ...], counts: dict[int, int], most: int) -> None:
        self._sizes, self._most = sizes, most
        self._left = dict(counts)
        self._lengths = sorted(counts)  # of samples that are left
        self._num_samples = sum(counts.values())
        self._num_tokens = sum(length * count for length, count in counts.items())
        self._rows: list[tuple[list[int], int]] = []
        while self._num_samples:
            row = self._next_row()
            self._use(row, -1)
            number = min(self._left[length] // times for length, times in Counter(row).items())
            self._use(row, number)
            self._rows.append((row, number))
            self._lengths = [length for length in self._lengths if self._left[length]]

    def num_held(self) -> list[int]:
        """Return how many rows have each size as the smallest that holds their tokens."""
        held = [0] * len(self._sizes)
        for row, number in self._rows:
            held[bisect_left(self._sizes, sum(row))] += number
        return held

    def row_of_samples(self) -> NDArray[np.int64]:
        """Return int64[n], the row of each sample, in descending length and, if equal, in ascending row."""
        firsts = list(accumulate((number for _, number in self._rows), initial=0))
        placings = [
            (-length, np.repeat(np.arange(first, first + number), times))
            for (row, number), first in zip(self._rows, firsts, strict=False)
            for length, times in Counter(row).items()
        ]
        return np.concatenate([rows for _, rows in sorted(placings, key=lambda placing: placing[0])])

    def capacity(self) -> NDArray[np.int64]:
        """Return int64[R], the length of each row."""
        sizes, _, numbers = zip(*self.alike(), strict=True)
        return np.repeat(np.array(sizes, dtype=np.int64), numbers)

    def alike(self) -> Iterator[tuple[int, list[int], int]]:
        """Yield rows in turn: their length, the lengths of their samples, and how many such rows follow each other."""
        for row, number in self._rows:
            yield self._sizes[bisect_left(self._sizes, sum(row))], row, number

    def _next_row(self) -> list[int]:
        size = self._sizes[bisect_left(self._sizes, self._lengths[-1])]
        row: list[int] = []
        while len(row) < self._most and (longest := self._longest(size - sum(row))):
            self._use([longest], 1)
            row.append(longest)
        if self._num_samples * self._sizes[0] <= self._most * self._num_tokens:
            return row
        self._use(row, -1)
        # The distances from the mean, times the number of samples: integers.
        above = self._lengths[-1] * self._num_samples - self._num_tokens
        below = self._num_tokens - self._lengths[0] * self._num_samples
        row = [self._lengths[-1] if above >= below else self._lengths[0]]
        self._use(row, 1)
        while len(row) < self._most:
            space, missing = size - sum(row), self._most - len(row)
            more = self._exact_pair(space) if missing == 2 else []
            if not more:
                one = self._longest(space // missing) or self._longest(space)
                if not one:
                    break
                more = [one]
            self._use(more, 1)
            row += more
        return row

    def _longest(self, most: int) -> int:
        """Return the length of the longest sample left that has at most this many tokens; 0 if there is none."""
        place = bisect_right(self._lengths, most) - 1
        while place >= 0 and not self._left[self._lengths[place]]:
            place -= 1
        return self._lengths[place] if place >= 0 else 0

    def _exact_pair(self, space: int) -> list[int]:
        best: list[int] = []
        copies = 0
        for length in self._lengths[: bisect_right(self._lengths, space // 2)]:
            other = space - length
            found = self._left[length] // 2 if other == length else min(self._left[length], self._left.get(other, 0))
            if found > copies:
                best, copies = [length, other], found
        return best

    def _use(self, row: list[int], times: int) -> None:
        """Count the samples of rows as placed, or of as many rows below 0 as left again."""
        for length in row:
            self._left[length] -= times
        self._num_samples -= times * len(row)
        self._num_tokens -= times * sum(row)


class _BestFit:
    """Open rows by the space they have left: equal ones as intervals (first row, number of rows)."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes
        self._queues: dict[int, deque[tuple[int, int]]] = {}
        self._spaces: list[int] = []  # the keys of the queues, ascending
        self._opened: list[tuple[int, int]] = []  # (capacity, number of rows)
        self._num_rows = 0
        self._placings: list[_Placing] = []

    def place(self, length: int, count: int) -> None:
        """Place equal samples, none longer than those before them.

        The row with the least space r >= length takes r // length samples in turn, since what it then has left is the
        least space again as long as it holds one more.
        """
        while count:
            index = bisect_left(self._spaces, length)
            if index == len(self._spaces):
                space = self._sizes[bisect_left(self._sizes, length)]
                num_new = -(-count // (space // length))
                self._opened.append((space, num_new))
                self._append(space, self._num_rows, num_new)
                self._num_rows += num_new
            else:
                space = self._spaces[index]
            count -= self._fill(space, length, count)

    def num_held(self) -> list[int]:
        """Return how many rows have each size as the smallest that holds their tokens."""
        firsts = list(accumulate((number for _, number in self._opened), initial=0))
        held = [0] * len(self._sizes)
        for size, number in self._opened:
            held[bisect_left(self._sizes, size)] += number
        for space, queue in self._queues.items():
            for first, number in queue:
                size = self._opened[bisect_right(firsts, first) - 1][0]
                held[bisect_left(self._sizes, size)] -= number
                held[bisect_left(self._sizes, size - space)] += number
        return held

    def row_of_samples(self) -> NDArray[np.int64]:
        """Return int64[n], the row of each sample in the order of placing."""
        _, first_row, num_samples, per_row = np.array(self._placings, dtype=np.int64).T
        within = np.arange(num_samples.sum()) - np.repeat(np.cumsum(num_samples) - num_samples, num_samples)
        return np.repeat(first_row, num_samples) + within // np.repeat(per_row, num_samples)

    def capacity(self) -> NDArray[np.int64]:
        """Return int64[R], the length that each row was opened with."""
        sizes, counts = np.array(self._opened, dtype=np.int64).T
        return np.repeat(sizes, counts)

    def alike(self) -> Iterator[tuple[int, list[int], int]]:
        """Yield rows in turn: their length, the lengths of their samples, and how many such rows follow each other."""
        bounds = {first for placing in self._placings for first in (placing.first_row, placing.end_row)}
        bounds |= set(accumulate((number for _, number in self._opened), initial=0))
        cuts = sorted(bounds)
        held: list[list[int]] = [[] for _ in cuts]
        for placing in self._placings:
            for cut in range(bisect_left(cuts, placing.first_row), bisect_left(cuts, placing.end_row)):
                held[cut] += [placing.length] * placing.per_row
        sizes = self.capacity()
        for cut, (first, after) in enumerate(pairwise(cuts)):
            yield int(sizes[first]), held[cut], after - first

    def _fill(self, space: int, length: int, count: int) -> int:
        """Place samples into the rows that have had this space longest; return how many."""
        queue = self._queues[space]
        first, num_rows = queue.popleft()
        if not queue:
            del self._queues[space]
            del self._spaces[bisect_left(self._spaces, space)]
        per_row = space // length
        full = min(num_rows, count // per_row)
        rest = 0
        if full:
            self._placings.append(_Placing(length, first, full * per_row, per_row))
            self._append(space - per_row * length, first, full)
        if full < num_rows:
            rest = min(count - full * per_row, per_row - 1)
            if rest:
                self._placings.append(_Placing(length, first + full, rest, rest))
                self._append(space - rest * length, first + full, 1)
            untouched = first + full + (1 if rest else 0)
            self._prepend(space, untouched, first + num_rows - untouched)
        return full * per_row + rest

    def _append(self, space: int, first: int, num_rows: int) -> None:
        if space:
            self._queue(space).append((first, num_rows))

    def _prepend(self, space: int, first: int, num_rows: int) -> None:
        if num_rows:
            self._queue(space).appendleft((first, num_rows))

    def _queue(self, space: int) -> deque[tuple[int, int]]:
        if space not in self._queues:
            self._queues[space] = deque()
            insort(self._spaces, space)
        return self._queues[space]
