"""Fills rows with samples by best fit, on the histogram.

Letters: n samples in R rows.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
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


def fill_rows(sizes: tuple[int, ...], lengths: Sequence[int], counts: Sequence[int]) -> "_BestFit":
    """Return rows of these sizes with `counts[i]` samples of `lengths[i]`, which descend."""
    rows = _BestFit(sizes)
    for length, count in zip(lengths, counts, strict=True):
        rows.place(length, count)
    return rows


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
