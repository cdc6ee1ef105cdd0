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

from . import find
from .inputs import moderate

BUCKETS = [(4, 3), (2, 7), (1, 20)]
BOTH = (jvarlen, torch_ref)
make_mixed_plan = {jvarlen: jvarlen_mixed.make_mixed_plan, torch_ref: torch_ref.make_mixed_plan}

whole_costs = st.lists(st.integers(0, 30), min_size=1, max_size=7)
real_costs = st.lists(st.floats(0, 1e300), min_size=1, max_size=7)


def longest_first(costs, num_ranks):
    work, ranks = [0] * num_ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        ranks[i] = min(range(num_ranks), key=lambda rank: (work[rank], rank))
        work[ranks[i]] += costs[i]
    return ranks


@moderate
@given(costs=whole_costs, num_ranks=st.integers(1, 9))
def test_the_costliest_microbatch_goes_first_to_the_rank_with_the_least(package, costs, num_ranks):
    assigned = find(package, "assign_microbatches")(costs, num_ranks)
    assert assigned.dtype == np.int64
    assert assigned.tolist() == longest_first(costs, num_ranks)


@moderate
@given(costs=real_costs, num_ranks=st.integers(1, 9))
def test_both_assign_alike(costs, num_ranks):
    """Also where costs are hardly different, or of very different sizes."""
    for scaled in (costs, [1 + cost / 2e300 for cost in costs], np.sqrt(costs)):
        one, other = (find(package, "assign_microbatches")(scaled, num_ranks).tolist() for package in BOTH)
        assert one == other


def test_ranks_may_stay_without_a_microbatch(package):
    """More ranks than microbatches are allowed; so are costs of 0."""
    assert find(package, "assign_microbatches")([3, 5], 4).tolist() == [1, 0]
    assert find(package, "assign_microbatches")([0, 0.0], 10**12).tolist() == [0, 0]


def test_what_cannot_be_assigned_is_named(package):
    """Costs by index."""
    with pytest.raises(ValueError, match=r"id 1: nan, id 2: -1\.0, id 4: inf"):
        find(package, "assign_microbatches")([1, float("nan"), -1, 2, float("inf")], 2)
    with pytest.raises(ValueError, match="num_ranks"):
        find(package, "assign_microbatches")([1], 0)
    for wrong in ([], [[1, 2]], ["a"]):
        with pytest.raises(ValueError, match=r"costs must be (a )?1-D"):
            find(package, "assign_microbatches")(wrong, 1)


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
    told = b"jvarlen-mixed-plan-1\0" + bytes.fromhex(plan.digest) + struct.pack(f"<{len(numbers)}q", *numbers)
    assert mixed.digest == hashlib.sha256(told).hexdigest()


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
        assert ranks[start:end].tolist() == find(package, "assign_microbatches")(costs[start:end], 2).tolist()
    assert len(set(ranks.tolist())) == 2


def test_pairs_count_both_sides(package):
    """The positions of a pair's bucket are those of its source and of its target."""
    plan = package.make_plan([[2, 3], [2, 9], [1, 1]], [(2, 2, 3), (1, 4, 12)], order="dataset")
    mixed = make_mixed_plan[package](plan, 2)
    assert mixed.ranks(2).tolist() == find(package, "assign_microbatches")([16, 10], 2).tolist()


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
    plan = package.make_plan([3] * 8, BUCKETS, order="length", microbatches_per_step=2)
    with pytest.raises(ValueError, match="microbatches_per_step=1"):
        make_mixed_plan[package](plan, 2)
    with pytest.raises(ValueError, match="microbatches_per_step"):
        make_mixed_plan[package](package.make_plan([3] * 8, BUCKETS, order="length"), 0)
