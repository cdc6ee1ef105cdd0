"""Padded rows, packed rows of several lengths, or packed rows of one length: which epoch takes the fewest seconds."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torch_ref.checks import as_array
from torch_ref.planning.budget import Budget
from torch_ref.planning.costs import CostModel
from torch_ref.planning.plan import Plan

__all__ = ["choose_by_seconds", "settle_packing"]


def settle_packing(only_packed: dict[str, bool], only_single: dict[str, bool]) -> tuple[str, str]:
    """Return "best_fit", "padded", or "auto" where no argument decides, and which arguments decided.

    Each of the two dicts says whether an argument was given that only packed rows, or only single samples, can have.

    Raises:
        ValueError: if arguments of both kinds were given.
    """
    packed, single = ([name for name, given in names.items() if given] for names in (only_packed, only_single))
    if packed and single:
        raise ValueError(f"{', '.join(packed)} is only for packed rows, {', '.join(single)} only for single samples")
    if packed:
        return "best_fit", f"packed rows, for {', '.join(packed)}"
    return ("padded", f"single samples, for {', '.join(single)}") if single else ("auto", "")


def choose_by_seconds(plan_by: Callable[[Budget, str], Plan], lengths: ArrayLike, budget: Budget) -> tuple[Plan, str]:
    """Plan the first epoch in each way; return the plan with the fewest seconds, compilation included, and why.

    Several packed shapes are tried where the cost is not a `CostModel`, or one leaves more than 1 % padding. A way must
    be faster by more than a billionth to be taken before an earlier one of: single samples, one packed shape, several.

    Raises:
        ValueError: if there is no cost, or samples have several lengths.
    """
    given = as_array("lengths", lengths)
    if given.ndim == 2:
        raise ValueError(f'packing="auto" is for samples of one length, not of {given.shape[1]}: name another')
    if budget.cost is None:
        raise ValueError('packing="auto" compares seconds: give cost, the seconds of a microbatch')
    plans = [plan_by(budget, "padded"), plan_by(replace(budget, max_shapes=1), "best_fit")]
    if plans[1].padding > 0.01 or not isinstance(budget.cost, CostModel):
        several = plan_by(budget, "best_fit")
        plans += [several] if several.buckets != plans[1].buckets else []
    totals = [_seconds(plan, given, budget) for plan in plans]
    chosen = next(i for i, total in enumerate(totals) if total <= min(totals) * (1 + 1e-9))
    texts = [
        f"{total:,.1f} s with {len(plan.buckets.shapes)} {'padded' if plan.row_offsets is None else 'packed'} shape"
        + "s" * (len(plan.buckets.shapes) > 1)
        for plan, total in zip(plans, totals, strict=True)
    ]
    return plans[chosen], f"an epoch is predicted to take {texts[chosen]}; all: {', '.join(texts)}"


def _seconds(plan: Plan, lengths: NDArray[np.int64], budget: Budget) -> float:
    rows, row_lengths = np.array(plan.buckets.shapes).T
    microbatches = plan.num_microbatches * np.array(list(plan.groups_of_buckets().values()))
    total = (budget.compile_seconds or 0.0) * len(rows)
    if plan.row_offsets is None or not isinstance(budget.cost, CostModel):
        assert budget.cost is not None
        return total + float((microbatches * np.asarray(budget.cost(rows, row_lengths))).sum())
    # Longer ones are cut, since split samples never come to be chosen.
    squares = np.minimum(lengths[plan.sample_ids], row_lengths[-1]).astype(np.int64) ** 2
    pairs = np.zeros(len(rows), dtype=np.int64)
    np.add.at(pairs, np.repeat(plan.group_bucket, np.diff(plan.group_offsets)), squares)
    of_one = budget.cost(rows, row_lengths, pairs=pairs / np.maximum(microbatches, 1))
    return total + float((microbatches * of_one).sum())
