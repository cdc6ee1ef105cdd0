"""Trainings of processes that are lost, seen from outside: their processes train nothing here."""

import json
import os
from pathlib import Path

import pytest

from tests import forks

PROGRAM = Path(__file__).parents[1] / "run_elastic.py"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    env = {name: value for name, value in os.environ.items() if name != "JAX_LOCAL_DEVICE_IDS"}
    ended = forks.run(PROGRAM, str(tmp_path_factory.mktemp("elastic")), env=env | {"PYTHONPATH": str(forks.ROOT)})
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    return found | {"said": ended.stderr}


pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize(
    ("case", "code", "places"),
    [
        ("ends", 0, [[0, 1, 2, 3]]),
        ("is wrong", 2, [[0, 1, 2, 3]]),
        ("loses one", 0, [[0, 1, 2, 3], [0, 1]]),
        ("loses process 0", 0, [[0, 1, 2, 3], [1, 2]]),
        ("is aborted", 0, [[0, 1, 2, 3], [0, 2]]),
        ("stands still", 0, [[0, 1, 2, 3], [0, 2]]),
        ("is stopped", 143, [[0, 1, 2, 3]]),
        ("comes back", 0, [[0, 1, 2, 3], [0, 1], [0, 1, 2, 3]]),
    ],
)
def test_a_training_goes_on_with_those_that_survive(outcomes, case, code, places):
    assert outcomes[case] == {"code": code, "places": places, "running": []}


def test_starts_that_save_nothing_come_to_an_end(outcomes):
    assert outcomes["crashes"]["code"] == (
        "5 starts in a row have saved nothing new; the last: process 0 ended with exit code 1"
    )
    assert len(outcomes["crashes"]["places"]) == 5
    assert not outcomes["crashes"]["running"]
    assert "LookupError: of the test" in outcomes["said"]


def test_too_few_survivors_are_named_and_nothing_runs_on(outcomes):
    found = outcomes["too few"]
    assert "process 1 was killed by SIGKILL; process 2 was killed by SIGKILL; process 3" in found["code"]
    assert "goes on with 2 devices at least (stage1.tensor2), and 1 is left" in found["code"]
    assert found["places"] == [[0, 1, 2, 3]]
    assert not found["running"]


def test_each_loss_is_said_with_how_many_go_on(outcomes):
    said = outcomes["said"]
    assert "jvarlen: process 2 was killed by SIGKILL; goes on from the last checkpoint with 2 of 4 processes" in said
    assert "jvarlen: process 1 stands still; goes on" in said
    assert "jvarlen: trains on 4 of 4 processes again" in said
