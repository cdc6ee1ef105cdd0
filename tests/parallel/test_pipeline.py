"""Steps by a schedule: the numbers of the unsplit model, on stages that hold what the schedule says."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jvarlen import Bucket, compile_buckets
from jvarlen.batches import BatchShapes
from jvarlen.distributed.layout import Layout
from jvarlen.estimates import estimate_communication, hlo
from jvarlen.estimates.cluster import Cluster, Link
from jvarlen.estimates.hlo import list_collectives
from jvarlen.estimates.layout_table import layout_table
from jvarlen.estimates.memory import kept_slots
from jvarlen.estimates.model_costs import count_costs
from jvarlen.estimates.step_seconds import step_seconds
from jvarlen.models import init_params, layered, make_loss_fn
from jvarlen.parallel import make_train_step as make_layout_step
from jvarlen.parallel.evaluation import make_eval_step
from jvarlen.parallel.layers import LayeredModel, LayeredParams, layered_loss_fn, layers_of_stages
from jvarlen.parallel.pipeline import sum_scheduled
from jvarlen.parallel.schedules import make_schedule
from jvarlen.testing import assert_layout_invariant
from jvarlen.training.reduction import Shards
from jvarlen.training.step_sums import LossProgram
from jvarlen.training.train_state import new_state
from jvarlen.training.trainable import select_trained
from tests.parallel.steps import DECODER, assert_equal_trees, batches_of, initial_params
from tests.support.collectives import count_collectives
from tests.support.meshes import layout_mesh


def noisy_embed(ends, microbatch, axes):
    x = microbatch["x"] @ ends["in"]
    return {"x": x + 0.1 * jax.random.normal(axes.key, x.shape), "layers": jnp.zeros(2, jnp.int32)}


def noisy_layer(own, x, microbatch, axes):
    change = jnp.tanh(x["x"] @ own["k"] + axes.layer)
    return {"x": x["x"] + change * jax.random.bernoulli(axes.key, 0.8, change.shape), "layers": x["layers"] + 1}


def noisy_loss(ends, x, microbatch, axes):
    y = jnp.sin(x["x"] @ ends["in"].T) * x["layers"][1] + jax.random.normal(axes.key, (3,))
    return jnp.sum(y * microbatch["w"][:, None]), jnp.sum(microbatch["w"]), {"squares": jnp.sum(x["x"] ** 2)}


# Tied ends, dropout in all three functions, integers among what layers pass on, and a further sum.
NOISY = LayeredModel(noisy_embed, noisy_layer, noisy_loss)


def noisy_params(num_layers):
    rng = np.random.default_rng(0)
    return LayeredParams({"in": rng.normal(size=(3, 5))}, {"k": rng.normal(size=(num_layers, 5, 5))})


def noisy_batch(num_microbatches):
    """The last microbatch has no weight."""
    rng = np.random.default_rng(num_microbatches)
    weights = rng.integers(1, 4, (num_microbatches, 6)).astype(np.float64)
    weights[1:][-1:] = 0
    return {"x": rng.normal(size=(num_microbatches, 6, 3)), "w": weights, "num_sequences": np.float64(7)}


def sums_on(model, text, *, remat=None, trained_of=select_trained):
    layout = dataclasses.replace(Layout.parse(text), remat=remat)
    return sum_scheduled(model, Shards(mesh=layout_mesh(layout)), layout, trained_of).whole


@functools.cache
def sums_without_stages(num_layers, num_microbatches):
    with jax.enable_x64(True):
        state = new_state(noisy_params(num_layers), optax.identity(), seed=3)
        return jax.jit(LossProgram(layered_loss_fn(NOISY)).sums_of.whole)(state, noisy_batch(num_microbatches))


@pytest.mark.parametrize(
    ("text", "num_layers", "num_microbatches", "remat"),
    [
        ("data2.stage2.gpipe", 8, 8, "none"),
        ("data2.stage4", 12, 4, "full"),  # fewer microbatches a shard than stages
        ("data1.stage4.zero_bubble", 8, 8, "none"),
        ("data1.stage4.interleaved.virtual3", 12, 4, "none"),
    ],
)
def test_sums_and_gradients_are_those_of_the_unsplit_model(text, num_layers, num_microbatches, remat):
    expected = sums_without_stages(num_layers, num_microbatches)
    with jax.enable_x64(True):
        state = new_state(noisy_params(num_layers), optax.identity(), seed=3)
        found = jax.jit(sums_on(NOISY, text, remat=remat))(state, noisy_batch(num_microbatches))
        assert_equal_trees(found, expected, 1e-12)
        assert np.abs(np.asarray(found.grads.layers["k"])).max(axis=(1, 2)).min() > 1e-3


@pytest.mark.parametrize("text", ["data1.stage4.interleaved.virtual2"])
def test_sums_without_gradients_are_the_same(text):
    expected = sums_without_stages(8, 8)
    with jax.enable_x64(True):
        state = new_state(noisy_params(8), optax.identity(), seed=3)
        found = jax.jit(sums_on(NOISY, text, trained_of=None))(state, noisy_batch(8))
        assert_equal_trees(found, expected._replace(grads=None), 1e-12)


def test_a_stage_holds_its_own_layers_only():
    params = LayeredParams({"in": np.zeros((64, 64))}, {"k": np.zeros((4, 64, 64)), "b": np.zeros((4, 64))})
    state = make_layout_step(SIMPLE, optax.adam(1e-2), layout="data2.stage4.zero1").init(params)
    moments = state.opt_state[0].mu
    assert state.params.layers["k"].sharding.spec == PartitionSpec("stage")
    assert moments.layers["k"].sharding.spec == PartitionSpec("stage", "data")
    assert moments.layers["b"].sharding.spec == PartitionSpec("stage")
    assert state.params.layers["k"].addressable_shards[0].data.shape == (1, 64, 64)
    assert moments.layers["k"].addressable_shards[0].data.shape == (1, 32, 64)
    assert moments.ends["in"].addressable_shards[0].data.shape == (32, 64)
    assert state.params.ends["in"].sharding.is_fully_replicated


def simple_state(num_layers, width=8, dtype=np.float32):
    params = LayeredParams({"in": np.ones(width, dtype)}, {"k": np.full((num_layers, width, width), 0.1, dtype)})
    return new_state(params, optax.identity())


SIMPLE = LayeredModel(
    lambda ends, microbatch, axes: microbatch * ends["in"],
    lambda own, x, microbatch, axes: x + jnp.tanh(x @ own["k"]),
    lambda ends, x, microbatch, axes: (jnp.sum(x * x * ends["in"]), jnp.float32(1)),
)


@functools.cache
def held(text, num_microbatches, remat="full"):
    """The temporary memory of a step, in activations, as they are sent from stage to stage."""
    batch = jax.ShapeDtypeStruct((num_microbatches, 1024, 8), np.float32)
    executable = jax.jit(sums_on(SIMPLE, text, remat=remat)).lower(simple_state(4), batch).compile()
    return executable.memory_analysis().temp_size_in_bytes / (1024 * 8 * 4)


def test_temporaries_do_not_grow_with_microbatches():
    eager = held("data1.stage4.eager_1f1b", 8)
    assert held("data1.stage4.eager_1f1b", 32) == pytest.approx(eager, abs=0.1)
    assert eager < 20
    assert held("data1.stage4.gpipe", 32) - held("data1.stage4.gpipe", 8) > 23.9
    # It keeps 4 on the first stage where the eager schedule keeps 7.
    assert held("data1.stage4.1f1b", 8) == pytest.approx(eager - 3, abs=0.1)


def test_residuals_are_held_as_the_schedule_says():
    """A layer keeps two, its input and its tanh."""
    eager = held("data1.stage4.eager_1f1b", 8, "none")
    assert held("data1.stage4.eager_1f1b", 32, "none") == pytest.approx(eager, abs=0.1)
    assert eager - held("data1.stage4.eager_1f1b", 8) < 7 + 6
    assert held("data1.stage4.1f1b", 8, "none") == pytest.approx(eager - 2 * 3, abs=0.1)
    assert held("data1.stage4.gpipe", 32, "none") - held("data1.stage4.gpipe", 8, "none") < 24 * 3 + 0.1


@pytest.mark.parametrize(
    ("text", "remat", "times"),
    [
        ("data1.stage2.interleaved.virtual2", "none", {"F": 1, "B": 1, "W": 1}),
        ("data1.stage2.interleaved.virtual2", "full", {"F": 2, "B": 1, "W": 1}),
        ("data1.stage4.zero_bubble", "full", {"F": 3, "B": 2, "W": 1}),
    ],
)
def test_every_layer_works_as_often_as_the_schedule_says(text, remat, times):
    """Counted while it runs, for each microbatch. From inputs, B and W run a layer again, and W its B as well."""
    ran = []

    def work(kind, x):
        def noted(x):
            ran.append(kind)
            return np.zeros_like(x)

        return x + jax.pure_callback(noted, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    @jax.custom_vjp
    def run(own, x):
        return work("F", own + x)

    def forward(own, x):
        y = run(own, x)
        return y, y

    def back(y, of_y):
        of_x = work("B", of_y + 0 * y)
        return work("W", of_x), of_x

    run.defvjp(forward, back)
    model = SIMPLE._replace(layer=lambda own, x, microbatch, axes: run(own["k"], x))
    params = LayeredParams({"in": np.ones(3, np.float32)}, {"k": np.zeros((4, 3), np.float32)})
    step = jax.jit(sums_on(model, text, remat=remat))
    jax.block_until_ready(step(new_state(params, optax.identity()), np.ones((4, 3), np.float32)))
    assert {kind: ran.count(kind) / 16 for kind in "FBW"} == times


@pytest.mark.parametrize("text", ["data2.stage4.zero_bubble", "data2.stage2.interleaved.virtual2"])
def test_stages_send_where_one_has_results_and_reductions_are_outside_the_loop(text):
    batch, layout = jax.ShapeDtypeStruct((16, 4, 8), np.float32), Layout.parse(text)
    executable = jax.jit(sums_on(SIMPLE, text)).lower(simple_state(4), batch).compile()
    counts = count_collectives(executable)
    assert counts.keys() == {"all-reduce", "collective-permute"}
    assert counts["all-reduce"].per_step >= 1
    assert counts["all-reduce"].in_loops == 0
    assert counts["collective-permute"].in_loops == 2
    assert counts["collective-permute"].per_step == (
        2 if layout.virtual == 2 else 0
    )  # layers to virtual stages, and back
    schedule = make_schedule(layout.schedule, layout.stage, 8, layout.virtual)
    kind = schedule.tables().kind
    sent = [each.times for each in list_collectives(executable, kind + 1) if each.kind == "collective-permute"]
    assert sorted(sent)[-2:] == [np.sum((kind == each).any(axis=1)) for each in (0, 1)]


@pytest.mark.parametrize("remat", ["none", "full"])
def test_stages_send_after_all_actions_of_a_tick(remat):
    """If they sent an activation before backward passes, a tick would last as long as both."""
    batch = jax.ShapeDtypeStruct((8, 4, 8), np.float32)
    step = sums_on(SIMPLE, "data1.stage2.zero_bubble", remat=remat)
    text = jax.jit(step).lower(simple_state(4), batch).compile().as_text()
    bodies = map(hlo.instructions_of, hlo.computations_of(text).values())
    loops = re.compile(r"(\w+)/while\"")
    (listed,) = (body for body in bodies if any(each.operation == "while" and "sends1" in each.rest for each in body))
    scopes, before = {}, {}  # and of each instruction, all that it follows from
    for each in listed:
        taken = hlo.operands_of(each)
        before[each.name] = {*taken}.union(*(before.get(name, ()) for name in taken))
        if each.operation == "while":
            scopes[loops.search(each.rest)[1]] = each.name
    actions = {scopes[f"branch{kind}"] for kind in (1, 2, 3)}
    assert actions <= before[scopes["sends1"]]
    assert actions <= before[scopes["sends2"]]


@pytest.mark.parametrize("text", ["data1.stage2.tensor2", "data1.stage2.tensor2.sequence_parallel"])
def test_each_device_of_tensor_sends_its_part_as_estimated(text):
    layout, bucket, model = Layout.parse(text), Bucket(2, 8), layered(DECODER)
    step, params = make_layout_step(model, optax.sgd(1e-3), layout=layout), init_params(DECODER, 0)
    shapes = BatchShapes([bucket], num_microbatches=4, layout=layout, has_many_groups=False)
    traffic = estimate_communication(compile_buckets(step, step.init(params), shapes, progress=False), bucket)
    of = {(row.kind, row.axes): row for row in traffic}
    costs = count_costs(model, [bucket], params=params, tensor_sizes=[2])
    sends, x_bytes = 2 * (4 + 1), int(costs.x_bytes[0])
    sent, gathered = of["collective-permute", ("stage",)], of.get(("all-gather", ("tensor",)))
    assert (sent.times, sent.num_bytes) == (sends, sends * x_bytes / 2)
    of_gathers = 0
    if not layout.sequence_parallel:  # which gathers in every layer
        assert (gathered.times, gathered.num_bytes) == (sends, sends * x_bytes)
        of_gathers = gathered.wire_bytes
    a_byte_a_second = Link(1.0, 0)
    cluster = dataclasses.replace(Cluster.named("dgx-h100"), link=a_byte_a_second, host_link=a_byte_a_second)
    told = step_seconds(layout_table([layout]), costs, cluster, num_microbatches=4).stage.item()
    assert told == sent.wire_bytes + of_gathers


@pytest.mark.parametrize(
    "layouts",
    [
        ("data2.stage2.tensor2.1f1b.zero1", "data1.stage2.tensor3.interleaved.virtual2"),
        pytest.param(
            ("data1.stage2.tensor4.gpipe", "data1.stage2.tensor2.context2", "data1.stage4.tensor2.zero_bubble"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_parts_of_activations_arrive_whole(layouts):
    """Three devices do not divide 160 numbers, which each sends then."""
    config = dataclasses.replace(DECODER, width=10, mlp_width=12, num_heads=12, head_size=2)
    batch = batches_of(4)[0]
    assert assert_layout_invariant(layered(config), init_params(config, 0), batch, layouts, rtol=1e-11)


def test_idle_ticks_do_not_reach_the_gradient():
    """The root of 0, which idle stages would see, has an infinite derivative."""
    rooted = LayeredModel(
        lambda ends, microbatch, axes: microbatch * ends,
        lambda own, x, microbatch, axes: own * jnp.sqrt(x),
        lambda ends, x, microbatch, axes: (jnp.sum(x), jnp.float32(microbatch.size)),
    )
    state = new_state(LayeredParams(jnp.float32(2), jnp.full(4, 3.0)), optax.identity())
    batch = jnp.arange(1.0, 7).reshape(2, 3)
    expected = jax.jit(LossProgram(layered_loss_fn(rooted)).sums_of.whole)(state, batch)
    for remat in ("full", "none"):
        found = jax.jit(sums_on(rooted, "data1.stage4.zero_bubble", remat=remat))(state, batch)
        assert_equal_trees(found, expected, 1e-5)


NAMED = LayeredModel(noisy_embed, noisy_layer, noisy_loss, num_layers=5)


@pytest.mark.parametrize(
    "layout",
    [
        "data2.stage2.zero3",
        "data1.stage4.zero_bubble.remat_none",  # of 2, 2, 1 and no layers
        "data2.stage2.interleaved.virtual2.zero1",
        "data1.stage2.layers4.1f1b",
    ],
)
def test_stages_of_different_sizes_train_as_one_device(layout):
    found = assert_layout_invariant(NAMED, noisy_params(5), noisy_batch(4), [layout], rtol=1e-11)
    assert found == [Layout.parse(layout)]


def test_layers_that_a_stage_does_not_have_are_not_computed():
    """A layer that counts how often it ran, through each device's host."""
    calls = []

    def layer(own, x, microbatch, axes):
        jax.debug.callback(lambda index: calls.append(int(index)), axes.layer)
        return x @ own["k"]

    counting = SIMPLE._replace(layer=layer, num_layers=3)
    step = make_eval_step(counting, layout="data1.stage2")
    state = make_layout_step(counting, optax.sgd(0.1), layout="data1.stage2").init(simple_state(3).params)
    assert state.params.layers["k"].shape == (4, 8, 8)
    jax.block_until_ready(jax.jit(step)(state, jnp.ones((2, 2, 8)))[1])
    jax.effects_barrier()
    assert sorted(calls) == [0, 0, 1, 1, 2, 2]


def test_stages_are_told_as_they_are_cut():
    for text, num_layers, expected in (
        ("stage4", 30, [8, 8, 8, 6]),
        ("stage4.layers9", 32, [9, 9, 9, 5]),
        ("stage16.interleaved.virtual8", 126, [8] * 14 + [7] * 2),
        ("stage4", 5, [2, 2, 1, 0]),
    ):
        assert layers_of_stages(num_layers, Layout.parse(text)) == expected


def test_a_layer_may_loop_from_a_constant_and_branch_to_one():
    """What a recurrent network does: a carry of zeros, and a branch that doesn't depend on the input."""

    def recurrent(own, x, microbatch, axes):
        def cell(h, row):
            h = jnp.tanh(h + row @ own["k"])
            return h, h

        rows = jax.lax.scan(cell, jnp.zeros(x.shape[1:]), x)[1]
        return x + jax.lax.cond(jnp.sum(rows) > 0, lambda: rows, lambda: jnp.zeros_like(rows))

    looping = LayeredModel(
        lambda ends, microbatch, axes: microbatch["x"] @ ends["in"],
        recurrent,
        lambda ends, x, microbatch, axes: (jnp.sum(jnp.sin(x @ ends["in"].T)), jnp.sum(microbatch["w"])),
    )
    with jax.enable_x64(True):
        state = new_state(noisy_params(4), optax.identity())
        expected = jax.jit(LossProgram(layered_loss_fn(looping)).sums_of.whole)(state, noisy_batch(4))
        for remat in ("full", "none"):
            found = jax.jit(sums_on(looping, "data2.stage2", remat=remat))(state, noisy_batch(4))
            assert_equal_trees(found, expected, 1e-12)


def test_gradients_of_bfloat16_are_summed_in_float32():
    """In bfloat16, 256 + 1 is 256."""
    product = LayeredModel(
        lambda ends, microbatch, axes: microbatch,
        lambda own, x, microbatch, axes: x * own,
        lambda ends, x, microbatch, axes: (jnp.sum(x), jnp.float32(1)),
    )
    state = new_state(LayeredParams((), jnp.ones(4, jnp.bfloat16)), optax.identity())
    sums = jax.jit(sums_on(product, "data1.stage2.interleaved.virtual2"))(state, jnp.ones((300, 1), jnp.bfloat16))
    assert sums.grads.layers.dtype == jnp.float32
    assert sums.grads.layers.tolist() == [300] * 4
    assert float(sums.loss_sum) == float(sums.weight_sum) == 300


def test_what_does_not_fit_is_refused_by_number_before_it_is_compiled():
    model, optimizer, params = layered(DECODER), optax.sgd(0.1), initial_params(dtype=np.float32)

    def init(text, params=params, model=model):
        return make_layout_step(model, optimizer, layout=text).init(params)

    with pytest.raises(ValueError, match=r"^4 layers do not make 8 stages: each has at least one"):
        init("data1.stage8")
    with pytest.raises(ValueError, match=r"^4 layers do not divide into the 3 equal parts of .*num_layers=4\)$"):
        init("data1.stage3", model=model._replace(num_layers=None))
    with pytest.raises(ValueError, match=r"^the num_layers of the LayeredModel are 5, and its parameters have 4"):
        init("data1.stage2", model=model._replace(num_layers=5))
    with pytest.raises(ValueError, match=r"4 layers do not make 4 stages of 2 virtual stages"):
        init("data1.stage4.interleaved.virtual2")
    with pytest.raises(ValueError, match=r"^layers1 of the layout .* does not cut 4 layers into 2 .*: take 2 to 4$"):
        init("data1.stage2.layers1")
    with pytest.raises(ValueError, match=r"^layers2 of the layout data1.layers2 needs stageN"):
        init("data1.layers2")
    with pytest.raises(ValueError, match=r"^virtual2 needs the schedule interleaved, not eager_1f1b"):
        init("data1.stage2.virtual2")
    with pytest.raises(ValueError, match=r"^context2 takes a LayeredModel with by_positions=True"):
        init("data1.stage2.context2", model=model._replace(by_positions=False))
    with pytest.raises(ValueError, match=r"^a model by layers takes LayeredParams, not a dict"):
        init("data1.stage2", {"w": np.zeros(3)}, SIMPLE)
    with pytest.raises(ValueError, match=r"^stage2 takes a LayeredModel, and loss_fn is a loss function"):
        make_layout_step(make_loss_fn(DECODER), optimizer, layout="data1.stage2")
    with pytest.raises(ValueError, match="no 'stage'"):
        sum_scheduled(SIMPLE, Shards(mesh=jax.make_mesh((2,), ("data",))), Layout())
    with pytest.raises(ValueError, match=r"a multiple of num_stages \(2\) microbatches, not num_microbatches \(3\)"):
        jax.eval_shape(sums_on(SIMPLE, "data2.stage2.interleaved.virtual2"), simple_state(4), jnp.ones((6, 2, 8)))
    with pytest.raises(ValueError, match="3 microbatches a step do not spread over 2 shards"):
        jax.eval_shape(sums_on(SIMPLE, "data2.stage2"), simple_state(4), jnp.ones((3, 2, 8)))
    narrow = SIMPLE._replace(layer=lambda own, x, microbatch, axes: x[:, :2])
    with pytest.raises(ValueError, match=r"must return x of the shapes .* float32\[2,8\] -> float32\[2,2\]"):
        jax.eval_shape(sums_on(narrow, "data1.stage2"), simple_state(4), jnp.ones((2, 2, 8)))
    ring = SIMPLE._replace(layer=lambda own, x, microbatch, axes: jax.lax.ppermute(x, "data", [(0, 1), (1, 0)]))
    with pytest.raises(ValueError, match="layers in stages cannot send by ppermute"):
        jax.eval_shape(sums_on(ring, "data2.stage2"), simple_state(4), jnp.ones((4, 2, 8)))


@pytest.mark.parametrize(
    ("name", "num_virtual"),
    [("gpipe", 1), ("1f1b", 1), ("eager_1f1b", 1), ("zero_bubble", 1), ("interleaved", 2), ("interleaved", 3)],
)
def test_slots_without_tables_are_those_of_the_tables(name, num_virtual):
    for num_stages, turns in itertools.product((2, 3, 4, 5, 8), (1, 2, 3, 5)):
        num_microbatches = turns * num_stages if num_virtual > 1 else 2 * turns - 1
        tables = make_schedule(name, num_stages, num_microbatches, num_virtual).tables()
        assert kept_slots(name, num_stages, num_microbatches, num_virtual) == tables.num_activations
