"""Seesaw: where batches grow, at which rates, and in how many steps, against closed forms."""

import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import lr_sequence, make_plan
from jvarlen.training import adamw_by_batch_size, seesaw

PEAK = 3e-3


def rates_of(ramp, batch_size, num_tokens, rule="sqrt"):
    """The plan of samples of one token, and the rate of every step."""
    plan = make_plan(np.ones(num_tokens, int), [(8, 1)], order="dataset", sequences_per_step=ramp.batch_sizes)
    return plan, lr_sequence(plan, ramp.schedule, batch_size, rule=rule, counted_in="tokens")


def test_where_a_schedule_halves_the_batch_doubles_and_the_rate_falls_by_the_root():
    ramp = seesaw(lambda seen: PEAK * 0.5 ** (seen // 800), 2_400, 8)
    assert ramp.batch_sizes.stages == ((0, 8), (800, 16), (1600, 32))
    plan, rates = rates_of(ramp, 8, 2_400)
    assert plan.num_sequences.tolist() == [8] * 100 + [16] * 50 + [32] * 25  # 175 steps in place of 300
    np.testing.assert_allclose(rates, PEAK / np.sqrt(plan.num_sequences / 8), rtol=1e-15)
    # For SGD the rate stays.
    np.testing.assert_allclose(rates_of(ramp, 8, 2_400, rule="linear")[1], PEAK, rtol=1e-15)


@pytest.mark.parametrize("factor", [2.0, 1.1])
def test_batches_grow_where_a_cosine_has_fallen_by_another_factor(factor):
    warmup, num_tokens = 1_000, 101_000
    schedule = optax.warmup_cosine_decay_schedule(0.0, PEAK, warmup, num_tokens, end_value=0.1 * PEAK)
    ramp = seesaw(schedule, num_tokens, 64, factor=factor)
    for power, (start, size) in enumerate(ramp.batch_sizes.stages[1:], 1):
        # (1 - 0.1) (1 + cos) / 2 + 0.1 = factor^-power
        closed = warmup + 100_000 * math.acos(2 * (factor**-power - 0.1) / 0.9 - 1) / math.pi
        assert start == math.ceil(closed)
        assert size == round(64 * factor**power)
    assert len(ramp.batch_sizes.stages) == 1 + math.floor(math.log(10) / math.log(factor))
    plan, rates = rates_of(ramp, 64, num_tokens)
    seen = np.cumsum(plan.num_sequences) - plan.num_sequences
    is_warm = seen >= warmup
    np.testing.assert_allclose(rates[~is_warm], PEAK * seen[~is_warm] / warmup, rtol=1e-12)
    ratio, full = plan.num_sequences / 64, is_warm & (np.arange(plan.num_steps) < plan.num_steps - 1)
    np.testing.assert_allclose(rates[full], PEAK / np.sqrt(ratio[full]), rtol=2e-3 if factor == 2 else 6e-3)


def test_a_quarter_of_a_cosine_takes_two_over_pi_of_the_steps():
    """Batches in inverse proportion to cos(pi x / 2) take the integral of it."""
    num_tokens = 400_000
    ramp = seesaw(lambda seen: PEAK * jnp.cos(jnp.pi * seen / (2 * num_tokens)), num_tokens, 50, factor=1.01)
    plan, _ = rates_of(ramp, 50, num_tokens)
    assert plan.num_steps / (num_tokens / 50) == pytest.approx(2 / math.pi, rel=6e-3)
    assert plan.num_samples == num_tokens


def test_optimizers_by_batch_size_take_its_schedule_and_sizes():
    """Gradients of 0 and a weight decay of 1: an update is the rate."""
    ramp = seesaw(lambda seen: PEAK * 0.5 ** (seen // 80), 240, 8)
    plan, rates = rates_of(ramp, 8, 240)
    optimizer = adamw_by_batch_size(ramp.schedule, 8, rule="sqrt", weight_decay=1.0, plan=plan, counted_in="tokens")
    state, ones = optimizer.init(jnp.ones(1)), jnp.ones(1)
    for rate in rates:
        updates, state = optimizer.update(jnp.zeros(1), state, ones)
        np.testing.assert_allclose(updates, -rate, rtol=1e-6)
    # The last step has half of its samples.
    expected = PEAK / np.array([*np.sqrt(plan.num_sequences[:-1] / 8), 4 / np.sqrt(2)])
    np.testing.assert_allclose(rates, expected, rtol=1e-15)


def test_batches_at_their_largest_follow_the_schedule():
    schedule = optax.cosine_decay_schedule(PEAK, 10_000)
    ramp = seesaw(schedule, 10_000, 10, max_batch_size=35)
    assert [size for _, size in ramp.batch_sizes.stages] == [10, 20, 35]
    last = ramp.batch_sizes.stages[-1][0]
    assert last == math.ceil(10_000 * math.acos(-0.5) / math.pi)  # where it is a quarter
    plan, rates = rates_of(ramp, 10, 10_000)
    seen = np.cumsum(plan.num_sequences) - plan.num_sequences
    at_most = (plan.num_sequences == 35) & (seen >= last)
    expected = PEAK * (1 + np.cos(np.pi * seen[at_most] / 10_000)) / 2 * math.sqrt(3.5)
    np.testing.assert_allclose(rates[at_most], expected, rtol=1e-9)
    unchanged = seesaw(schedule, 10_000, 10, max_batch_size=10)
    assert unchanged.batch_sizes.stages == ((0, 10),)
    counts = np.arange(0, 10_000, 7)
    assert [unchanged.schedule(n) for n in counts] == [schedule(n) for n in counts]


def test_a_fall_by_more_than_the_factor_is_one_stage():
    ramp = seesaw(lambda seen: PEAK if seen < 100 else PEAK / 10, 200, 4)
    assert ramp.batch_sizes.stages == ((0, 4), (100, 32))
    assert [ramp.schedule(seen) for seen in (0, 99, 100, 199)] == [PEAK, PEAK, PEAK / 10, PEAK / 10]


def test_a_schedule_that_never_falls_keeps_the_batch():
    assert seesaw(lambda seen: PEAK, 10**12, 4).batch_sizes.stages == ((0, 4),)


def test_a_peak_and_falls_are_found_to_the_token_in_a_long_run():
    peak_at, num_tokens = 123_456_789, 10**12
    ramp = seesaw(lambda n: jnp.minimum(n / peak_at, 2.0 ** (-(n - peak_at) // 10**11)), num_tokens, 1_000)
    assert ramp.batch_sizes.stages[:3] == ((0, 1_000), (peak_at + 1, 2_000), (peak_at + 10**11 + 1, 4_000))
    assert float(ramp.schedule(peak_at // 3)) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"schedule": lambda n: 1 + math.cos(n / 100)}, r"rises after its peak, at token 0: from .* at token 315 to"),
        ({"schedule": lambda n: 1 - n / 100}, r"at least 0: at token 101: -0.01.*, at token 102: .*more \(limit 0\)"),
        ({"schedule": lambda n: math.nan}, "finite and at least 0: at token 0: nan"),
        ({"schedule": lambda n: 0.0}, "is 0 for the whole run"),
        ({"schedule": 0.1}, "must be a function of tokens seen, not 0.1"),
        ({"num_tokens": 0, "batch_size": 0}, r"num_tokens \(0\), batch_size \(0\)"),
        ({"max_batch_size": 4}, r"max_batch_size \(4\) is below batch_size \(8\)"),
        ({"factor": 1.0}, "factor must be finite and at least 1.01, not 1.0"),
        ({"factor": math.inf}, "factor must be finite"),
    ],
)
def test_what_is_no_ramp_is_refused(changed, said):
    given = {"schedule": lambda n: 1.0, "num_tokens": 1_000, "batch_size": 8} | changed
    with pytest.raises(ValueError, match=said):
        seesaw(given.pop("schedule"), given.pop("num_tokens"), given.pop("batch_size"), **given)
