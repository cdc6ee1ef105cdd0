"""Losses of the examples of rollouts and preferences: those of a plain loop over answers, one at a time."""

import functools
import runpy
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import compile_buckets, load, make_plan, make_train_step, plan_step
from jvarlen.data import share_prompts
from jvarlen.models import init_params, layered, logits, make_loss_fn
from jvarlen.parallel import StepLoss
from jvarlen.testing import assert_layout_invariant

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


def test_rollouts_with_shared_prompts_are_those_of_a_plain_loop_over_answers():
    grpo, rng = example("rollouts"), np.random.default_rng(0)
    config, longest = grpo.CONFIG, 16
    params = params_of(config, 0)
    prompts = [rng.integers(0, config.num_values, size) for size in rng.integers(1, 6, 24)]

    @jax.jit
    def log_probs_of(params, sample):
        return log_probs_alone(params, config, sample["tokens"], sample["length"])

    answers, alone = [], []
    for prompt in prompts:
        answers.append([])
        for num_new in rng.integers(1, grpo.LARGEST + 1, rng.integers(2, 9)):
            tokens = np.concatenate([prompt, rng.integers(0, config.num_values, num_new)])
            sample = {"tokens": padded(tokens, longest), "length": np.int32(len(tokens))}
            now = log_probs_of(params, sample)[len(prompt) : len(tokens)]
            old, before = now + 0.3 * rng.normal(size=(2, num_new))
            fields = grpo.fields_of(tokens[len(prompt) :], old, rng.normal())
            answers[-1].append(fields | {"reference_log_probs": np.minimum(before, 0)})
            for name, array in answers[-1][-1].items():
                if name != "tokens":
                    sample[name] = padded(np.pad(np.float32(array), (len(prompt), 0)), longest)
            alone.append(sample)
    num_tokens = sum(int(np.sum(sample["weights"] > 0)) for sample in alone)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss_of(params, sample):
        log_probs, is_answer = log_probs_of(params, sample), sample["weights"] > 0
        ratios = jnp.exp(jnp.where(is_answer, log_probs - sample["old_log_probs"], 0))
        advantage = jnp.sum(sample["advantages"]) / jnp.sum(is_answer)
        clipped = jnp.where(advantage > 0, jnp.minimum(ratios, 1.2), jnp.maximum(ratios, 0.8))
        drifts = jnp.where(is_answer, sample["reference_log_probs"] - log_probs, 0)
        kl = jnp.sum(jnp.expm1(drifts) - drifts)
        gain = jnp.mean(clipped, where=is_answer) * advantage
        num_clipped = jnp.sum(clipped != ratios, where=is_answer)
        return -gain / len(alone) + grpo.KL_WEIGHT * kl / num_tokens, (kl, num_clipped)

    found = [loss_of(params, sample) for sample in alone]
    (losses, (kls, num_clipped)), grads = jax.tree.map(lambda *each: np.sum(each, axis=0), *found)
    assert num_tokens / 10 < num_clipped < num_tokens / 2
    samples, _ = share_prompts(prompts, answers)
    plan = plan_step([len(sample["tokens"]) for sample in samples], [(1, 96), (2, 96)], **grpo.PACKED)
    assert plan.num_groups > 1
    fields = grpo.FIELDS | {"reference_log_probs": "length"}
    metrics, gradient = gradient_of(
        StepLoss(make_loss_fn(config, grpo.sums), grpo.loss), params, lambda: load(plan, samples, fields=fields)
    )
    np.testing.assert_allclose(metrics.loss, losses, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(metrics.sums["kl"], kls / num_tokens, rtol=1e-5)
    assert_gradients_equal(gradient, grads)


def test_the_loss_of_rollouts_is_the_same_on_any_layout():
    grpo, rng = example("rollouts"), np.random.default_rng(0)
    prompts = [rng.integers(0, grpo.LARGEST, size) for size in (1, 5, 3, 2, 4, 4)]
    answers = [
        [
            grpo.fields_of(rng.integers(0, grpo.LARGEST, size), rng.normal(-2, 0.3, size), rng.normal())
            | {"reference_log_probs": rng.normal(-2, 0.3, size)}
            for size in rng.integers(1, 5, 4)
        ]
        for _ in prompts
    ]
    samples, _ = share_prompts(prompts, answers)
    plan = plan_step([len(sample["tokens"]) for sample in samples], [(2, 48)], num_microbatches=4, **grpo.PACKED)
    batch = next(load(plan, samples, fields=grpo.FIELDS | {"reference_log_probs": "length"}))
    step_loss = StepLoss(layered(grpo.CONFIG, grpo.sums), grpo.loss)
    assert_layout_invariant(step_loss, params_of(grpo.CONFIG, 0), batch, ["data2.tensor2"], num_steps=1)


@pytest.mark.parametrize(("answer", "reward"), [([2, 1, 0], 1), ([2, 1], 2 / 3), ([2, 2, 0], 1 / 3), ([3, 1, 0], 0)])
def test_rewards_are_the_share_that_is_right_up_to_the_first_mistake(answer, reward):
    assert example("rollouts").reward_of(np.array([7, 3]), np.array(answer)) == pytest.approx(reward)
