"""Plans and learning rates on a machine with a GPU: equal in both packages and on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvarlen

BASE_BATCH_SIZE = 12


def base_schedule(step):
    """Warm-up, then decay by the root, in float64."""
    return 1e-3 * min((step + 1) / 5, (5 / (step + 1)) ** 0.5)


def plan_of(package, lengths, order="shuffle", strategy="optimal", epoch=0):
    buckets = package.make_buckets(lengths, 192, max_shapes=4, strategy=strategy, num_microbatches=2, length_multiple=8)
    return package.make_plan(lengths, buckets, order=order, seed=7, epoch=epoch, num_microbatches=2)


def test_the_device_is_the_one_that_is_meant(on_gpu):
    assert jnp.zeros(1).devices() == {jax.devices()[0]}
    assert (jax.default_backend() == "gpu") == on_gpu


def test_rates_looked_up_on_the_device_are_the_table_rounded_to_float32(lengths):
    plan = plan_of(jvarlen, lengths)
    optimizer = jvarlen.scale_by_planned_rate(plan, base_schedule, BASE_BATCH_SIZE, rule="sqrt")
    expected = jvarlen.lr_sequence(plan, base_schedule, BASE_BATCH_SIZE, rule="sqrt").astype(np.float32)
    state, found = optimizer.init(jnp.ones(())), []
    for _ in range(plan.num_steps):
        rate, state = jax.jit(optimizer.update)(jnp.ones(()), state)
        found.append(rate)
    assert found[0].devices() == {jax.devices()[0]}
    np.testing.assert_array_equal(np.asarray(found), expected)


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
def test_updates_are_scaled_on_the_device_to_two_roundings(lengths, rule):
    sizes = plan_of(jvarlen, lengths).num_sequences
    optimizer = optax.chain(optax.sgd(1.0), jvarlen.scale_by_batch_size(BASE_BATCH_SIZE, rule=rule))
    state = optimizer.init(jnp.ones(()))

    def scale(size):
        return -optimizer.update(jnp.ones(()), state, batch_size=size)[0]

    found = np.asarray(jax.jit(jax.vmap(scale))(jnp.asarray(sizes, jnp.float32)))
    expected = jvarlen.lr_scale(sizes, BASE_BATCH_SIZE, rule).astype(np.float32)
    assert found.dtype == np.float32
    np.testing.assert_array_less(np.abs(found - expected), 2.5 * np.spacing(expected))
