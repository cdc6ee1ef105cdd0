"""Packs several samples into each row.

Letters: n samples in R rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torch_ref.checks import as_array, check_integer, known_keywords
from torch_ref.planning.joint import check_sizes
from torch_ref.planning.lengths import PACKED_OVERLONG, check_ascending, check_lengths, check_several_lengths
from torch_ref.planning.order import ROWS_STREAM, Order, as_order, random_keys, sample_order, stable_argsort
from torch_ref.planning.packer import Chunks, PackedRows, Packer, check_samples_per_row, lay_end_to_end
from torch_ref.planning.windows import WINDOWS, begin_windows

__all__ = ["METHODS", "PACKINGS", "Packing", "ShuffledSamples", "as_packing", "make_packer", "pack_samples", "wrap"]

METHODS = ("best_fit", "wrapped")
PACKINGS = ("padded", *METHODS, "auto")

_LEAST_BLOCK = 256
_MOST_PAIRS = 2048


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Samples in rows. If samples are pairs, so are rows: lengths and capacities are then [..., 2].

    Attributes:
        sample_ids: int64[n], row by row, and in a row in the order of placing.
        row_offsets: int64[R + 1]; row r holds `sample_ids[row_offsets[r]:row_offsets[r + 1]]`.
        sample_lengths: int64[n], in tokens, cut to the longest row.
        capacity: int64[R], the length that each row was opened with.
        row_lengths: the lengths that rows can have, ascending; or the two of every row.
        overlong: the rule for samples above the longest row, as in `pack_samples`.
        num_dropped: samples left out because they were too long.
        num_truncated: samples cut to the longest row.
        chunk_starts: int64[n], how many tokens of its sample come before each chunk, or before what "truncate_start"
            and "truncate_random" keep, of pairs int64[n, 2]; None where samples come from their first token on, unless
            they are wrapped. A split sample has its id once for each chunk.
        method: "best_fit" | "wrapped".
        shuffled: what its shuffled samples are packed from, to compare epochs; None in another order, or if wrapped.
        all_lengths: int64[N], the cut lengths of all samples that an order could take, where this one left out some, or
            they are wrapped; otherwise None.
        most_samples: the given most samples of a row of each of `row_lengths`, or of pairs of every row; or None.
    """

    sample_ids: NDArray[np.int64]
    row_offsets: NDArray[np.int64]
    sample_lengths: NDArray[np.int64]
    capacity: NDArray[np.int64]
    row_lengths: tuple[int, ...]
    overlong: str = "error"
    num_dropped: int = 0
    num_truncated: int = 0
    chunk_starts: NDArray[np.int64] | None = None
    method: str = "best_fit"
    all_lengths: NDArray[np.int64] | None = None
    most_samples: tuple[int, ...] | None = None
    shuffled: "ShuffledSamples | None" = None

    @property
    def num_rows(self) -> int:
        """R, the number of rows."""
        return len(self.capacity)

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """int64[R], the tokens of each row."""
        return np.add.reduceat(self.sample_lengths, self.row_offsets[:-1])

    @property
    def starts(self) -> NDArray[np.int64]:
        """int64[n], where each sample begins in its row."""
        before = np.cumsum(self.sample_lengths, axis=0) - self.sample_lengths
        return before - np.repeat(before[self.row_offsets[:-1]], np.diff(self.row_offsets), axis=0)

    @property
    def fill(self) -> float:
        """The share of the rows' capacity that holds tokens."""
        return int(self.sample_lengths.sum()) / int(self.capacity.sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class ShuffledSamples:
    """Samples that are packed in another order in every epoch.

    Attributes:
        lengths: int64[N], or int64[N, 2].
        row_lengths: as in `Packing`.
        overlong: as in `Packing`.
        seed: of the order.
        block_size: how many are packed at a time; None is all.
        most_samples: as in `Packing`.
    """

    lengths: NDArray[np.int64]
    row_lengths: tuple[int, ...]
    overlong: str
    seed: int
    block_size: int | None
    most_samples: tuple[int, ...] | None

    def describe(self) -> str:
        """Say how many rows the blocks of epoch 0 add, and how many of its rows with several samples epoch 1 repeats.

        Pairs are not packed all at once to count the rows.
        """
        first, second = (self._pack(epoch, self.block_size) for epoch in (0, 1))
        rows, later = _rows_of_several(first), set(_rows_of_several(second))
        text = "shuffled and packed all at once"
        if self.block_size is not None:
            text = f"shuffled and packed in blocks of {self.block_size:,}"
            if self.lengths.ndim == 1:
                text += f" ({first.num_rows - self._pack(0, None).num_rows:,} rows more than all at once)"
        if not rows:
            return f"{text}; no row holds several samples"
        share = sum(row in later for row in rows) / len(rows)
        return f"{text}; epoch 1 repeats {share:.1%} of the rows of several samples"

    def _pack(self, epoch: int, block_size: int | None) -> Packing:
        order = Order("shuffle", block_size=block_size)
        most = self.most_samples
        return pack_samples(
            self.lengths,
            self.row_lengths,
            order=order,
            seed=self.seed,
            epoch=epoch,
            overlong="truncate" if self.overlong in WINDOWS else self.overlong,  # rows of the same samples are the same
            samples_per_row=most[0] if most and self.lengths.ndim == 2 else most,
        )


def _rows_of_several(packing: Packing) -> list[frozenset[tuple[int, int]]]:
    """Return the samples of each row with more than one, each with the token that it begins at."""
    starts = np.zeros_like(packing.sample_ids) if packing.chunk_starts is None else packing.chunk_starts
    samples = list(zip(packing.sample_ids.tolist(), starts.tolist(), strict=True))
    return [frozenset(samples[i:j]) for i, j in pairwise(packing.row_offsets.tolist()) if j - i > 1]


@known_keywords
def pack_samples(
    lengths: ArrayLike,
    row_lengths: int | Sequence[int],
    *,
    method: str = "best_fit",
    order: str | Order | ArrayLike = "dataset",
    seed: int = 0,
    epoch: int = 0,
    overlong: str = "error",
    samples_per_row: int | Sequence[int] | None = None,
) -> Packing:
    """Put several samples into a row: longest first, each where it leaves the least space; or wrapped, end to end.

    Wrapped samples follow each other in their order through rows of one length, which cut them into chunks: each row
    but the last is full, and no token is left out. The chunks count as samples, like those of split samples.

    By best fit, a sample goes into the open row with the least space left that still holds it, among equals the one
    that has had this space longest; where there is none, a new row of the smallest length that holds it is opened.

    Pairs go into rows that have a length for each side, and fit where both their lengths do. Rows are filled as
    `torch_ref.planning.joint.fill_pair_rows` says: one after the other, each time with the pair whose lengths best
    match the space that is left. Pairs cannot be split. They always come in blocks, and in the shuffled order of epoch
    0 where another word is given. "auto" is the largest of 256, 512, 1024 and 2048 that makes two full blocks; or else
    one block.

    Shuffled samples are packed in blocks of `Order.block_size` consecutive ones (long samples before they are split or
    dropped count), so that rows are others in every epoch. The last row of a block is opened again: its samples are
    packed with those of the next block. "auto" takes the smallest of 256, 512, 1024, ..., each below the number of
    samples, for which epoch 0 has at most R / 100 rows more, rounded up, than the R of all at once. If there is none,
    it takes the largest, up to half the number of samples, for which they are at most R / 20 more; or else all at once,
    which is also what None says.

    Args:
        lengths: [N] integers >= 1, in tokens; or [N, 2] for pairs.
        row_lengths: the lengths that rows can have, strictly ascending, or one of them; of pairs the two of every row,
            each below 2**23.
        method: "best_fit" | "wrapped". Wrapped, samples have one length each and all rows the same; there is no
            `block_size` or rule for long samples.
        order: as in `sample_order`; decides between samples of equal length. "shuffle" packs other samples together
            every epoch, by random keys that are independent of those of a plan, and alone has blocks.
        seed: 0 <= seed < 2**63, for the order.
        epoch: 0 <= epoch < 2**63, likewise.
        overlong: samples above the longest row: "error" | "drop" | "truncate" | "truncate_start" | "truncate_random" |
            "split". The last makes chunks of them, each as long as that row but the last, which are packed like
            samples; those before keep what `make_plan` says, of pairs on both sides.
        samples_per_row: the most samples of a row, or of a row of each length, which may not descend: a row that holds
            so many is full. None: as many as fit.

    Returns:
        The rows, numbered in the order of opening.

    Raises:
        ValueError: if an argument is out of its range, or a sample is too long (the first are listed).

    Example:
        >>> packing = pack_samples([3, 5, 2, 4, 1], 8)
        >>> np.split(packing.sample_ids, packing.row_offsets[1:-1])
        [array([1, 0]), array([3, 2, 4])]
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    order = as_order(order)
    seed, epoch = check_integer("seed", seed, minimum=0), check_integer("epoch", epoch, minimum=0)
    is_pairs = as_array("lengths", lengths).ndim == 2
    if is_pairs and np.shape(lengths)[1] > 2:
        raise ValueError(f"packed rows hold samples of one or two lengths, got {np.shape(lengths)[1]}")
    if method == "wrapped":
        unfit = {
            f"overlong={overlong!r}": overlong != "error",
            f"block_size={order.block_size!r}": order.blocks is not None,
            "samples with several lengths each": is_pairs,
            f"several row_lengths, {row_lengths}": not is_pairs and np.size(row_lengths) > 1,
        }
        if named := [text for text, is_unfit in unfit.items() if is_unfit]:
            raise ValueError(f'method="wrapped" does not go with {", ".join(named)}')
        return _wrap(lengths, row_lengths, order, seed, epoch, samples_per_row)
    if overlong not in PACKED_OVERLONG:
        raise ValueError(f"overlong must be one of {', '.join(PACKED_OVERLONG)}, got {overlong!r}")
    packer = make_packer(
        check_several_lengths(lengths) if is_pairs else check_lengths(lengths), row_lengths, overlong, samples_per_row
    )
    packing = _pack_by_best_fit(packer, order, seed, epoch)
    if overlong not in WINDOWS:
        return packing
    ids, longest = packing.sample_ids, packing.row_lengths if is_pairs else packing.row_lengths[-1:]
    starts = begin_windows(overlong, ids, packer.lengths[ids], longest, seed, epoch)
    return replace(packing, chunk_starts=starts)


def make_packer(
    lengths: NDArray[np.int64],
    row_lengths: int | Sequence[int],
    overlong: str,
    samples_per_row: int | Sequence[int] | None,
) -> Packer:
    """Return what packs samples of checked lengths into rows of these lengths."""
    if lengths.ndim == 2:
        sizes = check_sizes(row_lengths)
        return Packer(lengths, sizes, overlong, check_samples_per_row(samples_per_row, [tuple(sizes.tolist())]))
    given = row_lengths if np.ndim(row_lengths) else [row_lengths]
    sizes = np.array(check_ascending("row_lengths", given), dtype=np.int64)
    return Packer(
        lengths, sizes, overlong, check_samples_per_row(samples_per_row, [(size,) for size in sizes.tolist()])
    )


def _wrap(
    lengths: ArrayLike,
    row_lengths: int | Sequence[int],
    order: Order,
    seed: int,
    epoch: int,
    samples_per_row: int | Sequence[int] | None,
) -> Packing:
    """Let ordered samples follow each other through rows of one length."""
    packer = make_packer(check_lengths(lengths), row_lengths, "error", samples_per_row)
    ids = _shuffle(len(packer.lengths), seed, epoch) if order.name == "shuffle" else sample_order(packer.lengths, order)
    return wrap(packer, ids, None)


def wrap(packer: Packer, ids: NDArray[np.int64], ends: Sequence[int] | None) -> Packing:
    """Let samples follow each other through rows; the tokens at the `ends` of steps, or all together, end a row."""
    total = packer.lengths[ids].sum(dtype=np.float64)
    if total >= 2**62:
        raise ValueError("wrapped samples must have fewer than 2**62 tokens together")
    most = None if packer.most is None else packer.most[0]
    whole = [int(packer.lengths[ids].sum())]
    fitted, rows = lay_end_to_end(packer.lengths, ids, int(packer.sizes[0]), most, whole if ends is None else ends)
    packing = as_packing(packer, len(packer.lengths), fitted, rows)
    return replace(packing, overlong="split", method="wrapped", all_lengths=packer.lengths)


def _pack_by_best_fit(packer: Packer, order: Order, seed: int, epoch: int) -> Packing:
    """Return the rows of the samples in an order."""
    lengths, sizes, overlong = packer.lengths, packer.sizes, packer.overlong
    is_pairs, block_size = lengths.ndim == 2, order.blocks
    if order.name != "shuffle" and block_size is not None:
        raise ValueError(f'a block_size is for order="shuffle", got {order.block_size} for {order.name!r}')
    if order.name == "shuffle":
        ids = _shuffle(len(lengths), seed, epoch)
    elif is_pairs and isinstance(order.by, str):
        ids = _shuffle(len(lengths), seed, 0)
    else:
        ids = sample_order(lengths.sum(axis=1) if is_pairs else lengths, order)
    if order.block_size == "auto" and (is_pairs or order.name == "shuffle"):
        block_size = _count_pairs_of_a_block(len(ids)) if is_pairs else _least_block_size(packer, seed)
    fitted, row_lengths, shuffled = packer.fit(ids), tuple(sizes.tolist()), None
    if order.name == "shuffle":
        shuffled = ShuffledSamples(
            lengths=lengths,
            row_lengths=row_lengths,
            overlong=overlong,
            seed=seed,
            block_size=block_size,
            most_samples=packer.most,
        )
    return as_packing(packer, len(ids), fitted, packer.pack_blocks(fitted, block_size), shuffled)


def as_packing(
    packer: Packer, num_ordered: int, fitted: Chunks, rows: PackedRows, shuffled: ShuffledSamples | None = None
) -> Packing:
    """Return the packing of chunks that were placed in rows, from an order of so many samples."""
    return Packing(
        sample_ids=fitted.sample_ids[rows.chunks],
        row_offsets=np.concatenate([[0], np.cumsum(rows.sizes)]),
        sample_lengths=fitted.lengths[rows.chunks],
        capacity=rows.capacity,
        row_lengths=tuple(packer.sizes.tolist()),
        overlong=packer.overlong,
        num_dropped=fitted.num_dropped,
        num_truncated=fitted.num_truncated,
        chunk_starts=None if fitted.starts is None else fitted.starts[rows.chunks],
        all_lengths=packer.lengths_of_all(num_ordered),
        most_samples=packer.most,
        shuffled=shuffled,
    )


def _least_block_size(packer: Packer, seed: int) -> int | None:
    """Return the block size that "auto" stands for."""
    num_samples = len(packer.lengths)
    fitted = packer.fit(_shuffle(num_samples, seed, 0))
    block_size, sizes = _LEAST_BLOCK, []
    while block_size < num_samples:
        sizes.append(block_size)
        block_size *= 2
    if not sizes or not len(fitted.lengths):
        return None
    num_rows = len(packer.pack_blocks(fitted, None).capacity)

    @cache
    def num_more(size: int) -> int:
        return len(packer.pack_blocks(fitted, size).capacity) - num_rows

    few = (size for size in sizes if num_more(size) <= -(-num_rows // 100))
    some = (size for size in reversed(sizes) if 2 * size <= num_samples and num_more(size) <= num_rows // 20)
    return next(few, None) or next(some, None)


def _shuffle(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return stable_argsort(random_keys(seed, epoch, 0, num_samples, ROWS_STREAM))


def _count_pairs_of_a_block(num_pairs: int) -> int | None:
    """Return the block size that "auto" stands for."""
    block_size = _MOST_PAIRS
    while block_size >= _LEAST_BLOCK:
        if 2 * block_size <= num_pairs:
            return block_size
        block_size //= 2
    return None
