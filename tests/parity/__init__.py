"""One body of contract tests over every package that implements the contract."""

import importlib
import os
from types import ModuleType
from typing import Any

# All packages are required: one that cannot be imported fails its tests. Naming fewer in PARITY_PACKAGES is for the
# time when one of them is still being written.
PACKAGES = tuple(os.environ.get("PARITY_PACKAGES", "jvarlen,torch_ref").split(","))


def find(package: ModuleType, name: str) -> Any:
    """A name of the planning part, which `jvarlen` has at the top or in its package of that name."""
    if package.__name__ != "jvarlen" or name in package.__all__:
        return getattr(package, name)
    return getattr(importlib.import_module("jvarlen.planning"), name)
