"""Applies a function to ranges of samples, here or in worker processes, and keeps the values in files."""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.files import load_array, read_object, write_atomically
from jvarlen.planning.lengths import DataSource

__all__ = ["Check", "MeasuredRange", "Ranges", "ShardFiles", "Values", "Work", "measure_ranges"]

Values = Int64[np.ndarray, " n *sides"]
Check = Callable[[Values], Values]

_SECONDS_PER_RANGE = 0.25  # long against handing a range over, short to wait for
_FIRST_RANGE = 4  # samples, which may take long
_LARGEST_RANGE = 32_768
_FIRST_INSPECTED = 4_096  # samples
_INSPECTED_EVERY = 1_024  # of those after them
_SHARDS_VERSION = 2


class Work(NamedTuple):
    """What measures ranges of samples; a worker process gets it once, pickled."""

    dataset: DataSource
    function: Callable[[Any], Any]
    to_array: Callable[[list[Any], range], Values]  # raises ValueError that lists rejected values
    inspect: Callable[[Any], None] | None = None  # raises ValueError for a wrong sample; sees a few: all take too long
    read_values: Callable[[range], list[int] | None] | None = None  # of consecutive samples; None where it cannot
    value_of_bad: Any = None  # of samples that cannot be measured; None: they are an error


class MeasuredRange(NamedTuple):
    """The values of a range of samples, and the seconds that measuring them took."""

    samples: range
    values: Values
    seconds: float


class Ranges(Iterator[range]):
    """Cuts ranges of samples into smaller ones that take about equally long, whatever one sample takes."""

    def __init__(self, missing: Sequence[range]):
        self._missing = iter(missing)
        self._rest = range(0)
        self._size = _FIRST_RANGE

    def __next__(self) -> range:
        while not self._rest:
            self._rest = next(self._missing)
        cut, self._rest = self._rest[: self._size], self._rest[self._size :]
        return cut

    def adapt(self, part: MeasuredRange) -> None:
        """Sizes the next ranges by what one took."""
        fitting = int(len(part.samples) * _SECONDS_PER_RANGE / max(part.seconds, 1e-9))
        self._size = max(1, min(fitting, 2 * self._size, _LARGEST_RANGE))


def measure_ranges(work: Work, missing: Sequence[range], num_workers: int) -> Generator[MeasuredRange, None, None]:
    """Measures the missing samples in ranges of about a quarter of a second."""
    ranges = Ranges(missing)
    num_workers = min(num_workers, sum(map(len, missing)))
    if num_workers:
        yield from _measure_elsewhere(work, ranges, num_workers)
        return
    for samples in ranges:
        part = _measure_range(work, samples)
        ranges.adapt(part)
        yield part


def _measure_elsewhere(work: Work, ranges: Ranges, num_workers: int) -> Generator[MeasuredRange, None, None]:
    from jvarlen._common.workers import WorkerPool

    pending: dict[Future[MeasuredRange], range] = {}
    with WorkerPool(work, num_workers) as pool:
        try:
            while True:
                for samples in itertools.islice(ranges, num_workers - len(pending)):
                    pending[pool.apply(_measure_range, samples)] = samples
                if not pending:
                    return
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    part = future.result()
                    del pending[future]
                    ranges.adapt(part)
                    yield part
        except BrokenExecutor as error:
            had = list_first((f"{samples.start} to {samples.stop - 1}" for samples in pending.values()), " or ")
            raise RuntimeError(
                f"a worker process {pool.kill()}; it had samples {had}. Where memory ran out, take fewer workers; "
                "otherwise see what it printed. Shards that were finished are kept"
            ) from error


def _measure_range(work: Work, samples: range) -> MeasuredRange:
    start = time.perf_counter()
    dataset, function, inspect = work.dataset, work.function, work.inspect
    values = None if work.read_values is None else work.read_values(samples)
    if values is None:
        values = []
        for sample_id in samples:
            try:
                sample = dataset[sample_id]
                value = function(sample)
            except Exception as error:
                if work.value_of_bad is None or isinstance(error, MemoryError):
                    raise _error_of(sample_id, error) from error
                value = work.value_of_bad
            else:
                if inspect is not None and (sample_id < _FIRST_INSPECTED or not sample_id % _INSPECTED_EVERY):
                    try:
                        inspect(sample)
                    except UserError as error:
                        raise _error_of(sample_id, error) from None
            values.append(value)
    return MeasuredRange(samples, work.to_array(values, samples), time.perf_counter() - start)


def _error_of(sample_id: int, error: Exception) -> Exception:
    """A ValueError for bad input, else a RuntimeError, that tells the sample."""
    if isinstance(error, UserError):
        return UserError(f"sample {sample_id} cannot be measured: {error}")
    return RuntimeError(f"sample {sample_id} could not be measured: {error!r}")


class ShardFiles:
    """The files of a measurement: a manifest, and a `.npy` for every complete shard, int64[n]."""

    def __init__(
        self,
        directory: Path,
        num_samples: int,
        shard_size: int,
        quantity: str,
        function: Callable[..., Any],
        check: Check,
    ):
        while isinstance(function, functools.partial):
            function = function.func
        named = function if hasattr(function, "__qualname__") else type(function)
        self._directory, self._shard_size, self._check = directory, shard_size, check
        self._shards = [range(num_samples)[start : start + shard_size] for start in range(0, num_samples, shard_size)]
        self._num_missing = list(map(len, self._shards))
        self._manifest = {
            "format_version": _SHARDS_VERSION,
            "quantity": quantity,
            "function": f"{getattr(named, '__module__', None) or 'builtins'}.{named.__qualname__}",
            "num_samples": num_samples,
            "shard_size": shard_size,
        }

    def read(self, store: Callable[[range, Values], object]) -> list[range]:
        """Hands existing shards to `store`, or begins a directory; returns the samples of each missing shard."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / "manifest.json"
        if path.exists():
            found = read_object(path)
            differing = [name for name, wanted in self._manifest.items() if found.get(name) != wanted]
            if differing:
                listed = "; ".join(f"{name} is {found.get(name)!r}, not {self._manifest[name]!r}" for name in differing)
                raise UserError(f"{self._directory} is of another measuring: {listed}. Delete it or take another one")
        else:
            with write_atomically(path) as file:
                file.write(json.dumps(self._manifest, indent=2).encode() + b"\n")
        for index, shard in enumerate(self._shards):
            if (path := self._path(index)).exists():
                values = load_array(path, str(self._manifest["quantity"]))
                if len(values) != len(shard):
                    raise UserError(f"{path} holds {len(values)} values, not {len(shard)}: delete it")
                store(shard, values)
                self._num_missing[index] = 0
        return [shard for shard, num_missing in zip(self._shards, self._num_missing, strict=True) if num_missing]

    def add(self, samples: range, values: Values) -> None:
        """Notes that all values hold these samples of a shard; writes it once it is whole and passes the check."""
        index = samples.start // self._shard_size
        self._num_missing[index] -= len(samples)
        if self._num_missing[index]:
            return
        shard = self._shards[index]
        try:
            values = self._check(values[shard.start : shard.stop])
        except ValueError:  # the check of all values lists the offenders of all shards
            return
        with write_atomically(self._path(index)) as file:
            np.save(file, values, allow_pickle=False)

    def _path(self, index: int) -> Path:
        return self._directory / f"{index:0{len(str(len(self._shards) - 1))}}.npy"  # names sort as the shards do
