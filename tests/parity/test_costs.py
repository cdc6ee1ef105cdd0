"""Cost models: the best fit of all, by trying every set of terms that may be zero."""

import warnings
from dataclasses import FrozenInstanceError
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import torch_ref

from .inputs import few

NAMES = ("constant", "linear", "quadratic")


def tell_the_terms_apart(pairs):
    """Return whether constant, linear and quadratic terms are clearly independent on these shapes."""
    terms = np.array([(1.0, rows * length, rows * length**2) for rows, length in pairs])
    return bool(np.linalg.matrix_rank(terms / terms.max(axis=0), rtol=1e-5) == 3)


shapes = st.lists(st.tuples(st.integers(1, 64), st.integers(1, 200)), min_size=3, max_size=8, unique=True).filter(
    lambda pairs: len({length for _, length in pairs}) >= 2 and tell_the_terms_apart(pairs)
)


def relative_terms(shape, measured):
    """Return what each coefficient adds to predicted / measured."""
    rows, length = shape
    return [Fraction(term) / Fraction(measured) for term in (1, rows * length, rows * length * length)]


def error(coefficients, pairs, measured):
    """Return the sum of squares, exactly."""
    exact = [Fraction(coefficient) for coefficient in coefficients]
    predicted = [
        sum(c * term for c, term in zip(exact, relative_terms(pair, value), strict=True))
        for pair, value in zip(pairs, measured, strict=True)
    ]
    return sum(((value - 1) ** 2 for value in predicted), start=Fraction(0))


def solve(matrix, right):
    """Return the solution of a small linear system, or None where there is not exactly one."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for k in range(len(rows)):
        pivot = next((i for i in range(k, len(rows)) if rows[i][k]), None)
        if pivot is None:
            return None
        rows[k], rows[pivot] = rows[pivot], rows[k]
        for i in range(len(rows)):
            if i != k:
                factor = rows[i][k] / rows[k][k]
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[k], strict=True)]
    return [row[-1] / row[k] for k, row in enumerate(rows)]


def least_error(pairs, measured):
    """Return the least sum of squares: of every set of terms the unrestricted best, if none of it is negative."""
    terms = [relative_terms(pair, value) for pair, value in zip(pairs, measured, strict=True)]
    best = error((0, 0, 0), pairs, measured)
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            normal = [[sum(row[i] * row[j] for row in terms) for j in chosen] for i in chosen]
            solution = solve(normal, [sum(row[i] for row in terms) for i in chosen])
            if solution is not None and min(solution) >= 0:
                coefficients = [solution[chosen.index(i)] if i in chosen else 0 for i in range(3)]
                best = min(best, error(coefficients, pairs, measured))
    return best


@few
@given(pairs=shapes, data=st.data())
def test_no_model_has_a_smaller_relative_error(package, pairs, data):
    """The least squares over coefficients of at least 0, on any measurements."""
    values = st.floats(1e-5, 10.0, allow_subnormal=False)
    measured = data.draw(st.lists(values, min_size=len(pairs), max_size=len(pairs)))
    model = package.fit_cost_model(pairs, measured)
    coefficients = [getattr(model, name) for name in NAMES]
    assert min(coefficients) >= 0
    least = least_error(pairs, measured)
    assert float(error(coefficients, pairs, measured)) <= float(least) * (1 + 1e-9) + 1e-12


@few
@given(pairs=shapes, constant=st.floats(1e-4, 1e-2), linear=st.floats(1e-7, 1e-5), quadratic=st.floats(1e-10, 1e-7))
def test_exact_measurements_are_predicted(package, pairs, constant, linear, quadratic):
    """Where the measurements follow the form there is no error left."""
    measured = [constant + rows * length * (linear + quadratic * length) for rows, length in pairs]
    model = package.fit_cost_model(pairs, np.array(measured))
    rows, length = np.array(pairs).T
    np.testing.assert_allclose(model(rows, length), measured, rtol=1e-6)
    assert model.largest_error < 1e-6


def test_a_model_is_a_function_of_arrays_that_broadcast(package):
    """float64 by the formula, whatever the shapes, and as a cost of buckets."""
    model = package.CostModel(constant=0.5, linear=0.25, quadratic=0.125)
    assert float(model(2, 4)) == 0.5 + 8 * (0.25 + 0.125 * 4)
    rows, length = np.arange(1, 4)[:, None], np.arange(1, 6)
    values = model(rows, length)
    assert values.shape == (3, 5)
    assert values.dtype == np.float64
    assert values[2, 4] == 0.5 + 15 * (0.25 + 0.125 * 5)
    assert model(rows, length, pairs=[7.0])[2, 4] == 0.5 + 15 * 0.25 + 0.125 * 7
    with pytest.raises(TypeError, match="positional"):
        model(2, 4, 4)  # as buckets of pairs call a cost: their target is no number of pairs
    buckets = package.make_buckets([3, 5, 8], 64, cost=model, compile_seconds=0.0, max_cost=60.0)
    assert all(model(*bucket) <= 60.0 for bucket in buckets.shapes)


def of_measured(package, values):
    """Return the model fitted to these values of three shapes: rows of up to 100 tokens, microbatches of up to 400."""
    return package.fit_cost_model([(1, 10), (2, 10), (4, 100)], values)


def test_a_fit_that_misses_a_measurement_by_more_than_a_fifth_is_warned_of_once(package):
    """With the worst shape, both numbers of it, and how many there are; a fit within 20 % says nothing."""
    with pytest.warns(UserWarning, match="the cost model") as caught:
        model = of_measured(package, [1.0, 2.0, 1.0])
    assert model.largest_error > 0.2
    assert caught[0].filename == __file__, "the line that called it"
    [text] = [str(each.message) for each in caught]
    assert model.measured == ((1, 10, 1.0), (2, 10, 2.0), (4, 100, 1.0))
    assert abs(float(model(2, 10)) / 2.0 - 1) == pytest.approx(model.largest_error)
    for named in ("2", "10", f"{model.largest_error:.0%}", f"{float(model(2, 10)):.3g}", "of 3", "20%"):
        assert named in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 0.1 < of_measured(package, [1.0, 1.34, 1.0]).largest_error <= 0.2


def test_buckets_beyond_what_was_measured_are_warned_of(package):
    """Those of more than twice the length or twice the tokens, by shape, with what was measured; no others."""
    cost = of_measured(package, [1.3, 1.6, 60.0])
    lengths = np.repeat([90, 150, 200], 30)
    assert len(package.make_buckets(lengths, 800, cost=cost).shapes) == 3
    with pytest.warns(UserWarning, match=r"100 tokens.*400.*more than 2 times") as caught:
        longer = package.make_buckets([*lengths, 201], 800, cost=cost)
    if package is torch_ref:
        assert caught[0].filename == __file__, "the line that called it"
    assert "1×201" in str(caught[0].message).replace(" x ", "×")
    assert "×200" not in str(caught[0].message).replace(" x ", "×")
    assert longer.shapes[-1] == (1, 201)
    with pytest.warns(UserWarning, match=r"10\D+90, 6\D+150"):
        package.make_buckets(lengths, 900, cost=cost)
    memory = package.fit_cost_model([(1, 10), (2, 10), (4, 100)], [1.3, 1.6, 60.0], unit="bytes")
    with pytest.warns(UserWarning, match="201"):
        package.make_buckets([*lengths, 201], 800, memory=memory, max_bytes=1e9)
    package.make_buckets([*lengths, 5000], 8000, cost=lambda rows, length: rows * length * 0.5)


def test_a_model_says_what_it_is_of(package):
    """Unit, device, model and the largest error of the fit; nothing of it changes."""
    grid = [(1, 10), (2, 10), (1, 100)]
    model = package.fit_cost_model(grid, [1.0, 1.0, 2.0], unit="bytes", device="A", model="B")
    assert (model.unit, model.device, model.model) == ("bytes", "A", "B")
    predicted = np.array([float(model(*shape)) for shape in grid])
    assert model.largest_error == pytest.approx(np.abs(predicted / [1.0, 1.0, 2.0] - 1).max(), rel=1e-12)
    assert package.fit_cost_model(grid, [1, 2, 3]).unit == "seconds"
    with pytest.raises(FrozenInstanceError):
        model.constant = 1.0


@pytest.mark.parametrize(
    ("pairs", "measured", "named"),
    [
        ([(1, 2), (2, 2), (1, 3)], [1.0, 2.0], "3"),
        ([(64, 64), (16, 256), (4, 1024), (1, 4096)], [1.0, 2.0, 3.0, 4.0], r"equally many tokens.*1, 4096"),
        ([(1, 2), (2, 2), (1, 2)], [1.0, 2.0, 1.0], r"3\D+2"),
        ([(1, 2), (2, 2), (3, 2)], [1.0, 2.0, 3.0], r"3\D+2"),
        ([(1, 2), (2, 2), (5, 37)], [1.0, 2.0, 0.0], r"5\D+37"),
        ([(1, 2), (2, 2), (5, 37)], [1.0, 2.0, float("nan")], r"5\D+37"),
    ],
    ids=str,
)
def test_measurements_that_settle_nothing_are_refused(package, pairs, measured, named):
    """Too few, of one length, not as many as shapes, or no positive numbers, listed by shape."""
    with pytest.raises(ValueError, match=named):
        package.fit_cost_model(pairs, measured)
