"""Measures the length, or any other integer, of every sample of a dataset, here or in worker processes.

Long measurements write shard files and resume from them.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import operator
import os
import reprlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
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
    "LengthFn", "Work", "find_lengths", "measure_integers", "measure_lengths", "measure_parts",
]  # fmt: skip

LengthFn = Callable[[Sample], int | Sequence[int]] | str | tuple[str, ...]  # also the names of fields

Value: TypeAlias = Any
"""An integer of any library, or a tuple of several."""

_SECONDS_PER_PART = 0.25  # long against handing a part over, short to wait for
_RANGES_PER_WORKER = 8  # so that all workers end at about the same time
_READ_AT_ONCE = 1_024  # samples
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
    function, num_lengths = _function_of(length_fn, dataset) if callable(length_fn) else _lengths_of_fields(length_fn)
    shape = () if num_lengths == 1 else (num_lengths,)
    name, check = "lengths", functools.partial(check_sample_lengths, num_lengths=num_lengths)
    value_of_bad: Value | None = None
    if on_bad_sample == "skip":  # the name keeps shards of both kinds apart
        name, check = "lengths of good samples", functools.partial(_check_but_empty, check)
        value_of_bad = (1,) * num_lengths if shape else 1
    is_read_at_once = function is len and hasattr(dataset, "lengths_of")
    read_values = functools.partial(_read_lengths, dataset) if is_read_at_once else None
    work = Work(dataset, function, name, read_values, value_of_bad)
    lengths = _measure(work, check, num_workers, progress, shards, shard_size, shape)
    if not callable(length_fn):
        for field, of_field in zip(_names_of(length_fn), lengths.reshape(len(lengths), -1).T, strict=True):
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


_LengthsOf: TypeAlias = tuple[Callable[[Sample], Value], int]
"""What gives the length of a sample, or a tuple of several; and how many it gives."""


def _names_of(named: str | Sequence[str]) -> tuple[str, ...]:
    return (named,) if isinstance(named, str) else tuple(named) if isinstance(named, list | tuple) else ()


def _lengths_of_fields(named: str | Sequence[str]) -> _LengthsOf:
    names = _names_of(named)
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


def _function_of(length_fn: Callable[[Sample], int | Sequence[int]], dataset: DataSource) -> _LengthsOf:
    """The function, or what makes tuples of the several lengths that it gives, by the first sample that it takes."""
    if length_fn is len and hasattr(dataset, "lengths_of"):
        return length_fn, 1
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


def _name_of(function: Callable[..., object]) -> str:
    """The name of a function of the user, or of the fields that are measured, by which shards know it."""
    if isinstance(function, functools.partial) and function.func in (_first_axis, _first_axes):
        return f"{__name__}.{function.args[0]!r}"
    if isinstance(function, functools.partial) and function.func is _several_lengths:
        function = function.args[0]
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(named, '__module__', None) or 'builtins'}.{named.__qualname__}"


class Work(NamedTuple):
    """What measures samples; a worker process gets it once, pickled."""

    dataset: DataSource
    function: Callable[[Sample], Value]
    name: str  # of the measured integer
    read_values: Callable[[range], list[int] | None] | None = None  # of consecutive samples; its result may be None
    value_of_bad: Value | None = None  # of samples that cannot be measured; None: they are an error
    bad_errors: type[Exception] = Exception  # that mark a sample as bad; others end the measurement


_Part: TypeAlias = tuple[range, Values]  # the values of consecutive samples


def measure_parts(work: Work, missing: Sequence[range], num_workers: int) -> Generator[_Part, None, None]:
    """Measures the missing samples in parts of about a quarter of a second."""
    num_workers = min(num_workers, sum(map(len, missing)))
    if num_workers:
        yield from _measure_elsewhere(work, missing, num_workers)
        return
    for left in missing:
        while left:
            values = _measure_first(work, left)
            yield left[: len(values)], values
            left = left[len(values) :]


def _measure_elsewhere(work: Work, missing: Sequence[range], num_workers: int) -> Generator[_Part, None, None]:
    from jvarlen._common.workers import WorkerPool

    size = max(1, sum(map(len, missing)) // (_RANGES_PER_WORKER * num_workers))
    waiting = collections.deque(
        samples[start : start + size] for samples in missing for start in range(0, len(samples), size)
    )
    pending: dict[Future[Values], range] = {}
    with WorkerPool(work, num_workers) as pool:
        try:
            while waiting or pending:
                while waiting and len(pending) < num_workers:
                    samples = waiting.popleft()
                    pending[pool.apply(_measure_first, samples)] = samples
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    values = future.result()
                    samples = pending.pop(future)
                    if rest := samples[len(values) :]:
                        waiting.append(rest)
                    yield samples[: len(values)], values
        except BrokenExecutor as error:
            had = list_first((f"{samples.start} to {samples.stop - 1}" for samples in pending.values()), " or ")
            raise RuntimeError(
                f"a worker process {pool.kill()}; it had samples {had}. Where memory ran out, take fewer workers; "
                "otherwise see what it printed. Shards that were finished are kept"
            ) from error


def _measure_first(work: Work, samples: range) -> Values:
    """The values of the first of these samples, as many as are measured in a quarter of a second."""
    if work.read_values is not None:
        samples = samples[:_READ_AT_ONCE]
        if (read := work.read_values(samples)) is not None:
            return _to_array(work.name, read, samples)
    end, values = time.perf_counter() + _SECONDS_PER_PART, []
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
        if time.perf_counter() > end:
            break
    return _to_array(work.name, values, samples)


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
        files = ShardFiles(Path(shards), num_samples, int(shard_size), work.name, _name_of(work.function), check)
        missing = files.read(store)
    num_known = num_samples - sum(map(len, missing))
    bar = progress_bar(total=num_samples, initial=num_known, desc=work.name, unit="sample", progress=progress)
    parts = measure_parts(work, missing, num_workers)
    with contextlib.closing(parts), bar as shown:
        for samples, part in parts:
            store(samples, part)
            if files is not None:
                files.add(samples, values)
            shown.update(len(part))
            raise_if_interrupted()
    return check(values)
