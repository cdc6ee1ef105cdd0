"""Padded shapes, packed shapes or one packed shape: what an epoch in each takes, and which takes least.

Letters: N samples, K buckets.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64, Int64

from jvarlen._common.checks import UserError, list_first
from jvarlen.planning.buckets import Bucket, Buckets, make_buckets
from jvarlen.planning.budget import Budget, checked_cost, num_steps
from jvarlen.planning.cost_model import CostModel
from jvarlen.planning.lengths import Overlong, PackedOverlong, check_lengths, fit_lengths
from jvarlen.planning.order import Order
from jvarlen.planning.packings import Packing, PackingMethod
from jvarlen.planning.row_lengths import choose_packed_buckets

__all__ = [
    "ShapeCandidate",
    "choose_candidate",
    "decided_packing",
    "packed_candidates",
    "padded_candidate",
    "shapes_in_words",
]

_LEAST_GAIN = 1e-9  # as a share, so that rounding decides nothing
_LEAST_PADDING = 0.01  # of one packed shape that others are worth trying for


class ShapeCandidate(NamedTuple):
    """Shapes, and what an epoch in them takes."""

    buckets: Buckets[Bucket]
    packing: Packing | None  # the rows of the first epoch; None: one sample a row
    seconds: Float64[np.ndarray, " K"]  # of all steps of each bucket
    num_steps: Int64[np.ndarray, " K"]

    @property
    def method(self) -> PackingMethod | None:
        """How rows are packed; None: they are not."""
        return None if self.packing is None else self.packing.method

    def __str__(self) -> str:
        return shapes_in_words(len(self.buckets), is_packed=self.packing is not None)


def shapes_in_words(number: int, *, is_packed: bool) -> str:
    """Such as "1 packed shape"."""
    return f"{number} {'packed' if is_packed else 'padded'} shape{'s' * (number > 1)}"


def padded_candidate(lengths: Int64[np.ndarray, " N"], buckets: Buckets[Bucket], budget: Budget) -> ShapeCandidate:
    """Samples of these lengths, which the buckets hold, one a row."""
    num_held = _num_held(lengths, buckets)
    return ShapeCandidate(buckets, None, *_epoch(num_held, buckets, budget))


def _packed_candidate(
    packing: Packing, buckets: Buckets[Bucket], budget: Budget, whole_below: int = 0
) -> ShapeCandidate:
    """Packed rows; of rows below so many tokens attention computes all pairs, whatever samples share them."""
    num_tokens = packing.num_tokens
    num_held = _num_held(num_tokens, buckets)
    of_rows = np.add.reduceat(packing.sample_lengths**2, packing.row_offsets[:-1])
    pairs = np.zeros(len(buckets), np.int64)
    np.add.at(pairs, np.searchsorted([bucket.length for bucket in buckets], num_tokens), of_rows)
    return ShapeCandidate(buckets, packing, *_epoch(num_held, buckets, budget, pairs, whole_below))


def packed_candidates(
    pack: Callable[[Budget], tuple[tuple[Any, ...], Packing]], budget: Budget, whole_below: int = 0
) -> list[ShapeCandidate]:
    """One packed shape, and several where they can take less; `pack` gives buckets and rows for a budget."""
    candidates: list[ShapeCandidate] = []
    for limits in (dataclasses.replace(budget, max_shapes=1), budget):
        buckets, packing = pack(limits)
        if not candidates or buckets != candidates[0].buckets:
            candidates.append(_packed_candidate(packing, cast(Any, buckets), budget, whole_below))
        padded_tokens = int((candidates[0].num_steps * candidates[0].buckets.padded_tokens).sum())
        padding = 1 - int(packing.sample_lengths.sum()) / (budget.microbatches_per_step * padded_tokens)
        if isinstance(budget.cost, CostModel) and padding <= _LEAST_PADDING:
            break  # with pairs of tokens that are the same in all rows, others save no more than that
    return candidates


def choose_candidate(
    lengths: npt.ArrayLike, budget: Budget, overlong: PackedOverlong, *, order: Order, seed: int
) -> tuple[ShapeCandidate, str]:
    """The candidate of the fewest seconds, compiling included, and why; of equal ones padded, then one packed shape."""
    if budget.cost is None:
        raise UserError('packing="auto" chooses by seconds: it needs a cost of microbatches in seconds (cost=)')
    if np.ndim(lengths) == 2:
        raise UserError('packing="auto" is for samples of one length each: of two, say packing="best_fit" or None')
    padded = make_buckets(lengths, budget, overlong=cast(Overlong, overlong))
    fitted = fit_lengths(check_lengths(lengths), padded[-1].length, cast(Overlong, overlong)).lengths
    pack = functools.partial(choose_packed_buckets, lengths, overlong=overlong, order=order, seed=seed)
    candidates = [padded_candidate(fitted, cast(Any, padded), budget), *packed_candidates(pack, budget)]
    totals = [float(each.seconds.sum()) + (budget.compile_seconds or 0.0) * len(each.buckets) for each in candidates]
    least = min(totals) * (1 + _LEAST_GAIN)
    chosen = next(each for each, total in zip(candidates, totals, strict=True) if total <= least)
    listed = (f"{total:,.1f} in {each}" for each, total in zip(candidates, totals, strict=True))
    return chosen, f"{chosen}: predicted seconds of an epoch, compiling included, are {', '.join(listed)}"


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


def _num_held(num_tokens: Int64[np.ndarray, " R"], buckets: Buckets[Bucket]) -> Int64[np.ndarray, " K"]:
    """How many rows each bucket holds."""
    return np.bincount(np.searchsorted([bucket.length for bucket in buckets], num_tokens), minlength=len(buckets))


def _epoch(
    num_held: Int64[np.ndarray, " K"],
    buckets: Buckets[Bucket],
    budget: Budget,
    pairs: Int64[np.ndarray, " K"] | None = None,
    whole_below: int = 0,
) -> tuple[Float64[np.ndarray, " K"], Int64[np.ndarray, " K"]]:
    """Seconds of all steps of each bucket, of which packed rows hold so many pairs of tokens in all, and the steps."""
    cost = budget.cost
    assert cost is not None
    rows, length = np.array(buckets, np.int64).T
    steps = num_steps(budget, num_held, rows)
    microbatches = steps * budget.microbatches_per_step
    each = checked_cost(cost, rows, length)
    if pairs is not None and isinstance(cost, CostModel):
        of_pairs = cost(rows, length, pairs=pairs / np.maximum(microbatches, 1))
        each = np.where(length < whole_below, each, of_pairs)
    return microbatches * each, steps
