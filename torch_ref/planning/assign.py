"""Assigns ordered samples to buckets, with a rule for samples that fit into none."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_ref.checks import to_tensor
from torch_ref.planning.lengths import count_overlong, fit_lengths, list_several

__all__ = ["Items", "assign_buckets"]


class Items(NamedTuple):
    """What is cut into steps, in order: samples, or rows of a packing.

    `ids` int64[n], `num_tokens` int64[n], `bucket` int64[n]; and how many were left out or cut.
    """

    ids: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    bucket: Tensor
    num_dropped: int
    num_truncated: int


def assign_buckets(
    values: NDArray[np.int64],
    sizes: NDArray[np.int64],
    ids: NDArray[np.int64],
    buckets: Sequence[tuple[int, ...]],
    overlong: str,
) -> Items:
    """Find the first bucket that holds each ordered item, and apply the `overlong` rule to items that none holds.

    `values` are int64[N] in tokens, or int64[N, D] for several lengths; `sizes` int64[N] is what each counts, and `ids`
    int64[n] the order.
    """
    if values.ndim == 2:
        return _assign_several(values, sizes, ids, buckets, overlong)
    longest = buckets[-1][1]
    fitted = fit_lengths(values, ids, longest, overlong)
    bucket_lengths = torch.tensor([bucket[1] for bucket in buckets])
    bucket = torch.bucketize(to_tensor(fitted.lengths), bucket_lengths)
    return Items(fitted.sample_ids, fitted.lengths, bucket, fitted.num_dropped, fitted.num_truncated)


def _assign_several(
    values: NDArray[np.int64],
    sizes: NDArray[np.int64],
    ids: NDArray[np.int64],
    buckets: Sequence[tuple[int, ...]],
    overlong: str,
) -> Items:
    if overlong.startswith("truncate"):
        raise ValueError(f'overlong="{overlong}" is not for several lengths: pass "error" or "drop"')
    held = np.all(values[:, None] <= np.array(buckets)[:, 1:], axis=2)
    unheld = ~np.any(held[ids], axis=1)
    outside, kept = np.sort(ids[unheld]), ids[~unheld]
    counts = count_overlong(
        overlong,
        len(outside),
        len(ids),
        lambda: list_several(outside, values[outside]),
        name="in none of the buckets",
        allowing='"drop"',
    )
    return Items(kept, sizes[kept], to_tensor(held[kept].argmax(axis=1)), *counts)
