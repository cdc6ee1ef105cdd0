"""Packs pairs, such as source and target, into rows that have a length for each side."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_ref.checks import check_integer
from torch_ref.planning.lengths import Fitted, count_overlong, list_several

__all__ = ["MAX_SIZE", "check_sizes", "fill_pair_rows", "fit_joint"]

MAX_SIZE = 2**23 - 1  # so that a space times 2**40 fits int64
_UNIT = 2**40


def check_sizes(row_lengths: Any) -> NDArray[np.int64]:
    """Return the length of a row on each side; a ValueError unless they are two."""
    given = list(row_lengths) if np.ndim(row_lengths) else [row_lengths]
    if len(given) != 2:
        raise ValueError(f"row_lengths must be one for each side of a pair, got {given}")
    sizes = [check_integer(f"row length {d}", size, maximum=MAX_SIZE) for d, size in enumerate(given)]
    return np.array(sizes, dtype=np.int64)


def fit_joint(lengths: NDArray[np.int64], order: NDArray[np.int64], sizes: NDArray[np.int64], overlong: str) -> Fitted:
    """Apply the `overlong` rule to pairs in order, which are too long if either side is above that of a row."""
    if overlong == "split":
        raise ValueError('overlong="split" is only for samples of one length')
    ordered = lengths[order]
    too_long = np.any(ordered > sizes, axis=1)
    ids = np.sort(order[too_long])
    counts = count_overlong(
        overlong,
        len(ids),
        len(order),
        lambda: f"{list_several(ids, lengths[ids])} (limit {sizes.tolist()})",
        name="longer than the rows",
        advice="take longer rows",
    )
    if overlong == "drop":
        return Fitted(order[~too_long], ordered[~too_long], *counts)
    return Fitted(order, np.minimum(ordered, sizes), *counts)


def fill_pair_rows(
    lengths: NDArray[np.int64],
    sizes: NDArray[np.int64],
    most: int | None = None,
    max_rows: int | None = None,
    *,
    from_first: bool = False,
) -> list[list[int]]:
    """Fill one row after the other; return the indices of each in the order of placing.

    A row takes, while anything fits, the pair with the largest sum over its sides of length * floor(2**40 * space /
    size**2), among equals the one with the lexicographically largest lengths, and of these the first.

    Args:
        lengths: int64[n, 2], each at most the sizes.
        sizes: int64[2].
        most: the most pairs of a row; None for as many as fit.
        max_rows: stop after so many; None for all.
        from_first: whether each row begins with the first pair that is left.
    """
    left = np.lexsort((-np.arange(len(lengths)), lengths[:, 1], lengths[:, 0]))
    rows: list[list[int]] = []
    while len(left) and len(rows) != max_rows:
        row: list[int] = []
        space = sizes.copy()
        while len(left) and len(row) != most:
            if from_first and not row:
                place = left.argmin()
            else:
                values = lengths[left] @ (space * _UNIT // sizes**2)
                values[np.any(lengths[left] > space, axis=1)] = -1
                if values.max() < 0:
                    break
                place = np.flatnonzero(values == values.max())[-1]
            row.append(int(left[place]))
            space -= lengths[left[place]]
            left = np.delete(left, place)
        rows.append(row)
    return rows
