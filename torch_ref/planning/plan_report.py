"""The report of a plan: a table of its buckets as text."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from torch_ref.checks import to_tensor

__all__ = ["steps_table"]


def steps_table(
    buckets: Sequence[tuple[int, ...]],
    step_bucket: NDArray[np.int32],
    num_sequences: NDArray[np.int64],
    num_tokens: NDArray[np.int64],
    padded_tokens: NDArray[np.int64],
    *,
    first_steps: bool = False,
) -> str:
    """Return a line for each bucket and one for all: shape, samples, steps, and the share of positions that is padding.

    `padded_tokens` int64[S] are rows times length over all microbatches; `first_steps` adds the first step of each.
    """
    per_step = np.stack([num_sequences, np.ones_like(num_tokens), num_tokens, padded_tokens], axis=1)
    sums = torch.zeros((len(buckets), 4), dtype=torch.int64)
    sums.index_add_(0, to_tensor(step_bucket), to_tensor(per_step))
    names = [*(f"{rows} x {' + '.join(map(str, lengths))}" for rows, *lengths in buckets), "total"]
    lines = [f"{'rows x length':>20} {'samples':>12} {'steps':>9} {'padding':>9}"]
    for name, row in zip(names, [*sums.tolist(), per_step.sum(axis=0).tolist()], strict=True):
        samples, steps, tokens, positions = row
        share = f"{1 - tokens / positions:.2%}" if positions else "-"
        lines.append(f"{name:>20} {samples:>12,} {steps:>9,} {share:>9}")
    if first_steps:
        order = step_bucket.tolist()
        firsts = [f"{order.index(k):,}" if k in order else "-" for k in range(len(buckets))]
        lines = [f"{line} {first:>11}".rstrip() for line, first in zip(lines, ["first step", *firsts, ""], strict=True)]
    return "\n".join(lines)
