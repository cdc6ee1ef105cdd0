"""A GPT in pure JAX on packed rows of text: layers in a scan, and a learning rate that follows the batch size.

Letters: B rows, T positions, D width, H heads, K size of a head, L layers.

Run it: python examples/gpt.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jvarlen

NUM_BYTES, NUM_LAYERS, WIDTH, NUM_HEADS, ROW_LENGTH = 128, 2, 32, 2, 128


def make_texts(num_texts):
    """Sums in words, the longer the rarer, as bytes."""
    rng = np.random.default_rng(0)
    terms = [rng.integers(10, size=1 + n) for n in rng.geometric(0.25, num_texts).clip(max=12)]
    texts = [" plus ".join(map(str, numbers)) + f" is {sum(numbers)}." for numbers in terms]
    return [np.frombuffer(text.encode(), np.uint8) for text in texts]


def init_params(key):
    """Matrices of layers have a leading axis L."""
    keys = jax.random.split(key, 6)
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    layers = {
        name: jax.random.normal(k, (NUM_LAYERS, *shape)) / shape[0] ** 0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    table, places = (
        jax.random.normal(k, (n, WIDTH)) / 8 for k, n in zip(keys[4:], (NUM_BYTES, ROW_LENGTH), strict=True)
    )
    return {"table": table, "places": places, "layers": layers}


def normalize(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def next_logits(params, inputs_BxT, batch):
    """Texts that share a row don't see each other."""
    segments_BxT = batch.segment_ids
    mask_Bx1xTxT = (segments_BxT[:, :, None] == segments_BxT[:, None, :])[:, None]

    def layer(x_BxTxD, own):
        qkv_BxTxHxK = (normalize(x_BxTxD) @ own["qkv"]).reshape(*inputs_BxT.shape, NUM_HEADS, -1)
        attended = jax.nn.dot_product_attention(*jnp.split(qkv_BxTxHxK, 3, -1), mask=mask_Bx1xTxT, is_causal=True)
        x_BxTxD += attended.reshape(x_BxTxD.shape) @ own["out"]
        return x_BxTxD + jax.nn.gelu(normalize(x_BxTxD) @ own["up"]) @ own["down"], None

    x_BxTxD = params["table"][inputs_BxT] + params["places"][batch.positions]
    x_BxTxD, _ = jax.lax.scan(layer, x_BxTxD, params["layers"])
    return normalize(x_BxTxD) @ params["table"].T


def loss_fn(params, batch):
    """The last byte of a text predicts nothing, least of all the first of the next text in its row."""
    inputs_BxT, targets_BxT, weights_BxT = jvarlen.batches.next_token_targets(batch)
    losses_BxT = optax.softmax_cross_entropy_with_integer_labels(next_logits(params, inputs_BxT, batch), targets_BxT)
    return jnp.sum(losses_BxT * weights_BxT), jnp.sum(weights_BxT)


texts = make_texts(2_400)
adam = optax.adamw(optax.warmup_cosine_decay_schedule(0, 2e-2, 6, 42))  # the rate for 64 texts a step
plan = jvarlen.make_plan(jvarlen.measure_lengths(texts), [(16, ROW_LENGTH)], packing="best_fit")
train_step = jvarlen.make_train_step(loss_fn, optax.chain(adam, jvarlen.scale_by_batch_size(64, rule="sqrt")))
state = train_step.init(jax.jit(init_params)(jax.random.key(0)))
batches = jvarlen.load(plan, texts)
step = jvarlen.compile_buckets(train_step, state, batches)
losses = []
for batch in batches:
    state, metrics = step(state, batch)
    losses.append(metrics.loss)
print(f"loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f} nats a byte in {len(losses)} steps")
