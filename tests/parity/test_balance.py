"""Plans whose rows are dealt to ranks by cost."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jvarlen
import jvarlen.planning.balance
import torch_ref
import torch_ref.planning.balance

from . import find
from .inputs import moderate

BOTH = (jvarlen, torch_ref)
BUCKETS = [(1, 4), (3, 9), (2, 20)]
LONGEST = 20


@st.composite
def inputs(draw):
    """Draw lengths, what is planned of them, costs with and without ties, and ranks."""
    num_microbatches = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    kind = draw(st.sampled_from(["samples", "rows", "chunks", "pairs"]))
    size = draw(st.integers(1, 60))
    seed = draw(st.integers(0, 2**32))
    random = np.random.default_rng(seed)
    lengths = random.integers(1, (45 if kind == "chunks" else LONGEST) + 1, (size, 2) if kind == "pairs" else size)
    costs = [
        random.integers(0, 4, size).astype(float),
        random.lognormal(0, 1.5, size),
        np.where(random.random(size) < 0.1, 1e9, random.random(size)),
    ]
    return {
        "kind": kind,
        "lengths": lengths,
        "order": draw(st.sampled_from(["dataset", "length", "shuffle"])),
        "num_microbatches": num_microbatches,
        "num_ranks": draw(st.sampled_from([None, *(n for n in (1, 2, 3, 4, 6, 8, 12) if num_microbatches % n == 0)])),
        "costs": costs[draw(st.integers(0, 2))],
        "tokens_per_step": draw(st.sampled_from([None, 45, 150])),
    }


def plan_of(package, drawn):
    """Return the plan, and the costs of its samples or rows."""
    buckets = [(1, 9, 9), (3, 20, 20)] if drawn["kind"] == "pairs" else BUCKETS
    options = {name: drawn[name] for name in ("num_microbatches", "order", "tokens_per_step")}
    if drawn["kind"] in ("rows", "chunks"):
        options |= {"packing": "best_fit", "overlong": "split" if drawn["kind"] == "chunks" else "error"}
    plan = package.make_plan(drawn["lengths"], buckets, **options)
    return plan, np.resize(drawn["costs"], plan.num_rows)


def work_of(package, plan, costs, num_ranks):
    module = {jvarlen: jvarlen.planning.balance, torch_ref: torch_ref.planning.balance}[package]
    return module.rank_costs(plan, costs, num_ranks)


def waited(package, plan, costs, num_ranks=None):
    """Return what the slowest rank of each step has to do."""
    return work_of(package, plan, costs, num_ranks or plan.num_microbatches).max(axis=1)


def rows_of(plan):
    """Return the samples of each row, with where they begin, in the order of the plan."""
    starts = np.zeros(plan.num_samples, int) if plan.chunk_starts is None else plan.chunk_starts
    offsets = np.arange(plan.num_samples + 1) if plan.row_offsets is None else plan.row_offsets
    samples = list(zip(plan.sample_ids.tolist(), starts.tolist(), strict=True))
    return [tuple(samples[i:j]) for i, j in pairwise(offsets)]


def moved_costs(plan, balanced, costs):
    """Return the costs of the same rows in their new order; those by sample stay."""
    if plan.row_offsets is None:
        return costs
    by_row = dict(zip(rows_of(plan), costs, strict=True))
    return np.array([by_row[row] for row in rows_of(balanced)])


@moderate
@given(drawn=inputs())
def test_both_deal_alike(drawn):
    """Integer for integer, whatever is planned."""
    results = []
    for package in BOTH:
        plan, costs = plan_of(package, drawn)
        balanced = package.balance_plan(plan, costs, drawn["num_ranks"])
        work = work_of(package, balanced, moved_costs(plan, balanced, costs), drawn["num_microbatches"])
        results.append((balanced, work))
    (one, work), (other, work_of_other) = results
    assert one.digest == other.digest
    assert one.num_tokens.tolist() == other.num_tokens.tolist()
    np.testing.assert_allclose(work, work_of_other, rtol=1e-12)


@moderate
@given(drawn=inputs())
def test_a_balanced_plan_has_the_same_steps_and_rows(package, drawn):
    """Every row once, in the same group; the same number of rows in each group of each rank."""
    plan, costs = plan_of(package, drawn)
    balanced = package.balance_plan(plan, costs, drawn["num_ranks"])
    assert Counter(rows_of(balanced)) == Counter(rows_of(plan))
    assert (balanced.buckets, balanced.num_microbatches) == (plan.buckets, plan.num_microbatches)
    assert balanced.group_bucket.tolist() == plan.group_bucket.tolist()
    assert balanced.step_groups.tolist() == plan.step_groups.tolist()
    assert balanced.step_offsets.dtype == balanced.sample_ids.dtype == balanced.num_tokens.dtype == np.int64
    for group in range(plan.num_groups):
        old, new = plan.rows(group), balanced.rows(group)
        is_row = [(rows if rows.ndim == 2 else rows[..., 0]) >= 0 for rows in (old, new)]
        assert is_row[0].tolist() == is_row[1].tolist()
        assert set(old.ravel().tolist()) == set(new.ravel().tolist())
    assert balanced.num_tokens.tolist() == plan.num_tokens.tolist()


def rows_in(plan, step):
    begin, end = plan.step_offsets[step : step + 2]
    offsets = np.arange(plan.num_samples + 1) if plan.row_offsets is None else plan.row_offsets
    first, last = np.searchsorted(offsets, [begin, end])
    return rows_of(plan)[first:last]


@moderate
@given(drawn=inputs())
def test_dealing_never_costs_time(package, drawn):
    """No slowest rank of a step gets slower."""
    plan, costs = plan_of(package, drawn)
    balanced = package.balance_plan(plan, costs, drawn["num_ranks"])
    before = waited(package, plan, costs, drawn["num_ranks"])
    after = waited(package, balanced, moved_costs(plan, balanced, costs), drawn["num_ranks"])
    room = 1 + 60 * 2.0**-31 * np.max(costs) / np.maximum(before, 1e-300)  # costs are rounded to 2**-32 of the largest
    assert (after <= before * room).all()


@pytest.mark.parametrize(("size", "rows", "above_own"), [(8, 2, 1.1), (12, 1, 1.25)])
def test_without_a_number_of_ranks_any_number_waits_little(package, size, rows, above_own):
    """At most a little more than in plans for each number of ranks, far less than undealt."""
    costs = np.random.default_rng(0).lognormal(0, 1, 40 * size * rows)
    plan = package.make_plan([4] * len(costs), [(rows, 4)], num_microbatches=size, order="shuffle")
    balanced = package.balance_plan(plan, costs)
    for ranks in (size // each for each in (2, 4, 8) if size % each == 0 and each < size):
        own = package.balance_plan(plan, costs, ranks)
        before, found, least = (waited(package, each, costs, ranks).sum() for each in (plan, balanced, own))
        assert found <= above_own * least
        assert found < before


def test_packed_rows_cost_their_blocks(package):
    """Linear · T + quadratic · Σ l², with the bucket's T, and chunks as long as they are; the constant is no row's."""
    split = {"packing": "best_fit", "overlong": "split", "order": "length"}
    plan = package.make_plan([25, 6, 3, 2], [(1, 5), (2, 10)], **split)
    costs = find(package, "packed_row_costs")(plan, [25, 6, 3, 2], package.CostModel(7.0, 3.0, 0.125))
    expected = []
    for step in range(plan.num_steps):
        length = plan.buckets.shapes[plan.step_bucket[step]][1]
        for row in rows_in(plan, step):
            chunks = [min([25, 6, 3, 2][number] - start, 10) for number, start in row]
            expected.append(3 * length + sum(chunk**2 for chunk in chunks) / 8)
    assert costs.tolist() == expected
    assert len(set(expected)) > 2


def test_what_cannot_be_balanced_is_named(package):
    """Costs by id, steps by number, and what is missing."""
    plan = package.make_plan([4, 4, 3], [(2, 4)], order="length", num_microbatches=2)
    with pytest.raises(ValueError, match=r"id 1: nan, id 2: -1\.0"):
        package.balance_plan(plan, [1.0, float("nan"), -1.0], 2)
    with pytest.raises(ValueError, match="id 2"):
        package.balance_plan(plan, [1.0, 2.0], 2)
    for num_ranks in (0, 3, 4):  # more ranks than microbatches, too
        with pytest.raises(ValueError, match=r"num_ranks|ranks do not divide"):
            package.balance_plan(plan, [1.0] * 3, num_ranks)


def test_what_has_no_packed_rows_is_named(package):
    """Rows of one feature only; one cost a row."""
    cost = package.CostModel(0.0, 1.0, 0.5)
    with pytest.raises(ValueError, match="packed rows"):
        find(package, "packed_row_costs")(package.make_plan([4], [(2, 4)], order="length"), [4], cost)
    joint = package.make_plan([[2, 3], [1, 1]], [(1, 4, 4)], packing="best_fit", order="length")
    with pytest.raises(ValueError, match="one feature"):
        find(package, "packed_row_costs")(joint, [[2, 3], [1, 1]], cost)
    plan = package.make_plan([2, 2, 3], [(2, 4)], packing="best_fit", order="length")
    with pytest.raises(ValueError, match="CostModel"):
        find(package, "packed_row_costs")(plan, [2, 2, 3], lambda rows, length: rows * length)
    for wrong, match in (([4, 3, 3], r"step 0.*\b(7|10)\b.*\b(7|10)\b"), ([[4, 4]] * 3, "1-D")):
        with pytest.raises(ValueError, match=match):
            find(package, "packed_row_costs")(plan, wrong, cost)
    with pytest.raises(ValueError, match=r"2 rows|2 values"):
        package.balance_plan(plan, [1.0] * 3, 1)
