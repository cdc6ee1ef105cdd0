"""Causal attention over rows whose positions are spread over a mesh axis, in zigzag.

Device d of N holds chunks d and 2N − 1 − d of 2N of a row. Of the pairs of chunks that causal attention looks at, three
are within a device, where two are half masked, and two with the keys of each other device, both whole.
Letters: N devices of the axis, T positions of a row, S = T / N those of this device, C = T / 2N of a chunk, B rows,
H heads of queries, J of keys and values, K head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jvarlen.attention.attention import backward, forward
from jvarlen.attention.seen import UNSEEN, How, Seen

__all__ = ["attend_zigzag", "halves"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend_zigzag(
    how: How,
    axis_name: str,
    query: Float[Array, "B S H K"],
    key: Float[Array, "B S J K"],
    value: Float[Array, "B S J K"],
    ids: Int32[Array, "N 2 B C"] | Int32[Array, " B"],
    window: Int32[Array, ""] | None,
) -> Float[Array, "B S H K"]:
    """`attend_over_axis` without its checks; `ids` are those of both chunks of all devices, or the lengths of rows."""
    return _attend_forward(how, axis_name, query, key, value, ids, window)[0]


def _attend_forward(
    how: How, axis_name: str, query: Array, key: Array, value: Array, ids: Array, window: Array | None
) -> tuple[Array, Any]:
    queries, wide = halves(query), jnp.promote_types(query.dtype, jnp.float32)
    _, num_rows, chunk, num_heads, _ = queries.shape

    def add(sums: tuple[Array, Array], kv: Array, pair: _Pairs, seen: Seen) -> tuple[Array, Array]:
        query, *before = _at((queries, *sums), pair.of_queries)
        found = forward(how, wide, query, *kv, seen)
        log_sums = jnp.logaddexp(before[1], found[1])
        shares = (jnp.moveaxis(jnp.exp(x - log_sums), 1, 2)[..., None] for x in (before[1], found[1]))
        output = sum(share * x for share, x in zip(shares, (before[0], found[0]), strict=True))
        return _set(sums, pair.of_queries, (output, log_sums))

    visit = functools.partial(_visit, add, ids, window, axis_name)
    kv, own = _keys_and_values(key, value), lax.axis_index(axis_name)
    sums = jnp.zeros(queries.shape, wide), jnp.full((2, num_rows, num_heads, chunk), UNSEEN, wide)
    sums = visit(sums, kv, own, _own_pairs(own, lax.axis_size(axis_name)))
    outputs, log_sums = _visit_others(kv, sums, visit, axis_name)
    output = _joined(outputs).astype(query.dtype)
    return output, (query, key, value, ids, window, output, log_sums)


def _attend_backward(how: How, axis_name: str, kept: Any, grad: Array) -> tuple[Any, ...]:
    # Layers outside of a loop would keep what the forward pass received, for being the same computation as here.
    query, key, value, ids, window, output, log_sums = lax.optimization_barrier(kept)
    wide, num_devices = log_sums.dtype, lax.axis_size(axis_name)
    queries, *of_queries = halves(query), halves(output), log_sums, halves(grad)

    def add(grads: tuple[Array, Array], kv: Array, pair: _Pairs, seen: Seen) -> tuple[Array, Array]:
        query, *kept = _at((queries, *of_queries), pair.of_queries)
        added, *added_kv = backward(how, (wide,) * 3, query, *kv, seen, *kept)
        query_grads, kv_grads = (_at(*each) for each in zip(grads, pair[:2], strict=True))
        return (
            _set(grads[0], pair.of_queries, query_grads + added),
            _set(grads[1], pair.of_keys, kv_grads + jnp.stack(added_kv)),
        )

    def visit(state: tuple[Array, Array], kv: Array, source: Array, pairs: _Pairs) -> tuple[Array, Array]:
        query_grads, elsewhere = state
        query_grads, kv_grads = visit_alone((query_grads, no_kv_grads), kv, source, pairs)
        return query_grads, _set(elsewhere, source, kv_grads)

    visit_alone = functools.partial(_visit, add, ids, window, axis_name)
    kv, own = _keys_and_values(key, value), lax.axis_index(axis_name)
    no_kv_grads = jnp.zeros(kv.shape, wide)
    no_grads = jnp.zeros(queries.shape, wide), jnp.zeros((num_devices, *kv.shape), wide)
    query_grads, elsewhere = _visit_others(kv, no_grads, visit, axis_name)
    # Runs beside the pairs of this device, as reduce-scatters do not on every TPU.
    arrived = lax.all_to_all(elsewhere, axis_name, 0, 0)
    query_grads, kv_grads = visit_alone((query_grads, no_kv_grads), kv, own, _own_pairs(own, num_devices))
    # Otherwise a compiler may schedule only cheap operations beside it.
    query_grads, arrived = lax.optimization_barrier((query_grads, arrived))
    grads = (query_grads, *jnp.moveaxis(kv_grads + jnp.sum(arrived, axis=0), 1, 0))
    return (*(_joined(x).astype(like.dtype) for x, like in zip(grads, (query, key, value), strict=True)), None, None)


attend_zigzag.defvjp(_attend_forward, _attend_backward)


class _Pairs(NamedTuple):
    """Pairs of a half of own queries, 0 the early ones, and a half of a device's keys that some of them see."""

    of_queries: Array
    of_keys: Array
    distance: Array  # of their chunks, 0 if they are the same one


def _own_pairs(own: Any, num_devices: int) -> _Pairs:
    return _Pairs(jnp.array([0, 1, 1]), jnp.array([0, 0, 1]), jnp.stack([0, 2 * num_devices - 1 - 2 * own, 0]))


def _pairs_with(source: Array, own: Array, num_devices: int) -> _Pairs:
    """Pairs of own queries and another device's keys; no other pair has a query that sees a key."""
    # Late queries see the early keys of everybody. Besides, from a device before this one, the early queries see the
    # early keys, and from one after it, the late queries the late keys.
    late = (source > own).astype(jnp.int32)
    distances = jnp.stack([2 * num_devices - 1 - own - source, jnp.abs(own - source)])
    return _Pairs(jnp.stack([1, late]), jnp.stack([0, late]), distances)


def _visit(
    add: Callable[[Any, Array, _Pairs, Seen], Any],
    ids: Array,
    window: Array | None,
    axis_name: str,
    state: Any,
    kv: Float[Array, "2 2 B C J K"],
    source: Array,
    pairs: _Pairs,
) -> Any:
    """The state after `add(state, kv, pair, seen)` with pairs of own queries and a device's keys and values."""
    num_devices, (_, _, num_rows, chunk, *_) = lax.axis_size(axis_name), kv.shape

    def ids_of(device: Array) -> Int32[Array, "2 B C"]:
        if ids.ndim > 1:
            return _at(ids, device)
        starts_2x1x1 = jnp.stack([device, 2 * num_devices - 1 - device])[:, None, None] * chunk
        return (starts_2x1x1 + jnp.arange(chunk) < ids[:, None]).astype(jnp.int32)

    own_ids, source_ids = ids_of(lax.axis_index(axis_name)), ids_of(source)

    def add_pair(state: Any, pair: _Pairs) -> tuple[Any, None]:
        offset = jnp.broadcast_to(pair.distance * chunk, num_rows).astype(jnp.int32)
        seen = Seen(_at(own_ids, pair.of_queries), _at(source_ids, pair.of_keys), offset, window)
        return add(state, _at(kv, pair.of_keys), pair, seen), None

    return lax.scan(add_pair, state, pairs)[0]


def _visit_others(kv: Array, state: Any, visit: Callable[[Any, Array, Array, _Pairs], Any], axis_name: str) -> Any:
    """The state after `visit(state, kv, source, pairs)` with the keys and values of all other devices."""
    num_devices, own = lax.axis_size(axis_name), lax.axis_index(axis_name)
    if num_devices == 1:
        return state
    gathered = lax.all_gather(kv, axis_name)

    def visit_next(state: Any, step: Array) -> tuple[Any, None]:
        source = (own - step) % num_devices
        return visit(state, _at(gathered, source), source, _pairs_with(source, own, num_devices)), None

    return lax.scan(visit_next, state, jnp.arange(1, num_devices))[0]


def _keys_and_values(key: Float[Array, "B S J K"], value: Float[Array, "B S J K"]) -> Float[Array, "2 2 B C J K"]:
    """By half, then keys and values: one array, and one message."""
    return jnp.stack([halves(x) for x in (key, value)], axis=1)


def halves(array: Array) -> Array:
    """[B, S, …] as [2, B, C, …]."""
    return jnp.moveaxis(array.reshape(array.shape[0], 2, -1, *array.shape[2:]), 1, 0)


def _joined(halves: Array) -> Array:
    """The inverse of `halves`."""
    return jnp.moveaxis(halves, 0, 1).reshape(halves.shape[1], -1, *halves.shape[3:])


def _at(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree)


def _set(tree: Any, index: Any, values: Any) -> Any:
    return jax.tree.map(lambda leaf, value: lax.dynamic_update_index_in_dim(leaf, value, index, 0), tree, values)
