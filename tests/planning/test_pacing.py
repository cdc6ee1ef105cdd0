"""Pacing: what functions take."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jvarlen.planning.order import competence_pacing, linear_pacing

num_steps = st.integers(1, 10_000)
initials = st.floats(1e-6, 1.0)
pacings = st.one_of(
    st.builds(linear_pacing, num_steps, initials),
    st.builds(competence_pacing, num_steps, initials, st.floats(0.1, 10.0)),
)


@given(pacings, st.integers(0, 11_000))
def test_a_single_step_has_the_share_that_it_has_among_others(pacing, step):
    alone, among = pacing(step), pacing(np.full((2, 3), step))
    assert isinstance(alone, float)
    assert (among == alone).all()
    assert among.shape == (2, 3)


@pytest.mark.parametrize("step", [-1, 0.5, [3, -2], "first"])
def test_steps_must_be_integers_of_at_least_0(step):
    with pytest.raises(ValueError, match="steps must be integers of at least 0"):
        linear_pacing(10)(step)
