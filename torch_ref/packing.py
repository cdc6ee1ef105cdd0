"""Packs several samples into each row.

Letters: n samples in R rows.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from torch_ref.checks import check_integer, integer_array, list_offenders, to_tensor
from torch_ref.joint import check_sizes, fill_joint_rows, fit_joint, place_samples
from torch_ref.lengths import PACKED_OVERLONG, Fitted, check_joint_lengths, check_lengths, fit_lengths
from torch_ref.order import PACKING_STREAM, random_keys, sample_order, stable_argsort
from torch_ref.placing import fill_rows

__all__ = ["PackedHistogram", "Packing", "check_row_lengths", "pack_samples", "split_samples"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Samples in rows. If samples have D lengths each, so have rows: lengths and capacities are then [..., D].

    Attributes:
        sample_ids: int64[n], row by row, and in a row in the order of placing.
        row_offsets: int64[R + 1]; row r holds `sample_ids[row_offsets[r]:row_offsets[r + 1]]`.
        sample_lengths: int64[n], in tokens, cut to the longest row.
        capacity: int64[R], the length that each row was opened with.
        row_lengths: the lengths that rows can have, ascending; or the D lengths of every row.
        overlong: the rule for samples above the longest row: "error" | "drop" | "truncate" | "split".
        num_dropped: samples left out because they were too long.
        num_truncated: samples cut to the longest row.
        piece_starts: int64[n], how many tokens of its sample come before each piece; None if no sample was split. A
            split sample has its id once for each piece.
    """

    sample_ids: NDArray[np.int64]
    row_offsets: NDArray[np.int64]
    sample_lengths: NDArray[np.int64]
    capacity: NDArray[np.int64]
    row_lengths: tuple[int, ...]
    overlong: str = "error"
    num_dropped: int = 0
    num_truncated: int = 0
    piece_starts: NDArray[np.int64] | None = None

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
class PackedHistogram:
    """Rows by what they hold. Of samples with D lengths each, lengths and capacities are [..., D].

    Attributes:
        sample_lengths: int64[n], the lengths in the rows of each kind, descending; of D lengths as they were placed.
        row_offsets: int64[G + 1]; rows of kind g hold `sample_lengths[row_offsets[g]:row_offsets[g + 1]]`.
        capacity: int64[G], the length of the rows of each kind.
        counts: int64[G], the number of rows of each kind.
        row_lengths: the lengths that rows can have, ascending; or the D lengths of every row.
        overlong: the rule for samples above the longest row: "error" | "drop" | "truncate".
        num_dropped: samples left out because they were too long.
        num_truncated: samples cut to the longest row.
    """

    sample_lengths: NDArray[np.int64]
    row_offsets: NDArray[np.int64]
    capacity: NDArray[np.int64]
    counts: NDArray[np.int64]
    row_lengths: tuple[int, ...]
    overlong: str = "error"
    num_dropped: int = 0
    num_truncated: int = 0

    @property
    def num_rows(self) -> int:
        """The number of rows of all kinds."""
        return int(self.counts.sum())

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """int64[G], the tokens of a row of each kind."""
        return np.add.reduceat(self.sample_lengths, self.row_offsets[:-1])

    @property
    def fill(self) -> float:
        """The share of the rows' capacity that holds tokens."""
        return int(np.dot(self.counts, self.num_tokens).sum()) / int(np.dot(self.counts, self.capacity).sum())


@overload
def pack_samples(
    lengths: ArrayLike,
    row_lengths: int | Sequence[int],
    *,
    counts: None = None,
    max_samples_per_row: int | None = None,
    order: str | ArrayLike = "dataset",
    seed: int = 0,
    epoch: int = 0,
    overlong: str = "error",
) -> Packing: ...


@overload
def pack_samples(
    lengths: ArrayLike,
    row_lengths: int | Sequence[int],
    *,
    counts: ArrayLike,
    max_samples_per_row: int | None = None,
    overlong: str = "error",
) -> PackedHistogram: ...


def pack_samples(
    lengths: ArrayLike,
    row_lengths: int | Sequence[int],
    *,
    counts: ArrayLike | None = None,
    max_samples_per_row: int | None = None,
    order: str | ArrayLike = "dataset",
    seed: int = 0,
    epoch: int = 0,
    overlong: str = "error",
) -> Packing | PackedHistogram:
    """Put several samples into a row, longest first, each where it leaves the least space.

    If any number of samples may share a row, a sample goes into the open row with the least space left that still holds
    it, among equals the one that has had this space longest; where there is none, a new row of the smallest length that
    holds it is opened.

    If at most m may, rows are made one after the other, each as often as its samples last. The length of a row is the
    smallest that holds the longest sample left. The row takes this sample, then the longest that fits, until nothing
    does or it has m. But where more than m times as many samples as full rows of the smallest length would then be
    left, the row is made of short and long ones: first the longest or the shortest, that which is farther from the mean
    of all that are left (the longest, if equally far); then, while more than two are missing, the longest of at most an
    equal part of the space, or if there is none, that fits; then the two that fill the row exactly, in most copies
    (among equals those with the shortest sample), or if there are none, two taken like the others. In the end a row
    gets the smallest length that holds its tokens.

    Samples with D lengths each go into rows that have a length for each of them, and fit where all their lengths do.
    Rows are then filled as `torch_ref.joint.fill_joint_rows` says: one after the other, each time with the sample whose
    lengths best match the space that is left. Such samples cannot be split.

    The time grows with the number of distinct lengths, not with that of the samples, but for sorting and writing them
    out.

    Args:
        lengths: [N] integers >= 1, in tokens; or [N, D] for samples with D lengths each.
        row_lengths: the lengths that rows can have, strictly ascending, or one of them; or the D lengths of every row,
            each below 2**23.
        counts: [N] integers >= 1: there are `counts[i]` samples of `lengths[i]`. They have no ids and no order.
        max_samples_per_row: m; None is no limit.
        order: as in `sample_order`; decides between samples of equal length. "shuffle" packs other samples together
            every epoch, in rows of the same sizes. It has random keys of its own, independent of those of a plan.
        seed: 0 <= seed < 2**63, for the order.
        epoch: 0 <= epoch < 2**63, likewise.
        overlong: samples above the longest row: "error" | "drop" | "truncate" | "split". The last makes pieces of them,
            each as long as that row but the last, which are packed like samples of their own.

    Returns:
        The rows, numbered in the order of opening; with `counts` by what they hold, likewise.

    Raises:
        ValueError: if an argument is out of its range, or a sample is too long (the first are listed).

    Example:
        >>> packing = pack_samples([3, 5, 2, 4, 1], 8)
        >>> np.split(packing.sample_ids, packing.row_offsets[1:-1])
        [array([1, 0]), array([3, 2, 4])]
    """
    if np.ndim(lengths) == 2:
        return _pack_joint(lengths, row_lengths, counts, max_samples_per_row, order, seed, epoch, overlong)
    checked = check_lengths(lengths)
    sizes = check_row_lengths(row_lengths)
    if overlong not in PACKED_OVERLONG:
        raise ValueError(f"overlong must be one of {', '.join(PACKED_OVERLONG)}, got {overlong!r}")
    if max_samples_per_row is not None:
        max_samples_per_row = check_integer("max_samples_per_row", max_samples_per_row)
    if counts is not None:
        numbers = _check_counts(counts, len(checked), order)
        return _pack_histogram(checked, numbers, sizes, max_samples_per_row, overlong)
    ids = _packing_order(checked, order, seed, epoch)
    starts = None
    if overlong == "split" and (checked[ids] > sizes[-1]).any():
        fitted, starts = split_samples(checked, ids, sizes[-1])
    else:
        rule = "error" if overlong == "split" else overlong
        fitted = fit_lengths(checked, ids, sizes[-1], rule, name="the longest row")
    longest_first = stable_argsort(fitted.lengths, descending=True)
    ordered = fitted.lengths[longest_first]
    distinct, numbers = torch.unique_consecutive(to_tensor(ordered), return_counts=True)
    rows = fill_rows(sizes, distinct.tolist(), numbers.tolist(), max_samples_per_row)
    row, capacity = rows.row_of_samples(), rows.capacity()
    by_row = stable_argsort(row)
    return Packing(
        sample_ids=fitted.sample_ids[longest_first][by_row],
        row_offsets=np.concatenate([[0], np.cumsum(np.bincount(row, minlength=len(capacity)))]),
        sample_lengths=ordered[by_row],
        capacity=capacity,
        row_lengths=sizes,
        overlong=overlong,
        num_dropped=fitted.num_dropped,
        num_truncated=fitted.num_truncated,
        piece_starts=None if starts is None else starts[longest_first][by_row],
    )


def _packing_order(lengths: NDArray[np.int64], order: str | ArrayLike, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the ids in the order that decides between samples of equal length."""
    seed, epoch = check_integer("seed", seed, minimum=0), check_integer("epoch", epoch, minimum=0)
    if isinstance(order, str) and order == "shuffle":
        return stable_argsort(random_keys(seed, epoch, 0, len(lengths), PACKING_STREAM))
    return sample_order(lengths, order)


def _pack_joint(
    lengths: ArrayLike,
    row_lengths: Any,
    counts: ArrayLike | None,
    most: int | None,
    order: str | ArrayLike,
    seed: int,
    epoch: int,
    overlong: str,
) -> Packing | PackedHistogram:
    """Pack samples with several lengths each."""
    checked = check_joint_lengths(lengths)
    sizes = check_sizes(row_lengths, checked.shape[1])
    if overlong not in PACKED_OVERLONG:
        raise ValueError(f"overlong must be one of {', '.join(PACKED_OVERLONG)}, got {overlong!r}")
    most = None if most is None else check_integer("max_samples_per_row", most)
    if counts is None:
        each, ids = np.ones(len(checked), dtype=np.int64), _packing_order(checked.sum(axis=1), order, seed, epoch)
    else:
        each, ids = _check_counts(counts, len(checked), order), np.arange(len(checked))
    fitted = fit_joint(checked, ids, sizes, overlong)
    distinct, inverse = np.unique(fitted.lengths, axis=0, return_inverse=True)
    kind = inverse.reshape(-1)
    by_kind = Counter[int]()
    for k, number in zip(kind.tolist(), each[fitted.sample_ids].tolist(), strict=True):
        by_kind[k] += number
    rows = fill_joint_rows(distinct, [by_kind[k] for k in range(len(distinct))], sizes, most)
    if counts is not None:
        too_long = int(each[np.any(checked > sizes, axis=1)].sum())
        return PackedHistogram(
            sample_lengths=distinct[np.concatenate([row.kinds for row in rows])],
            row_offsets=np.array(list(accumulate((len(row.kinds) for row in rows), initial=0)), dtype=np.int64),
            capacity=np.tile(sizes, (len(rows), 1)),
            counts=np.array([row.number for row in rows], dtype=np.int64),
            row_lengths=tuple(sizes.tolist()),
            overlong=overlong,
            num_dropped=too_long if overlong == "drop" else 0,
            num_truncated=too_long if overlong == "truncate" else 0,
        )
    samples, row_offsets = place_samples(kind, rows)
    return Packing(
        sample_ids=fitted.sample_ids[samples],
        row_offsets=row_offsets,
        sample_lengths=fitted.lengths[samples],
        capacity=np.tile(sizes, (len(row_offsets) - 1, 1)),
        row_lengths=tuple(sizes.tolist()),
        overlong=overlong,
        num_dropped=fitted.num_dropped,
        num_truncated=fitted.num_truncated,
    )


def split_samples(lengths: NDArray[np.int64], ids: NDArray[np.int64], limit: int) -> tuple[Fitted, NDArray[np.int64]]:
    """Return the pieces of the ordered samples, with the tokens before each."""
    full, rest = np.divmod(lengths[ids], limit)
    number = full + (rest > 0)
    place = np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
    is_full = place < np.repeat(full, number)
    return Fitted(np.repeat(ids, number), np.where(is_full, limit, np.repeat(rest, number)), 0, 0), place * limit


def _pack_histogram(
    lengths: NDArray[np.int64], counts: NDArray[np.int64], sizes: tuple[int, ...], most: int | None, overlong: str
) -> PackedHistogram:
    ids = np.arange(len(lengths))
    if overlong == "split":
        fitted, _ = split_samples(lengths, ids, sizes[-1])
    else:
        fitted = fit_lengths(lengths, ids, sizes[-1], overlong, name="the longest row")
    by_length: Counter[int] = Counter()
    for length, count in zip(fitted.lengths.tolist(), counts[fitted.sample_ids].tolist(), strict=True):
        by_length[length] += count
    descending = sorted(by_length, reverse=True)
    rows = fill_rows(sizes, descending, [by_length[length] for length in descending], most)
    kinds: Counter[tuple[int, tuple[int, ...]]] = Counter()
    for size, held, number in rows.alike():
        kinds[size, tuple(sorted(held, reverse=True))] += number
    too_long = int(counts[lengths > sizes[-1]].sum())
    return PackedHistogram(
        sample_lengths=np.array([length for _, held in kinds for length in held], dtype=np.int64),
        row_offsets=np.array(list(accumulate((len(held) for _, held in kinds), initial=0)), dtype=np.int64),
        capacity=np.array([capacity for capacity, _ in kinds], dtype=np.int64),
        counts=np.array(list(kinds.values()), dtype=np.int64),
        row_lengths=sizes,
        overlong=overlong,
        num_dropped=too_long if overlong == "drop" else 0,
        num_truncated=too_long if overlong == "truncate" else 0,
    )


def _check_counts(counts: ArrayLike, num_lengths: int, order: str | ArrayLike) -> NDArray[np.int64]:
    if not isinstance(order, str) or order != "dataset":
        raise ValueError(f"order must not be given for a histogram (counts=), got {order!r}")
    values = integer_array("counts", counts)
    if len(values) != num_lengths:
        raise ValueError(f"counts must be as many as lengths, {num_lengths}, got {len(values)}")
    bad = np.flatnonzero(values < 1)
    if len(bad):
        raise ValueError(f"counts must be at least 1: {list_offenders(bad, values[bad], 1)}")
    return values.astype(np.int64, copy=False)


def check_row_lengths(row_lengths: Any) -> tuple[int, ...]:
    """Return the lengths of rows as ints; a ValueError where they do not strictly ascend from 1 or more."""
    try:
        given = list(row_lengths)
    except TypeError:
        given = [row_lengths]
    sizes = tuple(check_integer(f"row length {index}", value) for index, value in enumerate(given))
    if not sizes or any(after <= before for before, after in pairwise(sizes)):
        raise ValueError(f"row_lengths must be at least one, strictly ascending, got {given}")
    return sizes
