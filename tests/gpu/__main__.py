"""Runs tests and benchmarks on a GPU, from a checkout; the exit code is the outcome.

    PYTHONPATH=. python -m tests.gpu [--platform cpu]

Nothing is installed. It needs jax (with CUDA), flax, optax, numpy, pytest and what these require; it compares with
PyTorch where that is installed. Exit codes: 0 for success; 1 if something failed, as the last lines say; 3 if there is
no GPU. `--platform cpu` runs the same tests on the CPU, and the quick form of the benchmark, to check that they run.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NO_GPU = 3
# Other files that hold tests for a GPU.
ELSEWHERE = ("tests/parity/test_sort.py", "tests/parity/test_torch_compile.py", "tests/parity/test_training.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--part", choices=("tests", "benchmark"), help="one of the two alone")
    chosen = parser.parse_args()
    environment = os.environ | environment_of(chosen.platform)
    if chosen.platform == "gpu" and not has_gpu(environment):
        print("no GPU: nothing to do (PLATFORM=cpu runs the same on the CPU)", file=sys.stderr)
        return NO_GPU
    # The benchmark runs in any case: time on a GPU is rare.
    codes = {
        part: subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=False).returncode
        for part, command in commands(chosen.platform).items()
        if chosen.part in (None, part)
    }
    failed = [part for part, code in codes.items() if code]
    print(f"failed: {', '.join(failed)}" if failed else "all is well", file=sys.stderr)
    return 1 if failed else 0


def commands(platform: str) -> dict[str, list[str]]:
    """What is run for a platform, by name, as arguments of Python."""
    tests = ["-m", "pytest", "-c", "tests/gpu/pytest.ini", "--rootdir=.", "-q", "tests/gpu"]
    if platform == "cpu":
        return {"tests": tests, "benchmark": ["benchmarks/gpu.py", "--quick"]}
    return {"tests": [*tests, *ELSEWHERE, "-m", "gpu"], "benchmark": ["benchmarks/gpu.py"]}


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
