"""Histograms of lengths, curves of a run and ledgers, as text and pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int64

from jvarlen._common.checks import UserError
from jvarlen.compiling.ledger import Ledger

__all__ = ["iterate_metrics", "length_histogram", "plot_curves", "plot_ledger", "read_metrics", "smoothed"]

_MOST_BINS = 14
_BAR = 40  # characters of the longest bar
_AXES = ("loss, bits a token", "learning rate", "sequences a step", "bucket length")
_SMOOTHING = 0.95  # of the loss curve, a step
_MOST_LABELS = 24  # of buckets side by side


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
            # ValueError: no JSON, or a number beyond what Python reads; RecursionError: brackets in brackets.
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                wrong = UserError(f"{path}, line {number}, is no record of a step: {error!r}")
            else:
                yield row


def plot_curves(metrics: Iterable[dict[str, Any]], path: Path) -> None:
    """Plots loss, learning rate, batch size and bucket length over steps into a PNG file.

    Args:
      metrics: records of steps, as from `read_metrics`.
      path: the file; its directory must exist, and an existing file is replaced.
    """
    from matplotlib.figure import Figure  # here: text reports do without matplotlib

    rows = [row for row in metrics if "loss" in row]  # evaluations have lines of their own
    steps = np.array([row["step"] for row in rows])
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]} if rows else {}
    figure = Figure(figsize=(9, 9), layout="constrained")
    axes = figure.subplots(4, sharex=True)
    if rows:
        bits = columns["loss"] / np.log(2)
        axes[0].plot(steps, bits, color="0.8", linewidth=0.8, label="step")
        axes[0].plot(steps, smoothed(bits), color="C0", label="smoothed")
        axes[0].legend(frameon=False)
        if "learning_rate" in columns:  # an optimizer of one's own doesn't tell
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


def plot_ledger(ledger: Ledger, path: Path) -> None:
    """Plots compile seconds, uses, seconds of a step, padding and bytes of each bucket into a PNG file.

    Buckets are in order of their lengths. Unknown figures of a bucket are left blank; a figure that is unknown for all
    buckets is marked as such.

    Args:
      ledger: the ledger of compiled buckets.
      path: the file; its directory must exist, and an existing file is replaced.
    """
    from matplotlib.figure import Figure  # here: text reports do without matplotlib

    rows = sorted(ledger, key=lambda row: row.bucket.lengths)
    places = np.arange(len(rows))

    def figures_of(name: str, unit: float = 1.0) -> np.ndarray:
        """float64[K], NaN where unknown."""
        return np.array([getattr(row, name) for row in rows], np.float64) / unit

    figure = Figure(figsize=(9, 11), layout="constrained")
    axes = figure.subplots(5, sharex=True)

    def bars(axis: int, values: np.ndarray, colour: str, below: np.ndarray | float = 0.0, label: str = "") -> None:
        known = np.isfinite(values)
        bottom = np.broadcast_to(below, values.shape)[known]
        axes[axis].bar(places[known], values[known], 0.8, bottom, color=colour, label=label or None)
        if not known.any():
            axes[axis].text(0.5, 0.5, "not known", color="0.5", ha="center", transform=axes[axis].transAxes)

    lower_s = figures_of("lower_s")
    bars(0, lower_s, "C0", label="lowering")
    bars(0, figures_of("compile_s"), "C1", np.nan_to_num(lower_s), "compiling, or reading")
    bars(1, figures_of("times_used"), "C2", label="ran")
    axes[1].plot(places, figures_of("planned_steps"), "_", color="0.3", markersize=12, label="in the plan")
    bars(2, figures_of("step_s"), "C3")
    bars(3, figures_of("padding", 0.01), "C4")
    argument_mb, kept_mb = figures_of("argument_bytes", 1e6), figures_of("output_bytes", 1e6)
    kept_mb -= figures_of("alias_bytes", 1e6)
    bars(4, argument_mb, "C0", label="arguments")
    bars(4, kept_mb, "C1", argument_mb, "outputs beside them")
    bars(4, figures_of("temp_bytes", 1e6), "C2", argument_mb + kept_mb, "temporaries")
    axes[4].plot(places, figures_of("peak_bytes", 1e6), "_", color="0.3", markersize=12, label="peak by the compiler")
    labels = ("compile seconds", "steps", "seconds of a step", "padding in %", "MB")
    for axis, label in zip(axes, labels, strict=True):
        axis.set_ylabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in (axes[0], axes[1], axes[4]):
        axis.legend(frameon=False, fontsize="small")
    every = max(1, math.ceil(len(rows) / _MOST_LABELS))
    shown = rows[::every]
    axes[4].set_xticks(places[::every], [str(row.bucket) for row in shown], rotation=90 if len(shown) > 8 else 0)
    axes[4].set_xlabel("bucket")
    axes[4].set_xlim(-0.6, max(len(rows), 1) - 0.4)
    figure.savefig(path, dpi=110)


def smoothed(values: Float[np.ndarray, " S"]) -> Float[np.ndarray, " S"]:
    """Exponential moving average without the bias of its start."""
    import scipy.signal  # here: importing it takes long, and few need it

    sums = scipy.signal.lfilter([1 - _SMOOTHING], [1, -_SMOOTHING], values)
    return sums / (1 - _SMOOTHING ** np.arange(1, len(values) + 1))
