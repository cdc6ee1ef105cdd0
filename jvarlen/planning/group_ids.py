"""Samples that share a step: which ones belong together, and where they stand in an order.

Letters: N samples, n of them in an order, Q group ids among these.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from jaxtyping import Int64, Shaped

from jvarlen._common.checks import UserError, list_offenders, offenders_where
from jvarlen.planning.order import stable_argsort

__all__ = ["GroupIds", "check_shared_steps"]

_WIDE = 8  # group ids up to this many times the samples number a table as they are


class GroupIds:
    """The group ids of all samples; samples of one group id share a step."""

    def __init__(self, group_ids: npt.ArrayLike, num_samples: int):
        values = _check_integers(group_ids, num_samples)
        refused = (values < 0) | (values > np.iinfo(np.int64).max)
        if refused.any():
            listed = list_offenders(*offenders_where(refused, values))
            raise UserError(
                "group_ids must be from 0 to 2**63 - 1, and a sample that belongs to no others has one of its own: "
                f"{listed}"
            )
        self.of_samples: Int64[np.ndarray, " N"] = values.astype(np.int64)
        self._numbers = _numbers_of(self.of_samples)

    def bring_together(self, ids: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Samples in an order, in which all of a group id come where its first one came."""
        numbers = self._numbers[ids]
        first = np.empty(int(numbers.max()) + 1, np.int64)
        first[numbers[::-1]] = np.arange(len(ids) - 1, -1, -1)  # the first place is written last, and stays
        return ids[stable_argsort(first[numbers])]

    def offsets(self, ids: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " Q_plus_1"]:
        """The samples before those of each group id, where they come together."""
        begins = np.flatnonzero(np.diff(self.of_samples[ids])) + 1
        return np.concatenate([[0], begins, [len(ids)]])


def check_shared_steps(
    group_ids: Int64[np.ndarray, " N"],
    sample_ids: Int64[np.ndarray, " n"],
    step_offsets: Int64[np.ndarray, " S_plus_1"],
) -> None:
    """Raises ValueError where samples of one group id are in several steps, or a sample has no group id."""
    if len(group_ids) <= sample_ids.max() or group_ids.min() < 0:
        raise UserError("group_ids must be at least 0, one for every sample")
    numbers, step = (
        _numbers_of(group_ids)[sample_ids],
        np.repeat(np.arange(len(step_offsets) - 1), np.diff(step_offsets)),
    )
    last = np.empty(int(numbers.max()) + 1, np.int64)
    last[numbers] = step
    if (apart := last[numbers] != step).any():
        listed = list_offenders(np.unique(group_ids[sample_ids[apart]]), name="group id")
        raise UserError(f"samples of one group id are in several steps: {listed}")


def _check_integers(group_ids: npt.ArrayLike, num_samples: int) -> Shaped[np.ndarray, " N"]:
    values = np.asarray(group_ids)
    if values.shape != (num_samples,) or values.dtype.kind not in "iu":
        raise UserError(
            f"group_ids must be {num_samples:,} integers, one a sample, not {values.dtype} of shape {values.shape}"
        )
    return values


def _numbers_of(group_ids: Int64[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
    """Small numbers that are equal where group ids are."""
    if group_ids.max() < _WIDE * len(group_ids):
        return group_ids
    return np.unique(group_ids, return_inverse=True)[1]
