"""The parameters of a model under tensor parallelism: how they lie along the axis, and their parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import describe, leaves_by_name
from jvarlen.parallel.layers import Axes, LayeredModel, LayeredParams, bind_axes
from jvarlen.parallel.tensor import sum_backward

__all__ = ["TENSOR_AXIS", "TensorSpec", "merge_params", "partition_specs", "split_params", "tensor_parallel_model"]

TENSOR_AXIS = "tensor"


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """How a parameter lies along `"tensor"`, where a `PartitionSpec` does not tell all.

    Attributes:
      spec: as for an array without the layer axis, such as `P(None, "tensor")`. Queries, keys and values in one kernel
        need an axis of their own, `[D, 3, F]` along `P(None, None, "tensor")`, so that a device has its part of each.
      num_values: of a vocabulary, its size, which zeros extend to a multiple of the devices; None if they must divide
        it.
      num_heads: heads of attention along that dimension, such as 2 of keys and values, of which none may be cut.
    """

    spec: PartitionSpec
    num_values: int | None = None
    num_heads: int | None = None


def tensor_parallel_model(model: LayeredModel, axes: Axes) -> LayeredModel:
    """A model for `layered_loss_fn` whose functions take their parts of parameters, inside `shard_map` over the axis.

    Args:
      model: with `specs`; ValueError without.
      axes: has `tensor`, and whether the model is sequence-parallel.

    Returns:
      A model for `layered_loss_fn`. Its loss is whole; gradients lie as the parameters.
    """
    if model.specs is None:
        raise UserError(f"nothing of this model lies along the axis {axes.tensor!r}: its specs are None")
    specs = model.specs

    def stack(params: Any) -> LayeredParams:
        stacked = params if model.stack is None else model.stack(params)
        if not axes.sequence_parallel:
            return stacked
        whole = jax.tree.map(lambda spec, leaf: leaf if _dim_of(spec) is None else None, specs, stacked)
        summed = iter(sum_backward(jax.tree.leaves(whole), axes.tensor))
        return jax.tree.map(lambda spec, leaf: next(summed) if _dim_of(spec) is None else leaf, specs, stacked)

    bound = bind_axes(model, lambda: {"tensor": axes.tensor, "sequence_parallel": axes.sequence_parallel})
    return bound._replace(stack=stack)


def partition_specs(specs: LayeredParams) -> LayeredParams:
    """How the result of `split_params` lies on a mesh.

    Args:
      specs: those of a model: a `PartitionSpec` or a `TensorSpec` for every leaf, without the layer axis.

    Returns:
      A `PartitionSpec` for every leaf, with the layer axis.
    """

    def of_layer(spec: Any) -> PartitionSpec:
        return PartitionSpec(None, *_plain(spec).spec) if any(_plain(spec).spec) else PartitionSpec()

    ends = jax.tree.map(lambda spec: _plain(spec).spec, specs.ends)
    return LayeredParams(ends, jax.tree.map(of_layer, specs.layers))


def split_params(params: LayeredParams, specs: LayeredParams, num_devices: int) -> LayeredParams:
    """Whole parameters of which N equal parts along `partition_specs` are those of the devices.

    Vocabularies are extended by zeros.

    Args:
      params: whole arrays.
      specs: those of the model.
      num_devices: N.

    Returns:
      `LayeredParams` of whole arrays.

    Raises:
      ValueError: N does not divide what is to be split, or the specs are not those of these parameters.

    Example:
      >>> params = LayeredParams({"table": np.ones((3, 1))}, ())
      >>> specs = LayeredParams({"table": TensorSpec(PartitionSpec("tensor"), num_values=3)}, ())
      >>> split_params(params, specs, 2).ends["table"].ravel().tolist()
      [1.0, 1.0, 1.0, 0.0]
    """
    _check_splits(params, specs, num_devices)

    def split(spec: TensorSpec, leaf: Any, dim: int) -> Any:
        if not (missing := -np.shape(leaf)[dim] % num_devices):  # values of a vocabulary
            return leaf
        pad = np.pad if isinstance(leaf, np.ndarray) else jnp.pad
        return pad(leaf, [(0, missing if i == dim else 0) for i in range(np.ndim(leaf))])

    return _map_splits(split, specs, params)


def merge_params(params: LayeredParams, specs: LayeredParams) -> LayeredParams:
    """The inverse of `split_params`, also for gradients.

    Args:
      params: whole arrays.
      specs: those of the model.

    Returns:
      `LayeredParams` of whole arrays.
    """

    def merge(spec: TensorSpec, leaf: Any, dim: int) -> Any:
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

    def check(spec: TensorSpec, leaf: Any, dim: int, name: str) -> None:
        size = np.shape(leaf)[dim]
        if size % num_devices if spec.num_values is None else size != spec.num_values:
            values = "" if spec.num_values is None else f", not {spec.num_values}"
            offenders.append(f"{name} {describe(leaf)} (dimension {dim}: {size}{values})")
        elif spec.num_heads is not None and spec.num_heads % num_devices:
            offenders.append(f"{name} {describe(leaf)} (num_heads: {spec.num_heads}, which would be cut)")

    names = [jax.tree.map_with_path(lambda path, _: jax.tree_util.keystr(path), part) for part in params]
    _map_splits(check, specs, params, LayeredParams(*names))
    if offenders:
        raise UserError(f"the {num_devices} devices of the axis {TENSOR_AXIS!r} do not divide {list_first(offenders)}")


def _map_splits(change: Callable[..., Any], specs: LayeredParams, *trees: LayeredParams) -> LayeredParams:
    """`change(spec, leaf, dim, …)` of what lies along dimension dim, with `TensorSpec`; others as they are."""

    def changed(num_leading: int) -> Callable[..., Any]:
        def of_leaf(spec: Any, leaf: Any, *others: Any) -> Any:
            dim = _dim_of(spec)
            return leaf if dim is None else change(_plain(spec), leaf, num_leading + dim, *others)

        return of_leaf

    return LayeredParams(
        jax.tree.map(changed(0), specs.ends, *(tree.ends for tree in trees)),
        jax.tree.map(changed(1), specs.layers, *(tree.layers for tree in trees)),
    )


def _plain(spec: PartitionSpec | TensorSpec) -> TensorSpec:
    return spec if isinstance(spec, TensorSpec) else TensorSpec(spec)


def _dim_of(spec: PartitionSpec | TensorSpec) -> int | None:
    """The dimension along the tensor axis; None: there is none."""
    plain = _plain(spec).spec
    return plain.index(TENSOR_AXIS) if TENSOR_AXIS in plain else None
