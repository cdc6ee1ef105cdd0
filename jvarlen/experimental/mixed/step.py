"""The train step of mixed plans: every rank has its own number of microbatches, each of its own shape.

One program runs them all: a loop over the rank's microbatches with a switch over the buckets, and one reduction after
the loop. Only there do ranks wait for each other, once per step. Letters: p ranks, m microbatches of a rank, L arrays
of a batch, K buckets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from jvarlen._common.checks import UserError
from jvarlen.distributed.mesh import DATA_AXIS
from jvarlen.distributed.placement import LayoutLike, placement_of
from jvarlen.experimental.mixed.batches import MixedBatch
from jvarlen.parallel.train import TrainStep
from jvarlen.planning.buckets import AnyBucket, check_buckets
from jvarlen.training.losses import LossFn
from jvarlen.training.step import step_of_sums
from jvarlen.training.step_sums import LossProgram, StepSums, SumsFn
from jvarlen.training.train_state import TrainState

__all__ = ["make_mixed_train_step"]


def make_mixed_train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    buckets: Sequence[tuple[int, ...]],
    *,
    layout: LayoutLike,
    norms: bool = False,
) -> TrainStep:
    """A train step over microbatches of different shapes, of which each rank has any number.

    Loss, gradient and random keys are those of `make_train_step` with the same microbatches on one device: sums are
    accumulated over a rank's microbatches, reduced over the ranks once, and divided once.

    Args:
      loss_fn: as for `make_train_step`. It may not communicate over the mesh: ranks do not call it at the same time.
      optimizer: as for `make_train_step`.
      buckets: those of the mixed plan; the loss is compiled for all of them, in one program.
      layout: data-parallel alone; its shards are the ranks.
      norms: whether the metrics include the global norms of gradient and updates.

    Returns:
      `TrainStep` for a `MixedBatch`: a plain function, to be compiled by `jax.jit`.

    Raises:
      ValueError: buckets that repeat or do not ascend; a layout that is not data-parallel alone; and when it is
        traced: a batch of other buckets or of another number of ranks, a loss that communicates, and what
        `make_train_step` raises.
    """
    checked = check_buckets(buckets).shapes
    placement = placement_of(layout)
    if placement is None or placement.mesh.size != placement.layout.data or placement.layout.zero:
        raise UserError(f"a mixed step is data-parallel alone, and layout is {layout}")
    if placement.layout.reduce_dtype != "float32":
        raise UserError(f"a mixed step sends gradients in float32: leave reduce_bfloat16 out of {placement.layout}")
    mesh, num_ranks = placement.program_mesh, placement.layout.data
    sums_of = _sum_mixed(LossProgram(loss_fn), checked, mesh, num_ranks)
    function = step_of_sums(sums_of, optimizer, norms=norms)
    return TrainStep(function=function, model=loss_fn, optimizer=optimizer, placement=placement)


def _sum_mixed(loss: LossProgram, buckets: tuple[AnyBucket, ...], mesh: Mesh, num_ranks: int) -> SumsFn:
    """The sums of a whole mixed step, over all ranks."""

    def sums_of(state: TrainState, batch: Any) -> StepSums:
        _check_batch(batch, buckets, num_ranks)
        state = state._replace(opt_state=None)
        split, whole = PartitionSpec(DATA_AXIS), PartitionSpec()
        zeros = _zero_sums(loss, state, batch)

        def on_rank(state: TrainState, batch: MixedBatch) -> StepSums:
            sums = _accumulate(loss, state, batch, zeros)
            return jax.lax.psum(sums, DATA_AXIS)

        # Unchecked, as in `sum_over_shards`: loops of the loss may start from constants.
        over_ranks = jax.shard_map(
            on_rank,
            mesh=mesh,
            in_specs=(whole, jax.tree.map(lambda leaf: split if leaf.ndim else whole, batch)),
            out_specs=whole,
            check_vma=False,
        )
        return over_ranks(state, batch)

    return sums_of


def _accumulate(loss: LossProgram, state: TrainState, batch: MixedBatch, zeros: StepSums) -> StepSums:
    """The sums over the microbatches of one rank, whose arrays have a leading axis of 1."""
    leaves, structure = jax.tree.flatten(batch.arrays)
    key = loss.step_key(state)
    sizes_KxL = np.array([[math.prod(shape) for shape in each.shapes] for each in batch.layout], np.int32)

    def adding(shapes: tuple[tuple[int, ...], ...]) -> Callable[..., StepSums]:
        def add(sums: StepSums, offsets_L: jax.Array, place: jax.Array) -> StepSums:
            arrays = [
                jax.lax.dynamic_slice(leaf[0], (offset,), (math.prod(shape),)).reshape(shape) if leaf.ndim else leaf
                for leaf, shape, offset in zip(leaves, shapes, offsets_L, strict=True)
            ]
            own_key = None if key is None else jax.random.fold_in(key, place)
            microbatch = jax.tree.unflatten(structure, arrays)
            added = loss.sum_microbatch(state, microbatch, own_key)
            return jax.tree.map(jnp.add, sums, added)

        return add

    branches = [adding(each.shapes) for each in batch.layout]

    def turn(carry: tuple[jax.Array, jax.Array, StepSums]) -> tuple[jax.Array, jax.Array, StepSums]:
        i, offsets_L, sums = carry
        k = batch.bucket_index[0, i]
        sums = jax.lax.switch(k, branches, sums, offsets_L, batch.places[0, i])
        return i + 1, offsets_L + jnp.asarray(sizes_KxL)[k], sums

    start = jnp.int32(0), jnp.zeros(len(leaves), jnp.int32), zeros
    return jax.lax.while_loop(lambda carry: carry[0] < batch.num_microbatches[0], turn, start)[2]


def _zero_sums(loss: LossProgram, state: TrainState, batch: MixedBatch) -> StepSums:
    """Zeros of what a microbatch adds; raises ValueError if the loss names a mesh axis."""
    leaves, structure = jax.tree.flatten(batch.arrays)
    shapes = zip(leaves, batch.layout[0].shapes, strict=True)
    microbatch = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(shape, leaf.dtype) for leaf, shape in shapes])
    key = loss.step_key(state)
    try:  # outside of shard_map, where no axis has a name
        sums = jax.eval_shape(lambda microbatch: loss.sum_microbatch(state, microbatch, key), microbatch)
    except NameError as error:
        if "axis name" not in str(error):  # best effort: JAX says so in words only
            raise
        raise UserError(
            f"{loss.name} names a mesh axis ({error}), and the ranks of a mixed step do not call it at the same time, "
            "nor equally often: return the sums of the microbatch's own rows"
        ) from error
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), sums)


def _check_batch(batch: Any, buckets: tuple[AnyBucket, ...], num_ranks: int) -> None:
    if not isinstance(batch, MixedBatch):
        raise UserError(f"a mixed step takes a MixedBatch, such as load_mixed gives, not a {type(batch).__name__}")
    of_batch = tuple(each.bucket for each in batch.layout)
    if of_batch != buckets:
        listed = (", ".join(map(str, each)) for each in (of_batch, buckets))
        raise UserError("the batch has the buckets {}, and the step was made for {}".format(*listed))
    if len(batch.num_microbatches) != num_ranks:
        raise UserError(f"the batch is for {len(batch.num_microbatches)} ranks, and the mesh has {num_ranks}")
