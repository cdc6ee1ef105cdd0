"""Puts samples into rows: by best fit, in blocks or all at once, and pairs.

Letters: n samples, V distinct lengths, K lengths of rows, R rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from jvarlen.planning import lengths as sample_lengths
from jvarlen.planning._kernels import best_fit, fill_pair_rows
from jvarlen.planning.order import stable_argsort

__all__ = ["NO_MOST", "RowSizes", "Rows", "num_rows_at_once", "place_in_rows", "rows_by_tokens"]

NO_MOST = 2**62  # samples of a row, which has fewer


class RowSizes(NamedTuple):
    """The lengths of rows, ascending, and the most samples of a row of each; for pairs one row has two lengths."""

    lengths: Int64[np.ndarray, " K"]
    most: Int64[np.ndarray, " most"]

    @property
    def has_most(self) -> bool:
        """Whether rows can be full before their tokens are."""
        return int(self.most[0]) < NO_MOST


class Rows(NamedTuple):
    """The contents of rows: indices of samples, row by row, where each row begins, and the length of each."""

    which: Int64[np.ndarray, " n"]
    offsets: Int64[np.ndarray, " R_plus_1"]
    capacity: Int64[np.ndarray, " R *sides"]


def place_in_rows(
    lengths: Int64[np.ndarray, " n *sides"],
    block_ends: Int64[np.ndarray, " b"],
    sizes: RowSizes,
    *,
    most_rows: int = 2**62,
    carries: bool = True,
) -> Rows:
    """Packs block by block; no rows as soon as there must be more than `most_rows`.

    The samples of the last row of a block go to the next block, if it carries them.
    """
    place = _place_at_once if lengths.ndim == 1 else _place_pairs
    which, num_in_row, capacity = [], [], []
    carried, begin, num_rows = np.empty(0, np.int64), 0, 0
    for end in block_ends.tolist():
        samples = np.concatenate([carried, np.arange(begin, end)])
        rows = place(lengths[samples], sizes)
        num_kept = len(rows.capacity) - (carries and end < len(lengths))
        num_rows += num_kept
        if num_rows > most_rows:
            return Rows(carried[:0], np.zeros(1, np.int64), carried[:0])
        placed, kept = samples[rows.which], int(rows.offsets[num_kept])
        which.append(placed[:kept])
        num_in_row.append(np.diff(rows.offsets[: num_kept + 1]))
        capacity.append(rows.capacity[:num_kept])
        carried, begin = np.sort(placed[kept:]), end
    offsets = np.cumulative_sum(np.concatenate(num_in_row), include_initial=True)
    return Rows(np.concatenate(which), offsets, np.concatenate(capacity))


def _place_at_once(lengths: Int64[np.ndarray, " n"], sizes: RowSizes) -> Rows:
    """Packs on the histogram, so that time hardly depends on the number of samples."""
    descending = stable_argsort(-lengths)
    ordered = lengths[descending]
    first = np.flatnonzero(np.diff(ordered, prepend=-1))  # of each distinct length
    runs, _ = _best_fit(ordered[first], np.diff(first, append=len(ordered)), sizes)
    first_row, per_row, num_samples, opened = runs.T
    run = np.repeat(np.arange(len(runs)), num_samples)
    row = first_row[run] + (np.arange(len(run)) - (np.cumsum(num_samples) - num_samples)[run]) // per_row[run]
    capacity = np.repeat(opened, (opened > 0) * -(-num_samples // per_row))
    offsets = np.cumulative_sum(np.bincount(row, minlength=len(capacity)), include_initial=True)
    return Rows(descending[stable_argsort(row)], offsets, capacity)


def num_rows_at_once(lengths: Int64[np.ndarray, " n"], sizes: RowSizes) -> int:
    """How many rows samples take that are packed without blocks."""
    values, counts = (column[::-1].copy() for column in sample_lengths.histogram_of(lengths))
    return int(rows_by_tokens(values, counts, sizes)[1].sum())


def _best_fit(
    lengths: Int64[np.ndarray, " V"], counts: Int64[np.ndarray, " V"], sizes: RowSizes
) -> tuple[Int64[np.ndarray, "r 4"], Int64[np.ndarray, "e 6"]]:
    """Runs and rows with space of `best_fit`."""
    room = 8 * len(lengths) + 8
    while not len((found := best_fit(lengths, counts, *sizes, room))[0]):
        room *= 2
    return found


def rows_by_tokens(
    lengths: Int64[np.ndarray, " V"], counts: Int64[np.ndarray, " V"], sizes: RowSizes
) -> tuple[Int64[np.ndarray, " m"], Int64[np.ndarray, " m"]]:
    """Tokens of rows that samples of descending lengths are packed into, and how many rows to add or to take off."""
    runs, unfilled = _best_fit(lengths, counts, sizes)
    _, per_row, num_samples, opened = runs.T
    _, num_alike, size, space, *_ = unfilled.T
    num_opened = -(-num_samples // per_row) * (opened > 0)
    return np.concatenate([opened, size, size - space]), np.concatenate([num_opened, -num_alike, num_alike])


def _place_pairs(lengths: Int64[np.ndarray, "n 2"], sizes: RowSizes) -> Rows:
    """Packs pairs."""
    backwards = np.arange(len(lengths))[::-1]  # so that of equal pairs the first comes last
    ascending = backwards[np.lexsort(lengths[backwards].T[::-1])]
    places, rows = fill_pair_rows(lengths[ascending], sizes.lengths, int(sizes.most[0]), ascending[:0], NO_MOST)
    offsets = np.cumulative_sum(np.bincount(rows), include_initial=True)
    return Rows(ascending[places], offsets, np.tile(sizes.lengths, (len(offsets) - 1, 1)))
