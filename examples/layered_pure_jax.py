"""A model by layers in pure JAX, trained under ZeRO-3 on 4 devices: a gated convolution instead of attention.

What ZeRO-3 asks of a model is three functions and parameters stacked along the layers, so that a device gathers one
layer at a time. Embedding and output head are the same table. layered_nnx.py does the same in Flax NNX.
Letters: L layers, B rows, T positions, D width, K positions that a convolution sees, V tokens.

Run it: python examples/layered_pure_jax.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jvarlen
from jvarlen.batches import next_token_targets
from jvarlen.distributed import split_cpu
from jvarlen.parallel import (
    LayeredModel,
    LayeredParams,
)

split_cpu(4)  # before anything is computed; leave it out on a machine with accelerators
L, D, K, V = 3, 32, 4, 64
BEGIN = 0  # the input at the first position of a sample, whose tokens are 1 … 63


def make_samples(num_samples):
    """Each repeats four random tokens, so all others can be predicted."""
    rng = np.random.default_rng(0)
    sizes = 4 + rng.geometric(0.08, num_samples).clip(max=44)
    return [np.resize(rng.integers(1, V, 4), size) for size in sizes]


def init_params(key):
    """Small random weights. Those of layers have a leading axis L."""
    keys = jax.random.split(key, 4)
    layers = {
        "conv": jax.random.normal(keys[0], (L, K, D)) / 2,
        "up": jax.random.normal(keys[1], (L, D, 2 * D)) / D**0.5,
        "down": jax.random.normal(keys[2], (L, D, D)) / D**0.5,
        "scale": jnp.ones((L, D)),
    }
    return LayeredParams(ends={"table": jax.random.normal(keys[3], (V, D)) / 8, "scale": jnp.ones(D)}, layers=layers)


def normalize(x, scale):
    return scale * x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def embed(ends, microbatch, axes):
    """The input of a position is the token before it."""
    inputs_BxT, _, _ = next_token_targets(microbatch, begin_token=BEGIN)
    return ends["table"][inputs_BxT]


def layer(own, x_BxTxD, microbatch, axes):
    """Adds a gated convolution over the position and those before it, so padding, which comes last, takes no part."""
    value, gate = jnp.split(normalize(x_BxTxD, own["scale"]) @ own["up"], 2, axis=-1)
    padded = jnp.pad(value, ((0, 0), (K - 1, 0), (0, 0)))
    mixed = sum(own["conv"][k] * padded[:, k : k + value.shape[1]] for k in range(K))
    return x_BxTxD + (mixed * jax.nn.sigmoid(gate)) @ own["down"]


def loss(ends, x_BxTxD, microbatch, axes):
    """Sums over real tokens: padding and padding rows have weight 0."""
    logits_BxTxV = normalize(x_BxTxD, ends["scale"]) @ ends["table"].T
    _, targets_BxT, weights_BxT = next_token_targets(microbatch, begin_token=BEGIN)
    losses_BxT = optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, targets_BxT)
    correct = (jnp.argmax(logits_BxTxV, axis=-1) == targets_BxT) * weights_BxT
    return jnp.sum(losses_BxT * weights_BxT), jnp.sum(weights_BxT), {"correct": jnp.sum(correct)}


model = LayeredModel(embed, layer, loss)
samples = make_samples(1_500)
lengths = jvarlen.measure_lengths(samples, progress=False)
buckets = jvarlen.make_buckets(lengths, max_tokens=256, max_shapes=2, num_microbatches=4)
plan = jvarlen.make_plan(lengths, buckets, order="shuffle", num_microbatches=4)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2), jvarlen.scale_by_batch_size(64, rule="sqrt"))


def train(train_step, layout):
    """The state after the plan, and the metrics of each step."""
    state = train_step.init(params)
    batches = jvarlen.load(plan, samples, layout=layout)
    step = jvarlen.compile_buckets(train_step, state, batches, progress=False)
    history = []
    with jvarlen.no_recompiles():
        for batch in batches:
            state, metrics = step(state, batch)
            history.append(metrics)
    return state, history


layout = "data4.zero3"
params = jax.tree.map(np.asarray, jax.jit(init_params)(jax.random.key(0)))
train_step = jvarlen.make_train_step(model, optimizer, layout=layout)
state, sharded = train(train_step, layout)
print(f"a device holds {state.params.layers['up'].addressable_shards[0].data.shape} of {(L, D, 2 * D)}")

# The same on one device, which holds everything.
whole, expected = train(jvarlen.make_train_step(model, optimizer), None)
losses, expected_losses = ([float(metrics.loss) for metrics in history] for history in (sharded, expected))
np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)  # float32, added in another order
print(f"{len(losses)} steps, with the losses of one device")
for name, steps in (("first", sharded[:10]), ("last", sharded[-10:])):
    sums = jvarlen.MetricSums()
    for metrics in steps:
        sums.add(metrics)
    total = sums.total
    print(f"{name} ten steps: loss {sums.loss:.3f}, {total.sums['correct'] / total.weight_sum:.0%} correct")

trained = train_step.gather_params(state)  # whole NumPy arrays, to be saved or evaluated
for leaf, expected_leaf in zip(jax.tree.leaves(trained), jax.tree.leaves(whole.params), strict=True):
    np.testing.assert_allclose(leaf, expected_leaf, atol=1e-4)
print(f"parameters: {sum(leaf.size for leaf in jax.tree.leaves(trained)):,}")
