"""From a plan of packed rows to the plan of their samples.

Letters: n packed samples, or pieces of them; R rows, S steps, P places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int64

from jvarlen._common.checks import UserError, list_offenders, offenders_where
from jvarlen.planning._kernels import take_segments
from jvarlen.planning.buckets import AnyBucket
from jvarlen.planning.lengths import PackedOverlong, check_lengths_for, ends_to_offsets, fit_lengths
from jvarlen.planning.order import stable_argsort
from jvarlen.planning.packing.pack import Packing

if TYPE_CHECKING:
    from jvarlen.planning.plan import Plan

__all__ = ["lengths_of_rows", "rows_in_chunk_order", "steps_in_chunk_order", "with_samples"]


def lengths_of_rows(
    packing: Packing, buckets: Sequence[AnyBucket], overlong: PackedOverlong
) -> Int64[np.ndarray, " R *sides"]:
    """The tokens of packed rows; raises ValueError where no bucket holds them."""
    if overlong != "error":
        raise UserError(f"overlong={overlong!r}: a packing has cut or dropped samples by its own rule already")
    num_tokens = check_lengths_for(buckets, packing.num_tokens)
    if num_tokens.ndim == 1:
        problem = "packed rows longer than the longest bucket; of the rows"
        return fit_lengths(num_tokens, buckets[-1].lengths[0], "error", problem=problem).lengths
    edges = np.array([bucket.lengths for bucket in buckets])
    is_held = np.any(np.all(num_tokens[:, None] <= edges, axis=2), axis=1)
    if not np.all(is_held):
        offenders = list_offenders(*offenders_where(np.logical_not(is_held), num_tokens), edges.max(axis=0).tolist())
        raise UserError(f"packed rows that no bucket holds; of the rows: {offenders}")
    return num_tokens


def with_samples(plan_of_rows: Plan, packing: Packing) -> Plan:
    """The plan with the samples of each row in place of the row."""
    _check_cuts(packing, plan_of_rows.buckets)
    rows = plan_of_rows.sample_ids
    row_offsets = ends_to_offsets(np.cumsum(np.diff(packing.row_offsets)[rows]))

    def of_rows(values: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " m"]:
        return take_segments(values, packing.row_offsets, rows, row_offsets)

    return dataclasses.replace(
        plan_of_rows,
        sample_ids=of_rows(packing.sample_ids),
        piece_starts=None if packing.piece_starts is None else of_rows(packing.piece_starts),
        step_offsets=row_offsets[plan_of_rows.step_offsets],
        row_offsets=row_offsets,
        overlong=packing.overlong,
        num_dropped=packing.num_dropped,
        num_truncated=packing.num_truncated,
    )


def rows_in_chunk_order(packing: Packing, rows: Int64[np.ndarray, " R"]) -> Int64[np.ndarray, " R"]:
    """Ordered rows, each after the rows that hold earlier pieces of its samples."""
    assert packing.piece_starts is not None
    place_of_row = np.full(packing.num_rows, -1)
    place_of_row[rows] = np.arange(len(rows))
    place = np.repeat(place_of_row, np.diff(packing.row_offsets))
    is_in = place >= 0  # an order array can leave rows out
    ids, starts = packing.sample_ids[is_in], packing.piece_starts[is_in]
    return rows[_after_earlier_pieces(ids, starts, place[is_in], len(rows))]


def steps_in_chunk_order(plan: Plan, longest_first: bool) -> Plan:
    """The plan with each step after those that hold earlier pieces of its samples, and with pieces in their order."""
    assert plan.piece_starts is not None
    assert plan.row_offsets is not None
    step_of_piece = np.repeat(np.arange(plan.num_steps), plan.num_sequences)
    emitted = _after_earlier_pieces(plan.sample_ids, plan.piece_starts, step_of_piece, plan.num_steps)
    if longest_first:
        longest = plan.step_bucket[emitted] == plan.step_bucket.max()
        first = int(longest.argmax())
        emitted[[0, first]] = emitted[[first, 0]]
    first_row = np.searchsorted(plan.row_offsets, plan.step_offsets)
    num_rows = np.diff(first_row)[emitted]
    row_of = take_segments(np.arange(plan.num_rows), first_row, emitted, ends_to_offsets(np.cumsum(num_rows)))
    offsets = ends_to_offsets(np.cumsum(plan.num_sequences[emitted]))
    ids = take_segments(plan.sample_ids, plan.step_offsets, emitted, offsets)
    starts = take_segments(plan.piece_starts, plan.step_offsets, emitted, offsets)
    in_sample = np.lexsort([starts, ids])
    starts[stable_argsort(ids)] = starts[in_sample]
    return dataclasses.replace(
        plan,
        step_bucket=plan.step_bucket[emitted],
        step_offsets=offsets,
        num_tokens=plan.num_tokens[emitted],
        sample_ids=ids,
        piece_starts=starts,
        row_offsets=ends_to_offsets(np.cumsum(np.diff(plan.row_offsets)[row_of])),
    )


def _after_earlier_pieces(
    ids: Int64[np.ndarray, " n"], starts: Int64[np.ndarray, " n"], place: Int64[np.ndarray, " n"], num_places: int
) -> Int64[np.ndarray, " P"]:
    """Places in order, but one with the last piece of a sample follows all that hold other pieces of it."""
    last_start = np.zeros(ids.max() + 1, np.int64)
    np.maximum.at(last_start, ids, starts)
    is_last = starts == last_start[ids]
    last_of_others = np.full(len(last_start), -1)
    np.maximum.at(last_of_others, ids[~is_last], place[~is_last])
    waits_for = np.full(num_places, -1)
    np.maximum.at(waits_for, place[is_last], last_of_others[ids[is_last]])
    own = np.arange(num_places)
    return np.lexsort([own, waits_for > own, np.maximum(own, waits_for)])


def _check_cuts(packing: Packing, buckets: Sequence[AnyBucket]) -> None:
    """Raises ValueError if a bucket would hold more of a cut or split sample than was packed."""
    is_split = packing.piece_starts is not None
    if not packing.num_truncated and not is_split:
        return
    longest = tuple(np.max([bucket.lengths for bucket in buckets], axis=0).tolist())
    if len(longest) == 1 and longest != packing.row_lengths[-1:]:
        raise UserError(
            f"the packing {'splits' if is_split else 'cuts'} samples at {packing.row_lengths[-1]} tokens, so the "
            f"longest bucket must have just that length, not {longest[-1]}"
        )
    # A sample that was cut fills its row in that feature, so that buckets are never shorter.
    if len(longest) > 1 and any(np.greater(longest, packing.row_lengths)):
        raise UserError(
            f"the packing cuts samples at {packing.row_lengths} tokens, so no bucket may be longer, which are {longest}"
        )
