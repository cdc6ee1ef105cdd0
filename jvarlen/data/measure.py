"""Measures the length, or any other number, of every sample of a dataset.

Long measurements write shard files and resume from them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from jvarlen._common.checks import (
    UserError,
    check_at_least_one,
    check_at_least_zero,
    check_choices,
    is_integer,
    is_number,
    list_offenders,
)
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen._common.progress import progress_bar
from jvarlen.data.sample_ranges import Values, Work, measure_ranges
from jvarlen.planning.lengths import DataSource, check_lengths, check_pair_lengths, check_random_access
from jvarlen.planning.samples import OnBadSample, fields_of

if TYPE_CHECKING:
    from jvarlen.data.shard_files import Check

__all__ = ["LengthFn", "PairLengths", "known_lengths", "measure_difficulty", "measure_integers", "measure_lengths"]

LengthFn = Callable[[Any], int] | str | tuple[str, str]  # also the names of fields

_MAX_EXACT_INT = 2**53  # up to here every integer is a float64


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
        the first 4,096 samples and every 1,024th after them); samples without a named field, or with a scalar or text
        there; lengths below 1, listed when all samples are measured;
        `shards` that are damaged or of another measurement; arguments out of range; with workers, a dataset or function
        that does not pickle.
      RuntimeError: `dataset` or `length_fn` failed on a sample, whose id is given; the original error is the cause. Or
        a worker process failed; the samples that it had are given.

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
    running = _Running(num_workers, progress, shards, shard_size)
    return _measure(dataset, function, quantity, running, read_values)


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
      difficulty_fn: returns the difficulty of a sample: an int or a float, of Python or NumPy, or a 0-d array of one.
        Booleans are rejected.
      num_workers: this and the other arguments as in `measure_lengths`.
      progress: likewise.
      shards: likewise; each quantity needs a directory of its own.
      shard_size: likewise.

    Returns:
      int64[N] if every difficulty is an int; float64[N] if any is a float.

    Raises:
      ValueError: as in `measure_lengths`; a value that is not a number, or an int that does not fit int64; ints
        beyond ±2**53 among floats, which float64 cannot represent; NaN, listed at the end.
      RuntimeError: as in `measure_lengths`.

    Example:
      >>> measure_difficulty(["abc", "aaaa"], lambda sample: len(set(sample)) / len(sample), progress=False)
      array([1.  , 0.25])
    """
    running = _Running(num_workers, progress, shards, shard_size)
    return _measure(dataset, difficulty_fn, _DIFFICULTIES, running)


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
    dataset: DataSource,
    function: Callable[[Any], int],
    name: str,
    *,
    num_workers: int,
    progress: bool,
    shards: Path | None,
    shard_size: int,
    read_values: Callable[[range], list[int] | None] | None = None,
) -> Int64[np.ndarray, " N"]:
    """Measures any integer of every sample, zero and negative ones too; `read_values` as for `Work`."""
    quantity = _Quantity(name, "integers that fit int64", is_integer, _unchecked)
    return _measure(dataset, function, quantity, _Running(num_workers, progress, shards, shard_size), read_values)


class _Running(NamedTuple):
    """How to measure: the options of `measure_lengths`."""

    num_workers: int
    progress: bool
    shards: str | os.PathLike[str] | None
    shard_size: int


def _read_lengths(dataset: Any, samples: range) -> list[int] | None:
    """Lengths that a dataset reads at once; None if one is below 1: the sample itself then tells the reason."""
    lengths = dataset.lengths_of(samples)
    return lengths if lengths is not None and min(lengths) > 0 else None


class _Quantity(NamedTuple):
    """A quantity to measure; `check` takes all values and makes the result."""

    name: str
    wanted: str
    is_allowed: Callable[[Any], bool]
    check: Check
    shape: tuple[int, ...] = ()  # of the value of one sample
    value_of_bad: Any = None  # as `Work` has it

    def to_array(self, values: list[Any], samples: range) -> Values:
        """Values of a range of samples, int64 if all are integers; raises ValueError that lists what are no numbers."""
        types = set(map(type, values))
        if types == {int}:
            with contextlib.suppress(OverflowError):  # listed below
                return np.fromiter(values, np.int64, len(values))
        if types == {float} and self.is_allowed(0.0):
            return np.fromiter(values, np.float64, len(values))
        if types == {tuple} and self.shape:
            return np.array(values, np.int64)
        # The Python numbers in NumPy scalars and 0-d arrays of any library.
        numbers = [v.item() if getattr(v, "shape", None) == () and hasattr(v, "item") else v for v in values]
        unmeasured = {i: value for i, value in zip(samples, values, strict=True) if isinstance(value, _Unmeasured)}
        if self.value_of_bad is not None and any(value.is_bad for value in unmeasured.values()):
            bad = (isinstance(value, _Unmeasured) and value.is_bad for value in values)
            return self.to_array(
                [self.value_of_bad if is_bad else v for v, is_bad in zip(values, bad, strict=True)], samples
            )
        if unmeasured:
            fields = np.array([value.fields for value in unmeasured.values()])
            listed = list_offenders(np.array(list(unmeasured)), fields)
            first = next(iter(unmeasured.values()))
            raise UserError(f"{first.problem}: {listed}{first.advice}")
        refused = [
            place
            for place, number in enumerate(numbers)
            if not self.is_allowed(number) or (is_integer(number) and not -(2**63) <= number < 2**63)
        ]
        if refused:
            shown = np.array([reprlib.repr(numbers[place]) for place in refused])
            offenders = list_offenders(np.array(refused) + samples.start, shown)
            raise UserError(f"{self.name} must be {self.wanted}: {offenders}")
        if all(map(is_integer, numbers)):
            return np.array(numbers, np.int64)
        _as_floats(np.array([number if is_integer(number) else 0 for number in numbers], np.int64), samples.start)
        return np.array(numbers, np.float64)


class _Unmeasured(NamedTuple):
    """Stands for the length of a sample that has none."""

    fields: str  # of the sample
    problem: str
    advice: str = ""
    is_bad: bool = False  # one that may be skipped


def _len_of_tokens(sample: Any) -> int | _Unmeasured:
    """`len`, if it counts tokens."""
    fields = fields_of(sample)
    if fields is None:
        return len(sample)
    return _Unmeasured(
        fields,
        "length_fn=len counts fields of these samples, not tokens",
        '; give measure_lengths a length_fn that counts the tokens: the name of their field, such as "tokens", or a '
        "function, such as lambda sample: len(sample[0])",
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

    def __call__(self, sample: Any) -> int | tuple[int, ...] | _Unmeasured:
        try:
            lengths = tuple([_first_axis(_field(sample, name)) for name in self._names])
        except TypeError:  # a scalar, also in place of a missing field
            return _Unmeasured(
                _told_fields(sample),
                f"length_fn={self.__qualname__}: these samples have no such field, or a scalar or text there",
                is_bad=True,
            )
        return lengths if self.is_pair else lengths[0]


class PairLengths:
    """Makes `measure_lengths` take a function that gives two lengths of a sample."""

    is_pair = True

    def __init__(self, function: Callable[[Any], Sequence[int]]):
        self._function = function

    def __call__(self, sample: Any) -> tuple[int, int]:
        """Both lengths; raises ValueError or TypeError for what are not two integers."""
        first, second = self._function(sample)
        return operator.index(first), operator.index(second)


def _field_names(sample: Any) -> Iterable[Any]:
    """The names of fields; attributes of other classes are none: an array has `data` and `shape`."""
    if isinstance(sample, dict | Mapping):  # of which the first is known at once
        return sample
    return getattr(sample, "__dataclass_fields__", getattr(sample, "_fields", ()))


def _field(sample: Any, name: str) -> Any:
    names: Any = _field_names(sample)
    if name not in names:
        return None
    return sample[name] if names is sample else getattr(sample, name)


def _first_axis(field: Any) -> int:
    """The size of the first axis; raises TypeError for what has none, such as scalars and text."""
    if isinstance(field, str | bytes | dict):
        raise TypeError(type(field))
    return len(field)


def _told_fields(sample: Any) -> str:
    fields = {name: _field(sample, name) for name in itertools.islice(_field_names(sample), 8)}
    told = [f"{name} {list(getattr(field, 'shape', ())) or type(field).__name__}" for name, field in fields.items()]
    return f"{type(sample).__name__} of {', '.join(told)}" if told else type(sample).__name__


def _unchecked(values: Values) -> Values:  # workers pickle it
    return values


def _check_but_empty(check: Check, values: Values) -> Values:
    """The checked lengths, 1 for samples without a token."""
    is_empty = ~values.reshape(len(values), -1).any(axis=1)
    values = values.copy()
    values[is_empty] = 1
    return check(values)


def _check_difficulties(values: Values) -> Values:
    if (is_nan := np.isnan(values)).any():
        raise UserError(f"difficulty must not be NaN: {list_offenders(np.flatnonzero(is_nan), values[is_nan])}")
    return values


def _as_floats(ints: Int64[np.ndarray, " n"], first_id: int) -> Float64[np.ndarray, " n"]:
    """Integers among floats; raises ValueError that lists those that floats do not hold exactly."""
    is_inexact = (ints > _MAX_EXACT_INT) | (ints < -_MAX_EXACT_INT)
    if is_inexact.any():
        offenders = list_offenders(np.flatnonzero(is_inexact) + first_id, ints[is_inexact], "±2**53")
        raise UserError(f"among floats, ints must be exact as floats: {offenders}")
    return ints.astype(np.float64)


_LENGTHS = _Quantity("lengths", "integers that fit int64", is_integer, check_lengths)
_PAIR_LENGTHS = _Quantity("lengths", "integers that fit int64", is_integer, check_pair_lengths, shape=(2,))
_DIFFICULTIES = _Quantity("difficulty", "floats, or integers that fit int64", is_number, _check_difficulties)


def _measure(
    dataset: DataSource,
    function: Callable[[Any], Any],
    quantity: _Quantity,
    running: _Running,
    read_values: Callable[[range], list[int] | None] | None = None,
) -> Any:
    num_workers, progress, shards, shard_size = running
    check_at_least_zero(num_workers=num_workers)
    check_at_least_one(shard_size=shard_size)
    check_random_access(dataset)
    num_samples = len(dataset)
    if not num_samples:
        raise UserError("the dataset is empty: at least one sample is needed")
    values: Values = np.zeros((num_samples, *quantity.shape), np.int64)

    def store(samples: range, part: Values) -> None:
        nonlocal values
        if part.dtype == np.float64 and values.dtype == np.int64:
            values = _as_floats(values, 0)
        values[samples.start : samples.stop] = part if part.dtype == values.dtype else _as_floats(part, samples.start)

    files, missing = None, [range(num_samples)]
    if shards is not None:
        from jvarlen.data.shard_files import ShardFiles

        files = ShardFiles(Path(shards), num_samples, int(shard_size), quantity.name, function, quantity.check)
        missing = files.read(store)
    careful = _len_of_tokens if function is len else None
    work = Work(dataset, function, quantity.to_array, careful, read_values, quantity.value_of_bad)
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
