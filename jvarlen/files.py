"""Files: in goes a path, out comes a file that appears under that name whole, or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

__all__ = ["write_atomically"]


@contextlib.contextmanager
def write_atomically(path: Path) -> Iterator[IO[Any]]:
    """A binary file that takes the name `path` when the block ends without an error.

    Args:
      path: its directory exists.

    Raises:
      FileNotFoundError: there is no such directory.
      OSError: the file cannot be written; what was there under the name stays.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {path.parent} to write {path.name} to")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; a file of that name cannot be written")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
