"""Shapes for given steps: near the best of all sets of shapes, within their limits, the same in every run."""

import itertools

import numpy as np
import pytest

from jvarlen import make_plan
from jvarlen._common.checks import UserError
from jvarlen.planning import group_shapes
from jvarlen.planning.buckets import Bucket, Buckets
from jvarlen.planning.budget import Budget
from jvarlen.planning.lengths import sample_sizes
from jvarlen.planning.make_buckets import make_buckets
from jvarlen.planning.step_groups import group_steps
from jvarlen.testing import assert_exactly_once


def steps_of(num_samples, per_step):
    return np.append(np.arange(0, num_samples, per_step), num_samples)


def groups_in(buckets, lengths, step_offsets):
    """int64[S, K], the groups that the rule forms."""
    longest = np.array([bucket.lengths for bucket in buckets.shapes])
    fits = (np.reshape(lengths, (len(lengths), 1, -1)) <= longest).all(axis=2)
    assert fits.any(axis=1).all()
    groups = group_steps(step_offsets, lengths, sample_sizes(lengths), fits.argmax(axis=1), buckets)
    num_groups = np.zeros((len(step_offsets) - 1, len(longest)), np.int64)
    np.add.at(num_groups, (np.repeat(np.arange(len(num_groups)), np.diff(groups.step_groups)), groups.bucket), 1)
    return num_groups


def tokens_and_launches(buckets, lengths, step_offsets, max_shapes):
    """Tokens with padding, and for a group the eighth of a step's tokens over `max_shapes`."""
    num_groups = groups_in(buckets, lengths, step_offsets)
    launch = np.sum(lengths) / len(num_groups) / 8 / max_shapes
    return num_groups.sum(axis=0) @ (buckets.num_microbatches * buckets.padded_tokens) + launch * num_groups.sum()


def all_sets(lengths, budget):
    longest = max(lengths)
    shapes = [(rows, length) for length in sorted(set(lengths)) for rows in range(1, budget.max_tokens // length + 1)]
    for number in range(1, budget.max_shapes + 1):
        for chosen in itertools.combinations(shapes, number):
            if chosen[-1][1] == longest:
                yield Buckets(chosen, budget.num_microbatches)


def choose(lengths, per_step, budget):
    return make_plan(lengths, budget, order="dataset", sequences_per_step=per_step).buckets


def lognormal(num_samples, longest=4096):
    drawn = np.random.default_rng(0).lognormal(np.log(300), 1, num_samples)
    return np.clip(np.round(drawn), 1, longest).astype(np.int64)


@pytest.mark.parametrize("seed", range(12))
def test_the_search_finds_nearly_the_cheapest_of_all_sets(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.choice(rng.choice(np.arange(2, 13), 4, replace=False), 60)
    budget = Budget(max_tokens=24, max_shapes=3, num_microbatches=int(rng.integers(1, 4)))
    offsets = steps_of(len(lengths), 15)
    least = min(tokens_and_launches(each, lengths, offsets, 3) for each in all_sets(lengths.tolist(), budget))
    assert tokens_and_launches(choose(lengths, 15, budget), lengths, offsets, 3) <= 1.02 * least


def test_a_cost_in_seconds_and_compile_seconds_decide_where_they_are_given():
    lengths, offsets = lognormal(3000, 512), steps_of(3000, 100)

    def seconds(rows, length):
        return 1e-4 * rows * length**1.5 + 3.0

    def epoch(buckets):
        rows, length = np.array(buckets.shapes).T
        return groups_in(buckets, lengths, offsets).sum(axis=0) @ (2 * seconds(rows, length))

    options = {"max_tokens": 2048, "length_multiple": 32, "num_microbatches": 2}
    budget = Budget(**options, cost=seconds, max_shapes=8)
    by_cost = choose(lengths, 100, budget)
    assert epoch(by_cost) < epoch(choose(lengths, 100, Budget(**options, max_shapes=8)))
    for compile_seconds in (100.0, 1e6):
        few = choose(lengths, 100, Budget(**options, cost=seconds, max_shapes=8, compile_seconds=compile_seconds))
        assert len(few.shapes) < len(by_cost.shapes)
        both = [epoch(each) + compile_seconds * len(each.shapes) for each in (few, by_cost)]
        assert both[0] < both[1]
    assert len(few.shapes) == 1


@pytest.mark.parametrize("seed", range(20))
def test_costs_of_sets_are_those_of_the_groups_of_the_rule(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(group_shapes, "_AT_ONCE", int(rng.choice([1, 64, 2**15])))
    drawn = rng.choice(rng.choice(np.arange(1, 40), 5, replace=False), 100)
    lengths = np.sort(np.unique(drawn))
    largest = Buckets(tuple(Bucket(int(rng.integers(1, 9)), length) for length in lengths.tolist()), 1 + seed % 3)
    budget = Budget(max_tokens=10**6, num_microbatches=largest.num_microbatches, max_shapes=5)
    offsets = steps_of(100, 30)
    held, tokens = group_shapes._count_samples(largest, drawn, offsets, np.arange(4))
    options = group_shapes._list_options(largest, 30, budget)
    search = group_shapes._Search(options, held, budget, tokens=tokens, share_of_steps=1.0, lengths_given=False)
    for number in (1, 3, 5):
        drawn_sets = [np.sort(rng.choice(len(options.rows), number, replace=False)) for _ in range(40)]
        sets = search._allowed(np.stack([*drawn_sets, np.arange(number)]))
        expected = [
            tokens_and_launches(
                Buckets(tuple(Bucket(int(options.rows[i]), int(lengths[options.length[i]])) for i in each[::-1]),
                        budget.num_microbatches),
                drawn, offsets, 5,
            )
            for each in sets
        ]  # fmt: skip
        np.testing.assert_allclose(np.exp(search._costs(sets)), expected, rtol=1e-12)


@pytest.mark.parametrize(("num_microbatches", "per_step", "row_multiple"), [(1, 64, 1), (4, 256, 2), (8, 32, 1)])
def test_shapes_stay_within_the_budget(num_microbatches, per_step, row_multiple):
    budget = Budget(
        max_tokens=8192, max_shapes=8, length_multiple=64, num_microbatches=num_microbatches, row_multiple=row_multiple
    )
    lengths = lognormal(2000)
    buckets = choose(lengths, per_step, budget)
    assert buckets.num_microbatches == num_microbatches
    assert len(buckets.shapes) <= 8
    for rows, length in buckets.shapes:
        cap = int(budget.row_caps(np.array(length)))
        assert length % 64 == 0
        assert rows <= cap
        assert rows % row_multiple == 0 or rows == cap < row_multiple
    assert buckets.shapes[-1].length == -(-lengths.max() // 64) * 64
    assert buckets == choose(lengths, per_step, budget)


def test_the_order_of_samples_in_a_step_and_of_steps_does_not_matter():
    budget, lengths = Budget(max_tokens=8192, max_shapes=8, length_multiple=64, num_microbatches=2), lognormal(1600)
    shuffled = np.random.default_rng(1).permuted(lengths.reshape(25, 64)[::-1], axis=1).reshape(-1)
    assert choose(shuffled, 64, budget) == choose(lengths, 64, budget)


def test_many_distinct_lengths_take_a_choice_of_some_of_them():
    lengths, offsets = np.random.default_rng(0).integers(1, 3000, 20_000), steps_of(20_000, 200)
    buckets = choose(lengths, 200, Budget(max_tokens=100_000, max_shapes=8))
    assert buckets.shapes[-1].length == lengths.max()
    for_all_at_once = make_buckets(lengths, 100_000, max_shapes=8)
    costs = [tokens_and_launches(each, lengths, offsets, 8) for each in (buckets, for_all_at_once)]
    assert costs[0] < 0.9 * costs[1]


def test_there_are_no_shapes_that_no_step_needs():
    assert choose(np.full(100, 7), 10, Budget(max_tokens=70)).shapes == ((10, 7),)


def test_the_lengths_of_a_strategy_stay_and_get_rows():
    lengths, given = lognormal(6400), (256, 1024, 4096)
    options = {"max_tokens": 8192, "strategy": given, "sequences_per_step": 64, "order": "dataset"}
    plan = make_plan(lengths, num_microbatches=2, max_shapes=6, **options)
    assert sorted({bucket.length for bucket in plan.buckets.shapes}) == [*given]
    assert 3 < len(plan.buckets.shapes) <= 6
    full = Buckets([(32, 256), (8, 1024), (2, 4096)], 2)
    costs = [tokens_and_launches(each, lengths, steps_of(6400, 64), 6) for each in (plan.buckets, full)]
    assert costs[0] < 0.95 * costs[1]
    assert [bucket.length for bucket in make_plan(lengths, max_shapes=2, **options).buckets.shapes] == [*given]


@pytest.mark.parametrize("method", ["best_fit", "wrapped"])
def test_packed_rows_get_fewer_rows_for_the_last_group(method):
    options = {"max_tokens": 8192, "packing": method, "tokens_per_step": 50_000}
    plan = make_plan(lognormal(5000), max_length=4096, num_microbatches=2, **options)
    assert plan.buckets.shapes == ((1, 4096), (2, 4096))
    one = make_plan(lognormal(5000), [(2, 4096)], num_microbatches=2, packing=method, tokens_per_step=50_000)
    assert plan.padding < one.padding


@pytest.mark.parametrize("options", [{}, {"packing": "best_fit"}])
def test_pairs_get_rows_for_the_steps(options):
    source = lognormal(4000, 500)
    lengths = np.stack([source, np.maximum(source // 2, 1)], axis=1)
    plan = make_plan(lengths, max_tokens=2048, max_shapes=6, length_multiple=16, sequences_per_step=40, **options)
    assert len(plan.buckets.shapes) <= 6
    assert (plan.buckets.padded_tokens <= 2048).all()
    assert_exactly_once(plan, 4000)


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_samples_that_are_dropped_or_cut_choose_no_longer_shapes(overlong):
    lengths = lognormal(4000)
    plan = make_plan(
        lengths, max_tokens=2048, max_length=1024, length_multiple=64, sequences_per_step=50, overlong=overlong
    )
    assert plan.buckets.shapes[-1].length == 1024
    assert plan.num_dropped + plan.num_truncated == (lengths > 1024).sum() > 0
    assert (plan.num_sequences[:-1] == 50).all()


def test_a_sample_that_fits_no_microbatch_is_named_by_its_id():
    with pytest.raises(UserError, match=r"samples in such: id 2: 90$"):
        make_plan([5, 7, 90, 8], max_tokens=64, sequences_per_step=2, order="length_descending")
