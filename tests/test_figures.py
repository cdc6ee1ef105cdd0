"""Figures of the built-in corpus that must come out, whatever the machine."""

import numpy as np
import pytest

from jvarlen import CostModel, balance_plan, make_buckets, make_plan
from jvarlen.data.stdlib_corpus import stdlib_functions
from jvarlen.planning import packed_row_costs
from jvarlen.planning.balance import rank_costs

MAX_TOKENS = 8192


def token_seconds(length):
    """Seconds of a token of a small transformer on two cores: a constant part and one that grows with the length."""
    return 15.0e-6 + 0.219e-6 * length


def cost(rows, length):
    return rows * length * token_seconds(length)


@pytest.fixture(scope="module")
def lengths():
    lengths = np.diff(stdlib_functions(progress=False).offsets)
    return lengths[lengths <= 1024]


def efficiency(lengths, buckets):
    """Seconds of every sample at its own length over seconds of the plan."""
    plan = make_plan(lengths, buckets, order="length")
    shapes = np.array(plan.buckets.shapes)[plan.step_bucket]
    return np.sum(lengths * token_seconds(lengths)) / np.sum(cost(shapes[:, 0], shapes[:, 1]))


@pytest.mark.slow
@pytest.mark.parametrize(("max_shapes", "expected"), [(8, 0.789), (16, 0.889), (24, 0.925), (32, 0.944), (48, 0.963)])
def test_few_shapes_come_close_to_no_padding(lengths, max_shapes, expected):
    buckets = make_buckets(lengths, MAX_TOKENS, max_shapes=max_shapes, cost=cost)
    assert len(buckets.shapes) == max_shapes
    assert efficiency(lengths, buckets) == pytest.approx(expected, abs=0.004)  # the corpus is the interpreter's


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "times_the_ideal"), [("pad_to_max", 6.8), ("powers_of_two", 1.88)])
def test_what_is_common_costs_more(lengths, strategy, times_the_ideal):
    buckets = make_buckets(lengths, MAX_TOKENS, strategy=strategy)
    assert 1 / efficiency(lengths, buckets) == pytest.approx(times_the_ideal, rel=0.03)


def test_64_ranks_rarely_wait_for_the_slowest():
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1.2, 200_000), 1, 8192).astype(np.int64)
    plan = make_plan(lengths, [(4, 8192)], packing="best_fit", num_microbatches=64, order="shuffle")
    cost = CostModel(constant=0.0, linear=1.0, quadratic=1 / 4096)
    costs = packed_row_costs(plan, lengths, cost)
    efficiency = []
    for dealt in (plan, balance_plan(plan, costs, 64)):
        work = rank_costs(dealt, packed_row_costs(dealt, lengths, cost), 64)
        efficiency.append((work.mean(axis=1) / work.max(axis=1)).mean())
    assert efficiency == pytest.approx([0.687, 0.981], abs=0.002)
