"""Learning rate: on device the same scale as on the host, without a retrace."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import lr_scale, lr_sequence, make_plan, scale_by_batch_size
from jvarlen.lr import base_rates

PLAN = make_plan([3] * 14 + [9] * 5, [(5, 4), (2, 9)])


@pytest.mark.parametrize("rule", ["linear", "sqrt", None])
@pytest.mark.parametrize("base", [1, 3, 256])
def test_the_scale_on_device_is_within_two_ulp(rule, base):
    transform = scale_by_batch_size(base, rule=rule)
    update = jax.jit(lambda size: transform.update(jnp.float32(1), transform.init(None), batch_size=size)[0])
    for size in (1, 2, 7, 100, 4097, 10**6):
        exact = float(lr_scale(size, base, rule))
        assert abs(float(update(jnp.float32(size))) - exact) <= 2 * np.spacing(np.float32(exact))


def test_another_batch_size_does_not_retrace():
    transform = scale_by_batch_size(2)
    traces = []

    @jax.jit
    def update(size):
        traces.append(size)
        return transform.update({"w": jnp.ones(3)}, transform.init(None), batch_size=size)[0]

    assert [float(update(jnp.float32(size))["w"][0]) for size in (2, 4, 6)] == [1, 2, 3]
    assert len(traces) == 1


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
def test_a_scaled_adamw_is_adamw_at_the_scaled_rate(rule):
    """Weight decay included: it is decoupled from the gradient, not from the rate."""
    rng = np.random.default_rng(0)
    params = scaled_params = {"w": jnp.asarray(rng.normal(size=5), jnp.float32)}
    base, sizes = 0.01, [2.0, 8.0, 3.0, 16.0]
    scaled = optax.chain(optax.adamw(base, weight_decay=0.3), scale_by_batch_size(4, rule=rule))
    rates = jnp.asarray(base * lr_scale(sizes, 4, rule), jnp.float32)
    plain = optax.adamw(lambda step: rates[step], weight_decay=0.3)
    state, scaled_state = plain.init(params), scaled.init(params)
    for size in sizes:
        grads = {"w": jnp.asarray(rng.normal(size=5), jnp.float32)}
        updates, state = plain.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        updates, scaled_state = scaled.update(grads, scaled_state, scaled_params, batch_size=jnp.float32(size))
        scaled_params = optax.apply_updates(scaled_params, updates)
    np.testing.assert_allclose(params["w"], scaled_params["w"], rtol=1e-6)


def test_dtypes_of_updates_are_kept():
    transform = scale_by_batch_size(1)
    updates, _ = transform.update(jnp.ones(2, jnp.bfloat16), transform.init(None), batch_size=3)
    assert updates.dtype == jnp.bfloat16


def test_the_batch_size_cannot_be_forgotten():
    transform = scale_by_batch_size(1)
    with pytest.raises(TypeError, match="batch_size"):
        transform.update(jnp.ones(2), transform.init(None))


def test_an_optax_schedule_is_evaluated_in_float64():
    schedule = optax.cosine_decay_schedule(0.1, 1000)
    rates = base_rates(schedule, 1000)
    exact = 0.1 * 0.5 * (1 + np.cos(np.pi * np.arange(1000) / 1000))
    np.testing.assert_allclose(rates, exact, rtol=1e-12)


def test_schedules_come_as_number_array_or_function():
    steps = PLAN.num_steps
    expected = base_rates(np.full(steps, 0.5), steps)
    for schedule in (0.5, lambda step: 0.5, lambda step: max(step, 0.5) * 0 + 0.5, optax.constant_schedule(0.5)):
        assert (base_rates(schedule, steps) == expected).all()
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        base_rates([1.0, 2.0], steps)


def test_the_batch_size_counts_sequences_or_tokens():
    by_sequences = lr_sequence(PLAN, 0.1, 5)
    by_tokens = lr_sequence(PLAN, 0.1, 15, unit="tokens")
    np.testing.assert_allclose(by_sequences, 0.1 * PLAN.num_sequences / 5, rtol=1e-15)
    np.testing.assert_allclose(by_tokens, 0.1 * PLAN.num_tokens / 15, rtol=1e-15)
    with pytest.raises(ValueError, match="'samples'"):
        lr_sequence(PLAN, 0.1, 5, unit="samples")


@pytest.mark.parametrize("base", [0, -1, float("nan")])
def test_the_base_batch_size_is_positive(base):
    for call in (lambda: lr_scale(1, base), lambda: scale_by_batch_size(base)):
        with pytest.raises(ValueError, match="base_batch_size"):
            call()


def test_an_unknown_rule_is_refused_at_construction():
    with pytest.raises(ValueError, match="'cubic'"):
        scale_by_batch_size(1, rule="cubic")
