"""Moments by samples: Optax's own at a constant batch size, and one half-life in samples at any."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import make_plan
from jvarlen.training import adamw_by_batch_size, sgd_by_batch_size
from jvarlen.training.moments import MomentsState

pytestmark = pytest.mark.usefixtures("optimized")

BASE, NUM_STEPS = 8, 100
SIZES = np.random.default_rng(0).integers(1, 65, NUM_STEPS)
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
PLAN = make_plan([3] * 14 + [9] * 5, [(5, 4), (2, 9)], order="shuffle")


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


@pytest.mark.parametrize("is_planned", [True, False], ids=["planned", "traced"])
@pytest.mark.parametrize("name", OF_OPTAX)
def test_constant_base_batches_give_the_bits_of_optax(name, is_planned):
    make, of_optax = OF_OPTAX[name]
    sizes = np.full(NUM_STEPS, BASE)
    found, _ = take_steps(make(0.01, BASE, plan=sizes if is_planned else None), sizes)
    expected, _ = take_steps(of_optax, sizes)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
