"""Streams: steps in static shapes as they fill, for lengths that come one by one, with a state to resume from."""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, Self, Unpack

import numpy as np
from numpy.typing import NDArray

from torch_ref.checks import COUNTS, INT64_MAX, check_count, check_integer
from torch_ref.planning.buckets import Buckets, buckets_or_budget, check_distinct, check_steps, given_buckets
from torch_ref.planning.budget import Budget, PlanBudgetFields, takes_budget
from torch_ref.planning.joint import check_sizes
from torch_ref.planning.lengths import check_overlong, count_overlong
from torch_ref.planning.order import BUFFER_STREAM, random_keys
from torch_ref.planning.packer import check_samples_per_row
from torch_ref.planning.stream_packing import MAX_TOKENS, HeldSamples, Lengths
from torch_ref.planning.stream_shapes import choose_packed_shapes, choose_shapes
from torch_ref.planning.windows import WINDOWS, begin_windows

__all__ = ["StreamBatches", "StreamStep", "stream_batches"]

_PACKINGS = ("padded", "best_fit")
_STATE_KEYS = {
    *("buckets", "num_microbatches", "size", "samples_per_row", "max_waiting", "overlong", "shuffle_buffer", "seed"),
    *("epoch", "waiting", "buffered", "num_read", "num_dropped", "num_truncated"),
}


class StreamStep(NamedTuple):
    """A step of a stream.

    Attributes:
        bucket_index: which of the buckets it is of.
        bucket: its shape, B rows of T tokens, or of two lengths.
        ids: int64[M, B], places in the stream, -1 for a padding row. Row j of the step is in microbatch j mod M at slot
            j // M. Packed, int64[M, B, P]: the samples of a row in turn, and -1 after them.
        lengths: int64, like `ids`, in tokens, cut to the longest bucket; 0 where there is no sample. For pairs int64[M,
            B, 2] or int64[M, B, P, 2].
        starts: int64, like `lengths`, how many tokens of each sample come before its row, -1 where there is none; None
            where rows have samples from their first token on.
    """

    bucket_index: int
    bucket: Any
    ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    starts: NDArray[np.int64] | None = None


class _Queues:
    """Samples that wait, each for the first bucket that holds it."""

    def __init__(
        self, buckets: Buckets, max_waiting: int | None, queues: Sequence[Sequence[tuple[int, Lengths]]]
    ) -> None:
        self.queues = [list(queue) for queue in queues]
        self._buckets, self._max_waiting = buckets, max_waiting
        self._capacity = [bucket.rows * buckets.num_microbatches for bucket in buckets.shapes]
        self._full: int | None = None

    def put(self, number: int, lengths: Lengths) -> None:
        shapes = enumerate(self._buckets.shapes)
        index = next(k for k, bucket in shapes if all(map(operator.le, lengths, bucket[1:])))
        self.queues[index].append((number, lengths))
        if len(self.queues[index]) == self._capacity[index]:
            self._full = index
        elif self._max_waiting is not None and sum(map(len, self.queues)) > self._max_waiting:
            self._full = self._fullest()

    def is_enough(self) -> bool:
        return self._full is not None

    def take_step(self) -> tuple[int, list[list[tuple[int, Lengths]]]]:
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
        samples_per_row: tuple[int, ...] | None,
        max_waiting: int | None,
        overlong: str,
        shuffle_buffer: int | None = None,
        seed: int = 0,
        epoch: int = 0,
        num_read: int = 0,
        num_dropped: int = 0,
        num_truncated: int = 0,
        waiting: Sequence[Sequence[tuple[int, Lengths]]] | None = None,
        buffered: Sequence[tuple[int, Lengths]] = (),
    ) -> None:
        """Take checked arguments, and a stream that continues after the samples read."""
        self.buckets, self.is_packed = buckets, samples_per_row is not None
        self.samples_per_row = samples_per_row or (1,) * len(buckets.shapes)
        self.num_read, self.num_dropped, self.num_truncated = num_read, num_dropped, num_truncated
        self._stream, self._overlong = stream, overlong
        # Lengths of the samples that wait, where more than a bucket holds and a window is to be chosen.
        self._uncut: dict[int, Lengths] = {}
        if waiting is not None and overlong in WINDOWS:
            waiting = [[(number, self._cut(number, lengths)) for number, lengths in queue] for queue in waiting]
        self._max_waiting = max_waiting
        self._waiting: _Queues | HeldSamples
        if self.is_packed:
            (held,) = [[]] if waiting is None else waiting
            self._waiting = HeldSamples(buckets, self.samples_per_row, max_waiting, held)
        else:
            self._waiting = _Queues(buckets, max_waiting, [[] for _ in buckets.shapes] if waiting is None else waiting)
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
            "size": self.buckets.size,
            "samples_per_row": list(self.samples_per_row) if self.is_packed else None,
            "max_waiting": self._max_waiting,
            "overlong": self._overlong,
            "shuffle_buffer": self._shuffle_buffer,
            "seed": self._seed,
            "epoch": self._epoch,
            "buffered": [[number, *lengths] for number, lengths in self._buffered],
            "waiting": [
                [[number, *self._uncut.get(number, lengths)] for number, lengths in queue] for queue in self._queues()
            ],
            "num_read": self.num_read,
            "num_dropped": self.num_dropped,
            "num_truncated": self.num_truncated,
        }

    def _queues(self) -> list[list[tuple[int, Lengths]]]:
        return [self._waiting.samples] if isinstance(self._waiting, HeldSamples) else self._waiting.queues

    def _draw(self) -> tuple[int, Lengths] | None:
        """Read until the buffer is full or the stream ends, and take a sample out of it; None where none is left."""
        drawn_before = self.num_read - len(self._buffered)
        while len(self._buffered) < (self._shuffle_buffer or 1):
            try:
                value = next(self._stream)
            except StopIteration:
                break
            self._buffered.append((self.num_read, _check_lengths(self.num_read, value, self._num_sides)))
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

    @property
    def _num_sides(self) -> int:
        return len(self.buckets.shapes[0]) - 1

    def _take(self, number: int, lengths: Lengths) -> None:
        """Let a sample wait, unless it is dropped."""
        limits = [tuple(bucket[1:]) for bucket in self.buckets.shapes]
        is_held = any(all(map(operator.le, lengths, limit)) for limit in limits)
        shown, limit = (lengths[0], limits[-1][0]) if len(lengths) == 1 else (lengths, limits[-1])
        dropped, truncated = count_overlong(
            self._overlong,
            int(not is_held),
            number + 2,  # others may follow
            lambda: f"id {number}: {shown} (limit {limit})",
            advice="take longer buckets, with max_length= where they are estimated",
        )
        self.num_dropped += dropped
        self.num_truncated += truncated
        if not dropped:
            self._waiting.put(number, self._cut(number, lengths))

    def _cut(self, number: int, lengths: Lengths) -> Lengths:
        if self._overlong in ("error", "drop"):
            return lengths
        cut = tuple(map(min, lengths, self.buckets.shapes[-1][1:]))
        if cut != lengths and self._overlong in WINDOWS:
            self._uncut[number] = lengths
        return cut

    def _lay_out(self, index: int, rows: list[list[tuple[int, Lengths]]]) -> StreamStep:
        bucket, num_microbatches = self.buckets.shapes[index], self.buckets.num_microbatches
        shape = (num_microbatches, bucket[0], self.samples_per_row[index])
        ids, lengths = np.full(shape, -1), np.zeros((*shape, self._num_sides), dtype=np.int64)
        for j, row in enumerate(rows):
            slot, microbatch = divmod(j, num_microbatches)
            ids[microbatch, slot, : len(row)] = [number for number, _ in row]
            lengths[microbatch, slot, : len(row)] = [each for _, each in row]
        if self._num_sides == 1:
            lengths = lengths[..., 0]
        if not self.is_packed:
            ids, lengths = ids[:, :, 0], lengths[:, :, 0]
        return StreamStep(index, bucket, ids, lengths, self._begin(ids, lengths, bucket[1:]))

    def _begin(
        self, ids: NDArray[np.int64], lengths: NDArray[np.int64], longest: Sequence[int]
    ) -> NDArray[np.int64] | None:
        """Return where the windows of a step's samples begin, and -1 elsewhere."""
        if not self._uncut:
            return None
        is_sample = ids >= 0
        numbers, whole = ids[is_sample], lengths[is_sample]
        for place, number in enumerate(numbers.tolist()):
            if number in self._uncut:
                whole[place] = np.reshape(self._uncut.pop(number), whole.shape[1:])
        windows = begin_windows(self._overlong, numbers, whole, longest, self._seed, self._epoch)
        if windows is None:
            return None
        starts = np.full_like(lengths, -1)
        starts[is_sample] = windows
        return starts


@takes_budget
def stream_batches(
    lengths: Iterable[int] | Iterable[Sequence[int]],
    buckets: Buckets | Sequence[tuple[int, ...]] | Budget | None = None,
    *,
    packing: str = "padded",
    samples_per_row: int | Sequence[int] | None = None,
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

    Packed, all samples wait together, until they have four times the tokens of the largest step (of pairs on either
    side). Then, and at the end of the stream, a step is taken out of them. Among the buckets that hold the first
    sample, its bucket is the one whose step the waiting samples that it holds would fill most times over, where more
    than twice counts as twice; the shortest among equals. Row by row, the first sample that is left and fits comes
    first; then, up to P samples, always the longest that still fits, the first among equals, or for pairs the one that
    `pack_samples` takes next.

    Args:
        lengths: integers >= 1, in tokens; sample i is the one at place i, from 0. Or several integers of each sample,
            the first >= 1 and the others >= 0; two where rows are packed.
        buckets: `Buckets`, or tuples of rows and lengths, ascending; or None or a `Budget` to choose them
            for the first samples: lengths by `make_buckets` or, packed, as in `make_plan`; as many
            rows as fit. Packed pairs have one.
        packing: "padded", with one sample in a row; or "best_fit".
        samples_per_row: P, the most samples of a packed row, one for all or one for each bucket. None, only where
            buckets are chosen: as many of the first samples as a row can hold.
        num_estimate: how many samples are read ahead to choose the buckets.
        max_waiting: at most this many samples wait in all; if one more would, the queue that is fullest in proportion
            becomes a step with padding rows. Packed, a step is taken then and not before.
        shuffle_buffer: read this many samples ahead, and take them out at random; None keeps the order of the stream.
        seed: 0 <= seed < 2**63, chooses the random keys.
        epoch: 0 <= epoch < 2**63, likewise.
        overlong: samples above the longest bucket, as in `make_plan`.
        state: what `StreamBatches.state` gave; the steps continue after the last one before it. `lengths` is the same
            stream from its beginning, and the other arguments come from the state.
        budget: fields of `Budget` as keywords, `max_tokens` among them, to choose the buckets; with given ones only
            `num_microbatches`, M, and `size`. With one length, padded, the longest bucket chosen is as long as
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
    check_overlong(overlong)
    if packing not in _PACKINGS:
        raise ValueError(f"packing must be one of {', '.join(_PACKINGS)}, got {packing!r}")
    if packing == "padded" and samples_per_row is not None:
        raise ValueError(f"samples_per_row={samples_per_row} is for packed rows, and a row holds one sample")
    given = buckets_or_budget(buckets, budget)
    if isinstance(given, Budget):
        first = list(islice(stream, check_integer("num_estimate", num_estimate)))
        num_sides = len(first[0]) if first and isinstance(first[0], Sequence | np.ndarray) else 1
        known = [_check_lengths(number, value, num_sides) for number, value in enumerate(first)]
        stream = chain(first, stream)
        if packing == "padded":
            given = choose_shapes(known, given)
        else:
            given, samples_per_row = choose_packed_shapes(known, given, samples_per_row)
    return StreamBatches(
        stream,
        given,
        samples_per_row=_check_shapes(given, packing, samples_per_row, overlong),
        max_waiting=check_count("max_waiting", max_waiting),
        overlong=overlong,
        shuffle_buffer=check_count("shuffle_buffer", shuffle_buffer),
        seed=check_integer("seed", seed, minimum=0),
        epoch=check_integer("epoch", epoch, minimum=0),
    )


def _check_shapes(
    buckets: Buckets, packing: str, samples_per_row: int | Sequence[int] | None, overlong: str
) -> tuple[int, ...] | None:
    """Check buckets, and return P of each, or None for rows of one sample; a ValueError for others."""
    check_steps(buckets)
    check_distinct(buckets)
    is_pairs = len(buckets.shapes[0]) > 2
    if packing == "padded":
        if is_pairs and overlong not in ("error", "drop"):
            raise ValueError(f'overlong="{overlong}" is not for pairs: pass "error" or "drop"')
        return None
    if buckets.size != "sum":
        raise ValueError(f"size={buckets.size!r} counts pairs that are not packed")
    if max(buckets.num_microbatches * bucket[0] * sum(bucket[1:]) for bucket in buckets.shapes) > MAX_TOKENS:
        raise ValueError(f"a step of packed rows has at most {MAX_TOKENS} tokens")
    if is_pairs and len(buckets.shapes) > 1:
        raise ValueError(f"packed pairs have rows of one shape, got {[tuple(bucket) for bucket in buckets.shapes]}")
    row_lengths = [tuple(bucket[1:]) for bucket in buckets.shapes]
    if is_pairs:
        check_sizes(row_lengths[0])
    most = check_samples_per_row(samples_per_row, row_lengths)
    if most is None:
        raise ValueError("packed rows of given buckets need samples_per_row=, which is part of their shape")
    return most


def _check_lengths(number: int, value: Any, num_sides: int) -> Lengths:
    if num_sides == 1:
        return (_check_length(number, value),)
    values = list(value) if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str) else []
    most = INT64_MAX // num_sides
    try:
        lengths = tuple(map(operator.index, values))
    except TypeError:
        lengths = ()
    is_bool = any(isinstance(each, bool | np.bool_) for each in values)
    if is_bool or len(lengths) != num_sides or lengths[0] < 1 or not 0 <= min(lengths) <= max(lengths) <= most:
        raise ValueError(
            f"lengths must be {num_sides} integers from 0 to {most} each, the first at least 1: id {number}: {value!r} "
            f"(limit 1); {COUNTS}"
        )
    return lengths


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
        buckets = given_buckets(state["buckets"], {name: state[name] for name in ("num_microbatches", "size")})
        num_read, num_dropped, num_truncated, seed, epoch = (
            check_integer(name, state[name], minimum=0)
            for name in ("num_read", "num_dropped", "num_truncated", "seed", "epoch")
        )
        check_overlong(state["overlong"])
        packing = "padded" if state["samples_per_row"] is None else "best_fit"
        resumed = StreamBatches(
            stream,
            buckets,
            samples_per_row=_check_shapes(buckets, packing, state["samples_per_row"], state["overlong"]),
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


def _samples(listed: Any) -> list[tuple[int, Lengths]]:
    """Return samples that a state lists as id and lengths."""
    return [(int(number), tuple(map(int, lengths))) for number, *lengths in listed]
