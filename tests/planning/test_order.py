"""Order: stable, random by (seed, epoch) only, and computable in parts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jvarlen.planning.order import random_keys, stable_argsort


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30))
def test_stable_argsort_is_numpys_for_any_integers(keys):
    array = np.array(keys, np.int64)
    assert stable_argsort(array).tolist() == np.argsort(array, kind="stable").tolist()


@given(st.lists(st.sampled_from([-np.inf, -1.5, -0.0, 0.0, 2.0, np.inf]), max_size=30))
def test_stable_argsort_is_numpys_for_floats(keys):
    array = np.array(keys, np.float32)
    assert stable_argsort(array).tolist() == np.argsort(array, kind="stable").tolist()


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_a_part_of_the_random_stream_is_that_part(start, count, seed, epoch):
    whole = random_keys(start + count, seed=seed, epoch=epoch)
    assert random_keys(count, seed=seed, epoch=epoch, start=start).tolist() == whole[start:].tolist()
