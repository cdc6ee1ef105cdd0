"""ZeRO: what of a state is sharded over the data axes, and layers that gather their parameters. N is the shards."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import DATA_AXIS, axes_in
from jvarlen.parallel.layers import LayeredModel, LayeredParams, layered_loss_fn
from jvarlen.training.losses import LossFn

__all__ = [
    "MIN_SHARDED", "Perturbed", "gather_shards", "gathering_model", "perturbed_loss_fn", "shard_specs",
]  # fmt: skip

MIN_SHARDED = 1024  # elements; of smaller arrays, collectives cost more than the bytes are worth

_WHOLE = PartitionSpec()
# What the backward pass computes again: gathered parameters, and what is next to free and may have been made from them.
# A parameter without gradient is gathered in a `custom_vjp_call`.
_NOT_SAVED = {
    "all_gather", "broadcast_in_dim", "convert_element_type", "copy", "custom_vjp_call", "reshape",
    "sharding_constraint", "slice", "squeeze", "transpose",
}  # fmt: skip


def shard_specs(params: Any, layout: Layout, *, padded: bool = True, other_specs: Any = None) -> Any:
    """How parameters, or if `padded` gradients and optimizer state, lie over the axes where they are sharded."""
    # Each along the first dimension that N divides, so that gathering has no need to transpose; or else, if padded,
    # along the largest that has at least N elements, where padding is least. Arrays with no such dimension, or of few
    # elements, are whole. Of `LayeredParams`, both count within a layer. Dimensions of `other_specs` are taken, by
    # "stage" or "tensor".
    spec = functools.partial(_spec, layout=layout, padded=padded)
    taken = jax.tree.map(lambda _: _WHOLE, params) if other_specs is None else other_specs
    if isinstance(params, LayeredParams):
        layers = jax.tree.map(functools.partial(spec, begin=1), params.layers, taken.layers)
        return LayeredParams(jax.tree.map(spec, params.ends, taken.ends), layers)
    return jax.tree.map(spec, params, taken)


def _spec(leaf: Any, taken: PartitionSpec, *, layout: Layout, padded: bool, begin: int = 0) -> PartitionSpec:
    shape, axes = np.shape(leaf), [*taken, *(None,) * (np.ndim(leaf) - len(taken))]
    free = [dim for dim in range(begin, len(shape)) if axes[dim] is None]
    dims = [dim for dim in free if shape[dim] % layout.num_shards == 0]
    if not dims and padded:
        dims = sorted((dim for dim in free if shape[dim] >= layout.num_shards), key=lambda dim: -shape[dim])
    if not dims or math.prod(shape[begin:]) < MIN_SHARDED:
        return taken
    axes[dims[0]] = layout.data_axes
    while axes[-1] is None:
        axes.pop()
    return PartitionSpec(*axes)


class Perturbed(NamedTuple):
    """Parameters in shards, and zeros of their whole shapes, whose gradients are those of whole parameters."""

    shards: Any
    zeros: Any


def gathering_model(model: LayeredModel, specs: LayeredParams, *, recomputes: bool = False) -> LayeredModel:
    """A model whose functions take shards of their parameters, inside `shard_map` over the data axes."""
    # Each function gathers its parameters, a layer again in the backward pass, so that only those of the layer that
    # runs are whole. Gradients are reduced to the same shards; of `Perturbed` parameters, they are those of the zeros.
    # If it recomputes, layers hold only their inputs for the backward pass.
    specs_of_layer = jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), specs.layers)

    def gathering(call: Callable[..., Any], specs: Any, *, again: bool = True, in_loop: bool = False) -> Any:
        def gather_and_call(params: Any, *args: Any) -> Any:
            *arrays, axes = args

            def on_shards(params: Any, *arrays: Any) -> Any:
                if isinstance(params, Perturbed):
                    params = jax.tree.map(_gather_perturbed, params.shards, params.zeros, specs)
                else:
                    params = gather_shards(params, specs)
                return call(params, *arrays, axes)

            if again:  # forward and backward of a loop are different loops, and have no common subexpressions
                policy = (
                    None if in_loop and recomputes else lambda primitive, *_, **__: primitive.name not in _NOT_SAVED
                )
                on_shards = jax.checkpoint(on_shards, policy=policy, prevent_cse=not in_loop)
            return on_shards(params, *arrays)

        return gather_and_call

    return model._replace(
        embed=gathering(model.embed, specs.ends),
        layer=gathering(model.layer, specs_of_layer, in_loop=True),
        loss=gathering(model.loss, specs.ends, again=False),  # its backward pass follows at once
    )


def perturbed_loss_fn(model: LayeredModel) -> LossFn:
    """The loss of a model that gathers, as a function of `Perturbed` parameters."""
    stack = model.stack or (lambda params: params)

    def stack_both(params: Perturbed) -> LayeredParams:
        shards, zeros = map(stack, params)
        return LayeredParams(Perturbed(shards.ends, zeros.ends), Perturbed(shards.layers, zeros.layers))

    return layered_loss_fn(model._replace(stack=stack_both))


def gather_shards(params: Any, specs: Any) -> Any:
    """Whole parameters from shards, inside `shard_map` over the data axes; gradients are reduced to the same shards."""
    return jax.tree.map(_gather_reducing, params, specs)


def _along_data(spec: PartitionSpec) -> tuple[int, Any] | None:
    """The dimension that lies along the data axes, and these axes; None if there is none."""
    return next(((dim, axes) for dim, axes in enumerate(spec) if DATA_AXIS in axes_in([axes])), None)


def _gather(shard: jax.Array, spec: PartitionSpec) -> jax.Array:
    along = _along_data(spec)
    return shard if along is None else jax.lax.all_gather(shard, along[1], axis=along[0], tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather_reducing(shard: jax.Array, spec: PartitionSpec) -> jax.Array:
    return _gather(shard, spec)


def _reduce(spec: PartitionSpec, _: None, grad: jax.Array) -> tuple[jax.Array]:
    """Sums over the shards in float32 at least, which the transpose of a gather would not do."""
    along = _along_data(spec)
    if along is None:
        return (grad,)
    wide = grad.astype(jnp.promote_types(grad.dtype, jnp.float32))
    summed = jax.lax.psum_scatter(wide, along[1], scatter_dimension=along[0], tiled=True)
    return (summed.astype(grad.dtype),)


# Forward by `_gather`: the policy of what is saved must see the primitive.
_gather_reducing.defvjp(lambda shard, spec: (_gather(shard, spec), None), _reduce)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gather_perturbed(shard: jax.Array, zeros: jax.Array, spec: PartitionSpec) -> jax.Array:
    return _gather(shard, spec)


_gather_perturbed.defvjp(lambda shard, zeros, spec: (_gather(shard, spec), None), lambda spec, _, grad: (None, grad))
