"""From the plan of packed rows to the plan of their samples."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from torch_ref.planning.packing import Packing
from torch_ref.planning.plan import Plan

__all__ = ["count_shortest", "plan_samples_of_rows"]


def count_shortest(packing: Packing, buckets: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return how many of the shortest samples a row of each bucket holds, or those given: no row of any order has more.

    A wrapped row can begin and end with parts of two others. At least 1, and no more than tokens.
    """
    if packing.most_samples is not None:
        rows = [packing.row_lengths] if len(buckets[0]) > 2 else [(length,) for length in packing.row_lengths]
        most_of = dict(zip(rows, packing.most_samples, strict=True))
        return tuple(most_of[bucket[1:]] for bucket in buckets)
    lengths = packing.sample_lengths if packing.all_lengths is None else packing.all_lengths
    limits = np.array(buckets)[:, 1:]
    tokens_before = np.cumsum(np.sort(lengths.reshape(len(lengths), -1), axis=0), axis=0)
    most = [np.searchsorted(tokens_before[:, d], limits[:, d], side="right") for d in range(limits.shape[1])]
    in_rows = np.min(most, axis=0) + 2 * (packing.method == "wrapped")
    return tuple(np.clip(in_rows, 1, limits[:, 0]).tolist())


def plan_samples_of_rows(plan: Plan, packing: Packing) -> Plan:
    """Return the plan of a packing's samples, from that of its rows."""
    rows = plan.sample_ids
    sizes = np.diff(packing.row_offsets)[rows]
    row_offsets = np.concatenate([[0], np.cumsum(sizes)])
    places = np.arange(row_offsets[-1]) + np.repeat(packing.row_offsets[rows] - row_offsets[:-1], sizes)
    return replace(
        plan,
        sample_ids=packing.sample_ids[places],
        chunk_starts=None if packing.chunk_starts is None else packing.chunk_starts[places],
        group_offsets=row_offsets[plan.group_offsets],
        row_offsets=row_offsets,
        overlong=packing.overlong,
        num_dropped=packing.num_dropped,
        num_truncated=packing.num_truncated,
        shuffled=packing.shuffled,
        samples_per_row=count_shortest(packing, plan.buckets.shapes),
    )
