"""Histograms of lengths as text."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64

from jvarlen._common.text_table import text_table

__all__ = ["length_histogram"]

_MOST_BINS = 14
_BAR = 40  # characters of the longest bar


def length_histogram(lengths: Int64[np.ndarray, " N"]) -> str:
    """A histogram of lengths as text, with bins that grow by equal ratios.

    Args:
      lengths: int64[N], each ≥ 1.

    Returns:
      One line a bin, with its range, number of samples, share of all tokens, and a bar; then a line of figures.
    """
    edges = np.unique(np.geomspace(lengths.min(), lengths.max() + 1, _MOST_BINS + 1).round().astype(np.int64))
    bin_of_sample = np.searchsorted(edges, lengths, side="right") - 1
    samples = np.bincount(bin_of_sample, minlength=len(edges) - 1)
    tokens = np.bincount(bin_of_sample, lengths, len(edges) - 1)
    rows = [["length", "samples", "of tokens"]]
    for low, high, count, share in zip(edges, edges[1:] - 1, samples, tokens / tokens.sum(), strict=False):
        bar = "█" * round(_BAR * count / samples.max())
        rows.append([f"{low:>6,} – {high:>6,}", f"{count:,}", f"{share:.1%}", bar])
    table = text_table(rows, align=">", least_widths=(15, 10, 10), gap=" ")
    return (
        f"{table}\n{len(lengths):,} samples, {lengths.sum():,} tokens; shortest {lengths.min():,}, "
        f"median {int(np.median(lengths)):,}, 99 % up to {int(np.percentile(lengths, 99)):,}, longest {lengths.max():,}"
    )
