"""A model of your own in pure JAX: of which of four sources is a text? Attention, and a mean over the tokens.

What `jvarlen` asks of a model is one function: loss_fn(params, microbatch) -> (sum of losses, sum of weights).
own_model_linen.py and own_model_nnx.py do the same in Flax.
Letters: B rows, T positions, D width, C sources.

Run it: python examples/own_model_pure_jax.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jvarlen
from jvarlen import testing

NUM_SOURCES, NUM_TOKENS, WIDTH = 4, 32, 16


def make_samples(num_samples):
    """The first token is the source, the others are drawn as that source draws them."""
    rng = np.random.default_rng(0)
    frequencies = rng.dirichlet(np.full(NUM_TOKENS, 0.5), size=NUM_SOURCES)
    sources = rng.integers(NUM_SOURCES, size=num_samples)
    sizes = rng.geometric(0.1, num_samples).clip(max=48)
    texts = [rng.choice(NUM_TOKENS, n, p=frequencies[source]) for source, n in zip(sources, sizes, strict=True)]
    return [np.append(source, text) for source, text in zip(sources, texts, strict=True)]


def init_params(key):
    """Small random weights."""
    shapes = {"embed": (NUM_TOKENS, WIDTH), "qkv": (3, WIDTH, WIDTH), "head": (WIDTH, NUM_SOURCES)}
    keys = jax.random.split(key, len(shapes))
    return {name: jax.random.normal(k, shape) / 4 for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def predict(params, text_BxT, lengths_B):
    """Logits of the sources. Padding takes no part: not in attention, nor in the mean, whose divisor is never 0."""
    x_BxTxD = params["embed"][text_BxT]
    query, key, value = (x_BxTxD @ weight for weight in params["qkv"])
    heads = (query[:, :, None], key[:, :, None], value[:, :, None])  # an axis for one head
    x_BxTxD += jvarlen.attend(*heads, lengths_B, causal=False)[:, :, 0]
    is_token_BxTx1 = jvarlen.attention.padding_mask(lengths_B, text_BxT.shape[1])[..., None]
    mean_BxD = jnp.sum(x_BxTxD * is_token_BxTx1, axis=1) / jnp.maximum(lengths_B, 1)[:, None]
    return mean_BxD @ params["head"]


def loss_fn(params, microbatch):
    """Sums over real rows: a padding row has length 0, and so weight 0."""
    labels_B, text_BxT = microbatch.tokens[:, 0], microbatch.tokens[:, 1:]
    logits_BxC = predict(params, text_BxT, jnp.maximum(microbatch.lengths - 1, 0))
    losses_B = optax.softmax_cross_entropy_with_integer_labels(logits_BxC, labels_B)
    weights_B = (microbatch.lengths > 0).astype(losses_B.dtype)
    return jnp.sum(losses_B * weights_B), jnp.sum(weights_B)


samples = make_samples(2_000)
lengths = jvarlen.measure_lengths(samples, progress=False)
params = jax.jit(init_params)(jax.random.key(0))

(batch,) = jvarlen.load(jvarlen.make_plan(lengths[:6], [(6, 49)], order="length"), samples[:6])
splits = testing.assert_partition_invariant(loss_fn, params, batch, num_shards=[1])
testing.assert_finite_on_padding_rows(loss_fn, params, [batch])
print("the same loss and gradient, in float64, on all of:", *splits, sep="\n  ")

buckets = jvarlen.make_buckets(lengths, max_tokens=1024, max_shapes=2)
plans = [jvarlen.make_plan(lengths, buckets, order="shuffle", epoch=epoch) for epoch in range(3)]
optimizer = optax.chain(optax.adamw(3e-3), jvarlen.scale_by_batch_size(32, rule="sqrt"))
train_step = jvarlen.make_train_step(loss_fn, optimizer)
state = train_step.init(params)
step = jvarlen.compile_buckets(train_step, state, plans[0], progress=False)
for epoch, plan in enumerate(plans):
    sums = jvarlen.MetricSums()
    for batch in jvarlen.load(plan, samples):
        state, metrics = step(state, batch)
        sums.add(metrics)
    print(f"epoch {epoch}: {sums.total.weight_sum:,.0f} samples, loss {sums.loss:.3f}")
