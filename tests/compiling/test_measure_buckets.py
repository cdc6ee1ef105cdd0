"""Measuring buckets: from compiled steps to cost models on disk, and from these to buckets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jvarlen import Bucket, UnplannedShapeError
from jvarlen.batches import BatchShapes, full_batch, token_batch_spec
from jvarlen.cli import main
from jvarlen.compiling import program_store, use_compilation_cache
from jvarlen.compiling.compile import compile_buckets
from jvarlen.compiling.measure import measure_buckets
from jvarlen.models import DecoderConfig
from jvarlen.planning.cost_model import CostModel, fit_cost_model
from jvarlen.runs.commands.measure import measure_costs

TINY = DecoderConfig(num_layers=1, width=16, num_heads=1)


def test_longer_rows_are_dearer_and_the_fit_names_what_was_measured(tmp_path, monkeypatch):
    """No cache hides what compiling takes: nothing is written to it."""
    monkeypatch.setattr(program_store, "_own_setting", None)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_enable_compilation_cache", True)
    use_compilation_cache(tmp_path)
    try:
        costs = measure_costs(TINY, max_tokens=1024, lengths=[16, 256], packed=True, repeats=1, progress=False)
    finally:
        jax.config.update("jax_enable_compilation_cache", False)
        jax.config.update("jax_compilation_cache_dir", before)
        reset_cache()
    assert not any("jit_train_step" in path.name for path in tmp_path.iterdir())
    assert all(seconds > 0 for *_, seconds in costs.seconds.measured)
    assert "width 16" in costs.seconds.model
    assert "packed" in costs.seconds.model
    assert "cpu" in costs.seconds.device
    assert len(costs.seconds.measured) == 4
    assert costs.compile_seconds > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [0, 16]}, "at least 1"),
        ({"lengths": [16]}, "2 lengths"),
        ({"lengths": [64, 2048]}, r"\(0, 2048\)"),
        ({"num_microbatches": 0}, "num_microbatches"),
        ({"repeats": 0}, "repeats"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_compiled(options, message):
    with pytest.raises(ValueError, match=message):
        measure_costs(TINY, **{"max_tokens": 1024, "lengths": [16, 64], "progress": False} | options)


@pytest.mark.slow
def test_measured_costs_budget_a_plan(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.save("lengths.npy", np.random.default_rng(0).integers(8, 250, 500))
    tiny = ["--decoder.num-layers", "1", "--decoder.width", "16", "--decoder.num-heads", "1"]
    assert main(["measure", "--max-tokens", "1024", "--lengths", "64", "256", *tiny, "--no-progress"]) == 0
    assert "packed" not in capsys.readouterr().out
    limit = float(CostModel.load("cost.json")(2, 256))
    arguments = ["--max-tokens", "4096", "--cost-model", "cost.json", "--max-cost"]
    assert main(["plan", "lengths.npy", *arguments, str(limit), "--compile-seconds", "0.001"]) == 0
    printed = capsys.readouterr().out
    assert "predicted" in printed
    assert main(["plan", "lengths.npy", *arguments, "1e-9"]) == 2
    assert "--max-cost 1e-09" in capsys.readouterr().err


def test_costs_of_compiled_buckets_can_be_fitted():
    """Memory is exact and known without a run; seconds come from runs that leave the state as it is."""

    def step(state, batch):
        scores = jax.nn.softmax(jnp.einsum("mbt,mbu->mbtu", batch.weights, batch.weights))
        return state + scores.sum(), scores.max()

    state = jnp.float32(1)
    shapes = [(8, 16), (4, 64), (2, 256), (4, 256)]
    compiled = [
        compile_buckets(step, state, BatchShapes([shape], num_microbatches=2), progress=False) for shape in shapes
    ]
    measured = [measure_buckets(one, state, progress=False) for one in compiled]
    assert float(state) == 1
    assert all(one.seconds[0] > 0 for one in measured)
    memory = fit_cost_model(shapes, [one.num_bytes[0] for one in measured], unit="bytes", device=measured[0].device)
    assert memory.quadratic > 0
    assert memory.largest_error < 0.25
    assert "cpu" in memory.device
    seconds = fit_cost_model(shapes, [one.seconds[0] for one in measured])
    assert float(seconds(4, 256)) > float(seconds(8, 16))


def test_batches_of_the_callers_own_are_measured():
    """Where values decide how long a step takes, as a routed model's do."""
    compiled = compile_buckets(
        lambda state, batch: (state + batch.tokens.sum(), {}),
        jnp.int32(0),
        BatchShapes([(2, 4), (1, 8)]),
        progress=False,
    )
    shapes = []

    def make_batch(spec):
        shapes.append(spec.tokens.shape)
        return full_batch(spec)

    measure_buckets(compiled, jnp.int32(0), make_batch=make_batch, progress=False)
    assert sorted(shapes) == [(1, 1, 8), (1, 2, 4)]
    other = full_batch(token_batch_spec(Bucket(3, 4), 1))
    with pytest.raises(UnplannedShapeError):
        measure_buckets(compiled, jnp.int32(0), make_batch=lambda spec: other, progress=False)
