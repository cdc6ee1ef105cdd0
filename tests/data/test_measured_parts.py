"""Parts of samples: each sample once, in parts of suitable size, and errors that name it."""

import numpy as np
import pytest

from jvarlen.data.measure import Work, measure_parts


def identity(sample):
    return sample


def measure(dataset, num_workers, function=identity):
    return list(measure_parts(Work(dataset, function, "numbers"), [range(len(dataset))], num_workers))


def test_parts_have_each_sample_once_and_slow_ones_alone(monkeypatch):
    dataset = list(range(20))
    whole = measure(dataset, 0)
    monkeypatch.setattr("jvarlen.data.measure._SECONDS_PER_PART", -1)
    each = measure(dataset, 0)
    assert [len(whole), len(each)] == [1, 20]
    for parts in (whole, each):
        assert [i for samples, _ in parts for i in samples] == dataset
        assert np.concatenate([values for _, values in parts]).tolist() == dataset


@pytest.mark.slow
@pytest.mark.multiprocess
def test_workers_share_the_ranges():
    parts = measure(list(range(100)), 2)
    assert len(parts) >= 16
    assert sorted(i for samples, _ in parts for i in samples) == list(range(100))
    assert all(values.tolist() == list(samples) for samples, values in parts)


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
