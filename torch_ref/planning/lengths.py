"""Checked int64 lengths, cut or dropped above a limit."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torch_ref.checks import COUNTS, INT64_MAX, MAX_LISTED, as_array, check_integer, integer_array, list_offenders

__all__ = [
    "OVERLONG",
    "PACKED_OVERLONG",
    "SIZES",
    "Fitted",
    "check_ascending",
    "check_lengths",
    "check_overlong",
    "check_several_lengths",
    "check_size",
    "count_overlong",
    "fit_lengths",
    "list_several",
    "row_sizes",
    "sample_sizes",
]

OVERLONG: tuple[str, ...] = ("error", "drop", "truncate", "truncate_start", "truncate_random")
PACKED_OVERLONG = (*OVERLONG, "split")
SIZES = ("sum", "larger", "product")


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
        ValueError: if they are not 1-D integers (bools are not), if there are none, or if some are below 1 or above
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


def check_several_lengths(lengths: ArrayLike) -> NDArray[np.int64]:
    """Return D >= 2 lengths of each sample, such as source and target, as int64[N, D].

    Raises:
        ValueError: if they are not N >= 1 rows of integers, or if a first length is below 1, another below 0, or their
            sum above int64; the first offenders are listed as id and lengths.
    """
    values = as_array("lengths", lengths)
    if values.ndim != 2 or values.shape[1] < 2 or len(values) == 0:
        raise ValueError(
            f"several lengths of samples must have shape [N, D] with N >= 1 and D >= 2, got {values.shape}"
        )
    if values.dtype.kind not in "iu":
        raise ValueError(f"lengths must be integers that fit int64, got dtype {values.dtype}; {COUNTS}")
    missing = (values[:, 0] < 1) | np.any(values < 0, axis=1)
    _refuse_several(
        values, missing, "lengths must be at least 1 (limit 1), those after the first of a sample at least 0"
    )
    most = INT64_MAX // values.shape[1]
    _refuse_several(values, np.any(values > most, axis=1), f"lengths must be at most {most}")
    return values.astype(np.int64, copy=False)


def check_ascending(name: str, lengths: Any) -> tuple[int, ...]:
    """Return lengths of buckets or rows as ints; a ValueError unless they strictly ascend from 1 or more."""
    try:
        given = list(lengths)
    except TypeError:
        raise ValueError(f"{name} must be a sequence of lengths, got {lengths!r}") from None
    checked = tuple(check_integer(f"length {index} of {name}", value) for index, value in enumerate(given))
    if not checked or any(after <= before for before, after in pairwise(checked)):
        raise ValueError(f"{name} must be at least one length, strictly ascending, got {given}")
    return checked


def check_size(size: object) -> None:
    """Raise ValueError unless `size` says what a sample of several lengths counts."""
    if size not in SIZES:
        raise ValueError(f"size must be one of {', '.join(SIZES)}, got {size!r}")


def row_sizes(lengths: NDArray[np.int64], size: str = "sum") -> NDArray[np.int64]:
    """Return what rows of lengths int64[..., D] count in a budget, int64[...]; a ValueError if that is above int64."""
    if size == "sum":
        return np.asarray(lengths.sum(axis=-1))
    if size == "larger":
        return np.asarray(lengths.max(axis=-1))
    largest = [int(length.max()) for length in np.moveaxis(lengths, -1, 0)]
    if math.prod(largest) > INT64_MAX:
        raise ValueError(f"the product of lengths {' and '.join(map(str, largest))} is above int64")
    return np.asarray(lengths.prod(axis=-1))


def sample_sizes(lengths: NDArray[np.int64], size: str = "sum") -> NDArray[np.int64]:
    """Return what samples count, int64[N]: their lengths, int64[N], or of int64[N, D] what `row_sizes` says."""
    if lengths.ndim == 1:
        return lengths
    sizes = row_sizes(lengths, size)
    _refuse_several(lengths, sizes < 1, f"size={size!r} must be at least 1 for each sample")
    return sizes


def fit_lengths(
    lengths: NDArray[np.int64],
    order: NDArray[np.int64],
    limit: int,
    overlong: str,
    *,
    name: str = "the longest bucket",
    is_packed: bool = False,
) -> Fitted:
    """Apply the `overlong` rule to samples in order, int64[n]; `name` is what messages call the limit.

    `is_packed` says whether messages offer to split samples.

    Raises:
        ValueError: if samples are above the limit and the rule is "error", or is "drop" and leaves none; the first are
            listed.
    """
    ordered = lengths[order]
    too_long = ordered > limit
    # By id, not by place in the order: the first offenders are then the same whatever the order.
    ids = np.sort(order[too_long])
    counts = count_overlong(
        overlong,
        len(ids),
        len(order),
        lambda: list_offenders(ids, lengths[ids], limit),
        name=f"longer than {name}",
        advice="take longer rows" if is_packed else "take longer buckets",
        allowing='"drop", "truncate" or "split"' if is_packed else '"drop" or "truncate"',
    )
    if overlong == "drop":
        return Fitted(order[~too_long], ordered[~too_long], *counts)
    return Fitted(order, np.minimum(ordered, limit), *counts)


def count_overlong(
    overlong: str,
    count: int,
    total: int,
    listed: Callable[[], str],
    *,
    name: str = "longer than the longest bucket",
    advice: str = "take longer buckets",
    allowing: str = '"drop" or "truncate"',
) -> tuple[int, int]:
    """Return how many of `count` too long samples, of `total` in all, are dropped and how many are cut.

    Raises:
        ValueError: if `overlong` is unknown, or "error" where there are some, or "drop" where there are no others; with
            what `listed` writes out.
    """
    check_overlong(overlong)
    if count and overlong == "drop" and count == total:
        raise ValueError(f'overlong="drop" leaves no sample: all {count} are {name}: {listed()}')
    if count and overlong == "error":
        are = "sample is" if count == 1 else "samples are"
        raise ValueError(f"{count} {are} {name}: {listed()}; {advice}, or overlong={allowing}")
    return (count, 0) if overlong == "drop" else (0, count)


def check_overlong(overlong: str) -> None:
    """Raise ValueError unless `overlong` is a rule for samples above a limit."""
    if overlong == "split":
        raise ValueError('overlong="split" cuts samples into packed rows: plan with packing, or by another rule')
    if overlong not in OVERLONG:
        raise ValueError(f"overlong must be one of {', '.join(OVERLONG)}, got {overlong!r}")


def _refuse(values: NDArray[Any], bad: NDArray[np.bool_], limit: int, message: str) -> None:
    ids = np.flatnonzero(bad)
    if len(ids):
        raise ValueError(f"{message}: {list_offenders(ids, values[ids], limit)}")


def _refuse_several(values: NDArray[Any], bad: NDArray[np.bool_], message: str) -> None:
    ids = np.flatnonzero(bad)
    if len(ids):
        raise ValueError(f"{message}: {list_several(ids, values[ids])}")


def list_several(ids: NDArray[Any], lengths: NDArray[Any]) -> str:
    """Write out the first few of int[n, D] lengths with their ids, int[n], and how many more there are."""
    first = zip(ids[:MAX_LISTED].tolist(), lengths[:MAX_LISTED].tolist(), strict=True)
    text = ", ".join(f"id {number}: {tuple(each)}" for number, each in first)
    left = len(ids) - MAX_LISTED
    return f"{text} and {left} more" if left > 0 else text
