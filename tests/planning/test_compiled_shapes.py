"""Compiled shapes in `make_buckets`. The rule is tested in `parity/`, for both packages."""

import numpy as np
import pytest

from jvarlen import Budget, CostModel, UserError, make_buckets, make_pair_buckets, make_plan
from jvarlen.planning import choose_row_lengths

COST = CostModel(constant=1e-3, linear=1e-5, quadratic=0.0)
BUDGET = Budget(max_tokens=4096, cost=COST, compile_seconds=0.5)
LENGTHS = np.random.default_rng(0).integers(1, 300, 3000)


def test_a_histogram_reuses_what_its_samples_reuse():
    compiled = [(rows, length) for length in range(20, 330, 30) for rows in (4, 8, 12)]
    values, counts = np.unique(LENGTHS, return_counts=True)
    buckets = make_buckets(LENGTHS, BUDGET, compiled=compiled)
    assert set(buckets) & set(compiled)
    assert make_buckets(values, BUDGET, counts=counts, compiled=compiled) == buckets


def test_a_plan_in_a_shape_longer_than_all_samples_holds_every_sample():
    buckets = make_buckets(LENGTHS, BUDGET, compile_seconds=60.0, compiled=[(10, 400)])
    assert buckets == ((10, 400),)
    assert sorted(make_plan(LENGTHS, buckets, order="length").sample_ids) == list(range(len(LENGTHS)))


def test_what_is_no_shape_is_a_users_error():
    with pytest.raises(UserError, match=r"\(0, 8\)"):
        make_buckets(LENGTHS, BUDGET, compiled=[(0, 8)])
    with pytest.raises(UserError, match="not None and 'optimal'"):
        make_buckets(LENGTHS, 4096, compiled=[(1, 300)])


@pytest.mark.parametrize("function", [choose_row_lengths, make_pair_buckets, Budget])
def test_what_cannot_reuse_shapes_does_not_take_them(function):
    arguments = {"max_tokens": 4096} | ({} if function is Budget else {"lengths": [[3, 4]]})
    with pytest.raises(TypeError, match="compiled"):
        function(**arguments, compiled=[(1, 300)])
