"""Translation in pure JAX: a GRU reads the source, another writes the target and looks back by attention.

Letters: B rows, S and U positions of source and target, D width, V words.

Run it: python examples/translation.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jvarlen

NUM_WORDS, WIDTH = 40, 64  # words are 2 … 39 in both languages
BEGIN, END = 0, 1


def make_pairs(num_pairs):
    """Every word has one translation; the other language says the words the other way round."""
    rng = np.random.default_rng(0)
    translation = np.append([BEGIN, END], 2 + rng.permutation(NUM_WORDS - 2))
    pairs = []
    for size in rng.geometric(0.15, num_pairs).clip(max=24):
        sentence = rng.integers(2, NUM_WORDS, size)
        said_once = translation[sentence[np.append(True, sentence[1:] % 4 != 0)]]  # some words have none
        pairs.append({"source": sentence, "target": np.append(said_once[::-1], END)})
    return pairs


def init_params(key):
    shapes = {"source": (NUM_WORDS, WIDTH), "target": (NUM_WORDS, WIDTH), "head": (2 * WIDTH, NUM_WORDS)}
    shapes |= {"encoder": (2 * WIDTH, 3 * WIDTH), "decoder": (2 * WIDTH, 3 * WIDTH), "query": (WIDTH, WIDTH)}
    keys = jax.random.split(key, len(shapes))
    return {name: jax.random.normal(k, shapes[name]) / 8 for k, name in zip(keys, shapes, strict=True)}


def run_gru(weights, inputs_BxTxD, state_BxD, is_word_BxT):
    """The states after each word, and the last one; past the end of a row it stays as it is."""

    def advance(state, x):
        word, is_word = x
        update, reset, _ = jnp.split(jnp.concatenate([word, state], -1) @ weights, 3, axis=-1)
        proposed = jnp.tanh((jnp.concatenate([word, jax.nn.sigmoid(reset) * state], -1) @ weights)[:, 2 * WIDTH :])
        gate = jax.nn.sigmoid(update) * is_word[:, None]
        state = (1 - gate) * state + gate * proposed
        return state, state

    last, states = jax.lax.scan(advance, state_BxD, (jnp.swapaxes(inputs_BxTxD, 0, 1), is_word_BxT.T))
    return jnp.swapaxes(states, 0, 1), last


def loss_fn(params, batch):
    """Each word of the target from those before it and the source; sums over real words."""
    source_BxS, target_BxU, weights_BxU = batch["source"], batch["target"], batch["weights"]
    is_source_BxS = jnp.arange(source_BxS.shape[1]) < batch["source_lengths"][:, None]
    before_BxU = jnp.pad(target_BxU, ((0, 0), (1, 0)), constant_values=BEGIN)[:, :-1]
    nothing_BxD = jnp.zeros((len(source_BxS), WIDTH))
    read_BxSxD, last_BxD = run_gru(params["encoder"], params["source"][source_BxS], nothing_BxD, is_source_BxS)
    written_BxUxD, _ = run_gru(params["decoder"], params["target"][before_BxU], last_BxD, weights_BxU > 0)
    scores_BxUxS = jnp.einsum("BUD,BSD->BUS", written_BxUxD @ params["query"], read_BxSxD)
    attention_BxUxS = jax.nn.softmax(jnp.where(is_source_BxS[:, None], scores_BxUxS, -1e9), axis=-1)
    seen_BxUxD = jnp.einsum("BUS,BSD->BUD", attention_BxUxS, read_BxSxD)
    logits_BxUxV = jnp.concatenate([written_BxUxD, seen_BxUxD], -1) @ params["head"]
    losses_BxU = optax.softmax_cross_entropy_with_integer_labels(logits_BxUxV, target_BxU)
    return jnp.sum(losses_BxU * weights_BxU), jnp.sum(weights_BxU)


pairs = make_pairs(3_000)
lengths = jvarlen.measure_lengths(pairs, ("source", "target"))
buckets = jvarlen.make_plan(lengths, max_tokens=2048, max_shapes=2).buckets
train_step = jvarlen.make_train_step(loss_fn, optax.adam(1e-2))
state = train_step.init(jax.jit(init_params)(jax.random.key(0)))
batches = jvarlen.load(
    lambda epoch: jvarlen.make_plan(lengths, buckets, epoch=epoch), pairs, lengths=lengths, num_epochs=3
)
step = jvarlen.compile_buckets(train_step, state, batches)
losses = []
for batch in batches:
    state, metrics = step(state, batch)
    losses.append(metrics.loss)
print(f"loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f} in {len(losses)} steps")
