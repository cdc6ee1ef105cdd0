"""One step of all samples, in given buckets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import assert_same_plan, in_both
from .inputs import moderate
from .test_step_groups import bucket_shapes

LENGTHS = np.random.default_rng(0).integers(1, 60, 100)
BUCKETS = [(4, 16), (2, 40), (1, 60), (2, 60)]


@st.composite
def step_arguments(draw):
    """Draw samples, or pairs, and how they come in rows."""
    packing = draw(st.sampled_from(["padded", "best_fit", "wrapped", "pairs", "packed pairs"]))
    is_pairs = "pairs" in packing
    one = st.tuples(st.integers(1, 12), st.integers(0, 12)) if is_pairs else st.integers(1, 12)
    buckets = draw(bucket_shapes(12, sides=1 + is_pairs))
    if packing in ("wrapped", "packed pairs"):
        buckets = [bucket for bucket in buckets if bucket[1:] == buckets[-1][1:]]
    is_packed = packing not in ("padded", "pairs")
    return {
        "lengths": draw(st.lists(one, min_size=1, max_size=40)),
        "buckets": buckets,
        "num_microbatches": draw(st.integers(1, 4)),
        "packing": {"pairs": "padded", "packed pairs": "best_fit"}.get(packing, packing),
        "samples_per_row": draw(st.one_of(st.none(), st.integers(1, 4))) if is_packed else None,
    }, draw(st.booleans()) and (packing in ("padded", "best_fit"))


@moderate
@given(drawn=step_arguments())
def test_both_plan_steps_alike(drawn):
    """Balanced or not."""
    arguments, is_balanced = drawn

    def plan(package):
        return package.plan_step(**arguments, cost=package.CostModel(0.0, 1.0, 0.125) if is_balanced else None)

    one, other = in_both(plan)
    assert_same_plan(one, other)
    assert one.num_steps == 1


@pytest.mark.parametrize("packing", ["padded", "best_fit"])
def test_a_step_is_that_of_a_plan(package, packing):
    """It has all samples, in their order; its rows are dealt to ranks by cost."""
    options = {"packing": packing, "num_microbatches": 4}
    step = package.plan_step(LENGTHS, BUCKETS, **options)
    plan = package.make_plan(LENGTHS, BUCKETS, order="dataset", sequences_per_step=100, **options)
    assert step.digest == plan.digest
    balanced = package.plan_step(LENGTHS, BUCKETS, cost=package.CostModel(0.0, 1.0, 0.1), **options)
    assert balanced.digest != step.digest
    assert sorted(balanced.sample_ids.tolist()) == sorted(step.sample_ids.tolist())


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([], {}, "at least one"),
        ([3, 70, 61], {}, r"id 1: 70.*id 2: 61 \(limit 60\)$"),
        ([3, 70, 61], {"packing": "best_fit"}, r"id 1: 70.*id 2: 61 \(limit 60\)$"),
        ([[3, 1], [2, 9], [2, 4]], {"buckets": [(2, 4, 4)]}, r"(every|no) bucket.*: id 1: \(2, 9\)"),
        ([3], {"buckets": None}, "buckets must be .*None"),
        ([3], {"max_tokens": 79}, "80.*120"),
        ([3], {"packing": "auto"}, "packing"),
        ([3], {"samples_per_row": 2}, "packed rows"),
        ([3], {"packing": "best_fit", "cost": lambda rows, length: rows * length}, "CostModel"),
    ],
)
def test_what_is_no_step_is_told(package, lengths, options, message):
    with pytest.raises(ValueError, match=message):
        package.plan_step(lengths, **{"buckets": BUCKETS} | options)
