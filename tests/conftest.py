"""What all tests share: eight CPU devices, settings that make tests fast, caches of programs, and small data."""

import collections
import contextlib
import gc
import hashlib
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.processes import COMPILE_FAST

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 {COMPILE_FAST}"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes import the same modules
# Neither tests nor the processes that they start use the user's cache.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
# Tests run a compiled program for a few steps, so LLVM's optimizations take longer than they save. XLA's passes stay as
# they are. Tests that depend on rounding use the fixture `optimized`.
if os.environ.get("JVARLEN_TEST_PLATFORM") != "gpu":
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
# Processes of tests share the cores: a second thread of PyTorch makes it many times slower.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # for programs that set the number of threads themselves
# No test reads the source locations of operations, and recording them takes time.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

with contextlib.suppress(ImportError):  # GPU machines may lack it
    from tests.support import type_checks

    type_checks.install()

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache as compilation_cache_of_jax

from jvarlen.attention import attention, blocks
from jvarlen.data.split import Split
from jvarlen.data.tokens import TokenDataset

sys.dont_write_bytecode = False  # which that variable has set
gc.disable()  # until all tests are collected: no garbage until then
# Folders and files whose programs are kept for later sessions.
KEEPING_PROGRAMS = {
    "attention", "estimates", "experimental", "foreign", "golden", "inference", "models", "parallel", "parity",
    "planning", "sorting", "test_readme", "training",
}  # fmt: skip
MOST_PROGRAMS = 20_000
SECONDS_OF_GARBAGE = 20

# The same examples in every run: one that fails fails again. HYPOTHESIS_PROFILE=default draws others.
with contextlib.suppress(ImportError):  # GPU machines may lack it
    from hypothesis import settings

    settings.register_profile("repeatable", derandomize=True, deadline=None)  # other work slows any example
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files of slow tests first.
    slow = collections.Counter(
        item.path for item in items if any(map(item.get_closest_marker, ("slow", "multiprocess")))
    )
    items.sort(key=lambda item: -slow[item.path])
    if all(device.platform != "gpu" for device in jax.devices()):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.hookimpl(optionalhook=True)  # GPU machines may lack xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, one process of tests takes files from the end.

    Slow tests mostly start processes and wait for them. Beside them, the quick ones use the cores.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class FromBothEnds(LoadFileScheduling):
        def _assign_work_unit(self, node: Any) -> None:
            if node is self.nodes[-1]:
                self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
            super()._assign_work_unit(node)

    return FromBothEnds(config, log)


def pytest_collection_finish() -> None:
    """From now on there is garbage; it is looked for far less often than by default."""
    gc.enable()
    gc.set_threshold(1_000_000, 50, 1_000)


@pytest.fixture(scope="session")
def collection_times():
    return [-math.inf]


@pytest.fixture(scope="module", autouse=True)
def collect_garbage(collection_times):
    """Freezes what outlives the tests of modules, such as JAX's caches, so that collections stay short."""
    if time.monotonic() - collection_times[-1] > SECONDS_OF_GARBAGE:
        gc.collect()
        gc.freeze()
        collection_times.append(time.monotonic())


@pytest.fixture(scope="session", autouse=True)
def data_home(tmp_path_factory):
    """A folder for the key that signs compiled programs, in place of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture
def optimized():
    """Compiles as users do, with LLVM's optimizations."""
    before = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "true"
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def in_blocks(monkeypatch):
    """Attention in loops over blocks of 4 positions, as for long rows."""
    for module, values in ((attention, {"WHOLE_BELOW": 0, "_FEW": 0, "_FEW_LOGITS": 0}), (blocks, {"BLOCK": 4})):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture
def compilations():
    """Names of the programs that JAX compiles during the test, whether or not a guard sees them."""
    names = []

    def on_duration(event, duration_secs, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(details.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(on_duration)
    yield names
    jax.monitoring.unregister_event_duration_listener(on_duration)


@pytest.fixture(scope="module")
def compilation_cache(tmp_path_factory):
    """A cache for the runs of a module, which compile the same programs again and again."""
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache_of_jax.reset_cache()
    yield tmp_path_factory.mktemp("compiled")
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache_of_jax.reset_cache()


@pytest.fixture(scope="session")
def programs_of_before(tmp_path_factory, pytestconfig):
    """A directory of programs that earlier sessions compiled; it keeps new ones for later sessions.

    They are in pytest's cache, which `--cache-clear` deletes. Each process of tests has a separate directory, because
    JAX's writes are not atomic.
    """
    programs = tmp_path_factory.mktemp("programs")
    if (cache := getattr(pytestconfig, "cache", None)) is None:
        yield programs
        return
    # Programs depend on the instructions of the CPU.
    info = Path("/proc/cpuinfo").read_bytes() if Path("/proc/cpuinfo").exists() else b""
    instructions = hashlib.sha256(info.partition(b"flags")[2].partition(b"\n")[0]).hexdigest()
    kept = cache.mkdir(f"programs-{instructions[:8]}")
    for path in kept.glob("*-cache"):
        (programs / path.name).symlink_to(path)
    yield programs
    for path in programs.glob("*-cache"):
        if not path.is_symlink():
            with tempfile.NamedTemporaryFile(dir=kept, delete=False) as file:
                file.write(path.read_bytes())
            os.replace(file.name, kept / path.name)  # whole or not at all
    with contextlib.suppress(FileNotFoundError):  # the other process of tests deletes some as well
        for path in sorted(kept.glob("*-cache"), key=lambda path: path.stat().st_mtime)[:-MOST_PROGRAMS]:
            path.unlink()


def keeping_programs(directory: Path) -> dict[str, Any]:
    """The settings with which JAX keeps every program in a directory."""
    return {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(directory),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_persistent_cache_enable_xla_caches": "none",  # whose directory would be part of a program's name
    }


@pytest.fixture(scope="module", autouse=True)
def kept_programs(request):
    """Gives the modules in KEEPING_PROGRAMS the programs of earlier sessions."""
    if KEEPING_PROGRAMS.isdisjoint(request.path.relative_to(Path(__file__).parents[1]).with_suffix("").parts):
        yield
        return
    settings = keeping_programs(request.getfixturevalue("programs_of_before"))
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache_of_jax.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache_of_jax.reset_cache()


def random_dataset(num_samples: int, longest: int, seed: int = 0) -> TokenDataset:
    """Random printable bytes of random lengths, 1 to `longest`."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, num_samples)
    return TokenDataset.from_bytes([rng.integers(32, 127, n, np.uint8).tobytes() for n in lengths])


@pytest.fixture(scope="session")
def split() -> Split:
    return Split(train=random_dataset(120, 40), held_out=random_dataset(15, 40, seed=1))


@pytest.fixture(scope="session", name="recorded_run")
def run_of_all_tests(tmp_path_factory):
    """A run of 20 steps with evaluations, for tests that only read it."""
    from tests.support.recorded_run import recorded_run  # here: it compiles, which most tests do without

    return recorded_run(tmp_path_factory)
