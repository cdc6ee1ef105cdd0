"""Seconds of programs as XLA writes them: what takes which, in what order, and what is waited for."""

import dataclasses

import numpy as np
import pytest

from jvarlen.estimates.cluster import Cluster, Link
from jvarlen.targets.program_seconds import program_seconds

CLUSTER = Cluster(
    name="round",
    devices_per_host=4,
    memory_bytes=1,
    flops_per_second=1e12,
    efficiency=0.5,
    attention_efficiency=0.25,
    memory_bytes_per_second=2e12,
    memory_efficiency=0.5,
    kernel_s=1e-6,
    link=Link(1e9),
    host_link=Link(1e8),
)
LAUNCH = 1e-6
PRODUCT = 2 * 1000**3 / 5e11  # seconds of one
REDUCED = 2 * 4e6 * 3 / 4 / 1e9  # of four megabytes over four devices of a host

# A loop of three turns, each with a product beside which an all-reduce runs, and an update of one of three slices.
PROGRAM = """HloModule jit_step, is_scheduled=true

%add.1 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.2 = f32[] add(%a, %b)
}

%gemm_computation (p0: bf16[1000,1000], p1: bf16[1000,1000]) -> bf16[1000,1000] {
  %p0 = bf16[1000,1000]{1,0} parameter(0)
  %p1 = bf16[1000,1000]{1,0} parameter(1)
  ROOT %dot.1 = bf16[1000,1000]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused_update (p0.1: f32[3,1000,1000], p1.1: bf16[1000,1000], p2.1: s32[]) -> f32[3,1000,1000] {
  %p0.1 = f32[3,1000,1000]{2,1,0} parameter(0)
  %p1.1 = bf16[1000,1000]{1,0} parameter(1)
  %p2.1 = s32[] parameter(2)
  %convert.1 = f32[1000,1000]{1,0} convert(%p1.1)
  %bitcast.1 = f32[1,1000,1000]{2,1,0} bitcast(%convert.1)
  %zero.1 = s32[] constant(0)
  ROOT %update.1 = f32[3,1000,1000]{2,1,0} dynamic-update-slice(%p0.1, %bitcast.1, %p2.1, %zero.1, %zero.1)
}

%condition (c: (s32[], bf16[1000,1000], f32[1000,1000], f32[3,1000,1000])) -> pred[] {
  %c = (s32[], bf16[1000,1000]{1,0}, f32[1000,1000]{1,0}, f32[3,1000,1000]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%c), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%i.1, %three), direction=LT
}

%body (t: (s32[], bf16[1000,1000], f32[1000,1000], f32[3,1000,1000])) -> (s32[], bf16[1000,1000], f32[1000,1000], f32[3,1000,1000]) {
  %t = (s32[], bf16[1000,1000]{1,0}, f32[1000,1000]{1,0}, f32[3,1000,1000]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = bf16[1000,1000]{1,0} get-tuple-element(%t), index=1
  %grad = f32[1000,1000]{1,0} get-tuple-element(%t), index=2
  %kept = f32[3,1000,1000]{2,1,0} get-tuple-element(%t), index=3
  %all-reduce-start = f32[1000,1000]{1,0} all-reduce-start(%grad), replica_groups={{0,1,2,3}}, to_apply=%add.1
  %y = bf16[1000,1000]{1,0} fusion(%x, %x), kind=kCustom, calls=%gemm_computation
  %all-reduce-done = f32[1000,1000]{1,0} all-reduce-done(%all-reduce-start)
  %updated = f32[3,1000,1000]{2,1,0} fusion(%kept, %y, %i), kind=kLoop, calls=%fused_update
  ROOT %next = (s32[], bf16[1000,1000]{1,0}, f32[1000,1000]{1,0}, f32[3,1000,1000]{2,1,0}) tuple(%i, %y, %all-reduce-done, %updated)
}

ENTRY %main (p: (s32[], bf16[1000,1000], f32[1000,1000], f32[3,1000,1000])) -> (s32[], bf16[1000,1000], f32[1000,1000], f32[3,1000,1000]) {
  %p = (s32[], bf16[1000,1000]{1,0}, f32[1000,1000]{1,0}, f32[3,1000,1000]{2,1,0}) parameter(0)
  ROOT %loop = (s32[], bf16[1000,1000]{1,0}, f32[1000,1000]{1,0}, f32[3,1000,1000]{2,1,0}) while(%p), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""  # noqa: E501


def seconds_of(text, cluster=CLUSTER, *, is_tpu=False, hosts=(0, 0, 0, 0), **options):
    return program_seconds(text, cluster, is_tpu=is_tpu, hosts=hosts, **options)


def program(instructions, computations=""):
    """One that runs these, of arguments `%x` and `%y` of bfloat16[1000,1000]."""
    lines = ["HloModule m, is_scheduled=true", "", computations, "ENTRY %main (x: bf16[1000,1000]) -> f32[] {"]
    lines += [f"  %{name} = bf16[1000,1000]{{1,0}} parameter({i})" for i, name in enumerate("xy")]
    return "\n".join([*lines, *(f"  {line}" for line in instructions), "}\n"])


def test_loops_multiply_and_products_hide_what_runs_beside_them():
    update = (2e6 + 4e6) / 1e12 + LAUNCH  # reads what it keeps, and writes one slice
    turn = max(PRODUCT + LAUNCH, REDUCED) + update
    estimate = seconds_of(PROGRAM)
    assert estimate.total == pytest.approx(3 * turn)
    assert estimate.exposed == pytest.approx(3 * (REDUCED - PRODUCT - LAUNCH))
    assert estimate[2:] == pytest.approx((3 * PRODUCT, 3 * (2e6 + 4e6), 3 * 2)), "a product and an update a turn"
    fast = dataclasses.replace(CLUSTER, link=Link(1e10))
    assert seconds_of(PROGRAM, fast).exposed == 0
    assert seconds_of(PROGRAM, fast).total == pytest.approx(3 * (PRODUCT + LAUNCH + update))


def test_links_between_hosts_are_those_of_the_members_in_each():
    hosts = (0, 0, 1, 1)
    # Out of each host by the links of two devices.
    assert seconds_of(PROGRAM, hosts=hosts).exposed == pytest.approx(3 * (REDUCED * 5 - PRODUCT - LAUNCH))


def test_collectives_run_one_at_a_time():
    start = "%s{0} = f32[1000,1000]{{1,0}} all-reduce-start(%x), replica_groups={{{{0,1,2,3}}}}, to_apply=%add"
    done = "%d{0} = f32[1000,1000]{{1,0}} all-reduce-done(%s{0})"
    lines = [each.format(i) for each in (start, done) for i in (1, 2)]
    assert seconds_of(program(lines))[:2] == pytest.approx((2 * REDUCED, 2 * REDUCED))


@pytest.mark.parametrize(
    ("line", "is_tpu", "flops"),
    [
        ("dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}", False, 2e9),
        ('custom-call(%x, %y), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":'
         '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}', False, 2e9),
        ("convolution(%x, %y), dim_labels=bf_io->bf", True, 2e9),
        # A product of batches, as TPUs have it: an input spread so that each output takes one of the kernel.
        ("convolution(%b, %k), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf", True, 3.36e9),
    ],
)  # fmt: skip
def test_products_take_their_operations(line, is_tpu, flops):
    batched = "0bf" in line
    extra = ["%b = bf16[8,500,600]{2,1,0} bitcast(%x)", "%k = bf16[8,600,700]{2,1,0} bitcast(%y)"] if batched else []
    result = "bf16[8,500,700]" if batched else "bf16[1000,1000]"
    text = program([*extra, f"ROOT %z = {result} {line}"])
    assert seconds_of(text, is_tpu=is_tpu).total == pytest.approx(flops / 5e11 + LAUNCH)


@pytest.mark.parametrize(
    ("is_tpu", "precision", "share"), [(False, "", 2), (False, "highest", 16), (True, "", 1), (True, "highest", 6)]
)
def test_products_of_float32_are_slower(is_tpu, precision, share):
    line = "dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    line += f", operand_precision={{{precision},{precision}}}" if precision else ""
    text = program([f"ROOT %z = bf16[1000,1000] {line}"]).replace("bf16", "f32")
    assert seconds_of(text, is_tpu=is_tpu).total == pytest.approx(share * PRODUCT + LAUNCH)


ATTENTION = {
    "cudnn": ("custom-call(%q, %k, %k)", '"__cudnn$fmhaSoftmax"', "", 2),
    "cudnn, backward": ("custom-call(%q, %k, %k, %q)", '"__cudnn$fmhaSoftmaxBackward"', "", 5),
    "triton": ("custom-call(%ids, %q, %k, %k)", '"xla.gpu.triton"', 'backend_config={name = "_dkv_kernel"}', 4),
}


@pytest.mark.parametrize(("call", "target", "rest", "products"), ATTENTION.values(), ids=ATTENTION)
@pytest.mark.parametrize("causal", [False, True])
def test_kernels_of_attention_take_their_operations(call, target, rest, products, causal):
    name = "causal_attention_forward" if causal else "attention_forward"
    line = f'{call}, custom_call_target={target}, metadata={{op_name="jit({name})/call"}}, {rest}'
    given = ["%ids = s32[2,512] bitcast(%x)", "%q = bf16[2,512,8,64] bitcast(%x)", "%k = bf16[2,2048,2,64] bitcast(%x)"]
    pairs, rate = 2 * 8 * 512 * 2048 / (2 if causal else 1), 2.5e11 * (0.77 if "triton" in target else 1)
    text = program([*given, f"ROOT %z = (bf16[2,512,8,64], f32[2,8,512]) {line}"])
    assert seconds_of(text).total == pytest.approx(products * 2 * pairs * 64 / rate + LAUNCH)


@pytest.mark.parametrize(("length", "num_keys"), [(None, 2048), (1024, 1024)])
def test_splash_attention_takes_its_operations(length, num_keys):
    """Two rows of 1,024 are one array of keys, and the instruction is broken over lines."""
    given = ["%q = bf16[8,512,64] bitcast(%x)", "%k = bf16[8,2048,64] bitcast(%x)", "%n = s32[1,1,1] bitcast(%x)"]
    line = (
        '%splash_mha_dq_segmented.7 = bf16[8,512,64] custom-call(%n, %q, %k, %k), custom_call_target="tpu_custom_call"'
    )
    kept = 'frontend_attributes={kernel_metadata={\n "is_mqa": false\n}}'
    text = program([*given, f'{line}, {kept}, metadata={{op_name="jit(causal_attention_backward)"}}'])
    flops = 3 * 8 * 512 * num_keys * 64
    assert seconds_of(text, is_tpu=True, length=length).total == pytest.approx(flops / 2.5e11 + LAUNCH)


def products(name, num):
    """A computation of so many products."""
    lines = [f"%{name}.0 = bf16[1000,1000] parameter(0)"]
    lines += [
        f"%{name}.{i + 1} = bf16[1000,1000] dot(%{name}.{i}, %{name}.{i}), lhs_contracting_dims={{1}}, "
        "rhs_contracting_dims={0}"
        for i in range(num)
    ]
    return computation(name, lines)


def computation(name, lines):
    *before, last = lines
    body = "\n".join(f"  {line}" for line in [*before, f"ROOT {last}"])
    return f"%{name} (a: bf16[1000,1000]) -> bf16[1000,1000] {{\n{body}\n}}\n\n"


def test_of_branches_the_longest_counts():
    text = program(["%w = s32[] bitcast(%x)", "ROOT %z = bf16[1000,1000] conditional(%w, %x, %x, %x), "
                    "branch_computations={%none, %one, %two}"],
                   products("none", 0) + products("one", 1) + products("two", 2))  # fmt: skip
    assert seconds_of(text).total == pytest.approx(2 * (PRODUCT + LAUNCH))


def test_of_a_tick_the_longest_counts_that_a_stage_does():
    def loop(name, taken, branch):
        scope = f'metadata={{op_name="jit(f)/while/body/branch{branch}/while"}}'
        return f"%{name}_loop = bf16[1000,1000] while(%{taken}), condition=%less, body=%{name}, {scope}"

    within = computation("forward", ["%whole = bf16[1000,1000] parameter(0)", loop("one", "whole", "")])
    lines = [loop("forward", "x", 1), "ROOT " + loop("two", "forward_loop", 2)]
    less = "%less (c: bf16[1000,1000]) -> pred[] {\n  ROOT %c = pred[] parameter(0)\n}\n\n"
    text = program(lines, less + products("one", 1) + within + products("two", 2))
    ticks = np.array([[1, 0], [1, 1], [2, 1], [0, 2], [0, 0]])
    assert seconds_of(text, ticks=ticks).total == pytest.approx((1 + 1 + 2 + 2) / 5 * (PRODUCT + LAUNCH))
    assert seconds_of(text) is None


@pytest.mark.parametrize(
    "text",
    [
        PROGRAM.replace('"known_trip_count":{"n":"3"}', ""),
        program(['ROOT %z = bf16[1000,1000] custom-call(%x), custom_call_target="tpu_custom_call"']),
        program(['ROOT %z = bf16[1000,1000] custom-call(%x), custom_call_target="xla.gpu.triton", name = "mine"']),
        program(["ROOT %z = bf16[1000,1000]{1,0:S(5)} copy(%x)"]),
    ],
    ids=["turns of a loop", "a kernel of a TPU", "a kernel of a GPU", "memory of the host"],
)
def test_seconds_of_a_program_with_unknown_parts_are_unknown(text):
    assert seconds_of(text) is None
