"""A run that is killed and resumed is the one that is not, bit for bit."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tests import forks, processes

from . import calls

READS = 130 * 4  # all samples once for their lengths, then three epochs of them


def run(*args):
    env = os.environ | {"XLA_FLAGS": processes.COMPILE_FAST, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(processes.ROOT)}
    return forks.run(Path(__file__).parent / "run_training.py", *map(str, args), env=env)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_killed_and_resumed_run_ends_as_one_that_is_not_killed(tmp_path):
    whole = run(tmp_path / "whole", tmp_path / "whole.npz", 0)
    assert whole.returncode == 0, whole.stderr
    killed = run(tmp_path / "killed", tmp_path / "killed.npz", READS)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (run_dir,), (whole_dir,) = ((tmp_path / name).glob("[0-9]*") for name in ("killed", "whole"))
    num_steps, num_steps_killed = len(calls.steps_of_run(whole_dir)), len(calls.steps_of_run(run_dir))
    assert 0 < calls.num_steps_saved(run_dir) <= num_steps_killed < num_steps
    resumed = run(tmp_path / "killed", tmp_path / "killed.npz", 0, run_dir)
    assert resumed.returncode == 0, resumed.stderr
    assert calls.steps_of_run(run_dir) == calls.steps_of_run(whole_dir)
    with np.load(tmp_path / "whole.npz") as one, np.load(tmp_path / "killed.npz") as other:
        assert len(one.files) > 10
        assert one.files == other.files
        assert all(one[name].tobytes() == other[name].tobytes() for name in one.files)
