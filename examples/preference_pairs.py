"""Two answers to each prompt, one of them chosen: DPO with the decoder, in packed rows.

A sample is a pair of texts, the chosen one its source and the rejected one its target, so that both lie in the same
row. Letters: B rows, T positions, P pairs of a row.

Run it: python examples/preference_pairs.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jvarlen
from jvarlen.batches import sum_by_sample
from jvarlen.models import DecoderConfig, init_params, make_loss_fn, token_log_probs

NUM_WORDS, BETA = 100, 0.5
CONFIG = DecoderConfig(num_layers=1, width=32, vocab_size=NUM_WORDS + 1)  # words, and the token that begins samples
FIELDS = {"source_tokens": "source", "source_answer": "source", "target_tokens": "target", "target_answer": "target"}


def make_pair(rng):
    """The chosen answer is on the topic of the prompt, and the rejected one on another; word w has topic w mod 10."""
    topics, sizes = rng.choice(10, 2, replace=False), 1 + rng.geometric(0.1, 3).clip(max=40)
    of_texts = zip([topics[0], *topics], sizes, strict=True)
    prompt, *answers = (rng.integers(NUM_WORDS // 10, size=size) * 10 + topic for topic, size in of_texts)
    pair = {}
    for side, answer in zip(("source", "target"), answers, strict=True):
        pair[f"{side}_tokens"] = np.concatenate([prompt, answer])
        pair[f"{side}_answer"] = np.arange(len(prompt) + len(answer)) >= len(prompt)
    return pair


def log_ratios(log_probs, batch):
    """For each pair, log p(chosen) − log p(rejected), [B, P], from the log probabilities of the tokens of both."""
    chosen_BxT, rejected_BxT = log_probs
    chosen_BxP = sum_by_sample(chosen_BxT * batch["source_answer"], batch, "source")
    return chosen_BxP - sum_by_sample(rejected_BxT * batch["target_answer"], batch, "target")


def ratios_of_reference(params, batch):
    return log_ratios(token_log_probs(params, CONFIG, batch), batch)


def dpo(log_probs, batch):
    """−log σ(margin), summed over the pairs of a microbatch, their number, and what else is to be told."""
    margins_BxP, is_real_BxP = BETA * (log_ratios(log_probs, batch) - batch["reference"]), batch["is_real"]
    told = {"margin": jnp.sum(margins_BxP, where=is_real_BxP), "accuracy": jnp.sum(margins_BxP > 0, where=is_real_BxP)}
    return jnp.sum(-jax.nn.log_sigmoid(margins_BxP), where=is_real_BxP), jnp.sum(is_real_BxP), told


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    pairs, reference = [make_pair(rng) for _ in range(2_000)], init_params(CONFIG, seed=0)
    lengths = jvarlen.measure_lengths(pairs, ("source_tokens", "target_tokens"))
    plan = jvarlen.make_plan(lengths, [(4, 128, 128)], packing="best_fit")
    packed = {"buckets": plan.buckets, "packing": "best_fit", "samples_per_row": plan.samples_per_row}
    before = jvarlen.predict(ratios_of_reference, reference, pairs, lengths=lengths, fields=FIELDS, **packed)
    pairs = [pair | {"reference": ratio} for pair, ratio in zip(pairs, before, strict=True)]
    train_step = jvarlen.make_train_step(make_loss_fn(CONFIG, dpo), optax.adam(1e-2))
    state, history = train_step.init(reference), []
    batches = jvarlen.load(plan, pairs, fields=FIELDS | {"reference": "row"})
    step = jvarlen.compile_buckets(train_step, state, batches)
    for batch in batches:
        state, metrics = step(state, batch)
        history.append(metrics)
    last = jax.tree.map(lambda *each: np.mean(each), *history[-10:])
    print(f"loss {history[0].loss:.3f} -> {last.loss:.3f} in {len(history)} steps")
    print(*(f"{name}: {of_pairs / last.weight_sum:.3f}" for name, of_pairs in last.sums.items()), sep="\n")
