"""ZeRO: what of a state is sharded over the data axes, and layers that gather their parameters.

Shards lie along one dimension of an array. Parameters are sharded only where the number of shards divides one; arrays
of the optimizer, and gradients, are padded where it divides none. Letters: N shards, L layers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import DATA_AXIS, STAGE_AXIS, axes_in
from jvarlen.parallel.layers import LayeredModel, LayeredParams, layered_loss_fn
from jvarlen.training.losses import LossFn
from jvarlen.training.train_state import TrainState

__all__ = [
    "MIN_SHARDED", "Perturbed", "crop", "gather_shards", "gathering_model", "pad", "pad_to", "padded", "padded_shape",
    "perturbed_loss_fn", "shard_specs", "staged_specs", "state_specs", "unpadded",
]  # fmt: skip

MIN_SHARDED = 1024  # elements; of smaller arrays, collectives cost more than the bytes are worth

_WHOLE = PartitionSpec()
# What the backward pass computes again: gathered parameters, and what is next to free and may have been made from them.
_NOT_SAVED = {
    "all_gather", "broadcast_in_dim", "convert_element_type", "copy", "reshape", "sharding_constraint", "slice",
    "squeeze", "transpose",
}  # fmt: skip


def shard_specs(params: Any, layout: Layout, *, padded: bool = True, other_specs: Any = None) -> Any:
    """How parameters, their gradients and their optimizer state lie over the data axes where they are sharded.

    Each is sharded along the largest dimension that N divides, the first of equal ones; or else, if `padded` (of
    gradients and optimizer state), along the largest that has at least N elements. Arrays with no such dimension, or
    with fewer than 1,024 elements, are whole. Of `LayeredParams`, both count within a layer. `other_specs` tell which
    dimensions lie along `"stage"` or `"tensor"`, and so not along these.
    """
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
        dims = [dim for dim in free if shape[dim] >= layout.num_shards]
    if not dims or math.prod(shape[begin:]) < MIN_SHARDED:
        return taken
    largest = max(dims, key=lambda dim: (shape[dim], -dim))
    axes[largest] = layout.data_axes
    while axes[-1] is None:
        axes.pop()
    return PartitionSpec(*axes)


def staged_specs(specs: LayeredParams) -> LayeredParams:
    """The same specs, with the layers along `"stage"`."""
    layers = jax.tree.map(lambda spec: PartitionSpec(STAGE_AXIS, *spec[1:]), specs.layers)
    return specs._replace(layers=layers)


def padded_shape(shape: tuple[int, ...], spec: PartitionSpec, axis_sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an array whose sharded dimensions are padded to multiples of the sizes of their axes."""
    axes = [*spec, *(None,) * (len(shape) - len(spec))]
    multiples = [math.prod(axis_sizes[axis] for axis in axes_in([axis])) for axis in axes]
    return tuple(-(-size // multiple) * multiple for size, multiple in zip(shape, multiples, strict=True))


class _OfParam(NamedTuple):
    """How an array of the optimizer lies, and its shape without padding."""

    spec: PartitionSpec
    shape: tuple[int, ...]


def _by_params(state: TrainState, layout: Layout, other_specs: Any) -> Any:
    """For each array of the optimizer, padded or not, an `_OfParam`."""
    lie = shard_specs(state.params, layout, other_specs=other_specs) if layout.zero else other_specs
    specs = jax.tree.leaves(lie)
    params = {
        path: (np.shape(leaf), spec)
        for (path, leaf), spec in zip(jax.tree.leaves_with_path(state.params), specs, strict=True)
    }

    # By path, not by Optax's own search: that calls `init` with placeholders, which some optimizers do not take.
    def of_param(path: tuple[Any, ...], leaf: Any) -> _OfParam:
        found = np.shape(leaf)
        for begin in range(len(path) + 1):  # the longest end first
            shape, spec = params.get(path[begin:], ((), _WHOLE))
            leading = found[: len(found) - len(shape)]  # such as the history of L-BFGS
            if any(spec) and found[len(leading) :] in (shape, padded_shape(shape, spec, layout.axis_sizes)):
                return _OfParam(PartitionSpec(*(None,) * len(leading), *spec), leading + shape)
        return _OfParam(_WHOLE, found)

    return jax.tree.map_with_path(of_param, state.opt_state)


def state_specs(state: TrainState, layout: Layout, other_specs: Any = None) -> TrainState:
    """How a state lies over the axes, as a `TrainState` of specs; arrays of the optimizer may be padded.

    From level 1 on, or with `other_specs`, an array of the optimizer lies as the parameter whose path is the end of its
    own, such as `['embed']` of `[0].mu['embed']`, and whose shape is its own or the end of it; others are whole.
    """
    whole = jax.tree.map(lambda _: _WHOLE, state)
    if layout.zero == 0 and other_specs is None:
        return whole
    params = whole.params if other_specs is None else other_specs
    if layout.zero == 3:
        params = shard_specs(state.params, layout, padded=False, other_specs=other_specs)
    of_params = _by_params(state, layout, other_specs)
    return whole._replace(
        params=params,
        opt_state=jax.tree.map(
            lambda of_param: of_param.spec, of_params, is_leaf=lambda leaf: isinstance(leaf, _OfParam)
        ),
    )


def unpadded(state: TrainState, layout: Layout, other_specs: Any = None) -> TrainState:
    """A state whose optimizer has arrays in the shapes of their parameters."""
    return _with_arrays(state, layout, other_specs, lambda leaf, of_param: crop(leaf, of_param.shape))


def padded(state: TrainState, layout: Layout, other_specs: Any = None) -> TrainState:
    """The inverse of `unpadded`, with zeros."""
    return _with_arrays(state, layout, other_specs, lambda leaf, of_param: pad(leaf, of_param.spec, layout.axis_sizes))


def _with_arrays(
    state: TrainState, layout: Layout, other_specs: Any, change: Callable[[Any, _OfParam], Any]
) -> TrainState:
    if layout.zero == 0 and other_specs is None:
        return state
    of_params = _by_params(state, layout, other_specs)
    changed = jax.tree.map(
        lambda of_param, leaf: change(leaf, of_param),
        of_params,
        state.opt_state,
        is_leaf=lambda leaf: isinstance(leaf, _OfParam),
    )
    return state._replace(opt_state=changed)


def pad(leaf: Any, spec: PartitionSpec, axis_sizes: Mapping[str, int]) -> Any:
    """An array, or its shape, with zeros at the end of the dimensions that are sharded."""
    shape = padded_shape(np.shape(leaf), spec, axis_sizes)
    if shape == np.shape(leaf):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, leaf.dtype)
    return pad_to(leaf, shape)


def pad_to(leaf: Any, shape: tuple[int, ...]) -> jax.Array:
    """An array with zeros at the end of dimensions."""
    return jnp.pad(leaf, [(0, to - size) for size, to in zip(np.shape(leaf), shape, strict=True)])


def crop(leaf: Any, shape: tuple[int, ...]) -> Any:
    """An array, or its shape, without what was padded."""
    if shape == np.shape(leaf):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, leaf.dtype)
    return leaf[tuple(map(slice, shape))]


class Perturbed(NamedTuple):
    """Parameters in shards, and zeros of their whole shapes: where a loss puts gradients that are not reduced."""

    shards: Any
    zeros: Any


def gathering_model(model: LayeredModel, specs: LayeredParams, *, recomputes: bool = False) -> LayeredModel:
    """A model whose functions take shards of their parameters, inside `shard_map` over the data axes.

    Each gathers its parameters, a layer again in the backward pass, so that only those of the layer that runs are
    whole. Their gradients are reduced to the same shards; of `Perturbed` parameters, they become those of the zeros.
    If it recomputes, layers hold only their inputs for the backward pass.
    """
    specs_of_layer = jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), specs.layers)

    def gathering(call: Callable[..., Any], specs: Any, *, again: bool = True, in_loop: bool = False) -> Any:
        def gather_and_call(params: Any, *args: Any) -> Any:
            *arrays, axes = args

            def on_shards(params: Any, *arrays: Any) -> Any:
                if isinstance(params, Perturbed):
                    params = jax.tree.map(_gather, params.shards, specs, params.zeros)
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


def perturbed_loss_fn(model: LayeredModel, specs: LayeredParams, *, recomputes: bool = False) -> LossFn:
    """The loss of a model that gathers, as a function of `Perturbed` parameters."""
    stack = model.stack or (lambda params: params)

    def stack_both(params: Perturbed) -> LayeredParams:
        shards, zeros = map(stack, params)
        return LayeredParams(Perturbed(shards.ends, zeros.ends), Perturbed(shards.layers, zeros.layers))

    return layered_loss_fn(gathering_model(model, specs, recomputes=recomputes)._replace(stack=stack_both))


def gather_shards(params: Any, specs: Any) -> Any:
    """Whole parameters from shards, inside `shard_map` over the data axes; gradients are reduced to the same shards."""
    return jax.tree.map(_gather, params, specs)


class _Along(NamedTuple):
    """The dimension of an array that lies along the data axes, and these axes."""

    dim: int
    axes: Any


def _along_data(spec: PartitionSpec) -> _Along | None:
    """None: no dimension lies along the data axes."""
    return next((_Along(dim, axes) for dim, axes in enumerate(spec) if DATA_AXIS in axes_in([axes])), None)


def _gather(shard: jax.Array, spec: PartitionSpec, zeros: jax.Array | None = None) -> jax.Array:
    along = _along_data(spec)
    if zeros is not None:
        return _gather_dim_perturbed(shard, zeros, along)
    return shard if along is None else _gather_dim(shard, along)


def _all_gather(shard: jax.Array, along: _Along | None) -> jax.Array:
    return shard if along is None else jax.lax.all_gather(shard, along.axes, axis=along.dim, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather_dim(shard: jax.Array, along: _Along) -> jax.Array:
    return _all_gather(shard, along)


def _gather_dim_backward(along: _Along, _: None, grad: jax.Array) -> tuple[jax.Array]:
    """Sums over the shards in float32 at least, which the transpose of a gather would not do."""
    wide = grad.astype(jnp.promote_types(grad.dtype, jnp.float32))
    summed = jax.lax.psum_scatter(wide, along.axes, scatter_dimension=along.dim, tiled=True)
    return (summed.astype(grad.dtype),)


# Forward not by `_gather_dim`: the policy of what is saved must see the primitive.
_gather_dim.defvjp(lambda shard, along: (_all_gather(shard, along), None), _gather_dim_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gather_dim_perturbed(shard: jax.Array, zeros: jax.Array, along: _Along | None) -> jax.Array:
    return _all_gather(shard, along)


_gather_dim_perturbed.defvjp(
    lambda shard, zeros, along: (_all_gather(shard, along), None), lambda along, _, grad: (None, grad)
)
