"""Optimizers and masks see the model's own parameters on any layout: a step has the numbers of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jvarlen.parallel import LayeredModel, LayeredParams, TensorSpec, column_linear, row_linear
from jvarlen.testing import assert_layout_invariant

WIDTH, HIDDEN, NUM_VALUES = 24, 96, 13  # with more than 1,024 elements, kernels are sharded; nothing divides 13


def stack(params):
    return LayeredParams(
        {"table": params["table"], "scale": params["scale"]},
        jax.tree.map(lambda *own: jnp.stack(own), *params["blocks"]),
    )


def layer(own, x, batch, axes):
    gates, values = jnp.split(column_linear(x * own["scale"], own["in"], axes=axes), 2, axis=-1)
    return x + row_linear(jax.nn.sigmoid(gates) * values, own["out"], axes=axes)


def loss(ends, x, batch, axes):
    losses = optax.softmax_cross_entropy_with_integer_labels(x * ends["scale"] @ ends["table"].T, batch["targets"])
    return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])


MODEL = LayeredModel(
    lambda ends, batch, axes: ends["table"][batch["tokens"]],
    layer,
    loss,
    specs=LayeredParams(
        {"table": P(), "scale": P()},
        {"in": TensorSpec(P(None, "tensor"), num_blocks=2), "out": P("tensor"), "scale": P()},
    ),
    stack=stack,
)


def own_params(num_layers=4):
    rng = np.random.default_rng(0)
    return {
        "table": rng.normal(size=(NUM_VALUES, WIDTH)) / 4,
        "scale": 1 + rng.normal(size=WIDTH) / 10,
        "blocks": [
            {
                "in": rng.normal(size=(WIDTH, HIDDEN)) / 5,
                "out": rng.normal(size=(HIDDEN // 2, WIDTH)) / 7,
                "scale": 1 + rng.normal(size=WIDTH) / 10,
            }
            for _ in range(num_layers)
        ],
    }


def batch_of(num_microbatches=4):
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, NUM_VALUES, (num_microbatches, 2, 6))
    weights = rng.uniform(0.5, 2, tokens.shape) * (rng.random(tokens.shape) < 0.8)
    return {"tokens": tokens, "targets": np.roll(tokens, 1, -1), "weights": weights}


def matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def by_name(params):
    return jax.tree.map_with_path(lambda path, _: "'blocks'][1]" in jax.tree_util.keystr(path), params)


def per_layer(params):
    return jax.tree.map_with_path(lambda path, _: "slow" if "[2]" in jax.tree_util.keystr(path) else "fast", params)


OPTIMIZERS = {
    "decay of matrices": optax.adamw(1e-2, weight_decay=0.5, eps=1e-5, mask=matrices),
    "decay of names": optax.adamw(1e-2, weight_decay=0.5, eps=1e-5, mask=by_name),
    "decay of a tree": optax.adamw(1e-2, weight_decay=0.5, eps=1e-5, mask=by_name(own_params())),
    "masked": optax.masked(optax.adam(1e-2, eps=1e-5), matrices),
    "rates of layers": optax.partition({"slow": optax.sgd(1e-3), "fast": optax.adam(1e-2, eps=1e-5)}, per_layer),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8, multiply_by_parameter_scale=True),
    "clipped by block": optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(1.0, momentum=0.9)),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adaptive_grad_clip(0.01), optax.sgd(1.0)),
    "lamb": optax.lamb(1e-2, eps=1e-5),
    "lars": optax.lars(1e-1, momentum=0.9),
    "novograd": optax.novograd(1e-2),
    "muon": optax.contrib.muon(1e-2),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, key=3), optax.sgd(0.1)),
    "line search": optax.lbfgs(memory_size=3, linesearch=optax.scale_by_backtracking_linesearch(4)),
    "accumulated": optax.MultiSteps(optax.apply_if_finite(optax.lamb(1e-2, eps=1e-5), 2), 2),
}
LAYOUTS = ["data2.zero1", "data4.zero3", "data2.stage2", "data1.tensor2", "data2.stage2.tensor2.zero1", "data1.stage4"]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_gives_the_numbers_of_one_device_on_any_layout(name):
    assert_layout_invariant(MODEL, own_params(), batch_of(), LAYOUTS, optimizer=OPTIMIZERS[name], num_steps=3)
