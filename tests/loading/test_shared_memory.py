"""Shared memory: a step that does not fit is an error that says so, not a signal."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jvarlen.loading.plan_source import ReadStep
from jvarlen.loading.read_ahead import check_room

STEP = ReadStep(3, {"tokens": np.zeros(5_000, np.int8), "scalar": 1.0}, 2, 0, np.arange(2))  # two pages and one


def room_of(num_pages, num_free=None):
    return SimpleNamespace(f_frsize=4096, f_blocks=num_pages, f_bavail=num_pages if num_free is None else num_free)


@pytest.mark.parametrize("room", [room_of(3), room_of(9, num_free=3), room_of(0)], ids=["all", "the rest", "no limit"])
def test_a_step_that_fits_passes(room, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: room)
    assert check_room(STEP) is STEP


def test_a_step_that_does_not_fit_is_refused_with_what_it_needs(monkeypatch):
    monkeypatch.setattr(os, "statvfs", {"/dev/shm": room_of(9, num_free=2)}.__getitem__)
    said = "step 3 needs 12,288 bytes of shared memory: /dev/shm has 8,192 of 36,864 bytes free"
    with pytest.raises(RuntimeError, match=rf"{said}.*--shm-size.*num_workers=0"):
        check_room(STEP)


def test_without_the_directory_nothing_is_checked(monkeypatch):
    monkeypatch.setattr("jvarlen.loading.read_ahead._SHARED_MEMORY", "/nowhere")
    assert check_room(STEP) is STEP


PROGRAM = """
import numpy as np
import jvarlen

LENGTH = 1_000_000  # a step has 8 MB of tokens and weights

if __name__ == "__main__":
    for num_workers in (0, 1):
        plan = jvarlen.make_plan([LENGTH] * 3, [(1, LENGTH)], order="length")
        batches = jvarlen.load(plan, [np.ones(LENGTH, np.int32)] * 3, num_workers=num_workers)
        print(len(list(batches)), flush=True)
"""
MOUNTED = 'mount -t tmpfs -o size=4m tmpfs /dev/shm && "$@"'
IN_SMALL_DEV_SHM = ["unshare", "--map-root-user", "--mount", "sh", "-c", MOUNTED, "sh"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_in_a_small_dev_shm_loading_says_what_to_do(tmp_path):
    if not shutil.which("unshare") or subprocess.run([*IN_SMALL_DEV_SHM, "true"], capture_output=True).returncode:
        pytest.skip("no /dev/shm of its own can be mounted for a process")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run = subprocess.run(
        [*IN_SMALL_DEV_SHM, sys.executable, program],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert run.stdout == "3\n"  # without workers
    assert run.returncode == 1
    assert re.search(
        r"RuntimeError: step 0 needs 8,\d+,\d+ bytes of shared memory: /dev/shm has .*--shm-size", run.stderr
    )
