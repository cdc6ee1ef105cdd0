"""Gradients sent in bfloat16: sums in float32 of what is rounded once, in half of the bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jvarlen import CompileOptions, FitConfig, compile_buckets, fit, make_train_step
from jvarlen.batches import BatchShapes
from jvarlen.data.split import Split
from jvarlen.distributed.grad_buckets import reduce_scatter
from jvarlen.distributed.layout import Layout
from jvarlen.estimates import estimate_communication
from jvarlen.parallel.layers import LayeredModel, LayeredParams, layered_loss_fn
from jvarlen.runs.config import CheckpointConfig, DirectoryConfig, HardwareConfig, PlanConfig
from tests.conftest import random_dataset
from tests.support.meshes import layout_mesh

UNIT = 2.0**-8  # by how much of itself bfloat16 rounds a number at most

# Arrays whose first dimension 4 divides, or the second, or none, and an array that is too small for shards.
MODEL = LayeredModel(
    lambda ends, microbatch, axes: (microbatch @ ends["odd"])[:, :64] + (microbatch @ ends["in"]),
    lambda own, x, microbatch, axes: x + jnp.tanh(x @ own["k"] + own["b"]),
    lambda ends, x, microbatch, axes: (jnp.sum(jnp.square(x @ ends["out"] - microbatch)), jnp.float32(x.shape[0])),
)
BATCH = np.random.default_rng(1).normal(size=(8, 5, 17)).astype(np.float32)


def params_of():
    rng = np.random.default_rng(0)
    ends = {"odd": rng.normal(size=(17, 75)), "in": rng.normal(size=(17, 64)), "out": rng.normal(size=(64, 17))}
    layers = {"k": rng.normal(size=(4, 64, 64)), "b": rng.normal(size=(4, 64))}
    return jax.tree.map(lambda leaf: (leaf / 8).astype(np.float32), LayeredParams(ends, layers))


def grads_on(text, model, params):
    step = make_train_step(model, optax.identity(), layout=text)
    state, _ = jax.jit(step)(step.init(params), BATCH)
    weight = BATCH.shape[0] * BATCH.shape[1]
    return jax.tree.map(lambda after, before: (after - before) * weight, step.gather_params(state), params)


@pytest.fixture(scope="module")
def of_microbatches():
    """The gradients of all microbatches, in float64."""
    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, params_of())
        grad = jax.jit(jax.grad(lambda params, microbatch: layered_loss_fn(MODEL)(params, microbatch)[0]))
        return jax.tree.map(lambda *grads: np.stack(grads), *(grad(params, each) for each in BATCH.astype(np.float64)))


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("data4.zero3", MODEL),
        ("data2.stage2.zero1", MODEL),
        ("data4.zero1.grad_bucket_bytes4096", layered_loss_fn(MODEL)),
        ("data4.zero3", layered_loss_fn(MODEL)),
    ],
)
def test_each_contribution_and_each_whole_sum_is_rounded_once(text, model, of_microbatches):
    found, wide = (grads_on(f"{text}.{word}", model, params_of()) for word in ("reduce_bfloat16", "reduce_float32"))
    differs = False
    for each, exact, parts in zip(*map(jax.tree.leaves, (found, wide, of_microbatches)), strict=True):
        size = np.abs(parts).sum(axis=0)
        np.testing.assert_allclose(exact, parts.sum(axis=0), atol=1e-4 * size.max())
        error, bound = np.abs(each - exact), UNIT * (size + np.abs(exact) * (1 + UNIT)) + 1e-4 * size.max()
        assert (error <= bound).all()
        differs |= bool((error > 1e-4 * size.max()).any())
    assert differs


@pytest.mark.parametrize(
    "text", ["data4", "data4.grad_bucket_bytes4096", "data4.zero1", "data4.zero2", "data4.zero3", "data2.stage2.zero1"]
)
def test_both_parts_of_complex_gradients_are_sent(text):
    def loss(ends, x, microbatch, axes):
        return jnp.sum(jnp.abs(x @ ends["out"] - microbatch) ** 2), jnp.float32(x.shape[0])

    model, params = MODEL._replace(loss=loss), jax.tree.map(lambda leaf: np.complex64(leaf * (1 + 2j) / 8), params_of())
    found, wide = (grads_on(f"{text}.{word}", model, params) for word in ("reduce_bfloat16", "reduce_float32"))
    for each, exact in zip(jax.tree.leaves(found), jax.tree.leaves(wide), strict=True):
        for part, of_exact in ((each.real, exact.real), (each.imag, exact.imag)):
            assert np.linalg.norm(part - of_exact) < 2 * UNIT * np.linalg.norm(of_exact)


def test_what_is_sent_in_bfloat16_is_added_in_float32():
    """256 + 1 is 256 in bfloat16, and 263 is not a number of it."""
    values = np.array([256, 1, 1, 1, 1, 1, 1, 1], np.float32)
    mesh = layout_mesh(Layout(data=4, context=2))

    def on_device(value):
        return reduce_scatter(jnp.broadcast_to(value, (8, 3)), ("data", "context"), "bfloat16")

    specs = PartitionSpec(("data", "context"))
    reduced = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)(values)
    np.testing.assert_array_equal(reduced, np.full((8, 3), 263, np.float32))


@pytest.mark.parametrize("text", ["data4", "data2.stage2.zero1"])
def test_half_of_the_bytes_are_sent(text):
    sent = []
    for word in ("reduce_bfloat16", "reduce_float32"):
        step = make_train_step(MODEL, optax.sgd(1.0), layout=f"{text}.{word}")
        bucket = BATCH.shape[1:]
        shapes = BatchShapes(
            [bucket],
            num_microbatches=8,
            batch_spec=lambda bucket, num: jax.ShapeDtypeStruct((num, *bucket), "float32"),
            has_many_groups=False,
        )
        compiled = compile_buckets(
            step, step.init(params_of()), shapes, progress=False, options=CompileOptions(cache_dir=None)
        )
        rows = estimate_communication(compiled, bucket)
        kinds = {"reduce-scatter", "all-to-all"} if "zero" in text else {"all-reduce", "all-to-all", "all-gather"}
        sent.append(sum(row.wire_bytes for row in rows if row.axes == ("data",) and row.kind in kinds))
    assert 0.49 * sent[1] < sent[0] < 0.55 * sent[1]


def test_a_run_prints_the_error_of_its_gradients(tmp_path, capsys):
    config = FitConfig(
        max_steps=1,
        checkpoints=CheckpointConfig(keep_last=1),
        directory=DirectoryConfig(run_dir=tmp_path / "run"),
        compile=CompileOptions(cache_dir=None, when="ahead"),
        progress=False,
        plan=PlanConfig(max_tokens=32, max_shapes=1, max_length=16, num_microbatches=4),
        hardware=HardwareConfig(parallel="data4.zero2.reduce_bfloat16"),
    )

    def loss_fn(params, microbatch):
        losses_BxT = -jax.nn.log_softmax(params["table"][microbatch.tokens] @ params["out"])[..., 0]
        return jnp.sum(losses_BxT * microbatch.weights), jnp.sum(microbatch.weights)

    params = {"table": jnp.ones((256, 8)), "out": jnp.eye(8)}
    fit(
        config,
        Split(random_dataset(64, 16), random_dataset(8, 16)),
        loss_fn=loss_fn,
        params=params,
        optimizer=optax.sgd(0.1),
    )
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "sent in bfloat16 differ by" in line)
    error = float(line.split("differ by ")[1].split()[0])
    assert 0 < error < 4 * UNIT
