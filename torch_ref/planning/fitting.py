"""The samples that fit a budget."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from torch_ref.checks import MAX_LISTED, to_tensor
from torch_ref.planning.budget import Budget
from torch_ref.planning.lengths import check_lengths, check_overlong, fit_lengths

__all__ = ["Fitting", "fit_budget"]

_MOST_CANDIDATES = 5000  # the time is quadratic in them


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """Samples that a longest length was applied to.

    Attributes:
        sample_ids: int64[n], ascending.
        lengths: int64[n], cut, each at most `max_tokens` when `length_multiple` has rounded it.
        budget: what a microbatch may take.
    """

    sample_ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    budget: Budget

    @property
    def ordered(self) -> Tensor:
        """int64[n], the lengths ascending."""
        return torch.sort(to_tensor(self.lengths)).values

    @property
    def rounded(self) -> Tensor:
        """int64[n], in the order of the ids."""
        return to_tensor(self.budget.round_lengths(self.lengths))

    def candidates(self, lengths: Tensor) -> Tensor:
        """Round lengths up to those that "optimal" chooses from, if these are not all rounded lengths of samples."""
        distinct = torch.unique(self.rounded)
        every = -(-len(distinct) // _MOST_CANDIDATES)
        if every == 1:
            return lengths
        kept = distinct[torch.arange(len(distinct) - 1, -1, -every).flip(0)]
        return kept[torch.searchsorted(kept, lengths)]

    def refuse(self, bucket_lengths: Tensor) -> None:
        """Raise a ValueError for lengths int64[k] for which not even one row fits.

        It lists the samples whose rounded length no microbatch holds; there may be none.
        """
        rounded = [int(self.budget.round_lengths(int(length))) for length in self.lengths]
        limits = {length: self.budget.refusals(length) for length in {*rounded, *bucket_lengths.tolist()}}
        unfit = [(int(i), length) for i, length in zip(self.sample_ids, rounded, strict=True) if limits[length]]
        names = {name: limit for refused in limits.values() for name, limit in refused.items()}
        listed = [
            f"id {i}: {length} ({', '.join(f'{name} {limit}' for name, limit in limits[length].items())})"
            for i, length in unfit[:MAX_LISTED]
        ]
        raise ValueError(
            f"{', '.join(f'{name}={limit}' for name, limit in names.items())} leaves no row of some lengths"
            + (f", rounded up to {self.budget.form_of_lengths}" if self.budget.length_multiple != 1 else "")
            + f": {', '.join(listed) or f'lengths {bucket_lengths.tolist()}'}"
            + (f" and {len(unfit) - MAX_LISTED} more" if len(unfit) > MAX_LISTED else "")
        )


def fit_budget(lengths: ArrayLike, overlong: str, budget: Budget, *, every: bool) -> Fitting:
    """Apply the longest length and the budget to the samples.

    `every` says whether one row of each sample's rounded length must fit all limits, or only `max_tokens`.

    Raises:
        ValueError: if a sample does not fit, or the longest length cannot hold the longest one, rounded.
    """
    checked = check_lengths(lengths)
    check_overlong(overlong)
    ids = np.arange(len(checked))
    clipped = checked
    max_length = budget.max_length if budget.given_lengths is None else budget.given_lengths[-1]
    if max_length is not None:
        ids, clipped, *_ = fit_lengths(checked, ids, max_length, overlong, name="max_length")
        longest = budget.round_lengths(int(clipped.max()))
        if longest > max_length:
            raise ValueError(
                f"the longest bucket would be {longest}, above max_length={max_length}: "
                f"make max_length {budget.form_of_lengths}, as length_multiple and length_offset say"
            )
    fitting = Fitting(sample_ids=ids, lengths=clipped, budget=budget)
    if budget.round_lengths(int(clipped.max())) > budget.max_tokens:
        fitting.refuse(torch.empty(0, dtype=torch.int64))
    if every:
        distinct = torch.unique(fitting.rounded)
        if bool((budget.caps(distinct) < 1).any()):
            fitting.refuse(distinct)
    return fitting
