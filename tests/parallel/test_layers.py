"""Models by layers: the numbers of the whole model, a random key for every layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import Bucket, load, make_plan, make_train_step
from jvarlen.models import DecoderConfig, init_params, layered, make_loss_fn, stack_layers, unstack_layers
from jvarlen.parallel.layers import Axes, LayeredModel, LayeredParams, layered_loss_fn
from jvarlen.training.train_state import new_state
from tests.conftest import random_dataset

MODEL = DecoderConfig(num_layers=3, width=16, num_heads=2)

SIMPLE = LayeredModel(
    lambda ends, microbatch, axes: microbatch @ ends["in"],
    lambda own, x, microbatch, axes: x + jnp.tanh(x @ own["k"]),
    lambda ends, x, microbatch, axes: (jnp.sum(jnp.sin(x @ ends["in"].T)), jnp.float32(x.shape[0])),
)


@functools.cache
def initial_params():
    with jax.enable_x64(False):
        return jax.tree.map(np.asarray, init_params(MODEL, seed=0))


def simple_params(num_layers=2):
    rng = np.random.default_rng(0)
    ends = {"in": rng.normal(size=(3, 5)).astype(np.float32)}
    return LayeredParams(ends, {"k": rng.normal(size=(num_layers, 5, 5)).astype(np.float32)})


def microbatch_of(packed):
    dataset = random_dataset(12, 14)
    lengths = np.diff(dataset.offsets)
    if packed:
        plan = make_plan(lengths, [Bucket(3, 14)], packing="best_fit", order="length")
        batch = next(iter(load(plan, dataset)))
    else:
        batch = next(iter(load(make_plan(lengths, [Bucket(5, 14)], order="length"), dataset)))
    return jax.tree.map(lambda leaf: np.asarray(leaf)[0] if leaf.ndim else np.asarray(leaf), batch)


def test_the_decoder_by_layers_is_the_decoder():
    microbatch = microbatch_of(packed=False)
    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, initial_params())

        def gradients(loss_fn):
            return jax.jit(jax.value_and_grad(loss_fn, has_aux=True))

        found, found_grads = gradients(layered_loss_fn(layered(MODEL)))(stack_layers(params), microbatch)
        expected, expected_grads = gradients(make_loss_fn(MODEL))(params, microbatch)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        assert float(expected[1]) > 10
        found_grads = unstack_layers(found_grads)
        assert jax.tree.structure(found_grads) == jax.tree.structure(expected_grads)
        for leaf, expected_leaf in zip(jax.tree.leaves(found_grads), jax.tree.leaves(expected_grads), strict=True):
            np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-12, atol=1e-12 * np.abs(expected_leaf).max())


def test_a_state_of_stacked_layers_trains_as_that_of_the_whole_decoder():
    optimizer, batch = (
        optax.adamw(1e-2),
        jax.tree.map(lambda leaf: leaf[None] if leaf.ndim else leaf, microbatch_of(packed=True)),
    )
    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, initial_params())
        states = []
        for model, initial in ((make_loss_fn(MODEL), params), (layered(MODEL), stack_layers(params))):
            step = make_train_step(model, optimizer)
            state, run = step.init(initial), jax.jit(step)
            for _ in range(3):
                state, metrics = run(state, batch)
            states.append((state, metrics))
        (expected, expected_metrics), (found, metrics) = states
        np.testing.assert_allclose(metrics.loss, expected_metrics.loss, rtol=1e-12)
        pairs = zip(*map(jax.tree.leaves, (unstack_layers(found.params), expected.params)), strict=True)
        for leaf, expected_leaf in pairs:
            np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-10, atol=1e-12)


def test_layers_run_in_order_and_the_plain_step_trains_them():
    params, batch = simple_params(), np.random.default_rng(1).normal(size=(2, 4, 3)).astype(np.float32)
    optimizer = optax.sgd(0.1)
    state, metrics = jax.jit(make_train_step(layered_loss_fn(SIMPLE), optimizer))(new_state(params, optimizer), batch)

    def by_hand(params):
        x = batch.reshape(8, 3) @ params.ends["in"]
        for own in params.layers["k"]:
            x = x + jnp.tanh(x @ own)
        return jnp.sum(jnp.sin(x @ params.ends["in"].T)) / 8

    loss, grads = jax.jit(jax.value_and_grad(by_hand))(params)
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
    for leaf, before, grad in zip(*map(jax.tree.leaves, (state.params, params, grads)), strict=True):
        np.testing.assert_allclose(leaf, before - 0.1 * np.asarray(grad), rtol=1e-5, atol=1e-6)


def test_every_call_has_a_key_of_its_own_and_a_layer_its_index():
    def draw(axes):
        return jax.random.uniform(axes.key)

    model = LayeredModel(
        lambda ends, microbatch, axes: jnp.zeros(6).at[0].set(draw(axes)),
        lambda own, x, microbatch, axes: x.at[axes.layer + 1].set(draw(axes)),
        lambda ends, x, microbatch, axes: (jnp.sum(x), jnp.float32(1), {"drawn": x.at[5].set(draw(axes))}),
    )
    params = LayeredParams((), jnp.zeros(4))
    key = jax.random.key(3)
    drawn = layered_loss_fn(model)(params, None, key)[2]["drawn"]
    expected = [jax.random.uniform(jax.random.fold_in(key, index)) for index in (4, 0, 1, 2, 3, 5)]
    assert drawn.tolist() == np.array(expected).tolist()
    assert len(set(drawn.tolist())) == 6


def test_without_a_key_in_the_state_the_axes_have_none():
    seen = []
    model = SIMPLE._replace(embed=lambda ends, microbatch, axes: seen.append(axes) or microbatch @ ends["in"])
    layered_loss_fn(model)(simple_params(), np.ones((4, 3), np.float32))
    assert seen == [Axes()]  # nor a layer, in embed


def test_what_is_no_model_by_layers_is_refused():
    microbatch = np.ones((4, 3), np.float32)
    loss_fn = layered_loss_fn(SIMPLE)
    with pytest.raises(ValueError, match="takes LayeredParams, not a dict"):
        loss_fn({"in": 1}, microbatch)
    params = simple_params()
    with pytest.raises(ValueError, match=r"one leading axis.*'b'\] float32\[3\], \['k'\] float32\[2,5,5\]"):
        loss_fn(params._replace(layers={"k": params.layers["k"], "b": np.ones(3, np.float32)}), microbatch)
    with pytest.raises(ValueError, match=r"one leading axis"):
        loss_fn(params._replace(layers={"k": np.float32(1)}), microbatch)
    with pytest.raises(ValueError, match=r"one leading axis.*: there are none"):
        loss_fn(params._replace(layers=()), microbatch)
    half = SIMPLE._replace(layer=lambda own, x, microbatch, axes: x[:2].astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"x: float32\[4,5\] -> bfloat16\[2,5\]"):
        layered_loss_fn(half)(params, microbatch)


def test_a_stack_may_regroup_arrays_into_a_tree_of_the_same_structure():
    rng = np.random.default_rng(0)
    own = LayeredParams({"a": rng.normal(size=(5, 3)), "b": rng.normal(size=(3, 5))}, {"k": rng.normal(size=(2, 3, 3))})
    own = jax.tree.map(lambda leaf: leaf.astype(np.float32), own)
    model = LayeredModel(
        lambda ends, microbatch, axes: microbatch @ ends["b"],
        lambda layer, x, microbatch, axes: x + jnp.tanh(x @ layer["k"]),
        lambda ends, x, microbatch, axes: (jnp.sum(x @ ends["a"]), jnp.float32(1)),
        stack=lambda params: LayeredParams(
            {"a": params.ends["b"], "b": params.ends["a"]}, {"k": params.layers["k"][::-1]}
        ),
    )
    batch = rng.normal(size=(1, 4, 5)).astype(np.float32)
    grads = jax.grad(lambda params: layered_loss_fn(model)(params, batch[0])[0])(own)
    step = make_train_step(model, optax.sgd(1.0))
    state, _ = step(step.init(own), batch)
    expected = jax.tree.map(lambda leaf, grad: leaf - grad, own, grads)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), state.params, expected)


def test_zeros_of_the_gradient_of_an_embedding_wait_for_the_backward_pass_of_the_layers():
    """A compiler may make constants early, and would hold them during the loops over layers."""
    model = SIMPLE._replace(
        embed=lambda ends, tokens, axes: ends["table"][tokens],
        loss=lambda ends, x, tokens, axes: (jnp.sum(jnp.sin(x)).astype(jnp.float32), jnp.float32(x.shape[0])),
    )
    params = LayeredParams({"table": jnp.ones((11, 5), jnp.bfloat16)}, {"k": jnp.ones((2, 5, 5), jnp.bfloat16)})
    step = make_train_step(model, optax.sgd(0.1))
    eqns = equations_in(jax.make_jaxpr(step)(step.init(params), np.zeros((1, 4), np.int32)).jaxpr)
    of_table = [eqn for eqn in eqns if eqn.outvars and str(eqn.outvars[0].aval) == "bfloat16[11,5]"]
    zeros = [eqn for eqn in of_table if eqn.primitive.name == "broadcast_in_dim"]
    assert len(zeros) == 1
    assert not hasattr(zeros[0].invars[0], "val")
    assert "scatter-add" in {eqn.primitive.name for eqn in of_table}


def equations_in(jaxpr):
    """Those of a traced function, and of what it calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            if hasattr(inner := getattr(value, "jaxpr", value), "eqns"):
                yield from equations_in(inner)
