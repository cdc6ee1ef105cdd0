"""Fills rows with samples by best fit."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["Filled", "fill_rows"]


class Filled(NamedTuple):
    """Rows of samples.

    Attributes:
        row: of each sample.
        size: the length that each row was opened with.
        space: what each row has left.
    """

    row: list[int]
    size: list[int]
    space: list[int]

    def count_by_size(self, sizes: Sequence[int]) -> list[int]:
        """Return how many rows have each size as the smallest that holds their tokens."""
        counts = [0] * len(sizes)
        for size, space in zip(self.size, self.space, strict=True):
            counts[bisect_left(sizes, size - space)] += 1
        return counts


def fill_rows(sizes: Sequence[int], lengths: Iterable[int], most: Sequence[int] | None = None) -> Filled:
    """Place samples, longest first, into rows of these sizes, each where the least space is left.

    Among equals a sample goes into the row that has had this space longest; where none holds it, into a new row of the
    smallest size that does. A row of `most` samples, a number for each size, is full.
    """
    room: list[int] = []  # of each row, the samples that it may still take
    filled = Filled([], [], [])
    rows: dict[int, deque[int]] = {}  # by the space that they have left, the one that has had it longest first
    spaces: list[int] = []  # the keys, ascending
    for length in lengths:
        place = bisect_left(spaces, length)
        if place == len(spaces):
            index = bisect_left(sizes, length)
            row, space = len(filled.size), sizes[index]
            room.append(space if most is None else most[index])
            filled.size.append(space)
            filled.space.append(space)
        else:
            space = spaces[place]
            row = rows[space].popleft()
            if not rows[space]:
                del rows[space], spaces[place]
        space -= length
        filled.row.append(row)
        filled.space[row] = space
        room[row] -= 1
        if space and room[row]:
            if space not in rows:
                rows[space] = deque()
                insort(spaces, space)
            rows[space].append(row)
    return filled
