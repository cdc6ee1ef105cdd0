"""ZeRO over N data shards: the specs of sharded arrays, gathering them, and reducing gradients to them."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jvarlen._common.types import Array, Params, PyTree, Specs
from jvarlen.distributed.grad_buckets import reduce_scatter
from jvarlen.distributed.layout import Layout, ReduceDtype
from jvarlen.distributed.mesh import DATA_AXIS, auto_axes, axes_in
from jvarlen.parallel.layers import LayeredParams
from jvarlen.training.trainable import merge_trained

__all__ = [
    "MIN_SHARDED", "along_data", "gather_by_layers", "gather_shards", "reduce_to_shard", "shard_specs",
    "specs_of_layer",
]  # fmt: skip

MIN_SHARDED = 1024  # elements; of smaller arrays, collectives cost more than the bytes are worth

_WHOLE = PartitionSpec()
_MOST_WIDE = 2**26  # elements of a gradient that are widened at a time


def shard_specs(params: Params, layout: Layout, *, padded: bool = True, other_specs: Specs = None) -> PyTree:
    """Specs of parameters, or if `padded` of gradients and optimizer state, over the axes that shard them."""
    # Each along the first dimension that N divides, so that gathering does not transpose; or else, if padded,
    # along the largest that has at least N elements, where padding is least. Arrays with no such dimension, or of few
    # elements, are whole. In `LayeredParams`, both count within a layer. Dimensions of `other_specs` are taken, by
    # "stage" or "tensor".
    spec = functools.partial(_spec, layout=layout, padded=padded)
    taken = jax.tree.map(lambda _: _WHOLE, params) if other_specs is None else other_specs
    if isinstance(params, LayeredParams):
        layers = jax.tree.map(functools.partial(spec, begin=1), params.layers, taken.layers)
        return LayeredParams(jax.tree.map(spec, params.ends, taken.ends), layers)
    return jax.tree.map(spec, params, taken)


def _spec(leaf: Array, taken: PartitionSpec, *, layout: Layout, padded: bool, begin: int = 0) -> PartitionSpec:
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


def specs_of_layer(specs: Specs) -> PyTree:
    """The specs of one layer, from those of stacked layers."""
    return jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), specs)


def along_data(spec: PartitionSpec) -> tuple[int, str | tuple[str, ...]] | None:
    """The dimension along the data axes, and these axes, or None."""
    return next(((dim, axes) for dim, axes in enumerate(spec) if DATA_AXIS in axes_in([axes])), None)


def gather_shards(params: Params, specs: Specs) -> PyTree:
    """Whole parameters from shards, inside `shard_map` over the data axes."""

    def gather(shard: jax.Array, spec: PartitionSpec) -> jax.Array:
        if (along := along_data(spec)) is None:
            return shard
        dim, axes = along
        if dim == 0:
            return jax.lax.all_gather(shard, axes, tiled=True)
        # Along another one, XLA would transpose all layers before their loop.
        whole = jnp.moveaxis(jax.lax.all_gather(shard, axes), 0, dim)
        return whole.reshape(*shard.shape[:dim], -1, *shard.shape[dim + 1 :])

    return jax.tree.map(gather, params, specs)


def gather_by_layers(layers: Params, into: PyTree, specs: Specs, whole: PyTree, mesh: Mesh) -> PyTree:
    """Gathers stacked layers from `specs` to `whole`, one after the other."""
    # All at once would be transposed: a gather puts the shards one after the other, before the layers.
    shards, into, specs, whole = (
        jax.tree.map(lambda spec, leaf: None if along_data(spec) is None else leaf, specs, each)
        for each in (layers, into, specs, whole)
    )
    of_layer = specs_of_layer(specs)

    def on_device(shards: PyTree, into: PyTree) -> PyTree:
        def turn(into: PyTree, index_and_layer: tuple[jax.Array, Any]) -> tuple[Any, None]:
            index, layer = index_and_layer
            put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
            return jax.tree.map(put, into, gather_shards(layer, of_layer)), None

        num_layers = jax.tree.leaves(shards)[0].shape[0]
        return jax.lax.scan(turn, into, (jnp.arange(num_layers), shards))[0]

    if not jax.tree.leaves(shards):
        return layers
    mapped = jax.shard_map(on_device, mesh=auto_axes(mesh), in_specs=(specs, whole), out_specs=whole, check_vma=False)
    return merge_trained(mapped(shards, into), layers)


def reduce_to_shard(grad: jax.Array, spec: PartitionSpec, sent: ReduceDtype = "float32") -> jax.Array:
    """This device's shard of the sum of a gradient, in float32 at least; unchanged if no data axis shards it."""
    along, dtype = along_data(spec), jnp.promote_types(grad.dtype, jnp.float32)
    if along is None:
        return grad.astype(dtype)
    dim, axes = along
    num_shards = jax.lax.axis_size(axes)
    if missing := -grad.shape[dim] % num_shards:
        grad = jnp.pad(grad, [(0, missing if i == dim else 0) for i in range(grad.ndim)])

    num_rows, is_widened = grad.shape[dim] // num_shards, sent == "float32" and dtype != grad.dtype
    num_parts = math.gcd(num_rows, -(-grad.size // _MOST_WIDE)) if is_widened and dim == 0 else 1
    if num_parts == 1:
        return reduce_scatter(grad, axes, sent, dim)
    # Some rows of each shard at a time, so that the whole is not widened.
    parts = grad.reshape(num_shards, num_parts, -1, *grad.shape[1:])

    def reduce(i: jax.Array) -> jax.Array:
        return reduce_scatter(parts[:, i].reshape(-1, *grad.shape[1:]), axes, sent)

    shards = jax.lax.map(reduce, jnp.arange(num_parts))
    return shards.reshape(num_rows, *grad.shape[1:])
