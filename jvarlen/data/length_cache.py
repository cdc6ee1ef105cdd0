"""Keys of file contents, and sample lengths and hashes that are cached under such keys."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from jaxtyping import Int64

from jvarlen._common.checks import UserError
from jvarlen._common.files import FULL_DISK, private_cache, regular_file, write_atomically
from jvarlen._common.interrupts import is_interrupted, raise_if_interrupted
from jvarlen.data.measure import measure_integers
from jvarlen.data.split import sample_hash
from jvarlen.planning.lengths import DataSource

__all__ = ["cached_hashes", "cached_lengths", "combine_keys", "content_key", "hold_lock"]

_FORMAT = b"jvarlen-content-1\0"
_PART_BYTES = 1 << 26  # part of the key: another size gives other keys
_READ_BYTES = 1 << 20  # fits a cache, and gives an interrupt its turn
_MOST_THREADS = 16  # more wait for the disk

_SHARD_SIZE = 65_536  # samples
_LEAST_FOR_WORKERS = 4_096  # samples; processes take seconds to start
_SECONDS_BETWEEN_TRIES = 0.1


def content_key(*paths: Path) -> str:
    """SHA-256 in hex of the hashes of 64-MiB parts of files, one after the other; their names do not matter."""
    sizes = [path.stat().st_size for path in paths]
    parts = [
        (path, start, min(start + _PART_BYTES, size))
        for path, size in zip(paths, sizes, strict=True)
        for start in range(0, size, _PART_BYTES)
    ]
    whole = hashlib.sha256(_FORMAT)
    whole.update(json.dumps(sizes).encode())  # where one file ends and the next begins
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="content-key") as threads:
        for digest in threads.map(_hash_part, *zip(*parts, strict=True)) if parts else ():
            whole.update(digest)
    return whole.hexdigest()


def combine_keys(*parts: str | None) -> str:
    """The key of several keys or names together, in their order."""
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


def cached_lengths(
    dataset: DataSource, path: Path, key: str, *, num_workers: int = 0, progress: bool = True
) -> Int64[np.ndarray, " N"]:
    """The lengths of all samples, from `PATH.lengths-KEY.npz` or the user's caches, or measured; 0 where none is."""
    measure = functools.partial(
        measure_integers, dataset, len, "lengths", read_values=getattr(dataset, "lengths_of", None), value_of_bad=0,
        num_workers=num_workers if len(dataset) >= _LEAST_FOR_WORKERS else 0, progress=progress, shard_size=_SHARD_SIZE,
    )  # fmt: skip
    return _cache("lengths", path, key, len(dataset), measure)


def cached_hashes(dataset: DataSource, path: Path, key: str, *, progress: bool = True) -> Int64[np.ndarray, " N"]:
    """The `sample_hash` of every sample, cached like the lengths of `cached_lengths`, in `PATH.hashes-KEY.npz`."""
    measure = functools.partial(
        measure_integers, dataset, sample_hash, "hashes", progress=progress, shard_size=_SHARD_SIZE
    )
    return _cache("hashes", path, key, len(dataset), measure)


def _cache(
    kind: str, path: Path, key: str, num_samples: int, measure: Callable[..., Int64[np.ndarray, " N"]]
) -> Int64[np.ndarray, " N"]:
    """An integer of every sample, from the cache or else measured; without a cache where none can be written."""
    stem = _stem(kind, Path(os.path.abspath(path)), key)  # also `.` has a name then
    if stem is None:
        return measure()
    cache, parts = Path(f"{stem}.npz"), Path(f"{stem}.parts")
    values = None
    try:
        if not cache.exists():
            with hold_lock(Path(f"{stem}.lock")):
                if not cache.exists():  # another process may have measured meanwhile
                    values = measure(shards=parts)
                    with write_atomically(cache) as file:
                        np.savez(file, **{kind: values, "key": np.array(key)})  # type: ignore[arg-type]
                    if path.exists():  # who cannot read the data cannot read the cache
                        cache.chmod(cache.stat().st_mode & path.stat().st_mode & 0o666)
                    shutil.rmtree(parts, ignore_errors=True)
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        warnings.warn(f"{kind} are not cached: {error}", stacklevel=3)
        return measure() if values is None else values
    try:
        with io.BytesIO(regular_file(cache).read_bytes()) as file, np.load(file, allow_pickle=False) as stored:
            if str(stored["key"]) == key and len(stored[kind]) == num_samples:
                return stored[kind]
            raise UserError("it is of other data")
    except Exception as error:  # damage shows in many ways: as zip, as array
        raise UserError(f"{cache} holds no {kind} to use, and should be deleted: {error}") from error


def _stem(kind: str, path: Path, key: str) -> Path | None:
    """The path of a cache without its ending, beside the data or in the user's caches; None: neither can be written."""
    name = f"{kind}-{key[:16]}"
    beside = path.parent / f"{path.name}.{name}"
    if Path(f"{beside}.npz").exists() or os.access(path.parent, os.W_OK):
        return beside
    try:
        stem = private_cache() / name
        if not Path(f"{stem}.npz").exists() and not os.access(stem.parent, os.W_OK):
            raise PermissionError(f"{path.parent} and {stem.parent} cannot be written")
    except OSError as error:
        warnings.warn(f"{kind} are not cached: {error}", stacklevel=4)
        return None
    return stem


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """A block that one process at a time runs; the others wait until they are interrupted."""
    lock = FileLock(path, poll_interval=_SECONDS_BETWEEN_TRIES)
    try:
        held = lock.acquire(cancel_check=is_interrupted)
    except Timeout:
        raise KeyboardInterrupt from None
    with held:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # a waiting process creates it again
