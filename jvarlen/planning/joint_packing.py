"""Packs samples of several features, such as source and target, into rows with a length for each feature.

NumPy only. The rule works on the histogram of distinct lengths. Letters: N samples, n of them packed, D features, R
rows, V distinct lengths, G distinct rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from jvarlen._common.checks import UserError, is_integer
from jvarlen.planning._kernels import fill_joint_rows, split_into_leaves, take_segments
from jvarlen.planning.lengths import FittedLengths, PackedOverlong, ends_to_offsets, fit_lengths
from jvarlen.planning.order import stable_argsort

__all__ = ["DistinctRows", "check_feature_row_lengths", "distinct_joint_rows", "fit_features"]

_MAX_ROW_LENGTH = 2**23 - 1  # so that products of lengths and factors fit int64


class DistinctRows(NamedTuple):
    """Distinct rows in the order of opening.

    Attributes:
      lengths: int64[m, D], those of the samples of each distinct row, in the order of placing.
      offsets: int64[G+1]; distinct row g holds `lengths[offsets[g]:offsets[g+1]]`.
      counts: int64[G], how many rows in turn are so.
      kinds: int64[m], the number of these lengths among the distinct ones, ascending.
    """

    lengths: Int64[np.ndarray, "m D"]
    offsets: Int64[np.ndarray, " G_plus_1"]
    counts: Int64[np.ndarray, " G"]
    kinds: Int64[np.ndarray, " m"]

    def filled(self, kind: Int64[np.ndarray, " n"]) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " R_plus_1"]]:
        """The samples of all rows, in order of row and place, and where each row begins.

        Args:
          kind: int64[n], the number of each sample's lengths; samples of equal lengths are placed in this order.
        """
        of_row = np.repeat(np.arange(len(self.counts)), self.counts)
        row_offsets = ends_to_offsets(np.cumsum(np.diff(self.offsets)[of_row]))
        places = stable_argsort(take_segments(self.kinds, self.offsets, of_row, row_offsets))
        samples = np.empty(len(kind), np.int64)
        samples[places] = stable_argsort(kind)
        return samples, row_offsets


def distinct_joint_rows(
    lengths: Int64[np.ndarray, "n D"],
    counts: Int64[np.ndarray, " n"] | None,
    row_lengths: Int64[np.ndarray, " D"],
    max_samples_per_row: int | None,
) -> tuple[DistinctRows, Int64[np.ndarray, " n"]]:
    """The rows that samples of several features are packed into.

    Args:
      lengths: int64[n, D], none above the row lengths.
      counts: int64[n], how many samples have these lengths; None: one each.
      row_lengths: int64[D].
      max_samples_per_row: as in `pack_samples`.

    Returns:
      `DistinctRows`; and int64[n], the number of each sample's lengths among the distinct ones.
    """
    distinct, kind = _distinct(lengths, row_lengths)
    num_of_each = np.zeros(len(distinct), np.int64)
    np.add.at(num_of_each, kind, np.int64(1) if counts is None else counts)
    num_samples = int(num_of_each.sum())
    max_samples = num_samples if max_samples_per_row is None else min(num_samples, int(max_samples_per_row))
    kinds, offsets, numbers = fill_joint_rows(
        distinct, num_of_each, row_lengths, max_samples, *split_into_leaves(distinct)
    )
    return DistinctRows(distinct[kinds], offsets, numbers, kinds), kind


def _distinct(
    lengths: Int64[np.ndarray, "n D"], row_lengths: Int64[np.ndarray, " D"]
) -> tuple[Int64[np.ndarray, "V D"], Int64[np.ndarray, " n"]]:
    """Distinct lengths, ascending, and the number of each sample's among them."""
    sizes = tuple((row_lengths + 1).tolist())
    if math.prod(sizes) >= 2**63:
        distinct, kind = np.unique(lengths, axis=0, return_inverse=True)
        return distinct, kind.reshape(-1)
    codes, kind = np.unique(np.ravel_multi_index(tuple(lengths.T), sizes), return_inverse=True)  # far faster
    return np.stack(np.unravel_index(codes, sizes), axis=1), kind


def fit_features(
    lengths: Int64[np.ndarray, "N D"],
    row_lengths: Int64[np.ndarray, " D"],
    overlong: PackedOverlong,
    ids: Int64[np.ndarray, " N"],
) -> FittedLengths:
    """Applies the rule for samples that are longer than a row in any feature.

    Raises:
      ValueError: as in `fit_lengths`; or the rule is to split, which would tear inputs from their targets.
    """
    if overlong == "split":
        raise UserError('overlong="split" is for samples of one feature: pieces of others would not belong together')
    problem = 'samples longer than the rows (overlong="drop" or "truncate" allows them)'
    return fit_lengths(lengths, row_lengths, overlong, ids, problem=problem)


def check_feature_row_lengths(row_lengths: int | Sequence[int], num_features: int) -> Int64[np.ndarray, " D"]:
    """Checks the length of rows in each of D features: integers from 1 to 2**23 − 1.

    Raises:
      ValueError: another number of lengths than of features, or lengths that are not as described; they are listed.
    """
    given: list[Any] = [row_lengths] if isinstance(row_lengths, int) else list(row_lengths)
    if len(given) != num_features:
        raise UserError(f"lengths of {num_features} features need a row length for each, not {given}")
    wrong = [f"feature {d}: {t!r}" for d, t in enumerate(given) if not is_integer(t) or not 1 <= t <= _MAX_ROW_LENGTH]
    if wrong:
        raise UserError(f"row lengths must be integers from 1 to {_MAX_ROW_LENGTH}: {', '.join(wrong)}")
    return np.array(given, np.int64)
