"""Moments by samples: Optax's own at a constant batch size, and one half-life in samples at any."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import lr_sequence, make_plan, make_train_step, with_float32_master
from jvarlen.estimates.memory import estimate_memory
from jvarlen.training import adamw_by_batch_size, beta_sequence, sgd_by_batch_size
from jvarlen.training.checkpoint import Place, open_checkpoints
from jvarlen.training.moments import MomentsState
from tests.parallel.steps import assert_equal_trees
from tests.parallel.test_own_leaves import MODEL, TRAINABLE, own_params, random_batch

BASE, NUM_STEPS = 8, 100
SIZES = np.random.default_rng(0).integers(0, 65, NUM_STEPS)
SIZES[:3] = 0, BASE, 0
ADAMW = functools.partial(adamw_by_batch_size, b2=0.95, weight_decay=0.1)
OF_OPTAX = {
    "adamw": (ADAMW, optax.adamw(0.01, b2=0.95, weight_decay=0.1)),
    "momentum": (functools.partial(sgd_by_batch_size, momentum=0.9), optax.sgd(0.01, 0.9)),
    "nesterov": (
        functools.partial(sgd_by_batch_size, momentum=0.9, nesterov=True),
        optax.sgd(0.01, 0.9, nesterov=True),
    ),
    "sgd": (sgd_by_batch_size, optax.sgd(0.01)),
}
VARYING = {
    "sqrt": ADAMW,
    "eps too": functools.partial(ADAMW, rule="linear", eps_rule="sqrt", eps=1e-3),
    "no rule": functools.partial(ADAMW, rule=None, b1=0.0, eps=0.0, eps_rule="sqrt"),
    "no eps": functools.partial(ADAMW, eps=0.0),
    "nesterov": functools.partial(sgd_by_batch_size, momentum=0.9, nesterov=True, rule="sqrt"),
    "no momentum": functools.partial(sgd_by_batch_size, unit="tokens"),
}


def take_steps(optimizer, sizes, dtype=np.float32):
    """Parameters after every step of one jitted function, and the last state."""
    optimizer = optax.with_extra_args_support(optimizer)
    rng = np.random.default_rng(1)
    params = {"w": jnp.asarray(rng.normal(size=(7, 5)), dtype), "b": jnp.asarray(rng.normal(size=300), dtype)}
    state, after = optimizer.init(params), []

    @jax.jit
    def step(params, state, grads, size):
        updates, state = optimizer.update(grads, state, params, batch_size=size, num_tokens=size)
        return optax.apply_updates(params, updates), state

    for size in sizes:
        grads = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * rng.exponential(), dtype), params)
        params, state = step(params, state, grads, jnp.float32(size))
        after.append(params)
    assert step._cache_size() == 1
    return jax.tree.map(lambda *leaves: np.stack(leaves), *after), state


def moments_in(state):
    (node,) = [each for each in state if isinstance(each, MomentsState)]
    return node


# At a constant batch size


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("is_planned", [True, False], ids=["planned", "traced"])
@pytest.mark.parametrize("name", OF_OPTAX)
def test_constant_base_batches_give_the_bits_of_optax(name, is_planned):
    make, of_optax = OF_OPTAX[name]
    sizes = np.full(NUM_STEPS, BASE)
    found, _ = take_steps(make(0.01, BASE, plan=sizes if is_planned else None), sizes)
    expected, _ = take_steps(of_optax, sizes)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.usefixtures("optimized")
def test_constant_base_batches_give_the_bits_of_optax_to_float32_masters():
    sizes = np.full(10, BASE)
    made = (ADAMW(0.01, BASE, plan=sizes), OF_OPTAX["adamw"][1])
    found, expected = (take_steps(with_float32_master(each), sizes, jnp.bfloat16)[1].master for each in made)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# At any batch size


@pytest.mark.parametrize("name", VARYING)
def test_batch_sizes_that_come_with_the_steps_do_as_planned_ones(name):
    """To 1e-12 in float64, and to 1e-5 in float32. Some are 0, the first too."""
    make = VARYING[name]
    with jax.enable_x64(True):
        planned, _ = take_steps(make(0.01, BASE, plan=SIZES), SIZES, np.float64)
        traced, _ = take_steps(make(0.01, BASE), SIZES, np.float64)
    in_float32, _ = take_steps(make(0.01, BASE), SIZES)
    assert np.isfinite(planned["w"]).all()
    for leaf in ("w", "b"):
        np.testing.assert_allclose(traced[leaf], planned[leaf], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(in_float32[leaf], planned[leaf], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_planned", [True, False], ids=["planned", "traced"])
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_a_batch_of_twice_the_size_counts_as_two(name, is_planned):
    """With an equal gradient, at rate 0."""
    make, _ = OF_OPTAX[name]
    grads, moments = jnp.asarray(np.random.default_rng(2).normal(size=9)), []
    with jax.enable_x64(True):
        for sizes in ([BASE] * 6, [2 * BASE] * 3, [3 * BASE, 0, BASE, 2 * BASE]):
            optimizer = make(0.0, BASE, plan=sizes if is_planned else None)
            state = optimizer.init(grads := jnp.asarray(grads, np.float64))
            for size in sizes:
                updates, state = optimizer.update(grads, state, grads, batch_size=size)
            assert not updates.any()
            moments.append(moments_in(state).moments)
        for others in moments[1:]:
            for found, expected in zip(others, moments[0], strict=True):
                np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("unit", ["sequences", "tokens"])
def test_what_a_plan_keeps_of_a_moment_is_told_before(unit):
    """Over epochs that come from an iterator; of a gradient of 0, a moment keeps as much."""
    plans = [make_plan([3] * 14 + [9] * 5, [(5, 4), (2, 9)], order="shuffle", epoch=epoch) for epoch in range(2)]
    betas = beta_sequence(iter(plans), 0.9, 6, unit=unit)
    sizes = np.concatenate([getattr(plan, f"num_{unit}") for plan in plans])
    np.testing.assert_allclose(betas, 0.9 ** (sizes / 6), rtol=1e-15)
    optimizer = sgd_by_batch_size(1.0, 6, momentum=0.9, rule=None, unit=unit, plan=iter(plans), counted_in="tokens")
    state = optimizer.init(jnp.ones(()))
    before = moments_in(state)._replace(moments=(jnp.ones(()),))
    _, state = optimizer.update(jnp.zeros(()), (before, *state[1:]))
    assert float(moments_in(state).moments[0]) == np.float32(betas[0])
    table = state[-1].table[: len(sizes)]
    assert table.tolist() == lr_sequence(plans, 1.0, 6, rule=None).astype(np.float32).tolist()


def test_the_correction_of_few_samples_has_no_cancellation():
    """A constant gradient gives a first moment of itself, from the first sample of a thousandth of a batch on."""
    optimizer = adamw_by_batch_size(1.0, 1000, weight_decay=0.0, rule=None)
    state, grad = optimizer.init(jnp.ones(())), jnp.float32(0.3)
    for _ in range(3):
        updates, state = optimizer.update(grad, state, jnp.ones(()), batch_size=1)
        assert float(updates) == pytest.approx(-1, rel=1e-6)


@pytest.mark.parametrize("sizes", [None, [8]], ids=["traced", "planned"])
@pytest.mark.parametrize("make", [adamw_by_batch_size, functools.partial(sgd_by_batch_size, momentum=0.9)])
def test_a_state_keeps_its_types_and_takes_no_batch_sizes_of_another_kind(make, sizes):
    """Also where gradients have more bits than parameters."""
    optimizer, params = make(0.1, 8, plan=sizes), jnp.ones(2, jnp.bfloat16)
    state = optimizer.init(params)
    updates, after = optimizer.update(jnp.ones(2, np.float32), state, params, batch_size=8)
    assert jax.tree.map(jnp.result_type, (updates, after)) == jax.tree.map(jnp.result_type, (params, state))
    with pytest.raises(ValueError, match="_by_batch_size has plan= if its state is"):
        make(0.1, 8, plan=None if sizes else [8]).update(updates, state, params, batch_size=8)


def test_sgd_without_momentum_has_no_moments():
    assert not jax.tree.leaves(sgd_by_batch_size(0.1, 8).init(jnp.ones(2)))


def test_steps_after_the_planned_ones_give_nan():
    for optimizer in (ADAMW(0.01, BASE, plan=[8]), sgd_by_batch_size(0.01, BASE, plan=[8])):
        after, _ = take_steps(optimizer, [8, 8])
        assert [np.isnan(each).all() for each in after["w"]] == [False, True]


@pytest.mark.parametrize(("unit", "name"), [("sequences", "batch_size"), ("tokens", "num_tokens")])
@pytest.mark.parametrize("make", [adamw_by_batch_size, functools.partial(sgd_by_batch_size, momentum=0.9)])
def test_the_batch_size_cannot_be_forgotten(make, unit, name):
    optimizer = make(0.1, 8, unit=unit)
    other = {"batch_size": "num_tokens", "num_tokens": "batch_size"}[name]
    with pytest.raises(TypeError, match=rf"_by_batch_size\(unit='{unit}'\) needs the extra argument {name}.*plan="):
        optimizer.update(jnp.ones(2), optimizer.init(jnp.ones(2)), jnp.ones(2), **{other: 3})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"b1": 1.0}, r"b1 \(1.0\) must be"),
        ({"b2": -0.1}, r"b2 \(-0.1\) must be"),
        ({"eps": -1.0}, "eps"),
        ({"weight_decay": np.inf}, "weight_decay"),
        ({"unit": "samples"}, "'samples'"),
        ({"rule": "cubic"}, "'cubic'"),
        ({"eps_rule": "linear"}, "'linear'"),
        ({"counted_in": "tokens"}, "needs plan="),
        ({"learning_rate": np.ones(2)}, "needs plan="),
        ({"plan": [-1]}, "batch sizes must be"),
        ({"plan": [8], "counted_in": "tokens"}, "do not tell tokens"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_arguments_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        adamw_by_batch_size(**{"learning_rate": 0.1, "base_batch_size": 8} | options)
    for make in (adamw_by_batch_size, sgd_by_batch_size):
        with pytest.raises(ValueError, match="base_batch_size"):
            make(0.1, 0)


# In training


@pytest.mark.parametrize("is_planned", [True, False], ids=["planned", "traced"])
@pytest.mark.parametrize(("layout", "trainable"), [("data2.zero3", None), ("data2.stage2.tensor2.zero1", TRAINABLE)])
def test_layouts_take_the_steps_of_one_device(layout, trainable, is_planned):
    """In which samples vary; the memory of the state is that of the estimate, with tables whole on every device."""
    sizes, found = [3, 40, 8], {}
    optimizer = adamw_by_batch_size(1e-2, 8, eps=1e-5, plan=sizes if is_planned else None)
    with jax.enable_x64(True):
        for text in ("data1", layout):
            step = make_train_step(MODEL, optimizer, layout=text, trainable=trainable)
            state, take = step.init(params := own_params()), jax.jit(step)
            estimate = estimate_memory(MODEL, optimizer, layout=text, params=params, trainable=trainable)
            on_first = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state.opt_state))
            assert estimate.opt_state == on_first
            for size in sizes:
                state, _ = take(state, random_batch() | {"num_sequences": np.float32(size)})
            found[text] = step.gather_params(state)
    assert_equal_trees(found[layout], found["data1"], rtol=1e-12)


@pytest.mark.parametrize("is_planned", [True, False], ids=["planned", "traced"])
def test_a_resumed_training_takes_the_same_steps_by_the_same_program(tmp_path, is_planned):
    """Also under a plan of more steps, whose first ones are the same."""

    def made(num_steps):
        sizes = np.resize([3, 40, 8], num_steps) if is_planned else None
        optimizer = adamw_by_batch_size(1e-2, 8, plan=sizes)
        step = make_train_step(lambda params, batch: (jnp.sum(params * batch["x"]), jnp.float32(1)), optimizer)
        return jax.jit(step), step.init(jnp.ones(3))

    def batch(number):
        return {"x": np.float32([[1, -2, number]]), "num_sequences": np.float32([3, 40, 8][number])}

    step, state = made(3)
    for number in range(3):
        if number == 2:
            with open_checkpoints(tmp_path) as checkpoints:
                checkpoints.save(state, Place(num_steps_done=2, epoch=0, step=2, plan_digest="", seed=0))
        state, _ = step(state, batch(number))
    longer, fresh = made(2**14)
    assert step.lower(state, batch(2)).as_text() == longer.lower(fresh, batch(2)).as_text()
    with open_checkpoints(tmp_path) as checkpoints:
        restored, _ = checkpoints.restore(fresh)
    resumed, _ = longer(restored, batch(2))
    assert_equal_trees(resumed.params, state.params, rtol=0)
    assert_equal_trees(resumed.opt_state[0].moments, state.opt_state[0].moments, rtol=0)
