"""With `optimizer.betas_by_batch_size`, the moments of a run forget by samples, also when it is resumed."""

import jax
import jax.numpy as jnp
import numpy as np

from jvarlen import CompileOptions, FitConfig, fit
from jvarlen.runs import every
from jvarlen.runs.config import DirectoryConfig, OptimizerConfig, PlanConfig
from jvarlen.runs.loop import Training
from jvarlen.training import beta_sequence
from jvarlen.training.moments import MomentsState
from tests.runs.test_hooks import frequencies
from tests.support.settings import changed


def test_moments_forget_by_the_tokens_of_each_step_also_when_resumed(split, tmp_path):
    config = FitConfig(
        max_steps=6,
        optimizer=OptimizerConfig(
            betas_by_batch_size=True, batch_size_unit="tokens", base_batch_size=100, b1=0.6, learning_rate=0.1
        ),
        directory=DirectoryConfig(run_dir=tmp_path / "run"),
        compile=CompileOptions(cache_dir=None),
        progress=False,
        plan=PlanConfig(max_tokens=128, max_shapes=2, max_length=32, overlong="truncate"),
    )
    means, tokens, params, options = (
        [np.zeros(256)],
        [],
        [np.zeros(256)],
        {"loss_fn": frequencies, "params": jnp.zeros(256)},
    )

    def look(training):
        nodes = jax.tree.leaves(training.state.opt_state, is_leaf=lambda node: isinstance(node, MomentsState))
        (node,) = [node for node in nodes if isinstance(node, MomentsState)]
        means.append(np.asarray(node.moments[0], np.float64))
        params.append(np.asarray(training.state.params, np.float64))
        tokens.append(float(node.seen.total) * 100)

    run = fit(config, split, **options, hooks=[every(1, look)])
    sizes = np.diff(np.round(tokens), prepend=0).astype(np.int64)
    assert len({*sizes}) > 1
    betas = beta_sequence(sizes, 0.6, 100, unit="tokens")
    never = ~np.isin(np.arange(256), np.concatenate([np.asarray(sample) for sample in split.train]))
    assert never.any()
    # The gradient of a token that never comes is its probability.
    for beta, old, new, at in zip(betas, means, means[1:], params, strict=False):
        gradient = (new - beta * old) / (1 - beta)
        np.testing.assert_allclose(gradient[never], np.exp(at[never]) / np.exp(at).sum(), rtol=1e-4)

    again = changed(config, run_dir=tmp_path / "again")
    assert fit(again, split, **options, hooks=[every(3, Training.stop)]).summary.num_steps == 3
    np.testing.assert_array_equal(fit(again, split, **options).params, run.params)
    by_steps = changed(config, run_dir=tmp_path / "steps", optimizer=OptimizerConfig(learning_rate=0.1, b1=0.6))
    assert np.abs(fit(by_steps, split, **options).params - run.params).max() > 1e-3
