"""Distributed sample sort: sorts keys over the devices of a mesh axis, exactly balanced.

Letters: N rows, p shards (devices along the mesh axis), n rows per shard, k samples. See `shard_sort` for the steps.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jvarlen._common.checks import UserError, check_at_least_one, check_choices
from jvarlen._common.keywords import check_keywords
from jvarlen._common.types import PyTree
from jvarlen.distributed.mesh import NO_MESH
from jvarlen.distributed.placement import LayoutLike, shards_on
from jvarlen.distributed.processes import agree, together
from jvarlen.sorting import shard_sort
from jvarlen.sorting.sharded_rows import shard_rows

__all__ = ["Result", "sample_sort", "sort_shard"]

Result = Literal["interleaved", "block"]
Transform = Literal["shard_map", "pmap"]
Exchange = Literal["auto", "dense", "ragged"]
NanRule = Literal["raise", "last"]

_MAX_LISTED = 5  # NaN keys that are named
_LARGEST_OVERSAMPLING = 1024


@check_keywords
def sample_sort(
    keys: npt.ArrayLike | jax.Array,
    layout: LayoutLike = None,
    *,
    result: Result = "interleaved",
    oversampling: int = 4,
    transform: Transform = "shard_map",
    nan: NanRule = "raise",
    payload: PyTree = None,
    shard_sizes: npt.ArrayLike | None = None,
    exchange: Exchange = "auto",
) -> tuple[PyTree, ...]:
    """Sorts keys over the devices of a mesh axis, interleaved and exactly balanced.

    The order is that of `np.lexsort((index, keys))`: by key, ties by index, −0.0 equal to 0.0. It is the same for any
    number of shards, transform, exchange and oversampling. It compiles once for all N with the same n = ⌈N/p⌉; a JAX
    array that must be filled up to p·n compiles that as well. It cannot be used inside `jit`.

    If the mesh has devices of several processes, all call it with the same arguments, NumPy `keys` included; for rows
    that each process has, use `shard_local_rows`.

    Args:
      keys: integers or floats[N], N ≥ 0: a NumPy array, or a JAX array on any devices. If `jax_enable_x64` is off,
        64-bit NumPy keys must fit 32 bits exactly. With `shard_sizes`, [p·n].
      layout: where to sort, as for `make_train_step`: its p data shards. Along other axes the sort is repeated.
      result: `"interleaved"`: shard d, slot i holds the global rank i·p + d, so that every shard has ⌈N/p⌉ or ⌊N/p⌋
        rows and neighbours in rank are on neighbouring devices. `"block"`: shard d holds the ranks from d·⌈N/p⌉ on.
      oversampling: k, the samples that a shard proposes for each block in a round of the search for block boundaries,
        at most 1,024: a larger k means fewer rounds and larger messages.
      transform: `"shard_map"` or `"pmap"` (on a mesh of one axis with the devices of a process side by side).
      nan: `"raise"`, which waits for the result to look for NaN keys, or `"last"`. All NaN come back as the same NaN.
      payload: a pytree of arrays whose leading axis is that of `keys`; they follow their keys.
      shard_sizes: integers[p] between 0 and n, as `shard_local_rows` returns it: how many of the n places of each shard
        in `keys`, the first ones, are rows. An index counts the rows before. Every ⌈N/p⌉ then compiles. None: all.
      exchange: `"dense"`: all-to-alls with room for the worst case. `"ragged"`: one all-to-all of exactly the rows,
        which CPUs do not have. `"auto"`: ragged where there is one.

    Returns:
      Keys, indices and, if there is one, the payload, with leading axis p·⌈N/p⌉ sharded over the axis. Indices are
      int32, or int64 from 2**31 − 1 places on. A place without a row has index −1 and a meaningless key and payload.

    Raises:
      ValueError: arguments that are not as described, or that differ between processes; NaN keys and values that do not
        fit are listed by index.
      RuntimeError: another process raised such an error.

    Example:
      >>> keys, indices = sample_sort([3, 1, 2])
      >>> keys.tolist(), indices.tolist()
      ([1, 2, 3], [1, 2, 0])
    """
    keys = keys if isinstance(keys, jax.Array) else np.asarray(keys)
    placement = shards_on(layout)
    mesh, axis_name, num_shards = placement.mesh, placement.data_axis, placement.layout.data
    with together("check the arguments of sample_sort") if mesh.is_multi_process else contextlib.nullcontext():
        if not _is_number(keys.dtype) or keys.ndim != 1:
            raise UserError(f"keys must be integers or floats of one axis, not {keys.dtype}{list(keys.shape)}")
        words = {"transform": (transform, Transform), "exchange": (exchange, Exchange)}
        check_choices(result=(result, Result), **words, nan=(nan, NanRule))
        check_at_least_one(oversampling=oversampling)
        if oversampling > _LARGEST_OVERSAMPLING:
            raise UserError(f"oversampling must be at most {_LARGEST_OVERSAMPLING}, not {oversampling}")
        if transform == "pmap":
            _check_pmap(mesh, num_shards)
        is_ragged = num_shards > 1 and exchange != "dense" and shard_sort.has_ragged(mesh)
        if exchange == "ragged" and num_shards > 1 and not is_ragged:
            raise UserError('exchange="ragged" needs a backend that has a ragged all-to-all; this one does not')
    if mesh.is_multi_process:
        leaves, structure = jax.tree.flatten((keys, payload))
        sizes = None if shard_sizes is None else np.asarray(shard_sizes).tolist()
        described = (axis_name, result, oversampling, transform, nan, exchange, sizes, str(structure))
        agree("the arguments of sample_sort", repr((*described, *map(_describe, leaves))))
    columns, sizes = shard_rows((keys, payload), mesh, axis_name, shard_sizes)
    shards = shard_sort.Shards(axis_name, num_shards, int(oversampling), is_ragged)
    return _run(
        _program(mesh, shards, result, -(-int(sizes.sum()) // num_shards), transform), mesh, columns, sizes, nan
    )


Sorted = tuple[jax.Array, jax.Array, PyTree, jax.Array]  # keys, indices, payload, and what is known of NaN
Program = Callable[[jax.Array, PyTree, jax.Array], Sorted]  # of sharded keys and payload, and the sizes of all shards


def _is_number(dtype: np.dtype) -> bool:
    try:
        return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)
    except TypeError:  # a type of NumPy that JAX does not have
        return False


def _describe(column: npt.ArrayLike | jax.Array) -> tuple[str, tuple[int, ...], str]:
    """The properties that must agree on all processes; for a host array, its content as well."""
    if isinstance(column, jax.Array):
        return str(column.dtype), column.shape, "placed"
    array = np.asarray(column)
    return str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest()


def _check_pmap(mesh: Mesh, num_shards: int) -> None:
    if mesh.size != num_shards:
        raise UserError(f"pmap needs a mesh of one axis, not of {', '.join(mesh.axis_names)}")
    owners = [device.process_index for device in mesh.devices.flat]
    if sum(a != b for a, b in itertools.pairwise(owners)) >= len(set(owners)):
        raise UserError(f"pmap needs the devices of a process side by side in the mesh, not of processes {owners}")


def _run(program: Program, mesh: Mesh, columns: PyTree, sizes: np.ndarray, nan: NanRule) -> tuple[PyTree, ...]:
    """Runs a program on all shards, and looks for NaN in its report."""
    keys, payload = columns
    # Rows are 64-bit numbers inside, whatever the keys are; and the program names its mesh itself.
    with jax.enable_x64(True), jax.set_mesh(NO_MESH):
        on_all = jax.device_put(sizes, NamedSharding(mesh, PartitionSpec()))
        keys, indices, payload, nan_report = program(keys, payload, on_all)
        if nan == "raise" and jnp.issubdtype(keys.dtype, jnp.floating):
            # The only place where the host waits.
            num_nan, *first = np.ravel(nan_report.addressable_data(0).tolist()).tolist()
            if num_nan:
                more = f" and {num_nan - _MAX_LISTED:,} more" if num_nan > _MAX_LISTED else ""
                listed = ", ".join(f"id {i}" for i in first[: min(num_nan, _MAX_LISTED)])
                raise UserError(f'keys are NaN (nan="last" sorts them last): {listed}{more}')
    return (keys, indices) if payload is None else (keys, indices, payload)


@functools.lru_cache(maxsize=128)
def _program(mesh: Mesh, shards: shard_sort.Shards, result: Result, num_out: int, transform: Transform) -> Program:
    """A function of sharded keys, sharded payload and the sizes of the shards."""
    body = functools.partial(sort_shard, shards=shards, result=result, num_out=num_out)
    if transform == "pmap":
        return _with_pmap(body, mesh, shards.axis_name)
    axis, everywhere = PartitionSpec(shards.axis_name), PartitionSpec()
    in_specs, out_specs = (axis, axis, everywhere), (axis, axis, axis, everywhere)
    # The report is the same on all shards, which an all-gather does not tell the type system.
    mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    # Repeated here, because arrays that are on no mesh would otherwise be replicated.
    return jax.jit(mapped, out_shardings=tuple(NamedSharding(mesh, spec) for spec in out_specs))


def _with_pmap(body: Callable[..., Sorted], mesh: Mesh, axis_name: str) -> Program:
    """The program by `pmap`, whose arrays have a leading axis over the devices of this process."""
    mapped = jax.pmap(body, axis_name, devices=list(mesh.devices.flat))
    sharding = NamedSharding(mesh, PartitionSpec(axis_name))
    local_mesh = mesh.local_mesh
    by_device = NamedSharding(local_mesh, PartitionSpec(axis_name))

    def stack(array: jax.Array) -> jax.Array:
        parts = [shard.data[None] for shard in array.addressable_shards]
        shape = (len(parts), *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, by_device, parts)

    def join(array: jax.Array) -> jax.Array:
        parts = [shard.data[0] for shard in array.addressable_shards]
        shape = (mesh.size * len(parts[0]), *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, parts)

    def program(keys: jax.Array, payload: PyTree, sizes: jax.Array) -> Sorted:
        sorted_rows = mapped(*jax.tree.map(stack, (keys, payload, sizes)))
        keys, indices, payload = jax.tree.map(join, sorted_rows[:3])
        return keys, indices, payload, sorted_rows[3]

    return program


def sort_shard(
    keys: jax.Array, payload: PyTree, sizes: jax.Array, *, shards: shard_sort.Shards, result: Result, num_out: int
) -> Sorted:
    """One shard's part of a sort, inside `shard_map` or `pmap`; returns `num_out` rows, padding included."""
    if num_out == 0:
        nothing, payload = jax.tree.map(lambda column: column[:0], (keys, payload))
        return nothing, jnp.zeros(0, jnp.int32), payload, jnp.zeros(1 + _MAX_LISTED, jnp.int64)
    p, d = shards.num_shards, lax.axis_index(shards.axis_name)
    sizes = sizes.astype(shard_sort.index_dtype(p * len(keys)))
    num_rows = sizes.sum(dtype=sizes.dtype)
    is_dealt = result == "interleaved" and p > 1
    block = -(-num_out // p) * p if is_dealt else num_out
    # The rank at which each shard's block begins, and the end; of the type of `num_rows`, which p·b may not fit.
    starts = jnp.minimum(jnp.arange(p + 1, dtype=jnp.int64) * block, num_rows).astype(num_rows.dtype)
    words = shard_sort.words_of_shard(keys, sizes, d, p)
    words, payload = shard_sort.sort_blocks(words, payload, starts, block, shards)
    if is_dealt:
        words, payload = shard_sort.deal_ranks((words, payload), shards)
    words, payload = jax.tree.map(lambda column: column[:num_out], (words, payload))
    slot = jnp.arange(num_out)
    is_row = (slot * p + d if is_dealt else d * num_out + slot) < num_rows
    return _finish(words, payload, is_row, keys, shards)


def _finish(
    words: shard_sort.Words, payload: PyTree, is_row: jax.Array, keys: jax.Array, shards: shard_sort.Shards
) -> Sorted:
    """Keys and indices of sorted rows, and int64[1 + 5]: how many keys are NaN, and the first of their indices."""
    sorted_keys, indices = shard_sort.from_words(words, keys.dtype)
    indices = jnp.where(is_row, indices, -1)
    if not jnp.issubdtype(keys.dtype, jnp.floating):
        return sorted_keys, indices, payload, jnp.zeros(1 + _MAX_LISTED, jnp.int64)
    # The NaN keys of a shard are the last of its rows, and ordered by index.
    num_nan = (jnp.isnan(sorted_keys) & is_row).sum()
    place = jnp.arange(_MAX_LISTED)
    first = indices.at[is_row.sum() - num_nan + place].get(mode="clip")
    first = jnp.where(place < num_nan, first, jnp.iinfo(indices.dtype).max)
    of_all = lax.all_gather(jnp.concatenate([num_nan[None], first]), shards.axis_name)
    return sorted_keys, indices, payload, jnp.append(of_all[:, 0].sum(), jnp.sort(of_all[:, 1:].ravel())[:_MAX_LISTED])
