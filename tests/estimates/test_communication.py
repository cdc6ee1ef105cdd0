"""The communication of a step is known before it runs, to the byte."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from jvarlen import CompileOptions, compile_buckets
from jvarlen.batches import BatchShapes
from jvarlen.estimates import estimate_communication
from jvarlen.estimates.communication import communication_of
from jvarlen.estimates.hlo import Collective, list_collectives
from jvarlen.parallel import LayeredModel, LayeredParams, Layout
from jvarlen.parallel.train import make_train_step

NUM_LAYERS, WIDTH = 3, 64
MODEL = LayeredModel(
    embed=lambda ends, microbatch, axes: microbatch,
    layer=lambda own, x, microbatch, axes: x + jnp.tanh(x @ own),
    loss=lambda ends, x, microbatch, axes: (jnp.sum(x), jnp.float32(len(x))),
)
NUM_BYTES = 4 * NUM_LAYERS * WIDTH * WIDTH  # of the parameters
BUCKET = (2, WIDTH)


def estimate_of(zero, num_shards, num_microbatches, frozen=None, **options):
    """The estimate of a step with this many microbatches a shard; `frozen` is another array of the layers."""
    layout, model, trainable = Layout(data=num_shards, zero=zero, **options), MODEL, None
    of_layers = jnp.zeros((NUM_LAYERS, WIDTH, WIDTH))
    if frozen is not None:
        layer = MODEL.layer
        model = MODEL._replace(layer=lambda own, x, *given: layer(own["own"], x @ own["frozen"], *given))
        of_layers, trainable = {"own": of_layers, "frozen": frozen}, "layers.own"
    step = make_train_step(model, optax.adamw(1e-2), layout=layout, trainable=trainable)
    params = LayeredParams((), of_layers)
    compiled = compile_buckets(
        step,
        step.init(params),
        BatchShapes(
            [BUCKET],
            num_microbatches=num_shards * num_microbatches,
            batch_spec=lambda bucket, num: jax.ShapeDtypeStruct((num, *BUCKET), jnp.float32),
            has_many_groups=False,
        ),
        progress=False,
        options=CompileOptions(cache_dir=None),
    )
    return estimate_communication(compiled, BUCKET)


@pytest.mark.parametrize(
    ("zero", "num_microbatches", "times_of_data_parallelism"),
    [(0, 3, 1.0), (1, 3, 1.0), (2, 1, 1.0), (2, 3, 2.0), (3, 3, 4.5)],
)
def test_a_level_sends_its_multiple_of_data_parallelism(zero, num_microbatches, times_of_data_parallelism):
    """Rajbhandari et al. 2020, section 7; with A microbatches a shard, (A + 1) / 2 at level 2, 3A / 2 at level 3."""
    estimate = estimate_of(zero, 4, num_microbatches)
    assert {row.axes for row in estimate} == {("data",)}
    of_params = 2 * 3 * NUM_BYTES // 4  # of a ring of four
    ahead = of_params // 2 // NUM_LAYERS if zero == 3 else 0  # a layer, gathered for the loop that would follow
    of_sums = estimate.wire_bytes - times_of_data_parallelism * of_params - ahead
    assert 0 < of_sums <= 64  # loss and weight


@pytest.mark.parametrize(("zero", "num_gathers"), [(2, 0), (3, 2)])
def test_what_is_not_trained_is_gathered_at_level_3_and_not_sent_else(zero, num_gathers):
    """Forward, and again backward, for the gradient of what comes before; and a layer ahead."""
    without = estimate_of(zero, 4, 1).wire_bytes
    beside = estimate_of(zero, 4, 1, frozen=np.zeros((NUM_LAYERS, WIDTH, WIDTH), np.float32)).wire_bytes
    num_layers = num_gathers * NUM_LAYERS + (zero == 3)
    assert beside - without == num_layers * 3 * NUM_BYTES // NUM_LAYERS // 4


def test_the_rows_of_an_estimate():
    estimate = estimate_of(3, 2, 2)
    rows = {row.kind: row for row in estimate}
    assert rows.keys() == {"all-gather", "reduce-scatter", "all-reduce"}
    # Forward and backward, in two microbatches; and a layer ahead.
    times = 4 * NUM_LAYERS + 1
    num_bytes = times * NUM_BYTES // NUM_LAYERS
    assert rows["all-gather"][2:] == (times, num_bytes, num_bytes // 2, 0, 0)
    assert rows["reduce-scatter"][2:] == (2 * NUM_LAYERS, 2 * NUM_BYTES, 2 * NUM_BYTES // 2, 0, 0)
    lines = str(estimate).splitlines()
    header = ["collective", "axes", "times a step", "bytes", "sent by a device", "asynchronous", "overlapped"]
    assert re.split(r"\s{2,}", lines[0].strip()) == header
    assert any(line.split() == ["all-gather", "data", "13", "212,992", "106,496", "0", "0"] for line in lines), lines


def test_gradient_buckets_send_what_one_reduction_does():
    whole, buckets = estimate_of(0, 4, 2), estimate_of(0, 4, 2, grad_bucket_bytes=1)
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


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("mesh['x'=2,'y'=2] {'x'}", ((0, 2), (1, 3))),
        ("mesh['x'=2,'y'=2] {'x','y'}", ((0, 1, 2, 3),)),
        ("mesh['x'=1,'y'=2,'z'=2], device_ids=([2,2]T(1,0)) {'y'}", ((0, 1), (2, 3))),
        ("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
    ],
)
def test_groups_of_devices_are_read_in_every_form(groups, expected):
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


@pytest.mark.parametrize("is_sync", [False, True])
def test_one_that_xla_marks_as_synchronous_is_not_asynchronous(is_sync):
    marked = f'backend_config={{"collective_backend_config":{{"is_sync":{str(is_sync).lower()}}}}}'
    text = f"""ENTRY %main (p: f32[8]) -> f32[8] {{
  %s = f32[8]{{0}} all-reduce-start(%p), replica_groups={{{{0,1}}}}, to_apply=%add, {marked}
  ROOT %d = f32[8]{{0}} all-reduce-done(%s)
}}
"""
    assert list_collectives(text) == [Collective("all-reduce", 32, ((0, 1),), 1, is_asynchronous=not is_sync)]


@pytest.mark.parametrize(
    ("kind", "shapes", "groups"),
    [
        ("all-to-all", "((f32[8]{0}, f32[4]{0}), (f32[8]{0}, f32[4]{0}))", "replica_groups={{0,1}}"),
        ("collective-permute", "((f32[8]{0}, f32[4]{0}), (f32[8]{0}, f32[4]{0}))", "source_target_pairs={{0,1},{1,0}}"),
        ("collective-permute", "(f32[12]{0}, f32[12]{0}, u32[]{:S(2)}, u32[])", "source_target_pairs={{0,1},{1,0}}"),
        ("all-reduce", "(f32[8]{0}, f32[4]{0})", "replica_groups={{0,1}}"),
        ("all-reduce", "((f32[8]{0}, f32[4]{0}), (f32[8]{0}, f32[4]{0}))", "replica_groups={{0,1}}"),
    ],
)
def test_several_arrays_of_an_asynchronous_collective_are_counted_once(kind, shapes, groups):
    text = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n  %s = {shapes} {kind}-start(%p), {groups}\n}}\n"
    assert [each.num_bytes for each in list_collectives(text)] == [48]


def test_one_collective_in_three_fusions_of_a_tpu_is_one():
    gather = "  %g = f32[16]{0:T(128)} all-gather(%p), replica_groups={{0,1}}, dimensions={0}\n"
    bodies = "".join(
        f"%{name} (p: f32[8]) -> f32[16] {{\n{gather}  ROOT %r = f32[16]{{0}} copy(%g)\n}}\n\n"
        for name in ("fused.1", "async_collective_fusion.7", "fused.2", "other")
    )
    text = f"""{bodies}ENTRY %main (p: f32[8]) -> f32[16] {{
  %async-collective-start.3 = f32[16]{{0}} fusion(%p), kind=kCustom, calls=%fused.1
  %k = f32[4]{{0}} custom-call(%p), custom_call_target="tpu_custom_call", frontend_attributes={{kernel_metadata={{
"name": "a kernel",
}}}}, metadata={{op_name="attend"}}
  %fusion.7 = f32[16]{{0}} fusion(%k), kind=kCustom, calls=%async_collective_fusion.7
  %async-collective-done.3 = f32[16]{{0}} fusion(%fusion.7), kind=kCustom, calls=%fused.2
  ROOT %fusion.8 = f32[16]{{0}} fusion(%async-collective-done.3), kind=kCustom, calls=%other
}}
"""
    expected = Collective("all-gather", 64, ((0, 1),), 1)
    assert list_collectives(text) == [expected._replace(is_asynchronous=True, products=1), expected]


BETWEEN = """%gemm_fusion (l: bf16[8,8], r: bf16[8,8]) -> bf16[8,8] {
  %l = bf16[8,8]{1,0} parameter(0)
  %r = bf16[8,8]{1,0} parameter(1)
  ROOT %dot.1 = bf16[8,8]{1,0} dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%elementwise (e: bf16[8,8]) -> bf16[8,8] {
  %e = bf16[8,8]{1,0} parameter(0)
  ROOT %twice = bf16[8,8]{1,0} add(%e, %e)
}

%condition (c: (bf16[8,8])) -> pred[] {
  %c = (bf16[8,8]{1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

%turn (b: (bf16[8,8])) -> (bf16[8,8]) {
  %b = (bf16[8,8]{1,0}) parameter(0)
  %x = bf16[8,8]{1,0} get-tuple-element(%b), index=0
  %all-gather-start.1 = (bf16[4,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%x), replica_groups={{0,1}}, dimensions={0}
  %first = bf16[8,8]{1,0} OPERATION
  %all-gather-done.7 = bf16[8,8]{1,0} all-gather-done(%all-gather-start.1)
  %after = bf16[8,8]{1,0} fusion(%first, %all-gather-done.7), kind=kCustom, calls=%gemm_fusion
  ROOT %both = (bf16[8,8]{1,0}) tuple(%after)
}

%wrapped (w: bf16[8,8]) -> bf16[4,8] {
  %w = bf16[8,8]{1,0} parameter(0)
  ROOT %rs = bf16[4,8]{1,0} reduce-scatter(%w), replica_groups={{0,1}}, dimensions={0}, to_apply=%elementwise
}

ENTRY %main (p: bf16[8,8]) -> (bf16[8,8]) {
  %p = bf16[8,8]{1,0} parameter(0)
  %before = bf16[8,8]{1,0} fusion(%p, %p), kind=kCustom, calls=%gemm_fusion
  %t = (bf16[8,8]{1,0}) tuple(%before)
  %async-start.2 = ((bf16[8,8]{1,0}), bf16[4,8]{1,0}) async-start(%before), calls=%wrapped
  %all-reduce-start = bf16[8,8]{1,0} all-reduce-start(%before), replica_groups={{0,1}}, to_apply=%elementwise
  %all-reduce-done = bf16[8,8]{1,0} all-reduce-done(%all-reduce-start)
  ROOT %while = (bf16[8,8]{1,0}) while(%t), condition=%condition, body=%turn, \
backend_config={"known_trip_count":{"n":"5"}}
  %async-done.1 = bf16[4,8]{1,0} async-done(%async-start.2)
}
"""


@pytest.mark.parametrize(
    ("operation", "products"),
    [
        ("fusion(%x, %x), kind=kCustom, calls=%gemm_fusion", 1),
        ("fusion(%x), kind=kLoop, calls=%elementwise", 0),
        ("copy(%x)", 0),
        ("dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}", 1),
        ("convolution(%x, %x), dim_labels=bf_io->bf", 1),
        ('custom-call(%x, %x), custom_call_target="__cublas$lt$matmul"', 1),
        ('custom-call(%x, %x), custom_call_target="__cudnn$fmhaSoftmax"', 1),
        ('custom-call(%x), custom_call_target="__gpu$xla.gpu.triton"', 1),
        ('custom-call(%x), custom_call_target="tpu_custom_call"', 1),
        ('custom-call(), custom_call_target="AllocateBuffer"', 0),
    ],
)
def test_products_between_the_start_and_the_done_of_a_collective(operation, products):
    found = {each.kind: each for each in list_collectives(BETWEEN.replace("OPERATION", operation))}
    assert all(each.is_asynchronous for each in found.values())
    assert found["all-gather"].products == products
    assert found["all-reduce"].products == 0, "what runs before the start or after the done does not count"
    assert found["reduce-scatter"].products == 1, "a loop that holds products"
    rows = {row.kind: row for row in communication_of(BETWEEN.replace("OPERATION", operation), None)}
    assert rows["all-gather"][-2:] == (5, 5 * products)
    assert rows["all-reduce"][-2:] == (1, 0)


LOOP = """%condition (c: (s32[], f32[8])) -> pred[] {
  %c = (s32[]{:T(128)}, f32[8]{0}) parameter(0)
  %n = s32[]{:T(128)} constant(5)
  %i = s32[]{:T(128)} get-tuple-element(%c), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT
}

%body (b: (s32[], f32[8])) -> (s32[], f32[8]) {
  %b = (s32[]{:T(128)}, f32[8]{0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%b), index=0
  %x = f32[8]{0} get-tuple-element(%b), index=1
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one), metadata={op_name="while/body/add"}
  %sum = f32[8]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  ROOT %both = (s32[]{:T(128)}, f32[8]{0}) tuple(%next, /*index=1*/%sum)
}

ENTRY %main (p: f32[8]) -> (s32[], f32[8]) {
  %zero = s32[]{:T(128)} constant(0)
  %begin = s32[]{:T(128)} copy(%zero)
  %t = (s32[]{:T(128)}, f32[8]{0}) tuple(%begin, %p)
  ROOT %while = (s32[]{:T(128)}, f32[8]{0}) while(%t), condition=%condition, body=%body
}
"""


@pytest.mark.parametrize(
    ("change", "times"),
    [
        (("", ""), 5),
        (("constant(0)", "constant(2)"), 3),
        (("constant(0)", "constant(7)"), 0),
        (("add(%i, %one)", "add(%one, %i)"), 5),
        (("constant(1)", "constant(2)"), None),
        (("add(%i, %one)", "add(%one, %one)"), None),
        (("direction=LT", "direction=LE"), None),
        (("get-tuple-element(%b), index=0", "get-tuple-element(%inner), index=0"), None),
        (("get-tuple-element(%c), index=0", "get-tuple-element(%inner), index=0"), None),
        (("compare(%i, %n)", "compare(%n, %i)"), None),
        (("add(%i, %one)", "multiply(%i, %one)"), None),
        (("%n = s32[]{:T(128)} constant(5)", "%n = s32[]{:T(128)} get-tuple-element(%c), index=1"), None),
        (("%zero = s32[]{:T(128)} constant(0)", "%zero = s32[]{:T(128)} parameter(1)"), None),
    ],
)
def test_turns_that_the_compiler_does_not_know_are_counted_where_they_are_constant(change, times):
    text = LOOP.replace(*change, 1) if change[0] else LOOP
    assert [each.times for each in list_collectives(text)] == [times]


def test_turns_are_those_that_the_compiler_knows():
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def talk(x):
        def turn(x, _):
            return jax.lax.fori_loop(0, 3, lambda i, x: x + jax.lax.psum(x, "a"), x), None

        return jax.lax.scan(turn, x, length=5)[0]

    text = compiled_text(talk, mesh, jnp.ones(4))
    assert "known_trip_count" in text
    assert [each.times for each in list_collectives(text)] == [15]
    if "wrapped_compare" not in text:  # as JAX 0.12 does on CPUs, where XLA always tells
        assert [each.times for each in list_collectives(text.replace("known_trip_count", "unknown"))] == [15]


def test_branches_count_as_often_as_the_stage_takes_them_that_does_so_most():
    def loop_of(scope, name):
        line = f"while(%b), condition=%less, body=%{name}, metadata={{op_name="
        return f'  %w{name} = (s32[], f32[8]{{0}}) {line}"jit(f)/while/body/{scope}/while"}}'

    scopes = {"forward": "branch1", "backward": "branch2", "part": "branch", "send": "sends2"}
    loops = "\n".join(loop_of(scope, name) for name, scope in scopes.items())
    text = LOOP.replace("  %sum = f32[8]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add", loops)
    for name, operation in (
        ("forward", "all-reduce(%a), replica_groups={{0,1}}, to_apply=%add"),
        ("backward", "all-gather(%a), replica_groups={{0,1}}, dimensions={0}"),
        ("part", "reduce-scatter(%a), replica_groups={{0,1}}, to_apply=%add, dimensions={0}"),
        ("send", "collective-permute(%a), source_target_pairs={{0,1}}"),
    ):
        lines = f"%{name} (a: f32[8]) -> f32[8] {{", "  %a = f32[8]{0} parameter(0)"
        text = "\n".join([*lines, f"  ROOT %r = f32[8]{{0}} {operation}", "}", text])
    text = "%less (d: s32[]) -> pred[] {\n  ROOT %d = pred[] parameter(0)\n}\n\n" + text
    ticks = np.array([[1, 0], [1, 1], [2, 2], [0, 2], [2, 0]])
    times = {each.kind: each.times for each in list_collectives(text, ticks)}
    assert times == {"all-reduce": 2, "all-gather": 2, "reduce-scatter": 5, "collective-permute": 3}
    assert {each.times for each in list_collectives(text)} == {None}, "how often is not told"
