"""Spreads rows from anywhere over the devices of a mesh axis.

Letters: N rows, p shards (devices along the axis), n places of a shard, the first of which hold its rows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int64

from jvarlen._common.checks import UserError, list_offenders, offenders_where
from jvarlen._common.types import Array, PyTree
from jvarlen.distributed.mesh import NO_MESH, local_shards, num_shards_of
from jvarlen.distributed.placement import LayoutLike, shards_on
from jvarlen.distributed.processes import agree, gather_arrays, together

__all__ = ["own_parts", "shard_local_rows", "shard_rows", "spread_local_rows"]


def shard_rows(
    columns: PyTree, mesh: Mesh, axis_name: str, shard_sizes: npt.ArrayLike | None = None
) -> tuple[PyTree, Int64[np.ndarray, " p"]]:
    """Places the rows of a pytree of columns on an axis, ⌈N/p⌉ a shard; the pytree, and the rows of each shard."""
    num_shards = num_shards_of(mesh, axis_name)
    num_places = _leading_axis(columns)
    sizes = _check_sizes(shard_sizes, num_places, num_shards)
    sharding = NamedSharding(mesh, PartitionSpec(axis_name))
    size = max(1, -(-num_places // num_shards)) * num_shards
    return jax.tree.map(lambda column: _place(column, size, sharding), columns), sizes


def spread_local_rows(num_rows: int, mesh: Mesh, axis_name: str) -> Int64[np.ndarray, " p"]:
    """The rows of each shard when every process spreads its rows evenly over its devices."""
    with together("spread the rows"):
        local = local_shards(mesh, axis_name)
        if not len(local):
            raise UserError(f"process {jax.process_index()} has no device of the mesh; all that bring rows need one")
    sizes = np.zeros(mesh.shape[axis_name], np.int64)
    sizes[local] = [num_rows // len(local) + (i < num_rows % len(local)) for i in range(len(local))]
    return gather_arrays(sizes).sum(axis=0)


def shard_local_rows(columns: PyTree, layout: LayoutLike = None) -> tuple[PyTree, Int64[np.ndarray, " p"]]:
    """Spreads the rows of each process over its devices, for `sample_sort(*, shard_sizes=)`.

    Args:
      columns: a pytree of NumPy arrays with the same leading axis, the rows of this process, possibly none. Structure,
        dtypes and other axes are the same on all processes.
      layout: where to, as for `sample_sort`; the devices of a data shard belong to one process.

    Returns:
      The pytree, with arrays of leading axis p·n sharded over the axis, and int64[p], the rows of each shard; n is the
      most of any shard. Rows are numbered along the axis.

    Raises:
      ValueError: leading axes that differ, a layout that is not as described or has no device of a process, rows of
        another kind than those of other processes, or, without `jax_enable_x64`, values above 32 bits.
      RuntimeError: another process raised one of these.
    """
    placement = shards_on(layout)
    mesh, axis_name = placement.mesh, placement.data_axis
    with together("check the rows"):
        columns = jax.tree.map(lambda column: _fit_type(np.asarray(column)), columns)
        num_rows = _leading_axis(columns)
    leaves, structure = jax.tree.flatten(columns)
    agree("the kind of rows", repr((axis_name, str(structure), [(str(x.dtype), x.shape[1:]) for x in leaves])))
    sizes = spread_local_rows(num_rows, mesh, axis_name)
    local = local_shards(mesh, axis_name)
    starts = np.zeros_like(sizes)  # in the rows of this process
    starts[local] = np.cumsum(sizes[local]) - sizes[local]
    per_shard = max(1, int(sizes.max()))
    sharding = NamedSharding(mesh, PartitionSpec(axis_name))

    def place(column: np.ndarray) -> jax.Array:
        def shard(index: Any) -> np.ndarray:
            d = (index[0].start or 0) // per_shard
            part = np.zeros((per_shard, *column.shape[1:]), column.dtype)
            part[: sizes[d]] = column[starts[d] : starts[d] + sizes[d]]
            return part

        return jax.make_array_from_callback((len(sizes) * per_shard, *column.shape[1:]), sharding, shard)

    return jax.tree.map(place, columns), sizes


def own_parts(array: jax.Array) -> list[np.ndarray]:
    """The part of an array, sharded along its leading axis, that this process holds, in order."""
    parts = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}  # other axes may repeat them
    return [np.asarray(parts[start]) for start in sorted(parts)]


def _leading_axis(columns: PyTree) -> int:
    sizes = {np.shape(column)[:1] for column in jax.tree.leaves(columns)}
    if len(sizes) != 1 or () in sizes:
        raise UserError(f"keys and payload must have one leading axis of the same size, not {sorted(sizes)}")
    return sizes.pop()[0]


def _check_sizes(shard_sizes: npt.ArrayLike | None, num_places: int, num_shards: int) -> Int64[np.ndarray, " p"]:
    if shard_sizes is None:
        per_shard = -(-num_places // num_shards)
        return np.clip(num_places - np.arange(num_shards) * per_shard, 0, per_shard)
    sizes, limit = np.asarray(shard_sizes), num_places // num_shards
    if sizes.shape != (num_shards,) or sizes.dtype.kind not in "iu" or num_places % num_shards:
        raise UserError(
            f"shard_sizes must be {num_shards} integers, one for each shard of the {num_places} places, not "
            f"{sizes.dtype}{list(sizes.shape)}"
        )
    wrong = (sizes < 0) | (sizes > limit)
    if wrong.any():
        offenders = list_offenders(*offenders_where(wrong, sizes), limit)
        raise UserError(f"shard_sizes must be from 0 to the places of a shard: {offenders}")
    return sizes.astype(np.int64)


def _place(column: Array, size: int, sharding: NamedSharding) -> jax.Array:
    """A column with zeros after its rows, on the devices of the sharding."""
    if not isinstance(column, jax.Array):
        array = _fit_type(np.asarray(column))
        array = np.concatenate([array, np.zeros((size - len(array), *array.shape[1:]), array.dtype)])
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    with jax.set_mesh(NO_MESH):
        if len(column) < size:
            if isinstance(column.sharding, NamedSharding):  # an explicitly sharded axis can't be filled
                auto = Mesh(column.sharding.mesh.devices, column.sharding.mesh.axis_names)
                column = jax.device_put(column, NamedSharding(auto, column.sharding.spec))
            column = _fill(column, size, None if column.is_fully_addressable else sharding)
        is_there = isinstance(column.sharding, NamedSharding) and column.sharding.mesh == sharding.mesh
        if is_there and column.sharding.is_equivalent_to(sharding, column.ndim):
            return column
        return jax.device_put(column, sharding)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _fill(column: jax.Array, size: int, sharding: NamedSharding | None) -> jax.Array:
    filled = jnp.pad(column, [(0, size - len(column))] + [(0, 0)] * (column.ndim - 1))
    return filled if sharding is None else jax.lax.with_sharding_constraint(filled, sharding)


def _fit_type(array: np.ndarray) -> np.ndarray:
    """The array in the type that JAX would give it, which has 32 bits where 64 are off; only where that is exact."""
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    dtype = jax.device_put(np.zeros(0, array.dtype)).dtype
    if dtype == array.dtype:
        return array
    with np.errstate(over="ignore"):
        short = array.astype(dtype)
    differs = (short != array) & ~((short != short) & (array != array))  # NaN stays NaN
    if differs.any():
        offenders = list_offenders(*offenders_where(differs, array))
        raise UserError(f"{array.dtype} values do not fit {dtype} exactly; turn jax_enable_x64 on: {offenders}")
    return short
