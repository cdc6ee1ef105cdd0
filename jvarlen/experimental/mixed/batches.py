"""Batches of mixed steps: each rank has a number of microbatches of its own, of different shapes, in flat buffers.

Letters: p ranks, M microbatches of a step, m the most that a rank has, C elements of a buffer, K buckets, L arrays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Integer

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import describe, have_same_containers, leaves_by_name
from jvarlen.batches.shapes import BatchSpec, plan_specs
from jvarlen.distributed.placement import LayoutLike, shards_on
from jvarlen.experimental.mixed.plan import MixedPlan
from jvarlen.planning.buckets import AnyBucket
from jvarlen.planning.budget import CostFn

__all__ = ["BucketArrays", "MixedBatch", "mix_microbatches", "mixed_batch_spec"]


class BucketArrays(NamedTuple):
    """What a microbatch of a bucket takes of the buffers.

    Attributes:
      bucket: its shape.
      shapes: of each array of a microbatch, in the order of the leaves.
    """

    bucket: AnyBucket
    shapes: tuple[tuple[int, ...], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MixedBatch:
    """The arrays of a mixed step, a pytree. All steps of a plan have the same shapes.

    Attributes:
      arrays: a batch like those of an ordinary step, such as a `Batch`, with a buffer [p, C] in place of each array.
        A rank's buffer holds its microbatches one after the other, then zeros. Scalars are of the whole step.
      bucket_index: int32[p, m], the bucket of each microbatch of a rank; 0 after the last.
      places: int32[p, m], the place of each microbatch in its step, which determines its key; 0 after the last.
      num_microbatches: int32[p], how many a rank has, possibly none.
      layout: what a microbatch of each bucket takes of the buffers. It is part of the structure, not an array.
    """

    arrays: Any
    bucket_index: Any
    places: Any
    num_microbatches: Any
    layout: tuple[BucketArrays, ...] = dataclasses.field(metadata={"static": True})

    @property
    def num_sequences(self) -> Any:
        """float32[], real samples in the whole step; None if `arrays` has no such field."""
        return self._field("num_sequences")

    @property
    def num_tokens(self) -> Any:
        """The field of `arrays`, if it has one; else None."""
        return self._field("num_tokens")

    def _field(self, name: str) -> Any:
        return self.arrays.get(name) if isinstance(self.arrays, dict) else getattr(self.arrays, name, None)


def mixed_batch_spec(
    plans: MixedPlan | Sequence[MixedPlan],
    *,
    layout: LayoutLike,
    cost: CostFn | None = None,
    batch_spec: BatchSpec | None = None,
) -> MixedBatch:
    """The shapes and dtypes of all batches of a mixed plan: what its fullest rank needs in any step.

    Args:
      plans: the mixed plan; or several of the same buckets, such as those of all epochs, whose batches then share one
        program.
      layout: as for `make_mixed_train_step`: its p data shards are the ranks.
      cost: as for `load_mixed`: it decides which rank gets which microbatches.
      batch_spec: `batch_spec(bucket, 1)` gives the pytree of `jax.ShapeDtypeStruct` of a microbatch, with a leading
        axis of 1 on all that are not scalars. None: samples of tokens.

    Returns:
      A `MixedBatch` of `jax.ShapeDtypeStruct` with their shardings on the mesh: every array is sharded along `"data"`.

    Raises:
      ValueError: no plan, or plans of different buckets.
    """
    placement = shards_on(layout)
    num_ranks = placement.layout.data
    plans = [plans] if not isinstance(plans, Sequence) else list(plans)
    all_buckets = list(dict.fromkeys(plan.buckets.shapes for plan in plans))
    if len(all_buckets) != 1:
        raise UserError(f"plans must be at least one, all of the same buckets, not of {list_first(all_buckets, '; ')}")
    batch_spec = batch_spec or plan_specs(plans[0].plan)
    specs = [batch_spec(bucket, 1) for bucket in all_buckets[0]]
    arrays_of_each = tuple(
        BucketArrays(bucket, tuple(leaf.shape[1:] for leaf in jax.tree.leaves(spec)))
        for bucket, spec in zip(all_buckets[0], specs, strict=True)
    )
    sizes_KxL = np.array([[math.prod(shape) for shape in each.shapes] for each in arrays_of_each], np.int64)
    most, capacities_L = 1, np.ones(sizes_KxL.shape[1], np.int64)
    for plan in plans:
        step = np.repeat(np.arange(plan.num_steps), np.diff(plan.step_offsets))
        slot = step * num_ranks + plan.ranks(num_ranks, cost)
        most = max(most, int(np.bincount(slot).max(initial=0)))
        taken = [np.bincount(slot, sizes_K[plan.plan.step_bucket]).max(initial=0) for sizes_K in sizes_KxL.T]
        capacities_L = np.maximum(capacities_L, np.array(taken).astype(np.int64))
    leaves, structure = jax.tree.flatten(specs[0])
    buffers = [
        jax.ShapeDtypeStruct((num_ranks, int(capacity)) if leaf.shape else (), leaf.dtype)
        for leaf, capacity in zip(leaves, capacities_L, strict=True)
    ]
    of_each = jax.ShapeDtypeStruct((num_ranks, most), np.int32)
    spec = MixedBatch(
        arrays=jax.tree.unflatten(structure, buffers),
        bucket_index=of_each,
        places=of_each,
        num_microbatches=jax.ShapeDtypeStruct((num_ranks,), np.int32),
        layout=arrays_of_each,
    )
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        spec,
        placement.batch_shardings(spec),
    )


def mix_microbatches(
    microbatches: Sequence[Any],
    buckets: Sequence[tuple[int, ...]],
    ranks: Sequence[int] | Integer[np.ndarray, " M"],
    spec: MixedBatch,
    *,
    places: Integer[np.ndarray, " M"] | None = None,
) -> MixedBatch:
    """Copies the microbatches of a step into the buffers of their ranks.

    Args:
      microbatches: pytrees of host arrays, as collate functions make them for one microbatch: all but scalars have a
        leading axis of 1. Scalars are of the whole step.
      buckets: the bucket of each.
      ranks: integers in 0 … p − 1, the rank of each. A rank may have none.
      spec: of `mixed_batch_spec`.
      places: the place of each in its step; None: their order.

    Returns:
      A `MixedBatch` of NumPy arrays.

    Raises:
      ValueError: a bucket that `spec` does not have; no such rank; arrays of other shapes or types than those of their
        bucket; scalars that differ between microbatches; or more for a rank than there is room for.
    """
    known = {tuple(each.bucket): k for k, each in enumerate(spec.layout)}
    if unknown := [tuple(bucket) for bucket in buckets if tuple(bucket) not in known]:
        raise UserError(f"buckets that are not among the {len(known)} of these batches: {list_first(unknown)}")
    num_ranks, most = spec.bucket_index.shape
    ranks_M = np.asarray(ranks).tolist()
    if wrong := [f"{rank} of microbatch {i}" for i, rank in enumerate(ranks_M) if not 0 <= rank < num_ranks]:
        raise UserError(f"ranks must be in 0 … {num_ranks - 1}: {list_first(wrong)}")
    places_M = range(len(ranks_M)) if places is None else places.tolist()
    names = list(leaves_by_name(spec.arrays))
    buffers = [np.zeros(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(spec.arrays)]
    bucket_index, places_pxm = np.zeros((2, num_ranks, most), np.int32)
    counts, ends_pxL = np.zeros(num_ranks, np.int32), np.zeros((num_ranks, len(buffers)), np.int64)
    for microbatch, bucket, rank, place in zip(microbatches, buckets, ranks_M, places_M, strict=True):
        k = known[tuple(bucket)]
        _check_microbatch(microbatch, spec, k, microbatches[0])
        if counts[rank] == most:
            raise UserError(_NO_ROOM.format(rank, f"{most} microbatches"))
        bucket_index[rank, counts[rank]], places_pxm[rank, counts[rank]] = k, place
        counts[rank] += 1
        for j, (leaf, buffer) in enumerate(zip(jax.tree.leaves(microbatch), buffers, strict=True)):
            if not buffer.ndim:
                buffer[...] = leaf
                continue
            start, end = ends_pxL[rank, j], ends_pxL[rank, j] + leaf.size
            if end > buffer.shape[1]:
                raise UserError(_NO_ROOM.format(rank, f"{buffer.shape[1]} elements of {names[j]}"))
            buffer[rank, start:end] = leaf.ravel()
            ends_pxL[rank, j] = end
    return MixedBatch(
        arrays=jax.tree.unflatten(jax.tree.structure(spec.arrays), buffers),
        bucket_index=bucket_index,
        places=places_pxm,
        num_microbatches=counts,
        layout=spec.layout,
    )


_NO_ROOM = "rank {} gets more than the {} that there is room for: make the spec for the same plan, ranks and cost"


def _check_microbatch(microbatch: Any, spec: MixedBatch, k: int, first: Any) -> None:
    """Raises ValueError where arrays are not those of bucket k, or scalars not those of the first microbatch."""
    shapes = zip(leaves_by_name(spec.arrays).items(), spec.layout[k].shapes, strict=True)
    expected = {
        name: describe(jax.ShapeDtypeStruct((1, *shape) if leaf.shape else (), leaf.dtype))
        for (name, leaf), shape in shapes
    }
    found = leaves_by_name(microbatch)
    wrong = [
        f"{name}: {describe(found.get(name))}, expected {expected.get(name, 'none')}"
        for name in {**expected, **found}
        if describe(found.get(name)) != expected.get(name)
    ]
    if wrong or not have_same_containers(microbatch, spec.arrays):
        listed = list_first(wrong, "; ") or "its containers differ"
        raise UserError(f"a microbatch of bucket {spec.layout[k].bucket} is not as in batch_spec: {listed}")
    differing = [
        f"{name}: {leaf} and {other}"
        for (name, leaf), other in zip(leaves_by_name(first).items(), found.values(), strict=True)
        if not np.ndim(leaf) and leaf != other
    ]
    if differing:
        raise UserError(
            f"scalars of a batch are of the whole step, and these differ between its microbatches: "
            f"{list_first(differing, '; ')}; give arrays of shape [1] for what each has of its own"
        )
