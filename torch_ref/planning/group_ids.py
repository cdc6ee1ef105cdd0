"""Samples that share a step: rollouts of a prompt, a query with its negatives.

Letters: N samples, n of them in order, S steps, Q group ids.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_ref.checks import INT64_MAX, as_array, list_offenders

__all__ = ["bring_together", "check_group_ids", "check_one_step_each", "ends_of_group_ids"]


def check_group_ids(group_ids: Any, lengths: Any) -> NDArray[np.int64]:
    """Return the group ids of samples of these lengths as int64[N]; a ValueError unless they are N integers >= 0."""
    values, wanted = np.asarray(group_ids), as_array("lengths", lengths).shape[:1]
    if values.shape != wanted or values.dtype.kind not in "iu":
        raise ValueError(f"group_ids must be integers of shape {wanted}, got {values.dtype} of shape {values.shape}")
    for wrong, limit in ((values < 0, 0), (values > INT64_MAX, INT64_MAX)):
        if wrong.any():
            listed = list_offenders(np.flatnonzero(wrong), values[wrong], limit)
            raise ValueError(
                f"group_ids must be from 0 to {INT64_MAX}; a sample of no group has an id of its own: {listed}"
            )
    return values.astype(np.int64)


def bring_together(ids: NDArray[np.int64], group_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ordered samples, int64[n], with all of a group id moved up to the first of them."""
    _, first, which = np.unique(group_ids[ids], return_index=True, return_inverse=True)
    return ids[np.argsort(first[which], kind="stable")]


def ends_of_group_ids(ids: NDArray[np.int64], group_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the places, int64[Q + 1], before, between and after the group ids of samples that are together."""
    is_other = np.concatenate([[True], group_ids[ids[1:]] != group_ids[ids[:-1]], [True]])
    return np.flatnonzero(is_other)


def check_one_step_each(
    group_ids: NDArray[np.int64], sample_ids: NDArray[np.int64], step_offsets: NDArray[np.int64]
) -> None:
    """Raise ValueError if a sample has no group id >= 0, or samples of one are in several steps."""
    if (group_ids < 0).any() or len(group_ids) <= sample_ids.max():
        raise ValueError(f"group_ids must be integers >= 0 for {sample_ids.max() + 1} samples, got {len(group_ids)}")
    steps = np.repeat(np.arange(len(step_offsets) - 1), np.diff(step_offsets))
    groups, first, which = np.unique(group_ids[sample_ids], return_index=True, return_inverse=True)
    apart = np.unique(which[steps != steps[first][which]])
    if len(apart):
        raise ValueError(f"group id {groups[apart[0]]} has samples in several steps")
