"""What all tests share: eight host devices, small data, and marks that follow from the machine."""

import collections
import contextlib
import os

from tests.processes import COMPILE_FAST

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 {COMPILE_FAST}"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes import the same modules
# The user's cache is left alone, by processes that tests start as well.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
# Tests compile often and run what they compiled for some steps: LLVM's optimizations take longer than they save. XLA's
# own passes stay as they are. What depends on rounding compiles as users do, by the fixture `optimized`.
if os.environ.get("JVARLEN_TEST_PLATFORM") != "gpu":
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache as compilation_cache_of_jax

from jvarlen.data.split import Split
from jvarlen.data.tokens import TokenDataset

# The same examples in every run: one that fails fails again. HYPOTHESIS_PROFILE=default draws others.
with contextlib.suppress(ImportError):  # GPU machines may lack it
    from hypothesis import settings

    settings.register_profile("repeatable", derandomize=True)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files of slow tests first: at the end, one process of tests would be left alone with them.
    slow = collections.Counter(
        item.path for item in items if any(map(item.get_closest_marker, ("slow", "multiprocess")))
    )
    items.sort(key=lambda item: -slow[item.path])
    if all(device.platform != "gpu" for device in jax.devices()):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(scope="session", autouse=True)
def own_data_home(tmp_path_factory):
    """The user's key, which compiled sets are signed with, is left alone, by processes that tests start as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(scope="module")
def optimized():
    """Compile as users do."""
    before = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "true"
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def compilation_cache(tmp_path_factory):
    """A directory for the runs of a module, which compile the same programs over and over."""
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache_of_jax.reset_cache()
    yield tmp_path_factory.mktemp("compiled")
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache_of_jax.reset_cache()


def random_dataset(num_samples: int, longest: int, seed: int = 0) -> TokenDataset:
    """Random printable bytes of random lengths, 1 to `longest`."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, num_samples)
    return TokenDataset.from_bytes([rng.integers(32, 127, n, np.uint8).tobytes() for n in lengths])


@pytest.fixture(scope="session")
def split() -> Split:
    return Split(train=random_dataset(120, 40), held_out=random_dataset(15, 40, seed=1))
