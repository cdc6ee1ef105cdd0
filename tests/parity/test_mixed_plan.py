"""Mixed steps, and which rank computes which microbatch of them."""

import hashlib
import itertools
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jvarlen
import torch_ref
from jvarlen.experimental import mixed as jvarlen_mixed

from .inputs import moderate

BUCKETS = [(4, 3), (2, 7), (1, 20)]
make_mixed_plan = {jvarlen: jvarlen_mixed.make_mixed_plan, torch_ref: torch_ref.make_mixed_plan}


def longest_first(costs, num_ranks):
    work, ranks = [0] * num_ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        ranks[i] = min(range(num_ranks), key=lambda rank: (work[rank], rank))
        work[ranks[i]] += costs[i]
    return ranks


@moderate
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=30), size=st.integers(1, 6), seed=st.integers(0, 3))
def test_steps_are_runs_of_microbatches(package, lengths, size, seed):
    """Counts, offsets and the digest, number by number."""
    plan = package.make_plan(lengths, BUCKETS, order="shuffle", seed=seed)
    mixed = make_mixed_plan[package](plan, size)
    starts = list(range(0, plan.num_steps, size))
    assert mixed.plan is plan
    assert mixed.step_offsets.dtype == np.int64
    assert mixed.step_offsets.tolist() == [*starts, plan.num_steps]
    assert mixed.num_steps == len(starts)
    assert (mixed.num_samples, mixed.num_microbatches) == (len(lengths), plan.num_steps)
    assert mixed.buckets == plan.buckets
    for name in ("num_sequences", "num_tokens"):
        assert getattr(mixed, name).dtype == np.int64
        assert getattr(mixed, name).tolist() == [getattr(plan, name)[i : i + size].sum() for i in starts]
    numbers = [len(starts), *starts, plan.num_steps]
    expected = b"jvarlen-mixed-plan-1\0" + bytes.fromhex(plan.digest) + struct.pack(f"<{len(numbers)}q", *numbers)
    assert mixed.digest == hashlib.sha256(expected).hexdigest()


@pytest.mark.parametrize("cost", [None, lambda rows, length: rows * length * (1.0 + length / 8)])
def test_every_step_is_assigned_by_itself(package, cost):
    """By positions, or by a function of the shape."""
    plan = package.make_plan(np.arange(150) % 20 + 1, BUCKETS, order="shuffle")
    mixed = make_mixed_plan[package](plan, 5)
    ranks = mixed.ranks(2, cost)
    assert ranks.dtype == np.int32
    per_shape = cost or (lambda rows, length: rows * length)
    costs = [float(per_shape(*BUCKETS[bucket])) for bucket in plan.step_bucket]
    for start, end in itertools.pairwise(mixed.step_offsets.tolist()):
        assert ranks[start:end].tolist() == longest_first(costs[start:end], 2)
    assert len(set(ranks.tolist())) == 2
    assert set(mixed.ranks(10**12).tolist()) == set(range(5))  # others have no microbatch
    with pytest.raises(ValueError, match="num_ranks"):
        mixed.ranks(0)


def test_buckets_that_no_step_uses_do_not_change_the_ranks(package):
    """However costly they are: costs are whole numbers of a unit, which follows from the largest in use."""
    plan = package.make_plan([7, 3, 3, 3, 3, 3], [(1, 3), (1, 7), (1, 2**40)], order="dataset")
    mixed = make_mixed_plan[package](plan, 6)
    costs = [(1.0 + bucket) for bucket in plan.step_bucket.tolist()]
    ranks = mixed.ranks(2, lambda rows, length: np.where(length < 9, 1.0 + (length > 3), 2.0**40))
    assert ranks.tolist() == longest_first(costs, 2)


def test_pairs_count_both_sides(package):
    """The positions of a pair's bucket are those of its source and of its target."""
    plan = package.make_plan([[2, 3], [2, 9], [1, 1]], [(2, 2, 3), (1, 4, 12)], order="dataset")
    mixed = make_mixed_plan[package](plan, 2)
    assert mixed.ranks(2).tolist() == longest_first([16, 10], 2)


def test_rates_follow_mixed_steps(package):
    """As those of a plan."""
    plan = package.make_plan([3] * 7 + [7] * 3, BUCKETS, order="length")
    mixed = make_mixed_plan[package](plan, 2)
    assert mixed.num_sequences.tolist() == [7, 3]
    np.testing.assert_allclose(package.lr_sequence(mixed, 1e-3, 1), [7e-3, 3e-3], rtol=1e-12)
    rates = package.lr_sequence([plan, mixed], lambda seen: 1.0 + seen, 1, rule=None, counted_in="sequences")
    assert rates.tolist() == [1.0, 5.0, 8.0, 10.0, 11.0, 18.0]


def test_a_plan_of_several_microbatches_cannot_be_mixed(package):
    """Its steps have one bucket each."""
    plan = package.make_plan([3] * 8, BUCKETS, order="length", num_microbatches=2)
    with pytest.raises(ValueError, match="num_microbatches=1"):
        make_mixed_plan[package](plan, 2)
    with pytest.raises(ValueError, match="num_microbatches"):
        make_mixed_plan[package](package.make_plan([3] * 8, BUCKETS, order="length"), 0)
