"""The state of a stream, as plain values; checked when a stream resumes from it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import dacite

from jvarlen._common.checks import UserError, check_at_least_one, if_given
from jvarlen.planning.buckets import Bucket, check_buckets
from jvarlen.planning.lengths import Overlong
from jvarlen.planning.order import check_seed

__all__ = ["STATE_VERSION", "StreamState", "check_single_buckets", "read_state"]

# 2: streams can have a shuffle buffer.
STATE_VERSION = 2
_NEW_IN_2: dict[str, Any] = {"shuffle_buffer": None, "seed": 0, "epoch": 0, "buffered_ids": [], "buffered_lengths": []}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamState:
    """Plain values from which a stream resumes; waiting samples are grouped by bucket, buffered ones are not."""

    version: int
    buckets: list[list[int]]
    microbatches_per_step: int
    max_waiting: int | None
    overlong: Overlong
    shuffle_buffer: int | None
    seed: int
    epoch: int
    num_read: int
    num_dropped: int
    num_truncated: int
    waiting_ids: list[list[int]]
    waiting_lengths: list[list[int]]
    buffered_ids: list[int]
    buffered_lengths: list[int]


def read_state(fields: Mapping[str, Any]) -> StreamState:
    """Checks a state from `StreamBatches.state`; raises ValueError that says what is wrong."""
    try:
        if fields.get("version") == 1:
            fields = {**_NEW_IN_2, **fields, "version": STATE_VERSION}
        if missing := [field.name for field in dataclasses.fields(StreamState) if field.name not in fields]:
            raise UserError(f"it has no {', '.join(missing)}")
        state = dacite.from_dict(StreamState, fields, dacite.Config(strict=True))
        if state.version != STATE_VERSION:
            raise UserError(f"version {state.version}, and not {STATE_VERSION}")
        buckets = check_single_buckets([tuple(bucket) for bucket in state.buckets])
        check_at_least_one(
            microbatches_per_step=state.microbatches_per_step,
            **if_given(max_waiting=state.max_waiting, shuffle_buffer=state.shuffle_buffer),
        )
        check_seed(state.seed, state.epoch)
        _check_waiting(state, buckets)
        _check_buffered(state)
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
        in_order = ids if state.shuffle_buffer is None else sorted(ids)
        if any(a >= b for a, b in itertools.pairwise([-1, *in_order, state.num_read])):
            raise UserError(f"ids that wait must ascend from 0 to below num_read, {state.num_read}")
        if not all(shorter < length <= bucket.length for length in lengths):
            raise UserError(f"samples wait for {bucket.rows}×{bucket.length} that belong to another")
        shorter = bucket.length
    waiting = [i for ids in state.waiting_ids for i in ids]
    known = [*waiting, *state.buffered_ids]
    if len(set(known)) != len(known):
        raise UserError("an id waits twice")
    counts = state.num_read, state.num_dropped, state.num_truncated
    if min(counts) < 0 or state.num_dropped + len(known) > state.num_read or state.num_truncated > state.num_read:
        raise UserError(
            f"{state.num_read} read, {state.num_dropped} dropped, {state.num_truncated} truncated, {len(known)} wait"
        )
    if state.max_waiting is not None and len(waiting) > state.max_waiting:
        raise UserError(f"{len(waiting)} samples wait, and max_waiting is {state.max_waiting}")


def _check_buffered(state: StreamState) -> None:
    """Raises ValueError if no shuffle buffer can hold these samples."""
    ids, lengths = state.buffered_ids, state.buffered_lengths
    if len(ids) != len(lengths) or len(ids) >= (state.shuffle_buffer or 1):
        raise UserError(f"{len(ids)} ids and {len(lengths)} lengths in a shuffle buffer of {state.shuffle_buffer}")
    if not all(0 <= i < state.num_read for i in ids) or not all(1 <= length < 2**63 for length in lengths):
        raise UserError("the shuffle buffer holds samples that were not read, or of no length")


def check_single_buckets(buckets: Sequence[tuple[int, ...]]) -> tuple[Bucket, ...]:
    """Checks buckets as `check_buckets` does; raises ValueError for those of pairs as well."""
    checked = check_buckets(buckets)
    single = tuple(bucket for bucket in checked if isinstance(bucket, Bucket))
    if len(single) < len(checked):
        raise UserError(f"buckets of a stream must be (rows, length) pairs, not {checked}")
    return single
