"""Simulated runs: seconds by cause, the slowest of many devices, failures against closed forms, and what is refused."""

import itertools
import math

import numpy as np
import pytest

import jvarlen
from jvarlen.estimates.cluster import Cluster
from jvarlen.estimates.step_seconds import StepSeconds
from jvarlen.experimental.simulation import noise as noise_module
from jvarlen.experimental.simulation.failures import Failures
from jvarlen.experimental.simulation.noise import Noise
from jvarlen.experimental.simulation.run import simulate
from jvarlen.parallel import Layout

CLUSTER = Cluster.named("dgx-h100:3")
PLAN = jvarlen.make_plan(np.arange(1, 200) % 60 + 1, [(2, 20), (1, 61)], num_microbatches=12, order="shuffle", seed=1)
PARTS = StepSeconds(*(np.array([i, 3.0 * i]) / 8 for i in range(8, 1, -1)))
COMPUTE = StepSeconds(np.ones(2), *np.zeros((6, 2)))


def run(layout="data4.stage2.tensor2", **options):
    return simulate(PLAN, Layout.parse(layout), CLUSTER, **{"seconds": PARTS} | options)


def differences(one, other):
    """Names of what differs."""
    arrays = ("step_seconds", "step_ends", "num_tokens")
    different = [name for name in arrays if not np.array_equal(getattr(one, name), getattr(other, name))]
    return different + [n for n in ("total_s", "causes", "interruptions") if getattr(one, n) != getattr(other, n)]


def test_even_devices_that_never_fail_take_the_seconds_of_their_steps():
    done = run(num_steps=50, flops=[1e15, 5e15])
    step_bucket = np.resize(PLAN.step_bucket, 50)
    assert 0 < step_bucket.sum() < 50
    assert np.array_equal(done.step_seconds, PARTS.total[step_bucket])
    assert done.total_s == done.step_ends[-1] == PARTS.total[step_bucket].sum()
    expected = {name: part[step_bucket].sum() for name, part in PARTS._asdict().items()}
    assert {name: seconds for name, seconds in done.causes.items() if seconds} == expected
    num_flops = np.array([1e15, 5e15])[step_bucket].sum()
    assert done.mfu == pytest.approx(num_flops / (done.total_s * 16 * 989.4e12))
    assert done.tokens_per_second == np.resize(PLAN.num_tokens, 50).sum() / done.total_s
    assert run().padding == PLAN.padding
    assert run().mfu is None


def test_seconds_by_cause_sum_to_the_total():
    done = run(
        num_steps=400,
        noise=Noise(jitter=0.2, straggler_share=0.2, straggler_slowdown=1.3),
        failures=Failures(mean_seconds_between=1500, restart_s=20, repair_s=700),
        checkpoint_every_steps=15,
        checkpoint_s=3,
        start_s=40,
    )
    assert all(seconds > 0 for seconds in done.causes.values())
    assert math.fsum(done.causes.values()) == pytest.approx(done.total_s, rel=1e-9)
    assert done.causes["checkpoints"] == 27 * 3
    assert done.causes["lost work"] == pytest.approx(sum(each.lost_s for each in done.interruptions))
    assert np.all(np.diff(done.step_ends) >= done.step_seconds[1:] - 1e-6)
    assert done.total_s == pytest.approx(done.step_ends[-1] + 3)
    for earlier, later in itertools.pairwise(done.interruptions):
        assert earlier.at_s < later.at_s
        assert earlier.resumed_step <= later.resumed_step <= later.step
    assert all(each.resumed_step % 15 == 0 for each in done.interruptions)
    assert f"{done.num_failures} failures" in str(done)
    assert "lost work" in done.report()


def brute_force(rng, num_steps, slow_RxN, m, sigma, slowdown):
    """Steps of which every microbatch of every device is drawn."""
    times = rng.lognormal(-(sigma**2) / 2, sigma, (num_steps, m, *slow_RxN.shape)) * np.where(slow_RxN, slowdown, 1)
    return times.max(axis=3).mean(axis=1).max(axis=1)


@pytest.mark.parametrize(
    ("layout", "shape", "m"),
    [("data4.tensor2", (4, 2), 3), ("data12.stage2", (12, 2), 1), ("data2", (2, 1), 6), ("data1.stage3", (1, 3), 12)],
)
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_the_slowest_devices_are_as_slow_as_where_each_is_drawn(layout, shape, m, share):
    num_steps, jitter, slowdown = 6000, 0.3, 1.2
    done = run(layout, seconds=COMPUTE, num_steps=num_steps, noise=Noise(jitter=jitter))
    if share:
        noise = Noise(jitter=jitter, straggler_share=share, straggler_slowdown=slowdown)
        done = run(layout, seconds=COMPUTE, num_steps=num_steps, noise=noise, seed=5)
    is_slow = np.random.default_rng(np.random.SeedSequence(5).spawn(1)[0].spawn(1)[0]).random(shape) < share
    assert is_slow.any() == (share > 0)
    assert not is_slow.all()
    sigma = math.sqrt(math.log1p(jitter**2))
    drawn = brute_force(np.random.default_rng(1), num_steps, is_slow, m, sigma, slowdown)
    tolerance = 4.5 * np.hypot(drawn.std(), done.step_seconds.std()) / math.sqrt(num_steps)
    assert done.step_seconds.mean() == pytest.approx(drawn.mean(), abs=tolerance)
    for q in (0.05, 0.5, 0.95):
        assert np.quantile(done.step_seconds, q) == pytest.approx(np.quantile(drawn, q), rel=0.02)


def test_equal_seeds_give_equal_runs_whatever_the_chunks(monkeypatch):
    options = {
        "layout": "data2.context2.stage2.context_from50",
        "num_steps": 300,
        "noise": Noise(jitter=0.1, straggler_share=0.2, straggler_slowdown=1.3),
        "failures": Failures(mean_seconds_between=900, restart_s=20),
        "checkpoint_every_steps": 10,
    }
    first = run(**options)
    assert first.interruptions
    assert differences(first, run(**options, seed=1)) == [
        "step_seconds", "step_ends", "total_s", "causes", "interruptions"
    ]  # fmt: skip
    for chunk in (1, 100, 2**14):
        monkeypatch.setattr(noise_module, "_CHUNK", chunk)
        assert differences(first, run(**options)) == []


@pytest.mark.parametrize(
    ("every", "save_s", "restart_s", "mean_s", "num_steps", "num_runs"),
    [(25, 4.0, 15.0, 300.0, 20_000, 40), (None, 0.0, 100.0, 100.0, 20, 400)],
)
def test_failures_cost_what_daly_s_formula_says(every, save_s, restart_s, mean_s, num_steps, num_runs):
    failures = Failures(mean_seconds_between=2 * mean_s, restart_s=restart_s)  # of two hosts
    options = {"seconds": COMPUTE, "num_steps": num_steps, "checkpoint_every_steps": every, "checkpoint_s": save_s}
    runs = [run("data12", failures=failures, **options, seed=seed) for seed in range(num_runs)]
    part = (every or num_steps) + save_s
    expected = mean_s * math.exp(restart_s / mean_s) * math.expm1(part / mean_s) * num_steps / (every or num_steps)
    totals = np.array([each.total_s for each in runs])
    tolerance = 4 * totals.std() / math.sqrt(len(runs))
    assert totals.mean() == pytest.approx(expected, abs=tolerance)
    assert tolerance < (0.008 if every else 0.4) * expected
    # As in a Poisson process on the seconds that hosts run.
    assert np.mean([each.num_failures for each in runs]) == pytest.approx(expected / mean_s, rel=0.03 if every else 0.3)
    if every:
        assert runs[0].causes["lost work"] / runs[0].num_failures == pytest.approx(part / 2, rel=0.15)


def test_without_spares_a_run_waits_for_repairs():
    failures = Failures(mean_seconds_between=2000, restart_s=10, repair_s=300)
    options = {"failures": failures, "num_steps": 300, "checkpoint_every_steps": 5}
    full, with_spares = run("data12.tensor2", **options), run("data4.tensor2", **options)
    assert {each.waited_s for each in full.interruptions} == {300.0}
    assert full.causes["spares"] == 300.0 * full.num_failures
    # Two hosts are free: a failure waits only if there were two others in the 300 seconds before it.
    waits = [each.waited_s for each in with_spares.interruptions]
    times = [each.at_s for each in with_spares.interruptions]
    assert waits[:2] == [0.0, 0.0]
    for i in range(2, len(waits)):
        assert (waits[i] > 0) == (times[i - 2] + 300 > times[i])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "data12.tensor4"}, "data12.tensor4 takes 48 devices, and dgx-h100 has 24"),
        ({"layout": "data5"}, "data shards of data5 do not divide the 12 microbatches"),
        ({"seconds": PARTS._replace(data=np.array([1.0, np.nan]))}, "data of bucket 1: nan"),
        ({"seconds": PARTS._replace(update=np.array([-1.0, 1]))}, "update of bucket 0: -1.0"),
        ({"seconds": PARTS._replace(compute=np.ones(3))}, r"the shape \(2,\), .* compute \(3,\)"),
        ({"seconds": StepSeconds(*np.zeros((7, 2)))}, "not all 0: bucket 0: 0 in all, bucket 1: 0 in all"),
        ({"flops": [1.0]}, "flops must be 2 finite numbers"),
        ({"noise": -0.1}, r"jitter \(-0.1\)"),
        ({"noise": float("nan")}, r"jitter \(nan\)"),
        ({"noise": "a"}, "noise must be a Noise, or a number for the jitter, not 'a'"),
        ({"noise": None}, "noise must be a Noise, or a number for the jitter, not None"),
        ({"num_steps": 0}, r"num_steps \(0\)"),
        ({"checkpoint_every_steps": 0}, r"checkpoint_every_steps \(0\)"),
        ({"checkpoint_s": float("inf")}, r"checkpoint_s \(inf\)"),
        ({"failures": Failures(mean_seconds_between=0.5)}, r"hardly end.*e\+258 failures are to be expected"),
        ({"failures": Failures(mean_seconds_between=3, restart_s=1000), "checkpoint_every_steps": 1}, "hardly end"),
    ],
)
def test_what_cannot_be_simulated_is_refused(options, message):
    with pytest.raises(jvarlen.UserError, match=message):
        run(**options)
