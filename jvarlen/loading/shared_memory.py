"""Checks that a worker's step fits into /dev/shm."""

from __future__ import annotations

import os

import jax
import numpy as np

from jvarlen.loading.plan_source import ReadStep

__all__ = ["check_room", "describe_room"]

_DIRECTORY = "/dev/shm"
_PAGE_BYTES = 4096
_MOST_STEPS = 10  # of a worker: those in Grain's two buffers of 4, one that is written, and one that is taken


def check_room(step: ReadStep) -> ReadStep:
    """Checks in a worker process that the arrays of a step fit into shared memory, and returns the step.

    The kernel grants more memory than there is, and then kills the process that writes to it.

    Raises:
      RuntimeError: they do not fit.
    """
    arrays = [leaf for leaf in jax.tree.leaves(step) if isinstance(leaf, np.ndarray)]
    needed_bytes = sum(-(-array.nbytes // _PAGE_BYTES) * _PAGE_BYTES for array in arrays)
    free_bytes, total_bytes = _room()
    if total_bytes and needed_bytes > free_bytes:
        raise RuntimeError(f"step {step.step} needs {needed_bytes:,} bytes of shared memory: {describe_room()}")
    return step


def describe_room() -> str:
    """How much room there is, and what to do if that is too little."""
    free_bytes, total_bytes = _room()
    return (
        f"{_DIRECTORY} has {free_bytes:,} of {total_bytes:,} bytes free. Make it larger (docker: --shm-size), to hold "
        f"{_MOST_STEPS} steps a worker, or load with num_workers=0, which needs none of it"
    )


def _room() -> tuple[int, int]:
    """Free and total bytes; a total of 0 where there is no limit, or no such directory."""
    try:
        room = os.statvfs(_DIRECTORY)
    except OSError:
        return 0, 0
    return room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
