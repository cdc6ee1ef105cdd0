"""Sortable words: they sort as the rows do, and give the rows back bit for bit."""

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jvarlen.sorting.shard_sort import from_words, to_words, word_dtypes

INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
FLOATS = [np.float16, np.float32, np.float64, ml_dtypes.bfloat16]

# Inputs of one shape share a program, as they do in a sort.
jitted_to_words = jax.jit(to_words, static_argnums=2)
jitted_from_words = jax.jit(from_words, static_argnums=1)


def round_trip(keys, num_rows=1000):
    """Order of the words, and the keys and indices that they give back."""
    with jax.enable_x64(True):
        words = jitted_to_words(keys, np.arange(len(keys)), num_rows)
        order = np.lexsort([np.asarray(word) for word in reversed(words)])
        given_back = jitted_from_words(words, np.dtype(keys.dtype))
    return order, *map(np.asarray, given_back)


def extremes(dtype):
    if dtype in INTEGERS:
        info = np.iinfo(dtype)
        return np.array([0, 1, info.max, info.min, info.max - 1, info.min + 1, 0], dtype)
    info = ml_dtypes.finfo(dtype)
    values = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, info.max, info.min, info.tiny, -info.tiny, -0.0, 0.0]
    return np.array([*values, info.smallest_subnormal, -info.smallest_subnormal], dtype)


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
def test_extremes_are_ordered_and_come_back(dtype):
    keys = extremes(dtype)
    order, given_back, indices = round_trip(keys)
    # float64 holds the floats exactly; the integers compare as they are.
    comparable = keys.astype(np.float64) if dtype in FLOATS else keys
    assert (order == np.lexsort((np.arange(len(keys)), comparable))).all()
    assert given_back.tobytes() == keys.tobytes()
    assert (indices == np.arange(len(keys))).all()


# A few sizes, because each is compiled for itself.
@given(arrays(np.float32, st.sampled_from([0, 1, 2, 5, 40]), elements=st.floats(width=32)))
@settings(deadline=None, max_examples=60)
def test_floats_are_ordered_as_lexsort_does(keys):
    order, given_back, _ = round_trip(keys)
    assert (order == np.lexsort((np.arange(len(keys)), keys))).all()
    np.testing.assert_array_equal(given_back, keys)
    assert (np.signbit(given_back) == np.signbit(keys))[~np.isnan(keys)].all()


@pytest.mark.parametrize("negative", [False, True])
def test_every_nan_is_last(negative):
    nan = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF], np.uint32) | np.uint32(negative << 31)
    keys = np.concatenate([nan.view(np.float32), np.array([np.inf, -np.inf], np.float32)])
    order, given_back, _ = round_trip(keys)
    assert order.tolist() == [4, 3, 0, 1, 2]
    assert np.isnan(given_back[:3]).all()


@pytest.mark.parametrize(
    ("dtype", "num_rows", "expected"),
    [
        (np.int32, 2**31 - 2, [np.uint64]),
        (np.float16, 10, [np.uint64]),
        (np.int32, 2**31 - 1, [np.uint32, np.uint64]),
        (np.int64, 10, [np.uint64, np.uint32]),
        (np.float64, 2**31 - 1, [np.uint64, np.uint64]),
    ],
)
def test_a_row_is_one_word_where_it_fits(dtype, num_rows, expected):
    assert word_dtypes(np.dtype(dtype), num_rows) == tuple(map(np.dtype, expected))


@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.int64])
def test_no_row_sorts_with_the_gaps(dtype):
    for num_rows in (2**31 - 2, 2**40):
        with jax.enable_x64(True):
            largest = np.array([np.iinfo(dtype).max if np.issubdtype(dtype, np.integer) else np.nan], dtype)
            words = jitted_to_words(largest, np.array([num_rows - 1]), num_rows)
            assert any((np.asarray(word) < np.iinfo(word.dtype).max).all() for word in words)
            assert int(jitted_from_words(words, np.dtype(dtype))[1][0]) == num_rows - 1
