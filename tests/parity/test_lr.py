"""Learning rates: the factor for a batch size and the table of a plan."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .inputs import few, moderate, text_of


def plan_of(package):
    return package.make_plan([3] * 10 + [7] * 4, [(10, 3), (4, 7)], order="length")


@moderate
@given(size=st.integers(0, 10**9), base=st.integers(1, 10**9))
def test_scale_is_the_ratio_its_root_or_one(package, size, base):
    """The three named rules, in float64."""
    for rule, expected in (("linear", size / base), ("sqrt", math.sqrt(size / base)), (None, 1.0)):
        scale = package.lr_scale(size, base, rule)
        assert np.asarray(scale).dtype == np.float64
        assert np.asarray(scale).shape == ()
        assert float(scale) == pytest.approx(expected, rel=1e-15, abs=0)


def test_scale_takes_arrays_and_functions(package):
    """An array gives an array; a function gets the float64 ratio."""
    sizes = np.array([0, 4, 16])
    assert package.lr_scale(sizes, 4).tolist() == [0.0, 1.0, 4.0]
    assert package.lr_scale(sizes, 4, "sqrt").tolist() == [0.0, 1.0, 2.0]
    assert package.lr_scale(sizes, 4, None).tolist() == [1.0, 1.0, 1.0]
    assert package.lr_scale(sizes, 4, lambda ratio: ratio**2 + 1).tolist() == [1.0, 2.0, 17.0]
    assert float(package.lr_scale(16, 4, lambda ratio: ratio / 8)) == 0.5
    assert package.lr_scale(sizes.astype(np.int32), 4).dtype == np.float64


def test_rates_of_ten_and_four_sequences_against_two(package):
    """Reference batch size 2 and rate 1e-3: 5e-3 and 2e-3; with the root rule times sqrt(5) and sqrt(2)."""
    plan = plan_of(package)
    assert plan.num_sequences.tolist() == [10, 4]
    assert max(rows * length for rows, length in plan.buckets.shapes) == 30
    np.testing.assert_allclose(package.lr_sequence(plan, 1e-3, 2), [5e-3, 2e-3], rtol=1e-12)
    roots = 1e-3 * np.sqrt([5.0, 2.0])
    np.testing.assert_allclose(package.lr_sequence(plan, 1e-3, 2, rule="sqrt"), roots, rtol=1e-12)


def test_the_table_takes_numbers_arrays_and_functions(package):
    """base(t) times the scale, t counted from 0."""
    plan = plan_of(package)
    for base in (lambda t: 0.5 + t, np.array([0.5, 1.5]), [0.5, 1.5]):
        rates = package.lr_sequence(plan, base, 2)
        assert rates.dtype == np.float64
        np.testing.assert_allclose(rates, [2.5, 3.0], rtol=1e-12)
    np.testing.assert_allclose(package.lr_sequence(plan, 2, 2, rule=None), [2.0, 2.0], rtol=1e-12)
    doubled = package.lr_sequence(plan, 1.0, 2, rule=lambda ratio: 2 * ratio)
    np.testing.assert_allclose(doubled, [10.0, 4.0], rtol=1e-12)


@few
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    num_epochs=st.integers(1, 3),
    counted_in=st.sampled_from(["steps", "sequences", "tokens"]),
    unit=st.sampled_from(["sequences", "tokens"]),
)
def test_the_schedule_is_asked_for_what_came_before_each_step(package, lengths, num_epochs, counted_in, unit):
    """Step by step over all epochs; a single plan is as a list of one."""
    plans = [
        package.make_plan(lengths, [(4, 10), (2, 30)], order="shuffle", epoch=epoch) for epoch in range(num_epochs)
    ]
    seen, expected = 0, []
    for plan in plans:
        for step in range(plan.num_steps):
            samples = [i for i in plan.rows(step).ravel().tolist() if i >= 0]
            sizes = {"steps": 1, "sequences": len(samples), "tokens": sum(lengths[i] for i in samples)}
            expected.append((1 + seen) * sizes[unit] / 3)
            seen += sizes[counted_in]
    for given_plans in (plans, iter(plans), *([plans[0]] if num_epochs == 1 else [])):
        rates = package.lr_sequence(given_plans, lambda count: 1.0 + count, 3, unit=unit, counted_in=counted_in)
        np.testing.assert_allclose(rates, expected, rtol=1e-15)
    number = package.lr_sequence(plans, 0.5, 3, unit=unit, counted_in=counted_in)
    np.testing.assert_allclose(number, package.lr_sequence(plans, [0.5] * len(expected), 3, unit=unit), rtol=1e-15)


def test_counts_beyond_float32_are_exact(package):
    """2**20 + 1 tokens a step: odd numbers above 2**24."""
    plan = package.make_plan([2**20 + 1] * 40, [(1, 2**20 + 1)], order="length")
    rates = package.lr_sequence(plan, lambda count: count, 1, rule=None, counted_in="tokens")
    assert rates.tolist() == [step * (2**20 + 1) for step in range(40)]


@pytest.mark.parametrize(
    "arguments",
    [
        (-1, 2),
        (np.array([3, -4]), 2),
        (1, 0),
        (1, -2),
        (1, 2, "cubic"),
        (float("nan"), 2),
        (1, float("nan")),
        (1, "32"),
        (1, None),
        (1, True),
        (1, [1, 2]),
    ],
    ids=str,
)
def test_bad_batch_sizes_bases_and_rules_are_refused(package, arguments):
    """batch_size >= 0, base_batch_size > 0, a known rule."""
    with pytest.raises(ValueError, match=r"batch|rule"):
        package.lr_scale(*arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"unit": "bytes"}, "bytes"),
        ({"counted_in": "epochs"}, "epochs"),
        ({"base_schedule": [1.0, 2.0], "counted_in": "tokens"}, "counted in tokens"),
        ({"rule": lambda ratio: ratio[:1]}, r"shape \(1,\)"),
        ({"rule": lambda ratio: 1.0}, r"shape \(\)"),
        ({"rule": lambda ratio: ratio * [1, float("nan")]}, "scales .*id 1: nan"),
        ({"rule": lambda ratio: ratio - 4}, "scales .*id 1: -2"),
        ({"rule": "cubic"}, "cubic"),
        ({"base_schedule": [1.0, 2.0, 3.0]}, "3"),
        ({"base_schedule": [[1.0, 2.0]]}, "2"),
        ({"base_batch_size": 0}, "base_batch_size"),
        ({"base_batch_size": "32"}, "base_batch_size.*'32'"),
        ({"plan": "ten"}, "plan must be a plan"),
        ({"plan": []}, "plan is empty"),
        ({"base_schedule": "1e-3"}, "base_schedule.*'1e-3'"),
    ],
    ids=text_of,
)
def test_bad_table_arguments_are_refused_by_name(package, arguments, named):
    """Everything outside its range is a ValueError that says what."""
    valid = {"plan": plan_of(package), "base_schedule": 1.0, "base_batch_size": 2}
    with pytest.raises(ValueError, match=named):
        package.lr_sequence(**(valid | arguments))


@pytest.mark.parametrize("counted", [{"unit": "tokens"}, {"counted_in": "tokens"}])
def test_tokens_are_not_counted_in_another_size_of_pairs(package, counted):
    """Steps on devices count both lengths, so the plan's own unit has to be said."""
    plan = package.make_plan([[3, 4], [5, 2]], max_tokens=30, size="product", max_shapes=1)
    with pytest.raises(ValueError, match=r"size .* plan\.num_tokens"):
        package.lr_sequence([plan, plan], lambda seen: 1.0, 2, **counted)
    assert package.lr_sequence(plan.num_tokens, 1.0, 2, unit="tokens").tolist() == [x / 2 for x in plan.num_tokens]


def test_batch_sizes_come_in_place_of_a_plan(package):
    """The same table as of a plan with these sizes, in either unit; a count in the other unit is not known."""
    plan = plan_of(package)

    def schedule(seen):
        return 1.0 + seen

    for unit, sizes in (("sequences", plan.num_sequences), ("tokens", plan.num_tokens)):
        for table in (sizes, sizes.astype(np.int32), sizes.tolist(), tuple(sizes.tolist())):
            for counted_in in ("steps", unit):
                options = {"unit": unit, "counted_in": counted_in, "rule": "sqrt"}
                rates = package.lr_sequence(table, schedule, 3, **options)
                assert rates.tolist() == package.lr_sequence(plan, schedule, 3, **options).tolist()
    assert package.lr_sequence([10, 4], 1e-3, 2).tolist() == [0.005, 0.002]
    with pytest.raises(ValueError, match="batch sizes in sequences do not tell tokens: counted_in must be 'steps' or"):
        package.lr_sequence([10, 4], schedule, 2, counted_in="tokens")


@pytest.mark.parametrize("sizes", [[1.5, 2.5], np.ones((2, 2), int), np.array([], int), np.int64(3), [-1, 2]])
def test_what_are_no_batch_sizes_is_refused(package, sizes):
    """Fractions, tables, none, a single one, and negative ones."""
    with pytest.raises(ValueError, match="batch sizes must be"):
        package.lr_sequence(sizes, 1e-3, 2)


def beta_sequence(package):
    return (package.training if package.__name__ == "jvarlen" else package).beta_sequence


@pytest.mark.parametrize("unit", ["sequences", "tokens"])
def test_betas_are_powers_of_the_ratio(package, unit):
    """Over the plans of all epochs, or of batch sizes; 1 for a batch of 0."""
    plan, betas_of = plan_of(package), beta_sequence(package)
    sizes = {"sequences": [10, 4], "tokens": [30, 28]}[unit]
    expected = [0.9 ** (size / 8) for size in sizes]
    for given_plans in (plan, [plan], sizes, np.array(sizes)):
        betas = betas_of(given_plans, 0.9, 8, unit=unit)
        assert betas.dtype == np.float64
        np.testing.assert_allclose(betas, expected, rtol=1e-12)
    np.testing.assert_allclose(betas_of([plan, plan], 0.9, 8, unit=unit), expected * 2, rtol=1e-12)
    assert betas_of([8, 0, 16], 0.5, 8).tolist() == [0.5, 1.0, 0.25]
    assert betas_of([8, 0, 16], 0.0, 8).tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"beta": 1.0}, "beta"),
        ({"beta": -0.1}, "beta"),
        ({"beta": float("nan")}, "beta"),
        ({"base_batch_size": 0}, "base_batch_size"),
        ({"unit": "bytes"}, "bytes"),
        ({"plan": [1, -2]}, "batch sizes .*id 1: -2"),
        ({"plan": []}, "plan is empty"),
    ],
    ids=text_of,
)
def test_bad_arguments_of_betas_are_refused_by_name(package, arguments, named):
    valid = {"plan": plan_of(package), "beta": 0.9, "base_batch_size": 2}
    with pytest.raises(ValueError, match=named):
        beta_sequence(package)(**(valid | arguments))
