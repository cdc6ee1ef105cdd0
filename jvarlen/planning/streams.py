"""Streams: steps in a few static shapes, for lengths that are not known in advance.

Letters: K buckets, M microbatches per step, B rows, P samples of a row, T length.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Unpack

import dacite
import numpy as np

from jvarlen._common.checks import (
    UserError,
    check_at_least_one,
    check_choices,
    if_given,
    is_integer,
    list_first,
)
from jvarlen.planning import stream_steps
from jvarlen.planning.buckets import Bucket, Buckets, check_distinct_lengths, resolve_buckets, rows_of_steps
from jvarlen.planning.budget import Budget, PlanBudgetFields, takes_budget
from jvarlen.planning.lengths import COUNTS, apply_overlong
from jvarlen.planning.order import BUFFER_STREAM, check_seed, random_keys
from jvarlen.planning.stream_steps import StreamStep

__all__ = ["StreamBatches", "StreamPacking", "StreamStep", "stream_batches"]

StreamPacking = Literal["padded", "best_fit"]
StreamOverlong = Literal["error", "drop", "truncate"]

_LENGTHS_PER_SLICE = 2**14
_KEYS_PER_SLICE = 2**10
_STATE_VERSION = 4
_TOO_LONG = (
    'samples longer than the longest bucket (overlong="drop" or "truncate" allows them; where buckets are estimated, '
    "max_length= sets the longest)"
)


@takes_budget
def stream_batches(
    lengths: Iterable[int],
    buckets: Buckets[Bucket] | Sequence[tuple[int, ...]] | Budget | None = None,
    *,
    packing: StreamPacking = "padded",
    samples_per_row: int | None = None,
    num_estimate: int = 10_000,
    max_waiting: int | None = None,
    shuffle_buffer: int | None = None,
    seed: int = 0,
    epoch: int = 0,
    overlong: StreamOverlong = "error",
    state: Mapping[str, object] | None = None,
    **budget: Unpack[PlanBudgetFields],
) -> StreamBatches:
    """Batches a stream: every sample exactly once, in steps of the buckets' shapes.

    M × rows samples that wait for the first bucket that holds them make a step. At the end of the stream the remaining
    ones come by bucket, ascending, filled up with padding rows.

    Packed, samples are held until those held have at least four times the tokens of a step. A step is then made of some
    of them, and of the others at the end of the stream. Its rows are filled one after the other. A row begins with the
    sample that came first, of those that are left. Then it takes the longest that fits, of equal ones the one that came
    first, until none fits or it holds P samples.

    Args:
      lengths: tokens of each sample, integers of at least 1. Apart from the estimate and the shuffle buffer, no more of
        them are read than a step needs.
      buckets: `Buckets`; or, with M = 1, (rows, length) pairs, strictly ascending; packed, one. None, or a `Budget`:
        lengths are chosen for the first `num_estimate` samples, by `make_buckets` or, packed, as `make_plan` chooses
        one; each bucket has as many rows as the budget allows.
      packing: `"padded"`, one sample a row; or `"best_fit"`, several.
      samples_per_row: P, the most samples of a packed row, at most one a token; it is part of the shapes. None, where
        the bucket is chosen: as many as a row of the first samples can hold.
      num_estimate: how many samples the buckets are estimated from.
      max_waiting: the most samples that wait at a time, at least 1. When one more arrives, the fullest bucket (ties:
        the shorter) gives a step with padding rows. None: as many as the buckets hold. Packed, a step is made whenever
        one more arrives, and only then, whatever the tokens.
      shuffle_buffer: how many samples are read ahead; the next one is drawn from them at random. None: samples come in
        the order of the stream.
      seed: 0 ≤ seed < 2**63, of the shuffle buffer.
      epoch: 0 ≤ epoch < 2**63, likewise.
      overlong: what happens to samples longer than the longest bucket: `"error"`, `"drop"` or `"truncate"`.
      state: a state from `StreamBatches.state`: given the same stream from its beginning, the steps continue after it.
        All other options come from the state; those given here are ignored.
      budget: the fields of a `Budget` as keywords, to choose the buckets; with given buckets only
        `num_microbatches`. `max_length` is rounded up to `length_multiple`, packed rounded down; without it the longest
        of the first samples counts, and a longer one may follow.

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
      >>> for step in stream_batches([3, 1, 8, 4, 2], [(2, 8)], packing="best_fit", samples_per_row=3):
      ...     print(step.ids.tolist(), step.lengths.tolist())
      [[[0, 3, 1], [2, -1, -1]]] [[[3, 4, 1], [8, 0, 0]]]
      [[[4, -1, -1], [-1, -1, -1]]] [[[2, 0, 0], [0, 0, 0]]]

    References:
      `tf.data.Dataset.bucket_by_sequence_length`; Lhotse's `DynamicBucketingSampler`, which estimates buckets as well.
      Packing with a bounded look-ahead: Grain's `FirstFitPackIterDataset`.
    """
    stream = _plain_integers(lengths)
    if state is not None:
        return StreamBatches(stream, _read_state(state))
    check_at_least_one(num_estimate=num_estimate, **if_given(max_waiting=max_waiting, shuffle_buffer=shuffle_buffer))
    check_seed(seed, epoch)
    check_choices(overlong=(overlong, StreamOverlong), packing=(packing, StreamPacking))
    if samples_per_row is not None and packing == "padded":
        raise UserError(f"samples_per_row ({samples_per_row}) is for packed rows: a row holds one sample otherwise")
    check_at_least_one(**if_given(samples_per_row=samples_per_row))
    chosen, most = resolve_buckets(buckets, budget), samples_per_row
    if isinstance(chosen, Budget):
        first = [_check_length(i, length) for i, length in enumerate(itertools.islice(stream, num_estimate))]
        stream = itertools.chain(first, stream)
        if packing == "padded":
            chosen = stream_steps.estimate_buckets(first, chosen)
        else:
            chosen, most = stream_steps.estimate_packed_bucket(first, chosen, samples_per_row)
    _check_buckets(chosen, packing, most)
    num_queues = len(chosen.shapes)
    fresh = _StreamState(
        buckets=[list(bucket) for bucket in chosen.shapes],
        num_microbatches=chosen.num_microbatches,
        samples_per_row=None if most is None else min(int(most), chosen.shapes[0].lengths[0]),
        max_waiting=None if max_waiting is None else int(max_waiting),
        overlong=overlong,
        shuffle_buffer=None if shuffle_buffer is None else int(shuffle_buffer),
        seed=int(seed),
        epoch=int(epoch),
        waiting_ids=[[] for _ in range(num_queues)],
        waiting_lengths=[[] for _ in range(num_queues)],
    )
    return StreamBatches(stream, fresh)


def _check_buckets(buckets: Buckets[Any], packing: StreamPacking, most: int | None) -> None:
    """Raises ValueError for buckets that a stream, or its packing, does not take."""
    check_distinct_lengths(buckets)
    rows_of_steps(buckets)
    if not isinstance(buckets.shapes[0], Bucket):
        raise UserError(f"streams have samples of one length, and buckets (rows, length), not {buckets.shapes[0]}")
    if packing == "padded":
        return
    if len(buckets.shapes) > 1:
        raise UserError(f"packed rows of a stream all have one shape, not {list_first(buckets.shapes)}")
    if most is None:
        raise UserError("samples_per_row= is part of the shape of packed rows: give it with the buckets")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StreamState:
    """Plain values from which a stream resumes; waiting samples are by bucket."""

    version: int = _STATE_VERSION
    buckets: list[list[int]]
    num_microbatches: int
    samples_per_row: int | None  # None: rows are not packed
    max_waiting: int | None
    overlong: StreamOverlong
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
      is_packed: whether rows hold several samples.
      samples_per_row: P of each bucket; 1 where rows are not packed.
      overlong: what happens to samples longer than the longest bucket.
      num_dropped: samples dropped so far, because they are longer than the longest bucket.
      num_truncated: samples truncated to it so far.
    """

    def __init__(self, stream: Iterator[Any], start: _StreamState):
        self._options = start
        shapes = tuple(Bucket(*bucket) for bucket in start.buckets)
        self.buckets = Buckets(shapes, start.num_microbatches)
        self.num_microbatches, self.overlong = start.num_microbatches, start.overlong
        self.num_dropped, self.num_truncated = start.num_dropped, start.num_truncated
        self.is_packed = start.samples_per_row is not None
        self.samples_per_row = (start.samples_per_row or 1,) * len(shapes)
        self._longest = shapes[-1].length
        queues = start.waiting_ids, start.waiting_lengths
        self._waiting: stream_steps.WaitingSamples | stream_steps.PackedSamples
        if start.samples_per_row is None:
            self._waiting = stream_steps.WaitingSamples(self.buckets, start.max_waiting, *queues)
        else:
            self._waiting = stream_steps.PackedSamples(self.buckets, start.samples_per_row, start.max_waiting, *queues)
        self._buffered_ids, self._buffered_lengths = [*start.buffered_ids], [*start.buffered_lengths]
        # What is in a step is counted, what was read is not: it follows, whenever and wherever reading stops.
        self._num_emitted = start.num_read - start.num_dropped - len(self.ids_to_come)
        self._steps = self._emit_all(stream)
        self._is_spent = False

    def __iter__(self) -> Iterator[StreamStep]:
        if self._is_spent:
            raise UserError("this stream is at its end: for another pass, call stream_batches again")
        return self

    def __next__(self) -> StreamStep:
        for step in self._steps:
            self._num_emitted += int(np.count_nonzero(step.ids >= 0))
            return step
        self._is_spent = True
        raise StopIteration

    @property
    def num_read(self) -> int:
        """Samples taken so far, without those that were only read ahead for the estimate."""
        return self._num_emitted + self.num_dropped + len(self.ids_to_come)

    @property
    def ids_to_come(self) -> list[int]:
        """Samples that were read, and are in no step yet: they wait, or are in the shuffle buffer."""
        return [*itertools.chain.from_iterable(self._waiting.ids), *self._buffered_ids]

    def state(self) -> dict[str, object]:
        """The state from which `stream_batches(state=)` resumes, after the last step that was returned.

        Returns:
          A dict of plain values that survive JSON unchanged: the options, the counts, and the waiting samples.
        """
        counts = {"num_read": self.num_read, "num_dropped": self.num_dropped, "num_truncated": self.num_truncated}
        samples = {
            "waiting_ids": self._waiting.ids,
            "waiting_lengths": self._waiting.lengths,
            "buffered_ids": self._buffered_ids,
            "buffered_lengths": self._buffered_lengths,
        }
        return copy.deepcopy(vars(self._options) | counts | samples)

    def _emit_all(self, stream: Iterator[Any]) -> Iterator[StreamStep]:
        start = self.num_read
        self._skip(stream, start)
        samples: Iterator[tuple[int, Any]] = enumerate(stream, start)
        if self._options.shuffle_buffer is not None:
            samples = self._draw(samples, start, self._options.shuffle_buffer)
        yield from self._waiting.steps(self._admitted(samples))

    def _skip(self, stream: Iterator[Any], num_read: int) -> None:
        """Passes over what a state has read; raises ValueError where the stream is another, as far as can be seen."""
        lengths = itertools.chain(*self._waiting.lengths, self._buffered_lengths)
        expected = dict(zip(self.ids_to_come, lengths, strict=True))
        differing, num_skipped = [], 0
        for i, length in enumerate(itertools.islice(stream, num_read)):
            num_skipped = i + 1
            if i in expected and min(_check_length(i, length), self._longest) != min(expected[i], self._longest):
                differing.append(f"id {i}: {length} (was {expected[i]})")
        if num_skipped < num_read:
            raise UserError(f"the stream ends before id {num_skipped}, and the state has read {num_read:,} samples")
        if differing:
            raise UserError(f"the stream is not the one that the state is of, lengths differ: {list_first(differing)}")

    def _admitted(self, samples: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, int]]:
        """The samples that are not dropped, with checked lengths, cut at the longest bucket."""
        longest = self._longest
        for i, length in samples:
            if type(length) is int and 0 < length <= longest:
                yield i, length
            elif cut := self._admit(i, _check_length(i, length)):
                yield i, cut

    def _admit(self, i: int, length: int) -> int | None:
        """The length that a sample counts with, or None where it is dropped; raises ValueError that names it."""
        if length <= self._longest:
            return length
        of_one = np.array([i]), np.array([length])
        num_dropped, num_truncated = apply_overlong(self.overlong, *of_one, self._longest, i + 1, problem=_TOO_LONG)
        self.num_dropped += num_dropped
        self.num_truncated += num_truncated
        return None if num_dropped else self._longest

    def _draw(
        self, samples: Iterator[tuple[int, Any]], num_read: int, shuffle_buffer: int
    ) -> Iterator[tuple[int, int]]:
        """All samples, (id, length), in the order in which the shuffle buffer gives them after `num_read` were read."""
        ids, lengths = self._buffered_ids, self._buffered_lengths
        slices = (
            random_keys(
                _KEYS_PER_SLICE, seed=self._options.seed, epoch=self._options.epoch, start=start, stream=BUFFER_STREAM
            ).tolist()
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
            lengths.append(_check_length(i, length))
            ids.append(i)
            if len(ids) == shuffle_buffer:
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
    """The length of a sample as an integer."""
    if is_integer(length) and 1 <= length < 2**63:
        return int(length)
    raise UserError(f"lengths of a stream must be integers of at least 1 and below 2**63: id {i}: {length!r}; {COUNTS}")


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
