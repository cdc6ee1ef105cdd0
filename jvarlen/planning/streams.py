"""Streams: steps in a few static shapes, for lengths that are not known in advance.

Letters: K buckets, M microbatches per step, B rows, P samples of a row, T length.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Unpack, cast

import dacite
import numpy as np

from jvarlen._common.checks import UserError, check_at_least_one, check_choices, if_given, list_first
from jvarlen.planning import stream_steps
from jvarlen.planning.buckets import AnyBucket, Buckets, check_distinct_lengths, resolve_buckets, rows_of_steps
from jvarlen.planning.budget import Budget, PlanBudgetFields, takes_budget
from jvarlen.planning.lengths import Overlong, SampleSize, apply_overlong, is_cut_by
from jvarlen.planning.order import BUFFER_STREAM, Order, check_seed, random_keys
from jvarlen.planning.packing import row_sizes_of
from jvarlen.planning.rules import PlanRules, SamplesPerRow
from jvarlen.planning.stream_steps import StreamLength, StreamStep, bucket_finder, check_length, cut_length
from jvarlen.planning.windows import draw_starts

__all__ = ["StreamBatches", "StreamPacking", "StreamStep", "stream_batches"]

StreamPacking = Literal["padded", "best_fit"]

_LENGTHS_PER_SLICE = 2**14
_KEYS_PER_SLICE = 2**10
_STATE_VERSION = 3
_TOO_LONG = (
    'samples longer than the longest bucket (overlong="drop" or "truncate" allows them; where buckets are estimated, '
    "max_length= sets the longest)"
)
_PAIR_TOO_LONG = 'samples that no bucket holds (overlong="drop" allows them)'


@takes_budget
def stream_batches(
    lengths: Iterable[int] | Iterable[Sequence[int]],
    buckets: Buckets[AnyBucket] | Sequence[tuple[int, ...]] | Budget | None = None,
    *,
    packing: StreamPacking = "padded",
    samples_per_row: SamplesPerRow | None = None,
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

    M × rows samples that wait for the first bucket that holds them make a step. At the end of the stream the remaining
    ones come by bucket, ascending, filled up with padding rows.

    Packed, samples are held until those held have at least four times the tokens of a step of the largest bucket, for
    pairs on one side. A step is then made of some of them, and of the others at the end of the stream. Its bucket is
    one that holds the sample that came first: of these the one with the most min(h, 2c) / c, where c is the tokens of
    its step and h those of all held samples that it holds; in a tie the shortest. Its rows are filled one after the
    other. A row begins with the sample that came first, of those that are left and that the bucket holds. Then it takes
    the longest that fits, of equal ones the one that came first, until none fits or it holds P samples. Pairs are
    taken by the rule of `pack_samples`.

    Args:
      lengths: tokens of each sample, integers of at least 1; or several integers each, of which all but the first may
        be 0, such as integers[N, D]; D = 2 where rows are packed. Apart from the estimate and the shuffle buffer, no
        more of them are read than a step needs.
      buckets: `Buckets`; or, with M = 1, (rows, length) or (rows, first, second, …), strictly ascending; one of
        pairs that are packed. None, or a `Budget`: lengths are chosen for the first `num_estimate` samples, by
        `make_buckets` or, packed, as `make_plan` does; each bucket has as many rows as the budget allows.
      packing: `"padded"`, one sample a row; or `"best_fit"`, several.
      samples_per_row: P, the most samples of a packed row, as in `pack_samples`; it is part of the shapes. None, where
        the buckets are chosen: as many as a row of the first samples can hold.
      num_estimate: how many samples the buckets are estimated from.
      max_waiting: the most samples that wait at a time, at least 1. When one more arrives, the fullest bucket (ties:
        the shorter) gives a step with padding rows. None: as many as the buckets hold. Packed, a step is made whenever
        one more arrives, and only then, whatever the tokens.
      shuffle_buffer: how many samples are read ahead; the next one is drawn from them at random. None: samples come in
        the order of the stream.
      seed: 0 ≤ seed < 2**63, of the shuffle buffer and of `"truncate_random"`.
      epoch: 0 ≤ epoch < 2**63, likewise.
      overlong: what happens to samples longer than the longest bucket, as in `make_plan`.
      state: a state from `StreamBatches.state`: given the same stream from its beginning, the steps continue after it.
        All other options come from the state; those given here are ignored.
      budget: the fields of a `Budget` as keywords, to choose the buckets; with given buckets only
        `num_microbatches` and `size`. `max_length` is rounded up to `length_multiple`, packed rounded down; without it
        the longest of the first samples counts, and a longer one may follow. Samples of several lengths up to
        `max_length` may follow that no bucket holds.

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
    is_iterator = isinstance(lengths, Iterator)
    stream = _plain_integers(lengths)
    if state is not None:
        return StreamBatches(stream, _read_state(state), is_iterator=is_iterator)
    check_at_least_one(num_estimate=num_estimate, **if_given(max_waiting=max_waiting, shuffle_buffer=shuffle_buffer))
    check_seed(seed, epoch)
    check_choices(overlong=(overlong, Overlong), packing=(packing, StreamPacking))
    if samples_per_row is not None and packing == "padded":
        raise UserError(f"samples_per_row ({samples_per_row}) is for packed rows: a row holds one sample otherwise")
    chosen, most = resolve_buckets(buckets, budget), samples_per_row
    if isinstance(chosen, Budget):
        first = _read_first(stream, num_estimate)
        stream = itertools.chain(first, stream)
        if packing == "padded":
            chosen = stream_steps.estimate_buckets(first, chosen)
        else:
            chosen, most = stream_steps.estimate_packed_buckets(first, chosen, samples_per_row)
    check_distinct_lengths(chosen)
    fresh = _StreamState(
        buckets=[list(bucket) for bucket in chosen.shapes],
        num_microbatches=chosen.num_microbatches,
        size=chosen.size,
        packing=packing,
        samples_per_row=_check_packing(chosen, packing, most, overlong),
        max_waiting=None if max_waiting is None else int(max_waiting),
        overlong=overlong,
        shuffle_buffer=None if shuffle_buffer is None else int(shuffle_buffer),
        seed=int(seed),
        epoch=int(epoch),
        waiting_ids=[[] for _ in chosen.shapes] if packing == "padded" else [[]],
        waiting_lengths=[[] for _ in chosen.shapes] if packing == "padded" else [[]],
    )
    return StreamBatches(stream, fresh, is_iterator=is_iterator)


def _check_packing(
    buckets: Buckets[AnyBucket], packing: StreamPacking, most: SamplesPerRow | None, overlong: Overlong
) -> list[int] | None:
    """P of each bucket, None for one sample a row; raises ValueError for buckets that do not go with the packing."""
    is_single, rows = len(buckets.shapes[0].lengths) == 1, rows_of_steps(buckets).tolist()
    if packing == "padded":
        if is_cut_by(overlong) and not is_single:
            raise UserError(
                f'overlong="{overlong}" is for samples of one length, or packed pairs: choose "error" or "drop"'
            )
        return None
    if buckets.size != "sum":
        raise UserError(f"size ({buckets.size!r}) is for samples of two lengths each that are not packed")
    num_tokens = max(number * sum(bucket.lengths) for number, bucket in zip(rows, buckets.shapes, strict=True))
    if num_tokens > stream_steps.MOST_PACKED:
        raise UserError(f"a step of packed rows may have {stream_steps.MOST_PACKED:,} tokens, not {num_tokens:,}")
    if not is_single and len(buckets.shapes) > 1:
        raise UserError(f"packed rows of pairs all have one shape, not {list_first(buckets.shapes)}")
    if most is None:
        raise UserError("samples_per_row= is part of the shapes of packed rows: give it with the buckets")
    row_lengths = [length for bucket in buckets.shapes for length in bucket.lengths]
    rules = PlanRules(Order("dataset"), overlong=overlong, packing="best_fit", samples_per_row=most)
    sizes = row_sizes_of(row_lengths, rules, is_pairs=not is_single)
    return np.broadcast_to(sizes.most, len(buckets.shapes)).tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StreamState:
    """Plain values from which a stream resumes; waiting samples are by bucket, unless they are to be packed."""

    version: int = _STATE_VERSION
    buckets: list[list[int]]
    num_microbatches: int
    size: SampleSize
    packing: StreamPacking
    samples_per_row: list[int] | None
    max_waiting: int | None
    overlong: Overlong
    shuffle_buffer: int | None
    seed: int
    epoch: int
    waiting_ids: list[list[int]]
    waiting_lengths: list[list[int | list[int]]]
    num_read: int = 0
    num_dropped: int = 0
    num_truncated: int = 0
    buffered_ids: list[int] = dataclasses.field(default_factory=list)
    buffered_lengths: list[int | list[int]] = dataclasses.field(default_factory=list)


class StreamBatches:
    """The steps of a stream, an iterator of `StreamStep`; `stream_batches` makes it.

    Attributes:
      buckets: the static shapes, `buckets.shapes`, lengths ascending, and M.
      num_microbatches: M.
      samples_per_row: P of each bucket; 1 where rows are not packed.
      overlong: what happens to samples longer than the longest bucket.
      is_from_iterator: whether the lengths come from an iterator, which may read the samples themselves.
      num_dropped: samples dropped so far, because they are longer than the longest bucket.
      num_truncated: samples truncated to it so far.
    """

    def __init__(self, stream: Iterator[Any], start: _StreamState, *, is_iterator: bool):
        self._options, self.is_from_iterator = start, is_iterator
        self.buckets = Buckets(
            cast("tuple[AnyBucket, ...]", tuple(map(tuple, start.buckets))), start.num_microbatches, start.size
        )
        self.num_microbatches, self.overlong = start.num_microbatches, start.overlong
        self.num_dropped, self.num_truncated = start.num_dropped, start.num_truncated
        self.samples_per_row = tuple(start.samples_per_row or [1] * len(start.buckets))
        self._whole: dict[int, StreamLength] = {}  # lengths of waiting samples that are cut
        longest = self.buckets.shapes[-1].lengths
        waiting_lengths = [
            [self._cut(i, _as_length(length), longest) for i, length in zip(*queue, strict=True)]
            for queue in zip(start.waiting_ids, start.waiting_lengths, strict=True)
        ]
        self._waiting: stream_steps.WaitingSamples | stream_steps.PackedSamples
        if not self.is_packed:
            queues = start.waiting_ids, waiting_lengths
            self._waiting = stream_steps.WaitingSamples(self.buckets, start.max_waiting, *queues)
        else:
            held = start.waiting_ids[0], waiting_lengths[0]
            self._waiting = stream_steps.PackedSamples(self.buckets, self.samples_per_row, start.max_waiting, *held)
        self._buffered_ids = [*start.buffered_ids]
        self._buffered_lengths = list(map(_as_length, start.buffered_lengths))
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
            return self._choose_windows(step) if self._whole else step
        self._is_spent = True
        raise StopIteration

    @property
    def is_packed(self) -> bool:
        """Whether rows hold several samples."""
        return self._options.samples_per_row is not None

    @property
    def num_read(self) -> int:
        """Samples taken so far, without those that were only read ahead for the estimate."""
        return self._num_emitted + self.num_dropped + self._waiting.num_waiting + len(self._buffered_ids)

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
            "waiting_lengths": [
                [_as_plain(self._whole.get(i, length)) for i, length in zip(*queue, strict=True)]
                for queue in zip(self._waiting.ids, self._waiting.lengths, strict=True)
            ],
            "buffered_ids": self._buffered_ids,
            "buffered_lengths": list(map(_as_plain, self._buffered_lengths)),
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
        longest = self.buckets.shapes[-1].lengths
        lengths = itertools.chain(*self._waiting.lengths, self._buffered_lengths)
        expected = {i: cut_length(length, longest) for i, length in zip(self.ids_to_come, lengths, strict=True)}
        differing, num_skipped = [], 0
        for i, length in enumerate(itertools.islice(stream, num_read)):
            num_skipped = i + 1
            if i in expected and cut_length(check_length(i, length, len(longest)), longest) != expected[i]:
                differing.append(f"id {i}: {length} (was {_as_plain(expected[i])})")
        if num_skipped < num_read:
            raise UserError(f"the stream ends before id {num_skipped}, and the state has read {num_read:,} samples")
        if differing:
            raise UserError(f"the stream is not the one that the state is of, lengths differ: {list_first(differing)}")

    def _admitted(self, samples: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, StreamLength]]:
        """The samples that are not dropped, with checked lengths, cut at the longest bucket."""
        if len(longest := self.buckets.shapes[-1].lengths) == 1:
            for i, length in samples:
                if type(length) is int and 0 < length <= longest[0]:
                    yield i, length
                elif cut := self._admit(i, length):
                    yield i, cut
            return
        find, num_buckets, num_lengths = bucket_finder(self.buckets), len(self.buckets.shapes), len(longest)
        for i, each in samples:
            lengths = tuple(each) if type(each) is list else each
            is_plain = type(lengths) is tuple and len(lengths) == num_lengths and {*map(type, lengths)} == {int}
            if is_plain and lengths[0] > 0 <= min(lengths) and find(lengths) < num_buckets:
                yield i, lengths
            elif cut := self._admit(i, each):
                yield i, cut

    def _admit(self, i: int, length: Any) -> StreamLength | None:
        """The length that a sample counts with, or None where it is dropped; raises ValueError that names it."""
        longest = self.buckets.shapes[-1].lengths
        length = check_length(i, length, len(longest))
        is_single, limits = len(longest) == 1, [list(bucket.lengths) for bucket in self.buckets.shapes]
        if bucket_finder(self.buckets)(length) < len(limits):
            return length
        num_dropped, num_truncated = apply_overlong(
            self.overlong,
            np.array([i]),
            np.array([length]),
            longest[0] if is_single else list_first(limits),
            i + 1,
            problem=_TOO_LONG if is_single or self.is_packed else _PAIR_TOO_LONG,
        )
        self.num_dropped += num_dropped
        self.num_truncated += num_truncated
        return None if num_dropped else self._cut(i, length, longest)

    def _cut(self, i: int, length: StreamLength, longest: tuple[int, ...]) -> StreamLength:
        """The length that a sample waits with."""
        cut = cut_length(length, longest) if is_cut_by(self.overlong) else length
        if cut != length:
            self._whole[i] = length
        return cut

    def _choose_windows(self, step: StreamStep) -> StreamStep:
        """The step with the whole lengths of samples, and the token with which each begins, where one is cut."""
        is_sample = step.ids >= 0
        ids, lengths = step.ids[is_sample], step.lengths[is_sample]
        for place, i in enumerate(ids.tolist()):
            if i in self._whole:
                lengths[place] = self._whole.pop(i)
        starts = np.maximum(lengths - np.squeeze(step.bucket.lengths), 0)
        if not starts.any():
            return step
        whole = np.zeros_like(step.lengths)
        whole[is_sample] = lengths
        step = step._replace(whole_lengths=whole)
        if self.overlong == "truncate":
            return step
        if self.overlong == "truncate_random":
            starts = draw_starts(ids, starts, self._options.seed, self._options.epoch)
        of_rows = np.full_like(step.lengths, -1)
        of_rows[is_sample] = starts
        return step._replace(starts=of_rows)

    def _draw(
        self, samples: Iterator[tuple[int, Any]], num_read: int, shuffle_buffer: int
    ) -> Iterator[tuple[int, StreamLength]]:
        """All samples, (id, length), in the order in which the shuffle buffer gives them after `num_read` were read."""
        ids, lengths = self._buffered_ids, self._buffered_lengths
        num_lengths = len(self.buckets.shapes[0].lengths)
        slices = (
            random_keys(
                _KEYS_PER_SLICE, seed=self._options.seed, epoch=self._options.epoch, start=start, stream=BUFFER_STREAM
            ).tolist()
            for start in itertools.count(num_read - len(ids), _KEYS_PER_SLICE)
        )
        keys = itertools.chain.from_iterable(slices)

        def draw() -> tuple[int, StreamLength]:
            """Draws one; the last takes its place."""
            place = (next(keys) * len(ids)) >> 32
            drawn = ids[place], lengths[place]
            ids[place], lengths[place] = ids[-1], lengths[-1]
            del ids[-1], lengths[-1]
            return drawn

        for i, length in samples:
            checked = check_length(i, length, num_lengths)
            ids.append(i)
            lengths.append(checked)
            if len(ids) == shuffle_buffer:
                yield draw()
        while ids:
            yield draw()


def _plain_integers(lengths: Iterable[Any]) -> Iterator[Any]:
    """Yields lengths one by one; those of an array as Python integers, which is much faster than NumPy's."""
    if not isinstance(lengths, np.ndarray) or lengths.ndim not in (1, 2):
        return iter(lengths)
    parts = (lengths[i : i + _LENGTHS_PER_SLICE].tolist() for i in range(0, len(lengths), _LENGTHS_PER_SLICE))
    return itertools.chain.from_iterable(parts)


def _read_first(stream: Iterator[Any], num_estimate: int) -> list[StreamLength]:
    """The checked lengths of the first samples, which all have as many as the first one."""
    first = list(itertools.islice(stream, num_estimate))
    num_lengths = len(first[0]) if first and isinstance(first[0], Sequence | np.ndarray) else 1
    return [check_length(i, length, num_lengths) for i, length in enumerate(first)]


def _as_length(length: int | list[int]) -> StreamLength:
    return tuple(length) if isinstance(length, list) else length


def _as_plain(length: StreamLength) -> int | list[int]:
    return list(length) if isinstance(length, tuple) else length


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
