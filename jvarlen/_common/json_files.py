"""Frozen dataclasses as JSON files that users write or keep."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, TypeVar

import dacite

from jvarlen._common.checks import UserError, is_integer, list_first
from jvarlen._common.files import write_atomically

__all__ = ["load_dataclass", "save_dataclass"]

_T = TypeVar("_T")


def save_dataclass(value: Any, path: str | os.PathLike[str]) -> None:
    """Writes the fields, atomically; an existing file is replaced, or stays if that fails."""
    with write_atomically(Path(path)) as file:
        file.write(json.dumps(dataclasses.asdict(value), indent=2).encode() + b"\n")


def load_dataclass(cls: type[_T], path: str | os.PathLike[str], what: str) -> _T:
    """Reads what `save_dataclass` wrote, or a user.

    Args:
      cls: the dataclass.
      path: the file.
      what: its name in messages, such as `"cost model"`.

    Returns:
      An instance. Integers are taken where fields are floats.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: unknown or missing keys, or values that are not valid; the message says which.
    """
    try:
        given = json.loads(Path(path).read_text())
        fields = {field.name: field.type for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if unknown := sorted({*given} - {*fields}):
            raise UserError(f"unknown keys: {list_first(unknown)}")
        floats = {name: float(value) for name, value in given.items() if fields[name] == "float" and is_integer(value)}
        return dacite.from_dict(cls, given | floats, dacite.Config(cast=[tuple], strict=True))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {what} {path}") from None
    except (dacite.DaciteError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} holds no {what}: {error}") from error
