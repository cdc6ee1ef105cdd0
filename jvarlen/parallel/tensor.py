"""Tensor parallelism: matrix products split over a mesh axis, and sequence parallelism between them.

The functions of a model by layers call these inside `shard_map(check_vma=False)`, with the `axes` that they get; where
`axes.tensor` is None they are plain products and look-ups. Letters: N devices of the axis, T positions, D inputs, F
outputs, V values of a token. "Whole" is equal on all devices.
"""

# What a device holds is *whole*, equal on all devices of the axis, or a *part*: some features, some rows of a
# vocabulary, or under sequence parallelism some positions. Gradients are taken inside `shard_map`, of a loss that every
# device has whole. Its gradient with respect to a whole array is whole as well, so that no device may add what the
# others have already. JAX's transpose of a sum over devices would count the loss once per device: `sum_backward` and
# `sum_forward` define their gradients. Under sequence parallelism every whole parameter meets only some positions
# or features, and its gradient is a part of the sum. `tensor_parallel_model` sums those gradients, once per microbatch.

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import describe, leaves_by_name
from jvarlen._common.types import Grads, Params, PyTree, Specs
from jvarlen.parallel.layers import Axes, LayeredModel, LayeredParams, bind_axes

__all__ = [
    "TENSOR_AXIS", "TensorSpec", "check_tensor_divides", "column_linear", "enter_tensor_parallel", "gather_heads",
    "leave_tensor_parallel", "merge_params", "partition_specs", "row_linear", "split_params", "sum_backward",
    "sum_forward", "sum_over_positions", "take_features", "take_positions", "tensor_parallel_model", "vary_alike",
    "vocabulary_embedding",
]  # fmt: skip

TENSOR_AXIS = "tensor"


def column_linear(
    x: Float[Array, "*positions D"], kernel: Float[Array, "D F"], bias: Float[Array, " F"] | None = None, *, axes: Axes
) -> Float[Array, "*out F"]:
    """A product whose outputs are split. For several products of one input, call `enter_tensor_parallel` once.

    Args:
      x: float[…, D], whole; under sequence parallelism float[…, T / N, D], this device's positions.
      kernel: float[D, F / N], a part along `P(None, "tensor")`.
      bias: float[F / N], a part along `P("tensor")`.
      axes: what is bound.

    Returns:
      float[…, F / N], this device's features of all positions.
    """
    product = enter_tensor_parallel(x, axes=axes) @ kernel
    return product if bias is None else product + bias


def row_linear(
    x: Float[Array, "*positions D"], kernel: Float[Array, "D F"], bias: Float[Array, " F"] | None = None, *, axes: Axes
) -> Float[Array, "*out F"]:
    """A product whose inputs are split, summed over the devices.

    Args:
      x: float[…, D / N], this device's features of all positions.
      kernel: float[D / N, F], a part along `P("tensor")`.
      bias: float[F], whole, added once.
      axes: what is bound.

    Returns:
      float[…, F], whole, by one all-reduce; under sequence parallelism float[…, T / N, F], by one reduce-scatter.

    Raises:
      ValueError: sequence parallelism of positions that N does not divide.
    """
    product = leave_tensor_parallel(x @ kernel, axes=axes)
    return product if bias is None else product + bias


def enter_tensor_parallel(x: Float[Array, "*shape"], *, axes: Axes) -> Float[Array, "*out"]:
    """The input of split products: Megatron's f, which does nothing forward and is an all-reduce backward.

    Under sequence parallelism it is an all-gather forward, to float[…, T, D], and a reduce-scatter backward. A whole
    parameter that each device uses for its features, such as the scale of a norm of each head, enters as well,
    unless `axes.sequence_parallel`.

    Args:
      x: float[…], whole; under sequence parallelism float[…, T / N, D], this device's positions.
      axes: what is bound.

    Returns:
      float[…], whole; under sequence parallelism float[…, T, D].
    """
    if axes.tensor is None:
        return x
    if axes.sequence_parallel:
        return lax.all_gather(x, axes.tensor, axis=x.ndim - 2, tiled=True)  # its transpose is right: a reduce-scatter
    return sum_backward(x, axes.tensor)


def leave_tensor_parallel(x: Float[Array, "*shape"], *, axes: Axes) -> Float[Array, "*out"]:
    """The sum of a split product: Megatron's g, which is an all-reduce forward and does nothing backward.

    Under sequence parallelism it is a reduce-scatter forward, to float[…, T / N, D], and an all-gather backward; N must
    divide T.

    Args:
      x: float[…], this device's term of the sum; under sequence parallelism float[…, T, D].
      axes: what is bound.

    Returns:
      float[…], whole; under sequence parallelism float[…, T / N, D], this device's positions.
    """
    if axes.tensor is None:
        return x
    if axes.sequence_parallel:
        _part_of(x.shape[-2], "positions", axes)
        return lax.psum_scatter(x, axes.tensor, scatter_dimension=x.ndim - 2, tiled=True)
    return sum_forward(x, axes.tensor)


def gather_heads(x: Float[Array, "*positions F"], num_heads: int, *, axes: Axes) -> Float[Array, "*positions out"]:
    """The features of whole heads of keys or values, of which there may be fewer than devices.

    Device t then has head ⌊t · num_heads / N⌋, of which each device of its group computes some features: an all-gather
    forward, and a reduce-scatter backward, which sums what the queries of the group give.

    Args:
      x: float[…, F], this device's features of all positions.
      num_heads: of the whole model; a multiple of N or a divisor.
      axes: what is bound.

    Returns:
      float[…, F], or with fewer heads than devices float[…, F · N / num_heads], those of one head.

    Raises:
      ValueError: heads that N does not divide, and that do not divide N.
    """
    num_devices = 1 if axes.tensor is None else lax.axis_size(axes.tensor)
    if num_heads % num_devices == 0:
        return x
    if num_devices % num_heads:
        raise UserError(
            f"the {num_devices} devices of the axis {axes.tensor!r} must be a multiple or a divisor of the "
            f"num_kv_heads ({num_heads})"
        )
    groups = np.arange(num_devices).reshape(num_heads, -1).tolist()
    return lax.all_gather(x, axes.tensor, axis=x.ndim - 1, axis_index_groups=groups, tiled=True)


def vocabulary_embedding(
    table: Float[Array, "V D"], tokens: Int[Array, "*batch T"], *, axes: Axes
) -> Float[Array, "*batch out D"]:
    """Embeddings from a table whose rows are split.

    Args:
      table: float[⌈V / N⌉, D], a part along `TensorSpec(P("tensor"), num_values=V)`.
      tokens: int[…, T], below V, whole.
      axes: what is bound.

    Returns:
      float[…, T, D], whole, by one all-reduce; under sequence parallelism float[…, T / N, D], by one reduce-scatter.
    """
    if axes.tensor is None:
        return table[tokens]
    local = tokens - lax.axis_index(axes.tensor) * len(table)
    is_here = (local >= 0) & (local < len(table))
    rows = table[jnp.where(is_here, local, 0)]
    return leave_tensor_parallel(jnp.where(is_here[..., None], rows, 0), axes=axes)


def vary_alike(*arrays: Array) -> list[Array]:
    """The arrays, all varying over every mesh axis over which any of them varies, as their gradients do."""
    # Only `shard_map(check_vma=True)` knows of it. XLA drops zeros added.
    zero = functools.reduce(jnp.add, (jnp.zeros_like(array, jnp.float32, shape=()) for array in arrays))
    return [array + zero.astype(array.dtype) for array in arrays]


def take_features(x: Shaped[Array, "*shape"], dim: int = -1, *, axes: Axes) -> Shaped[Array, "*out"]:
    """This device's part of a whole array, such as a mask that `axes.key` gives for all features.

    Args:
      x: whole.
      dim: of the features, which N divides; ValueError otherwise.
      axes: what is bound; without a tensor axis, the part is the array.

    Returns:
      The part; without a tensor axis, the array.
    """
    if axes.tensor is None:
        return x
    if not axes.sequence_parallel and jnp.issubdtype(x.dtype, jnp.inexact):
        x = sum_backward(x, axes.tensor)
    return _take(x, dim, "features", axes)


def take_positions(x: Shaped[Array, "*shape"], dim: int = -2, *, axes: Axes) -> Shaped[Array, "*out"]:
    """This device's positions of a whole array under sequence parallelism, otherwise the array.

    Args:
      x: whole.
      dim: of the positions, which N divides; ValueError otherwise.
      axes: what is bound.

    Returns:
      The part under sequence parallelism, else the array.
    """
    return _take(x, dim, "positions", axes) if axes.tensor is not None and axes.sequence_parallel else x


def sum_over_positions(x: Float[Array, "*shape"], *, axes: Axes) -> Float[Array, "*shape"]:
    """The sum for all positions from that for those of `take_positions`: for losses without a vocabulary.

    Args:
      x: float[…], a sum over this device's positions.
      axes: what is bound.

    Returns:
      float[…], whole.
    """
    return sum_forward(x, axes.tensor) if axes.tensor is not None and axes.sequence_parallel else x


def check_tensor_divides(axes: Axes, **sizes: int) -> int:
    """N, or 1 without a tensor axis; raises ValueError if N does not divide sizes, such as `num_heads=8`."""
    num_devices = 1 if axes.tensor is None else lax.axis_size(axes.tensor)
    if wrong := [f"{name} ({size})" for name, size in sizes.items() if size % num_devices]:
        raise UserError(f"the {num_devices} devices of the axis {axes.tensor!r} do not divide {' and '.join(wrong)}")
    return num_devices


def _take(x: PyTree, dim: int, what: str, axes: Axes) -> PyTree:
    size = _part_of(x.shape[dim], what, axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes.tensor) * size, size, dim)


def _part_of(size: int, what: str, axes: Axes) -> int:
    num_devices = lax.axis_size(axes.tensor)
    if size % num_devices:
        hint = ": give make_buckets a length_multiple" if what == "positions" else ""
        raise UserError(f"the {num_devices} devices of the axis {axes.tensor!r} do not divide {size} {what}{hint}")
    return size // num_devices


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def sum_backward(x: PyTree, axis_name: str) -> PyTree:
    """Returns x, whose gradient is summed over the axis where it has one."""
    return x


def _keep(x: PyTree, axis_name: str) -> tuple[Any, list[tuple[()] | None]]:
    return jax.tree.map(lambda leaf: leaf.value, x), [() if leaf.perturbed else None for leaf in jax.tree.leaves(x)]


def _sum_grads(axis_name: str, has_grad: list[tuple[()] | None], grads: Grads) -> tuple[Any]:
    leaves, structure = jax.tree.flatten(grads)
    of_these = [jnp.zeros(grad.shape, grad.dtype) if isinstance(grad, SymbolicZero) else grad for grad in leaves]
    summed = iter(lax.psum([grad for grad, has in zip(of_these, has_grad, strict=True) if has is not None], axis_name))
    return (jax.tree.unflatten(structure, [None if has is None else next(summed) for has in has_grad]),)


sum_backward.defvjp(_keep, _sum_grads, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def sum_forward(x: PyTree, axis_name: str) -> PyTree:
    """Returns the sum of x over the axis; its gradient passes through unchanged."""
    return lax.psum(x, axis_name)


sum_forward.defvjp(lambda x, axis_name: (lax.psum(x, axis_name), None), lambda axis_name, _, grad: (grad,))


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """How a parameter is split along `"tensor"`, where a `PartitionSpec` does not say enough.

    Attributes:
      spec: as for an array without the layer axis, such as `P(None, "tensor")`. Queries, keys and values in one kernel
        need a separate axis, `[D, 3, F]` along `P(None, None, "tensor")`, so that a device has its part of each.
      num_values: of a vocabulary, its size, which zeros extend to a multiple of the devices; None if they must divide
        it.
      num_heads: heads of attention along that dimension, none of which may be cut.
      shares_heads: whether devices may share a head, as those of keys and values, which `gather_heads` makes whole:
        then the heads may also divide the devices.
    """

    spec: PartitionSpec
    num_values: int | None = None
    num_heads: int | None = None
    shares_heads: bool = False


def tensor_parallel_model(model: LayeredModel, axes: Axes) -> LayeredModel:
    """A model for `layered_loss_fn` that takes its parts of parameters, inside `shard_map` over `axes.tensor`."""
    if model.specs is None:
        raise UserError(f"nothing of this model is split along the axis {axes.tensor!r}: its specs are None")
    specs = model.specs

    def stack(params: Params) -> LayeredParams:
        stacked = params if model.stack is None else model.stack(params)
        if not axes.sequence_parallel:
            return stacked
        whole = jax.tree.map(lambda spec, leaf: leaf if _dim_of(spec) is None else None, specs, stacked)
        summed = iter(sum_backward(jax.tree.leaves(whole), axes.tensor))
        return jax.tree.map(lambda spec, leaf: next(summed) if _dim_of(spec) is None else leaf, specs, stacked)

    bound = bind_axes(model, lambda own: own._replace(tensor=axes.tensor, sequence_parallel=axes.sequence_parallel))
    return bound._replace(stack=stack)


def partition_specs(specs: LayeredParams) -> LayeredParams:
    """The specs of the result of `split_params`: a `PartitionSpec` per leaf, with the layer axis."""

    def of_layer(spec: Specs) -> PartitionSpec:
        return PartitionSpec(None, *_plain(spec).spec) if any(_plain(spec).spec) else PartitionSpec()

    ends = jax.tree.map(lambda spec: _plain(spec).spec, specs.ends)
    return LayeredParams(ends, jax.tree.map(of_layer, specs.layers))


def split_params(params: LayeredParams, specs: LayeredParams, num_devices: int) -> LayeredParams:
    """Whole parameters, with zeros after vocabularies, whose N parts along `partition_specs` are equal."""
    _check_splits(params, specs, num_devices)

    def split(spec: TensorSpec, leaf: Array, dim: int) -> PyTree:
        if not (missing := -np.shape(leaf)[dim] % num_devices):  # values of a vocabulary
            return leaf
        pad = np.pad if isinstance(leaf, np.ndarray) else jnp.pad
        return pad(leaf, [(0, missing if i == dim else 0) for i in range(np.ndim(leaf))])

    return _map_splits(split, specs, params)


def merge_params(params: LayeredParams, specs: LayeredParams) -> LayeredParams:
    """The inverse of `split_params`, also for gradients."""

    def merge(spec: TensorSpec, leaf: Array, dim: int) -> PyTree:
        if spec.num_values is None or spec.num_values == leaf.shape[dim]:
            return leaf
        return leaf[(slice(None),) * dim + (slice(spec.num_values),)]

    return _map_splits(merge, specs, params)


def _check_splits(params: LayeredParams, specs: LayeredParams, num_devices: int) -> None:
    structures: list[object] = [jax.tree.structure(specs), jax.tree.structure(params)]
    if structures[0] != structures[1]:
        found, wanted = leaves_by_name(params), jax.tree.leaves_with_path(specs)
        differing = {*found} ^ {jax.tree_util.keystr(path) for path, _ in wanted}
        raise UserError(f"the specs of a model are not those of these parameters: {list_first(sorted(differing))}")
    offenders = []

    def check(spec: TensorSpec, leaf: Array, dim: int, name: str) -> None:
        size = np.shape(leaf)[dim]
        if size % num_devices if spec.num_values is None else size != spec.num_values:
            values = "" if spec.num_values is None else f", not {spec.num_values}"
            offenders.append(f"{name} {describe(leaf)} (dimension {dim}: {size}{values})")
        elif (
            spec.num_heads
            and spec.num_heads % num_devices
            and not (spec.shares_heads and num_devices % spec.num_heads == 0)
        ):
            offenders.append(f"{name} {describe(leaf)} (num_heads: {spec.num_heads}, which would be cut)")

    names = [jax.tree.map_with_path(lambda path, _: jax.tree_util.keystr(path), part) for part in params]
    _map_splits(check, specs, params, LayeredParams(*names))
    if offenders:
        raise UserError(f"the {num_devices} devices of the axis {TENSOR_AXIS!r} do not divide {list_first(offenders)}")


def _map_splits(change: Callable[..., Any], specs: LayeredParams, *trees: LayeredParams) -> LayeredParams:
    """Calls `change(spec, leaf, dim, …)` for leaves split along dimension dim; keeps the others."""

    def with_leading(num_leading: int) -> Callable[..., Any]:
        def of_leaf(spec: Specs, leaf: Array, *others: PyTree) -> PyTree:
            dim = _dim_of(spec)
            return leaf if dim is None else change(_plain(spec), leaf, num_leading + dim, *others)

        return of_leaf

    return LayeredParams(
        jax.tree.map(with_leading(0), specs.ends, *(tree.ends for tree in trees)),
        jax.tree.map(with_leading(1), specs.layers, *(tree.layers for tree in trees)),
    )


def _plain(spec: PartitionSpec | TensorSpec) -> TensorSpec:
    return spec if isinstance(spec, TensorSpec) else TensorSpec(spec)


def _dim_of(spec: PartitionSpec | TensorSpec) -> int | None:
    """The dimension along the tensor axis, or None."""
    plain = _plain(spec).spec
    return plain.index(TENSOR_AXIS) if TENSOR_AXIS in plain else None
