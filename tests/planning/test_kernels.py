"""Kernels: compiled or as plain Python, they do what a transcription of the rule in Python integers does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvarlen.planning import _kernels as kernels

LARGEST_KEY = 2**32 - 1

# A compiled kernel takes seconds on its first call.
unhurried = settings(deadline=None, max_examples=50)


def plain(kernel):
    return getattr(kernel, "py_func", kernel)


@pytest.fixture(params=["compiled", "plain"])
def draw(request, monkeypatch):
    """`paced_arrival` from lists to a list, with all that it calls compiled or all of it plain."""
    if request.param == "compiled" and kernels.numba is None:
        pytest.skip("numba is not installed: there is only the Python")
    if request.param == "plain":
        for name in ("paced_arrival", "scaled_key"):
            monkeypatch.setattr(kernels, name, plain(getattr(kernels, name)))

    def call(bucket_of_rank, samples_per_step, admitted, keys):
        signed = (np.array(column, np.int64) for column in (bucket_of_rank, samples_per_step, admitted))
        return kernels.paced_arrival(*signed, np.array(keys, np.uint64)).tolist()

    return call


def transcribed_arrival(bucket_of_rank, samples_per_step, admitted, keys):
    n = len(bucket_of_rank)
    pool = list(range(n))
    open_steps = {}
    emitted = 0
    arrived = []
    for p in range(n):
        a = min(max(admitted[min(emitted, len(admitted) - 1)], p + 1), n)
        j = p + ((keys[p] * (a - p)) >> 32)
        pool[p], pool[j] = pool[j], pool[p]
        arrived.append(pool[p])
        bucket = bucket_of_rank[pool[p]]
        open_steps.setdefault(bucket, []).append(pool[p])
        if len(open_steps[bucket]) == samples_per_step[bucket]:
            emitted += 1
            open_steps[bucket] = []
    return arrived


@st.composite
def draws(draw):
    samples_per_step = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    bucket_of_rank = draw(st.lists(st.integers(0, len(samples_per_step) - 1), min_size=1, max_size=40))
    n = len(bucket_of_rank)
    num_steps = sum(-(-bucket_of_rank.count(k) // size) for k, size in enumerate(samples_per_step))
    admitted = sorted(draw(st.lists(st.integers(0, n), min_size=num_steps, max_size=num_steps)))
    keys = draw(st.lists(st.integers(0, LARGEST_KEY) | st.just(LARGEST_KEY), min_size=n, max_size=n))
    return bucket_of_rank, samples_per_step, admitted, keys


def test_paced_arrival_is_its_transcription(draw):
    @unhurried
    @given(draws())
    def check(arguments):
        assert draw(*arguments) == transcribed_arrival(*arguments)

    check()


def test_samples_arrive_in_every_order_where_all_are_admitted(draw):
    n = 3
    thirds = [i * 2**32 // 6 for i in range(6)]
    orders = {tuple(draw([0] * n, [1], [n] * n, [a, b, LARGEST_KEY])) for a in thirds for b in thirds}
    assert len(orders) == 6


def test_samples_arrive_in_order_where_none_is_admitted(draw):
    assert draw([0] * 5, [2], [0, 0, 0], [LARGEST_KEY] * 5) == [0, 1, 2, 3, 4]


def test_a_full_step_admits_more_and_an_open_one_does_not(draw):
    # Two are admitted until a step of two is full; then all. The largest key draws the last that is admitted.
    assert draw([0] * 5, [2], [2, 5, 5], [LARGEST_KEY] * 5) == [1, 0, 4, 2, 3]


@pytest.mark.parametrize("kernel", [kernels.scaled_key, plain(kernels.scaled_key)], ids=["compiled", "plain"])
@pytest.mark.parametrize("width", [1, 7, 2**31, 2**31 + 1, 2**32 - 1, 2**32])
@pytest.mark.parametrize("key", [0, 1, 2**31, LARGEST_KEY])
def test_keys_are_scaled_without_overflow(kernel, width, key):
    assert kernel(np.uint64(key), width) == kernel(np.uint64(key), np.int64(width)) == key * width >> 32
