"""Figures that must come out: padding with few shapes, and a small cluster's share of a small epoch."""

from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest

BUDGET = 500_000


@cache
def uniform_lengths() -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return 200,000 uniform lengths, 421,681,184 tokens."""
    lengths = np.random.RandomState(2023).randint(128, 4096, 200_000)
    assert lengths.sum() == 421_681_184
    return lengths


@pytest.mark.parametrize(
    ("max_shapes", "num_microbatches", "percent"),
    [
        (4, 1, "19.07"),
        (8, 1, "10.56"),
        (16, 1, "5.62"),
        (32, 1, "2.93"),
        (4, 8, "19.11"),
        (8, 8, "10.57"),
        (16, 8, "5.64"),
        (32, 8, "2.95"),
    ],
)
def test_padding_of_uniform_lengths_with_few_shapes(
    package: ModuleType, max_shapes: int, num_microbatches: int, percent: str
) -> None:
    """The best possible under the row rule, lengths rounded to 16."""
    lengths = uniform_lengths()
    buckets = package.make_buckets(
        lengths, BUDGET, max_shapes=max_shapes, length_multiple=16, microbatches_per_step=num_microbatches
    )
    assert len(buckets) == max_shapes
    plan = package.make_plan(lengths, buckets, microbatches_per_step=num_microbatches)
    assert f"{100 * plan.padding:.2f}" == percent
    assert plan.num_samples == 200_000


def test_no_strategy_beats_optimal_on_uniform_lengths(package: ModuleType) -> None:
    """With the same number of shapes and the same rounding."""
    lengths = uniform_lengths()
    paddings = {}
    for strategy in ("optimal", "quantile", "equal_tokens", "geometric"):
        buckets = package.make_buckets(lengths, BUDGET, strategy=strategy, max_shapes=8, length_multiple=16)
        paddings[strategy] = package.make_plan(lengths, buckets).padding
    assert min(paddings, key=lambda strategy: paddings[strategy]) == "optimal"


def test_fifteen_samples_on_two_nodes_of_four_devices(package: ModuleType) -> None:
    """Six steps of 15 samples over 8 devices: all take part in every step, nothing is lost, nobody waits."""
    lengths = np.array([1650, 310, 2900, 480, 3900, 120, 1580, 300, 2870, 450, 1700, 290, 3950, 110, 2950])
    edges = [128, 512, 1600, 1728, 3008, 4000]
    plan = package.make_plan(lengths, [(4096 // edge, edge) for edge in edges], microbatches_per_step=8)
    assert plan.num_steps == 6
    microbatches = np.array([len(plan.rows(step)) for step in range(plan.num_steps)])
    assert (microbatches == 8).all()
    shares = [np.concatenate([plan.rows(step)[d] for step in range(plan.num_steps)]) for d in range(8)]
    assert len({share.size for share in shares}) == 1
    ids = np.concatenate(shares)
    assert sorted(ids[ids >= 0].tolist()) == list(range(15))
