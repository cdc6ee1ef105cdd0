"""Sharded rows: every row at its place, and nothing changed on the way."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jvarlen import sample_sort
from jvarlen.distributed.mesh import local_shards
from jvarlen.sorting import shard_local_rows
from jvarlen.sorting.sharded_rows import shard_rows, spread_local_rows
from tests.support.meshes import data_mesh


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 10])
@pytest.mark.parametrize("num_shards", [1, 3, 4])
def test_rows_are_spread_in_order(num_rows, num_shards):
    rows = np.arange(num_rows * 2, dtype=np.int32).reshape(-1, 2)
    placed, sizes = shard_rows(rows, data_mesh(num_shards), "data")
    assert placed.sharding.spec == PartitionSpec("data")
    assert (np.asarray(placed)[:num_rows] == rows).all()
    per_shard = max(1, -(-num_rows // num_shards))
    assert placed.shape == (num_shards * per_shard, 2)
    assert sizes.tolist() == np.clip(num_rows - np.arange(num_shards) * per_shard, 0, per_shard).tolist()


@pytest.mark.parametrize("num_rows", [0, 2, 9, 16])
def test_local_rows_are_spread_evenly_and_sort(num_rows):
    mesh = data_mesh(4)
    keys = np.random.default_rng(0).integers(0, 9, num_rows).astype(np.int32)
    (placed, ids), sizes = shard_local_rows((keys, np.arange(num_rows, dtype=np.int32)), mesh)
    assert np.ptp(sizes) <= 1
    assert sizes.sum() == num_rows
    _, indices, payload = sample_sort(placed, mesh, result="block", payload=ids, shard_sizes=sizes)
    assert indices[:num_rows].tolist() == np.argsort(keys, kind="stable").tolist() == payload[:num_rows].tolist()


def test_a_bfloat16_column_passes():
    column = np.array([1.5, 2.5], jax.numpy.bfloat16)
    assert shard_rows(column, data_mesh(2), "data")[0].dtype == jax.numpy.bfloat16


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 1e39, 0.1, 2**60 + 1])
def test_values_that_would_change_are_refused(value):
    for place in (lambda column, mesh: shard_rows(column, mesh, "data"), shard_local_rows):
        with pytest.raises(ValueError, match=r"do not fit \w+32 exactly.*id 1: "):
            place(np.array([0, value]), data_mesh(1))
    with jax.enable_x64(True):
        assert shard_rows(np.array([0, value]), data_mesh(1), "data")[0].tolist() == [0, value]


def test_what_is_no_table_of_rows_is_refused():
    with pytest.raises(ValueError, match=r"one leading axis of the same size, not \[\(2,\), \(3,\)\]"):
        shard_local_rows((np.zeros(2), np.zeros((3, 1))), data_mesh(2))
    with pytest.raises(ValueError, match="one for each shard of the 6 places"):
        shard_rows(np.zeros(6), data_mesh(4), "data", [1, 1, 1, 1])
    with pytest.raises(ValueError, match="no 'model'"):
        spread_local_rows(4, data_mesh(2), "model")


def test_shards_of_this_process():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    assert local_shards(Mesh(devices, ("data", "model")), "model").tolist() == [0, 1]
    assert spread_local_rows(5, Mesh(devices, ("data", "model")), "data").tolist() == [3, 2]
