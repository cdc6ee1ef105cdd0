"""Prompts that are computed once for all their answers: losses and gradients of rows that repeat them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen import load, make_plan
from jvarlen._common.checks import UserError
from jvarlen.batches import next_token_targets, sample_positions
from jvarlen.data import WeightedTokens, share_prompts
from jvarlen.models import DecoderConfig, init_params, layered, make_loss_fn, token_log_probs, with_window
from jvarlen.testing import assert_layout_invariant

CONFIG = DecoderConfig(
    num_layers=2, width=16, num_heads=4, num_kv_heads=2, vocab_size=40, begins_samples=False, windows=(0, 5)
)
OTHERS = {
    "begins samples": DecoderConfig(num_layers=1, width=16, vocab_size=40, attention="xla"),
    "in blocks": dataclasses.replace(CONFIG, attention="blocks"),
}
# Tokens of a prompt, and of its answers. One prompt alone holds nothing that could be shared, and one has one answer.
SIZES = [(9, [4, 6, 1]), (1, [3, 2]), (6, [5]), (4, [2, 9, 3, 3]), (12, [1, 1])]
MAX_LENGTH = 22  # splits the answers of the fourth


@functools.cache
def groups():
    """Prompts, some of whose tokens are trained, and weighted answers."""
    rng = np.random.default_rng(0)

    def tokens(size, weights):
        return WeightedTokens(rng.integers(0, 39, size), rng.choice(weights, size))

    prompts = [tokens(size, [0.0, 0.5] if i % 2 else [0.0]) for i, (size, _) in enumerate(SIZES)]
    return prompts, [[tokens(size, [0.25, 1.0]) for size in sizes] for _, sizes in SIZES]


def repeated():
    """The same, with the prompt before each answer."""
    return [
        WeightedTokens(np.append(prompt.tokens, answer.tokens), np.append(prompt.weights, answer.weights))
        for prompt, answers in zip(*groups(), strict=True)
        for answer in answers
    ]


def batch_of(samples, max_length, packing, num_microbatches=1):
    """All samples in one step."""
    lengths = [len(sample["tokens"] if isinstance(sample, dict) else sample) for sample in samples]
    buckets = [(len(samples), max_length)]
    plan = make_plan(lengths, buckets, packing=packing, order="dataset", num_microbatches=num_microbatches)
    (batch,) = load(plan, samples)
    return batch


def sums(config, batch):
    """The loss and the gradient in float64."""
    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, init_params(config, 0))
        microbatch = jax.tree.map(lambda leaf: leaf[0] if leaf.ndim else leaf, batch)
        return jax.jit(jax.value_and_grad(make_loss_fn(config), has_aux=True))(params, microbatch)


CASES = {"padded": (CONFIG, "padded", 0), **{name: (config, "best_fit", 4) for name, config in OTHERS.items()}}


@pytest.mark.parametrize(("config", "packing", "window"), CASES.values(), ids=CASES)
def test_loss_and_gradient_are_those_of_rows_that_repeat_the_prompt(config, packing, window, monkeypatch):
    monkeypatch.setattr("jvarlen.attention.blocks.BLOCK", 8)
    samples, prompt_of_sample = share_prompts(*groups(), max_length=MAX_LENGTH)
    assert np.bincount(prompt_of_sample).tolist() == [1, 1, 1, 2, 1]
    batch = batch_of(samples, MAX_LENGTH if packing == "padded" else 2 * MAX_LENGTH, packing)
    alone = batch_of(repeated(), MAX_LENGTH, "padded")
    (loss, weight), grads = sums(config, with_window(batch, window))
    (expected, expected_weight), expected_grads = sums(config, with_window(alone, window))
    assert weight == expected_weight
    np.testing.assert_allclose(loss, expected, rtol=1e-12)
    for grad, expected_grad in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert grad.dtype == np.float64
        np.testing.assert_allclose(grad, expected_grad, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("config", [CONFIG, OTHERS["begins samples"]], ids=["as it is", "begins samples"])
def test_log_probabilities_are_those_of_rows_that_repeat_the_prompt(config):
    prompts, answers = groups()
    ends = iter(np.cumsum([len(answer) for each in answers for answer in each]).tolist())
    numbered = [
        [{"tokens": answer.tokens, "numbers": next(ends) - np.arange(len(answer))} for answer in each]
        for each in answers
    ]
    alone = [
        {"tokens": np.append(prompt.tokens, one["tokens"]), "numbers": np.append(0 * prompt.tokens, one["numbers"])}
        for prompt, each in zip(prompts, numbered, strict=True)
        for one in each
    ]

    def by_number(batch):
        microbatch = {name: jnp.asarray(leaf[0] if leaf.ndim else leaf) for name, leaf in batch.items()}
        with jax.enable_x64(True):
            params = jax.tree.map(np.float64, init_params(config, 0))
            found = jax.jit(lambda *given: token_log_probs(given[0], config, given[1]))(params, microbatch)
        numbers = batch["numbers"][0]
        return np.asarray(found)[numbers > 0][np.argsort(numbers[numbers > 0])]

    shared = by_number(batch_of(share_prompts(prompts, numbered, max_length=MAX_LENGTH)[0], 2 * MAX_LENGTH, "best_fit"))
    expected = by_number(batch_of(alone, MAX_LENGTH, "padded"))
    assert (expected < 0).all()
    np.testing.assert_allclose(shared, expected, rtol=1e-12)


def test_layouts_agree_and_a_context_axis_is_refused_by_name():
    samples, _ = share_prompts(*groups(), max_length=MAX_LENGTH)
    batch = batch_of(samples, 24, "best_fit", num_microbatches=2)
    params, layouts = init_params(CONFIG, 0), ["data2.zero3", "data1.stage2", "data1.tensor2.remat_full"]
    assert_layout_invariant(layered(CONFIG), params, batch, layouts, num_steps=2)
    with pytest.raises(UserError, match="take a layout without a context axis"):
        assert_layout_invariant(layered(CONFIG), params, batch, ["data1.context2"], num_steps=1)


@pytest.mark.parametrize("is_traced", [True, False])
def test_inputs_targets_and_positions_are_those_of_each_answer_alone(is_traced):
    samples, _ = share_prompts([[5, 6, 7], [3]], [[[8, 9], [4]], [[1, 2], [2]]])
    batch = batch_of(samples, 13, "best_fit")
    if is_traced:
        batch = jax.tree.map(jnp.asarray, batch)
    microbatch = {name: array[0] for name, array in batch.items() if np.ndim(array)} | {"num_sequences": 2}
    assert np.asarray(microbatch["tokens"])[0].tolist() == [5, 6, 7, 8, 9, 7, 4, 3, 1, 2, 3, 2, 0]
    assert np.asarray(sample_positions(microbatch))[0, :12].tolist() == [0, 1, 2, 3, 4, 2, 3, 0, 1, 2, 0, 1]
    inputs, targets, weights = map(np.asarray, next_token_targets(microbatch))
    has_target = weights[0] > 0
    assert has_target.tolist() == [False, False, True, True, False, True, False, True, True, False, True, False, False]
    assert targets[0, has_target].tolist() == [8, 9, 4, 1, 2, 2]
    inputs, targets, weights = map(np.asarray, next_token_targets(microbatch, begin_token=99))
    assert inputs[0, :12].tolist() == [99, 5, 6, 7, 8, 6, 7, 99, 3, 1, 99, 3]
    assert targets[0, weights[0] > 0].tolist() == [8, 9, 4, 1, 2, 2]


def test_positions_are_those_of_a_batch():
    with pytest.raises(UserError, match="takes a batch of samples of one length, not a dict"):
        sample_positions({"answer_ids": np.zeros((1, 4), int)})
