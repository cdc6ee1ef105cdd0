"""Reports: in go lengths or the metrics of a run, out come text and pictures."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.signal
from jaxtyping import Int64

__all__ = ["length_histogram", "plot_curves", "read_metrics"]

_BAR = 40  # characters of the longest bar
_AXES = ("loss, bits a byte", "learning rate", "sequences a step", "bucket length")
_SMOOTHING = 0.95  # of the loss curve, a step


def length_histogram(lengths: Int64[np.ndarray, " N"], num_bins: int = 14) -> str:
    """A histogram of lengths as text, the bins growing by equal ratios.

    Args:
      lengths: int64[N], each ≥ 1.
      num_bins: the most bins.

    Returns:
      A line a bin: its range, how many samples, their share of all tokens, a bar; then a line of figures.
    """
    edges = np.unique(np.geomspace(lengths.min(), lengths.max() + 1, num_bins + 1).round().astype(np.int64))
    bin_of_sample = np.searchsorted(edges, lengths, side="right") - 1
    samples = np.bincount(bin_of_sample, minlength=len(edges) - 1)
    tokens = np.bincount(bin_of_sample, lengths, len(edges) - 1)
    lines = [f"{'length':>15} {'samples':>10} {'of tokens':>10}"]
    for low, high, count, share in zip(edges, edges[1:] - 1, samples, tokens / tokens.sum(), strict=False):
        bar = "█" * round(_BAR * count / samples.max())
        lines.append(f"{low:>6,} – {high:>6,} {count:>10,} {share:>10.1%} {bar}".rstrip())
    lines.append(
        f"{len(lengths):,} samples, {lengths.sum():,} tokens; shortest {lengths.min():,}, "
        f"median {int(np.median(lengths)):,}, 99 % up to {int(np.percentile(lengths, 99)):,}, longest {lengths.max():,}"
    )
    return "\n".join(lines)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, in order; a last line that was cut off is left out.

    Raises:
      ValueError: another line is no JSON object with a step; it is named.
    """
    lines = path.read_text(errors="replace").splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            row["step"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}, is no record of a step: {error!r}") from None
        rows.append(row)
    return rows


def plot_curves(metrics: Iterable[dict[str, Any]], path: Path) -> None:
    """Draws loss, learning rate, batch size and bucket length over steps into a PNG file."""
    from matplotlib.figure import Figure  # here: text reports do without matplotlib

    rows = [row for row in metrics if "loss" in row]  # evaluations have lines of their own
    steps = np.array([row["step"] for row in rows])
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]} if rows else {}
    figure = Figure(figsize=(9, 9), layout="constrained")
    axes = figure.subplots(4, sharex=True)
    if rows:
        bits = columns["loss"] / np.log(2)
        axes[0].plot(steps, bits, color="0.8", linewidth=0.8, label="step")
        axes[0].plot(steps, _smooth(bits), color="C0", label="smoothed")
        axes[0].legend(frameon=False)
        axes[1].plot(steps, columns["base_learning_rate"], color="0.6", label="base")
        axes[1].plot(steps, columns["learning_rate"], ".", color="C1", markersize=3, label="in force")
        axes[1].legend(frameon=False)
        axes[2].plot(steps, columns["num_sequences"], ".", color="C2", markersize=3)
        axes[3].plot(steps, columns["bucket_length"], ".", color="C3", markersize=3)
    for axis, label in zip(axes, _AXES, strict=True):
        axis.set_ylabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    axes[3].set_xlabel("step")
    figure.savefig(path, dpi=110)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Exponential moving average without the bias of its start."""
    sums = scipy.signal.lfilter([1 - _SMOOTHING], [1, -_SMOOTHING], values)
    return sums / (1 - _SMOOTHING ** np.arange(1, len(values) + 1))
