"""Chooses the static shapes of a dataset, for samples of one length or of several."""

from __future__ import annotations

from typing import Any, Unpack

import numpy.typing as npt

from jvarlen._common.checks import UserError
from jvarlen.planning.buckets import Buckets, choose_buckets
from jvarlen.planning.budget import Budget, BudgetFields, as_budget, takes_budget
from jvarlen.planning.lengths import Overlong, check_sample_lengths
from jvarlen.planning.several_lengths import choose_joint_buckets

__all__ = ["make_buckets"]


@takes_budget
def make_buckets(
    lengths: npt.ArrayLike,
    max_tokens: int | Budget,
    *,
    counts: npt.ArrayLike | None = None,
    max_candidates: int | None = None,
    overlong: Overlong = "error",
    **budget: Unpack[BudgetFields],
) -> Buckets[Any]:
    """Chooses the static shapes for a dataset.

    `"optimal"` finds the cheapest of all sets of rounded lengths; of D > 5,000, of every ⌈D / 5,000⌉-th.

    For samples of several lengths, two families of sets are searched, each exactly by dynamic programming; the set that
    costs least wins. In a chain, all lengths grow from bucket to bucket, which suits lengths that grow together. In a
    nested set, the first length cuts the samples into classes, in each of which the second cuts anew, and so on, which
    suits hardly correlated lengths.

    Args:
      lengths: integers[N], tokens per sample. Or integers[N, D], D ≥ 2 lengths per sample, such as source and target,
        or frames, height and width; all but the first may be 0.
      max_tokens: budget of one microbatch in tokens, padding included: rows × length never exceeds it, or for several
        lengths rows × `size`. Or a `Budget`.
      counts: integers[N], how many samples have each of the `lengths`, one a sample, which then are a histogram; None
        means one each.
      max_candidates: how many of each of several lengths are tried: the best ones for that length alone. None: the most
        with n**D ≤ 4,096, which is 64 of two lengths and 16 of three. Time grows with n**(2 D), and with the square of
        the number of distinct lengths, which `length_multiple` lowers.
      overlong: how samples above `max_length` count here: `"error"` raises, `"drop"` leaves them out, `"truncate"`
        counts them as cut to it, which samples of several lengths cannot be. Pass the same to `make_plan`.
      budget: the other fields of `Budget`, as keywords: `max_shapes`, `strategy`, `cost` and so on. Several lengths
        have no other `strategy` than `"optimal"`, no `max_cost` and no `memory`; `max_length` is that of each.

    Returns:
      `Buckets`, whose `shapes` are a tuple of `Bucket`, lengths strictly ascending; the last holds the longest sample.
      For several lengths it is one of `MultiLengthBucket`, ascending by their first length, then their second, and so
      on. A bucket without samples (possible with given lengths, `"geometric"` and `"powers_of_two"`) has as many rows
      as the budget allows. They know M, their `num_microbatches`, and `size`, which `make_plan` takes from them.

    Raises:
      ValueError: arguments that are not as described; samples above the budget are listed as id, value, limit.

    Warns:
      UserWarning: buckets more than twice as large as all that a `CostModel` of the budget was measured with.

    Example:
      >>> make_buckets([3, 4, 4, 9, 16], max_tokens=32, max_shapes=2).shapes
      (Bucket(rows=3, length=4), Bucket(rows=2, length=16))
      >>> list(map(str, make_buckets([[3, 9], [3, 4], [8, 8], [2, 4]], 32, max_shapes=3).shapes))
      ['2×(3, 4)', '1×(3, 9)', '1×(8, 8)']
      >>> videos = [[8, 3, 4], [16, 3, 4], [8, 6, 2], [16, 6, 2]]
      >>> list(map(str, make_buckets(videos, 400, max_shapes=3, size="product").shapes))
      ['2×(16, 3, 4)', '2×(16, 6, 2)']

    References:
      Dynamic programming over sorted lengths: Wang and Song 2011, "Ckmeans.1d.dp"; a cluster costs its padded steps.
      Two-dimensional buckets for translation: Tensor2Tensor and lhotse, whose boundaries are quantiles.
    """
    checked, limits = check_sample_lengths(lengths), as_budget(max_tokens, budget)
    if checked.ndim == 1:
        if max_candidates is not None:
            raise UserError(f"max_candidates ({max_candidates}) is for samples of several lengths; these have one")
        return choose_buckets(checked, limits, overlong, counts)
    if counts is not None:
        raise UserError("counts are of samples of one length: give one row of lengths for each sample of several")
    return choose_joint_buckets(checked, limits, overlong, max_candidates)
