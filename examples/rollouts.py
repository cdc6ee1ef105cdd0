"""Learning from samples of the model (GRPO): count down to 0 from the last number of a prompt.

Packed rows hold a prompt once, with all answers that were drawn to it behind it. Letters: B rows, T positions.

Run it: python examples/rollouts.py
"""

import jax.numpy as jnp
import numpy as np
import optax

import jvarlen
from jvarlen.data import share_prompts
from jvarlen.inference import generate
from jvarlen.models import DecoderConfig, init_params, make_loss_fn, token_log_probs
from jvarlen.parallel import StepLoss

NUM_ITERATIONS, NUM_UPDATES, NUM_PROMPTS, NUM_ANSWERS, LARGEST, CLIP, KL_WEIGHT = 40, 2, 16, 16, 8, 0.2, 0.01
CONFIG = DecoderConfig(num_layers=1, width=32, vocab_size=LARGEST + 2)  # numbers, and the token that begins samples
# Shapes that stay, whatever the lengths: prompts with room for an answer, and packed rows of prompts with all answers.
SAMPLING = {"samples_per_prompt": NUM_ANSWERS, "temperature": 1.0, "max_new_tokens": LARGEST, "end_token": 0}
SAMPLING |= {"return_log_probs": True, "buckets": [(NUM_PROMPTS, 5 + LARGEST)], "progress": False}
SHAPES, PACKED = [(1, 320), (4, 320)], {"packing": "best_fit", "samples_per_row": 8}
FIELDS = dict.fromkeys(["tokens", "answer_ids", "weights", "advantages", "old_log_probs"], "length")


def reward_of(prompt, answer):
    """The share of the numbers that are right, up to the first wrong one."""
    right = np.arange(prompt[-1])[::-1]
    is_right = [one == other for one, other in zip(right, answer, strict=False)]
    return np.cumprod(is_right).sum() / max(len(right), len(answer))


def log_probs_of(params, batch):
    return token_log_probs(params, CONFIG, batch)


def roll_out(state, reference, seed):
    """The batches of an update, from new prompts, their answers and what the loss needs of them; and the rewards."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1, LARGEST + 1, size) for size in rng.integers(1, 6, NUM_PROMPTS)]
    answers, log_probs = generate(state, CONFIG, prompts, seed=seed, **SAMPLING)
    rewards = [reward_of(prompts[i // NUM_ANSWERS], answer) for i, answer in enumerate(answers)]
    rewards = np.reshape(rewards, (NUM_PROMPTS, NUM_ANSWERS))
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-4)
    fields = [fields_of(*each) for each in zip(answers, log_probs, advantages.flat, strict=True)]
    samples, _ = share_prompts(prompts, [fields[i : i + NUM_ANSWERS] for i in range(0, len(fields), NUM_ANSWERS)])
    lengths = [len(sample["tokens"]) for sample in samples]
    shapes = {"lengths": lengths, "fields": FIELDS, "buckets": SHAPES, "progress": False}
    before = jvarlen.predict(log_probs_of, reference, samples, **shapes, **PACKED)
    samples = [sample | {"reference_log_probs": each} for sample, each in zip(samples, before, strict=True)]
    plan = jvarlen.plan_step(lengths, SHAPES, **PACKED)
    return jvarlen.load(plan, samples, fields=FIELDS | {"reference_log_probs": "length"}), rewards


def fields_of(answer, log_probs, advantage):
    """The arrays of an answer along its tokens; the loss weights add up to 1."""
    of_tokens = {"weights": np.full(len(answer), 1 / len(answer)), "advantages": np.full(len(answer), advantage)}
    return {"tokens": answer, "old_log_probs": log_probs, **of_tokens}


def sums(log_probs_BxT, batch):
    """Sums over a microbatch: of what the tokens of answers gain, of KL divergences, and of the two denominators."""
    is_answer_BxT, advantages_BxT = batch["weights"] > 0, batch["advantages"]
    log_probs_BxT = jnp.where(is_answer_BxT, log_probs_BxT, 0)
    ratios_BxT = jnp.exp(log_probs_BxT - batch["old_log_probs"])
    gains_BxT = jnp.minimum(ratios_BxT * advantages_BxT, ratios_BxT.clip(1 - CLIP, 1 + CLIP) * advantages_BxT)
    drifts_BxT = batch["reference_log_probs"] - log_probs_BxT
    kl_BxT = jnp.exp(drifts_BxT) - drifts_BxT - 1
    of_answers = {"gain": jnp.sum(gains_BxT * batch["weights"]), "answers": jnp.sum(batch["weights"])}
    return of_answers | {"kl": jnp.sum(kl_BxT, where=is_answer_BxT), "tokens": jnp.sum(is_answer_BxT)}


def loss(sums):
    gain, kl = sums["gain"] / sums["answers"], sums["kl"] / sums["tokens"]
    return KL_WEIGHT * kl - gain, {"gain": gain, "kl": kl}


if __name__ == "__main__":
    reference = init_params(CONFIG, seed=0)
    train_step = jvarlen.make_train_step(StepLoss(make_loss_fn(CONFIG, sums), loss), optax.adam(5e-3))
    state, history = train_step.init(reference), []
    step = jvarlen.compile_buckets(train_step, state, roll_out(state, reference, 0)[0], progress=False)
    with jvarlen.no_recompiles():
        for iteration in range(1, NUM_ITERATIONS):
            (batch,), rewards = roll_out(state, reference, iteration)
            for _ in range(NUM_UPDATES):
                state, metrics = step(state, batch)
            history.append(rewards.mean())
    print(f"reward {np.mean(history[:3]):.3f} -> {np.mean(history[-3:]):.3f} in {len(history)} iterations")
