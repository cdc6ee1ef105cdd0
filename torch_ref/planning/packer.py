"""Fills rows with samples in order: by best fit, all at once or in blocks; or end to end.

Letters: n samples or chunks of them, R rows, K lengths of rows.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torch_ref.planning.joint import fill_pair_rows, fit_joint
from torch_ref.planning.lengths import Fitted, fit_lengths
from torch_ref.planning.order import stable_argsort
from torch_ref.planning.placing import fill_rows

__all__ = ["Chunks", "PackedRows", "Packer", "check_samples_per_row", "join_rows", "lay_end_to_end", "split_samples"]


class Chunks(NamedTuple):
    """What is packed, in order.

    Attributes:
        sample_ids: int64[n].
        lengths: int64[n] or int64[n, D], cut.
        starts: int64[n], the tokens of its sample before each; None if no sample was split.
        place: int64[n], the place of its sample in the order.
        num_dropped: samples left out.
        num_truncated: samples cut.
    """

    sample_ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    starts: NDArray[np.int64] | None
    place: NDArray[np.int64]
    num_dropped: int
    num_truncated: int


class PackedRows(NamedTuple):
    """Rows of some chunks: their indices by row, how many each row holds, and the length of each row."""

    chunks: NDArray[np.int64]
    sizes: NDArray[np.int64]
    capacity: NDArray[np.int64]


class Packer:
    """Packs samples in any order, all at once or in blocks.

    Args:
        lengths: int64[N] or int64[N, 2].
        sizes: the lengths of rows.
        overlong: the rule for samples that no row holds.
        most: the most samples of a row of each length, or of pairs of every row; None for as many as fit.
    """

    def __init__(
        self, lengths: NDArray[np.int64], sizes: NDArray[np.int64], overlong: str, most: tuple[int, ...] | None
    ) -> None:
        """Take what all orders share."""
        self.lengths, self.sizes, self.overlong, self.most = lengths, sizes, overlong, most

    def fit(self, ids: NDArray[np.int64]) -> Chunks:
        """Apply the rule for long samples to those of the ordered ids."""
        starts = None
        if self.lengths.ndim == 2:
            fitted = fit_joint(self.lengths, ids, self.sizes, self.overlong)
        elif self.overlong == "split" and (self.lengths[ids] > self.sizes[-1]).any():
            fitted, starts = split_samples(self.lengths, ids, int(self.sizes[-1]))
        else:
            rule = "error" if self.overlong == "split" else self.overlong
            fitted = fit_lengths(self.lengths, ids, int(self.sizes[-1]), rule, name="the longest row", is_packed=True)
        places = np.empty(len(self.lengths), dtype=np.int64)
        places[ids] = np.arange(len(ids))
        return Chunks(
            fitted.sample_ids,
            fitted.lengths,
            starts,
            places[fitted.sample_ids],
            fitted.num_dropped,
            fitted.num_truncated,
        )

    def lengths_of_all(self, num_ordered: int) -> NDArray[np.int64] | None:
        """Return the cut lengths of all samples where an order has fewer of them, since another may take others."""
        if num_ordered == len(self.lengths):
            return None
        rule = "drop" if self.overlong == "error" else self.overlong
        return Packer(self.lengths, self.sizes, rule, self.most).fit(np.arange(len(self.lengths))).lengths

    def pack_blocks(self, fitted: Chunks, block_size: int | None) -> PackedRows:
        """Pack chunks of `block_size` samples at a time, with those of the last row before; None: all at once."""
        block = fitted.place // (block_size if isinstance(block_size, int) else len(self.lengths))
        *ends, num_chunks = np.append(np.flatnonzero(np.diff(block)) + 1, len(block)).tolist()
        begin, left, parts = 0, np.empty(0, dtype=np.int64), []
        for end in ends:
            indices = np.concatenate([left, np.arange(begin, end)])
            rows = self.pack_at_once(fitted.lengths[indices])
            begin, chunks, last = end, indices[rows.chunks], len(indices) - int(rows.sizes[-1])
            left = np.sort(chunks[last:])
            parts.append(PackedRows(chunks[:last], rows.sizes[:-1], rows.capacity[:-1]))
        indices = np.concatenate([left, np.arange(begin, num_chunks)])
        rows = self.pack_at_once(fitted.lengths[indices])
        return join_rows([*parts, rows._replace(chunks=indices[rows.chunks])])

    def pack_at_once(self, lengths: NDArray[np.int64]) -> PackedRows:
        """Pack chunks of these lengths."""
        if lengths.ndim == 2:
            rows = fill_pair_rows(lengths, self.sizes, None if self.most is None else self.most[0])
            return PackedRows(np.concatenate(rows), np.array(list(map(len, rows))), np.tile(self.sizes, (len(rows), 1)))
        longest_first = stable_argsort(lengths, descending=True)
        filled = fill_rows(self.sizes.tolist(), lengths[longest_first].tolist(), self.most)
        row, capacity = np.array(filled.row, dtype=np.int64), np.array(filled.size, dtype=np.int64)
        return PackedRows(longest_first[stable_argsort(row)], np.bincount(row, minlength=len(capacity)), capacity)


def join_rows(parts: Sequence[PackedRows]) -> PackedRows:
    """Return the rows of all parts."""
    return PackedRows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def lay_end_to_end(
    lengths: NDArray[np.int64], ids: NDArray[np.int64], size: int, most: int | None, ends: Sequence[int]
) -> tuple[Chunks, PackedRows]:
    """Let samples follow each other through rows of one length, and of at most so many samples.

    Args:
        lengths: int64[N].
        ids: int64[n], of those that follow each other.
        size: the length of rows.
        most: the most samples of a row, parts of them included; None for as many as fit.
        ends: the tokens up to the end of each step, which ends a row.

    Returns:
        The parts of samples, in order, and the rows of them.
    """
    after = np.cumsum(lengths[ids])
    before = after - lengths[ids]
    row_begins: list[int] = []
    for begin, end in pairwise([0, *ends]):
        while begin < end:
            if most is None:
                row_begins += range(begin, end, size)
                break
            row_begins.append(begin)
            last = min(int(np.searchsorted(after, begin, side="right")) + most, len(after)) - 1
            begin = min(begin + size, end, int(after[last]))
    bounds = np.union1d(before, row_begins)
    sample = np.searchsorted(after, bounds, side="right")
    offsets = np.append(np.searchsorted(bounds, row_begins), len(bounds))
    chunks = Chunks(ids[sample], np.diff(bounds, append=after[-1]), bounds - before[sample], sample, 0, 0)
    return chunks, PackedRows(np.arange(len(bounds)), np.diff(offsets), np.full(len(row_begins), size))


def check_samples_per_row(samples_per_row: Any, row_lengths: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the most samples of a row of each length, at most one a token; None if they are not given."""
    if samples_per_row is None:
        return None
    most = np.asarray(samples_per_row)
    if most.ndim > 1 or most.dtype.kind not in "iu" or not (most >= 1).all():
        raise ValueError(f"samples_per_row must be an integer >= 1, or one for each bucket, got {samples_per_row!r}")
    if most.ndim and len(most) != len(row_lengths):
        raise ValueError(f"samples_per_row must be one number or {len(row_lengths)}, got {samples_per_row!r}")
    given = np.broadcast_to(most, len(row_lengths)).tolist()
    for (shorter, few), (longer, many) in pairwise(zip(row_lengths, given, strict=True)):
        if few > many or (shorter == longer and few != many):
            raise ValueError(
                f"samples_per_row may not descend, nor differ for rows of one length, got {samples_per_row!r}"
            )
    return tuple(min(number, row[0]) for number, row in zip(given, row_lengths, strict=True))


def split_samples(lengths: NDArray[np.int64], ids: NDArray[np.int64], limit: int) -> tuple[Fitted, NDArray[np.int64]]:
    """Return the chunks of the ordered samples, with the tokens before each."""
    full, rest = np.divmod(lengths[ids], limit)
    number = full + (rest > 0)
    place = np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
    is_full = place < np.repeat(full, number)
    return Fitted(np.repeat(ids, number), np.where(is_full, limit, np.repeat(rest, number)), 0, 0), place * limit
