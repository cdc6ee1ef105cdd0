"""Windows: which part stays of a sample that is longer than the longest bucket.

Letters: N samples, n of them in order, m that are cut, D lengths of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from jvarlen.planning.lengths import PackedOverlong
from jvarlen.planning.order import random_keys
from jvarlen.planning.rules import PlanRules

__all__ = ["draw_starts", "is_window", "window_starts", "window_stops"]

_WINDOW_STREAM = 3  # of the first length; those of others follow
_LAST = np.iinfo(np.int64).max


def is_window(overlong: str) -> bool:
    """Whether a rule keeps another part of a sample than its beginning, or may."""
    return overlong in ("truncate_start", "truncate_random")


def window_starts(
    ids: Int64[np.ndarray, " n"], lengths: Int64[np.ndarray, " N *D"], longest: Sequence[int], rules: PlanRules
) -> Int64[np.ndarray, " n *D"] | None:
    """The token with which what stays of each sample begins; None by other rules, and where all samples stay whole."""
    if not is_window(rules.overlong):
        return None
    num_cut = np.maximum(lengths[ids] - np.array(longest), 0)
    if not num_cut.any():
        return None
    return num_cut if rules.overlong == "truncate_start" else draw_starts(ids, num_cut, rules.seed, rules.epoch)


def draw_starts(
    ids: Int64[np.ndarray, " n"], num_cut: Int64[np.ndarray, " n *D"], seed: int, epoch: int
) -> Int64[np.ndarray, " n *D"]:
    """Random windows of samples that lose so many tokens: ⌊key · (tokens + 1) / 2³²⌋, by a stream for each length."""
    starts = num_cut.copy()
    for side, of_side in enumerate(starts.reshape(len(ids), -1).T):  # a view
        places = np.flatnonzero(of_side)
        ids_of_cut = ids[places]
        first = int(ids_of_cut.min(initial=_LAST))
        num_keys = int(ids_of_cut.max(initial=-1)) + 1 - first
        keys = random_keys(max(num_keys, 0), seed=seed, epoch=epoch, start=first, stream=_WINDOW_STREAM + side)
        keys_of_cut = keys[ids_of_cut - first]
        high, low = np.divmod(of_side[places].astype(np.uint64) + np.uint64(1), np.uint64(2**32))
        of_side[places] = keys_of_cut * high + (keys_of_cut * low >> np.uint64(32))  # so that no product overflows
    return starts


def window_stops(
    starts: Int64[np.ndarray, ...], longest: Sequence[int], overlong: PackedOverlong
) -> Int64[np.ndarray, ...]:
    """The token before which what stays of each sample ends, at most."""
    if overlong == "truncate_start":  # the end of the sample: one that has become longer does not fit its bucket
        return np.full_like(starts, _LAST)
    return np.minimum(starts, _LAST - np.array(longest)) + np.array(longest)
