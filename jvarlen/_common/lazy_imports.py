"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["lazy_imports"]


def lazy_imports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package: the names that its `if TYPE_CHECKING:` imports, and its modules."""

    @functools.cache
    def module_of() -> dict[str, str]:
        blocks = (node for node in ast.parse(inspect.getsource(sys.modules[package])).body if isinstance(node, ast.If))
        imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
        return {alias.name: node.module or "" for node in imports for alias in node.names}

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if name in module_of():
            return getattr(importlib.import_module(module_of()[name]), name)
        if importlib.util.find_spec(f"{package}.{name}"):
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find, lambda: sorted({*vars(sys.modules[package]), *module_of()})
