"""Buckets that reuse shapes whose programs exist already.

NumPy only. Letters: C compiled shapes, D distinct rounded lengths, K buckets, M microbatches a step, B rows, T length,
n samples of a bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from jvarlen._common.checks import UserError, is_integer, list_first
from jvarlen.planning.budget import Budget, checked_cost
from jvarlen.planning.edges import Histogram, optimal_edges
from jvarlen.planning.lengths import ends_to_offsets

__all__ = ["reusing_buckets", "usable_shapes"]


def usable_shapes(
    compiled: Iterable[Sequence[int]], budget: Budget, max_length: int | None
) -> Int64[np.ndarray, " C 2"]:
    """The compiled shapes that a bucket may have.

    Args:
      compiled: (rows, length) shapes.
      budget: of a microbatch. Rows must be at most the cap of their length, and a multiple of `row_multiple` where the
        cap leaves one; lengths must be multiples of `length_multiple`.
      max_length: the longest bucket; None: any.

    Returns:
      int64[C, 2], rows and length, without duplicates, ascending by length, then rows.

    Raises:
      ValueError: shapes that are not (rows, length) with integers of at least 1; they are listed.
    """
    given = list(compiled)
    if wrong := [shape for shape in given if not _is_shape(shape)]:
        raise UserError(
            f"compiled must hold (rows, length) shapes with integers of at least 1, not {list_first(wrong)}"
        )
    fitting = {
        (int(length), int(rows))
        for rows, length in given
        if int(rows) * int(length) <= budget.max_tokens
        and length % budget.length_multiple == 0
        and (max_length is None or length <= max_length)
    }
    lengths, rows = np.array(sorted(fitting), np.int64).reshape(-1, 2).T
    caps = budget.row_caps(lengths)
    is_usable = (rows <= caps) & ((caps < budget.row_multiple) | (rows % budget.row_multiple == 0))
    return np.stack([rows, lengths], axis=1)[is_usable]


def reusing_buckets(
    histogram: Histogram,
    caps: Int64[np.ndarray, " D"],
    shapes: Int64[np.ndarray, " C 2"],
    max_shapes: int,
    budget: Budget,
) -> tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " K"]]:
    """The cheapest buckets if those of compiled shapes cost no `compile_seconds`.

    Edges are rounded lengths of samples and lengths of compiled shapes. Every bucket holds at least one sample, because
    an empty one saves nothing, and of equal costs the fewest buckets win.

    Args:
      histogram: of the samples.
      caps: int64[D], the most rows at each of its rounded lengths, each at least 1.
      shapes: from `usable_shapes`, at least one.
      max_shapes: the most buckets.
      budget: of a microbatch, with `compile_seconds`.

    Returns:
      Edges, ascending, and rows, int64[K] each.
    """
    edges = np.union1d(histogram.rounded, shapes[:, 1])
    place = np.searchsorted(histogram.rounded, edges, side="right")
    samples_up_to = histogram.samples_below[place]
    caps_of_edges = np.where(np.isin(edges, histogram.rounded), caps[place - 1], 0)
    choice, samples_below = _RowChoice(shapes, budget), ends_to_offsets(samples_up_to)

    def bucket_costs(j: int) -> Float64[np.ndarray, " j"]:
        return choice.costs_and_rows(samples_below[j] - samples_below[:j], caps_of_edges[j - 1], edges[j - 1])[0]

    num_last = int((edges >= histogram.rounded[-1]).sum())
    chosen = np.searchsorted(edges, optimal_edges(edges, bucket_costs, max_shapes, num_last))
    num_held = np.diff(samples_up_to[chosen], prepend=0)
    rows = [choice.costs_and_rows(num_held[k : k + 1], caps_of_edges[j], edges[j])[1] for k, j in enumerate(chosen)]
    return edges[chosen], np.concatenate(rows)


class _RowChoice:
    """The cheapest rows of a bucket: its trimmed ones, or those of a compiled shape of its length."""

    def __init__(self, shapes: Int64[np.ndarray, " C 2"], budget: Budget):
        assert budget.cost is not None
        self._budget = budget
        self._rows, self._lengths = shapes.T
        self._costs = checked_cost(budget.cost, self._rows, self._lengths)

    def costs_and_rows(
        self, num_held: Int64[np.ndarray, " n"], cap: int, length: int
    ) -> tuple[Float64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """What buckets of a length cost, and their rows.

        Args:
          num_held: int64[n], samples of each.
          cap: the most rows; 0 leaves only compiled shapes.
          length: tokens a row.
        """
        costs, rows = np.full(len(num_held), np.inf), np.zeros(len(num_held), np.int64)
        if cap:
            cap_of_each = np.full(len(num_held), cap)
            costs = self._budget.bucket_costs(num_held, cap_of_each, np.full(len(num_held), length))
            _, rows = self._budget.steps_and_rows(num_held, cap_of_each)
        # Of equal costs the last wins, which has the fewest rows.
        first, end = np.searchsorted(self._lengths, [length, length + 1])
        for i in range(end - 1, first - 1, -1):
            microbatches = self._budget.num_steps(num_held, self._rows[i]) * self._budget.microbatches_per_step
            reusing = microbatches.astype(np.float64) * self._costs[i]
            rows = np.where(reusing <= costs, self._rows[i], rows)
            costs = np.minimum(reusing, costs)
        return costs, rows


def _is_shape(shape: Any) -> bool:
    is_pair = isinstance(shape, Sequence | np.ndarray) and len(shape) == 2
    return is_pair and all(is_integer(number) and number >= 1 for number in shape)
