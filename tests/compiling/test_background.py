"""Programs that are compiled in the background: the same ones, each in time, and no step waits for another's."""

import contextlib
import json
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen import (
    Bucket,
    CompileOptions,
    Plan,
    RecompileError,
    UnplannedShapeError,
    compile_buckets,
    make_plan,
    no_recompiles,
)
from jvarlen.batches import BatchShapes, token_batch_spec
from jvarlen.compiling.lowering import StepCompiler
from tests.support.meshes import data_mesh

BUCKETS = [Bucket(4, 8), Bucket(2, 16), Bucket(2, 24), Bucket(1, 32)]  # the third is the largest
FIRST, SECOND, LARGEST, LAST = BUCKETS


def count_step(state, batch):
    return state + jnp.sum(batch.weights), {"tokens": jnp.sum(batch.tokens)}


def make_batch(bucket):
    return jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), token_batch_spec(bucket, 2))


def compile_count(
    buckets=BUCKETS, *, step=count_step, when="background", state=0.0, num_threads=1, mesh=None, **kwargs
):
    options = CompileOptions(cache_dir=None, when=when, num_threads=num_threads)
    shapes = buckets if isinstance(buckets, Plan) else BatchShapes(buckets, num_microbatches=2, layout=mesh)
    return compile_buckets(step, state, shapes, progress=False, options=options, **kwargs)


@pytest.fixture
def gates(monkeypatch):
    """An event for each bucket, whose program is compiled once it is set; and the order in which threads began."""

    class Gates(dict):
        def open(self, *buckets):
            for bucket in buckets:
                self[bucket].set()

    gates = Gates({bucket: threading.Event() for bucket in BUCKETS})
    gates.began = []
    compile_now = StepCompiler.compile

    def compile_when_open(step_compiler, lowered):
        gates.began.append(lowered.key)
        assert gates[lowered.key].wait(60)
        return compile_now(step_compiler, lowered)

    monkeypatch.setattr(StepCompiler, "compile", compile_when_open)
    yield gates
    gates.open(*BUCKETS)


@contextlib.contextmanager
def waiting(call, *args):
    """Runs a call in another thread, which has to be waiting when the block begins."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call(*args)))
    thread.start()
    time.sleep(0.2)
    assert thread.is_alive()
    yield results
    thread.join(60)


def wait_until(is_true):
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("num_devices", [None, 2])
def test_steps_and_programs_are_those_of_compiling_ahead(num_devices):
    mesh = None if num_devices is None else data_mesh(num_devices)
    steps = ahead, background = [compile_count(when=when, mesh=mesh) for when in ("ahead", "background")]
    states = [jnp.float32(0), jnp.float32(0)]
    with no_recompiles():
        for bucket in (FIRST, LAST, SECOND, FIRST, LARGEST):
            states = [step(state, make_batch(bucket))[0] for step, state in zip(steps, states, strict=True)]
            assert float(states[0]) == float(states[1])
    assert background.pending == ()
    assert {row.bucket: row.total_bytes for row in background.report} == {
        row.bucket: row.total_bytes for row in ahead.report
    }
    assert background.report.times_used == 5


def test_a_step_waits_for_its_own_program_alone(gates):
    step = compile_count()
    state = jnp.float32(0)
    assert step.pending == (FIRST, LARGEST, SECOND, LAST)
    with waiting(step, state, make_batch(FIRST)) as results:
        gates.open(FIRST)
    state, metrics = results[0]
    assert state == metrics["tokens"] == 64
    assert FIRST not in step.pending
    stalled = {bucket: seconds > 0 for bucket, seconds in step._stall_s.items()}
    assert stalled == {FIRST: True, SECOND: False, LARGEST: False, LAST: False}
    for _ in range(3):  # whatever the others do
        state, _ = step(state, make_batch(FIRST))
    assert state == 4 * 64
    # Its only thread is busy with the largest: the one that is needed comes before all others, beside it.
    wait_until(lambda: gates.began == [FIRST, LARGEST])
    gates.open(SECOND)
    state, _ = step(state, make_batch(SECOND))
    assert state == 5 * 64
    assert gates.began[2] == SECOND
    assert LARGEST in step.pending
    gates.open(*BUCKETS)
    report = step.report  # waits
    assert not step.pending
    assert [row.bucket for row in report] == [FIRST, LARGEST, SECOND, LAST]
    assert [row.stall_s > 0 for row in report] == [True, False, True, False]
    assert "stall s" in str(report)
    assert json.loads(report.to_json())["rows"][0]["stall_s"] == report[0].stall_s


def test_a_wait_may_end_early(gates):
    step = compile_count()
    assert not step.wait(LAST, timeout=0.15)
    gates.open(*BUCKETS)
    assert step.wait(LAST)
    assert step.wait()
    assert step.wait(LAST, timeout=0.0)
    assert not step.pending
    with pytest.raises(ValueError, match=r"not compiled: \[\(9, 9\)\]"):
        step.wait((9, 9))


def test_only_what_was_planned_is_compiled_under_the_guard():
    step, state = compile_count(), jnp.float32(0)
    with no_recompiles("count") as count:
        state, _ = step(state, make_batch(FIRST))
        step.wait()
        assert not count.recompilations
        jax.jit(lambda x: x * 17)(state)
    assert count.functions == ["<lambda>"]
    with no_recompiles("count") as count, pytest.raises(RecompileError), no_recompiles():
        jax.jit(lambda x: x * 18)(state)


def test_buckets_come_as_the_plan_first_uses_them_and_the_largest_second(gates):
    gates.open(*BUCKETS)
    lengths = np.repeat([8, 16, 24, 32], [16, 12, 8, 6])
    plan = make_plan(lengths, BUCKETS, num_microbatches=2, order="length_descending")
    uses = [plan.buckets.shapes[k] for k in plan.step_bucket]
    assert uses[0] == LAST
    compile_count(plan).wait()
    assert gates.began == [LAST, LARGEST, SECOND, FIRST]
    gates.began.clear()
    compile_count(plan, start_step=uses.index(SECOND)).wait()
    assert gates.began[:3] == [SECOND, LARGEST, FIRST]
    gates.began.clear()
    compile_count([LAST, SECOND, FIRST, LARGEST]).wait()
    assert gates.began == [LAST, LARGEST, SECOND, FIRST]
    with pytest.raises(ValueError, match=r"start_step \(3\) must be in 0 … 0, the steps of the plan"):
        compile_count(start_step=3)
    for wrong in (-1, plan.num_steps + 1):
        with pytest.raises(ValueError, match=rf"start_step \({wrong}\) must be in 0 … {plan.num_steps}"):
            compile_count(plan, start_step=wrong)


def test_a_program_that_fails_ends_the_next_step(gates, monkeypatch):
    compile_when_open = StepCompiler.compile

    def compile_some(step_compiler, lowered):
        if lowered.key == LARGEST:
            raise RuntimeError("out of registers")
        return compile_when_open(step_compiler, lowered)

    monkeypatch.setattr(StepCompiler, "compile", compile_some)
    gates.open(*BUCKETS)
    step = compile_count()
    state, _ = step(jnp.float32(0), make_batch(FIRST))
    with pytest.raises(RuntimeError, match="out of registers") as caught:
        step(state, make_batch(LAST))
    assert caught.value.__notes__ == ["while compiling count_step for bucket 2×24"]


@pytest.mark.parametrize("failure", [RuntimeError("no registers"), KeyboardInterrupt()])
def test_what_fails_in_the_background_loses_no_state(monkeypatch, failure):
    step = compile_count()
    state = jnp.float32(0)
    with monkeypatch.context() as patch:

        def fail(*args):
            raise failure

        step.wait(FIRST)
        patch.setattr("jvarlen.compiling.compiled_buckets.CompiledBuckets.advance", fail)
        state, _ = step(state, make_batch(FIRST))
    with pytest.raises(type(failure)):
        step(state, make_batch(FIRST))
    state, _ = step(state, make_batch(FIRST))
    assert state == 2 * 64


@pytest.mark.parametrize("when", ["ahead", "background"])
def test_a_program_that_does_not_fit_the_device_is_refused_when_it_arrives(when, monkeypatch):
    needed = compile_count(when="ahead").report
    largest = max(row.total_bytes for row in needed)
    monkeypatch.setattr(StepCompiler, "bytes_limit", largest - 1)
    with pytest.raises(
        ValueError, match=f"needs {largest:,} bytes on each device, which has {largest - 1:,}"
    ) as caught:
        compile_count(when=when).wait()
    assert "bucket" in caught.value.__notes__[0]
    monkeypatch.setattr(StepCompiler, "bytes_limit", largest)
    compile_count(when=when).wait()


def test_what_no_step_will_use_is_not_compiled(gates):
    step = compile_count()
    step.release_after({FIRST: 1, LARGEST: 0, SECOND: 0, LAST: 1})
    assert step.pending == (FIRST, LAST)
    gates.open(*BUCKETS)
    state, _ = step(jnp.float32(0), make_batch(FIRST))
    state, _ = step(state, make_batch(LAST))
    assert gates.began == [FIRST, LAST]
    assert [row.bucket for row in step.report] == [FIRST, LAST]
    with pytest.raises(UnplannedShapeError, match="the executable of 2×16 was released"):
        step(state, make_batch(SECOND))


def test_closing_leaves_out_what_is_pending(gates):
    step = compile_count()
    gates.open(FIRST)
    state, _ = step(jnp.float32(0), make_batch(FIRST))
    step.close()
    assert not step.pending
    assert [row.bucket for row in step.report] == [FIRST]
    state, _ = step(state, make_batch(FIRST))
    with pytest.raises(UnplannedShapeError):
        step(state, make_batch(LAST))
    gates.open(*BUCKETS)
    time.sleep(0.1)
    assert LAST not in gates.began


def test_ctrl_c_while_a_step_waits_loses_nothing(gates, monkeypatch):
    step = compile_count()
    state = jnp.float32(5)
    with monkeypatch.context() as patch:

        def interrupted(*args):
            raise KeyboardInterrupt

        patch.setattr("jvarlen.compiling.queue.futures.wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(state, make_batch(FIRST))
    gates.open(*BUCKETS)
    state, _ = step(state, make_batch(FIRST))
    assert state == 5 + 64
