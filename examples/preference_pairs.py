"""Two answers to each prompt, one of them chosen: DPO with the decoder.

A sample of packed rows holds the prompt once, with both answers behind it. Letters: B rows, T positions, P samples of a
row, that is, pairs.

Run it: python examples/preference_pairs.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jvarlen
from jvarlen.batches import sum_by_sample
from jvarlen.data import share_prompts
from jvarlen.models import DecoderConfig, init_params, make_loss_fn, token_log_probs

NUM_WORDS, BETA = 100, 0.5
CONFIG = DecoderConfig(num_layers=1, width=32, vocab_size=NUM_WORDS + 1)  # word w has topic w mod 10
FIELDS = dict.fromkeys(["tokens", "answer_ids", "signs"], "length")


def make_pair(rng):
    """A prompt, and two answers with their signs in the log ratio: the chosen one is on the topic of the prompt."""
    topics, sizes = rng.choice(10, 2, replace=False), 1 + rng.geometric(0.1, 3).clip(max=40)
    of_texts = zip([topics[0], *topics], sizes, strict=True)
    prompt, *answers = (rng.integers(NUM_WORDS // 10, size=size) * 10 + topic for topic, size in of_texts)
    signed = zip(answers, (1, -1), strict=True)
    return prompt, [{"tokens": tokens, "signs": np.full(len(tokens), sign)} for tokens, sign in signed]


def log_ratios(log_probs_BxT, batch):
    """For each pair, log p(chosen) − log p(rejected), [B, P]."""
    return sum_by_sample(log_probs_BxT * batch["signs"], batch)


def ratios_of_reference(params, batch):
    return log_ratios(token_log_probs(params, CONFIG, batch), batch)


def dpo(log_probs_BxT, batch):
    """−log σ(margin), summed over the pairs of a microbatch, their number, and what else is to be told."""
    margins_BxP, is_real_BxP = BETA * (log_ratios(log_probs_BxT, batch) - batch["reference"]), batch["is_real"]
    told = {"margin": jnp.sum(margins_BxP, where=is_real_BxP), "accuracy": jnp.sum(margins_BxP > 0, where=is_real_BxP)}
    return jnp.sum(-jax.nn.log_sigmoid(margins_BxP), where=is_real_BxP), jnp.sum(is_real_BxP), told


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    prompts, answers = zip(*(make_pair(rng) for _ in range(2_000)), strict=True)
    samples, _ = share_prompts(prompts, answers)
    reference = init_params(CONFIG, seed=0)
    lengths = [len(sample["tokens"]) for sample in samples]
    plan = jvarlen.make_plan(lengths, [(4, 256)], packing="best_fit")
    packed = {"buckets": plan.buckets, "packing": "best_fit", "samples_per_row": plan.samples_per_row}
    before = jvarlen.predict(ratios_of_reference, reference, samples, lengths=lengths, fields=FIELDS, **packed)
    samples = [sample | {"reference": ratio} for sample, ratio in zip(samples, before, strict=True)]
    train_step = jvarlen.make_train_step(make_loss_fn(CONFIG, dpo), optax.adam(1e-2))
    state, history = train_step.init(reference), []
    batches = jvarlen.load(plan, samples, fields=FIELDS | {"reference": "row"})
    step = jvarlen.compile_buckets(train_step, state, batches)
    for batch in batches:
        state, metrics = step(state, batch)
        history.append(metrics)
    last = jax.tree.map(lambda *each: np.mean(each), *history[-10:])
    print(f"loss {history[0].loss:.3f} -> {last.loss:.3f} in {len(history)} steps")
    print(*(f"{name}: {of_pairs / last.weight_sum:.3f}" for name, of_pairs in last.sums.items()), sep="\n")
