"""Benchmarks run, in their quick form; their figures are no concern of tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_prints_its_table(path):
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS.parent)}
    run = subprocess.run([sys.executable, path, "--quick"], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.count("\n| ") > 3
