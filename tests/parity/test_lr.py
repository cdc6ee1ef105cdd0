"""Learning rates: the factor for a batch size and the table of a plan."""

import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .inputs import moderate


def plan_of(package: ModuleType) -> Any:
    """Return a plan of steps with 10 and then 4 sequences."""
    return package.make_plan([3] * 10 + [7] * 4, [(10, 3), (4, 7)])


@moderate
@given(size=st.integers(0, 10**9), base=st.integers(1, 10**9))
def test_scale_is_the_ratio_its_root_or_one(package: ModuleType, size: int, base: int) -> None:
    """The three named rules, in float64."""
    for rule, expected in (("linear", size / base), ("sqrt", math.sqrt(size / base)), (None, 1.0)):
        scale = package.lr_scale(size, base, rule)
        assert np.asarray(scale).dtype == np.float64
        assert np.asarray(scale).shape == ()
        assert float(scale) == pytest.approx(expected, rel=1e-15, abs=0)


def test_scale_takes_arrays_and_functions(package: ModuleType) -> None:
    """An array gives an array; a function gets the float64 ratio."""
    sizes = np.array([0, 4, 16])
    assert package.lr_scale(sizes, 4).tolist() == [0.0, 1.0, 4.0]
    assert package.lr_scale(sizes, 4, "sqrt").tolist() == [0.0, 1.0, 2.0]
    assert package.lr_scale(sizes, 4, None).tolist() == [1.0, 1.0, 1.0]
    assert package.lr_scale(sizes, 4, lambda ratio: ratio**2 + 1).tolist() == [1.0, 2.0, 17.0]
    assert float(package.lr_scale(16, 4, lambda ratio: ratio / 8)) == 0.5
    assert package.lr_scale(sizes.astype(np.int32), 4).dtype == np.float64


def test_rates_of_ten_and_four_sequences_against_two(package: ModuleType) -> None:
    """Reference batch size 2 and rate 1e-3: 5e-3 and 2e-3; with the root rule times sqrt(5) and sqrt(2)."""
    plan = plan_of(package)
    assert plan.num_sequences.tolist() == [10, 4]
    assert max(rows * length for rows, length in plan.buckets) == 30
    np.testing.assert_allclose(package.lr_sequence(plan, 1e-3, 2), [5e-3, 2e-3], rtol=1e-12)
    roots = 1e-3 * np.sqrt([5.0, 2.0])
    np.testing.assert_allclose(package.lr_sequence(plan, 1e-3, 2, rule="sqrt"), roots, rtol=1e-12)


def test_the_table_takes_numbers_arrays_and_functions(package: ModuleType) -> None:
    """base(t) times the scale, t counted from 0."""
    plan = plan_of(package)
    for base in (lambda t: 0.5 + t, np.array([0.5, 1.5]), [0.5, 1.5]):
        rates = package.lr_sequence(plan, base, 2)
        assert rates.dtype == np.float64
        np.testing.assert_allclose(rates, [2.5, 3.0], rtol=1e-12)
    np.testing.assert_allclose(package.lr_sequence(plan, 2, 2, rule=None), [2.0, 2.0], rtol=1e-12)
    doubled = package.lr_sequence(plan, 1.0, 2, rule=lambda ratio: 2 * ratio)
    np.testing.assert_allclose(doubled, [10.0, 4.0], rtol=1e-12)


def test_the_table_counts_tokens_on_request(package: ModuleType) -> None:
    """Real tokens: 30 and 28."""
    rates = package.lr_sequence(plan_of(package), 1e-3, 10, unit="tokens")
    np.testing.assert_allclose(rates, [3e-3, 2.8e-3], rtol=1e-12)


@pytest.mark.parametrize(
    "arguments",
    [(-1, 2), (np.array([3, -4]), 2), (1, 0), (1, -2), (1, 2, "cubic"), (float("nan"), 2), (1, float("nan"))],
    ids=str,
)
def test_bad_batch_sizes_bases_and_rules_are_refused(package: ModuleType, arguments: tuple[Any, ...]) -> None:
    """batch_size >= 0, base_batch_size > 0, a known rule."""
    with pytest.raises(ValueError, match=r"batch|rule"):
        package.lr_scale(*arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"unit": "bytes"}, "bytes"),
        ({"rule": "cubic"}, "cubic"),
        ({"base_schedule": [1.0, 2.0, 3.0]}, "3"),
        ({"base_schedule": [[1.0, 2.0]]}, "2"),
        ({"base_batch_size": 0}, "base_batch_size"),
    ],
    ids=str,
)
def test_bad_table_arguments_are_refused_by_name(package: ModuleType, arguments: dict[str, Any], named: str) -> None:
    """Everything outside its range is a ValueError that says what."""
    valid: dict[str, Any] = {"base_schedule": 1.0, "base_batch_size": 2}
    with pytest.raises(ValueError, match=named):
        package.lr_sequence(plan_of(package), **(valid | arguments))
