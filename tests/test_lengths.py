"""Lengths: checked, measured, limited."""

import time

import numpy as np
import pytest

from jvarlen.lengths import check_lengths, measure_lengths


def test_int64_lengths_are_not_copied():
    lengths = np.arange(1, 5)
    assert check_lengths(lengths) is lengths


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint64])
def test_any_integers_become_int64(dtype):
    checked = check_lengths(np.array([1, 200 % 128], dtype))
    assert checked.dtype == np.int64
    assert checked.tolist() == [1, 72]


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([], "empty"),
        ([[1, 2]], "1-D"),
        (3, "1-D"),
        ([1.0, 2.0], "float64"),
        ([True], "bool"),
        (["a"], "integers"),
        ([3, 0, 5, -2], "id 1: 0, id 3: -2"),
        (np.array([1, 2**63], np.uint64), f"id 1: {2**63}"),
    ],
)
def test_bad_lengths_are_refused_by_name(lengths, said):
    with pytest.raises(ValueError, match=said):
        check_lengths(lengths)


def test_many_offenders_are_counted():
    with pytest.raises(ValueError, match="id 4: 0 and 95 more"):
        check_lengths(np.zeros(100, int))


def test_measured_lengths_are_those_of_the_samples():
    assert measure_lengths(["ab", "c", "def"], progress=False).tolist() == [2, 1, 3]
    assert measure_lengths([[1, 2], [3, 4, 5]], sum, progress=False).tolist() == [3, 12]


@pytest.mark.multiprocess
def test_worker_processes_measure_the_same():
    dataset = ["x" * (1 + i % 97) for i in range(10_000)]
    assert (measure_lengths(dataset, num_workers=2, progress=False) == measure_lengths(dataset, progress=False)).all()


def test_a_measured_length_of_zero_is_refused():
    with pytest.raises(ValueError, match="id 1: 0"):
        measure_lengths(["a", ""], progress=False)
    with pytest.raises(ValueError, match="num_workers"):
        measure_lengths(["a"], num_workers=-1, progress=False)


class Slow:
    """Samples of length 7 that take long enough for a progress bar to redraw."""

    def __len__(self):
        return 300

    def __getitem__(self, index):
        time.sleep(0.001)
        return "seven77"


def test_a_progress_bar_changes_no_length():
    assert set(measure_lengths(Slow(), progress=True).tolist()) == {7}
