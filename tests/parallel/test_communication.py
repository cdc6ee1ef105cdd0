"""What a step communicates is told before it runs, to the byte."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from jvarlen import CompileOptions, compile_buckets
from jvarlen.batches import BatchShapes
from jvarlen.compiling.hlo import Collective, list_collectives
from jvarlen.parallel import LayeredModel, LayeredParams, Layout, estimate_communication
from jvarlen.parallel.train import make_train_step

NUM_LAYERS, WIDTH = 3, 64
MODEL = LayeredModel(
    embed=lambda ends, microbatch, axes: microbatch,
    layer=lambda own, x, microbatch, axes: x + jnp.tanh(x @ own),
    loss=lambda ends, x, microbatch, axes: (jnp.sum(x), jnp.float32(len(x))),
)
NUM_BYTES = 4 * NUM_LAYERS * WIDTH * WIDTH  # of the parameters
BUCKET = (2, WIDTH)


def estimate_of(zero, num_shards, num_microbatches, accumulate=None, frozen=None, **options):
    """Of a step with so many microbatches a shard; `frozen` is another array of the layers."""
    layout, model, of_layers = Layout(data=num_shards, zero=zero), MODEL, jnp.zeros((NUM_LAYERS, WIDTH, WIDTH))
    trainable = None
    if frozen is not None:
        layer = MODEL.layer
        model = MODEL._replace(layer=lambda own, x, *given: layer(own["own"], x @ own["frozen"], *given))
        of_layers, trainable = {"own": of_layers, "frozen": frozen}, "layers.own"
    step = make_train_step(model, optax.adamw(1e-2), layout=layout, accumulate=accumulate, trainable=trainable)
    params = LayeredParams((), of_layers)
    compiled = compile_buckets(
        step,
        step.init(params),
        BatchShapes(
            [BUCKET],
            microbatches_per_step=num_shards * num_microbatches,
            batch_spec=lambda bucket, num: jax.ShapeDtypeStruct((num, *BUCKET), jnp.float32),
        ),
        progress=False,
        options=CompileOptions(cache_dir=None, **options),
    )
    return estimate_communication(compiled, BUCKET)


@pytest.mark.parametrize(
    ("zero", "num_microbatches", "times_of_data_parallelism"),
    [(0, 1, 1.0), (0, 3, 1.0), (1, 1, 1.0), (1, 3, 1.0), (2, 1, 1.0), (2, 3, 2.0), (3, 1, 1.5), (3, 3, 4.5)],
)
def test_a_level_sends_its_multiple_of_data_parallelism(zero, num_microbatches, times_of_data_parallelism):
    """Rajbhandari et al. 2020, section 7; with A microbatches a shard, (A + 1) / 2 at level 2, 3A / 2 at level 3."""
    estimate = estimate_of(zero, 4, num_microbatches)
    assert {row.axes for row in estimate} == {("data",)}
    of_params = 2 * 3 * NUM_BYTES // 4  # of a ring of four
    of_sums = estimate.wire_bytes - times_of_data_parallelism * of_params
    assert 0 < of_sums <= 64  # loss and weight


@pytest.mark.parametrize(("zero", "num_gathers"), [(0, 0), (1, 0), (2, 0), (3, 2)])
def test_what_is_not_trained_is_gathered_at_level_3_and_not_sent_else(zero, num_gathers):
    """Forward, and again backward, for the gradient of what comes before."""
    without = estimate_of(zero, 4, 1).wire_bytes
    beside = estimate_of(zero, 4, 1, frozen=np.zeros((NUM_LAYERS, WIDTH, WIDTH), np.float32)).wire_bytes
    assert beside - without == num_gathers * 3 * NUM_BYTES // 4


@pytest.mark.parametrize(("zero", "times_of_data_parallelism"), [(2, 1.0), (3, 3.5)])
def test_whole_gradients_are_reduced_once(zero, times_of_data_parallelism):
    """1 at level 2, and (2A + 1) / 2 at level 3, for A = 3."""
    estimate = estimate_of(zero, 4, 3, accumulate="whole")
    assert 0 < estimate.wire_bytes - times_of_data_parallelism * 2 * 3 * NUM_BYTES // 4 <= 64


def test_the_rows_of_an_estimate():
    estimate = estimate_of(3, 2, 2)
    rows = {row.kind: row for row in estimate}
    assert rows.keys() == {"all-gather", "reduce-scatter", "all-reduce"}
    # Forward and backward, in two microbatches.
    assert rows["all-gather"][2:] == (4 * NUM_LAYERS, 4 * NUM_BYTES, 4 * NUM_BYTES // 2)
    assert rows["reduce-scatter"][2:] == (2 * NUM_LAYERS, 2 * NUM_BYTES, 2 * NUM_BYTES // 2)
    lines = str(estimate).splitlines()
    assert lines[0].split() == ["collective", "axes", "times", "a", "step", "bytes", "sent", "by", "a", "device"]
    assert any(line.split() == ["all-gather", "data", "12", "196,608", "98,304"] for line in lines), lines


def test_gradient_buckets_send_what_one_reduction_does():
    whole, buckets = estimate_of(0, 4, 2), estimate_of(0, 4, 2, grad_bucket_bytes=1, first_grad_bucket_bytes=1)
    assert whole.wire_bytes == buckets.wire_bytes
    assert [row.kind for row in buckets] == ["all-reduce"]


def compiled_text(function, mesh, x):
    spec = PartitionSpec(*mesh.axis_names)
    split = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(split).lower(x).compile().as_text()


def test_bytes_groups_and_turns_of_each_collective():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])

    def talk(x):
        x = jax.lax.psum(x, "a") + jax.lax.ppermute(x, "b", [(0, 1), (3, 2)])
        x = x + jax.lax.all_gather(x, "b").sum(0)

        def turn(x, _):
            return jax.lax.psum_scatter(jnp.tile(x.ravel(), 4), "b", tiled=True).reshape(x.shape), None

        return jax.lax.scan(turn, x, length=5)[0]

    found = {each.kind: each for each in list_collectives(compiled_text(talk, mesh, jnp.ones((4, 12))))}
    across, along = ((0, 4), (1, 5), (2, 6), (3, 7)), ((0, 1, 2, 3), (4, 5, 6, 7))
    assert found == {
        "all-reduce": Collective("all-reduce", 4 * 6, across, 1),
        "collective-permute": Collective("collective-permute", 4 * 6, ((0, 1), (3, 2), (4, 5), (7, 6)), 1),
        "all-gather": Collective("all-gather", 4 * 4 * 6, along, 1),
        "reduce-scatter": Collective("reduce-scatter", 4 * 4 * 6, along, 5),
    }


def test_turns_that_depend_on_values_are_unknown():
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def talk(x):
        return jax.lax.while_loop(lambda x: x[0] < 100, lambda x: x + jax.lax.psum(x, "a"), x)

    (found,) = list_collectives(compiled_text(talk, mesh, jnp.ones(4)))
    assert found.times is None


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("mesh['x'=2,'y'=2] {'x'}", ((0, 2), (1, 3))),
        ("mesh['x'=2,'y'=2] {'x','y'}", ((0, 1, 2, 3),)),
    ],
)
def test_groups_in_every_form_of_the_text(groups, expected):
    instruction = f"ROOT %r = bf16[8]{{0}} all-reduce(%p), replica_groups={groups}, to_apply=%add"
    text = "ENTRY %main (p: bf16[8]) -> bf16[8] {\n  " + instruction + "\n}\n"
    assert list_collectives(text) == [Collective("all-reduce", 16, expected, 1)]


def test_asynchronous_results_are_counted_once():
    text = """ENTRY %main (p: f32[8]) -> f32[16] {
  %s = (f32[8]{0}, f32[16]{0}) all-gather-start(%p), replica_groups={{0,1}}, dimensions={0}
  %d = f32[16]{0} all-gather-done(%s)
  %t = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}
  ROOT %e = f32[8]{0} collective-permute-done(%t)
}
"""
    assert [each.num_bytes for each in list_collectives(text)] == [64, 32]
    for groups in ("elsewhere", "{}"):
        with pytest.raises(ValueError, match="unknown form"):
            list_collectives(text.replace("replica_groups={{0,1}}", f"replica_groups={groups}"))
    assert np.array_equal([each.times for each in list_collectives(text)], [1, 1])
