"""With `optimizer.ema_decay`, a run evaluates, saves and returns the average of its parameters."""

import jax.numpy as jnp
import numpy as np

from jvarlen import CompileOptions, FitConfig, fit
from jvarlen.runs import every
from jvarlen.runs.config import DirectoryConfig, OptimizerConfig, PlanConfig
from jvarlen.runs.loop import Training
from jvarlen.training.checkpoint import read_params
from tests.runs.test_hooks import frequencies
from tests.support.settings import changed


def test_a_run_evaluates_saves_and_returns_the_average_also_when_resumed(split, tmp_path):
    config = FitConfig(
        max_steps=6,
        eval_every=2,
        optimizer=OptimizerConfig(ema_decay=0.8, learning_rate=0.1),
        directory=DirectoryConfig(run_dir=tmp_path / "run"),
        compile=CompileOptions(cache_dir=None),
        progress=False,
        plan=PlanConfig(max_tokens=128, max_shapes=1, max_length=32, overlong="truncate"),
    )
    trained, options = [], {"loss_fn": frequencies, "params": jnp.zeros(256)}

    def look(training):
        trained.append(np.asarray(training.state.params, np.float64))

    run = fit(config, split, **options, hooks=[every(1, look)])
    weights = 0.8 ** np.arange(6)[::-1]
    average = np.tensordot(weights / weights.sum(), np.stack(trained), 1)
    np.testing.assert_allclose(run.params, average, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(read_params(run.run_dir / "checkpoints")[0][""], run.params)
    assert np.abs(average - trained[-1]).max() > 0.01

    tokens = np.concatenate([np.asarray(sample)[:32] for sample in split.held_out])
    losses = np.log(np.exp(average).sum()) - average
    np.testing.assert_allclose(run.summary.held_out_after, losses[tokens].mean(), rtol=1e-6)

    again = changed(config, run_dir=tmp_path / "again")
    assert fit(again, split, **options, hooks=[every(3, Training.stop)]).summary.num_steps == 3
    resumed = fit(again, split, **options)
    np.testing.assert_array_equal(resumed.params, run.params)
    assert resumed.summary.evaluations == run.summary.evaluations
