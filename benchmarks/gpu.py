"""How near to its matrix rate does a GPU train on samples of different lengths, and what do few shapes cost there?

A model of about 100 million parameters in bfloat16, lengths up to 4,096, 65,536 tokens a microbatch, on one GPU; JAX
and, where it is installed, PyTorch, each in a process of its own: `gpu_jax.py` and `gpu_torch.py`, in `support/`. A
third one, `gpu_targets.py`, holds the bytes and seconds that `compile_for` predicts for such a GPU against it. Run
`python benchmarks/gpu.py [--quick]` in a checkout, installed or not; it takes some minutes. Prints tables and writes
them, with versions and hardware, to `benchmarks/results/`. The exit code is 1 without a GPU, or where a part failed;
the report still has what the other parts measured. `--quick` runs a tiny model on the CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from support.bfloat16_on_cpu import environment_for_bfloat16
from support.gpu_sizes import FULL, QUICK
from support.gpu_tables import make_lines
from support.timing import report

FOLDER = Path(__file__).parent
DEADLINE_S = 480  # of a process that hangs
# All compilations are cold; and JAX takes nearly all memory, as nothing else is on the GPU while it runs.
ENVIRONMENT = {"JAX_ENABLE_COMPILATION_CACHE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
ON_CPU = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "CUDA_VISIBLE_DEVICES": ""}


def ask(module: str, *, quick: bool) -> dict[str, Any]:
    """What a process answered; under "failed", by part, what did not work."""
    environment = os.environ | ENVIRONMENT | (ON_CPU | environment_for_bfloat16() if quick else {})
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(FOLDER.parent), str(FOLDER), os.environ.get("PYTHONPATH")))
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "answers.json")
        command = [sys.executable, "-m", f"support.{module}", "quick" if quick else "full", str(path)]
        try:
            code = subprocess.run(command, env=environment, timeout=DEADLINE_S, check=False).returncode
        except subprocess.TimeoutExpired:
            code = -1
        answers = json.loads(path.read_text()) if path.exists() else {"failed": {}}
    parts = answers.get("parts", ["all of it"])
    for name in parts if code else ():
        if not answers.get(name):
            answers["failed"].setdefault(name, f"its process ended with code {code}, or after {DEADLINE_S} s")
    return answers


def is_true(module: str, expression: str) -> bool:
    """Whether an expression of a module holds; asked in a process of its own, which gives the GPU's memory back."""
    program = f"import sys, {module}; sys.exit(not {expression})"
    return subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def why_no_torch(*, quick: bool) -> str | None:
    """Why PyTorch cannot be compared with; None where it can."""
    if importlib.util.find_spec("torch") is None:
        return "it is not installed"
    return None if quick or is_true("torch", "torch.cuda.is_available()") else "it sees no GPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model on the CPU, and no report")
    quick = parser.parse_args().quick
    if not quick and not is_true("jax", "(jax.default_backend() == 'gpu')"):
        sys.exit("no GPU: nothing to do (--quick runs a tiny model on the CPU)")
    of_jax, of_targets = ask("gpu_jax", quick=quick), ask("gpu_targets", quick=quick)
    missing = why_no_torch(quick=quick)
    of_torch = {"missing": missing} if missing else ask("gpu_torch", quick=quick)
    report("gpu", make_lines(QUICK if quick else FULL, of_jax, of_torch, of_targets, quick=quick), write=not quick)
    answers = {"JAX": of_jax, "PyTorch": of_torch, "targets": of_targets}
    failed = [f"{name}: {part}" for name, of in answers.items() for part in of.get("failed", {})]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
