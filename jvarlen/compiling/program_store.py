"""JAX's persistent cache of compiled programs: the only setting that compiling changes for the whole process."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jvarlen._common.keywords import check_keywords
from jvarlen.compiling.compile_options import default_compilation_cache

__all__ = ["use_compilation_cache", "without_compilation_cache"]

# JAX's limits, and those that keep every program: (setting, JAX's default, new value).
_LIMITS = (
    ("jax_persistent_cache_min_compile_time_secs", 1.0, 0.0),
    ("jax_persistent_cache_min_entry_size_bytes", 0, -1),
)

_switching = threading.RLock()  # two that switch the cache off one into the other would leave it off
_own_setting: str | None = None  # the directory that was set here, not by the user


@check_keywords
def use_compilation_cache(directory: str | os.PathLike[str] | None = None) -> None:
    """Keeps all compiled programs in JAX's persistent compilation cache, also those that compile fast.

    This sets JAX for the whole process, from now on. Settings of the user stay: a cache that is switched off
    (`jax_enable_compilation_cache`), the directory (`jax_compilation_cache_dir`; a warning says so), and limits
    (`jax_persistent_cache_min_compile_time_secs`, `jax_persistent_cache_min_entry_size_bytes`).

    Args:
      directory: created if missing, for this user alone; without it, if that fails, with a warning. Its programs are
        run: whoever can write to it is trusted. None takes that of an earlier call, or else the user's cache.
    """
    global _own_setting
    settings: Any = jax.config  # whose attributes are made while JAX is imported
    if not settings.jax_enable_compilation_cache:
        return
    default = default_compilation_cache()
    wanted = Path(directory or default).expanduser().absolute()  # JAX opens it later, maybe from elsewhere
    chosen = settings.jax_compilation_cache_dir
    if chosen is None or (chosen == _own_setting and wanted != default):
        try:
            wanted.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
        except OSError as error:
            warnings.warn(f"compiled programs are not cached: {error}", stacklevel=3)
            return
        if chosen != str(wanted):
            _own_setting = str(wanted)
            settings.update("jax_compilation_cache_dir", _own_setting)
            reset_cache()  # JAX keeps the directory, or the lack of one, that it found first
    elif wanted not in (default, Path(chosen).absolute()):
        warnings.warn(f"compiled programs are cached in {chosen} by JAX's setting, not in {wanted}", stacklevel=3)
    for name, usual, lowest in _LIMITS:
        if getattr(settings, name) == usual:
            settings.update(name, lowest)


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
