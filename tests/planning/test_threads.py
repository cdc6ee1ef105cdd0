"""Threads: every sample is worked on once, whatever their number; a mistake in one is not lost."""

import numpy as np
import pytest

from jvarlen._common import threads


@pytest.mark.parametrize("num_samples", [0, 1, 2**19 - 1, 2**20, 3 * 2**20 + 7])
def test_parts_cover_the_range_once(num_samples):
    done = np.zeros(num_samples, np.int64)

    def work(start, end):
        done[start:end] += 1

    threads.in_parts(work, num_samples)
    assert (done == 1).all()


def test_an_error_in_a_part_comes_out(monkeypatch):
    monkeypatch.setattr(threads, "_LEAST_PART", 2)

    def work(start, end):
        if end == 8:
            raise ValueError("the last part")

    with pytest.raises(ValueError, match="the last part"):
        threads.in_parts(work, 8)
