"""JAX settings that users' tests make: a step compiles, loads and trains under each."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import (
    CompileOptions,
    compile_buckets,
    load,
    make_plan,
    make_train_step,
    no_recompiles,
    scale_by_batch_size,
)
from jvarlen.batches import BatchShapes
from jvarlen.distributed.mesh import replicate
from jvarlen.training.train_state import new_state
from tests.conftest import random_dataset
from tests.support.meshes import data_mesh

DATASET = random_dataset(24, 10)
PLAN = make_plan(np.diff(DATASET.offsets), [(2, 10)], order="length", num_microbatches=2)


def loss_fn(params, microbatch):
    logits_BxT = jnp.tanh(params["embed"][microbatch.tokens]) @ params["w"]
    targets_BxT = (microbatch.tokens % 2).astype(logits_BxT.dtype)
    losses_BxT = optax.sigmoid_binary_cross_entropy(logits_BxT, targets_BxT)
    weights_BxT = microbatch.weights.astype(losses_BxT.dtype)
    return jnp.sum(losses_BxT * weights_BxT), jnp.sum(weights_BxT)


def dropout_loss_fn(params, microbatch, key, extra):
    kept = jax.random.bernoulli(key, 0.8, params["w"].shape)
    dropped = params | {"w": params["w"] * kept.astype(params["w"].dtype)}
    return *loss_fn(dropped, microbatch), {"mean": extra["mean"] / 2 + jnp.mean(params["w"]) / 2}


def train(
    num_devices,
    loss_fn=loss_fn,
    dtype=np.float32,
    epochs=2,
    around=contextlib.nullcontext,
    make_optimizer=optax.adamw,
    **state,
):
    """Losses of some epochs."""
    mesh = None if num_devices is None else data_mesh(num_devices)
    rng = np.random.default_rng(0)
    params = {"embed": jnp.asarray(rng.normal(size=(128, 4)), dtype), "w": jnp.asarray(rng.normal(size=4), dtype)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), make_optimizer(0.02), scale_by_batch_size(4))
    make_state = jax.jit(lambda params: new_state(params, optimizer, **state))  # each function alone is slow
    state = make_state(params)
    state = state if mesh is None else replicate(state, mesh)
    train_step = make_train_step(loss_fn, optimizer, layout=mesh, norms=True)
    options = CompileOptions(cache_dir=None)
    step = compile_buckets(train_step, state, BatchShapes.of_plan(PLAN, layout=mesh), progress=False, options=options)
    losses = []
    for _ in range(epochs):
        for batch in load(PLAN, DATASET, layout=mesh):
            with no_recompiles(), around():
                state, metrics = step(state, batch)
                losses.append(float(metrics.loss))
    return losses


@pytest.fixture(scope="module")
def expected():
    return train(None)


with_devices = pytest.mark.parametrize("num_devices", [None, 2])


def test_nans_are_looked_for(expected):
    with jax.debug_nans(True):
        np.testing.assert_allclose(train(2), expected, rtol=1e-5)


def test_tracers_do_not_leak(expected):
    with jax.checking_leaks():
        np.testing.assert_allclose(train(2), expected, rtol=1e-5)
        train(2, dropout_loss_fn, epochs=1, seed=0, extra={"mean": jnp.zeros(())})


def test_ranks_are_not_promoted(expected):
    with jax.numpy_rank_promotion("raise"):
        np.testing.assert_allclose(train(2), expected, rtol=1e-5)


# Adam of Optax doesn't take the next setting: it raises a float to the power of an integer.
MOMENTUM = functools.partial(optax.sgd, momentum=0.5)


@pytest.fixture(scope="module")
def expected_of_momentum():
    return train(None, make_optimizer=MOMENTUM)


def test_types_are_not_promoted(expected_of_momentum):
    num_devices, dtype = 2, jnp.bfloat16
    with jax.numpy_dtype_promotion("strict"):
        losses = train(num_devices, dtype=dtype, make_optimizer=MOMENTUM)
        statistics = {"mean": jnp.zeros((), dtype)}
        train(num_devices, dropout_loss_fn, dtype, 1, make_optimizer=MOMENTUM, seed=0, extra=statistics)
    np.testing.assert_allclose(losses, expected_of_momentum, rtol=0.02)


@with_devices
def test_nothing_is_transferred_in_the_loop_but_the_loss_that_is_read(num_devices, expected):
    losses = train(num_devices, around=lambda: jax.transfer_guard("disallow"))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
