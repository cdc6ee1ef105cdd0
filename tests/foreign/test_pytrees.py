"""Parameters and batches in all sorts of containers and types."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .harness import M, Model, assert_trains_as_a_plain_loop, on_devices, random, random_rows, unequal_weights

D = 4


class Rows(NamedTuple):
    x: jax.Array
    y: jax.Array
    weights: jax.Array


class Layer(NamedTuple):
    w: jax.Array
    b: jax.Array


ROWS = Rows(random_rows(D), random_rows(D, seed=1), unequal_weights())
LAYER = Layer(random(D, D), random(D))


def squared(outputs_BxD, batch):
    losses = jnp.mean((outputs_BxD - batch.y) ** 2, axis=-1)
    return jnp.sum(losses * batch.weights), jnp.sum(batch.weights)


def affine(layer, x_BxD):
    return x_BxD @ layer.w + layer.b


def bare_array():
    return Model(lambda params, batch: squared(batch.x * params, batch), jnp.ones(()), ROWS)


def complex_numbers():
    def loss_fn(params, batch):
        return squared(jnp.abs(batch.x * params["w"]), batch)

    return Model(loss_fn, {"w": jnp.arange(1, D + 1) * (1 + 2j)}, ROWS, num_all_reduces=2)


def dict_with_counts():
    """A batch as a data pipeline leaves it: a dict, counts as integers, those of tokens by microbatch."""

    def loss_fn(params, batch):
        return squared(affine(params, batch["x"]), Rows(batch["x"], batch["y"], batch["weights"]))

    num_tokens = np.arange(M, dtype=np.int32) + 3
    num_sequences = np.int32(np.count_nonzero(ROWS.weights))
    return Model(loss_fn, LAYER, {**ROWS._asdict(), "num_sequences": num_sequences, "num_tokens": num_tokens})


def keys_in_the_batch():
    """A typed key for each row, from the data pipeline."""

    def loss_fn(params, batch):
        noise_BxD = jax.vmap(lambda key: jax.random.normal(key, (D,)))(batch["keys"])
        rows = Rows(batch["x"] + noise_BxD, batch["y"], batch["weights"])
        return squared(affine(params, rows.x), rows)

    keys = jax.random.split(jax.random.key(0), ROWS.weights.shape)
    return Model(loss_fn, LAYER, {**ROWS._asdict(), "keys": keys})


def weight_that_is_a_number():
    """All rows count, and their number is a constant of the program."""

    def loss_fn(params, batch):
        return jnp.sum((affine(params, batch.x) - batch.y) ** 2), batch.x.shape[0]

    return Model(loss_fn, LAYER, ROWS)


def parameters_in_bfloat16():
    def loss_fn(params, batch):
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), batch)
        return squared(affine(params, half.x), half)

    optimizer = optax.sgd(0.125)
    return Model(loss_fn, jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), LAYER), ROWS, optimizer=optimizer)


MODELS = [bare_array, complex_numbers, dict_with_counts, keys_in_the_batch, weight_that_is_a_number]


@on_devices(MODELS)
def test_it_trains_as_in_a_plain_loop(model, num_devices):
    assert_trains_as_a_plain_loop(model, num_devices)


def test_bfloat16_trains_as_in_a_plain_loop_up_to_its_rounding():
    assert_trains_as_a_plain_loop(parameters_in_bfloat16, 4, tolerance=0.02)
