"""Run directories: one run each at a time, found again under the same settings, and a link that does no harm."""

import contextlib
import dataclasses
import errno
import fcntl
import os

import numpy as np
import pytest

from jvarlen.runs.config import DirectoryConfig, FitConfig, is_run_dir
from jvarlen.runs.directory import lock_run_dir, new_run_dir, point_latest_to, resumed_run_dir
from jvarlen.runs.saved_config import load_config
from jvarlen.runs.settings import resolve
from jvarlen.runs.shapes import epoch_plan, shapes_for
from jvarlen.runs.summary import Summary


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


LENGTHS = np.arange(1, 40)


def plan_of(settings):
    shapes = shapes_for(settings.plan, LENGTHS)
    return epoch_plan(settings.plan, shapes, LENGTHS, seed=settings.config.seed, epoch=0)


def begin(config):
    settings = resolve(config)
    with contextlib.ExitStack() as held:
        shapes = shapes_for(settings.plan, LENGTHS)
        return new_run_dir(settings.config, shapes, plan_of(settings), {}, held)


def resume(config, run_dir):
    settings = resolve(config)
    with contextlib.ExitStack() as held:
        return resumed_run_dir(settings.config, run_dir, plan_of(settings), held)[1]


def test_a_directory_that_holds_a_run_takes_no_other(tmp_path):
    config = FitConfig(directory=DirectoryConfig(run_dir=tmp_path / "run"))
    assert not is_run_dir(config.directory.run_dir)
    assert begin(config) == config.directory.run_dir
    assert is_run_dir(config.directory.run_dir)
    with pytest.raises(ValueError, match="holds a run already"):
        begin(dataclasses.replace(config, seed=3))
    assert load_config(config.directory.run_dir / "config.json").seed == 0


def test_checkpoints_without_settings_are_not_taken_over(tmp_path):
    (tmp_path / "run" / "checkpoints" / "4").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds a run already"):
        begin(FitConfig(directory=DirectoryConfig(run_dir=tmp_path / "run")))


def test_a_directory_that_a_kill_left_without_settings_is_begun_anew(tmp_path):
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "plan.npz").write_bytes(b"half")
    begin(FitConfig(directory=DirectoryConfig(run_dir=run_dir)))
    assert resume(FitConfig(), run_dir) == []


def test_the_link_to_the_latest_run_replaces_no_file_of_the_user(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        point_latest_to(tmp_path / name)
        assert (tmp_path / "latest").resolve() == tmp_path / name
    monkeypatch.chdir(tmp_path / "a")
    point_latest_to((tmp_path / "a").relative_to(tmp_path / "a"))
    assert (tmp_path / "latest").resolve() == tmp_path / "a"
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").write_text("mine")
    point_latest_to(tmp_path / "b")
    assert (tmp_path / "latest").read_text() == "mine"
    assert not list(tmp_path.glob(".latest-*"))


def test_a_summary_is_shown_without_exponents():
    summary = Summary(**dict.fromkeys((field.name for field in dataclasses.fields(Summary)), 0) | {
        "evaluations": {"other": None}, "tokens_per_s": 1234567.8, "padding": 0.00001234, "compile_s": 5.43216,
    })  # fmt: skip
    shown = dict(line.rsplit(maxsplit=1) for line in str(summary).splitlines())
    expected = {"tokens per s": "1,234,568", "padding": "0.00001234", "compile s": "5.432", "after on other": "–"}
    assert {name: shown[name] for name in expected} == expected
