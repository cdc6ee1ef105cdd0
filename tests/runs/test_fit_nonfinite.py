"""Runs in which a step is not finite: nothing of it is saved, and the error names that step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import CompileOptions, FitConfig, Plan, fit
from jvarlen.data.split import Split
from jvarlen.data.tokens import TokenDataset
from jvarlen.reports.run_records import read_metrics
from jvarlen.runs.config import CheckpointConfig, DirectoryConfig, PlanConfig
from jvarlen.training.step import are_finite

MARK = 255
MARKED = 37  # a sample
STEP = 5  # which has it


def samples(num_samples, seed, marked=()):
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(97, 101, length, np.uint8) for length in rng.integers(8, 17, num_samples)]
    for i in marked:
        tokens[i][-1] = MARK
    return TokenDataset.from_bytes([each.tobytes() for each in tokens])


DATA = Split(samples(64, 0, [MARKED]), samples(8, 1))


@pytest.fixture
def config(tmp_path):
    return FitConfig(
        num_epochs=1,
        checkpoints=CheckpointConfig(checkpoint_every=1, keep_last=100),
        directory=DirectoryConfig(run_dir=tmp_path / "run"),
        compile=CompileOptions(cache_dir=None, when="ahead"),
        progress=False,
        plan=PlanConfig(max_tokens=128, max_shapes=1, max_length=16),
    )


def nan_gradient(params, microbatch, extra):
    """A finite loss; with a marked token its gradient is NaN, and so are the statistics."""
    is_marked = jnp.any(microbatch.tokens == MARK)
    losses_BxT = -jax.nn.log_softmax(params)[microbatch.tokens]
    root = jnp.sqrt(jnp.where(is_marked, 0.0, 1.0) * jnp.sum(params[:2] ** 2) + jnp.where(is_marked, 0.0, 1.0))
    loss_sum, weight_sum = jnp.sum(losses_BxT * microbatch.weights) + root, jnp.sum(microbatch.weights)
    return loss_sum, weight_sum, {"mean": jnp.where(is_marked, jnp.nan, weight_sum), "steps": extra["steps"] + 1}


def nan_loss(params, microbatch, extra):
    loss_sum, weight_sum, extra = nan_gradient(params, microbatch, extra)
    return loss_sum * jnp.where(jnp.any(microbatch.tokens == MARK), jnp.nan, 1.0), weight_sum, extra


def huge_gradient(params, microbatch, extra):
    """Finite, with a square that is not: Adam's parameters stay, and its second moment becomes infinite."""
    factor = jnp.where(jnp.any(microbatch.tokens == MARK), 1e25, 1.0)
    losses_BxT = -jax.nn.log_softmax(params)[microbatch.tokens] * factor
    return jnp.sum(losses_BxT * microbatch.weights), jnp.sum(microbatch.weights), extra


def constant_loss(params, microbatch, extra):
    """NaN, with a finite gradient."""
    loss_sum, weight_sum, extra = huge_gradient(params, microbatch._replace(tokens=microbatch.tokens % MARK), extra)
    return jnp.where(jnp.any(microbatch.tokens == MARK), jnp.nan, 0.0) + loss_sum, weight_sum, extra


def own(loss_fn, optimizer):
    extra = {"mean": jnp.float32(0), "steps": jnp.int32(0)}
    return {"loss_fn": loss_fn, "params": jnp.linspace(0, 1, 256), "extra": extra, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("loss_fn", "optimizer", "said"),
    [
        (nan_gradient, optax.sgd(0.1), r"parameters or extra are not finite after .* the gradient is not finite"),
        (nan_loss, optax.adam(0.1), r"parameters or extra are not finite after .* the loss is nan"),
        (huge_gradient, optax.adam(0.1), r"gradient of .* is not finite, and .* has not rejected it: .*nu"),
        (constant_loss, optax.adam(0.1), r"the loss is nan at .* and the gradient is finite"),
        (nan_gradient, optax.apply_if_finite(optax.adam(0.1), 0), r"parameters or extra are not finite after .*"),
    ],
    ids=["gradient", "loss", "moment", "loss alone", "not rejected any more"],
)
def test_a_run_ends_at_the_step_that_is_not_finite_and_saves_nothing_of_it(loss_fn, optimizer, said, config):
    run_dir = config.directory.run_dir
    with pytest.raises(FloatingPointError, match=said) as raised:
        fit(config, DATA, **own(loss_fn, optimizer))
    assert f"step {STEP} (counted from 0)" in str(raised.value)
    plan = Plan.load(run_dir / "plan.npz")
    assert MARKED in plan.rows(STEP)
    assert [row["step"] for row in read_metrics(run_dir / "metrics.jsonl") if "loss" in row] == list(range(STEP))
    assert not (run_dir / "summary.json").exists()
    assert {int(path.name) for path in (run_dir / "checkpoints").glob("[0-9]*")} == {*range(STEP + 1)}


def test_the_last_step_may_not_break_a_run_either(config):
    with pytest.raises(FloatingPointError, match=rf"step {STEP} \(counted from 0\)"):
        fit(dataclasses.replace(config, max_steps=STEP + 1), DATA, **own(nan_gradient, optax.sgd(0.1)))
    assert not (config.directory.run_dir / "summary.json").exists()
    assert not (config.directory.run_dir / "checkpoints" / str(STEP + 1)).exists()


@pytest.mark.parametrize("parallel", [None, "data2.zero1"])
def test_a_run_goes_on_past_steps_that_the_optimizer_rejects(config, parallel):
    hardware = dataclasses.replace(config.hardware, parallel=parallel)
    plan = dataclasses.replace(config.plan, num_microbatches=4 if parallel else 1, max_tokens=32 if parallel else 128)
    config = dataclasses.replace(config, hardware=hardware, plan=plan)
    arguments = own(nan_loss, optax.apply_if_finite(optax.adam(0.1), 3))
    result = fit(config, DATA, **arguments)
    assert (result.summary.num_nonfinite_grads, result.summary.interrupted) == (1, False)
    assert int(result.state.extra["steps"]) == (result.summary.num_steps - 1) * plan.num_microbatches
    assert are_finite((result.state.params, result.state.extra))
    rows = [row for row in read_metrics(result.run_dir / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in rows if row.get("grads_finite") is False] == [STEP]
    assert [row["step"] for row in rows if row["loss"] is None] == [STEP]
    again = fit(dataclasses.replace(config, num_epochs=2), DATA, **arguments)
    assert again.summary.num_nonfinite_grads == 2, "also those before the resume"


@pytest.mark.parametrize("name", ["params", "extra"])
def test_a_run_does_not_begin_with_what_is_not_finite(name, config):
    arguments = own(nan_gradient, optax.sgd(0.1))
    arguments[name] = jax.tree.map(lambda leaf: leaf if leaf.dtype == jnp.int32 else leaf + jnp.nan, arguments[name])
    with pytest.raises(ValueError, match=rf"the initial state holds values that are not finite: \.{name}"):
        fit(config, DATA, **arguments)
    assert not any((config.directory.run_dir / "checkpoints").glob("[0-9]*"))


def test_scalars_of_an_optimizer_may_be_infinite(config):
    optimizer = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=100))
    result = fit(dataclasses.replace(config, max_steps=2), DATA, **own(huge_gradient, optimizer))
    assert result.summary.num_steps == 2
