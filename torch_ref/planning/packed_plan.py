"""From the plan of packed rows to the plan of their samples; pieces of split samples in order."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_ref.checks import list_offenders
from torch_ref.planning.lengths import list_pairs
from torch_ref.planning.packing import Packing
from torch_ref.planning.plan import Plan

__all__ = ["check_packing", "hold_back_rows", "hold_back_steps", "plan_samples_of_rows"]


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
    if packing.piece_starts is not None and longest != packing.row_lengths[-1]:
        raise ValueError(
            f"the packing split samples into pieces of {packing.row_lengths[-1]}: the longest bucket must have this "
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
        piece_starts=None if packing.piece_starts is None else packing.piece_starts[places],
        step_offsets=row_offsets[plan.step_offsets],
        row_offsets=row_offsets,
        overlong=packing.overlong,
        num_dropped=packing.num_dropped,
        num_truncated=packing.num_truncated,
        shuffled=packing.shuffled,
        samples_per_row=_count_shortest(packing, plan.buckets.shapes),
    )


def hold_back_rows(packing: Packing, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Order rows so that each comes after those with earlier pieces of its samples."""
    assert packing.piece_starts is not None
    pieces = _pieces_between(packing.sample_ids, packing.piece_starts, packing.row_offsets)
    return rows[_hold_back([pieces[row] for row in rows.tolist()])]


def hold_back_steps(plan: Plan, *, longest_first: bool) -> Plan:
    """Order steps likewise, and equally long pieces of a sample by where they begin."""
    assert plan.piece_starts is not None
    assert plan.row_offsets is not None
    steps = _hold_back(_pieces_between(plan.sample_ids, plan.piece_starts, plan.step_offsets))
    if longest_first:
        first = next(place for place, step in enumerate(steps) if plan.step_bucket[step] == plan.step_bucket.max())
        steps[0], steps[first] = steps[first], steps[0]
    first_row = np.searchsorted(plan.row_offsets, plan.step_offsets)
    rows = np.concatenate([np.arange(first_row[step], first_row[step + 1]) for step in steps])
    places = np.concatenate([np.arange(plan.step_offsets[step], plan.step_offsets[step + 1]) for step in steps])
    ids, starts = plan.sample_ids[places], plan.piece_starts[places]
    for number in np.unique(ids[starts > 0]):
        starts[ids == number] = np.sort(starts[ids == number])
    return replace(
        plan,
        step_bucket=plan.step_bucket[steps],
        step_offsets=np.concatenate([[0], np.cumsum(plan.num_sequences[steps])]),
        num_tokens=plan.num_tokens[steps],
        sample_ids=ids,
        piece_starts=starts,
        row_offsets=np.concatenate([[0], np.cumsum(np.diff(plan.row_offsets)[rows])]),
    )


def _hold_back(groups: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
    """Order groups of pieces (sample, start) so that a last piece comes after all others of its sample.

    Returns:
        The indices of the groups. One that has to wait comes as soon as it can, in order among those that can.
    """
    last: dict[int, int] = {}
    for group in groups:
        for number, start in group:
            last[number] = max(start, last.get(number, 0))
    missing = Counter(number for group in groups for number, start in group if start < last[number])
    waiting_for = [{n for n, start in group if start == last[n] and missing[n]} for group in groups]
    held: dict[int, list[int]] = {}  # groups by the samples that they wait for
    ordered = []
    for index, group in enumerate(groups):
        missing.subtract(number for number, start in group if start < last[number])
        waiting_for[index] = {number for number in waiting_for[index] if missing[number]}
        for number in waiting_for[index]:
            held.setdefault(number, []).append(index)
        if waiting_for[index]:
            continue
        ordered.append(index)
        freed = set()
        for number in {number for number, _ in group if not missing[number]}:
            for other in held.pop(number, []):
                waiting_for[other].discard(number)
                if not waiting_for[other]:
                    freed.add(other)
        ordered += sorted(freed)
    return ordered


def _pieces_between(ids: NDArray[np.int64], starts: NDArray[np.int64], offsets: NDArray[np.int64]) -> list[Any]:
    pieces, bounds = list(zip(ids.tolist(), starts.tolist(), strict=True)), offsets.tolist()
    return [pieces[begin:end] for begin, end in pairwise(bounds)]


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
