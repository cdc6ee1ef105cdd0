"""What holds for every plan, whether it was made or read from a file."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from torch_ref.checks import INT64_MAX, check_integer
from torch_ref.planning.buckets import Bucket, check_steps
from torch_ref.planning.lengths import PACKED_OVERLONG

if TYPE_CHECKING:
    from torch_ref.planning.plan import Plan

__all__ = ["check_plan"]


def check_plan(plan: "Plan", *, with_ids: bool = True) -> None:
    """Refuse a plan that `make_plan` would not make.

    Each sample comes once, or each piece of it; one that never comes may have been left out of the order.

    Args:
        plan: made, or read.
        with_ids: whether to look at the ids as well, which takes time and memory for very many.

    Raises:
        ValueError: that names what is wrong.
    """
    shapes, ids = plan.buckets.shapes, plan.sample_ids
    check_steps(plan.buckets)
    if plan.overlong not in PACKED_OVERLONG:
        raise ValueError(f"overlong is {plan.overlong!r}, not one of {', '.join(PACKED_OVERLONG)}")
    check_integer("num_dropped", plan.num_dropped, minimum=0)
    check_integer("num_truncated", plan.num_truncated, minimum=0)
    if not len(plan.step_bucket) == len(plan.step_offsets) - 1 == len(plan.num_tokens):
        raise ValueError("step_bucket, step_offsets and num_tokens count different numbers of steps")
    _check_offsets("step_offsets", plan.step_offsets, len(ids))
    if not ((plan.step_bucket >= 0) & (plan.step_bucket < len(shapes))).all():
        raise ValueError(f"step_bucket has numbers that are none of the {len(shapes)} buckets")
    rows_before = plan.step_offsets
    if plan.row_offsets is not None:
        _check_offsets("row_offsets", plan.row_offsets, len(ids))
        if not np.isin(plan.step_offsets, plan.row_offsets).all():
            raise ValueError("a step begins within a packed row")
        rows_before = np.searchsorted(plan.row_offsets, plan.step_offsets)
    rows = np.diff(rows_before)
    per_step = plan.num_microbatches * np.array([bucket[0] for bucket in shapes])
    if (rows > per_step[plan.step_bucket]).any():
        raise ValueError("a step has more rows than its microbatches")
    sizes = plan.buckets.row_sizes
    num_steps = np.bincount(plan.step_bucket, minlength=len(shapes)).tolist()
    padded = sum(n * b * size for n, b, size in zip(num_steps, per_step.tolist(), sizes.tolist(), strict=True))
    if padded > INT64_MAX:
        raise ValueError(f"all steps together have {padded} tokens with padding, too many for int64")
    if ((plan.num_tokens < np.diff(plan.step_offsets)) | (plan.num_tokens > rows * sizes[plan.step_bucket])).any():
        raise ValueError("num_tokens of a step are fewer than its samples, or more than its rows hold")
    if plan.row_offsets is not None:
        _check_samples_per_row(plan, np.diff(plan.row_offsets), np.repeat(plan.step_bucket, rows))
    if plan.piece_starts is not None and (plan.row_offsets is None or not isinstance(shapes[0], Bucket)):
        raise ValueError("only packed samples of one length have pieces")
    if with_ids:
        _check_ids(ids, plan.piece_starts)


def _check_samples_per_row(plan: "Plan", sizes: NDArray[np.int64], bucket_of_row: NDArray[np.int32]) -> None:
    if plan.pair_size != "sum":
        raise ValueError(f"pair_size={plan.pair_size!r} counts pairs that are not packed")
    most = np.array(plan.samples_per_row)
    longest = np.array([bucket[1] for bucket in plan.buckets.shapes])
    if most.shape != longest.shape or not ((most >= 1) & (most <= longest)).all():
        raise ValueError(f"samples_per_row must be between 1 and the length of each bucket, got {plan.samples_per_row}")
    if (sizes > most[bucket_of_row]).any():
        raise ValueError("a row holds more samples than samples_per_row")


def _check_offsets(name: str, offsets: NDArray[np.int64], last: int) -> None:
    if not len(offsets) > 1 or offsets[0] != 0 or offsets[-1] != last or not (offsets[:-1] < offsets[1:]).all():
        raise ValueError(f"{name} do not ascend strictly from 0 to {last}, the number of samples")


def _check_ids(ids: NDArray[np.int64], piece_starts: NDArray[np.int64] | None) -> None:
    if (ids < 0).any():
        raise ValueError("a sample id is below 0")
    if piece_starts is None:
        ordered = np.sort(ids)
        twice = ordered[1:] == ordered[:-1]
    else:
        if len(piece_starts) != len(ids) or (piece_starts < 0).any():
            raise ValueError("piece_starts must be one number of tokens, at least 0, for each piece")
        order = np.lexsort((piece_starts, ids))
        twice = (np.diff(ids[order]) == 0) & (np.diff(piece_starts[order]) == 0)
    if twice.any():
        raise ValueError("a sample, or a piece of one, comes twice")
