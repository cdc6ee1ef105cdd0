"""Ordered files: element r is that of rank r, whatever the devices, and a failure leaves what was there."""

import json
import os
import resource
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jvarlen.experimental.ordered_file import write as ordered_file
from jvarlen.experimental.ordered_file import write_ordered
from tests.experimental.ordered_file.run_ordered_file import OLD, shard_values, values_by_rank
from tests.support import processes

PROGRAM = Path(__file__).with_name("run_ordered_file.py")


def sharding_over(num_shards, axis_type=AxisType.Auto):
    devices = jax.devices()[:num_shards]
    mesh = jax.make_mesh((num_shards,), ("data",), axis_types=(axis_type,), devices=devices)
    return NamedSharding(mesh, PartitionSpec("data"))


def write(path, values, num_shards=4, result="interleaved", **options):
    ordered = shard_values(values, sharding_over(num_shards), result, num_shards=num_shards)
    write_ordered(path, ordered, len(values), result=result, progress=False, **options)


def same(path, values, dtype=np.int64):
    """Whether the file, and nothing beside it, holds the values, bit by bit."""
    found = np.load(path, mmap_mode="r")
    return found.dtype == dtype and found.tobytes() == np.asarray(values).astype(dtype).tobytes()


@pytest.mark.parametrize(
    ("shared_disk", "axis_type"), [(None, AxisType.Auto), (False, AxisType.Auto), (False, AxisType.Explicit)]
)
@pytest.mark.parametrize("result", ["interleaved", "block"])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 4])
def test_element_r_is_that_of_rank_r(tmp_path, num_shards, result, shared_disk, axis_type):
    for num_samples in (0, 1, 4, 5, 12, 97):
        values, path = values_by_rank(num_samples), tmp_path / "order.npy"
        ordered = shard_values(values, sharding_over(num_shards, axis_type), result, num_shards=num_shards)
        write_ordered(path, ordered, num_samples, result=result, shared_disk=shared_disk, progress=False)
        assert same(path, values)
        assert os.listdir(tmp_path) == ["order.npy"]


@pytest.mark.parametrize("shared_disk", [None, False])
@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (np.array([0.5, -0.0, np.nan, -np.inf], np.float32), np.float32),
        (np.array([0.5, -0.0, np.nan, -np.inf], np.float32), np.float64),
        (np.array([0.5, -0.0, np.nan], np.float16), np.float16),
        (np.array([1.0, -3.0], np.float32), np.int8),
        (np.array([2**63 - 1, -(2**63), 2**40]), np.int64),
        (np.array([2**64 - 1, 0], np.uint64), np.uint64),
        (np.array([255, 0, 7], np.uint8), np.int16),
        (np.array([-5, 300], np.int16), ">i4"),
    ],
)
def test_values_are_kept_exactly(tmp_path, values, dtype, shared_disk):
    with jax.enable_x64(True):
        ordered = shard_values(values, sharding_over(2), "interleaved", num_shards=2)
    write_ordered(tmp_path / "x.npy", ordered, len(values), dtype=dtype, shared_disk=shared_disk, progress=False)
    assert same(tmp_path / "x.npy", values, np.dtype(dtype))


@pytest.mark.parametrize("shared_disk", [None, False])
@pytest.mark.parametrize("result", ["interleaved", "block"])
def test_pieces_make_the_whole(tmp_path, monkeypatch, result, shared_disk):
    values = values_by_rank(97)
    for piece in (1, 8, 25, 96, 97, 98):
        monkeypatch.setattr(ordered_file, "_PIECE", piece)
        write(tmp_path / "order.npy", values, result=result, shared_disk=shared_disk)
        assert same(tmp_path / "order.npy", values)


@pytest.mark.parametrize("shared_disk", [None, False])
def test_a_full_disk_leaves_what_was_there(tmp_path, shared_disk):
    path = tmp_path / "order.npy"
    path.write_text(OLD)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))  # no file can grow beyond it
    try:
        with pytest.raises(OSError, match="File too large"):
            write(path, values_by_rank(97), shared_disk=shared_disk)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == OLD
    assert os.listdir(tmp_path) == ["order.npy"]


@pytest.mark.parametrize("shared_disk", [None, False])
@pytest.mark.parametrize(
    ("values", "dtype", "message"),
    [
        (np.int32([1, 2, 300, -200]), np.int8, "int32 values do not fit int8 exactly, .* id 2: 300, id 3: -200$"),
        (np.int32([1, 2, 3, -1]), np.uint64, "id 3: -1$"),
        (np.uint64([2**63, 1]), np.int64, f"id 0: {2**63}$"),
        (np.int64([1, 2**53 + 1]), np.float64, f"id 1: {2**53 + 1}$"),
        (np.int64([2**63 - 1]), np.float64, f"id 0: {2**63 - 1}$"),
        (np.float32([0.5, np.nan, 2]), np.int64, "id 0: 0.5, id 1: nan$"),
        (np.full(12, 2**20, np.int32), np.int16, "id 4: 1048576 and 7 more$"),
    ],
)
def test_values_that_do_not_fit_are_listed_by_rank(tmp_path, monkeypatch, values, dtype, message, shared_disk):
    monkeypatch.setattr(ordered_file, "_PIECE", 16)
    with jax.enable_x64(True):
        ordered = shard_values(values, sharding_over(1), "interleaved", num_shards=1)
    with pytest.raises(ValueError, match=message):
        write_ordered(tmp_path / "x.npy", ordered, len(values), dtype=dtype, shared_disk=shared_disk, progress=False)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("ordered", "num_samples", "options", "message"),
    [
        ([1, 2], 3, {}, "num_samples must be an integer from 0 to 2, not 3"),
        ([1, 2], -1, {}, "from 0 to 2, not -1"),
        ([[1, 2]], 1, {}, r"one axis, not int64\[1, 2\]"),
        ([True], 1, {}, "ordered must be integers or floats"),
        ([1, 2], 1, {"result": "blocks"}, "result .'blocks'. must be one of 'interleaved', 'block'"),
        ([1, 2], 1, {"dtype": "U3"}, "dtype must be integers or floats, not <U3"),
        ([1, 2], 1, {"dtype": "i4,("}, r"not 'i4,\('"),
    ],
)
def test_arguments_are_checked(tmp_path, ordered, num_samples, options, message):
    with pytest.raises(ValueError, match=message):
        write_ordered(tmp_path / "order.npy", ordered, num_samples, **options)
    assert not os.listdir(tmp_path)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_where_one_process_fails_all_do_and_the_old_file_stays(tmp_path):
    num_processes = 3
    outputs = processes.run(PROGRAM, num_processes, str(tmp_path), seconds=120)
    seen = [json.loads(output.splitlines()[-1]) for output in outputs]
    last = num_processes - 1
    # Who is to blame, the type of its error, and a part of its text; the others name all three.
    for case, culprit, error, text in [
        ("does not fit", last, "UserError", "id 100: 1048576"),
        ("does not fit, gathered", 0, "UserError", "id 100: 1048576"),
        ("disk full at the end", last, "OSError", "File too large"),
        ("interrupted", last, "KeyboardInterrupt", ""),
        ("no directory", 0, "FileNotFoundError", "there is no directory"),
        ("wrong number", last, "UserError", "num_samples must be an integer from 0 to"),
        ("in one place", last, "UserError", 'pass result="block"'),
    ]:
        for rank, one in enumerate(seen):
            raised, message = one[case]
            assert raised == (error if rank == culprit else "ProcessesError"), (case, one)
            assert text in message
            name = f"jvarlen.{error}" if error == "UserError" else error
            assert rank == culprit or f": process {culprit}: {name}" in message
    for one in seen:
        assert one["not shared"][0] == "UserError"
        assert all(f"process {rank}: {tmp_path}/none" in one["not shared"][1] for rank in range(1, num_processes))
        assert one["other number"][0] == "UserError"
        assert f"process {last}: 'order.npy: 100 of" in one["other number"][1]
        assert one["afterwards"] == ["", ""]
    assert same(tmp_path / "order.npy", values_by_rank(101))
