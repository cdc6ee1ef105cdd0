"""Argument checks. Each raises one ValueError that lists the offending values.

NumPy only. An error shows the first few offenders and counts the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard, TypeVar, get_args

import numpy as np
from jaxtyping import Bool, Int64, Integer, Shaped

__all__ = [
    "NothingFitsError", "UserError", "check_above", "check_at_least", "check_at_least_one", "check_at_least_zero",
    "check_choices", "check_counts", "check_setting", "if_given", "is_integer", "is_number", "list_first",
    "list_offenders", "offenders_where",
]  # fmt: skip

_MAX_LISTED = 5

_T = TypeVar("_T")


class UserError(ValueError):
    """Input that jvarlen rejects. The command line prints its message without a traceback."""


UserError.__module__ = "jvarlen"  # its public name


class NothingFitsError(UserError):
    """No layout or rows fit into the memory. The command line ends with exit code 1."""


def check_at_least_one(**values: object) -> None:
    """Raises ValueError that lists the arguments which are not integers from 1 to 2**63 − 1."""
    _check_integers(1, values)


def if_given(**options: _T | None) -> dict[str, _T]:
    """The options that are not None, for a check of those that may be left out."""
    return {name: value for name, value in options.items() if value is not None}


def check_at_least_zero(**values: object) -> None:
    """Raises ValueError that lists the arguments which are not integers from 0 to 2**63 − 1."""
    _check_integers(0, values)


def _check_integers(least: int, values: Mapping[str, object]) -> None:
    wrong = [
        f"{name} ({value!r})" for name, value in values.items() if not is_integer(value) or not least <= value < 2**63
    ]
    if wrong:
        raise UserError(f"must be integers of at least {least} and below 2**63: {', '.join(wrong)}")


def check_choices(**choices: tuple[object, object]) -> None:
    """Raises ValueError that lists the arguments, name=(given, Literal), that the literal does not allow."""
    wrong = [
        f"{name} ({given!r}) must be one of {', '.join(map(repr, get_args(literal)))}"
        for name, (given, literal) in choices.items()
        if not isinstance(given, str) or given not in get_args(literal)
    ]
    if wrong:
        raise UserError("; ".join(wrong))


def is_integer(value: object) -> TypeGuard[int]:
    """Whether it is a Python or NumPy integer, and not a boolean."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a real Python or NumPy number, and not a boolean."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def list_first(items: Iterable[object], separator: str = ", ") -> str:
    """The first few items as text, and how many more there are."""
    texts = list(map(str, items))
    more = f" and {len(texts) - _MAX_LISTED:,} more" if len(texts) > _MAX_LISTED else ""
    return separator.join(texts[:_MAX_LISTED]) + more


def list_offenders(
    ids: Integer[np.ndarray, " n"],
    values: Shaped[np.ndarray, " n *axes"] | None = None,
    limit: object = None,
    *,
    name: str = "id",
) -> str:
    """The first few offenders, as id or as id and value, how many more there are, and the limit they exceed."""
    first = ids[:_MAX_LISTED].tolist()
    shown = [] if values is None else values[:_MAX_LISTED].tolist()
    listed = [f"{name} {i}: {tuple(v) if isinstance(v, list) else v}" for i, v in zip(first, shown, strict=False)]
    listed = listed or [f"{name} {i}" for i in first]
    more = f" and {len(ids) - _MAX_LISTED:,} more" if len(ids) > _MAX_LISTED else ""
    return ", ".join(listed) + more + ("" if limit is None else f" (limit {limit})")


def offenders_where(
    is_offender: Bool[np.ndarray, " N"], values: Shaped[np.ndarray, " N *axes"]
) -> tuple[Int64[np.ndarray, " n"], Shaped[np.ndarray, " n *axes"]]:
    """Ids and values of the offenders, for `list_offenders`."""
    return np.flatnonzero(is_offender), values[is_offender]


def check_at_least(config: object, limit: int, *names: str) -> None:
    """Raises ValueError for fields below `limit` or infinite; None is left alone."""
    wanted = f"finite and at least {limit}"
    check_setting(config, names, lambda value: value is None or limit <= value < math.inf, wanted)


def check_counts(config: object, least: int, *names: str) -> None:
    """Raises ValueError for fields that are not integers from `least` to 2**31 − 1; None is left alone."""
    wanted = f"integers from {least} to 2**31 - 1"
    check_setting(config, names, lambda value: value is None or (is_integer(value) and least <= value < 2**31), wanted)


def check_above(config: object, limit: int, *names: str) -> None:
    """Raises ValueError for fields that are not above `limit`, or infinite."""
    check_setting(config, names, lambda value: limit < value < math.inf, f"finite and above {limit}")


def check_setting(config: object, names: tuple[str, ...], holds: Callable[[Any], bool], wanted: str) -> None:
    """Raises ValueError that lists the fields for which `holds` is false."""
    wrong = [f"{name} ({getattr(config, name)!r})" for name in names if not holds(getattr(config, name))]
    if wrong:
        raise UserError(f"must be {wanted}: {', '.join(wrong)}")
