"""Work on an array by several threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

__all__ = ["in_parts"]

_MOST_THREADS = 4  # the work is bound by memory
_LEAST_PART = 2**19  # samples; starting a thread costs more than less work than that


def in_parts(work: Callable[[int, int], object], num_samples: int) -> None:
    """Calls `work(start, end)` for consecutive parts of 0 to `num_samples`, which touch nothing in common."""
    num_parts = max(1, min(_MOST_THREADS, os.cpu_count() or 1, num_samples // _LEAST_PART))
    cuts = [num_samples * part // num_parts for part in range(num_parts + 1)]
    if num_parts == 1:
        work(0, num_samples)
        return
    with ThreadPoolExecutor(num_parts) as threads:
        for done in [threads.submit(work, start, end) for start, end in pairwise(cuts)]:
            done.result()
