"""Causal attention over rows whose positions are spread over a mesh axis, in zigzag.

Device d of N holds chunks d and 2N − 1 − d of 2N of a row, and gathers the keys and values of all. Its early and its
late queries see 2N + 1 chunks together, as many as those of any device.
Letters: N devices of the axis, T positions of a row, S = T / N those of this device, C = T / 2N of a chunk, B rows,
H heads of queries, J of keys and values, K head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jvarlen.attention.attention import backward, forward
from jvarlen.attention.seen import How, Seen, padding_mask

__all__ = ["attend_zigzag", "whole_rows"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend_zigzag(
    how: How,
    axis_name: str,
    query: Float[Array, "B S H K"],
    key: Float[Array, "B S J K"],
    value: Float[Array, "B S J K"],
    ids: Int32[Array, "B T"] | Int32[Array, " B"],
    window: Int32[Array, ""] | None,
) -> Float[Array, "B S H K"]:
    """`attend_over_axis` without its checks; `ids` are those of whole rows, or their lengths."""
    return _attend_forward(how, axis_name, query, key, value, ids, window)[0]


def _attend_forward(
    how: How, axis_name: str, query: Array, key: Array, value: Array, ids: Array, window: Array | None
) -> tuple[Array, Any]:
    keys, values = whole_rows(jnp.stack([key, value]), axis_name)
    seen_by = _seen_by(ids, window, query, axis_name)

    def of_half(half: Any) -> tuple[Array, Array]:
        query, start = half
        return forward(how, query.dtype, query, keys, values, seen_by(start))

    outputs, log_sums = lax.map(of_half, (_halves(query), _starts(query, axis_name)))
    output = _joined(outputs)
    return output, (query, key, value, ids, window, output, log_sums)


def _attend_backward(how: How, axis_name: str, kept: Any, grad: Array) -> tuple[Any, ...]:
    # Layers outside of a loop would keep what the forward pass received, for being the same computation as here.
    query, key, value, ids, window, output, log_sums = lax.optimization_barrier(kept)
    wide = log_sums.dtype
    keys, values = whole_rows(jnp.stack([key, value]), axis_name)
    seen_by = _seen_by(ids, window, query, axis_name)

    def of_half(kv_grads: Array, half: Any) -> tuple[Array, Array]:
        query, *kept, start = half
        query_grads, *added = backward(how, (wide,) * 3, query, keys, values, seen_by(start), *kept)
        return kv_grads + jnp.stack(added), query_grads

    halves = _halves(query), _halves(output), log_sums, _halves(grad), _starts(query, axis_name)
    kv_grads, query_grads = lax.scan(of_half, jnp.zeros((2, *keys.shape), wide), halves)
    kv_grads = lax.psum_scatter(_by_device(kv_grads, lax.axis_size(axis_name)), axis_name)
    grads = (_joined(query_grads), *kv_grads)
    return (*(x.astype(like.dtype) for x, like in zip(grads, (query, key, value), strict=True)), None, None)


attend_zigzag.defvjp(_attend_forward, _attend_backward)


def _starts(query: Float[Array, "B S H K"], axis_name: str) -> Int32[Array, 2]:
    """The first positions of this device's chunks."""
    own = lax.axis_index(axis_name)
    return jnp.stack([own, 2 * lax.axis_size(axis_name) - 1 - own]).astype(jnp.int32) * (query.shape[1] // 2)


def _seen_by(
    ids: Array, window: Array | None, query: Float[Array, "B S H K"], axis_name: str
) -> Callable[[Int32[Array, ""]], Seen]:
    """What the queries of a chunk see, by its first position."""
    num_rows, num_positions = query.shape[:2]
    key_ids = ids if ids.ndim > 1 else padding_mask(ids, num_positions * lax.axis_size(axis_name)).astype(jnp.int32)

    def seen(start: Int32[Array, ""]) -> Seen:
        query_ids = lax.dynamic_slice_in_dim(key_ids, start, num_positions // 2, axis=1)
        return Seen(query_ids, key_ids, jnp.broadcast_to(start, num_rows), window)

    return seen


def whole_rows(arrays: Array, axis_name: str) -> Array:
    """[A, B, S, …] of all devices as [A, B, T, …], with the positions of rows in their order; one message."""
    halves_NxAxBx2xC = lax.all_gather(arrays.reshape(*arrays.shape[:2], 2, -1, *arrays.shape[3:]), axis_name)
    early, late = halves_NxAxBx2xC[:, :, :, 0], halves_NxAxBx2xC[:, :, :, 1]
    chunks_AxBx2NxC = jnp.moveaxis(jnp.concatenate([early, late[::-1]]), 0, 2)
    return chunks_AxBx2NxC.reshape(*arrays.shape[:2], -1, *arrays.shape[3:])


def _by_device(arrays: Array, num_devices: int) -> Array:
    """[A, B, T, …] as [N, A, B, S, …], the positions of each device."""
    chunks_AxBx2NxC = arrays.reshape(*arrays.shape[:2], 2 * num_devices, -1, *arrays.shape[3:])
    early, late = chunks_AxBx2NxC[:, :, :num_devices], chunks_AxBx2NxC[:, :, num_devices:][:, :, ::-1]
    return jnp.moveaxis(jnp.concatenate([early, late], axis=3), 2, 0)


def _halves(array: Array) -> Array:
    """[B, S, …] as [2, B, C, …]."""
    return jnp.moveaxis(array.reshape(array.shape[0], 2, -1, *array.shape[2:]), 1, 0)


def _joined(halves: Array) -> Array:
    """The inverse of `_halves`."""
    return jnp.moveaxis(halves, 0, 1).reshape(halves.shape[1], -1, *halves.shape[3:])
