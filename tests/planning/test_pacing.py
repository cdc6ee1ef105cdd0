"""Pacing: shares that lie in [0, 1], never fall, and reach exactly 1 when they should."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jvarlen.planning.pacing import competence_pacing, discrete_pacing, linear_pacing, root_pacing

num_steps = st.integers(1, 10_000)
initials = st.floats(1e-6, 1.0)
degrees = st.floats(0.1, 10.0)
pacings = st.one_of(
    st.builds(linear_pacing, num_steps, initials),
    st.builds(root_pacing, num_steps, initials, degrees),
    st.builds(competence_pacing, num_steps, initials, degrees),
    st.builds(discrete_pacing, num_steps, st.integers(1, 50), initials),
)


@given(pacings, st.integers(0, 11_000))
def test_a_single_step_has_the_share_that_it_has_among_others(pacing, step):
    alone, among = pacing(step), pacing(np.full((2, 3), step))
    assert isinstance(alone, float)
    assert (among == alone).all()
    assert among.shape == (2, 3)


def test_stages_begin_at_whole_steps():
    shares = discrete_pacing(10, 3, 0.25)(np.arange(11))
    assert shares.tolist() == [0.25] * 4 + [0.5] * 3 + [0.75] * 3 + [1.0]


def test_stages_are_counted_in_integers():
    # In floats, 2**53 + 1 of twice as many steps is the first half.
    pacing = discrete_pacing(2**54 + 2, 2, 0.5)
    assert pacing(np.array([2**53, 2**53 + 1])).tolist() == [0.5, 0.75]


def test_more_stages_than_steps_reach_1():
    assert discrete_pacing(2, 5, 0.5)(np.arange(4)).tolist() == [0.5, 0.7, 1, 1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_steps": 10, "num_stages": 0}, r"num_stages \(0\)"),
        ({"num_steps": 10, "num_stages": 2.5}, r"num_stages \(2.5\)"),
        ({"num_steps": 10, "num_stages": 2, "initial": 0}, "initial"),
        ({"num_steps": 0, "num_stages": 2}, r"num_steps \(0\)"),
        ({"num_steps": 2**40, "num_stages": 2**23}, r"below 2\*\*63"),
    ],
)
def test_impossible_stages_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        discrete_pacing(**options)


@pytest.mark.parametrize("step", [-1, 0.5, [3, -2], "first"])
def test_steps_must_be_integers_of_at_least_0(step):
    with pytest.raises(ValueError, match="steps must be integers of at least 0"):
        linear_pacing(10)(step)
