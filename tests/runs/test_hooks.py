"""Functions of the user's own, called between steps."""

import jax
import jax.numpy as jnp
import pytest

from jvarlen import CompileOptions, FitConfig, fit
from jvarlen.runs import every
from jvarlen.runs.config import CheckpointConfig, DirectoryConfig, PlanConfig
from tests.support.settings import changed


def frequencies(params, microbatch):
    """The loss of a model that compiles at once: how often each token comes, whatever is before it."""
    losses_MxT = -jax.nn.log_softmax(params)[microbatch.tokens]
    return jnp.sum(losses_MxT * microbatch.weights), jnp.sum(microbatch.weights)


@pytest.fixture
def config(tmp_path):
    return FitConfig(
        max_steps=7,
        eval_every=3,
        checkpoints=CheckpointConfig(keep_last=9),
        directory=DirectoryConfig(run_dir=tmp_path / "run"),
        compile=CompileOptions(cache_dir=None),
        progress=False,
        plan=PlanConfig(max_tokens=128, max_shapes=2, max_length=32, overlong="truncate"),
    )


def trained(config, split, *hooks):
    return fit(config, split, loss_fn=frequencies, params=jnp.zeros(256), hooks=hooks)


def test_hooks_see_every_state_that_they_ask_for_and_change_no_numbers(config, split, tmp_path):
    seen, shares = [], []

    def look(training):
        seen.append((training.num_steps_done, training.record["step"]))
        shares.append(float(jnp.tanh(training.state.params).max()))  # what it compiles is no recompiling

    result = trained(config, split, every(2, look), every(7, look))
    assert seen == [(2, 1), (4, 3), (6, 5), (7, 6)]
    assert shares == sorted(shares)
    assert result.summary.compilations_after_first_step == 0
    without = trained(changed(config, run_dir=tmp_path / "without"), split)
    assert without.summary.evaluations == result.summary.evaluations
    with pytest.raises(ValueError, match=r"num_steps \(0\)"):
        every(0, look)


def test_a_hook_evaluates_saves_and_stops_a_training_which_may_be_resumed(config, split):
    losses = []

    def stop_early(training):
        losses.append(training.evaluate()["held_out"])
        training.save()
        if len(losses) == 2:
            training.stop()

    stopped = trained(config, split, every(2, stop_early))
    assert (stopped.summary.num_steps, stopped.summary.interrupted) == (4, False)
    assert stopped.summary.held_out_after == losses[-1]
    names = {path.name for path in (stopped.run_dir / "checkpoints").glob("[0-9]*")}
    assert names == {"0", "2", "4"}
    resumed = trained(config, split, every(5, stop_early))
    assert (resumed.summary.num_steps, len(losses)) == (7, 3)
