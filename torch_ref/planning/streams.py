"""Streams: steps in static shapes as they fill, for lengths that come one by one, with a state to resume from."""

import operator
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, Self, Unpack

import numpy as np
from numpy.typing import NDArray

from torch_ref.checks import COUNTS, INT64_MAX, check_count, check_integer
from torch_ref.planning.buckets import Buckets, buckets_or_budget, check_distinct, check_steps, given_buckets
from torch_ref.planning.budget import Budget, PlanBudgetFields, takes_budget
from torch_ref.planning.lengths import check_overlong, count_overlong
from torch_ref.planning.order import BUFFER_STREAM, random_keys
from torch_ref.planning.stream_packing import HeldSamples
from torch_ref.planning.stream_shapes import choose_packed_shape, choose_shapes

__all__ = ["StreamBatches", "StreamStep", "stream_batches"]

_PACKINGS = ("padded", "best_fit")
_OVERLONG = ("error", "drop", "truncate")
_STATE_KEYS = {
    *("buckets", "num_microbatches", "samples_per_row", "max_waiting", "overlong", "shuffle_buffer", "seed"),
    *("epoch", "waiting", "buffered", "num_read", "num_dropped", "num_truncated"),
}


class StreamStep(NamedTuple):
    """A step of a stream.

    Attributes:
        bucket_index: which of the buckets it is of.
        bucket: its shape, B rows of T tokens.
        ids: int64[M, B], places in the stream, -1 for a padding row. Row j of the step is in microbatch j mod M at slot
            j // M. Packed, int64[M, B, P]: the samples of a row in turn, and -1 after them.
        lengths: int64, like `ids`, in tokens, cut to the longest bucket; 0 where there is no sample.
    """

    bucket_index: int
    bucket: Any
    ids: NDArray[np.int64]
    lengths: NDArray[np.int64]


class _Queues:
    """Samples that wait, each for the first bucket that holds it."""

    def __init__(self, buckets: Buckets, max_waiting: int | None, queues: Sequence[Sequence[tuple[int, int]]]) -> None:
        self.queues = [list(queue) for queue in queues]
        self._buckets, self._max_waiting = buckets, max_waiting
        self._capacity = [bucket.rows * buckets.num_microbatches for bucket in buckets.shapes]
        self._full: int | None = None

    def put(self, number: int, length: int) -> None:
        index = bisect_left([end for _, end in self._buckets.shapes], length)
        self.queues[index].append((number, length))
        if len(self.queues[index]) == self._capacity[index]:
            self._full = index
        elif self._max_waiting is not None and sum(map(len, self.queues)) > self._max_waiting:
            self._full = self._fullest()

    def is_enough(self) -> bool:
        return self._full is not None

    def take_step(self) -> tuple[int, list[list[tuple[int, int]]]]:
        left = next(index for index, queue in enumerate(self.queues) if queue)
        index = left if self._full is None else self._full
        rows, self.queues[index], self._full = [[sample] for sample in self.queues[index]], [], None
        return index, rows

    def _fullest(self) -> int:
        fullest = 0
        for index, queue in enumerate(self.queues):
            if len(queue) * self._capacity[fullest] > len(self.queues[fullest]) * self._capacity[index]:
                fullest = index
        return fullest


class StreamBatches(Iterator[StreamStep]):
    """The steps of a stream, read as they are asked for; made by `stream_batches`.

    Attributes:
        buckets: the K shapes, `buckets.shapes`, by ascending length, and M.
        samples_per_row: P of each; 1 where a row holds one sample.
        is_packed: whether rows hold several samples.
        num_read: how many samples of the stream wait, or are in steps, or were dropped.
        num_dropped: those left out because they were too long.
        num_truncated: those cut to the longest bucket.
    """

    def __init__(
        self,
        stream: Iterator[Any],
        buckets: Buckets,
        *,
        samples_per_row: int | None,
        max_waiting: int | None,
        overlong: str,
        shuffle_buffer: int | None = None,
        seed: int = 0,
        epoch: int = 0,
        num_read: int = 0,
        num_dropped: int = 0,
        num_truncated: int = 0,
        waiting: Sequence[Sequence[tuple[int, int]]] | None = None,
        buffered: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Take checked arguments, and a stream that continues after the samples read."""
        self.buckets, self.is_packed = buckets, samples_per_row is not None
        self.samples_per_row = (samples_per_row or 1,) * len(buckets.shapes)
        self.num_read, self.num_dropped, self.num_truncated = num_read, num_dropped, num_truncated
        self._stream, self._overlong = stream, overlong
        self._max_waiting = max_waiting
        self._waiting: _Queues | HeldSamples
        queues = [[] for _ in buckets.shapes] if waiting is None else waiting
        if samples_per_row is not None:
            self._waiting = HeldSamples(buckets, samples_per_row, max_waiting, queues[0])
        else:
            self._waiting = _Queues(buckets, max_waiting, queues)
        # Samples that were read and not drawn, as (id, lengths); without shuffling, each is drawn as it is read.
        self._shuffle_buffer, self._seed, self._epoch = shuffle_buffer, seed, epoch
        self._buffered = list(buffered)
        self._is_spent = False

    def __iter__(self) -> Self:
        """Return itself; a second pass would find nothing, and is refused."""
        if self._is_spent:
            raise ValueError("this stream is at its end: call stream_batches again for another pass")
        return self

    def __next__(self) -> StreamStep:
        """Read on until there is enough for a step, or the stream ends."""
        while not self._waiting.is_enough() and (sample := self._draw()) is not None:
            self._take(*sample)
        if not any(self._queues()):
            self._is_spent = True
            raise StopIteration
        return self._lay_out(*self._waiting.take_step())

    def state(self) -> dict[str, Any]:
        """Return what `stream_batches` needs to continue after the last step, as plain JSON values."""
        return {
            "buckets": [list(bucket) for bucket in self.buckets.shapes],
            "num_microbatches": self.buckets.num_microbatches,
            "samples_per_row": self.samples_per_row[0] if self.is_packed else None,
            "max_waiting": self._max_waiting,
            "overlong": self._overlong,
            "shuffle_buffer": self._shuffle_buffer,
            "seed": self._seed,
            "epoch": self._epoch,
            "buffered": list(map(list, self._buffered)),
            "waiting": [list(map(list, queue)) for queue in self._queues()],
            "num_read": self.num_read,
            "num_dropped": self.num_dropped,
            "num_truncated": self.num_truncated,
        }

    def _queues(self) -> list[list[tuple[int, int]]]:
        return [self._waiting.samples] if isinstance(self._waiting, HeldSamples) else self._waiting.queues

    def _draw(self) -> tuple[int, int] | None:
        """Read until the buffer is full or the stream ends, and take a sample out of it; None where none is left."""
        drawn_before = self.num_read - len(self._buffered)
        while len(self._buffered) < (self._shuffle_buffer or 1):
            try:
                value = next(self._stream)
            except StopIteration:
                break
            self._buffered.append((self.num_read, _check_length(self.num_read, value)))
            self.num_read += 1
        if not self._buffered:
            return None
        place = 0
        if self._shuffle_buffer is not None:
            key = int(random_keys(self._seed, self._epoch, drawn_before, 1, BUFFER_STREAM)[0])
            place = key * len(self._buffered) // 2**32
        sample = self._buffered[place]
        self._buffered[place] = self._buffered[-1]
        self._buffered.pop()
        return sample

    def _take(self, number: int, length: int) -> None:
        """Let a sample wait, unless it is dropped."""
        longest = self.buckets.shapes[-1].length
        dropped, truncated = count_overlong(
            self._overlong,
            int(length > longest),
            number + 2,  # others may follow
            lambda: f"id {number}: {length} (limit {longest})",
            advice="take longer buckets, with max_length= where they are estimated",
        )
        self.num_dropped += dropped
        self.num_truncated += truncated
        if not dropped:
            self._waiting.put(number, min(length, longest))

    def _lay_out(self, index: int, rows: list[list[tuple[int, int]]]) -> StreamStep:
        bucket, num_microbatches = self.buckets.shapes[index], self.buckets.num_microbatches
        shape = (num_microbatches, bucket[0], self.samples_per_row[index])
        ids, lengths = np.full(shape, -1), np.zeros(shape, dtype=np.int64)
        for j, row in enumerate(rows):
            slot, microbatch = divmod(j, num_microbatches)
            ids[microbatch, slot, : len(row)] = [number for number, _ in row]
            lengths[microbatch, slot, : len(row)] = [each for _, each in row]
        if not self.is_packed:
            ids, lengths = ids[:, :, 0], lengths[:, :, 0]
        return StreamStep(index, bucket, ids, lengths)


@takes_budget
def stream_batches(
    lengths: Iterable[int],
    buckets: Buckets | Sequence[tuple[int, ...]] | Budget | None = None,
    *,
    packing: str = "padded",
    samples_per_row: int | None = None,
    num_estimate: int = 10_000,
    max_waiting: int | None = None,
    shuffle_buffer: int | None = None,
    seed: int = 0,
    epoch: int = 0,
    overlong: str = "error",
    state: Mapping[str, Any] | None = None,
    **budget: Unpack[PlanBudgetFields],
) -> StreamBatches:
    """Cut a stream of samples, whose end need not be known, into steps of static shapes.

    A sample waits in the queue of the first bucket that holds it; a full queue is a step.

    Packed, all samples wait together, until they have four times the tokens of a step. Then, and at the end of the
    stream, a step is taken out of them. Row by row, the first sample that is left comes first; then, up to P samples,
    always the longest that still fits, the first among equals.

    Args:
        lengths: integers >= 1, in tokens; sample i is the one at place i, from 0.
        buckets: `Buckets`, or pairs of rows and length, ascending; or None or a `Budget` to choose them for the first
            samples: lengths by `make_buckets` or, packed, one as in `make_plan`; as many rows as fit. Packed rows
            have one.
        packing: "padded", with one sample in a row; or "best_fit".
        samples_per_row: P, the most samples of a packed row. None, only where the bucket is chosen: as many of the
            first samples as a row can hold.
        num_estimate: how many samples are read ahead to choose the buckets.
        max_waiting: at most this many samples wait in all; if one more would, the queue that is fullest in proportion
            becomes a step with padding rows. Packed, a step is taken then and not before.
        shuffle_buffer: read this many samples ahead, and take them out at random; None keeps the order of the stream.
        seed: 0 <= seed < 2**63, chooses the random keys.
        epoch: 0 <= epoch < 2**63, likewise.
        overlong: samples above the longest bucket: "error", "drop" or "truncate".
        state: what `StreamBatches.state` gave; the steps continue after the last one before it. `lengths` is the same
            stream from its beginning, and the other arguments come from the state.
        budget: fields of `Budget` as keywords, `max_tokens` among them, to choose the buckets; with given ones only
            `num_microbatches`, M. Padded, the longest bucket chosen is as long as
            `max_length`, rounded up to `length_multiple`, whatever the first samples are: it replaces their last
            bucket, or is one more where that costs less for them within `max_shapes` (after given lengths always, for
            "pad_to_max" never).

    Returns:
        An iterator of `StreamStep`s.

    Raises:
        ValueError: if an argument is out of its range or the state is not one; here or while iterating if a length is
            no integer >= 1 or too long, by id.

    Example:
        >>> steps = stream_batches([3, 9, 2, 1], [(2, 4), (1, 9)])
        >>> [(step.bucket.length, step.ids.tolist()) for step in steps]
        [(9, [[1]]), (4, [[0, 2]]), (4, [[3, -1]])]
    """
    stream = iter(lengths)
    if state is not None:
        return _resume(stream, state)
    _check_overlong(overlong)
    if packing not in _PACKINGS:
        raise ValueError(f"packing must be one of {', '.join(_PACKINGS)}, got {packing!r}")
    if packing == "padded" and samples_per_row is not None:
        raise ValueError(f"samples_per_row={samples_per_row} is for packed rows, and a row holds one sample")
    given = buckets_or_budget(buckets, budget)
    if isinstance(given, Budget):
        first = list(islice(stream, check_integer("num_estimate", num_estimate)))
        known = [_check_length(number, value) for number, value in enumerate(first)]
        stream = chain(first, stream)
        if packing == "padded":
            given = choose_shapes(known, given)
        else:
            given, samples_per_row = choose_packed_shape(known, given, samples_per_row)
    return StreamBatches(
        stream,
        given,
        samples_per_row=_check_shapes(given, packing, samples_per_row),
        max_waiting=check_count("max_waiting", max_waiting),
        overlong=overlong,
        shuffle_buffer=check_count("shuffle_buffer", shuffle_buffer),
        seed=check_integer("seed", seed, minimum=0),
        epoch=check_integer("epoch", epoch, minimum=0),
    )


def _check_shapes(buckets: Buckets, packing: str, samples_per_row: int | None) -> int | None:
    """Check buckets, and return P, or None for rows of one sample; a ValueError for others."""
    check_steps(buckets)
    check_distinct(buckets)
    if len(buckets.shapes[0]) > 2:
        raise ValueError(f"streams have samples of one length, got buckets such as {tuple(buckets.shapes[0])}")
    if packing == "padded":
        return None
    if len(buckets.shapes) > 1:
        raise ValueError(f"packed rows have one shape, got {[tuple(bucket) for bucket in buckets.shapes]}")
    if samples_per_row is None:
        raise ValueError("packed rows of given buckets need samples_per_row=, which is part of their shape")
    return min(check_integer("samples_per_row", samples_per_row), buckets.shapes[0].length)


def _check_overlong(overlong: str) -> None:
    check_overlong(overlong)
    if overlong not in _OVERLONG:
        raise ValueError(f"overlong of a stream must be one of {', '.join(_OVERLONG)}, got {overlong!r}")


def _check_length(number: int, value: Any) -> int:
    try:
        length = operator.index(value)
    except TypeError:
        length = 0
    if isinstance(value, bool | np.bool_) or not 1 <= length <= INT64_MAX:
        raise ValueError(f"lengths must be integers from 1 to {INT64_MAX}: id {number}: {value!r} (limit 1); {COUNTS}")
    return length


def _resume(stream: Iterator[Any], state: Any) -> StreamBatches:
    """Return the steps after a state, of a stream that is at its beginning."""
    if not isinstance(state, Mapping):
        raise ValueError(f"not a state of stream_batches: {state!r}")
    if missing := sorted(_STATE_KEYS - state.keys()):
        raise ValueError(f"not a state of stream_batches: {', '.join(missing)} missing")
    try:
        buckets = given_buckets(state["buckets"], {"num_microbatches": state["num_microbatches"]})
        num_read, num_dropped, num_truncated, seed, epoch = (
            check_integer(name, state[name], minimum=0)
            for name in ("num_read", "num_dropped", "num_truncated", "seed", "epoch")
        )
        _check_overlong(state["overlong"])
        packing = "padded" if state["samples_per_row"] is None else "best_fit"
        resumed = StreamBatches(
            stream,
            buckets,
            samples_per_row=_check_shapes(buckets, packing, state["samples_per_row"]),
            max_waiting=check_count("max_waiting", state["max_waiting"]),
            overlong=state["overlong"],
            shuffle_buffer=check_count("shuffle_buffer", state["shuffle_buffer"]),
            seed=seed,
            epoch=epoch,
            num_read=num_read,
            num_dropped=num_dropped,
            num_truncated=num_truncated,
            waiting=[_samples(queue) for queue in state["waiting"]],
            buffered=_samples(state["buffered"]),
        )
    # A state can be wrong in its types in many ways.
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise ValueError(f"not a state of stream_batches: {error}") from error
    num_skipped = sum(1 for _ in islice(stream, num_read))
    if num_skipped < num_read:
        raise ValueError(f"the stream ends after {num_skipped} samples, the state has read {num_read}")
    return resumed


def _samples(listed: Any) -> list[tuple[int, int]]:
    """Return samples that a state lists as id and length."""
    return [(int(number), int(length)) for number, length in listed]
