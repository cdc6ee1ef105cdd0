"""A plan that no process holds whole: each makes its own rows from the lengths that it has.

Every process finds the steps from the histogram of all lengths; the distributed sort brings each sample to the device
that trains on it. Letters: N samples, n of this process, p shards, M microbatches a step, m of them on this process, S
steps, K buckets, U rows of a microbatch in all steps together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Int64

from jvarlen._common.checks import UserError, check_choices
from jvarlen.distributed.mesh import check_shards_divide, local_shards
from jvarlen.distributed.placement import LayoutLike, shards_on
from jvarlen.distributed.processes import agree, gather_arrays, together
from jvarlen.experimental.large_plans.chunk_digests import chunk_digests
from jvarlen.experimental.large_plans.histogram import LargeOverlong
from jvarlen.experimental.large_plans.plan_places import Places, make_places, sort_to_places
from jvarlen.planning.buckets import AnyBucket, Bucket, Buckets, check_buckets, rows_of_steps
from jvarlen.planning.grouping import BucketTable, canonical_steps, emitted_steps
from jvarlen.planning.lengths import (
    apply_overlong,
    check_lengths,
    dropped_and_truncated,
    fit_lengths,
    histogram_of,
)
from jvarlen.planning.order import Order, as_order, check_seed, random_keys
from jvarlen.planning.plan_file import plan_digest
from jvarlen.planning.rules import PlanRules
from jvarlen.planning.steps import PlannedSteps, StepRows
from jvarlen.sorting.sharded_rows import spread_local_rows

__all__ = ["DistributedPlan", "count_lengths", "plan_distributed"]

DistributedOrder = Literal["length", "length_descending", "shuffle"]

_LONGEST = 2**32 - 1  # tokens; a length is the lower half of a key


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DistributedPlan(PlannedSteps):
    """The steps of an epoch, with only the rows that this process trains on.

    It has the attributes of `PlannedSteps`, for the whole plan, and these:

    Attributes:
      digest: the digest of the whole plan, equal to that of the `Plan` from `make_plan`.
      microbatches: int64[m], which of the M microbatches of every step belong to this process, ascending.
      first_rows: int64[S], where each step begins in `row_ids`.
      own_num_tokens: int64[S], real tokens of each step in these microbatches.
      row_ids: int64[U, m], the samples of this process's microbatches, one step after the other; −1 for a padding row.
    """

    digest: str
    microbatches: Int64[np.ndarray, " m"]
    first_rows: Int64[np.ndarray, " S"]
    own_num_tokens: Int64[np.ndarray, " S"]
    row_ids: Int64[np.ndarray, "U m"]

    def rows(self, step: int) -> Int64[np.ndarray, "m B"]:
        """The sample of every row of a step that this process trains on.

        Args:
          step: 0 ≤ step < S.

        Returns:
          int64[m, B] of sample ids, −1 for a padding row: the microbatches of this process in `Plan.rows`.

        Raises:
          IndexError: no such step.
        """
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} of a plan of {self.num_steps} steps")
        first = self.first_rows[step]
        return self.row_ids[first : first + self.buckets.shapes[self.step_bucket[step]].rows].T

    @functools.cached_property
    def largest_id(self) -> int:
        """The largest of `row_ids`."""
        return int(self.row_ids.max())

    def local_rows(self, step: int, microbatches: Int64[np.ndarray, " m"] | None = None) -> StepRows:
        """As `Plan.local_rows`, of the microbatches of this process.

        Args:
          step: 0 ≤ step < S.
          microbatches: int64[m], those of this process; None for the same.

        Returns:
          `StepRows`.

        Raises:
          IndexError: no such step.
          ValueError: other microbatches than those of this process.
        """
        if microbatches is not None and not np.array_equal(microbatches, self.microbatches):
            raise UserError(
                f"the plan was made for a mesh where this process has the microbatches {self.microbatches.tolist()}"
            )
        return StepRows(self.rows(step), None, int(self.own_num_tokens[step]))


def count_lengths(lengths: npt.ArrayLike) -> tuple[Int64[np.ndarray, " D"], Int64[np.ndarray, " D"]]:
    """The histogram of the lengths of all processes, for `make_buckets(lengths, counts=counts)`.

    Args:
      lengths: integers[n], each ≥ 1: tokens of the samples of this process, possibly none.

    Returns:
      int64[D], distinct lengths, ascending, and int64[D], samples of each; the same on all processes.

    Raises:
      ValueError: lengths that are not as described, listed; or no process has any.
      RuntimeError: another process raised such an error.

    Example:
      >>> lengths, counts = count_lengths([3, 1, 3])
      >>> lengths.tolist(), counts.tolist()
      ([1, 3], [1, 2])
    """
    with together("count the lengths"):
        own_lengths = _check_own_lengths(lengths)
        values, counts = histogram_of(own_lengths) if len(own_lengths) else (own_lengths, own_lengths)
    most = int(gather_arrays(np.array([len(values)])).max())
    if most == 0:
        raise UserError("lengths are empty: at least one sample is needed")
    own = np.zeros((2, most), np.int64)
    own[:, : len(values)] = values, counts
    values, counts = gather_arrays(own).swapaxes(0, 1).reshape(2, -1)
    distinct, place = np.unique(values[counts > 0], return_inverse=True)
    totals = np.zeros(len(distinct), np.int64)
    np.add.at(totals, place, counts[counts > 0])
    return distinct, totals


def plan_distributed(
    lengths: npt.ArrayLike,
    buckets: Buckets[Bucket] | Sequence[tuple[int, int]],
    layout: LayoutLike,
    *,
    num_microbatches: int | None = None,
    order: DistributedOrder | Order = "shuffle",
    seed: int = 0,
    epoch: int = 0,
    overlong: LargeOverlong = "error",
) -> DistributedPlan:
    """Plans an epoch over processes that each have only the lengths of their own samples.

    The plan is the one that `make_plan` makes from all lengths in one place, with the same digest. A process holds its
    samples, its rows and the steps: O(N/p + S) if all have about equally many samples. Every device allocates as many
    places as the fullest needs. Every process calls this with the same arguments except `lengths`.

    Args:
      lengths: integers[n], tokens of the samples of this process, at most 2**32 − 1. Their number may differ between
        processes and may be 0. Sample ids count along the mesh axis: those of process 0 come first if its devices do,
        and the samples of a process with several devices are spread over them evenly, in order.
      buckets: as `make_buckets` chooses them from `count_lengths`; or (rows, length) pairs, lengths strictly ascending.
      layout: where a step runs, as for `make_train_step`: its p data shards train on M / p consecutive microbatches
        each.
      num_microbatches: M, a multiple of p; None: as in `make_plan`.
      order: `"length"`, `"length_descending"` or `"shuffle"`. Other orders are sequential and cannot be planned in
        parts.
      seed: as in `make_plan`.
      epoch: as in `make_plan`.
      overlong: as in `make_plan`.

    Returns:
      A `DistributedPlan`.

    Raises:
      ValueError: arguments that are not as described or differ between processes; samples that are too long are listed
        by the process that has them.
      RuntimeError: another process raised such an error.

    Example:
      >>> plan = plan_distributed([3, 1, 4, 2, 8], [(2, 4), (1, 8)], "data1", order="length", num_microbatches=2)
      >>> plan.num_steps, plan.rows(0).tolist()
      (2, [[1, 0], [3, 2]])
    """
    placement = shards_on(layout)
    mesh, axis_name = placement.mesh, placement.data_axis
    with together("check the arguments of plan_distributed"):
        order = _check_order(order, seed, epoch, overlong)
        checked = _check_buckets(buckets, num_microbatches)
        num_microbatches = checked.num_microbatches
        check_shards_divide(num_microbatches, mesh, axis_name)
    agree("the arguments of plan_distributed", repr((checked, order, seed, epoch, overlong)))
    rows, edges = np.array(checked.shapes, np.int64).T
    distinct, counts = count_lengths(lengths)  # checks them on all processes
    own_lengths = _check_own_lengths(lengths)
    sizes = spread_local_rows(len(own_lengths), mesh, axis_name)
    own_ids = _ids_of_shards(sizes, local_shards(mesh, axis_name))
    bucket_of = BucketTable(edges, overlong)
    num_samples = np.bincount(bucket_of(distinct), counts, len(edges) + 1).astype(np.int64)
    num_long = int(counts[distinct > edges[-1]].sum())
    num_dropped, num_truncated = dropped_and_truncated(num_long, overlong)
    _fit_own(own_lengths, own_ids, edges, overlong, int(counts.sum()) - num_long)
    rules = PlanRules(order, seed=seed, epoch=epoch)
    steps = canonical_steps(num_samples[:-1], rows_of_steps(checked))
    emitted = emitted_steps(steps, rules, None, int(sizes.sum()), edges)
    places = make_places(steps, num_samples[:-1], rows, num_microbatches, placement.layout.data)
    lengths_of = _length_of_descending_key if order.by == "length_descending" else _length_of_key
    row_ids, own_num_tokens, num_tokens = sort_to_places(
        *_make_keys(own_lengths, own_ids, bucket_of, rules), places, mesh, axis_name, lengths_of, int(edges[-1])
    )
    step_offsets = np.cumulative_sum(np.diff(steps.offsets)[emitted], include_initial=True)
    microbatches = placement.local_microbatches(num_microbatches)
    offset_of_step = step_offsets[np.argsort(emitted)]
    is_real = row_ids >= 0
    positions = _positions_of_rows(places, offset_of_step, rows[steps.bucket], microbatches)[is_real]
    chunks = chunk_digests(positions, row_ids[is_real], int(step_offsets[-1]), int(sizes.sum()), mesh, axis_name)
    arrays = {"buckets": checked.shapes, "step_bucket": steps.bucket[emitted], "step_offsets": step_offsets}
    return DistributedPlan(
        buckets=checked,
        num_microbatches=num_microbatches,
        group_bucket=arrays["step_bucket"],
        group_offsets=step_offsets,
        group_tokens=num_tokens[emitted],
        overlong=overlong,
        num_dropped=num_dropped,
        num_truncated=num_truncated,
        new_shape_every=int(order.new_shape_every),
        digest=plan_digest({"microbatches_per_step": num_microbatches, **arrays}, chunks),
        microbatches=microbatches,
        first_rows=places.first_rows[emitted],
        own_num_tokens=own_num_tokens[emitted],
        row_ids=row_ids,
    )


def _check_order(order: DistributedOrder | Order, seed: int, epoch: int, overlong: LargeOverlong) -> Order:
    order = as_order(order)
    check_choices(order=(order.by, DistributedOrder), overlong=(overlong, LargeOverlong))
    if order.sample_blocks is not None:
        raise UserError("a distributed plan has no block_size")
    check_seed(seed, epoch)
    return order


def _check_buckets(
    buckets: Buckets[Bucket] | Sequence[tuple[int, int]], num_microbatches: int | None
) -> Buckets[AnyBucket]:
    checked = check_buckets(buckets, num_microbatches)
    if not isinstance(checked.shapes[0], Bucket):
        raise UserError("a distributed plan is of samples of one length, not of pairs")
    return checked


def _fit_own(
    lengths: Int64[np.ndarray, " n"],
    ids: Int64[np.ndarray, " n"],
    edges: Int64[np.ndarray, " K"],
    overlong: LargeOverlong,
    num_fitting: int,
) -> None:
    """Raises for samples of this process that are too long."""
    with together("fit the samples into the buckets"):
        fit_lengths(lengths, _LONGEST, "error", ids, problem="samples longer than a distributed plan can sort")
        is_long = lengths > edges[-1]
        apply_overlong(overlong, ids[is_long], lengths[is_long], int(edges[-1]), num_fitting)


def _check_own_lengths(lengths: npt.ArrayLike) -> Int64[np.ndarray, " n"]:
    """Checked lengths of this process, of which there may be none."""
    array = np.asarray(lengths)
    return np.zeros(0, np.int64) if array.shape == (0,) else check_lengths(array)


def _ids_of_shards(sizes: Int64[np.ndarray, " p"], shards: Int64[np.ndarray, " q"]) -> Int64[np.ndarray, " n"]:
    """The sample ids of the rows of some shards."""
    starts = np.cumsum(sizes) - sizes
    ids = [np.arange(starts[d], starts[d] + sizes[d]) for d in shards.tolist()]
    return np.concatenate([np.zeros(0, np.int64), *ids])


def _make_keys(
    lengths: Int64[np.ndarray, " n"],
    ids: Int64[np.ndarray, " n"],
    bucket_of_length: BucketTable,
    rules: PlanRules,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Keys that sort samples by bucket, and within it as ordered; and the lengths, where the keys do not hold them."""
    order, seed, epoch = rules.order.by, rules.seed, rules.epoch
    if order == "length":
        return lengths.astype(np.uint32), None
    high = bucket_of_length(lengths).astype(np.uint64) << np.uint64(32)
    if order == "length_descending":
        return high | (_LONGEST - lengths).astype(np.uint64), None
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1  # ids of neighbouring shards follow each other
    parts = np.split(ids, breaks)
    random = [random_keys(len(part), seed=seed, epoch=epoch, start=int(part[0])) for part in parts if len(part)]
    return high | np.concatenate([np.zeros(0, np.uint64), *random]), lengths.astype(np.uint32)


def _length_of_key(keys: jax.Array, payload: jax.Array | None) -> jax.Array:
    """int64, lengths from keys that are lengths, or where they are the payload."""
    return (keys if payload is None else payload).astype(jnp.int64)


def _length_of_descending_key(keys: jax.Array, payload: jax.Array | None) -> jax.Array:
    """int64, lengths from keys whose lower half falls with them."""
    return (_LONGEST - (keys & _LONGEST)).astype(jnp.int64)


def _positions_of_rows(
    places: Places,
    offset_of_step: Int64[np.ndarray, " S"],
    rows_of_step: Int64[np.ndarray, " S"],
    microbatches: Int64[np.ndarray, " m"],
) -> Int64[np.ndarray, "U m"]:
    """Where the rows of these microbatches are among the sample ids of the plan; steps are canonical ones."""
    num_microbatches = places.num_microbatches
    first_of_row = np.repeat(offset_of_step - places.first_rows * num_microbatches, rows_of_step)
    return (first_of_row + np.arange(places.num_rows) * num_microbatches)[:, None] + microbatches
