"""Parameters to evaluate are the average that the optimizer keeps, on any layout as on one device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import jvarlen
from jvarlen import no_recompiles
from jvarlen.parallel.layers import layered_loss_fn
from tests.parallel.test_own_leaves import MODEL, TRAINABLE, own_params, random_batch

schedule_free_eval_params = optax.contrib.schedule_free_eval_params


class MeanState(NamedTuple):
    count: jax.Array
    mean: dict


def keep_mean():
    """The mean of the parameters after all steps."""

    def init(params):
        return MeanState(jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))

    def update(updates, state, params):
        count, after = state.count + 1, optax.apply_updates(params, updates)
        return updates, MeanState(count, jax.tree.map(lambda m, p: m + (p - m) / count, state.mean, after))

    return optax.GradientTransformation(init, update)


def taken(step, num_steps=3):
    state, batch, take = step.init(own_params()), random_batch(), jax.jit(step)
    for _ in range(num_steps):
        state, _ = take(state, batch)
    return state


def trained_alone(optimizer, average, trainable=None, num_steps=3):
    """Parameters and optimizer state on one device, by Optax alone, and their average by the given function."""
    loss_fn, batch = layered_loss_fn(MODEL), random_batch()
    whole = own_params()
    params = jvarlen.training.trainable.select_trained(whole, trainable)

    def loss(params):
        merged = jvarlen.training.trainable.merge_trained(params, whole)
        sums = [loss_fn(merged, jax.tree.map(lambda leaf, i=i: leaf[i], batch)) for i in range(4)]
        return sum(each[0] for each in sums) / sum(each[1] for each in sums)

    @jax.jit
    def take(params, state):
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(num_steps):
        params, state = take(params, state)
    return jvarlen.training.trainable.merge_trained(average(state, params), whole)


def assert_close(found, expected, rtol=1e-11):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("text", ["data2.stage2.tensor2.zero1"])
def test_schedule_free_is_evaluated_at_the_parameters_of_optax(text):
    optimizer = optax.contrib.schedule_free_adamw(0.1, warmup_steps=2)
    with jax.enable_x64(True):
        expected = trained_alone(optimizer, schedule_free_eval_params)
        step = jvarlen.make_train_step(MODEL, optimizer, layout=text)
        state = taken(step)
        evaluated = step.for_evaluation(state)
        assert_close(step.gather_params(evaluated), expected)
        assert evaluated.opt_state is state.opt_state
        for leaf, trained in zip(jax.tree.leaves(evaluated.params), jax.tree.leaves(state.params), strict=True):
            assert leaf.sharding == trained.sharding
        with no_recompiles():
            step.for_evaluation(evaluated)


@pytest.mark.parametrize("text", [None, "data4.zero3"])
def test_a_function_of_the_user_gives_the_parameters_to_evaluate(text):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1), keep_mean())

    def average(opt_state, params):
        return opt_state[2].mean

    with jax.enable_x64(True):
        expected = trained_alone(optimizer, average, TRAINABLE)
        step = jvarlen.make_train_step(MODEL, optimizer, layout=text, trainable=TRAINABLE, eval_params=average)
        state = taken(step)
        assert_close(step.gather_params(step.for_evaluation(state)), expected)


def test_schedule_free_is_found_inside_of_other_optimizers():
    """And averaged in float32, where its masters are."""
    optimizer = jvarlen.with_float32_master(
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.partition(
                {"a": optax.contrib.schedule_free_sgd(0.5), "b": optax.contrib.schedule_free_sgd(0.25)},
                {"one": "a", "two": "b"},
            ),
        )
    )
    params = {"one": jnp.ones(3, jnp.bfloat16), "two": jnp.full(2, 2.0, jnp.bfloat16)}
    step = jvarlen.make_train_step(lambda p, x: (sum(jnp.sum(x * leaf**2) for leaf in p.values()), 1.0), optimizer)
    state = step.init(params)
    for value in (1.0, 0.3):
        state, _ = jax.jit(step)(state, jnp.full((1,), value))
    found = step.for_evaluation(state).params
    inner = state.opt_state.inner_state[1].inner_states
    for name, label in (("one", "a"), ("two", "b")):
        part = inner[label].inner_state
        expected = schedule_free_eval_params(part._replace(z=part.z[name]), state.opt_state.master[name])
        assert expected.dtype == jnp.float32
        np.testing.assert_array_equal(found[name], expected.astype(jnp.bfloat16), strict=True)
        assert (found[name] != state.params[name]).any()


def test_without_an_average_the_state_is_the_same():
    step = jvarlen.make_train_step(MODEL, optax.adam(0.1))
    state = step.init(own_params())
    assert step.for_evaluation(state) is state


def test_what_is_not_like_the_parameters_is_refused():
    params = {"a": jnp.ones(3), "b": jnp.ones(2)}

    def average(opt_state, params):
        return {"a": params["a"][:2], "c": params["b"]}

    step = jvarlen.make_train_step(lambda p, x: (jnp.sum(x), 1.0), optax.sgd(0.1), eval_params=average)
    with pytest.raises(ValueError, match=r"\['a'\] float32\[2\], not float32\[3\]; \['c'\] float32\[2\], not absent"):
        step.for_evaluation(step.init(params))
