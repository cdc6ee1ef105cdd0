"""Keys of file contents, whatever the files are called, and sample lengths and hashes cached under such keys.

Files are hashed in parts by several threads; hashing releases the GIL.
"""

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
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from jaxtyping import Int64

from jvarlen._common.checks import UserError
from jvarlen._common.files import default_cache_dir, write_atomically
from jvarlen._common.interrupts import is_interrupted, raise_if_interrupted
from jvarlen.data.measure import ShardsError, measure_integers
from jvarlen.data.split import sample_hash
from jvarlen.planning.lengths import DataSource
from jvarlen.planning.samples import Dataset

__all__ = ["cached_hashes", "cached_lengths", "combine_keys", "content_key"]

_FORMAT = b"jvarlen-content-1\0"
_PART_BYTES = 1 << 26  # part of the key: another size gives other keys
_READ_BYTES = 1 << 20  # fits a cache, and gives an interrupt its turn
_MOST_THREADS = 16  # more wait for the disk

_SHARD_SIZE = 65_536  # samples; fewer are measured again sooner than looked after
_LEAST_FOR_WORKERS = 4_096  # samples; processes take seconds to start
_SECONDS_BETWEEN_TRIES = 0.1


def content_key(*paths: Path) -> str:
    """The key of the content of files, one after the other; their names do not matter.

    SHA-256 in hex of the hashes of parts of 64 MiB. The files are read, not memory-mapped: one that is truncated
    meanwhile is a ValueError.

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


def cached_lengths(
    dataset: DataSource, path: Path, key: str, *, num_workers: int = 0, progress: bool = True
) -> Int64[np.ndarray, " N"]:
    """The lengths of all samples, from the cache under this key or else measured.

    They are cached in `PATH.lengths-KEY.npz` (the first 16 digits of the key), or in the user's caches if that cannot
    be written. A cache that is damaged or has another key is not used; a warning names it.

    With many samples, the lengths measured so far are kept in `PATH.lengths-KEY.parts/`, so that an interrupted call
    resumes when it is repeated. If several processes need the same lengths, one measures and the others wait for it.

    A sample that raises ValueError has length 0. Lengths with zeros are not cached.
    """
    read_values = getattr(dataset, "lengths_of", None)
    options = {"num_workers": num_workers if len(dataset) >= _LEAST_FOR_WORKERS else 0, "read_values": read_values}
    return _cached("lengths", path, key, _Lengths(dataset), int, progress=progress, **options)


def cached_hashes(dataset: DataSource, path: Path, key: str, *, progress: bool = True) -> Int64[np.ndarray, " N"]:
    """The `sample_hash` of every sample, cached like the lengths of `cached_lengths`, in `PATH.hashes-KEY.npz`."""
    return _cached("hashes", path, key, dataset, sample_hash, progress=progress, num_workers=0)


def _cached(
    kind: str, path: Path, key: str, dataset: DataSource, function: Callable[[Any], int], **options: Any
) -> Int64[np.ndarray, " N"]:
    """An integer of every sample, from the first cache that has it or else measured."""
    path, num_samples = Path(os.path.abspath(path)), len(dataset)  # also `.` has a name then
    measure = functools.partial(measure_integers, dataset, function, kind, shard_size=_SHARD_SIZE, **options)
    stems = path.parent / f"{path.name}.{kind}-{key[:16]}", default_cache_dir() / f"{kind}-{key[:16]}"
    places = [_Place(*(stem.with_name(stem.name + ending) for ending in (".npz", ".parts", ".lock"))) for stem in stems]
    kept = _read_first(places, kind, key, num_samples)
    if kept is not None:
        return kept
    with _own_parts(places) if num_samples >= _SHARD_SIZE else contextlib.nullcontext() as parts:
        if num_samples >= _SHARD_SIZE:  # another process may have measured meanwhile
            kept = _read_first(places, kind, key, num_samples, warn=False)
        if kept is None:
            try:
                kept = measure(shards=parts)
            except ShardsError as error:
                assert parts is not None
                warnings.warn(f"{error}. It is deleted here, and everything is measured again", stacklevel=3)
                shutil.rmtree(parts)
                kept = measure(shards=parts)
            _keep(places, kind, key, kept)
        if parts is not None:
            shutil.rmtree(parts, ignore_errors=True)
    return kept


class _Place(NamedTuple):
    cache: Path
    parts: Path
    lock: Path


class _Lengths(Dataset):
    """The length of every sample; 0 where there is none."""

    def __init__(self, dataset: DataSource):
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def _read(self, index: int) -> int:
        try:
            return len(self._dataset[index])
        except ValueError:
            return 0


@contextlib.contextmanager
def _own_parts(places: list[_Place]) -> Iterator[Path | None]:
    """A directory for parts that no other process uses within the block; None where none can be locked.

    Waits where another process has it.
    """
    for place in places:
        lock = FileLock(place.lock, poll_interval=_SECONDS_BETWEEN_TRIES, fallback_to_soft=False)
        try:
            held = lock.acquire(cancel_check=is_interrupted)
        except Timeout:
            raise KeyboardInterrupt from None
        except OSError:  # also of file systems that have no locks
            continue
        with held:
            try:
                yield place.parts
            finally:
                place.lock.unlink(missing_ok=True)  # a waiting process creates it again
        return
    yield None


def _read_first(
    places: list[_Place], kind: str, key: str, num_samples: int, *, warn: bool = True
) -> Int64[np.ndarray, " N"] | None:
    """What is kept at the first place that has it whole."""
    for place in places:
        try:
            content = place.cache.read_bytes()
        except OSError:
            continue
        try:
            return _parse(kind, content, key, num_samples)
        except Exception as error:  # damage shows in many ways: as zip, as array
            if warn:
                warnings.warn(f"{place.cache} holds no {kind} to use: {error}. All are measured again", stacklevel=4)
    return None


def _parse(kind: str, content: bytes, key: str, num_samples: int) -> Int64[np.ndarray, " N"]:
    with np.load(io.BytesIO(content), allow_pickle=False) as stored:
        stored_key, values, seal = str(stored["key"]), stored[kind], stored["seal"].tobytes()
    if stored_key != key:
        raise UserError(f"they are of other data, {stored_key[:16]}")
    if seal != _seal(key, values) or values.dtype != np.int64:
        raise UserError("the file is damaged")
    if values.shape != (num_samples,) or values.min() < 1:
        raise UserError(f"they are not of {num_samples:,} samples")
    return values


def _keep(places: list[_Place], kind: str, key: str, values: Int64[np.ndarray, " N"]) -> None:
    """Writes the cache at the first place that can be written, if there is a sample under every id."""
    if not values.all():
        return
    reasons = []
    for place in places:
        try:
            place.cache.parent.mkdir(parents=True, exist_ok=True)
            with write_atomically(place.cache) as file:
                seal = np.frombuffer(_seal(key, values), np.uint8)
                arrays: dict[str, Any] = {"key": np.array(key), "seal": seal, kind: values}
                np.savez(file, **arrays)
            return
        except OSError as error:
            reasons.append(str(error))
    warnings.warn(f"the {kind} are not kept for the next time: {'; '.join(reasons)}", stacklevel=4)


def _seal(key: str, values: Int64[np.ndarray, " N"]) -> bytes:
    return hashlib.sha256(key.encode() + values.astype("<i8").tobytes()).digest()
