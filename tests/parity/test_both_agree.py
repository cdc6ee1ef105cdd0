"""The packages against each other on inputs too large for the slow transcription."""

import importlib
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from . import PACKAGES
from .inputs import ORDERS

pytestmark = pytest.mark.skipif(len(PACKAGES) < 2, reason="PARITY_PACKAGES names only one package")

STRATEGIES = ("pad_to_max", "powers_of_two", "geometric", "quantile", "equal_tokens", "optimal")
SIZE = 20_000


@pytest.fixture(scope="module")
def both() -> list[ModuleType]:
    """Return the two packages."""
    return [importlib.import_module(name) for name in PACKAGES]


def inputs(seed: int) -> dict[str, Any]:
    """Return lengths with a long tail, and difficulties of three kinds."""
    rng = np.random.default_rng(seed)
    return {
        "lengths": np.minimum(rng.zipf(1.4, SIZE) + rng.integers(0, 30, SIZE), 5000),
        "integers": rng.integers(2**60, 2**60 + 5000, SIZE),
        "floats": rng.normal(size=SIZE).round(2),
        "subset": rng.permutation(SIZE)[: SIZE // 3],
    }


def timed_cost(rows: Any, length: Any) -> Any:
    """Return seconds of a microbatch."""
    return 15e-6 + rows * length * (0.219e-6 + 1.3e-10 * length)


def assert_equal_plans(plans: list[Any]) -> None:
    """Hold two plans equal in all that a trainer sees."""
    one, other = plans
    assert one.digest == other.digest
    assert [tuple(bucket) for bucket in one.buckets] == [tuple(bucket) for bucket in other.buckets]
    for name in ("step_bucket", "step_offsets", "sample_ids", "num_sequences", "num_tokens"):
        assert getattr(one, name).dtype == getattr(other, name).dtype
        assert np.array_equal(getattr(one, name), getattr(other, name))
    for name in ("num_steps", "num_samples", "microbatches_per_step", "overlong", "num_dropped", "num_truncated"):
        assert getattr(one, name) == getattr(other, name)
    assert one.padding == pytest.approx(other.padding, abs=1e-12)
    for step in range(one.num_steps):
        assert np.array_equal(one.rows(step), other.rows(step))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_both_choose_the_same_buckets(both: list[ModuleType], strategy: str, num_microbatches: int) -> None:
    """Every strategy, with and without multiples."""
    lengths = inputs(0)["lengths"]
    for options in ({}, {"row_multiple": 8, "length_multiple": 16}, {"max_length": 2048, "length_multiple": 4}):
        one, other = (
            package.make_buckets(
                lengths, 16_384, strategy=strategy, max_shapes=12, microbatches_per_step=num_microbatches, **options
            )
            for package in both
        )
        assert [tuple(bucket) for bucket in one] == [tuple(bucket) for bucket in other]


@pytest.mark.parametrize("compile_seconds", [None, 0.0, 0.01, 1.0])
def test_both_weigh_seconds_alike(both: list[ModuleType], compile_seconds: float | None) -> None:
    """A cost that rounds: the same sums in the same order."""
    lengths = inputs(1)["lengths"]
    one, other = (
        package.make_buckets(
            lengths, 16_384, max_shapes=24, length_multiple=8, cost=timed_cost, compile_seconds=compile_seconds
        )
        for package in both
    )
    assert [tuple(bucket) for bucket in one] == [tuple(bucket) for bucket in other]


@pytest.mark.parametrize("order", [*ORDERS, "subset"])
@pytest.mark.parametrize("difficulty", [None, "integers", "floats"])
@pytest.mark.parametrize("shuffle_steps", [False, True])
def test_both_make_the_same_plan(
    both: list[ModuleType], order: str, difficulty: str | None, shuffle_steps: bool
) -> None:
    """The same rows in every step, the same counts, the same digest."""
    drawn = inputs(2)
    buckets = both[1].make_buckets(drawn["lengths"], 16_384, max_shapes=12, microbatches_per_step=4)
    plans = [
        package.make_plan(
            drawn["lengths"],
            buckets,
            microbatches_per_step=4,
            order=drawn["subset"] if order == "subset" else order,
            difficulty=None if difficulty is None else drawn[difficulty],
            seed=2**40 + 7,
            epoch=3,
            shuffle_steps=shuffle_steps,
            longest_first=shuffle_steps,
        )
        for package in both
    ]
    assert_equal_plans(plans)


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
@pytest.mark.parametrize("order", ORDERS)
def test_both_treat_overlong_samples_alike(both: list[ModuleType], overlong: str, order: str) -> None:
    """The same samples dropped or cut."""
    lengths = inputs(3)["lengths"]
    plans = [
        package.make_plan(lengths, [(8, 20), (4, 100), (1, 1000)], order=order, overlong=overlong, seed=1)
        for package in both
    ]
    assert_equal_plans(plans)
    assert plans[0].num_dropped + plans[0].num_truncated > 0


def assert_equal_batches(batches: list[Any]) -> None:
    """Hold two results of `batch_by_tokens` equal, types included."""
    one, other = batches
    for name in ("sample_ids", "offsets", "num_sequences", "shape_index"):
        if getattr(one, name) is None:
            assert getattr(other, name) is None
        else:
            assert getattr(one, name).dtype == getattr(other, name).dtype
            assert np.array_equal(getattr(one, name), getattr(other, name))
    assert one.num_batches == other.num_batches > 1


@pytest.mark.parametrize("order", [*ORDERS, "subset"])
@pytest.mark.parametrize("budget", ["padded", "sum"])
@pytest.mark.parametrize("sequence_multiple", [1, 8, 100])
def test_both_make_the_same_batches(both: list[ModuleType], order: str, budget: str, sequence_multiple: int) -> None:
    """From batches of a few samples to batches of thousands."""
    drawn = inputs(5)
    for max_tokens in (5000, 16_384, 1_000_000):
        for max_sequences in (None, 37, 1000):
            batches = [
                package.batch_by_tokens(
                    drawn["lengths"],
                    max_tokens,
                    order=drawn["subset"] if order == "subset" else order,
                    budget=budget,
                    max_sequences=max_sequences,
                    sequence_multiple=sequence_multiple,
                    seed=2**40 + 7,
                    epoch=3,
                )
                for package in both
            ]
            assert_equal_batches(batches)


@pytest.mark.parametrize("order", [*ORDERS, "subset"])
def test_both_choose_the_same_shapes_for_batches(both: list[ModuleType], order: str) -> None:
    """Planned buckets, and shapes of which some hold nothing that others do not, in no order."""
    drawn = inputs(6)
    rng = np.random.default_rng(7)
    scattered = [(int(2 ** rng.integers(0, 10)), int(2 ** rng.integers(0, 13))) for _ in range(40)]
    for shapes in (both[0].make_buckets(drawn["lengths"], 16_384), [*scattered, (1, 5000), (2, 5000), (1, 5000)]):
        batches = [
            package.batch_by_tokens(
                drawn["lengths"], 1, order=drawn["subset"] if order == "subset" else order, shapes=shapes, seed=1
            )
            for package in both
        ]
        assert_equal_batches(batches)
        assert len(set(batches[0].shape_index.tolist())) > 3


@pytest.mark.parametrize("rule", ["linear", "sqrt", None, np.log1p])
@pytest.mark.parametrize("unit", ["sequences", "tokens"])
def test_both_give_the_same_learning_rates(both: list[ModuleType], rule: Any, unit: str) -> None:
    """To 1e-12 in float64."""
    lengths = inputs(4)["lengths"]
    plan = both[0].make_plan(lengths, [(64, 16), (16, 100), (2, 5000)], order="shuffle")
    for base in (3e-4, lambda t: 3e-4 * 0.99**t, np.linspace(1e-3, 1e-5, plan.num_steps)):
        one, other = (package.lr_sequence(plan, base, 256, rule=rule, unit=unit) for package in both)
        assert one.dtype == other.dtype == np.float64
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=0)


def test_both_export_the_planning_names(both: list[ModuleType]) -> None:
    """The same names for the planning part."""
    names = {"Bucket", "Plan", "batch_by_tokens", "check_lengths", "lr_scale", "lr_sequence"}
    names |= {"make_buckets", "make_plan", "sample_order"}
    for package in both:
        assert names <= set(package.__all__)
