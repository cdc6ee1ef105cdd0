"""The budget of a microbatch, in tokens, cost and bytes, and how many rows of a length it allows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64, Int64, Shaped

from jvarlen._common.checks import UserError, check_at_least_one, check_at_least_zero, is_integer
from jvarlen._common.keywords import check_keywords
from jvarlen._common.settings import Settings
from jvarlen.planning.lengths import SampleSize, row_sizes

__all__ = [
    "Budget", "BudgetFields", "BudgetSettings", "CostFn", "PlanBudgetFields", "Strategy", "as_budget",
    "broken_by_one_row", "bucket_costs", "caps_of", "check_bucket_lengths", "evaluate_cost", "limits_of_rows",
    "num_steps", "round_caps", "round_up", "steps_and_rows", "takes_budget",
]  # fmt: skip

_T = TypeVar("_T", bound=Callable[..., Any])
_Numbers = TypeVar("_Numbers", int, np.ndarray)
CostFn = Callable[..., npt.ArrayLike]
Strategy = Literal["pad_to_max", "powers_of_two", "geometric", "quantile", "equal_tokens", "optimal"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetSettings(Settings):
    """The fields of a `Budget` that are plain values, which the settings of runs have as well."""

    max_tokens: int
    """Budget of one microbatch in tokens, padding included: rows × length never exceeds it."""
    max_shapes: int = 16
    """The most buckets, that is, compiled shapes. Strategies pad_to_max and powers_of_two ignore it."""
    max_length: int | None = None
    """Longest bucket in tokens, and the length of packed rows; None for the longest sample, or for packed rows as
    `choose_row_lengths` says."""
    strategy: Strategy | Sequence[int] = "optimal"
    """How the lengths of the buckets are chosen: the cheapest set (optimal), one (pad_to_max), powers of two whatever
    max_shapes says, equal ratios from the shortest to the longest (geometric), equally many samples a bucket (quantile)
    or equally many tokens (equal_tokens). Or the lengths themselves, strictly ascending; the last is the
    longest bucket."""
    num_microbatches: int = 1
    """Microbatches of one optimizer update (M), over all devices and accumulation."""
    row_multiple: int = 1
    """Rows of a bucket are a multiple of this where the budget allows it."""
    length_multiple: int | Sequence[int] = 1
    """Lengths of buckets are rounded up to a multiple of this, plus length_offset. For samples of several lengths
    one number for all of these, or one for each."""
    length_offset: int | Sequence[int] = 0
    """Lengths of buckets are this much above a multiple of length_multiple, below which it must be: 8 and 1 make 1, 9,
    17 and so on."""
    max_sequences: int | None = None
    """The most rows of a microbatch, however short they are; None for any number."""
    compile_seconds: float | None = None
    """Seconds of compiling one bucket; with a cost in seconds this decides how many are worth compiling."""
    max_cost: float | None = None
    """The most that a microbatch may cost, so that all take about the same time. Costs must not fall as rows grow."""


@check_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget(BudgetSettings):
    """The limits and the cost of a microbatch, and how bucket lengths are chosen and how many.

    `make_buckets`, `make_plan` and others take its fields as keywords, or a `Budget` itself.

    Attributes:
      cost: cost(rows, length) of one microbatch, for example the seconds of a `CostModel`. It takes int64 arrays that
        broadcast and returns float64, finite and at least 0. The choice of lengths minimises its sum over all
        microbatches. None: rows × length tokens, in int64. For several lengths it is cost(rows, first, second, …), and
        by default rows × `size`.
      memory: memory(rows, length), the bytes of a step in a bucket, for example from a `CostModel` of bytes. It must
        not fall as rows grow.
      max_bytes: the most bytes of a bucket, by `memory`.
      size: what a sample of several lengths counts: their `"sum"`, as source and target tokens; the `"larger"`, or
        largest; or their `"product"`, as the pixels of images and videos. rows × size stays within `max_tokens`, is
        what buckets are chosen by, and what the plan reports as tokens and as padding.

    Raises:
      ValueError: a limit that is not a positive number, or that lacks its function; a strategy that does not exist.

    Example:
      >>> budget = Budget(max_tokens=32, row_multiple=2)
      >>> budget.row_caps(np.array([4, 9, 20]))
      array([8, 2, 1])
    """

    cost: CostFn | None = None
    memory: CostFn | None = None
    max_bytes: float | None = None
    size: SampleSize = "sum"

    def __post_init__(self):
        super().__post_init__()
        names = ["max_tokens", "max_shapes", "num_microbatches", "row_multiple"]
        names += [name for name in ("max_length", "max_sequences") if getattr(self, name) is not None]
        check_at_least_one(**{name: getattr(self, name) for name in names})
        self._check_form_of_lengths()
        if not isinstance(self.strategy, str):
            check_bucket_lengths(self.strategy)
        for name, value, source, function in _limits(self):
            if function is None or not 0 < value < math.inf:
                raise UserError(f"{name} ({value!r}) must be finite, above 0, and needs {source}, a function of rows")
        seconds = self.compile_seconds
        if seconds is not None and (self.cost is None or not 0 <= seconds < math.inf):
            raise UserError(f"compile_seconds ({seconds!r}) must be at least 0 and needs a cost in seconds")

    def _check_form_of_lengths(self) -> None:
        """Raises ValueError unless every multiple is at least 1, and the offset that belongs to it below it."""
        for name, check in (("length_multiple", check_at_least_one), ("length_offset", check_at_least_zero)):
            value = getattr(self, name)
            for number in value if isinstance(value, Sequence | np.ndarray) else [value]:
                check(**{name: number})
        try:
            multiples, offsets = np.broadcast_arrays(self.length_multiple, self.length_offset)
        except ValueError:  # of different numbers of lengths
            multiples, offsets = np.zeros((2, 1))
        if not multiples.size or (multiples < 1).any() or (offsets < 0).any() or (offsets >= multiples).any():
            raise UserError(
                f"length_multiple ({self.length_multiple}) must be at least 1, and length_offset "
                f"({self.length_offset}) at least 0 and below it: one number each, or as many as samples have lengths"
            )

    def of_length(self, side: int = 0, num_lengths: int = 1) -> Budget:
        """The same with the multiple and the offset of one of the lengths that samples have.

        Args:
          side: 0 ≤ side < num_lengths.
          num_lengths: how many lengths a sample has.

        Returns:
          A `Budget`.

        Raises:
          ValueError: multiples or offsets of another number of lengths.
        """
        of_side = {}
        for name in ("length_multiple", "length_offset"):
            if not isinstance(value := getattr(self, name), Sequence):
                continue
            if len(value) != num_lengths:
                raise UserError(f"{name} {value} is for {len(value)} lengths of a sample, but they have {num_lengths}")
            of_side[name] = value[side]
        return dataclasses.replace(self, **of_side) if of_side else self

    def round_lengths(self, lengths: _Numbers) -> _Numbers:
        """The next lengths that a bucket may have: each a multiple of `length_multiple`, plus `length_offset`.

        Args:
          lengths: an integer or int64[…, D] of at least 1, with D lengths along the last axis where multiples or
            offsets are one for each.

        Returns:
          As `lengths`.
        """
        offset: Any = self.length_offset if is_integer(self.length_offset) else np.array(self.length_offset)
        multiple: Any = self.length_multiple if is_integer(self.length_multiple) else np.array(self.length_multiple)
        return round_up(lengths - offset, multiple) + offset

    @property
    def given_lengths(self) -> Int64[np.ndarray, " K"] | None:
        """int64[K], the bucket lengths where the strategy gives them, rounded up; None where it chooses them."""
        if isinstance(self.strategy, str):
            return None
        given = np.unique(self.of_length().round_lengths(np.array(self.strategy, np.int64)))
        if self.max_length is not None and given[-1] > self.max_length:
            raise UserError(f"the last of the given lengths, {given[-1]}, is above max_length {self.max_length}")
        return given

    def row_caps(self, length: Int64[np.ndarray, " *n"]) -> Int64[np.ndarray, " *n"]:
        """The most rows that a microbatch of each length may have; 0 where not even one fits.

        Args:
          length: int64[...], tokens per row.

        Returns:
          int64[...], a multiple of `row_multiple` where one remains.

        Raises:
          ValueError: a cost that is not finite or below 0.
        """
        return round_caps(self, _most_rows(self, length)[-1][1])


_Limit = tuple[str, Any, str, Any]  # its name and value, and the name of the function that it limits, and that


def _limits(budget: Budget) -> list[_Limit]:
    """The limits that are set."""
    cost = "max_cost", budget.max_cost, "cost", budget.cost
    memory = "max_bytes", budget.max_bytes, "memory", budget.memory
    return [limit for limit in (cost, memory) if limit[1] is not None]


def _most_rows(budget: Budget, length: Int64[np.ndarray, " *n"]) -> list[tuple[str, Int64[np.ndarray, " *n"]]]:
    """The most rows within the first limit, within the first two and so on, with the name of the last of them."""
    most = [("tokens", budget.max_tokens // length)]
    for _, value, source, function in _limits(budget):
        most.append((source, _most_rows_within(function, value, source, length, most[-1][1])))
    return most


def limits_of_rows(budget: Budget, length: Int64[np.ndarray, " n"]) -> list[str]:
    """The limit that sets the most rows of each length: tokens, cost, memory or sequences; the first in a tie."""
    within = _most_rows(budget, length)
    if budget.max_sequences is not None:
        within.append(("sequences", np.minimum(within[-1][1], budget.max_sequences)))
    return [within[k][0] for k in np.argmin([most for _, most in within], axis=0)]


def caps_of(budget: Budget, lengths: Int64[np.ndarray, " K *D"]) -> Int64[np.ndarray, " K"]:
    """The most rows of buckets of one length each, or of several, by their sizes."""
    if lengths.ndim == 1:
        return budget.row_caps(lengths)
    return round_caps(budget, budget.max_tokens // row_sizes(lengths, budget.size))


def round_caps(budget: Budget, most: Int64[np.ndarray, " *n"]) -> Int64[np.ndarray, " *n"]:
    """Cuts rows at `max_sequences`, and rounds them down to `row_multiple` where one remains."""
    most = most if budget.max_sequences is None else np.minimum(most, budget.max_sequences)
    return np.where(most >= budget.row_multiple, most - most % budget.row_multiple, most)


def num_steps(
    budget: Budget, num_samples: Int64[np.ndarray, " *n"], rows: Int64[np.ndarray, " *n"]
) -> Int64[np.ndarray, " *n"]:
    """How many steps the samples of each bucket take in microbatches of these rows, each at least 1."""
    return -(-num_samples // (budget.num_microbatches * rows))


def steps_and_rows(
    budget: Budget, num_samples: Int64[np.ndarray, " *n"], cap: Int64[np.ndarray, " *n"]
) -> tuple[Int64[np.ndarray, " *n"], Int64[np.ndarray, " *n"]]:
    """How many steps each bucket takes with at most `cap` rows, and how many rows it needs; `cap` if it is empty."""
    # Trimming the rows turns one nearly empty last step into steps that are all nearly full.
    steps = num_steps(budget, num_samples, cap)
    needed = round_up(num_steps(budget, num_samples, np.maximum(steps, 1)), budget.row_multiple)
    return steps, np.where(num_samples > 0, np.minimum(cap, needed), cap)


def bucket_costs(
    budget: Budget,
    num_held: Int64[np.ndarray, " *n"],
    cap: Int64[np.ndarray, " *n"],
    size: Int64[np.ndarray, " *n"],
    lengths: tuple[Int64[np.ndarray, ""], ...] | None = None,
) -> Shaped[np.ndarray, " *n"]:
    """The cost of each bucket in all its microbatches: int64 tokens, or float64 with a cost function."""
    # The size is the length, or of samples of several, which are given, what they count.
    steps, rows = steps_and_rows(budget, num_held, cap)
    microbatches = steps * budget.num_microbatches
    if budget.cost is None:
        return microbatches * (rows * size)
    each = evaluate_cost(budget.cost, rows, *(lengths or (size,)))
    return microbatches.astype(np.float64) * each + (budget.compile_seconds or 0.0)


def broken_by_one_row(budget: Budget, length: int) -> str:
    """The limits that a single row exceeds, in words; an empty text if it exceeds none."""
    broken = [f"max_tokens {budget.max_tokens}"] if length > budget.max_tokens else []
    for name, limit, source, function in _limits(budget):
        value = evaluate_cost(function, np.array([1]), np.array([length]), name=source)[0]
        broken += [f"{name} {limit:g} (one row needs {value:g})"] if value > limit else []
    return " and ".join(broken)


def takes_budget(function: _T) -> _T:
    """A function whose other keywords are the fields of a `Budget`."""
    return check_keywords(function, [field.name for field in dataclasses.fields(Budget)])


class BudgetFields(TypedDict, total=False):
    """The fields of a `Budget` as keywords, except `max_tokens`."""

    max_shapes: int
    max_length: int | None
    strategy: Strategy | Sequence[int]
    num_microbatches: int
    row_multiple: int
    length_multiple: int | Sequence[int]
    length_offset: int | Sequence[int]
    max_sequences: int | None
    compile_seconds: float | None
    max_cost: float | None
    max_bytes: float | None
    cost: CostFn | None
    memory: CostFn | None
    size: SampleSize


class PlanBudgetFields(BudgetFields, total=False):
    """All fields of a `Budget` as keywords, for what takes buckets or else chooses them."""

    max_tokens: int


def as_budget(max_tokens: int | Budget, fields: BudgetFields) -> Budget:
    """The budget of these tokens and other fields; a given `Budget` keeps those that are not among the others."""
    if isinstance(max_tokens, Budget):
        return dataclasses.replace(max_tokens, **fields)
    return Budget(max_tokens=max_tokens, **fields)


def check_bucket_lengths(lengths: Sequence[int], name: str = "given lengths") -> Int64[np.ndarray, " K"]:
    """Checks given lengths of rows: integers ≥ 1, strictly ascending."""
    given = np.asarray(lengths)
    is_integers = given.ndim == 1 and given.size > 0 and given.dtype.kind in "iu"
    if not is_integers or given.min() < 1 or (given[1:] <= given[:-1]).any():
        raise UserError(f"{name} must be integers of at least 1 that strictly ascend, not {lengths!r}")
    return given.astype(np.int64)


def evaluate_cost(function: CostFn, *shape: Int64[np.ndarray, " *n"], name: str = "cost") -> Float64[np.ndarray, " *n"]:
    """function(rows, *lengths) as float64; raises ValueError where it is not finite and at least 0."""
    try:
        values = np.broadcast_to(np.asarray(function(*shape), np.float64), np.broadcast_shapes(*map(np.shape, shape)))
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} takes int64 arrays of rows and lengths, and gives one number each: {error}") from error
    wrong = ~(np.isfinite(values) & (values >= 0))
    if wrong.any():
        first = int(wrong.argmax())
        sizes = ", ".join(str(axis.flat[first]) for axis in np.broadcast_arrays(*shape))
        raise UserError(f"{name}({sizes}) is {values.flat[first]}; it must be finite and at least 0")
    return values


def round_up(values: _Numbers, multiple: int) -> _Numbers:
    """The next multiple, of an integer or of an array of integers."""
    return -(-values // multiple) * multiple


def _most_rows_within(
    function: CostFn, limit: float, name: str, length: Int64[np.ndarray, " n"], most: Int64[np.ndarray, " n"]
) -> Int64[np.ndarray, " n"]:
    """The largest number of rows, at most `most`, whose cost is within a limit: bisection for all lengths at once."""
    low, high = np.zeros_like(most), most
    while (is_open := low < high).any():
        middle = (low + high + 1) // 2
        fits = evaluate_cost(function, np.maximum(middle, 1), length, name=name) <= limit
        low = np.where(is_open & fits, middle, low)
        high = np.where(is_open & ~fits, middle - 1, high)
    return low
