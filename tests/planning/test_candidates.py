"""Whether samples are packed, and in how many shapes, of trainings of any length."""

import dataclasses

import numpy as np
import pytest

from jvarlen import CostModel, make_buckets, make_plan
from jvarlen.planning.budget import Budget
from jvarlen.planning.order import Order
from jvarlen.planning.row_lengths import choose_candidate
from jvarlen.planning.rules import PlanRules

LENGTHS = np.random.default_rng(0).lognormal(4.5, 0.8, 5000).astype(np.int64).clip(1, 1024)
BUDGET = Budget(max_tokens=4096, length_multiple=8, cost=CostModel(0.0, 3e-5, 1e-8), compile_seconds=2.0)


def choose(packing, budget=BUDGET, num_epochs=1.0):
    return choose_candidate(LENGTHS, budget, PlanRules(Order(), packing=packing), num_epochs)[0]


def test_no_other_number_of_padded_shapes_takes_fewer_seconds():
    by_epochs = [choose("padded", num_epochs=n) for n in (0.1, 2, 50)]
    assert [len(each.buckets.shapes) for each in by_epochs] == sorted({len(each.buckets.shapes) for each in by_epochs})
    chosen = by_epochs[1]
    assert chosen.method == "padded"
    for max_shapes in range(1, 17):
        buckets = make_buckets(LENGTHS, BUDGET, max_shapes=max_shapes, compile_seconds=None)
        plan = make_plan(LENGTHS, buckets, order="length")
        seconds = sum(float(BUDGET.cost(*buckets.shapes[k])) for k in plan.step_bucket)
        assert chosen.seconds <= 2 * seconds + 2.0 * len(buckets.shapes) + 1e-9


@pytest.mark.parametrize("num_epochs", [1, 3])
def test_packed_shapes_take_the_seconds_of_their_steps(num_epochs):
    one = dataclasses.replace(BUDGET, max_shapes=1)
    chosen = choose("best_fit", one, num_epochs)
    plan = make_plan(LENGTHS, chosen.buckets, packing="best_fit")
    of_pairs = BUDGET.cost.quadratic * float((LENGTHS**2).sum())
    steps_s = plan.num_steps * BUDGET.cost.linear * chosen.buckets.shapes[0].padded_tokens + of_pairs
    assert (chosen.method, chosen.seconds) == ("best_fit", pytest.approx(2.0 + num_epochs * steps_s))
