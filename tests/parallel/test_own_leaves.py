"""Optimizers and masks see the model's own parameters on any layout: a step has the numbers of one device."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jvarlen
from jvarlen.parallel import LayeredModel, LayeredParams, TensorSpec, column_linear, row_linear
from jvarlen.parallel.layers import unstack_own
from jvarlen.parallel.own_leaves import on_own_leaves, own_leaves_of
from jvarlen.testing import assert_layout_invariant
from jvarlen.training import adamw_by_batch_size, sgd_by_batch_size
from jvarlen.training.trainable import select_trained

WIDTH, HIDDEN, NUM_VALUES = 24, 96, 13  # with more than 1,024 elements, kernels are sharded; nothing divides 13


def stack(params):
    return LayeredParams(
        {name: params[name] for name in ("table", "scale", "shift")},
        jax.tree.map(lambda *own: jnp.stack(own), *params["blocks"]),
    )


def layer(own, x, batch, axes):
    x = jnp.where(own["kind"], x * own["scale"], x)
    gates, values = jnp.split(column_linear(x, own["in"].reshape(WIDTH, -1), axes=axes), 2, axis=-1)
    return x + row_linear(jax.nn.sigmoid(gates) * values, own["out"], axes=axes)


def loss(ends, x, batch, axes):
    losses = optax.softmax_cross_entropy_with_integer_labels(x * ends["scale"] @ ends["table"].T, batch["targets"])
    return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])


MODEL = LayeredModel(
    lambda ends, batch, axes: ends["table"][(batch["tokens"] + ends["shift"]) % NUM_VALUES],
    layer,
    loss,
    specs=LayeredParams(
        {"table": P(), "scale": P(), "shift": P()},
        {"in": P(None, None, "tensor"), "out": P("tensor"), "scale": P(), "kind": P()},
    ),
    stack=stack,
)


def own_params(num_layers=4):
    rng = np.random.default_rng(0)
    return {
        "table": rng.normal(size=(NUM_VALUES, WIDTH)) / 4,
        "scale": 1 + rng.normal(size=WIDTH) / 10,
        "shift": np.int32(3),
        "blocks": [
            {
                "in": rng.normal(size=(WIDTH, 2, HIDDEN // 2)) / 5,
                "out": rng.normal(size=(HIDDEN // 2, WIDTH)) / 7,
                "scale": 1 + rng.normal(size=WIDTH) / 10,
                "kind": np.bool_(i % 2),
            }
            for i in range(num_layers)
        ],
    }


def random_batch(num_microbatches=4):
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, NUM_VALUES, (num_microbatches, 2, 6))
    weights = rng.uniform(0.5, 2, tokens.shape) * (rng.random(tokens.shape) < 0.8)
    return {"tokens": tokens, "targets": np.roll(tokens, 1, -1), "weights": weights}


def matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def by_name(params):
    return jax.tree.map_with_path(lambda path, _: "'blocks'][1]" in jax.tree_util.keystr(path), params)


def per_layer(params):
    return jax.tree.map_with_path(lambda path, _: "slow" if "[2]" in jax.tree_util.keystr(path) else "fast", params)


OPTIMIZERS = {
    "decay of matrices": optax.adamw(1e-2, weight_decay=0.5, eps=1e-5, mask=matrices),
    "decay of names": optax.adamw(1e-2, weight_decay=0.5, eps=1e-5, mask=by_name),
    "decay of a tree": optax.adamw(1e-2, weight_decay=0.5, eps=1e-5, mask=by_name(own_params())),
    "masked": optax.masked(optax.adam(1e-2, eps=1e-5), matrices),
    "rates of layers": optax.partition({"slow": optax.sgd(1e-3), "fast": optax.adam(1e-2, eps=1e-5)}, per_layer),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8, multiply_by_parameter_scale=True),
    "clipped by block": optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(1.0, momentum=0.9)),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adaptive_grad_clip(0.01), optax.sgd(1.0)),
    "lamb": optax.lamb(1e-2, eps=1e-5),
    "lars": optax.lars(1e-1, momentum=0.9),
    "novograd": optax.novograd(1e-2),
    "muon": optax.contrib.muon(1e-2),
    "moments by samples": adamw_by_batch_size(1e-2, 8, weight_decay=0.5, eps=1e-5, plan=[3, 64, *[8] * 18]),
    "momentum by samples": sgd_by_batch_size(1e-1, 8, momentum=0.9, nesterov=True, plan=[3, 64, *[8] * 18]),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, key=3), optax.sgd(0.1)),
    "accumulated": optax.MultiSteps(optax.apply_if_finite(optax.lamb(1e-2, eps=1e-5), 2), 2),
}
LAYOUTS = ["data2.zero1", "data4.zero3", "data2.stage2", "data1.tensor2", "data2.stage2.tensor2.zero1", "data1.stage4"]


# All on all layouts with `make compositions`.
NUM_LAYOUTS = int(os.environ.get("COMPOSITIONS", "1"))
NAMES = OPTIMIZERS if NUM_LAYOUTS > 1 else ["decay of a tree", "rates of layers", "adafactor"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_gives_the_numbers_of_one_device_on_any_layout(name):
    first = list(OPTIMIZERS).index(name) % len(LAYOUTS)
    layouts = [*LAYOUTS[first:], *LAYOUTS[:first]][:NUM_LAYOUTS]
    assert_layout_invariant(MODEL, own_params(), random_batch(), layouts, optimizer=OPTIMIZERS[name], num_steps=3)


@pytest.mark.parametrize("name", ["decay of names", "adafactor", "noise", "accumulated"])
def test_an_update_of_stacked_layers_is_that_of_each(name):
    """Without a layout; what differs between layers, and what mixes them, as well."""
    optimizer, params = OPTIMIZERS[name], jax.tree.map(np.float32, select_trained(own_params()))
    rng = np.random.default_rng(2)
    grads = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), params)
    own = own_leaves_of(params, stack)
    stacking = on_own_leaves(optimizer, own)
    states = optimizer.init(params), stacking.init(stack(params))
    for _ in range(2):
        expected, one = optimizer.update(grads, states[0], params)
        found, other = jax.jit(stacking.update)(stack(grads), states[1], stack(params))
        states = one, other
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), unstack_own(found, other), expected
        )


@jax.custom_jvp
def custom_jvp(x):
    return jnp.sin(x)


@jax.custom_vjp
def custom_vjp(x):
    return jnp.cos(x)


custom_jvp.defjvp(lambda given, tangents: (custom_jvp(*given), tangents[0] * jnp.cos(given[0])))
custom_vjp.defvjp(lambda x: (custom_vjp(x), x), lambda x, grad: (-jnp.sin(x) * grad,))

OPERATIONS = {
    "elements": lambda x: 2 * x + 1,
    "jit": jax.jit(lambda x: jnp.clip(x, -1, 1)),
    "cond": lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x, lambda x: -x, x),
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
    "dot_general": lambda x: x @ x,
    "reduction": lambda x: x / jnp.linalg.norm(x),
    "scan": lambda x: jax.lax.scan(lambda x, _: (x @ x, None), x, length=3)[0],
    "while": lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x + 1, x),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_all_layers_do_alike_runs_once(name):
    def num_equations(num_layers):
        params = [np.full((4, 4), float(i), np.float32) for i in range(num_layers)]
        stacked = LayeredParams((), jnp.stack(params))
        own = own_leaves_of(params, lambda params: LayeredParams((), jnp.stack(params)))
        alike = optax.stateless(lambda grads, params: jax.tree.map(OPERATIONS[name], grads))
        optimizer = on_own_leaves(alike, own)
        traced = jax.make_jaxpr(optimizer.update)(stacked, optimizer.init(stacked), stacked)
        updates, _ = optimizer.update(stacked, optimizer.init(stacked), stacked)
        expected = jnp.stack([OPERATIONS[name](leaf) for leaf in params])
        np.testing.assert_allclose(updates.layers, expected, rtol=1e-6)
        return len(traced.jaxpr.eqns)

    assert num_equations(2) == num_equations(5)


# All layers of a stack, some and none; one of the ends; integers are no match.
TRAINABLE = ("blocks.*.in", "blocks.3.*", "blocks.1.out", "scale")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"), [("lamb", "data2.tensor2.zero3"), ("accumulated", "data1.stage2.interleaved.virtual2")]
)
def test_some_layers_of_a_stack_are_trained_as_on_one_device(name, text):
    optimizer = OPTIMIZERS[name]
    assert_layout_invariant(
        MODEL, own_params(), random_batch(), [text], optimizer=optimizer, trainable=TRAINABLE, num_steps=3
    )


def test_layers_that_are_not_trained_keep_their_bits_and_have_no_state():
    """Zeros keep their sign, which adding 0 would not."""
    params = jax.tree.map(lambda leaf: leaf.astype(np.float32) if leaf.dtype == np.float64 else leaf, own_params())
    for block in params["blocks"]:
        block["out"][:] = -0.0
    step = jvarlen.make_train_step(MODEL, optax.adamw(1e-2), layout="data2.stage2.tensor2.zero1", trainable=TRAINABLE)
    batch = jax.tree.map(lambda leaf: leaf.astype(np.float32) if leaf.dtype == np.float64 else leaf, random_batch())
    state = step.init(params)
    trained = select_trained(params, TRAINABLE)
    num_trained = sum(leaf.size for leaf in jax.tree.leaves(trained))
    assert sum(leaf.size for leaf in jax.tree.leaves(state.opt_state)) == 2 * num_trained + 1
    spread = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.size >= 1024]
    assert {leaf.ndim for leaf in spread} == {2, 4}  # of layers by themselves, and of stacks
    assert not any(leaf.is_fully_replicated for leaf in spread)
    after = step.gather_params(jax.jit(step)(state, batch)[0])

    def check(leaf, found, before):
        if leaf is None:
            assert found.dtype == before.dtype
            assert found.tobytes() == before.tobytes()
        else:
            assert (found != before).any()

    jax.tree.map(check, trained, after, params, is_leaf=lambda leaf: leaf is None)


def test_a_head_is_not_cut():
    """Two heads of keys and values do not go over four devices, and four of queries do."""
    specs = LayeredParams(
        {}, {"q": TensorSpec(P(None, "tensor"), num_heads=4), "k": TensorSpec(P(None, "tensor"), num_heads=2)}
    )
    model = LayeredModel(*(lambda *args: args[0],) * 3, specs=specs)
    params = LayeredParams({}, {"q": np.ones((2, 8, 16)), "k": np.ones((2, 8, 8))})
    step = jvarlen.make_train_step(model, optax.sgd(0.1), layout="data1.tensor4")
    with pytest.raises(ValueError, match=r"the 4 devices of the axis 'tensor' do not divide \['k'\].*\(num_heads: 2, "):
        step.init(params)
