"""Compilation: everything before the first step, nothing afterwards; batches that were not planned are rejected."""

import gc
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

from jvarlen import (
    Bucket,
    CompileOptions,
    UnplannedShapeError,
    compile_buckets,
    make_buckets,
    make_plan,
    no_recompiles,
)
from jvarlen.batches import Batch, BatchShapes, PackedBatch, token_batch_spec
from jvarlen.compiling.lowering import StepCompiler
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import replicate
from jvarlen.distributed.placement import place
from tests.support import processes
from tests.support.meshes import batch_shardings, data_mesh

BUCKETS = [Bucket(4, 8), Bucket(2, 16), Bucket(2, 24)]
SHAPES = BatchShapes(BUCKETS, num_microbatches=2)
LARGEST_FIRST = [BUCKETS[2], BUCKETS[0], BUCKETS[1]]


def count_step(state, batch):
    return state + jnp.sum(batch.weights), {"tokens": jnp.sum(batch.tokens)}


def make_batch(rows, length, num_microbatches=2):
    return jax.tree.map(
        lambda leaf: np.ones(leaf.shape, leaf.dtype), token_batch_spec(Bucket(rows, length), num_microbatches)
    )


def compile_step(step, state, shapes, **options):
    return compile_buckets(step, state, shapes, progress=False, options=CompileOptions(cache_dir=None, **options))


def compile_count(buckets=BUCKETS, state=0.0, mesh=None, num_microbatches=2, **options):
    shapes = BatchShapes(buckets, num_microbatches=num_microbatches, layout=mesh)
    return compile_step(count_step, state, shapes, **options)


@pytest.fixture(scope="module")
def compiled():
    return compile_count()


def num_executables():
    gc.collect()
    return len(jax.devices()[0].client.live_executables())


def test_each_bucket_runs_without_compiling(compiled):
    state, batches = jnp.float32(0), [make_batch(*bucket) for bucket in BUCKETS]
    with no_recompiles():
        for batch in batches:
            state, _ = compiled(state, batch)
    assert float(state) == 2 * sum(rows * length for rows, length in BUCKETS)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_largest_is_compiled_first(num_threads):
    report = compile_count(num_threads=num_threads).report
    assert [row.bucket for row in report] == LARGEST_FIRST
    assert all(row.lower_s > 0 and row.compile_s > 0 and not row.cache_hit for row in report)


def test_several_threads_compile_at_once_and_lowering_stays_in_the_callers(monkeypatch):
    threads = {"lower": set(), "compile": set()}
    both_there = threading.Barrier(2, timeout=20)
    lower, compile_one = StepCompiler.lower, StepCompiler.compile

    def noted_lower(self, bucket):
        threads["lower"].add(threading.current_thread())
        return lower(self, bucket)

    def noted_compile(self, lowered):
        threads["compile"].add(threading.current_thread())
        if lowered.key in LARGEST_FIRST[:2]:
            both_there.wait()
        return compile_one(self, lowered)

    monkeypatch.setattr(StepCompiler, "lower", noted_lower)
    monkeypatch.setattr(StepCompiler, "compile", noted_compile)
    compile_count(num_threads=2)
    assert threads["lower"] == {threading.current_thread()}
    assert len(threads["compile"]) == 2


def test_a_bucket_that_does_not_compile_is_named_and_ends_the_rest(monkeypatch):
    begun = []
    compile_one = StepCompiler.compile

    def failing(self, lowered):
        begun.append(lowered.key)
        if lowered.key == LARGEST_FIRST[0]:
            raise MemoryError("of the compiler")
        return compile_one(self, lowered)

    monkeypatch.setattr(StepCompiler, "compile", failing)
    with pytest.raises(MemoryError) as raised:
        compile_count(num_threads=1)
    assert raised.value.__notes__ == ["while compiling count_step for bucket 2×24"]
    assert LARGEST_FIRST[2] not in begun


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda batch: make_batch(3, 16), "Nearest is 2×16: .tokens is int32[2,3,16], planned was int32[2,2,16]"),
        (lambda batch: make_batch(4, 8, 1), "Nearest is 4×8: .tokens is int32[1,4,8]"),
        (
            lambda batch: batch._replace(weights=np.ones(batch.weights.shape)),
            "Nearest is 4×8: .weights is float64[2,4,8], planned was float32[2,4,8]. Buckets: 4×8, 2×16, 2×24",
        ),
        (lambda batch: batch._replace(num_sequences=3.0), ".num_sequences is a Python float, planned was float32[]"),
        (lambda batch: batch._replace(lengths=None), ".lengths is absent, planned was int32[2,4]"),
        (lambda batch: batch._asdict(), "is absent"),
        (
            lambda batch: type("Other", (Batch,), {})(*batch),
            "the containers differ: Other, planned was Batch",
        ),
    ],
)
def test_an_unplanned_batch_is_refused_by_the_leaves_that_differ(compiled, change, said):
    with pytest.raises(UnplannedShapeError, match=re.escape(said)):
        compiled(jnp.float32(0), change(make_batch(4, 8)))


def test_a_batch_on_another_device_is_refused(compiled):
    state = jnp.float32(0)
    with pytest.raises(
        UnplannedShapeError, match=r"\.tokens is int32\[2,4,8\] on device 2, planned was .* on device 0"
    ):
        compiled(state, jax.device_put(make_batch(4, 8), jax.devices()[2]))
    compiled(state, make_batch(4, 8))  # it was not donated to what was refused


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (np.zeros(3, np.float32), r"it is float32\[3\], planned was float32\[\]"),
        (np.int32(0), r"it is int32\[\], planned was"),
        ((np.float32(0),), r"\[0\] is float32\[\], planned was absent"),
    ],
)
def test_another_state_is_refused_at_the_first_call(state, said):
    compiled = compile_count(BUCKETS[:1])
    with pytest.raises(UnplannedShapeError, match=f"the state is not the one .*{said}"):
        compiled(state, make_batch(4, 8))


def test_a_state_with_functions_of_its_own_is_refused_by_its_container():
    def of_optimizer(optimizer):
        return [TrainState.create(apply_fn=count_step, params={"w": jnp.zeros(2)}, tx=optimizer)]

    optimizer = optax.sgd(0.1)
    compiled = compile_step(lambda state, batch: (state, {}), of_optimizer(optimizer), BatchShapes(BUCKETS[:1]))
    with pytest.raises(UnplannedShapeError, match="what TrainState holds beside its leaves, such as functions"):
        compiled(of_optimizer(optax.sgd(0.1)), make_batch(4, 8, 1))
    compiled(of_optimizer(optimizer), make_batch(4, 8, 1))


def test_another_state_is_explained_later_as_well():
    compiled = compile_count(BUCKETS[:1])
    state, _ = compiled(jnp.float32(0), make_batch(4, 8))
    with pytest.raises(UnplannedShapeError, match=r"it is float32\[5\], planned was float32\[\]"):
        compiled(jnp.zeros(5), make_batch(4, 8))
    placed = jax.device_put(state, jax.devices()[1])
    with pytest.raises(UnplannedShapeError, match=r"it is .* on device 1, planned was .* on device 0"):
        compiled(placed, make_batch(4, 8))


@pytest.mark.parametrize("num_devices", [None, 2])
def test_a_state_that_was_donated_is_named(num_devices):
    """On several devices of a CPU, JAX ends the process if it gets one."""
    mesh = None if num_devices is None else data_mesh(num_devices)
    state = {"w": jnp.ones(3) if mesh is None else replicate(jnp.ones(3), mesh)}
    compiled = compile_step(
        lambda state, batch: (jax.tree.map(jnp.negative, state), None),
        state,
        BatchShapes(BUCKETS[:1], num_microbatches=2, layout=mesh),
    )
    compiled(state, make_batch(4, 8))
    with pytest.raises(ValueError, match=r"state\['w'\] of the arguments was donated: .* Use the state that the step"):
        compiled(state, make_batch(4, 8))


@pytest.mark.parametrize("num_devices", [None, 2])
def test_a_state_that_is_not_donated_can_be_used_again(num_devices):
    mesh = None if num_devices is None else data_mesh(num_devices)
    state = jnp.float32(1)
    compiled = compile_buckets(
        count_step, state, BatchShapes(BUCKETS[:1], num_microbatches=2, layout=mesh), progress=False, donate=False
    )
    totals = [float(compiled(state, make_batch(4, 8))[0]) for _ in range(3)]
    assert totals == [1 + 2 * 4 * 8] * 3


def aliased(kind, mesh):
    """An array, a committed one, or a key, that a state may hold twice."""
    leaf = jax.random.key(0) if kind == "key" else jnp.arange(3.0)
    if kind == "uncommitted":
        return leaf
    return jax.device_put(leaf, jax.devices()[0]) if mesh is None else replicate(leaf, mesh)


@pytest.mark.parametrize("num_devices", [None, 8])
@pytest.mark.parametrize("kind", ["uncommitted", "committed", "key"])
def test_a_state_may_hold_an_array_twice_in_any_step(kind, num_devices):
    """Such as a teacher that is set to the parameters every so many steps."""
    mesh = None if num_devices is None else data_mesh(num_devices)

    def step(state, batch):
        if kind == "key":
            return tuple(map(jax.random.fold_in, state, (1, 2))), None
        return (state[0] + 1, state[1] + 2), None

    leaf = aliased(kind, mesh)
    expected = jax.device_get(jax.tree.map(as_numbers, step((leaf, leaf), None)[0]))
    compiled = compile_step(step, (leaf, leaf), BatchShapes(BUCKETS[:1], num_microbatches=8, layout=mesh))
    batch = make_batch(4, 8, 8)
    del leaf

    def train():
        leaf = aliased(kind, mesh)
        state, _ = compiled((leaf, leaf), batch)
        numbers = jax.device_get(jax.tree.map(as_numbers, state))
        compiled(state, batch)
        return numbers

    for _ in range(3):  # the state of one training may lie where the last of the one before lay
        with no_recompiles():
            np.testing.assert_array_equal(train(), expected)


@pytest.mark.multiprocess
@pytest.mark.parametrize("num_devices", [1, 4])
def test_no_array_is_donated_that_is_used_elsewhere(num_devices):
    """Whatever became of the state that the step before returned. In a process of its own, which JAX may end."""
    program = Path(__file__).with_name("run_shared_arrays.py")
    (printed,) = processes.run(program, 1, num_devices=num_devices, seconds=120)
    seen = json.loads(printed.splitlines()[-1])
    assert seen["after_tying"] == [2, 3]
    assert seen["after_an_evaluation"] == [1, 2]
    assert seen["at_a_used_address"] == [[1, 2]]
    assert seen["in_a_batch"] == [3, 2 * 4 * num_devices]
    error, text = seen["donated_by_another"]
    assert error == "UserError"
    assert text.startswith("state.params['a'], state.params['b'], state.count of the arguments were donated: ")


def as_numbers(leaf):
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def test_the_state_can_be_numbers_or_of_another_precision():
    compiled = compile_step(
        lambda state, batch: ({"n": state["n"] + 1, "x": state["x"] * 2}, None),
        {"n": 0, "x": np.ones(3)},
        BatchShapes(BUCKETS[:1]),
    )
    state, _ = compiled({"n": 0, "x": np.ones(3)}, make_batch(4, 8, 1))
    state, _ = compiled(state, make_batch(4, 8, 1))
    assert (int(state["n"]), state["x"].tolist()) == (2, [4, 4, 4])


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda state, batch: state, r"must return \(state, metrics\), not "),
        (lambda state, batch: (state.astype(jnp.bfloat16), None), r"it: float32\[\] -> bfloat16\[\]"),
        (lambda state, batch: ({"s": state}, None), "returns a state that differs from its input"),
    ],
)
def test_a_step_that_changes_the_kind_of_its_state_is_refused(step, said):
    with pytest.raises(ValueError, match=said):
        compile_step(step, jnp.float32(0), BatchShapes(BUCKETS))


def test_a_mesh_takes_spread_batches_and_fresh_state():
    mesh = data_mesh(2)
    compiled = compile_count(BUCKETS[:1], mesh=mesh)
    batch = make_batch(4, 8)
    state, _ = compiled(jnp.float32(0), jax.device_put(batch, batch_shardings(batch, mesh)))
    state, _ = compiled(state, batch)  # not placed, so it goes where it is wanted
    assert float(state) == 2 * 2 * 4 * 8
    assert state.sharding.is_fully_replicated
    assert len(state.sharding.device_set) == 2
    with pytest.raises(UnplannedShapeError, match=r"on device 1, planned was int32\[2,4,8\] on devices 0, 1 as"):
        compiled(state, jax.device_put(batch, jax.devices()[1]))
    with pytest.raises(ValueError, match="3 microbatches a step do not spread over 2 shards"):
        compile_step(count_step, jnp.float32(0), BatchShapes(BUCKETS, num_microbatches=3, layout=mesh))


def test_a_plan_brings_its_microbatches_and_its_padding():
    lengths = np.random.default_rng(0).integers(1, 25, 90)
    plan = make_plan(
        lengths, make_buckets(lengths, 64, max_shapes=3, num_microbatches=2), order="length", num_microbatches=2
    )
    compiled = compile_step(count_step, jnp.float32(0), plan)
    assert compiled.shapes.num_microbatches == 2
    assert {row.bucket: row.planned_steps for row in compiled.report} == plan.groups_of_buckets()
    packed = make_plan(lengths, [(4, 32)], packing="best_fit", order="length")
    compiled = compile_step(lambda state, batch: (state, batch.positions.sum()), 0, packed)
    assert all(isinstance(spec, PackedBatch) for spec in compiled.specs.values())
    with pytest.raises(ValueError, match="a plan or BatchShapes, not a list"):
        compile_buckets(count_step, jnp.float32(0), BUCKETS)


def test_the_placement_of_a_step_is_used():
    class Step:
        placement = place(Layout(data=2))

        def __call__(self, state, batch):
            return count_step(state, batch)

    compiled = compile_step(Step(), jnp.float32(0), SHAPES)
    assert compiled.mesh == Step.placement.mesh


def test_the_report_shows_operations_bytes_and_use():
    compiled = compile_step(
        lambda state, batch: (state, batch.weights @ batch.weights.mT),
        jnp.ones(3),
        BatchShapes([(4, 32), (2, 40)]),
        time_steps=True,
    )
    state = jnp.ones(3)
    for _ in range(3):
        state, _ = compiled(state, make_batch(4, 32, 1))
    row, unused = compiled.report
    assert row.flops >= 2 * 4 * 4 * 32
    batch_bytes = 4 * (4 * 32 + 4 + 4 * 32 + 1)
    assert 4 * (4 * 32) <= row.argument_bytes <= batch_bytes + 3 * 4  # what the step never reads may be left out
    assert row.total_bytes >= row.argument_bytes
    assert (row.times_used, unused.times_used) == (3, 0)
    assert row.step_s > 0
    assert np.isnan(unused.step_s)
    assert compiled.report.unused == (Bucket(2, 40),)


def test_what_a_curriculum_has_passed_is_released():
    state = jnp.float32(0)
    before = num_executables()
    compiled = compile_count()
    compiled.release_after({BUCKETS[0]: 2, BUCKETS[1]: 1, BUCKETS[2]: 0})
    live = []
    for bucket in (BUCKETS[0], BUCKETS[0], BUCKETS[1]):
        live.append(num_executables() - before)
        state, _ = compiled(state, make_batch(*bucket))
    assert live == [2, 2, 1]
    assert num_executables() == before
    assert float(state) == 2 * (2 * 4 * 8 + 2 * 16)
    assert not any(row.is_live for row in compiled.report)
    with pytest.raises(UnplannedShapeError, match="2×16 was released"):
        compiled(state, make_batch(2, 16))
    with pytest.raises(ValueError, match=r"not compiled: \[\(9, 9\)\]"):
        compiled.release_after({(9, 9): 1})


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_warm_start_takes_every_program_from_the_cache(tmp_path):
    program = f"""
import numpy as np, jvarlen
from jvarlen.batches import BatchShapes
from jvarlen.distributed.placement import place
step = lambda state, batch: (state + batch.weights.sum(), batch.num_sequences)
options = jvarlen.CompileOptions(cache_dir={str(tmp_path)!r})
with jvarlen.no_recompiles("count") as count:
    shapes = BatchShapes([(2, 4), (1, 8)])
    compiled = jvarlen.compile_buckets(step, np.float32(0), shapes, progress=False, options=options)
print([row.cache_hit for row in compiled.report], count.num_compiled)
for spec in compiled.specs.values():
    print(float(compiled(np.float32(1), jvarlen.batches.full_batch(spec))[0]))
"""
    printed = [
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "true"},
        ).stdout.splitlines()
        for _ in range(2)
    ]
    assert printed == [["[False, False] 2", "9.0", "9.0"], ["[True, True] 0", "9.0", "9.0"]]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_processes_compile_the_same_or_none_goes_on():
    program = Path(__file__).with_name("run_compile.py")
    outputs = processes.run(program, 2, num_devices=2, seconds=120)
    for rank, seen in enumerate(json.loads(output.splitlines()[-1]) for output in outputs):
        assert seen["total"] == [4 * (2 * 4 + 1 * 8), 0]
        assert seen["one differs"][0] == "UserError"
        assert "processes differ in the compiled buckets: process 0: " in seen["one differs"][1]
        error, text = seen["one fails"]
        assert error == ("OSError" if rank == 1 else "ProcessesError")
        text = text.removeprefix("could not compile the buckets: process 1: OSError: ")
        assert text.startswith("the model of process 1 is missing")
        assert seen["afterwards"] == ["", ""]
