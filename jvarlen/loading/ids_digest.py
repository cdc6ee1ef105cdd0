"""A hash of the ids of the samples that were read, in order.

Letters: n samples of a step, m microbatches of a process.
"""

from __future__ import annotations

import hashlib

import numpy as np
from jaxtyping import Int64

from jvarlen.planning.steps import ReadPlan

__all__ = ["IdsDigest", "planned_ids_digest"]


class IdsDigest:
    """SHA-256 over the steps added so far: the number of each step, its number of samples and their ids, as int64."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256(b"jvarlen-ids-1\0")

    def add(self, step: int, ids: Int64[np.ndarray, " n"]) -> None:
        """Adds a step, whose samples were read in this order."""
        self._sha.update(np.array([step, len(ids)], "<i8").tobytes())
        self._sha.update(ids.astype("<i8", copy=False).tobytes())

    def hexdigest(self) -> str:
        """The digest as 64 hex digits; more steps can be added afterwards."""
        return self._sha.hexdigest()


def planned_ids_digest(
    plan: ReadPlan, microbatches: Int64[np.ndarray, " m"] | None = None, *, start_step: int = 0
) -> str:
    """The hash of the planned rows, which `BatchIterator.ids_digest` must equal at the end of an epoch.

    Args:
      plan: the plan of the epoch.
      microbatches: int64[m], the microbatches of this process, as from `own_microbatches`; None: all that the plan has.
      start_step: the step at which loading began.

    Returns:
      64 hex digits. Processes of one training have different digests, because each reads its own rows.

    Example:
      >>> from jvarlen.planning.plan import make_plan
      >>> plan = make_plan([3, 1, 4], [(2, 4)], order="length")
      >>> planned_ids_digest(plan) == planned_ids_digest(plan, start_step=1)
      False
    """
    digest = IdsDigest()
    for step in range(start_step, plan.num_steps):
        ids_MxB = plan.own_rows(step, microbatches).ids
        digest.add(step, ids_MxB[ids_MxB >= 0])
    return digest.hexdigest()
