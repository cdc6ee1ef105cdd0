"""Budgets: what a microbatch may take, its rows, and the steps that a number of samples takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from torch_ref.checks import MAX_LISTED, check_count, check_integer, check_number, known_keywords, to_tensor
from torch_ref.planning.lengths import check_ascending, check_size

__all__ = [
    "STRATEGIES",
    "Budget",
    "BudgetFields",
    "Cost",
    "PlanBudgetFields",
    "as_budget",
    "ceil_div",
    "checked_costs",
    "round_up",
    "takes_budget",
]

_Called = TypeVar("_Called", bound=Callable[..., Any])
Cost = Callable[..., ArrayLike]

STRATEGIES = ("pad_to_max", "powers_of_two", "geometric", "quantile", "equal_tokens", "optimal")
_INTEGERS = ("max_tokens", "max_shapes", "num_microbatches", "row_multiple")


def ceil_div(numerator: Tensor, denominator: Tensor | int) -> Tensor:
    """Return the quotient of integers >= 0, rounded up."""
    return numerator if isinstance(denominator, int) and denominator == 1 else -(-numerator // denominator)


def round_up(values: Tensor, multiple: int) -> Tensor:
    """Return the smallest multiples that are at least the values."""
    return ceil_div(values, multiple) * multiple


@known_keywords
@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a microbatch may take, and how bucket lengths are chosen.

    Attributes:
        max_tokens: rows times length of a microbatch never exceed it.
        max_shapes: at most this many buckets ("powers_of_two" and given lengths take as many as they need).
        max_length: the longest bucket is at most this long; None is no limit.
        strategy: "pad_to_max" | "powers_of_two" | "geometric" | "quantile" | "equal_tokens" | "optimal", or strictly
            ascending lengths >= 1, the last of which then limits the samples as `max_length` does. "optimal" finds the
            least total cost exactly, in time quadratic in the number of distinct lengths.
        num_microbatches: M.
        row_multiple: rows are a multiple of it wherever the limits leave at least one multiple.
        length_multiple: bucket lengths are multiples of it, plus `length_offset`; of samples of several lengths all
            are, or those of each length of its own number in a sequence.
        length_offset: at least 0 and below `length_multiple`, likewise.
        max_sequences: a microbatch has at most this many rows; None is no limit.
        cost: the cost of a microbatch: called as cost(rows, length) with int64 arrays that broadcast, gives
            float64 >= 0. "optimal" minimises it; None counts tokens with padding, rows times length. For
            several lengths it is cost(rows, first, second, ...), or None for rows times `size`.
        compile_seconds: what each further bucket costs, in the unit of `cost`; only together with it.
        max_cost: a microbatch costs at most this; only together with `cost`, which must not fall as rows grow.
        memory: the bytes that a microbatch needs, a function like `cost` that does not fall as rows grow.
        max_bytes: a microbatch needs at most this; only together with `memory`.
        size: what a sample of several lengths counts: their "sum", the "larger" or largest, or their "product"
            (pixels). It is the unit of `max_tokens`, of the choice of buckets, and of a plan's tokens and padding.

    Raises:
        ValueError: if a field is out of its range, or lacks the one that it goes with.
    """

    max_tokens: int
    max_shapes: int = 16
    max_length: int | None = None
    strategy: str | Sequence[int] = "optimal"
    num_microbatches: int = 1
    row_multiple: int = 1
    length_multiple: int | Sequence[int] = 1
    length_offset: int | Sequence[int] = 0
    max_sequences: int | None = None
    cost: Cost | None = None
    compile_seconds: float | None = None
    max_cost: float | None = None
    memory: Cost | None = None
    max_bytes: float | None = None
    size: str = "sum"

    def __post_init__(self) -> None:
        """Check the fields, and make plain numbers of them."""
        for name in _INTEGERS:
            self._set(name, check_integer(name, getattr(self, name)))
        self._check_form_of_lengths()
        for name in ("max_length", "max_sequences"):
            self._set(name, check_count(name, getattr(self, name)))
        if np.iterable(self.strategy) and not isinstance(self.strategy, str):
            self._set("strategy", check_ascending("strategy", self.strategy))
        elif self.strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, or lengths, got {self.strategy!r}")
        check_size(self.size)
        for name, limit_name in (("cost", "max_cost"), ("memory", "max_bytes")):
            function, limit = getattr(self, name), getattr(self, limit_name)
            if function is not None and not callable(function):
                raise ValueError(f"{name} must be a function of (rows, length), got {function!r}")
            if limit is None:
                continue
            if function is None:
                raise ValueError(f"{limit_name} needs {name}, a function of (rows, length)")
            self._set(limit_name, check_number(limit_name, limit, above=0))
        if self.compile_seconds is not None:
            if self.cost is None:
                raise ValueError("compile_seconds needs a cost in seconds")
            check_number("compile_seconds", self.compile_seconds)

    @property
    def given_lengths(self) -> list[int] | None:
        """The lengths that the strategy gives, rounded up and deduplicated, or None."""
        if isinstance(self.strategy, str):
            return None
        lengths = np.unique(self.of_side(0, 1).round_lengths(np.array(self.strategy, dtype=np.int64))).tolist()
        check_integer("the last length of strategy, rounded up to length_multiple,", lengths[-1])
        if self.max_length is not None and lengths[-1] > self.max_length:
            raise ValueError(f"the last length of strategy, {lengths[-1]}, is above max_length={self.max_length}")
        return lengths

    def _check_form_of_lengths(self) -> None:
        """Check `length_multiple` and `length_offset`, and make plain numbers or tuples of them."""
        for name, least in (("length_multiple", 1), ("length_offset", 0)):
            value = getattr(self, name)
            if not np.iterable(value) or isinstance(value, str):
                self._set(name, check_integer(name, value, minimum=least))
                continue
            of_each = [check_integer(f"{name} of length {i}", each, minimum=least) for i, each in enumerate(value)]
            self._set(name, tuple(of_each))
        sizes = {len(each) for each in (self.length_multiple, self.length_offset) if isinstance(each, tuple)}
        if len(sizes) > 1 or 0 in sizes:
            raise ValueError(f"length_multiple and length_offset must be numbers of as many lengths, got {sizes}")
        for side in range(max(sizes, default=1)):
            multiple, offset = self._form_of(side)
            if offset >= multiple:
                raise ValueError(f"length_offset must be below length_multiple, got {offset} and {multiple}")

    def _form_of(self, side: int) -> tuple[int, int]:
        multiple, offset = self.length_multiple, self.length_offset
        return (
            multiple if isinstance(multiple, int) else multiple[side],
            offset if isinstance(offset, int) else offset[side],
        )

    def of_side(self, side: int, num_lengths: int) -> "Budget":
        """Return the budget with the form of one of the lengths of samples, of which they have this many.

        Raises:
            ValueError: if `length_multiple` or `length_offset` are those of another number of lengths.
        """
        for name in ("length_multiple", "length_offset"):
            value = getattr(self, name)
            if not isinstance(value, int) and len(value) != num_lengths:
                raise ValueError(f"{name}={value} is that of {len(value)} lengths, samples have {num_lengths}")
        multiple, offset = self._form_of(side)
        return replace(self, length_multiple=multiple, length_offset=offset)

    def round_lengths(self, lengths: Any) -> Any:
        """Return the least lengths of the form that are at least these integers >= 1, of a number, array or tensor."""
        multiple, offset = self._form_of(0)
        return -(-(lengths - offset) // multiple) * multiple + offset

    @property
    def form_of_lengths(self) -> str:
        """What bucket lengths are, in words."""
        return f"a multiple of {self.length_multiple}" + (f" plus {self.length_offset}" if self.length_offset else "")

    def rows_and_steps(self, num_samples: Tensor, caps: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of a microbatch and the steps that the samples of a bucket take, int64 tensors.

        `caps` are the most rows allowed, at least 1. A bucket without samples has as many rows, and no step.
        """
        share = ceil_div(num_samples, self.num_microbatches)
        steps = ceil_div(share, caps)
        rows = round_up(ceil_div(share, steps.clamp(min=1)), self.row_multiple)
        return torch.where(steps > 0, torch.minimum(rows, caps), caps), steps

    def caps(self, lengths: Tensor) -> Tensor:
        """Return the most rows of lengths int64[n] that stay inside all limits, by bisection; 0 where not even one.

        They are multiples of `row_multiple` wherever one remains.
        """
        high = self.max_tokens // lengths
        if self.max_sequences is not None:
            high = high.clamp(max=self.max_sequences)
        if not self._functions():
            return self._round_caps(high)
        low = torch.zeros_like(high)
        while bool((undecided := low < high).any()):
            middle = high - (high - low) // 2
            fits = torch.zeros_like(undecided)
            fits[undecided] = self._fits(middle[undecided], lengths[undecided])
            low = torch.where(fits, middle, low)
            high = torch.where(undecided & ~fits, middle - 1, high)
        return self._round_caps(low)

    def _round_caps(self, caps: Tensor) -> Tensor:
        return torch.where(caps >= self.row_multiple, caps - caps % self.row_multiple, caps)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def refusals(self, length: int) -> dict[str, float]:
        """Return the limits that not even one row of this length meets, by name."""
        if length > self.max_tokens:
            return {"max_tokens": self.max_tokens}
        row, lengths = torch.tensor([1]), torch.tensor([length])
        above = {}
        for name, (label, function, limit) in self._functions().items():
            if checked_costs(label, function, row, lengths)[0] > limit:
                above[name] = limit
        return above

    def _functions(self) -> dict[str, tuple[str, Cost, float]]:
        functions: dict[str, tuple[str, Cost, float]] = {}
        if self.cost is not None and self.max_cost is not None:
            functions["max_cost"] = ("cost", self.cost, self.max_cost)
        if self.memory is not None and self.max_bytes is not None:
            functions["max_bytes"] = ("memory", self.memory, self.max_bytes)
        return functions

    def _fits(self, rows: Tensor, lengths: Tensor) -> Tensor:
        fits = torch.ones(len(rows), dtype=torch.bool)
        for label, function, limit in self._functions().values():
            fits &= checked_costs(label, function, rows, lengths) <= limit
        return fits


class BudgetFields(TypedDict, total=False):
    """The fields of a `Budget` as keywords, but for `max_tokens`."""

    max_shapes: int
    max_length: int | None
    strategy: str | Sequence[int]
    num_microbatches: int
    row_multiple: int
    length_multiple: int | Sequence[int]
    length_offset: int | Sequence[int]
    max_sequences: int | None
    cost: Cost | None
    compile_seconds: float | None
    max_cost: float | None
    memory: Cost | None
    max_bytes: float | None
    size: str


class PlanBudgetFields(BudgetFields, total=False):
    """All fields of a `Budget` as keywords, for what takes buckets or else chooses them."""

    max_tokens: int


def as_budget(max_tokens: int | Budget, fields: BudgetFields) -> Budget:
    """Return the budget of keywords, or a given one with these in place of its fields."""
    return replace(max_tokens, **fields) if isinstance(max_tokens, Budget) else Budget(max_tokens=max_tokens, **fields)


def takes_budget(function: _Called) -> _Called:
    """Return a function whose further keywords are the fields of a `Budget`."""
    return known_keywords(function, list(Budget.__dataclass_fields__))


def checked_costs(label: str, function: Cost, rows: Tensor, *lengths: Tensor) -> Tensor:
    """Call a function of rows and lengths, int64 tensors that broadcast, and return float64 of the shape of `rows`.

    Raises:
        ValueError: if the values are no numbers, or not finite, or below 0; the first shapes are listed.
    """
    try:
        values: NDArray[Any] = np.asarray(function(rows.numpy(), *(each.numpy() for each in lengths)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{label} must take int64 arrays of rows and lengths: {error}") from error
    if values.dtype.kind not in "iuf":
        raise ValueError(f"{label} must return float64, got dtype {values.dtype}")
    costs = np.broadcast_to(values, rows.shape).astype(np.float64)
    bad = np.flatnonzero(~(np.isfinite(costs) & (costs >= 0)))
    if len(bad):
        sides = [each.expand_as(rows).reshape(-1).tolist() for each in (rows, *lengths)]
        shapes = ", ".join(f"{' x '.join(str(side[i]) for side in sides)}: {costs.flat[i]}" for i in bad[:MAX_LISTED])
        raise ValueError(f"{label} must be finite and at least 0; rows x length: {shapes}")
    return to_tensor(costs)
