"""Kernels, compiled and as plain Python."""

import importlib.util
import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvarlen.planning import _kernels as kernels

LARGEST_KEY = 2**32 - 1

# A compiled kernel takes seconds on its first call.
unhurried = settings(deadline=None, max_examples=50)


HAS_NUMBA = importlib.util.find_spec("numba") is not None
needs_numba = pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed: there is only the Python")


@pytest.fixture(params=[pytest.param("compiled", marks=needs_numba), "py_func"])
def draw(request):
    """`paced_arrival` from lists to a list, compiled or plain."""
    kernel = getattr(kernels.paced_arrival, request.param)

    def call(bucket_of_rank, samples_per_step, admitted, keys):
        signed = (np.array(column, np.int64) for column in (bucket_of_rank, samples_per_step, admitted))
        return kernel(*signed, np.array(keys, np.uint64)).tolist()

    return call


@st.composite
def draws(draw):
    samples_per_step = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    bucket_of_rank = draw(st.lists(st.integers(0, len(samples_per_step) - 1), min_size=1, max_size=40))
    n = len(bucket_of_rank)
    num_steps = sum(-(-bucket_of_rank.count(k) // size) for k, size in enumerate(samples_per_step))
    admitted = sorted(draw(st.lists(st.integers(0, n), min_size=num_steps, max_size=num_steps)))
    keys = draw(st.lists(st.integers(0, LARGEST_KEY) | st.just(LARGEST_KEY), min_size=n, max_size=n))
    return bucket_of_rank, samples_per_step, admitted, keys


@needs_numba
@unhurried
@given(draws())
def test_paced_arrival_is_alike_compiled_and_plain(arguments):
    *signed, keys = arguments
    arrays = (*(np.array(column, np.int64) for column in signed), np.array(keys, np.uint64))
    assert np.array_equal(kernels.paced_arrival.compiled(*arrays), kernels.paced_arrival.py_func(*arrays))


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


@pytest.mark.parametrize("kernel", [pytest.param("compiled", marks=needs_numba), "py_func"])
def test_keys_are_scaled_without_overflow(kernel):
    kernel = getattr(kernels.scaled_key, kernel)
    for width, key in itertools.product([1, 7, 2**31, 2**31 + 1, 2**32 - 1, 2**32], [0, 1, 2**31, LARGEST_KEY]):
        assert kernel(np.uint64(key), width) == kernel(np.uint64(key), np.int64(width)) == key * width >> 32


def test_few_samples_run_without_numba_and_many_with_it():
    program = """
import sys
import numpy as np
from jvarlen.planning import _kernels

lengths = np.arange(1, 101)
assert len(_kernels.close_by_budget(lengths, 100, 10, 1, True)) > 10
assert "numba" not in sys.modules
many = np.tile(lengths, 1000)
ends = _kernels.close_by_budget(many, 100, 10, 1, True)
assert (ends == _kernels.close_by_budget.py_func(many, 100, 10, 1, True)).all()
print("numba" in sys.modules)
"""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(HAS_NUMBA)


@needs_numba
@unhurried
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60),
    block_size=st.integers(1, 30),
    most=st.integers(1, 40),
)
def test_blocks_are_filled_alike_compiled_and_plain(lengths, block_size, most):
    column = np.array(lengths)
    block = np.arange(len(column)) // block_size
    descending = np.lexsort((-column, block))
    ends = np.append(np.flatnonzero(np.diff(block)) + 1, len(column))
    kernel = kernels.fill_blocks
    for most_rows in (most, 2**62):
        found = [
            fill(column, descending, ends, np.array([12, 20]), np.array([2, 3]), most_rows, True)
            for fill in (kernel.compiled, kernel.py_func)
        ]
        assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))
    samples, row_ends, capacity = found[0]
    assert sorted(samples.tolist()) == list(range(len(column)))
    assert (np.add.reduceat(column[samples], np.append(0, row_ends[:-1])) <= capacity).all()
    stopped = kernel.py_func(column, descending, ends, np.array([12, 20]), np.array([2, 3]), most, True)[1]
    assert len(stopped) == (len(row_ends) if len(row_ends) <= most else 0)


@needs_numba
def test_rows_of_pairs_are_filled_alike_compiled_and_plain():
    pairs = np.random.default_rng(0).integers(1, [30, 40], (200, 2))
    pairs = pairs[np.lexsort(pairs.T[::-1])]
    kernel = kernels.fill_pair_rows
    for arrivals, most_rows in ((np.arange(0), 2**62), (np.random.default_rng(1).permutation(200), 20)):
        found = [fill(pairs, np.array([60, 70]), 3, arrivals, most_rows) for fill in (kernel.compiled, kernel.py_func)]
        assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))


@needs_numba
def test_rows_of_a_stream_are_filled_alike_compiled_and_plain():
    lengths = np.random.default_rng(0).integers(1, 30, 300)
    ascending, kernel = np.argsort(lengths, kind="stable"), kernels.fill_stream_rows
    found = [fill(lengths, ascending, 28, 4, 30) for fill in (kernel.compiled, kernel.py_func)]
    assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))
    assert found[0][1][-1] == 29


@needs_numba
@unhurried
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40),
    row_length=st.integers(1, 30),
    most=st.integers(1, 5),
    step=st.integers(1, 100),
)
def test_wrapped_rows_begin_alike_compiled_and_plain(lengths, row_length, most, step):
    begins = np.cumulative_sum(np.array(lengths), include_initial=True)
    step_ends = np.append(np.arange(step, begins[-1], step), begins[-1])
    kernel = kernels.wrapped_rows
    found = [lay(begins, step_ends, row_length, most) for lay in (kernel.compiled, kernel.py_func)]
    assert np.array_equal(*found)


@needs_numba
def test_many_small_calls_are_compiled_as_one_large_one_is():
    kernel = kernels.Kernel(lambda values: "plain", few=10, adds_up=True)
    assert [kernel(np.zeros(4)), kernel(np.zeros(5))] == ["plain"] * 2
    assert "compiled" not in kernel.__dict__
    kernel(np.zeros(1))
    assert "compiled" in kernel.__dict__
