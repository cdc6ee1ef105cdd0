"""What the GPU tests share: which device it is, in JAX and in PyTorch."""

import os
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

# "cpu" runs the same bodies where there is no GPU, to see that they run.
PLATFORM = os.environ.get("JVARLEN_TEST_PLATFORM", "gpu")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if PLATFORM == "gpu":
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def on_gpu() -> bool:
    return PLATFORM == "gpu"


@pytest.fixture(scope="session")
def torch_device(on_gpu: bool) -> str:
    """torch's name of the device; skips where torch, or its CUDA, is missing."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if on_gpu and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return "cuda" if on_gpu else "cpu"


@pytest.fixture(scope="session")
def torch_ref(torch_device: str) -> ModuleType:
    import torch_ref  # here: it needs torch

    return torch_ref


@pytest.fixture(scope="session")
def dataset() -> list[np.ndarray]:
    """Bytes that count up from anywhere by ones, twos or threes: much can be learned in few steps."""
    rng = np.random.default_rng(0)
    lengths, starts, strides = (rng.integers(low, high, 240) for low, high in ((1, 49), (0, 95), (1, 4)))
    counts = zip(starts, strides, lengths, strict=True)
    return [(32 + (start + stride * np.arange(n)) % 95).astype(np.uint8) for start, stride, n in counts]


@pytest.fixture(scope="session")
def lengths(dataset: list[np.ndarray]) -> np.ndarray:
    return np.array([len(sample) for sample in dataset])
