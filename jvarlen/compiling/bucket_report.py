"""What reports of buckets share: rows and figures of all of them, as a table, as JSON and back.

It imports no JAX: a saved report can be read on a machine without devices.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from jvarlen._common.checks import UserError, is_integer, is_number
from jvarlen._common.files import read_object, write_atomically
from jvarlen.planning.buckets import AnyBucket, Bucket, PairBucket, check_buckets

__all__ = ["UNKNOWN", "BucketReport", "Column", "figure_text", "table_of"]

UNKNOWN = "–"
_Row = TypeVar("_Row")


class BucketReport(tuple[_Row, ...]):
    """Rows of buckets, a frozen dataclass each, with figures of all of them as attributes."""

    _what: ClassVar[str]  # it is, in messages
    _format: ClassVar[int]  # of the file
    _row_type: ClassVar[type]
    # Follow from the fields; in the file for those who read it by other means.
    _derived: ClassVar[tuple[str, ...]] = ()
    _derived_of_row: ClassVar[tuple[str, ...]] = ()

    def __getnewargs__(self) -> tuple[Any, ...]:
        """What `__new__` takes, for copies and pickles."""
        return tuple(self), *vars(self).values()

    def to_json(self) -> str:
        """All rows as JSON, with the figures that follow from them; unknown figures are null."""
        rows = [vars(row) | {name: getattr(row, name) for name in self._derived_of_row} for row in self]
        of_all = vars(self) | {name: getattr(self, name) for name in self._derived}
        return json.dumps(_plain({"format": self._format, **of_all, "rows": rows}), indent=2, allow_nan=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_json` to a file, atomically.

        Args:
          path: the file; its directory must exist, and an existing file is replaced.

        Raises:
          OSError: it cannot be written; an existing file stays.
        """
        with write_atomically(Path(path)) as file:
            file.write(self.to_json().encode() + b"\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads what `save` wrote.

        Args:
          path: the file.

        Returns:
          A report of the same rows.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: it holds no such report; the message says what is wrong.
        """
        document = read_object(Path(path), f"holds no {cls._what}")
        try:
            if (found := document.pop("format")) != cls._format:
                raise UserError(f"its format is {found}, and this version of jvarlen reads {cls._format}")
            rows = [_without(row, cls._derived_of_row) for row in document.pop("rows")]
            of_all, hints = _without(document, cls._derived), _hints(cls)
            figures = {name: _built(of_all[name], hints[name], name) for name in hints}
            return cls([_built(row, cls._row_type, "row") for row in rows], **figures)
        except (ValueError, LookupError, TypeError, OverflowError) as error:
            problem = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise UserError(f"{path} holds no {cls._what}: {problem}") from error


def _without(fields: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in dict(fields).items() if name not in names}


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {name: hint for name, hint in hints.items() if typing.get_origin(hint) is not ClassVar}


def _plain(value: Any) -> Any:
    """A value as JSON holds it: buckets as lists, other dataclasses and named tuples as objects, NaN as null."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, Bucket | PairBucket):
        return list(value)
    if dataclasses.is_dataclass(value):
        value = vars(value)
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value


_HOLDS: dict[Any, Callable[[Any], bool]] = {
    float: lambda value: is_number(value) and not (is_integer(value) and abs(value) >= 2**63),
    int: lambda value: is_integer(value) and 0 <= value < 2**63,
    bool: lambda value: isinstance(value, bool),
    str: lambda value: isinstance(value, str),
}


def _built(value: Any, hint: Any, name: str) -> Any:
    """What a field of this type holds, from JSON; raises an error where it cannot hold that."""
    parts = typing.get_args(hint)
    if hint == AnyBucket:
        return check_buckets([value])[0]
    if type(None) in parts:
        return None if value is None else _built(value, parts[0], name)
    if hint is float and value is None:
        return math.nan
    if hint in _HOLDS:
        if not _HOLDS[hint](value):
            raise UserError(f"{name} is {value!r}")
        return value
    if parts and issubclass(typing.get_origin(hint), Mapping):
        return {_built(key, parts[0], name): _built(each, parts[1], name) for key, each in value.items()}
    if parts:
        return tuple(_built(each, parts[0], name) for each in value)
    if not (dataclasses.is_dataclass(hint) or hasattr(hint, "_fields")):  # a tuple of rows that has a name
        return hint(_built(value, hint.__orig_bases__[0], name))
    hints = _hints(hint)
    if unknown := sorted(dict(value).keys() - hints.keys()):
        raise UserError(f"{name} has unknown {', '.join(unknown)}")
    return hint(**{each: _built(of_each, hints[each], each) for each, of_each in dict(value).items()})


def figure_text(figure: float | str | None, unit: float = 1.0) -> str:
    """A number of units with three digits, or all of those before the point; text as it is."""
    if isinstance(figure, str):
        return figure
    if figure is None or math.isnan(figure):
        return UNKNOWN
    scaled = figure / unit
    return f"{scaled:,.0f}" if abs(scaled) >= 100 else f"{scaled:.3g}"


class Column(NamedTuple):
    """A column of a table of rows."""

    header: str
    of_row: Callable[[Any], float | str | None]
    unit: float = 1.0
    of_all: Callable[[Sequence[Any]], float | str] | None = None  # most figures have no meaningful sum

    def cells(self, rows: Iterable[Any]) -> list[str]:
        """The text of each row."""
        return [figure_text(self.of_row(row), self.unit) for row in rows]


def table_of(rows: Sequence[Any], *columns: Column) -> list[tuple[str, ...]]:
    """The headers, and the cells of each row."""
    return list(zip(*([column.header, *column.cells(rows)] for column in columns), strict=True))
