"""A pytest plugin for machines without most dependencies: it stands in for missing packages."""

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

import pytest

STAND_INS = Path(__file__).parent / "stand_ins"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    sys.path.append(str(STAND_INS))  # last: what is installed goes before
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch is in the same process


def pytest_report_header() -> list[str]:
    import jax  # here: what the tests set for it comes before

    packages = ("jax", "flax", "optax", "numpy", "torch", "jaxtyping", "tqdm", "platformdirs", "dacite")
    return [
        f"devices: {', '.join(device.device_kind for device in jax.devices())}",
        f"packages: {', '.join(f'{name} {_version(name)}' for name in packages)}",
    ]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Tests of both packages need both."""
    is_of_both = collection_path.parent.name == "parity" or collection_path.name == "parity"
    return True if is_of_both and importlib.util.find_spec("torch") is None else None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
