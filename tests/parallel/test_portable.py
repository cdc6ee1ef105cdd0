"""States in the form of one device: the same whatever the layout, and restored bit for bit on any other."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jvarlen
from jvarlen.models import DecoderConfig, init_params, layered, make_loss_fn
from jvarlen.parallel import LayeredModel, LayeredParams, Layout, TensorSpec
from jvarlen.parallel.layers import OwnLeavesState, is_own_leaf
from jvarlen.parallel.portable import portable_params
from jvarlen.parallel.state_layout import stacked_for
from jvarlen.parallel.zero import MIN_SHARDED
from jvarlen.training.checkpoint import Place, open_checkpoints
from jvarlen.training.train_state import new_state
from jvarlen.training.trainable import select_trained

# Nothing divides 257, nor 258 rows by 4; two devices share a head of keys, and two stages do not divide the layers.
CONFIG = DecoderConfig(num_layers=3, width=24, num_heads=4, num_kv_heads=1, vocab_size=257)
MODEL = layered(CONFIG)
PLACE = Place(num_steps_done=1, epoch=0, step=1, plan_digest="")


def random_like(tree, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jax.device_put(rng.normal(size=leaf.shape).astype(leaf.dtype)), tree)


def assert_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for found, expected in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def not_scales(params):
    return jax.tree.map_with_path(lambda path, _: "scale" not in jax.tree_util.keystr(path), params)


OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "accumulated, with masters, masked, with a history": optax.MultiSteps(
        jvarlen.with_float32_master(
            optax.chain(optax.masked(optax.adam(1e-3), not_scales), optax.scale_by_lbfgs(memory_size=3))
        ),
        2,
    ),
}
ALL_AXES = "data2.stage2.tensor2.zero1"
CASES = [("data3.zero1", "adamw"), (ALL_AXES, list(OPTIMIZERS)[1])]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """States of one device with random values, and a checkpoint of each, as a run on one device writes it."""
    found = {}
    for name, optimizer in OPTIMIZERS.items():
        params = init_params(CONFIG, seed=0)
        if "masters" in name:
            params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        whole = random_like(new_state(params, optimizer))
        folder = tmp_path_factory.mktemp("saved")
        with open_checkpoints(folder) as checkpoints:
            checkpoints.save(whole, PLACE)
        found[name] = whole, folder
    return found


@pytest.mark.parametrize(("text", "name"), CASES)
def test_a_layout_takes_checkpoints_of_one_device_and_writes_the_same(saved, tmp_path, text, name):
    layout, optimizer = Layout.parse(text), OPTIMIZERS[name]
    whole, folder = saved[name]
    step = jvarlen.make_train_step(MODEL, optimizer, layout=layout)
    state = step.init(whole.params)
    form = step.portable_form(state, whole.params)
    with open_checkpoints(folder, form=form) as checkpoints:
        restored, _ = checkpoints.restore(zeros_like(state))
    for found, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert (found.shape, found.sharding) == (expected.shape, expected.sharding)
    # Parameters, and what lies like them, are as `init` places them.
    assert_equal(restored.params, state.params)
    if name == "adamw":
        opt_state = restored.opt_state
        if isinstance(opt_state, OwnLeavesState):
            mu = dict(jax.tree.leaves_with_path(opt_state.inner_state[0].mu))
            own = jax.tree.leaves_with_path(opt_state.own, is_leaf=is_own_leaf)
            first = {at.place: path for path, at in reversed(own)}
            mu = [mu[first[place]] for place in sorted(first)]
            mu = jax.tree.unflatten(jax.tree.structure(state.params), mu)
        else:
            mu = opt_state[0].mu
        moments = jvarlen.make_train_step(MODEL, optimizer, layout=layout).init(whole.opt_state[0].mu).params
        unpadded = stacked_for(layout, MODEL, whole.params, optimizer)[1]
        assert_equal(cropped(mu, unpadded), cropped(moments, unpadded))

    with open_checkpoints(tmp_path, form=form) as checkpoints:
        checkpoints.save(restored, PLACE)
    with open_checkpoints(tmp_path) as checkpoints:
        again, _ = checkpoints.restore(zeros_like(whole))
    assert_equal(again, whole)
    about, expected = (json.loads((path / "1" / "about.json").read_text())["leaves"] for path in (tmp_path, folder))
    assert about == expected
    one_device = jax.jit(functools.partial(portable_params, whole=whole.params, layout=layout, model=MODEL))
    assert_equal(one_device(restored.params), whole.params)

    made = [leaf for leaf in jax.tree.leaves(form.like(state)) if isinstance(leaf, jax.ShapeDtypeStruct)]
    assert made
    spread = [leaf.sharding.shard_shape(leaf.shape) != leaf.shape for leaf in made if leaf.size >= MIN_SHARDED]
    assert all(spread), "no device holds a whole array"


def test_a_state_of_some_parameters_goes_from_layout_to_layout(tmp_path):
    """All layers of a stack are trained, or some, or none."""
    optimizer, trainable = optax.adamw(1e-3), ["layers.1.*", "layers.*.mlp.up.kernel", "embed.*"]
    trained_of = functools.partial(select_trained, trainable=trainable)
    whole = random_like(new_state(init_params(CONFIG, seed=0), optimizer, trained_of=trained_of))

    def form_on(text):
        layout, *of_loss = text.split(" ", 1)
        model = make_loss_fn(CONFIG) if of_loss else MODEL
        step = jvarlen.make_train_step(model, optimizer, layout=layout, trainable=trainable)
        state = step.init(whole.params)
        return state, step.portable_form(state, whole.params)

    with open_checkpoints(tmp_path / "0") as checkpoints:
        checkpoints.save(whole, PLACE)
    for number, text in enumerate((ALL_AXES, "data4.zero3", "data3.zero3 of a loss")):
        state, form = form_on(text)
        assert jax.tree.structure(form.shapes) == jax.tree.structure(whole)
        with open_checkpoints(tmp_path / str(number), form=form) as checkpoints:
            restored, _ = checkpoints.restore(zeros_like(state))
        assert_equal(restored.params, state.params)
        with open_checkpoints(tmp_path / str(number + 1), form=form) as checkpoints:
            checkpoints.save(restored, PLACE)
    with open_checkpoints(tmp_path / str(number + 1)) as checkpoints:
        again, _ = checkpoints.restore(zeros_like(whole))
    assert_equal(again, whole)


@pytest.mark.parametrize(
    ("of_state", "given", "listed"),
    [
        ({"trainable": "a"}, {}, ".opt_state[0].mu['b']: absent -> float32[5]"),
        ({}, {"trainable": "a"}, ".opt_state[0].mu['b']: float32[5] -> absent"),
        ({"trainable": "b"}, {"trainable": "c"}, ".opt_state[0].mu['c']: absent -> float32[5]"),
        ({}, {"optimizer": optax.sgd(0.1)}, ".opt_state[0].count: int32[] -> absent"),
        ({}, {"params": {"a": np.ones((4, 3))}}, ".params['b']: float32[5] -> absent"),
        (
            {},
            {"params": {"a": np.ones((4, 3)), "b": np.ones(7), "c": np.ones(5)}},
            ".params['b']: float32[5]",
        ),
    ],
)
def test_a_state_of_another_step_or_of_other_parameters_is_refused(of_state, given, listed):
    params = {"a": np.ones((4, 3), np.float32), "b": np.ones(5, np.float32), "c": np.ones(5, np.float32)}

    def step(*, optimizer=optax.adam(0.1), trainable=None):  # noqa: B008
        return jvarlen.make_train_step(lambda *_: (0.0, 1.0), optimizer, layout="data2.zero1", trainable=trainable)

    given = dict(given)
    other = given.pop("params", params)
    with pytest.raises(ValueError, match="the state is not of these params and the optimizer, layout") as refused:
        step(**given).portable_form(step(**of_state).init(params), other)
    assert listed in str(refused.value)


def test_states_of_one_device_have_the_form_already():
    params = {"a": np.ones(3, np.float32)}
    for layout in (None, "data2"):
        step = jvarlen.make_train_step(lambda *_: (0.0, 1.0), optax.sgd(0.1), layout=layout)
        assert step.portable_form(step.init(params), params) is None


def test_a_state_of_other_layers_of_a_stack_is_refused():
    params = init_params(CONFIG, seed=0)
    own, other = (
        jvarlen.make_train_step(MODEL, optax.adam(0.1), layout="data2.zero3", trainable=f"layers.{i}.*") for i in (0, 1)
    )
    own.portable_form(own.init(params), params)
    with pytest.raises(ValueError, match=r"mu\['layers'\]\[0\]\['attention'\].*: float32.* -> absent"):
        other.portable_form(own.init(params), params)


def cropped(tree, like):
    """Without the zeros that pad shards or vocabularies."""
    return jax.tree.map(lambda leaf, like: np.asarray(leaf)[tuple(map(slice, like.shape))], tree, like)


def zeros_like(tree):
    return jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), tree)


def test_a_model_of_ones_own_keeps_the_form_that_its_parameters_have(tmp_path):
    """Nothing is stacked; a vocabulary is padded."""
    specs = LayeredParams(
        {"table": TensorSpec(P("tensor"), num_values=5)}, {"in": P(None, "tensor"), "out": P("tensor")}
    )
    model = LayeredModel(*(lambda *args: args[0],) * 3, specs=specs)
    params = LayeredParams(
        {"table": np.arange(15.0).reshape(5, 3)},
        {"in": np.arange(24.0).reshape(2, 3, 4), "out": np.arange(12.0).reshape(2, 2, 3)},
    )
    layout, optimizer = Layout.parse("data1.tensor2"), optax.sgd(0.1, momentum=0.9)
    step = jvarlen.make_train_step(model, optimizer, layout=layout)
    state = step.init(params)
    saved = step.portable_form(state, params).save(state)
    assert_equal(saved.params, jax.tree.map(jnp.asarray, params))
    assert saved.params.layers["out"] is state.params.layers["out"]
    assert saved.opt_state[0].trace.ends["table"].shape == (5, 3)


def test_a_stack_that_does_more_than_stack_is_rejected():
    def stack(params):
        return LayeredParams({"twice": params["w"][0]}, {"w": jnp.stack(params["w"])})

    model = MODEL._replace(stack=stack, specs=None, num_layers=2)
    params = {"w": [np.zeros((2, 3)), np.zeros((2, 3))]}
    with pytest.raises(ValueError, match="does not have each of its 2 arrays once"):
        jvarlen.make_train_step(model, optax.sgd(0.1), layout="stage2").init(params)
