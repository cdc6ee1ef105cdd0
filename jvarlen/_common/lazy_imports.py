"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["lazy_imports"]


def lazy_imports(
    package: str, names_of: Mapping[str, Sequence[str]], is_module: Callable[[str], bool] = lambda name: False
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`.

    Args:
      package: its `__name__`.
      names_of: the names of each module, such as `planning.plan`.
      is_module: whether any other name is that of a module, which is then imported.
    """
    module_of = {name: module for module, names in names_of.items() for name in names}

    def find(name: str) -> Any:
        if name in module_of:
            return getattr(importlib.import_module(f"jvarlen.{module_of[name]}"), name)
        if is_module(name):
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return find, list_names
