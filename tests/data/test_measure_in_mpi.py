"""Measuring by the processes that `mpirun` starts."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.logged_samples import times_measured
from tests.processes import ROOT

PROGRAM = ROOT / "tests" / "run_measure_in_mpi.py"
NUM_SAMPLES = 500


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(not shutil.which("mpirun") or not importlib.util.find_spec("mpi4py"), reason="no MPI")
def test_two_of_three_mpi_processes_measure_every_sample_once(tmp_path):
    start = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable, "-m", "mpi4py.futures"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    printed = subprocess.run([*start, PROGRAM, tmp_path], env=env, capture_output=True, check=True, timeout=120).stdout
    assert json.loads(printed) == list(range(1, NUM_SAMPLES + 1))
    assert times_measured(tmp_path) == dict.fromkeys(range(NUM_SAMPLES), 1)
    assert len(list(tmp_path.iterdir())) == 2
