"""Packs samples of several lengths, such as source and target, into rows that have a length for each."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torch_ref.checks import check_integer
from torch_ref.lengths import Fitted, count_overlong, list_pairs

__all__ = ["MAX_SIZE", "JointRow", "check_sizes", "fill_joint_rows", "fit_joint", "place_samples"]

MAX_SIZE = 2**23 - 1  # so that a space times 2**40 fits int64
_UNIT = 2**40


class JointRow(NamedTuple):
    """A row, as indices of distinct lengths in the order of placing, and how many such rows follow each other."""

    kinds: list[int]
    number: int


def check_sizes(row_lengths: Any, num_lengths: int) -> NDArray[np.int64]:
    """Return the length of a row for each length of a sample; a ValueError if their number differs."""
    given = list(row_lengths) if np.ndim(row_lengths) else [row_lengths]
    if len(given) != num_lengths:
        raise ValueError(f"row_lengths must be one for each of {num_lengths} lengths of a sample, got {given}")
    sizes = [check_integer(f"row length {d}", size, maximum=MAX_SIZE) for d, size in enumerate(given)]
    return np.array(sizes, dtype=np.int64)


def fit_joint(lengths: NDArray[np.int64], order: NDArray[np.int64], sizes: NDArray[np.int64], overlong: str) -> Fitted:
    """Apply the `overlong` rule to ordered samples, which are too long if any of their lengths is.

    Args:
        lengths: int64[N, D].
        order: int64[n], the samples in use.
        sizes: int64[D], of a row.
        overlong: "error" | "drop" | "truncate"; "split" is refused.

    Returns:
        The samples that remain, with their lengths int64[n, D].
    """
    if overlong == "split":
        raise ValueError('overlong="split" is only for samples of one length')
    ordered = lengths[order]
    too_long = np.any(ordered > sizes, axis=1)
    ids = np.sort(order[too_long])
    counts = count_overlong(
        overlong,
        len(ids),
        len(order),
        lambda: f"{list_pairs(ids, lengths[ids])} (limit {sizes.tolist()})",
        name="longer than the rows",
    )
    if overlong == "drop":
        return Fitted(order[~too_long], ordered[~too_long], *counts)
    return Fitted(order, np.minimum(ordered, sizes), *counts)


def fill_joint_rows(
    distinct: NDArray[np.int64], counts: Sequence[int], sizes: NDArray[np.int64], most: int | None
) -> list[JointRow]:
    """Fill one row after the other, each as often as its samples last.

    A row takes, while anything fits, the sample with the largest sum over d of length_d * floor(2**40 * space_d /
    size_d**2), among equals the lexicographically largest lengths. Where more samples are left
    than a limit `most`, and ceil(samples / most) rows have more room than all of them need in every d, each sample
    after a row's first has at most floor(space_d / places left) tokens, if there is one.

    Args:
        distinct: int64[V, D], ascending lexicographically, each at most the sizes.
        counts: [V] samples of each.
        sizes: int64[D].
        most: samples of a row; None is no limit.
    """
    left = np.array(counts, dtype=np.int64)
    index = np.arange(len(distinct))  # of what is left
    rows: list[JointRow] = []
    while len(index):
        num_left, tokens_left = int(left[index].sum()), left[index] @ distinct[index]
        places = num_left if most is None else min(most, num_left)
        sparse = places < num_left and bool((-(-num_left // places) * sizes > tokens_left).all())
        row: list[int] = []
        space = sizes.copy()
        while len(row) < places:
            values = distinct[index] @ (space * _UNIT // sizes**2)
            values[left[index] == 0] = -1
            fits = np.all(distinct[index] <= space, axis=1) & (values >= 0)
            if sparse and row:
                small = fits & np.all(distinct[index] <= space // (places - len(row)), axis=1)
                fits = small if small.any() else fits
            if not fits.any():
                break
            best = np.flatnonzero(fits & (values == values[fits].max()))[-1]  # the last is the largest
            row.append(int(index[best]))
            left[row[-1]] -= 1
            space -= distinct[row[-1]]
        kinds, times = np.unique(row, return_counts=True)
        again = int((left[kinds] // times).min())
        left[kinds] -= again * times
        rows.append(JointRow(row, 1 + again))
        if not left[kinds].all():
            index = index[left[index] > 0]
    return rows


def place_samples(kind: NDArray[np.int64], rows: Sequence[JointRow]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the samples of all rows, int64[n], and where rows begin, int64[R + 1].

    Args:
        kind: int64[n], the index of each sample's lengths among the distinct ones; equals are placed in this order.
        rows: what each row holds.
    """
    kinds = np.concatenate([np.tile(row.kinds, row.number) for row in rows])
    sizes = [len(row.kinds) for row in rows for _ in range(row.number)]
    samples = np.empty(len(kind), dtype=np.int64)
    samples[np.argsort(kinds, kind="stable")] = np.argsort(kind, kind="stable")
    return samples, np.array(list(accumulate(sizes, initial=0)), dtype=np.int64)
