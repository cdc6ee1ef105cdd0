"""Groups of a step: which of its rows share microbatches of which bucket.

Letters: n rows, D lengths of each, K buckets.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torch_ref.planning.buckets import Buckets

__all__ = ["Group", "Rows", "group_rows"]


class Rows(NamedTuple):
    """The rows of a step, each a sample or several.

    Attributes:
        lengths: int64[n, D].
        sizes: int64[n], what each counts.
        num_samples: int64[n], the samples of each.
    """

    lengths: NDArray[np.int64]
    sizes: NDArray[np.int64]
    num_samples: NDArray[np.int64]


class Group(NamedTuple):
    """The bucket of a group, and the places of its rows in the step, ascending."""

    bucket: int
    places: NDArray[np.int64]


def group_rows(rows: Rows, buckets: Buckets, samples_per_row: NDArray[np.int64]) -> list[Group]:
    """Put the rows of a step into groups, by ascending bucket, those of one bucket as they are opened.

    From the longest buckets down, rows whose first bucket has that length fill groups of the most rows; what is left of
    them goes into one of the least rows that hold it. Its free rows take the largest rows of other lengths that fit,
    among equals the first.

    Args:
        rows: of the step, in order. Some bucket holds each.
        buckets: the shapes, with M. Those of one length differ in their rows.
        samples_per_row: int64[K], the most samples of a row of each bucket.

    Returns:
        The groups. Each row is in one of them.
    """
    shapes = np.array(buckets.shapes, dtype=np.int64)
    capacity, limits = shapes[:, 0] * buckets.num_microbatches, shapes[:, 1:]
    fits_nxK = np.all(rows.lengths[:, None] <= limits, axis=2) & (rows.num_samples[:, None] <= samples_per_row)
    _, starts, level_of_bucket = np.unique(limits, axis=0, return_index=True, return_inverse=True)
    level = level_of_bucket.reshape(-1)[fits_nxK.argmax(axis=1)]
    largest_first = np.argsort(-rows.sizes, kind="stable")
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
