"""Compiling without JAX's persistent cache.

On a CPU, a program that was read from the cache loses its code when it is turned into bytes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

__all__ = ["without_compilation_cache"]

_switching = threading.RLock()  # two that switch the cache off one into the other would leave it off


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """A block in which every program is compiled and none is cached, in other threads too."""
    settings: Any = jax.config
    with _switching:
        before = settings.jax_enable_compilation_cache
        settings.update("jax_enable_compilation_cache", False)
        reset_cache()  # JAX remembers whether it uses one
        try:
            yield
        finally:
            settings.update("jax_enable_compilation_cache", before)
            reset_cache()
