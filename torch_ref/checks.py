"""Argument checks: plain integers and tensors, or a ValueError that lists the offending values."""

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed

__all__ = [
    "COUNTS",
    "INT64_MAX",
    "MAX_LISTED",
    "as_array",
    "check_bool",
    "check_count",
    "check_integer",
    "check_number",
    "check_process_group",
    "integer_array",
    "known_keywords",
    "list_offenders",
    "to_tensor",
]

_Called = TypeVar("_Called", bound=Callable[..., Any])

INT64_MAX = 2**63 - 1
COUNTS = "a length counts tokens, frames or the like: give frames in place of seconds"
MAX_LISTED = 5


def check_bool(name: str, value: object) -> bool:
    """Return `value` as a Python bool; a ValueError for anything else, true or not."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def check_integer(name: str, value: Any, minimum: int = 1, maximum: int = INT64_MAX) -> int:
    """Return an integer of any kind, in [minimum, maximum], as a Python int; a ValueError for others and for bools."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None
    if isinstance(value, bool | np.bool_) or not minimum <= number <= maximum:
        raise ValueError(f"{name} must be an integer from {minimum} to {maximum}, got {value!r}")
    return number


def check_count(name: str, value: Any) -> int | None:
    """Return None, or an integer >= 1 of any kind as a Python int; a ValueError for others."""
    return None if value is None else check_integer(name, value)


def check_number(name: str, value: Any, *, above: float | None = None) -> float:
    """Return a finite number as a float; a ValueError unless it is greater than `above`, or for None at least 0."""
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not is_number or not np.isfinite(value) or (value < 0 if above is None else value <= above):
        bound = "at least 0" if above is None else f"above {above:g}"
        raise ValueError(f"{name} must be a finite number {bound}, got {value!r}")
    return float(value)


def check_process_group(caller: str) -> None:
    """Raise ValueError, which names the caller, unless `torch.distributed` has a default process group."""
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ValueError(
            f"{caller} needs a process group: call torch.distributed.init_process_group first, in all processes"
        )


def as_array(name: str, values: Any) -> NDArray[Any]:
    """Return `values` as an array; a ValueError, which says that lengths are wanted, for rows of different sizes."""
    try:
        return np.asarray(values)
    except ValueError:
        raise ValueError(
            f"{name} must be integers, not sequences of different sizes; the lengths of samples are "
            "[len(sample) for sample in samples]"
        ) from None


def integer_array(name: str, values: Any) -> NDArray[Any]:
    """Return `values` as a 1-D array [N >= 1] in its integer dtype; a ValueError for all else, bools included."""
    if isinstance(values, Iterator):
        raise ValueError(f"{name} must be a list or an array, got a {type(values).__name__}: make a list of it")
    array = as_array(name, values)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} must be 1-D with at least one element, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers that fit int64, got dtype {array.dtype}; {COUNTS}")
    return array


def list_offenders(ids: NDArray[Any], values: NDArray[Any] | Sequence[int], limit: int) -> str:
    """Return text such as "id 3: 0 (limit 1), id 9: -2 (limit 1) and 7 more", of ids int64[n] and their values."""
    listed = zip(ids[:MAX_LISTED], values[:MAX_LISTED], strict=True)
    text = ", ".join(f"id {number}: {value} (limit {limit})" for number, value in listed)
    left = len(ids) - MAX_LISTED
    return f"{text} and {left} more" if left > 0 else text


def to_tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor that shares the array's memory, or of a copy where the array is read-only or strided."""
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def known_keywords(called: _Called, more: Collection[str] = ()) -> _Called:
    """Return a function, or a class, whose TypeError for an unknown keyword names the nearest and all that it has.

    `more` are keywords that it takes in addition to those that it lists.
    """
    if isinstance(called, type):
        cast(Any, called).__init__ = known_keywords(cast(Any, called).__init__, more)
        return called
    listed = signature(called).parameters.values()
    names = [each.name for each in listed if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    names = list(dict.fromkeys([*(name for name in names if name != "self"), *more]))
    label = called.__qualname__.removesuffix(".__init__")

    @wraps(called)
    def call(*args: Any, **keywords: Any) -> Any:
        for name in keywords:
            if name not in names:
                nearest = "".join(f" (nearest: {near})" for near in get_close_matches(name, names, n=1))
                raise TypeError(f"{label} has no keyword {name}{nearest}; its keywords are {', '.join(names)}")
        return called(*args, **keywords)

    return cast(_Called, call)
