"""Applies a function to ranges of samples, here or in other processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from jvarlen.planning.lengths import DataSource

__all__ = ["MeasuredRange", "Ranges", "Values", "Work", "measure_range", "measure_ranges"]

Values = Int64[np.ndarray, " n"] | Float64[np.ndarray, " n"]

_SECONDS_PER_RANGE = 0.25  # long against handing a range over, short to wait for
_FIRST_RANGE = 16  # samples
_LARGEST_RANGE = 32_768
_MOST_SECONDS = 1.0  # after which a range is handed back, measured in part
_PIECES = 64  # of a range, between which the time is looked at
_FIRST_CAREFUL = 4_096  # samples
_CAREFUL_EVERY = 1_024  # of those after them


class Work(NamedTuple):
    """What measures ranges of samples; a worker process gets it once, pickled."""

    dataset: DataSource
    function: Callable[[Any], Any]
    to_array: Callable[[list[Any], range], Values]  # raises ValueError that lists rejected values
    careful_function: Callable[[Any], Any] | None = None  # for a few of the samples: inspecting all takes too long
    read_values: Callable[[range], list[int] | None] | None = None  # of consecutive samples; None where it cannot
    value_of_bad: Any = None  # of samples that cannot be measured; None: they are an error


class MeasuredRange(NamedTuple):
    """The values of a range of samples, and the seconds that measuring them took."""

    samples: range
    values: Values
    seconds: float


def measure_ranges(work: Work, missing: Sequence[range], num_workers: int) -> Generator[MeasuredRange, None, None]:
    """Measures the missing samples in ranges of about a quarter of a second."""
    ranges = Ranges(missing)
    num_workers = min(num_workers, ranges.num_left)
    if num_workers:
        from jvarlen.data.sample_workers import measure_elsewhere

        yield from measure_elsewhere(work, ranges, num_workers)
        return
    for samples in ranges:
        part = measure_range(work, samples)
        ranges.adapt(part, samples)
        yield part


class Ranges:
    """Cuts ranges of samples into smaller ones that take about equally long, whatever one sample takes."""

    def __init__(self, missing: Sequence[range]):
        self.num_left = sum(map(len, missing))
        self._missing = iter(missing)
        self._returned: list[range] = []
        self._rest = range(0)
        self._size = _FIRST_RANGE

    def __iter__(self) -> Iterator[range]:
        return self

    def __next__(self) -> range:
        while not self._rest:
            self._rest = self._returned.pop() if self._returned else next(self._missing)
        cut, self._rest = self._rest[: self._size], self._rest[self._size :]
        return cut

    def adapt(self, part: MeasuredRange, samples: range) -> None:
        """Sizes the next ranges by what a part took; what it lacks of its range is measured later."""
        self.num_left -= len(part.samples)
        if len(part.samples) < len(samples):
            self._returned.append(samples[len(part.samples) :])
        fitting = int(len(part.samples) * _SECONDS_PER_RANGE / max(part.seconds, 1e-9))
        self._size = max(1, min(fitting, 2 * self._size, _LARGEST_RANGE))


def measure_range(work: Work, samples: range) -> MeasuredRange:
    """The values of a range; of its first samples alone, where they take long."""
    start = time.perf_counter()
    dataset, function, careful = work.dataset, work.function, work.careful_function or work.function
    if work.read_values is not None:
        try:
            known = work.read_values(samples)
        except Exception as error:
            told = f"samples {samples.start} to {samples.stop - 1} could not be measured: {error!r}"
            raise RuntimeError(told) from error
        if known is not None:
            return MeasuredRange(samples, work.to_array(known, samples), time.perf_counter() - start)
    values: list[Any] = []
    size = -(-len(samples) // _PIECES)
    try:
        for first in range(0, len(samples), size):
            for sample_id in samples[first : first + size]:
                is_careful = sample_id < _FIRST_CAREFUL or not sample_id % _CAREFUL_EVERY
                try:
                    value = (careful if is_careful else function)(dataset[sample_id])
                except MemoryError:
                    raise
                except Exception:
                    if work.value_of_bad is None:
                        raise
                    value = work.value_of_bad
                values.append(value)
            if time.perf_counter() - start > _MOST_SECONDS:
                break
    except Exception as error:
        raise RuntimeError(f"sample {sample_id} could not be measured: {error!r}") from error
    samples = samples[: len(values)]
    return MeasuredRange(samples, work.to_array(values, samples), time.perf_counter() - start)
