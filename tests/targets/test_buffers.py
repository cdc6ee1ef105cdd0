"""The largest buffers of a program: their bytes, and the line of the user's own file that made each."""

import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import jvarlen
from jvarlen.batches import BatchShapes
from jvarlen.targets.buffers import Buffer, allocated_bytes, largest_buffers
from jvarlen.targets.compile_for import compile_for
from jvarlen.targets.dump import Dump
from jvarlen.targets.target import Target

THEIR_FILE = """
import jax
import jax.numpy as jnp


def widen(x, kernel):
    return jnp.tanh(x @ kernel)


def loss_fn(params, batch):
    x = params["embedding"][batch.tokens]
    wide = widen(x, params["up"])
    logits = jnp.sin(wide @ params["down"])
    return jnp.sum(logits.mean(-1) * batch.weights), jnp.sum(batch.weights)


def scanned_loss_fn(params, batch):
    def layer(x, kernels):
        up, down = kernels
        hidden = jnp.tanh(x @ up)
        return x + hidden @ down, None

    x, _ = jax.lax.scan(layer, params["embedding"][batch.tokens], (params["up"], params["down"]))
    return jnp.sum(x.mean(-1) * batch.weights), jnp.sum(batch.weights)
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A module outside of this library, in whose lines JAX's traces are kept."""
    (tmp_path / "theirs.py").write_text(THEIR_FILE)
    spec = importlib.util.spec_from_file_location("theirs", tmp_path / "theirs.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "theirs", module)
    spec.loader.exec_module(module)
    limit = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 10)
    yield module
    jax.config.update("jax_traceback_in_locations_limit", limit)


def row_of(loss_fn, params, num_devices=1, target=None, keep=None):
    target = target or Target("some", tuple(jax.devices()[:num_devices]), None, is_here=True)
    shapes = BatchShapes([(4, 64)], num_microbatches=num_devices, has_many_groups=False)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in params.items()}
    with pytest.MonkeyPatch.context() as patch:
        if keep is not None:
            patch.setattr("jvarlen.targets.compile_for.largest_buffers", keep.append)
        [row] = compile_for(loss_fn, optax.sgd(0.1), shapes, target=target, params=params, progress=False)
    return row


def line_of(code):
    return next(number for number, line in enumerate(THEIR_FILE.splitlines(), 1) if code in line)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_the_largest_buffers_and_the_lines_that_made_them(theirs, num_devices):
    params = {"embedding": (100, 16), "up": (16, 2048), "down": (2048, 8)}
    row = row_of(theirs.loss_fn, params, num_devices)
    wide = [buffer for buffer in row.buffers if buffer.num_bytes == 4 * 4 * 64 * 2048]
    up, down = (f"{theirs.__file__}:{line_of(code)}" for code in ("jnp.tanh(x @ kernel)", "jnp.sin(wide @"))
    told = {(buffer.operation, buffer.source) for buffer in wide}
    assert f"{up} widen" in {source for _, source in told}
    # Which of them lie there when the most does, depends on what XLA fuses.
    of_up = {(operation, f"{up} widen") for operation in ("tanh", "mul (backward)", "add_any (backward)")}
    assert told <= of_up | {("dot_general (backward)", f"{down} loss_fn")}
    assert {buffer.kind for buffer in wide} == {"temporary"}
    arguments = {buffer.operation: buffer for buffer in row.buffers if buffer.kind == "argument"}
    assert arguments["state.params['up']"][:3] == (4 * 16 * 2048, "argument", "f32[16,2048]")
    assert arguments["state.params['up']"].source is None
    sizes = [buffer.num_bytes for buffer in row.buffers]
    assert len(sizes) == 10
    assert sizes == sorted(sizes, reverse=True)
    assert sum(size for size, kind, *_ in row.buffers if kind == "temporary") <= row.temp_bytes


def test_what_a_loop_stacks_has_the_line_that_made_an_element(theirs):
    params = {"embedding": (100, 16), "up": (3, 16, 2048), "down": (3, 2048, 16)}
    stacked = row_of(theirs.scanned_loss_fn, params).buffers[0]
    assert stacked[:3] == (4 * 3 * 4 * 64 * 2048, "temporary", "f32[3,4,64,2048]")
    assert stacked.source == f"{theirs.__file__}:{line_of('jnp.tanh(x @ up)')} scanned_loss_fn.layer"


def test_all_buffers_at_the_peak_are_nearly_all_bytes_of_the_step(theirs):
    params = {"embedding": (100, 16), "up": (16, 2048), "down": (2048, 8)}
    dumps = []
    row = row_of(theirs.loss_fn, params, keep=dumps)
    buffers = largest_buffers(dumps[0], 10**6)
    assert sum(size for size, kind, *_ in buffers if kind == "argument") == row.argument_bytes
    held = sum(buffer.num_bytes for buffer in buffers)
    assert 0.98 * row.total_bytes < held <= row.total_bytes


def test_arrays_of_this_library_have_its_lines(theirs):
    row = row_of(theirs.loss_fn, {"embedding": (50_000, 16), "up": (16, 8), "down": (8, 8)})
    assert {buffer.kind for buffer in row.buffers} == {"argument", "temporary"}
    places = {buffer.source.split(":")[0] for buffer in row.buffers if buffer.kind == "temporary"}
    assert any(place.startswith("jvarlen/") for place in places), places


# What is there of a program for GPUs: a loop that stacks what its turns leave, and arrays of its caller.
PROGRAM = """HloModule jit_step, is_scheduled=true

FileNames
1 "/home/them/train.py"
2 "/home/them/.venv/lib/python3.11/site-packages/flax/nnx/linear.py"
3 "HERE/training/step_sums.py"
4 "HERE/compiling/lowering.py"
5 "/usr/lib/python3/dist-packages/optax/update.py"

FunctionNames
1 "loss_fn.<locals>.layer"
2 "Linear.__call__"
3 "accumulate"
4 "StepCompiler.lower"
5 "main"

FileLocations
1 {file_name_id=1 function_name_id=5 line=80 end_line=80 column=1 end_column=9}
2 {file_name_id=4 function_name_id=4 line=165 end_line=165 column=1 end_column=9}
3 {file_name_id=3 function_name_id=3 line=179 end_line=179 column=1 end_column=9}
4 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=1 end_column=9}
5 {file_name_id=2 function_name_id=2 line=300 end_line=300 column=1 end_column=9}
6 {file_name_id=5 function_name_id=3 line=7 end_line=7 column=1 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=4 parent_frame_id=4}
5 {file_location_id=5 parent_frame_id=5}
6 {file_location_id=6 parent_frame_id=4}

%fused_stack (p.0: f32[2,8], p.1: f32[8], p.2: s32[]) -> f32[2,8] {
  %p.0 = f32[2,8]{1,0} parameter(0)
  %p.1 = f32[8]{0} parameter(1)
  %p.2 = s32[] parameter(2)
  %one = f32[1,8]{1,0} bitcast(%p.1)
  ROOT %dus = f32[2,8]{1,0} dynamic-update-slice(%p.0, %one, %p.2), metadata={\
op_name="jit(step)/jvp()/while/body/jit(dynamic_update_index_in_dim)/dynamic_update_slice" stack_frame_id=3}
}

%body (b: (s32[], f32[2,8])) -> (s32[], f32[2,8]) {
  %b = (s32[], f32[2,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %stack = f32[2,8]{1,0} get-tuple-element(%b), index=1
  %gemm = (f32[8]{0}, s8[64]{0}) custom-call(%i), custom_call_target="__cublas$gemm", metadata={\
op_name="jit(step)/jvp()/while/body/closed_call/jit(linear)/dot_general" stack_frame_id=5}
  %product = f32[8]{0} get-tuple-element(%gemm), index=0
  %fusion.stack = f32[2,8]{1,0} fusion(%stack, %product, %i), kind=kLoop, calls=%fused_stack
  ROOT %next = (s32[], f32[2,8]{1,0}) tuple(%i, %fusion.stack)
}

%condition (c: (s32[], f32[2,8])) -> pred[] {
  %c = (s32[], f32[2,8]{1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

%elsewhere (e: f32[4,8]) -> f32[4,8] {
  %e = f32[4,8]{1,0} parameter(0)
  ROOT %moved = f32[4,8]{1,0} convert(%e)
}

ENTRY %main (param.0: f32[4,8]) -> f32[4,8] {
  %param.0 = f32[4,8]{1,0} parameter(0), metadata={op_name="state.params[\\'w\\']"}
  %zeros = f32[2,8]{1,0} broadcast(%zero), metadata={op_name="jit(step)/while/body/closed_call" stack_frame_id=3}
  %begin = (s32[], f32[2,8]{1,0}) tuple(%zero, %zeros)
  %while = (s32[], f32[2,8]{1,0}) while(%begin), condition=%condition, body=%body, metadata={\
op_name="jit(step)/jvp()/while" stack_frame_id=3}
  %early = f32[4,8]{1,0} exponential(%param.0), metadata={op_name="jit(step)/exp" stack_frame_id=4}
  %summed = f32[4,8]{1,0} add(%early, %param.0), metadata={\
op_name="jit(step)/transpose(jvp())/add_any" stack_frame_id=6}
  %wrapped = f32[4,8]{1,0} fusion(%summed), kind=kLoop, calls=%elsewhere
  ROOT %result = f32[4,8]{1,0} copy(%wrapped)
}
"""
BUFFERS = """BufferAssignment:
allocation 0: size 256, parameter 0, shape |f32[4,8]| at ShapeIndex {}, maybe-live-out:
 value: <1 param.0 @0> (size=128,offset=0): f32[4,8]{1,0}
 value: <2 result @0> (size=128,offset=0): f32[4,8]{1,0}
allocation 1: size 64, maybe-live-out:
 value: <3 metric @0> (size=64,offset=0): f32[16]{0}
allocation 2: size 4, thread-local:
 value: <4 scalar @0> (size=4,offset=0): f32[]
allocation 3: size 9000, color 1, preallocated-temp:
 value: <5 vector.memory @0> (size=9000,offset=0): f32[2250]{0:S(1)}
allocation 4: size 512, preallocated-temp:
 value: <6 early @0> (size=200,offset=0): f32[4,8]{1,0:T(8,128)}
 value: <7 zeros @0> (size=100,offset=100): f32[2,8]{1,0}
 value: <8 while{1} (phi) @0> (size=100,offset=100): f32[2,8]{1,0}
 value: <9 c{1} (phi) @0> (size=100,offset=100): f32[2,8]{1,0}
 value: <10 while{} (phi) @0> (size=16,offset=496): (s32[], f32[2,8]{1,0})
 value: <11 summed @0> (size=130,offset=230): f32[4,8]{1,0}
 value: <12 wrapped @0> (size=120,offset=370): f32[4,8]{1,0}
"""
LIFETIMES = """HloLiveRange (max 20):
  InstructionSequence:
    0:param.0
  BufferLiveRange:
    param.0{}:0-20
    early{}:1-2
    zeros{}:3-4
    while{1}:4-12
    c{1}:5-12
    while{}:4-12
    summed{}:10-15
    wrapped{}:11-12
    vector.memory{}:0-20
"""


def test_what_is_held_at_the_peak_of_a_program():
    program = PROGRAM.replace("HERE", str(Path(jvarlen.__file__).parent))
    buffers = largest_buffers(Dump(program, BUFFERS, LIFETIMES))
    # 366 bytes from moment 11 on: not 430, of all that lies there at any time, nor what another kind of memory holds.
    assert buffers == (
        Buffer(256, "argument", "f32[4,8]", "state.params['w']", None),
        Buffer(130, "temporary", "f32[4,8]", "add_any (backward)", "jvarlen/training/step_sums.py:179 accumulate"),
        Buffer(120, "temporary", "f32[4,8]", "add_any (backward)", "jvarlen/training/step_sums.py:179 accumulate"),
        Buffer(100, "temporary", "f32[2,8]", "linear/dot_general", "/home/them/train.py:12 loss_fn.layer"),
        Buffer(64, "output", "f32[16]", "metric", None),
        Buffer(16, "temporary", "(s32[], f32[2,8]{1,0})", "while", "jvarlen/training/step_sums.py:179 accumulate"),
    )
    assert largest_buffers(Dump(program, BUFFERS, LIFETIMES), 2) == buffers[:2]
    assert allocated_bytes(Dump("", BUFFERS)) == 512  # without those in other memory


def test_buffers_are_not_known_where_the_compiler_does_not_tell_when_they_are_held():
    assert largest_buffers(Dump(PROGRAM, BUFFERS)) is None
