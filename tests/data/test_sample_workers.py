"""Sample workers: every sample once, in ranges of suitable size, and errors that name the sample, from any process."""

import sys
import time
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvarlen.data import sample_ranges
from jvarlen.data.sample_ranges import MeasuredRange, Ranges, Work, measure_ranges


def to_array(values, samples):
    """Ints alone; the range tells which others there are."""
    if not all(isinstance(value, int) for value in values):
        raise ValueError(f"samples {samples.start} to {samples.stop - 1} are not all ints")
    return np.array(values, np.int64)


def identity(sample):
    return sample


def measure(dataset, num_workers, function=identity):
    return list(measure_ranges(Work(dataset, function, to_array), [range(len(dataset))], num_workers))


@given(sizes=st.lists(st.integers(0, 2_000), max_size=6), seconds=st.lists(st.floats(0, 10), max_size=20))
@settings(deadline=None)
def test_ranges_cover_what_is_missing_once_and_stay_in_their_shard(sizes, seconds):
    missing = [range(5_000 * index, 5_000 * index + size) for index, size in enumerate(sizes)]
    cut, ranges = [], Ranges(missing)
    for took, samples in zip(seconds, ranges, strict=False):
        cut.append(samples)
        ranges.adapt(MeasuredRange(samples, np.zeros(len(samples), int), took), samples)
    cut += ranges
    assert [i for samples in cut for i in samples] == [i for shard in missing for i in shard]
    assert all(samples.start // 5_000 == (samples.stop - 1) // 5_000 for samples in cut)


def test_ranges_of_slow_samples_are_short():
    ranges = Ranges([range(10**9)])
    lengths = []
    for samples in ranges:
        lengths.append(len(samples))
        if len(lengths) == 20:
            break
        seconds_per_sample = 1e-7 if len(lengths) < 15 else 0.1
        ranges.adapt(MeasuredRange(samples, np.zeros(0, int), len(samples) * seconds_per_sample), samples)
    assert max(lengths) == 32_768
    assert lengths[-1] == 2


@pytest.mark.parametrize(
    "num_workers", [0, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.multiprocess])], ids=["here", "in_workers"]
)
def test_missing_samples_are_measured_once_and_no_others(num_workers):
    missing = [range(3, 3), range(5, 100), range(200, 201), range(300, 1_000)]
    dataset = [i * i if any(i in shard for shard in missing) else "not to be read" for i in range(1_000)]
    parts = list(measure_ranges(Work(dataset, identity, to_array), missing, num_workers))
    assert sorted(i for part in parts for i in part.samples) == [i for shard in missing for i in shard]
    assert all(part.values.tolist() == [i * i for i in part.samples] for part in parts)
    assert all(any(set(part.samples) <= set(shard) for shard in missing) for part in parts)


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


class AwkwardError(Exception):
    """An error that pickles, and does not unpickle."""

    def __init__(self, code, reason):
        super().__init__(f"{code}: {reason}")


def fail_awkwardly(sample):
    raise AwkwardError(sample, "awkward")


def test_an_error_of_a_sample_tells_which():
    with pytest.raises(RuntimeError, match=r"sample 2 could not be measured: TypeError\(") as told:
        measure(["a", "b", 3], 0, len)
    assert isinstance(told.value.__cause__, TypeError)
    with pytest.raises(RuntimeError, match=r"sample 1 could not be measured: OSError\('no such block'\)"):
        measure(Failing([1, 2]), 0)
    with pytest.raises(ValueError, match="samples 0 to 1 are not all ints"):
        measure([1, "x"], 0)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_errors_in_workers_are_those_of_this_process():
    with pytest.raises(RuntimeError, match=r"sample 2 could not be measured: TypeError\(") as told:
        measure(["a", "b", 3], 1, len)
    assert isinstance(told.value.__cause__, TypeError)
    assert "measure_range" in told.value.__cause__.__notes__[0]
    with pytest.raises(RuntimeError, match=r"sample 0 could not be measured: AwkwardError\('7: awkward'\)") as told:
        measure([7], 1, fail_awkwardly)
    assert "AwkwardError" in str(told.value.__cause__)
    with pytest.raises(ValueError, match="samples 0 to 1 are not all ints"):
        measure([1, "x"], 1)


@pytest.mark.multiprocess
def test_workers_need_what_pickles():
    with pytest.raises(ValueError, match=r"functions that pickle: TypeError\('it holds an open file'\)"):
        measure(Unpicklable([1]), 1)
    with pytest.raises(ValueError, match=r"not unpickle in a worker process: OSError\('no such mount'\)") as refused:
        measure(UnpicklableThere([1]), 1)
    assert "_fail_to_unpickle" in refused.value.__notes__[0]


def test_nothing_to_measure_starts_no_worker():
    assert not list(measure_ranges(Work(Unpicklable([1]), identity, to_array), [range(0)], 2))


def in_order(parts):
    """The values of all samples; every sample is measured once."""
    parts = sorted(parts, key=lambda part: part.samples.start)
    assert [i for part in parts for i in part.samples] == list(range(parts[-1].samples.stop))
    return [value for part in parts for value in part.values.tolist()]


def fail_there(sample):
    """With an error whose type another process cannot import, like one that a script defines."""
    there = sys.modules["only_there"] = types.ModuleType("only_there")
    there.OnlyThereError = type("OnlyThereError", (Exception,), {"__module__": "only_there"})
    raise there.OnlyThereError(sample)


@pytest.mark.multiprocess
def test_an_error_whose_type_is_not_importable_here_tells_its_sample():
    with pytest.raises(RuntimeError, match=r"sample 0 could not be measured: OnlyThereError\(7\)") as told:
        measure([7], 1, fail_there)
    assert type(told.value.__cause__) is RuntimeError
    assert "fail_there" in told.value.__cause__.__notes__[-1]


class SlowAfter(list):
    """Samples that take long from some id on."""

    def __getitem__(self, index):
        time.sleep(0.002 * (index >= 5_000))
        return super().__getitem__(index)


def test_a_range_that_takes_long_is_measured_in_part_and_its_rest_later(monkeypatch):
    monkeypatch.setattr(sample_ranges, "_MOST_SECONDS", 0.3)
    parts = measure(SlowAfter(range(5_300)), 0)
    assert in_order(parts) == list(range(5_300))
    assert max(part.seconds for part in parts) < 1


def test_an_error_in_samples_that_are_read_at_once_tells_which():
    def fail(samples):
        raise OSError("no such block")

    with pytest.raises(RuntimeError, match=r"samples 0 to 1 could not be measured: OSError\('no such block'\)"):
        list(measure_ranges(Work([1, 2], identity, to_array, read_values=fail), [range(2)], 0))
