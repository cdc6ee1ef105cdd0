"""ZeRO-3 of a loss function: parameters in shards, whole in each microbatch, and the numbers of one device."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import make_eval_step, make_train_step
from jvarlen.parallel import LayeredModel, LayeredParams, layered_loss_fn
from jvarlen.training import ema_of_params
from tests.parallel.steps import assert_equal_trees
from tests.support.collectives import count_collectives

TRAINED, NOT_TRAINED = ["first.*", "odd", "last"], ("fixed", "order")
INIT = {"seed": 3, "extra": {"mean": np.zeros(16)}}
BATCH = np.random.default_rng(1).normal(size=(8, 5, 16))


def loss_fn(params, x, key, extra):
    """With a matrix and integers that are not trained, and a sum of parameters alone."""
    hidden = jnp.tanh(x @ params["first"]["w"] + params["first"]["b"] + params["odd"][:, :64].sum(0))
    hidden = hidden * jax.random.bernoulli(key, 0.9, hidden.shape)
    found = ((hidden @ params["fixed"])[:, params["order"][:64]]) @ params["last"]
    mean = extra["mean"] + 0.1 * (found.mean(0) - extra["mean"])
    sums = {"sizes": jnp.sum(params["last"] ** 2), "found": jnp.sum(found)}
    return jnp.sum(jnp.square(found - x)), jnp.float64(len(x)), sums, {"mean": mean}


@functools.cache
def initial_params():
    rng = np.random.default_rng(0)
    return {
        "first": {"w": rng.normal(size=(16, 64)) / 4, "b": rng.normal(size=64)},
        "odd": rng.normal(size=(15, 75)) / 8,  # which 4 does not divide
        "fixed": rng.normal(size=(64, 64)) / 8,
        "order": rng.integers(0, 64, 2048).astype(np.int32),
        "last": rng.normal(size=(64, 16)) / 8,
    }


def train(layout, num_steps):
    """The step, its state, the metrics of all steps, the average of its parameters, and its evaluation."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2), ema_of_params(0.5))
    step = make_train_step(loss_fn, optimizer, layout=layout, trainable=TRAINED, norms=True)
    state, take, told = step.init(initial_params(), **INIT), jax.jit(step, donate_argnums=0), []
    for _ in range(num_steps):
        state, metrics = take(state, BATCH)
        told.append(metrics)
    average = step.for_evaluation(state)
    _, evaluated = jax.jit(make_eval_step(loss_fn, layout=layout))(average, BATCH)
    params = [step.gather_params(each) for each in (state, average)]
    return state, (told, evaluated, state.extra, params)


@pytest.mark.parametrize(("num_steps", "rtol"), [(1, 1e-12), (10, 1e-11)])
def test_steps_metrics_and_evaluations_are_those_of_one_device(num_steps, rtol):
    with jax.enable_x64(True):
        _, expected = train(None, num_steps)
        state, found = train("data4.zero3", num_steps)
    assert_equal_trees(found, expected, rtol)
    held = jax.tree.map(lambda leaf: leaf.addressable_shards[0].data.size / leaf.size, state.params)
    assert held == {"first": {"w": 0.25, "b": 1}, "odd": 1, "fixed": 0.25, "order": 0.25, "last": 0.25}
    for name in NOT_TRAINED:
        np.testing.assert_array_equal(state.params[name], initial_params()[name])


def test_gradients_become_shards_in_each_microbatch():
    def squares(params, x):
        return jnp.sum(jnp.tanh(x @ params) ** 2), jnp.float32(1)

    step = make_train_step(squares, optax.adam(1e-2), layout="data4.zero3")
    state = step.init(np.ones((64, 32), np.float32))
    compiled = jax.jit(step, donate_argnums=0).lower(state, np.ones((8, 5, 64), np.float32)).compile()
    counts = count_collectives(compiled)
    assert counts["reduce-scatter"] == (0, 1)
    assert sum(counts["all-gather"]) == 1  # which XLA takes out of the loop on a CPU


def test_gradients_of_bfloat16_shards_are_summed_in_float32():
    """256 + 1 is 256 in bfloat16."""
    step = make_train_step(
        lambda params, number: (jnp.sum(params) * number, jnp.float32(1 / 8)), optax.sgd(1.0), layout="data8.zero3"
    )
    batch = jnp.array([256, 1, 1, 1, 1, 1, 1, 1], jnp.bfloat16)
    state = step.init(jnp.zeros(1024, jnp.bfloat16))
    lowered = jax.jit(step).lower(state, batch)
    assert re.search(r"all_gather.*-> tensor<1024xbf16>", lowered.as_text())  # CPUs compute in float32
    state, _ = lowered.compile()(state, batch)
    assert set(state.params.tolist()) == {-264.0}  # 263, rounded once


@pytest.mark.parametrize("of_loss", [False, True])
def test_a_sum_of_gathered_parameters_is_not_taken_for_one_over_shards(of_loss):
    model = LayeredModel(
        lambda ends, x, axes: x,
        lambda own, x, batch, axes: x @ own,
        lambda ends, x, batch, axes: (jnp.sum(x**2), jnp.float32(1), {"sizes": jnp.sum(ends["scale"])}),
    )
    params = LayeredParams({"scale": np.ones((64, 32), np.float32)}, np.ones((1, 16, 16), np.float32))
    step = make_train_step(layered_loss_fn(model) if of_loss else model, optax.sgd(0.1), layout="data2.zero3")
    _, metrics = jax.jit(step)(step.init(params), np.ones((4, 3, 16), np.float32))
    assert metrics.sums["sizes"] == 4 * 64 * 32
