"""Plans of packed rows: the samples of their rows, and how much the rows of other epochs differ.

Letters: N samples, n of them (or of their chunks) in the plan, R rows.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int64, UInt64

from jvarlen.planning._kernels import take_segments
from jvarlen.planning.order import Order
from jvarlen.planning.packing import Packing, pack_by_method, row_sizes_of
from jvarlen.planning.placing import num_rows_at_once
from jvarlen.planning.plan import Plan
from jvarlen.planning.rules import PlanRules

__all__ = ["Repacking", "put_samples_into_rows"]


def put_samples_into_rows(plan_of_rows: Plan, packing: Packing) -> Plan:
    """The plan with the samples of each row in place of the row."""
    rows = plan_of_rows.sample_ids
    row_offsets = np.cumulative_sum(np.diff(packing.row_offsets)[rows], include_initial=True)

    def take_rows(values: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " m"]:
        return take_segments(values, packing.row_offsets, rows, row_offsets)

    return dataclasses.replace(
        plan_of_rows,
        sample_ids=take_rows(packing.sample_ids),
        chunk_starts=None if packing.chunk_starts is None else take_rows(packing.chunk_starts),
        group_offsets=row_offsets[plan_of_rows.group_offsets],
        row_offsets=row_offsets,
        overlong=packing.overlong,
        num_dropped=packing.num_dropped,
        num_truncated=packing.num_truncated,
        samples_per_row=packing.samples_per_row([bucket.lengths for bucket in plan_of_rows.buckets.shapes]),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Repacking:
    """Shuffled samples, which every epoch packs differently; the text says how much the rows differ."""

    lengths: Int64[np.ndarray, " N *sides"]
    packing: Packing
    rules: PlanRules

    def __str__(self) -> str:
        what, block_size = "pairs" if self.lengths.ndim == 2 else "samples", self.packing.block_size
        rules = self.rules._replace(order=Order(block_size=block_size))
        of_epochs = (rules._replace(epoch=epoch) for epoch in (0, 1))
        first, second = (pack_by_method(self.lengths, self.packing.row_lengths, each) for each in of_epochs)
        parts = ["packed all at once" if block_size is None else f"packed in blocks of {block_size:,} {what}"]
        if block_size is not None and what == "samples":  # the time is quadratic in pairs
            sizes = row_sizes_of(first.row_lengths, rules._replace(overlong="error"), is_pairs=False)
            more = first.num_rows - num_rows_at_once(first.sample_lengths, sizes)
            parts.append(f"rows more than all at once: {more:,}")
        keys = np.random.default_rng(0).integers(1, 2**63, len(self.lengths), dtype=np.uint64)
        here, there = (_sums_of_rows(packing, keys) for packing in (first, second))
        recurring = (
            f"rows of several {what} that recur in epoch 1: {np.isin(here, there).mean():.1%}" if len(here) else ""
        )
        return "; ".join([*parts, recurring or f"no row holds several {what}"])


def _sums_of_rows(packing: Packing, keys: UInt64[np.ndarray, " N"]) -> UInt64[np.ndarray, " r"]:
    """Sums of the keys of the samples in each row of several samples; they identify rows."""
    chunk_keys = keys[packing.sample_ids]
    if packing.chunk_starts is not None:
        chunk_keys *= (2 * packing.chunk_starts + 1).view(np.uint64)
    return np.add.reduceat(chunk_keys, packing.row_offsets[:-1])[np.diff(packing.row_offsets) > 1]
