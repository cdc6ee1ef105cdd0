"""Atomic writes: a file appears under its name when it is complete, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import platformdirs

__all__ = ["check_place", "default_cache_dir", "load_array", "move_into_place", "write_atomically"]


def default_cache_dir() -> Path:
    """The directory of this user's caches, as the platform has it (`XDG_CACHE_HOME` is honoured on Linux)."""
    return platformdirs.user_cache_path("jvarlen")


@contextlib.contextmanager
def write_atomically(path: Path, mode: int = 0o666) -> Iterator[IO[Any]]:
    """A binary file that takes the name `path` when the block ends without an error.

    Args:
      path: its directory exists.
      mode: permissions of the file from its first moment on, less what the process masks.

    Raises:
      FileNotFoundError: there is no such directory.
      OSError: the file cannot be written; what was there under the name stays.
    """
    check_place(path)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        descriptor = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)  # nobody else has it open, or will
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        move_into_place(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def check_place(path: Path) -> None:
    """Raises OSError where no file can take the name `path`."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {path.parent} to write {path.name} to")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; a file of that name cannot be written")


def move_into_place(part: Path, path: Path) -> None:
    """Gives a file that is whole and on disk its name, in place of what had it, so that it outlives a power cut."""
    os.replace(part, path)
    # Some file systems cannot do this for a directory; the file has its name, and is whole, all the same.
    with contextlib.suppress(OSError):
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def load_array(path: Path, what: str) -> np.ndarray:
    """The array of a `.npy` file, which stays on disk until it is looked at.

    Args:
      path: the file.
      what: of what it should be, for errors.

    Returns:
      The array, mapped from the file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is no `.npy` file of one array.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {what} file {path}") from None
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path} is not a readable .npy file of {what}: {error}") from error
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path} holds several arrays; a .npy file of {what} holds one")
    return array
