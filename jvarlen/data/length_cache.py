"""Cache of sample lengths and hashes, keyed by the content of the data."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from jaxtyping import Int64

from jvarlen._common.checks import UserError
from jvarlen._common.files import default_cache_dir, write_atomically
from jvarlen._common.interrupts import is_interrupted
from jvarlen.data.measure import measure_integers
from jvarlen.data.shard_files import ShardsError
from jvarlen.data.split import sample_hash
from jvarlen.planning.lengths import DataSource

__all__ = ["cached_hashes", "cached_lengths"]

_SHARD_SIZE = 65_536  # samples; fewer are measured again sooner than looked after
_LEAST_FOR_WORKERS = 4_096  # samples; processes take seconds to start
_SECONDS_BETWEEN_TRIES = 0.1


def cached_lengths(
    dataset: DataSource, path: Path, key: str, *, num_workers: int = 0, progress: bool = True
) -> Int64[np.ndarray, " N"]:
    """The lengths of all samples, from the cache under this key or else measured.

    They are cached in `PATH.lengths-KEY.npz` (the first 16 digits of the key), or in the user's caches if that cannot
    be written. A cache that is damaged or has another key is not used; a warning names it.

    With many samples, the lengths measured so far are kept in `PATH.lengths-KEY.parts/`, so that an interrupted call
    resumes when it is repeated. If several processes need the same lengths, one measures and the others wait for it.

    Args:
      dataset: random access to samples that have a `len()`; a ValueError gives the reason if there is no sample under
        an id.
      path: the file or directory that the samples come from.
      key: the hex key of everything that decides the lengths.
      num_workers: processes that measure, if there are thousands of samples; `dataset` must pickle for them. 0 measures
        in this process.
      progress: whether measuring shows a progress bar.

    Returns:
      int64[N]; 0 for a missing or empty sample. Lengths with zeros are not cached.

    Raises:
      ValueError: an empty dataset; one that does not pickle, with workers.
      RuntimeError: a sample cannot be read; see `measure_lengths`.
    """
    lengths = _Lengths(dataset)
    return _cached(_Measurement("lengths", lengths, int, num_workers, progress, lengths.of_range), path, key)


def cached_hashes(dataset: DataSource, path: Path, key: str, *, progress: bool = True) -> Int64[np.ndarray, " N"]:
    """The `sample_hash` of every sample, cached like the lengths of `cached_lengths`, in `PATH.hashes-KEY.npz`.

    Args:
      dataset: random access to samples, none of them empty.
      path: the file or directory that the samples come from.
      key: the hex key of everything that decides the samples.
      progress: whether hashing shows a progress bar.

    Returns:
      int64[N].

    Raises:
      RuntimeError: a sample cannot be read.
    """
    return _cached(_Measurement("hashes", dataset, sample_hash, 0, progress), path, key)


def _cached(measurement: _Measurement, path: Path, key: str) -> Int64[np.ndarray, " N"]:
    path = Path(os.path.abspath(path))  # also `.` has a name then
    kind, num_samples = measurement.kind, len(measurement.dataset)
    places = [
        _Place(kind, path.parent, f"{path.name}.{kind}-{key[:16]}"),
        _Place(kind, default_cache_dir(), f"{kind}-{key[:16]}"),
    ]
    kept = _read_first(places, key, num_samples)
    if kept is not None:
        return kept
    if num_samples < _SHARD_SIZE:
        measured = measurement.measure(None)
        _keep(places, key, measured)
        return measured
    with _own_parts(places) as parts:
        kept = _read_first(places, key, num_samples, warn=False)  # another process may have measured meanwhile
        measured = measurement.measure(parts) if kept is None else kept
        if kept is None:
            _keep(places, key, measured)
        if parts is not None:
            shutil.rmtree(parts, ignore_errors=True)
    return measured


class _Place(NamedTuple):
    kind: str
    directory: Path
    name: str

    @property
    def cache(self) -> Path:
        return self.directory / f"{self.name}.npz"

    @property
    def parts(self) -> Path:
        return self.directory / f"{self.name}.parts"

    @property
    def lock(self) -> Path:
        return self.directory / f"{self.name}.lock"


class _Lengths:
    """The length of every sample; 0 where there is none."""

    def __init__(self, dataset: DataSource):
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> int:
        try:
            return len(self._dataset[index])
        except ValueError:
            return 0

    def of_range(self, samples: range) -> list[int] | None:
        """The lengths of consecutive samples, where the dataset reads them at once."""
        return self._dataset.lengths_of(samples) if hasattr(self._dataset, "lengths_of") else None


class _Measurement(NamedTuple):
    """An integer of every sample of a dataset, and how it is measured."""

    kind: str
    dataset: DataSource
    function: Callable[[Any], int]
    num_workers: int
    progress: bool
    read_values: Callable[[range], list[int] | None] | None = None

    def measure(self, parts: Path | None) -> Int64[np.ndarray, " N"]:
        """Measures all samples; parts that are damaged are measured again."""
        try:
            return self._measure(parts)
        except ShardsError as error:
            assert parts is not None
            warnings.warn(f"{error}. It is deleted here, and everything is measured again", stacklevel=5)
            shutil.rmtree(parts)
        return self._measure(parts)

    def _measure(self, parts: Path | None) -> Int64[np.ndarray, " N"]:
        return measure_integers(
            self.dataset,
            self.function,
            self.kind,
            num_workers=self.num_workers if len(self.dataset) >= _LEAST_FOR_WORKERS else 0,
            progress=self.progress,
            shards=parts,
            shard_size=_SHARD_SIZE,
            read_values=self.read_values,
        )


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
    places: list[_Place], key: str, num_samples: int, *, warn: bool = True
) -> Int64[np.ndarray, " N"] | None:
    """What is kept at the first place that has it whole."""
    for place in places:
        try:
            content = place.cache.read_bytes()
        except OSError:
            continue
        try:
            return _parse(place.kind, content, key, num_samples)
        except Exception as error:  # damage shows in many ways: as zip, as array
            if warn:
                warnings.warn(
                    f"{place.cache} holds no {place.kind} to use: {error}. All are measured again", stacklevel=4
                )
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


def _keep(places: list[_Place], key: str, values: Int64[np.ndarray, " N"]) -> None:
    """Writes the cache at the first place that can be written, if there is a sample under every id."""
    if not values.all():
        return
    reasons = []
    for place in places:
        try:
            place.directory.mkdir(parents=True, exist_ok=True)
            with write_atomically(place.cache) as file:
                seal = np.frombuffer(_seal(key, values), np.uint8)
                arrays: dict[str, Any] = {"key": np.array(key), "seal": seal, place.kind: values}
                np.savez(file, **arrays)
            return
        except OSError as error:
            reasons.append(str(error))
    warnings.warn(f"the {places[0].kind} are not kept for the next time: {'; '.join(reasons)}", stacklevel=4)


def _seal(key: str, values: Int64[np.ndarray, " N"]) -> bytes:
    return hashlib.sha256(key.encode() + values.astype("<i8").tobytes()).digest()
