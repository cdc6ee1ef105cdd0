"""The budget of a microbatch, in tokens, cost and bytes, and how many rows of a length it allows.

NumPy only. Letters: M microbatches a step, B rows, T length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64, Int64

from jvarlen._common.checks import check_at_least_one, is_number

__all__ = ["Budget", "CostFn", "checked_cost", "make_budget", "round_up"]

CostFn = Callable[..., npt.ArrayLike]


class _Limit(NamedTuple):
    """A limit on a function of rows and length, and the names of both."""

    name: str
    value: float
    function_name: str
    function: CostFn


class Budget(NamedTuple):
    """The limits that decide the rows of a bucket.

    Attributes:
      max_tokens: the most tokens of a microbatch, padding included.
      microbatches_per_step: M.
      row_multiple: rows are a multiple of it, where the limits allow one.
      limits: every other quantity that has a limit.
    """

    max_tokens: int
    microbatches_per_step: int = 1
    row_multiple: int = 1
    limits: tuple[_Limit, ...] = ()

    def row_caps(self, length: Int64[np.ndarray, " *n"]) -> Int64[np.ndarray, " *n"]:
        """The most rows that a microbatch of each length may have; 0 where not even one fits.

        Args:
          length: int64[...], tokens a row.

        Returns:
          int64[...], a multiple of `row_multiple` where one remains.

        Raises:
          ValueError: a cost that is not finite or below 0.
        """
        most = self.max_tokens // length
        for limit in self.limits:
            most = _most_rows_within(limit, length, most)
        return self.rounded_caps(most)

    def rounded_caps(self, most: Int64[np.ndarray, " *n"]) -> Int64[np.ndarray, " *n"]:
        """Rounds rows down to `row_multiple`, where one remains."""
        return np.where(most >= self.row_multiple, most - most % self.row_multiple, most)

    def steps_and_rows(
        self, num_samples: Int64[np.ndarray, " *n"], cap: Int64[np.ndarray, " *n"]
    ) -> tuple[Int64[np.ndarray, " *n"], Int64[np.ndarray, " *n"]]:
        """How many steps a bucket takes and how many rows it then needs.

        Trimming the rows to what the steps need turns one nearly empty last step into steps that are all nearly full.

        Args:
          num_samples: int64[...], samples of each bucket.
          cap: int64[...], from `row_caps`, each at least 1.

        Returns:
          steps and rows, int64[...] each; rows of a bucket without samples are its cap.
        """
        microbatches, multiple = self.microbatches_per_step, self.row_multiple
        steps = -(-num_samples // (microbatches * cap))
        needed = -(-num_samples // (microbatches * np.maximum(steps, 1)))
        return steps, np.where(num_samples > 0, np.minimum(cap, round_up(needed, multiple)), cap)

    def broken_by_one_row(self, length: int) -> str:
        """The limits that a single row of this length exceeds, in words."""
        broken = [f"max_tokens {self.max_tokens}"] if length > self.max_tokens else []
        for limit in self.limits:
            value = checked_cost(limit.function, np.array([1]), np.array([length]), name=limit.function_name)[0]
            if value > limit.value:
                broken.append(f"{limit.name} {limit.value:g} (one row needs {value:g})")
        return " and ".join(broken)


def make_budget(
    max_tokens: int,
    *,
    microbatches_per_step: int = 1,
    row_multiple: int = 1,
    cost: CostFn | None = None,
    max_cost: float | None = None,
    memory: CostFn | None = None,
    max_bytes: float | None = None,
) -> Budget:
    """Checks the limits of a microbatch and joins them.

    Args:
      max_tokens: the most tokens, padding included.
      microbatches_per_step: M.
      row_multiple: what rows are a multiple of.
      cost: cost(rows, length) of a microbatch, not falling as rows grow.
      max_cost: the most that a microbatch may cost; needs `cost`.
      memory: memory(rows, length) in bytes, not falling as rows grow.
      max_bytes: the most bytes; needs `memory`.

    Returns:
      `Budget`.

    Raises:
      ValueError: limits that are no positive numbers, or lack their function.
    """
    check_at_least_one(max_tokens=max_tokens, microbatches_per_step=microbatches_per_step, row_multiple=row_multiple)
    if max_tokens * microbatches_per_step >= 2**63:
        raise ValueError(
            f"max_tokens × microbatches_per_step ({max_tokens} × {microbatches_per_step}) must be below 2**63"
        )
    limits = []
    for name, limit, source, function in (
        ("max_cost", max_cost, "cost", cost),
        ("max_bytes", max_bytes, "memory", memory),
    ):
        if function is not None and not callable(function):
            raise ValueError(f"{source} must be a function of rows and length, not {function!r}")
        if limit is None:
            continue
        if function is None:
            raise ValueError(f"{name} ({limit!r}) needs {source}, a function of rows and length")
        if not is_number(limit) or not 0 < limit < math.inf:
            raise ValueError(f"{name} must be finite and above 0, not {limit!r}")
        limits.append(_Limit(name, float(limit), source, function))
    return Budget(int(max_tokens), int(microbatches_per_step), int(row_multiple), tuple(limits))


def checked_cost(function: CostFn, *shape: Int64[np.ndarray, " *n"], name: str = "cost") -> Float64[np.ndarray, " *n"]:
    """function(rows, length, ...) as float64; raises ValueError where it is not finite and at least 0."""
    values = np.broadcast_to(np.asarray(function(*shape), np.float64), shape[0].shape)
    wrong = ~(np.isfinite(values) & (values >= 0))
    if wrong.any():
        first = int(wrong.argmax())
        place = ", ".join(f"{label}={axis[first]}" for label, axis in zip(("rows", "length"), shape, strict=True))
        raise ValueError(f"{name}({place}) is {values[first]}; it must be finite and at least 0")
    return values


def round_up(values: Any, multiple: int) -> Any:
    """The next multiple, of an integer or of an array of integers."""
    return -(-values // multiple) * multiple


def _most_rows_within(
    limit: _Limit, length: Int64[np.ndarray, " n"], most: Int64[np.ndarray, " n"]
) -> Int64[np.ndarray, " n"]:
    """The largest number of rows, at most `most`, whose cost is within the limit: bisection for all lengths at once."""
    low, high = np.zeros_like(most), most
    while (is_open := low < high).any():
        middle = (low + high + 1) // 2
        fits = checked_cost(limit.function, np.maximum(middle, 1), length, name=limit.function_name) <= limit.value
        low = np.where(is_open & fits, middle, low)
        high = np.where(is_open & ~fits, middle - 1, high)
    return low
