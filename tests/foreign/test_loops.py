"""Losses made of loops and branches, which JAX restricts more on a mesh than on one device."""

import jax
import jax.numpy as jnp
import numpy as np

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


def fori_loop_from_zeros():
    def loss_fn(params, batch):
        def body(t, total_BxD):
            return jnp.sin(total_BxD + batch["x"][:, t] * params["w"])

        return squared(jax.lax.fori_loop(0, T, body, jnp.zeros(batch["y"].shape)), batch)

    return Model(loss_fn, random_params(w=(D,)), rows_batch())


def while_loop_of_a_threshold():
    """A loop without a gradient, such as a search, whose number of turns depends on the data."""

    def loss_fn(params, batch):
        scale = jax.lax.while_loop(
            lambda scale: jnp.sum(batch["x"] ** 2) / scale > 4.0, lambda scale: 2.0 * scale, jnp.ones(())
        )
        return squared(batch["x"][:, 0] @ params["w"] / scale, batch)

    return Model(loss_fn, random_params(w=(D, D)), rows_batch())


def conditional_random_field():
    """A linear chain: its partition function by the forward algorithm."""
    num_tags = 3

    def loss_fn(params, batch):
        def of_row(x_TxD, tags_T, length):
            emissions_TxK = x_TxD @ params["emission"]
            is_real_T = jnp.arange(T) < length

            def forward(alpha_K, at):
                emission_K, is_real = at
                moved_K = jax.nn.logsumexp(alpha_K[:, None] + params["transition"], axis=0) + emission_K
                return jnp.where(is_real, moved_K, alpha_K), None

            alpha_K, _ = jax.lax.scan(forward, emissions_TxK[0], (emissions_TxK[1:], is_real_T[1:]))
            of_path_T = jnp.take_along_axis(emissions_TxK, tags_T[:, None], axis=1)[:, 0]
            of_path_T = of_path_T.at[1:].add(params["transition"][tags_T[:-1], tags_T[1:]])
            return jax.nn.logsumexp(alpha_K) - jnp.sum(of_path_T * is_real_T)

        losses_B = jax.vmap(of_row)(batch["x"], batch["tags"], batch["lengths"])
        weights_B = (batch["lengths"] > 0).astype(losses_B.dtype)
        return jnp.sum(losses_B * weights_B), jnp.sum(weights_B)

    rng = np.random.default_rng(0)
    lengths = (rng.integers(1, T + 1, unequal_weights().shape) * (unequal_weights() > 0)).astype(np.int32)
    tags = rng.integers(0, num_tags, (*lengths.shape, T)).astype(np.int32)
    params = random_params(emission=(D, num_tags), transition=(num_tags, num_tags))
    return Model(loss_fn, params, {"x": random_rows(T, D), "tags": tags, "lengths": lengths})


def soft_dynamic_time_warping():
    def loss_fn(params, batch):
        def distance(one_TxD, other_TxD):
            costs_TxT = jnp.sum((one_TxD[:, None] - other_TxD[None]) ** 2, axis=-1)

            def row(above_T, costs_T):
                def cell(left_and_diagonal, at):
                    cost, above = at
                    left, diagonal = left_and_diagonal
                    here = cost - jax.nn.logsumexp(-jnp.stack([left, diagonal, above]))
                    return (here, above), here

                return (jax.lax.scan(cell, (jnp.array(1e3), above_T[0]), (costs_T, above_T[1:]))[1],) * 2

            def of_row(above_T, costs_T):
                cells_T, _ = row(above_T, costs_T)
                return jnp.concatenate([jnp.full(1, 1e3), cells_T]), None

            first = jnp.concatenate([jnp.zeros(1), jnp.full(T, 1e3)])
            return jax.lax.scan(of_row, first, costs_TxT)[0][-1]

        losses_B = jax.vmap(distance)(batch["x"] * params["scale"], jnp.tile(batch["y"][:, None], (1, T, 1)))
        return jnp.sum(losses_B * batch["weights"]), jnp.sum(batch["weights"])

    return Model(loss_fn, random_params(scale=(D,)), rows_batch())


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
    fori_loop_from_zeros,
    while_loop_of_a_threshold,
    conditional_random_field,
    soft_dynamic_time_warping,
    branch_that_is_constant,
]


@on_devices(MODELS, others=(1, 8))
def test_it_trains_as_in_a_plain_loop(model, num_devices):
    assert_trains_as_a_plain_loop(model, num_devices)
