"""Samples packed into rows: what `pack_samples` returns and plans are made from.

Letters: n samples (or chunks of them), R rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Int64

from jvarlen.planning.lengths import LengthHistogram, PackedOverlong, histogram_of

__all__ = ["Packing", "PackingMethod", "feature_histograms"]

PackingMethod = Literal["best_fit", "wrapped"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Samples packed into rows. `make_plan` takes it in place of lengths and plans the rows.

    If samples have several features, every length has a last axis of them.

    Attributes:
      sample_ids: int64[n], row by row, each row from its beginning.
      row_offsets: int64[R+1]; row r holds `sample_ids[row_offsets[r]:row_offsets[r+1]]`.
      sample_lengths: int64[n], tokens of each sample; a truncated sample counts with its cut length.
      capacity: int64[R], the length of each row.
      row_lengths: the lengths that rows may have, ascending; of several features, the length of each.
      overlong: the rule for samples longer than the longest row.
      num_dropped: samples left out by that rule.
      num_truncated: samples cut by that rule.
      piece_starts: int64[n], the token of its sample with which each begins: above 0 for later chunks of a sample that
        is split, which has its id once a chunk. None where no sample is split; wrapped packing always has them.
      method: that of `pack_samples`.
      max_samples_per_row: the most samples that a row may have; None: any number.
      histograms: how many samples have each length, a histogram a feature, also of samples that an order left out;
        None: of these samples alone.
    """

    sample_ids: Int64[np.ndarray, " n"]
    row_offsets: Int64[np.ndarray, " R_plus_1"]
    sample_lengths: Int64[np.ndarray, " n *features"]
    capacity: Int64[np.ndarray, " R *features"]
    row_lengths: tuple[int, ...]
    overlong: PackedOverlong = "error"
    num_dropped: int = 0
    num_truncated: int = 0
    piece_starts: Int64[np.ndarray, " n"] | None = None
    method: PackingMethod = "best_fit"
    max_samples_per_row: int | None = None
    histograms: tuple[LengthHistogram, ...] | None = None

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.capacity)

    @property
    def num_tokens(self) -> Int64[np.ndarray, " R *features"]:
        """int64[R], tokens in each row, which a plan takes as the length of the row."""
        return np.add.reduceat(self.sample_lengths, self.row_offsets[:-1])

    def samples_per_row(self, row_lengths: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The most samples that a row of each length could hold in any epoch: as many of the shortest as fit.

        Wrapped, two more: the rest of the one before them, and the beginning of the one after. At least 1, at most
        one a token.

        Args:
          row_lengths: of K rows; each as long as it is in every feature.

        Returns:
          K numbers.
        """
        limits = [] if self.max_samples_per_row is None else [np.full(len(row_lengths), self.max_samples_per_row)]
        features = self.histograms or feature_histograms(self.sample_lengths)
        for row_length, (lengths, counts) in zip(np.array(row_lengths, np.int64).T, features, strict=True):
            num_tokens, num_samples = (np.append(0, np.cumsum(each)) for each in (lengths * counts, counts))
            num_whole = np.searchsorted(num_tokens[1:], row_length, side="right")  # lengths all of whose samples fit
            next_length = np.append(lengths, 2**62)[num_whole]
            limits.append(num_samples[num_whole] + (row_length - num_tokens[num_whole]) // next_length)
        most = np.min(limits, axis=0) + 2 * (self.method == "wrapped")
        return tuple(np.clip(most, 1, [row_length[0] for row_length in row_lengths]).tolist())

    @property
    def starts(self) -> Int64[np.ndarray, " n *features"]:
        """int64[n], the position in its row at which each sample begins."""
        starts = np.cumsum(self.sample_lengths, axis=0) - self.sample_lengths
        return starts - np.repeat(starts[self.row_offsets[:-1]], np.diff(self.row_offsets), axis=0)

    @property
    def fill(self) -> float:
        """The share of all rows' tokens that are real, in (0, 1]."""
        return int(self.sample_lengths.sum()) / int(self.capacity.sum())


def feature_histograms(lengths: Int64[np.ndarray, " n *features"]) -> tuple[LengthHistogram, ...]:
    """How many samples have each length, for each of their features."""
    if lengths.ndim == 1:
        return (histogram_of(lengths),)
    return tuple(LengthHistogram(*np.unique(of_feature, return_counts=True)) for of_feature in lengths.T)
