"""Devices: meshes and shardings."""

import jax
import numpy as np
import pytest

from jvarlen.distributed.mesh import batch_shardings, data_mesh


@pytest.mark.parametrize("num_devices", [0, -1, 9])
def test_more_devices_than_there_are_is_an_error(num_devices):
    with pytest.raises(ValueError, match=f"between 1 and 8, not {num_devices}"):
        data_mesh(num_devices)


def test_a_mesh_of_so_many_devices_of_each_process_names_those_with_fewer():
    assert data_mesh(3, of_each_process=True).devices.tolist() == jax.devices()[:3]
    with pytest.raises(ValueError, match=r"between 1 and 8, not 9: process 0 has 8"):
        data_mesh(9, of_each_process=True)


def test_a_mesh_takes_the_first_devices():
    assert data_mesh().shape == {"data": 8}
    assert data_mesh(2).devices.tolist() == jax.devices()[:2]


def test_scalars_are_everywhere_and_the_rest_is_spread():
    batch = {"x": np.zeros((8, 3)), "n": np.float32(1)}
    shardings = batch_shardings(batch, data_mesh(4))
    assert shardings["n"].is_fully_replicated
    assert shardings["x"].shard_shape((8, 3)) == (2, 3)
