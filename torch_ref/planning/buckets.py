"""Static shapes (rows, length) from lengths and budgets, by a strategy or with given lengths."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from torch_ref.checks import INT64_MAX, MAX_LISTED, check_integer
from torch_ref.planning.bucket_lengths import CLOSED_FORM, optimal_lengths
from torch_ref.planning.budget import (
    Budget,
    Cost,
    PlanBudgetFields,
    as_budget,
    checked_costs,
)
from torch_ref.planning.costs import warn_beyond_measured
from torch_ref.planning.fitting import Fitting, fit_budget
from torch_ref.planning.lengths import check_size, row_sizes

__all__ = [
    "Bucket",
    "Buckets",
    "Cheapest",
    "MultiLengthBucket",
    "buckets_or_budget",
    "check_distinct",
    "check_steps",
    "choose_of_one_length",
    "given_buckets",
]

MAX_ROWS_PER_STEP = 2**24  # their ids are laid out at once


class Bucket(NamedTuple):
    """A static shape: `rows` samples of up to `length` tokens each.

    Attributes:
        rows: samples of a microbatch, padding rows included.
        length: tokens that each row has room for.
    """

    rows: int
    length: int


class MultiLengthBucket(tuple[int, ...]):
    """A static shape for samples of several lengths, such as pairs: the tuple of rows and of each length.

    Example:
        >>> MultiLengthBucket((2, 16, 24)).lengths
        (16, 24)
    """

    __slots__ = ()

    @property
    def rows(self) -> int:
        """Samples of a microbatch, padding rows included."""
        return self[0]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens that each row has room for, along each length."""
        return self[1:]

    def __repr__(self) -> str:
        """Name both."""
        return f"MultiLengthBucket(rows={self.rows}, lengths={self.lengths})"


@dataclass(frozen=True)
class Buckets:
    """The static shapes of a plan, and for how many microbatches a step their rows were chosen.

    They are not a sequence: a list or a slice of them would forget that number.

    Attributes:
        shapes: `Bucket`s, or `MultiLengthBucket`s, of ascending lengths, and those of one length of ascending rows;
            bare tuples become such.
        num_microbatches: M.
        size: what samples of several lengths count in them, as in `Budget`.

    Raises:
        ValueError: if there is no shape, if shapes differ in width, if one is not made of integers >= 1, or if shapes
            do not ascend; or for another M or `size` than these can be.
    """

    shapes: tuple[Any, ...]
    num_microbatches: int = 1
    size: str = "sum"

    def __post_init__(self) -> None:
        """Check all, and make plain numbers of them."""
        num_microbatches = check_integer("num_microbatches", self.num_microbatches)
        check_size(self.size)
        object.__setattr__(self, "num_microbatches", num_microbatches)
        object.__setattr__(self, "shapes", _check_shapes(self.shapes))
        if self.size != "sum" and isinstance(self.shapes[0], Bucket):
            raise ValueError(f"size={self.size!r} counts several lengths, and these samples have one each")

    if not TYPE_CHECKING:

        def __iter__(self) -> NoReturn:
            """Refuse to become a list."""
            raise ValueError(
                f"Buckets are not a sequence, which would forget num_microbatches={self.num_microbatches}: give "
                "them whole, or their `shapes` together with that number"
            )

        def __getitem__(self, index: Any) -> NoReturn:
            """Refuse to become a slice."""
            iter(self)

    @property
    def row_sizes(self) -> NDArray[np.int64]:
        """int64[K], what a row of each bucket counts: its length, or what `size` says of several."""
        return row_sizes(np.array([bucket[1:] for bucket in self.shapes], dtype=np.int64), self.size)


def choose_of_one_length(lengths: ArrayLike, limits: Budget, overlong: str) -> Buckets:
    """Choose the static shapes for lengths int64[N]."""
    limits = limits.of_side(0, 1)
    fitting = fit_budget(lengths, overlong, limits, every=limits.strategy == "optimal")
    ordered = fitting.ordered
    if limits.given_lengths is not None:
        bucket_lengths = torch.tensor(limits.given_lengths)
    elif limits.strategy == "optimal":
        bucket_lengths = Cheapest(fitting, cost=limits.cost).bucket_lengths(limits.max_shapes)
    else:
        chosen = CLOSED_FORM[str(limits.strategy)](ordered, limits.max_shapes)
        bucket_lengths = torch.unique(limits.round_lengths(chosen))
    caps = limits.caps(bucket_lengths)
    if bool((caps < 1).any()):
        fitting.refuse(bucket_lengths[caps < 1])
    num_samples = torch.bincount(torch.bucketize(ordered, bucket_lengths), minlength=len(bucket_lengths))
    rows, _ = limits.rows_and_steps(num_samples, caps)
    pairs = zip(rows.tolist(), bucket_lengths.tolist(), strict=True)
    buckets = Buckets(tuple(pairs), limits.num_microbatches, limits.size)
    for model in (limits.cost, limits.memory):
        warn_beyond_measured(model, buckets.shapes)
    return buckets


def given_buckets(buckets: Any, fields: Mapping[str, Any]) -> Buckets:
    """Return the buckets that a caller gives: `Buckets`; or tuples, with M = 1.

    Only the fields `num_microbatches` and `size` go with given buckets, and take the place of theirs; others raise
    a ValueError.
    """
    for name in fields.keys() - {"num_microbatches", "size"}:
        raise ValueError(f"{name} chooses buckets, and these are given")
    return replace(buckets if isinstance(buckets, Buckets) else Buckets(buckets), **fields)


def buckets_or_budget(
    buckets: Buckets | Sequence[tuple[int, ...]] | Budget | None, fields: PlanBudgetFields
) -> Buckets | Budget:
    """Return the buckets that a caller gives, or the budget that chooses them."""
    if isinstance(buckets, int | np.integer):
        raise ValueError(f"buckets must be a list of (rows, length), got {buckets}: did you mean max_tokens={buckets}?")
    if buckets is not None and not isinstance(buckets, Budget):
        return given_buckets(buckets, fields)
    if buckets is None and "max_tokens" not in fields:
        raise ValueError("give buckets, or max_tokens to choose them by")
    return Budget(**fields) if buckets is None else as_budget(buckets, fields)


def _check_shapes(buckets: Any) -> tuple[Any, ...]:
    if not isinstance(buckets, list | tuple | np.ndarray):
        raise ValueError(f"buckets must be a list of (rows, length), got {buckets!r}")
    checked = []
    for index, bucket in enumerate(buckets):
        if isinstance(bucket, int) or len(bucket) < 2 or len(bucket) != len(buckets[0]):
            raise ValueError(
                f"bucket {index} must be (rows, length), or all buckets (rows, first, second, ...), got {bucket!r}"
            )
        names = ["rows", *(f"length {side}" if len(bucket) > 2 else "length" for side in range(len(bucket) - 1))]
        checked.append([check_integer(f"{name} of bucket {index}", n) for name, n in zip(names, bucket, strict=True)])
    by_length = [(*lengths, rows) for rows, *lengths in checked]
    if not checked or any(after <= before for before, after in pairwise(by_length)):
        listed = [tuple(bucket) for bucket in checked]
        raise ValueError(
            f"buckets must be at least one, of ascending lengths, and those of one length of ascending rows: {listed}"
        )
    if len(checked[0]) == 2:
        return tuple(Bucket(*bucket) for bucket in checked)
    return tuple(MultiLengthBucket(bucket) for bucket in checked)


def check_distinct(buckets: Buckets) -> None:
    """Raise ValueError for buckets of one length, which only steps of several groups have."""
    pairs = [(tuple(one), tuple(other)) for one, other in pairwise(buckets.shapes) if one[1:] == other[1:]]
    if pairs:
        listed = ", ".join(f"{one} and {other}" for one, other in pairs[:MAX_LISTED])
        raise ValueError(
            "buckets of one length and several rows are for steps of several groups (sequences_per_step, "
            f"tokens_per_step): {listed}"
        )


def check_steps(buckets: Buckets) -> None:
    """Raise ValueError for buckets whose steps are too large to lay out the ids of their rows."""
    shapes, num_microbatches = buckets.shapes, buckets.num_microbatches
    most_rows = num_microbatches * max(bucket[0] for bucket in shapes)
    sizes = [sum(lengths) for _, *lengths in shapes]
    if buckets.size != "sum" and max(sizes) <= INT64_MAX:
        sizes = buckets.row_sizes.tolist()
    most_tokens = num_microbatches * max(bucket[0] * size for bucket, size in zip(shapes, sizes, strict=True))
    if most_rows > MAX_ROWS_PER_STEP or most_tokens > INT64_MAX:
        raise ValueError(
            f"num_microbatches={num_microbatches} makes steps of {most_rows} rows and {most_tokens} tokens; "
            f"at most {MAX_ROWS_PER_STEP} rows and {INT64_MAX} tokens are allowed"
        )


class Cheapest:
    """The dynamic program over the rounded lengths of samples, or of many over every k-th, from the longest down.

    Attributes:
        distinct: int64[D], these lengths, ascending.
        before: int64[D + 1], how many samples have a shorter one, rounded up to one of these; the last is their number.
    """

    def __init__(self, fitting: Fitting, *, cost: Cost | None) -> None:
        """Count the samples of each length, for a cost that may be another than that which limits the rows."""
        self._limits, self._budget = fitting.budget, replace(fitting.budget, cost=cost)
        self.distinct, counts = torch.unique(fitting.candidates(fitting.rounded), return_counts=True)
        self.before = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(counts, dim=0)])
        self._caps = fitting.budget.caps(self.distinct)

    def bucket_lengths(self, max_shapes: int) -> Tensor:
        """Return the cheapest bucket lengths, int64[k <= max_shapes]."""
        before, distinct, caps = self.before, self.distinct, self._caps
        return optimal_lengths(
            distinct,
            max_shapes,
            lambda j: self._cost_of(before[j + 1] - before[: j + 1], distinct[j : j + 1], caps[j : j + 1]),
        )

    def total(self, lengths: Sequence[int], num_held: Sequence[int]) -> float:
        """Return the cost of buckets of these lengths, for the samples or rows that each holds, rounded once."""
        length = torch.tensor(lengths)
        return math.fsum(self._cost_of(torch.tensor(num_held), length, self._limits.caps(length)).tolist())

    def _cost_of(self, num_held: Tensor, length: Tensor, cap: Tensor) -> Tensor:
        """Return the costs of buckets of these lengths with at most `cap` rows, by the row rule."""
        rows, steps = self._budget.rows_and_steps(num_held, cap)
        microbatches = steps * self._budget.num_microbatches
        if self._budget.cost is None:
            return microbatches * rows * length
        each = checked_costs("cost", self._budget.cost, rows, length)
        return microbatches.to(torch.float64) * each + (self._budget.compile_seconds or 0.0)
