"""A plan as a table: in goes a plan, out come figures of its buckets, or lines of text.

NumPy only; `Plan.report` is what users call, so this knows a plan by its attributes. Letters: S steps, K buckets.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Int64

from jvarlen.budget import CostFn, checked_cost

__all__ = ["BucketFigures", "bucket_figures", "plan_table"]


class BucketFigures(NamedTuple):
    """What a plan makes of each bucket; a figure each, in the order of the buckets.

    Attributes:
      num_samples: int64[K].
      num_steps: int64[K].
      num_tokens: int64[K], real ones.
      num_positions: int64[K], tokens that the steps have room for.
      seconds: float64[K], what a cost predicts for all steps of the bucket; None without one.
    """

    num_samples: Int64[np.ndarray, " K"]
    num_steps: Int64[np.ndarray, " K"]
    num_tokens: Int64[np.ndarray, " K"]
    num_positions: Int64[np.ndarray, " K"]
    seconds: Float64[np.ndarray, " K"] | None

    @property
    def padding(self) -> Float64[np.ndarray, " K"]:
        """float64[K], NaN where a bucket has no step."""
        with np.errstate(invalid="ignore"):
            return 1.0 - self.num_tokens / self.num_positions


def bucket_figures(plan: Any, cost: CostFn | None = None) -> BucketFigures:
    """Counts samples, steps, tokens and positions of each bucket; with a cost, predicts the seconds as well."""
    num_buckets = len(plan.buckets)
    num_steps = np.bincount(plan.step_bucket, minlength=num_buckets)
    microbatches = plan.microbatches_per_step * num_steps

    def sums(per_step: Int64[np.ndarray, " S"]) -> Int64[np.ndarray, " K"]:
        totals = np.zeros(num_buckets, np.int64)
        np.add.at(totals, plan.step_bucket, per_step)
        return totals

    seconds = None
    if cost is not None:
        rows, *lengths = np.array(plan.buckets, np.int64).T
        seconds = microbatches * checked_cost(cost, rows, *lengths)
    num_positions = microbatches * np.array([bucket.num_positions for bucket in plan.buckets])
    return BucketFigures(sums(plan.num_sequences), num_steps, sums(plan.num_tokens), num_positions, seconds)


def plan_table(
    plan: Any,
    learning_rates: Float[np.ndarray, " S"] | None = None,
    cost: CostFn | None = None,
    compile_seconds: float | None = None,
) -> str:
    """Lines of text: see `Plan.report`."""
    figures = bucket_figures(plan, cost)
    seconds = figures.seconds
    header = f"{'rows × length':>15} {'samples':>12} {'steps':>8} {'padding':>9}"
    lines = [header if seconds is None else f"{header} {'predicted s':>12}"]
    for k, bucket in enumerate(plan.buckets):
        padding = f"{figures.padding[k]:9.2%}" if figures.num_steps[k] else f"{'–':>9}"
        length = "+".join(f"{length:,}" for length in bucket.lengths)
        line = f"{bucket.rows:>6,} × {length:>6} {figures.num_samples[k]:>12,} {figures.num_steps[k]:>8,} {padding}"
        lines.append(line if seconds is None else f"{line} {seconds[k]:>12,.1f}")
    total = f"{'total':>15} {plan.num_samples:>12,} {plan.num_steps:>8,} {plan.padding:9.2%}"
    lines.append(total if seconds is None else f"{total} {seconds.sum():>12,.1f}")
    lines.append(
        f"{int(plan.num_tokens.sum()):,} real tokens in {int(plan.positions_per_step.sum()):,} positions; "
        f"microbatches a step: {plan.microbatches_per_step}"
    )
    if plan.is_packed:
        lines.append(f"packed: {plan.num_rows:,} rows, {plan.num_samples / plan.num_rows:.2f} samples a row")
    longest = "+".join(f"{length:,}" for length in plan.buckets[-1].lengths)
    lines.append(
        f"longest bucket {longest} tokens; overlong={plan.overlong!r}: "
        f"{plan.num_truncated:,} samples cut, {plan.num_dropped:,} dropped"
    )
    correlation = plan.neighbour_correlation
    if not math.isnan(correlation):
        lines.append(f"correlation of mean length between neighbouring steps: {correlation:+.3f}")
    if seconds is not None and compile_seconds is not None:
        compiling = compile_seconds * len(plan.buckets)
        lines.append(
            f"predicted: {seconds.sum():,.1f} s of steps, {compiling:,.1f} s of compiling {len(plan.buckets)} buckets"
        )
    if learning_rates is not None:
        lines.append(f"learning rate {learning_rates.min():.3g} to {learning_rates.max():.3g}")
    return "\n".join(lines)
