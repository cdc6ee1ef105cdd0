"""What a plan is compared with: figures of the plans, and of batches counted one by one."""

import numpy as np
import pytest

from jvarlen import make_plan
from jvarlen.planning.compare import compare_strategies, comparison_table, length_histogram
from jvarlen.planning.cost_model import CostModel
from jvarlen.planning.steps import bucket_figures

LENGTHS = np.random.default_rng(0).lognormal(4, 0.8, 3000).astype(int).clip(1, 900) // 5 * 5 + 3
COST = CostModel(constant=1e-3, linear=1e-6, quadratic=1e-8)
THIS, POWERS, PACKED, DATASET = (
    "this plan",
    "lengths powers of two",
    "packed rows",
    "dataset order, padded to each batch's longest",
)
SHARED = {"max_tokens": 4096, "num_microbatches": 2, "row_multiple": 2, "length_multiple": 4}


def compared(overlong="error", packing="padded", cost=None, **budget):
    budget = SHARED | {"cost": cost, "max_shapes": 4} | budget
    plan = make_plan(LENGTHS, **budget, overlong=overlong, packing=packing)
    figures = {each.name: each for each in compare_strategies(plan, LENGTHS, **budget)}
    return plan, figures


@pytest.mark.parametrize(
    ("max_length", "overlong", "cost"),
    [(None, "error", COST), (400, "drop", None), (400, "truncate", None), (400, "truncate", COST)],
)
def test_the_figures_are_those_of_plans_of_the_same_samples(max_length, overlong, cost):
    made, figures = compared(overlong, max_length=max_length, cost=cost)
    assert list(figures) == [THIS, POWERS, PACKED, DATASET]
    options = SHARED | {"max_length": max_length, "overlong": overlong, "cost": cost}
    plans = {
        THIS: made,
        POWERS: make_plan(LENGTHS, **options, strategy="powers_of_two"),
        PACKED: make_plan(LENGTHS, **options, max_shapes=1, order="dataset", packing="best_fit"),
    }
    for name, plan in plans.items():
        each = figures[name]
        assert (each.num_shapes, each.num_steps) == (len(plan.buckets.shapes), plan.num_steps)
        assert each.padded_tokens == plan.padded_tokens_per_step.sum()
        assert each.padding == pytest.approx(plan.padding, abs=1e-12)
        spent, least = plan.padded_tokens_per_step.sum(), made.padded_tokens_per_step.sum()
        if cost is not None:
            spent, least = (bucket_figures(p, cost, LENGTHS).seconds.sum() for p in (plan, made))
            assert each.seconds == pytest.approx(spent)
        assert each.relative == pytest.approx(spent / least)


def test_steps_of_many_groups_are_compared_with_steps_of_one_shape():
    budget = SHARED | {"max_shapes": 4}
    plan = make_plan(LENGTHS, **budget, sequences_per_step=64)
    this, other = compare_strategies(plan, LENGTHS, **budget)[:2]
    of_one_shape = make_plan(LENGTHS, **budget)
    assert (other.name, other.num_steps, other.padding) == (
        "steps of one shape",
        of_one_shape.num_steps,
        of_one_shape.padding,
    )
    assert (this.num_steps, this.padding) == (plan.num_steps, plan.padding)


@pytest.mark.parametrize("cost", [None, COST])
def test_dataset_order_is_counted_batch_by_batch(cost):
    made, figures = compared(cost=cost, row_multiple=1, compile_seconds=cost and 5.0)
    shapes, batch = [], []
    for length in [-(-int(length) // 4) * 4 for length in LENGTHS]:
        if (len(batch) + 1) * max(*batch, length, 0) > 4096:
            shapes.append((len(batch), max(batch)))
            batch = []
        batch.append(length)
    shapes.append((len(batch), max(batch)))
    total, each = sum(b * t for b, t in shapes), figures[DATASET]
    assert (each.num_shapes, each.num_steps, each.padded_tokens) == (len(set(shapes)), -(-len(shapes) // 2), total)
    assert each.padding == pytest.approx(1 - LENGTHS.sum() / total)
    seconds = cost and sum(cost(b, t) for b, t in shapes) + 5.0 * each.num_shapes
    assert each.seconds == (None if cost is None else pytest.approx(seconds))
    of_compiling = 5.0 * len(made.buckets.shapes)
    base = bucket_figures(made, cost).seconds.sum() + of_compiling if cost else figures[THIS].padded_tokens
    assert each.relative == pytest.approx((seconds or total) / base)


@pytest.mark.parametrize(("packing", "overlong"), [("best_fit", "split"), ("best_fit", "drop"), ("wrapped", "error")])
def test_a_packed_plan_is_compared_with_rows_of_its_chunks(packing, overlong):
    plan, figures = compared(overlong, packing, max_length=100)
    assert list(figures) == [THIS, POWERS, DATASET]
    tokens = int(plan.num_tokens.sum())
    for each in figures.values():
        assert each.padding == pytest.approx(1 - tokens / each.padded_tokens)


@pytest.mark.parametrize("cost", [None, COST])
def test_the_table_is_aligned(cost):
    _, figures = compared(cost=cost)
    header, *rows = comparison_table(list(figures.values())).splitlines()
    assert [row.split("  ")[0] for row in rows] == list(figures)
    assert {len(row) for row in rows} == {len(header)}
    assert ("predicted s" in header) == (cost is not None)
    assert rows[0].endswith("1.00")


@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [1, 2], list(range(1, 500)), [3, 10**9]])
def test_the_histogram_counts_every_sample_once(lengths):
    *bins, figures = length_histogram(np.array(lengths)).splitlines()[1:]
    assert sum(int(line.split()[3].replace(",", "")) for line in bins) == len(lengths)
    assert f"{len(lengths):,} samples, {sum(lengths):,} tokens" in figures
