"""The rows of a microbatch and the number of steps, from budgets and a number of samples."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from torch_ref.checks import MAX_LISTED, to_tensor

__all__ = ["Budget", "Cost", "RowRule", "ceil_div", "checked_costs", "round_caps", "round_up"]

Cost = Callable[[NDArray[np.int64], NDArray[np.int64]], ArrayLike]


def ceil_div(numerator: Tensor, denominator: Tensor | int) -> Tensor:
    """Return the quotient of integers >= 0, rounded up."""
    return -(-numerator // denominator)


def round_up(values: Tensor, multiple: int) -> Tensor:
    """Return the smallest multiples that are at least the values."""
    return ceil_div(values, multiple) * multiple


def round_caps(caps: Tensor, row_multiple: int) -> Tensor:
    """Round caps down to a multiple of rows wherever at least one multiple remains."""
    return torch.where(caps >= row_multiple, caps - caps % row_multiple, caps)


@dataclass(frozen=True, kw_only=True)
class RowRule:
    """How many rows a microbatch gets, from its cap and from how many samples its bucket holds.

    Attributes:
        microbatches_per_step: M.
        row_multiple: rows are a multiple of it wherever the cap leaves at least one multiple.
    """

    microbatches_per_step: int
    row_multiple: int

    def rows_and_steps(self, num_samples: Tensor, caps: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of a microbatch and the steps that the samples take.

        Args:
            num_samples: int64, samples in the bucket; 0 gives as many rows as the cap allows, and no step.
            caps: int64 of a shape that broadcasts, the most rows allowed, at least 1, rounded to the multiple.

        Returns:
            (rows, steps), two int64 tensors of the common shape.
        """
        share = ceil_div(num_samples, self.microbatches_per_step)
        steps = self.num_steps(num_samples, caps)
        rows = round_up(ceil_div(share, steps.clamp(min=1)), self.row_multiple)
        return torch.where(steps > 0, torch.minimum(rows, caps), caps), steps

    def num_steps(self, num_samples: Tensor, rows: Tensor) -> Tensor:
        """Return the steps that the samples take with given rows.

        Args:
            num_samples: int64, samples in the bucket.
            rows: int64 of a shape that broadcasts, at least 1.

        Returns:
            int64 of the common shape.
        """
        # ceil(ceil(n / M) / x) = ceil(n / (M * x)), without a product that could overflow.
        return ceil_div(ceil_div(num_samples, self.microbatches_per_step), rows)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a microbatch may take: positions, and where given cost and bytes.

    Attributes:
        max_tokens: rows times length.
        max_sequences: rows, or None.
        cost: a function of rows and length that does not fall as rows grow, or None.
        max_cost: its limit, or None.
        memory: likewise, in bytes.
        max_bytes: its limit, or None.
    """

    max_tokens: int
    max_sequences: int | None = None
    cost: Cost | None = None
    max_cost: float | None = None
    memory: Cost | None = None
    max_bytes: float | None = None

    def caps(self, lengths: Tensor, row_multiple: int) -> Tensor:
        """Return the most rows that stay inside all limits, by bisection.

        Args:
            lengths: int64[n], in tokens.
            row_multiple: as in `RowRule`.

        Returns:
            int64[n], 0 where not even one row fits.

        Raises:
            ValueError: if a function gives what is not a finite number >= 0.
        """
        high = self.max_tokens // lengths
        if self.max_sequences is not None:
            high = high.clamp(max=self.max_sequences)
        if not self._functions():
            return round_caps(high, row_multiple)
        low = torch.zeros_like(high)
        while bool((undecided := low < high).any()):
            middle = high - (high - low) // 2
            fits = torch.zeros_like(undecided)
            fits[undecided] = self._fits(middle[undecided], lengths[undecided])
            low = torch.where(fits, middle, low)
            high = torch.where(undecided & ~fits, middle - 1, high)
        return round_caps(low, row_multiple)

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


def checked_costs(label: str, function: Cost, rows: Tensor, lengths: Tensor) -> Tensor:
    """Call a function of rows and lengths and check what it gives.

    Args:
        label: what the message calls it.
        function: called with two int64 arrays that broadcast.
        rows: int64[n].
        lengths: int64[n] or int64[1].

    Returns:
        float64[n].

    Raises:
        ValueError: if the values are no numbers, or not finite, or below 0; the first shapes are listed.
    """
    values: NDArray[Any] = np.asarray(function(rows.numpy(), lengths.numpy()))
    if values.dtype.kind not in "iuf":
        raise ValueError(f"{label} must return float64, got dtype {values.dtype}")
    costs = np.broadcast_to(values, rows.shape).astype(np.float64)
    bad = np.flatnonzero(~(np.isfinite(costs) & (costs >= 0)))
    if len(bad):
        each = lengths.expand_as(rows)
        shapes = ", ".join(f"{int(rows[i])} x {int(each[i])}: {costs[i]}" for i in bad[:MAX_LISTED])
        raise ValueError(f"{label} must be finite and at least 0; rows x length: {shapes}")
    return to_tensor(costs)
