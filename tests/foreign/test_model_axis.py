"""Parameters sharded over a second mesh axis, as Megatron shards them: by the compiler or by the loss."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jvarlen import CompileOptions, compile_buckets, make_train_step
from jvarlen.batches import BatchShapes
from jvarlen.targets.compile_for import compile_for
from jvarlen.targets.target import Target
from tests.support.collectives import Collectives

from .harness import (
    Model,
    assert_same_course,
    random_params,
    random_rows,
    squared,
    train,
    train_plainly,
    unequal_weights,
)

D, HIDDEN = 8, 64
SPECS = {"column": PartitionSpec(None, "model"), "row": PartitionSpec("model", None), "bias": PartitionSpec()}


def left_to_the_compiler(params, batch):
    return squared(jnp.tanh(batch["x"] @ params["column"]) @ params["row"] + params["bias"], batch)


def with_a_constraint(params, batch):
    hidden_BxH = jnp.tanh(batch["x"] @ params["column"])
    hidden_BxH = jax.lax.with_sharding_constraint(hidden_BxH, PartitionSpec(None, "model"))
    return squared(hidden_BxH @ params["row"] + params["bias"], batch)


def by_a_nested_shard_map(params, batch):
    """Over "model" alone; the mesh is the one around it."""
    outputs_BxD = jax.shard_map(
        lambda x_BxD, column, row: jax.lax.psum(jnp.tanh(x_BxD @ column) @ row, "model"),
        in_specs=(PartitionSpec(), SPECS["column"], SPECS["row"]),
        out_specs=PartitionSpec(),
        axis_names={"model"},
    )(batch["x"], params["column"], params["row"])
    return squared(outputs_BxD + params["bias"], batch)


def make_mesh(num_shards, axis_type):
    devices = jax.devices()[: 2 * num_shards]
    return jax.make_mesh((num_shards, 2), ("data", "model"), axis_types=(axis_type,) * 2, devices=devices)


def make_model(loss_fn, mesh=None):
    batch = {"x": random_rows(D), "y": random_rows(D, seed=1), "weights": unequal_weights()}
    params = random_params(column=(D, HIDDEN), row=(HIDDEN, D), bias=(D,))
    if mesh is not None:
        params = {name: jax.device_put(leaf, NamedSharding(mesh, SPECS[name])) for name, leaf in params.items()}
    return Model(loss_fn, params, batch)


@functools.cache
def trained_plainly():
    return train_plainly(make_model(left_to_the_compiler))


@functools.cache
def trained_whole(num_shards):
    return train(make_model(left_to_the_compiler), num_shards)


@pytest.mark.parametrize(("loss_fn", "num_shards"), [(with_a_constraint, 2), (by_a_nested_shard_map, 4)])
def test_sharded_parameters_train_as_in_a_plain_loop_and_halve_the_operations(loss_fn, num_shards):
    with jax.enable_x64(True):
        expected, whole = trained_plainly(), trained_whole(num_shards)
        for axis_type in (AxisType.Auto, AxisType.Explicit)[: 1 + (num_shards == 2)]:
            mesh = make_mesh(num_shards, axis_type)
            trained = train(make_model(loss_fn, mesh), mesh)
            assert_same_course(trained.course, expected)
            for name, leaf in trained.course.params.items():
                assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, SPECS[name]), leaf.ndim)
            # Small arrays count here: whole ones are tested for what is finite together, by rows.
            assert 0.42 < trained.flops / whole.flops < 0.53
            # Over "model" once a microbatch, over "data" once a step; and what is finite.
            assert trained.collectives == {"all-reduce": Collectives(2, 1)}


def test_a_loss_may_name_a_second_axis_of_one_device():
    with jax.enable_x64(True):
        mesh = jax.make_mesh((2, 1), ("data", "model"), devices=jax.devices()[:2])
        assert_same_course(train(make_model(with_a_constraint, mesh), mesh).course, trained_plainly())


def test_shapes_lie_as_arrays_do():
    optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=8)
    mesh = make_mesh(2, AxisType.Auto)
    model = make_model(left_to_the_compiler, mesh)
    step = make_train_step(model.loss_fn, optimizer, layout=mesh)
    arrays = step.init(model.params)
    shapes = step.init(
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), model.params)
    )
    for shape, array in zip(jax.tree.leaves(shapes), jax.tree.leaves(arrays), strict=True):
        assert shape.sharding.is_equivalent_to(array.sharding, array.ndim)
    batches = BatchShapes(
        [(1, 1)], num_microbatches=8, layout=mesh, batch_spec=lambda *_: model.batch, has_many_groups=False
    )
    target = Target("some", tuple(mesh.devices.flat), None, is_here=True)
    how = {"layout": mesh, "params": model.params, "progress": False}
    [row] = compile_for(model.loss_fn, optimizer, batches, target=target, **how)
    compiled = compile_buckets(step, arrays, batches, options=CompileOptions(cache_dir=None), progress=False)
    assert row.argument_bytes == compiled.report[0].argument_bytes
    assert row.flops is None, "what the compiler splits, the trace shows whole"
