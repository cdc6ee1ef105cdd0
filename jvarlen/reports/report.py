"""Histograms of lengths as text, and the records of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from jvarlen._common.checks import UserError
from jvarlen._common.text_table import text_table

__all__ = ["iterate_metrics", "length_histogram", "read_metrics"]

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


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`, in order, without an incomplete last line.

    Args:
      path: the file.

    Returns:
      One record a line.

    Raises:
      ValueError: any other line is not a JSON object with a step; it is named.
    """
    return list(iterate_metrics(path))


def iterate_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of `read_metrics`, one at a time."""
    wrong: ValueError | None = None
    with path.open(errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if wrong is not None:
                raise wrong
            try:
                row = json.loads(line)
                row["step"]
            except (ValueError, KeyError, TypeError) as error:
                wrong = UserError(f"{path}, line {number}, is no record of a step: {error!r}")
            else:
                yield row
