"""ZeRO: the numbers of the unsharded step on every level, state in shards, and what is communicated."""

import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import PartitionSpec

from jvarlen import CompileOptions, compile_buckets, load, make_eval_step, make_plan, make_train_step, no_recompiles
from jvarlen.batches import BatchShapes
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.placement import place
from jvarlen.estimates.hlo import list_collectives
from jvarlen.models import DecoderConfig, init_params, layered
from jvarlen.parallel import device_layers
from jvarlen.parallel.evaluation import make_eval_step as make_layout_eval_step
from jvarlen.parallel.layers import LayeredModel, LayeredParams, layered_loss_fn
from jvarlen.parallel.state_layout import StateLayout
from jvarlen.parallel.train import make_train_step as make_layout_step
from jvarlen.parallel.zero import shard_specs
from jvarlen.training.train_state import new_state
from tests.conftest import random_dataset
from tests.parallel import run_zero
from tests.parallel.steps import assert_equal_trees, batches_of, clipped_adamw, initial_params, take_steps
from tests.support import processes
from tests.support.collectives import count_collectives

MODEL = DecoderConfig(num_layers=2, width=24, num_heads=2, windows=(0, 3))

# Weights that 2, 4 and 8 divide, a bias that is too small for shards, and a table that nothing divides.
SIMPLE = LayeredModel(
    lambda ends, microbatch, axes: (microbatch @ ends["odd"])[:, :64],
    lambda own, x, microbatch, axes: x + jnp.tanh(x @ own["k"] + own["b"]),
    lambda ends, x, microbatch, axes: (jnp.sum(jnp.square(x @ ends["out"] - microbatch)), jnp.float32(x.shape[0])),
)

# The same of the tokens of a batch.
TOKENS = SIMPLE._replace(
    embed=lambda ends, batch, axes: ends["table"][batch.tokens],
    loss=lambda ends, x, batch, axes: (
        jnp.sum(optax.softmax_cross_entropy_with_integer_labels(x @ ends["table"].T, batch.tokens) * batch.weights),
        jnp.sum(batch.weights),
    ),
)


def simple_params(dtype=np.float64):
    rng = np.random.default_rng(0)
    ends = {"odd": rng.normal(size=(15, 75)) / 8, "out": rng.normal(size=(64, 15)) / 8}
    layers = {"k": rng.normal(size=(3, 64, 64)) / 8, "b": rng.normal(size=(3, 64))}
    return jax.tree.map(lambda leaf: leaf.astype(dtype), LayeredParams(ends, layers))


def simple_batch(num_microbatches=4, dtype=np.float64):
    return np.random.default_rng(1).normal(size=(num_microbatches, 5, 15)).astype(dtype)


def on_layout(model, params, optimizer, text, **options):
    layout = Layout.parse(text)
    step = make_layout_step(model, optimizer, layout=layout)
    return step, step.init(params, **options), {"layout": layout}


def shardings_of(state):
    return jax.tree.map(lambda leaf: leaf.sharding.spec, state)


def state_bytes(tree):
    """Bytes on the fullest device, and of the whole arrays."""
    leaves = jax.tree.leaves(tree)
    on_device = {}
    for leaf in leaves:
        for shard in leaf.addressable_shards:
            on_device[shard.device] = on_device.get(shard.device, 0) + shard.data.nbytes
    return max(on_device.values()), sum(leaf.nbytes for leaf in leaves)


def matrices_only(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 2, params)


OPTIMIZERS = {
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1, mask=matrices_only),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=16, clipping_threshold=0.1),
    "polyak_sgd": lambda: optax.polyak_sgd(max_learning_rate=0.1),  # is told the loss of the step
    "schedule_free": lambda: optax.contrib.schedule_free(optax.adam(1e-2), learning_rate=1e-2),  # holds parameters
}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lamb", "data4.zero2"),
        ("adafactor", "data4.zero3"),
        ("polyak_sgd", "data2.zero3"),
        ("schedule_free", "data4.zero1"),
    ],
)
def test_any_optimizer_sees_whole_arrays(name, text):
    optimizer = OPTIMIZERS[name]()
    with jax.enable_x64(True):
        whole = jax.jit(make_train_step(layered_loss_fn(SIMPLE), optimizer))
        expected, expected_losses = take_steps(whole, new_state(simple_params(), optimizer), [simple_batch()], 5)
        step, state, on = on_layout(SIMPLE, simple_params(), optimizer, text)
        placed = shardings_of(state)
        state, losses = take_steps(jax.jit(step, donate_argnums=0), state, [simple_batch()], 5)
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-9)
        assert losses[-1] < losses[0]
        assert_equal_trees(step.gather_params(state), expected.params, 1e-9)
        whole_state = jax.jit(StateLayout(on["layout"], None).unpad)(state)
        assert_equal_trees(whole_state.opt_state, expected.opt_state, 1e-9)
        assert shardings_of(state) == placed


def test_what_is_gathered_first_changes_no_number(monkeypatch):
    config, found = DecoderConfig(num_layers=3, width=48, num_heads=2), []
    for most_bytes, num_arrays in ((2**20, 7), (150_000, 5), (0, 1)):  # the 5th is one of three of a size
        monkeypatch.setattr(device_layers, "_EARLY_BYTES", most_bytes)
        with jax.enable_x64(True):
            step, state, on = on_layout(layered(config), initial_params(config), clipped_adamw(), "data4.zero3")
            lowered = jax.jit(step).lower(state, batches_of(8)[0])
            state, losses = take_steps(lowered.compile(), state, batches_of(8)[:1], 2)
            _, metrics = jax.jit(make_layout_eval_step(layered(config), **on))(state, batches_of(8)[0])
        gathers = re.findall(r'all_gather"?\(.*', lowered.as_text())
        found.append((losses, float(metrics.loss), step.gather_params(state)))
        assert sum("force_delay_async" in gather for gather in gathers) == 2 * num_arrays, "forward and backward"
    for each in found[1:]:
        assert_equal_trees(each, found[0], 1e-12)


def noisy_loss(ends, x, microbatch, axes):
    noise = jax.random.normal(axes.key, x.shape)
    loss_sum, weight_sum = SIMPLE.loss(ends, x + 0.1 * noise, microbatch, axes)
    return loss_sum, weight_sum, {"squares": jnp.sum(x**2)}


def noisy_layer(own, x, microbatch, axes):
    return SIMPLE.layer(own, x * jax.random.bernoulli(axes.key, 0.9, x.shape), microbatch, axes)


NOISY = SIMPLE._replace(layer=noisy_layer, loss=noisy_loss)


@functools.cache
def noisy_step_on_one_device():
    optimizer = optax.sgd(1e-3)
    with jax.enable_x64(True):
        whole = jax.jit(make_train_step(layered_loss_fn(NOISY), optimizer, norms=True))
        return whole(new_state(simple_params(), optimizer, seed=3), simple_batch())


@pytest.mark.parametrize("zero", [1, 3])
def test_keys_extra_state_sums_and_norms_are_those_of_one_device(zero):
    model, optimizer = NOISY, optax.sgd(1e-3)
    expected, expected_metrics = noisy_step_on_one_device()
    layout = Layout(data=2, zero=zero)
    with jax.enable_x64(True):
        step = make_layout_step(model, optimizer, layout=layout, norms=True)
        state, metrics = jax.jit(step)(step.init(simple_params(), seed=3), simple_batch())
        assert_equal_trees(metrics, expected_metrics, 1e-12)
        assert float(metrics.sums["squares"]) > 1
        assert_equal_trees(state.params, expected.params, 1e-12)
        assert int(state.step) == 1
        assert jax.random.key_data(state.key).tolist() == jax.random.key_data(expected.key).tolist()


def test_shards_lie_along_the_first_dimension_that_divides():
    params = {
        "wide": np.zeros((64, 96)),
        "tall": np.zeros((96, 64)),
        "square": np.zeros((64, 64)),
        "odd": np.zeros((128, 257)),
        "late": np.zeros((257, 128)),
        "prime": np.zeros((257, 257)),
        "small": np.zeros(1020),
        "scalar": np.zeros(()),
        "deep": np.zeros((8, 2, 128)),
    }
    whole, rows, columns = PartitionSpec(), PartitionSpec("data"), PartitionSpec(None, "data")
    assert shard_specs(params, Layout(data=4)) == {
        "wide": rows,
        "tall": rows,
        "square": rows,
        "odd": rows,
        "late": columns,
        "prime": rows,
        "small": whole,
        "scalar": whole,
        "deep": rows,
    }
    assert shard_specs(params, Layout(data=4), padded=False)["prime"] == whole
    assert shard_specs(params, Layout(data=3), padded=False) == dict.fromkeys(params, whole) | {
        "wide": columns,
        "tall": rows,
    }
    assert shard_specs(params, Layout(data=300)) == dict.fromkeys(params, whole)  # nothing has so many elements
    assert shard_specs(params, Layout(data=100))["wide"] == whole
    assert shard_specs(params, Layout(data=90))["wide"] == columns
    both = PartitionSpec(("data", "context"))
    assert shard_specs(params, Layout(data=2, context=2))["wide"] == both
    stacked = LayeredParams(np.zeros((1024, 3)), {"w": np.zeros((2048, 32, 32)), "scale": np.zeros((64, 1000))})
    specs = LayeredParams(rows, {"w": PartitionSpec(None, "data"), "scale": whole})
    assert shard_specs(stacked, Layout(data=4)) == specs  # never along the layers, and a layer's own size counts


def test_state_takes_its_share_of_bytes():
    model = DecoderConfig(num_layers=2, width=64, num_heads=2)
    params = init_params(model, seed=0)
    for zero in range(4):
        _, state, _ = on_layout(layered(model), params, optax.adamw(1e-2), f"data4.zero{zero}")
        (params_held, params_bytes), (held, whole) = state_bytes(state.params), state_bytes(state.opt_state)
        assert whole > 2 * params_bytes
        # Norms are whole everywhere, and are few.
        assert held <= 0.26 * whole if zero else held == whole
        assert params_held <= 0.26 * params_bytes if zero == 3 else params_held == params_bytes


@pytest.mark.parametrize("zero", [0, 3])
def test_parameters_are_gathered_as_they_were_given(zero):
    stacked = initial_params(MODEL, np.float32)
    kept = jax.tree.map(np.array, stacked)
    layout = Layout(data=4, zero=zero) if zero else Layout(data=4)
    step = make_layout_step(layered(MODEL), optax.sgd(0.1), layout=layout)
    state = step.init(stacked)
    gathered = step.gather_params(state)
    assert jax.tree.structure(gathered) == jax.tree.structure(kept)
    assert_equal_trees(gathered, kept, 0)
    jax.tree.map(lambda leaf: leaf.delete(), state.params)  # as a step that donates it
    assert_equal_trees(gathered, kept, 0)


def collectives_of(text, num_microbatches=8):
    step, state, _ = on_layout(SIMPLE, simple_params(np.float32), optax.adamw(1e-2), text)
    executable = jax.jit(step, donate_argnums=0).lower(state, simple_batch(num_microbatches, np.float32)).compile()
    return count_collectives(executable), executable.as_text()


def reduced_elements(text, kind):
    """Elements of each array that collectives of a kind give."""
    for line in text.splitlines():
        shapes, found, _ = line.partition(f" {kind}(")
        if found:
            for shape in shapes.split(" = ", 1)[1].split("f32[")[1:]:
                yield int(np.prod([int(size) for size in shape.split("]")[0].split(",") if size]))


@pytest.mark.parametrize(("zero", "in_loops"), [(1, False), (2, True)])
def test_gradients_are_reduced_to_shards_once_or_in_each_microbatch(zero, in_loops):
    counts, text = collectives_of(f"data4.zero{zero}")
    assert counts["all-reduce"] == (2, 0)  # of sums, and of whether gradients are finite
    # Those of the layers are in a loop over layers, which is in that over microbatches or after it.
    assert counts["reduce-scatter"] == ((0, 2) if in_loops else (1, 1))
    assert counts["all-gather"] == (1, 1)
    odd, layer = 15 * 76, 64 * 64  # 75 padded to 76
    assert sorted(reduced_elements(text, "reduce-scatter")) == [odd // 4, layer // 4]
    assert sorted(reduced_elements(text, "all-gather")) == [odd, layer]
    assert max(reduced_elements(text, "all-reduce")) == 64 * 15  # the largest array that is whole


def test_the_third_level_gathers_each_layer_forward_and_backward():
    counts, text = collectives_of("data4.zero3")
    assert counts["all-gather"] == (2, 2)  # the first layer of a step before the loop over microbatches
    assert sorted(reduced_elements(text, "all-gather")) == [15 * 76] + 3 * [64 * 64]  # one layer at a time
    assert counts["reduce-scatter"] == (0, 1)
    assert list(reduced_elements(text, "reduce-scatter")) == [64 * 64 // 4]
    assert counts["all-reduce"].in_loops == 0


def test_gradients_of_bfloat16_shards_are_summed_in_float32():
    """256 + 1 is 256 in bfloat16."""
    model = LayeredModel(
        lambda ends, microbatch, axes: jnp.zeros((), jnp.bfloat16),
        lambda own, x, microbatch, axes: x + jnp.sum(own) * microbatch,
        lambda ends, x, microbatch, axes: (x, jnp.float32(1 / 8)),
    )
    params = LayeredParams((), jnp.zeros((1, 1024), jnp.bfloat16))
    step, state, _ = on_layout(model, params, optax.sgd(1.0), "data8.zero3")
    batch = jnp.array([256, 1, 1, 1, 1, 1, 1, 1], jnp.bfloat16)
    state, _ = jax.jit(step)(state, batch)
    assert set(state.params.layers.ravel().tolist()) == {-264.0}  # 263, rounded once


def test_a_plan_is_trained_on_and_nothing_is_compiled_again():
    dataset = random_dataset(25, 12)
    plan = make_plan(np.diff(dataset.offsets), [(2, 12)], order="shuffle", num_microbatches=4)
    optimizer = clipped_adamw()
    params = LayeredParams({"table": np.random.default_rng(0).normal(size=(256, 64)) / 4}, simple_params().layers)
    params = jax.tree.map(np.float32, params)
    whole, expected = new_state(params, optimizer), []
    whole_step = compile_buckets(make_train_step(layered_loss_fn(TOKENS), optimizer), whole, plan, progress=False)
    for batch in load(plan, dataset):
        whole, metrics = whole_step(whole, batch)
        expected.append(float(metrics.loss))
    assert len(expected) > 3
    step, state, on = on_layout(TOKENS, params, optimizer, "data4.zero3")
    placed, losses = shardings_of(state), []
    compiled = compile_buckets(step, state, plan, progress=False)
    for batch in load(plan, dataset, layout=on["layout"]):
        with no_recompiles() if losses else no_recompiles("count"):
            given, (state, metrics) = state, compiled(state, batch)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given.opt_state[1]))
        assert shardings_of(state) == placed
        losses.append(float(metrics.loss))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert count_collectives(compiled.program_text(plan.buckets.shapes[0])).keys() == {
        "all-reduce",
        "all-gather",
        "reduce-scatter",
    }


@functools.cache
def simple_step_on_one_device():
    with jax.enable_x64(True):
        whole = jax.jit(make_train_step(layered_loss_fn(SIMPLE), optax.adamw(1e-2)))
        return whole(new_state(simple_params(), optax.adamw(1e-2)), simple_batch(8))


@pytest.mark.parametrize("zero", [1, 2])
def test_gradient_buckets_do_not_change_the_step(zero):
    bucket, optimizer = (5, 15), optax.adamw(1e-2)
    batch = simple_batch(8)
    spec = jax.ShapeDtypeStruct(batch.shape, batch.dtype)
    expected, expected_metrics = simple_step_on_one_device()
    with jax.enable_x64(True):
        step, state, _ = on_layout(SIMPLE, simple_params(), optimizer, f"data4.zero{zero}.grad_bucket_bytes{2**14}")
        compiled = compile_buckets(
            step,
            state,
            BatchShapes([bucket], num_microbatches=8, batch_spec=lambda *_: spec, has_many_groups=False),
            progress=False,
            options=CompileOptions(cache_dir=None),
        )
        state, metrics = compiled(state, batch)
        np.testing.assert_allclose(metrics.loss, expected_metrics.loss, rtol=1e-12)
        assert_equal_trees(step.gather_params(state), expected.params, 1e-12)
        in_loops = count_collectives(compiled.program_text(bucket)).get("reduce-scatter", (0, 0))[1]
        assert in_loops == zero


def test_what_cannot_be_spread_is_refused_by_name():
    optimizer, params = optax.sgd(0.1), simple_params(np.float32)
    for each in (Layout(data=2, zero=3), Layout(data=1)):
        with pytest.raises(ValueError, match="takes LayeredParams, not a dict"):
            make_layout_step(SIMPLE, optimizer, layout=each).init({"w": np.ones((64, 64))})
    step, state, _ = on_layout(SIMPLE, params, optimizer, "data2.zero3")
    with pytest.raises(ValueError, match="3 microbatches a step do not spread over 2 shards"):
        jax.eval_shape(step, state, simple_batch(3, np.float32))


@pytest.mark.parametrize("text", ["data2", "data4.zero3", "data1.stage3"])
def test_evaluation_steps_gather_layer_by_layer_and_drop_nothing_out(text):
    layout, params = Layout.parse(text), simple_params(np.float32)
    on = {"layout": layout}
    keys = []
    model = SIMPLE._replace(layer=lambda *args: keys.append(args[-1].key) or SIMPLE.layer(*args))
    state = make_layout_step(SIMPLE, optax.adam(1e-2), **on).init(params, seed=0)
    batch = simple_batch(dtype=np.float32)
    _, expected = jax.jit(make_eval_step(layered_loss_fn(SIMPLE)))(params, batch)
    step = jax.jit(make_layout_eval_step(model, **on)).lower(state, batch).compile()
    assert_equal_trees(step(state, batch)[1], expected, 1e-5)
    assert {*keys} == {None}
    in_loop = any(
        each.kind == "all-gather" and each.times > len(batch) // layout.data
        for each in list_collectives(step.as_text())
    )
    assert in_loop == (layout.zero == 3)


def counting():
    """An optimizer that counts elements, and divides by their number: padding would show."""

    def update(grads, state, params=None):
        count = sum(leaf.size for leaf in jax.tree.leaves(grads))
        moments = jax.tree.map(lambda moment, grad: 0.9 * moment + grad + 1.0, state["moments"], grads)
        total = sum(jnp.sum(moment) for moment in jax.tree.leaves(moments))
        return jax.tree.map(lambda moment: -1e-4 * moment * total / count, moments), {"moments": moments}

    return optax.GradientTransformation(lambda params: {"moments": jax.tree.map(jnp.zeros_like, params)}, update)


@functools.cache
def counted_on_one_device():
    with jax.enable_x64(True):
        whole = jax.jit(make_train_step(layered_loss_fn(SIMPLE), counting()))
        return take_steps(whole, new_state(simple_params(), counting()), [simple_batch(7)], 4)


@pytest.mark.parametrize("zero", [1, 3])
def test_a_number_that_divides_nothing_pads_the_state_and_not_the_optimizer(zero):
    expected, losses = counted_on_one_device()
    with jax.enable_x64(True):
        step, state, _ = on_layout(SIMPLE, simple_params(), counting(), f"data7.zero{zero}")
        moments = state.opt_state["moments"]
        assert moments.ends["odd"].shape == (15, 77)
        assert moments.layers["k"].addressable_shards[0].data.shape == (3, 10, 64)
        state, found_losses = take_steps(jax.jit(step, donate_argnums=0), state, [simple_batch(7)], 4)
        np.testing.assert_allclose(found_losses, losses, rtol=1e-12)
        assert_equal_trees(step.gather_params(state), expected.params, 1e-12)
        padding = np.asarray(state.opt_state["moments"].layers["k"])[:, 64:]
        assert padding.shape == (3, 6, 64)
        assert not padding.any()


def test_optimizers_that_keep_a_history_keep_it_in_shards():
    layout = Layout(data=4, zero=1)
    params = {"w": np.ones((64, 64), np.float32)}
    state = make_layout_step(layered_loss_fn(SIMPLE), optax.lbfgs(memory_size=3), layout=layout).init(params)
    on_fullest, whole = state_bytes(state.opt_state)
    assert whole > 8 * params["w"].nbytes
    assert on_fullest < 0.26 * whole


def test_what_cannot_be_trained_is_named():
    params = simple_params(np.float32)
    on = {"layout": Layout(data=2)}
    with pytest.raises(ValueError, match="a model by layers takes no extra"):
        make_layout_step(SIMPLE, optax.sgd(1.0), **on).init(params, extra={"mean": np.zeros(3)})
    params.ends["rng"] = jax.random.key(0)
    with pytest.raises(ValueError, match=r"parameters must be numbers, not \.ends\['rng'\] key"):
        make_layout_step(SIMPLE, optax.sgd(1.0), **on).init(params)


@pytest.mark.multiprocess
def test_processes_train_as_one():
    """Two processes of two devices each."""
    text = "data4.zero3"
    losses, squares, held = run_zero.train(text)
    for output in processes.run(Path(run_zero.__file__), 2, text, num_devices=2):
        found_losses, found_squares, found_held = json.loads(output.splitlines()[-1])
        np.testing.assert_allclose(found_losses, losses, rtol=1e-12)
        np.testing.assert_allclose(found_squares, squares, rtol=1e-12)
        assert found_held == held < 0.4
    assert len(losses) > 2


def test_a_mesh_of_one_axis_serves_a_layout_of_data():
    mesh, optimizer = jax.make_mesh((4,), ("rows",), devices=jax.devices()[:4]), optax.adam(1e-2)
    step = make_layout_step(SIMPLE, optimizer, layout=place(Layout(zero=2), mesh, axes={"data": "rows"}))
    state = step.init(simple_params(np.float32))
    assert state_bytes(state.opt_state)[0] < state_bytes(state.opt_state)[1]
    batch = simple_batch(dtype=np.float32)
    _, metrics = jax.jit(step)(state, jax.device_put(batch, step.placement.batch_shardings(batch)))
    whole = jax.jit(make_train_step(layered_loss_fn(SIMPLE), optimizer))
    _, expected = whole(new_state(simple_params(np.float32), optimizer), simple_batch(dtype=np.float32))
    np.testing.assert_allclose(metrics.loss, expected.loss, rtol=1e-5)


@pytest.mark.parametrize(
    ("text", "sizes", "axes", "left"),
    [
        ("data2.context2.zero3", None, None, set()),
        ("data1.stage2", None, None, set()),
        ("data4.zero1", {"data": 4, "tensor": 1}, None, set()),
        ("data4", {"data": 4, "model": 1}, {"data": "data"}, {"model"}),  # a loss may name it
    ],
)
def test_no_axis_of_a_layout_is_left_to_the_compiler(text, sizes, axes, left):
    """Nor for one device: kernels that `custom_partitioning` makes, such as cuDNN's, cannot be beside one."""
    layout, found = Layout.parse(text), []

    def loss_fn(ends, x, batch, on_axes):
        mesh = jax.sharding.get_abstract_mesh()
        found.append({*mesh.axis_names} - {*mesh.manual_axes})
        return layered(MODEL).loss(ends, x, batch, on_axes)

    devices = jax.devices()[: layout.num_devices]
    mesh = None if sizes is None else jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=devices)
    placement = place(layout, devices if mesh is None else mesh, axes=axes)
    model = layered(MODEL)._replace(loss=loss_fn)
    step = make_train_step(model, optax.sgd(1.0), layout=placement)
    state = step.init(jax.eval_shape(lambda: init_params(MODEL, 0)))
    batch = BatchShapes([(1, 8)], num_microbatches=4, layout=placement, has_many_groups=False)
    for each in (step, make_eval_step(model, layout=placement)):
        found.clear()
        jax.eval_shape(each, state, batch.spec(batch.buckets[0]))
        assert found
        assert all(names == left for names in found)
