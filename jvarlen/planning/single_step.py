"""Plans one step of samples that are new in every step. Letters: N samples, M microbatches of a group, K buckets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jvarlen._common.checks import (
    UserError,
    check_at_least_one,
    check_choices,
    if_given,
    list_first,
    list_offenders,
)
from jvarlen._common.keywords import check_keywords
from jvarlen.planning.balance import balance_plan, packed_row_costs
from jvarlen.planning.buckets import AnyBucket, Buckets, check_buckets
from jvarlen.planning.budget import CostFn, evaluate_cost
from jvarlen.planning.cost_model import CostModel
from jvarlen.planning.grouping import first_buckets
from jvarlen.planning.lengths import check_features, check_sample_lengths, sample_sizes
from jvarlen.planning.make_plan import plan_samples
from jvarlen.planning.order import Order
from jvarlen.planning.plan import Plan
from jvarlen.planning.rules import PlanRules, RowPacking, SamplesPerRow
from jvarlen.planning.step_plans import plan_packed_steps
from jvarlen.planning.step_sizes import StepSizes

__all__ = ["plan_step"]


@check_keywords
def plan_step(
    lengths: npt.ArrayLike,
    buckets: Buckets[AnyBucket] | Sequence[tuple[int, ...]],
    *,
    max_tokens: int | None = None,
    num_microbatches: int | None = None,
    packing: RowPacking = "padded",
    samples_per_row: SamplesPerRow | None = None,
    cost: CostFn | None = None,
) -> Plan:
    """Plans one step of all samples, in microbatches of given buckets: for data that are new in every step.

    It is a plan of `make_plan` with all samples in one step, in their order. Its groups are those of
    `sequences_per_step`. Every rank computes as many microbatches of each group. Every process must give the lengths of
    all samples, those of all processes in the order of ranks.

    Args:
      lengths: integers[N] or integers[N, 2], as in `make_plan`; N ≥ 1.
      buckets: as in `make_plan`, given.
      max_tokens: the most tokens of a microbatch, padding included; larger buckets are an error. None for no limit.
      num_microbatches: M; None: that of the `Buckets`, or 1.
      packing: as in `make_plan`, but not `"auto"`.
      samples_per_row: as in `make_plan`. Packed steps have the same shapes whatever the lengths only where it is given.
      cost: as in `Budget`, to balance the rows of the step over ranks, as `balance_plan` does, by the cost of a row as
        long as its sample; packed rows need a `CostModel`. None: rows are dealt in order.

    Returns:
      A `Plan` of one step, whose `sample_ids` are places in `lengths`.

    Raises:
      ValueError: arguments that are not as described; no samples; samples that no bucket holds are listed as id, value,
        limit.

    Example:
      >>> plan = plan_step([3, 7, 2, 6, 1], [(2, 4), (1, 8)])
      >>> [plan.rows(group).tolist() for group in plan.groups(0)]
      [[[0, 2]], [[4, -1]], [[1]], [[3]]]
    """
    check_choices(packing=(packing, RowPacking))
    check_at_least_one(**if_given(max_tokens=max_tokens))
    checked, given = check_sample_lengths(lengths), check_buckets(buckets, num_microbatches)
    check_features(given.shapes, checked)
    limit = np.inf if max_tokens is None else max_tokens
    padded = given.padded_tokens.tolist()
    if wrong := [f"{each}: {n:,}" for each, n in zip(given.shapes, padded, strict=True) if n > limit]:
        raise UserError(f"buckets of more tokens than max_tokens ({max_tokens:,}): {list_first(wrong)}")
    is_long = first_buckets(checked, given.lengths, "error") == len(given.shapes)
    if packing != "wrapped" and is_long.any():
        listed = list_offenders(np.flatnonzero(is_long), checked[is_long], given.lengths[-1].tolist())
        raise UserError(f"samples that no bucket holds: {listed}")
    step_sizes = StepSizes("tokens_per_step", int(sample_sizes(checked, given.size).sum()))
    rules = PlanRules(Order("dataset"), packing=packing, samples_per_row=samples_per_row, step_sizes=step_sizes)
    if packing == "padded":
        if samples_per_row is not None:
            raise UserError(f"samples_per_row ({samples_per_row}) is for packed rows: a row holds one sample otherwise")
        plan = plan_samples(checked, given, rules)
    else:
        plan = plan_packed_steps(checked, given, rules, step_sizes)
    plan = dataclasses.replace(plan, sized_by="plan_step")
    if cost is None:
        return plan
    if packing != "padded":
        if not isinstance(cost, CostModel):
            raise UserError(f"packed rows are balanced by a CostModel, not {cost!r}")
        return balance_plan(plan, packed_row_costs(plan, checked, cost))
    sides = [checked] if checked.ndim == 1 else list(checked.T)
    return balance_plan(plan, evaluate_cost(cost, np.ones(len(checked), np.int64), *sides))
