"""Runs tests and benchmarks on a GPU, from a checkout, in 12 minutes; the exit code is the outcome.

    PYTHONPATH=. python -m tests.gpu [--platform cpu] [--seconds 720]

First the tests of attention by cuDNN, then the benchmark, then all other tests; what has no time left is cut. Nothing
is installed. It needs jax (with CUDA), flax, optax, numpy, pytest and what these require; it compares with PyTorch
where that is installed. Exit codes: 0 for success; 1 if something failed or was cut, as the last lines say; 3 if there
is no GPU. `--platform cpu` runs the same tests on the CPU, and the quick form of the benchmark, to check that they run.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
NO_GPU = 3
CUDNN = ("tests/gpu/test_attention_on_a_device.py", "tests/gpu/test_training_on_a_device.py")
CUDNN_S, OTHERS_S = 90, 30
# Other files that hold tests for a GPU.
ELSEWHERE = ("tests/parity/test_sort.py", "tests/parity/test_torch_compile.py", "tests/parity/test_training.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--part", choices=("tests", "benchmark"), help="one of the two alone")
    parser.add_argument("--seconds", type=float, default=720, help="in all, on a GPU")
    chosen = parser.parse_args()
    environment = os.environ | environment_of(chosen.platform)
    if chosen.platform == "gpu" and not has_gpu(environment):
        print("no GPU: nothing to do (PLATFORM=cpu runs the same on the CPU)", file=sys.stderr)
        return NO_GPU
    # All run in any case: time on a GPU is rare.
    end, failed = time.monotonic() + (chosen.seconds if chosen.platform == "gpu" else 3600), []
    for step in steps(chosen.platform, chosen.seconds):
        left_s = min(step.seconds, end - time.monotonic())
        if chosen.part in (None, step.part) and not succeeds(step, left_s, environment):
            failed.append(step.name)
    print(f"failed or cut: {', '.join(failed)}" if failed else "all is well", file=sys.stderr)
    return 1 if failed else 0


class Step(NamedTuple):
    """What is run, as arguments of Python, for so many seconds at most."""

    name: str
    part: str
    command: list[str]
    seconds: float


def steps(platform: str, seconds: float) -> list[Step]:
    """The most valuable first."""
    tests = ["-m", "pytest", "-c", "tests/gpu/pytest.ini", "--rootdir=.", "-q"]
    if platform == "cpu":
        benchmark = ["benchmarks/gpu.py", "--quick"]
        return [Step("tests", "tests", [*tests, "tests/gpu"], 3600), Step("benchmark", "benchmark", benchmark, 3600)]
    by_cudnn = [*tests, *CUDNN, "-m", "gpu", "-k", "cudnn"]
    others = [*tests, "tests/gpu", *ELSEWHERE, "-m", "gpu", "-k", "not cudnn"]
    measuring_s = seconds - CUDNN_S - OTHERS_S
    return [
        Step("tests of cuDNN", "tests", by_cudnn, CUDNN_S),
        # It ends by itself.
        Step("benchmark", "benchmark", ["benchmarks/gpu.py", "--seconds", f"{measuring_s:.0f}"], measuring_s + 10),
        Step("other tests", "tests", others, seconds),
    ]


def succeeds(step: Step, seconds: float, environment: dict[str, str]) -> bool:
    """Whether it ends in time, without an error."""
    try:
        run = subprocess.run([sys.executable, *step.command], cwd=ROOT, env=environment, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return False
    return run.returncode == 0


def environment_of(platform: str) -> dict[str, str]:
    """What is set for it; plugins of pytest that the machine may have are left out."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "JVARLEN_TEST_PLATFORM": platform}
    if platform == "gpu":
        return environment
    # What is asked of the CPU is whether it runs, and soon.
    return environment | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "OMP_NUM_THREADS": "1"}


def has_gpu(environment: dict[str, str]) -> bool:
    """Asked in a process of its own: JAX would hold the memory of the GPU."""
    program = "import jax, sys; sys.exit(jax.default_backend() != 'gpu')"
    return subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
