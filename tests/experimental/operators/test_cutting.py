"""Cuts into stages: the least time of all cuts, ties decided, and what is refused."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvarlen.experimental.operators.cutting import cut_layers


def stage_costs(costs, layers, first, last):
    ends = itertools.accumulate(layers)
    sums = [sum(costs[end - num : end]) for num, end in zip(layers, ends, strict=True)]
    sums[0] += first
    sums[-1] += last
    return sums


def all_cuts(num_layers, num_stages):
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        edges = [0, *inner, num_layers]
        yield tuple(b - a for a, b in itertools.pairwise(edges))


def best_cut(costs, num_stages, first, last):
    def order(layers):
        sums = stage_costs(costs, layers, first, last)
        return max(sums), sum(each**2 for each in sums), layers

    return list(min(all_cuts(len(costs), num_stages), key=order))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_cut_is_the_best_of_all_with_ties_as_documented(data):
    costs = data.draw(
        st.lists(st.integers(0, 6), min_size=1, max_size=8)
    )  # whole numbers, of which many sums are equal
    num_stages = data.draw(st.integers(1, len(costs)))
    first, last = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
    found = cut_layers(costs, num_stages, first=first, last=last)
    assert found.dtype == np.int64
    assert found.tolist() == best_cut(costs, num_stages, first, last)


def test_rounding_decides_no_tie():
    assert cut_layers(np.full(8, 0.1), 3).tolist() == [2, 3, 3]
    assert cut_layers(np.full(10, 0.1), 4).tolist() == cut_layers(np.ones(10), 4).tolist() == [2, 2, 3, 3]
    assert cut_layers(np.full(96, 1 / 3), 8).tolist() == [12] * 8
    assert cut_layers(np.array([2, 3, 5, 5]) / 3, 2).tolist() == [2, 2]
    assert cut_layers(0.3 * np.array([3, 4, 6, 5, 4, 3]), 5).tolist() == [1, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("costs", "num_stages", "ends", "message"),
    [
        ([1, np.nan, -2, np.inf], 2, {}, r"id 1: nan, id 2: -2.0, id 3: inf"),
        ([1, 2], 3, {}, "2 layers do not make 3 stages"),
        ([], 1, {}, "0 layers do not make 1 stages"),
        ([1, 2], 0, {}, r"num_stages \(0\)"),
        ([[1, 2]], 1, {}, r"shape \(1, 2\)"),
        ([1, 2], 1, {"first": -1.0, "last": np.inf}, r"first \(-1.0\), last \(inf\)"),
    ],
)
def test_what_is_wrong_is_listed(costs, num_stages, ends, message):
    with pytest.raises(ValueError, match=message):
        cut_layers(costs, num_stages, **ends)
