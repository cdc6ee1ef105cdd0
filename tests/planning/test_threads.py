"""Threads: every sample is worked on once, whatever their number; a mistake in one is not lost."""

import os

import numpy as np
import pytest

from jvarlen import make_buckets, make_plan
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


def test_plans_are_the_same_on_any_number_of_threads(monkeypatch):
    lengths = np.random.default_rng(0).integers(1, 100, 3_001)
    buckets = make_buckets(lengths, 500)
    plans = []
    for least_part, num_cores in ((2**19, 1), (1, 2), (1, 3), (1, 16)):
        monkeypatch.setattr(threads, "_LEAST_PART", least_part)
        monkeypatch.setattr(os, "cpu_count", lambda num_cores=num_cores: num_cores)
        for order in ("shuffle", "dataset"):
            plans.append((order, make_plan(lengths, buckets, order=order, seed=3)))
    for order in ("shuffle", "dataset"):
        same = [plan for name, plan in plans if name == order]
        assert len({plan.digest for plan in same}) == 1
        assert all((plan.num_tokens == same[0].num_tokens).all() for plan in same)
