"""A list of the files of a directory, with size and SHA-256, and its check.

The list is a file in the directory itself and carries a hash of itself: a changed byte in it is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.files import write_atomically

__all__ = ["MANIFEST", "check_manifest", "write_manifest"]

MANIFEST = "manifest.json"
_NUM_THREADS = 4  # hashing and reading leave the interpreter to others
_ODD = "neither a file nor a directory; links are not followed"


def write_manifest(directory: Path) -> None:
    """Lists all files of a directory in its file `manifest.json`, and makes sure that all of it is on disk.

    Args:
      directory: regular files and directories, which nobody changes during the call or later.

    Raises:
      ValueError: it contains something else, such as a link.
      OSError: a file cannot be read, or the list cannot be written.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     _ = (Path(folder) / "weights").write_bytes(b"abc")
      ...     write_manifest(Path(folder))
      ...     check_manifest(Path(folder))
    """
    found, odd = _walk(directory)
    if odd:
        raise UserError(_not_whole(directory, (f"{name}: {_ODD}" for name in sorted(odd))))
    files = _hash_files(directory, found, sync=True)
    with write_atomically(directory / MANIFEST) as file:
        file.write(_encode(files))


def check_manifest(directory: Path) -> None:
    """Raises an error if a directory differs from its manifest.

    Links are not followed, and no file but the manifest is parsed. Empty directories do not count.

    Args:
      directory: as `write_manifest` left it.

    Raises:
      ValueError: files are missing, added, of another size or content, or not regular files; or the manifest itself is
        missing or damaged. The first few are listed.
      OSError: a file cannot be read.
    """
    if directory.is_symlink():
        raise UserError(f"{directory} is a link, which is not followed")
    found, odd = _walk(directory)
    if odd:
        raise UserError(_not_whole(directory, (f"{name}: {_ODD}" for name in sorted(odd))))
    listed = _read_manifest(directory) if MANIFEST in found else None
    if listed is None:
        raise UserError(_not_whole(directory, [f"{MANIFEST}: missing, or damaged: not as it was written"]))
    found.remove(MANIFEST)
    problems = [f"{name}: missing" for name in sorted(listed.keys() - found)]
    problems += [f"{name}: not listed in {MANIFEST}" for name in sorted(found - listed.keys())]
    for name, is_now in _hash_files(directory, found & listed.keys()).items():
        if is_now["size"] != listed[name]["size"]:
            problems.append(f"{name}: {is_now['size']} bytes instead of {listed[name]['size']}")
        elif is_now != listed[name]:
            problems.append(f"{name}: other bytes than were written, its SHA-256 differs")
    if problems:
        raise UserError(_not_whole(directory, problems))


def _walk(directory: Path) -> tuple[set[str], set[str]]:
    """Names of all regular files, and of whatever is neither file nor directory, relative and with slashes."""
    files, odd = set(), set()

    def walk(folder: str, prefix: str) -> None:
        with os.scandir(folder) as entries:
            for entry in entries:
                name = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    walk(entry.path, f"{name}/")
                elif entry.is_file(follow_symlinks=False):
                    files.add(name)
                else:
                    odd.add(name)

    walk(str(directory), "")
    return files, odd


def _hash_files(directory: Path, names: set[str], *, sync: bool = False) -> dict[str, dict[str, Any]]:
    """Size in bytes and SHA-256 of files, by name."""

    def hash_file(name: str) -> dict[str, Any]:
        # A link, or a pipe that would never answer, put there since the directory was read is refused as well.
        descriptor = os.open(directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(f"{directory / name} is no plain file")
            if sync:
                os.fsync(descriptor)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return {"size": file.tell(), "sha256": digest}

    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        return dict(zip(sorted(names), threads.map(hash_file, sorted(names)), strict=True))


def _encode(files: dict[str, Any]) -> bytes:
    """The one form of a manifest."""
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return json.dumps({"sha256": digest, "files": files}, indent=1, sort_keys=True).encode()


def _read_manifest(directory: Path) -> dict[str, Any] | None:
    """The listed files, by name; None if the manifest is not as it was written."""
    raw = (directory / MANIFEST).read_bytes()
    try:
        files = json.loads(raw)["files"]
        is_whole = _encode(files) == raw and all(entry.keys() == {"size", "sha256"} for entry in files.values())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        is_whole = False
    return files if is_whole else None


def _not_whole(directory: Path, problems: Iterable[str]) -> str:
    return f"{directory} is not whole: {list_first(problems, '; ')}"
