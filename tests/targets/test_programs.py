"""What compilers make of the steps of `cases.py`: which kernels they have, and what runs beside what."""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator

import jax
import pytest
from jax.sharding import PartitionSpec

from jvarlen import Layout, UserError, with_float32_master
from jvarlen.attention import attend
from jvarlen.batches import BatchShapes
from jvarlen.distributed.placement import place
from jvarlen.estimates.hlo import (
    arrays_in,
    called_by,
    collective_of,
    computations_of,
    instructions_of,
    list_collectives,
    operands_of,
)
from jvarlen.models import DecoderConfig, init_params, layered, make_loss_fn
from jvarlen.parallel.layer_loop import reduce_by_layers
from jvarlen.parallel.layers import LayeredParams
from jvarlen.targets.buffers import largest_buffers
from jvarlen.targets.compile_for import TargetStep, compile_for
from jvarlen.targets.dump import compile_with_dump
from jvarlen.targets.report import TargetRow
from jvarlen.targets.target import Target
from tests.targets.cases import (
    BUCKETS,
    CASES,
    FEW,
    KNOWN_FAULTS,
    MEASURED,
    MODELS,
    NOT_SURE,
    OPTIMIZER,
    REFUSED,
    Case,
    faults_of_case,
)

TRITON = {"_forward_kernel", "_dq_kernel", "_dkv_kernel"}
CUDNN = {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
SPLASH = {"fwd", "dq", "dkv"}


def faults_of(case: Case, row: TargetRow) -> Iterator[str]:
    """By name, what a program of a case should have and has not."""
    assert row.kernels is not None
    assert row.communication is not None
    if case.is_tpu:
        kernels, expected = {name.split("_")[2] for name in row.kernels}, SPLASH
    else:
        kernels, expected = {*row.kernels}, CUDNN if case.is_by_cudnn else TRITON
    if kernels != expected:
        yield f"attention is by {sorted(kernels)}"
    for each in row.communication:
        if each.asynchronous < each.times:
            yield f"nothing can run beside some {each.kind}"
    layout = Layout.parse(case.layout)
    of_data = [each for each in row.communication if "data" in each.axes]
    reduced = [each for each in of_data if each.kind in ("all-reduce", "reduce-scatter")]
    if reduced and not any(each.overlapped for each in reduced):
        yield "no gradient is reduced beside a product"
    if layout.zero and all(each.kind != "reduce-scatter" for each in reduced):
        yield "gradients that are sharded are all-reduced"
    gathered = [each for each in of_data if each.kind == "all-gather"]
    if layout.zero == 3 and not any(each.overlapped for each in gathered):
        yield "no parameter is gathered beside a product"
    of_attention = [each for each in row.communication if each.axes == ("context",)]
    for kind in ("all-gather", "all-to-all") if layout.context > 1 else ():
        if not any(each.overlapped for each in of_attention if each.kind == kind):
            yield f"no {kind} of attention runs beside a product"
    if layout.num_devices == 1 and (row.launches is None or row.launches != (0, 0, 0, 1)):
        yield "a step is not one CUDA graph"


@pytest.mark.parametrize(
    ("case", "buckets"),
    [
        *(pytest.param(case, BUCKETS, id=str(case), marks=pytest.mark.slow) for case in CASES),
        *(pytest.param(case, BUCKETS[:1], id=f"{case}, one bucket") for case in FEW),
    ],
)
@pytest.mark.usefixtures("optimized")
def test_programs_have_no_faults_but_known_ones(case, buckets):
    if case.not_here:
        pytest.skip(case.not_here)
    report = case.compile(buckets)
    found = {fault for row in report for fault in faults_of(case, row)}
    known, not_sure = (faults_of_case(case, listed) for listed in (KNOWN_FAULTS, NOT_SURE))
    assert found - not_sure == known
    measured = json.loads(MEASURED.read_text())
    if str(case) not in measured["bytes"] or jax.__version__ not in measured["versions"]["GPUs"]:
        pytest.skip("its temporaries have not been measured: python -m tests.targets.cases")
    for row in report:
        assert row.temp_bytes <= 1.1 * measured["bytes"][str(case)][str(row.bucket)], measured["versions"]


def test_the_last_dimension_of_layers_is_reduced_without_a_transposed_copy_of_all():
    if missing := Case("8xh100", "llama", "data8", "padded", 1).not_here:
        pytest.skip(missing)
    target, whole, spec = Target.parse("2xh100"), PartitionSpec(), PartitionSpec(None, None, "data")
    mesh = place(Layout(data=2), target.devices).mesh

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=whole, out_specs=spec, check_vma=False)
    def reduce(grads):
        return reduce_by_layers(LayeredParams((), 2 * grads), LayeredParams((), spec), "float32").layers

    given = jax.ShapeDtypeStruct((7, 64, 128), "float32", sharding=jax.NamedSharding(mesh, whole))
    program = jax.jit(reduce).lower(given).compile({"xla_gpu_autotune_level": 0}).as_text()
    shapes = [tuple(map(int, sizes.split(","))) for sizes in re.findall(r"f32\[([\d,]+)\]", program)]
    assert "reduce-scatter" in program
    assert {shape for shape in shapes if math.prod(shape) == math.prod(given.shape)} == {given.shape}


@pytest.mark.usefixtures("optimized")
def test_a_loop_over_layers_finds_which_blocks_meet_by_one_kernel_for_the_limits_and_one_for_each_side():
    if missing := Case("1xh100", "llama", "data1", "packed", 1).not_here:
        pytest.skip(missing)

    def loss(x, ids):
        def layer(x, _):
            return x + attend(x, x, x, segment_ids=ids, implementation="triton"), None

        return jax.lax.scan(jax.checkpoint(layer), x, length=3)[0].astype("float32").sum()

    sharding = jax.sharding.SingleDeviceSharding(Target.parse("1xh100").devices[0])
    shapes = ((4, 1024, 2, 64), "bfloat16"), ((4, 1024), "int32")
    arguments = (jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in shapes)
    program = jax.jit(jax.grad(loss)).lower(*arguments).compile({"xla_gpu_autotune_level": 0}).as_text()
    bodies = [instructions_of(body) for body in computations_of(program).values()]
    bodies = [body for body in bodies if any("triton" in each.rest for each in body)]
    kernels = [[each for each in body if each.operation == "fusion" and "block_ranges" in each.rest] for body in bodies]
    assert [len(each) for each in kernels] == [2, 3]


def dumped(text, config, model=None):
    """What XLA writes of a step for eight GPUs, and the shapes of its stacks of kernels."""
    if missing := Case("8xh100", "llama", "data8", "packed", 1).not_here:
        pytest.skip(missing)
    params = jax.eval_shape(lambda: init_params(config, 0))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, "bfloat16"), params)
    layout = Layout.parse(text)
    shapes = BatchShapes([(1, 512)], num_microbatches=4 * layout.data, has_many_groups=False)
    step = TargetStep(model or layered(config), with_float32_master(OPTIMIZER), Target.parse("8xh100"))
    compiler = step.compiler(shapes, layout, params)
    kernels = [leaf.shape for leaf in jax.tree.leaves(params["layers"][0]) if leaf.ndim > 1]
    return compile_with_dump(compiler, compiler.lower(shapes.buckets[0]))[1], kernels


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("zero", [2, 3])
def test_sums_and_parameters_of_layers_are_whole_one_layer_at_a_time(zero):
    num_layers, num_microbatches = 5, 4
    dump, kernels = dumped(f"data8.zero{zero}", dataclasses.replace(MODELS["llama"], num_layers=num_layers))
    of_layer = sum(map(math.prod, kernels))
    collectives = list_collectives(dump.program)
    reduced = [each for each in collectives if each.kind == "reduce-scatter"]
    assert max(each.num_bytes for each in reduced) == 4 * of_layer
    times = sum(each.times for each in reduced if each.num_bytes == 4 * of_layer)
    assert times == num_layers * num_microbatches, "a reduction of each layer in each backward pass"
    of_turns = [
        each for each in collectives if each.kind == "all-gather" and each.times == num_layers * num_microbatches
    ]
    if zero == 3:
        assert [each.num_bytes for each in of_turns] == [2 * of_layer] * 2
        assert all(each.products for each in of_turns), "the next layer is gathered beside the products of this one"
    bodies = computations_of(dump.program)
    if zero == 3:
        loops = loops_that_gather(2 * of_layer, bodies)
        assert [next_turn_multiplies_what_is_gathered(loop, bodies) for loop in loops] == [True, True]
    # Fusions may widen and turn what they then slice.
    fused = {name for body in bodies.values() for each in instructions_of(body) if each.operation == "fusion"
             for name in called_by(each.rest)}  # fmt: skip
    stored = {array for name, body in bodies.items() if name not in fused for each in instructions_of(body)
              for array in arrays_in(each.shapes)}  # fmt: skip
    stacks = {(num_layers, *shape) for shape in kernels}
    whole = {array for array in stored if math.prod(array[1]) in map(math.prod, stacks)}
    assert whole <= ({("bf16", shape) for shape in stacks} if zero == 2 else set())


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("text", ["data8.zero3", "data8.zero3.remat_full", "data4.tensor2.zero3"])
@pytest.mark.parametrize("width", [128, 2048, 4096])  # of the wider ones, only the smallest arrays go first
def test_the_next_layer_is_gathered_before_the_products_of_this_one(width, text):
    dump, kernels = dumped(text, dataclasses.replace(MODELS["llama"], width=width, mlp_width=2 * width))
    bodies = computations_of(dump.program)
    loops = loops_that_gather(2 * min(map(math.prod, kernels)) // Layout.parse(text).tensor, bodies)
    assert len(loops) == 2, "forward and backward"
    for loop in loops:
        products = [i for i, each in enumerate(loop) if each.operation == "custom-call" or is_product(each, bodies)]
        start = next(i for i, each in enumerate(loop) if each.operation == "all-gather-start")
        assert start < products[0]
        assert "force_delay_async" in loop[start].rest
        assert collective_of(loop[start]).num_bytes <= 30 * 2**20
        if width == 128:
            assert sum(each.operation == "all-gather-start" for each in loop) == 1


def loops_that_gather(num_bytes, bodies):
    """The instructions of each loop over layers that gathers so many bytes, or more, at once."""

    def gathers(each):
        found = collective_of(each)
        return found is not None and found.kind == "all-gather" and found.num_bytes >= num_bytes

    bodies = [body for body in map(instructions_of, bodies.values()) if any(map(gathers, body))]
    return [body for body in bodies if not any(each.operation == "while" for each in body)]


def is_product(each, bodies):
    return any(" dot(" in bodies[name] for name in called_by(each.rest))


def next_turn_multiplies_what_is_gathered(loop, bodies):
    """Whether a loop carries what it gathers to its next turn's products, and no product of this turn waits for it."""

    def products_after(names):
        for each in loop:
            if names & {*operands_of(each)}:
                names.add(each.name)
        after = [each for each in loop if each.name in names]
        return [each for each in after if is_product(each, bodies)]

    gathered = {each.name for each in loop if each.operation.startswith("all-gather")}
    of_this_turn = products_after(gathered)
    carried = {f"index={i}," for i, name in enumerate(operands_of(loop[-1])) if name in gathered}
    given = {each.name for each in loop if each.operation == "get-tuple-element" and loop[0].name in operands_of(each)
             and any(place in each.rest for place in carried)}  # fmt: skip
    return not of_this_turn and bool(products_after(given))


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_a_checkpoint_policy_keeps_what_it_names():
    config = dataclasses.replace(MODELS["llama"], num_layers=5)
    model, policy = layered(config), jax.checkpoint_policies.save_only_these_names("up")

    def layer(params, x, microbatch, axes):
        return jax.checkpoint(lambda *given: model.layer(*given, microbatch, axes), policy=policy)(params, x)

    dump, _ = dumped("data8.zero3", config, model._replace(layer=layer))
    stacks = [each.shape for each in largest_buffers(dump, 1000) if re.match(r"\w+\[5,(1,)?512,", each.shape)]
    assert sorted(stacks) == ["bf16[5,1,512,128]", "bf16[5,512,256]"], "inputs of layers, and what is named"


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_a_stage_holds_one_copy_of_its_sums():
    dump, kernels = dumped("data4.stage2.zero1", dataclasses.replace(MODELS["llama"], num_layers=10))
    sums = sorted(f"f32[5,{rows},{columns}]" for rows, columns in kernels)
    held = largest_buffers(dump, 1000)
    temporary = [each.shape for each in held if each.kind == "temporary"]
    sizes = {5 * math.prod(shape) for shape in kernels}
    dims = [(shape, [*map(int, re.findall(r"\d+", shape.partition("[")[2]))]) for shape in temporary]
    assert sorted(shape for shape, of in dims if shape.startswith("f32") and math.prod(of) in sizes) == sums


@pytest.mark.parametrize(("model", "layout"), REFUSED)
def test_what_the_list_leaves_out_is_refused(model, layout):
    with pytest.raises(UserError, match=REFUSED[model, layout]):
        Case("here", model, layout, "padded", 4).compile()


@pytest.mark.slow
def test_a_loop_over_layers_takes_little_more_than_unrolled_layers():
    """Whose elementwise results XLA computes again inside of kernels."""
    if missing := Case("1xh100", "demo", "data1", "padded", 1).not_here:
        pytest.skip(missing)
    config, buckets = DecoderConfig(num_layers=4), BatchShapes([(8, 512)], num_microbatches=1, has_many_groups=False)
    params, layout = jax.eval_shape(lambda: init_params(config, 0)), Layout(data=1)
    [unrolled], [in_a_loop] = (
        compile_for(model, OPTIMIZER, buckets, layout=layout, params=params, target="1xh100", progress=False)
        for model in (make_loss_fn(config), layered(config))
    )
    assert in_a_loop.temp_bytes < 1.2 * unrolled.temp_bytes
