"""Figures that must come out: padding in batches and with few shapes, and a small cluster's share of a small epoch."""

from functools import cache

import numpy as np
import pytest

BUDGET = 500_000


@cache
def uniform_lengths():
    """Return 200,000 uniform lengths, 421,681,184 tokens."""
    lengths = np.random.RandomState(2023).randint(128, 4096, 200_000)
    assert lengths.sum() == 421_681_184
    return lengths


def positions_of(batches):
    """Return the padded positions of each batch of uniform lengths."""
    longest = np.maximum.reduceat(uniform_lengths()[batches.sample_ids], batches.offsets[:-1])
    return batches.num_sequences * longest


def test_padding_in_batches_of_a_fixed_size(package):
    """128 samples a batch in dataset order: almost half of all positions are padding."""
    lengths = uniform_lengths()
    batches = package.batch_by_tokens(lengths, 2**62, max_sequences=128)
    assert batches.num_batches == 1563
    assert batches.num_sequences.tolist() == [128] * 1562 + [64]
    positions = positions_of(batches)
    assert positions.sum() == 813_107_328
    assert positions.sum() - lengths.sum() == 391_426_144
    first = lengths[batches.sample_ids[: batches.offsets[1]]]
    assert (first.min(), first.max(), first.sum(), positions[0]) == (167, 4037, 254_802, 516_736)


def test_padding_in_batches_of_a_token_budget(package):
    """Longest first: 0.19 % of the positions are padding."""
    batches = package.batch_by_tokens(uniform_lengths(), BUDGET, order="length_descending")
    assert batches.num_batches == 848
    positions = positions_of(batches)
    assert positions.max() <= BUDGET
    assert positions.sum() == 422_494_327
    assert positions.sum() - uniform_lengths().sum() == 813_143


def test_batches_of_a_token_budget_in_multiples_of_eight(package):
    """The last batch, too."""
    batches = package.batch_by_tokens(uniform_lengths(), BUDGET, order="length_descending", sequence_multiple=8)
    assert batches.num_batches == 865
    assert (batches.num_sequences % 8 == 0).all()
    assert positions_of(batches).max() <= BUDGET
    assert batches.num_sequences.sum() == 200_000


@pytest.mark.parametrize("budget", ["padded", "sum"])
def test_rates_of_batches_of_thirty_tokens(package, budget):
    """Batches of 10 and 4 sequences, reference size 2 and rate 1e-3: linear 5e-3 and 2e-3, else by the root."""
    batches = package.batch_by_tokens([3] * 10 + [7] * 4, 30, budget=budget)
    assert batches.num_sequences.tolist() == [10, 4]
    np.testing.assert_allclose(1e-3 * package.lr_scale(batches.num_sequences, 2), [5e-3, 2e-3], rtol=1e-12)
    roots = 1e-3 * np.sqrt([5.0, 2.0])
    np.testing.assert_allclose(1e-3 * package.lr_scale(batches.num_sequences, 2, "sqrt"), roots, rtol=1e-12)


@pytest.mark.parametrize(
    ("max_shapes", "num_microbatches", "percent"), [(4, 1, "19.07"), (16, 1, "5.62"), (8, 8, "10.57"), (32, 8, "2.95")]
)
def test_padding_of_uniform_lengths_with_few_shapes(package, max_shapes, num_microbatches, percent):
    """The best possible under the row rule, lengths rounded to 16."""
    lengths = uniform_lengths()
    buckets = package.make_buckets(
        lengths, BUDGET, max_shapes=max_shapes, length_multiple=16, num_microbatches=num_microbatches
    )
    assert len(buckets.shapes) == max_shapes
    plan = package.make_plan(lengths, buckets, order="length", num_microbatches=num_microbatches)
    assert f"{100 * plan.padding:.2f}" == percent
    assert plan.num_samples == 200_000


def test_no_strategy_beats_optimal_on_uniform_lengths(package):
    """With the same number of shapes and the same rounding."""
    lengths = uniform_lengths()
    paddings = {}
    for strategy in ("optimal", "quantile", "equal_tokens", "geometric"):
        buckets = package.make_buckets(lengths, BUDGET, strategy=strategy, max_shapes=8, length_multiple=16)
        paddings[strategy] = package.make_plan(lengths, buckets, order="length").padding
    assert min(paddings, key=lambda strategy: paddings[strategy]) == "optimal"


def test_fifteen_samples_on_two_nodes_of_four_devices(package):
    """Six steps of 15 samples over 8 devices: all take part in every step, nothing is lost, nobody waits."""
    lengths = np.array([1650, 310, 2900, 480, 3900, 120, 1580, 300, 2870, 450, 1700, 290, 3950, 110, 2950])
    edges = [128, 512, 1600, 1728, 3008, 4000]
    plan = package.make_plan(lengths, [(4096 // edge, edge) for edge in edges], order="length", num_microbatches=8)
    assert plan.num_steps == 6
    microbatches = np.array([len(plan.rows(step)) for step in range(plan.num_steps)])
    assert (microbatches == 8).all()
    shares = [np.concatenate([plan.rows(step)[d] for step in range(plan.num_steps)]) for d in range(8)]
    assert len({share.size for share in shares}) == 1
    ids = np.concatenate(shares)
    assert sorted(ids[ids >= 0].tolist()) == list(range(15))


def test_fifteen_samples_in_six_batches_of_4096_tokens(package):
    """By ascending length: as many of the short ones as fit, the long ones alone; nothing is lost."""
    lengths = np.array([1360, 310, 2900, 480, 3900, 120, 1300, 300, 2040, 450, 1900, 290, 3950, 110, 1330])
    batches = package.batch_by_tokens(lengths, 4096, order="length")
    assert batches.num_sequences.tolist() == [7, 3, 2, 1, 1, 1]
    assert sorted(batches.sample_ids.tolist()) == list(range(15))
