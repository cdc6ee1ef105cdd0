"""Streams: steps in static shapes as they fill, for lengths that come one by one, with a state to resume from."""

import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, Self, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from torch_ref.checks import COUNTS, INT64_MAX, check_count, check_integer, list_offenders
from torch_ref.planning.buckets import (
    Bucket,
    Buckets,
    buckets_or_budget,
    check_distinct,
    check_steps,
    given_buckets,
)
from torch_ref.planning.budget import Budget, PlanBudgetFields, checked_costs, takes_budget
from torch_ref.planning.lengths import check_overlong, count_overlong
from torch_ref.planning.make_buckets import make_buckets
from torch_ref.planning.order import BUFFER_STREAM, random_keys
from torch_ref.planning.windows import WINDOWS, begin_windows

__all__ = ["StreamBatches", "StreamStep", "stream_batches"]

_STATE_KEYS = {
    *("buckets", "num_microbatches", "max_waiting", "overlong", "shuffle_buffer", "seed", "epoch"),
    *("waiting", "buffered", "num_read", "num_dropped", "num_truncated"),
}


class StreamStep(NamedTuple):
    """A step of a stream.

    Attributes:
        bucket_index: which of the buckets it is of.
        bucket: its shape, B rows of T tokens.
        ids: int64[M, B], places in the stream, -1 for a padding row. Row j of the step is in microbatch j mod M at slot
            j // M.
        lengths: int64[M, B], in tokens, cut to the longest bucket; 0 for a padding row.
        starts: int64[M, B], how many tokens of its sample come before each row, -1 for a padding row; None where rows
            have samples from their first token on.
    """

    bucket_index: int
    bucket: Bucket
    ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    starts: NDArray[np.int64] | None = None


class StreamBatches(Iterator[StreamStep]):
    """The steps of a stream, read as they are asked for; made by `stream_batches`.

    Attributes:
        buckets: the K shapes, `buckets.shapes`, by ascending length, and M.
        num_read: how many samples of the stream went into queues and steps so far, or were dropped.
        num_dropped: those left out because they were too long.
        num_truncated: those cut to the longest bucket.
    """

    def __init__(
        self,
        stream: Iterator[Any],
        buckets: Buckets,
        *,
        max_waiting: int | None,
        overlong: str,
        shuffle_buffer: int | None = None,
        seed: int = 0,
        epoch: int = 0,
        num_read: int = 0,
        num_dropped: int = 0,
        num_truncated: int = 0,
        waiting: Sequence[Sequence[tuple[int, int]]] = (),
        buffered: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Take checked arguments, and a stream that continues after the samples read."""
        self.buckets = buckets
        self.num_read, self.num_dropped, self.num_truncated = num_read, num_dropped, num_truncated
        self._stream = stream
        self._max_waiting, self._overlong = max_waiting, overlong
        # The samples that wait for each bucket, as (id, length), cut unless a window is to be chosen.
        self._queues = [deque(queue) for queue in waiting] or [deque[tuple[int, int]]() for _ in buckets.shapes]
        self._capacity = [bucket.rows * buckets.num_microbatches for bucket in buckets.shapes]
        # Samples that were read and not drawn, as (id, length); without shuffling, each is drawn as it is read.
        self._shuffle_buffer, self._seed, self._epoch = shuffle_buffer, seed, epoch
        self._buffered = list(buffered)
        self._is_spent = False

    def __iter__(self) -> Self:
        """Return itself; a second pass would find nothing, and is refused."""
        if self._is_spent:
            raise ValueError("this stream is at its end: call stream_batches again for another pass")
        return self

    def __next__(self) -> StreamStep:
        """Read on until a step is full, or the waiting samples are too many, or the stream ends."""
        while (sample := self._draw()) is not None:
            index = self._take(*sample)
            if index is None:
                continue
            if len(self._queues[index]) == self._capacity[index]:
                return self._emit(index)
            if self._max_waiting is not None and sum(map(len, self._queues)) > self._max_waiting:
                return self._emit(self._fullest())
        left = next((index for index, queue in enumerate(self._queues) if queue), None)
        if left is None:
            self._is_spent = True
            raise StopIteration
        return self._emit(left)

    def state(self) -> dict[str, Any]:
        """Return what `stream_batches` needs to continue after the last step, as plain JSON values."""
        return {
            "buckets": [list(bucket) for bucket in self.buckets.shapes],
            "num_microbatches": self.buckets.num_microbatches,
            "max_waiting": self._max_waiting,
            "overlong": self._overlong,
            "shuffle_buffer": self._shuffle_buffer,
            "seed": self._seed,
            "epoch": self._epoch,
            "buffered": [list(sample) for sample in self._buffered],
            "waiting": [[list(sample) for sample in queue] for queue in self._queues],
            "num_read": self.num_read,
            "num_dropped": self.num_dropped,
            "num_truncated": self.num_truncated,
        }

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

    def _take(self, number: int, length: int) -> int | None:
        """Put a sample into its queue and return which, or None where it is dropped."""
        longest = self.buckets.shapes[-1].length
        dropped, truncated = count_overlong(
            self._overlong,
            int(length > longest),
            number + 2,  # others may follow
            lambda: list_offenders(np.array([number]), [length], longest),
            advice="take longer buckets, with max_length= where they are estimated",
        )
        self.num_dropped += dropped
        self.num_truncated += truncated
        if dropped:
            return None
        cut = min(length, longest)
        index = next(k for k, bucket in enumerate(self.buckets.shapes) if cut <= bucket.length)
        self._queues[index].append((number, length if self._overlong in WINDOWS else cut))
        return index

    def _fullest(self) -> int:
        fullest = 0
        for index, queue in enumerate(self._queues):
            if len(queue) * self._capacity[fullest] > len(self._queues[fullest]) * self._capacity[index]:
                fullest = index
        return fullest

    def _emit(self, index: int) -> StreamStep:
        bucket = self.buckets.shapes[index]
        rows = np.tile(np.array([-1, 0, -1]), (self._capacity[index], 1))
        ids, lengths = np.array(self._queues[index]).T
        starts = begin_windows(self._overlong, ids, lengths, bucket[1:], self._seed, self._epoch)
        kept = np.minimum(lengths, bucket.length)
        rows[: len(ids)] = np.stack([ids, kept, np.zeros_like(ids) if starts is None else starts], axis=1)
        self._queues[index].clear()
        split = rows.reshape(bucket.rows, self.buckets.num_microbatches, 3).transpose(2, 1, 0)
        columns = [np.ascontiguousarray(part) for part in split]
        return StreamStep(index, bucket, *columns[: 2 if starts is None else 3])


@takes_budget
def stream_batches(
    lengths: Iterable[int],
    buckets: Buckets | Sequence[tuple[int, int]] | Budget | None = None,
    *,
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

    A sample waits in the queue of the smallest bucket that holds it; a full queue is a step.

    Args:
        lengths: integers >= 1, in tokens; sample i is the one at place i, from 0.
        buckets: `Buckets`, or (rows, length) pairs of strictly ascending lengths; or None or a `Budget` to choose them:
            lengths by `make_buckets` of the first samples, as many rows as fit.
        num_estimate: how many samples are read ahead to choose the buckets.
        max_waiting: at most this many samples wait in all; if one more would, the queue that is fullest in proportion
            becomes a step with padding rows.
        shuffle_buffer: read this many samples ahead, and take them out at random; None keeps the order of the stream.
        seed: 0 <= seed < 2**63, chooses the random keys.
        epoch: 0 <= epoch < 2**63, likewise.
        overlong: samples above the longest bucket, as in `make_plan`.
        state: what `StreamBatches.state` gave; the steps continue after the last one before it. `lengths` is the same
            stream from its beginning, and the other arguments come from the state.
        budget: fields of `Budget` as keywords, `max_tokens` among them, to choose the buckets; with given ones only
            `num_microbatches`, M. The longest bucket chosen is as long as `max_length`, rounded up to
            `length_multiple`, whatever the first samples are: it replaces their last bucket, or is one more where that
            costs less for them within `max_shapes` (after given lengths always, for "pad_to_max" never).

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
    check_overlong(overlong)
    given = buckets_or_budget(buckets, budget)
    if isinstance(given, Budget):
        first = list(islice(stream, check_integer("num_estimate", num_estimate)))
        known = [_check_length(number, value) for number, value in enumerate(first)]
        stream, given = chain(first, stream), _choose(known, given)
    return StreamBatches(
        stream,
        _check_single(given),
        max_waiting=check_count("max_waiting", max_waiting),
        overlong=overlong,
        shuffle_buffer=check_count("shuffle_buffer", shuffle_buffer),
        seed=check_integer("seed", seed, minimum=0),
        epoch=check_integer("epoch", epoch, minimum=0),
    )


def _choose(known: list[int], limits: Budget) -> Buckets:
    """Return the buckets for the first lengths, the longest as long as `max_length` says."""
    cap = limits.max_length
    if cap is not None:
        cap = limits.of_side(0, 1).round_lengths(cap)
        refused = limits.refusals(cap)
        if refused:
            raise ValueError(f"max_length makes a bucket of {cap}, of which no row fits {refused}")

    def lengths_of(max_shapes: int) -> list[int]:
        buckets = make_buckets(known, limits, max_shapes=max_shapes, max_length=cap, overlong="truncate")
        return [bucket.length for bucket in buckets.shapes]

    lengths = lengths_of(limits.max_shapes)
    if cap is not None and lengths[-1] < cap and limits.given_lengths is not None:
        lengths.append(cap)
    elif cap is not None and lengths[-1] < cap:
        # As one bucket more, at the price of one bucket fewer for the first samples, where that costs less.
        lengths[-1] = cap
        if limits.max_shapes > 1 and limits.strategy != "pad_to_max":
            longer = [*lengths_of(limits.max_shapes - 1), cap]
            lengths = min(lengths, longer, key=lambda each: _total_cost(known, each, limits))
    rows = limits.caps(torch.tensor(lengths)).tolist()
    return Buckets(tuple(zip(rows, lengths, strict=True)), limits.num_microbatches)


def _total_cost(known: list[int], lengths: list[int], limits: Budget) -> float:
    """Return what the first samples cost in buckets of these lengths, as `make_buckets` counts it."""
    each = torch.tensor(lengths)
    held = torch.bincount(torch.bucketize(torch.tensor(known), each), minlength=len(lengths))
    rows, steps = limits.rows_and_steps(held, limits.caps(each))
    microbatches = steps * limits.num_microbatches
    if limits.cost is None:
        return int((microbatches * rows * each).sum())
    costs = microbatches.to(torch.float64) * checked_costs("cost", limits.cost, rows, each)
    return sum((costs + (limits.compile_seconds or 0.0)).tolist())


def _check_single(buckets: Buckets) -> Buckets:
    """Return buckets of one length; a ValueError for others, and for steps that are too large."""
    check_steps(buckets)
    check_distinct(buckets)
    if not isinstance(buckets.shapes[0], Bucket):
        raise ValueError(f"buckets of a stream must be (rows, length), got {tuple(buckets.shapes[0])}")
    return buckets


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
        check_overlong(state["overlong"])
        resumed = StreamBatches(
            stream,
            _check_single(buckets),
            max_waiting=check_count("max_waiting", state["max_waiting"]),
            overlong=state["overlong"],
            shuffle_buffer=check_count("shuffle_buffer", state["shuffle_buffer"]),
            seed=seed,
            epoch=epoch,
            num_read=num_read,
            num_dropped=num_dropped,
            num_truncated=num_truncated,
            waiting=[[(int(number), int(length)) for number, length in queue] for queue in state["waiting"]],
            buffered=[(int(number), int(length)) for number, length in state["buffered"]],
        )
    # A state can be wrong in its types in many ways.
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise ValueError(f"not a state of stream_batches: {error}") from error
    num_skipped = sum(1 for _ in islice(stream, num_read))
    if num_skipped < num_read:
        raise ValueError(f"the stream ends after {num_skipped} samples, the state has read {num_read}")
    return resumed
