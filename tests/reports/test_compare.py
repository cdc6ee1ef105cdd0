"""Comparison of strategies: its figures are those of the plans, and of batches counted one by one."""

import functools
from typing import get_args

import numpy as np
import pytest

from jvarlen import make_buckets, make_plan, pack_samples
from jvarlen.planning import choose_row_lengths
from jvarlen.planning.budget import Strategy
from jvarlen.planning.cost_model import CostModel
from jvarlen.planning.steps import bucket_figures
from jvarlen.reports.compare import compare_strategies, comparison_cells, comparison_table, length_histogram

# Of some eighty distinct lengths: choosing row lengths takes time for each.
LENGTHS = np.random.default_rng(0).lognormal(4, 0.8, 3000).astype(int).clip(1, 900) // 5 * 5 + 3
COST = CostModel(constant=1e-3, linear=1e-6, quadratic=1e-8)
NO_PLAN = ["no plan, sorted", "no plan, dataset order"]


def by_name(figures):
    return {each.name: each for each in figures}


@functools.cache
def compared(**options):
    """Some tests look at the same comparison."""
    return compare_strategies(LENGTHS, 4096, **options)


@pytest.mark.parametrize(
    ("max_length", "overlong", "cost"),
    [(None, "error", COST), (400, "drop", None), (400, "truncate", None), (400, "truncate", COST)],
)
def test_the_figures_are_those_of_the_plans(max_length, overlong, cost):
    shared = {"microbatches_per_step": 2, "row_multiple": 2, "length_multiple": 4}
    choice = {"max_shapes": 6, "max_length": max_length, "overlong": overlong, "cost": cost}
    figures = by_name(compared(**shared, **choice))
    strategies = ["optimal", *(name for name in get_args(Strategy) if name != "optimal")]
    assert list(figures) == [*strategies, "packed", *NO_PLAN]
    for strategy in strategies:
        buckets = make_buckets(LENGTHS, 4096, strategy=strategy, **shared, **choice)
        check(
            figures[strategy],
            make_plan(LENGTHS, buckets, order="length", microbatches_per_step=2, overlong=overlong),
            cost,
        )
    row_lengths = choose_row_lengths(LENGTHS, 4096, **shared, **choice | ({} if cost else {"max_shapes": 1}))
    packing = pack_samples(LENGTHS, row_lengths, overlong=overlong)
    buckets = make_buckets(
        packing.num_tokens, 4096, strategy=row_lengths, microbatches_per_step=2, row_multiple=2, cost=cost
    )
    check(figures["packed"], make_plan(packing, buckets, order="length", microbatches_per_step=2), cost)


def check(figures, plan, cost):
    assert figures.num_shapes == len(plan.buckets)
    assert figures.num_steps == plan.num_steps
    assert figures.padded_tokens == plan.padded_tokens_per_step.sum()
    assert figures.padding == pytest.approx(plan.padding, abs=1e-12)
    assert (figures.num_samples, figures.num_dropped) == (plan.num_samples, plan.num_dropped)
    assert figures.num_truncated == plan.num_truncated
    if cost is None:
        assert figures.seconds is None
        per_step = plan.padded_tokens_per_step
    else:
        assert figures.seconds == pytest.approx(bucket_figures(plan, cost).seconds.sum())
        rows, length = np.array(plan.buckets)[plan.step_bucket].T
        per_step = plan.microbatches_per_step * cost(rows, length)
    assert figures.unevenness == pytest.approx(per_step.max() / per_step.mean())


def grouped(values, size):
    return [values[i : i + size] for i in range(0, len(values), size)]


@pytest.mark.parametrize("cost", [None, COST])
def test_what_there_is_without_a_plan_is_counted_batch_by_batch(cost):
    max_tokens, multiple, microbatches = 4096, 8, 4
    rounded = [-(-int(length) // multiple) * multiple for length in LENGTHS]
    in_dataset_order = grouped(rounded, max_tokens // max(rounded))
    in_sorted_order, batch = [], []
    for length in sorted(rounded):
        if (len(batch) + 1) * length > max_tokens:
            in_sorted_order.append(batch)
            batch = []
        batch = [*batch, length]
    in_sorted_order.append(batch)
    figures = by_name(
        compare_strategies(
            LENGTHS,
            max_tokens,
            length_multiple=multiple,
            microbatches_per_step=microbatches,
            cost=cost,
            compile_seconds=None if cost is None else 5.0,
        )
    )
    for name, batches in zip(NO_PLAN, (in_sorted_order, in_dataset_order), strict=True):
        shapes = [(len(batch), max(batch)) for batch in batches]
        positions = [sum(b * t for b, t in step) for step in grouped(shapes, microbatches)]
        assert figures[name].num_shapes == len(set(shapes))
        assert figures[name].num_steps == len(positions)
        assert figures[name].padded_tokens == sum(positions)
        assert figures[name].padding == pytest.approx(1 - LENGTHS.sum() / sum(positions))
        if cost is None:
            per_step = np.array(positions)
        else:
            per_step = np.array([sum(cost(b, t) for b, t in step) for step in grouped(shapes, microbatches)])
            assert figures[name].seconds == pytest.approx(per_step.sum() + 5.0 * len(set(shapes)))
        assert figures[name].unevenness == pytest.approx(per_step.max() / per_step.mean())
        assert not figures[name].is_plan


@pytest.mark.parametrize("cost", [None, COST])
def test_all_is_relative_to_the_best_plan(cost):
    figures = compared(cost=cost)
    best = figures[comparison_cells(figures)[2]]
    assert best.is_plan
    assert best.relative == 1
    for each in figures:
        spent, least = (each.padded_tokens, best.padded_tokens) if cost is None else (each.seconds, best.seconds)
        assert each.relative == pytest.approx(spent / least)
        assert not each.is_plan or each.relative >= 1
    named = by_name(figures)
    others = [named[s].relative for s in ("pad_to_max", "geometric", "quantile", "equal_tokens")]
    assert named["optimal"].relative <= min(others)


def test_seconds_of_compiling_count_where_they_are_given():
    steps_only = by_name(compared(cost=COST))
    with_compiling = by_name(compared(cost=COST, compile_seconds=2.0))
    for name in ("pad_to_max", "quantile", *NO_PLAN):
        added = with_compiling[name].seconds - steps_only[name].seconds
        assert added == pytest.approx(2.0 * steps_only[name].num_shapes)
    assert with_compiling["optimal"].num_shapes < steps_only["optimal"].num_shapes


def memory_with_a_gap(rows, length):
    """Nothing fits between 100 and 200 tokens."""
    return np.where((length >= 100) & (length <= 200), 1e12, 1.0) * rows


def test_a_strategy_that_cannot_be_made_says_why():
    figures = compare_strategies(LENGTHS, 4096, memory=memory_with_a_gap, max_bytes=1e9)
    named = by_name(figures)
    assert "max_bytes 1e+09" in named["optimal"].problem
    assert np.isnan(named["optimal"].relative)
    assert not named["pad_to_max"].problem
    lines = comparison_table(figures).splitlines()
    (line,) = [line for line in lines if line.startswith("optimal")]
    assert "not possible: max_bytes 1e+09" in line
    assert len(line) < 150
    assert figures[comparison_cells(figures)[2]].problem == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": 600}, "max_tokens 600 leaves no row"),
        ({"max_length": 500}, "samples longer than the longest bucket"),
        ({"max_length": 0}, "max_length"),
        ({"max_shapes": 0}, "max_shapes"),
        ({"overlong": "cut"}, "overlong"),
        ({"compile_seconds": 3.0}, "needs a cost"),
        ({"max_cost": 3.0}, "max_cost"),
        ({"lengths": [3, 0]}, "id 1: 0"),
        ({"lengths": [50, 3, 9], "max_tokens": 8, "max_length": 10, "overlong": "drop"}, "samples in such: id 2: 9$"),
        ({"lengths": [7, 8], "max_length": 6, "overlong": "drop"}, "leaves no sample: id 0: 7, id 1: 8"),
    ],
)
def test_what_nothing_can_be_made_of_is_an_error(options, said):
    with pytest.raises(ValueError, match=said):
        compare_strategies(**{"lengths": LENGTHS, "max_tokens": 4096} | options)


@pytest.mark.parametrize("cost", [None, COST])
def test_the_table_is_aligned_and_marks_the_best(cost):
    shared = {"microbatches_per_step": 2, "row_multiple": 2, "length_multiple": 4}
    figures = compared(**shared, max_shapes=6, max_length=400, overlong="truncate", cost=cost)
    header, *rows, samples, explained = comparison_table(figures).splitlines()
    assert [row.split("  ")[0] for row in rows] == [each.name for each in figures]
    (best,) = [row for row in rows if row.endswith(" ← best")]
    assert best.startswith(figures[comparison_cells(figures)[2]].name)
    assert {len(row.removesuffix("  ← best")) for row in rows} == {len(header)}
    assert samples == f"3,000 samples; {int((LENGTHS > 400).sum()):,} cut, 0 dropped"
    assert ("seconds" in explained) == (cost is not None) == ("predicted s" in header)


def test_a_table_needs_a_plan():
    without = [each for each in compared(cost=None) if not each.is_plan]
    with pytest.raises(ValueError, match="none of the figures"):
        comparison_table(without)


@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [1, 2], list(range(1, 500)), [3, 10**9]])
def test_the_histogram_counts_every_sample_once(lengths):
    *bins, figures = length_histogram(np.array(lengths)).splitlines()[1:]
    assert sum(int(line.split()[3].replace(",", "")) for line in bins) == len(lengths)
    assert f"{len(lengths):,} samples, {sum(lengths):,} tokens" in figures
