"""A model by layers in Flax NNX, trained under ZeRO-3 on 4 devices: attention, dropout, several samples in a row.

What ZeRO-3 asks of a model is three functions and parameters stacked along the layers, so that a device gathers one
layer at a time. layered_pure_jax.py does the same without Flax.
Letters: L layers, B rows, T positions, D width, V tokens.

Run it: python examples/layered_nnx.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jvarlen
from jvarlen import testing
from jvarlen.batches import next_token_targets
from jvarlen.distributed import split_cpu
from jvarlen.parallel import (
    LayeredModel,
    LayeredParams,
    layered_loss_fn,
)

split_cpu(4)  # before anything is computed; leave it out on a machine with accelerators
L, D, V, ROW_LENGTH = 3, 32, 64, 48
BEGIN = 0  # the input at the first position of a sample, whose tokens are 1 … 63


def make_samples(num_samples):
    """Each token is followed by one of two."""
    rng = np.random.default_rng(0)
    followers = rng.integers(1, V, (V, 2))

    def sample(size):
        tokens = [BEGIN]
        for choice in rng.integers(2, size=size):
            tokens.append(followers[tokens[-1], choice])
        return np.array(tokens[1:])

    return [sample(size) for size in rng.geometric(0.08, num_samples).clip(max=ROW_LENGTH)]


class Block(nnx.Module):
    """Without a key, there is no dropout."""

    def __init__(self, *, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(D, rngs=rngs), nnx.LayerNorm(D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=D, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(D, 2 * D, rngs=rngs), nnx.Linear(2 * D, D, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)

    def __call__(self, x_BxTxD, mask_BxTxT, key):
        x_BxTxD += self.attention(self.norm1(x_BxTxD), mask=mask_BxTxT[:, None])
        hidden = self.dropout(
            nnx.gelu(self.up(self.norm2(x_BxTxD))),
            deterministic=key is None,
            rngs=None if key is None else nnx.Rngs(dropout=key),
        )
        return x_BxTxD + self.down(hidden)


class Ends(nnx.Module):
    def __init__(self, *, rngs):
        self.tokens, self.places = nnx.Embed(V, D, rngs=rngs), nnx.Embed(ROW_LENGTH, D, rngs=rngs)
        self.norm, self.head = nnx.LayerNorm(D, rngs=rngs), nnx.Linear(D, V, rngs=rngs)


# Arrays apart from the rest: the functions below get only arrays. `vmap` stacks those of all blocks.
@nnx.split_rngs(splits=L)
@nnx.vmap(in_axes=0, out_axes=0)
def make_blocks(rngs):
    return Block(rngs=rngs)


ends_graph, ends_params = nnx.split(Ends(rngs=nnx.Rngs(0)))
block_graph, block_params = nnx.split(make_blocks(nnx.Rngs(1)))
params = jax.tree.map(np.asarray, LayeredParams(ends=ends_params, layers=block_params))


def embed(ends, microbatch, axes):
    """The input of a position is the token before it in its sample."""
    ends = nnx.merge(ends_graph, ends)
    inputs_BxT, _, _ = next_token_targets(microbatch, begin_token=BEGIN)
    return ends.tokens(inputs_BxT) + ends.places(microbatch.positions)


def layer(own, x_BxTxD, microbatch, axes):
    """Positions see those before them in their sample. The key is the same on any layout."""
    mask_BxTxT = jvarlen.attention.segment_mask(microbatch.segment_ids, microbatch.segment_ids)
    return nnx.merge(block_graph, own)(x_BxTxD, mask_BxTxT, axes.key)


def loss(ends, x_BxTxD, microbatch, axes):
    """Sums over real tokens: padding has weight 0."""
    ends = nnx.merge(ends_graph, ends)
    logits_BxTxV = ends.head(ends.norm(x_BxTxD))
    _, targets_BxT, weights_BxT = next_token_targets(microbatch, begin_token=BEGIN)
    losses_BxT = optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, targets_BxT)
    return jnp.sum(losses_BxT * weights_BxT), jnp.sum(weights_BxT)


model = LayeredModel(embed, layer, loss)
samples = make_samples(1_500)
lengths = jvarlen.measure_lengths(samples, progress=False)
plan = jvarlen.make_plan(lengths, [(4, ROW_LENGTH)], packing="best_fit", num_microbatches=4)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

# Samples that share a row do not know of each other. In float32, as Flax's layers ask for, and without dropout.
testing.assert_packing_invariant(layered_loss_fn(model, takes_key=False), params, samples[:6], dtype="float32")


def train(train_step, layout):
    """The state after the plan, and the loss of each step."""
    state = train_step.init(params, seed=0)
    batches = jvarlen.load(plan, samples, layout=layout)
    step = jvarlen.compile_buckets(train_step, state, batches, progress=False)
    losses = []
    with jvarlen.no_recompiles():
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(float(metrics.loss))
    return state, losses


layout = "data4.zero3"
train_step = jvarlen.make_train_step(model, optimizer, layout=layout)
state, losses = train(train_step, layout)
kernel = state.params.layers["up"]["kernel"]
print(f"a device holds {kernel.addressable_shards[0].data.shape} of {kernel.shape}")

# The same on one device, which holds everything.
whole, expected = train(jvarlen.make_train_step(model, optimizer), None)
np.testing.assert_allclose(losses, expected, rtol=1e-4)  # float32, added in another order
print(f"{len(losses)} steps, with the losses of one device: {losses[0]:.3f} -> {losses[-1]:.3f}")

trained = train_step.gather_params(state)  # whole NumPy arrays, to be saved or evaluated
batch = next(jvarlen.load(plan, samples))
evaluate = jax.jit(jvarlen.make_eval_step(model))
_, metrics = evaluate(trained, batch)  # no dropout: parameters alone have no key
_, expected_metrics = evaluate(whole.params, batch)
np.testing.assert_allclose(metrics.loss, expected_metrics.loss, rtol=1e-4)
print(f"without dropout: {float(metrics.loss):.3f}")
