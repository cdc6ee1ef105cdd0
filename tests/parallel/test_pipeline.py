"""Pipelined steps: the numbers of the unsplit model, every stage on its own devices, nothing done in idle ticks."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import (
    Bucket,
    compile_buckets,
    init_train_state,
    load,
    make_eval_step,
    make_plan,
    make_train_step,
    no_recompiles,
    pack_samples,
    scale_by_batch_size,
)
from jvarlen.compiling.hlo import count_collectives
from jvarlen.distributed.mesh import data_mesh
from jvarlen.loading.collate import pack_to_bucket
from jvarlen.models import TransformerConfig, init_params, layered, make_loss_fn, stack_layers
from jvarlen.models.pipelined import make_stages, merge_stages, split_stages
from jvarlen.parallel.layers import layered_loss_fn
from jvarlen.parallel.pipeline import (
    StagedParams,
    Stages,
    bubble_fraction,
    make_pipeline_eval_step,
    make_pipeline_loss_fn,
    make_pipeline_train_step,
    pipeline_mesh,
    place_stages,
)
from tests.conftest import random_dataset

MODEL = TransformerConfig(num_layers=4, width=16, num_heads=2)
MODEL_GRADIENTS = jax.jit(jax.value_and_grad(layered_loss_fn(layered(MODEL)), has_aux=True))


@functools.cache
def initial_params():
    with jax.enable_x64(False):
        return jax.tree.map(np.asarray, init_params(MODEL, seed=0))


class Rows(NamedTuple):
    """M×B rows of three numbers."""

    x: np.ndarray
    weights: np.ndarray
    num_sequences: np.ndarray


STAGES = Stages(
    lambda ends, microbatch: microbatch.x @ ends["in"],
    lambda own, x, microbatch: x + jnp.tanh(x @ own["k"]),
    lambda ends, x, microbatch: (
        jnp.sum(jnp.sin(x @ ends["in"].T @ ends["out"]) * microbatch.weights[:, None]),
        jnp.sum(microbatch.weights),
    ),
)


def unsplit_loss_fn(params, microbatch):
    x = STAGES.embed(params.ends, microbatch)
    for s in range(params.stages["k"].shape[0]):
        x = STAGES.stage({"k": params.stages["k"][s]}, x, microbatch)
    return STAGES.loss(params.ends, x, microbatch)


def make_params(num_stages, width=5, dtype=np.float64):
    rng = np.random.default_rng(0)
    ends = {"in": rng.normal(size=(3, width)), "out": rng.normal(size=(3, 2))}
    params = StagedParams(ends, {"k": rng.normal(size=(num_stages, width, width))})
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def make_rows(num_microbatches, num_dummies=0, dtype=np.float64):
    rng = np.random.default_rng(num_microbatches)
    weights = rng.integers(1, 4, (num_microbatches, 6)).astype(dtype)
    weights.reshape(-1)[weights.size - num_dummies :] = 0
    x = rng.normal(size=(num_microbatches, 6, 3)).astype(dtype)
    return Rows(x, weights, dtype(np.count_nonzero(weights)))


def mesh_of(num_shards, num_stages):
    return pipeline_mesh(num_stages, num_shards * num_stages)


def assert_equal_trees(found, expected, rtol):
    for leaf, expected_leaf in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        largest = max(np.max(np.abs(expected_leaf), initial=0), 1e-3)
        np.testing.assert_allclose(leaf, expected_leaf, rtol=rtol, atol=rtol * largest)


@pytest.mark.parametrize(
    ("num_shards", "num_stages", "num_microbatches", "rematerialize"),
    [(1, 2, 3, False), (2, 2, 8, True), (1, 4, 1, True), (1, 4, 4, False), (4, 1, 4, False)],
)
def test_a_pipelined_step_is_the_unsplit_step(num_shards, num_stages, num_microbatches, rematerialize):
    mesh = mesh_of(num_shards, num_stages)
    # The norm to be clipped is that of all stages: of one alone it would be another.
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2), scale_by_batch_size(7))
    with jax.enable_x64(True):
        params, batch = make_params(num_stages), make_rows(num_microbatches, num_dummies=3)
        step = jax.jit(make_pipeline_train_step(STAGES, optimizer, mesh=mesh, rematerialize=rematerialize))
        found = step(init_train_state(place_stages(params, mesh), optimizer), batch)
        expected = jax.jit(make_train_step(unsplit_loss_fn, optimizer))(init_train_state(params, optimizer), batch)
        assert_equal_trees(found, expected, 1e-12)
        moved = np.abs(np.asarray(found[0].params.stages["k"]) - params.stages["k"]).max(axis=(1, 2))
        assert (moved > 1e-3).all()


def test_a_stage_may_loop_from_a_constant_and_branch_to_one():
    """What a recurrent network does: a carry of zeros, and a branch that doesn't depend on the input."""

    def recurrent(own, x, microbatch):
        def cell(h, row):
            h = jnp.tanh(h + row @ own["k"])
            return h, h

        rows = jax.lax.scan(cell, jnp.zeros(x.shape[1:]), x)[1]
        return x + jax.lax.cond(jnp.sum(rows) > 0, lambda: rows, lambda: jnp.zeros_like(rows))

    looping = STAGES._replace(stage=recurrent)
    mesh, optimizer = mesh_of(2, 2), optax.sgd(0.1)
    with jax.enable_x64(True):
        params, batch = make_params(2), make_rows(4, num_dummies=3)
        step = jax.jit(make_pipeline_train_step(looping, optimizer, mesh=mesh))
        found = step(init_train_state(place_stages(params, mesh), optimizer), batch)

        def unsplit(params, microbatch):
            x = looping.embed(params.ends, microbatch)
            for s in range(2):
                x = looping.stage({"k": params.stages["k"][s]}, x, microbatch)
            return looping.loss(params.ends, x, microbatch)

        expected = jax.jit(make_train_step(unsplit, optimizer))(init_train_state(params, optimizer), batch)
        assert_equal_trees(found, expected, 1e-12)


def packed_rows(num_microbatches):
    bucket = Bucket(2, 12)
    dataset = random_dataset(num_microbatches * bucket.rows * 2 - 1, bucket.length)
    samples = pack_samples(np.diff(dataset.offsets), (bucket.length,))
    plan = make_plan(samples, [bucket], microbatches_per_step=num_microbatches)
    return next(iter(load(plan, dataset, collate=pack_to_bucket)))


def model_gradients(params, batch):
    """Sums and gradients of the unsplit model, one microbatch after the other."""
    batch = jax.tree.map(np.asarray, batch)
    microbatches = (
        jax.tree.map(lambda leaf, i=i: leaf[i] if leaf.ndim else leaf, batch) for i in range(len(batch.tokens))
    )
    of_each = [MODEL_GRADIENTS(params, microbatch) for microbatch in microbatches]
    return jax.tree.map(lambda *leaves: sum(map(np.asarray, leaves)), *of_each)


def test_the_transformer_in_stages_is_the_transformer():
    """Two blocks a stage, and samples side by side."""
    num_stages, batch = 2, packed_rows(4)
    mesh = mesh_of(1, num_stages)
    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, initial_params())
        staged = place_stages(split_stages(params, num_stages), mesh)
        loss_fn = make_pipeline_loss_fn(make_stages(MODEL), mesh=mesh)
        sums, grads = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(staged, batch)
        found = sums, stack_layers(merge_stages(grads))
        assert_equal_trees(found, model_gradients(stack_layers(params), batch), 1e-12)


def test_stages_are_merged_to_what_was_split():
    merged = merge_stages(split_stages(initial_params(), 2))
    assert jax.tree.structure(merged) == jax.tree.structure(initial_params())
    assert_equal_trees(merged, initial_params(), 0)
    with pytest.raises(ValueError, match="must divide the 4 blocks, and 3 does not"):
        split_stages(initial_params(), 3)


@pytest.mark.slow
def test_a_plan_is_trained_on_as_without_stages_and_nothing_is_compiled_again():
    dataset = random_dataset(23, 12)
    plan = make_plan(np.diff(dataset.offsets), [(2, 12)], order="shuffle", microbatches_per_step=4)
    model = TransformerConfig(num_layers=2, width=16, num_heads=1)
    params = jax.tree.map(np.asarray, init_params(model, seed=0))
    optimizer, mesh = optax.chain(optax.sgd(0.1, momentum=0.9), scale_by_batch_size(8)), mesh_of(2, 2)
    staged = init_train_state(place_stages(split_stages(params, 2), mesh), optimizer)
    step = make_pipeline_train_step(make_stages(model), optimizer, mesh=mesh)
    compiled = compile_buckets(step, staged, plan, mesh=mesh, progress=False)
    unsplit = init_train_state(params, optimizer)
    unsplit_step = compile_buckets(make_train_step(make_loss_fn(model), optimizer), unsplit, plan, progress=False)

    in_blocks, all_bytes = (
        sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in (staged.params.stages, staged.params)
    )
    held = in_blocks // 2 + all_bytes - in_blocks  # half of the blocks, and the ends
    of_device = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(staged.params))
    assert of_device == held
    saved = min(row.argument_bytes for row in unsplit_step.ledger) - min(row.argument_bytes for row in compiled.ledger)
    assert saved >= 2 * in_blocks // 2  # parameters and momentum

    losses, unsplit_losses = [], []
    for batch, same in zip(load(plan, dataset, mesh=mesh), load(plan, dataset), strict=True):
        with no_recompiles() if losses else no_recompiles("count"):
            staged, metrics = compiled(staged, batch)
        unsplit, unsplit_metrics = unsplit_step(unsplit, same)
        assert float(metrics.num_tokens) == float(unsplit_metrics.num_tokens)
        losses.append(float(metrics.loss))
        unsplit_losses.append(float(unsplit_metrics.loss))
    assert len(losses) > 2
    np.testing.assert_allclose(losses, unsplit_losses, rtol=1e-5)


@pytest.mark.parametrize("rematerialize", [False, True])
def test_dummy_rows_and_microbatches_contribute_nothing(rematerialize):
    mesh = mesh_of(1, 2)
    sums_of = make_pipeline_loss_fn(STAGES, mesh=mesh, rematerialize=rematerialize)
    loss_fn = jax.jit(jax.value_and_grad(sums_of, has_aux=True))
    with jax.enable_x64(True):
        params, batch = place_stages(make_params(2), mesh), make_rows(2)
        more = Rows(
            np.concatenate([batch.x, np.full((1, 6, 3), 1e3)]), np.concatenate([batch.weights, np.zeros((1, 6))]), 12.0
        )
        assert_equal_trees(loss_fn(params, more), loss_fn(params, batch), 1e-12)


def test_a_step_of_dummies_gives_zero_and_changes_nothing():
    mesh, optimizer = mesh_of(1, 2), optax.sgd(0.1)
    params = make_params(2, dtype=np.float32)
    batch = make_rows(3, num_dummies=18, dtype=np.float32)
    step = jax.jit(make_pipeline_train_step(STAGES, optimizer, mesh=mesh))
    state, metrics = step(init_train_state(place_stages(params, mesh), optimizer), batch)
    assert float(metrics.loss) == 0
    assert_equal_trees(state.params, params, 0)


def test_idle_ticks_do_not_reach_the_gradient():
    """The root of 0, which idle stages would see, has an infinite derivative."""
    stages = Stages(
        lambda ends, microbatch: microbatch * ends,
        lambda own, x, microbatch: own * jnp.sqrt(x),
        lambda ends, x, microbatch: (jnp.sum(x), jnp.float32(microbatch.size)),
    )
    mesh = mesh_of(1, 4)
    params = place_stages(StagedParams(jnp.float32(2), jnp.full((4, 1), 3.0)), mesh)
    batch = jnp.arange(1.0, 7).reshape(2, 3)
    sums, grads = jax.jit(jax.value_and_grad(make_pipeline_loss_fn(stages, mesh=mesh), has_aux=True))(params, batch)

    def unsplit(params):
        x = batch * params.ends
        for s in range(4):
            x = params.stages[s] * jnp.sqrt(x)
        return jnp.sum(x), jnp.float32(6)

    expected = jax.jit(jax.value_and_grad(unsplit, has_aux=True))(jax.tree.map(np.asarray, params))
    assert_equal_trees((sums, grads), expected, 1e-5)


def scan_lengths(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn.params["length"]
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda value: hasattr(value, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from scan_lengths(inner)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 3), (4, 2)])
def test_the_share_of_idle_ticks_is_the_bubble(num_stages, num_microbatches):
    """Counted: the ticks of the program, and how often its stages ran, forward and backward."""
    ran = []

    def note(name, x):
        def noted(x):
            ran.append(name)
            return np.zeros(x.shape, x.dtype)

        return x + jax.pure_callback(noted, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    @jax.custom_vjp
    def work(x):
        return note("forward", x)

    work.defvjp(lambda x: (note("forward", x), None), lambda _, grad: (note("backward", grad),))
    stages = Stages(
        lambda ends, microbatch: ends * microbatch,
        lambda own, x, microbatch: own + work(x),
        lambda ends, x, microbatch: (jnp.sum(x), jnp.float32(1)),
    )
    mesh = mesh_of(1, num_stages)
    params = place_stages(StagedParams(jnp.float32(1), jnp.zeros((num_stages, 1))), mesh)
    step = jax.value_and_grad(make_pipeline_loss_fn(stages, mesh=mesh), has_aux=True)
    batch = jnp.ones((num_microbatches, 2))
    jax.block_until_ready(jax.jit(step)(params, batch))
    num_ticks = max(scan_lengths(jax.make_jaxpr(step)(params, batch).jaxpr))
    assert ran.count("forward") == ran.count("backward") == num_stages * num_microbatches
    idle = 1 - len(ran) / (num_stages * num_ticks)
    assert idle == pytest.approx(bubble_fraction(num_stages, num_microbatches))


def test_the_bubble_is_counted_in_a_table_of_the_schedule():
    for num_stages in range(1, 6):
        for num_microbatches in range(1, 8):
            ticks = range(num_microbatches + num_stages - 1)
            idle = [not 0 <= t - s < num_microbatches for t in ticks for s in range(num_stages)]
            assert bubble_fraction(num_stages, num_microbatches) == pytest.approx(np.mean(idle))
    with pytest.raises(ValueError, match="num_microbatches"):
        bubble_fraction(2, 0)


def test_memory_grows_with_stages_and_not_with_microbatches_or_parameters():
    """A stage keeps two activations of a microbatch, of three at most, and those of a tick are there besides."""
    mesh, optimizer = mesh_of(1, 2), optax.sgd(0.1)
    params = make_params(2, width=128, dtype=np.float32)
    state = init_train_state(place_stages(params, mesh), optimizer)

    def temp_bytes(num_microbatches, rematerialize):
        step = make_pipeline_train_step(STAGES, optimizer, mesh=mesh, rematerialize=rematerialize)
        lowered = jax.jit(step).lower(state, make_rows(num_microbatches, dtype=np.float32))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    received_bytes, stage_bytes = 6 * 128 * 4, 128 * 128 * 4
    kept = temp_bytes(18, False)
    assert abs(kept - temp_bytes(4, False)) < received_bytes
    assert 0 < kept - temp_bytes(2, False) < 3 * received_bytes
    assert 3 * received_bytes < kept - temp_bytes(18, True) < 12 * received_bytes < stage_bytes


def test_gradients_are_reduced_outside_the_loops():
    mesh, optimizer = mesh_of(2, 2), optax.sgd(0.1)
    state = init_train_state(place_stages(make_params(2, dtype=np.float32), mesh), optimizer)
    step = jax.jit(make_pipeline_train_step(STAGES, optimizer, mesh=mesh))
    counts = count_collectives(step.lower(state, make_rows(8, dtype=np.float32)).compile())
    assert counts["all-reduce"].per_step >= 1
    assert counts["all-reduce"].in_loops == 0
    assert counts["collective-permute"].in_loops == 2  # to the next stage, and back
    assert counts.keys() == {"all-reduce", "collective-permute"}


def test_gradients_of_bfloat16_are_summed_in_float32():
    """In bfloat16, 256 + 1 is 256."""
    stages = Stages(
        lambda ends, microbatch: microbatch,
        lambda own, x, microbatch: x * own,
        lambda ends, x, microbatch: (jnp.sum(x), jnp.float32(1)),
    )
    mesh = mesh_of(1, 2)
    params = place_stages(StagedParams((), jnp.ones((2,), jnp.bfloat16)), mesh)
    step = jax.jit(jax.value_and_grad(make_pipeline_loss_fn(stages, mesh=mesh), has_aux=True))
    (loss_sum, _), grads = step(params, jnp.ones((300, 1), jnp.bfloat16))
    assert grads.stages.dtype == jnp.bfloat16
    assert grads.stages.tolist() == [300, 300]
    assert float(loss_sum) == 300


def test_constants_travel_with_what_stages_give():
    """A sum that starts at 0 on the first stage, grows on every stage, and joins the loss on the last."""
    stages = Stages(
        lambda ends, microbatch: {"x": microbatch, "sum": jnp.zeros(())},
        lambda own, x, microbatch: {"x": x["x"] * own, "sum": x["sum"] + jnp.sum(x["x"])},
        lambda ends, x, microbatch: (jnp.sum(x["x"]) + x["sum"], jnp.float32(2)),
    )
    mesh = mesh_of(1, 2)
    params = place_stages(StagedParams((), jnp.array([2.0, 5.0])), mesh)
    loss_sum, weight_sum = jax.jit(make_pipeline_loss_fn(stages, mesh=mesh))(params, jnp.ones((3, 2)))
    assert float(loss_sum) == 3 * (2 * 10 + 2 + 4)
    assert float(weight_sum) == 6


def test_the_loss_may_be_a_part_of_another_function():
    mesh = mesh_of(1, 2)
    loss_fn = make_pipeline_loss_fn(STAGES, mesh=mesh)

    def mean_and_decay(params, loss_fn):
        loss_sum, weight_sum = loss_fn(params)
        return 3 * loss_sum / weight_sum + jnp.sum(params.stages["k"] ** 2)

    def unsplit(params):
        return jax.tree.map(jnp.sum, jax.vmap(unsplit_loss_fn, (None, Rows(0, 0, None)))(params, batch))

    with jax.enable_x64(True):
        params, batch = make_params(2), make_rows(3)
        found = jax.jit(jax.grad(lambda params: mean_and_decay(params, lambda params: loss_fn(params, batch))))(params)
        expected = jax.jit(jax.grad(lambda params: mean_and_decay(params, unsplit)))(params)
        assert_equal_trees(found, expected, 1e-12)


def test_evaluation_sums_what_training_sums():
    mesh = mesh_of(2, 2)
    params, batch = make_params(2, dtype=np.float32), make_rows(4, num_dummies=2, dtype=np.float32)
    kept, metrics = jax.jit(make_pipeline_eval_step(STAGES, mesh=mesh))(place_stages(params, mesh), batch)
    _, expected = jax.jit(make_eval_step(unsplit_loss_fn))(params, batch)
    assert_equal_trees(metrics, expected, 1e-5)
    assert_equal_trees(kept, params, 0)


def test_what_does_not_fit_the_mesh_is_refused():
    mesh = mesh_of(2, 2)
    loss_fn = make_pipeline_loss_fn(STAGES, mesh=mesh)
    with pytest.raises(ValueError, match=r"the mesh has 2 stages.*'k'.*\(4, 5, 5\)"):
        place_stages(make_params(4), mesh)
    with pytest.raises(ValueError, match=r"the mesh has 2 stages.*'k'.*\(4, 5, 5\)"):
        jax.eval_shape(loss_fn, make_params(4), make_rows(2))
    with pytest.raises(ValueError, match="3 microbatches a step do not spread over 2 shards"):
        jax.eval_shape(loss_fn, make_params(2), make_rows(3))
    with pytest.raises(ValueError, match="no 'stage'"):
        make_pipeline_loss_fn(STAGES, mesh=data_mesh(2))
    with pytest.raises(ValueError, match="must divide the 8 devices, and 3 does not"):
        pipeline_mesh(3)
    with pytest.raises(ValueError, match="num_devices must be between 1 and 8, not 16"):
        pipeline_mesh(2, 16)


def test_a_stage_that_gives_something_else_than_it_takes_is_refused():
    stages = STAGES._replace(stage=lambda own, x, microbatch: x[:, :2])
    loss_fn = make_pipeline_loss_fn(stages, mesh=mesh_of(1, 2))
    with pytest.raises(
        ValueError, match=r"must return x with the shapes and dtypes that it takes: x: float32\[6,5\] -> float32\[6,2\]"
    ):
        jax.eval_shape(loss_fn, make_params(2, dtype=np.float32), make_rows(1, dtype=np.float32))
