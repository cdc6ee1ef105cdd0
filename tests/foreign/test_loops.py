"""Losses made of loops and branches, which JAX restricts more on a mesh than on one device."""

import jax
import jax.numpy as jnp

from .harness import Model, assert_trains_as_a_plain_loop, on_devices, random_params, random_rows, unequal_weights

T, D = 5, 4


def rows_batch(**more):
    return {"x": random_rows(T, D), "y": random_rows(D, seed=1), "weights": unequal_weights(), **more}


def squared(outputs_BxD, batch):
    losses = jnp.mean((outputs_BxD - batch["y"]) ** 2, axis=-1)
    return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])


def rnn_by_scan_from_zeros():
    def loss_fn(params, batch):
        def cell(hidden_BxD, x_BxD):
            return jnp.tanh(x_BxD @ params["in"] + hidden_BxD @ params["hidden"]), None

        zeros = jnp.zeros(batch["y"].shape)
        return squared(jax.lax.scan(cell, zeros, jnp.moveaxis(batch["x"], 1, 0))[0], batch)

    return Model(loss_fn, random_params(**{"in": (D, D), "hidden": (D, D)}), rows_batch())


def while_loop_of_a_threshold():
    """A loop without a gradient, such as a search, whose number of turns depends on the data."""

    def loss_fn(params, batch):
        scale = jax.lax.while_loop(
            lambda scale: jnp.sum(batch["x"] ** 2) / scale > 4.0, lambda scale: 2.0 * scale, jnp.ones(())
        )
        return squared(batch["x"][:, 0] @ params["w"] / scale, batch)

    return Model(loss_fn, random_params(w=(D, D)), rows_batch())


def branch_that_is_constant():
    """One branch of a `cond` depends on the parameters, the other gives zeros."""

    def loss_fn(params, batch):
        outputs_BxD = jax.lax.cond(
            jnp.any(batch["weights"] > 4),
            lambda x_BxD: x_BxD @ params["w"],
            lambda x_BxD: jnp.zeros(x_BxD.shape),
            batch["x"][:, 0],
        )
        return squared(outputs_BxD, batch)

    return Model(loss_fn, random_params(w=(D, D)), rows_batch())


MODELS = [
    rnn_by_scan_from_zeros,
    while_loop_of_a_threshold,
    branch_that_is_constant,
]


@on_devices(MODELS, others=(1, None))
def test_it_trains_as_in_a_plain_loop(model, num_devices):
    assert_trains_as_a_plain_loop(model, num_devices)
