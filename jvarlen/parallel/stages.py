"""What programs of a model in stages share: parameters before the loop, reductions after it, and buffers with slots.

Letters: L layers, S stages, V chunks of a stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jvarlen._common.checks import UserError
from jvarlen.distributed.grad_buckets import reduce_in_buckets
from jvarlen.distributed.mesh import STAGE_AXIS, axes_in
from jvarlen.parallel.layers import LayeredParams
from jvarlen.parallel.zero import gather_shards, staged_specs
from jvarlen.training.step_sums import StepSums, count_once, sharded_dims, split_step
from jvarlen.training.train_state import TrainState

__all__ = [
    "add_trees",
    "buffer_of",
    "check_layers_divide",
    "read_slot",
    "sum_over_stages",
    "wide_zeros",
    "write_slot",
    "zeros_of_shapes",
]


def check_layers_divide(num_layers: int, num_stages: int, num_chunks: int = 1) -> None:
    """Raises ValueError if L layers do not divide into S stages of V chunks."""
    if num_stages > num_layers:
        raise UserError(f"{num_layers} layers do not make {num_stages} stages: a stage has at least one layer")
    if num_layers % (num_stages * num_chunks):
        chunks = f" of {num_chunks} chunks" if num_chunks > 1 else ""
        raise UserError(
            f"{num_layers} layers do not divide into {num_stages} stages{chunks} of equal size: the number of layers "
            f"must be a multiple of {num_stages * num_chunks}"
        )


def sum_over_stages(
    sum_on_device: Callable[[LayeredParams, Any], StepSums],
    state: TrainState,
    batch: Any,
    *,
    arrange: Callable[[Any], LayeredParams],
    mesh: Mesh,
    axis_name: str | tuple[str, ...],
    rows_along: str | None = None,
    with_grads: bool = True,
    param_specs: LayeredParams | None = None,
    grad_specs: LayeredParams | None = None,
) -> StepSums:
    """The sums of a step, from those that each device computes of its stage and its microbatches.

    Args:
      sum_on_device: of the arranged parameters of its stage, and of microbatches and their keys; its gradients are
        those of the arranged parameters, in float32 at least. Sums of the loss are 0 on all but the last stage.
      state: its `params` are `LayeredParams`.
      batch: of the step.
      arrange: what a stage computes with, from whole parameters of the stage; linear.
      mesh: has axes `"data"` and `"stage"`, with Auto axes.
      axis_name: as for `sum_scheduled`; so are `rows_along`, `with_grads`, `param_specs` and `grad_specs`.
      rows_along: likewise.
      with_grads: likewise.
      param_specs: likewise.
      grad_specs: likewise.
    """

    def on_device(params: LayeredParams, microbatches_and_keys: Any) -> StepSums:
        whole = params if param_specs is None else gather_shards(params, param_specs)
        sums = count_once(sum_on_device(arrange(whole), microbatches_and_keys), rows_along)
        if not with_grads:
            return jax.lax.psum(sums, (*axes_in(axis_name), STAGE_AXIS))
        _, pull = jax.vjp(arrange, jax.tree.map(wide_zeros, whole))
        (grads,) = pull(sums.grads)
        return _reduce(sums._replace(grads=grads), grad_specs, axis_name)

    whole = jax.tree.map(lambda _: PartitionSpec(), state.params)
    params_lie = staged_specs(whole if param_specs is None else param_specs)
    grads_lie = params_lie if grad_specs is None else staged_specs(grad_specs)
    batch_axes = tuple(name for name in axes_in(axis_name) if name != rows_along)
    on_devices = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(params_lie, PartitionSpec(batch_axes)),
        out_specs=StepSums._make([PartitionSpec()] * 5 + [grads_lie if with_grads else None]),
        axis_names=set(mesh.axis_names),
        # Unchecked, as in `sum_step`; besides, devices take different branches.
        check_vma=False,
    )
    return on_devices(state.params, split_step(state, batch, takes_key=True))


def _reduce(sums: StepSums, grad_specs: LayeredParams | None, axis_name: str | tuple[str, ...]) -> StepSums:
    """Sums over the data shards; of layers not over the stages, which have different ones."""
    leaves, structure = jax.tree.flatten(sums.grads)
    dims = sharded_dims(grad_specs, sums.grads, axis_name)
    sharded = [(place,) for place, dim in enumerate(dims) if dim is not None]
    leaves = reduce_in_buckets(leaves, sharded, axis_name, dims)
    whole = [place for place, dim in enumerate(dims) if dim is None]
    for place, leaf in zip(whole, jax.lax.psum([leaves[place] for place in whole], axis_name), strict=True):
        leaves[place] = leaf
    ends, layers = jax.tree.unflatten(structure, leaves)
    others = jax.lax.psum(sums._replace(grads=None), axis_name)
    others, ends = jax.lax.psum((others, ends), STAGE_AXIS)
    return others._replace(grads=LayeredParams(ends, layers))


def buffer_of(value: Any, num_slots: int) -> Any:
    """Zeros in the shapes of a value, in as many slots, at least one."""
    return jax.tree.map(lambda leaf: jnp.zeros((max(1, num_slots), *leaf.shape), leaf.dtype), value)


def read_slot(buffer: Any, slot: Any) -> Any:
    """What is in a slot; anything for slot −1."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, slot, keepdims=False), buffer)


def write_slot(buffer: Any, slot: Any, value: Any) -> Any:
    """The buffer with a value in a slot; for slot −1 as it was."""

    def write(leaf: jax.Array, own: jax.Array) -> jax.Array:
        if not leaf.shape[0]:
            return leaf
        before = jax.lax.dynamic_index_in_dim(leaf, slot, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(leaf, jnp.where(slot >= 0, own, before), slot, 0)

    return jax.tree.map(write, buffer, value)


def add_trees(sums: Any, more: Any) -> Any:
    """The sums and more, in the types of the sums."""
    return jax.tree.map(lambda total, value: total + value.astype(total.dtype), sums, more)


def zeros_of_shapes(shapes: Any) -> Any:
    """Zeros of these shapes and dtypes."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def wide_zeros(leaf: jax.Array) -> jax.Array:
    """Zeros in the shape of an array, in float32 at least."""
    return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))
