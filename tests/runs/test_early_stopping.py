"""A run ends once evaluations stop lowering the held-out loss, at the same step however often it is resumed."""

import json
import os
import signal

import jax
import jax.numpy as jnp
import optax
import pytest

from jvarlen import CompileOptions, FitConfig, UserError, fit
from jvarlen.runs import every
from jvarlen.runs.config import CheckpointConfig, DirectoryConfig, PlanConfig
from jvarlen.training.checkpoint import read_params
from tests.support.settings import changed


def away(params, microbatch):
    """A loss whose parameters go away from 0 by 1 in every step."""
    return -jnp.sum(params * jnp.sum(microbatch.weights)), jnp.sum(microbatch.weights)


def distance(params, microbatch):
    """The held-out loss falls until step 5: 5, 3, 1, 1, 3, 5 after steps 0, 2, 4, 6, 8, 10."""
    return jnp.abs(params - 5) * jnp.sum(microbatch.weights), jnp.sum(microbatch.weights)


@pytest.fixture
def config(tmp_path):
    return FitConfig(
        max_steps=20,
        eval_every=2,
        patience=1,
        checkpoints=CheckpointConfig(checkpoint_every=3, keep_last=1),
        directory=DirectoryConfig(run_dir=tmp_path / "run"),
        compile=CompileOptions(cache_dir=None),
        progress=False,
        plan=PlanConfig(max_tokens=128, max_shapes=1, max_length=32, overlong="truncate"),
    )


def trained(config, split, *hooks):
    options = {"loss_fn": away, "eval_loss_fn": distance, "optimizer": optax.sgd(1.0), "params": jnp.float32(0)}
    return fit(config, split, hooks=hooks, **options)


def evaluations(run_dir):
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["mean_loss"] for record in records if "mean_loss" in record}


@pytest.mark.parametrize(("patience", "min_delta", "last"), [(1, 0.0, 8), (0, 0.0, 6), (1, 2.5, 6), (9, 0.0, 20)])
def test_it_ends_after_more_evaluations_than_patience_that_do_not_lower_the_loss(
    config, split, patience, min_delta, last
):
    result = trained(changed(config, patience=patience, min_delta=min_delta), split)
    assert (result.summary.num_steps, result.summary.interrupted) == (last, False)
    assert evaluations(result.run_dir) == {step: abs(step - 5) for step in range(0, last + 1, 2)}
    params, place = read_params(result.run_dir / "checkpoints", "best")
    assert (place.num_steps_done, float(params[""])) == (4, 4.0)


@pytest.mark.parametrize(("finite_from", "last"), [(3, 8), (99, 4)])
def test_a_loss_that_is_not_a_number_is_not_the_lowest(config, split, finite_from, last):
    def late(params, microbatch):
        loss_sum, weight_sum = distance(params, microbatch)
        return jnp.where(params < finite_from, jnp.nan, loss_sum), weight_sum

    options = {"loss_fn": away, "optimizer": optax.sgd(1.0), "params": jnp.float32(0)}
    assert fit(config, split, eval_loss_fn=late, **options).summary.num_steps == last


def interrupt(training):
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("at", [5, 6, 8])
def test_a_resumed_run_ends_where_one_without_a_break_does(config, split, tmp_path, at):
    """Also if it is resumed at a step that is evaluated again, and when it had ended."""
    once = trained(config, split)
    config = changed(config, run_dir=tmp_path / "resumed")
    stopped = trained(config, split, every(at, interrupt))
    assert stopped.summary.num_steps == at
    for _ in range(2):
        resumed = trained(config, split)
        assert (resumed.summary.num_steps, resumed.summary.evaluations) == (8, once.summary.evaluations)
        assert jax.tree.map(float, resumed.state) == jax.tree.map(float, once.state)
    goes_on = trained(changed(config, patience=2), split)
    assert goes_on.summary.num_steps == 10


def test_a_step_whose_evaluation_was_interrupted_is_counted_after_the_resume(config, split):
    """As the last one is, if the run is then made longer."""
    ended = trained(changed(config, max_steps=6), split)
    assert ended.summary.num_steps == 6
    assert trained(config, split).summary.num_steps == 8


def test_patience_needs_evaluations_and_a_loss(config, split):
    with pytest.raises(UserError, match=r"patience \(1\) needs eval_every"):
        FitConfig(patience=1)
    with pytest.raises(UserError, match=r"min_delta \(0.1\) needs patience"):
        FitConfig(min_delta=0.1)
    with pytest.raises(UserError, match=r"patience \(-1\)"):
        FitConfig(patience=-1, eval_every=1)
    nothing = lambda params, microbatch: (jnp.float32(0), jnp.float32(0) * jnp.sum(microbatch.weights))  # noqa: E731
    with pytest.raises(UserError, match="no held-out token has weight"):
        fit(config, split, loss_fn=away, eval_loss_fn=nothing, params=jnp.float32(0), optimizer=optax.sgd(1.0))
