"""Tokens beyond an embedding: named before a step is computed."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen import CompileOptions, FitConfig, fit, load, make_plan
from jvarlen.data.split import Split
from jvarlen.models import DecoderConfig
from jvarlen.runs.config import DirectoryConfig
from jvarlen.runs.plan_config import PlanConfig

SAMPLES = [np.array([1, 2, 3]), np.array([4, 9]), np.array([10, 1]), np.array([5])]
LENGTHS = [3, 2, 2, 1]


def collate(step):
    return {"tokens": np.stack([[[sample.max() for sample in row] for row in step.samples]])}


FORMS = {
    "padded": (make_plan(LENGTHS, [(2, 3)], order="dataset"), SAMPLES, "tokens", {}, "id 2: "),
    "workers": (make_plan(LENGTHS, [(2, 3)], order="dataset"), SAMPLES, "tokens", {"num_workers": 1}, "id 2: "),
    "packed": (
        make_plan(LENGTHS, [(1, 4)], packing="best_fit", order="dataset"),
        SAMPLES,
        "tokens",
        {},
        "id 2: ",
    ),
    "pairs": (
        make_plan([(1, n) for n in LENGTHS], [(2, 1, 3)], order="dataset"),
        [(np.array([50]), sample) for sample in SAMPLES],
        "target_tokens",
        {},
        "id 2: ",
    ),
    "own": (make_plan(LENGTHS, [(2, 3)], order="dataset"), SAMPLES, "tokens", {"collate": collate}, "step 1"),
}


@pytest.mark.parametrize("form", [pytest.param(f, marks=[pytest.mark.slow] * (f == "workers")) for f in FORMS])
def test_a_loader_names_the_samples_beyond_the_limit(form):
    plan, samples, name, options, said = FORMS[form]
    assert len(list(load(plan, samples, num_values={name: 11, "another": 1}, **options))) == plan.num_steps
    with pytest.raises(ValueError, match=rf"{name} reach 10.*below 10 have a row") as caught:
        list(load(plan, samples, num_values={name: 10}, **options))
    assert caught.match(said)


def config_of(path):
    return FitConfig(
        max_steps=3,
        num_epochs=9,
        directory=DirectoryConfig(run_dir=path / "run"),
        compile=CompileOptions(cache_dir=None),
        progress=False,
        plan=PlanConfig(max_tokens=8, max_shapes=1, order="dataset"),
        decoder=DecoderConfig(num_layers=1, width=8, num_heads=1, vocab_size=11),
    )


@pytest.mark.parametrize("is_own", [True, False], ids=["own loss", "built-in model"])
def test_fit_ends_before_a_step_with_tokens_beyond_the_embedding(is_own, tmp_path):
    own = {}
    if is_own:

        def loss_fn(params, microbatch):
            return params["table"][microbatch.tokens].sum(), microbatch.weights.sum()

        own = {"loss_fn": loss_fn, "params": {"table": jnp.zeros((10, 4))}, "num_values": {"tokens": 10}}
    with pytest.raises(ValueError, match=r"id 2: tokens reach 10, but only values below 10"):
        fit(config_of(tmp_path), Split(train=SAMPLES, held_out=SAMPLES[:2]), **own)
    within = [np.minimum(sample, 9) for sample in SAMPLES]
    config = dataclasses.replace(config_of(tmp_path), directory=DirectoryConfig(run_dir=tmp_path / "within"))
    assert fit(config, Split(train=within, held_out=within[:2]), **own).summary.num_steps == 3
