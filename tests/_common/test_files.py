"""Files: whole under their name, or not there at all."""

import errno
import io
import json
import os
from pathlib import Path

import pytest

from jvarlen import CostModel, Plan, UserError
from jvarlen._common.files import check_place, load_array, write_atomically
from jvarlen.data.line_files import read_json
from jvarlen.reports.run_records import read_metrics
from jvarlen.runs.commands.sample import SampleCommand
from jvarlen.runs.saved_config import load_config


def write_and_fail(path):
    with write_atomically(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt


def write_to_full_disk(path):
    with write_atomically(path), open("/dev/full", "wb", buffering=0) as full:
        full.write(b"x")


def test_a_file_appears_whole(tmp_path):
    path = tmp_path / "file"
    with write_atomically(path) as file:
        file.write(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new"


def test_an_interrupted_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        write_and_fail(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_places_that_cannot_be_written_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no directory \S+/nowhere to write file to"):
        write_and_fail(tmp_path / "nowhere" / "file")
    with pytest.raises(IsADirectoryError, match="is a directory"):
        write_and_fail(tmp_path)


@pytest.fixture
def pipe(tmp_path):
    """A pipe that has something to read, and a writer, so that reading it would block."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    os.write(writer, b"{}")
    yield path
    os.close(writer)


READERS = {
    "lengths": lambda path: load_array(path, "lengths"),
    "cost model": CostModel.load,
    "json": read_json,
    "plan": Plan.load,
    "settings": load_config,
    "metrics": read_metrics,
    "prompts": lambda path: SampleCommand(directory=path, prompts=path).run(),
    "place": check_place,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_pipes_and_devices_are_refused_before_they_are_opened(pipe, read, monkeypatch):
    def refuse(path, *args, **kwargs):
        assert "pipe" not in str(path)
        return open_any(path, *args, **kwargs)

    open_any = io.open
    monkeypatch.setattr(io, "open", refuse)
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(ValueError, match=r"pipe\b.* not a regular file"):
        read(pipe)


def test_json_of_other_editors_has_a_byte_order_mark(tmp_path):
    path = tmp_path / "cost.json"
    fields = {"constant": 1.0, "linear": 2.0, "quadratic": 0.0, "unit": "seconds"}
    path.write_text(json.dumps(fields), encoding="utf-8-sig")
    assert CostModel.load(path) == CostModel(**fields)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '|O', 'fortran_order': False, 'shape': (3,), }",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (1099511627776,), }",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (-3,), }",
        "{'descr': 'nonsense', 'fortran_order': False, 'shape': (3,), }",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (3,), 'x': 1}",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (3,), ",
        "{'descr': '<i8', 'fortran_order': 7, 'shape': 'x'}",
        "(" * 117,
        "x = '",
    ],
)
def test_forged_headers_of_arrays_are_refused_by_path(tmp_path, header):
    path = tmp_path / "lengths.npy"
    padded = header.ljust(117) + "\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded.encode() + bytes(24))
    with pytest.raises(UserError, match=r"lengths\.npy is not a readable \.npy file of lengths"):
        load_array(path, "lengths")


@pytest.mark.parametrize("number", ["1e400", "-1e400", "9" * 400])
def test_numbers_that_no_float_holds_are_refused_by_path(tmp_path, number):
    (tmp_path / "cost.json").write_text(f'{{"constant": 1, "linear": {number}, "quadratic": 0}}')
    with pytest.raises(UserError, match=r"cost\.json holds no cost model: the number .* is above 1\.8e308"):
        CostModel.load(tmp_path / "cost.json")


def test_others_can_read_it(tmp_path):
    with write_atomically(tmp_path / "file") as file:
        file.write(b"x")
    (tmp_path / "other").write_bytes(b"x")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_on_a_full_disk_the_error_names_the_file_and_nothing_is_left(tmp_path):
    with pytest.raises(OSError, match=r"/file cannot be written: No space left on device$") as full:
        write_to_full_disk(tmp_path / "file")
    assert full.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_directories_that_cannot_be_synced_will_do(tmp_path, monkeypatch):
    open_any = os.open

    def refuse_directories(path, *args):
        if Path(path).is_dir():
            raise PermissionError
        return open_any(path, *args)

    monkeypatch.setattr(os, "open", refuse_directories)
    with write_atomically(tmp_path / "file") as file:
        file.write(b"x")
    assert (tmp_path / "file").read_bytes() == b"x"
