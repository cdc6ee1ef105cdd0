"""Which samples share a row, on the histogram of lengths, so that time hardly depends on the number of samples.

Letters: n samples, D features, R rows, V distinct lengths, G distinct rows.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from jvarlen.planning._kernels import fill_joint_rows, halved_order, take_segments
from jvarlen.planning.lengths import ends_to_offsets
from jvarlen.planning.order import stable_argsort

__all__ = ["DistinctRows", "Placed", "distinct_joint_rows", "place_samples", "rows_by_tokens"]


class Placed(NamedTuple):
    """Samples in the order of placing, as runs: (length, first row, samples a row, samples)."""

    runs: list[tuple[int, int, int, int]]
    opened: list[tuple[int, int]]  # rows in the order of opening, as (capacity, number)
    unfilled: list[tuple[int, int, int]]  # those with space left, as (capacity, space, number)

    def capacity(self) -> Int64[np.ndarray, " R"]:
        """int64[R], the tokens that each row has room for."""
        return np.repeat(*np.array(self.opened).T)

    def row_of_samples(self) -> Int64[np.ndarray, " n"]:
        """int64[n], the row of each sample."""
        _, first_row, per_row, num_samples = np.array(self.runs).T
        run = np.repeat(np.arange(len(num_samples)), num_samples)
        place_in_run = np.arange(len(run)) - (np.cumsum(num_samples) - num_samples)[run]
        return first_row[run] + place_in_run // per_row[run]


def place_samples(
    lengths: list[int], counts: list[int], capacities: Sequence[int], max_samples_per_row: int | None
) -> Placed:
    """Places `counts` samples of each of the descending `lengths` by the rule of `pack_samples`."""
    if max_samples_per_row is None:
        return _best_fit(lengths, counts, capacities)
    return _row_by_row(lengths, counts, capacities, max_samples_per_row)


def rows_by_tokens(
    lengths: list[int], counts: list[int], capacities: Sequence[int], max_samples_per_row: int | None = None
) -> dict[int, int]:
    """The histogram of tokens in the rows of `pack_samples`."""
    placed = place_samples(lengths, counts, capacities, max_samples_per_row)
    num_rows: collections.Counter[int] = collections.Counter()
    for capacity, opened in placed.opened:
        num_rows[capacity] += opened
    for capacity, space, num_alike in placed.unfilled:
        num_rows[capacity] -= num_alike
        num_rows[capacity - space] += num_alike
    return num_rows


class DistinctRows(NamedTuple):
    """Distinct rows in the order of opening, each with the lengths of its samples in the order of placing."""

    lengths: Int64[np.ndarray, "m D"]
    offsets: Int64[np.ndarray, " G_plus_1"]
    counts: Int64[np.ndarray, " G"]  # how many rows in turn are so
    kinds: Int64[np.ndarray, " m"]  # the number of these lengths among the distinct ones, ascending

    def filled(self, kind: Int64[np.ndarray, " n"]) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " R_plus_1"]]:
        """The samples of all rows, in order of row and place, and where each row begins."""
        of_row = np.repeat(np.arange(len(self.counts)), self.counts)
        row_offsets = ends_to_offsets(np.cumsum(np.diff(self.offsets)[of_row]))
        places = stable_argsort(take_segments(self.kinds, self.offsets, of_row, row_offsets))
        samples = np.empty(len(kind), np.int64)
        samples[places] = stable_argsort(kind)
        return samples, row_offsets


def distinct_joint_rows(
    lengths: Int64[np.ndarray, "n D"],
    row_lengths: Int64[np.ndarray, " D"],
    max_samples_per_row: int | None,
) -> tuple[DistinctRows, Int64[np.ndarray, " n"]]:
    """The rows that samples of several features are packed into."""
    kind = lengths[:, 0]
    for d in range(1, lengths.shape[1]):  # far faster than to sort rows
        codes = kind * (row_lengths[d] + 1) + lengths[:, d]
        _, first, kind = np.unique(codes, return_index=True, return_inverse=True)
    distinct = lengths[first]
    padded = np.pad(distinct, [(0, (1 << (len(distinct) - 1).bit_length()) - len(distinct)), (0, 0)], mode="edge")
    num_of_each = np.zeros(len(padded), np.int64)
    np.add.at(num_of_each, kind, 1)
    num_samples = int(num_of_each.sum())
    max_samples = num_samples if max_samples_per_row is None else min(num_samples, int(max_samples_per_row))
    order = halved_order(padded)
    kinds, offsets, numbers = fill_joint_rows(padded, num_of_each, row_lengths, max_samples, order)
    return DistinctRows(distinct[kinds], offsets, numbers, kinds), kind


def _best_fit(lengths: list[int], counts: list[int], capacities: Sequence[int]) -> Placed:
    """Longest first, each sample into the row with the least space that holds it."""
    # A row that took a sample and still holds another of that length is again the one with the least space that does,
    # so each row takes as many as it holds before the next one is looked at.
    runs: list[tuple[int, int, int, int]] = []
    opened: list[tuple[int, int]] = []
    num_rows = 0
    spaces: list[int] = []  # of open rows, ascending, distinct
    rows_with: dict[int, collections.deque[tuple[int, int, int]]] = {}  # by space: first row, number, capacity
    for length, count in zip(lengths, counts, strict=True):
        while count:
            place = bisect.bisect_left(spaces, length)
            if place < len(spaces):
                space = spaces[place]
                rows = rows_with[space]
                first, num_alike, capacity = rows.popleft()
                per_row = space // length
                used = min(num_alike, -(-count // per_row))
                if used < num_alike:
                    rows.appendleft((first + used, num_alike - used, capacity))
                elif not rows:
                    del spaces[place], rows_with[space]
            else:
                space = capacity = capacities[bisect.bisect_left(capacities, length)]
                per_row = space // length
                first, used = num_rows, -(-count // per_row)
                num_rows += used
                opened.append((capacity, used))
            num_placed = min(count, used * per_row)
            count -= num_placed
            runs.append((length, first, per_row, num_placed))
            num_full, rest = divmod(num_placed, per_row)
            for row, num_alike, left in (
                (first, num_full, space - per_row * length),
                (first + num_full, int(rest > 0), space - rest * length),
            ):
                if num_alike and left:
                    if left not in rows_with:
                        bisect.insort(spaces, left)
                        rows_with[left] = collections.deque()
                    rows_with[left].append((row, num_alike, capacity))
    unfilled = [(capacity, space, number) for space, rows in rows_with.items() for _, number, capacity in rows]
    return Placed(runs, opened, unfilled)


class _Left:
    """The samples that no row holds yet, and their tokens."""

    def __init__(self, lengths: list[int], counts: list[int]):
        self.lengths, self.counts = np.array(lengths[::-1]), np.array(counts[::-1])  # ascending
        self.num_samples = sum(counts)
        self.num_tokens = sum(length * count for length, count in zip(lengths, counts, strict=True))

    def move(self, row: list[int], number: int) -> None:
        """Puts a row's samples back this many times; takes them if the number is below 0."""
        np.add.at(self.counts, np.searchsorted(self.lengths, row), number)
        self.num_samples += number * len(row)
        self.num_tokens += number * sum(row)

    def take(self, most: int) -> list[int]:
        """Takes the longest sample of at most this many tokens: its length, or nothing."""
        place = int(np.searchsorted(self.lengths, most, side="right")) - 1
        while place >= 0 and not self.counts[place]:
            place -= 1
        row = [int(self.lengths[place])] if place >= 0 else []
        self.move(row, -1)
        return row

    def take_pair(self, space: int) -> list[int]:
        """Takes two samples that fill the space exactly, of which most pairs are left, ties by the shorter; or none."""
        num_shorter = np.searchsorted(self.lengths, space // 2, side="right")
        shorter = self.lengths[:num_shorter]
        place = np.searchsorted(self.lengths, space - shorter)
        place[self.lengths.take(place, mode="clip") != space - shorter] = -1
        num_pairs = np.where(place >= 0, np.minimum(self.counts[:num_shorter], self.counts[place]), 0)
        num_pairs[2 * shorter == space] //= 2
        if not num_pairs.any():
            return []
        pair = [space - int(shorter[num_pairs.argmax()]), int(shorter[num_pairs.argmax()])]
        self.move(pair, -1)
        return pair

    def take_greedily(self, capacity: int, max_samples: int) -> list[int]:
        """Takes a row of the longest sample and whatever is the longest that still fits."""
        row: list[int] = []
        while len(row) < max_samples and (taken := self.take(capacity - sum(row))):
            row += taken
        return row

    def take_evenly(self, capacity: int, max_samples: int) -> list[int]:
        """Takes a row of as many samples as it may have, if they fit."""
        shortest, longest = int(self.lengths[0]), int(self.lengths[-1])
        is_longest = (longest + shortest) * self.num_samples >= 2 * self.num_tokens
        row = self.take(longest if is_longest else shortest)
        while num_more := max_samples - len(row):
            space = capacity - sum(row)
            taken = self.take_pair(space) if num_more == 2 else []
            taken = taken or self.take(space // num_more) or self.take(space)
            if not taken:
                break
            row += taken
        return row

    def take_again(self, row: list[int]) -> int:
        """Takes the samples of a row as often as they are left; returns how often."""
        lengths, per_row = np.unique(row, return_counts=True)
        number = int((self.counts[np.searchsorted(self.lengths, lengths)] // per_row).min())
        self.move(row, -number)
        is_left = self.counts > 0
        if not is_left.all():
            self.lengths, self.counts = self.lengths[is_left], self.counts[is_left]
        return number


def _row_by_row(lengths: list[int], counts: list[int], capacities: Sequence[int], max_samples: int) -> Placed:
    """Makes rows of at most `max_samples`, each as often as its samples last."""
    left = _Left(lengths, counts)
    runs: list[tuple[int, int, int, int]] = []
    opened: list[tuple[int, int]] = []
    unfilled: list[tuple[int, int, int]] = []
    num_rows = 0
    while left.num_samples:
        capacity = capacities[bisect.bisect_left(capacities, left.lengths[-1])]
        row = left.take_greedily(capacity, max_samples)
        if left.num_samples * capacities[0] > max_samples * left.num_tokens:
            left.move(row, 1)
            row = left.take_evenly(capacity, max_samples)
        num_alike = 1 + left.take_again(row)
        capacity = capacities[bisect.bisect_left(capacities, sum(row))]
        opened.append((capacity, num_alike))
        if space := capacity - sum(row):
            unfilled.append((capacity, space, num_alike))
        for length, per_row in collections.Counter(row).items():
            runs.append((length, num_rows, per_row, per_row * num_alike))
        num_rows += num_alike
    runs.sort(key=lambda run: -run[0])
    return Placed(runs, opened, unfilled)
