"""Groups of a step: which of its rows share microbatches of which bucket.

Letters: n rows, D lengths of each, K buckets.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torch_ref.planning.buckets import Buckets

__all__ = ["Group", "group_rows"]


class Group(NamedTuple):
    """The bucket of a group, and the places of its rows in the step, ascending."""

    bucket: int
    places: NDArray[np.int64]


def group_rows(lengths: NDArray[np.int64], sizes: NDArray[np.int64], buckets: Buckets) -> list[Group]:
    """Put the rows of a step into groups, by ascending bucket, those of one bucket as they are opened.

    From the longest buckets down, rows whose first bucket has that length fill groups of the most rows; what is left of
    them goes into one of the least rows that hold it. Its free rows take the largest rows of other lengths that fit,
    among equals the first.

    Args:
        lengths: int64[n, D] of the rows in the order of the step. Some bucket holds each.
        sizes: int64[n], what each counts.
        buckets: the shapes, with M. Those of one length differ in their rows.

    Returns:
        The groups. Each row is in one of them.
    """
    shapes = np.array(buckets.shapes, dtype=np.int64)
    capacity, limits = shapes[:, 0] * buckets.num_microbatches, shapes[:, 1:]
    fits_nxK = np.all(lengths[:, None] <= limits, axis=2)
    _, starts, level_of_bucket = np.unique(limits, axis=0, return_index=True, return_inverse=True)
    level = level_of_bucket.reshape(-1)[fits_nxK.argmax(axis=1)]
    largest_first = np.argsort(-sizes, kind="stable")
    is_left = np.ones(len(level), dtype=np.bool_)
    groups: list[Group] = []
    for number, start in reversed([*enumerate(starts.tolist())]):
        rest = np.flatnonzero(is_left & (level == number))
        is_left[rest] = False
        of_level = capacity[start : starts[number + 1] if number + 1 < len(starts) else None]
        while len(rest) >= of_level[-1]:
            groups.append(Group(start + len(of_level) - 1, rest[: of_level[-1]]))
            rest = rest[of_level[-1] :]
        if len(rest):
            bucket = start + int(np.searchsorted(of_level, len(rest)))
            fit = largest_first[(is_left & fits_nxK[:, bucket])[largest_first]]
            more = fit[: capacity[bucket] - len(rest)]
            is_left[more] = False
            groups.append(Group(bucket, np.sort(np.concatenate([rest, more]))))
    return sorted(groups, key=lambda group: group.bucket)
