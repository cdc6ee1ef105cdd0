"""Losses that communicate over the mesh axis themselves, synchronously, one microbatch of each shard at a time.

What they compute depends on which microbatches meet. So the loop that they are compared with takes microbatch j of each
shard together, N of them under a `vmap` that has the axis.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from .harness import Course, M, Model, assert_same_course, random_params, random_rows, train, unequal_weights, weighted

D = 4


def rows_batch():
    return {"x": random_rows(D), "y": random_rows(D, seed=1), "weights": unequal_weights()}


def contrastive_loss():
    """The negatives of a row are the other rows of all shards."""

    def loss_fn(params, batch):
        def unit(x_BxD):
            return x_BxD / jnp.sqrt(jnp.sum(x_BxD**2, axis=-1, keepdims=True) + 1e-3)

        x_BxD, y_BxD = unit(batch["x"] @ params["w"]), unit(batch["y"] @ params["u"])
        all_y_KxD = jax.lax.all_gather(y_BxD, "data", tiled=True)
        is_real_K = jax.lax.all_gather(batch["weights"], "data", tiled=True) > 0
        scores_BxK = jnp.where(is_real_K, 5 * x_BxD @ all_y_KxD.T, -1e9)
        own_B = jax.lax.axis_index("data") * len(x_BxD) + jnp.arange(len(x_BxD))
        losses_B = optax.softmax_cross_entropy_with_integer_labels(scores_BxK, own_B)
        return weighted(jnp.where(batch["weights"] > 0, losses_B, 0), batch)

    return Model(loss_fn, random_params(w=(D, D), u=(D, D)), rows_batch())


def synchronised_batch_normalisation():
    """Statistics of the rows of all shards, and running ones."""

    def loss_fn(params, batch, extra):
        x_BxD, is_real_Bx1 = batch["x"] @ params["w"], (batch["weights"] > 0)[:, None]
        count = jnp.maximum(jax.lax.psum(jnp.sum(is_real_Bx1), "data"), 1)
        mean_D = jax.lax.psum(jnp.sum(x_BxD * is_real_Bx1, axis=0), "data") / count
        variance_D = jax.lax.psum(jnp.sum((x_BxD - mean_D) ** 2 * is_real_Bx1, axis=0), "data") / count
        outputs_BxD = (x_BxD - mean_D) / jnp.sqrt(variance_D + 1e-3)
        statistics = {"mean": 0.9 * extra["mean"] + 0.1 * mean_D, "var": 0.9 * extra["var"] + 0.1 * variance_D}
        return *weighted(jnp.sum((outputs_BxD - batch["y"]) ** 2, axis=-1), batch), statistics

    extra = {"mean": jnp.zeros(D), "var": jnp.ones(D)}
    return Model(loss_fn, random_params(w=(D, D)), rows_batch(), extra=extra)


def squared(params, batch):
    return weighted(jnp.sum((batch["x"] @ params["w"] - batch["y"]) ** 2, axis=-1), batch)


def both_sums_reduced():
    return Model(
        lambda params, batch: jax.lax.psum(squared(params, batch), "data"), random_params(w=(D, D)), rows_batch()
    )


def train_in_groups(model, num_shards, num_steps=3):
    """Microbatch j of each shard together."""
    params, extra, opt_state = model.params, jax.device_get(model.extra), model.optimizer.init(model.params)
    batch = jax.tree.map(lambda leaf: leaf.reshape(num_shards, -1, *leaf.shape[1:]), model.batch)
    update, apply = jax.jit(model.optimizer.update), jax.jit(optax.apply_updates)

    @jax.jit
    def of_group(params, extra, group):
        def loss(params):
            of_shards = jax.vmap(model.loss_fn, (None, 0) + (None,) * (extra is not None), axis_name="data")
            loss_sums, *others = of_shards(params, group, *(() if extra is None else (extra,)))
            return jnp.sum(loss_sums), (loss_sums, *others)

        (_, aux), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return grads, *aux

    losses = []
    for _ in range(num_steps):
        parts = [
            of_group(params, extra, jax.tree.map(lambda leaf, j=j: leaf[:, j], batch)) for j in range(M // num_shards)
        ]
        parts = jax.device_get(parts)
        total = sum(float(part[2].sum()) for part in parts)
        losses.append(sum(float(part[1].sum()) for part in parts) / total)
        grads = jax.tree.map(lambda *leaves, by=total: sum(leaves) / by, *(part[0] for part in parts))
        updates, opt_state = update(grads, opt_state, params)
        params = apply(params, updates)
        if extra is not None:
            changes = [
                jax.tree.map(lambda new, old, w=part[2]: np.tensordot(w, new - old, 1), part[3], extra)
                for part in parts
            ]
            extra = jax.tree.map(lambda old, *changes, by=total: old + sum(changes) / by, extra, *changes)
    return Course([np.float64(loss) for loss in losses], [{}] * num_steps, params, extra)


MODELS = [contrastive_loss, synchronised_batch_normalisation, both_sums_reduced]


@pytest.mark.parametrize(("make_model", "num_devices"), [(MODELS[0], 8), *((model, 2) for model in MODELS[1:])])
def test_it_trains_as_groups_of_microbatches_do(make_model, num_devices):
    with jax.enable_x64(True):
        model = make_model()
        assert_same_course(train(model, num_devices).course, train_in_groups(model, num_devices))
