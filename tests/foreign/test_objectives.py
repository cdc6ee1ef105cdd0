"""Objectives with random numbers, frozen weights and statistics: what is trained, and towards what."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .harness import (
    Model,
    assert_trains_as_a_plain_loop,
    on_devices,
    random,
    random_params,
    random_rows,
    unequal_weights,
    weighted,
)

D, HIDDEN, NUM_CLASSES = 4, 6, 5


def rows_batch(**more):
    labels = np.random.default_rng(0).integers(0, NUM_CLASSES, unequal_weights().shape).astype(np.int32)
    return {"x": random_rows(D), "labels": labels, "weights": unequal_weights(), **more}


def cross_entropy(logits_BxC, batch):
    return weighted(optax.softmax_cross_entropy_with_integer_labels(logits_BxC, batch["labels"]), batch)


def variational_autoencoder():
    """Reparametrised; the parts of the bound are summed up beside it."""

    def loss_fn(params, batch, key):
        mean_BxD, log_scale_BxD = jnp.split(batch["x"] @ params["encoder"], 2, axis=-1)
        latent_BxD = mean_BxD + jnp.exp(log_scale_BxD) * jax.random.normal(key, mean_BxD.shape)
        reconstruction_B = jnp.sum((latent_BxD @ params["decoder"] - batch["x"]) ** 2, axis=-1)
        divergence_B = jnp.sum(jnp.exp(2 * log_scale_BxD) + mean_BxD**2 - 1 - 2 * log_scale_BxD, axis=-1) / 2
        loss_sum, weight_sum = weighted(reconstruction_B + divergence_B, batch)
        sums = {"reconstruction": weighted(reconstruction_B, batch)[0], "rows": jnp.sum(batch["weights"] > 0)}
        return loss_sum, weight_sum, sums

    return Model(loss_fn, random_params(encoder=(D, 4), decoder=(2, D)), rows_batch(), seed=2)


def low_rank_adapters():
    """The base weights are closed over and stay."""
    base = random_params(w=(D, HIDDEN), out=(HIDDEN, NUM_CLASSES))

    def loss_fn(params, batch):
        adapted = jax.tree.map(lambda w, adapter: w + adapter["a"] @ adapter["b"], base, params, is_leaf=is_array)
        return cross_entropy(jax.nn.relu(batch["x"] @ adapted["w"]) @ adapted["out"], batch)

    is_array = lambda leaf: isinstance(leaf, jax.Array)  # noqa: E731
    adapters = {
        "w": random_params(a=(D, 1), b=(1, HIDDEN)),
        "out": {"a": jnp.asarray(random(HIDDEN, 1)), "b": jnp.zeros((1, NUM_CLASSES))},
    }
    return Model(loss_fn, adapters, rows_batch())


def average_of_parameters():
    """As a teacher, which the parameters are at the beginning: the state holds each of these arrays twice."""

    def loss_fn(params, batch, extra):
        targets_BxC = jax.nn.softmax(batch["x"] @ extra["w"])
        loss_sum, weight_sum = weighted(
            optax.softmax_cross_entropy(batch["x"] @ params["w"] + params["b"], targets_BxC), batch
        )
        average = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, extra, jax.lax.stop_gradient(params))
        return loss_sum, weight_sum, average

    params = random_params(w=(D, NUM_CLASSES), b=(NUM_CLASSES,))
    return Model(loss_fn, params, rows_batch(), extra=params)


def counts_and_codes_in_place():
    """Extra state of several types, changed in place: means by class, counts, a flag, a key."""

    def loss_fn(params, batch, extra):
        codes_BxD = batch["x"] @ params["w"]
        one_hot_BxC = jax.nn.one_hot(batch["labels"], NUM_CLASSES) * (batch["weights"] > 0)[:, None]
        extra["means"] = 0.5 * extra["means"] + 0.5 * one_hot_BxC.T @ codes_BxD
        extra["is_seen"] |= jnp.any(batch["labels"] == 1)
        extra["counts"] += jnp.sum(one_hot_BxC, axis=0).astype(extra["counts"].dtype)
        distances_B = jnp.sum((codes_BxD - jax.lax.stop_gradient(extra["means"])[batch["labels"]]) ** 2, axis=-1)
        return *weighted(distances_B, batch), {"weight": jnp.sum(batch["weights"])}, extra

    extra = {
        "means": jnp.zeros((NUM_CLASSES, D)),
        "counts": jnp.full(NUM_CLASSES, 3, np.uint32),
        "is_seen": jnp.array(False),
        "key": jax.random.key(1),
    }
    return Model(loss_fn, random_params(w=(D, D)), rows_batch(), extra=extra, num_all_reduces=2)


MODELS = [variational_autoencoder, low_rank_adapters, average_of_parameters, counts_and_codes_in_place]


@on_devices(MODELS)
def test_it_trains_as_in_a_plain_loop(model, num_devices):
    assert_trains_as_a_plain_loop(model, num_devices)
