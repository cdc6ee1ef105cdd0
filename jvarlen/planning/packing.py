"""Packs several samples into each row.

Letters: N samples, n of them (or of their chunks) packed, R rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from jaxtyping import Int64

from jvarlen._common.checks import UserError, check_choices, is_integer
from jvarlen._common.keywords import check_keywords
from jvarlen.planning import lengths as sample_lengths
from jvarlen.planning._kernels import best_fit, fill_blocks, fill_pair_rows
from jvarlen.planning.budget import check_bucket_lengths
from jvarlen.planning.lengths import FittedLengths, LengthHistogram, PackedOverlong, check_sample_lengths, fit_lengths
from jvarlen.planning.order import ROWS_STREAM, Order, as_order, check_seed, order_samples, random_keys, stable_argsort

__all__ = [
    "MAX_PAIR_ROW", "Packing", "PackingChoice", "PackingMethod", "RowPacking", "num_rows_at_once", "orders_of_packing",
    "pack_by_method", "pack_samples", "rows_by_tokens",
]  # fmt: skip

PackingMethod = Literal["best_fit", "wrapped"]
RowPacking = Literal["padded", PackingMethod]  # padded: one sample a row
PackingChoice = Literal[RowPacking, "auto"]

_LEAST_BLOCK = 256  # samples
_MOST_PAIRS = 2048  # of a block; the time is quadratic in them
MAX_PAIR_ROW = 2**23 - 1  # so that products of lengths and factors fit int64


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Samples packed into rows.

    If samples are pairs, every length has a last axis of two.

    Attributes:
      sample_ids: int64[n], row by row, each row from its beginning.
      row_offsets: int64[R+1]; row r holds `sample_ids[row_offsets[r]:row_offsets[r+1]]`.
      sample_lengths: int64[n], tokens of each sample; a truncated sample counts with its cut length.
      capacity: int64[R], the length of each row.
      row_lengths: the lengths that rows may have, ascending; of pairs, the length of each side.
      overlong: the rule for samples longer than the longest row.
      num_dropped: samples left out by that rule.
      num_truncated: samples cut by that rule.
      chunk_starts: int64[n], the token of its sample with which each begins: above 0 for later chunks of a sample that
        is split, which has its id once a chunk. None where no sample is split; wrapped packing always has them.
      method: that of `pack_samples`.
      histograms: how many samples have each length, a histogram a side, also of samples that an order left out.
      block_size: samples of a block, where they are packed in blocks; None where all are packed at once.
    """

    sample_ids: Int64[np.ndarray, " n"]
    row_offsets: Int64[np.ndarray, " R_plus_1"]
    sample_lengths: Int64[np.ndarray, " n *sides"]
    capacity: Int64[np.ndarray, " R *sides"]
    row_lengths: tuple[int, ...]
    histograms: tuple[LengthHistogram, ...]
    overlong: PackedOverlong = "error"
    num_dropped: int = 0
    num_truncated: int = 0
    chunk_starts: Int64[np.ndarray, " n"] | None = None
    method: PackingMethod = "best_fit"
    block_size: int | None = None

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.capacity)

    @property
    def num_tokens(self) -> Int64[np.ndarray, " R *sides"]:
        """int64[R], tokens in each row, which a plan takes as the length of the row."""
        return np.add.reduceat(self.sample_lengths, self.row_offsets[:-1])

    def samples_per_row(self, row_lengths: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The most samples that a row of each length could hold in any epoch: as many of the shortest as fit.

        Wrapped, two more: the rest of the one before them, and the beginning of the one after. At least 1, at most
        one a token.

        Args:
          row_lengths: of K rows; each as long as it is on every side.

        Returns:
          K numbers.
        """
        limits = []
        for row_length, (lengths, counts) in zip(np.array(row_lengths, np.int64).T, self.histograms, strict=True):
            num_tokens, num_samples = (np.append(0, np.cumsum(each)) for each in (lengths * counts, counts))
            num_whole = np.searchsorted(num_tokens[1:], row_length, side="right")  # lengths all of whose samples fit
            next_length = np.append(lengths, 2**62)[num_whole]
            limits.append(num_samples[num_whole] + (row_length - num_tokens[num_whole]) // next_length)
        most = np.min(limits, axis=0) + 2 * (self.method == "wrapped")
        return tuple(np.clip(most, 1, [row_length[0] for row_length in row_lengths]).tolist())

    @property
    def starts(self) -> Int64[np.ndarray, " n *sides"]:
        """int64[n], the position in its row at which each sample begins."""
        starts = np.cumsum(self.sample_lengths, axis=0) - self.sample_lengths
        return starts - np.repeat(starts[self.row_offsets[:-1]], np.diff(self.row_offsets), axis=0)

    @property
    def fill(self) -> float:
        """The share of all rows' tokens that are real, in (0, 1]."""
        return int(self.sample_lengths.sum()) / int(self.capacity.sum())


@check_keywords
def pack_samples(
    lengths: npt.ArrayLike,
    row_lengths: int | Sequence[int],
    *,
    method: PackingMethod = "best_fit",
    order: str | Order | npt.ArrayLike = "dataset",
    seed: int = 0,
    epoch: int = 0,
    overlong: PackedOverlong = "error",
) -> Packing:
    """Packs several samples into each row, for your loop; `make_plan(packing=…)` also plans the rows.

    Wrapped, samples lie end to end in their order, and are cut at the end of every row, so that all rows but the last
    are full. Each chunk is packed and counted as a sample.

    Best fit keeps samples whole. Samples come by descending length, ties as in `order`, each into the open row with the
    least free space that holds it; of several such rows, into the one that has had this space longest. If no open row
    holds it, a new one is opened with the smallest length that does.

    Best fit packs shuffled samples in blocks, so that every epoch has other rows. A block is `Order.block_size` samples
    that follow each other, and those of the last row of the block before, which is not kept. `"auto"` is the least
    power of two, from 256 on and below the number of samples, with which the rows of epoch 0 are at most 1 %, rounded
    up, more than without blocks. If there is none, it is the largest, up to half the number of samples, with which they
    are at most 5 % more; else none.

    Pairs, such as source and target, share rows with a length T for each side. Rows come one after the other. A row
    repeatedly takes, of the pairs that fit it on both sides, the one with the largest sum over the sides of
    l · ⌊2**40 · s / T²⌋, where l is the length of the pair and s the space that is left; of equal sums the larger first
    length wins, then the larger second one. All come in blocks: `"auto"` is the largest power of two from 256 to 2,048
    that is at most half the number of pairs; none if there is none. Words other than `"shuffle"` pack the blocks of its
    epoch 0.

    Args:
      lengths: integers[N], tokens per sample; or integers[N, 2], those of both sides of a pair.
      row_lengths: the lengths that rows may have: one integer, or several, strictly ascending, as from
        `choose_row_lengths`; wrapped, one. For pairs the length of a row on each side, below 2**23.
      method: `"best_fit"`, or `"wrapped"`, of single samples, in blocks of no size, and with the default `overlong`,
        since every sample may be cut.
      order: a word, an array of sample ids or an `Order`, whose `by` counts, and with `"shuffle"` its `block_size`;
        `"shuffle"` draws from a stream that is independent of that of plans.
      seed: as in `sample_order`.
      epoch: as in `sample_order`.
      overlong: what happens to samples longer than the longest row: `"error"`, `"drop"`, `"truncate"` (on every side),
        or, not of pairs, `"split"`: into chunks as long as that row and a shorter last one.

    Returns:
      `Packing`.

    Raises:
      ValueError: arguments that are not as described; offending samples are listed as id, value, limit.

    Example:
      >>> packing = pack_samples([3, 6, 2, 5, 4], 10)
      >>> packing.sample_ids.tolist(), packing.row_offsets.tolist(), packing.starts.tolist()
      ([1, 4, 3, 0, 2], [0, 2, 5], [0, 6, 0, 5, 8])

    References:
      Packing by histogram: Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination". Best fit by
      descending size: Johnson et al. 1974. Pairs: Panigrahy et al. 2011, "Heuristics for Vector Bin Packing".
    """
    check_choices(overlong=(overlong, PackedOverlong), method=(method, PackingMethod))
    check_seed(seed, epoch)
    checked = check_sample_lengths(lengths)
    sizes = list(row_lengths) if isinstance(row_lengths, Iterable) else [row_lengths]
    return pack_by_method(checked, sizes, method, as_order(order), seed, epoch, overlong)


def pack_by_method(
    lengths: Int64[np.ndarray, " N *sides"],
    row_lengths: Sequence[int],
    method: PackingMethod,
    order: Order,
    seed: int,
    epoch: int,
    overlong: PackedOverlong,
) -> Packing:
    """`pack_samples` for checked lengths."""
    is_pairs = lengths.ndim == 2
    if is_pairs and (method == "wrapped" or overlong == "split"):
        raise UserError('pairs are not cut: method="wrapped" and overlong="split" are for samples of one length each')
    sizes = _check_row_lengths(row_lengths, is_pairs)
    if method == "wrapped":
        return _wrap(lengths, sizes, order, seed, epoch, overlong)
    is_shuffled = order.is_by("shuffle")
    if not is_shuffled and order.sample_blocks is not None:
        raise UserError(f"block_size ({order.block_size}) is for order 'shuffle': others are packed all at once")
    if is_pairs and isinstance(order.by, str):
        order, epoch = dataclasses.replace(order, by="shuffle"), epoch * is_shuffled
    ids = _order_ids(lengths, order, seed, epoch)
    fitted = _fit(lengths[ids], sizes, overlong, ids)
    block_size, rows = order.sample_blocks, None
    if is_pairs and order.block_size == "auto":
        block_size = min(_MOST_PAIRS, 2 ** (len(ids).bit_length() - 2)) if len(ids) >= 2 * _LEAST_BLOCK else None
    elif is_shuffled and order.block_size == "auto":
        first = ids if epoch == 0 else _order_ids(lengths, order, seed, 0)
        tried = fitted if epoch == 0 else _fit(lengths[first], sizes, overlong, first)
        block_size, rows = _choose_blocks(tried, len(ids), sizes)
    if rows is None or epoch > 0:
        rows = _pack(fitted.lengths, _block_ends(fitted.place, block_size), sizes)
    # Another epoch may take other samples.
    of_all = fitted if len(ids) == len(lengths) else _fit(lengths, sizes, "drop" if overlong == "error" else overlong)
    return Packing(
        sample_ids=ids[fitted.place][rows.which],
        row_offsets=rows.offsets,
        sample_lengths=fitted.lengths[rows.which],
        capacity=rows.capacity,
        chunk_starts=None if fitted.starts is None else fitted.starts[rows.which],
        row_lengths=tuple(sizes.tolist()),
        histograms=_side_histograms(of_all.lengths),
        overlong=overlong,
        num_dropped=fitted.num_dropped,
        num_truncated=fitted.num_truncated,
        block_size=block_size,
    )


def orders_of_packing(order: Order, method: PackingMethod) -> tuple[Order, Order]:
    """The order in which the samples of a plan are packed, and that of the rows."""
    row_order = dataclasses.replace(order, block_size=None)
    if order.is_by("shuffle"):
        return order, row_order
    if method == "wrapped" or not isinstance(order.by, str):
        return Order(order.by, block_size=order.block_size), dataclasses.replace(row_order, by="dataset")
    return Order("dataset", block_size=order.block_size), row_order  # in which best fit makes rows of the same sizes


def _side_histograms(lengths: Int64[np.ndarray, " n *sides"]) -> tuple[LengthHistogram, ...]:
    """How many samples have each length, for each side."""
    if lengths.ndim == 1:
        return (sample_lengths.histogram_of(lengths),)
    return tuple(LengthHistogram(*np.unique(side, return_counts=True)) for side in lengths.T)


def _check_row_lengths(row_lengths: Sequence[int], is_pairs: bool) -> Int64[np.ndarray, " K"]:
    if not is_pairs:
        return check_bucket_lengths(row_lengths, "row_lengths")
    is_allowed = np.shape(row_lengths) == (2,) and all(map(is_integer, row_lengths))
    if not is_allowed or not 1 <= min(row_lengths) <= max(row_lengths) <= MAX_PAIR_ROW:
        raise UserError(
            "rows of pairs have two lengths (row_lengths, or those of the one bucket), integers from 1 to "
            f"{MAX_PAIR_ROW}, not {row_lengths}"
        )
    return np.array(row_lengths, np.int64)


def _order_ids(lengths: Int64[np.ndarray, " N *sides"], order: Order, seed: int, epoch: int) -> Int64[np.ndarray, " m"]:
    """The order in which samples are packed."""
    if order.is_by("shuffle"):
        return stable_argsort(random_keys(len(lengths), seed=seed, epoch=epoch, stream=ROWS_STREAM))
    return order_samples(sample_lengths.sample_sizes(lengths), order)


def _wrap(
    lengths: Int64[np.ndarray, " N"],
    sizes: Int64[np.ndarray, " K"],
    order: Order,
    seed: int,
    epoch: int,
    overlong: PackedOverlong,
) -> Packing:
    """`pack_samples` end to end, cut at the end of every row."""
    refused = [f"block_size={order.block_size}"] if order.sample_blocks is not None else []
    refused += [f"overlong={overlong!r}"] if overlong != "error" else []
    refused += [f"several row lengths, {sizes.tolist()}"] if len(sizes) > 1 else []
    if refused:
        raise UserError(f"wrapped packing fills rows of one length to their end, and excludes {'; '.join(refused)}")
    ids = _order_ids(lengths, order, seed, epoch)
    ordered = lengths[ids]
    row_length = int(sizes[0])
    begins = np.cumulative_sum(ordered, include_initial=True)  # of each sample, and the end of the last
    row_begins = np.arange(0, begins[-1], row_length)
    place = np.searchsorted(begins, row_begins)
    is_cut = begins[place] != row_begins
    place, cuts = place[is_cut], row_begins[is_cut]
    which = np.insert(np.arange(len(ids)), place, place - 1)
    chunk_begins = np.insert(begins[:-1], place, cuts)
    return Packing(
        sample_ids=ids[which],
        row_offsets=np.append(np.searchsorted(chunk_begins, row_begins), len(which)),
        sample_lengths=np.diff(chunk_begins, append=begins[-1]),
        capacity=np.full(len(row_begins), row_length),
        chunk_starts=chunk_begins - begins[which],
        row_lengths=(row_length,),
        overlong="split",
        method="wrapped",
        histograms=_side_histograms(lengths),
    )


def _choose_blocks(
    fitted: FittedLengths, num_samples: int, sizes: Int64[np.ndarray, " K"]
) -> tuple[int | None, _Rows | None]:
    """The block size of `"auto"`, None for no blocks, and the rows with such blocks."""
    powers = [2**power for power in range(_LEAST_BLOCK.bit_length() - 1, (num_samples - 1).bit_length())]
    if not powers or not len(fitted.lengths):
        return None, None
    num_rows = num_rows_at_once(fitted.lengths, sizes)
    within = [(block_size, num_rows - (-num_rows // 100)) for block_size in powers]
    within += [(size, num_rows + num_rows // 20) for size in reversed(powers) if 2 * size <= num_samples]
    for block_size, most_rows in within:
        rows = _pack(fitted.lengths, _block_ends(fitted.place, block_size), sizes, most_rows)
        if 0 < len(rows.capacity) <= most_rows:
            return block_size, rows
    return None, None


def _block_ends(place: Int64[np.ndarray, " n"], block_size: int | None) -> Int64[np.ndarray, " b"]:
    """Where blocks of `block_size` samples end; None for one block."""
    if block_size is None:
        return np.array([len(place)])
    return np.append(np.flatnonzero(np.diff(place // block_size)) + 1, len(place))


class _Rows(NamedTuple):
    """The contents of rows: indices of samples, row by row, where each row begins, and the length of each."""

    which: Int64[np.ndarray, " n"]
    offsets: Int64[np.ndarray, " R_plus_1"]
    capacity: Int64[np.ndarray, " R *sides"]


def _pack(
    lengths: Int64[np.ndarray, " n *sides"],
    block_ends: Int64[np.ndarray, " b"],
    sizes: Int64[np.ndarray, " K"],
    most_rows: int = 2**62,
) -> _Rows:
    """Packs block by block; not to the end where the rows are more than `most_rows`."""
    if lengths.ndim == 2:
        return _pack_pairs(lengths, block_ends, sizes)
    if len(block_ends) == 1:
        return _pack_at_once(lengths, sizes)
    block = np.repeat(np.arange(len(block_ends)), np.diff(block_ends, prepend=0))
    longest = int(lengths.max())
    if len(block_ends) * (longest + 1) < 2**62:
        descending = stable_argsort(block * (longest + 1) + (longest - lengths))
    else:
        descending = np.lexsort([-lengths, block])
    which, ends, capacity = fill_blocks(lengths, descending, block_ends, sizes, most_rows)
    return _Rows(which, np.append(0, ends), capacity)


def _pack_at_once(lengths: Int64[np.ndarray, " n"], sizes: Int64[np.ndarray, " K"]) -> _Rows:
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
    return _Rows(descending[stable_argsort(row)], offsets, capacity)


def num_rows_at_once(lengths: Int64[np.ndarray, " n"], sizes: Int64[np.ndarray, " K"]) -> int:
    """How many rows samples take that are packed without blocks."""
    values, counts = (column[::-1].copy() for column in sample_lengths.histogram_of(lengths))
    return int(rows_by_tokens(values, counts, sizes)[1].sum())


def _best_fit(
    lengths: Int64[np.ndarray, " V"], counts: Int64[np.ndarray, " V"], sizes: Int64[np.ndarray, " K"]
) -> tuple[Int64[np.ndarray, "r 4"], Int64[np.ndarray, "e 5"]]:
    """Runs and rows with space of `best_fit`."""
    room = 8 * len(lengths) + 8
    while not len((found := best_fit(lengths, counts, sizes, room))[0]):
        room *= 2
    return found


def rows_by_tokens(
    lengths: Int64[np.ndarray, " V"], counts: Int64[np.ndarray, " V"], sizes: Int64[np.ndarray, " K"]
) -> tuple[Int64[np.ndarray, " m"], Int64[np.ndarray, " m"]]:
    """Tokens of rows that samples of descending lengths are packed into, and how many rows to add or to take off."""
    runs, unfilled = _best_fit(lengths, counts, sizes)
    _, per_row, num_samples, opened = runs.T
    _, num_alike, size, space, _ = unfilled.T
    num_opened = -(-num_samples // per_row) * (opened > 0)
    return np.concatenate([opened, size, size - space]), np.concatenate([num_opened, -num_alike, num_alike])


def _pack_pairs(
    lengths: Int64[np.ndarray, "n 2"], block_ends: Int64[np.ndarray, " b"], sizes: Int64[np.ndarray, " 2"]
) -> _Rows:
    """Packs blocks of pairs, each with those of the last row of the one before."""
    placed, row_of = [], []
    carried, begin, num_rows = np.empty(0, np.int64), 0, 0
    for end in block_ends.tolist():
        pairs = np.concatenate([carried, np.arange(begin, end)])[::-1]
        pairs = pairs[np.lexsort(lengths[pairs].T[::-1])]
        places, rows = fill_pair_rows(lengths[pairs], sizes)
        last = int(rows[-1]) if end < len(lengths) else len(lengths)
        placed.append(pairs[places[rows < last]])
        row_of.append(num_rows + rows[rows < last])
        carried, begin, num_rows = np.sort(pairs[places[rows == last]]), end, num_rows + min(last, int(rows[-1]) + 1)
    offsets = np.cumulative_sum(np.bincount(np.concatenate(row_of)), include_initial=True)
    return _Rows(np.concatenate(placed), offsets, np.tile(sizes, (len(offsets) - 1, 1)))


def _fit(
    lengths: Int64[np.ndarray, " N *sides"],
    row_lengths: Int64[np.ndarray, " K"],
    overlong: PackedOverlong,
    ids: Int64[np.ndarray, " N"] | None = None,
) -> FittedLengths:
    """Applies the rule for samples that are longer than the longest row, or than a row on any side."""
    if overlong == "split" and lengths.max() > row_lengths[-1]:
        return sample_lengths.split_lengths(lengths, int(row_lengths[-1]))
    limit = int(row_lengths[-1]) if lengths.ndim == 1 else row_lengths
    return fit_lengths(lengths, limit, "error" if overlong == "split" else overlong, ids, is_packed=True)
