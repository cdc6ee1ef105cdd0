"""Packs the samples of a stream that are held into rows, the first to come first."""

from bisect import bisect_left
from collections.abc import Sequence

from torch_ref.planning.buckets import Buckets

__all__ = ["HeldSamples"]

_STEPS_HELD = 4


class HeldSamples:
    """Samples that no step has yet, in the order in which they came.

    Attributes:
        samples: their ids and lengths, cut to the row.
    """

    def __init__(
        self, buckets: Buckets, most: int, max_waiting: int | None, samples: Sequence[tuple[int, int]]
    ) -> None:
        """Take the one shape, the most samples of a row, and what is held."""
        self.samples = list(samples)
        rows, self._row_length = buckets.shapes[0]
        self._most, self._max_waiting = most, max_waiting
        self._num_rows = buckets.num_microbatches * rows
        self._tokens = sum(length for _, length in samples)

    def put(self, number: int, length: int) -> None:
        """Hold one more."""
        self.samples.append((number, length))
        self._tokens += length

    def is_enough(self) -> bool:
        """Return whether a step is to be taken before another sample is read."""
        if self._max_waiting is not None:
            return len(self.samples) > self._max_waiting
        return self._tokens >= _STEPS_HELD * self._num_rows * self._row_length

    def take_step(self) -> tuple[int, list[list[tuple[int, int]]]]:
        """Return the index of the bucket and the samples of its rows, which are no longer held."""
        lengths = [length for _, length in self.samples]
        rows = _fill_rows(lengths, self._row_length, self._most, self._num_rows)
        taken = {place for row in rows for place in row}
        step = [[self.samples[place] for place in row] for row in rows]
        self._tokens -= sum(lengths[place] for place in taken)
        self.samples = [sample for place, sample in enumerate(self.samples) if place not in taken]
        return 0, step


def _fill_rows(lengths: Sequence[int], size: int, most: int, max_rows: int) -> list[list[int]]:
    """Return rows of places; each begins with the first one left, and goes on with the longest that fits."""
    by_length = sorted((length, -place) for place, length in enumerate(lengths))
    rows: list[list[int]] = []
    taken: set[int] = set()
    coming = iter(range(len(lengths)))
    while by_length and len(rows) < max_rows:
        first = next(place for place in coming if place not in taken)
        del by_length[bisect_left(by_length, (lengths[first], -first))]
        row, space = [first], size - lengths[first]
        while len(row) < most and (num_fitting := bisect_left(by_length, (space + 1, -len(lengths)))):
            length, negative = by_length.pop(num_fitting - 1)
            row.append(-negative)
            space -= length
        taken.update(row)
        rows.append(row)
    return rows
