"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["lazy_imports"]


def lazy_imports(
    package: str, names_of: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package: the names of each module, such as `planning.plan`, and its modules."""
    module_of = {name: module for module, names in names_of.items() for name in names}

    def find(name: str) -> Any:
        if name in module_of:
            return getattr(importlib.import_module(f"jvarlen.{module_of[name]}"), name)
        if not name.startswith("__") and importlib.util.find_spec(f"{package}.{name}"):
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return find, list_names
