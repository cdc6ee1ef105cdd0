"""A manifest: the SHA-256 of every file of a directory."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.files import read_object, regular_file, write_atomically

__all__ = ["check_manifest", "write_manifest"]

_MANIFEST = "manifest.json"
_NUM_THREADS = 4  # that hash: they leave the interpreter to others


def write_manifest(directory: Path) -> None:
    """Lists the SHA-256 of all files of a directory in one more file; all of it is then on disk."""
    hashes = _hash_files(directory, sync=True)
    with write_atomically(directory / _MANIFEST) as file:
        file.write(json.dumps(hashes, indent=1, sort_keys=True).encode())


def check_manifest(directory: Path) -> None:
    """Raises ValueError if a directory is not as `write_manifest` left it; parses no file but the manifest."""
    try:
        listed = read_object(directory / _MANIFEST)
    except FileNotFoundError:
        listed = {_MANIFEST: ""}
    found = _hash_files(directory)
    problems = dict.fromkeys(listed.keys() & found.keys(), "other bytes than were written, its SHA-256 differs")
    problems |= dict.fromkeys(listed.keys() - found.keys(), "missing")
    problems |= dict.fromkeys(found.keys() - listed.keys(), f"not listed in {_MANIFEST}")
    if differing := [name for name in sorted(problems) if listed.get(name) != found.get(name)]:
        wrong = [f"{name}: {problems[name]}" for name in differing]
        raise UserError(f"{directory} is not whole: {list_first(wrong, '; ')}")


def _hash_files(directory: Path, *, sync: bool = False) -> dict[str, str]:
    """SHA-256 of all files but the manifest, by relative names with slashes."""
    paths = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if not path.is_dir()}
    paths.pop(_MANIFEST, None)

    def hash_file(path: Path) -> str:
        with regular_file(path).open("rb") as file:
            if sync:
                os.fsync(file.fileno())
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        return dict(zip(paths, threads.map(hash_file, paths.values()), strict=True))
