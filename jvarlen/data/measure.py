"""Measures the length, or any other integer, of every sample of a dataset, here or in worker processes.

Long measurements write shard files and resume from them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
import reprlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Int64

from jvarlen._common.checks import (
    UserError,
    check_at_least_one,
    check_at_least_zero,
    check_choices,
    is_integer,
    list_first,
    list_offenders,
)
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen._common.keywords import check_keywords
from jvarlen._common.terminal import progress_bar
from jvarlen._common.types import Array
from jvarlen.data.samples import AnyDataset, OnBadSample, Sample, describe_fields, num_samples_of
from jvarlen.data.shard_files import Check, ShardFiles, Values
from jvarlen.planning.lengths import COUNTS, DataSource, check_lengths, check_sample_lengths

__all__ = [
    "LengthFn", "MeasuredRange", "Ranges", "Work", "find_lengths", "measure_integers", "measure_lengths",
    "measure_ranges",
]  # fmt: skip

LengthFn = Callable[[Sample], int | Sequence[int]] | str | tuple[str, ...]  # also the names of fields

Value: TypeAlias = Any
"""An integer of any library, or a tuple of several."""

_SECONDS_PER_RANGE = 0.25  # long against handing a range over, short to wait for
_FIRST_RANGE = 4  # samples, which may take long
_LARGEST_RANGE = 32_768
_FIRST_INSPECTED = 4_096  # samples
_INSPECTED_EVERY = 1_024  # of those after them
_FIRST_TRIED = 16  # samples, until one shows how many lengths there are


@check_keywords
def measure_lengths(
    dataset: DataSource,
    length_fn: LengthFn = len,
    *,
    num_workers: int = 0,
    progress: bool = True,
    shards: str | os.PathLike[str] | None = None,
    shard_size: int = 65_536,
    on_bad_sample: OnBadSample = "error",
) -> Int64[np.ndarray, " N *D"]:
    """Measures the length, or several lengths, of every sample of a random-access dataset.

    Args:
      dataset: has `len()` and integer indexing. With `length_fn=len`, lengths come from its method
        `lengths_of(samples: range)` if it has one, such as `LineDataset`.
      length_fn: returns the number of tokens of a sample, an integer of any library, or several lengths, as many for
        each sample as for the first. Or the name of a field of samples that are mappings, dataclasses or named tuples:
        the size of its first axis. Several names, such as `("source", "target")`, give a length each. `len` gives both
        lengths of pairs, plain tuples of two 1-D arrays; it is rejected for samples whose fields it would count, and
        for arrays of shape [1, L]; so is a named field that has such a shape in all samples.
      num_workers: processes that measure; 0 measures in this process. Workers are spawned, so `dataset` and `length_fn`
        must pickle; each takes some seconds to start and a copy of `dataset`.
      progress: whether to show a progress bar, in samples.
      shards: a directory for the measured lengths, created if missing, from which a repeated call resumes. It knows a
        measurement by the number of samples, `shard_size` and the name of `length_fn`: if the samples or the body of
        the function change, use a new directory. None keeps nothing.
      shard_size: samples in a shard file. An interrupt loses at most the shards in progress, about one a worker.
      on_bad_sample: what happens to a sample that cannot be read, lacks a named field, or has no token. `"skip"`: its
        length is 1, for `load` to leave its place empty, with `on_bad_sample="skip"` as well.

    Returns:
      int64[N], or int64[N, D] of D lengths, checked as `make_plan` checks them.

    Raises:
      ValueError: an empty dataset; a length that is not an integer or below 1; samples whose fields or only row `len`
        counts, or without a named field; `shards` of another measurement; arguments out of range; with workers, a
        dataset or function that does not pickle. Offenders are listed.
      RuntimeError: `dataset` or `length_fn` failed on a sample, whose id is given; the original error is the cause. Or
        a worker process failed; the samples that it had are given.

    Example:
      >>> measure_lengths(["a", "bcd"], progress=False)
      array([1, 3])
      >>> samples = [{"tokens": [7, 8, 9], "label": 0}, {"tokens": [7], "label": 1}]
      >>> measure_lengths(samples, "tokens", progress=False)
      array([3, 1])
      >>> videos = [np.zeros((8, 4, 6)), np.zeros((16, 3, 4))]
      >>> measure_lengths(videos, np.shape, progress=False).tolist()
      [[8, 4, 6], [16, 3, 4]]
    """
    check_choices(on_bad_sample=(on_bad_sample, OnBadSample))
    function = _several_lengths(length_fn, dataset) if callable(length_fn) else _FieldLengths(length_fn)
    num_lengths = function.num_lengths if isinstance(function, _FieldLengths | _SeveralLengths) else 1
    name, check = "lengths", functools.partial(check_sample_lengths, num_lengths=num_lengths)
    value_of_bad: Value | None = None
    if on_bad_sample == "skip":  # the name keeps shards of both kinds apart
        name, check = "lengths of good samples", functools.partial(_check_but_empty, check)
        value_of_bad = 1 if num_lengths == 1 else (1,) * num_lengths
    is_read_at_once = function is len and hasattr(dataset, "lengths_of")
    read_values = functools.partial(_read_lengths, dataset) if is_read_at_once else None
    work = Work(dataset, function, name, read_values, value_of_bad)
    lengths = _measure(
        work, check, num_workers, progress, shards, shard_size, (num_lengths,) if num_lengths > 1 else ()
    )
    if isinstance(function, _FieldLengths):
        for field, of_field in zip(function.names, lengths.reshape(len(lengths), -1).T, strict=True):
            if (of_field == 1).all():  # a single [1, F] among [n, F] is a length
                _check_rows(dataset, field)
    return lengths


def find_lengths(dataset: DataSource, *, progress: bool = True) -> Int64[np.ndarray, " N"]:
    """The attribute `lengths` of a dataset, or its lengths, measured sample by sample.

    Args:
      dataset: random access to samples that have a `len()`.
      progress: whether measuring shows a progress bar.

    Returns:
      int64[N], checked by `check_lengths`.

    Example:
      >>> from jvarlen.data.tokens import TokenDataset
      >>> find_lengths(TokenDataset.from_bytes([b"ab", b"c"]))
      array([2, 1])
    """
    if hasattr(dataset, "lengths"):
        return check_lengths(dataset.lengths)
    return measure_lengths(dataset, progress=progress)


def measure_integers(
    dataset: DataSource,
    function: Callable[[Sample], int],
    name: str,
    *,
    read_values: Callable[[range], list[int] | None] | None = None,
    value_of_bad: int | None = None,
    num_workers: int = 0,
    progress: bool = True,
    shards: str | os.PathLike[str] | None = None,
    shard_size: int = 65_536,
) -> Int64[np.ndarray, " N"]:
    """Measures any integer of every sample, zero and negative ones too."""
    work = Work(dataset, function, name, read_values, value_of_bad, ValueError)  # a failing disk makes no bad sample
    return _measure(work, np.asarray, num_workers, progress, shards, shard_size)


def _read_lengths(dataset: AnyDataset, samples: range) -> list[int] | None:
    """Lengths that a dataset reads at once; None if one is below 1: the sample itself then shows the reason."""
    lengths = dataset.lengths_of(samples)
    return lengths if lengths is not None and min(lengths) > 0 else None


def _check_but_empty(check: Check, values: Values) -> Values:
    """The checked lengths, 1 for samples without a token."""
    values = values.copy()
    values[~values.reshape(len(values), -1).any(axis=1)] = 1
    return check(values)


class _FieldLengths:
    """The lengths of named fields of a sample, a tuple of several; workers pickle it, files of shards keep its name."""

    def __init__(self, names: str | Sequence[str]):
        self.names = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, list | tuple) else ()
        if not (1 <= len(set(self.names)) == len(self.names) and all(isinstance(n, str) for n in self.names)):
            raise UserError(f"length_fn must be a function, the name of a field, or different names, not {names!r}")
        self.num_lengths = len(self.names)
        self.__qualname__ = repr(self.names if self.num_lengths > 1 else names)

    def __call__(self, sample: Sample) -> int | tuple[int, ...]:
        lengths = tuple([_first_axis(sample, name) for name in self.names])
        return lengths if self.num_lengths > 1 else lengths[0]


def _first_axis(sample: Sample, name: str) -> int:
    """The size of the first axis of a field; raises ValueError for scalars and text, which have no axis."""
    try:
        field = _field(sample, name)
        if not isinstance(field, str | bytes | dict):
            return len(field)
    except (LookupError, AttributeError, TypeError):
        pass
    raise UserError(f"no field {name!r} with a first axis in {describe_fields(sample) or type(sample).__name__}")


def _field(sample: Sample, name: str) -> Array:
    return sample[name] if isinstance(sample, dict | Mapping) else getattr(sample, name)


def _check_rows(dataset: DataSource, name: str) -> None:
    """Raises ValueError if a field, whose length is 1 in all samples, has its tokens along the second axis."""
    for sample_id in range(min(num_samples_of(dataset), _FIRST_INSPECTED)):
        kind = None
        with contextlib.suppress(Exception):  # of a bad sample, which may be skipped
            kind = _without_length(_field(dataset[sample_id], name))
        if kind:
            raise UserError(
                f"sample {sample_id} cannot be measured: length_fn={name!r} counts {kind}, not tokens, in all samples; "
                f"let samples hold the only row, {name}[0]"
            )


def _several_lengths(
    length_fn: Callable[[Sample], int | Sequence[int]], dataset: DataSource
) -> Callable[[Sample], Value]:
    """The function, or what makes tuples of the several lengths that it gives, by the first sample that it takes."""
    if length_fn is len and hasattr(dataset, "lengths_of"):
        return length_fn
    for sample_id in range(min(num_samples_of(dataset), _FIRST_TRIED)):
        with contextlib.suppress(Exception):  # raised when all are measured
            sample = dataset[sample_id]
            if length_fn is len:
                return _SeveralLengths(_lengths_of_pair, 2) if _is_pair(sample) else length_fn
            shape = np.shape(length_fn(sample))
            return _SeveralLengths(length_fn, shape[0]) if len(shape) == 1 and shape[0] > 1 else length_fn
    return length_fn


def _is_pair(sample: Sample) -> bool:
    """Whether a sample is a plain tuple of two 1-D arrays or lists."""
    return (
        type(sample) is tuple
        and len(sample) == 2
        and all(np.ndim(side[:1]) == 1 for side in sample if isinstance(side, list))
        and all(len(getattr(side, "shape", ())) == 1 for side in sample if not isinstance(side, list))
    )


def _lengths_of_pair(pair: Sample) -> tuple[int, int]:
    if not _is_pair(pair):
        raise UserError(f"no pair (source, target) of 1-D arrays as the first sample, but a {type(pair).__name__}")
    return len(pair[0]), len(pair[1])


class _SeveralLengths:
    """Tuples of what a function gives; workers pickle it, files of shards keep the name of the function."""

    def __init__(self, function: Callable[[Sample], Any], num_lengths: int):
        self._function, self.num_lengths = function, num_lengths
        while isinstance(function, functools.partial):
            function = function.func
        named = function if hasattr(function, "__qualname__") else type(function)
        self.__module__, self.__qualname__ = named.__module__, named.__qualname__

    def __call__(self, sample: Sample) -> tuple[int, ...]:
        given = self._function(sample)
        try:
            lengths = tuple(map(operator.index, given))
        except TypeError:
            raise UserError(f"lengths must be integers, and length_fn gives {reprlib.repr(given)}; {COUNTS}") from None
        if len(lengths) != self.num_lengths:
            raise UserError(f"length_fn gives {lengths}, but {self.num_lengths} lengths for samples before")
        return lengths


class Work(NamedTuple):
    """Measures ranges of samples; a worker process gets it once, pickled."""

    dataset: DataSource
    function: Callable[[Sample], Value]
    name: str  # of the measured integer
    read_values: Callable[[range], list[int] | None] | None = None  # of consecutive samples; its result may be None
    value_of_bad: Value | None = None  # of samples that cannot be measured; None: they are an error
    bad_errors: type[Exception] = Exception  # that mark a sample as bad; others end the measurement


class MeasuredRange(NamedTuple):
    """The values of a range of samples, and the seconds that measuring them took."""

    samples: range
    values: Values
    seconds: float


class Ranges(Iterator[range]):
    """Cuts ranges of samples into smaller ones that take about equally long."""

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
    values = None if work.read_values is None else work.read_values(samples)
    if values is None:
        values = []
        for sample_id in samples:
            is_inspected = work.function is len and (sample_id < _FIRST_INSPECTED or not sample_id % _INSPECTED_EVERY)
            try:
                sample = work.dataset[sample_id]
                value = work.function(sample)
            except Exception as error:
                is_bad = isinstance(error, work.bad_errors) and not isinstance(error, MemoryError)
                if work.value_of_bad is None or not is_bad:
                    if isinstance(error, UserError):
                        raise UserError(f"sample {sample_id} cannot be measured: {error}") from error
                    raise RuntimeError(f"sample {sample_id} could not be measured: {error!r}") from error
                value, is_inspected = work.value_of_bad, False
            if is_inspected and (kind := _without_length(sample)):  # of all samples it would take too long
                raise UserError(
                    f"sample {sample_id} cannot be measured: length_fn=len counts {kind}, not tokens; "
                    "give measure_lengths a length_fn that counts the tokens: the name of their field, such as "
                    '"tokens", or a function, such as lambda sample: len(sample[0])'
                )
            values.append(value)
    return MeasuredRange(samples, _to_array(work.name, values, samples), time.perf_counter() - start)


def _without_length(sample: Sample) -> str | None:
    """Words for what `len` counts instead of tokens, as for a tensor [1, L] with L tokens; None if it counts tokens."""
    shape = getattr(sample, "shape", None)
    if isinstance(shape, tuple) and len(shape) > 1 and shape[0] == 1 != shape[1]:
        return f"the first axis of a {type(sample).__name__} of shape {tuple(shape)}"
    fields = describe_fields(sample)
    return fields and f"fields of a {fields}"


def _to_array(name: str, values: list[Value], samples: range) -> Values:
    """Values of a range of samples; raises ValueError that lists those that are not integers."""
    if {*map(type, values)} == {tuple}:  # the sizes of two fields
        return np.array(values, np.int64)
    with contextlib.suppress(OverflowError):  # listed below
        if {*map(type, values)} == {int}:
            return np.fromiter(values, np.int64, len(values))
    # The Python numbers in NumPy scalars and 0-d arrays of any library.
    numbers = [v.item() if getattr(v, "shape", None) == () and hasattr(v, "item") else v for v in values]
    are_wrong = [not is_integer(number) or not -(2**63) <= number < 2**63 for number in numbers]
    if any(are_wrong):
        places = np.flatnonzero(are_wrong)
        shown = np.array([reprlib.repr(numbers[place]) for place in places])
        advice = f"; {COUNTS}" if any(isinstance(number, float) for number in numbers) else ""
        listed = list_offenders(places + samples.start, shown)
        raise UserError(f"{name} must be integers that fit int64: {listed}{advice}")
    return np.array(numbers, np.int64)


def _measure(
    work: Work,
    check: Check,
    num_workers: int,
    progress: bool,
    shards: str | os.PathLike[str] | None,
    shard_size: int,
    shape: tuple[int, ...] = (),
) -> Values:
    """All values, checked; each sample has one of this shape."""
    check_at_least_zero(num_workers=num_workers)
    check_at_least_one(shard_size=shard_size)
    num_samples = num_samples_of(work.dataset)
    if not num_samples:
        raise UserError("the dataset is empty: at least one sample is needed")
    values: Values = np.zeros((num_samples, *shape), np.int64)

    def store(samples: range, part: Values) -> None:
        values[samples.start : samples.stop] = part

    files, missing = None, [range(num_samples)]
    if shards is not None:
        files = ShardFiles(Path(shards), num_samples, int(shard_size), work.name, work.function, check)
        missing = files.read(store)
    num_known = num_samples - sum(map(len, missing))
    bar = progress_bar(total=num_samples, initial=num_known, desc=work.name, unit="sample", progress=progress)
    parts = measure_ranges(work, missing, num_workers)
    with contextlib.closing(parts), bar as shown:
        for part in parts:
            store(part.samples, part.values)
            if files is not None:
                files.add(part.samples, values)
            shown.update(len(part.samples))
            raise_if_interrupted()
    return check(values)
