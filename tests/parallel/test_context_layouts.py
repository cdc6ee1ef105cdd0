"""The axis "context" of a layout: parts of rows in long buckets, data in short ones, on one state."""

import functools
import itertools

import jax
import numpy as np
import optax
import pytest

from jvarlen import Bucket, compile_buckets, load, make_plan, make_train_step, no_recompiles
from jvarlen.batches import BatchShapes
from jvarlen.estimates import estimate_communication
from jvarlen.models import DecoderConfig, init_params, layered
from jvarlen.parallel import Layout, layered_loss_fn, make_eval_step
from jvarlen.parallel import make_train_step as make_layout_step
from jvarlen.parallel.layout_checks import check_bucket
from jvarlen.testing import assert_layout_invariant
from jvarlen.training.train_state import new_state
from tests.parallel.test_compositions import TIED, tied_params
from tests.support.meshes import layout_mesh

MODEL = DecoderConfig(num_layers=2, width=32, num_heads=2)
SHORT, LONG = Bucket(4, 8), Bucket(2, 32)


def planned(mesh=None):
    """Steps of both buckets, in turns."""
    lengths = np.tile([3, 32, 8, 20, 5, 31, 7, 17], 8)
    plan = make_plan(lengths, [SHORT, LONG], num_microbatches=4, order="shuffle")
    rng = np.random.default_rng(0)
    dataset = [rng.integers(0, 256, n).astype(np.int32) for n in lengths]
    batches = list(itertools.islice(load(plan, dataset, layout=mesh), 4))
    assert len({batch.tokens.shape for batch in batches}) == 2
    return batches


def trained(step, state, batches):
    metrics = []
    for batch in batches:
        state, found = step(state, batch)
        metrics.append(jax.device_get(found))
    return state, metrics


@functools.cache
def on_one_device():
    params, optimizer = init_params(MODEL, 0), optax.adamw(1e-3)
    step = jax.jit(make_train_step(layered_loss_fn(layered(MODEL)), optimizer, norms=True))
    return trained(step, new_state(params, optimizer), planned())[1]


def test_one_state_serves_buckets_on_either_side():
    layout = Layout.parse("data2.context2.zero3.context_from16")
    mesh, optimizer, model = layout_mesh(layout), optax.adamw(1e-3), layered(MODEL)
    state = make_layout_step(model, optimizer, layout=layout).init(init_params(MODEL, 0))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = compile_buckets(
        make_layout_step(model, optimizer, layout=layout, norms=True),
        state,
        BatchShapes([SHORT, LONG], num_microbatches=4, layout=layout, has_many_groups=False),
        progress=False,
    )
    batches = planned(mesh)
    with no_recompiles():
        state, metrics = trained(step, state, batches)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == shardings  # nothing is to be moved between steps
    for found, expected in zip(metrics, on_one_device(), strict=True):
        np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-5)
        np.testing.assert_allclose(found.grad_norm, expected.grad_norm, rtol=1e-4)
        assert found.num_tokens == expected.num_tokens


@functools.cache
def traffic_of(text, bucket):
    layout = Layout.parse(text)
    optimizer, model = optax.sgd(1e-3), layered(MODEL)
    on = {"layout": layout}
    state = make_layout_step(model, optimizer, **on).init(init_params(MODEL, 0))
    step = make_layout_step(model, optimizer, **on)
    compiled = compile_buckets(
        step, state, BatchShapes([bucket], num_microbatches=4, has_many_groups=False), progress=False
    )
    return {(row.kind, row.axes): row for row in estimate_communication(compiled, bucket)}


def test_short_buckets_communicate_as_data_parallel_ones_do():
    both = ("data", "context")
    short, data = traffic_of("data2.context2.context_from16", SHORT), traffic_of("data4", SHORT)
    assert short.keys() == {("all-reduce", both)}
    assert short["all-reduce", both][2:] == data["all-reduce", ("data",)][2:]


def test_long_buckets_add_the_keys_and_values_of_attention_only():
    long = traffic_of("data2.context2.context_from16", LONG)
    assert long.keys() == {
        ("all-reduce", ("data", "context")),
        ("all-gather", ("context",)),
        ("all-to-all", ("context",)),
    }
    whole = traffic_of("data4", SHORT)["all-reduce", ("data",)]  # of gradients, whatever the rows
    assert long["all-reduce", ("data", "context")][2:] == whole[2:]


def test_evaluation_counts_every_token_once():
    layout = Layout.parse("data2.stage2.context2")
    optimizer, model = optax.sgd(1.0), layered(MODEL)
    state = make_layout_step(model, optimizer, layout=layout).init(init_params(MODEL, 0))
    evaluate = jax.jit(make_eval_step(model, layout=layout))
    batch, first = planned()[0], on_one_device()[0]
    assert batch.tokens.shape[2] == LONG.length
    metrics = evaluate(state, batch)[1]
    np.testing.assert_allclose(metrics.loss, first.loss, rtol=1e-5)
    assert metrics.num_tokens == first.num_tokens


def test_a_model_that_does_not_work_by_positions_is_refused():
    model = layered(MODEL)
    layout = Layout.parse("data2.context2")
    on = {"layout": layout}

    def evaluate(model, batch=None):
        state = make_layout_step(model, optax.sgd(1.0), **on).init(init_params(MODEL, 0))
        return jax.eval_shape(make_eval_step(model, **on), state, planned()[0] if batch is None else batch)

    def whole_rows(ends, microbatch, axes):
        return model.embed(ends, microbatch, axes._replace(context=None, positions=None))

    with pytest.raises(ValueError, match=r"^embed returned float32\[2,32,32\] for 16 of 32 positions"):
        evaluate(model._replace(embed=whole_rows))

    def reducing(ends, x, microbatch, axes):
        loss_sum, weight_sum = model.loss(ends, x, microbatch, axes)
        return loss_sum, weight_sum if axes.context is None else jax.lax.psum(weight_sum, axes.context)

    with pytest.raises(ValueError, match=r"reduces weight_sum over mesh axis 'context' itself"):
        evaluate(model._replace(loss=reducing))


def test_rows_are_as_long_as_what_embed_returns():
    """Other arrays of a batch may be longer."""
    wide = {"batch": planned()[0], "features": np.zeros((4, 2, 100), np.float32)}

    def of_batch(call):
        return lambda *args: call(*args[:-2], args[-2]["batch"], args[-1])

    named = TIED._replace(embed=of_batch(TIED.embed), layer=of_batch(TIED.layer), loss=of_batch(TIED.loss))
    params = tied_params(np.random.default_rng(0), num_layers=2, vocab_size=256, width=8)
    assert_layout_invariant(named, params, wide, ["data2.context2.context_from32"], num_steps=1)


@pytest.mark.parametrize(
    ("text", "bucket", "message"),
    [
        ("data2.context2.context_from64", (2, 32), "2 microbatches .* the 4 shards .* rows of 32"),
        ("data2.context4", (2, 36), "36 positions cannot be spread over 4 shards"),
        ("data1.context2.tensor3.sequence_parallel", (2, 32), "takes a multiple of 3 positions, not 16"),
        ("data1.stage3.interleaved.virtual2", (2, 32), r"a multiple of num_stages \(3\) microbatches"),
    ],
)
def test_buckets_that_a_layout_cannot_take_are_refused(text, bucket, message):
    with pytest.raises(ValueError, match=message):
        check_bucket(Layout.parse(text), bucket, 2)
    check_bucket(Layout.parse("data2"), bucket, 2)


@pytest.mark.parametrize("text", ["data2.sequence_parallel", "data2.context_from64", "data2.interleaved.virtual2"])
def test_words_that_need_another_axis_are_refused(text):
    layout = Layout.parse(text)
    with pytest.raises(ValueError, match=r"needs (tensor|context|stage)N, with several devices"):
        make_layout_step(layered(MODEL), optax.sgd(1.0), layout=layout)


@pytest.mark.parametrize("remat", ["full", "selective"])
def test_only_layers_are_run_again(remat):
    layout = Layout(data=2, remat=remat)
    with pytest.raises(ValueError, match=f"remat_{remat} takes a LayeredModel"):
        make_layout_step(layered_loss_fn(layered(MODEL)), optax.sgd(1.0), layout=layout)
