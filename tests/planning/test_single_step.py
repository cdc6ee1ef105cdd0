"""One step of all samples, and plans of other epochs in the shapes of a plan."""

import pickle
import subprocess
import sys

import numpy as np
import pytest

from jvarlen import CostModel, Order, Plan, balance_plan, make_plan, plan_step
from jvarlen.planning import Buckets, packed_row_costs
from jvarlen.planning.balance import rank_costs

LENGTHS = np.random.default_rng(0).integers(1, 60, 100)
BUCKETS = [(4, 16), (2, 40), (1, 60), (2, 60)]


@pytest.mark.parametrize("packing", ["padded", "best_fit"])
def test_a_step_has_all_samples_in_the_groups_of_a_plan(packing):
    step = plan_step(LENGTHS, BUCKETS, packing=packing, num_microbatches=2)
    plan = make_plan(
        LENGTHS, BUCKETS, packing=packing, order="dataset", num_microbatches=2, sequences_per_step=len(LENGTHS)
    )
    assert step.num_steps == 1
    assert step.num_sequences.tolist() == [100]
    assert step.digest == plan.digest
    assert plan_step(LENGTHS, Buckets(BUCKETS, 2), packing=packing).digest == plan.digest


def test_a_step_wraps_and_takes_pairs():
    wrapped = plan_step([5, 9, 2], [(1, 8)], packing="wrapped")
    assert [wrapped.rows(group).tolist() for group in wrapped.groups(0)] == [[[[0, 1]]], [[[1, 2]]]]
    pairs = plan_step([[3, 9], [8, 2], [2, 2]], [(2, 4, 9), (2, 9, 4)])
    # (2, 2) is free to go where (8, 2) is.
    assert [pairs.rows(group).tolist() for group in pairs.groups(0)] == [[[0, -1]], [[1, 2]]]


@pytest.mark.parametrize("packing", ["padded", "best_fit"])
def test_a_step_is_balanced_by_tokens_and_pairs_of_tokens(packing):
    cost = CostModel(constant=0.0, linear=1.0, quadratic=0.1)
    plain, balanced = (
        plan_step(LENGTHS, BUCKETS, packing=packing, num_microbatches=4, samples_per_row=most, cost=each)
        for each in (None, cost)
        for most in [None if packing == "padded" else 8]
    )
    of_rows = [LENGTHS + 0.1 * LENGTHS**2] * 2
    if packing == "best_fit":
        of_rows = [packed_row_costs(plan, LENGTHS, cost) for plan in (plain, balanced)]
    before, after = (rank_costs(plan, each, 4) for plan, each in zip((plain, balanced), of_rows, strict=True))
    assert after.max() < before.max()
    assert after.max() < 1.1 * after.mean()


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([], {}, "at least one sample"),
        ([3, 70, 61], {}, r"id 1: 70, id 2: 61 \(limit 60\)"),
        ([3], {"max_tokens": 79}, r"1×60|2×40: 80, 2×60: 120"),
        ([3], {"packing": "auto"}, "packing"),
        ([3], {"samples_per_row": 2}, "packed rows"),
        ([3], {"packing": "best_fit", "cost": lambda rows, length: rows * length}, "CostModel"),
    ],
)
def test_what_is_no_step_is_told(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        plan_step(lengths, BUCKETS, **options)


def test_a_step_is_planned_without_jax():
    program = "import sys, jvarlen; jvarlen.plan_step([3, 1], [(2, 4)]); print('jax' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "False"


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 120, "max_shapes": 3},
        {"max_tokens": 120, "packing": "best_fit", "samples_per_row": 5},
        {"max_tokens": 120, "packing": "wrapped"},
        {"buckets": BUCKETS, "sequences_per_step": lambda step, tokens_seen: 7 + step},
        {"buckets": BUCKETS, "tokens_per_step": 400, "packing": "best_fit", "num_microbatches": 2},
        {"max_tokens": 120, "order": Order("length", block_size=8), "overlong": "drop", "max_length": 50},
    ],
    ids=["padded", "best fit", "wrapped", "ramp", "packed steps", "dropped"],
)
def test_another_epoch_has_the_same_shapes(options):
    """It is the plan of the same arguments in this plan's buckets."""
    plan = make_plan(LENGTHS, **options, seed=3)
    for epoch in (0, 2):
        other = plan.of_epoch(epoch)
        given = {name: value for name, value in options.items() if name in ("buckets", "max_tokens", "max_shapes")}
        kept = {name: value for name, value in options.items() if name not in (*given, "max_length")}
        expected = make_plan(LENGTHS, **kept | {"buckets": plan.buckets}, seed=3, epoch=epoch)
        assert other.digest == expected.digest
        assert other.buckets == plan.buckets
        assert other.samples_per_row == plan.samples_per_row
        assert (other.num_dropped, other.overlong) == (plan.num_dropped, plan.overlong)
    assert plan.of_epoch(2).of_epoch(0).digest == plan.digest
    assert plan.of_epoch(0).sample_ids is plan.sample_ids, "its own epoch is not planned again"
    assert plan.of_epoch(0).of_epoch(2).digest == other.digest


@pytest.mark.parametrize("packing", ["padded", "best_fit"])
def test_shapes_that_are_chosen_for_steps_are_those_of_every_epoch(packing):
    options = {"max_tokens": 120, "max_shapes": 3, "sequences_per_step": 16, "packing": packing}
    plans = [make_plan(LENGTHS, **options, epoch=epoch) for epoch in range(4)]
    assert {plan.buckets for plan in plans} == {plans[0].buckets}
    assert plans[0].of_epoch(3).digest == plans[3].digest


def test_another_epoch_is_balanced_as_this_one():
    plan = balance_plan(make_plan(LENGTHS, BUCKETS[:-1], num_microbatches=4), LENGTHS, 2)
    expected = balance_plan(make_plan(LENGTHS, BUCKETS[:-1], num_microbatches=4, epoch=1), LENGTHS, 2)
    assert plan.of_epoch(1).digest == expected.digest


def test_a_plan_without_lengths_has_no_other_epoch(tmp_path):
    """One from a file, one of a single step, one balanced by costs of its rows, and one of another process."""
    plan = make_plan(LENGTHS, BUCKETS[:-1], packing="best_fit")
    plan.save(tmp_path / "plan.npz")
    without = [
        Plan.load(tmp_path / "plan.npz"),
        plan_step(LENGTHS, BUCKETS),
        balance_plan(plan, np.ones(plan.num_rows), 1),
        pickle.loads(pickle.dumps(plan)),
    ]
    for each in without:
        with pytest.raises(ValueError, match="does not know the lengths"):
            each.of_epoch(1)
