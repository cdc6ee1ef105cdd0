"""Steps with chosen staleness: they do what a loop that keeps every version does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import UserError, compile_buckets, load, make_plan, make_train_step, no_recompiles
from jvarlen.experimental.asynchronous import keep_versions, make_stale_train_step
from jvarlen.training.step_sums import LossProgram
from jvarlen.training.train_state import new_state
from tests.conftest import random_dataset

OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def loss_fn(params, microbatch, key, extra):
    tokens = microbatch.tokens / 128 + 0.01 * jax.random.normal(key)
    losses = (jnp.tanh(tokens * params["w"]) - params["b"] - 0.5) ** 2 * microbatch.weights
    extra = {"mean": 0.9 * extra["mean"] + 0.1 * jnp.mean(tokens), "rows": extra["rows"] + len(microbatch.lengths)}
    return jnp.sum(losses), jnp.sum(microbatch.weights), {}, extra


SUMS_OF = jax.jit(LossProgram(loss_fn).sum_microbatch)


def first_state():
    extra = {"mean": jnp.zeros(()), "rows": jnp.zeros((), jnp.int32)}
    return new_state({"w": jnp.array(0.3), "b": jnp.array(0.1)}, OPTIMIZER, extra=extra, seed=0)


def plan_and_batches(num_microbatches=2, num_steps=9):
    dataset = random_dataset(num_steps * num_microbatches * 2, 8)
    plan = make_plan([len(sample) for sample in dataset], [(2, 8)], order="length", num_microbatches=num_microbatches)
    return plan, list(load(plan, dataset))


def by_hand(batches, delay_of):
    """Every version is kept, gradients are summed in a loop, and `make_train_step` only gets their sum."""
    versions = [first_state()]
    for u, batch in enumerate(batches):
        state = versions[-1]
        sums = []
        for i in range(len(batch.tokens)):
            old = versions[max(0, u - delay_of(u, i))]
            microbatch = jax.tree.map(lambda leaf, i=i: leaf[i] if leaf.ndim else leaf, batch)
            key = jax.random.fold_in(jax.random.fold_in(state.key, u), i)
            sums.append(SUMS_OF(old, microbatch, key))
        total = jax.tree.map(lambda *leaves: sum(leaves), *sums)
        grads = jax.tree.map(lambda grad, weight=total.weight_sum: grad / weight, total.grads)
        updates, opt_state = OPTIMIZER.update(grads, state.opt_state)
        rows, mean = state.extra["rows"] + total.extra[1], state.extra["mean"] + total.extra[0] / total.weight_sum
        params = optax.apply_updates(state.params, updates)
        versions.append(
            state._replace(params=params, opt_state=opt_state, extra={"mean": mean, "rows": rows}, step=state.step + 1)
        )
    return versions[-1]


def run(delays, batches):
    step, state = jax.jit(make_stale_train_step(loss_fn, OPTIMIZER, delays=delays)), first_state()
    state = keep_versions(state, delays=delays)
    for batch in batches:
        state, _ = step(state, batch)
    return state


@pytest.mark.parametrize(
    ("delays", "delay_of"), [(2, lambda u, i: 2), ([[0, 1], [5, 0]], lambda u, i: ((0, 1), (5, 0))[u % 2][i])]
)
def test_a_stale_step_is_a_loop_that_keeps_every_version(delays, delay_of):
    _, batches = plan_and_batches()
    state, expected = run(delays, batches), by_hand(batches, delay_of)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-5),
        (state.params, state.extra, state.step, state.opt_state.opt_state),
        (expected.params, expected.extra, expected.step, expected.opt_state),
    )


def test_delays_matter_and_0_is_the_ordinary_step_bit_for_bit():
    _, batches = plan_and_batches()
    step, state = jax.jit(make_train_step(loss_fn, OPTIMIZER)), first_state()
    for batch in batches:
        state, _ = step(state, batch)
    for delays in (0, [[0, 0]]):
        jax.tree.map(np.testing.assert_array_equal, run(delays, batches).params, state.params)
    assert not np.allclose(run(3, batches).params["w"], state.params["w"], rtol=1e-4)


def test_one_program_takes_all_delays():
    plan, batches = plan_and_batches()
    delays = [0, 3, 1]
    state = keep_versions(first_state(), delays=delays)
    step = compile_buckets(make_stale_train_step(loss_fn, OPTIMIZER, delays=delays), state, plan, progress=False)
    expected = run(delays, batches)
    with no_recompiles():
        for batch in batches:
            state, _ = step(state, batch)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), state.params, expected.params)


@pytest.mark.parametrize("delays", [-1, 1.5, [], [1, -2], [[1], [2, 3]], [[[1]]], "1", True, 2**31])
def test_delays_of_another_form_are_rejected(delays):
    with pytest.raises(UserError, match="delays must be integers of at least 0"):
        make_stale_train_step(loss_fn, OPTIMIZER, delays=delays)


def test_states_and_steps_must_be_of_the_same_delays():
    _, batches = plan_and_batches(num_steps=1)
    step = make_stale_train_step(loss_fn, OPTIMIZER, delays=3)
    with pytest.raises(UserError, match="reach back 3 updates, and the state keeps no past versions"):
        step(first_state(), batches[0])
    with pytest.raises(UserError, match="the state keeps those of 2 updates"):
        step(keep_versions(first_state(), delays=2), batches[0])
    with pytest.raises(UserError, match="for 3 microbatches a step, and the step has 2"):
        make_stale_train_step(loss_fn, OPTIMIZER, delays=[[1, 2, 3]])(
            keep_versions(first_state(), delays=3), batches[0]
        )
