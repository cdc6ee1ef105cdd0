"""Token-budget buckets: their lengths from the histogram of lengths, by closed forms or dynamic programming.

Letters: N samples, D distinct (rounded) lengths, K buckets, M microbatches per step.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Generic, NamedTuple, NoReturn, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
from jaxtyping import Int64

from jvarlen._common.checks import UserError, check_at_least_one, check_choices, is_integer, list_first, list_offenders
from jvarlen.planning import budget as budgets
from jvarlen.planning import lengths as sample_lengths
from jvarlen.planning.budget import Budget, PlanBudgetFields
from jvarlen.planning.cost_model import warn_beyond_measured
from jvarlen.planning.lengths import LengthHistogram, PackedOverlong, SampleSize, check_lengths, histogram_of, row_sizes

__all__ = [
    "MOST_TOKENS", "AnyBucket", "Bucket", "Buckets", "CountedSamples", "Histogram", "MultiLengthBucket",
    "bucket_of", "check_buckets", "check_distinct_lengths", "choose_buckets", "cost_of_candidates", "resolve_buckets",
    "rows_of_steps",
]  # fmt: skip

MOST_TOKENS = 2**63 - 1  # with padding, of a step and of all steps
_MOST_ROWS_A_STEP = 2**24  # their ids are laid out as int64[M, B], 128 MiB
_MOST_CANDIDATES = 5000  # lengths that "optimal" chooses from; the time is quadratic in them
_SHAPES_AT_ONCE = 32  # whose costs stay in a processor's cache


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
    def padded_tokens(self) -> int:
        """Tokens that fit into the bucket."""
        return self.rows * self.length

    def __str__(self) -> str:
        return f"{self.rows}×{self.length}"


class MultiLengthBucket(tuple[int, ...]):
    """A static shape for samples of several lengths, source and target tokens, or frames, height and width: a tuple.

    Its first entry are the rows, samples of a microbatch; the others the lengths, the most that a sample may have.

    Example:
      >>> bucket = MultiLengthBucket((2, 16, 224, 224))
      >>> bucket.rows, bucket.lengths
      (2, (16, 224, 224))
    """

    __slots__ = ()

    @property
    def rows(self) -> int:
        """Samples of a microbatch."""
        return self[0]

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of a row."""
        return self[1:]

    @property
    def padded_tokens(self) -> int:
        """Tokens along all lengths that fit into the bucket."""
        return self.rows * sum(self.lengths)

    def __str__(self) -> str:
        return f"{self.rows}×({', '.join(map(str, self.lengths))})"

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rows={self.rows}, lengths={self.lengths})"


def bucket_of(rows: int, *lengths: int) -> AnyBucket:
    """The bucket of one length or of several."""
    return Bucket(rows, *lengths) if len(lengths) == 1 else MultiLengthBucket((rows, *lengths))


AnyBucket: TypeAlias = Bucket | MultiLengthBucket
_Kind = TypeVar("_Kind", bound=AnyBucket, covariant=True)


@dataclasses.dataclass(frozen=True)
class Buckets(Generic[_Kind]):
    """The static shapes of a plan, and M, for which their rows were chosen.

    This is not a sequence: a list or a slice would forget M. The shapes alone are `shapes`.

    Raises:
      ValueError: shapes or numbers that are not as described.

    Example:
      >>> buckets = Buckets([(2, 4), (1, 8)], num_microbatches=8)
      >>> buckets.shapes
      (Bucket(rows=2, length=4), Bucket(rows=1, length=8))
    """

    shapes: tuple[_Kind, ...]
    """`Bucket`s, or `MultiLengthBucket`s, lengths ascending. Bare tuples become such. One length may come with
    several numbers of rows, ascending, where steps have several groups."""
    num_microbatches: int = 1
    """M, the microbatches of a step."""
    size: SampleSize = "sum"
    """How the lengths of a sample of several are counted."""

    def __post_init__(self):
        check_at_least_one(num_microbatches=self.num_microbatches)
        check_choices(size=(self.size, SampleSize))
        object.__setattr__(self, "shapes", _check_shapes(self.shapes))
        if self.size != "sum" and isinstance(self.shapes[0], Bucket):
            raise UserError(f"size ({self.size!r}) is for samples of several lengths; these have one")
        object.__setattr__(self, "num_microbatches", int(self.num_microbatches))

    if not TYPE_CHECKING:  # type checkers find no sequence here; the error says what to do

        def __iter__(self) -> NoReturn:
            raise UserError(
                "Buckets are not a sequence: a list or a slice would forget num_microbatches. Give them whole, or "
                f"buckets.shapes, with num_microbatches={self.num_microbatches}"
            )

        def __getitem__(self, index) -> NoReturn:
            iter(self)

    @property
    def lengths(self) -> Int64[np.ndarray, " K *D"]:
        """int64[K], the length of each bucket, or int64[K, D] for samples of several."""
        lengths = np.array([bucket.lengths for bucket in self.shapes], np.int64)
        return lengths if lengths.shape[1] > 1 else lengths[:, 0]

    @property
    def row_sizes(self) -> Int64[np.ndarray, " K"]:
        """int64[K], what a row of each bucket counts: its length, or of several what `size` says."""
        lengths = self.lengths
        return lengths if lengths.ndim == 1 else row_sizes(lengths, self.size)

    @property
    def padded_tokens(self) -> Int64[np.ndarray, " K"]:
        """int64[K], what fits into each bucket: rows × row size."""
        return np.array([bucket.rows for bucket in self.shapes], np.int64) * self.row_sizes

    @property
    def unit(self) -> str:
        """The name of what is counted, for reports."""
        return {
            "sum": "tokens",
            "larger": "tokens (the largest length of a sample)",
            "product": "tokens (the product of a sample's lengths)",
        }[self.size]

    def lengths_of(self, bucket: AnyBucket) -> str:
        """The lengths of one of the buckets, for reports.

        Args:
          bucket: one of `shapes`.

        Returns:
          Text such as `1,024`, or for several lengths `512+256`.
        """
        return ("+" if self.size == "sum" else "×").join(f"{length:,}" for length in bucket.lengths)


def choose_buckets(
    lengths: Int64[np.ndarray, " N"],
    limits: Budget,
    overlong: PackedOverlong = "error",
    counts: npt.ArrayLike | None = None,
) -> Buckets[Bucket]:
    """`make_buckets` for checked lengths, one a sample."""
    limits = limits.of_length()
    counted, given = CountedSamples(lengths, limits, overlong, counts), limits.given_lengths
    histogram = counted.histogram
    if given is not None:
        chosen = given
    elif limits.strategy == "optimal":
        chosen = _optimal_lengths(*counted.candidates(), limits)
    else:
        unrounded = _CLOSED_FORMS[str(limits.strategy)](histogram, limits.max_shapes)
        chosen = np.unique(limits.round_lengths(np.array(unrounded, np.int64)))
    _, rows = budgets.steps_and_rows(limits, histogram.num_samples(chosen), counted.most_rows(chosen))
    shapes = tuple(map(Bucket, rows.tolist(), chosen.tolist()))
    buckets = Buckets(shapes, limits.num_microbatches, limits.size)
    for model in (limits.cost, limits.memory):
        warn_beyond_measured(model, shapes)
    return buckets


def cost_of_candidates(lengths: npt.ArrayLike, budget: Budget, overlong: PackedOverlong = "error") -> float:
    """How much more, as a share, `"optimal"` costs than it would for the same lengths rounded down to candidates."""
    budget = budget.of_length()
    counted = CountedSamples(check_lengths(lengths), budget, overlong)
    histogram, (candidates, _) = counted.histogram, counted.candidates()
    if candidates is histogram:
        return 0.0

    def least_cost(of: Histogram) -> float:
        chosen = _optimal_lengths(of, budget.row_caps(of.rounded), budget)
        return float(budgets.bucket_costs(budget, of.num_samples(chosen), budget.row_caps(chosen), chosen).sum())

    # Other lengths than candidates save less than that, except where rows are cut to a multiple.
    below = np.append(histogram.rounded[0], candidates.rounded)
    rounded = budget.round_lengths(histogram.values)
    lowered = below[np.searchsorted(candidates.rounded, rounded, side="right")]
    return max(0.0, least_cost(candidates) / least_cost(Histogram(lowered, histogram.counts)) - 1.0)


def check_buckets(
    buckets: Buckets[AnyBucket] | Iterable[Iterable[int]], num_microbatches: int | None = None
) -> Buckets[AnyBucket]:
    """The buckets of a plan, with M where it is given; bare (rows, length) or (rows, first, second, …) have M = 1."""
    given = buckets if isinstance(buckets, Iterable) else [buckets]  # what is no list is refused as no pair
    checked = given if isinstance(given, Buckets) else Buckets(cast("tuple[AnyBucket, ...]", tuple(given)))
    if num_microbatches in (None, checked.num_microbatches):
        return checked
    return dataclasses.replace(checked, num_microbatches=num_microbatches)


def _check_shapes(shapes: Iterable[Iterable[int]]) -> tuple[AnyBucket, ...]:
    """The shapes as `Bucket`s or `MultiLengthBucket`s."""
    given = [tuple(bucket) if np.iterable(bucket) else (bucket,) for bucket in shapes]
    widths = {len(bucket) for bucket in given}
    if len(widths) != 1 or min(widths) < 2 or not all(is_integer(number) for bucket in given for number in bucket):
        raise UserError(
            "buckets must be at least one (rows, length) pair of integers, or (rows, first, second, …) with all of a "
            f"sample's lengths, not {given!r}"
        )
    descending = [(a, b) for a, b in itertools.pairwise(given) if (a[1:], a[0]) >= (b[1:], b[0])]
    if wrong := [bucket for bucket in given if min(bucket) < 1] or descending:
        raise UserError(
            f"rows and lengths must be at least 1, and lengths ascend, or rows where they are equal: {wrong}"
        )
    return tuple(bucket_of(*map(int, bucket)) for bucket in given)


def resolve_buckets(
    buckets: Buckets[AnyBucket] | Iterable[Iterable[int]] | Budget | None, fields: PlanBudgetFields
) -> Buckets[AnyBucket] | Budget:
    """Given buckets, with the M and the `size` of a budget's fields; or the budget that is to choose them."""
    if isinstance(buckets, Budget):
        return dataclasses.replace(buckets, **fields)
    if is_integer(buckets):
        raise UserError(f"buckets must be (rows, length) pairs, not {buckets}: did you mean max_tokens={buckets}?")
    if buckets is not None:
        if idle := fields.keys() - {"num_microbatches", "size"}:
            raise UserError(f"{', '.join(sorted(idle))}: buckets are given, so there are none to choose")
        checked = check_buckets(buckets, fields.get("num_microbatches"))
        return dataclasses.replace(checked, size=fields.get("size", checked.size))
    if "max_tokens" not in fields:
        raise UserError("give buckets, or max_tokens to choose them by")
    return Budget(**fields)


def check_distinct_lengths(buckets: Buckets[AnyBucket]) -> None:
    """Raises ValueError for a length with several numbers of rows, between which only a step's samples decide."""
    pairs = itertools.pairwise(buckets.shapes)
    if wrong := [f"{a} and {b}" for a, b in pairs if a.lengths == b.lengths]:
        raise UserError(
            "buckets of one length with several numbers of rows are for steps of several groups "
            f"(sequences_per_step=, tokens_per_step=): {list_first(wrong)}"
        )


def rows_of_steps(buckets: Buckets[AnyBucket]) -> Int64[np.ndarray, " K"]:
    """int64[K], the rows of a step of each bucket; raises ValueError for steps of more rows or tokens than fit."""
    rows = [buckets.num_microbatches * bucket.rows for bucket in buckets.shapes]
    if max(rows) > _MOST_ROWS_A_STEP:
        raise UserError(
            f"num_microbatches ({buckets.num_microbatches:,}) × rows "
            f"({max(bucket.rows for bucket in buckets.shapes):,}) must be at most {_MOST_ROWS_A_STEP:,}"
        )
    size_of: dict[str, Callable[[tuple[int, ...]], int]] = {"sum": sum, "larger": max, "product": math.prod}
    sizes = [size_of[buckets.size](bucket.lengths) for bucket in buckets.shapes]
    tokens = [number * size for number, size in zip(rows, sizes, strict=True)]
    if max(tokens) > MOST_TOKENS:
        raise UserError(f"a step has {max(tokens):,} tokens with padding, more than 2**63 − 1")
    return np.array(rows, np.int64)


class CountedSamples:
    """The samples that buckets are chosen for: cut at the longest bucket, or without those that are longer."""

    def __init__(
        self,
        lengths: Int64[np.ndarray, " N"],
        budget: Budget,
        overlong: PackedOverlong,
        counts: npt.ArrayLike | None = None,
    ):
        given, self._lengths, self._budget = budget.given_lengths, lengths, budget
        self._limit = int(given[-1]) if given is not None else budget.max_length or MOST_TOKENS
        self._drops = overlong == "drop"
        counted = histogram_of(lengths) if counts is None else LengthHistogram(lengths, np.asarray(counts))
        numbers = counted.counts
        if numbers.shape != counted.lengths.shape or numbers.dtype.kind not in "iu" or numbers.min() < 1:
            raise UserError(f"counts must be {len(lengths)} integers of at least 1, one for each length")
        ids = np.flatnonzero(lengths > self._limit)
        sample_lengths.apply_overlong(overlong, ids, lengths[ids], self._limit, len(lengths) - len(ids))
        is_counted = counted.lengths <= self._limit if self._drops else slice(None)
        values, num_of_each = (column[is_counted] for column in counted)
        self.histogram = Histogram(np.minimum(values, self._limit), num_of_each, budget)
        if self.histogram.rounded[-1] > self._limit:
            rounded = f"max_length {self._limit} would be rounded up to {self.histogram.rounded[-1]}"
            raise UserError(f"{rounded}: make it a multiple of length_multiple, plus length_offset")

    def candidates(self) -> tuple[Histogram, Int64[np.ndarray, " D"]]:
        """The samples by the lengths that `"optimal"` chooses from, and the most rows of each of these."""
        caps, candidates = self.most_rows(self.histogram.rounded), self.histogram.thin()
        return candidates, caps[np.isin(self.histogram.rounded, candidates.rounded)]

    def most_rows(self, bucket_lengths: Int64[np.ndarray, " K"]) -> Int64[np.ndarray, " K"]:
        """The most rows of each length; raises ValueError that lists samples of the lengths at which none fits."""
        caps = self._budget.row_caps(bucket_lengths)
        if caps.min() >= 1:
            return caps
        rounded = self._budget.round_lengths(np.minimum(self._lengths, self._limit))
        bucket = np.minimum(np.searchsorted(bucket_lengths, rounded), len(bucket_lengths) - 1)
        ids = np.flatnonzero((caps < 1)[bucket] & ~(self._drops & (self._lengths > self._limit)))
        longest = int(bucket_lengths[caps < 1][-1])
        broken = budgets.broken_by_one_row(self._budget, longest)
        listed = list_offenders(ids, self._lengths[ids]) or "none"
        raise UserError(f"{broken} leaves no row for a bucket of {longest} tokens; samples in such: {listed}")


class Histogram:
    """Distinct lengths of samples, distinct lengths rounded up, and how many samples and tokens are below each."""

    def __init__(
        self, lengths: Int64[np.ndarray, " n"], counts: Int64[np.ndarray, " n"], rounding: Budget | None = None
    ):
        self.values, place = np.unique(lengths, return_inverse=True)
        self.counts = np.zeros(len(self.values), np.int64)
        np.add.at(self.counts, place, counts)
        rounded = self.values if rounding is None else rounding.round_lengths(self.values)
        self.rounded, first = np.unique(rounded, return_index=True)
        self.samples_below = np.cumulative_sum(np.add.reduceat(self.counts, first), include_initial=True)

    def thin(self) -> Histogram:
        """The same samples, as long as the candidates of `"optimal"` that hold them."""
        every = -(-len(self.rounded) // _MOST_CANDIDATES)
        if every == 1:
            return self
        candidates = self.rounded[::-every][::-1]
        return Histogram(candidates[np.searchsorted(candidates, self.values)], self.counts)

    def num_samples(self, bucket_lengths: Int64[np.ndarray, " K"]) -> Int64[np.ndarray, " K"]:
        """Samples of each bucket, where a sample belongs to the smallest that holds it."""
        return np.diff(self.samples_below[np.searchsorted(self.rounded, bucket_lengths, side="right")], prepend=0)


def _optimal_lengths(histogram: Histogram, caps: Int64[np.ndarray, " D"], budget: Budget) -> Int64[np.ndarray, " K"]:
    """The cheapest of the rounded lengths, at most `max_shapes` of them, the longest included."""
    # cheapest[k, j] is the least cost of putting the shortest j lengths into exactly k + 1 buckets. The ceilings in the
    # cost of a bucket break the monotonicity that faster recurrences need, so every begin i < j of the last bucket is
    # tried: O(K D²) time, O(K D) memory. Among equal costs the first i wins, which is the smaller length.
    num_lengths = len(histogram.rounded)
    max_shapes = min(budget.max_shapes, num_lengths)
    dtype = np.int64 if budget.cost is None else np.float64
    # An integer that no sum of costs reaches, and that stays an integer when a bucket's cost is added to it.
    unreachable = np.iinfo(np.int64).max // 2 if budget.cost is None else np.inf
    cheapest = np.full((max_shapes, num_lengths + 1), unreachable, dtype)
    previous = np.zeros((max_shapes, num_lengths + 1), np.int32)
    for j in range(1, num_lengths + 1):
        num_held = histogram.samples_below[j] - histogram.samples_below[:j]
        cost = budgets.bucket_costs(budget, num_held, np.full(j, caps[j - 1]), np.full(j, histogram.rounded[j - 1]))
        cheapest[0, j] = cost[0]
        for k in range(0, min(max_shapes - 1, j), _SHAPES_AT_ONCE):
            totals = cheapest[k : min(k + _SHAPES_AT_ONCE, max_shapes - 1), :j] + cost
            end = k + len(totals)
            previous[k + 1 : end + 1, j] = first = totals.argmin(axis=1)
            cheapest[k + 1 : end + 1, j] = totals[np.arange(len(totals)), first]
    chosen, j = [], num_lengths
    for k in range(int(cheapest[:, -1].argmin()), -1, -1):
        chosen.append(histogram.rounded[j - 1])
        j = int(previous[k, j])
    return np.array(chosen[::-1], np.int64)


def _powers_of_two(histogram: Histogram, max_shapes: int) -> list[int]:
    shortest, longest = int(histogram.values[0]), int(histogram.values[-1])
    powers = [2**k for k in range((shortest - 1).bit_length(), (longest - 1).bit_length() + 1)]
    return [*powers[:-1], longest]


def _geometric(histogram: Histogram, max_shapes: int) -> list[int]:
    shortest, longest = int(histogram.values[0]), int(histogram.values[-1])
    powers = [shortest ** (max_shapes - k) * longest**k for k in range(1, max_shapes + 1)]
    return [_ceil_root(power, max_shapes, shortest, longest) for power in powers]


def _ceil_root(power: int, degree: int, low: int, high: int) -> int:
    """The smallest integer e in [low, high] with e**degree ≥ power; Python integers, so that it is exact."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if middle**degree >= power else (middle + 1, high)
    return low


def _quantile(histogram: Histogram, max_shapes: int) -> list[int]:
    ends = np.cumsum(histogram.counts)
    positions = [-(-k * int(ends[-1]) // max_shapes) for k in range(1, max_shapes + 1)]
    return histogram.values[np.searchsorted(ends, positions)].tolist()


def _equal_tokens(histogram: Histogram, max_shapes: int) -> list[int]:
    tokens = np.cumsum(histogram.values * histogram.counts)
    targets = [-(-k * int(tokens[-1]) // max_shapes) for k in range(1, max_shapes + 1)]
    return histogram.values[np.searchsorted(tokens, targets)].tolist()


# Lengths before rounding, which need neither be distinct nor ascend strictly.
_CLOSED_FORMS: dict[str, Callable[[Histogram, int], list[int]]] = {
    "pad_to_max": lambda histogram, max_shapes: [int(histogram.values[-1])],
    "powers_of_two": _powers_of_two,
    "geometric": _geometric,
    "quantile": _quantile,
    "equal_tokens": _equal_tokens,
}
