"""Pacing: shares that lie in [0, 1], never fall, and reach exactly 1 when they should."""

import math

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
STEPS = np.arange(11_000)


@given(pacings)
def test_shares_lie_between_0_and_1_and_never_fall(pacing):
    shares = pacing(STEPS)
    assert shares.dtype == np.float64
    assert shares.shape == STEPS.shape
    assert shares.min() > 0
    assert shares.max() == 1
    assert (np.diff(shares) >= 0).all()


@given(
    st.sampled_from([linear_pacing, root_pacing, competence_pacing, lambda *a: discrete_pacing(a[0], 7, a[1])]),
    num_steps,
    st.floats(1e-6, 0.99),
)
def test_shares_start_at_initial_and_are_exactly_1_from_num_steps_on(make, num_steps, initial):
    pacing = make(num_steps, initial)
    assert pacing(0) == pytest.approx(initial, rel=1e-9)
    assert pacing(num_steps - 1) < 1
    assert pacing(np.array([num_steps, num_steps + 1, 2**62])).tolist() == [1, 1, 1]


@given(pacings, st.integers(0, 11_000))
def test_a_single_step_has_the_share_that_it_has_among_others(pacing, step):
    alone, among = pacing(step), pacing(np.full((2, 3), step))
    assert isinstance(alone, float)
    assert (among == alone).all()
    assert among.shape == (2, 3)


@pytest.mark.parametrize("step", [0, 1, 37, 99, 100, 250])
def test_shares_are_those_of_the_formulas(step):
    x = min(step / 100, 1)
    assert linear_pacing(100, 0.2)(step) == pytest.approx(0.2 + 0.8 * x, rel=1e-15)
    assert root_pacing(100, 0.2)(step) == pytest.approx(0.2 + 0.8 * math.sqrt(x), rel=1e-15)
    assert root_pacing(100, 0.2, 3)(step) == pytest.approx(0.2 + 0.8 * math.cbrt(x), rel=1e-15)
    assert competence_pacing(100, 0.2)(step) == pytest.approx(math.sqrt(0.04 + 0.96 * x), rel=1e-15)
    assert competence_pacing(100, 0.2, 3)(step) == pytest.approx(math.cbrt(0.008 + 0.992 * x), rel=1e-15)


def test_degree_1_is_linear():
    linear = linear_pacing(77, 0.3)(STEPS)
    np.testing.assert_allclose(root_pacing(77, 0.3, 1)(STEPS), linear, rtol=1e-15)
    np.testing.assert_allclose(competence_pacing(77, 0.3, 1)(STEPS), linear, rtol=1e-15)


def test_stages_begin_at_whole_steps():
    shares = discrete_pacing(10, 3, 0.25)(np.arange(11))
    assert shares.tolist() == [0.25] * 4 + [0.5] * 3 + [0.75] * 3 + [1.0]


def test_stages_are_counted_in_integers():
    # In floats, 2**53 + 1 of twice as many steps is the first half.
    pacing = discrete_pacing(2**54 + 2, 2, 0.5)
    assert pacing(np.array([2**53, 2**53 + 1])).tolist() == [0.5, 0.75]


def test_more_stages_than_steps_reach_1():
    assert discrete_pacing(2, 5, 0.5)(np.arange(4)).tolist() == [0.5, 0.7, 1, 1]


@pytest.mark.parametrize("options", [{"num_steps": 0}, {"num_steps": 1.5}, {"num_steps": True}])
@pytest.mark.parametrize("make", [linear_pacing, root_pacing, competence_pacing])
def test_impossible_steps_are_refused_by_name(make, options):
    with pytest.raises(ValueError, match=r"num_steps \("):
        make(**options)


@pytest.mark.parametrize("initial", [0, -0.1, 1.1, math.nan, math.inf])
@pytest.mark.parametrize("make", [linear_pacing, root_pacing, competence_pacing])
def test_impossible_initial_shares_are_refused(make, initial):
    with pytest.raises(ValueError, match=f"initial must be above 0 and at most 1, not {initial}"):
        make(10, initial)


@pytest.mark.parametrize("degree", [0, -1, math.nan, math.inf])
@pytest.mark.parametrize("make", [root_pacing, competence_pacing])
def test_impossible_degrees_are_refused(make, degree):
    with pytest.raises(ValueError, match=f"degree must be finite and above 0, not {degree}"):
        make(10, degree=degree)


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
