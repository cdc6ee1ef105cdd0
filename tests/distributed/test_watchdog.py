"""The watchdog: a process that hangs ends all, with its name; a slow one ends none."""

import time
from pathlib import Path

import pytest

from jvarlen.distributed import processes
from jvarlen.distributed.processes import _who_is_behind, ending_stalled_processes
from tests.distributed.run_watchdog import TIMEOUT_S
from tests.support.processes import started

WITHIN_S = 10  # of the timeout


@pytest.mark.parametrize(
    ("steps_of", "said"),
    [
        ({0: 7, 1: 5, 2: 6}, "process 1 stands after step 5, others after 7"),
        ({0: 7, 1: 5, 2: 5}, "processes 1, 2 stand after step 5, others after 7"),
        ({0: 1200, 1: 1200}, "all processes stand after step 1,200"),
    ],
)
def test_who_has_begun_the_fewest_steps_is_named(steps_of, said):
    assert _who_is_behind(steps_of) == said


def test_one_process_waits_for_nobody(monkeypatch):
    monkeypatch.setattr(processes, "_LOOK_S", 0.001)
    with ending_stalled_processes("training", 0.01) as heartbeat:
        heartbeat.step()
        time.sleep(0.1)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_processes_end_with_the_name_of_the_one_that_hangs():
    with started(Path(__file__).with_name("run_watchdog.py"), 3) as started_ones:
        deadline = time.monotonic() + 60
        while "hangs at" not in started_ones.output(1):
            assert time.monotonic() < deadline, started_ones.output(1)
            time.sleep(0.05)
        ended = started_ones.wait(TIMEOUT_S + WITHIN_S)
    for rank, one in enumerate(ended):
        assert one.code == 2, one.output
        assert "slow is not stalled" in one.output
        stalled = "no step in 2.5 s; process 1 stands after step 5, others after 6"
        assert f"jvarlen: training has stalled: {stalled}\n" in one.output
        assert ("read_from_a_disk_that_hangs" in one.output) == (rank == 1)
