"""Losses of the examples of rollouts and preferences: those of a plain loop over answers, one at a time."""

import functools
import runpy
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jvarlen import compile_buckets, load, make_plan, make_train_step
from jvarlen.data import share_prompts
from jvarlen.models import init_params, logits, make_loss_fn

EXAMPLES = Path(__file__).parents[1] / "examples"


@functools.cache
def example(name):
    """The functions of an example, which does not run."""
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / f"{name}.py")))


def params_of(config, seed):
    return jax.tree.map(lambda leaf: 3 * leaf, init_params(config, seed))  # far from uniform


def log_probs_alone(params, config, tokens, length):
    """The log probabilities of the tokens of one text by itself, from whole logits, [T]; of padding as well."""
    ids = np.zeros(1, np.int32)
    row = {"tokens": tokens[None], "lengths": length[None], "weights": jnp.ones((1, len(tokens)))}
    row |= {"num_sequences": np.float32(1), "ids": ids, "is_real": ids >= 0}
    log_softmax = jax.nn.log_softmax(logits(params, config, row)[0])
    return jnp.take_along_axis(log_softmax, tokens[:, None], axis=1)[:, 0]


def padded(array, size):
    return np.pad(array, (0, size - len(array)))


def gradient_of(model, params, make_batches):
    """The metrics of one step, and its gradient, which is what a rate of 1 changes."""
    train_step = make_train_step(model, optax.sgd(1.0))
    state = train_step.init(params)
    batches = make_batches()
    step = compile_buckets(train_step, state, batches, progress=False)
    (batch,) = batches
    after, metrics = step(train_step.init(params), batch)
    return metrics, jax.tree.map(lambda one, other: np.asarray(one) - np.asarray(other), params, after.params)


def assert_gradients_equal(found, expected):
    for leaf, expected_leaf in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        largest = np.abs(expected_leaf).max()
        assert largest > 1e-5
        np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-4, atol=1e-4 * largest)


def test_dpo_in_packed_rows_is_that_of_a_plain_loop_over_pairs():
    dpo, rng = example("preference_pairs"), np.random.default_rng(0)
    pairs = [dpo.make_pair(rng) for _ in range(24)]
    params, reference = (params_of(dpo.CONFIG, seed) for seed in range(2))

    @jax.jit
    def ratio_of(params, texts):
        log_probs = [log_probs_alone(params, dpo.CONFIG, text["tokens"], text["length"]) for text in texts]
        chosen, rejected = (jnp.sum(each, where=text["is_answer"]) for each, text in zip(log_probs, texts, strict=True))
        return chosen - rejected

    alone = []
    for prompt, answers in pairs:
        texts = [np.concatenate([prompt, answer["tokens"]]) for answer in answers]
        places = [np.arange(len(text)) for text in texts]
        alone.append(
            [
                {"tokens": padded(text, 96), "length": np.int32(len(text)), "is_answer": padded(at >= len(prompt), 96)}
                for text, at in zip(texts, places, strict=True)
            ]
        )
    of_reference = [np.float32(ratio_of(reference, texts)) for texts in alone]

    @jax.jit
    @jax.value_and_grad
    def loss_of(params, texts, before):
        return jnp.log1p(jnp.exp(-dpo.BETA * (ratio_of(params, texts) - before)))

    losses, grads = zip(*(loss_of(params, *each) for each in zip(alone, of_reference, strict=True)), strict=True)
    samples, _ = share_prompts(*zip(*pairs, strict=True))
    plan = make_plan([len(sample["tokens"]) for sample in samples], [(2, 160)], packing="best_fit", num_microbatches=6)
    assert plan.num_steps == 1 < max(plan.samples_per_row)
    samples = [sample | {"reference": before} for sample, before in zip(samples, of_reference, strict=True)]
    fields = dpo.FIELDS | {"reference": "row"}
    metrics, gradient = gradient_of(
        make_loss_fn(dpo.CONFIG, dpo.dpo), params, lambda: load(plan, samples, fields=fields)
    )
    np.testing.assert_allclose(metrics.loss, np.mean(losses), rtol=1e-5)
    assert metrics.sums["accuracy"] == np.sum(np.array(losses) < np.log(2))
    assert metrics.weight_sum == len(pairs)
    assert_gradients_equal(gradient, jax.tree.map(lambda *each: sum(each) / len(pairs), *grads))
