"""Ranges of samples: each sample once, in ranges of suitable size, and errors that name it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvarlen.data.measure import MeasuredRange, Ranges, Work, measure_ranges


def identity(sample):
    return sample


def measure(dataset, num_workers, function=identity):
    return list(measure_ranges(Work(dataset, function, "numbers"), len(dataset), num_workers))


@given(num_samples=st.integers(0, 5_000), seconds=st.lists(st.floats(0, 10), max_size=20))
@settings(deadline=None)
def test_ranges_cover_each_sample_once(num_samples, seconds):
    cut, ranges = [], Ranges(num_samples)
    for took, samples in zip(seconds, ranges, strict=False):
        cut.append(samples)
        ranges.adapt(MeasuredRange(samples, np.zeros(len(samples), int), took))
    cut += ranges
    assert [i for samples in cut for i in samples] == list(range(num_samples))


def test_ranges_of_slow_samples_are_short():
    ranges = Ranges(10**9)
    lengths = []
    for samples in ranges:
        lengths.append(len(samples))
        if len(lengths) == 25:
            break
        seconds_per_sample = 1e-7 if len(lengths) < 20 else 0.1
        ranges.adapt(MeasuredRange(samples, np.zeros(0, int), len(samples) * seconds_per_sample))
    assert max(lengths) == 32_768
    assert lengths[-1] == 2


class Failing(list):
    """Samples one of which cannot be read."""

    def __getitem__(self, index):
        if index == 1:
            raise OSError("no such block")
        return super().__getitem__(index)


class Unpicklable(list):
    """Samples that no process can hand over."""

    def __reduce_ex__(self, protocol):
        raise TypeError("it holds an open file")


class UnpicklableThere(list):
    """Samples that no other process can take over."""

    def __reduce_ex__(self, protocol):
        return _fail_to_unpickle, ()


def _fail_to_unpickle():
    raise OSError("no such mount")


def test_an_error_of_a_sample_tells_which():
    with pytest.raises(RuntimeError, match=r"sample 2 could not be measured: TypeError\(") as told:
        measure(["a", "b", 3], 0, len)
    assert isinstance(told.value.__cause__, TypeError)
    with pytest.raises(RuntimeError, match=r"sample 1 could not be measured: OSError\('no such block'\)"):
        measure(Failing([1, 2]), 0)
    with pytest.raises(ValueError, match="numbers must be integers that fit int64: id 1: 'x'"):
        measure([1, "x"], 0)


@pytest.mark.multiprocess
def test_workers_need_what_pickles():
    with pytest.raises(ValueError, match=r"functions that pickle: TypeError\('it holds an open file'\)"):
        measure(Unpicklable([1]), 1)
    with pytest.raises(ValueError, match=r"not unpickle in a worker process: OSError\('no such mount'\)") as refused:
        measure(UnpicklableThere([1]), 1)
    assert "_fail_to_unpickle" in refused.value.__notes__[0]
