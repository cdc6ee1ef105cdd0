"""Sorting on a device: the order of NumPy, ties by index, for every dtype, however rows are exchanged."""

import jax
import numpy as np
import pytest

import jvarlen
from jvarlen.sorting.shard_sort import has_ragged
from tests.support.meshes import data_mesh
from tests.support.sort_inputs import by_rank, order_of

NUM_ROWS = 50_003  # that no number of devices divides
KEYS = ("int32", "int64", "float32", "repeated")


def keys_of(kind):
    rng = np.random.default_rng(0)
    match kind:
        case "int32":
            return rng.integers(-(2**31), 2**31, NUM_ROWS).astype(np.int32)
        case "int64":
            return rng.integers(-(2**63), 2**63 - 1, NUM_ROWS, endpoint=True)
        case "float32":
            special = np.array([np.inf, -np.inf, 0.0, -0.0, 1e-45, -3.4e38], np.float32)
            keys = rng.normal(size=NUM_ROWS).astype(np.float32)
            keys[::100] = rng.choice(special, len(keys[::100]))
            return keys
    return rng.integers(0, 5, NUM_ROWS).astype(np.int32)


@pytest.fixture(params=["one device", "all devices"])
def mesh(request):
    return data_mesh(1 if request.param == "one device" else -1)


def assert_sorted(keys, mesh, result="interleaved", **options):
    with jax.enable_x64(keys.dtype.itemsize == 8):
        sorted_keys, indices = jvarlen.sample_sort(keys, mesh, result=result, **options)
        assert sorted_keys.dtype == keys.dtype
        assert sorted_keys.devices() == set(mesh.devices.flat)
        order = order_of(keys)
        found = by_rank(indices, mesh.size, result)
        np.testing.assert_array_equal(found[: len(keys)], order)
        assert (found[len(keys) :] == -1).all()
        np.testing.assert_array_equal(by_rank(sorted_keys, mesh.size, result)[: len(keys)], keys[order])


@pytest.mark.parametrize("kind", KEYS)
def test_the_order_is_that_of_numpy(kind, mesh):
    assert_sorted(keys_of(kind), mesh)


def test_blocks_hold_the_order_as_well(mesh):
    assert_sorted(keys_of("repeated"), mesh, result="block")


def test_exact_messages_give_the_same_order():
    mesh = data_mesh()
    if mesh.size == 1 or not has_ragged(mesh):
        pytest.skip("one device alone, or a backend without a ragged all-to-all")
    for kind in KEYS:
        assert_sorted(keys_of(kind), mesh, exchange="ragged")


@pytest.mark.parametrize("kind", KEYS)
def test_torch_gives_the_same_order(torch_ref, torch_device, kind):
    import torch

    keys = keys_of(kind)
    sorted_keys, indices = torch_ref.sample_sort(torch.from_numpy(keys).to(torch_device))
    assert sorted_keys.device.type == indices.device.type == torch_device
    order = order_of(keys)
    np.testing.assert_array_equal(indices.cpu().numpy(), order)
    np.testing.assert_array_equal(sorted_keys.cpu().numpy(), keys[order])
