"""Which residues of a protein touch, from noisy distances: pair features [l, l], padded on both axes.

Letters: B rows, I, J and K residues of a protein, C channels.

Run it: python examples/proteins.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jvarlen

NUM_KINDS, CHANNELS, NUM_BLOCKS = 20, 16, 2


def make_protein(rng):
    """A random walk; most of its distances are unknown, and the others are noisy."""
    size = int(np.clip(rng.lognormal(3, 0.5), 8, 64))
    places = np.cumsum(rng.normal(0, 2.2, (size, 3)), axis=0)
    distances = np.linalg.norm(places[:, None] - places, axis=-1)
    is_known = rng.random(distances.shape) < 0.3
    noisy = np.where(is_known, distances + rng.normal(0, 1, distances.shape), 0)
    return {
        "residues": rng.integers(NUM_KINDS, size=size),
        "distances": noisy.astype(np.float32),
        "contacts": distances < 8,
    }


def init_params(key):
    keys = iter(jax.random.split(key, 3 + 5 * NUM_BLOCKS))

    def dense(*shape):
        return jax.random.normal(next(keys), shape) / shape[0] ** 0.5

    blocks = [
        {name: dense(CHANNELS, CHANNELS) for name in ("left", "right", "gate", "out", "pointwise")}
        for _ in range(NUM_BLOCKS)
    ]
    return {
        "residues": dense(NUM_KINDS, CHANNELS),
        "inputs": dense(4, CHANNELS),
        "blocks": blocks,
        "head": dense(CHANNELS, 1),
    }


def normalize(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def loss_fn(params, batch):
    """A loss a pair of real residues: padding has no part on either axis, in the loss and in the sums over k."""
    residues_BxI, distances_BxIxJ = batch["residues"], batch["distances"]
    places_I = jnp.arange(residues_BxI.shape[1])
    is_residue_BxI = places_I < batch["lengths"][:, None]
    is_pair_BxIxJ = (is_residue_BxI[:, :, None] & is_residue_BxI[:, None]).astype(jnp.float32)
    apart_IxJ = jnp.abs(places_I[:, None] - places_I) / 32
    inputs = [
        distances_BxIxJ / 16,
        jnp.exp(-distances_BxIxJ / 8),
        distances_BxIxJ != 0,
        jnp.broadcast_to(apart_IxJ, distances_BxIxJ.shape),
    ]
    embedded = params["residues"][residues_BxI]
    pairs = jnp.stack(inputs, axis=-1) @ params["inputs"] + embedded[:, :, None] + embedded[:, None]
    for block in params["blocks"]:
        x = normalize(pairs)
        left, right = (jnp.tanh(x @ block[side]) * is_pair_BxIxJ[..., None] for side in ("left", "right"))
        # Residues i and j through all others: the features of (i, k) times those of (k, j).
        mixed = jnp.einsum("BIKC,BKJC->BIJC", left, right) / jnp.maximum(batch["lengths"], 1)[:, None, None, None]
        pairs += jax.nn.sigmoid(x @ block["gate"]) * (mixed @ block["out"]) + jax.nn.gelu(x @ block["pointwise"])
    logits = (normalize(pairs) @ params["head"])[..., 0]
    losses_BxIxJ = optax.sigmoid_binary_cross_entropy(logits, batch["contacts"]) * is_pair_BxIxJ
    return jnp.sum(losses_BxIxJ), jnp.sum(is_pair_BxIxJ)


def num_pairs(rows, length):
    """The cost of a batch: pairs of residues, padding included."""
    return rows * length**2


rng = np.random.default_rng(0)
proteins = [make_protein(rng) for _ in range(600)]
lengths = jvarlen.measure_lengths(proteins, "residues")
plan = jvarlen.make_plan(lengths, max_tokens=1024, max_shapes=2, cost=num_pairs, max_cost=16_384)
train_step = jvarlen.make_train_step(loss_fn, optax.adam(3e-3))
state = train_step.init(jax.jit(init_params)(jax.random.key(0)))
batches = jvarlen.load(plan, proteins)
step = jvarlen.compile_buckets(train_step, state, batches)
losses = []
for batch in batches:
    state, metrics = step(state, batch)
    losses.append(metrics.loss)
print(f"loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f} in {len(losses)} steps")
