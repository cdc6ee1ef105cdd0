"""Parameters to evaluate are the average that the optimizer keeps, on any layout as on one device."""

import functools
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
from jvarlen.training import ema_of_params
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


def weighted(decay, params):
    """Σ dᵗ⁻ⁱ pᵢ / Σ dᵗ⁻ⁱ of the parameters after each update."""
    weights = decay ** np.arange(len(params))[::-1]
    weights /= weights.sum()

    def of_leaf(*leaves):
        is_float = leaves[0].dtype.kind == "f"
        return np.tensordot(weights, np.stack(leaves), 1) if is_float else leaves[0]

    return jax.tree.map(of_leaf, *params)


@pytest.mark.parametrize(
    ("layout", "trainable"), [(None, None), ("data4.zero3", TRAINABLE), ("data2.stage2.tensor2.zero1", None)]
)
def test_ema_is_the_average_of_the_parameters_after_each_update(layout, trainable):
    """Wherever it stands in the chain."""
    optimizer = optax.chain(ema_of_params(0.9), optax.clip_by_global_norm(1.0), optax.adam(0.1))
    with jax.enable_x64(True):
        step = jvarlen.make_train_step(MODEL, optimizer, layout=layout, trainable=trainable)
        state, batch, take = step.init(own_params()), random_batch(), jax.jit(step)
        assert_close(step.gather_params(step.for_evaluation(state)), step.gather_params(state))
        params = []
        for _ in range(4):
            state, _ = take(state, batch)
            params.append(step.gather_params(state))
        evaluated = step.for_evaluation(state)
        assert_close(step.gather_params(evaluated), weighted(0.9, params))
        for leaf, trained in zip(jax.tree.leaves(evaluated.params), jax.tree.leaves(state.params), strict=True):
            assert leaf.sharding == trained.sharding


def test_ema_of_few_bits_is_kept_in_float32():
    """With a decay whose steps bfloat16 has no bits for; of the float32 copies, where the optimizer has some."""
    step_of = functools.partial(jvarlen.make_train_step, lambda p, x: (jnp.sum(x * p), jnp.float32(1)))
    for with_master in (False, True):
        optimizer = optax.chain(optax.sgd(2.0**-7), ema_of_params(0.999))
        step = step_of(jvarlen.with_float32_master(optimizer) if with_master else optimizer)
        state, take, trained = step.init(jnp.ones(3, jnp.bfloat16)), jax.jit(step), []
        for _ in range(50):
            state, _ = take(state, jnp.full((1, 1), 0.5 if with_master else 1.0))
            trained.append(np.asarray(state.opt_state.master if with_master else state.params, np.float32))
        found = step.for_evaluation(state).params
        assert found.dtype == jnp.bfloat16
        np.testing.assert_array_equal(found, weighted(0.999, trained).astype(jnp.bfloat16))


def test_ema_counts_the_updates_of_multi_steps():
    step = jvarlen.make_train_step(
        lambda p, x: (jnp.sum(x * p), jnp.float32(1)),
        optax.MultiSteps(optax.chain(optax.sgd(1.0), ema_of_params(0.5)), 3),
    )
    state = step.init(jnp.float32(0))
    for _ in range(7):  # 0 becomes -1 and -2
        state, _ = jax.jit(step)(state, jnp.ones((1, 1)))
    np.testing.assert_allclose(step.for_evaluation(state).params, (-1 / 2 - 2) / 1.5, rtol=1e-6)


def test_averages_of_parts_are_each_of_their_parameters_and_two_of_one_are_refused():
    parts = {"a": optax.chain(optax.sgd(1.0), ema_of_params(0.5)), "b": optax.sgd(1.0)}
    optimizer = optax.partition(parts, {"one": "a", "two": "b"})
    params = {"one": jnp.zeros(2), "two": jnp.zeros(2)}
    loss = lambda p, x: (sum(jnp.sum(x * leaf) for leaf in p.values()), jnp.float32(1))  # noqa: E731
    step = jvarlen.make_train_step(loss, optimizer)
    state = step.init(params)
    for _ in range(2):
        state, _ = jax.jit(step)(state, jnp.ones((1, 1)))
    found = step.for_evaluation(state).params
    np.testing.assert_allclose(found["one"], (-1 / 2 - 2) / 1.5, rtol=1e-6)
    np.testing.assert_array_equal(found["two"], state.params["two"])

    step = jvarlen.make_train_step(loss, optax.chain(optimizer, ema_of_params(0.9)))
    with pytest.raises(ValueError, match="keeps 2 averages of a parameter"):
        step.for_evaluation(step.init(params))
    for decay in (0.0, 1.0, True):
        with pytest.raises(ValueError, match=r"decay \(.*\) must be above 0 and below 1"):
            ema_of_params(decay)


def test_an_evaluation_takes_the_average_and_refuses_the_state_that_keeps_it():
    loss = lambda p, x: (jnp.sum(x * p), jnp.float32(1))  # noqa: E731
    for optimizer in (optax.chain(optax.sgd(1.0), ema_of_params(0.5)), optax.contrib.schedule_free_sgd(1.0)):
        step, evaluation = jvarlen.make_train_step(loss, optimizer), jax.jit(jvarlen.make_eval_step(loss))
        state = step.init(jnp.float32(0))
        state, _ = jax.jit(step)(state, jnp.ones((1, 1)))
        evaluated = step.for_evaluation(state)
        assert evaluation(evaluated, jnp.ones((1, 1)))[1].loss == evaluated.params
        assert step.for_evaluation(evaluated) is evaluated
        with pytest.raises(ValueError, match=r"pass train_step.for_evaluation\(state\)"):
            evaluation(state, jnp.ones((1, 1)))


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


@pytest.mark.parametrize("average", [ema_of_params(0.5), optax.contrib.schedule_free_sgd(0.1)])
def test_parts_of_an_optimizer_may_be_named_by_subtrees(average):
    def loss_fn(params, x):
        return sum(jnp.sum(leaf * x) for leaf in jax.tree.leaves(params)), jnp.float32(1)

    def evaluated(labels):
        optimizer = optax.partition({"own": optax.chain(optax.sgd(0.1), average), "other": optax.adam(0.1)}, labels)
        step = jvarlen.make_train_step(loss_fn, optimizer)
        state = step.init({"a": {"x": jnp.ones(2), "y": jnp.zeros(3)}, "b": jnp.ones(1)})
        for _ in range(3):
            state, _ = step(state, jnp.ones((1, 1)))
        return step.for_evaluation(state).params

    by_leaf = evaluated({"a": {"x": "other", "y": "other"}, "b": "own"})
    assert_close(evaluated({"a": "other", "b": "own"}), by_leaf)
