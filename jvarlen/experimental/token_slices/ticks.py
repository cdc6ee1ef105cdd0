"""The schedule of token slices as rows of numbers, one for each tick, which the program reads.

Letters as in `program`.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from jvarlen.experimental.token_slices.schedule import token_slices
from jvarlen.parallel.schedules import BACKWARD, FORWARD

__all__ = ["TickPlan", "plan_ticks"]


class TickPlan(NamedTuple):
    """What each stage does in each tick.

    Attributes:
      rows: int32[T, S] by name, with a row for each tick: tables as of `Tables`, and `branch`, 0 for no action, 1 + k
        for the forward pass of slice k, 1 + K + k for its backward pass; `start`, the first position of the slice;
        `input_at` and `earlier_at`, the microbatch whose input and whose keys and values are kept, or −1.
      edges: K + 1 of them, where slices start and end.
      num_stages: S.
      num_microbatches: M.
    """

    rows: dict[str, np.ndarray]
    edges: tuple[int, ...]
    num_stages: int
    num_microbatches: int

    @property
    def num_slices(self) -> int:
        """K."""
        return len(self.edges) - 1

    @property
    def longest(self) -> int:
        """The most positions of a slice: what is sent has as many."""
        return int(np.diff(self.edges).max())

    @property
    def longest_earlier(self) -> int:
        """The most positions of a slice that has later ones."""
        return int(np.diff(self.edges)[:-1].max(initial=0))


def plan_ticks(num_stages: int, num_microbatches: int, lengths: tuple[int, ...]) -> TickPlan:
    """The ticks of a schedule of slices of these lengths."""
    num_slices = len(lengths)
    edges = (0, *itertools.accumulate(lengths))
    tables = token_slices(num_stages, num_microbatches, num_slices).tables()
    kind, k, microbatch = tables.kind, tables.microbatch % num_slices, tables.microbatch // num_slices
    rows = {name: getattr(tables, name) for name in ("arriving_input", "arriving_gradient")}
    rows["microbatch"] = microbatch
    rows["start"] = np.asarray(edges, np.int32)[k]
    rows["input_at"] = np.where(kind == FORWARD, microbatch, -1)
    rows["earlier_at"] = np.where((kind == FORWARD) & (k < num_slices - 1), microbatch, -1)
    branch = np.where(kind == FORWARD, 1 + k, 0) + np.where(kind == BACKWARD, 1 + num_slices + k, 0)
    # The backward pass of the last stage computes all of its forward pass, and nothing looks at the last slice.
    branch[:, -1][branch[:, -1] == num_slices] = 0
    rows["branch"] = branch
    return TickPlan(rows, edges, num_stages, num_microbatches)
