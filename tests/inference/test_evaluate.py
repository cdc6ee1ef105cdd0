"""The loss of a plan is Σ loss / Σ weight of all its samples, however they are planned and placed."""

import gc
import os
import signal
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import evaluate, make_eval_step, make_plan, make_train_step, no_recompiles
from jvarlen.batches import next_token_targets
from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.models import DecoderConfig, init_params, layered, make_loss_fn
from jvarlen.parallel import StepLoss

RNG = np.random.default_rng(0)
SAMPLES = [RNG.integers(0, 16, length) for length in RNG.integers(2, 30, 41)]
LENGTHS = [len(sample) for sample in SAMPLES]
TABLE = jnp.asarray(RNG.normal(size=(16, 16)), jnp.float32)
DECODER = DecoderConfig(num_layers=2, width=8, num_heads=2, vocab_size=16)


def loss_fn(table, microbatch):
    inputs, targets, weights = next_token_targets(microbatch)
    losses = optax.softmax_cross_entropy_with_integer_labels(table[inputs], targets)
    return (losses * weights).sum(), weights.sum(), {"hits": ((table[inputs].argmax(-1) == targets) * weights).sum()}


def by_hand(samples=SAMPLES):
    table = np.asarray(TABLE, np.float64)
    log_probs = table - np.log(np.exp(table).sum(1, keepdims=True))
    pairs = np.concatenate([np.stack([sample[:-1], sample[1:]], 1) for sample in samples])
    return -log_probs[tuple(pairs.T)].mean(), (table.argmax(1)[pairs[:, 0]] == pairs[:, 1]).sum(), len(pairs)


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ({"max_tokens": 64, "max_shapes": 3}, None),
        ({"max_tokens": 64, "packing": "best_fit", "num_microbatches": 4}, "data4"),
        ({"max_tokens": 64, "max_shapes": 2, "num_microbatches": 2, "sequences_per_step": 12}, "data2"),
    ],
)
def test_the_loss_is_that_of_all_samples_divided_once(options, layout):
    plan = make_plan(LENGTHS, order="length", **options)
    metrics = evaluate(make_eval_step(loss_fn, layout=layout), TABLE, plan, SAMPLES, progress=False)
    loss, hits, num_targets = by_hand()
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-6)
    assert (metrics.sums["hits"], metrics.weight_sum, metrics.num_tokens) == (hits, num_targets, sum(LENGTHS))


@pytest.mark.parametrize("layout", ["data2.zero3", "data2.stage2.tensor2.zero1"])
def test_a_state_is_evaluated_where_it_lies(layout):
    params = init_params(DECODER, 0)
    plan = make_plan(LENGTHS, max_tokens=64, max_shapes=1, num_microbatches=4, packing="best_fit", order="length")
    state = make_train_step(layered(DECODER), optax.adam(0.1), layout=layout).init(params)
    found = evaluate(make_eval_step(layered(DECODER), layout=layout), state, plan, SAMPLES, progress=False)
    expected = evaluate(make_eval_step(make_loss_fn(DECODER)), params, plan, SAMPLES, progress=False)
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-5)
    assert found.weight_sum == expected.weight_sum


def test_later_evaluations_compile_nothing_and_wait_for_no_step(monkeypatch):
    step, plan = make_eval_step(loss_fn), make_plan(LENGTHS, max_tokens=64, max_shapes=3, order="length")
    first = evaluate(step, TABLE, plan, SAMPLES, progress=False)
    part = make_plan(LENGTHS[:9], plan.buckets, order="length")  # steps of a part of the buckets
    other, calls = TABLE + 0, []

    def noting(name, function):
        return lambda *given: calls.append(name) or function(*given)

    monkeypatch.setattr(CompiledBuckets, "__call__", noting("step", CompiledBuckets.__call__))
    monkeypatch.setattr(jax, "device_get", noting("wait", jax.device_get))
    monkeypatch.setattr(type(TABLE), "is_ready", lambda array: False)  # as if the device were slow
    with no_recompiles():
        again = evaluate(step, other, plan, SAMPLES, progress=False)
        assert calls == ["step"] * plan.num_steps + ["wait"] * plan.num_steps
        of_part = evaluate(step, TABLE, part, SAMPLES[:9], progress=False)
    assert again.loss == first.loss
    np.testing.assert_allclose(of_part.loss, by_hand(SAMPLES[:9])[0], rtol=1e-6)
    assert [len(kept) for kept in step.programs.values()] == [1]


@pytest.mark.parametrize("returns_rows", [False, True])
def test_larger_steps_of_the_same_buckets_have_the_same_loss(returns_rows):
    def sums(table, microbatch):
        loss_sum, weight_sum, _ = loss_fn(table, microbatch)
        return {"loss": loss_sum, "weight": weight_sum}, {"row": microbatch.weights.sum(1)}

    def loss(sums, rows):
        return sums["loss"] / jnp.sum(rows["row"])

    step = make_eval_step(StepLoss(sums, loss) if returns_rows else loss_fn)
    for num in (4, 20):
        plan = make_plan(LENGTHS[:num], [(2, 29)], sequences_per_step=num, order="dataset")
        found = evaluate(step, TABLE, plan, SAMPLES[:num], progress=False).loss
        num_targets = by_hand(SAMPLES[:num])[2]
        factor = num_targets / (num_targets + num) if returns_rows else 1
        np.testing.assert_allclose(found, factor * by_hand(SAMPLES[:num])[0], rtol=1e-6)
    assert [len(kept) for kept in step.programs.values()] == [1 + returns_rows]


def test_programs_live_as_long_as_the_step_and_hold_no_dataset():
    class Samples(list):
        pass

    samples, step = Samples(SAMPLES), make_eval_step(loss_fn)
    evaluate(step, TABLE, make_plan(LENGTHS, max_tokens=64, order="length"), samples, progress=False)
    dead = [weakref.ref(samples), weakref.ref(step)]
    del samples
    gc.collect()
    assert dead[0]() is None
    del step
    gc.collect()
    assert dead[1]() is None


def test_a_loss_of_the_step_has_the_mean_over_steps():
    def sums(table, microbatch):
        loss_sum, weight_sum, _ = loss_fn(table, microbatch)
        return {"loss": loss_sum, "weight": weight_sum}

    step = make_eval_step(StepLoss(sums, lambda sums, rows: sums["loss"] / sums["weight"]))
    plan = make_plan(LENGTHS, max_tokens=64, max_shapes=2, sequences_per_step=12, order="length")
    metrics = evaluate(step, TABLE, plan, SAMPLES, progress=False)
    ids = [np.concatenate([plan.rows(group).ravel() for group in plan.groups(i)]) for i in range(plan.num_steps)]
    losses = [by_hand([SAMPLES[i] for i in each if i >= 0])[0] for each in ids]
    np.testing.assert_allclose(metrics.loss, np.mean(losses), rtol=1e-6)


def test_samples_with_fields_and_lengths_are_loaded_as_load_does():
    samples = [{"x": np.ones((n, 2), np.float32), "y": np.float32(n)} for n in (3, 5)]

    def squares(scale, microbatch):
        of_rows = (scale * microbatch["x"].sum((1, 2)) - microbatch["y"]) ** 2
        return jnp.sum(of_rows * microbatch["is_real"]), jnp.sum(microbatch["is_real"])

    options = {"fields": {"x": "length", "y": "row"}, "lengths": [3, 5], "progress": False}
    plan = make_plan([3, 5], max_tokens=16)
    assert evaluate(make_eval_step(squares), jnp.float32(1), plan, samples, **options).loss == (9 + 25) / 2
    with pytest.raises(ValueError, match="id 0"):
        evaluate(make_eval_step(squares), jnp.float32(1), plan, samples, **options | {"lengths": [4, 5]})


def test_without_weight_there_is_no_loss():
    plan = make_plan([1, 1], max_tokens=4)
    with pytest.raises(ValueError, match="no sample of these 1 steps has weight"):
        evaluate(make_eval_step(loss_fn), TABLE, plan, [[1], [2]], progress=False)


@pytest.mark.parametrize("step", [loss_fn, make_train_step(loss_fn, optax.sgd(0.1))])
def test_what_is_no_eval_step_is_refused(step):
    with pytest.raises(ValueError, match=r"takes an eval step, make_eval_step\(model\), not a (function|TrainStep)"):
        evaluate(step, TABLE, make_plan([2], max_tokens=4), [[1, 2]], progress=False)


def test_an_interrupt_ends_it_between_steps():
    class Interrupting(list):
        def __getitem__(self, index):
            os.kill(os.getpid(), signal.SIGINT)
            return list.__getitem__(self, index)

    plan = make_plan(LENGTHS, max_tokens=64, order="length")
    with pytest.raises(KeyboardInterrupt):
        evaluate(make_eval_step(loss_fn), TABLE, plan, Interrupting(SAMPLES), progress=False)
