"""Puts samples into rows: by best fit, in blocks or all at once, and pairs.

Letters: n samples, V distinct lengths, K lengths of rows, R rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from jvarlen.planning import lengths as sample_lengths
from jvarlen.planning._kernels import best_fit, fill_blocks, fill_pair_rows
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
    """Packs block by block; not to the end where the rows are more than `most_rows`.

    The samples of the last row of a block go to the next block, if it carries them.
    """
    if lengths.ndim == 2:
        return _place_pairs(lengths, block_ends, sizes, carries)
    if len(block_ends) == 1:
        return _place_at_once(lengths, sizes)
    block = np.repeat(np.arange(len(block_ends)), np.diff(block_ends, prepend=0))
    longest = int(lengths.max())
    if len(block_ends) * (longest + 1) < 2**62:
        descending = stable_argsort(block * (longest + 1) + (longest - lengths))
    else:
        descending = np.lexsort([-lengths, block])
    which, ends, capacity = fill_blocks(lengths, descending, block_ends, *sizes, most_rows, carries)
    return Rows(which, np.append(0, ends), capacity)


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


def _place_pairs(
    lengths: Int64[np.ndarray, "n 2"], block_ends: Int64[np.ndarray, " b"], sizes: RowSizes, carries: bool
) -> Rows:
    """Packs blocks of pairs, each with those of the last row of the one before, if it carries them."""
    placed, row_of = [], []
    carried, begin, num_rows = np.empty(0, np.int64), 0, 0
    for end in block_ends.tolist():
        pairs = np.concatenate([carried, np.arange(begin, end)])[::-1]
        pairs = pairs[np.lexsort(lengths[pairs].T[::-1])]
        places, rows = fill_pair_rows(lengths[pairs], sizes.lengths, int(sizes.most[0]), carried[:0], NO_MOST)
        last = int(rows[-1]) if carries and end < len(lengths) else len(lengths)
        placed.append(pairs[places[rows < last]])
        row_of.append(num_rows + rows[rows < last])
        carried, begin, num_rows = np.sort(pairs[places[rows == last]]), end, num_rows + min(last, int(rows[-1]) + 1)
    offsets = np.cumulative_sum(np.bincount(np.concatenate(row_of)), include_initial=True)
    return Rows(np.concatenate(placed), offsets, np.tile(sizes.lengths, (len(offsets) - 1, 1)))
