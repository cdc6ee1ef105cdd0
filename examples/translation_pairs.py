"""Translation: shapes for pairs of source and target, and a small encoder-decoder that learns a made-up language.

A sentence is some words and then some filler; the translation is another word for each word, and then the end.
Letters: B rows, S and U positions of source and target, D width, V words.

Run it: python examples/translation_pairs.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jvarlen
from jvarlen.batches import next_token_targets

NUM_WORDS, FILLER, END = 20, 0, 0  # words are 1 … 19 in both languages
LONGEST, WIDTH = 60, 32


def make_pairs(num_pairs):
    """Sentences of geometric lengths; the filler makes sources longer than their targets, by chance."""
    rng = np.random.default_rng(0)
    translation = np.append(END, 1 + rng.permutation(NUM_WORDS - 1))
    num_words, num_fillers = rng.geometric([0.1, 0.15], size=(num_pairs, 2)).clip(max=30).T
    pairs = []
    for words, fillers in zip(num_words.tolist(), num_fillers.tolist(), strict=True):
        sentence = rng.integers(1, NUM_WORDS, words)
        pairs.append((np.pad(sentence, (0, fillers), constant_values=FILLER), np.append(translation[sentence], END)))
    return pairs


def init_params(key):
    """Small random weights."""
    words, square = (NUM_WORDS, WIDTH), (WIDTH, WIDTH)
    shapes = {"source": words, "target": words, "places": (LONGEST, WIDTH), "query": square, "key": square}
    shapes |= {"value": square, "head": (WIDTH, NUM_WORDS)}
    keys = jax.random.split(key, len(shapes))
    return {name: jax.random.normal(k, shapes[name]) / WIDTH**0.5 for k, name in zip(keys, shapes, strict=True)}


def loss_fn(params, microbatch):
    """Each target word from its place, the one before it, and the source, of which padding is not seen."""
    source_BxS = microbatch.source_tokens
    before_BxU, target_BxU, weights_BxU = next_token_targets(microbatch, begin_token=END)
    encoded_BxSxD = params["source"][source_BxS] + params["places"][: source_BxS.shape[1]]
    x_BxUxD = params["target"][before_BxU] + params["places"][: target_BxU.shape[1]]
    attended = jax.nn.dot_product_attention(  # with an axis for one head
        (x_BxUxD @ params["query"])[:, :, None],
        (encoded_BxSxD @ params["key"])[:, :, None],
        (encoded_BxSxD @ params["value"])[:, :, None],
        key_value_seq_lengths=microbatch.source_lengths,
    )
    logits_BxUxV = (x_BxUxD + attended[:, :, 0]) @ params["head"]
    losses_BxU = optax.softmax_cross_entropy_with_integer_labels(logits_BxUxV, target_BxU)
    return jnp.sum(losses_BxU * weights_BxU), jnp.sum(weights_BxU)


pairs = make_pairs(4_000)
lengths = np.array([(len(source), len(target)) for source, target in pairs])
buckets = jvarlen.make_pair_buckets(lengths, 2048, max_shapes=4, length_multiple=4)
plans = [jvarlen.make_plan(lengths, buckets, order="shuffle", epoch=epoch) for epoch in range(3)]
print(plans[0].report())
to_longest = 1 - lengths.sum() / (len(lengths) * lengths.max(axis=0).sum())
print(f"padding: {plans[0].padding:.2%}; padded to the longest of each side, it would be {to_longest:.2%}")

optimizer = optax.chain(optax.adamw(1e-2), jvarlen.scale_by_batch_size(64, rule="sqrt"))
train_step = jvarlen.make_train_step(loss_fn, optimizer)
state = train_step.init(jax.jit(init_params)(jax.random.key(0)))
step = jvarlen.compile_buckets(train_step, state, plans[0], progress=False)
for epoch, plan in enumerate(plans):
    sums = jvarlen.MetricSums()
    for batch in jvarlen.load(plan, pairs):
        state, metrics = step(state, batch)
        sums.add(metrics)
    print(f"epoch {epoch}: {sums.total.weight_sum:,.0f} words, loss {sums.loss:.3f}")
