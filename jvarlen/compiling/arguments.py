"""What a compiled step is called with: which executable takes it, and what the step may overwrite."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import leaves_by_name

__all__ = [
    "UnplannedShapeError",
    "canonical",
    "check_deleted",
    "identity",
    "signature",
    "wait_for",
    "without_aliases",
]

_shape_and_dtype = attrgetter("shape", "dtype")


class UnplannedShapeError(UserError):
    """No executable was compiled for the structure, shape, dtype or sharding of a batch or a state."""


def signature(batch: Any) -> Hashable:
    """What decides which executable a batch belongs to: its containers, and the shape and dtype of every leaf."""
    leaves, structure = jax.tree.flatten(batch)
    return structure, *map(_shape_and_dtype, leaves)


def canonical(batch: Any) -> Any:
    """The batch with counts on the host in the types that they have on a device, such as float32 for float64."""

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray | np.generic) or leaf.ndim:
            return leaf
        return np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))

    return jax.tree.map(cast, batch)


def without_aliases(state: Any, held: Iterable[Iterable[jax.Array]]) -> Any:
    """The state with copies of arrays that it holds twice or that programs hold (`held`); itself if there are none."""
    # On several devices, donating an array and using it as well ends the process.
    seen = {buffer for arrays in held for array in arrays for buffer in _buffers(array)}
    copies = 0

    def own(leaf: Any) -> Any:
        nonlocal copies
        buffers = _buffers(leaf)
        if seen.isdisjoint(buffers):
            seen.update(buffers)
            return leaf
        copies += 1
        return _copy(leaf)

    unaliased = jax.tree.map(own, state)
    return unaliased if copies else state


def identity(state: Any) -> tuple[int, ...]:
    """Ids of a state and of what it directly holds, which tell it from other states without keeping it alive."""
    if isinstance(state, tuple | list):
        return id(state), *map(id, state)
    inside = state if isinstance(state, Mapping) else getattr(state, "__dict__", {})
    return id(state), *map(id, inside.values())


def check_deleted(state: Any, batch: Any, error: Exception | None = None) -> None:
    """Raises an error that names the arrays that were deleted, if there are any."""
    if not any(map(_is_deleted, jax.tree.leaves((state, batch)))):
        return
    gone = [
        f"{name}{path}"
        for name, tree in (("state", state), ("batch", batch))
        for path, leaf in leaves_by_name(tree).items()
        if _is_deleted(leaf)
    ]
    raise UserError(
        f"{list_first(gone)} of the arguments {'was' if len(gone) == 1 else 'were'} donated: a step wrote its results "
        "there. Use the state that the step returned, or compile_buckets(…, donate=False)"
    ) from error


def wait_for(arrays: Any) -> None:
    """Waits until arrays are computed; a pytree, of which some leaves may have been donated since."""
    jax.block_until_ready([leaf for leaf in jax.tree.leaves(arrays) if not _is_deleted(leaf)])


def _buffers(leaf: Any) -> list[Any]:
    """A key by which arrays that share memory are found."""
    if not isinstance(leaf, jax.Array) or leaf.size == 0 or leaf.is_deleted():
        return []
    return [(shard.device.id, shard.data.unsafe_buffer_pointer()) for shard in leaf.addressable_shards]


def _copy(leaf: jax.Array) -> jax.Array:
    """A copy on the array's own devices, with the same freedom to move; nothing is compiled for it."""
    if not leaf.committed:
        return jax.device_put(leaf, may_alias=False)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return jax.device_put(leaf, leaf.sharding, may_alias=False)
    shards = [jax.device_put(shard.data, shard.device, may_alias=False) for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()
