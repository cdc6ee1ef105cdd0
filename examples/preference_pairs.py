"""Two answers to a prompt in one sample: DPO, plus the loss of the tokens of the better answer.

DPO is a mean over pairs, and the loss of tokens one over tokens: two denominators, which `StepLoss` divides by once a
step. For DPO alone, a plain loss would do: Σ over pairs, and their number. Letters: B pairs, T positions, D width.

Run it: python examples/preference_pairs.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jvarlen
from jvarlen.parallel import StepLoss

NUM_WORDS, NUM_TOPICS, WIDTH, BETA, TOKEN_WEIGHT = 100, 10, 24, 0.5, 0.1


def make_words(topic, size, rng):
    """Words w with w mod 10 = topic, except for one in five."""
    words = rng.integers(NUM_WORDS // NUM_TOPICS, size=size) * NUM_TOPICS + topic
    return np.where(rng.random(size) < 0.8, words, rng.integers(NUM_WORDS, size=size))


def make_pairs(num_pairs, rng):
    """The better answer is on the topic of the prompt, and both begin with it."""
    pairs = []
    for topic, other in (rng.choice(NUM_TOPICS, 2, replace=False) for _ in range(num_pairs)):
        prompt = make_words(topic, 1 + rng.geometric(0.15), rng)
        answers = [make_words(each, 1 + min(rng.geometric(0.1), 30), rng) for each in (topic, other)]
        chosen, rejected = (np.concatenate([prompt, answer]) for answer in answers)
        pairs.append({"chosen": chosen, "rejected": rejected, "prompt_length": np.int32(len(prompt))})
    return pairs


def init_params(key):
    keys = jax.random.split(key, 3)
    shapes = {"table": (NUM_WORDS, WIDTH), "up": (2 * WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    return {
        name: jax.random.normal(k, shape) / shape[-1] ** 0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def log_probability(params, words_BxT, prompt_length_B, lengths_B):
    """The log probability of each answer after its prompt, from each word and the mean of the words up to it."""
    words_BxTxD = params["table"][words_BxT]
    positions_T = jnp.arange(words_BxT.shape[1])
    means_BxTxD = jnp.cumsum(words_BxTxD, axis=1) / (1 + positions_T[:, None])
    x_BxTxD = jax.nn.gelu(jnp.concatenate([words_BxTxD, means_BxTxD], axis=-1) @ params["up"]) @ params["down"]
    of_words = -optax.softmax_cross_entropy_with_integer_labels(x_BxTxD[:, :-1] @ params["table"].T, words_BxT[:, 1:])
    is_answer = (positions_T[1:] >= prompt_length_B[:, None]) & (positions_T[1:] < lengths_B[:, None])
    return jnp.sum(of_words, axis=1, where=is_answer)


def sums(params, batch):
    """Sums over the pairs of a microbatch: the losses of DPO and of tokens, and the weights of both."""
    lengths = {"chosen": batch["source_lengths"], "rejected": batch["target_lengths"]}
    now, before = (
        {side: log_probability(each, batch[side], batch["prompt_length"], length) for side, length in lengths.items()}
        for each in (params, reference)
    )
    margins_B = BETA * sum(sign * (now[side] - before[side]) for side, sign in (("chosen", 1), ("rejected", -1)))
    is_real_B = batch["is_real"]
    return {
        "dpo": jnp.sum(-jax.nn.log_sigmoid(margins_B), where=is_real_B),
        "pairs": jnp.sum(is_real_B),
        "preferred": jnp.sum(margins_B > 0, where=is_real_B),
        "nats": jnp.sum(-now["chosen"], where=is_real_B),
        "tokens": jnp.sum(lengths["chosen"] - batch["prompt_length"], where=is_real_B),
    }


def loss(sums):
    dpo, nats = sums["dpo"] / sums["pairs"], sums["nats"] / sums["tokens"]
    return dpo + TOKEN_WEIGHT * nats, {"dpo": dpo, "nats": nats, "preferred": sums["preferred"] / sums["pairs"]}


def loss_by_pairs(params, pairs):
    """The same by a plain loop over pairs."""
    of_pairs, longest = [], max(len(pair[side]) for pair in pairs for side in ("chosen", "rejected"))
    for pair in pairs:
        lengths = {"source_lengths": len(pair["chosen"]), "target_lengths": len(pair["rejected"])}
        row = {side: np.resize(pair[side], longest) for side in ("chosen", "rejected")}
        row |= lengths | {"prompt_length": pair["prompt_length"], "is_real": True}
        of_pairs.append(sums_of_one(params, {name: np.asarray(value)[None] for name, value in row.items()}))
    return loss({name: sum(each[name] for each in of_pairs) for name in of_pairs[0]})[0]


def show(history, first_ids):
    """What was learned, and that the first step is that of a plain loop."""
    losses = [metrics.loss for metrics in history]
    print(f"loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f} in {len(losses)} steps")
    print(f"preferred: {np.mean([metrics.sums['preferred'] for metrics in history[-10:]]):.3f}")
    first_pairs = [pairs[i] for i in first_ids[first_ids >= 0]]
    by_pairs, gradient = jax.value_and_grad(loss_by_pairs)(reference, first_pairs)
    print(f"first step: loss {losses[0]:.5f}, norm of its gradient {history[0].grad_norm:.5f}")
    print(f"by a plain loop: loss {by_pairs:.5f}, norm of its gradient {optax.tree.norm(gradient):.5f}")


sums_of_one = jax.jit(sums)
rng = np.random.default_rng(0)
pairs = make_pairs(2_000, rng)
reference = init_params(jax.random.key(0))  # the model before: constants of the loss

lengths = jvarlen.measure_lengths(pairs, ("chosen", "rejected"))
plan = jvarlen.make_plan(lengths, max_tokens=1024, max_shapes=2, num_microbatches=2)
train_step = jvarlen.make_train_step(StepLoss(sums, loss), optax.adam(1e-2), norms=True)
state = train_step.init(reference)
batches = jvarlen.load(plan, pairs, fields={"chosen": "source", "rejected": "target", "prompt_length": "row"})
step = jvarlen.compile_buckets(train_step, state, batches)
history = []
for batch in batches:
    state, metrics = step(state, batch)
    history.append(metrics)
show(history, plan.rows(0))
