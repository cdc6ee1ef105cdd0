"""Sentence embeddings in Flax Linen: trained on pairs with a score, then one vector a sentence, in the data's order.

Letters: B rows, T positions, D width.

Run it: python examples/sentence_embeddings.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jvarlen

NUM_WORDS, NUM_TOPICS, WIDTH = 300, 10, 24


def make_sentence(topics, rng):
    """Mostly words of its topics; word w has topic w mod 10."""
    size = min(1 + rng.geometric(0.08), 60)
    words = rng.integers(NUM_WORDS // NUM_TOPICS, size=size) * NUM_TOPICS + rng.choice(topics, size)
    return np.where(rng.random(size) < 0.8, words, rng.integers(NUM_WORDS, size=size))


def make_pairs(num_pairs, rng):
    """Two sentences on two topics each; the score is the share of topics that they have in common."""
    pairs = []
    for num_common in rng.integers(3, size=num_pairs):
        topics = rng.permutation(NUM_TOPICS)[: 4 - num_common]
        first, second = make_sentence(topics[:2], rng), make_sentence(topics[-2:], rng)
        pairs.append({"first": first, "second": second, "score": num_common / 2})
    return pairs


class Encoder(nn.Module):
    """A unit vector for each sentence: the mean of a small network over its words."""

    @nn.compact
    def __call__(self, words_BxT, lengths_B):
        is_word_BxTx1 = (jnp.arange(words_BxT.shape[1]) < lengths_B[:, None])[..., None]
        x_BxTxD = nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.Embed(NUM_WORDS, WIDTH)(words_BxT))))
        sum_BxD = jnp.sum(x_BxTxD * is_word_BxTx1, axis=1)
        return sum_BxD * jax.lax.rsqrt(jnp.sum(sum_BxD**2, axis=-1, keepdims=True) + 1e-6)


encoder = Encoder()


def loss_fn(params, batch):
    """Squared errors of the cosine as the score, summed over real pairs."""
    first_BxD = encoder.apply(params, batch["first"], batch["source_lengths"])
    second_BxD = encoder.apply(params, batch["second"], batch["target_lengths"])
    errors_B = (jnp.sum(first_BxD * second_BxD, axis=-1) - batch["score"]) ** 2
    return jnp.sum(errors_B * batch["is_real"]), jnp.sum(batch["is_real"])


def embed(params, batch):
    """The vectors of a microbatch's sentences."""
    return encoder.apply(params, batch.tokens, batch.lengths)


def share_of_same_topic(vectors, topics):
    """The share of sentences whose nearest other one has the same topic."""
    nearest = np.argmax(vectors @ vectors.T - 2 * np.eye(len(vectors)), axis=1)
    return np.mean(topics[nearest] == topics)


rng = np.random.default_rng(0)
pairs, topics = make_pairs(4_000, rng), rng.integers(NUM_TOPICS, size=300)
sentences = [make_sentence([topic], rng) for topic in topics]
params = encoder.init(jax.random.key(0), jnp.zeros((1, 1), int), jnp.ones(1, int))

plan = jvarlen.make_plan(jvarlen.measure_lengths(pairs, ("first", "second")), max_tokens=4096, max_shapes=2)
train_step = jvarlen.make_train_step(loss_fn, optax.adam(1e-2))
state = train_step.init(params)
batches = jvarlen.load(plan, pairs, fields={"first": "source", "second": "target", "score": "row"})
step = jvarlen.compile_buckets(train_step, state, batches)
losses = []
for batch in batches:
    state, metrics = step(state, batch)
    losses.append(metrics.loss)
print(f"loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f} in {len(losses)} steps")

vectors = np.stack(jvarlen.predict(embed, state.params, sentences, max_tokens=1024, max_shapes=2))
print(f"nearest of the same topic: {share_of_same_topic(vectors, topics):.3f}")
