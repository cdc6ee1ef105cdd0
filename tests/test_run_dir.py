"""Run directory: one run at a time has it, and none that has ended keeps it."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from jvarlen.run_dir import lock_run_dir

HOLDER = """
import sys, time
from pathlib import Path
from jvarlen.run_dir import lock_run_dir
with lock_run_dir(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_directory_is_held_until_the_end_of_the_block_or_an_error(tmp_path):
    def fail_inside():
        with lock_run_dir(tmp_path):
            for _ in range(2):  # to be refused takes nothing away
                with pytest.raises(ValueError, match=rf"{tmp_path} is in use .* \(process {os.getpid()} on "):
                    lock_run_dir(tmp_path).__enter__()
            raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            fail_inside()


def test_the_file_tells_the_latest_holder_alone(tmp_path):
    (tmp_path / "lock").write_text("process 123456789 on a host of a very long name" * 9)
    with lock_run_dir(tmp_path):
        assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on ")
        assert len((tmp_path / "lock").read_text().split()) == 4


@pytest.mark.multiprocess
def test_another_process_holds_it_until_it_is_killed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match=rf"\(process {process.pid} on "):
        lock_run_dir(tmp_path).__enter__()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with lock_run_dir(tmp_path):
        pass


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, code):
    def without_locks(file, operation):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", without_locks)
    with pytest.warns(UserWarning, match=f"no locks .{os.strerror(code)}"), lock_run_dir(tmp_path):
        pass


def test_other_errors_of_locking_are_raised(tmp_path, monkeypatch):
    def failing(file, operation):
        raise OSError(errno.EIO, "bad disk")

    monkeypatch.setattr(fcntl, "flock", failing)
    with pytest.raises(OSError, match="bad disk"):
        lock_run_dir(tmp_path).__enter__()
