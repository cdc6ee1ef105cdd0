"""Other epochs of a plan, in its shapes."""

import pickle

import numpy as np
import pytest

from . import assert_same_plan
from .inputs import Table

LENGTHS = np.random.default_rng(0).integers(1, 30, 200)
PAIRS = np.stack([LENGTHS, LENGTHS[::-1]], axis=1)
GIVEN = {"buckets": [(4, 8), (2, 16), (1, 32)]}


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_tokens": 120, "max_shapes": 3, "num_microbatches": 2},
        {"max_tokens": 120, "packing": "best_fit"},
        {"max_tokens": 120, "packing": "best_fit", "row_lengths": [32, 64], "samples_per_row": 5},
        {"max_tokens": 120, "packing": "wrapped", "max_length": 40},
        {"max_tokens": 120, "packing": "auto", "cost": lambda rows, length: rows * length, "compile_seconds": 10.0},
        {"lengths": PAIRS, "max_tokens": 240},
        {"order": "length", "pacing": Table((0.2, 0.5, 1.0)), **GIVEN},
        {"overlong": "drop", "buckets": [(4, 8), (2, 16)], "seed": 3},
        {"sequences_per_step": lambda step, tokens_seen: 7 + step + tokens_seen % 3, **GIVEN},
        {"tokens_per_step": 100, "packing": "best_fit", "samples_per_row": [2, 3, 4], **GIVEN},
    ],
    ids=lambda arguments: ", ".join(arguments),
)
def test_another_epoch_is_the_plan_of_the_same_arguments(package, arguments):
    """In the buckets that the first was made with, forwards and back."""
    arguments = {"lengths": LENGTHS} | arguments
    plan = package.make_plan(**arguments)
    chosen = {"cost", "compile_seconds", "max_tokens", "max_shapes", "max_length", "row_lengths", "num_microbatches"}
    given = {name: value for name, value in arguments.items() if name not in chosen} | {"buckets": plan.buckets}
    if arguments.get("packing") == "auto":
        given["packing"] = "padded" if plan.row_offsets is None else "best_fit"
    for epoch in (2, 0):
        other = plan.of_epoch(2).of_epoch(epoch)
        assert_same_plan(other, package.make_plan(**given | {"epoch": epoch}))
        assert other.buckets == plan.buckets
        assert other.samples_per_row == plan.samples_per_row
        assert (other.digest == plan.digest) == (epoch == 0)


def test_a_plan_without_its_lengths_makes_no_other_epoch(package, tmp_path):
    """From a file or another process, of a single step, or balanced by the costs of its rows."""
    plan, packed = package.make_plan(LENGTHS, **GIVEN), package.make_plan(LENGTHS, packing="best_fit", **GIVEN)
    plan.save(tmp_path / "plan.npz")
    without = [package.Plan.load(tmp_path / "plan.npz"), pickle.loads(pickle.dumps(plan))]
    without += [package.balance_plan(packed, np.ones(packed.num_rows)), package.plan_step(LENGTHS, **GIVEN)]
    for other in without:
        with pytest.raises(ValueError, match=r"does not know the lengths.*make_plan"):
            other.of_epoch(1)
    with pytest.raises(ValueError, match="epoch"):
        plan.of_epoch(-1)


def test_another_epoch_of_a_balanced_plan_is_balanced(package):
    arguments = GIVEN | {"num_microbatches": 4, "sequences_per_step": 50}
    plan = package.balance_plan(package.make_plan(LENGTHS, **arguments), LENGTHS, 2)
    expected = package.balance_plan(package.make_plan(LENGTHS, **arguments, epoch=3), LENGTHS, 2)
    assert_same_plan(plan.of_epoch(3), expected)
