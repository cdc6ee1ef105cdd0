"""The state of a stream: plain JSON values, checked before the stream resumes from them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import dacite

from jvarlen._common.checks import UserError, check_at_least_one
from jvarlen.planning.buckets import Bucket, check_buckets
from jvarlen.planning.lengths import Overlong

__all__ = ["STATE_VERSION", "StreamState", "check_single_buckets", "read_state"]

STATE_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamState:
    """Plain values from which a stream resumes; the waiting samples are grouped by bucket."""

    version: int
    buckets: list[list[int]]
    microbatches_per_step: int
    max_waiting: int | None
    overlong: Overlong
    num_read: int
    num_dropped: int
    num_truncated: int
    waiting_ids: list[list[int]]
    waiting_lengths: list[list[int]]


def read_state(fields: Mapping[str, Any]) -> StreamState:
    """Checks a state from `StreamBatches.state`; raises ValueError that says what is wrong."""
    try:
        if missing := [field.name for field in dataclasses.fields(StreamState) if field.name not in fields]:
            raise UserError(f"it has no {', '.join(missing)}")
        state = dacite.from_dict(StreamState, fields, dacite.Config(strict=True))
        if state.version != STATE_VERSION:
            raise UserError(f"version {state.version}, and not {STATE_VERSION}")
        buckets = check_single_buckets([tuple(bucket) for bucket in state.buckets])
        max_waiting = 1 if state.max_waiting is None else state.max_waiting
        check_at_least_one(microbatches_per_step=state.microbatches_per_step, max_waiting=max_waiting)
        _check_waiting(state, buckets)
    except (dacite.DaciteError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"this is no state of a stream: {error}") from error
    return state


def _check_waiting(state: StreamState, buckets: tuple[Bucket, ...]) -> None:
    """Raises ValueError if no stream can have these waiting samples or these counts."""
    if not len(buckets) == len(state.waiting_ids) == len(state.waiting_lengths):
        raise UserError(
            f"{len(buckets)} buckets, and waiting samples of {len(state.waiting_ids)} and {len(state.waiting_lengths)}"
        )
    shorter = 0
    for bucket, ids, lengths in zip(buckets, state.waiting_ids, state.waiting_lengths, strict=True):
        if len(ids) != len(lengths) or len(ids) >= state.microbatches_per_step * bucket.rows:
            raise UserError(
                f"{len(ids)} ids and {len(lengths)} lengths wait for a step of {bucket.rows}×{bucket.length}"
            )
        if any(a >= b for a, b in itertools.pairwise([-1, *ids, state.num_read])):
            raise UserError(f"ids that wait must ascend from 0 to below num_read, {state.num_read}")
        if not all(shorter < length <= bucket.length for length in lengths):
            raise UserError(f"samples wait for {bucket.rows}×{bucket.length} that belong to another")
        shorter = bucket.length
    waiting = [i for ids in state.waiting_ids for i in ids]
    if len(set(waiting)) != len(waiting):
        raise UserError("an id waits twice")
    counts = state.num_read, state.num_dropped, state.num_truncated
    if min(counts) < 0 or state.num_dropped + len(waiting) > state.num_read or state.num_truncated > state.num_read:
        raise UserError(
            f"{state.num_read} read, {state.num_dropped} dropped, {state.num_truncated} truncated, {len(waiting)} wait"
        )
    if state.max_waiting is not None and len(waiting) > state.max_waiting:
        raise UserError(f"{len(waiting)} samples wait, and max_waiting is {state.max_waiting}")


def check_single_buckets(buckets: Sequence[tuple[int, ...]]) -> tuple[Bucket, ...]:
    """Checks buckets as `check_buckets` does; raises ValueError for those of pairs as well."""
    checked = check_buckets(buckets)
    single = tuple(bucket for bucket in checked if isinstance(bucket, Bucket))
    if len(single) < len(checked):
        raise UserError(f"buckets of a stream must be (rows, length) pairs, not {checked}")
    return single
