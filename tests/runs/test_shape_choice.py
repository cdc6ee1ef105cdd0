"""Which shapes runs have by default, by seconds, and by their settings."""

import dataclasses
import json
import os
import re
import signal
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen import Bucket, CompileOptions, FitConfig, Plan, fit
from jvarlen._common.files import load_dataclass
from jvarlen.compiling.lowering import StepCompiler
from jvarlen.models import DecoderConfig
from jvarlen.planning.cost_model import CostModel
from jvarlen.runs.config import DirectoryConfig, PlanConfig
from jvarlen.runs.shapes import ChosenShapes, epoch_plan, shapes_for
from tests.runs.test_fit_own_model import DATA
from tests.runs.test_fit_own_model import own as own_with_batches
from tests.runs.test_hooks import frequencies
from tests.support.settings import changed


@pytest.fixture
def config(tmp_path):
    return FitConfig(
        max_steps=8,
        directory=DirectoryConfig(runs_dir=tmp_path / "runs"),
        compile=CompileOptions(cache_dir=None),
        progress=False,
        plan=PlanConfig(max_tokens=128, max_length=32, overlong="truncate", packing="padded"),
        decoder=DecoderConfig(num_layers=1, width=16, num_heads=1),
    )


def fit_frequencies(config, split):
    return fit(config, split, loss_fn=frequencies, params=jnp.zeros(256))


def chosen_by(run_dir):
    return load_dataclass(ChosenShapes, run_dir / "shapes.json", "chosen shapes")


def with_plan(config, **changes):
    return dataclasses.replace(config, plan=dataclasses.replace(config.plan, **changes))


def test_the_built_in_decoder_has_packed_rows_of_one_shape(config, split, capsys):
    """Each at least twice as long as the longest sample, without a `max_length`."""
    run = fit(with_plan(config, packing="auto", max_length=None), split)
    assert "packed rows of one shape" in capsys.readouterr().out
    longest = max(map(len, (split.train[i] for i in range(len(split.train)))))
    assert Plan.load(run.run_dir / "plan.npz").is_packed
    assert chosen_by(run.run_dir).buckets == ((1, 128),)
    assert 2 * longest <= 128 < 4 * longest


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


def costing(config, tmp_path, compile_seconds, linear=1e-3, quadratic=0.0):
    """Settings with a cost model: what tokens cost alone is least in packed rows."""
    cost = tmp_path / "cost.json"
    CostModel(0.0, linear, quadratic).save(cost)
    return with_plan(config, cost_model=cost, compile_seconds=compile_seconds, max_shapes="auto")


def test_a_loss_of_ones_own_is_packed_only_when_asked(config, split, tmp_path, capsys):
    config = with_plan(costing(config, tmp_path, 100.0), packing="auto")
    unasked = fit_frequencies(config, split)
    assert "one sample a row: packing=" in capsys.readouterr().out
    asked = fit_frequencies(with_plan(config, packing="best_fit"), split)
    told = capsys.readouterr().out
    assert "one sample a row: packing=" not in told
    assert re.search(r"\n1 packed shape: predicted seconds, .* in 1 packed shape\n", told)
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
def test_settings_for_one_of_them_decide(config, changes, is_packed):
    plan = dataclasses.replace(config.plan, packing="auto", max_shapes=2, **changes).resolve()
    shapes = shapes_for(plan, np.array([3, 20, 30]))
    assert shapes.packing == ("best_fit" if is_packed else "padded")
    assert any(name in shapes.reason for name in changes)
    assert epoch_plan(plan, shapes, np.array([3, 20, 30]), seed=0, epoch=0).is_packed == is_packed


def test_a_batch_of_ones_own_is_for_one_kind_of_rows(config):
    collate = own_with_batches()["collate"]
    with pytest.raises(ValueError, match=r'packing="auto" makes batches .* collate'):
        fit(with_plan(config, packing="auto"), DATA, collate=collate)


def test_buckets_may_be_given(config, split):
    result = fit_frequencies(with_plan(config, max_shapes=2, buckets=((8, 16), (4, 32))), split)
    assert Plan.load(result.run_dir / "plan.npz").buckets.shapes == (Bucket(8, 16), Bucket(4, 32))


def test_ctrl_c_while_a_step_waits_for_the_compiler_saves_and_resumes(config, split, monkeypatch):
    """For the second of three shapes."""
    config = with_plan(config, max_shapes=3)
    whole = fit_frequencies(config, split)
    compile_now, stuck, began = StepCompiler.compile, threading.Event(), []

    def compile_one(step_compiler, lowered):
        if step_compiler.name == "train_step":
            began.append(lowered.key)
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
