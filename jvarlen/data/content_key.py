"""Keys of file contents, whatever the files are called.

Files are hashed in parts by several threads; hashing releases the GIL.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jvarlen._common.checks import UserError
from jvarlen._common.interrupts import raise_if_interrupted

__all__ = ["combine_keys", "content_key"]

_FORMAT = b"jvarlen-content-1\0"
_PART_BYTES = 1 << 26  # part of the key: another size gives other keys
_READ_BYTES = 1 << 20  # fits a cache, and gives an interrupt its turn
_MOST_THREADS = 16  # more wait for the disk


def content_key(*paths: Path) -> str:
    """The key of the content of files, one after the other; their names do not matter.

    Args:
      *paths: the files. They are read, not memory-mapped: a file that is truncated meanwhile is an error.

    Returns:
      SHA-256 in hex, of the hashes of parts of 64 MiB.

    Raises:
      OSError: a file cannot be read.
      ValueError: a file became shorter while it was read.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     one, other = Path(folder, "one"), Path(folder, "other")
      ...     _ = one.write_bytes(b"same"), other.write_bytes(b"same")
      ...     content_key(one) == content_key(other) != content_key(one, other)
      True

    References:
      Merkle (1988), "A digital signature based on a conventional encryption function": a hash of hashes.
    """
    sizes = [path.stat().st_size for path in paths]
    parts = [
        (path, start, min(start + _PART_BYTES, size))
        for path, size in zip(paths, sizes, strict=True)
        for start in range(0, size, _PART_BYTES)
    ]
    whole = hashlib.sha256(_FORMAT)
    whole.update(json.dumps(sizes).encode())  # where one file ends and the next begins
    threads = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="content-key")
    try:
        for digest in threads.map(_hash_part, *zip(*parts, strict=True)) if parts else ():
            whole.update(digest)
    finally:
        threads.shutdown(cancel_futures=True)
    return whole.hexdigest()


def combine_keys(*parts: str | None) -> str:
    """The key of several keys or names together, in their order.

    Example:
      >>> combine_keys("a", "b") == combine_keys("ab", None)
      False
    """
    return hashlib.sha256(_FORMAT + json.dumps(parts).encode()).hexdigest()


def _hash_part(path: Path, start: int, end: int) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while start < end:
            raise_if_interrupted()
            content = file.read(min(_READ_BYTES, end - start))
            if not content:
                raise UserError(f"{path} became shorter while it was read")
            digest.update(content)
            start += len(content)
    return digest.digest()
