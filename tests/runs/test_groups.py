"""Runs whose steps have a given size: the updates of whole batches, resumed to the last bit, and logged by groups."""

import dataclasses
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import fit
from jvarlen.batches import Batch, next_token_targets
from jvarlen.cli import main
from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.models import init_params, make_loss_fn
from jvarlen.parallel import StepLoss
from jvarlen.planning.cost_model import CostModel
from jvarlen.reports.run_records import read_metrics
from jvarlen.runs.config import OptimizerConfig
from jvarlen.runs.saved_config import load_config
from jvarlen.runs.settings import resolve
from jvarlen.runs.training_plan import TrainingPlan
from tests.runs.test_fit import same_training
from tests.runs.test_layouts import StoppingAfter
from tests.support import run_fit
from tests.support.settings import changed

SIZE, NUM_STEPS = 24, 9
DATA = run_fit.make_data()
LENGTHS, EVAL_LENGTHS = (np.array([len(part[i]) for i in range(len(part))]) for part in DATA)


@pytest.fixture
def config(tmp_path, compilation_cache):
    config = run_fit.make_config(tmp_path / "runs", compilation_cache)
    plan = dataclasses.replace(config.plan, max_shapes=3, num_microbatches=2, max_tokens=96, sequences_per_step=SIZE)
    return changed(config, plan=plan, max_steps=NUM_STEPS)


def records_of(run_dir):
    return [record for record in read_metrics(run_dir / "metrics.jsonl") if "loss" in record]


def batch_of(ids):
    """All samples in one padded batch."""
    tokens, lengths = np.zeros((len(ids), LENGTHS.max()), np.int32), LENGTHS[ids]
    for row, i in zip(tokens, ids, strict=True):
        row[: LENGTHS[i]] = DATA.train[i]
    weights = (np.arange(tokens.shape[1]) < lengths[:, None]).astype(np.float32)
    return Batch(tokens, lengths, weights, np.float32(len(ids)), ids, ids >= 0)


def train_on_whole_batches(config, run_dir):
    """Losses and parameters of updates from one batch a step on one device, at the rates that were logged."""
    decoder = load_config(run_dir / "config.json").decoder
    loss_fn, params = make_loss_fn(decoder), init_params(decoder, config.seed)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1.0, b1=0.9, b2=0.95, weight_decay=0.1))
    plans, opt_state, losses = TrainingPlan(resolve(config), LENGTHS, {}), optimizer.init(params), []

    @jax.jit
    def update(params, opt_state, batch, rate):
        def mean_loss(params):
            loss, weight = loss_fn(params, batch)[:2]
            return loss / weight

        loss, grads = jax.value_and_grad(mean_loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return loss, optax.apply_updates(params, optax.tree.scale(rate, updates)), opt_state

    for record in records_of(run_dir):
        plan, step = plans.plan_of_epoch(record["epoch"]), record["step"] - plans.epoch_starts[record["epoch"]]
        ids = plan.sample_ids[plan.step_offsets[step] : plan.step_offsets[step + 1]]
        assert len(ids) == record["num_sequences"] == min(SIZE, len(LENGTHS) - SIZE * step)
        loss, params, opt_state = update(params, opt_state, batch_of(ids), record["learning_rate"])
        losses.append(float(loss))
    return losses, params


def test_a_run_on_two_devices_takes_the_updates_of_whole_batches(config):
    run = fit(changed(config, parallel="data2"), DATA)
    records = records_of(run.run_dir)
    assert len(records) == NUM_STEPS == run.summary.num_steps
    assert run.summary.compilations_after_first_step == 0
    assert run.summary.num_shapes == 3
    assert max(record["num_groups"] for record in records) > 2
    assert {record["learning_rate_scale"] for record in records if record["num_sequences"] == SIZE} == {1.0}
    losses, params = train_on_whole_batches(config, run.run_dir)
    np.testing.assert_allclose([record["loss"] for record in records], losses, rtol=1e-5)
    for found, expected in zip(jax.tree.leaves(run.state.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_batches_grow_alike_on_any_devices(config):
    plan = dataclasses.replace(config.plan, sequences_per_step="0:12,20%:24,50%:32")
    config = changed(config, plan=plan, num_epochs=1, max_steps=None)
    runs = [records_of(fit(changed(config, parallel=layout), DATA).run_dir) for layout in (None, "data2")]
    for name in ("num_sequences", "num_tokens", "learning_rate"):
        of_one, of_two = ([record[name] for record in records] for records in runs)
        assert of_one == of_two
    assert sum(record["num_sequences"] for record in runs[0]) == len(LENGTHS)
    assert {12, 24, 32} <= {record["num_sequences"] for record in runs[0]}
    np.testing.assert_allclose(*([record["loss"] for record in records] for records in runs), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["padded", "packed", "auto", "seesaw"])
def test_a_run_that_stops_within_an_epoch_resumes_to_the_last_bit(kind, config, tmp_path):
    plan = config.plan
    if kind == "packed":
        plan = dataclasses.replace(plan, packing="best_fit")
    elif kind == "auto":
        CostModel(1e-3, 1e-6, 1e-9).save(tmp_path / "cost.json")
        by_seconds = {"max_shapes": "auto", "cost_model": tmp_path / "cost.json", "compile_seconds": 1e-3}
        plan = dataclasses.replace(plan, **by_seconds)
    elif kind == "seesaw":  # of steps of 12 samples until the fourth
        plan = dataclasses.replace(plan, sequences_per_step=12)
        optimizer = OptimizerConfig(schedule="seesaw", final_fraction=0.01)
        config = changed(config, optimizer=optimizer, num_epochs=1, max_steps=None)
    config = changed(config, plan=plan)
    whole = fit(config, DATA)
    stopped = fit(config, DATA, trackers={"stop": StoppingAfter(1)})
    assert stopped.summary.interrupted
    assert 2 <= stopped.summary.num_steps <= 4 < -(-len(LENGTHS) // SIZE)
    resumed = fit(changed(config, resume=stopped.run_dir), DATA)
    if kind == "seesaw":
        sizes = [record["num_sequences"] for record in records_of(resumed.run_dir)]
        assert sizes[stopped.summary.num_steps] == 12 < max(sizes)
    assert same_training(whole, resumed)
    assert resumed.summary.padding == whole.summary.padding


@pytest.mark.slow
def test_a_signal_between_groups_finishes_the_step(config, monkeypatch):
    whole, usual, programs = fit(config, DATA), CompiledBuckets._run, []

    def run(self, key, state, *taken):
        programs.append(key)
        if len(programs) == first_of_step_2 + 1:
            os.kill(os.getpid(), signal.SIGINT)
        return usual(self, key, state, *taken)

    # Evaluations run before the first step, and each step ends with its update.
    num_evaluations = (
        TrainingPlan(resolve(config), LENGTHS, {"held_out": EVAL_LENGTHS}).eval_plans["held_out"].num_steps
    )
    first_of_step_2 = num_evaluations + sum(record["num_groups"] + 1 for record in records_of(whole.run_dir)[:2])
    monkeypatch.setattr(CompiledBuckets, "_run", run)
    stopped = fit(config, DATA)
    monkeypatch.undo()
    assert stopped.summary.interrupted
    assert stopped.summary.num_steps == 3
    assert same_training(whole, fit(changed(config, resume=stopped.run_dir), DATA))


def own_loss(table, microbatch, key, extra):
    inputs, targets, weights = next_token_targets(microbatch)
    noise = 0.01 * jax.random.normal(key, (*inputs.shape, 256))
    losses = optax.softmax_cross_entropy_with_integer_labels(table[inputs] + noise, targets) * weights
    return losses.sum(), weights.sum(), {"squares": (losses**2).sum()}, extra + microbatch.lengths.sum()


def sums_of(table, microbatch):
    inputs, targets, weights = next_token_targets(microbatch)
    losses = optax.softmax_cross_entropy_with_integer_labels(table[inputs], targets) * weights
    return {"loss": losses.sum(), "weight": weights.sum(), "squares": (losses**2).sum()}


OF_WHOLE_STEP = StepLoss(
    sums=sums_of, loss=lambda sums: sums["loss"] / sums["weight"] + jnp.sqrt(sums["squares"] / sums["weight"])
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "own", [{"loss_fn": own_loss, "extra": jnp.int32(0)}, {"loss_fn": OF_WHOLE_STEP}], ids=["key", "step_loss"]
)
def test_losses_of_ones_own_are_those_of_one_device_on_any_layout(own, config):
    def train(**settings):
        return fit(changed(config, **settings), DATA, params=jnp.zeros((256, 256)), **own)

    alone = train()
    for layout in ("data2", "data2.zero2"):
        run = train(parallel=layout)
        expected, found = ([record["loss"] for record in records_of(each.run_dir)] for each in (alone, run))
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert jax.tree.map(int, run.state.extra) == jax.tree.map(int, alone.state.extra)


@pytest.mark.slow
def test_a_run_resumes_on_another_layout(config):
    whole = fit(config, DATA)
    stopped = fit(changed(config, parallel="data2.zero1"), DATA, trackers={"stop": StoppingAfter(1)})
    resumed = fit(changed(config, parallel="data2.zero3", resume=stopped.run_dir), DATA)
    expected, found = ([record["loss"] for record in records_of(run.run_dir)] for run in (whole, resumed))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
def test_the_command_trains_on_packed_rows_and_reports_the_groups(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = [
        "--sequences-per-step", "64", "--devices", "2", "--max-steps", "3", "--max-tokens", "1024",
        "--max-length", "512", "--run-dir", "run",
        "--decoder.num-layers", "1", "--decoder.width", "8", "--decoder.num-heads", "1", "--no-progress",
    ]  # fmt: skip
    assert main(["train", *settings]) == 0
    records = records_of(tmp_path / "run")
    assert [record["num_sequences"] for record in records] == [64] * 3
    number = {}
    for group in (group for record in records for group in record["groups"]):
        name = f"{group['rows']:,} × {group['length']:,}"
        number[name] = number.get(name, 0) + group["num_groups"]
    capsys.readouterr()
    assert main(["report", "run", "--html", "page.html"]) == 0
    printed = capsys.readouterr().out
    most = max(record["num_groups"] for record in records)
    assert f"at most {most}" in printed
    for name, groups in number.items():
        assert any(
            line.startswith(name) and line.removeprefix(name).split()[0] == f"{groups:,}"
            for line in printed.splitlines()
        )


def test_dry_runs_tell_of_groups_and_of_the_update(tmp_path, capsys):
    settings = [
        "train", "--dry-run", "--sequences-per-step", "64", "--parallel", "data2.zero1", "--max-tokens", "64",
        "--max-length", "32", "--packing", "padded", "--max-shapes", "2", "--decoder.num-layers", "1",
        "--decoder.width", "16", "--decoder.num-heads", "1", "--no-progress", "--runs-dir", str(tmp_path),
    ]  # fmt: skip
    assert main(settings) == 0
    _, memory = capsys.readouterr().out.split("Memory of a group of ")
    of_group, of_update = memory.split("Communication of this group\n")[1].split("Communication of the update\n")
    assert "reduce-scatter" not in of_group
    assert {line.split()[0] for line in of_update.splitlines() if line} >= {"reduce-scatter", "all-gather"}
    assert main([*settings, "--target", "here", "--devices", "2"]) == 0
    _, table = capsys.readouterr().out.split("Compiled for here\n")
    assert "update" in [line.split()[0] for line in table.splitlines() if line.strip()]
    assert not list(tmp_path.iterdir())
