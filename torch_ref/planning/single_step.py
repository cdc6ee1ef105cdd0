"""One step of samples that are new in every step."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from torch_ref.checks import MAX_LISTED, as_array, check_integer, known_keywords, list_offenders, to_tensor
from torch_ref.planning.balance import balance_plan, packed_row_costs
from torch_ref.planning.buckets import Buckets, given_buckets
from torch_ref.planning.budget import Cost, checked_costs
from torch_ref.planning.costs import CostModel
from torch_ref.planning.lengths import check_lengths, check_several_lengths, list_several, sample_sizes
from torch_ref.planning.make_plan import make_plan
from torch_ref.planning.plan import Plan

__all__ = ["plan_step"]


@known_keywords
def plan_step(
    lengths: ArrayLike,
    buckets: Buckets | Sequence[tuple[int, ...]],
    *,
    max_tokens: int | None = None,
    num_microbatches: int | None = None,
    packing: str = "padded",
    samples_per_row: int | Sequence[int] | None = None,
    cost: Cost | None = None,
) -> Plan:
    """Plan one step of all samples, for data that are new in every step.

    Its groups are those of a step of `make_plan`, with the samples in the given order. Every rank has as many
    microbatches of each.

    Args:
        lengths: as in `make_plan`, those of the samples of all ranks; the same on every process.
        buckets: as in `make_plan`, given.
        max_tokens: the most tokens of a microbatch, padding included: a larger bucket is an error. None: no limit.
        num_microbatches: M; None: as the buckets say.
        packing: as in `make_plan`, but not "auto".
        samples_per_row: as in `make_plan`; given, the shapes of packed steps do not depend on the lengths.
        cost: as in `Budget`, of a row as long as its sample: rows are dealt to ranks by `balance_plan`. That of packed
            rows is a `CostModel`. None: rows stay in order.

    Returns:
        A plan of one step. Its ids are places in `lengths`.

    Raises:
        ValueError: if an argument is out of its range, there is no sample, or one fits no bucket (the first are
            listed).

    Example:
        >>> plan = plan_step([3, 7, 2, 6, 1], [(2, 4), (1, 8)])
        >>> [plan.rows(group).tolist() for group in plan.groups(0)]
        [[[0, 2]], [[4, -1]], [[1]], [[3]]]
    """
    if packing == "auto":
        raise ValueError(
            'packing="auto" compares plans of many steps: packing must be "padded", "best_fit" or "wrapped"'
        )
    given = given_buckets(buckets, {} if num_microbatches is None else {"num_microbatches": num_microbatches})
    if max_tokens is not None:
        limit = check_integer("max_tokens", max_tokens)
        sizes = zip(given.shapes, given.row_sizes.tolist(), strict=True)
        if large := [f"{tuple(bucket)}: {bucket.rows * size}" for bucket, size in sizes if bucket.rows * size > limit]:
            raise ValueError(f"buckets have more tokens than max_tokens={limit}: {', '.join(large[:MAX_LISTED])}")
    array = as_array("lengths", lengths)
    values = check_several_lengths(array) if array.ndim == 2 else check_lengths(lengths)
    columns = values.reshape(len(values), -1)
    shapes = np.array([bucket[1:] for bucket in given.shapes])
    if packing != "wrapped" and columns.shape[1] == shapes.shape[1]:
        long = np.flatnonzero(~np.all(columns[:, None] <= shapes, axis=2).any(axis=1))
        if len(long):
            has_several = values.ndim == 2
            listed = (
                list_several(long, values[long])
                if has_several
                else list_offenders(long, values[long], int(shapes[-1, 0]))
            )
            raise ValueError(f"samples longer than every bucket: {listed}")
    total = int(sample_sizes(values, given.size).sum())
    plan = make_plan(
        values, given, order="dataset", packing=packing, samples_per_row=samples_per_row, tokens_per_step=total
    )
    plan = replace(plan, plan_epoch=None)
    if cost is None:
        return plan
    if plan.row_offsets is None:
        sides = [to_tensor(side) for side in np.atleast_2d(values.T)]
        costs = checked_costs("cost", cost, to_tensor(np.ones(len(values), dtype=np.int64)), *sides).numpy()
        return balance_plan(plan, costs)
    if not isinstance(cost, CostModel):
        raise ValueError(f"packed rows are balanced by a CostModel, got {cost!r}")
    return balance_plan(plan, packed_row_costs(plan, values, cost))
