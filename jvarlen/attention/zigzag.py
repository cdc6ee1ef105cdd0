"""Causal attention over rows whose positions are spread over a mesh axis, in zigzag.

Device d of N holds chunks d and 2N − 1 − d of 2N of a row. Causal attention looks at three pairs of chunks within a
device, where two are half masked, and at two with the keys of each other device, both whole.
Letters: N devices of the axis, T positions of a row, S = T / N those of this device, C = T / 2N of a chunk, B rows,
H heads of queries, J of keys and values, K head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jvarlen.attention.attention import backward, forward, merge
from jvarlen.attention.masks import UNSEEN, Inputs, MaskArrays, StaticMask

__all__ = ["attend_zigzag", "halves"]

_Tree = TypeVar("_Tree")
_State: TypeAlias = tuple[Array, Array]  # sums, or gradients of queries and of keys and values
_Saved: TypeAlias = tuple[Array, Array, Array, Array, Array | None, Array, Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend_zigzag(
    static: StaticMask,
    axis_name: str,
    query: Float[Array, "B S H K"],
    key: Float[Array, "B S J K"],
    value: Float[Array, "B S J K"],
    ids: Int32[Array, "N 2 B C"] | Int32[Array, " B"],
    window: Int32[Array, ""] | None,
) -> Float[Array, "B S H K"]:
    """`attend_over_axis` without its checks; `ids` are those of both chunks of all devices, or the lengths of rows."""
    return _attend_forward(static, axis_name, query, key, value, ids, window)[0]


def _attend_forward(
    static: StaticMask, axis_name: str, query: Array, key: Array, value: Array, ids: Array, window: Array | None
) -> tuple[Array, _Saved]:
    queries, wide = halves(query), jnp.promote_types(query.dtype, jnp.float32)
    _, num_rows, chunk, num_heads, _ = queries.shape

    def add(sums: _State, kv: Array, pair: _Pairs, masks: MaskArrays) -> _State:
        query, *before = _at((queries, *sums), pair.query_half)
        found = forward(static, wide, Inputs(query, kv[0], kv[1], masks))
        return _set(sums, pair.query_half, merge((before[0], before[1]), found))

    visit = functools.partial(_visit, add, ids, window, axis_name)
    kv, here = _keys_and_values(key, value), lax.axis_index(axis_name)
    sums = jnp.zeros(queries.shape, wide), jnp.full((2, num_rows, num_heads, chunk), UNSEEN, wide)
    sums = visit(sums, kv, here, _pairs_within(here, lax.axis_size(axis_name)))
    outputs, log_sums = _visit_others(kv, sums, visit, axis_name)
    output = _join(outputs).astype(query.dtype)
    return output, (query, key, value, ids, window, output, log_sums)


def _attend_backward(
    static: StaticMask, axis_name: str, saved: _Saved, grad: Array
) -> tuple[Array, Array, Array, None, None]:
    # Without a barrier, layers outside of a loop would keep the keys and values that the forward pass received.
    query, key, value, ids, window, output, log_sums = lax.optimization_barrier(saved)
    wide, num_devices = log_sums.dtype, lax.axis_size(axis_name)
    by_half = halves(query), halves(output), log_sums, halves(grad)

    def add(grads: _State, kv: Array, pair: _Pairs, masks: MaskArrays) -> _State:
        query, output, log_sums, grad = _at(by_half, pair.query_half)
        added, *added_kv = backward(static, (wide,) * 3, Inputs(query, kv[0], kv[1], masks), output, log_sums, grad)
        query_grads, kv_grads = (_at(*each) for each in zip(grads, pair[:2], strict=True))
        return (
            _set(grads[0], pair.query_half, query_grads + added),
            _set(grads[1], pair.key_half, kv_grads + jnp.stack(added_kv)),
        )

    def visit(state: _State, kv: Array, source: Array, pairs: _Pairs) -> _State:
        query_grads, elsewhere = state
        query_grads, kv_grads = visit_alone((query_grads, no_kv_grads), kv, source, pairs)
        return query_grads, _set(elsewhere, source, kv_grads)

    visit_alone = functools.partial(_visit, add, ids, window, axis_name)
    kv, here = _keys_and_values(key, value), lax.axis_index(axis_name)
    no_kv_grads = jnp.zeros(kv.shape, wide)
    no_grads = jnp.zeros(by_half[0].shape, wide), jnp.zeros((num_devices, *kv.shape), wide)
    query_grads, elsewhere = _visit_others(kv, no_grads, visit, axis_name)
    # Runs beside the pairs of this device, as reduce-scatters do not on every TPU.
    arrived = lax.all_to_all(elsewhere, axis_name, 0, 0)
    query_grads, kv_grads = visit_alone((query_grads, no_kv_grads), kv, here, _pairs_within(here, num_devices))
    # Otherwise a compiler may schedule only cheap operations beside it.
    query_grads, arrived = lax.optimization_barrier((query_grads, arrived))
    key_grads, value_grads = jnp.moveaxis(kv_grads + jnp.sum(arrived, axis=0), 1, 0)
    return (
        _join(query_grads).astype(query.dtype),
        _join(key_grads).astype(key.dtype),
        _join(value_grads).astype(value.dtype),
        None,
        None,
    )


attend_zigzag.defvjp(_attend_forward, _attend_backward)


class _Pairs(NamedTuple):
    """Pairs of a half of this device's queries, 0 the early ones, and a half of a device's keys that they see."""

    query_half: Array
    key_half: Array
    distance: Array  # of their chunks, 0 if they are the same one


def _pairs_within(here: Array | int, num_devices: int) -> _Pairs:
    return _Pairs(jnp.array([0, 1, 1]), jnp.array([0, 0, 1]), jnp.stack([0, 2 * num_devices - 1 - 2 * here, 0]))


def _pairs_with(source: Array, here: Array, num_devices: int) -> _Pairs:
    """Pairs of this device's queries and another device's keys; no other pair has a query that sees a key."""
    # Late queries see the early keys of every device. Besides, early queries see the early keys of devices before this
    # one, and late queries the late keys of devices after it.
    late = (source > here).astype(jnp.int32)
    distances = jnp.stack([2 * num_devices - 1 - here - source, jnp.abs(here - source)])
    return _Pairs(jnp.stack([1, late]), jnp.stack([0, late]), distances)


def _visit(
    add: Callable[[_State, Array, _Pairs, MaskArrays], _State],
    ids: Array,
    window: Array | None,
    axis_name: str,
    state: _State,
    kv: Float[Array, "2 2 B C J K"],
    source: Array,
    pairs: _Pairs,
) -> _State:
    """The state after `add(state, kv, pair, masks)` with pairs of this device's queries and a device's keys."""
    num_devices, (_, _, num_rows, chunk, *_) = lax.axis_size(axis_name), kv.shape

    def ids_of(device: Array) -> Int32[Array, "2 B C"]:
        if ids.ndim > 1:
            return _at(ids, device)
        starts_2x1x1 = jnp.stack([device, 2 * num_devices - 1 - device])[:, None, None] * chunk
        return (starts_2x1x1 + jnp.arange(chunk) < ids[:, None]).astype(jnp.int32)

    query_ids, key_ids = ids_of(lax.axis_index(axis_name)), ids_of(source)

    def add_pair(state: _State, pair: _Pairs) -> tuple[_State, None]:
        offset = jnp.broadcast_to(pair.distance * chunk, num_rows).astype(jnp.int32)
        masks = MaskArrays(_at(query_ids, pair.query_half), _at(key_ids, pair.key_half), offset, window)
        return add(state, _at(kv, pair.key_half), pair, masks), None

    return lax.scan(add_pair, state, pairs)[0]


def _visit_others(
    kv: Array, state: _State, visit: Callable[[_State, Array, Array, _Pairs], _State], axis_name: str
) -> _State:
    """The state after `visit(state, kv, source, pairs)` with the keys and values of all other devices."""
    num_devices, here = lax.axis_size(axis_name), lax.axis_index(axis_name)
    if num_devices == 1:
        return state
    gathered = lax.all_gather(kv, axis_name)

    def visit_next(state: _State, step: Array) -> tuple[_State, None]:
        source = (here - step) % num_devices
        return visit(state, _at(gathered, source), source, _pairs_with(source, here, num_devices)), None

    return lax.scan(visit_next, state, jnp.arange(1, num_devices))[0]


def _keys_and_values(key: Float[Array, "B S J K"], value: Float[Array, "B S J K"]) -> Float[Array, "2 2 B C J K"]:
    """Stacks keys and values, halves first: one array, and one message."""
    return jnp.stack([halves(x) for x in (key, value)], axis=1)


def halves(array: Array) -> Array:
    """[B, S, …] as [2, B, C, …]."""
    return jnp.moveaxis(array.reshape(array.shape[0], 2, -1, *array.shape[2:]), 1, 0)


def _join(halves: Array) -> Array:
    """The inverse of `halves`."""
    return jnp.moveaxis(halves, 0, 1).reshape(halves.shape[1], -1, *halves.shape[3:])


def _at(tree: _Tree, index: Array) -> _Tree:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree)


def _set(tree: _Tree, index: Array, values: _Tree) -> _Tree:
    return jax.tree.map(lambda leaf, value: lax.dynamic_update_index_in_dim(leaf, value, index, 0), tree, values)
