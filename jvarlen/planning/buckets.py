"""Token-budget buckets, chosen by dynamic programming.

Letters: N samples, D distinct (rounded) lengths, K buckets, C compiled shapes, M microbatches a step, B
rows, T length, n samples of a bucket, s its steps.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, Float64, Int64

from jvarlen._common.checks import (
    UserError,
    is_integer,
    list_first,
    list_offenders,
    offenders_where,
)
from jvarlen.planning.budget import Budget, CostFn, Strategy, as_budget, checked_cost, round_up
from jvarlen.planning.edges import CLOSED_FORMS, Histogram, optimal_edges, trimmed_costs
from jvarlen.planning.lengths import (
    Overlong,
    check_counts,
    check_lengths,
    ends_to_offsets,
    fit_lengths,
    histogram_of,
    ids_where,
    overlong_counts,
)

__all__ = [
    "AnyBucket",
    "Bucket",
    "CostFn",
    "CountedSamples",
    "PairBucket",
    "Strategy",
    "check_buckets",
    "make_buckets",
]


class Bucket(NamedTuple):
    """A static shape: `rows` × `length` tokens.

    Attributes:
      rows: samples, or packed rows, of a microbatch.
      length: tokens of each.
    """

    rows: int
    length: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of a row, as a tuple with one entry."""
        return self[1:]

    @property
    def num_positions(self) -> int:
        """Tokens that fit into the bucket."""
        return self.rows * self.length

    def __str__(self) -> str:
        return f"{self.rows}×{self.length}"


class PairBucket(NamedTuple):
    """A static shape for pairs: `rows` × (`source_length` + `target_length`) tokens.

    Attributes:
      rows: pairs of a microbatch.
      source_length: tokens of each source.
      target_length: tokens of each target.
    """

    rows: int
    source_length: int
    target_length: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of a row, source and target."""
        return self[1:]

    @property
    def num_positions(self) -> int:
        """Tokens of both sides that fit into the bucket."""
        return self.rows * (self.source_length + self.target_length)

    def __str__(self) -> str:
        return f"{self.rows}×({self.source_length}, {self.target_length})"


AnyBucket: TypeAlias = Bucket | PairBucket


def make_buckets(
    lengths: npt.ArrayLike,
    max_tokens: int | Budget,
    *,
    counts: npt.ArrayLike | None = None,
    overlong: Overlong = "error",
    compiled: Iterable[Sequence[int]] = (),
    **budget: Any,
) -> tuple[Bucket, ...]:
    """Chooses the static shapes for a dataset.

    Args:
      lengths: integers[N], tokens a sample; those of a memory-mapped file are read in pieces.
      max_tokens: budget of one microbatch in tokens, padding included: rows × length never exceeds it. Or a `Budget`.
      counts: integers[N], how many samples have each of the `lengths`, which then are a histogram; None: one each.
      overlong: how samples above `max_length` count here: `"error"` raises, `"drop"` leaves them out, `"truncate"`
        counts them as cut to it. Pass the same to `make_plan`.
      compiled: (rows, length) shapes whose programs exist already, for example in a persistent cache or a saved set.
        Needs `compile_seconds` and strategy `"optimal"`. A bucket of exactly such a shape costs no `compile_seconds`.
        A bucket may have the length of a compiled shape although no sample has it, the longest bucket too, but none is
        empty. It has the rows that its samples need, or those of a compiled shape of its length, whichever costs least
        over all its microbatches and compilation. Among equal costs, compiled shapes win, then fewer rows. Shapes that
        don't fit the budget, `row_multiple`, `length_multiple` or `max_length` are ignored.
      budget: the other fields of `Budget`, as keywords: `max_shapes`, `strategy`, `cost` and so on.

    Returns:
      A tuple of `Bucket`, lengths strictly ascending; the last holds the longest sample. A bucket without samples
      (possible with given lengths, `"geometric"` and `"powers_of_two"`) has as many rows as the budget allows.

    Raises:
      ValueError: lengths or options that are not as described. Samples that alone exceed the budget are listed as id,
        value, limit.

    Example:
      >>> make_buckets([3, 4, 4, 9, 16], max_tokens=32, max_shapes=2)
      (Bucket(rows=3, length=4), Bucket(rows=2, length=16))
      >>> seconds = {"cost": lambda rows, length: 0.01 * rows * length, "compile_seconds": 1.0}
      >>> make_buckets([3, 4, 4, 9, 15], max_tokens=32, **seconds, compiled=[(8, 4), (2, 16)])
      (Bucket(rows=8, length=4), Bucket(rows=2, length=16))

    References:
      Dynamic programming over the sorted lengths is the exact one-dimensional clustering of Wang and Song 2011,
      "Ckmeans.1d.dp"; here a cluster costs what its padded steps cost.
    """
    limits = as_budget(max_tokens, budget)
    given, max_length = limits.given_lengths, limits.max_length
    if given is not None:
        max_length = int(given[-1])
    shapes = list(compiled)
    if shapes and (limits.strategy != "optimal" or limits.compile_seconds is None):
        raise UserError(
            f"compiled needs compile_seconds and strategy 'optimal', not {limits.compile_seconds!r} and "
            f"{limits.strategy!r}"
        )
    counted = CountedSamples(lengths, max_length, overlong, limits.length_multiple, counts)
    histogram = counted.histogram
    if given is not None:
        edges = given
    elif limits.strategy == "optimal":
        caps = counted.checked_caps(limits, histogram.rounded)
        usable = _usable_shapes(shapes, limits, max_length)
        if len(usable):
            return _as_buckets(*_reusing_buckets(histogram, caps, usable, limits.max_shapes, limits))
        costs = trimmed_costs(histogram.rounded, histogram.num_samples_between, caps, limits)
        edges = optimal_edges(histogram.rounded, costs, limits.max_shapes)
    else:
        chosen = CLOSED_FORMS[str(limits.strategy)](histogram, limits.max_shapes)
        edges = np.unique(round_up(np.array(chosen, np.int64), limits.length_multiple))
    _, rows = limits.steps_and_rows(histogram.num_samples(edges), counted.checked_caps(limits, edges))
    return _as_buckets(edges, rows)


def check_buckets(buckets: Sequence[tuple[int, ...]]) -> tuple[AnyBucket, ...]:
    """Checks buckets made elsewhere: (rows, length), or (rows, source length, target length) for pairs."""
    given = [tuple(bucket) for bucket in buckets]
    widths = {len(bucket) for bucket in given}
    if widths not in ({2}, {3}) or not all(is_integer(number) for bucket in given for number in bucket):
        raise UserError(
            f"buckets must be at least one (rows, length) pair of integers, or (rows, source, target), not {given!r}"
        )
    if wrong := [bucket for bucket in given if min(bucket) < 1]:
        raise UserError(f"rows and length must be at least 1: {wrong}")
    if descending := [(a, b) for a, b in itertools.pairwise(given) if a[1:] >= b[1:]]:
        raise UserError(f"bucket lengths must strictly ascend: {descending}")
    kind = Bucket if widths == {2} else PairBucket
    return tuple(kind(*map(int, bucket)) for bucket in given)


class CountedSamples:
    """The samples that buckets are chosen for: cut at the longest bucket, or without those that are longer."""

    def __init__(
        self,
        lengths: npt.ArrayLike,
        max_length: int | None,
        overlong: Overlong,
        length_multiple: int,
        counts: npt.ArrayLike | None = None,
    ):
        self._mapped = lengths if counts is None and isinstance(lengths, np.memmap) else None
        if self._mapped is not None:
            counted = histogram_of(self._mapped)
            overlong_counts(self._mapped, counted, max_length, overlong)  # here, as it lists samples
            lengths, counts = counted
        self._lengths = check_lengths(lengths)
        self._max_length = max_length
        self._drops = overlong == "drop"
        self._length_multiple = length_multiple
        fitted = fit_lengths(self._lengths, max_length, overlong)
        num_of_each = None if counts is None else check_counts(counts, len(self._lengths))[fitted.kept]
        self.histogram = Histogram(fitted.lengths, length_multiple, num_of_each)
        if max_length is not None and self.histogram.rounded[-1] > max_length:
            raise UserError(
                f"max_length {max_length} would be rounded up to {self.histogram.rounded[-1]}: make it a multiple of "
                "length_multiple"
            )

    def checked_caps(self, budget: Budget, edges: Int64[np.ndarray, " K"]) -> Int64[np.ndarray, " K"]:
        """The most rows at each edge; raises ValueError that lists samples of the edges at which none fits."""
        caps = budget.row_caps(edges)
        if caps.min() >= 1:
            return caps
        longest = int(edges[caps < 1][-1])
        bucket = np.minimum(np.searchsorted(edges, self._rounded_lengths()), len(edges) - 1)
        ids, lengths = offenders_where((caps < 1)[bucket] & self._is_counted(), self._lengths)
        if self._mapped is not None:
            ids = ids_where(self._mapped, functools.partial(np.isin, test_elements=lengths))
            lengths = self._mapped[ids]
        offenders = list_offenders(ids, lengths)
        raise UserError(
            f"{budget.broken_by_one_row(longest)} leaves no row for a bucket of {longest} tokens; samples in such: "
            f"{offenders or 'none'}"
        )

    def _rounded_lengths(self) -> Int64[np.ndarray, " N"]:
        cut = self._lengths if self._max_length is None else np.minimum(self._lengths, self._max_length)
        return round_up(cut, self._length_multiple)

    def _is_counted(self) -> Bool[np.ndarray, " N"]:
        return self._lengths <= self._max_length if self._drops else np.ones(len(self._lengths), np.bool_)


def _as_buckets(edges: Int64[np.ndarray, " K"], rows: Int64[np.ndarray, " K"]) -> tuple[Bucket, ...]:
    return tuple(Bucket(b, t) for b, t in zip(rows.tolist(), edges.tolist(), strict=True))


def _usable_shapes(
    compiled: Iterable[Sequence[int]], budget: Budget, max_length: int | None
) -> Int64[np.ndarray, " C 2"]:
    """The compiled shapes that a bucket may have."""
    given = list(compiled)
    if wrong := [shape for shape in given if not _is_shape(shape)]:
        raise UserError(
            f"compiled must hold (rows, length) shapes with integers of at least 1, not {list_first(wrong)}"
        )
    fitting = {
        (int(length), int(rows))
        for rows, length in given
        if int(rows) * int(length) <= budget.max_tokens
        and length % budget.length_multiple == 0
        and (max_length is None or length <= max_length)
    }
    lengths, rows = np.array(sorted(fitting), np.int64).reshape(-1, 2).T
    caps = budget.row_caps(lengths)
    is_usable = (rows <= caps) & ((caps < budget.row_multiple) | (rows % budget.row_multiple == 0))
    return np.stack([rows, lengths], axis=1)[is_usable]


def _reusing_buckets(
    histogram: Histogram,
    caps: Int64[np.ndarray, " D"],
    shapes: Int64[np.ndarray, " C 2"],
    max_shapes: int,
    budget: Budget,
) -> tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " K"]]:
    """The cheapest buckets if those of compiled shapes cost no `compile_seconds`.

    Edges are rounded lengths of samples and lengths of compiled shapes. Every bucket holds at least one sample, because
    an empty one saves nothing, and of equal costs the fewest buckets win.
    """
    edges = np.union1d(histogram.rounded, shapes[:, 1])
    place = np.searchsorted(histogram.rounded, edges, side="right")
    samples_up_to = histogram.samples_below[place]
    caps_of_edges = np.where(np.isin(edges, histogram.rounded), caps[place - 1], 0)
    choice, samples_below = _RowChoice(shapes, budget), ends_to_offsets(samples_up_to)

    def bucket_costs(j: int) -> Float64[np.ndarray, " j"]:
        return choice.costs_and_rows(samples_below[j] - samples_below[:j], caps_of_edges[j - 1], edges[j - 1])[0]

    num_last = int((edges >= histogram.rounded[-1]).sum())
    chosen = np.searchsorted(edges, optimal_edges(edges, bucket_costs, max_shapes, num_last))
    num_held = np.diff(samples_up_to[chosen], prepend=0)
    rows = [choice.costs_and_rows(num_held[k : k + 1], caps_of_edges[j], edges[j])[1] for k, j in enumerate(chosen)]
    return edges[chosen], np.concatenate(rows)


class _RowChoice:
    """The cheapest rows of a bucket: its trimmed ones, or those of a compiled shape of its length."""

    def __init__(self, shapes: Int64[np.ndarray, " C 2"], budget: Budget):
        assert budget.cost is not None
        self._budget = budget
        self._rows, self._lengths = shapes.T
        self._costs = checked_cost(budget.cost, self._rows, self._lengths)

    def costs_and_rows(
        self, num_held: Int64[np.ndarray, " n"], cap: int, length: int
    ) -> tuple[Float64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """What buckets of a length cost, and their rows."""
        costs, rows = np.full(len(num_held), np.inf), np.zeros(len(num_held), np.int64)
        if cap:
            cap_of_each = np.full(len(num_held), cap)
            costs = self._budget.bucket_costs(num_held, cap_of_each, np.full(len(num_held), length))
            _, rows = self._budget.steps_and_rows(num_held, cap_of_each)
        # Of equal costs the last wins, which has the fewest rows.
        first, end = np.searchsorted(self._lengths, [length, length + 1])
        for i in range(end - 1, first - 1, -1):
            microbatches = self._budget.num_steps(num_held, self._rows[i]) * self._budget.microbatches_per_step
            reusing = microbatches.astype(np.float64) * self._costs[i]
            rows = np.where(reusing <= costs, self._rows[i], rows)
            costs = np.minimum(reusing, costs)
        return costs, rows


def _is_shape(shape: Any) -> bool:
    is_pair = isinstance(shape, Sequence | np.ndarray) and len(shape) == 2
    return is_pair and all(is_integer(number) and number >= 1 for number in shape)
