"""Runs that choose the number of their shapes, and what such runs remember."""

import dataclasses
import json
import os
import re
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen import Bucket, CompileOptions, FitConfig, Plan, fit
from jvarlen._common.files import load_dataclass
from jvarlen.compiling.auto_shapes import RunCosts, costs_from_report, load_costs, save_costs
from jvarlen.compiling.lowering import StepCompiler
from jvarlen.compiling.report import CompileReport, CompileRow
from jvarlen.models import DecoderConfig
from jvarlen.planning.cost_model import CostModel
from jvarlen.runs.config import DirectoryConfig, PlanConfig, load_config
from jvarlen.runs.plan_config import ChosenShapes, epoch_plan, shapes_for
from tests.runs.test_fit_own_model import DATA
from tests.runs.test_fit_own_model import own as own_with_batches
from tests.settings import changed


@pytest.fixture
def cache_dir(compilation_cache, tmp_path):
    """A directory of its own for each test, with the cache switched on."""
    return tmp_path / "compiled"


@pytest.fixture
def config(tmp_path, cache_dir):
    return FitConfig(
        max_steps=8,
        directory=DirectoryConfig(runs_dir=tmp_path / "runs"),
        compile=CompileOptions(cache_dir=cache_dir),
        progress=False,
        plan=PlanConfig(max_tokens=128, max_shapes="auto", max_length=32, overlong="truncate", packing=None),
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


@pytest.mark.parametrize("packing", [None, "best_fit", "default"])
def test_a_run_keeps_what_it_chose_and_measures_for_the_next(config, split, cache_dir, capsys, packing):
    config = with_plan(config, packing=packing)
    first = fit(config, split)
    told = capsys.readouterr().out
    chosen = chosen_by(first.run_dir)
    plan = Plan.load(first.run_dir / "plan.npz")
    assert chosen.buckets == tuple(map(tuple, plan.buckets))
    assert load_config(first.run_dir / "config.json").plan.max_shapes == "auto", "what was asked for"
    assert plan.is_packed == (chosen.packing is not None)
    assert packing == "default" or plan.is_packed == (packing == "best_fit")
    if not plan.is_packed:
        assert set(chosen.eval_lengths) <= {bucket.length for bucket in plan.buckets}
        assert max(chosen.eval_lengths) == plan.buckets[-1].length
    assert f"\n{len(plan.buckets)} {'packed' if plan.is_packed else 'padded'} shape" in told
    assert "estimated)" in told
    assert ("would take" in told) == (packing == "default"), "the other kind of shapes"
    (path,) = (cache_dir / "costs").iterdir()
    kept = json.loads(path.read_text())
    assert not kept["is_estimate"]
    assert [sorted(map(tuple, shapes)) for shapes in kept["compiled"].values()] == [
        sorted(tuple(row.bucket) for row in CompileReport.load(first.run_dir / "compile_report.json"))
    ]
    assert kept["seconds"]["linear"] > 0
    again = fit(with_plan(config, packing=chosen.packing), split)
    told = capsys.readouterr().out
    assert "measured)" in told
    assert again.summary.num_cache_hits > 0


def test_a_run_tells_that_earlier_ones_measured_far_smaller_shapes(config, split, cache_dir, capsys):
    fit_frequencies(config, split)
    (path,) = (cache_dir / "costs").iterdir()
    kept = json.loads(path.read_text())
    kept["seconds"]["measured"] = [[1, 2, 1e-3]]
    path.write_text(json.dumps(kept))
    capsys.readouterr()
    fit_frequencies(config, split)
    assert "measured in far smaller shapes" in capsys.readouterr().out


@pytest.mark.parametrize("packing", [None, "auto"])
def test_a_run_is_resumed_with_its_own_shapes_whatever_is_remembered(config, split, cache_dir, tmp_path, packing):
    run_dir = tmp_path / "run"
    config = with_plan(config, packing=packing)
    config = changed(config, runs_dir=config.directory.runs_dir, run_dir=run_dir, max_steps=4)
    fit_frequencies(config, split)
    before = chosen_by(run_dir)
    (path,) = (cache_dir / "costs").iterdir()
    costs = json.loads(path.read_text())
    costs["seconds"] |= {"linear": 1e-9, "quadratic": 1e-3}
    path.write_text(json.dumps(costs | {"compile_seconds": 1e-9, "compiled": {}}))  # many shapes would be chosen
    result = fit_frequencies(dataclasses.replace(config, max_steps=7), split)
    assert result.summary.num_steps == 7
    assert chosen_by(run_dir) == before
    of_another = fit_frequencies(changed(config, run_dir=None), split)
    assert before.packing == ("best_fit" if packing == "auto" else None)
    assert (chosen_by(of_another.run_dir).packing, len(chosen_by(of_another.run_dir).buckets)) == (None, 4)


def test_a_run_that_steps_end_is_as_long_whatever_epochs_it_may_take(config, split, tmp_path, capsys):
    """Of its shapes, those of evaluations too, which come every few steps."""
    cost = tmp_path / "cost.json"
    CostModel(0.0, 1e-4, 0.0).save(cost)
    given = dataclasses.replace(with_plan(config, cost_model=cost, compile_seconds=0.5), eval_every=4)
    runs = [fit_frequencies(dataclasses.replace(given, num_epochs=n), split).run_dir for n in (None, 500)]
    first, second = (dataclasses.replace(chosen_by(run), reason="") for run in runs)
    assert first == second


def test_given_costs_decide_and_are_not_remembered(config, split, cache_dir, tmp_path):
    cost = tmp_path / "cost.json"
    CostModel(0.0, 1e-3, 0.0).save(cost)
    few = fit_frequencies(with_plan(config, cost_model=cost, compile_seconds=1000.0), split)
    many = fit_frequencies(with_plan(config, cost_model=cost, compile_seconds=1e-6), split)
    (path,) = (cache_dir / "costs").iterdir()
    assert json.loads(path.read_text())["compile_seconds"] > 1e-3
    assert [len(chosen_by(run.run_dir).buckets) for run in (few, many)] == [1, 4]  # all multiples of 8


def test_nothing_is_kept_without_a_cache(config, split, cache_dir):
    fit_frequencies(dataclasses.replace(config, compile=CompileOptions(cache_dir=None)), split)
    assert not cache_dir.exists()


@pytest.mark.parametrize(
    "changes", [{"packing": "wrapped", "overlong": None}, {"strategy": "quantile"}, {"buckets": ((8, 16), (4, 32))}]
)
def test_wrapped_rows_and_what_settings_say_have_the_usual_number(config, split, changes):
    result = fit_frequencies(with_plan(config, **changes), split)
    chosen = chosen_by(result.run_dir)
    usual = changed(with_plan(config, max_shapes=12, **changes), runs_dir=result.run_dir)
    assert chosen == chosen_by(fit_frequencies(usual, split).run_dir)
    assert (chosen.eval_lengths, chosen.new_shape_every) == ((), 0)


def test_a_model_of_ones_own_with_batches_of_its_own(config):
    arguments = own_with_batches()
    result = fit(with_plan(config, max_tokens=64, max_length=16, microbatches_per_step=4), DATA, **arguments)
    assert chosen_by(result.run_dir).buckets
    assert result.summary.num_steps == 8


def costing(config, tmp_path, compile_seconds, linear=1e-3, quadratic=0.0):
    """Settings with a cost model: what tokens cost alone is least in packed rows."""
    cost = tmp_path / "cost.json"
    CostModel(0.0, linear, quadratic).save(cost)
    return with_plan(config, cost_model=cost, compile_seconds=compile_seconds)


def test_a_loss_of_ones_own_is_packed_only_when_asked(config, split, tmp_path, capsys):
    config = dataclasses.replace(config, compile=CompileOptions(cache_dir=None))
    config = with_plan(costing(config, tmp_path, 100.0), packing="default")
    unasked = fit_frequencies(config, split)
    assert "one sample a row: packing=" in capsys.readouterr().out
    asked = fit_frequencies(with_plan(config, packing="auto"), split)
    told = capsys.readouterr().out
    assert "one sample a row: packing=" not in told
    assert re.search(r"\n1 packed shape: .* as given\); 1 padded shape would take", told)
    assert [Plan.load(run.run_dir / "plan.npz").is_packed for run in (unasked, asked)] == [False, True]
    assert asked.summary.held_out_before == pytest.approx(unasked.summary.held_out_before, rel=1e-6)
    for name in ("row_lengths", "max_samples_per_row"):
        with pytest.raises(ValueError, match=f'{name} .* needs packing="best_fit"'):
            fit_frequencies(with_plan(config, **{name: (32,) if name == "row_lengths" else 4}), split)


@pytest.mark.parametrize(
    ("changes", "is_packed"),
    [
        ({"row_lengths": (16, 32)}, True),
        ({"max_samples_per_row": 2}, True),
        ({"overlong": "split"}, True),
        ({"chunks_in_order": True}, True),
        ({"strategy": "quantile"}, False),
        ({"order": "length"}, False),
        ({"order": "length", "pacing": "root"}, False),
        ({"buckets": ((4, 32),)}, False),
        ({"block_size": 64}, False),
    ],
)
@pytest.mark.parametrize("max_shapes", [2, "auto"])
def test_settings_for_one_of_them_decide(config, changes, is_packed, max_shapes):
    plan = dataclasses.replace(config.plan, packing="auto", max_shapes=max_shapes, **changes)
    method, reason = plan.packing_in_force
    assert method == ("best_fit" if is_packed else None)
    assert any(name in reason for name in changes)
    if max_shapes == 2:
        shapes = shapes_for(plan, np.array([3, 20, 30]))
        assert (shapes.packing, shapes.reason) == (method, reason)
        assert epoch_plan(plan, shapes, np.array([3, 20, 30]), seed=0, epoch=0).is_packed == is_packed


def test_a_number_is_the_most_shapes_of_either_kind(config, split, tmp_path):
    cheap = with_plan(costing(config, tmp_path, 1e-6, linear=1e-5, quadratic=1e-3), packing="auto", max_shapes=2)
    assert len(chosen_by(fit_frequencies(cheap, split).run_dir).buckets) <= 2


def test_a_batch_of_ones_own_is_for_one_kind_of_rows(config):
    with pytest.raises(ValueError, match=r'packing="auto" makes batches .* collate'):
        fit(with_plan(config, packing="auto"), DATA, **own_with_batches())


def test_evaluations_in_fewer_shapes_give_the_same_loss(config, split, monkeypatch):
    plain = fit_frequencies(with_plan(config, max_shapes=4), split)
    shapes = chosen_by(plain.run_dir)
    few_shapes = dataclasses.replace(shapes, eval_lengths=(shapes.buckets[-1][1],))
    monkeypatch.setattr("jvarlen.runs.shape_choice.shapes_for", lambda plan, lengths, seed: few_shapes)
    few = fit_frequencies(with_plan(config, max_shapes=4), split)
    assert few.summary.held_out_before == pytest.approx(plain.summary.held_out_before, rel=1e-6)
    assert few.summary.held_out_after == pytest.approx(plain.summary.held_out_after, rel=1e-5)


def test_buckets_may_be_given(config, split):
    buckets = ((8, 16), (4, 32))
    result = fit_frequencies(with_plan(config, max_shapes=2, buckets=buckets), split)
    assert Plan.load(result.run_dir / "plan.npz").buckets == (Bucket(8, 16), Bucket(4, 32))
    with pytest.raises(ValueError, match=r"strictly ascend: \[\(\(4, 32\), \(8, 16\)\)\]"):
        with_plan(config, buckets=buckets[::-1])
    with pytest.raises(ValueError, match=r"max_shapes \(0\)"):
        with_plan(config, max_shapes=0)
    with pytest.raises(ValueError, match="max_shapes 'auto' is chosen by a training run"):
        shapes_for(config.plan, np.array([3, 4]))


def row_of(rows, length, *, compile_s, step_s, cache_hit=False, times_used=5):
    numbers = dict.fromkeys(["argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "peak_bytes"], 0)
    return CompileRow(
        Bucket(rows, length), 0.5, compile_s, cache_hit, 1e9, **numbers, times_used=times_used, step_s=step_s
    )


def test_a_report_replaces_what_it_measured():
    before = RunCosts("1 × cpu", "m", CostModel(0.0, 1.0, 1.0), 9.0, {"a": ((1, 2),)}, is_estimate=True)
    seconds = {(rows, length): 2 * rows * length * (2e-6 + 1e-8 * length) for rows, length in ((8, 64), (2, 256))}
    report = CompileReport([row_of(*shape, compile_s=1.5, step_s=step_s) for shape, step_s in seconds.items()])
    after = costs_from_report(report, 2, before, "b")
    assert (after.compile_seconds, after.is_estimate) == (2.0, False)
    assert (after.seconds.linear, after.seconds.quadratic) == (pytest.approx(2e-6), pytest.approx(1e-8))
    assert after.seconds.measured == tuple((*shape, step_s / 2) for shape, step_s in seconds.items())
    assert after.seconds.largest_error < 1e-9
    assert after.compiled == {"a": ((1, 2),), "b": ((8, 64), (2, 256))}
    cached = CompileReport([row_of(4, 128, compile_s=0.1, step_s=np.nan, cache_hit=True, times_used=0)])
    unmeasured = costs_from_report(cached, 2, before, "a")
    assert unmeasured == dataclasses.replace(before, compiled={"a": ((1, 2), (4, 128))})


@pytest.mark.parametrize("pairs", [{(4, 64): 3000.0}, {(4, 64): 3000.0, (1, 256): 3500.0}, None])
def test_shapes_that_are_alike_keep_the_proportion_of_what_tokens_and_pairs_cost(pairs):
    before = RunCosts("1 × cpu", "m", CostModel(0.0, 2e-6, 1e-8), 9.0)
    shapes = pairs or {(4, 64): 4 * 64**2}
    rows = [row_of(*shape, compile_s=1.0, step_s=3 * before.seconds(*shape, pairs=n)) for shape, n in shapes.items()]
    after = costs_from_report(CompileReport(rows), 1, before, "a", pairs)
    assert (after.seconds.linear, after.seconds.quadratic) == (pytest.approx(6e-6), pytest.approx(3e-8))
    assert after.seconds.largest_error < 1e-9


def test_packed_shapes_of_other_pairs_tell_what_tokens_and_pairs_cost():
    before = RunCosts("1 × cpu", "m", CostModel(0.0, 1.0, 1.0), 9.0)
    pairs, true = {(4, 64): 3000.0, (1, 256): 20_000.0}, CostModel(0.0, 2e-6, 1e-8)
    rows = [row_of(*shape, compile_s=1.0, step_s=2 * true(*shape, pairs=n)) for shape, n in pairs.items()]
    after = costs_from_report(CompileReport(rows), 2, before, "a", pairs)
    assert (after.seconds.linear, after.seconds.quadratic) == (pytest.approx(2e-6), pytest.approx(1e-8))


def test_costs_are_kept_by_device_and_model_and_damaged_ones_are_not_used(tmp_path):
    costs = RunCosts("1 × cpu", "m", CostModel(0.0, 1.0, 1.0), 9.0, {"a": ((1, 2),)})
    assert load_costs(tmp_path, "1 × cpu", "m") is None
    save_costs(costs, tmp_path)
    assert load_costs(tmp_path, "1 × cpu", "m") == costs
    assert load_costs(tmp_path, "2 × cpu", "m") is None
    assert load_costs(tmp_path, "1 × cpu", "n") is None
    (path,) = tmp_path.glob("costs/*.json")
    path.write_text(path.read_text()[:40])
    with pytest.warns(UserWarning, match="holds no costs of a model"):
        assert load_costs(tmp_path, "1 × cpu", "m") is None
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="could not be kept"):
        save_costs(costs, tmp_path / "file")


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
        without_cache = dataclasses.replace(config, compile=CompileOptions(cache_dir=None))
        interrupted = fit_frequencies(without_cache, split)
        stuck.set()
    assert interrupted.summary.interrupted
    assert interrupted.summary.num_steps < 8
    resumed = fit_frequencies(changed(config, resume=interrupted.run_dir), split)
    assert not resumed.summary.interrupted
    assert resumed.summary.held_out_after == pytest.approx(whole.summary.held_out_after, rel=1e-6)
    assert resumed.summary.num_tokens == whole.summary.num_tokens
