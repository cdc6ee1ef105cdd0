"""Keeps the memory of steps on a CPU from one step to the next."""

from __future__ import annotations

import ctypes
import sys

import jax

__all__ = ["keep_memory_of_steps"]

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # of glibc's malloc.h
_MOST_KEPT_BYTES = 2**31 - 1  # at the end of the heap; an int
_HEAP_BYTES = 2**26  # of a thread; glibc gives back an empty one unless so much is kept free


def keep_memory_of_steps() -> None:
    """Steps on one CPU device reuse the memory of earlier steps.

    By default the operating system maps the temporary memory of a program again for every call, with a fault for each
    page. Here freed memory stays with the process, up to 2 GiB. This changes the whole process: from then on, a call of
    a step waits for its end. Call it before anything touches a device. Without glibc only the waiting changes.
    """
    # glibc keeps large memory for the main thread alone. So steps run in the thread that calls them.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES)
        mallopt(_M_TOP_PAD, _HEAP_BYTES)
