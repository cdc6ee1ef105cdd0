"""Trainings of processes that are lost, seen from outside: their processes train nothing here."""

import json
import os
from pathlib import Path

import pytest

from jvarlen.experimental.elastic import keep_training
from tests.support import forks

PROGRAM = Path(__file__).parent / "run_elastic.py"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    env = {name: value for name, value in os.environ.items() if name != "JAX_LOCAL_DEVICE_IDS"}
    ended = forks.run(PROGRAM, str(tmp_path_factory.mktemp("elastic")), env=env | {"PYTHONPATH": str(forks.ROOT)})
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    return found | {"said": ended.stderr}


pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize(
    ("case", "code", "workers"),
    [
        ("ends", 0, [[0, 1, 2, 3]]),
        ("is given GPUs", 0, [[9, 7, 5, 3]]),
        ("is wrong", 2, [[0, 1, 2, 3]]),
        ("loses one", 0, [[0, 1, 2, 3], [0, 1]]),
        ("is aborted", 0, [[0, 1, 2, 3], [0, 2]]),
        ("stalls", 0, [[0, 1, 2, 3], [0, 1, 2, 3]]),
        ("stands still", 0, [[0, 1, 2, 3], [0, 2]]),
        ("comes back", 0, [[0, 1, 2, 3], [0, 1], [0, 1, 2, 3]]),
        ("is stopped", 143, [[0, 1, 2, 3]]),
        ("is stopped while one stands still", 143, [[0, 1, 2, 3]]),
        ("is stopped twice", 143, [[0, 1, 2, 3]]),
        ("is killed", "killed", [[0, 1, 2, 3]]),
    ],
)
def test_a_training_goes_on_with_those_that_survive(outcomes, case, code, workers):
    assert outcomes[case] == {"code": code, "workers": workers, "running": []}


def test_starts_that_save_nothing_come_to_an_end(outcomes):
    assert outcomes["crashes"]["code"] == (
        "5 starts in a row have saved nothing new; the last: process 0 ended with exit code 1"
    )
    assert len(outcomes["crashes"]["workers"]) == 5
    assert not outcomes["crashes"]["running"]
    assert "LookupError: of the test" in outcomes["said"]
    assert outcomes["returns nothing"]["code"].startswith("5 starts in a row have saved nothing new")
    assert not outcomes["returns nothing"]["running"]
    assert "TypeError: run must return an exit code, not None" in outcomes["said"]


def test_too_few_survivors_are_named_and_nothing_runs_on(outcomes):
    found = outcomes["too few"]
    assert "process 1 was killed by SIGKILL; process 2 was killed by SIGKILL; process 3" in found["code"]
    assert "goes on with 2 devices at least (stage1.tensor2), and 1 is left" in found["code"]
    assert found["workers"] == [[0, 1, 2, 3]]
    assert not found["running"]


def test_survivors_are_some_of_those_alive():
    with pytest.raises(ValueError, match=r"survivors\(2\) must be from 1 to 2, not 3"):
        keep_training(lambda start: 0, 2, progress=list, survivors=lambda alive: alive + 1)


def test_too_few_gpus_for_all_processes_are_named(monkeypatch):
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "0,1,2")
    with pytest.raises(ValueError, match=r"\(0,1,2\) has 3 devices, and 2 processes of 2 take 4"):
        keep_training(lambda start: 0, 2, progress=list, devices_per_process=2)
