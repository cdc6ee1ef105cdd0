"""Checked sample lengths, int64[N] in tokens.

NumPy only. This module knows nothing of buckets or batches.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np
import numpy.typing as npt
from jaxtyping import Int64

from jvarlen._common.checks import list_offenders, offenders_where

__all__ = [
    "DataSource",
    "Overlong",
    "check_lengths",
    "check_overlong",
    "check_pair_lengths",
    "ends_to_offsets",
]

Overlong = Literal["error", "drop", "truncate"]


def check_lengths(lengths: npt.ArrayLike) -> Int64[np.ndarray, " N"]:
    """Checks the lengths of samples and returns them as int64.

    Args:
      lengths: integers[N], tokens a sample; N ≥ 1, every length ≥ 1.

    Returns:
      int64[N]; the same array if it was int64 already.

    Raises:
      ValueError: not 1-D, empty, not integers, or lengths below 1; the first offenders are listed as id and value.

    Example:
      >>> check_lengths([3, 1, 2])
      array([3, 1, 2])
    """
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise ValueError(f"lengths must be 1-D, one integer a sample, not of shape {array.shape}")
    if array.size == 0:
        raise ValueError("lengths are empty: at least one sample is needed")
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"lengths must be integers, not {array.dtype}")
    if array.min() < 1:
        raise ValueError(f"lengths must be at least 1: {list_offenders(*offenders_where(array < 1, array), 1)}")
    if array.max() > np.iinfo(np.int64).max:
        limit = np.iinfo(np.int64).max
        raise ValueError(f"lengths must fit int64: {list_offenders(*offenders_where(array > limit, array), limit)}")
    return array.astype(np.int64, copy=False)


def check_pair_lengths(lengths: npt.ArrayLike) -> Int64[np.ndarray, "N 2"]:
    """Checks lengths of pairs: integers[N, 2], source and target tokens of a sample, each ≥ 1.

    Returns:
      int64[N, 2].

    Raises:
      ValueError: lengths that are not as described; the first offenders are listed as id and value.
    """
    array = np.asarray(lengths)
    if array.ndim != 2 or array.shape[1] != 2 or not array.size:
        raise ValueError(f"lengths of pairs must have shape (N, 2), source and target, not {array.shape}")
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"lengths must be integers, not {array.dtype}")
    if array.min() < 1:
        offenders = list_offenders(*offenders_where(array.min(axis=1) < 1, array), 1)
        raise ValueError(f"lengths must be at least 1: {offenders}")
    most = np.iinfo(np.int64).max // 2  # so that the sum of both fits
    if array.max() > most:
        offenders = list_offenders(*offenders_where(array.max(axis=1) > most, array), most)
        raise ValueError(f"lengths of pairs must be at most 2**62 - 1: {offenders}")
    return array.astype(np.int64, copy=False)


@runtime_checkable
class DataSource(Protocol):
    """Random access to samples by id, 0 to N − 1."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def check_overlong(overlong: str) -> None:
    """Raises ValueError for an unknown rule for samples that are too long."""
    if overlong not in get_args(Overlong):
        raise ValueError(f'overlong must be "error", "drop" or "truncate", not {overlong!r}')


def ends_to_offsets(ends: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n_plus_1"]:
    """Offsets of consecutive segments from their ends: the same with a zero in front."""
    return np.concatenate([np.zeros(1, np.int64), ends])
