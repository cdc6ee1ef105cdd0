"""Budgets of checked arguments, and the samples that fit them."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from torch_ref.checks import MAX_LISTED, check_integer, check_number, to_tensor
from torch_ref.lengths import check_lengths, check_overlong, fit_lengths
from torch_ref.rows import Budget, Cost, RowRule, round_up

__all__ = ["Fitting", "check_budget", "check_compile_seconds", "check_rule", "fit_budget"]


def check_rule(microbatches_per_step: int, row_multiple: int) -> RowRule:
    """Return the row rule of checked arguments."""
    return RowRule(
        microbatches_per_step=check_integer("microbatches_per_step", microbatches_per_step),
        row_multiple=check_integer("row_multiple", row_multiple),
    )


def check_budget(
    max_tokens: int,
    max_sequences: int | None,
    cost: Cost | None,
    max_cost: float | None,
    memory: Cost | None,
    max_bytes: float | None,
) -> Budget:
    """Return the budget of checked arguments; those that do not go together are a ValueError."""
    for name, function, limit_name, limit in (
        ("cost", cost, "max_cost", max_cost),
        ("memory", memory, "max_bytes", max_bytes),
    ):
        if function is not None and not callable(function):
            raise ValueError(f"{name} must be a function of (rows, length), got {function!r}")
        if limit is not None and function is None:
            raise ValueError(f"{limit_name} needs {name}, a function of (rows, length)")
    return Budget(
        max_tokens=check_integer("max_tokens", max_tokens),
        max_sequences=None if max_sequences is None else check_integer("max_sequences", max_sequences),
        cost=cost,
        max_cost=None if max_cost is None else check_number("max_cost", max_cost, above=0),
        memory=memory,
        max_bytes=None if max_bytes is None else check_number("max_bytes", max_bytes, above=0),
    )


def check_compile_seconds(cost: Cost | None, compile_seconds: float | None) -> None:
    """Refuse a price of a bucket that is no number, or that has nothing to be compared with."""
    if compile_seconds is None:
        return
    if cost is None:
        raise ValueError("compile_seconds needs a cost in seconds")
    check_number("compile_seconds", compile_seconds)


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """Samples that a longest length was applied to.

    Attributes:
        sample_ids: int64[n], ascending.
        lengths: int64[n], cut, each of which `length_multiple` rounds to at most `max_tokens`.
        length_multiple: bucket lengths are multiples of it.
        budget: what a microbatch may take.
    """

    sample_ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    length_multiple: int
    budget: Budget

    @property
    def ordered(self) -> Tensor:
        """int64[n], the lengths ascending."""
        return torch.sort(to_tensor(self.lengths)).values

    @property
    def rounded(self) -> Tensor:
        """int64[n], in the order of the ids."""
        return round_up(to_tensor(self.lengths), self.length_multiple)

    def refuse(self, edges: Tensor) -> None:
        """Raise a ValueError for edges int64[k], k >= 1, of which not even one row fits.

        It lists the samples whose own rounded length no microbatch holds; there may be none.
        """
        rounded = [-(-int(length) // self.length_multiple) * self.length_multiple for length in self.lengths]
        limits = {length: self.budget.refusals(length) for length in {*rounded, *edges.tolist()}}
        unfit = [(int(i), length) for i, length in zip(self.sample_ids, rounded, strict=True) if limits[length]]
        names = {name: limit for refused in limits.values() for name, limit in refused.items()}
        listed = [
            f"id {i}: {length} ({', '.join(f'{name} {limit}' for name, limit in limits[length].items())})"
            for i, length in unfit[:MAX_LISTED]
        ]
        raise ValueError(
            f"{', '.join(f'{name}={limit}' for name, limit in names.items())} leaves no row of some lengths, rounded "
            f"up to a multiple of {self.length_multiple}: {', '.join(listed) or f'lengths {edges.tolist()}'}"
            + (f" and {len(unfit) - MAX_LISTED} more" if len(unfit) > MAX_LISTED else "")
        )


def fit_budget(
    lengths: ArrayLike, max_length: int | None, overlong: str, length_multiple: int, budget: Budget, *, every: bool
) -> Fitting:
    """Apply the longest length and the budget to the samples.

    Args:
        lengths: [N] integers >= 1, in tokens.
        max_length: the longest bucket is at most this long, or None.
        overlong: "error" | "drop" | "truncate".
        length_multiple: bucket lengths are multiples of it.
        budget: what a microbatch may take.
        every: whether one row of each sample's own rounded length must fit all budgets, or only `max_tokens`.

    Returns:
        The samples that are left.

    Raises:
        ValueError: if a sample does not fit, or `max_length` cannot hold the longest one, rounded.
    """
    checked = check_lengths(lengths)
    check_overlong(overlong)
    ids = np.arange(len(checked))
    clipped = checked
    if max_length is not None:
        max_length = check_integer("max_length", max_length)
        ids, clipped, *_ = fit_lengths(checked, ids, max_length, overlong, name="max_length")
        longest = -(-int(clipped.max()) // length_multiple) * length_multiple
        if longest > max_length:
            raise ValueError(
                f"the longest bucket would be {longest}, above max_length={max_length}: "
                f"make max_length a multiple of length_multiple={length_multiple}"
            )
    fitting = Fitting(sample_ids=ids, lengths=clipped, length_multiple=length_multiple, budget=budget)
    if int(clipped.max()) > budget.max_tokens // length_multiple * length_multiple:
        fitting.refuse(torch.empty(0, dtype=torch.int64))
    if every:
        distinct = torch.unique(fitting.rounded)
        if bool((budget.caps(distinct, 1) < 1).any()):
            fitting.refuse(distinct)
    return fitting
