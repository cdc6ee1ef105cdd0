"""Slices of tokens: as good as the best of all cuts, and exactly as fast as they are said to be."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvarlen import UserError
from jvarlen.experimental.token_slices import choose_slices, slice_seconds, token_slices
from jvarlen.experimental.token_slices.cuts import slices_of


def causal_cost(num_tokens, num_earlier):
    return 1.0 + num_tokens * (1 + (num_earlier + num_tokens / 2) / 4)


def all_cuts(num_units):
    for inner in itertools.product([False, True], repeat=num_units - 1):
        edges = [0, *(i + 1 for i, is_cut in enumerate(inner) if is_cut), num_units]
        yield np.diff(edges)


def makespan(slices, length, num_stages, num_microbatches, cost):
    """As simulated, forward and backward alike."""
    costs = slice_seconds(slices, length, cost)[None]
    schedule = token_slices(num_stages, num_microbatches, len(slices))
    return schedule.simulate({"F": costs, "B": costs}, "mpmd").makespan / 2


@pytest.mark.parametrize("num_units", [1, 2, 7])
@pytest.mark.parametrize(("s", "m"), [(1, 1), (4, 1), (3, 2), (12, 1)])
def test_no_other_cut_is_faster_in_the_simulation(num_units, s, m):
    slices = choose_slices(3 * num_units, s, m, causal_cost, unit=3)
    least = min(makespan(3 * cut, 3 * num_units, s, m, causal_cost) for cut in all_cuts(num_units))
    assert makespan(slices, 3 * num_units, s, m, causal_cost) == pytest.approx(least, rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 4), st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_the_sum_is_the_smallest_of_all_cuts_for_any_costs(num_units, s, m, largest, seed):
    """Costs without any order, with many ties."""
    table = np.random.default_rng(seed).integers(0, largest, (num_units + 1, num_units + 1))

    def cost(num_tokens, num_earlier):
        return table[num_tokens, num_earlier]

    def seconds(cut):
        costs = table[cut, np.cumsum(cut) - cut]
        return m * costs.sum() + (s - 1) * costs.max(), costs.sum()

    slices = choose_slices(num_units, s, m, cost)
    assert slices.sum() == num_units
    assert slices.min() >= 1
    assert seconds(slices) == min(seconds(cut) for cut in all_cuts(num_units))


@given(st.integers(1, 60), st.integers(1, 60))
def test_a_number_of_slices_is_as_even_as_it_can_be(length, num_slices):
    if num_slices > length:
        with pytest.raises(UserError, match=f"^rows of {length} tokens do not make {num_slices} slices"):
            slices_of(num_slices, length)
        return
    slices = slices_of(num_slices, length)
    assert (len(slices), sum(slices)) == (num_slices, length)
    assert max(slices) - min(slices) <= 1


def test_bad_input_is_named():
    with pytest.raises(UserError, match=r"at least 1 .*: length \(0\), unit \(-1\)"):
        choose_slices(0, 1, 1, causal_cost, unit=-1)
    with pytest.raises(UserError, match=r"length \(10\) must be a multiple of unit \(4\)"):
        choose_slices(10, 1, 1, causal_cost, unit=4)
    with pytest.raises(UserError, match=r"finite and at least 0: cost\(1, 0\) = -1.0, cost\(2, 0\) = -2.0"):
        choose_slices(2, 1, 1, lambda num_tokens, num_earlier: -num_tokens)
    with pytest.raises(UserError, match=r"slices 4, 4 sum to 8 tokens; length is 10"):
        slice_seconds([4, 4], 10, causal_cost)
    with pytest.raises(UserError, match=r"at least 1 .*: slices\[1\] \(0\)"):
        slice_seconds([10, 0], 10, causal_cost)
