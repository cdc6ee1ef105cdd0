"""Measures the length, or any other integer, of every sample of a dataset, here or in worker processes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import reprlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Int64

from jvarlen._common.checks import (
    UserError,
    check_at_least_zero,
    check_choices,
    is_integer,
    list_first,
    list_offenders,
)
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen._common.keywords import check_keywords
from jvarlen._common.terminal import progress_bar
from jvarlen.data.samples import OnBadSample, Sample, describe_fields, num_samples_of
from jvarlen.planning.lengths import COUNTS, DataSource, check_lengths, check_sample_lengths

__all__ = [
    "LengthFn", "MeasuredRange", "Ranges", "Work", "find_lengths", "measure_integers", "measure_lengths",
    "measure_ranges",
]  # fmt: skip

LengthFn = Callable[[Sample], int | Sequence[int]] | str | tuple[str, ...]  # also the names of fields

Value: TypeAlias = Any
"""An integer of any library, or a tuple of several."""

Values: TypeAlias = Int64[np.ndarray, " n *sides"]

_SECONDS_PER_RANGE = 0.25  # long against handing a range over, short to wait for
_FIRST_RANGE = 4  # samples, which may take long
_LARGEST_RANGE = 32_768
_FIRST_INSPECTED = 4_096  # samples
_FIRST_TRIED = 16  # samples, until one shows how many lengths there are


@check_keywords
def measure_lengths(
    dataset: DataSource,
    length_fn: LengthFn = len,
    *,
    num_workers: int = 0,
    progress: bool = True,
    on_bad_sample: OnBadSample = "error",
) -> Int64[np.ndarray, " N *D"]:
    """Measures the length, or several lengths, of every sample of a random-access dataset.

    Args:
      dataset: has `len()` and integer indexing.
      length_fn: returns the number of tokens of a sample, an integer of any library, or several lengths, as many for
        each sample as for the first. Or the name of a field of samples that are mappings, dataclasses or named tuples:
        the size of its first axis. Several names, such as `("source", "target")`, give a length each. `len` gives both
        lengths of pairs, plain tuples of two 1-D arrays; it is rejected for samples whose fields it would count, and
        for arrays of shape [1, L].
      num_workers: processes that measure; 0 measures in this process. Workers are spawned, so `dataset` and `length_fn`
        must pickle; each takes some seconds to start and a copy of `dataset`.
      progress: whether to show a progress bar, in samples.
      on_bad_sample: what happens to a sample that cannot be read, lacks a named field, or has no token. `"skip"`: its
        length is 1, for `load` to leave its place empty, with `on_bad_sample="skip"` as well.

    Returns:
      int64[N], or int64[N, D] of D lengths, checked as `make_plan` checks them.

    Raises:
      ValueError: an empty dataset; a length that is not an integer or below 1; samples whose fields or only row `len`
        counts, or without a named field; arguments out of range; with workers, a dataset or function that does not
        pickle. Offenders are listed.
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
    function, num_lengths = _function_of(length_fn, dataset) if callable(length_fn) else _lengths_of_fields(length_fn)
    shape = () if num_lengths == 1 else (num_lengths,)
    value_of_bad: Value | None = None
    if on_bad_sample == "skip":
        value_of_bad = (1,) * num_lengths if shape else 1
    lengths = _measure(Work(dataset, function, "lengths", value_of_bad), num_workers, progress, shape)
    if on_bad_sample == "skip":
        lengths[~lengths.reshape(len(lengths), -1).any(axis=1)] = 1
    return check_sample_lengths(lengths, num_lengths)


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
    value_of_bad: int | None = None,
    num_workers: int = 0,
    progress: bool = True,
) -> Int64[np.ndarray, " N"]:
    """Measures any integer of every sample, zero and negative ones too."""
    work = Work(dataset, function, name, value_of_bad, ValueError)  # a failing disk makes no bad sample
    return _measure(work, num_workers, progress)


_LengthsOf: TypeAlias = tuple[Callable[[Sample], Value], int]
"""What gives the length of a sample, or a tuple of several; and how many it gives."""


def _lengths_of_fields(named: str | Sequence[str]) -> _LengthsOf:
    names = (named,) if isinstance(named, str) else tuple(named) if isinstance(named, list | tuple) else ()
    if not (1 <= len(set(names)) == len(names) and all(isinstance(name, str) for name in names)):
        raise UserError(f"length_fn must be a function, the name of a field, or different names, not {named!r}")
    if len(names) == 1:
        return functools.partial(_first_axis, names[0]), 1
    return functools.partial(_first_axes, names), len(names)


def _first_axes(names: tuple[str, ...], sample: Sample) -> tuple[int, ...]:
    return tuple([_first_axis(name, sample) for name in names])


def _first_axis(name: str, sample: Sample) -> int:
    """The size of the first axis of a field; raises ValueError for scalars and text, which have no axis."""
    try:
        field = sample[name] if isinstance(sample, Mapping) else getattr(sample, name)
        if not isinstance(field, str | bytes | dict):
            return len(field)
    except (LookupError, AttributeError, TypeError):
        pass
    raise UserError(f"no field {name!r} with a first axis in {describe_fields(sample) or type(sample).__name__}")


def _function_of(length_fn: Callable[[Sample], int | Sequence[int]], dataset: DataSource) -> _LengthsOf:
    """The function, or what makes tuples of the several lengths that it gives, by the first sample that it takes."""
    for sample_id in range(min(num_samples_of(dataset), _FIRST_TRIED)):
        with contextlib.suppress(Exception):  # raised when all are measured
            sample = dataset[sample_id]
            if length_fn is len:
                return (_lengths_of_pair, 2) if _is_pair(sample) else (length_fn, 1)
            shape = np.shape(length_fn(sample))
            if len(shape) != 1 or shape[0] < 2:
                return length_fn, 1
            return functools.partial(_several_lengths, length_fn, shape[0]), shape[0]
    return length_fn, 1


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


def _several_lengths(function: Callable[[Sample], Any], num_lengths: int, sample: Sample) -> tuple[int, ...]:
    given = function(sample)
    try:
        lengths = tuple(map(operator.index, given))
    except TypeError:
        raise UserError(f"lengths must be integers, and length_fn gives {reprlib.repr(given)}; {COUNTS}") from None
    if len(lengths) != num_lengths:
        raise UserError(f"length_fn gives {lengths}, but {num_lengths} lengths for samples before")
    return lengths


class Work(NamedTuple):
    """Measures ranges of samples; a worker process gets it once, pickled."""

    dataset: DataSource
    function: Callable[[Sample], Value]
    name: str  # of the measured integer
    value_of_bad: Value | None = None  # of samples that cannot be measured; None: they are an error
    bad_errors: type[Exception] = Exception  # that mark a sample as bad; others end the measurement


class MeasuredRange(NamedTuple):
    """The values of a range of samples, and the seconds that measuring them took."""

    samples: range
    values: Values
    seconds: float


class Ranges(Iterator[range]):
    """Cuts all samples into ranges that take about equally long."""

    def __init__(self, num_samples: int):
        self._left, self._size = range(num_samples), _FIRST_RANGE

    def __next__(self) -> range:
        if not self._left:
            raise StopIteration
        cut, self._left = self._left[: self._size], self._left[self._size :]
        return cut

    def adapt(self, part: MeasuredRange) -> None:
        """Sizes the next ranges by what one took."""
        fitting = int(len(part.samples) * _SECONDS_PER_RANGE / max(part.seconds, 1e-9))
        self._size = max(1, min(fitting, 2 * self._size, _LARGEST_RANGE))


def measure_ranges(work: Work, num_samples: int, num_workers: int) -> Generator[MeasuredRange, None, None]:
    """Measures all samples in ranges of about a quarter of a second."""
    ranges = Ranges(num_samples)
    if num_workers:
        yield from _measure_elsewhere(work, ranges, min(num_workers, num_samples))
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
                "otherwise see what it printed"
            ) from error


def _measure_range(work: Work, samples: range) -> MeasuredRange:
    start, values = time.perf_counter(), []
    for sample_id in samples:
        is_inspected = work.function is len and sample_id < _FIRST_INSPECTED  # of all it would take too long
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
        if is_inspected and (kind := _without_length(sample)):
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


def _measure(work: Work, num_workers: int, progress: bool, shape: tuple[int, ...] = ()) -> Values:
    """All values; each sample has one of this shape."""
    check_at_least_zero(num_workers=num_workers)
    num_samples = num_samples_of(work.dataset)
    if not num_samples:
        raise UserError("the dataset is empty: at least one sample is needed")
    values: Values = np.zeros((num_samples, *shape), np.int64)
    bar = progress_bar(total=num_samples, desc=work.name, unit="sample", progress=progress)
    parts = measure_ranges(work, num_samples, num_workers)
    with contextlib.closing(parts), bar as shown:
        for part in parts:
            values[part.samples.start : part.samples.stop] = part.values
            shown.update(len(part.samples))
            raise_if_interrupted()
    return values
