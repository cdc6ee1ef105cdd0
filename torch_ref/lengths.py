"""Sequence lengths in, checked int64 lengths out; here too is what happens to samples above the longest bucket."""

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torch_ref.checks import INT64_MAX, integer_array, list_offenders

Overlong = Literal["error", "drop", "truncate"]
OVERLONG: tuple[str, ...] = ("error", "drop", "truncate")


class Fitted(NamedTuple):
    """Samples that fit the longest bucket.

    Attributes:
        sample_ids: int64[n], in the order they came in.
        lengths: int64[n], in tokens, cut to the limit.
        num_dropped: how many samples were left out.
        num_truncated: how many were cut.
    """

    sample_ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    num_dropped: int
    num_truncated: int


def check_lengths(lengths: ArrayLike) -> NDArray[np.int64]:
    """Check the lengths of all samples.

    Args:
        lengths: [N] integers of any dtype, in tokens; sample i has `lengths[i]`.

    Returns:
        The same values as int64[N].

    Raises:
        ValueError: if they are not 1-D integers (bools are not), if there are none, or if some lie below 1 or above
            int64; the first offenders are listed as id, value, limit.

    Example:
        >>> check_lengths([3, 1, 2])
        array([3, 1, 2])
    """
    values = integer_array("lengths", lengths)
    _refuse(values, values < 1, 1, "lengths must be at least 1")
    if values.dtype == np.uint64:
        _refuse(values, values > INT64_MAX, INT64_MAX, "lengths must fit int64")
    return values.astype(np.int64, copy=False)


def fit_lengths(lengths: NDArray[np.int64], order: NDArray[np.int64], limit: int, overlong: str) -> Fitted:
    """Apply the `overlong` rule to the ordered samples.

    Args:
        lengths: int64[N], in tokens.
        order: int64[n], the ids of the samples in use. A sample that is not among them is not looked at.
        limit: the length of the longest bucket, in tokens.
        overlong: "error" | "drop" | "truncate".

    Returns:
        The samples that remain, with their lengths and the two counts.

    Raises:
        ValueError: if `overlong` is unknown; if it is "error" and a sample is longer than `limit` (the first are
            listed); if it is "drop" and no sample remains.
    """
    if overlong not in OVERLONG:
        raise ValueError(f"overlong must be one of {', '.join(OVERLONG)}, got {overlong!r}")
    ordered = lengths[order]
    too_long = ordered > limit
    count = int(too_long.sum())
    if count and overlong == "error":
        # By id, not by place in the order: the first offenders are then the same whatever the order.
        ids = np.sort(order[too_long])
        raise ValueError(
            f"{count} samples are longer than the longest bucket: {list_offenders(ids, lengths[ids], limit)}; "
            'add a longer bucket or pass overlong="drop" or "truncate"'
        )
    if overlong == "drop":
        if count == len(order):
            raise ValueError(f"all {count} samples are longer than the longest bucket ({limit}): nothing is left")
        return Fitted(order[~too_long], ordered[~too_long], count, 0)
    return Fitted(order, np.minimum(ordered, limit), 0, count)


def _refuse(values: NDArray[Any], bad: NDArray[np.bool_], limit: int, message: str) -> None:
    ids = np.flatnonzero(bad)
    if len(ids):
        raise ValueError(f"{message}: {list_offenders(ids, values[ids], limit)}")
