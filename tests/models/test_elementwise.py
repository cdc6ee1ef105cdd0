"""Gradients by hand are those of the formulas, to the last digits of float64 and in bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen.models.elementwise import rms_norm, swiglu

EPSILON = 1e-3


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape) * 3 for shape in shapes]


def norm(x, scale):
    return rms_norm(x, scale, epsilon=EPSILON, dtype=x.dtype)


def norm_by_formula(x, scale):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + EPSILON) * scale


def swiglu_by_formula(gate, up):
    return gate * jax.nn.sigmoid(gate) * up


CASES = pytest.mark.parametrize(
    ("function", "formula", "shapes"),
    [(norm, norm_by_formula, ((3, 5, 6), (6,))), (swiglu, swiglu_by_formula, ((4, 7), (4, 7)))],
    ids=["rms_norm", "swiglu"],
)


def values_and_grads(function, args, weights):
    def total(*args):
        y = function(*args)
        return jnp.sum(y * weights.astype(y.dtype), dtype=jnp.promote_types(y.dtype, jnp.float32)), y

    grads, y = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(*args)
    return y, *grads


@CASES
def test_values_and_gradients_are_those_of_the_formula(function, formula, shapes):
    with jax.enable_x64(True):
        args, weights = list(map(jnp.asarray, arrays(*shapes))), arrays(shapes[0])[0]
        for found, expected in zip(
            *(values_and_grads(each, args, weights) for each in (function, formula)), strict=True
        ):
            assert found.dtype == np.float64
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


@CASES
def test_of_bfloat16_only_results_are_rounded(function, formula, shapes):
    args, weights = (jnp.asarray(each, jnp.bfloat16) for each in arrays(*shapes)), arrays(shapes[0])[0]
    args, weights = list(args), jnp.asarray(weights, jnp.bfloat16)
    found = values_and_grads(function, args, weights)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(each, np.float64)) for each in args]
        expected = values_and_grads(formula, wide, np.asarray(weights, np.float64))
    for array, exact in zip(found, expected, strict=True):
        assert array.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(array, np.float64), exact, rtol=2**-8, atol=1e-5)


def test_swiglu_is_finite_far_from_zero():
    gate = jnp.asarray([-1e4, -100.0, 0.0, 100.0, 1e4])
    _, of_gate, of_up = values_and_grads(swiglu, (gate, jnp.ones(5)), np.ones(5))
    np.testing.assert_allclose(of_gate, [0, 0, 0.5, 1, 1], atol=1e-6)
    np.testing.assert_allclose(of_up, [0, 0, 0, 100, 1e4])
