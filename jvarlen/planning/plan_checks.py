"""What holds for every plan, whether it was made or read from a file.

Letters: n samples or chunks, R rows, S steps, K buckets, M microbatches a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int64

from jvarlen._common.checks import UserError, check_at_least_zero, check_choices
from jvarlen.planning.buckets import MOST_TOKENS, PairBucket, rows_of_steps
from jvarlen.planning.lengths import PackedOverlong

if TYPE_CHECKING:
    from jvarlen.planning.plan import Plan
    from jvarlen.planning.steps import PlannedSteps

__all__ = ["check_plan", "check_steps"]

_WIDE = 8  # ids up to so many times their number are told apart in a table, a byte each


def check_plan(plan: Plan) -> None:
    """Raises ValueError for a plan whose steps, rows or samples are not as `make_plan` makes them.

    Every sample comes once, or every chunk of it. One that is missing cannot be told from one that the order left out.
    """
    num_samples, row_offsets = len(plan.sample_ids), plan.row_offsets
    rows = plan.step_offsets
    if row_offsets is not None:
        _check_offsets("row_offsets", row_offsets, num_samples)
        rows = np.minimum(np.searchsorted(row_offsets, plan.step_offsets), len(row_offsets) - 1)
        if (row_offsets[rows] != plan.step_offsets).any():
            raise UserError("steps begin within packed rows")
        if plan.pair_size != "sum":
            raise UserError(f"pair_size ({plan.pair_size!r}) is for samples that are not packed")
    check_steps(plan, num_samples, rows)
    if plan.sample_ids.min() < 0:
        raise UserError("sample ids must be at least 0")
    if plan.chunk_starts is None:
        _check_each_once(plan.sample_ids)
    elif row_offsets is None or isinstance(plan.buckets.shapes[0], PairBucket):
        raise UserError("only packed samples of one length are split into chunks")
    else:
        _check_chunks(plan.sample_ids, plan.chunk_starts)
    if row_offsets is not None:
        most = np.array(plan.samples_per_row)
        limits = np.array([bucket.lengths[0] for bucket in plan.buckets.shapes])
        bucket_of_row = np.repeat(plan.step_bucket, np.diff(rows))
        if most.shape != limits.shape or (most < 1).any() or (most > limits).any():
            raise UserError(f"samples_per_row must be from 1 to the length of each bucket, not {plan.samples_per_row}")
        if (np.diff(row_offsets) > most[bucket_of_row]).any():
            raise UserError("rows hold more samples than samples_per_row")


def check_steps(plan: PlannedSteps, num_samples: int, row_offsets: Int64[np.ndarray, " S_plus_1"]) -> None:
    """Raises ValueError for steps that are not as `make_plan` makes them; `row_offsets` are the rows before each."""
    num_steps, num_buckets = len(plan.step_bucket), len(plan.buckets.shapes)
    capacities, sizes = rows_of_steps(plan.buckets), plan.buckets.row_sizes
    check_choices(overlong=(plan.overlong, PackedOverlong))
    check_at_least_zero(num_dropped=plan.num_dropped, num_truncated=plan.num_truncated)
    if plan.step_offsets.shape != (num_steps + 1,) or plan.num_tokens.shape != (num_steps,):
        raise UserError("step_bucket, step_offsets and num_tokens are not of the same steps")
    _check_offsets("step_offsets", plan.step_offsets, num_samples)
    if plan.step_bucket.min() < 0 or plan.step_bucket.max() >= num_buckets:
        raise UserError(f"step_bucket must be from 0 to {num_buckets - 1}")
    num_rows = np.diff(row_offsets)
    if (num_rows > capacities[plan.step_bucket]).any():
        raise UserError("steps have more rows than M × rows of their buckets")
    of_step, steps = (capacities * sizes).tolist(), np.bincount(plan.step_bucket, minlength=num_buckets).tolist()
    if (total := sum(n * padded for n, padded in zip(steps, of_step, strict=True))) > MOST_TOKENS:
        raise UserError(f"all steps have {total:,} tokens with padding, more than 2**63 − 1")
    too_few, too_many = (
        plan.num_tokens < np.diff(plan.step_offsets),
        plan.num_tokens > num_rows * sizes[plan.step_bucket],
    )
    if (too_few | too_many).any():
        raise UserError("num_tokens must be at least the samples of each step, and fit into its rows")


def _check_offsets(name: str, offsets: Int64[np.ndarray, " m"], last: int) -> None:
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != last or (offsets[1:] <= offsets[:-1]).any():
        raise UserError(f"{name} must ascend strictly from 0 to the {last:,} samples of the plan")


def _check_each_once(ids: Int64[np.ndarray, " n"]) -> None:
    largest = int(ids.max())
    if largest < _WIDE * len(ids):
        seen = np.zeros(largest + 1, bool)
        seen[ids] = True
        num_distinct = int(np.count_nonzero(seen))
    else:
        num_distinct = len(np.unique(ids))
    if num_distinct < len(ids):
        raise UserError("a sample comes twice")


def _check_chunks(ids: Int64[np.ndarray, " n"], starts: Int64[np.ndarray, " n"]) -> None:
    if starts.shape != ids.shape or starts.min() < 0:
        raise UserError("every chunk must begin at a token of its sample, from 0")
    order = np.lexsort((starts, ids))
    if ((np.diff(ids[order]) == 0) & (np.diff(starts[order]) == 0)).any():
        raise UserError("a chunk of a sample comes twice")
