"""Arrays that a step must not get: those that were donated before, and those that it would write over."""

from __future__ import annotations

from collections.abc import Iterable

import jax

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import leaves_by_name
from jvarlen._common.types import Array, Batch, PyTree

__all__ = ["check_deleted", "is_deleted", "without_aliases"]


def without_aliases(state: PyTree, batch_leaves: Iterable[Array]) -> PyTree:
    """The state with copies of arrays that it holds twice, or that the batch holds too."""
    seen = {buffer for leaf in batch_leaves for buffer in _buffers(leaf)}

    def copy_if_seen(leaf: Array) -> Array:
        buffers = _buffers(leaf)
        if seen.isdisjoint(buffers):
            seen.update(buffers)
            return leaf
        # On the array's devices, with the same freedom to move; nothing is compiled for it.
        return jax.device_put(leaf, leaf.sharding if leaf.committed else None, may_alias=False)

    return jax.tree.map(copy_if_seen, state)


def check_deleted(state: PyTree, batch: Batch, error: Exception | None = None) -> None:
    """Raises an error that names the arrays that were deleted, if there are any."""
    if not any(map(is_deleted, jax.tree.leaves((state, batch)))):
        return
    gone = [
        f"{name}{path}"
        for name, tree in (("state", state), ("batch", batch))
        for path, leaf in leaves_by_name(tree).items()
        if is_deleted(leaf)
    ]
    raise UserError(
        f"{list_first(gone)} of the arguments {'was' if len(gone) == 1 else 'were'} donated: a step wrote its results "
        "there. Use the state that the step returned, or compile_buckets(…, donate=False)"
    ) from error


def _buffers(leaf: Array) -> list[tuple[int, int]]:
    """The device and the address of each part: arrays that share memory share some of these."""
    if not isinstance(leaf, jax.Array) or leaf.size == 0 or leaf.is_deleted():
        return []
    return [(shard.device.id, shard.data.unsafe_buffer_pointer()) for shard in leaf.addressable_shards]


def is_deleted(leaf: Array) -> bool:
    """Whether an array was donated; values on the host never are."""
    return isinstance(leaf, jax.Array) and leaf.is_deleted()
