"""Files: whole under their name, or not there at all."""

import os
from pathlib import Path

import pytest

from jvarlen._common.files import write_atomically


def write_and_fail(path):
    with write_atomically(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt


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


def test_others_can_read_it(tmp_path):
    with write_atomically(tmp_path / "file") as file:
        file.write(b"x")
    (tmp_path / "other").write_bytes(b"x")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode


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
