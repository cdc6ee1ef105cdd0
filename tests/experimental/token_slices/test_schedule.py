"""The schedule of slices: every action once, after what it needs; its bubble, and costs by slice."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvarlen import UserError
from jvarlen.experimental.token_slices import token_slices


@pytest.mark.parametrize(("s", "m", "num_slices"), [(1, 1, 1), (2, 3, 2), (3, 2, 4)])
def test_every_slice_is_after_what_it_needs(s, m, num_slices):
    schedule = token_slices(s, m, num_slices)
    costs = {kind: np.random.default_rng(m).integers(1, 9, (s, num_slices)) for kind in "FB"}
    for mode in ("synchronous", "mpmd"):
        timeline = schedule.simulate(costs, mode)
        starts, ends = np.zeros((2, s, m, num_slices)), np.zeros((2, s, m, num_slices))
        kind, number, _ = np.moveaxis(schedule.actions, -1, 0)
        at = kind, np.arange(s)[:, None], number // num_slices, number % num_slices
        starts[at], ends[at] = timeline.starts, timeline.ends
        assert kind.size == starts.size == np.count_nonzero(ends)  # each is there once
        assert (ends[0, :-1] <= starts[0, 1:]).all()  # the stage before
        assert (ends[0, ..., :-1] <= starts[0, ..., 1:]).all()  # earlier slices
        assert (ends[0] <= starts[1]).all()
        assert (ends[1, 1:] <= starts[1, :-1]).all()
        assert (ends[1, ..., 1:] <= starts[1, ..., :-1]).all()
        assert ((ends - starts)[0] == costs["F"][:, None]).all()
        assert ((ends - starts)[1] == costs["B"][:, None]).all()


@pytest.mark.parametrize(("s", "m"), [(1, 1), (2, 3), (4, 8), (5, 1)])
def test_the_bubble_and_activations_are_those_of_the_paper(s, m):
    for mode in ("synchronous", "mpmd"):
        timeline = token_slices(s, m, 3).simulate({"F": 1, "B": 2}, mode)
        assert timeline.bubble == (s - 1) / (3 * m + s - 1)
        assert timeline.peak_activations.tolist() == [3 * m] * s


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(0, 3))
def test_slices_take_all_of_them_and_the_slowest_on_the_other_stages(s, m, costs, factor):
    cost = np.array([costs])
    timeline = token_slices(s, m, len(costs)).simulate({"F": cost, "B": factor * cost}, "mpmd")
    assert timeline.makespan == (1 + factor) * (m * cost.sum() + (s - 1) * cost.max())


def test_bad_input_is_named():
    with pytest.raises(UserError, match=r"at least 1 .*: num_slices \(0\)"):
        token_slices(2, 2, 0)
    with pytest.raises(ValueError, match=r"\(2,2\)"):
        token_slices(2, 2, 2).simulate({"F": [[1, 2, 3]], "B": 1})
