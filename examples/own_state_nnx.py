"""Dropout and BatchNorm in Flax NNX: a loss that takes a key, and state that is not parameters.

speech_ctc.py does the same in Flax Linen. Letters: B rows, T positions, D width, C sources.

Run it: python examples/own_state_nnx.py
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jvarlen
from jvarlen import testing

NUM_SOURCES, NUM_TOKENS, WIDTH = 4, 32, 16


class Classifier(nnx.Module):
    def __init__(self, *, rngs):
        self.embed = nnx.Embed(NUM_TOKENS, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2)
        self.head = nnx.Linear(WIDTH, NUM_SOURCES, rngs=rngs)

    def __call__(self, text_BxT, lengths_B, rngs=None):
        is_token_BxTx1 = jvarlen.attention.padding_mask(lengths_B, text_BxT.shape[1])[..., None]
        x_BxTxD = self.norm(self.embed(text_BxT), mask=is_token_BxTx1)
        mean_BxD = jnp.mean(x_BxTxD, axis=1, where=is_token_BxTx1)
        return self.head(self.dropout(mean_BxD, rngs=rngs))


graphdef, params, extra = nnx.split(Classifier(rngs=nnx.Rngs(0)), nnx.Param, nnx.BatchStat)


def loss_fn(params, microbatch, key, extra):
    # The mask comes from `key`, which is another one at every step. A generator inside the module would be merged with
    # the same count every time (`merge(copy=True)` included), and so draw the same mask at every step.
    model = nnx.merge(graphdef, params, extra)
    labels_B, text_BxT = microbatch.tokens[:, 0], microbatch.tokens[:, 1:]
    lengths_B = jnp.maximum(microbatch.lengths - 1, 1)  # at least 1: the mean over no token is no number
    logits_BxC = model(text_BxT, lengths_B, rngs=nnx.Rngs(dropout=key))
    weights_B = (microbatch.lengths > 0).astype(logits_BxC.dtype)
    losses_B = optax.softmax_cross_entropy_with_integer_labels(logits_BxC, labels_B) * weights_B
    correct = jnp.sum((jnp.argmax(logits_BxC, axis=-1) == labels_B) * weights_B)
    _, _, extra = nnx.split(model, nnx.Param, nnx.BatchStat)
    return jnp.sum(losses_B), jnp.sum(weights_B), {"correct": correct}, extra


rng = np.random.default_rng(0)
frequencies = rng.dirichlet(np.full(NUM_TOKENS, 0.5), size=NUM_SOURCES)
sources, sizes = rng.integers(NUM_SOURCES, size=2_000), rng.integers(1, 48, 2_000)
texts = [rng.choice(NUM_TOKENS, n, p=frequencies[source]) for source, n in zip(sources, sizes, strict=True)]
samples = [np.append(source, text) for source, text in zip(sources, texts, strict=True)]
lengths = jvarlen.measure_lengths(samples, progress=False)

buckets = jvarlen.make_buckets(lengths, max_tokens=1024, max_shapes=2, microbatches_per_step=2)
plans = [jvarlen.make_plan(lengths, buckets, order="shuffle", microbatches_per_step=2, epoch=e) for e in range(3)]
optimizer = optax.adamw(3e-3)
train_step = jvarlen.make_train_step(loss_fn, optimizer)
state = train_step.init(params, extra=extra, seed=0)
batch = next(jvarlen.load(plans[0], samples))
testing.assert_partition_invariant(loss_fn, params, batch, extra=extra, num_shards=[1], rtol=1e-5)
step = jvarlen.compile_buckets(train_step, state, plans[0], progress=False)
for epoch, plan in enumerate(plans):
    sums = jvarlen.MetricSums()
    with jvarlen.no_recompiles():
        for batch in jvarlen.load(plan, samples):
            state, metrics = step(state, batch)
            sums.add(metrics)
    total = sums.total
    num_samples, accuracy = float(total.weight_sum), float(total.sums["correct"] / total.weight_sum)
    print(f"epoch {epoch}: {num_samples:,.0f} samples, loss {sums.loss:.3f}, accuracy {accuracy:.3f}")
