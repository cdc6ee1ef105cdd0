"""Compilation: all before the first step, nothing afterwards, and what was not planned refused by name."""

import contextlib
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen import (
    Batch,
    Bucket,
    RecompileError,
    UnplannedShapeError,
    compile,
    compile_buckets,
    data_mesh,
    no_recompiles,
    token_batch_spec,
)
from jvarlen.distributed import batch_shardings

BUCKETS = [(4, 8), (2, 16), (2, 24)]


def count_step(state, batch):
    return state + jnp.sum(batch.weights), {"tokens": jnp.sum(batch.tokens)}


def make_batch(rows, length, num_microbatches=2):
    return jax.tree.map(
        lambda leaf: np.ones(leaf.shape, leaf.dtype), token_batch_spec(Bucket(rows, length), num_microbatches)
    )


@pytest.fixture(scope="module")
def compiled():
    return compile_buckets(count_step, jnp.float32(0), BUCKETS, microbatches_per_step=2, progress=False)


def test_each_bucket_runs_without_compiling(compiled):
    batches = [make_batch(*bucket) for bucket in BUCKETS]
    state = jnp.float32(0)
    with no_recompiles() as count:
        for batch in batches:
            state, _ = compiled(state, batch)
    assert count.num_compilations == 0
    assert float(state) == 2 * sum(rows * length for rows, length in BUCKETS)


def test_the_largest_is_compiled_first(compiled):
    assert [tuple(row.bucket) for row in compiled.ledger] == [(2, 24), (4, 8), (2, 16)]
    assert all(row.lower_s > 0 and row.compile_s > 0 for row in compiled.ledger)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda batch: make_batch(3, 16), r"Nearest is 2×16: \.tokens is int32\[2,3,16\], planned was int32\[2,2,16\]"),
        (lambda batch: make_batch(4, 8, 1), r"Nearest is 4×8: \.tokens is int32\[1,4,8\]"),
        (
            lambda batch: batch._replace(weights=np.ones(batch.weights.shape)),
            r"Nearest is 4×8: \.weights is float64\[2,4,8\], planned was float32\[2,4,8\]\. Buckets: 4×8, 2×16, 2×24",
        ),
        (
            lambda batch: batch._replace(num_sequences=3.0),
            r"\.num_sequences is a Python float, planned was float32\[\]",
        ),
        (lambda batch: batch._replace(lengths=None), r"\.lengths is absent, planned was int32\[2,4\]"),
        (lambda batch: batch._asdict(), "is absent"),
    ],
)
def test_an_unplanned_batch_is_refused_by_its_leaves(compiled, change, said):
    batch = make_batch(4, 8)
    with pytest.raises(UnplannedShapeError, match=said):
        compiled(jnp.float32(0), change(batch))


def test_the_same_leaves_in_other_containers_are_refused(compiled):
    class Other(Batch):
        pass

    with pytest.raises(UnplannedShapeError, match="containers"):
        compiled(jnp.float32(0), Other(*make_batch(4, 8)))


def test_the_state_is_donated(compiled):
    state = jnp.float32(0)
    compiled(state, make_batch(4, 8))
    assert state.is_deleted()


def test_buckets_at_fault_are_listed():
    with pytest.raises(ValueError, match=r"strictly ascend: \[\(\(2, 16\), \(2, 16\)\)\]"):
        compile_buckets(count_step, jnp.float32(0), [(2, 16), (2, 16)], progress=False)


def test_a_mesh_takes_spread_batches_and_fresh_state():
    mesh = data_mesh(2)
    compiled = compile_buckets(
        count_step, jnp.float32(0), BUCKETS[:1], microbatches_per_step=4, mesh=mesh, progress=False
    )
    batch = make_batch(4, 8, 4)
    batch = jax.device_put(batch, batch_shardings(batch, mesh))
    state, _ = compiled(jnp.float32(0), batch)
    state, _ = compiled(state, batch)
    assert float(state) == 2 * 4 * 4 * 8
    assert state.sharding.is_fully_replicated
    assert len(state.sharding.device_set) == 2
    with pytest.raises(ValueError, match="3 microbatches a step do not spread over 2 shards"):
        compile_buckets(count_step, jnp.float32(0), BUCKETS, microbatches_per_step=3, mesh=mesh, progress=False)


def test_a_batch_of_ones_own_is_described_by_its_spec():
    def spec(bucket, num_microbatches):
        return {"x": jax.ShapeDtypeStruct((num_microbatches, bucket.rows), np.float32)}

    compiled = compile_buckets(
        lambda state, batch: (state + batch["x"].sum(), None), jnp.float32(1), [(3, 5)], batch_spec=spec, progress=False
    )
    assert float(compiled(jnp.float32(1), {"x": np.ones((1, 3), np.float32)})[0]) == 4


def compile_something():
    """A program that no one has compiled before."""
    compile_something.calls += 1
    return jax.jit(lambda x: x * compile_something.calls)(np.ones(compile_something.calls))


compile_something.calls = 0


def test_a_compilation_raises_where_it_happens():
    reached = []

    def guarded():
        with no_recompiles():
            compile_something()
            reached.append("the next line")

    with pytest.raises(RecompileError, match="lambda"):
        guarded()
    assert not reached


def test_an_eager_operation_of_a_new_shape_raises():
    x = np.ones((3, 17, 5))
    with pytest.raises(RecompileError, match="cumsum"), no_recompiles():
        jnp.cumsum(x, axis=1)


def test_a_swallowed_compilation_raises_at_the_end():
    with pytest.raises(RecompileError), no_recompiles(), contextlib.suppress(RecompileError):
        compile_something()


def test_a_compilation_in_another_thread_raises_at_the_end():
    errors = []

    def work():
        try:
            compile_something()
        except RecompileError as error:
            errors.append(error)

    def guarded():
        with no_recompiles():
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()

    with pytest.raises(RecompileError):
        guarded()
    assert len(errors) == 1


def test_compilations_are_counted_or_warned_of():
    with no_recompiles("count") as outer:
        with pytest.warns(UserWarning, match="lambda.*compiled inside no_recompiles"), no_recompiles("warn") as inner:
            compile_something()
        compile_something()
    assert inner.num_compilations >= 1
    assert outer.num_compilations >= inner.num_compilations + 1
    before = outer.num_compilations
    compile_something()
    assert outer.num_compilations == before


def test_an_error_inside_is_not_replaced():
    with pytest.raises(KeyError), no_recompiles():
        raise KeyError


def test_an_idle_guard_listens_to_nothing():
    with no_recompiles():
        pass
    assert compile._guards == []


def test_an_unknown_action_is_refused():
    with pytest.raises(ValueError, match="'ignore'"), no_recompiles("ignore"):
        pass


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_warm_start_takes_every_program_from_the_cache(tmp_path):
    program = f"""
import numpy as np, pathlib, jvarlen, jvarlen.compile
jvarlen.compile.use_compilation_cache(pathlib.Path({str(tmp_path)!r}))
step = lambda state, batch: (state + batch.weights.sum(), None)
compiled = jvarlen.compile_buckets(step, np.float32(0), [(2, 4), (1, 8)], progress=False)
print([row.cache_hit for row in compiled.ledger])
"""
    printed = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert printed == ["[False, False]\n", "[True, True]\n"]


def test_a_cache_that_cannot_be_made_is_said_and_done_without(tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="not kept for the next time"):
        compile.use_compilation_cache(tmp_path / "file" / "cache")
    assert jax.config.jax_compilation_cache_dir is None


def test_the_ledger_tells_operations_and_bytes():
    compiled = compile_buckets(
        lambda state, batch: (state, batch.weights @ batch.weights.mT), jnp.ones(3), [(4, 32)], progress=False
    )
    (row,) = compiled.ledger
    assert row.flops >= 2 * 4 * 4 * 32
    batch_bytes = 4 * (4 * 32 + 4 + 4 * 32 + 1)
    assert row.argument_bytes in range(3 * 4, batch_bytes + 3 * 4 + 1)  # what the step never reads may be left out
    assert row.total_bytes >= row.argument_bytes
