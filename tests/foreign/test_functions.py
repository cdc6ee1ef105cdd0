"""Losses with derivatives, kernels, transformations and loops of their own, which a mesh restricts more."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas

from .harness import (
    B,
    M,
    Model,
    assert_trains_as_a_plain_loop,
    on_devices,
    random_params,
    random_rows,
    squared,
    unequal_weights,
)

T, D = 6, 4


def rows_batch(**more):
    return {"x": random_rows(T, D), "y": random_rows(D, seed=1), "weights": unequal_weights(), **more}


def pallas_kernel():
    def scale_kernel(x_ref, w_ref, out_ref):
        out_ref[...] = x_ref[...] * w_ref[...]

    @jax.custom_vjp
    def scaled(x_BxD, w_BxD):
        shape = jax.ShapeDtypeStruct(x_BxD.shape, x_BxD.dtype)
        return pallas.pallas_call(scale_kernel, out_shape=shape, interpret=True)(x_BxD, w_BxD)

    scaled.defvjp(lambda x, w: (scaled(x, w), (x, w)), lambda kept, by: (scaled(by, kept[1]), scaled(by, kept[0])))

    def loss_fn(params, batch):
        return squared(scaled(batch["x"][:, 0], jnp.broadcast_to(params["w"], batch["y"].shape)), batch)

    return Model(loss_fn, random_params(w=(D,)), rows_batch())


def recomputed_activations():
    def loss_fn(params, batch):
        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
        def block(x_BxD, w_DxD):
            return jnp.tanh(x_BxD @ w_DxD), None

        return squared(jax.lax.scan(jax.checkpoint(block), batch["x"][:, 0], params["layers"])[0], batch)

    return Model(loss_fn, random_params(layers=(3, D, D)), rows_batch())


def mean_over_segments():
    """Nodes of graphs, B graphs a microbatch."""

    def loss_fn(params, batch):
        nodes_NxD = jnp.tanh(batch["nodes"] @ params["w"])
        totals_BxD = jax.ops.segment_sum(nodes_NxD, batch["graph"], num_segments=B)
        counts_B = jax.ops.segment_sum(jnp.ones(T), batch["graph"], num_segments=B)
        return squared(totals_BxD / jnp.maximum(counts_B, 1)[:, None], batch)

    rng = np.random.default_rng(0)
    batch = {
        "nodes": rng.normal(size=(M, T, D)),
        "graph": np.sort(rng.integers(0, B, (M, T)), axis=1).astype(np.int32),
        "y": random_rows(D, seed=1),
        "weights": unequal_weights(),
    }
    return Model(loss_fn, random_params(w=(D, D)), batch)


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


MODELS = [rnn_by_scan_from_zeros, while_loop_of_a_threshold, pallas_kernel, recomputed_activations, mean_over_segments]


@on_devices(MODELS, others=(1, None))
def test_it_trains_as_in_a_plain_loop(model, num_devices):
    assert_trains_as_a_plain_loop(model, num_devices)
