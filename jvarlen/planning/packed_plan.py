"""From the plan of packed rows to the plan of their samples.

Letters: n samples or chunks, m of them in the plan.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int64

from jvarlen.planning._kernels import take_segments
from jvarlen.planning.lengths import ends_to_offsets
from jvarlen.planning.order import Order
from jvarlen.planning.packing import Packing, PackingMethod
from jvarlen.planning.plan import Plan

__all__ = ["orders_of_packing", "put_samples_into_rows"]


def orders_of_packing(order: Order, method: PackingMethod) -> tuple[Order, Order]:
    """The order in which the samples of a plan are packed, and that of the rows."""
    of_rows = dataclasses.replace(order, block_size=None)
    if order.is_by("shuffle"):
        return order, of_rows
    if method == "wrapped" or not isinstance(order.by, str):
        return Order(order.by, block_size=order.block_size), dataclasses.replace(of_rows, by="dataset")
    return Order("dataset", block_size=order.block_size), of_rows  # in which best fit makes rows of the same sizes


def put_samples_into_rows(plan_of_rows: Plan, packing: Packing) -> Plan:
    """The plan with the samples of each row in place of the row."""
    rows = plan_of_rows.sample_ids
    row_offsets = ends_to_offsets(np.cumsum(np.diff(packing.row_offsets)[rows]))

    def of_rows(values: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " m"]:
        return take_segments(values, packing.row_offsets, rows, row_offsets)

    return dataclasses.replace(
        plan_of_rows,
        sample_ids=of_rows(packing.sample_ids),
        chunk_starts=None if packing.chunk_starts is None else of_rows(packing.chunk_starts),
        step_offsets=row_offsets[plan_of_rows.step_offsets],
        row_offsets=row_offsets,
        overlong=packing.overlong,
        num_dropped=packing.num_dropped,
        num_truncated=packing.num_truncated,
        shuffled=packing.shuffled,
        samples_per_row=packing.samples_per_row([bucket.lengths for bucket in plan_of_rows.buckets.shapes]),
    )
