"""Distributed sort: the result is np.lexsort's, on any number of devices and with any options."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jvarlen import no_recompiles, sample_sort
from jvarlen.sorting.sample_sort import _program
from jvarlen.sorting.shard_sort import Shards, has_ragged
from tests.support import processes
from tests.support.meshes import data_mesh
from tests.support.sort_inputs import KINDS, by_rank, keys_of_kind, order_of

PROGRAM = Path(__file__).with_name("run_sort.py")
SHARDS = (1, 3, 8)
SIZES = (0, 1, 4, 97)


def explicit_mesh(num_shards):
    return jax.make_mesh((num_shards,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:num_shards])


def check(keys, num_shards, *, mesh=None, result="interleaved", **options):
    """Sorts and compares with np.lexsort; rows are balanced, none is lost, and padding is marked."""
    found_keys, indices = sample_sort(keys, mesh or data_mesh(num_shards), result=result, **options)
    host_keys, num_rows = np.asarray(keys), len(keys)
    per_shard = -(-num_rows // num_shards)
    assert found_keys.shape == indices.shape == (num_shards * per_shard,)
    assert found_keys.dtype == host_keys.dtype
    assert found_keys.sharding.spec == indices.sharding.spec == PartitionSpec("data")
    order, ranked = order_of(host_keys), by_rank(indices, num_shards, result)
    assert (ranked[:num_rows] == order).all()
    assert (ranked[num_rows:] == -1).all()
    assert by_rank(found_keys, num_shards, result)[:num_rows].tobytes() == host_keys[order].tobytes()
    on_shard = (np.asarray(indices).reshape(num_shards, per_shard) >= 0).sum(axis=1)
    if result == "interleaved":
        assert set(on_shard.tolist()) <= {num_rows // num_shards, per_shard}


@pytest.mark.parametrize("num_shards", SHARDS)
@pytest.mark.parametrize("num_rows", SIZES)
def test_any_number_of_rows_on_any_number_of_shards(num_rows, num_shards):
    result = ("interleaved", "block")[(SIZES.index(num_rows) + num_shards) % 2]  # both with every number of each
    rng = np.random.default_rng(num_rows)
    check(rng.integers(-4, 5, num_rows).astype(np.int32), num_shards, result=result)


@pytest.mark.parametrize("num_shards", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_any_keys_are_ordered_and_balanced(kind, num_shards):
    check(keys_of_kind(kind, 1021, np.random.default_rng(0)), num_shards)


@pytest.mark.parametrize(
    ("transform", "result", "oversampling"),
    [
        ("shard_map", "interleaved", 1),
        ("pmap", "block", 20),
        ("pmap", "interleaved", 4),
    ],
)
def test_nothing_but_the_layout_changes_the_result(transform, result, oversampling):
    keys = keys_of_kind("zipf", 203, np.random.default_rng(1))
    check(keys, 4, transform=transform, result=result, oversampling=oversampling)


@pytest.mark.parametrize("dtype", [np.int8, np.uint32, jnp.bfloat16])
def test_other_dtypes_stay_what_they_are(dtype):
    rng = np.random.default_rng(2)
    keys = rng.integers(0, 100, 50).astype(dtype)
    sorted_keys, indices = sample_sort(keys, data_mesh(4))
    order = order_of(keys.astype(np.float64))
    assert sorted_keys.dtype == dtype
    assert (by_rank(indices, 4, "interleaved")[:50] == order).all()
    assert (by_rank(sorted_keys, 4, "interleaved")[:50] == keys[order]).all()


@pytest.mark.parametrize(("dtype", "low", "high"), [(np.int64, -(2**62), 2**62), (np.float64, -1e300, 1e300)])
def test_64_bit_keys_keep_all_their_bits(dtype, low, high):
    rng = np.random.default_rng(3)
    keys = rng.integers(low, high, 301) if dtype == np.int64 else rng.uniform(low, high, 301)
    keys[::7] = keys[0] + (1 if dtype == np.int64 else 0)
    with jax.enable_x64(True):
        check(keys.astype(dtype), 4)


def test_64_bit_values_that_fit_32_bits_need_no_64_bit_mode():
    keys, indices = sample_sort(np.array([3, -(2**31), 2**31 - 1, 0]), data_mesh(2), result="block")
    assert keys.dtype == jnp.int32
    assert keys.tolist() == [-(2**31), 0, 3, 2**31 - 1]
    assert indices.tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize("keys", [np.array([1, 2**31, 5, -(2**40)]), np.array([1.0, 0.1, np.inf, 1e300])])
def test_64_bit_values_that_do_not_fit_are_refused_by_row(keys):
    with pytest.raises(ValueError, match=r"do not fit (int32|float32) exactly.*jax_enable_x64.*id 1: .*, id 3: "):
        sample_sort(keys, data_mesh(2))


@pytest.mark.parametrize(("num_shards", "result"), [(1, "interleaved"), (4, "block")])
def test_nan_is_an_error_that_names_the_rows(num_shards, result):
    keys = np.zeros(40, np.float32)
    keys[[3, 17, 38]] = np.nan, -np.nan, np.nan
    with pytest.raises(ValueError, match=r'keys are NaN \(nan="last" sorts them last\): id 3, id 17, id 38$'):
        sample_sort(keys, data_mesh(num_shards), result=result)
    keys[20:36] = np.nan
    with pytest.raises(ValueError, match=r"id 3, id 17, id 20, id 21, id 22 and 14 more$"):
        sample_sort(keys, data_mesh(num_shards), result=result)


def test_nan_is_last_where_that_is_asked_for():
    keys = keys_of_kind("special floats", 99, np.random.default_rng(4))
    keys[::10] = np.nan
    sorted_keys, indices = sample_sort(keys, data_mesh(4), nan="last")
    assert (by_rank(indices, 4, "interleaved")[:99] == order_of(keys)).all()
    assert np.isnan(by_rank(sorted_keys, 4, "interleaved")[89:99]).all()


@pytest.mark.parametrize(("num_shards", "transform"), [(3, "shard_map"), (4, "pmap")])
def test_payload_follows_its_key(num_shards, transform):
    rng = np.random.default_rng(5)
    keys = rng.integers(0, 9, 70).astype(np.int32)
    payload = {
        "id": np.arange(70, dtype=np.int16),
        "empty": np.zeros((70, 0), np.float32),
        "vector": rng.normal(size=(70, 2, 3)).astype(np.float32),
    }
    _, _, followed = sample_sort(keys, data_mesh(num_shards), payload=payload, transform=transform)
    for name, column in payload.items():
        ranked = by_rank(followed[name], num_shards, "interleaved")[:70]
        assert ranked.dtype == column.dtype
        assert (ranked == column[order_of(keys)]).all()


def placements():
    """Ways in which an array can lie on devices before it is sorted."""
    yield "numpy", lambda keys, mesh: keys
    yield "on one device", lambda keys, mesh: jax.device_put(keys, jax.devices()[0])
    yield "everywhere", lambda keys, mesh: jax.device_put(keys, NamedSharding(mesh, PartitionSpec()))
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        for devices, axes in (
            (jax.devices(), ("data",)),
            (jax.devices()[::-1], ("data",)),
            (jax.devices()[:3], ("data",)),
        ):
            other = Mesh(np.array(devices), axes, axis_types=(axis_type,))
            yield (
                "spread",
                lambda keys, mesh, other=other: jax.device_put(
                    keys, NamedSharding(other, PartitionSpec(other.axis_names[0]))
                ),
            )


@pytest.mark.parametrize("make_mesh", [data_mesh, explicit_mesh])
@pytest.mark.parametrize(
    ("place", "num_rows"),
    [(place, n) for name, place in placements() for n in (48, 51) if name != "spread" or n == 48],
)
def test_keys_may_lie_anywhere(make_mesh, place, num_rows):
    mesh = make_mesh(4)
    keys = keys_of_kind("two values", num_rows, np.random.default_rng(6))
    check(place(keys, mesh), 4, mesh=mesh)


def test_shards_of_other_meshes_and_more_axes():
    devices = np.array(jax.devices()[:4])
    keys = keys_of_kind("uniform", 60, np.random.default_rng(7))
    backwards = Mesh(devices[::-1], ("data",))
    check(keys, 4, mesh=backwards)
    check(jax.device_put(keys, NamedSharding(data_mesh(4), PartitionSpec("data"))), 4, mesh=backwards)
    check(keys, 2, mesh=Mesh(devices.reshape(2, 2), ("model", "data")))
    with pytest.raises(ValueError, match="pmap needs a mesh of one axis, not of model, data"):
        sample_sort(keys, Mesh(devices.reshape(2, 2), ("model", "data")), transform="pmap")


@pytest.mark.parametrize("sizes", [[5, 0, 2, 5], [0, 0, 0, 1], [0, 0, 0, 0]])
def test_shards_of_any_size_and_empty_ones(sizes):
    rng = np.random.default_rng(8)
    places = rng.integers(0, 4, (4, 5)).astype(np.int32)
    keys = np.concatenate([row[:size] for row, size in zip(places, sizes, strict=True)])
    for result in ("interleaved", "block"):
        sorted_keys, indices = sample_sort(places.ravel(), data_mesh(4), result=result, shard_sizes=sizes)
        assert sorted_keys.shape == (4 * -(-len(keys) // 4),)
        assert (by_rank(indices, 4, result)[: len(keys)] == order_of(keys)).all()
        assert (by_rank(indices, 4, result)[len(keys) :] == -1).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"result": "diagonal"}, r"result \('diagonal'\) must be one of 'interleaved', 'block'"),
        ({"transform": "vmap", "exchange": "x"}, r"transform \('vmap'\) .*; exchange \('x'\) must be"),
        ({"nan": "first"}, r"nan \('first'\) must be one of"),
        ({"oversampling": 0}, r"oversampling \(0\)"),
        ({"payload": np.zeros(3)}, r"one leading axis of the same size, not \[\(3,\), \(8,\)\]"),
        ({"shard_sizes": [1, 2]}, r"shard_sizes must be 4 integers.* not int64\[2\]"),
        ({"shard_sizes": [1, 3, 0, -1]}, r"from 0 to the places of a shard: id 1: 3, id 3: -1 \(limit 2\)"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        sample_sort(np.zeros(8, np.int32), data_mesh(4), **options)


@pytest.mark.parametrize(
    "keys",
    [
        np.zeros((2, 2), np.int32), np.zeros(2, bool), np.zeros(2, np.complex64), np.array(["a"]), np.array([2**70]),
        np.array([0], "datetime64[s]"),
    ],
)  # fmt: skip
def test_what_is_no_key_is_refused(keys):
    with pytest.raises(ValueError, match="keys must be integers or floats of one axis"):
        sample_sort(keys, data_mesh(2))


def test_a_shape_compiles_once():
    mesh = data_mesh(4)
    rng = np.random.default_rng(9)
    sample_sort(np.zeros(100, np.float32), mesh)
    with no_recompiles():
        for num_rows in (97, 98, 99, 100):
            sample_sort(rng.normal(size=num_rows).astype(np.float32), mesh)


def count_reads(monkeypatch):
    """A list that grows with every array whose values the host looks at."""
    array_type, reads = type(jnp.zeros(1)), []
    value = array_type._value
    monkeypatch.setattr(array_type, "_value", property(lambda array: (reads.append(array.shape), value.fget(array))[1]))
    monkeypatch.setattr(array_type, "__array__", lambda array, *args, **kwargs: np.array(array._value, *args, **kwargs))
    return reads


@pytest.mark.parametrize("transform", ["shard_map", "pmap"])
def test_the_host_only_waits_for_nan(transform, monkeypatch):
    mesh = data_mesh(4)
    spread = NamedSharding(mesh, PartitionSpec("data"))
    keys, floats = (jax.device_put(np.arange(8).astype(dtype), spread) for dtype in (np.int32, np.float32))
    reads = count_reads(monkeypatch)
    with jax.transfer_guard("disallow"):  # what is moved is moved on purpose
        sample_sort(keys, mesh, transform=transform)
        sample_sort(floats, mesh, nan="last", transform=transform)
        assert not reads
        sample_sort(floats, mesh, transform=transform)
        assert len(reads) == 1
    assert "callback" not in lowered(2, 4).as_text()


def lowered(num_rows, num_shards, *, ragged=False, platform=None):
    mesh = data_mesh(num_shards)
    program = _program(mesh, Shards("data", num_shards, 4, ragged), "interleaved", num_rows, "shard_map")
    spread = NamedSharding(mesh, PartitionSpec("data"))
    keys = jax.ShapeDtypeStruct((num_shards * num_rows,), jnp.int32, sharding=spread)
    with jax.enable_x64(True):
        traced = program.trace(keys, None, jax.ShapeDtypeStruct((num_shards,), jnp.int64))
        return traced.lower(lowering_platforms=(platform,)) if platform else traced.lower()


def test_memory_grows_with_a_shards_rows_alone():
    def temporaries(num_rows, num_shards):
        return lowered(num_rows, num_shards).compile().memory_analysis().temp_size_in_bytes

    for num_shards in (2, 4):
        small, large = temporaries(12_000, num_shards), temporaries(96_000, num_shards)
        # At most five words of 8 bytes a row, and O(k·p²) of them besides.
        assert 32 * 84_000 <= large - small <= 40 * 84_000
        assert large <= 40 * 96_000 + 32 * 4 * num_shards**2 + 4096


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_the_ragged_exchange_lowers_where_there_is_one(platform):
    text = lowered(96, 4, ragged=True, platform=platform).as_text()
    assert text.count("ragged_all_to_all") == 1
    assert "ragged_all_to_all" not in lowered(96, 4, platform=platform).as_text()


def test_the_backend_is_asked_for_its_ragged_exchange():
    assert not has_ragged(data_mesh(4))
    check(np.arange(40, dtype=np.int32)[::-1], 4, exchange="auto")
    with pytest.raises(ValueError, match='exchange="ragged" needs a backend that has a ragged all-to-all'):
        sample_sort(np.arange(40, dtype=np.int32), data_mesh(4), exchange="ragged")


@pytest.fixture(scope="module")
def dying():
    """Two processes, of which one dies: while the other waits for its heartbeat, other tests run."""
    with processes.started(PROGRAM, 2, "die") as running:
        yield running


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.usefixtures("dying")
def test_several_processes_sort_and_plan_as_one_would():
    outputs = processes.run(PROGRAM, 2, "together", num_devices=2)
    assert all(output.endswith("ok\n") for output in outputs)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_when_a_process_dies_the_others_end_with_an_error(dying):
    survivor, dead = dying.wait(seconds=60)
    assert survivor.at - dead.at < 30
    assert dead.code < 0
    assert "sorted" in survivor.output
    assert survivor.code != 0
