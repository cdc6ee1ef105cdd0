"""The shapes of a stream, chosen for its first samples."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from torch_ref.checks import to_tensor
from torch_ref.planning.buckets import Buckets
from torch_ref.planning.budget import Budget, checked_costs
from torch_ref.planning.lengths import row_sizes
from torch_ref.planning.make_buckets import make_buckets
from torch_ref.planning.order import Order
from torch_ref.planning.packed_plan import count_shortest
from torch_ref.planning.packing import pack_samples
from torch_ref.planning.row_lengths import choose_packed_buckets
from torch_ref.planning.stream_packing import Lengths

__all__ = ["choose_packed_shapes", "choose_shapes"]


def choose_shapes(known: Sequence[Lengths], limits: Budget) -> Buckets:
    """Return the buckets for the first samples, one in each row, with as many rows as fit.

    With one length, the longest is as long as `max_length` says.
    """
    if known and len(known[0]) > 1:
        return _with_most_rows(make_buckets(np.array(known), limits, overlong="drop"), limits)
    return _choose_single([length for (length,) in known], limits)


def choose_packed_shapes(
    known: Sequence[Lengths], limits: Budget, samples_per_row: int | Sequence[int] | None
) -> tuple[Buckets, tuple[int, ...]]:
    """Return the buckets of packed rows of the first samples, with as many rows as fit, and P of each."""
    lengths = np.array(known) if known and len(known[0]) > 1 else np.array(known).reshape(-1)
    buckets = choose_packed_buckets(
        lengths,
        limits,
        None,
        method="best_fit",
        order=Order("dataset"),
        seed=0,
        overlong="truncate",
        samples_per_row=samples_per_row,
    )
    row_lengths = [length for bucket in buckets.shapes for length in bucket[1:]]
    packed = pack_samples(lengths, row_lengths, overlong="truncate", samples_per_row=samples_per_row)
    return _with_most_rows(buckets, limits), count_shortest(packed, buckets.shapes)


def _with_most_rows(buckets: Buckets, limits: Budget) -> Buckets:
    """Return buckets of the same lengths, with as many rows as the limits allow."""
    lengths = np.array(buckets.shapes)[:, 1:]
    if lengths.shape[1] > 1:
        limits = replace(limits, cost=None, compile_seconds=None)
    rows = limits.caps(to_tensor(row_sizes(lengths, limits.size))).tolist()
    shapes = tuple((number, *bucket[1:]) for number, bucket in zip(rows, buckets.shapes, strict=True))
    return replace(buckets, shapes=shapes)


def _choose_single(known: list[int], limits: Budget) -> Buckets:
    """Return the buckets for the first lengths, the longest as long as `max_length` says."""
    cap = limits.max_length
    if cap is not None:
        cap = limits.of_side(0, 1).round_lengths(cap)
        refused = limits.refusals(cap)
        if refused:
            raise ValueError(f"max_length makes a bucket of {cap}, of which no row fits {refused}")

    def lengths_of(max_shapes: int) -> list[int]:
        buckets = make_buckets(known, limits, max_shapes=max_shapes, max_length=cap, overlong="truncate")
        return [bucket.length for bucket in buckets.shapes]

    lengths = lengths_of(limits.max_shapes)
    if cap is not None and lengths[-1] < cap and limits.given_lengths is not None:
        lengths.append(cap)
    elif cap is not None and lengths[-1] < cap:
        # As one bucket more, at the price of one bucket fewer for the first samples, where that costs less.
        lengths[-1] = cap
        if limits.max_shapes > 1 and limits.strategy != "pad_to_max":
            longer = [*lengths_of(limits.max_shapes - 1), cap]
            lengths = min(lengths, longer, key=lambda each: _total_cost(known, each, limits))
    rows = limits.caps(torch.tensor(lengths)).tolist()
    return Buckets(tuple(zip(rows, lengths, strict=True)), limits.num_microbatches)


def _total_cost(known: list[int], lengths: list[int], limits: Budget) -> float:
    """Return what the first samples cost in buckets of these lengths, as `make_buckets` counts it."""
    each = torch.tensor(lengths)
    held = torch.bincount(torch.bucketize(torch.tensor(known), each), minlength=len(lengths))
    rows, steps = limits.rows_and_steps(held, limits.caps(each))
    microbatches = steps * limits.num_microbatches
    if limits.cost is None:
        return int((microbatches * rows * each).sum())
    costs = microbatches.to(torch.float64) * checked_costs("cost", limits.cost, rows, each)
    return sum((costs + (limits.compile_seconds or 0.0)).tolist())
