"""What stays of samples that are longer than the longest bucket."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from torch_ref.checks import INT64_MAX
from torch_ref.planning.order import random_keys

__all__ = ["WINDOWS", "begin_windows", "end_windows"]

WINDOWS = ("truncate_start", "truncate_random")  # "truncate" keeps beginnings
_FIRST_STREAM = 3  # a stream for each length of a sample


def begin_windows(
    overlong: str, ids: NDArray[np.int64], lengths: NDArray[np.int64], longest: Sequence[int], seed: int, epoch: int
) -> NDArray[np.int64] | None:
    """Return how many tokens are cut off before what stays of samples, shaped as their lengths.

    Args:
        overlong: the rule.
        ids: int64[n].
        lengths: int64[n] or int64[n, D], of these samples.
        longest: D lengths, above which they are cut.
        seed: as in `make_plan`.
        epoch: as in `make_plan`.

    Returns:
        int64[n] or int64[n, D]; None where the rule keeps all beginnings, or no sample is too long.
    """
    too_much = np.maximum(lengths - np.array(longest), 0)
    if overlong not in WINDOWS or not too_much.any():
        return None
    if overlong == "truncate_start":
        return too_much
    before = np.zeros_like(too_much)
    for side in range(len(longest)):
        of_side = (slice(None), side) if lengths.ndim == 2 else slice(None)
        is_cut = too_much[of_side] > 0
        if is_cut.any():
            first, last = int(ids[is_cut].min()), int(ids[is_cut].max())
            keys = random_keys(seed, epoch, first, last - first + 1, _FIRST_STREAM + side)[ids[is_cut] - first]
            # Python's integers, as a product can take 95 bits.
            drawn = keys.astype(object) * (too_much[of_side][is_cut].astype(object) + 1) // 2**32
            before[of_side][is_cut] = drawn.astype(np.int64)
    return before


def end_windows(overlong: str, starts: NDArray[np.int64], longest: Sequence[int]) -> NDArray[np.int64]:
    """Return where what stays of samples ends, or more: with the sample, or as far from the start as the longest."""
    if overlong == "truncate_start":
        return np.full_like(starts, INT64_MAX)
    limits = np.array(longest)
    return np.asarray(np.minimum(starts, INT64_MAX - limits) + limits)
