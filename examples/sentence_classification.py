"""Sentence classification in Flax Linen: which of four topics is a review about? A weighted mean of its words, dropout.

Letters: B rows, T positions, D width.

Run it: python examples/sentence_classification.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jvarlen

NUM_TOPICS, NUM_WORDS, WIDTH = 4, 400, 32


def make_reviews(num_reviews, rng):
    """Common words, which say nothing, and now and then a word of the topic; most reviews are short."""
    reviews = []
    for topic in rng.integers(NUM_TOPICS, size=num_reviews):
        size = int(np.clip(rng.lognormal(2.7, 0.7), 3, 100))
        common, own = rng.zipf(1.5, size).clip(max=200), rng.integers(200 + 50 * topic, 250 + 50 * topic, size)
        reviews.append({"tokens": np.where(rng.random(size) < 0.2, own, common), "label": topic})
    return reviews


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, tokens_BxT, lengths_B, is_training):
        is_word_BxT = jnp.arange(tokens_BxT.shape[1]) < lengths_B[:, None]
        x_BxTxD = nn.Dropout(0.1)(nn.Embed(NUM_WORDS, WIDTH)(tokens_BxT), deterministic=not is_training)
        scores_BxT = jnp.where(is_word_BxT, nn.Dense(1)(nn.tanh(nn.Dense(WIDTH)(x_BxTxD)))[..., 0], -jnp.inf)
        return nn.Dense(NUM_TOPICS)(jnp.einsum("BT,BTD->BD", nn.softmax(scores_BxT), x_BxTxD))


model = Classifier()


def loss_fn(params, batch, key):
    """Sums over the reviews of a microbatch; padding rows don't count."""
    lengths_B = jnp.maximum(batch["lengths"], 1)  # also for padding rows: a mean over no words is NaN
    logits = model.apply(params, batch["tokens"], lengths_B, True, rngs={"dropout": key})
    losses_B = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return jnp.sum(losses_B * batch["is_real"]), jnp.sum(batch["is_real"])


@jax.jit
def predict(params, tokens_BxT, lengths_B):
    return jnp.argmax(model.apply(params, tokens_BxT, jnp.maximum(lengths_B, 1), False), axis=-1)


def accuracy(params, batches):
    """The share of real rows whose label is predicted."""
    num_correct, num_real = 0, 0
    for batch in batches:
        predicted_B = predict(params, batch["tokens"][0], batch["lengths"][0])
        num_correct += np.sum((predicted_B == batch["label"][0]) & batch["is_real"][0])
        num_real += np.sum(batch["is_real"])
    return num_correct / num_real


rng = np.random.default_rng(0)
reviews, held_out = make_reviews(3_000, rng), make_reviews(500, rng)
params = jax.jit(model.init, static_argnums=3)(jax.random.key(0), jnp.zeros((1, 8), int), jnp.ones(1, int), False)

lengths = jvarlen.measure_lengths(reviews, "tokens")
train_step = jvarlen.make_train_step(loss_fn, optax.adamw(3e-3))
state = train_step.init(params, seed=0)
batches = jvarlen.load(
    lambda epoch: jvarlen.make_plan(lengths, max_tokens=2048, max_shapes=3, epoch=epoch), reviews, num_epochs=3
)
step = jvarlen.compile_buckets(train_step, state, batches)
losses = []
for batch in batches:
    state, metrics = step(state, batch)
    losses.append(metrics.loss)
print(f"loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f} in {len(losses)} steps")
plan = jvarlen.make_plan(jvarlen.measure_lengths(held_out, "tokens"), max_tokens=4096, max_shapes=2)
print(f"accuracy {accuracy(state.params, jvarlen.load(plan, held_out)):.3f}")
