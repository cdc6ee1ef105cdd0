"""Processes: what happens on one happens on all, in bounded time."""

import contextlib
import json
import re
import signal
from pathlib import Path

import pytest

from jvarlen.distributed.processes import agree, gather_texts, initialize_processes, together
from tests.support import processes

PROGRAM = Path(__file__).with_name("run_processes.py")
WITHIN_S = 30  # of a death, as the heartbeat promises


@pytest.mark.parametrize("value", ["text", b"bytes", 3])
def test_one_process_agrees_with_itself(value):
    agree("value", value)
    assert gather_texts("texts", "long " * 1000) == ["long " * 1000]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_one_process_raises_what_failed(error):
    with pytest.raises(error, match="own"), together("try"):
        raise error("own")


@pytest.mark.parametrize("address", ["localhost", ":29400", "localhost:", "localhost:0", "localhost:65536"])
def test_a_coordinator_without_a_host_and_a_port_is_refused(address):
    with pytest.raises(ValueError, match="must be a host and a port"):
        initialize_processes(address, 1, 0)


@pytest.fixture(scope="module")
def left_ones():
    """Two processes for each way in which one of them leaves, at once: the other waits long for its heartbeat."""
    with contextlib.ExitStack() as stack:
        yield {mode: stack.enter_context(processes.started(PROGRAM, 2, mode)) for mode in ("terminated", "raises")}


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.usefixtures("left_ones")
def test_every_process_decides_the_same():
    seen = [json.loads(output.splitlines()[-1]) for output in processes.run(PROGRAM, 3, "all", seconds=60)]
    fine = ["", ""]
    for rank, one in enumerate(seen):
        for case in ("same text", "same bytes", "same number", "same long one", "none fails", "afterwards"):
            assert one[case] == fine, (rank, case)
        assert one["one differs"] == [
            "UserError", "processes differ in plan digest: processes 0, 2: '5d41'; process 1: '7a3e'"
        ]  # fmt: skip
        assert one["type differs"] == ["UserError", "processes differ in steps: process 0: '3'; processes 1, 2: 3"]
        assert one["end of a long one differs"][0] == "UserError"
        assert one["end of a long one differs"][1].count("… (SHA-256 ") == 3
        assert one["other call"] == [
            "ProcessesError", "processes are not at the same call: process 0: plan; processes 1, 2: lengths"
        ]  # fmt: skip
        assert one["texts"] == ["process 0 …", "process 1 …", "process 2 …"]
        assert one["shared"] is True
        assert one["shared, empty"] == ""
        assert one["arrays"] == [[[process, 2**62 + process]] for process in range(3)]
        own, others = (
            ["OSError", f"disk {rank} is broken"],
            "could not read the part: process 2: OSError: disk 2 is broken",
        )
        assert one["one fails"] == (own if rank == 2 else ["ProcessesError", others])
        both = "could not read the part: process 0: OSError: disk 0 is broken; process 2: OSError: disk 2 is broken"
        assert one["two fail"] == (["ProcessesError", both] if rank == 1 else own)
        interrupted = ["ProcessesError", "could not wait: process 1: KeyboardInterrupt"]
        assert one["interrupted"] == (["KeyboardInterrupt", ""] if rank == 1 else interrupted)


@pytest.mark.parametrize("mode", ["terminated", "raises"])
@pytest.mark.multiprocess
@pytest.mark.slow
def test_no_process_waits_long_for_one_that_left(left_ones, mode):
    survivor, left = left_ones[mode].wait(60 + WITHIN_S)
    (left_at,) = re.findall(r"^leaves at (.*)$", left.output, re.MULTILINE)
    assert max(survivor.at, left.at) - float(left_at) < WITHIN_S
    assert survivor.code != 0
    if mode == "raises":
        assert left.code != 0
        assert "no such dataset" in left.output
    else:
        assert left.code == -signal.SIGTERM, left.output
        assert "lost the other processes at 'load'; no word from process 1" in survivor.output
