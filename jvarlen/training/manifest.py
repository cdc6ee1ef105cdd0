"""A list of the files of a directory, with size and SHA-256, and its check.

The list is a file in the directory itself and carries a hash of itself: a changed byte in it is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.files import write_atomically

__all__ = ["MANIFEST", "check_manifest", "write_manifest"]

MANIFEST = "manifest.json"
_NUM_THREADS = 4  # hashing and reading leave the interpreter to others


def write_manifest(directory: Path) -> None:
    """Lists all files of a directory in its file `manifest.json`, and makes sure that all of it is on disk.

    Args:
      directory: files and directories, which nobody changes during the call or later.

    Raises:
      OSError: a file cannot be read, or the list cannot be written.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     _ = (Path(folder) / "weights").write_bytes(b"abc")
      ...     write_manifest(Path(folder))
      ...     check_manifest(Path(folder))
    """
    files = _hash_files(directory, _files_in(directory), sync=True)
    with write_atomically(directory / MANIFEST) as file:
        file.write(_encode(files))


def check_manifest(directory: Path) -> None:
    """Raises an error if a directory differs from its manifest.

    No file but the manifest is parsed. Empty directories do not count.

    Args:
      directory: as `write_manifest` left it.

    Raises:
      ValueError: files are missing, added, or of another size or content; or the manifest itself is missing or damaged.
        The first few are listed.
      OSError: a file cannot be read.
    """
    found = _files_in(directory)
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


def _files_in(directory: Path) -> set[str]:
    """Names of all files, relative and with slashes."""
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir()}


def _hash_files(directory: Path, names: set[str], *, sync: bool = False) -> dict[str, dict[str, Any]]:
    """Size in bytes and SHA-256 of files, by name."""

    def hash_file(name: str) -> dict[str, Any]:
        with (directory / name).open("rb") as file:
            if sync:
                os.fsync(file.fileno())
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
    except (ValueError, LookupError, TypeError, AttributeError):
        is_whole = False
    return files if is_whole else None


def _not_whole(directory: Path, problems: Iterable[str]) -> str:
    return f"{directory} is not whole: {list_first(problems, '; ')}"
