"""Counts of lengths that are read in pieces, so that those of a memory-mapped file need not fit memory.

Letters: N samples, D distinct lengths.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from jaxtyping import Integer

from jvarlen.experimental.large_plans.columns import read_slice
from jvarlen.planning.lengths import (
    LengthHistogram,
    apply_overlong,
    check_kind,
    check_values,
    dropped_and_truncated,
    histogram_of,
)

__all__ = ["LargeOverlong", "histogram_in_pieces", "overlong_counts"]

LargeOverlong = Literal["error", "drop", "truncate"]  # where other windows begin is an array that these plans lack

_PIECE = 2**22  # samples read at a time


def histogram_in_pieces(lengths: Integer[np.ndarray, " N"]) -> LengthHistogram:
    """How many samples have each length; raises ValueError that lists lengths below 1."""
    check_kind(lengths)
    counted = []
    for start in range(0, len(lengths), _PIECE):
        piece = read_slice(lengths, start, min(start + _PIECE, len(lengths)))
        check_values(piece, start)
        counted.append(histogram_of(piece.astype(np.int64, copy=False)))
    values, place = np.unique(np.concatenate([each.lengths for each in counted]), return_inverse=True)
    totals = np.zeros(len(values), np.int64)
    np.add.at(totals, place, np.concatenate([each.counts for each in counted]))
    return LengthHistogram(values, totals)


def overlong_counts(
    lengths: Integer[np.ndarray, " N"], histogram: LengthHistogram, limit: int, overlong: LargeOverlong
) -> tuple[int, int]:
    """Applies `apply_overlong` to counted samples, whose lengths are only read to list them in an error."""
    is_long = histogram.lengths > limit
    num_long, num_fitting = int(histogram.counts[is_long].sum()), int(histogram.counts[~is_long].sum())
    if num_long and (overlong == "error" or (overlong == "drop" and not num_fitting)):
        starts = range(0, len(lengths), _PIECE)
        pieces = ((start, read_slice(lengths, start, min(start + _PIECE, len(lengths)))) for start in starts)
        ids = np.concatenate([np.flatnonzero(piece > limit) + start for start, piece in pieces])
        apply_overlong(overlong, ids, lengths[ids], limit, num_fitting)
    return dropped_and_truncated(num_long, overlong)
