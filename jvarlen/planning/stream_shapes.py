"""The static shapes of a stream, chosen for its first samples.

Letters: n samples, K buckets.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from jvarlen._common.checks import UserError
from jvarlen.planning.buckets import AnyBucket, Buckets
from jvarlen.planning.budget import Budget, broken_by_one_row, bucket_costs, round_caps
from jvarlen.planning.lengths import check_sample_lengths, row_sizes
from jvarlen.planning.make_buckets import make_buckets
from jvarlen.planning.order import Order
from jvarlen.planning.row_lengths import choose_packed_buckets
from jvarlen.planning.rules import PlanRules, SamplesPerRow
from jvarlen.planning.stream_steps import StreamLength

__all__ = ["estimate_buckets", "estimate_packed_buckets"]


def estimate_buckets(first: Sequence[StreamLength], budget: Budget) -> Buckets[AnyBucket]:
    """Lengths as the first samples want them; rows as the budget allows, for nobody knows how many samples follow."""
    lengths = check_sample_lengths(first)
    # The rule of the stream for long samples comes when it is read.
    if lengths.ndim == 2:
        shapes = make_buckets(lengths, budget, overlong="drop").shapes
        return _with_all_rows([bucket.lengths for bucket in shapes], budget)
    longest = None if budget.max_length is None else budget.of_length().round_lengths(budget.max_length)
    if longest is not None and budget.row_caps(np.array([longest]))[0] < 1:
        raise UserError(f"{broken_by_one_row(budget, longest)} leaves no row for max_length, {longest} tokens")
    chosen = [bucket.length for bucket in make_buckets(lengths, budget, max_length=longest, overlong="truncate").shapes]
    if longest is not None and chosen[-1] < longest:
        chosen = _extend(chosen, longest, lengths, budget)
    return _with_all_rows([(length,) for length in chosen], budget)


def estimate_packed_buckets(
    first: Sequence[StreamLength], budget: Budget, samples_per_row: SamplesPerRow | None
) -> tuple[Buckets[AnyBucket], tuple[int, ...]]:
    """The buckets of packed rows, with all rows that the budget allows, and the most samples of a row of each."""
    rules = PlanRules(Order("dataset"), overlong="truncate", packing="best_fit", samples_per_row=samples_per_row)
    buckets, packing = choose_packed_buckets(check_sample_lengths(first), budget, rules)
    row_lengths = [bucket.lengths for bucket in buckets.shapes]
    return _with_all_rows(row_lengths, budget), packing.samples_per_row(row_lengths)


def _with_all_rows(row_lengths: Sequence[tuple[int, ...]], budget: Budget) -> Buckets[AnyBucket]:
    """Buckets of these lengths with as many rows as the budget allows."""
    lengths = np.array(row_lengths, np.int64)
    if lengths.shape[1] == 1:
        rows = budget.row_caps(lengths[:, 0])
    else:
        rows = round_caps(budget, budget.max_tokens // row_sizes(lengths, budget.size))
    return Buckets(np.column_stack([rows, lengths]).tolist(), budget.num_microbatches, budget.size)


def _extend(lengths: list[int], longest: int, first: Int64[np.ndarray, " n"], budget: Budget) -> list[int]:
    """Bucket lengths up to `longest`: it takes the place of the last, or follows fewer ones, whichever costs least."""
    if budget.given_lengths is not None:
        return [*lengths, longest]
    replaced = [*lengths[:-1], longest]
    if budget.max_shapes == 1 or budget.strategy == "pad_to_max":
        return replaced
    fewer = make_buckets(first, budget, max_shapes=budget.max_shapes - 1, max_length=longest, overlong="truncate")

    def cost_of_first(lengths: list[int]) -> float:
        bucket_lengths = np.array(lengths)
        num_held = np.bincount(np.searchsorted(bucket_lengths, first), minlength=len(lengths))
        return sum(bucket_costs(budget, num_held, budget.row_caps(bucket_lengths), bucket_lengths).tolist())

    with_longest = [*(bucket.length for bucket in fewer.shapes), longest]
    return min(replaced, with_longest, key=cost_of_first)  # if equal, the fewer
