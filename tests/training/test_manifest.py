"""Manifests: every change of a directory is noticed and named."""

import os

import pytest

from jvarlen.training.manifest import check_manifest, write_manifest

FILES = {"a": b"", "b/c": b"12345", "b/d/e": b"12345"}


@pytest.fixture
def directory(tmp_path):
    for name, content in FILES.items():
        path = tmp_path / "whole" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    write_manifest(tmp_path / "whole")
    return tmp_path / "whole"


def test_a_directory_is_as_it_was_wherever_it_lies(directory):
    check_manifest(directory)
    (directory / "empty").mkdir()
    check_manifest(directory.rename(directory.with_name("moved")))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: (d / "b/c").unlink(), "b/c: missing"),
        (lambda d: (d / "b/x").write_bytes(b""), "b/x: not listed"),
        (lambda d: (d / "b/c").write_bytes(b"12344"), "b/c: other bytes"),
        (lambda d: os.link(d / "b/c", d / "f"), "f: not listed"),
        (lambda d: (d / "b/c").unlink() or (d / "a").write_bytes(b"1"), "a: other bytes .*; b/c: missing$"),
    ],
)
def test_what_differs_is_named(directory, change, said):
    change(directory)
    with pytest.raises(ValueError, match=f"^{directory} is not whole: {said}"):
        check_manifest(directory)


def test_a_device_among_the_files_is_named_and_not_read(directory):
    (directory / "b/x").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="b/x is a pipe or a device"):
        check_manifest(directory)
