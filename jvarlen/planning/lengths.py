"""Checked sample lengths, int64[N] in tokens, and the rule for samples that are too long."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, Int64, Shaped

from jvarlen._common.checks import UserError, check_choices, is_integer, list_offenders, offenders_where

__all__ = [
    "COUNTS", "DataSource", "FittedLengths", "LengthHistogram", "Overlong", "PackedOverlong", "SampleSize",
    "apply_overlong", "as_array", "check_features", "check_kind", "check_lengths", "check_sample_lengths",
    "check_values", "dropped_and_truncated", "fit_lengths", "histogram_of", "is_cut_by",
    "row_sizes", "sample_sizes", "split_lengths",
]  # fmt: skip

Overlong = Literal["error", "drop", "truncate", "truncate_start", "truncate_random"]
PackedOverlong = Literal[Overlong, "split"]  # of packings, and of plans of their rows
SampleSize = Literal["sum", "larger", "product"]  # what a sample of several lengths counts

COUNTS = "a length counts tokens, frames or the like: give frames in place of seconds"

_LARGEST = 2**63 - 1
_LARGEST_TABLE = 2**24


def check_lengths(lengths: npt.ArrayLike) -> Int64[np.ndarray, " N"]:
    """Checks the lengths of samples and returns them as int64.

    Args:
      lengths: integers[N], tokens per sample; N ≥ 1, every length ≥ 1.

    Returns:
      int64[N]; the same array if it was int64 already.

    Raises:
      ValueError: not 1-D, empty, not integers, or lengths below 1 or above int64; the first offenders are listed as id
        and value.

    Example:
      >>> check_lengths([3, 1, 2])
      array([3, 1, 2])
    """
    array = as_array(lengths)
    check_kind(array)
    check_values(array)
    return array.astype(np.int64, copy=False)


def as_array(lengths: npt.ArrayLike) -> np.ndarray:
    """Lengths as an array; raises ValueError for rows of different lengths, and lists integers that no type holds."""
    if isinstance(lengths, Iterator):
        raise UserError(f"lengths must be an array or a list, not a {type(lengths).__name__}: make a list of them")
    try:
        array = np.asarray(lengths)
    except ValueError:
        raise UserError(
            "lengths must be one integer per sample, or as many of each, not the samples: measure_lengths gives them"
        ) from None
    if array.dtype.kind in "fO" and array.size and isinstance(lengths, Sequence) and all(map(is_integer, lengths)):
        check_values(np.array(lengths, object))
    return array


def check_values(lengths: Shaped[np.ndarray, " n *features"], first_id: int = 0) -> None:
    """Raises ValueError that lists lengths below 1, and those so long that the sum of a sample would not fit int64."""
    most = _LARGEST // (1 if lengths.ndim == 1 else lengths.shape[1])
    # Only the first length must be at least 1: a graph may have no edges.
    is_short = lengths.min() < 1 if lengths.ndim == 1 else lengths.min() < 0 or lengths[:, 0].min() < 1
    if not is_short and lengths.max() <= most:
        return
    problem, limit = ("at least", 1) if is_short else ("at most", most)
    is_wrong = lengths < ([1] + [0] * (np.size(lengths[0]) - 1)) if is_short else lengths > most
    ids = np.flatnonzero(is_wrong.reshape(len(lengths), -1).any(axis=1))
    others = ", those after the first of a sample at least 0" if is_short and lengths.ndim == 2 else ""
    listed = list_offenders(ids + first_id, lengths[ids], limit)
    raise UserError(f"lengths must be {problem} {limit}{others}: {listed}")


def check_kind(lengths: np.ndarray) -> None:
    """Raises ValueError unless lengths are integers of one axis, at least one; their values are not read."""
    if lengths.ndim != 1:
        raise UserError(f"lengths must be 1-D, one integer per sample, not of shape {lengths.shape}")
    if lengths.size == 0:
        raise UserError("lengths are empty: at least one sample is needed")
    if not np.issubdtype(lengths.dtype, np.integer):
        raise UserError(f"lengths must be integers, not {lengths.dtype}: {COUNTS}, or measure_lengths(samples)")


class LengthHistogram(NamedTuple):
    """How many samples have each length."""

    lengths: Int64[np.ndarray, " D"]
    counts: Int64[np.ndarray, " D"]  # each at least 1


def histogram_of(lengths: Int64[np.ndarray, " N"]) -> LengthHistogram:
    """Counts lengths, by a table where that is not too long."""
    if lengths.max() >= _LARGEST_TABLE:
        return LengthHistogram(*np.unique(lengths, return_counts=True))
    table = np.bincount(lengths)
    short = np.flatnonzero(table)
    return LengthHistogram(short, table[short])


def check_sample_lengths(lengths: npt.ArrayLike, num_lengths: int | None = None) -> Int64[np.ndarray, " N *sides"]:
    """Checks integers[N] ≥ 1, or integers[N, D], D ≥ 2 lengths of each sample, the first ≥ 1 and the others ≥ 0.

    `num_lengths` is 1 or D, where that is known.
    """
    array = as_array(lengths)
    if num_lengths == 1 or (num_lengths is None and array.ndim != 2):
        return check_lengths(array)
    if array.ndim != 2 or array.shape[1] < 2 or num_lengths not in (None, array.shape[1]) or not array.size:
        wanted = "D), D of at least 2" if num_lengths is None else f"{num_lengths})"
        raise UserError(f"several lengths of each sample must have shape (N, {wanted}, not {array.shape}")
    check_kind(array[:, 0])
    check_values(array)
    return array.astype(np.int64, copy=False)


def check_features(buckets: Sequence[tuple[int, ...]], lengths: Int64[np.ndarray, " N *sides"]) -> None:
    """Raises ValueError for buckets of another number of lengths than samples have."""
    num_lengths = len(buckets[0]) - 1
    if num_lengths != (1 if lengths.ndim == 1 else lengths.shape[1]):
        wanted = "(N,)" if num_lengths == 1 else f"(N, {num_lengths})"
        raise UserError(f"buckets like {tuple(buckets[0])} are for lengths of shape {wanted}, not {lengths.shape}")


def row_sizes(lengths: Int64[np.ndarray, " *n sides"], size: SampleSize = "sum") -> Int64[np.ndarray, " *n"]:
    """The size in a budget of rows of these lengths, one or several along the last axis."""
    if size == "sum":
        return lengths.sum(axis=-1)
    if size == "larger":
        return lengths.max(axis=-1)
    longest = lengths.reshape(-1, lengths.shape[-1]).max(axis=0).tolist()
    if math.prod(longest) > _LARGEST:
        raise UserError(f"the product of lengths {' and '.join(map(str, longest))} does not fit int64")
    return lengths.prod(axis=-1)


def sample_sizes(lengths: Int64[np.ndarray, " N *sides"], size: SampleSize = "sum") -> Int64[np.ndarray, " N"]:
    """The size of each sample in budgets and reports: its length; with several lengths, what `size` says."""
    if lengths.ndim == 1:
        return lengths
    sizes = row_sizes(lengths, size)
    if sizes.min() < 1:
        listed = list_offenders(*offenders_where(sizes < 1, lengths))
        raise UserError(f"size ({size!r}) must be at least 1 for every sample: {listed}")
    return sizes


@runtime_checkable
class DataSource(Protocol):
    """Random access to samples by id, 0 to N − 1."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def apply_overlong(
    overlong: str,
    ids: Int64[np.ndarray, " n"],
    lengths: Int64[np.ndarray, " n *sides"],
    limit: object,
    num_fitting: int,
    *,
    problem: str | None = None,
    is_packed: bool = False,
) -> tuple[int, int]:
    """Applies the rule for samples that are too long."""
    check_choices(overlong=(overlong, Overlong))
    if not len(ids) or is_cut_by(overlong) or (overlong == "drop" and num_fitting):
        return dropped_and_truncated(len(ids), overlong)
    by_id = np.argsort(ids)
    if overlong == "drop":
        problem = 'overlong="drop" leaves no sample'
    elif problem is None:
        # Samples of several lengths are not split, and cut only where they are packed.
        allowing = ('"drop"', '"drop" or "truncate"', '"drop", "truncate" or "split"')[is_packed + (lengths.ndim == 1)]
        what = "row" if is_packed else "bucket"
        problem = f"samples longer than the longest {what} (overlong={allowing} allows them)"
    raise UserError(f"{problem}: {list_offenders(ids[by_id], lengths[by_id], limit)}")


def dropped_and_truncated(num_long: int, overlong: str) -> tuple[int, int]:
    """How many of the samples that are too long a rule drops, and how many it truncates."""
    return num_long * (overlong == "drop"), num_long * is_cut_by(overlong)


def is_cut_by(overlong: str) -> bool:
    """Whether a sample that is too long is cut to one window, whichever."""
    return overlong in ("truncate", "truncate_start", "truncate_random")


class FittedLengths(NamedTuple):
    """The samples that remain after the rule for samples that are too long, or their chunks."""

    lengths: Int64[np.ndarray, " n *D"]  # at most the limit
    place: Int64[np.ndarray, " n"]  # of each among the given samples
    num_dropped: int = 0
    num_truncated: int = 0
    starts: Int64[np.ndarray, " n"] | None = None  # the token with which each chunk begins; None where none is split


def fit_lengths(
    lengths: Int64[np.ndarray, " N *D"],
    limit: int | Int64[np.ndarray, " D"] | None,
    overlong: str,
    ids: Int64[np.ndarray, " N"] | None = None,
    *,
    problem: str | None = None,
    is_packed: bool = False,
) -> FittedLengths:
    """Applies `apply_overlong` to all samples."""
    limit = np.iinfo(np.int64).max if limit is None else limit
    is_long: Bool[np.ndarray, " N"] = lengths > limit if lengths.ndim == 1 else np.any(lengths > limit, axis=1)
    places = np.flatnonzero(is_long)
    ids_of_long = places if ids is None else ids[places]
    shown = limit.tolist() if isinstance(limit, np.ndarray) else limit
    num_fitting = len(lengths) - len(places)
    counts = apply_overlong(
        overlong, ids_of_long, lengths[places], shown, num_fitting, problem=problem, is_packed=is_packed
    )
    if overlong == "drop" and len(places):
        return FittedLengths(lengths[~is_long], np.flatnonzero(~is_long), *counts)
    return FittedLengths(np.minimum(lengths, limit) if len(places) else lengths, np.arange(len(lengths)), *counts)


def split_lengths(lengths: Int64[np.ndarray, " N"], longest: int) -> FittedLengths:
    """The chunks of samples: each has `longest` tokens, except that the last of a sample can be shorter."""
    num_chunks = -(-lengths // longest)
    place = np.repeat(np.arange(len(lengths)), num_chunks)
    starts = longest * (np.arange(len(place)) - (np.cumsum(num_chunks) - num_chunks)[place])
    return FittedLengths(np.minimum(lengths[place] - starts, longest), place, starts=starts)
