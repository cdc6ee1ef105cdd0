"""Streams: steps in a few static shapes, for lengths that are not known in advance.

Letters: K buckets, M microbatches per step, B rows, T length.
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import fractions
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import dacite
import numpy as np
import numpy.typing as npt
from jaxtyping import Int64

from jvarlen._common.checks import UserError, check_at_least_one, check_choices, if_given, is_integer, list_first
from jvarlen.planning.buckets import (
    Bucket,
    Buckets,
    check_distinct_lengths,
    resolve_buckets,
    rows_of_steps,
)
from jvarlen.planning.budget import Budget, PlanBudgetFields, broken_by_one_row, bucket_costs, takes_budget
from jvarlen.planning.lengths import COUNTS, Overlong, apply_overlong
from jvarlen.planning.make_buckets import make_buckets
from jvarlen.planning.order import BUFFER_STREAM, check_seed, random_keys
from jvarlen.planning.windows import draw_starts, is_window

__all__ = ["StreamBatches", "StreamStep", "stream_batches"]

_LENGTHS_PER_SLICE = 2**14
_KEYS_PER_SLICE = 2**10
_STATE_VERSION = 2
_TOO_LONG = (
    'samples longer than the longest bucket (overlong="drop" or "truncate" allows them; where buckets are estimated, '
    "max_length= sets the longest)"
)


class StreamStep(NamedTuple):
    """A step of a stream.

    Attributes:
      bucket_index: the index of the bucket.
      bucket: its shape.
      ids: int64[M, B], the place of each sample in the stream, counted from 0; −1 for a padding row. Row j of the step
        is in microbatch j mod M, slot j // M.
      lengths: int64[M, B], tokens of each row, cut at the bucket; 0 for a padding row.
      starts: int64[M, B], the token of its sample with which each row begins; −1 for a padding row. None where all
        begin with the first.
    """

    bucket_index: int
    bucket: Bucket
    ids: Int64[np.ndarray, "M B"]
    lengths: Int64[np.ndarray, "M B"]
    starts: Int64[np.ndarray, "M B"] | None = None


@takes_budget
def stream_batches(
    lengths: Iterable[int],
    buckets: Buckets[Bucket] | Sequence[tuple[int, int]] | Budget | None = None,
    *,
    num_estimate: int = 10_000,
    max_waiting: int | None = None,
    shuffle_buffer: int | None = None,
    seed: int = 0,
    epoch: int = 0,
    overlong: Overlong = "error",
    state: Mapping[str, object] | None = None,
    **budget: Unpack[PlanBudgetFields],
) -> StreamBatches:
    """Batches a stream: every sample exactly once, in steps of the buckets' shapes.

    M × rows samples that wait for the smallest bucket that holds them make a step. At the end of the stream the
    remaining ones come by bucket, ascending, filled up with padding rows.

    Args:
      lengths: tokens of each sample, integers of at least 1. Apart from the estimate and the shuffle buffer, no more of
        them are read than a step needs.
      buckets: `Buckets`; or, with M = 1, (rows, length) pairs, lengths strictly ascending. None, or a `Budget`:
        `make_buckets` chooses the lengths for the first `num_estimate` samples; each bucket has as many rows as the
        budget allows.
      num_estimate: how many samples the buckets are estimated from.
      max_waiting: the most samples that wait at a time, at least 1. When one more arrives, the fullest bucket (ties:
        the shorter) gives a step with padding rows. None: as many as the buckets hold.
      shuffle_buffer: how many samples are read ahead; the next one is drawn from them at random. None: samples come in
        the order of the stream.
      seed: 0 ≤ seed < 2**63, of the shuffle buffer and of `"truncate_random"`.
      epoch: 0 ≤ epoch < 2**63, likewise.
      overlong: what happens to samples longer than the longest bucket, as in `make_plan`.
      state: a state from `StreamBatches.state`: given the same stream from its beginning, the steps continue after it.
        All other options come from the state; those given here are ignored.
      budget: the fields of a `Budget` as keywords, to choose the buckets; with given buckets only
        `num_microbatches`. `max_length` is rounded up to `length_multiple`; without it the longest of the first
        samples counts, and a longer one may follow.

    Returns:
      `StreamBatches`, an iterator of `StreamStep`.

    Raises:
      ValueError: options that are not as described, or an invalid state; while reading, lengths that are not integers
        of at least 1, or under `"error"` are too long, listed as id, value, limit.

    Example:
      >>> for step in stream_batches([3, 1, 8, 4, 2], [(2, 4), (1, 8)]):
      ...     print(step.bucket.length, step.ids.tolist(), step.lengths.tolist())
      4 [[0, 1]] [[3, 1]]
      8 [[2]] [[8]]
      4 [[3, 4]] [[4, 2]]

    References:
      `tf.data.Dataset.bucket_by_sequence_length`; Lhotse's `DynamicBucketingSampler`, which estimates buckets as well.
    """
    stream = _plain_integers(lengths)
    if state is not None:
        return StreamBatches(stream, _read_state(state))
    check_at_least_one(num_estimate=num_estimate, **if_given(max_waiting=max_waiting, shuffle_buffer=shuffle_buffer))
    check_seed(seed, epoch)
    check_choices(overlong=(overlong, Overlong))
    chosen = resolve_buckets(buckets, budget)
    if isinstance(chosen, Budget):
        first = [_check_length(i, length) for i, length in enumerate(itertools.islice(stream, num_estimate))]
        stream = itertools.chain(first, stream)
        chosen = _estimate_buckets(first, chosen)
    if not isinstance(chosen.shapes[0], Bucket):
        raise UserError(f"buckets of a stream must be (rows, length) pairs, not {chosen.shapes}")
    check_distinct_lengths(chosen)
    rows_of_steps(chosen)  # checks that they can be laid out
    fresh = _StreamState(
        buckets=[list(bucket) for bucket in chosen.shapes],
        num_microbatches=chosen.num_microbatches,
        max_waiting=None if max_waiting is None else int(max_waiting),
        overlong=overlong,
        shuffle_buffer=None if shuffle_buffer is None else int(shuffle_buffer),
        seed=int(seed),
        epoch=int(epoch),
        waiting_ids=[[] for _ in chosen.shapes],
        waiting_lengths=[[] for _ in chosen.shapes],
    )
    return StreamBatches(stream, fresh)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StreamState:
    """Plain values from which a stream resumes; waiting samples are grouped by bucket, buffered ones are not."""

    version: int = _STATE_VERSION
    buckets: list[list[int]]
    num_microbatches: int
    max_waiting: int | None
    overlong: Overlong
    shuffle_buffer: int | None
    seed: int
    epoch: int
    waiting_ids: list[list[int]]
    waiting_lengths: list[list[int]]
    num_read: int = 0
    num_dropped: int = 0
    num_truncated: int = 0
    buffered_ids: list[int] = dataclasses.field(default_factory=list)
    buffered_lengths: list[int] = dataclasses.field(default_factory=list)


class StreamBatches:
    """The steps of a stream, an iterator of `StreamStep`; `stream_batches` makes it.

    Attributes:
      buckets: the static shapes, `buckets.shapes`, lengths ascending, and M.
      num_microbatches: M.
      overlong: what happens to samples longer than the longest bucket.
      num_dropped: samples dropped so far, because they are longer than the longest bucket.
      num_truncated: samples truncated to it so far.
    """

    def __init__(self, stream: Iterator[Any], start: _StreamState):
        self._state = copy.deepcopy(start)
        self.buckets: Buckets[Bucket] = Buckets(
            tuple(Bucket(rows, length) for rows, length in start.buckets), start.num_microbatches
        )
        self.num_microbatches, self.overlong = start.num_microbatches, start.overlong
        self.num_dropped, self.num_truncated = start.num_dropped, start.num_truncated
        # What is in a step is counted, what was read is not: it follows, whenever and wherever reading stops.
        self._num_emitted = start.num_read - start.num_dropped - len(start.buffered_ids) - self._num_waiting()
        self._steps = self._emit_all(stream)
        self._is_spent = False

    def __iter__(self) -> Iterator[StreamStep]:
        if self._is_spent:
            raise UserError("this stream is at its end: for another pass, call stream_batches again")
        return self

    def __next__(self) -> StreamStep:
        for step in self._steps:
            return step
        self._is_spent = True
        raise StopIteration

    @property
    def num_read(self) -> int:
        """Samples taken so far, without those that were only read ahead for the estimate."""
        return self._num_emitted + self.num_dropped + self._num_waiting() + len(self._state.buffered_ids)

    @property
    def ids_to_come(self) -> list[int]:
        """Samples that were read, and are in no step yet: they wait, or are in the shuffle buffer."""
        return [*itertools.chain.from_iterable(self._state.waiting_ids), *self._state.buffered_ids]

    def _num_waiting(self) -> int:
        return sum(map(len, self._state.waiting_ids))

    def state(self) -> dict[str, object]:
        """The state from which `stream_batches(state=)` resumes, after the last step that was returned.

        Returns:
          A dict of plain values that survive JSON unchanged: the options, the counts, and the waiting samples.
        """
        counts = {"num_read": self.num_read, "num_dropped": self.num_dropped, "num_truncated": self.num_truncated}
        return copy.deepcopy(vars(self._state) | counts)

    def _emit_all(self, stream: Iterator[Any]) -> Iterator[StreamStep]:
        """The loop over samples, written to do little for each, because there can be very many."""
        state, start, longest = self._state, self.num_read, self.buckets.shapes[-1].length
        bucket_lengths = [bucket.length for bucket in self.buckets.shapes]
        capacities = [self.num_microbatches * bucket.rows for bucket in self.buckets.shapes]
        _skip_read(stream, state, longest)
        last = len(bucket_lengths) - 1
        room = self._room()
        samples: Iterator[tuple[int, Any]] = enumerate(stream, start)
        for i, length in samples if state.shuffle_buffer is None else self._draw(samples, start):
            if type(length) is not int or not 0 < length <= longest:
                length = self._admit(i, length, longest)
                if not length:
                    continue
            k = bisect.bisect_left(bucket_lengths, length, 0, last)
            ids = state.waiting_ids[k]
            ids.append(i)
            state.waiting_lengths[k].append(length)
            room -= 1
            if len(ids) == capacities[k]:
                yield self._emit(k)
                room = self._room()
            elif room < 0:
                num_waiting = map(len, state.waiting_ids)
                fill = list(map(fractions.Fraction, num_waiting, capacities))
                yield self._emit(fill.index(max(fill)))  # the fullest; of equal ones the first
                room = self._room()
        for k, ids in enumerate(state.waiting_ids):
            if ids:
                yield self._emit(k)

    def _room(self) -> int:
        """How many more samples may wait."""
        return sys.maxsize if self._state.max_waiting is None else self._state.max_waiting - self._num_waiting()

    def _admit(self, i: int, length: Any, longest: int) -> int:
        """The length that a sample waits with, or 0 where it is dropped; raises ValueError that names it."""
        length = _check_length(i, length)
        if length <= longest:
            return length
        num_dropped, num_truncated = apply_overlong(
            self.overlong, np.array([i]), np.array([length]), longest, i + 1, problem=_TOO_LONG
        )
        self.num_dropped += num_dropped
        self.num_truncated += num_truncated
        if num_dropped:
            return 0
        return length if is_window(self.overlong) else longest  # its window depends on the whole length

    def _emit(self, k: int) -> StreamStep:
        """The step of all samples that wait for a bucket."""
        ids, lengths, bucket = self._state.waiting_ids[k], self._state.waiting_lengths[k], self.buckets.shapes[k]
        num_cut = np.maximum(np.array(lengths) - bucket.length, 0)  # in the longest bucket alone
        starts = None
        if num_cut.any():
            is_random, of_epoch = self.overlong == "truncate_random", (self._state.seed, self._state.epoch)
            starts = draw_starts(np.array(ids), num_cut, *of_epoch) if is_random else num_cut

        def lay_out(values: npt.ArrayLike, padding: int) -> Int64[np.ndarray, "M B"]:
            rows_BxM = np.full((bucket.rows, self.num_microbatches), padding, np.int64)
            rows_BxM.reshape(-1)[: len(ids)] = values
            return rows_BxM.T

        of_rows = lay_out(ids, -1), lay_out(lengths - num_cut, 0), None if starts is None else lay_out(starts, -1)
        self._num_emitted += len(ids)
        ids.clear()
        lengths.clear()
        return StreamStep(k, bucket, *of_rows)

    def _draw(self, samples: Iterator[tuple[int, Any]], num_read: int) -> Iterator[tuple[int, int]]:
        """All samples, (id, length), in the order in which the shuffle buffer gives them after `num_read` were read."""
        state, ids, lengths = self._state, self._state.buffered_ids, self._state.buffered_lengths
        slices = (
            random_keys(_KEYS_PER_SLICE, seed=state.seed, epoch=state.epoch, start=start, stream=BUFFER_STREAM).tolist()
            for start in itertools.count(num_read - len(ids), _KEYS_PER_SLICE)
        )
        keys = itertools.chain.from_iterable(slices)

        def draw() -> tuple[int, int]:
            """Draws one; the last takes its place."""
            place = (next(keys) * len(ids)) >> 32
            drawn = ids[place], lengths[place]
            ids[place], lengths[place] = ids[-1], lengths[-1]
            del ids[-1], lengths[-1]
            return drawn

        for i, length in samples:
            ids.append(i)
            lengths.append(_check_length(i, length))
            if len(ids) == state.shuffle_buffer:
                yield draw()
        while ids:
            yield draw()


def _plain_integers(lengths: Iterable[Any]) -> Iterator[Any]:
    """Yields lengths one by one; those of an array as Python integers, which is much faster than NumPy's."""
    if not isinstance(lengths, np.ndarray) or lengths.ndim != 1:
        return iter(lengths)
    parts = (lengths[i : i + _LENGTHS_PER_SLICE].tolist() for i in range(0, len(lengths), _LENGTHS_PER_SLICE))
    return itertools.chain.from_iterable(parts)


def _check_length(i: int, length: Any) -> int:
    if not is_integer(length) or not 1 <= length < 2**63:
        what = f"integers of at least 1 and below 2**63: id {i}: {length!r}; {COUNTS}"
        raise UserError(f"lengths of a stream must be {what}")
    return int(length)


def _estimate_buckets(first: list[int], budget: Budget) -> Buckets[Bucket]:
    """Lengths as the first samples want them; rows as the budget allows, for nobody knows how many samples follow."""
    longest = None if budget.max_length is None else budget.of_length().round_lengths(budget.max_length)
    if longest is not None and budget.row_caps(np.array([longest]))[0] < 1:
        raise UserError(f"{broken_by_one_row(budget, longest)} leaves no row for max_length, {longest} tokens")
    # The rule of the stream comes when it is read.
    lengths = [bucket.length for bucket in make_buckets(first, budget, max_length=longest, overlong="truncate").shapes]
    if longest is not None and lengths[-1] < longest:
        lengths = _extend(lengths, longest, first, budget)
    rows = budget.row_caps(np.array(lengths)).tolist()
    return Buckets(tuple(map(Bucket, rows, lengths)), budget.num_microbatches)


def _extend(lengths: list[int], longest: int, first: list[int], budget: Budget) -> list[int]:
    """Bucket lengths up to `longest`: it takes the place of the last, or follows fewer ones, whichever costs least."""
    if budget.given_lengths is not None:
        return [*lengths, longest]
    replaced = [*lengths[:-1], longest]
    if budget.max_shapes == 1 or budget.strategy == "pad_to_max":
        return replaced
    fewer = make_buckets(first, budget, max_shapes=budget.max_shapes - 1, max_length=longest, overlong="truncate")

    def cost_of_first(lengths: list[int]) -> float:
        bucket_lengths = np.array(lengths)
        num_held = np.bincount(np.searchsorted(bucket_lengths, first), minlength=len(lengths))
        return sum(bucket_costs(budget, num_held, budget.row_caps(bucket_lengths), bucket_lengths).tolist())

    with_longest = [*(bucket.length for bucket in fewer.shapes), longest]
    return min(replaced, with_longest, key=cost_of_first)  # if equal, the fewer


def _skip_read(stream: Iterator[Any], state: _StreamState, longest: int) -> None:
    """Passes over what a state has read; raises ValueError where the stream is another, as far as can be seen."""
    ids = itertools.chain(*state.waiting_ids, state.buffered_ids)
    lengths = itertools.chain(*state.waiting_lengths, state.buffered_lengths)
    expected = {i: min(length, longest) for i, length in zip(ids, lengths, strict=True)}
    differing, num_read = [], 0
    for i, length in enumerate(itertools.islice(stream, state.num_read)):
        num_read = i + 1
        if i in expected and min(_check_length(i, length), longest) != expected[i]:
            differing.append(f"id {i}: {length} (was {expected[i]})")
    if num_read < state.num_read:
        raise UserError(f"the stream ends before id {num_read}, and the state has read {state.num_read:,} samples")
    if differing:
        raise UserError(f"the stream is not the one that the state is of, lengths differ: {list_first(differing)}")


def _read_state(fields: Mapping[str, object]) -> _StreamState:
    """The state that `StreamBatches.state` gave; raises ValueError for anything else."""
    try:
        if missing := [field.name for field in dataclasses.fields(_StreamState) if field.name not in fields]:
            raise UserError(f"it has no {', '.join(missing)}")
        state = dacite.from_dict(_StreamState, fields, dacite.Config(strict=True))
        if state.version != _STATE_VERSION:
            raise UserError(f"version {state.version}, and not {_STATE_VERSION}")
    except (dacite.DaciteError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"this is not a state of a stream: {error}") from error
    return state
