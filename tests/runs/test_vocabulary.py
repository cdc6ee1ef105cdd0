"""Tokens beyond an embedding: found in the loss, and named before a step is computed."""

import dataclasses

import equinox as eqx
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jvarlen import CompileOptions, FitConfig, fit, load, make_plan, pack_samples
from jvarlen.batches import BatchShapes, next_token_targets
from jvarlen.data.split import Split
from jvarlen.models import DecoderConfig
from jvarlen.runs.config import DirectoryConfig
from jvarlen.runs.plan_config import PlanConfig
from jvarlen.runs.vocabulary import table_rows

TABLE = {"table": jnp.zeros((10, 4))}
KEY = jax.random.key(0)
LINEN = flax.linen.Embed(10, 4)
GRAPH, NNX = nnx.split(nnx.Embed(10, 4, rngs=nnx.Rngs(0)))
EQX, EQX_REST = eqx.partition(eqx.nn.Embedding(10, 4, key=KEY), eqx.is_array)

SEEN = {
    "as they are": lambda p, mb: p["table"][mb.tokens],
    "take": lambda p, mb: jnp.take(p["table"], mb.tokens, axis=0),
    "shifted": lambda p, mb: p["table"][mb.tokens[:, :-1]],
    "after a first token": lambda p, mb: p["table"][jnp.pad(mb.tokens, ((0, 0), (1, 0)))[:, :-1]],
    "concatenated": lambda p, mb: p["table"][jnp.concatenate([jnp.zeros((2, 1), int), mb.tokens], 1)],
    "inputs": lambda p, mb: p["table"][next_token_targets(mb, begin_token=9)[0]],
    "in bfloat16": lambda p, mb: p["table"].astype(jnp.bfloat16)[mb.tokens],
    "rematerialized": lambda p, mb: jax.checkpoint(lambda e, t: e[t])(p["table"], mb.tokens),
    "by rows": lambda p, mb: jax.lax.map(lambda t: p["table"][t], mb.tokens),
}
NOT_SEEN = {
    "folded": lambda p, mb: p["table"][mb.tokens % 10],
    "clipped": lambda p, mb: p["table"][jnp.minimum(mb.tokens, 9)],
    "replaced": lambda p, mb: p["table"][jnp.where(mb.tokens < 10, mb.tokens, 0)],
    "the first alone": lambda p, mb: p["table"][mb.tokens[:, :1]],
    "of another table": lambda p, mb: (p["table"][0, 0] + jnp.zeros((99, 4)))[mb.tokens],
    "a column": lambda p, mb: p["table"][:, mb.tokens],
}
MODULES = {
    "linen": (LINEN.init(KEY, jnp.zeros((1, 1), int)), lambda p, mb: LINEN.apply(p, mb.tokens)),
    "nnx": (NNX, lambda p, mb: nnx.merge(GRAPH, p)(mb.tokens)),
    "equinox": (EQX, lambda p, mb: jax.vmap(jax.vmap(eqx.combine(p, EQX_REST)))(mb.tokens)),
}


def loss_of(embed):
    def loss_fn(params, microbatch):
        return embed(params, microbatch).sum(), microbatch.weights.sum()

    return loss_fn


def rows_of(embed, params=None):
    (spec,) = BatchShapes([(2, 8)], microbatches_per_step=2).specs.values()
    return table_rows(loss_of(embed), TABLE if params is None else params, None, spec)


@pytest.mark.parametrize("how", SEEN)
def test_a_table_that_tokens_index_is_seen(how):
    assert rows_of(SEEN[how]) == {"tokens": 10}


@pytest.mark.parametrize("how", NOT_SEEN)
def test_what_may_be_meant_is_no_error(how):
    assert "tokens" not in rows_of(NOT_SEEN[how])


@pytest.mark.parametrize("library", MODULES)
def test_embeddings_of_libraries_are_seen(library):
    params, embed = MODULES[library]
    assert rows_of(embed, params) == {"tokens": 10}


def test_the_smallest_table_counts_and_other_integers_too():
    params = TABLE | {"small": jnp.zeros((7, 4)), "of lengths": jnp.zeros((9, 2))}

    def embed(p, mb):
        return p["table"][mb.tokens] + p["small"][mb.tokens] + p["of lengths"][mb.lengths].sum()

    assert rows_of(embed, params) == {"tokens": 7, "lengths": 9}


def test_a_loss_that_cannot_be_traced_alone_is_left_to_the_compiler():
    assert rows_of(lambda p, mb: jax.lax.psum(p["table"][mb.tokens], "nowhere")) == {}


SAMPLES = [np.array([1, 2, 3]), np.array([4, 9]), np.array([10, 1]), np.array([5])]
LENGTHS = [3, 2, 2, 1]


def collate(step):
    return {"tokens": np.stack([[[sample.max() for sample in row] for row in step.samples]])}


FORMS = {
    "padded": (make_plan(LENGTHS, [(2, 3)], order="dataset"), SAMPLES, "tokens", {}, "samples 2,"),
    "workers": (make_plan(LENGTHS, [(2, 3)], order="dataset"), SAMPLES, "tokens", {"num_workers": 1}, "samples 2,"),
    "packed": (
        make_plan(pack_samples(LENGTHS, [4]), [(1, 4)], order="dataset"),
        SAMPLES,
        "tokens",
        {},
        "rows with .*2",
    ),
    "pairs": (
        make_plan([(1, n) for n in LENGTHS], [(2, 1, 3)], order="dataset"),
        [(np.array([50]), sample) for sample in SAMPLES],
        "target_tokens",
        {},
        "samples 2,",
    ),
    "own": (make_plan(LENGTHS, [(2, 3)], order="dataset"), SAMPLES, "tokens", {"collate": collate}, "step 1 reach 10,"),
}


@pytest.mark.parametrize("form", [pytest.param(f, marks=[pytest.mark.slow] * (f == "workers")) for f in FORMS])
def test_a_loader_names_the_samples_beyond_the_limit(form):
    plan, samples, name, options, said = FORMS[form]
    assert len(list(load(plan, samples, num_values={name: 11, "another": 1}, **options))) == plan.num_steps
    with pytest.raises(ValueError, match=rf"{name} of step \d reach 10.*below 10 have a row") as caught:
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
    own = {"loss_fn": loss_of(SEEN["as they are"]), "params": TABLE} if is_own else {}
    with pytest.raises(ValueError, match=r"tokens of step 2 reach 10, in the samples 2, but only values below 10"):
        fit(config_of(tmp_path), Split(train=SAMPLES, held_out=SAMPLES[:2]), **own)
    within = [np.minimum(sample, 9) for sample in SAMPLES]
    config = dataclasses.replace(config_of(tmp_path), directory=DirectoryConfig(run_dir=tmp_path / "within"))
    assert fit(config, Split(train=within, held_out=within[:2]), **own).summary.num_steps == 3
