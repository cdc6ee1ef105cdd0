"""Optax optimizers, also those that take the loss: as in a plain loop that tells them the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from jvarlen import (
    CompileOptions,
    compile_buckets,
    load,
    make_plan,
    make_train_step,
    no_recompiles,
    scale_by_batch_size,
    with_float32_master,
)
from jvarlen.batches import BatchShapes
from jvarlen.training.train_state import new_state
from tests.conftest import random_dataset
from tests.support.meshes import data_mesh

DATASET = random_dataset(40, 10)
PLAN = make_plan(np.diff(DATASET.offsets), [(2, 10)], num_microbatches=4, order="shuffle")


def loss_fn(params, microbatch):
    """Whether the byte of each token is odd."""
    logits_BxT = jnp.tanh(params["embed"][microbatch.tokens] / 8) @ params["w"] + params["b"]
    losses_BxT = optax.sigmoid_binary_cross_entropy(logits_BxT, microbatch.tokens % 2)
    return jnp.sum(losses_BxT * microbatch.weights), jnp.sum(microbatch.weights)


def make_params():
    rng = np.random.default_rng(0)
    return {"embed": jnp.asarray(rng.normal(size=(128, 4))), "w": jnp.asarray(rng.normal(size=4)), "b": jnp.zeros(())}


def by_group(**groups):
    return optax.partition(groups, {"embed": "embed", "w": "rest", "b": "rest"})


OPTIMIZERS = {
    "reduce_on_plateau": lambda: optax.chain(
        optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5, accumulation_size=1)
    ),
    "polyak_sgd": lambda: optax.polyak_sgd(max_learning_rate=1.0),
    "schedule_free": lambda: optax.contrib.schedule_free(optax.adam(0.1), learning_rate=0.1),
    "multi_steps": lambda: optax.MultiSteps(
        optax.chain(optax.adamw(0.1), scale_by_batch_size(4)), 2, accumulator_dtype=jnp.float64
    ),
    "partition": lambda: by_group(
        embed=optax.chain(optax.adamw(0.1), scale_by_batch_size(4, rule="sqrt")),
        rest=optax.chain(optax.sgd(0.1, momentum=0.9), scale_by_batch_size(30, unit="tokens")),
    ),
    "chain_of_all": lambda: optax.chain(
        optax.clip_by_global_norm(1.0),
        by_group(embed=optax.adamw(0.1), rest=optax.polyak_sgd(max_learning_rate=1.0)),
        optax.contrib.reduce_on_plateau(patience=1, factor=0.5),
        scale_by_batch_size(4),
    ),
}


def as_transformation(optimizer):
    if isinstance(optimizer, optax.MultiSteps):
        return optax.GradientTransformationExtraArgs(optimizer.init, optimizer.update)
    return optax.with_extra_args_support(optimizer)


@functools.cache
def train_plainly(name):
    optimizer = as_transformation(OPTIMIZERS[name]())

    @jax.jit
    def step(params, opt_state, batch):
        def loss(params):
            losses_M, weights_M = jax.vmap(loss_fn, (None, 0))(params, rows)
            return jnp.sum(losses_M) / jnp.sum(weights_M)

        rows = batch._replace(num_sequences=jnp.zeros(4))
        value, grad = jax.value_and_grad(loss)(params)
        told = {"batch_size": batch.num_sequences, "num_tokens": batch.lengths.sum(), "value": value}
        updates, opt_state = optimizer.update(grad, opt_state, params, **told)
        return value, optax.apply_updates(params, updates), opt_state

    params = make_params()
    opt_state, losses = optimizer.init(params), []
    for batch in jax.device_get(list(load(PLAN, DATASET))):
        loss, params, opt_state = step(params, opt_state, batch)
        losses.append(loss)
    return losses, params, opt_state


@pytest.mark.parametrize(("name", "num_devices"), [*((name, 4) for name in OPTIMIZERS), ("chain_of_all", None)])
def test_an_optimizer_takes_the_steps_that_it_takes_in_a_plain_loop(name, num_devices):
    with jax.enable_x64(True):
        mesh = None if num_devices is None else data_mesh(num_devices)
        optimizer = OPTIMIZERS[name]()
        state = new_state(make_params(), optimizer)
        step = compile_buckets(
            make_train_step(loss_fn, optimizer, layout=mesh),
            state,
            BatchShapes.of_plan(PLAN, layout=mesh),
            progress=False,
            options=CompileOptions(cache_dir=None),
        )
        losses = []
        with no_recompiles():
            for batch in load(PLAN, DATASET, layout=mesh):
                state, metrics = step(state, batch)
                losses.append(metrics.loss)
        assert np.abs(state.params["w"] - make_params()["w"]).max() > 1e-3
        for (path, one), other in zip(
            jax.tree.leaves_with_path((losses, state.params, state.opt_state)),
            jax.tree.leaves(train_plainly(name)),
            strict=True,
        ):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11, err_msg=jax.tree_util.keystr(path))


def train_on(batches, optimizer):
    """The parameters after a step for each batch."""
    step = jax.jit(make_train_step(loss_fn, optimizer))
    state = new_state(make_params(), optimizer)
    for batch in batches:
        state, _ = step(state, batch)
    return state.params


@pytest.fixture(scope="module")
def two_steps():
    """Two steps of different sizes, and one that holds all of both."""
    one, other = list(load(PLAN, DATASET))[:2]
    other = other._replace(  # without half of its microbatches
        weights=other.weights.at[2:].set(0), lengths=other.lengths.at[2:].set(0), num_sequences=np.float32(4)
    )
    both = jax.tree.map(lambda *leaves: jnp.concatenate(leaves) if leaves[0].ndim else sum(leaves), one, other)
    return (one, other), both


def multi_steps(optimizer):
    return optax.MultiSteps(optimizer, 2, accumulator_dtype=jnp.float64).gradient_transformation()


def test_scaled_before_accumulation_two_steps_are_one_of_all_their_samples(two_steps):
    """The scale is then the weight of a step in the mean."""
    steps, both = two_steps
    with jax.enable_x64(True):
        accumulated = optax.chain(scale_by_batch_size(30, unit="tokens"), multi_steps(optax.sgd(0.1)))
        at_once = optax.chain(optax.sgd(0.1), scale_by_batch_size(2 * 30, unit="tokens"))
        params, expected = train_on(steps, accumulated), train_on([both], at_once)
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-12), params, expected)


def test_scaled_inside_or_after_accumulation_the_last_step_alone_tells_the_size(two_steps):
    steps, _ = two_steps
    with jax.enable_x64(True):
        inside = optax.MultiSteps(
            optax.chain(optax.adam(0.1), scale_by_batch_size(4)), 2, accumulator_dtype=jnp.float64
        )
        after = optax.chain(multi_steps(optax.adam(0.1)), scale_by_batch_size(4))
        of_the_last = optax.chain(multi_steps(optax.adam(0.1)), optax.scale(float(steps[-1].num_sequences) / 4))
        params, *others = (train_on(steps, optimizer) for optimizer in (inside, after, of_the_last))
        for other in others:
            jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-12), params, other)


@pytest.mark.parametrize("is_outermost", [True, False])
def test_rates_of_batch_sizes_pass_through_masters_and_accumulation(is_outermost):
    scaled = optax.chain(optax.sgd(1.0), scale_by_batch_size(2))
    masters = with_float32_master(optax.MultiSteps(scaled, 2))
    optimizer = masters if is_outermost else optax.MultiSteps(with_float32_master(scaled), 2)
    step = make_train_step(lambda params, x: (jnp.sum(params * x["x"]), jnp.float32(1)), optimizer)
    state = step.init(jnp.zeros(3, jnp.bfloat16))
    for _ in range(2):
        state, _ = step(state, {"x": np.ones((1, 3), np.float32), "num_sequences": np.float32(6)})
    assert state.params.tolist() == [-3.0] * 3  # 3 times the rate


def test_masters_tell_the_optimizer_what_it_names_and_nothing_else():
    def update(updates, state, params=None, *, batch_size):
        return jax.tree.map(lambda leaf: -leaf * batch_size, updates), state

    named = optax.GradientTransformationExtraArgs(lambda params: (), update)
    step = make_train_step(lambda params, x: (jnp.sum(params * x["x"]), jnp.float32(1)), with_float32_master(named))
    state, _ = step(step.init(jnp.zeros(3, jnp.bfloat16)), {"x": np.ones((1, 3)), "num_sequences": np.float32(6)})
    assert state.params.tolist() == [-6.0] * 3
