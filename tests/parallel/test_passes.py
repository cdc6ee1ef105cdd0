"""A function cut into passes: the derivative of the whole, and what the passes hand on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen.parallel.passes import split_passes

PARAMS = {"in": np.full((3, 4), 0.3, np.float32), "out": np.full((4, 3), 0.2, np.float32)}
X = {"x": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), "count": np.int32(2)}


def perceptron(params, x, scale, key):
    hidden = jnp.tanh(x["x"] @ params["in"].astype(jnp.float32)) * jax.random.bernoulli(key, 0.5, (2, 4))
    scaled = hidden * scale[:, None]
    return {"x": x["x"] + x["count"] * (scaled @ params["out"]), "count": x["count"] + 1}


SCALE, KEY = np.array([2.0, -1.0], np.float32), jax.random.key(3)


def products(function, *args):
    return str(jax.make_jaxpr(function)(*args)).count("dot_general[")


@pytest.mark.parametrize(
    ("remat", "weights_apart", "expected"),
    [
        ("none", False, [2, 4]),
        ("none", True, [2, 2, 2]),
        ("full", False, [2, 5]),  # all but what only y needs
        ("full", True, [2, 3, 4]),
    ],
)
@pytest.mark.parametrize("function", [perceptron, jax.jit(perceptron), jax.jit(jax.jit(perceptron))])
def test_passes_give_the_derivative_and_run_products_as_often_as_said(function, remat, weights_apart, expected):
    @jax.jit
    def at_once(params, x):
        y, pull = jax.vjp(lambda params, x: function(params, X | {"x": x}, SCALE, KEY)["x"], params, x)
        return y, jnp.cos(y), *pull(jnp.cos(y))

    y, of_y, of_params, of_x = at_once(PARAMS, X["x"])
    of_y = [of_y]
    passes = split_passes(function, PARAMS, X, SCALE, KEY, remat=remat, weights_apart=weights_apart)
    found, residuals = passes.forward(PARAMS, X, SCALE, KEY)
    (found_of_x,), rest = passes.backward(PARAMS, residuals, of_y, SCALE, KEY)
    num = [
        products(passes.forward, PARAMS, X, SCALE, KEY),
        products(passes.backward, PARAMS, residuals, of_y, SCALE, KEY),
    ]
    if weights_apart:
        num.append(products(passes.weights, PARAMS, residuals, rest, SCALE, KEY))
        rest = passes.weights(PARAMS, residuals, rest, SCALE, KEY)
    assert num == expected
    if remat == "full":
        assert {leaf.shape for leaf in residuals} == {leaf.shape for leaf in jax.tree.leaves(X)}
    assert found["count"] == 3
    np.testing.assert_allclose(found["x"], y, rtol=1e-6)
    np.testing.assert_allclose(found_of_x, of_x, rtol=1e-6)
    for name, leaf in of_params.items():
        np.testing.assert_allclose(rest[name], leaf, rtol=1e-6)


def test_parameters_other_arguments_and_what_depends_on_them_alone_are_not_kept():
    """Kept are x, its count, tanh, and the scaled features. Not kept: parameters, their cast, the scale, the mask."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    passes = split_passes(perceptron, params, X, SCALE, KEY)
    _, residuals = passes.forward(params, X, SCALE, KEY)
    assert sorted((leaf.shape, leaf.dtype.name) for leaf in residuals) == [
        ((), "float32"),
        ((2, 3), "float32"),
        ((2, 4), "float32"),
        ((2, 4), "float32"),
    ]


def test_what_has_effects_is_done_once():
    seen = []

    def noting(w, x):
        jax.debug.callback(lambda value: seen.append(("forward", float(value))), x)
        return w * jnp.sin(x)

    passes = split_passes(noting, jnp.float32(2), jnp.float32(3), weights_apart=True)
    _, residuals = passes.forward(jnp.float32(2), jnp.float32(5))
    _, handed = passes.backward(jnp.float32(2), residuals, [jnp.float32(1)])
    passes.weights(jnp.float32(2), residuals, handed)
    jax.effects_barrier()
    assert seen == [("forward", 5.0)]
