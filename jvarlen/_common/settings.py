"""Settings: dataclasses whose values are checked by the types of their fields."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import os
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Union

import numpy as np

from jvarlen._common.checks import UserError, is_integer, is_number

__all__ = ["WRONG", "Settings", "plain_value"]

WRONG = object()
_NAMES = {int: "an integer", float: "a number", bool: "True or False", str: "a text", Path: "a path"}


class Settings:
    """The base of dataclasses of settings. Their `__post_init__` begins with this one.

    Values become plain, so that equal settings compare equal: iterables become tuples, texts paths where a path is
    wanted, and NumPy's numbers Python's.

    Raises:
      ValueError: lists the fields whose values are of another type, with the right types.
    """

    def __post_init__(self):
        cls: Any = type(self)
        wrong = []
        for name, kind in _kinds(cls).items():
            given = getattr(self, name)
            if (plain := plain_value(given, kind)) is WRONG:
                wrong.append(f"{name} ({given!r}) must be {_in_words(kind)}")
            elif plain is not given:
                object.__setattr__(self, name, plain)
        if wrong:
            raise UserError("; ".join(wrong))


@functools.cache
def _kinds(cls: Any) -> dict[str, Any]:
    """The types of the fields."""
    kinds = typing.get_type_hints(cls)
    return {field.name: kinds[field.name] for field in dataclasses.fields(cls)}


def plain_value(value: Any, kind: Any) -> Any:
    """The value as one of this type, or `WRONG`. A value of any other class is not converted."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return next((plain for each in args if (plain := plain_value(value, each)) is not WRONG), WRONG)
    if origin is Literal:
        return value if isinstance(value, str) and value in args else WRONG
    if origin in (tuple, collections.abc.Sequence):
        return _plain_tuple(value, args)
    if origin is collections.abc.Callable:
        return value if callable(value) else WRONG
    if kind is bool:
        return bool(value) if isinstance(value, bool | np.bool_) else WRONG
    if kind is int:
        return int(value) if is_integer(value) else WRONG
    if kind is float:
        return (value.item() if isinstance(value, np.generic) else value) if is_number(value) else WRONG
    if kind is Path:
        return Path(value) if isinstance(value, str | os.PathLike) else WRONG
    return WRONG if isinstance(kind, type) and not isinstance(value, kind) else value


def _plain_tuple(value: Any, args: tuple[Any, ...]) -> Any:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return WRONG
    values = tuple(value)
    kinds = args if _is_fixed(args) else args[:1] * len(values)
    if len(kinds) != len(values):
        return WRONG
    plain = tuple(map(plain_value, values, kinds))
    return WRONG if any(each is WRONG for each in plain) else plain


def _is_fixed(args: tuple[Any, ...]) -> bool:
    """Whether these are the types of a tuple with a fixed number of values."""
    return len(args) > 1 and args[1] is not Ellipsis


def _in_words(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_in_words, args))
    if origin is Literal:
        return ("one of " if args[1:] else "") + ", ".join(map(repr, args))
    if origin in (tuple, collections.abc.Sequence):
        listed = f"of {' and '.join(map(_in_words, args))}" if _is_fixed(args) else f"each {_in_words(args[0])}"
        return f"a sequence, {listed}"
    if origin is collections.abc.Callable:
        return "a function"
    name = "None" if kind is types.NoneType else str(getattr(kind, "__name__", kind))
    article = "an" if name[0] in "AEIOU" else "a"
    return name if kind is types.NoneType else _NAMES.get(kind, f"{article} {name}")
