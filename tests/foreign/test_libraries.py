"""Models of other libraries: Flax Linen, Flax NNX, Equinox, Haiku."""

from collections.abc import Callable

import equinox as eqx
import flax.linen as nn
import haiku
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state as flax_state

from jvarlen import UserError, compile_buckets, make_eval_step, make_plan, make_train_step
from jvarlen.estimates import estimate_memory
from jvarlen.testing import assert_partition_invariant

from .harness import Model, assert_trains_as_a_plain_loop, on_devices, random_rows, squared, unequal_weights

T, D, HIDDEN = 4, 3, 5
PLAN = make_plan([3, 4, 5], [(2, 8)])


def rows_batch(**more):
    return {"x": random_rows(T, D), "y": random_rows(HIDDEN, seed=1), "weights": unequal_weights(), **more}


X_BxTxD = random_rows(T, D)[0]


def in_float64(tree):
    return jax.tree.map(lambda leaf: leaf.astype(float) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)


class Normalised(nn.Module):
    """With running statistics."""

    @nn.compact
    def __call__(self, x, is_training):
        x = nn.Dense(HIDDEN, param_dtype=jnp.float64)(x[:, 0])
        return nn.BatchNorm(not is_training, momentum=0.9, param_dtype=jnp.float64)(x)


def linen_batch_normalisation():
    module = Normalised()
    variables = in_float64(jax.jit(module.init, static_argnums=2)(jax.random.key(0), X_BxTxD, True))

    def loss_fn(params, batch, extra):
        outputs_BxH, updated = module.apply(
            {"params": params, "batch_stats": extra}, batch["x"], True, mutable=["batch_stats"]
        )
        return *squared(outputs_BxH, batch), updated["batch_stats"]

    return Model(loss_fn, variables["params"], rows_batch(), extra=variables["batch_stats"])


class NNXModel(nnx.Module):
    """A layer, running statistics, dropout."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(D, HIDDEN, param_dtype=jnp.float64, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, momentum=0.9, param_dtype=jnp.float64, rngs=rngs)
        self.dropout = nnx.Dropout(0.4)

    def __call__(self, x, key):
        return self.dropout(self.norm(self.layer(x)), rngs=nnx.Rngs(dropout=key))


def nnx_batch_normalisation_and_dropout():
    graphdef, params, statistics = nnx.split(NNXModel(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)

    def loss_fn(params, batch, key, extra):
        model = nnx.merge(graphdef, params, extra)
        sums = squared(model(batch["x"][:, 0], key), batch)
        return *sums, nnx.state(model, nnx.BatchStat)

    return Model(loss_fn, params, rows_batch(), extra=in_float64(statistics), seed=3)


class Recurrent(eqx.Module):
    """A GRU scanned over time."""

    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear
    activation: Callable[[jax.Array], jax.Array] = eqx.field(static=True)

    def __init__(self, key):
        keys = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(D, HIDDEN, dtype=jnp.float64, key=keys[0])
        self.head = eqx.nn.Linear(HIDDEN, HIDDEN, dtype=jnp.float64, key=keys[1])
        self.activation = jnp.tanh

    def __call__(self, x_TxD):
        hidden, _ = jax.lax.scan(lambda hidden, x: (self.cell(x, hidden), None), jnp.zeros(HIDDEN), x_TxD)
        return self.activation(self.head(hidden))


def equinox_gru():
    """The module itself is the pytree of parameters."""

    def loss_fn(model, batch):
        return squared(jax.vmap(model)(batch["x"]), batch)

    return Model(loss_fn, Recurrent(jax.random.key(0)), rows_batch())


def equinox_partition():
    """The arrays of one layer are trained, in a module with functions and numbers among its leaves."""
    mlp = eqx.nn.MLP(D, HIDDEN, width_size=4, depth=1, dtype=jnp.float64, key=jax.random.key(0))
    is_trained = jax.tree.map(lambda _: False, mlp)
    is_trained = eqx.tree_at(lambda mlp: mlp.layers[-1].weight, is_trained, replace=True)
    params, rest = eqx.partition(mlp, is_trained)

    @eqx.filter_jit
    def loss_fn(params, batch):
        return squared(jax.vmap(eqx.combine(params, rest))(batch["x"][:, 0]), batch)

    return Model(loss_fn, params, rows_batch())


def haiku_lstm():
    def unroll(x_BxTxD):
        core = haiku.LSTM(HIDDEN)
        state = jax.tree.map(lambda leaf: leaf.astype(x_BxTxD.dtype), core.initial_state(x_BxTxD.shape[0]))
        return haiku.dynamic_unroll(core, x_BxTxD, state, time_major=False)[0][:, -1]

    forward = haiku.transform(unroll)

    def loss_fn(params, batch, key):
        return squared(forward.apply(params, key, batch["x"]), batch)

    return Model(loss_fn, in_float64(jax.jit(forward.init)(jax.random.key(0), X_BxTxD)), rows_batch(), seed=0)


MODELS = [linen_batch_normalisation, nnx_batch_normalisation_and_dropout, equinox_gru, equinox_partition, haiku_lstm]


@on_devices(MODELS)
def test_it_trains_as_in_a_plain_loop(model, num_devices):
    assert_trains_as_a_plain_loop(model, num_devices)


def one_loss(params, batch):
    return jnp.sum(batch), jnp.float32(1)


def mlp():
    return eqx.nn.MLP(3, 3, 4, 1, key=jax.random.key(0))


@pytest.mark.parametrize(
    ("take", "what"),
    [
        (lambda module: make_train_step(one_loss, optax.sgd(0.1)).init(module), "parameters"),
        (lambda module: make_train_step(one_loss, optax.sgd(0.1), layout="data2.zero1").init(module), "parameters"),
        (lambda module: make_train_step(one_loss, optax.sgd(0.1)).state_shardings(module), "parameters"),
        (lambda module: compile_buckets(make_eval_step(one_loss), module, PLAN, progress=False), "the state"),
        (lambda module: estimate_memory(None, optax.sgd(0.1), layout="data1", params=module), "parameters"),
        (lambda module: assert_partition_invariant(one_loss, module, {"x": np.ones((2, 1))}), "parameters"),
    ],
    ids=["init", "zero1", "state_shardings", "evaluation", "memory", "check"],
)
def test_a_module_whose_leaves_are_not_all_arrays_is_refused_by_them(take, what):
    with pytest.raises(
        UserError, match=rf"{what} must hold arrays of numbers alone, not \.activation a .*eqx\.partition"
    ):
        take(mlp())


@pytest.mark.parametrize(
    "make_step", [lambda: make_train_step(one_loss, optax.sgd(0.1)), lambda: make_eval_step(one_loss)]
)
def test_a_state_of_another_library_is_refused_by_its_name(make_step):
    state = flax_state.TrainState.create(apply_fn=None, params={"w": jnp.ones(3)}, tx=optax.sgd(0.1))
    message = r"must be a jvarlen\.TrainState, of train_step\.init\(params\), not a .*flax\..*TrainState"
    for take in (lambda step: jax.jit(step)(state, jnp.ones((1, 2))), lambda step: compile_buckets(step, state, PLAN)):
        with pytest.raises(UserError, match=message):
            take(make_step())
