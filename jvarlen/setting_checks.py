"""Checks of settings: in go a dataclass and names of fields, out comes nothing, or an error that lists the wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

__all__ = ["check_above", "check_at_least", "check_fraction", "check_setting"]


def check_at_least(config: object, limit: int, *names: str) -> None:
    """Raises ValueError for fields below `limit` or infinite; None is left alone."""
    wanted = f"finite and at least {limit}"
    check_setting(config, names, lambda value: value is None or limit <= value < math.inf, wanted)


def check_above(config: object, limit: int, *names: str) -> None:
    """Raises ValueError for fields that are not above `limit`, or infinite."""
    check_setting(config, names, lambda value: limit < value < math.inf, f"finite and above {limit}")


def check_fraction(config: object, *names: str) -> None:
    """Raises ValueError for fields that are not at least 0 and below 1."""
    check_setting(config, names, lambda value: 0 <= value < 1, "at least 0 and below 1")


def check_setting(config: object, names: tuple[str, ...], holds: Callable[[Any], bool], wanted: str) -> None:
    """Raises ValueError that lists the fields for which `holds` does not hold."""
    wrong = [f"{name} ({getattr(config, name)!r})" for name in names if not holds(getattr(config, name))]
    if wrong:
        raise ValueError(f"must be {wanted}: {', '.join(wrong)}")
