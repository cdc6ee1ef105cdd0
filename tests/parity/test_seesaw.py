"""Seesaw: the same stages, steps and rates in both packages."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jvarlen
import torch_ref
from jvarlen.training import seesaw

LENGTHS = np.random.default_rng(0).integers(1, 40, 500)


@settings(max_examples=20)
@given(
    st.integers(0, 5_000),
    st.floats(0.01, 1.0),
    st.integers(1, 30),
    st.floats(1.05, 4.0),
    st.none() | st.integers(0, 200),
)
def test_both_make_the_same_ramp(warmup, last, batch_size, factor, more):
    num_tokens = 3 * int(LENGTHS.sum())

    def schedule(seen):
        seen = float(seen)
        if seen < warmup:
            return (seen + 1) / (warmup + 1)
        return last + (1 - last) * (1 + math.cos(math.pi * (seen - warmup) / (num_tokens - warmup))) / 2

    options = {"factor": factor, "max_batch_size": None if more is None else batch_size + more}
    ours, twin = (make(schedule, num_tokens, batch_size, **options) for make in (seesaw, torch_ref.seesaw))
    starts = [start for start, _ in ours.batch_sizes.stages]
    for seen in {0, num_tokens - 1, *starts, *(start - 1 for start in starts[1:])}:
        assert ours.batch_sizes(0, seen) == twin.batch_sizes(0, seen)
        assert float(ours.schedule(seen)) == twin.schedule(seen)


def test_both_train_by_it():
    """Plans and rates of three epochs."""
    num_tokens, rates, digests = 3 * int(LENGTHS.sum()), [], []
    for package, make in ((jvarlen, seesaw), (torch_ref, torch_ref.seesaw)):
        ramp = make(lambda seen: 2.0 ** -(float(seen) / 9_000), num_tokens, 8)
        first = package.make_plan(LENGTHS, [(4, 20), (4, 40)], sequences_per_step=ramp.batch_sizes, order="shuffle")
        plans = [first.of_epoch(epoch) for epoch in range(3)]
        digests.append([plan.digest for plan in plans])
        rates.append(package.lr_sequence(plans, ramp.schedule, 8, rule="sqrt", counted_in="tokens"))
        assert plans[0].num_sequences[0] == 8
        assert plans[2].num_sequences[0] > 30
    assert digests[0] == digests[1]
    np.testing.assert_allclose(*rates, rtol=1e-12)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        (lambda n: 2 + math.cos(n / 50), {}),
        (lambda n: 1 - n / 100, {}),
        (lambda n: 0.0, {}),
        (lambda n: math.nan, {}),
        (lambda n: 1.0, {"factor": 1.0}),
        (lambda n: 1.0, {"max_batch_size": 3}),
        (lambda n: 1.0, {"batch_size": 0}),
    ],
)
def test_both_refuse_what_is_no_ramp(schedule, options):
    given = {"num_tokens": 1_000, "batch_size": 4} | options
    for make in (seesaw, torch_ref.seesaw):
        with pytest.raises(ValueError, match=r"schedule|rates|factor|batch_size"):
            make(schedule, **given)
