"""Measures the length, or any other integer, of every sample of a dataset.

Long measurements write shard files and resume from them.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from jvarlen._common.checks import (
    UserError,
    check_at_least_one,
    check_at_least_zero,
    check_choices,
    is_integer,
    list_offenders,
)
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen._common.progress import progress_bar
from jvarlen.data.sample_ranges import Check, ShardFiles, Values, Work, measure_ranges
from jvarlen.planning.lengths import DataSource, check_lengths, check_pair_lengths, check_random_access
from jvarlen.planning.samples import OnBadSample, fields_of

__all__ = ["LengthFn", "PairLengths", "known_lengths", "measure_integers", "measure_lengths"]

LengthFn = Callable[[Any], int] | str | tuple[str, str]  # also the names of fields


def measure_lengths(
    dataset: DataSource,
    length_fn: LengthFn = len,
    *,
    num_workers: int = 0,
    progress: bool = True,
    shards: str | os.PathLike[str] | None = None,
    shard_size: int = 65_536,
    on_bad_sample: OnBadSample = "error",
) -> Int64[np.ndarray, " N"] | Int64[np.ndarray, "N 2"]:
    """Measures the length of every sample of a random-access dataset.

    Args:
      dataset: has `len()` and integer indexing. With `length_fn=len`, lengths come from its method
        `lengths_of(samples: range)` if it has one, such as `LineDataset`.
      length_fn: returns the number of tokens of a sample: an int, a NumPy integer, or a 0-d array of one. Or the name
        of a field of samples that are mappings, dataclasses or named tuples: the size of its first axis. Two names,
        such as `("source", "target")`, give both lengths of every sample. `len` is rejected for samples whose fields
        it would count: mappings, named tuples, and lists or tuples that hold arrays or the like, or text beside other
        things.
      num_workers: processes that measure; 0 measures in this process. Workers are spawned, so `dataset` and `length_fn`
        must pickle; each takes some seconds to start and a copy of `dataset`.
      progress: whether to show a progress bar, in samples.
      shards: a directory for the measured lengths, created if missing. A repeated call resumes from its complete
        shards. It knows a measurement by the number of samples, `shard_size` and the name of `length_fn`: if the
        samples or the body of the function change, use a new directory. None keeps nothing.
      shard_size: samples in a shard file. An interrupt loses at most the shards in progress, about one a worker.
      on_bad_sample: what happens to a sample that cannot be read, lacks a named field, or has no token. `"skip"`: its
        length is 1, for `load` to leave its place empty, with `on_bad_sample="skip"` as well.

    Returns:
      int64[N], or int64[N, 2] for two names, checked as `make_plan` checks them. The files of a finished directory
      hold the same: `np.concatenate([np.load(path) for path in sorted(Path(shards).glob("*.npy"))])`.

    Raises:
      ValueError: an empty dataset; a length that is not an integer, or samples whose fields `len` counts (checked in
        the first 4,096 samples and every 1,024th after them); a sample without a named field, or with a scalar or text
        there; lengths below 1, listed when all samples are measured; `shards` of another measurement; arguments out of
        range; with workers, a dataset or function that does not pickle.
      RuntimeError: `dataset` or `length_fn` failed on a sample, whose id is given; the original error is the cause, of
        a worker process its traceback. Or a worker process failed; the samples that it had are given.

    Example:
      >>> measure_lengths(["a", "bcd"], progress=False)
      array([1, 3])
      >>> samples = [{"tokens": [7, 8, 9], "label": 0}, {"tokens": [7], "label": 1}]
      >>> measure_lengths(samples, "tokens", progress=False)
      array([3, 1])
    """
    check_choices(on_bad_sample=(on_bad_sample, OnBadSample))
    function = length_fn if callable(length_fn) else _FieldLengths(length_fn)
    quantity = _PAIR_LENGTHS if isinstance(function, _FieldLengths | PairLengths) and function.is_pair else _LENGTHS
    if on_bad_sample == "skip":  # the name keeps shards of both kinds apart
        check = functools.partial(_check_but_empty, quantity.check)
        value_of_bad = (1, 1) if quantity.shape else 1
        quantity = quantity._replace(name="lengths of good samples", check=check, value_of_bad=value_of_bad)
    is_read_at_once = length_fn is len and hasattr(dataset, "lengths_of")
    read_values = functools.partial(_read_lengths, dataset) if is_read_at_once else None
    return _measure(
        dataset,
        function,
        quantity,
        num_workers=num_workers,
        progress=progress,
        shards=shards,
        shard_size=shard_size,
        read_values=read_values,
    )


def known_lengths(dataset: DataSource, *, progress: bool = True) -> Int64[np.ndarray, " N"]:
    """The attribute `lengths` of a dataset, or its lengths, measured sample by sample.

    Args:
      dataset: random access to samples that have a `len()`.
      progress: whether measuring shows a progress bar.

    Returns:
      int64[N], checked by `check_lengths`.

    Example:
      >>> from jvarlen.data.tokens import TokenDataset
      >>> known_lengths(TokenDataset.from_bytes([b"ab", b"c"]))
      array([2, 1])
    """
    if hasattr(dataset, "lengths"):
        return check_lengths(dataset.lengths)
    return measure_lengths(dataset, progress=progress)


def measure_integers(
    dataset: DataSource, function: Callable[[Any], int], name: str, **options: Any
) -> Int64[np.ndarray, " N"]:
    """Measures any integer of every sample, zero and negative ones too; options of `_measure`."""
    return _measure(dataset, function, _Quantity(name, _unchecked), **options)


def _read_lengths(dataset: Any, samples: range) -> list[int] | None:
    """Lengths that a dataset reads at once; None if one is below 1: the sample itself then tells the reason."""
    lengths = dataset.lengths_of(samples)
    return lengths if lengths is not None and min(lengths) > 0 else None


class _Quantity(NamedTuple):
    """Integers to measure; `check` takes all values and makes the result."""

    name: str
    check: Check
    shape: tuple[int, ...] = ()  # of the value of one sample
    value_of_bad: Any = None  # as `Work` has it

    def to_array(self, values: list[Any], samples: range) -> Values:
        """Values of a range of samples; raises ValueError that lists what are no integers."""
        if {*map(type, values)} == {int}:
            with contextlib.suppress(OverflowError):  # listed below
                return np.fromiter(values, np.int64, len(values))
        if self.shape:
            return np.array(values, np.int64)
        # The Python numbers in NumPy scalars and 0-d arrays of any library.
        numbers = [v.item() if getattr(v, "shape", None) == () and hasattr(v, "item") else v for v in values]
        are_wrong = [not is_integer(number) or not -(2**63) <= number < 2**63 for number in numbers]
        if any(are_wrong):
            places = np.flatnonzero(are_wrong)
            shown = np.array([reprlib.repr(numbers[place]) for place in places])
            raise UserError(
                f"{self.name} must be integers that fit int64: {list_offenders(places + samples.start, shown)}"
            )
        return np.array(numbers, np.int64)


def _check_counts_tokens(sample: Any) -> None:
    """Raises ValueError for a sample whose fields `len` counts."""
    if fields := fields_of(sample):
        raise UserError(
            f"length_fn=len counts fields of a {fields}, not tokens; give measure_lengths a length_fn that counts the "
            'tokens: the name of their field, such as "tokens", or a function, such as lambda sample: len(sample[0])'
        )


class _FieldLengths:
    """The length of a named field of a sample, or a tuple of two; workers pickle it, files of shards keep its name."""

    def __init__(self, names: str | Sequence[str]):
        self._names = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, list | tuple) else ()
        if not (1 <= len(set(self._names)) == len(self._names) <= 2 and all(isinstance(n, str) for n in self._names)):
            raise UserError(
                f"length_fn must be a function, the name of a field, or the names of two fields, not {names!r}"
            )
        self.is_pair = len(self._names) == 2
        self.__qualname__ = repr(self._names if self.is_pair else names)

    def __call__(self, sample: Any) -> int | tuple[int, ...]:
        lengths = tuple([_first_axis(sample, name) for name in self._names])
        return lengths if self.is_pair else lengths[0]


def _first_axis(sample: Any, name: str) -> int:
    """The size of the first axis of a field; raises ValueError where there is none, as in scalars and text."""
    try:
        field = sample[name] if isinstance(sample, dict | Mapping) else getattr(sample, name)
        if not isinstance(field, str | bytes | dict):
            return len(field)
    except (LookupError, AttributeError, TypeError):
        pass
    raise UserError(f"no field {name!r} with a first axis in {fields_of(sample) or type(sample).__name__}")


class PairLengths:
    """Makes `measure_lengths` take a function that gives two lengths of a sample."""

    is_pair = True

    def __init__(self, function: Callable[[Any], Sequence[int]]):
        self._function = function

    def __call__(self, sample: Any) -> tuple[int, int]:
        """Both lengths; raises ValueError or TypeError for what are not two integers."""
        first, second = self._function(sample)
        return operator.index(first), operator.index(second)


def _unchecked(values: Values) -> Values:  # workers pickle it
    return values


def _check_but_empty(check: Check, values: Values) -> Values:
    """The checked lengths, 1 for samples without a token."""
    is_empty = ~values.reshape(len(values), -1).any(axis=1)
    values = values.copy()
    values[is_empty] = 1
    return check(values)


_LENGTHS = _Quantity("lengths", check_lengths)
_PAIR_LENGTHS = _Quantity("lengths", check_pair_lengths, shape=(2,))


def _measure(
    dataset: DataSource,
    function: Callable[[Any], Any],
    quantity: _Quantity,
    *,
    num_workers: int,
    progress: bool,
    shards: str | os.PathLike[str] | None,
    shard_size: int,
    read_values: Callable[[range], list[int] | None] | None = None,
) -> Any:
    check_at_least_zero(num_workers=num_workers)
    check_at_least_one(shard_size=shard_size)
    check_random_access(dataset)
    num_samples = len(dataset)
    if not num_samples:
        raise UserError("the dataset is empty: at least one sample is needed")
    values: Values = np.zeros((num_samples, *quantity.shape), np.int64)

    def store(samples: range, part: Values) -> None:
        values[samples.start : samples.stop] = part

    files, missing = None, [range(num_samples)]
    if shards is not None:
        files = ShardFiles(Path(shards), num_samples, int(shard_size), quantity.name, function, quantity.check)
        missing = files.read(store)
    inspect = _check_counts_tokens if function is len else None
    work = Work(dataset, function, quantity.to_array, inspect, read_values, quantity.value_of_bad)
    num_known = num_samples - sum(map(len, missing))
    bar = progress_bar(total=num_samples, initial=num_known, desc=quantity.name, unit="sample", progress=progress)
    parts = measure_ranges(work, missing, num_workers)
    with contextlib.closing(parts), bar as shown:
        for part in parts:
            store(part.samples, part.values)
            if files is not None:
                files.add(part.samples, values)
            shown.update(len(part.samples))
            raise_if_interrupted()
    return quantity.check(values)
