"""What holds for plans whose steps have several groups: files, reports, rates and balance."""

import dataclasses
import itertools

import numpy as np
import pytest

from jvarlen import Plan, balance_plan, lr_sequence, make_plan
from jvarlen.planning.balance import rank_costs
from jvarlen.planning.compare import compare_strategies
from jvarlen.planning.plan import check_plan
from jvarlen.testing import assert_exactly_once

LENGTHS = np.random.default_rng(0).integers(1, 60, 300)
BUCKETS = [(4, 16), (2, 40), (1, 60), (2, 60)]
PLANS = {
    packing: make_plan(LENGTHS, BUCKETS, packing=packing, num_microbatches=4, sequences_per_step=50)
    for packing in ("padded", "best_fit")
}


@pytest.mark.parametrize("packing", PLANS)
def test_a_saved_plan_is_read_again(tmp_path, packing):
    plan = PLANS[packing]
    plan.save(tmp_path / "plan.npz")
    read = Plan.load(tmp_path / "plan.npz")
    assert read.digest == plan.digest
    assert read.samples_per_row == plan.samples_per_row
    for name in ("group_bucket", "step_groups", "group_offsets", "group_tokens", "num_tokens", "num_sequences"):
        assert np.array_equal(getattr(read, name), getattr(plan, name))
    assert_exactly_once(read, len(LENGTHS))


def edited(plan, **fields):
    """A plan whose fields are those, and whose file would have its digest."""
    return dataclasses.replace(plan, **fields)


def test_groups_that_no_step_opens_are_refused():
    """Each is what an edited file with a right digest could hold."""
    small = make_plan([4, 4, 4, 2, 2], [(1, 2), (2, 4), (3, 4)], sequences_per_step=5, order="dataset")
    assert small.group_bucket.tolist() == [0, 0, 2]
    swapped = small.group_bucket[::-1].copy(), np.array([0, 3, 4, 5]), small.group_tokens[::-1].copy()
    two_rests = make_plan([4, 4, 4, 4], [(2, 4)], sequences_per_step=4, order="dataset")
    rest_first = make_plan([4, 4, 4], [(2, 4)], sequences_per_step=3, order="dataset")
    tokens = np.array([4, 8])
    broken = {
        "by bucket": edited(small, group_bucket=swapped[0], group_offsets=swapped[1], group_tokens=swapped[2]),
        "last group": edited(rest_first, group_offsets=np.array([0, 1, 3]), group_tokens=tokens),
        "shortest": edited(small, group_bucket=np.array([0, 0, 2], np.int32), buckets=[(1, 2), (2, 4), (4, 4)]),
        "most rows": edited(
            two_rests, group_bucket=np.array([0, 0], np.int32), buckets=[(2, 4), (3, 4)], samples_per_row=(1, 1)
        ),
        "step_groups": edited(small, step_groups=np.array([0, 2])),
    }
    for message, plan in broken.items():
        with pytest.raises(ValueError, match=message):
            check_plan(plan)


def test_the_report_counts_groups_and_steps():
    text = PLANS["padded"].report()
    assert "groups" in text.splitlines()[0]
    sizes = np.diff(PLANS["padded"].step_groups)
    assert f"microbatches a group: 4, groups a step: {sizes.mean():.1f}, at most {sizes.max()}, steps: 6" in text


def test_a_comparison_counts_steps():
    this, *_ = compare_strategies(PLANS["padded"], LENGTHS, 120)
    assert this.num_steps == 6
    assert this.padded_tokens == PLANS["padded"].padded_tokens_per_step.sum()


def test_rates_see_whole_steps():
    rates = lr_sequence(PLANS["padded"], 1e-3, 25)
    assert np.allclose(rates, [2e-3] * 6, rtol=1e-12)


@pytest.mark.parametrize("packing", PLANS)
@pytest.mark.parametrize("num_ranks", [2, 4, None])
def test_ranks_are_even_over_the_groups_of_a_step(packing, num_ranks):
    """Rows stay in their groups, whose microbatches stay as many; no step gets slower."""
    plan = PLANS[packing]
    cost = LENGTHS.astype(float) ** 2
    if packing == "best_fit":
        cost = np.add.reduceat(cost[plan.sample_ids], plan.row_offsets[:-1])
    balanced = balance_plan(plan, cost, num_ranks)
    for before, after in zip(groups_of(plan), groups_of(balanced), strict=True):
        assert sorted(before) == sorted(after)
    if packing == "best_fit":  # costs of rows move with them
        of_row = dict(zip(itertools.chain(*groups_of(plan)), cost, strict=True))
        moved = np.array([of_row[row] for row in itertools.chain(*groups_of(balanced))])
    else:
        moved = cost
    before, after = (rank_costs(p, c, num_ranks or 4) for p, c in ((plan, cost), (balanced, moved)))
    assert (after.max(axis=1) <= before.max(axis=1)).all()
    assert (after.max(axis=1) / after.mean(axis=1)).max() < 1.02
    check_plan(balanced)


def groups_of(plan):
    """The rows of each group, each as a tuple of its samples."""
    offsets = np.arange(plan.num_samples + 1) if plan.row_offsets is None else plan.row_offsets
    rows = [tuple(plan.sample_ids[i:j].tolist()) for i, j in itertools.pairwise(offsets.tolist())]
    return [rows[i:j] for i, j in itertools.pairwise(plan.first_rows.tolist())]
