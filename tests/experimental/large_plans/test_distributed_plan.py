"""Distributed plans: on any number of shards they equal the plan made in one place."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvarlen import Order, make_buckets, make_plan
from jvarlen.experimental.large_plans import count_lengths, plan_distributed
from jvarlen.testing import assert_exactly_once
from tests.support.meshes import data_mesh
from tests.support.same_batches import assert_same_batches


def assert_same(plan, whole, num_samples):
    assert_same_batches(plan, whole)
    assert_exactly_once(plan, num_samples)
    assert (plan.num_sequences == whole.num_sequences).all()
    assert plan.row_ids.shape[1] == len(plan.microbatches) == whole.num_microbatches
    assert plan.report() == whole.report()


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    rows=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    accumulation=st.integers(1, 3),
    order=st.sampled_from(["length", "length_descending", "shuffle"]),
    shuffle_steps=st.booleans(),
    longest_first=st.booleans(),
    new_shape_every=st.sampled_from([0, 1, 2, 5]),
    overlong=st.sampled_from(["drop", "truncate"]),
)
@settings(deadline=None, max_examples=8)
def test_any_buckets_and_options(
    lengths, rows, accumulation, order, shuffle_steps, longest_first, new_shape_every, overlong
):
    buckets = [(b, 3 + 9 * k) for k, b in enumerate(rows)]
    if overlong == "drop" and min(lengths) > buckets[-1][1]:
        overlong = "truncate"
    options = {
        "num_microbatches": 2 * accumulation, "seed": 1, "overlong": overlong,
        "order": Order(
            order, shuffle_steps=shuffle_steps, longest_first=longest_first, new_shape_every=new_shape_every
        ),
    }  # fmt: skip
    plan = plan_distributed(lengths, buckets, data_mesh(2), **options)
    whole = make_plan(lengths, buckets, **options)
    assert_same(plan, whole, len(lengths))
    assert (plan.num_dropped, plan.num_truncated) == (whole.num_dropped, whole.num_truncated)


def test_buckets_from_a_histogram_are_those_from_all_lengths():
    lengths = np.random.default_rng(1).zipf(1.3, 3000) % 500 + 1
    distinct, counts = count_lengths(lengths)
    assert counts.sum() == 3000
    for strategy in ("optimal", "quantile", "equal_tokens", "geometric"):
        limited = ({"max_length": 300, "overlong": rule} for rule in ("truncate", "drop"))
        for options in ({}, *limited, {"length_multiple": 8}):
            given_all = make_buckets(lengths, 2048, strategy=strategy, max_shapes=5, **options)
            assert make_buckets(distinct, 2048, counts=counts, strategy=strategy, max_shapes=5, **options) == given_all
    with pytest.raises(ValueError, match="counts must be 2 integers of at least 1"):
        make_buckets([3, 4], 20, counts=[1, 0])
    with pytest.raises(ValueError, match="counts must be 2 integers"):
        make_buckets([3, 4], 20, counts=[1.0])


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([3, 11, 5, 12], {}, r"longer than the longest bucket .*: id 1: 11, id 3: 12 \(limit 10\)"),
        ([11, 12], {"overlong": "drop"}, r"leaves no sample: id 0: 11, id 1: 12 \(limit 10\)"),
        ([3, 2**32], {"overlong": "drop"}, r"longer than a distributed plan can sort.*id 1: 4294967296"),
        ([3, 0], {}, r"lengths must be at least 1: id 1: 0"),
        ([], {}, "lengths are empty"),
        ([3], {"order": "dataset"}, r"order \('dataset'\) must be one of 'length', 'length_descending', 'shuffle'"),
        ([3], {"num_microbatches": 3}, "3 microbatches a step do not spread over 2 shards"),
        ([3], {"seed": -1}, "seed"),
        ([3], {"order": Order(block_size=2)}, "no block_size"),
        ([3], {"overlong": "cut"}, "overlong .* must be"),
    ],
)
def test_bad_input_is_refused(lengths, options, message):
    options = {"num_microbatches": 2} | options
    with pytest.raises(ValueError, match=message):
        plan_distributed(lengths, [(2, 10)], data_mesh(2), **options)
    with pytest.raises(ValueError, match="not of pairs"):
        plan_distributed([3], [(2, 10, 10)], data_mesh(2), order="length", num_microbatches=2)
