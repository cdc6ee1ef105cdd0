"""How near to its matrix rate does a GPU train on samples of different lengths, and what do few shapes cost there?

On one GPU, in 10 minutes, the most valuable first: sections, each in a process of its own that is ended when its time
is over. A model of about 100 million parameters in bfloat16, with packed and with padded rows; attention by samples; a
Llama of 1 B; PyTorch where it is installed; a profile; predictions of `compile_for` against the device. Run
`python benchmarks/gpu.py [--quick] [--seconds 600] [SECTION ...]` in a checkout, installed or not. The report, in
`benchmarks/results/`, is written after each section, and has what was measured until then. The exit code is 1 without a
GPU, or where a section failed. `--quick` runs tiny models on the CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from support import reports
from support.bfloat16_on_cpu import environment_for_bfloat16
from support.gpu_sizes import FULL, QUICK
from support.gpu_tables import make_lines
from support.timing import report

FOLDER = Path(__file__).parent
LEAST_S = 15.0  # in less, a process measures nothing
# All compilations are cold; and JAX takes nearly all memory, as nothing else is on the GPU while it runs.
ENVIRONMENT = {"JAX_ENABLE_COMPILATION_CACHE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
ON_CPU = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "CUDA_VISIBLE_DEVICES": ""}


class Section(NamedTuple):
    """A part of the report, in a process of its own."""

    name: str
    module: str
    seconds: float  # that no other section takes from it


SECTIONS = (
    Section("device", "gpu_shares", 35),
    Section("kernels", "gpu_attention", 65),
    Section("packed", "gpu_jax", 85),
    Section("padded", "gpu_jax", 70),
    Section("llama", "gpu_llama", 80),
    Section("torch", "gpu_torch", 95),
    Section("profile", "gpu_profile", 60),
    Section("targets", "gpu_targets", 45),
    Section("many shapes", "gpu_jax", 35),
    Section("rollouts", "gpu_llama", 30),
)


def time_limit(index: int, left_s: float) -> float:
    """Seconds for a section: its own and what earlier ones left, never more than there are."""
    later_s = sum(section.seconds for section in SECTIONS[index + 1 :])
    return min(left_s, max(SECTIONS[index].seconds, left_s - later_s))


def ask(section: Section, seconds: float, *, quick: bool) -> dict[str, Any]:
    """What a section answered; under "failed" why it has no more to say."""
    environment = os.environ | ENVIRONMENT | (ON_CPU | environment_for_bfloat16() if quick else {})
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(FOLDER.parent), str(FOLDER), os.environ.get("PYTHONPATH")))
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "answer.json")
        command = [sys.executable, "-m", f"support.{section.module}", "quick" if quick else "full", str(path)]
        try:
            code = subprocess.run([*command, section.name], env=environment, timeout=seconds, check=False).returncode
            why = f"its process ended with code {code}"
        except subprocess.TimeoutExpired:
            code, why = -1, f"cut after {seconds:.0f} s"
        answer: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return answer | ({"failed": answer.get("failed", why)} if code else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny models on the CPU, and no report")
    parser.add_argument("--seconds", type=float, help="for all sections; 600, or with --quick an hour")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(each.name for each in SECTIONS))
    given = parser.parse_args()
    end = time.monotonic() + (given.seconds or (3600 if given.quick else 600))
    answers = dict[str, dict[str, Any]]()
    lines: list[str] = []
    for index, section in enumerate(SECTIONS):
        if given.sections and section.name not in given.sections:
            continue
        limit_s = time_limit(index, end - time.monotonic())
        if section.name == "torch" and importlib.util.find_spec("torch") is None:
            answers["torch"] = {"left_out": "PyTorch is not installed"}
        elif limit_s < LEAST_S:
            answers[section.name] = {"failed": "left out: the time was over"}
        else:
            answers[section.name] = ask(section, limit_s, quick=given.quick)
        if not given.quick and answers.get("device", {}).get("platform", "gpu") != "gpu":
            sys.exit("no GPU: nothing to do (--quick runs tiny models on the CPU)")
        lines = make_lines(QUICK if given.quick else FULL, answers, quick=given.quick)
        if not given.quick:
            made = reports.make_report("gpu", lines, quick=False)
            reports.save(made, reports.RESULTS, reports.render(made))
    report("gpu", lines, write=not given.quick)
    if failed := [name for name, answer in answers.items() if "failed" in answer]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
