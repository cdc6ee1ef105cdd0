"""Fixtures: the package under test, one after the other."""

import importlib

import pytest
import torch
from torch import distributed

from . import PACKAGES


@pytest.fixture(scope="session", params=PACKAGES)
def package(request):
    """Return a package that implements the contract."""
    return importlib.import_module(request.param)


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread():
    """Keep torch's small operations off its thread pool, which is slow where cores are shared."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def one_process(tmp_path, monkeypatch):
    """Be the only process of a group."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
