"""Parts of arrays along an axis: resized, and read from and written to the slots of buffers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["read_part", "resize", "write_part"]


def resize(tree: Any, length: int, *, axis: int) -> Any:
    """Cuts an axis of each array, or fills it with zeros."""

    def change(leaf: jax.Array) -> jax.Array:
        missing = length - leaf.shape[axis]
        if missing <= 0:
            return jax.lax.slice_in_dim(leaf, 0, length, axis=axis)
        return jnp.pad(leaf, [(0, missing if i == axis else 0) for i in range(leaf.ndim)])

    return jax.tree.map(change, tree)


def read_part(buffer: Any, slot: Any, start: Any, length: int, *, axis: int) -> Any:
    """Reads a slot of a buffer from `start` on, along an axis."""

    def read(leaf: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(leaf, *_part(leaf, slot, start, length, axis))[0]

    return jax.tree.map(read, buffer)


def write_part(buffer: Any, slot: Any, start: Any, value: Any, *, axis: int) -> Any:
    """The buffer with a value in a slot, from `start` on along an axis; unchanged for slot −1."""

    def write(leaf: jax.Array, part: jax.Array) -> jax.Array:
        at, sizes = _part(leaf, slot, start, part.shape[axis], axis)
        before = jax.lax.dynamic_slice(leaf, at, sizes)
        return jax.lax.dynamic_update_slice(leaf, jnp.where(slot >= 0, part[None], before), at)

    return jax.tree.map(write, buffer, value)


def _part(leaf: jax.Array, slot: Any, start: Any, length: int, axis: int) -> tuple[list[Any], list[int]]:
    """Where a part of a slot begins, and its sizes."""
    zero = jnp.zeros_like(slot)
    at = [slot, *(start if i == axis else zero for i in range(leaf.ndim - 1))]
    return at, [1, *(length if i == axis else size for i, size in enumerate(leaf.shape[1:]))]
