"""Measured samples: in goes a dataset and a function of a sample, out comes a number a sample, int64[N] or float64[N].

NumPy only. Long measurings leave shard files behind, and go on from there when they are called again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import multiprocessing
import os
import pickle
import reprlib
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64
from tqdm import tqdm

from jvarlen.files import write_atomically
from jvarlen.interrupts import raise_if_interrupted, without_interrupts
from jvarlen.lengths import DataSource, check_at_least_one, check_lengths, is_integer, is_number, list_offenders

__all__ = ["measure_difficulty", "measure_lengths"]

Words = Int64[np.ndarray, " n"]  # ints as they are, floats as their bits
Values = Int64[np.ndarray, " n"] | Float64[np.ndarray, " n"]

_FORMAT_VERSION = 1
_MANIFEST = "manifest.json"
_SEAL_BYTES = hashlib.sha256().digest_size
_MAX_LISTED_FILES = 5
_MAX_EXACT_INT = 2**53  # up to here every integer is a float64

_SECONDS_PER_RANGE = 0.25  # long against handing a range over, short to wait for
_FIRST_RANGE = 16  # samples
_LARGEST_RANGE = 32_768


def measure_lengths(
    dataset: DataSource,
    length_fn: Callable[[Any], int] = len,
    *,
    num_workers: int = 0,
    progress: bool = True,
    shards: str | os.PathLike[str] | None = None,
    shard_size: int = 65_536,
) -> Int64[np.ndarray, " N"]:
    """Measures the length of every sample of a random-access dataset.

    Args:
      dataset: has `len()` and integer indexing.
      length_fn: gives the tokens of a sample: an int, a NumPy integer, or a 0-d array of one.
      num_workers: processes that measure; 0 measures in this one. Workers are spawned, so that `dataset` and
        `length_fn` must pickle, and each takes some seconds and a copy of `dataset`.
      progress: whether to show a progress bar, in samples.
      shards: a directory that keeps what is measured, and is made where there is none. A call that was interrupted is
        simply made again: whole shards are read, and their samples not touched. None keeps nothing.
      shard_size: samples in a shard file. At most the shards under way are lost, about one a worker.

    Returns:
      int64[N], checked by `check_lengths`. The same comes from the files of a finished directory:
      `np.concatenate([np.load(path) for path in sorted(Path(shards).glob("*.npy"))])`.

    Raises:
      ValueError: an empty dataset; what is no integer, which ends the measuring; lengths below 1, listed at the end,
        when all samples are measured (their shards are not kept); `shards` of another measuring, or damaged; arguments
        out of range; a dataset or function that does not pickle, with workers.
      RuntimeError: `dataset` or `length_fn` failed on a sample, whose id is told; the cause is its error. Or a worker
        process died.

    The directory knows a measuring by its number of samples, `shard_size` and the name of `length_fn`. Where the
    samples change, or the body of the function does, take a new directory.

    Example:
      >>> measure_lengths(["a", "bcd"], progress=False)
      array([1, 3])
    """
    work = _Work(dataset, length_fn, _LENGTHS)
    return _measure(work, num_workers=num_workers, progress=progress, shards=shards, shard_size=shard_size)


def measure_difficulty(
    dataset: DataSource,
    difficulty_fn: Callable[[Any], float],
    *,
    num_workers: int = 0,
    progress: bool = True,
    shards: str | os.PathLike[str] | None = None,
    shard_size: int = 65_536,
) -> Int64[np.ndarray, " N"] | Float64[np.ndarray, " N"]:
    """Measures the difficulty of every sample of a random-access dataset, for `sample_order` and the pacing functions.

    Args:
      dataset: has `len()` and integer indexing.
      difficulty_fn: gives the difficulty of a sample: an int or a float, of Python or NumPy, or a 0-d array of one.
        Truth values are refused.
      num_workers: as in `measure_lengths`.
      progress: whether to show a progress bar, in samples.
      shards: as in `measure_lengths`; each quantity needs a directory of its own.
      shard_size: samples in a shard file.

    Returns:
      int64[N] where every difficulty is an int; they never pass through floats. float64[N] where any is a float.

    Raises:
      ValueError: as in `measure_lengths`. What is no number, or an int that does not fit int64, ends the measuring. NaN
        is listed at the end, and so are ints beyond ±2**53 among floats, which would not stay what they are.
      RuntimeError: as in `measure_lengths`.

    Example:
      >>> measure_difficulty(["abc", "aaaa"], lambda sample: len(set(sample)) / len(sample), progress=False)
      array([1.  , 0.25])
    """
    work = _Work(dataset, difficulty_fn, _DIFFICULTIES)
    return _measure(work, num_workers=num_workers, progress=progress, shards=shards, shard_size=shard_size)


class _Quantity(NamedTuple):
    """What is measured: its name, what one value may be, and the check of all values, which makes the result."""

    name: str
    wanted: str
    is_allowed: Callable[[Any], bool]
    check: Callable[[Words, Bool[np.ndarray, " n"]], Any]


def _check_lengths(words: Words, is_float: Bool[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
    return check_lengths(words)


def _check_difficulties(words: Words, is_float: Bool[np.ndarray, " n"]) -> Values:
    if not is_float.any():
        return words
    values = words.view(np.float64)
    if not is_float.all():
        is_inexact = ~is_float & ((words > _MAX_EXACT_INT) | (words < -_MAX_EXACT_INT))
        if is_inexact.any():
            offenders = list_offenders(np.flatnonzero(is_inexact), words[is_inexact], "±2**53")
            raise ValueError(f"among floats, ints must be exact as floats: {offenders}")
        values = np.where(is_float, values, words)
    is_nan = np.isnan(values)
    if is_nan.any():
        raise ValueError(f"difficulty must not be NaN: {list_offenders(np.flatnonzero(is_nan), values[is_nan])}")
    return values


_LENGTHS = _Quantity("lengths", "integers that fit int64", is_integer, _check_lengths)
_DIFFICULTIES = _Quantity("difficulty", "floats, or integers that fit int64", is_number, _check_difficulties)


class _Work(NamedTuple):
    """All that measuring a range of samples needs; a worker gets it once."""

    dataset: DataSource
    function: Callable[[Any], Any]
    quantity: _Quantity


class _Part(NamedTuple):
    """The values of a range of samples, n of them."""

    samples: range
    words: Words
    is_float: bool | Bool[np.ndarray, " n"]
    seconds: float


def _measure(
    work: _Work, *, num_workers: int, progress: bool, shards: str | os.PathLike[str] | None, shard_size: int
) -> Any:
    if not is_integer(num_workers) or num_workers < 0:
        raise ValueError(f"num_workers must be an integer of at least 0, not {num_workers!r}")
    check_at_least_one(shard_size=shard_size)
    num_samples = len(work.dataset)
    if not num_samples:
        raise ValueError("the dataset is empty: at least one sample is needed")
    words, is_float = np.empty(num_samples, np.int64), np.zeros(num_samples, bool)
    files = None if shards is None else _ShardFiles(Path(shards), work, int(shard_size), words, is_float)
    missing = [range(num_samples)] if files is None else files.read()
    num_missing = sum(map(len, missing))
    bar = functools.partial(tqdm, desc=work.quantity.name, unit="sample", disable=not progress)
    with (
        contextlib.closing(_measure_ranges(work, _Ranges(missing), min(num_workers, num_missing))) as parts,
        bar(total=num_samples, initial=num_samples - num_missing) as shown,
    ):
        for part in parts:
            there = slice(part.samples.start, part.samples.stop)
            words[there], is_float[there] = part.words, part.is_float
            if files is not None:
                files.count(part.samples)
            shown.update(len(part.samples))
            raise_if_interrupted()
    return work.quantity.check(words, is_float)


class _Ranges:
    """Cuts missing shards into ranges of samples that take about equally long, whatever one sample takes."""

    def __init__(self, missing: Iterable[range]):
        self._missing = iter(missing)
        self._rest = range(0)
        self._size = _FIRST_RANGE

    def __iter__(self) -> Iterator[range]:
        return self

    def __next__(self) -> range:
        while not self._rest:
            self._rest = next(self._missing)
        cut, self._rest = self._rest[: self._size], self._rest[self._size :]
        return cut

    def adapt(self, part: _Part) -> None:
        """Sizes the next ranges by what the samples of this one took."""
        fitting = int(len(part.samples) * _SECONDS_PER_RANGE / max(part.seconds, 1e-9))
        self._size = max(1, min(fitting, 2 * self._size, _LARGEST_RANGE))


def _measure_range(work: _Work, samples: range) -> _Part:
    start = time.perf_counter()
    dataset, function, quantity = work
    values = []
    try:
        for sample_id in samples:
            values.append(function(dataset[sample_id]))
    except Exception as error:
        raise RuntimeError(f"sample {sample_id} could not be measured: {error!r}") from error
    return _Part(samples, *_to_words(values, samples, quantity), time.perf_counter() - start)


def _to_words(values: list[Any], samples: range, quantity: _Quantity) -> tuple[Words, bool | Bool[np.ndarray, " n"]]:
    """Values as words, and which are floats; raises ValueError that lists those that are no such numbers."""
    types = set(map(type, values))
    if types == {int}:
        with contextlib.suppress(OverflowError):  # listed below
            return np.fromiter(values, np.int64, len(values)), False
    if types == {float} and quantity.is_allowed(0.0):
        return np.fromiter(values, np.float64, len(values)).view(np.int64), True
    numbers = list(map(_unwrap, values))
    refused = [
        place
        for place, number in enumerate(numbers)
        if not quantity.is_allowed(number) or (is_integer(number) and not -(2**63) <= number < 2**63)
    ]
    if refused:
        shown = np.array([reprlib.repr(numbers[place]) for place in refused])
        offenders = list_offenders(np.array(refused) + samples.start, shown)
        raise ValueError(f"{quantity.name} must be {quantity.wanted}: {offenders}")
    is_float = np.array([not is_integer(number) for number in numbers])
    words = np.empty(len(numbers), np.int64)
    words[~is_float] = [int(number) for number in numbers if is_integer(number)]
    words.view(np.float64)[is_float] = [float(number) for number in numbers if not is_integer(number)]
    return words, is_float


def _unwrap(value: Any) -> Any:
    """The Python number in a NumPy scalar or a 0-d array, of whatever library; anything else as it is."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _measure_ranges(work: _Work, ranges: _Ranges, num_workers: int) -> Generator[_Part, None, None]:
    """The parts of all ranges, in the order in which they are done."""
    if num_workers:
        yield from _measure_in_workers(work, ranges, num_workers)
        return
    for samples in ranges:
        part = _measure_range(work, samples)
        ranges.adapt(part)
        yield part


class _Worker:
    """A process that measures ranges of samples, one at a time.

    An executor would neither tell which samples its dead process had, nor, before Python 3.14, end its processes in the
    middle of a task.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._samples = range(0)
        with theirs:
            self._process.start()

    def prepare(self, pickled: bytes) -> None:
        """Hands over what all ranges need."""
        with self._alive():
            self.connection.send_bytes(pickled)

    def begin(self, samples: range) -> None:
        """Hands over a range."""
        self._samples = samples
        with self._alive():
            self.connection.send(samples)

    def end(self) -> _Part:
        """The range it measured; raises what it failed with."""
        with self._alive():
            answer = self.connection.recv()
        if isinstance(answer, _Part):
            return answer
        error, cause = answer
        raise error from cause

    def close(self, *, kill: bool) -> None:
        """Ends the process: at once, or after what it does at its exit."""
        self.connection.close()
        if kill:
            self._process.kill()
        self._process.join()
        self._process.close()

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            self._process.join()
            code = self._process.exitcode or 0
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            had = f"samples {self._samples.start} to {self._samples.stop - 1}" if self._samples else "no samples yet"
            raise RuntimeError(
                f"a worker process {how}; it had {had}. Where memory ran out, take fewer workers; otherwise see what "
                "it printed. Shards that were finished are kept"
            ) from error


def _measure_in_workers(work: _Work, ranges: _Ranges, num_workers: int) -> Generator[_Part, None, None]:
    try:
        pickled = pickle.dumps(work, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise ValueError(f"workers need a dataset and a function that pickle: {error!r}") from error
    workers: list[_Worker] = []
    is_done = False
    resource_tracker.ensure_running()  # started within the block of Ctrl-C, it would end it
    try:
        with without_interrupts():  # Ctrl-C is for this process to handle, which then ends the others
            for _ in range(num_workers):
                workers.append(_Worker())
        for worker in workers:
            worker.prepare(pickled)
        del pickled
        busy: dict[Any, _Worker] = {}  # by connection
        idle = workers[::-1]
        while True:
            while idle and (samples := next(ranges, None)) is not None:
                worker = idle.pop()
                worker.begin(samples)
                busy[worker.connection] = worker
            if not busy:
                break
            for ready in wait(list(busy)):
                worker = busy.pop(ready)
                part = worker.end()
                idle.append(worker)
                ranges.adapt(part)
                yield part
        is_done = True
    finally:
        for worker in workers:
            worker.close(kill=not is_done)


def _serve(connection: Connection) -> None:
    """Measures ranges in a worker process until the other side closes or dies."""
    with contextlib.suppress(EOFError, ConnectionError):
        pickled = connection.recv_bytes()
        try:
            work = pickle.loads(pickled)
        except Exception as error:
            refused = ValueError(f"the dataset or the function does not unpickle in a worker process: {error!r}")
            connection.send((refused, _portable(error)))
            return
        del pickled
        while True:
            samples = connection.recv()
            try:
                answer: Any = _measure_range(work, samples)
            except Exception as error:
                answer = error, _portable(error.__cause__)
            connection.send(answer)


def _portable(error: BaseException | None) -> BaseException | None:
    """An error that survives pickling, with its traceback, which does not, as a note."""
    if error is None:
        return None
    told = "".join(traceback.format_exception(error))
    try:
        portable = pickle.loads(pickle.dumps(error))
    except Exception:
        portable = RuntimeError(repr(error))
    portable.add_note(f"In a worker process:\n{told}")
    return portable


class _ShardFiles:
    """The files of a measuring: a manifest, and a sealed `.npy` for every whole shard.

    A seal is the SHA-256 of the manifest, the file's name and its array. It follows the array, where NumPy does not
    look, so that no file is taken for another, or for whole when it is not.
    """

    def __init__(self, directory: Path, work: _Work, shard_size: int, words: Words, is_float: Bool[np.ndarray, " n"]):
        self._directory = directory
        self._check = work.quantity.check
        self._words, self._is_float = words, is_float
        self._shards = [range(start, min(start + shard_size, len(words))) for start in range(0, len(words), shard_size)]
        self._shard_size = shard_size
        self._num_missing = np.array(list(map(len, self._shards)))
        self._manifest = {
            "format_version": _FORMAT_VERSION,
            "quantity": work.quantity.name,
            "function": _qualified_name(work.function),
            "num_samples": len(words),
            "shard_size": shard_size,
        }
        self._written_manifest = (json.dumps(self._manifest, indent=2) + "\n").encode()

    def read(self) -> list[range]:
        """Reads the shards that are there, or begins a directory; the samples of those that are missing."""
        self._directory.mkdir(parents=True, exist_ok=True)
        present = {path.name for path in self._directory.glob("*.npy")}
        self._check_manifest(present)
        if foreign := present.difference(map(self._name, range(len(self._shards)))):
            raise self._refusal(f"holds files that are no shards of this measuring: {_list_names(foreign)}")
        damaged = {name for name in present if not self._read_shard(name)}
        if damaged:
            raise self._refusal(
                f"holds shards that are damaged or of another measuring, to be measured again once they are deleted: "
                f"{_list_names(damaged)}"
            )
        return [shard for shard, num_missing in zip(self._shards, self._num_missing, strict=True) if num_missing]

    def count(self, samples: range) -> None:
        """Takes note that a range is measured, and writes its shard where that makes it whole."""
        index = samples.start // self._shard_size
        self._num_missing[index] -= len(samples)
        if self._num_missing[index]:
            return
        shard = slice(self._shards[index].start, self._shards[index].stop)
        try:
            values = self._check(self._words[shard], self._is_float[shard])
        except ValueError:
            return  # listed at the end with the offenders of all shards, and measured again by the next call
        body = io.BytesIO()
        np.save(body, values, allow_pickle=False)
        name = self._name(index)
        with write_atomically(self._directory / name) as file:
            file.write(body.getvalue() + self._seal(name, body.getvalue()))

    def _read_shard(self, name: str) -> bool:
        content = (self._directory / name).read_bytes()
        body, seal = content[:-_SEAL_BYTES], content[-_SEAL_BYTES:]
        if seal != self._seal(name, body):
            return False
        values = np.load(io.BytesIO(body), allow_pickle=False)
        index = int(Path(name).stem)
        shard = slice(self._shards[index].start, self._shards[index].stop)
        self._words[shard], self._is_float[shard] = values.view(np.int64), values.dtype == np.float64
        self._num_missing[index] = 0
        return True

    def _check_manifest(self, present: set[str]) -> None:
        path = self._directory / _MANIFEST
        if not path.exists():
            if present:
                raise self._refusal(f"holds {_list_names(present)}, but no {_MANIFEST}")
            with write_atomically(path) as file:
                file.write(self._written_manifest)
            return
        try:
            found = json.loads(path.read_bytes())
            differences = [
                f"{name} is {found.get(name)!r}, not {wanted!r}"
                for name, wanted in self._manifest.items()
                if found.get(name) != wanted
            ]
        except (ValueError, AttributeError) as error:
            raise self._refusal(f"has a damaged {_MANIFEST} ({error})") from error
        if differences:
            raise self._refusal(f"is of another measuring: {'; '.join(differences)}")

    def _name(self, index: int) -> str:
        return f"{index:0{len(str(len(self._shards) - 1))}}.npy"  # so that names sort as the shards do

    def _seal(self, name: str, body: bytes) -> bytes:
        return hashlib.sha256(self._written_manifest + name.encode() + body).digest()

    def _refusal(self, reason: str) -> ValueError:
        return ValueError(f"{self._directory} {reason}. To start anew, delete it or take another directory")


def _list_names(names: set[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED_FILES:,} more" if len(names) > _MAX_LISTED_FILES else ""
    return ", ".join(sorted(names)[:_MAX_LISTED_FILES]) + more


def _qualified_name(function: Callable[..., Any]) -> str:
    """A function's module and name, the same for every user; of a partial that of its function."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(named, '__module__', None) or 'builtins'}.{named.__qualname__}"
