"""From the plan of packed rows to the plan of their samples."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from torch_ref.checks import list_offenders
from torch_ref.planning.lengths import list_pairs
from torch_ref.planning.packing import Packing
from torch_ref.planning.plan import Plan

__all__ = ["check_packing", "plan_samples_of_rows"]


def check_packing(packing: Packing, buckets: Sequence[tuple[int, ...]], overlong: str) -> None:
    """Raise ValueError if buckets hold less than the rows, or more of cut and split samples than was packed."""
    if overlong != "error":
        raise ValueError(f'overlong must be left at "error" for a packing, which has dealt with it, got {overlong!r}')
    if packing.num_tokens.ndim == 2:
        _check_joint_packing(packing, buckets)
        return
    if packing.method == "wrapped" and len(buckets) > 1:
        raise ValueError(f"wrapped rows have one length and one bucket, got {[tuple(bucket) for bucket in buckets]}")
    longest = buckets[-1][1]
    too_long = np.flatnonzero(packing.num_tokens > longest)
    if len(too_long):
        listed = list_offenders(too_long, packing.num_tokens[too_long], longest)
        raise ValueError(f"packed rows are longer than the longest bucket: {listed}")
    if packing.num_truncated and longest != packing.row_lengths[-1]:
        raise ValueError(
            f"the packing cut {packing.num_truncated} samples to {packing.row_lengths[-1]}: the longest bucket must "
            f"have this length, got {longest}"
        )
    if packing.chunk_starts is not None and longest != packing.row_lengths[-1]:
        raise ValueError(
            f"the packing split samples into chunks of {packing.row_lengths[-1]}: the longest bucket must have this "
            f"length, got {longest}"
        )


def _count_shortest(packing: Packing, buckets: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return how many of the shortest samples a row of each bucket holds: no row of any order has more.

    A wrapped row can begin and end with parts of two others. At least 1, and no more than tokens.
    """
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
        step_offsets=row_offsets[plan.step_offsets],
        row_offsets=row_offsets,
        overlong=packing.overlong,
        num_dropped=packing.num_dropped,
        num_truncated=packing.num_truncated,
        shuffled=packing.shuffled,
        samples_per_row=_count_shortest(packing, plan.buckets.shapes),
    )


def _check_joint_packing(packing: Packing, buckets: Sequence[tuple[int, ...]]) -> None:
    tokens, bucket_lengths = packing.num_tokens, np.array(buckets)[:, 1:]
    if tokens.shape[1] != bucket_lengths.shape[1]:
        raise ValueError(f"rows with {tokens.shape[1]} lengths do not go with buckets like {tuple(buckets[0])}")
    outside = np.flatnonzero(~np.any(np.all(tokens[:, None] <= bucket_lengths, axis=2), axis=1))
    if len(outside):
        raise ValueError(f"packed rows are longer than every bucket: {list_pairs(outside, tokens[outside])}")
    if packing.num_truncated and (bucket_lengths > packing.row_lengths).any():
        raise ValueError(
            f"the packing cut {packing.num_truncated} samples to {packing.row_lengths}: no bucket may be longer, "
            f"got {bucket_lengths.max(axis=0).tolist()}"
        )
