"""Padded shapes, packed shapes or one packed shape: whichever takes the fewest seconds, compiling included.

Letters: N samples, K buckets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from jaxtyping import Int64

from jvarlen._common.checks import UserError, list_first
from jvarlen.planning.buckets import Bucket, Buckets, make_buckets
from jvarlen.planning.budget import Budget, checked_cost, num_steps
from jvarlen.planning.cost_model import CostModel
from jvarlen.planning.lengths import Overlong, PackedOverlong, check_lengths, fit_lengths
from jvarlen.planning.order import Order
from jvarlen.planning.packing import Packing, PackingMethod
from jvarlen.planning.row_lengths import choose_packed_buckets

__all__ = ["ShapeCandidate", "choose_candidate", "decided_packing"]

_LEAST_GAIN = 1e-9  # as a share, so that rounding decides nothing
_LEAST_PADDING = 0.01  # of one packed shape that others are worth trying for


class ShapeCandidate(NamedTuple):
    """Shapes, and what training in them takes."""

    buckets: Buckets[Bucket]
    method: PackingMethod | None  # how rows are packed; None: one sample a row
    seconds: float

    def __str__(self) -> str:
        number = len(self.buckets)
        return f"{number} {'padded' if self.method is None else 'packed'} shape{'s' * (number > 1)}"


def choose_candidate(
    lengths: npt.ArrayLike,
    budget: Budget,
    overlong: PackedOverlong,
    *,
    order: Order,
    seed: int,
    method: PackingMethod | Literal["auto"] | None = "auto",
    num_epochs: float = 1.0,
    whole_below: int = 0,
) -> tuple[ShapeCandidate, str]:
    """The candidate of the fewest seconds, and why; of equal ones padded, then one packed shape.

    Of rows below `whole_below` tokens, attention computes all pairs, whatever samples share them.
    """
    if budget.cost is None:
        raise UserError('packing="auto" chooses by seconds: it needs a cost of microbatches in seconds (cost=)')
    if np.ndim(lengths) == 2:
        raise UserError('packing="auto" is for samples of one length each: of two, say packing="best_fit" or None')
    if budget.compile_seconds is not None:
        budget = dataclasses.replace(budget, compile_seconds=budget.compile_seconds / num_epochs)
    candidates: list[ShapeCandidate] = []
    if method != "best_fit":
        padded: Any = make_buckets(lengths, budget, overlong=cast(Overlong, overlong))
        fitted = fit_lengths(check_lengths(lengths), padded[-1].length, cast(Overlong, overlong)).lengths
        candidates.append(ShapeCandidate(padded, None, _epoch(fitted, padded, budget)[0]))
    for max_shapes in () if method is None else (1, budget.max_shapes):
        limits = dataclasses.replace(budget, max_shapes=max_shapes)
        buckets: Any
        buckets, packing = choose_packed_buckets(lengths, limits, overlong, order=order, seed=seed)
        seconds, padding = _epoch(packing, buckets, budget, whole_below)
        candidates.append(ShapeCandidate(buckets, "best_fit", seconds))
        if isinstance(budget.cost, CostModel) and padding <= _LEAST_PADDING:
            break  # with pairs of tokens that are the same in all rows, others save no more than that
    candidates = [each._replace(seconds=num_epochs * each.seconds) for each in candidates]
    least = min(each.seconds for each in candidates) * (1 + _LEAST_GAIN)
    chosen = next(each for each in candidates if each.seconds <= least)
    listed = dict.fromkeys(f"{each.seconds:,.1f} in {each}" for each in candidates)
    return chosen, f"{chosen}: predicted seconds, compiling included, are {', '.join(listed)}"


def _epoch(
    rows_of: Int64[np.ndarray, " N"] | Packing, buckets: Buckets[Bucket], budget: Budget, whole_below: int = 0
) -> tuple[float, float]:
    """Seconds of an epoch of samples or packed rows, compiling included, and the share of padding."""
    assert budget.cost is not None
    rows, length = np.array(buckets, np.int64).T
    num_tokens = rows_of.num_tokens if isinstance(rows_of, Packing) else rows_of
    bucket_of_row = np.searchsorted(length, num_tokens)
    held = np.bincount(bucket_of_row, minlength=len(length))
    num_microbatches = budget.microbatches_per_step * num_steps(budget, held, rows)
    each = checked_cost(budget.cost, rows, length)
    if isinstance(rows_of, Packing) and isinstance(budget.cost, CostModel):
        of_rows = np.add.reduceat(rows_of.sample_lengths**2, rows_of.row_offsets[:-1])
        pairs = np.bincount(bucket_of_row, of_rows, len(length)) / np.maximum(num_microbatches, 1)
        each = np.where(length < whole_below, each, budget.cost(rows, length, pairs=pairs))
    seconds = float((num_microbatches * each).sum()) + len(buckets) * (budget.compile_seconds or 0.0)
    return seconds, 1 - int(num_tokens.sum()) / int((num_microbatches * rows * length).sum())


def decided_packing(
    for_packed: Sequence[str], for_single: Sequence[str]
) -> tuple[PackingMethod | Literal["auto"] | None, str]:
    """The packing that given settings decide, which only packed rows or single samples have, and why; else auto."""
    packed, single = list_first(for_packed), list_first(for_single)
    if packed and single:
        raise UserError(f"{packed}: only packed rows have that; {single}: only single samples have that; leave one out")
    if packed:
        return "best_fit", f"packed rows, as {packed} asks for"
    return (None, f"one sample a row, as {single} asks for") if single else ("auto", "")
