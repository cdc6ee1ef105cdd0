"""Fixtures: the package under test, one after the other."""

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from . import PACKAGES


@pytest.fixture(scope="session", params=PACKAGES)
def package(request: pytest.FixtureRequest) -> ModuleType:
    """Return a package that implements the contract."""
    return importlib.import_module(request.param)


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Keep torch's small operations off its thread pool, which is slow where cores are shared."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
