"""Training step: the same numbers however a step is split, dummy rows without effect, one division."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import data_mesh, init_train_state, load, make_eval_step, make_plan, make_train_step, scale_by_batch_size
from jvarlen.compiling.recompiles import no_recompiles
from jvarlen.distributed.mesh import batch_shardings
from jvarlen.testing.recompiles import assert_partition_invariant
from jvarlen.training.step import Metrics
from tests.conftest import random_dataset


class Rows(NamedTuple):
    """M×B rows of four numbers."""

    x: np.ndarray
    weights: np.ndarray
    num_sequences: np.ndarray


def loss_fn(params, microbatch):
    losses = jnp.sum(jnp.sin(microbatch.x * params["w"]) ** 2, axis=-1) + params["b"]
    return jnp.sum(losses * microbatch.weights), jnp.sum(microbatch.weights)


def make_rows(num_rows=24, num_dummies=3, seed=0):
    rng = np.random.default_rng(seed)
    weights = rng.integers(1, 5, num_rows).astype(float)
    weights[num_rows - num_dummies :] = 0
    return rng.normal(size=(num_rows, 4)), weights


def split_into(x, weights, num_microbatches):
    return Rows(
        x.reshape(num_microbatches, -1, 4),
        weights.reshape(num_microbatches, -1),
        np.float64(np.count_nonzero(weights)),
    )


def params():
    return {"w": jnp.linspace(0.5, 2, 4), "b": jnp.array(0.1)}


def take_step(batch, mesh=None):
    optimizer = optax.chain(optax.sgd(0.1), scale_by_batch_size(7))
    if mesh is not None:
        batch = jax.device_put(batch, batch_shardings(batch, mesh))
    return jax.jit(make_train_step(loss_fn, optimizer, mesh=mesh))(init_train_state(params(), optimizer), batch)


def test_every_split_and_any_dummies_give_the_same_loss_and_gradient():
    splits = assert_partition_invariant(loss_fn, params(), split_into(*make_rows(), 8))
    without_dummies = {(split.num_microbatches, split.num_shards) for split in splits if not split.num_dummies}
    assert without_dummies >= {(8, 1), (8, 2), (8, 4), (4, 4), (2, 2), (1, 1)}
    assert any(split.num_dummies for split in splits)


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 6, 8, 24])
@pytest.mark.parametrize("num_devices", [None, 1, 2, 4])
def test_every_split_of_a_step_gives_the_same_step(num_microbatches, num_devices):
    if num_devices and num_microbatches % num_devices:
        return
    mesh = None if num_devices is None else data_mesh(num_devices)
    with jax.enable_x64(True):
        state, metrics = take_step(split_into(*make_rows(), num_microbatches), mesh)
        expected_state, expected = take_step(split_into(*make_rows(), 1))
        for leaf, expected_leaf in zip(jax.tree.leaves(state), jax.tree.leaves(expected_state), strict=True):
            np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-12)
        np.testing.assert_allclose(metrics.loss, expected.loss, rtol=1e-12)


def test_the_step_is_one_division_and_not_a_mean_of_means():
    x, weights = make_rows(num_dummies=0)
    with jax.enable_x64(True):
        _, metrics = take_step(split_into(x, weights, 4))
        losses = np.sum(np.sin(x * np.asarray(params()["w"])) ** 2, axis=-1) + 0.1
        np.testing.assert_allclose(metrics.loss, np.sum(losses * weights) / np.sum(weights), rtol=1e-12)
        means = [np.average(a, weights=b) for a, b in zip(losses.reshape(4, -1), weights.reshape(4, -1), strict=True)]
        assert abs(np.mean(means) - float(metrics.loss)) > 1e-4


def test_dummy_rows_and_microbatches_contribute_nothing():
    x, weights = make_rows(num_dummies=0)
    more_x, more_weights = np.concatenate([x, np.full((24, 4), 1e3)]), np.concatenate([weights, np.zeros(24)])
    with jax.enable_x64(True):
        state, metrics = take_step(split_into(x, weights, 2))
        padded_state, padded_metrics = take_step(split_into(more_x, more_weights, 4))
        for leaf, padded in zip(
            jax.tree.leaves((state, metrics)), jax.tree.leaves((padded_state, padded_metrics)), strict=True
        ):
            np.testing.assert_allclose(padded, leaf, rtol=1e-12)


def test_a_step_of_dummies_gives_zero_and_no_nan():
    x, weights = make_rows()
    state, metrics = take_step(split_into(x, np.zeros_like(weights), 2))
    assert float(metrics.loss) == 0
    assert jax.tree.map(np.asarray, state.params).keys() == params().keys()
    np.testing.assert_array_equal(state.params["w"], params()["w"])


def test_shards_that_do_not_divide_the_microbatches_are_refused():
    with pytest.raises(ValueError, match="3 microbatches a step do not spread over 2 shards"):
        jax.eval_shape(make_eval_step(loss_fn, mesh=data_mesh(2)), params(), split_into(*make_rows(), 3))


def test_evaluation_sums_what_training_sums():
    batch = split_into(*make_rows(), 3)
    kept, metrics = jax.jit(make_eval_step(loss_fn))(params(), batch)
    _, expected = take_step(batch)
    np.testing.assert_allclose(metrics.loss_sum, expected.loss_sum, rtol=1e-6)
    assert float(metrics.weight_sum) == batch.weights.sum()
    np.testing.assert_array_equal(kept["w"], params()["w"])


def test_the_optimizer_is_told_sequences_and_tokens_of_the_whole_step():
    told = []

    def update(updates, state, params=None, *, batch_size, num_tokens):
        told.append((batch_size, num_tokens))
        return jax.tree.map(lambda update: update * 0 + batch_size + num_tokens / 100, updates), state

    watching = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    dataset = random_dataset(12, 10)
    lengths = np.diff(dataset.offsets)
    plan = make_plan(lengths, [(3, 10)], microbatches_per_step=4)
    mesh = data_mesh(4)
    step = jax.jit(
        make_train_step(lambda w, batch: (w * jnp.sum(batch.weights), jnp.sum(batch.weights)), watching, mesh=mesh)
    )
    state, metrics = step(init_train_state(jnp.float32(0), watching), next(iter(load(plan, dataset, mesh=mesh))))
    assert float(metrics.num_tokens) == lengths.sum()
    np.testing.assert_allclose(float(state.params), 12 + lengths.sum() / 100, rtol=1e-6)
    assert len(told) == 1


def test_gradients_of_bfloat16_parameters_are_added_in_float32():
    """256 ones: in bfloat16 the sum would stop growing at 256, and lose every odd weight before."""
    batch = Rows(np.ones((300, 1, 4)), np.ones((300, 1)), np.float32(300))
    loss = lambda w, microbatch: (w * jnp.sum(microbatch.weights).astype(w.dtype), jnp.sum(microbatch.weights))  # noqa: E731
    optimizer = optax.sgd(1.0)
    state, metrics = jax.jit(make_train_step(loss, optimizer))(init_train_state(jnp.bfloat16(2), optimizer), batch)
    assert state.params.dtype == jnp.bfloat16
    assert float(metrics.loss_sum) == 600
    assert float(state.params) == 1


def test_metrics_of_nothing_are_zero():
    assert float(Metrics(jnp.float32(0), jnp.float32(0)).loss) == 0


def test_the_model_loses_nothing_to_padding():
    """Σ loss over a plan is the sum over samples taken one at a time, unpadded."""
    from jvarlen.models import TransformerConfig, init_params, make_loss_fn

    dataset = random_dataset(9, 12)
    lengths = np.diff(dataset.offsets)
    model_loss = make_loss_fn(TransformerConfig(num_layers=1, width=16, num_heads=2))
    weights = init_params(TransformerConfig(num_layers=1, width=16, num_heads=2), seed=0)
    step = jax.jit(make_eval_step(model_loss))
    plan = make_plan(lengths, [(2, 6), (2, 16)], microbatches_per_step=2)
    total = sum(float(step(weights, batch)[1].loss_sum) for batch in load(plan, dataset))
    one_by_one = sum(
        float(step(weights, batch)[1].loss_sum)
        for i, length in enumerate(lengths)
        for batch in load(make_plan(lengths, [(1, int(length))], order=[i], overlong="error"), dataset)
    )
    np.testing.assert_allclose(total, one_by_one, rtol=1e-5)


def test_the_loss_of_a_step_is_read_without_compiling_and_may_be_traced():
    metrics = Metrics(jnp.float32(6), jnp.float32(4))
    without_weight = Metrics(jnp.float32(6), jnp.float32(0))
    with no_recompiles():
        assert (float(metrics.loss), float(without_weight.loss)) == (1.5, 0.0)
        assert metrics.loss.dtype == np.float32
    assert float(jax.jit(lambda metrics: metrics.loss)(metrics)) == 1.5
