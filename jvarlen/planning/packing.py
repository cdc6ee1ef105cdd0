"""Packs several samples into each row.

Letters: N samples, n of them (or of their chunks) packed, R rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from jaxtyping import Int64

from jvarlen._common.checks import UserError, check_choices, is_integer
from jvarlen._common.keywords import check_keywords
from jvarlen.planning import lengths as sample_lengths
from jvarlen.planning._kernels import wrapped_rows
from jvarlen.planning.budget import check_bucket_lengths
from jvarlen.planning.lengths import FittedLengths, LengthHistogram, PackedOverlong, check_sample_lengths, fit_lengths
from jvarlen.planning.order import ROWS_STREAM, Order, as_order, check_seed, order_samples, random_keys, stable_argsort
from jvarlen.planning.placing import NO_MOST, Rows, RowSizes, num_rows_at_once, place_in_rows
from jvarlen.planning.rules import PackingMethod, PlanRules, SamplesPerRow
from jvarlen.planning.windows import window_starts

__all__ = [
    "MAX_PAIR_ROW", "Packing", "check_samples_per_row", "fit_rows", "lay_end_to_end", "make_packing", "pack_by_method",
    "pack_samples", "row_sizes_of", "rules_of_packing",
]  # fmt: skip

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
        is split, which has its id once a chunk, and where `"truncate_start"` or `"truncate_random"` cut its beginning;
        of pairs int64[n, 2]. None where all are whole or begin with their first; wrapped packing always has them.
      method: that of `pack_samples`.
      histograms: how many samples have each length, a histogram a side, also of samples that an order left out.
      block_size: samples of a block, where they are packed in blocks; None where all are packed at once.
      most_samples: the most samples of a row of each of `row_lengths`, for pairs of the one; None where none are given.
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
    chunk_starts: Int64[np.ndarray, " n *sides"] | None = None
    method: PackingMethod = "best_fit"
    block_size: int | None = None
    most_samples: tuple[int, ...] | None = None

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
        one a token. Where they are given, these.

        Args:
          row_lengths: of K rows; each as long as it is on every side.

        Returns:
          K numbers.
        """
        if self.most_samples is not None:
            lengths_of_rows = [self.row_lengths] if self.sample_lengths.ndim == 2 else [(n,) for n in self.row_lengths]
            given = dict(zip(lengths_of_rows, self.most_samples, strict=True))
            return tuple(given[row_length] for row_length in row_lengths)
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
    samples_per_row: SamplesPerRow | None = None,
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
    repeatedly takes, of the pairs that fit it on both sides, the one with the largest sum over the sides of l · ⌊2**40
    · s / T²⌋, where l is the length of the pair and s the space that is left; of equal sums the larger first length
    wins, then the larger second one, then the order. All come in blocks: `"auto"` is the largest power of two from 256
    to 2,048 that is at most half the number of pairs; none if there is none. Words other than `"shuffle"` pack the
    blocks of its epoch 0.

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
      overlong: what happens to samples longer than the longest row: `"error"`, `"drop"`, or, not of pairs, `"split"`:
        into chunks as long as that row and a shorter last one. Or they are cut on every side: `"truncate"` keeps the
        beginning, `"truncate_start"` the end, and `"truncate_random"` a window of (seed, epoch).
      samples_per_row: the most samples of a row: an integer, or one for each row length, which must not descend. A row
        that holds so many is full. None: as many as fit.

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
    if checked.ndim == 2 and checked.shape[1] > 2:
        raise UserError(f"packed rows hold samples of one or two lengths, not of {checked.shape[1]}")
    sizes = list(row_lengths) if isinstance(row_lengths, Iterable) else [row_lengths]
    rules = PlanRules(
        as_order(order), seed=seed, epoch=epoch, overlong=overlong, packing=method, samples_per_row=samples_per_row
    )
    packing = pack_by_method(checked, sizes, rules)
    longest = packing.row_lengths[-1:] if checked.ndim == 1 else packing.row_lengths
    starts = window_starts(packing.sample_ids, checked, longest, rules)
    return packing if starts is None else dataclasses.replace(packing, chunk_starts=starts)


def pack_by_method(lengths: Int64[np.ndarray, " N *sides"], row_lengths: Sequence[int], rules: PlanRules) -> Packing:
    """`pack_samples` for checked lengths."""
    is_pairs, order, epoch, overlong = lengths.ndim == 2, rules.order, rules.epoch, rules.overlong
    sizes = row_sizes_of(row_lengths, rules, is_pairs=is_pairs)
    if rules.packing == "wrapped":
        if order.sample_blocks is not None:
            raise UserError(f"wrapped packing fills rows to their end, and excludes block_size={order.block_size}")
        ids = _order_ids(lengths, order, rules.seed, epoch)
        fitted, rows = lay_end_to_end(lengths[ids], np.array([lengths[ids].sum()]), sizes)
        return make_packing(lengths, ids, fitted, rows, sizes, rules)
    is_shuffled = order.is_by("shuffle")
    if not is_shuffled and order.sample_blocks is not None:
        raise UserError(f"block_size ({order.block_size}) is for order 'shuffle': others are packed all at once")
    if is_pairs and isinstance(order.by, str):
        order, epoch = dataclasses.replace(order, by="shuffle"), epoch * is_shuffled
    ids = _order_ids(lengths, order, rules.seed, epoch)
    fitted = fit_rows(lengths[ids], sizes, overlong, ids)
    block_size, placed = order.sample_blocks, None
    if is_pairs and order.block_size == "auto":
        block_size = min(_MOST_PAIRS, 2 ** (len(ids).bit_length() - 2)) if len(ids) >= 2 * _LEAST_BLOCK else None
    elif is_shuffled and order.block_size == "auto":
        first = ids if epoch == 0 else _order_ids(lengths, order, rules.seed, 0)
        tried = fitted if epoch == 0 else fit_rows(lengths[first], sizes, overlong, first)
        block_size, placed = _choose_blocks(tried, len(ids), sizes)
    if placed is None or epoch > 0:
        placed = place_in_rows(fitted.lengths, _block_ends(fitted.place, block_size), sizes)
    return make_packing(lengths, ids, fitted, placed, sizes, rules, block_size)


def make_packing(
    lengths: Int64[np.ndarray, " N *sides"],
    ids: Int64[np.ndarray, " m"],
    fitted: FittedLengths,
    rows: Rows,
    sizes: RowSizes,
    rules: PlanRules,
    block_size: int | None = None,
) -> Packing:
    """The packing of samples with these ids, of all that there are, which fit and were placed in rows."""
    is_wrapped = rules.packing == "wrapped"
    of_all = lengths if is_wrapped else fitted.lengths
    if not is_wrapped and len(ids) < len(lengths):  # another epoch may take other samples
        of_all = fit_rows(lengths, sizes, "drop" if rules.overlong == "error" else rules.overlong).lengths
    return Packing(
        sample_ids=ids[fitted.place][rows.which],
        row_offsets=rows.offsets,
        sample_lengths=fitted.lengths[rows.which],
        capacity=rows.capacity,
        chunk_starts=None if fitted.starts is None else fitted.starts[rows.which],
        row_lengths=tuple(sizes.lengths.tolist()),
        histograms=tuple(map(sample_lengths.histogram_of, of_all.reshape(len(of_all), -1).T)),
        overlong="split" if is_wrapped else rules.overlong,
        num_dropped=fitted.num_dropped,
        num_truncated=fitted.num_truncated,
        method="wrapped" if is_wrapped else "best_fit",
        block_size=block_size,
        most_samples=tuple(sizes.most.tolist()) if sizes.has_most else None,
    )


def rules_of_packing(rules: PlanRules) -> tuple[PlanRules, PlanRules]:
    """The rules by which the samples of a plan are packed, and those by which the rows come."""
    order, row_order = rules.order, dataclasses.replace(rules.order, block_size=None)
    if not order.is_by("shuffle"):
        if rules.packing == "wrapped" or not isinstance(order.by, str):
            row_order = dataclasses.replace(row_order, by="dataset")
            order = Order(order.by, block_size=order.block_size)
        else:  # in which best fit makes rows of the same sizes
            order = Order("dataset", block_size=order.block_size)
    return rules._replace(order=order), rules._replace(order=row_order, overlong="error")


def row_sizes_of(row_lengths: Sequence[int], rules: PlanRules, *, is_pairs: bool) -> RowSizes:
    """Checks the lengths of rows, and the most samples of each, which a method is to fill."""
    overlong, is_wrapped = rules.overlong, rules.packing == "wrapped"
    if is_pairs and (is_wrapped or overlong == "split"):
        raise UserError('pairs are not cut: method="wrapped" and overlong="split" are for samples of one length each')
    if is_pairs:
        is_allowed = np.shape(row_lengths) == (2,) and all(map(is_integer, row_lengths))
        if not is_allowed or not 1 <= min(row_lengths) <= max(row_lengths) <= MAX_PAIR_ROW:
            raise UserError(
                "rows of pairs have two lengths (row_lengths, or those of the one bucket), integers from 1 to "
                f"{MAX_PAIR_ROW}, not {row_lengths}"
            )
        lengths = np.array(row_lengths, np.int64)
    else:
        lengths = check_bucket_lengths(row_lengths, "row_lengths")
    if is_wrapped:
        refused = [f"overlong={overlong!r}"] if overlong != "error" else []
        refused += [f"several row lengths, {lengths.tolist()}"] if len(lengths) > 1 else []
        if refused:
            raise UserError(f"wrapped packing fills rows of one length to their end, and excludes {'; '.join(refused)}")
    alike = [row_lengths] if is_pairs else [(length,) for length in lengths.tolist()]
    return RowSizes(lengths, check_samples_per_row(rules.samples_per_row, alike))


def check_samples_per_row(
    samples_per_row: SamplesPerRow | None, row_lengths: Sequence[Sequence[int]]
) -> Int64[np.ndarray, " K"]:
    """The most samples of a row of each of these lengths, at most one a token; more than any row has for None."""
    if samples_per_row is None:
        return np.full(len(row_lengths), NO_MOST)
    most, firsts = np.asarray(samples_per_row), np.array([first for first, *_ in row_lengths])
    is_allowed = most.shape in ((), firsts.shape) and most.dtype.kind in "iu" and most.min() >= 1
    if is_allowed and most.ndim == 1:
        is_same = [here == there for here, there in itertools.pairwise(map(tuple, row_lengths))]
        is_allowed = bool((np.diff(most) >= 0).all() and not np.diff(most)[is_same].any())
    if not is_allowed:
        raise UserError(
            f"samples_per_row must be an integer of at least 1, or one for each of {len(row_lengths)} row lengths, "
            f"which must not descend, nor differ for one length, not {samples_per_row!r}"
        )
    return np.minimum(most.astype(np.int64), firsts)


def _order_ids(lengths: Int64[np.ndarray, " N *sides"], order: Order, seed: int, epoch: int) -> Int64[np.ndarray, " m"]:
    """The order in which samples are packed."""
    if order.is_by("shuffle"):
        return stable_argsort(random_keys(len(lengths), seed=seed, epoch=epoch, stream=ROWS_STREAM))
    return order_samples(sample_lengths.sample_sizes(lengths), order)


def lay_end_to_end(
    lengths: Int64[np.ndarray, " n"], step_ends: Int64[np.ndarray, " S"], sizes: RowSizes
) -> tuple[FittedLengths, Rows]:
    """The chunks of samples in rows that they fill end to end, and the rows; the end of a step ends a row."""
    row_length = int(sizes.lengths[0])
    begins = np.cumulative_sum(lengths, include_initial=True)  # of each sample, and the end of the last
    if sizes.has_most:
        row_begins = wrapped_rows(begins, step_ends, row_length, int(sizes.most[0]))
    else:
        num_rows = -(-np.diff(step_ends, prepend=0) // row_length)
        step = np.repeat(np.arange(len(num_rows)), num_rows)
        nth = np.arange(len(step)) - (np.cumsum(num_rows) - num_rows)[step]
        row_begins = np.append(0, step_ends)[step] + nth * row_length
    place = np.searchsorted(begins, row_begins)
    is_cut = begins[place] != row_begins
    place, cuts = place[is_cut], row_begins[is_cut]
    which = np.insert(np.arange(len(lengths)), place, place - 1)
    chunk_begins = np.insert(begins[:-1], place, cuts)
    chunks = FittedLengths(np.diff(chunk_begins, append=begins[-1]), which, starts=chunk_begins - begins[which])
    offsets = np.append(np.searchsorted(chunk_begins, row_begins), len(which))
    return chunks, Rows(np.arange(len(which)), offsets, np.full(len(row_begins), row_length))


def _choose_blocks(fitted: FittedLengths, num_samples: int, sizes: RowSizes) -> tuple[int | None, Rows | None]:
    """The block size of `"auto"`, None for no blocks, and the rows with such blocks."""
    powers = [2**power for power in range(_LEAST_BLOCK.bit_length() - 1, (num_samples - 1).bit_length())]
    if not powers or not len(fitted.lengths):
        return None, None
    num_rows = num_rows_at_once(fitted.lengths, sizes)
    within = [(block_size, num_rows - (-num_rows // 100)) for block_size in powers]
    within += [(size, num_rows + num_rows // 20) for size in reversed(powers) if 2 * size <= num_samples]
    for block_size, most_rows in within:
        rows = place_in_rows(fitted.lengths, _block_ends(fitted.place, block_size), sizes, most_rows=most_rows)
        if 0 < len(rows.capacity) <= most_rows:
            return block_size, rows
    return None, None


def _block_ends(place: Int64[np.ndarray, " n"], block_size: int | None) -> Int64[np.ndarray, " b"]:
    """Where blocks of `block_size` samples end; None for one block."""
    if block_size is None:
        return np.array([len(place)])
    return np.append(np.flatnonzero(np.diff(place // block_size)) + 1, len(place))


def fit_rows(
    lengths: Int64[np.ndarray, " N *sides"],
    sizes: RowSizes,
    overlong: PackedOverlong,
    ids: Int64[np.ndarray, " N"] | None = None,
) -> FittedLengths:
    """Applies the rule for samples that are longer than the longest row, or than a row on any side."""
    longest = int(sizes.lengths[-1])
    if overlong == "split" and lengths.max() > longest:
        return sample_lengths.split_lengths(lengths, longest)
    limit = longest if lengths.ndim == 1 else sizes.lengths
    return fit_lengths(lengths, limit, "error" if overlong == "split" else overlong, ids, is_packed=True)
