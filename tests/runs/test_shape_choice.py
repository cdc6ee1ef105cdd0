"""Runs that choose their shapes by seconds."""

import dataclasses
import json
import os
import re
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import Bucket, CompileOptions, FitConfig, Plan, fit, make_train_step
from jvarlen._common.files import load_dataclass
from jvarlen.batches.shapes import BatchShapes
from jvarlen.compiling.lowering import StepCompiler, make_step_compiler
from jvarlen.models import DecoderConfig, init_params, make_loss_fn
from jvarlen.planning.cost_model import CostModel
from jvarlen.runs.config import DirectoryConfig, PlanConfig, load_config
from jvarlen.runs.plan_config import ChosenShapes, epoch_plan, shapes_for
from jvarlen.runs.prepare import estimate_costs
from tests.runs.test_fit_own_model import DATA
from tests.runs.test_fit_own_model import own as own_with_batches
from tests.support.settings import changed


@pytest.fixture
def config(tmp_path):
    return FitConfig(
        max_steps=8,
        directory=DirectoryConfig(runs_dir=tmp_path / "runs"),
        compile=CompileOptions(cache_dir=None),
        progress=False,
        plan=PlanConfig(max_tokens=128, max_shapes="auto", max_length=32, overlong="truncate", packing="padded"),
        decoder=DecoderConfig(num_layers=1, width=16, num_heads=1),
    )


def frequencies(params, microbatch):
    """The loss of a model that compiles at once: how often each token comes, whatever is before it."""
    losses_MxT = -jax.nn.log_softmax(params)[microbatch.tokens]
    return jnp.sum(losses_MxT * microbatch.weights), jnp.sum(microbatch.weights)


def fit_frequencies(config, split):
    return fit(config, split, loss_fn=frequencies, params=jnp.zeros(256))


def chosen_by(run_dir):
    return load_dataclass(ChosenShapes, run_dir / "shapes.json", "chosen shapes")


def with_plan(config, **changes):
    return dataclasses.replace(config, plan=dataclasses.replace(config.plan, **changes))


def test_a_run_estimates_the_seconds_that_nobody_gave(config, split, capsys):
    run = fit(with_plan(config, packing="auto"), split)
    told = capsys.readouterr().out
    chosen, plan = chosen_by(run.run_dir), Plan.load(run.run_dir / "plan.npz")
    assert chosen.buckets == tuple(map(tuple, plan.buckets.shapes))
    assert load_config(run.run_dir / "config.json").plan.max_shapes == "auto", "what was asked for"
    assert plan.is_packed == (chosen.packing != "padded")
    assert re.search(r"\n1 packed shape: predicted .* in \d padded shapes?, .* s a shape, estimated\)\n", told)


def test_a_run_is_resumed_with_its_own_shapes_whatever_others_would_cost(config, split, tmp_path):
    run_dir = tmp_path / "run"
    config = changed(costing(config, tmp_path, 100.0), run_dir=run_dir, max_steps=4)
    fit_frequencies(config, split)
    before = chosen_by(run_dir)
    shapes = json.loads((run_dir / "shapes.json").read_text())
    assert len(shapes["buckets"]) == 1
    shapes["reason"] = "not chosen again"
    (run_dir / "shapes.json").write_text(json.dumps(shapes))
    assert fit_frequencies(dataclasses.replace(config, max_steps=7), split).summary.num_steps == 7
    assert chosen_by(run_dir) == dataclasses.replace(before, reason="not chosen again")
    (run_dir / "shapes.json").write_text("{}")
    with pytest.raises(ValueError, match=r"shapes\.json holds no chosen shapes"):
        fit_frequencies(dataclasses.replace(config, max_steps=8), split)


def test_given_costs_decide_how_many_shapes_a_run_has(config, split, tmp_path):
    few = fit_frequencies(costing(config, tmp_path, 1000.0), split)
    many = fit_frequencies(costing(config, tmp_path, 1e-6), split)
    assert [len(chosen_by(run.run_dir).buckets) for run in (few, many)] == [1, 4]  # all multiples of 8


@pytest.mark.parametrize(
    "changes", [{"packing": "wrapped", "overlong": None}, {"strategy": "quantile"}, {"buckets": ((8, 16), (4, 32))}]
)
def test_wrapped_rows_and_what_settings_say_have_the_usual_number(config, split, changes):
    result = fit_frequencies(with_plan(config, **changes), split)
    chosen = chosen_by(result.run_dir)
    usual = changed(with_plan(config, max_shapes=16, **changes), runs_dir=result.run_dir)
    assert chosen == chosen_by(fit_frequencies(usual, split).run_dir)


def test_a_model_of_ones_own_with_batches_of_its_own(config):
    arguments = own_with_batches()
    result = fit(with_plan(config, max_tokens=64, max_length=16, num_microbatches=4), DATA, **arguments)
    assert chosen_by(result.run_dir).buckets
    assert result.summary.num_steps == 8


def costing(config, tmp_path, compile_seconds, linear=1e-3, quadratic=0.0):
    """Settings with a cost model: what tokens cost alone is least in packed rows."""
    cost = tmp_path / "cost.json"
    CostModel(0.0, linear, quadratic).save(cost)
    return with_plan(config, cost_model=cost, compile_seconds=compile_seconds)


def test_a_loss_of_ones_own_is_packed_only_when_asked(config, split, tmp_path, capsys):
    config = with_plan(costing(config, tmp_path, 100.0), packing="auto")
    unasked = fit_frequencies(config, split)
    assert "one sample a row: packing=" in capsys.readouterr().out
    asked = fit_frequencies(with_plan(config, packing="best_fit"), split)
    told = capsys.readouterr().out
    assert "one sample a row: packing=" not in told
    assert re.search(r"\n1 packed shape: predicted seconds, .* in 1 packed shape \(.* as given\)", told)
    assert [Plan.load(run.run_dir / "plan.npz").is_packed for run in (unasked, asked)] == [False, True]
    assert asked.summary.held_out_before == pytest.approx(unasked.summary.held_out_before, rel=1e-6)
    with pytest.raises(ValueError, match=r'row_lengths .* needs packing="best_fit"'):
        fit_frequencies(with_plan(config, row_lengths=(32,)), split)


@pytest.mark.parametrize(
    ("changes", "is_packed"),
    [
        ({"row_lengths": (16, 32)}, True),
        ({"overlong": "split"}, True),
        ({"strategy": "quantile"}, False),
        ({"order": "length"}, False),
        ({"order": "length", "pacing": "linear"}, False),
        ({"buckets": ((4, 32),)}, False),
        ({"block_size": 64}, False),
    ],
)
@pytest.mark.parametrize("max_shapes", [2, "auto"])
def test_settings_for_one_of_them_decide(config, changes, is_packed, max_shapes):
    plan = dataclasses.replace(config.plan, packing="auto", max_shapes=max_shapes, **changes)
    method, reason = plan.packing_in_force
    assert method == ("best_fit" if is_packed else "padded")
    assert any(name in reason for name in changes)
    if max_shapes == 2:
        shapes = shapes_for(plan, np.array([3, 20, 30]))
        assert (shapes.packing, shapes.reason) == (method, reason)
        assert epoch_plan(plan, shapes, np.array([3, 20, 30]), seed=0, epoch=0).is_packed == is_packed


@pytest.mark.parametrize("packing", ["padded", "best_fit"])
def test_a_number_is_the_most_shapes_of_either_kind(config, split, tmp_path, packing):
    cheap = with_plan(costing(config, tmp_path, 1e-6, linear=1e-5, quadratic=1e-3), packing=packing, max_shapes=2)
    assert len(chosen_by(fit_frequencies(cheap, split).run_dir).buckets) <= 2


def test_a_batch_of_ones_own_is_for_one_kind_of_rows(config):
    collate = own_with_batches()["collate"]
    with pytest.raises(ValueError, match=r'packing="auto" makes batches .* collate'):
        fit(with_plan(config, packing="auto"), DATA, collate=collate)


def test_buckets_may_be_given(config, split):
    buckets = ((8, 16), (4, 32))
    result = fit_frequencies(with_plan(config, max_shapes=2, buckets=buckets), split)
    assert Plan.load(result.run_dir / "plan.npz").buckets.shapes == (Bucket(8, 16), Bucket(4, 32))
    with pytest.raises(ValueError, match=r"strictly ascend: \[\(\(4, 32\), \(8, 16\)\)\]"):
        with_plan(config, buckets=buckets[::-1])
    with pytest.raises(ValueError, match=r"max_shapes \(0\)"):
        with_plan(config, max_shapes=0)
    with pytest.raises(ValueError, match="max_shapes 'auto' is chosen by seconds"):
        shapes_for(config.plan, np.array([3, 4]))


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_operations_are_counted_as_attention_of_whole_rows_has_them(num_microbatches, monkeypatch):
    """Of rows of any length from short ones: what loops with bounds from the data do, nothing can count."""
    monkeypatch.setattr("jvarlen.runs.prepare._operations_per_second", lambda device: 2.0)
    config = DecoderConfig(width=32, num_heads=2, vocab_size=64)
    params = jax.eval_shape(lambda: init_params(config, 0))
    long, short = [Bucket(1, 2048)], [Bucket(4, 128), Bucket(2, 256)]

    def seconds_of(buckets, **changes):
        step = make_train_step(make_loss_fn(dataclasses.replace(config, **changes)), optax.sgd(0.1))
        shapes = BatchShapes(buckets, num_microbatches=num_microbatches)
        step_compiler = make_step_compiler(step, step.init(params), shapes, CompileOptions(cache_dir=None))
        return estimate_costs(step_compiler, buckets)[0]

    estimate, whole = seconds_of(short), seconds_of(long, attention="xla")
    assert float(estimate(1, 2048)) == pytest.approx(float(whole(1, 2048)), rel=0.2)
    assert estimate.quadratic * 2048 > estimate.linear, "of rows this long"


def test_ctrl_c_while_a_step_waits_for_the_compiler_saves_and_resumes(config, split, monkeypatch):
    """For the second of three shapes."""
    config = with_plan(config, max_shapes=3)
    whole = fit_frequencies(config, split)
    compile_now, stuck, began = StepCompiler.compile, threading.Event(), []

    def compile_one(step_compiler, lowered):
        if step_compiler.name == "train_step":
            began.append(lowered.bucket)
            if len(began) > 1:
                os.kill(os.getpid(), signal.SIGINT)
                assert stuck.wait(60)
        return compile_now(step_compiler, lowered)

    with monkeypatch.context() as patch:
        patch.setattr(StepCompiler, "compile", compile_one)
        interrupted = fit_frequencies(config, split)
        stuck.set()
    assert interrupted.summary.interrupted
    assert interrupted.summary.num_steps < 8
    resumed = fit_frequencies(changed(config, resume=interrupted.run_dir), split)
    assert not resumed.summary.interrupted
    assert resumed.summary.held_out_after == pytest.approx(whole.summary.held_out_after, rel=1e-6)
    assert resumed.summary.num_tokens == whole.summary.num_tokens
