"""Chooses the shapes of a run by its settings and lengths, and plans in these shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int64, Integer

from jvarlen._common.checks import UserError
from jvarlen.planning.balance import balance_plan, packed_row_costs
from jvarlen.planning.buckets import AnyBucket, Buckets, check_buckets, cost_of_candidates
from jvarlen.planning.budget import Budget
from jvarlen.planning.cost_model import CostModel
from jvarlen.planning.lengths import check_sample_lengths
from jvarlen.planning.make_buckets import make_buckets
from jvarlen.planning.make_plan import make_plan
from jvarlen.planning.order import Order
from jvarlen.planning.plan import Plan
from jvarlen.planning.row_lengths import choose_candidate, choose_packed_buckets
from jvarlen.planning.rules import PlanRules, RowPacking
from jvarlen.runs.plan_config import PlanConfig, PlanSettings

__all__ = [
    "SHAPES_FILE", "ChosenShapes", "budget_of_rows", "check_for_pairs", "epoch_plan", "evaluation_plans",
    "note_on_candidates", "note_on_overlong", "shapes_for",
]  # fmt: skip

SHAPES_FILE = "shapes.json"  # in a run directory
_PAIRS = CostModel(constant=0.0, linear=0.0, quadratic=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChosenShapes:
    """The shapes of a run, which keeps them when it resumes."""

    buckets: tuple[tuple[int, ...], ...]  # packed rows are as long as these
    packing: RowPacking = "padded"
    reason: str = ""  # for the choice; empty where the settings say it all


def check_for_pairs(plan: PlanConfig) -> None:
    """Raises ValueError for settings that samples of two lengths do not have."""
    settings = {
        "packing": plan.packing if plan.packing == "wrapped" else None,
        **{name: getattr(plan, name) for name in ("buckets", "row_lengths", "cost_model")},
        "overlong": plan.overlong if plan.overlong not in (None, "error", "drop") else None,
    }
    if given := [f"{name} ({value})" for name, value in settings.items() if value]:
        raise UserError(f"for samples of two lengths, `fit` takes no {', '.join(given)}: leave it out")


def budget_of_rows(plan: PlanSettings, lengths: Integer[np.ndarray, " N *2"], budget: Budget) -> Budget:
    """The budget of packed rows, which may be longer than a default `max_length` that no sample reaches."""
    is_usual = plan.takes_longer_rows and lengths.max() <= plan.budget.max_length
    return dataclasses.replace(budget, max_length=None) if is_usual else budget


def shapes_for(
    plan: PlanSettings,
    lengths: Integer[np.ndarray, " N *2"],
    *,
    seed: int = 0,
    budget: Budget | None = None,
    num_epochs: float = 1.0,
) -> ChosenShapes:
    """The shapes for int64[N] tokens of samples, or [N, 2], by the budget of the settings or another one."""
    lengths = check_sample_lengths(lengths)
    method, reason, limits = plan.packing, plan.reason, budget or plan.budget
    if method != "padded":
        limits = budget_of_rows(plan, lengths, limits)
    buckets: Sequence[tuple[int, ...]] = plan.buckets
    rules = PlanRules(plan.order, seed=seed, overlong=plan.overlong, packing=method)
    if plan.by_seconds:
        chosen, by_seconds = choose_candidate(lengths, limits, rules, num_epochs)
        reason = "\n".join(filter(None, [reason, by_seconds]))
        method, buckets = chosen.method, chosen.buckets.shapes
        if plan.sizes_steps:  # seconds have decided how many
            limits, buckets = dataclasses.replace(limits, max_shapes=len(buckets)), ()
    assert method != "auto"  # seconds have decided
    if not buckets and plan.sizes_steps:
        buckets = _make_plan(plan, limits, method, lengths, seed=seed).buckets.shapes
    elif not buckets and method != "padded":
        buckets = choose_packed_buckets(lengths, limits, rules._replace(packing=method))[0].shapes
    elif not buckets:
        buckets = make_buckets(lengths, limits, overlong=plan.padded_overlong).shapes
    return ChosenShapes(buckets=tuple(map(tuple, buckets)), packing=method, reason=reason)


def note_on_candidates(plan: PlanSettings, shapes: ChosenShapes, lengths: Integer[np.ndarray, " N"]) -> str | None:
    """The most that it can cost that only some of very many lengths were tried; None if all were."""
    is_given = plan.buckets or plan.sizes_steps or plan.budget.strategy != "optimal"
    if is_given or shapes.packing != "padded" or lengths.ndim == 2:
        return None
    budget = dataclasses.replace(plan.budget, max_shapes=len(shapes.buckets))
    share = cost_of_candidates(lengths, budget, plan.padded_overlong)
    return (
        f"bucket lengths were chosen from every k-th of very many: at most {share:.2%} from the best" if share else None
    )


def note_on_overlong(plan: Plan, lengths: Integer[np.ndarray, " N"]) -> str | None:
    """How many samples, of int64[N] tokens, and how many of their tokens are cut or dropped; None if none is."""
    if not plan.num_dropped + plan.num_truncated:
        return None
    longest, done = np.max([bucket.lengths for bucket in plan.buckets.shapes], axis=0), "cut to that"
    sides = lengths.reshape(len(lengths), -1)
    too_long = sides[(sides > longest).any(axis=1)]
    lost = int(too_long.sum())
    if plan.num_dropped:
        done = "dropped"
    else:
        lost -= int(longest.sum()) * len(too_long)
    return (
        f"{len(too_long):,} of {len(lengths):,} samples are longer than "
        f"{'+'.join(f'{length:,}' for length in longest)} tokens and are {done}, which "
        f"leaves out {lost / lengths.sum():.1%} of all tokens: --packing best_fit --overlong split trains on all, and "
        "--max-length N makes longer rows"
    )


def epoch_plan(
    plan: PlanSettings, shapes: ChosenShapes, lengths: Integer[np.ndarray, " N"], *, seed: int, epoch: int
) -> Plan:
    """The plan of an epoch over int64[N] tokens of samples; rows in random order are packed again in every epoch."""
    # Packed rows are dealt to microbatches by their attention, all else being equal within a step. By pairs of tokens
    # alone and for any devices: a run resumes on others, or with costs measured again, and its plans stay the same.
    order = plan.first_order if epoch == 0 else plan.order  # later, all shapes have appeared
    buckets = check_buckets(shapes.buckets, plan.budget.num_microbatches)
    made = _make_plan(plan, buckets, shapes.packing, lengths, order=order, seed=seed, epoch=epoch)
    is_dealt = made.is_packed and lengths.ndim == 1 and made.num_microbatches > 1
    return balance_plan(made, packed_row_costs(made, lengths, _PAIRS)) if is_dealt else made


def _make_plan(
    plan: PlanSettings,
    buckets: Buckets[AnyBucket] | Budget,
    packing: RowPacking,
    lengths: Integer[np.ndarray, " N *2"],
    *,
    order: Order | None = None,
    seed: int = 0,
    epoch: int = 0,
) -> Plan:
    """The plan of an epoch in given buckets, or in those that a budget chooses."""
    return make_plan(
        lengths,
        buckets,
        order=order or plan.order,
        pacing=plan.pacing,
        packing=packing,
        overlong=plan.padded_overlong if packing == "padded" else plan.overlong,
        sequences_per_step=plan.sequences_per_step,
        tokens_per_step=plan.tokens_per_step,
        seed=seed,
        epoch=epoch,
    )


def evaluation_plans(
    plan: PlanSettings, shapes: ChosenShapes, lengths: Mapping[str, Int64[np.ndarray, " H"]]
) -> dict[str, Plan]:
    """Plans of sets of samples, int64[H] tokens each, in order of length and in the same buckets."""
    if not lengths:
        return {}
    buckets, is_packed = shapes.buckets, shapes.packing != "padded"
    # Wrapped rows would cut samples that other runs evaluate whole.
    overlong = "split" if shapes.packing == "wrapped" else plan.overlong if is_packed else plan.padded_overlong
    if any(each.ndim == 2 for each in lengths.values()):  # buckets of other pairs may be too short for these
        buckets = shapes_for(plan, np.concatenate(list(lengths.values()))).buckets
    buckets = tuple({bucket[1:]: bucket for bucket in buckets}.values())  # for steps of one shape, the most rows
    plans = {}
    for name, lengths_of_set in lengths.items():
        try:
            plans[name] = make_plan(
                lengths_of_set,
                buckets,
                order="length",
                num_microbatches=plan.budget.num_microbatches,
                packing="best_fit" if is_packed else "padded",
                overlong=overlong,
            )
        except UserError as error:
            raise UserError(f"samples of the evaluation {name}: {error}") from None
    most = tuple(np.max([each.samples_per_row for each in plans.values()], axis=0).tolist())  # all share their programs
    return {name: dataclasses.replace(each, samples_per_row=most) for name, each in plans.items()}
