"""Devices: which ones a command takes, and how batches lie on them."""

import jax
import numpy as np
import pytest

from jvarlen.distributed.launch import DeviceConfig, launch
from jvarlen.distributed.layout import Layout
from tests.support.meshes import batch_shardings, data_mesh


def test_a_command_takes_so_many_devices_of_each_process():
    assert launch(DeviceConfig(devices=3)).mesh.devices.flatten().tolist() == jax.devices()[:3]
    assert launch(DeviceConfig()).layout == Layout(data=8)
    assert launch(DeviceConfig(devices=4), Layout(tensor=2)).layout == Layout(data=2, tensor=2)
    with pytest.raises(ValueError, match=r"devices must be between 1 and 8, not 9: process 0 has 8. A CPU is split"):
        launch(DeviceConfig(devices=9))


def test_scalars_are_everywhere_and_the_rest_is_spread():
    batch = {"x": np.zeros((8, 3)), "n": np.float32(1)}
    shardings = batch_shardings(batch, data_mesh(4))
    assert shardings["n"].is_fully_replicated
    assert shardings["x"].shard_shape((8, 3)) == (2, 3)
