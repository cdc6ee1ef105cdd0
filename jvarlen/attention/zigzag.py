"""Causal attention over rows whose positions are spread over a mesh axis, in zigzag.

Device d of N holds chunks d and 2N − 1 − d of 2N of a row. Of the pairs of chunks that causal attention looks at, three
are within a device, where two are half masked, and two with the keys of each other device, both whole.
Letters: N devices of the axis, T positions of a row, S = T / N those of this device, C = T / 2N of a chunk, B rows,
H heads of queries, J of keys and values, G = H / J, K head size, Q queries at a time, M times, R = G · Q.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from jvarlen._common.checks import UserError

__all__ = ["attend_zigzag", "axis_size", "halves"]

_QUERIES = 256  # the most at a time


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def attend_zigzag(
    query: Float[Array, "B S H K"],
    key: Float[Array, "B S J K"],
    value: Float[Array, "B S J K"],
    segments: Integer[Array, "N 2 B C"] | None,
    window: Integer[Array, ""] | None,
    axis_name: str,
    implementation: str,
) -> Float[Array, "B S H K"]:
    """`attend_over_axis` without its checks; `segments` are those of both chunks of all devices."""
    return _attend_forward(query, key, value, segments, window, axis_name, implementation)[0]


class _Queries(NamedTuple):
    """Queries, their places in the chunk and their segments; the leading axes of all are halves and M parts."""

    query: Array
    places: Array
    segments: Array | None


class _Sums(NamedTuple):
    """Of the softmax so far: the largest logit, sums of powers, and their products with values, float32 at least."""

    largest: Array
    powers: Array
    products: Array


def _attend_forward(
    query: Array,
    key: Array,
    value: Array,
    segments: Array | None,
    window: Array | None,
    axis_name: str,
    implementation: str,
) -> tuple[Array, Any]:
    own = lax.axis_index(axis_name)
    queries = _queries_of(query, key.shape[2], None if segments is None else _at(segments, own))
    wide = jnp.promote_types(query.dtype, jnp.float32)
    shape = queries.query.shape
    sums = _Sums(jnp.full(shape[:-1], jnp.finfo(wide).min, wide), jnp.zeros(shape[:-1], wide), jnp.zeros(shape, wide))

    def visit(sums: _Sums, kv: Array, source: Array, pairs: _Pairs) -> _Sums:
        """Adds keys and values of a device."""
        return lax.scan(lambda sums, pair: (add(sums, kv, source, pair), None), sums, pairs)[0]

    def add(sums: _Sums, kv: Array, source: Array, pair: _Pairs) -> _Sums:
        of_queries, of_keys, distance = pair
        keys, values = _at(kv, of_keys)
        key_segments = None if segments is None else _at(_at(segments, source), of_keys)

        def add_to_part(part: tuple[_Queries, _Sums]) -> _Sums:
            queries, sums = part
            logits = _logits(queries, keys, key_segments, distance, window)
            largest = jnp.maximum(sums.largest, jnp.max(logits, axis=-1))
            powers = jnp.exp(logits - largest[..., None])
            shrunk = jnp.exp(sums.largest - largest)
            products = _product("BJRC,BJCK->BJRK", powers.astype(values.dtype), values)
            return _Sums(
                largest,
                sums.powers * shrunk + jnp.sum(powers, axis=-1),
                sums.products * shrunk[..., None] + products,
            )

        return _set(sums, of_queries, lax.map(add_to_part, _at((queries, sums), of_queries)))

    kv = _keys_and_values(key, value)
    sums = visit(sums, kv, own, _own_pairs(own, axis_size(axis_name)))
    sums = _visit_others(kv, sums, visit, axis_name, implementation)
    output = _whole_of(sums.products / sums.powers[..., None], query.shape).astype(query.dtype)
    log_sums = sums.largest + jnp.log(sums.powers)
    return output, (query, key, value, segments, window, output, log_sums)


def _attend_backward(axis_name: str, implementation: str, kept: Any, grad: Array) -> tuple[Any, ...]:
    # Layers outside of a loop would keep what the forward pass received, for being the same computation as here.
    query, key, value, segments, window, output, log_sums = lax.optimization_barrier(kept)
    own = lax.axis_index(axis_name)
    num_kv_heads, scale = key.shape[2], query.shape[-1] ** -0.5
    wide = log_sums.dtype
    queries = _queries_of(query, num_kv_heads, None if segments is None else _at(segments, own))
    grads = _parts_of(grad, num_kv_heads)
    inner = jnp.sum(grads.astype(wide) * _parts_of(output, num_kv_heads).astype(wide), axis=-1)

    def grads_with(query_grads: Array, kv: Array, source: Array, pairs: _Pairs) -> tuple[Array, Array]:
        """Adds to the gradients of own queries; returns those of a device's keys and values that are due to them."""
        state = (query_grads, jnp.zeros(kv.shape, wide))
        return lax.scan(lambda state, pair: (add(state, kv, source, pair), None), state, pairs)[0]

    def add(state: tuple[Array, Array], kv: Array, source: Array, pair: _Pairs) -> tuple[Array, Array]:
        query_grads, kv_grads = state
        of_queries, of_keys, distance = pair
        keys, values = _at(kv, of_keys)
        key_segments = None if segments is None else _at(_at(segments, source), of_keys)

        def add_part(kv_grads: Array, part: tuple[Any, ...]) -> tuple[Array, Array]:
            queries, grads, inner, log_sums = part
            logits = _logits(queries, keys, key_segments, distance, window)
            weights = jnp.exp(logits - log_sums[..., None])
            weight_grads = _product("BJRK,BJCK->BJRC", grads, values)
            logit_grads = (weights * (weight_grads - inner[..., None]) * scale).astype(query.dtype)
            value_grads = _product("BJRC,BJRK->BJCK", weights.astype(grads.dtype), grads)
            key_grads = _product("BJRC,BJRK->BJCK", logit_grads, queries.query)
            return kv_grads + jnp.stack([key_grads, value_grads]), _product("BJRC,BJCK->BJRK", logit_grads, keys)

        parts = _at((queries, grads, inner, log_sums), of_queries)
        added, part_grads = lax.scan(add_part, _at(kv_grads, of_keys), parts)
        query_grads = _set(query_grads, of_queries, _at(query_grads, of_queries) + part_grads)
        return query_grads, _set(kv_grads, of_keys, added)

    def visit(state: tuple[Array, Array], kv: Array, source: Array, pairs: _Pairs) -> tuple[Array, Array]:
        query_grads, kv_grads = grads_with(state[0], kv, source, pairs)
        if implementation == "ring":  # they follow their keys and values, and come home after the last device
            return query_grads, _to_next(state[1] + kv_grads, axis_name)
        return query_grads, _set(state[1], source, kv_grads)

    kv = _keys_and_values(key, value)
    num_devices = axis_size(axis_name)
    query_grads, kv_grads = grads_with(jnp.zeros(queries.query.shape, wide), kv, own, _own_pairs(own, num_devices))
    shape = kv.shape if implementation == "ring" else (num_devices, *kv.shape)
    query_grads, elsewhere = _visit_others(kv, (query_grads, jnp.zeros(shape, wide)), visit, axis_name, implementation)
    if implementation == "gather":
        elsewhere = lax.psum_scatter(elsewhere, axis_name)
    key_grads, value_grads = jnp.moveaxis(kv_grads + elsewhere, 1, 0)
    return (
        _whole_of(query_grads, query.shape).astype(query.dtype),
        *(_joined(jnp.moveaxis(x, 3, 2)).astype(like.dtype) for x, like in ((key_grads, key), (value_grads, value))),
        None,
        None,
    )


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


def _visit_others(
    kv: Array, state: Any, visit: Callable[[Any, Array, Array, _Pairs], Any], axis_name: str, implementation: str
) -> Any:
    """The state after `visit(state, kv, source, pairs)` with the keys and values of all other devices."""
    num_devices, own = axis_size(axis_name), lax.axis_index(axis_name)
    if num_devices == 1:
        return state

    def visit_at(state: Any, kv: Array, source: Array) -> Any:
        return visit(state, kv, source, _pairs_with(source, own, num_devices))

    def source_at(step: Any) -> Array:
        return (own - step) % num_devices

    if implementation == "gather":
        gathered = lax.all_gather(kv, axis_name)

        def visit_next(state: Any, step: Array) -> tuple[Any, None]:
            return visit_at(state, _at(gathered, source_at(step)), source_at(step)), None

        return lax.scan(visit_next, state, jnp.arange(1, num_devices))[0]

    def visit_and_pass_on(held: tuple[Array, Any], step: Array) -> tuple[tuple[Array, Any], None]:
        kv, state = held
        return (_to_next(kv, axis_name), visit_at(state, kv, source_at(step))), None

    held = (_to_next(kv, axis_name), state)
    if num_devices > 2:
        held, _ = lax.scan(visit_and_pass_on, held, jnp.arange(1, num_devices - 1))
    kv, state = held
    return visit_at(state, kv, source_at(num_devices - 1))


def _to_next(array: Array, axis_name: str) -> Array:
    num_devices = axis_size(axis_name)
    return lax.ppermute(array, axis_name, [(i, (i + 1) % num_devices) for i in range(num_devices)])


def _logits(
    queries: _Queries,
    keys: Float[Array, "B J C K"],
    key_segments: Integer[Array, "B C"] | None,
    distance: Array,
    window: Integer[Array, ""] | None,
) -> Float[Array, "B J R C"]:
    """Of one part of queries; those that are masked are the smallest number, as a query may see no key of a chunk."""
    logits = _product("BJRK,BJCK->BJRC", queries.query, keys) * keys.shape[-1] ** -0.5
    smallest = jnp.finfo(logits.dtype).min
    num_keys = keys.shape[2]
    after_RxC = distance * num_keys + queries.places[:, None] - jnp.arange(num_keys)
    is_seen_RxC = after_RxC >= 0
    if window is not None:
        is_seen_RxC &= after_RxC < window
    logits = jnp.where(is_seen_RxC, logits, smallest)
    if queries.segments is not None and key_segments is not None:
        is_same_BxRxC = queries.segments[:, :, None] == key_segments[:, None, :]
        logits = jnp.where(is_same_BxRxC[:, None], logits, smallest)
    return logits


def _product(subscripts: str, x: Array, y: Array) -> Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))


def _queries_of(query: Float[Array, "B S H K"], num_kv_heads: int, segments: Array | None) -> _Queries:
    """In parts, with their places, and their segments from int[2, B, C]."""
    parts = _parts_of(query, num_kv_heads)
    num_parts, num_groups = parts.shape[1], query.shape[2] // num_kv_heads
    places_MxQ = jnp.arange(num_parts * parts.shape[4] // num_groups, dtype=jnp.int32).reshape(num_parts, -1)
    places_2xMxR = jnp.broadcast_to(jnp.tile(places_MxQ, num_groups), (2, num_parts, parts.shape[4]))
    if segments is not None:
        segments = jnp.tile(jnp.moveaxis(_split(segments), 2, 1), num_groups)
    # If they did not depend on the queries, JAX would compute the masks of all pairs before a loop over layers.
    return lax.optimization_barrier(_Queries(parts, places_2xMxR, segments))


def _parts_of(array: Float[Array, "B S H K"], num_kv_heads: int) -> Float[Array, "2 M B J R K"]:
    """The heads of a group are more queries: products of matrices, not of more axes."""
    parts_2xBxMxQxHxK = _split(halves(array))
    grouped = parts_2xBxMxQxHxK.reshape(*parts_2xBxMxQxHxK.shape[:4], num_kv_heads, -1, array.shape[3])
    parts_2xMxBxJxGxQxK = grouped.transpose(0, 2, 1, 4, 5, 3, 6)
    return parts_2xMxBxJxGxQxK.reshape(*parts_2xMxBxJxGxQxK.shape[:4], -1, array.shape[3])


def _whole_of(parts: Float[Array, "2 M B J R K"], shape: tuple[int, ...]) -> Float[Array, "B S H K"]:
    """The inverse of `_parts_of`."""
    batch, seq_length, num_heads, head_size = shape
    _, num_parts, _, num_kv_heads, _, _ = parts.shape
    parts_2xMxBxJxGxQxK = parts.reshape(2, num_parts, batch, num_kv_heads, num_heads // num_kv_heads, -1, head_size)
    halves = parts_2xMxBxJxGxQxK.transpose(0, 2, 1, 5, 3, 4, 6).reshape(2, batch, -1, num_heads, head_size)
    return _joined(halves[:, :, : seq_length // 2])


def _keys_and_values(key: Float[Array, "B S J K"], value: Float[Array, "B S J K"]) -> Float[Array, "2 2 B J C K"]:
    """By half, then keys and values: one array, and one message."""
    return jnp.stack([jnp.moveaxis(halves(x), 2, 3) for x in (key, value)], axis=1)


def halves(array: Array) -> Array:
    """[B, S, …] as [2, B, C, …]."""
    return jnp.moveaxis(array.reshape(array.shape[0], 2, -1, *array.shape[2:]), 1, 0)


def _joined(halves: Array) -> Array:
    """The inverse of `_halves`."""
    return jnp.moveaxis(halves, 0, 1).reshape(halves.shape[1], -1, *halves.shape[3:])


def _split(halves: Array) -> Array:
    """[2, B, C, …] as [2, B, M, Q, …], zeros after the last."""
    num_queries = halves.shape[2]
    num_parts = -(-num_queries // _QUERIES)
    size = -(-num_queries // num_parts)
    padding = [(0, 0)] * halves.ndim
    padding[2] = (0, num_parts * size - num_queries)
    return jnp.pad(halves, padding).reshape(*halves.shape[:2], num_parts, size, *halves.shape[3:])


def _at(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree)


def _set(tree: Any, index: Any, values: Any) -> Any:
    return jax.tree.map(lambda leaf, value: lax.dynamic_update_index_in_dim(leaf, value, index, 0), tree, values)


def axis_size(axis_name: str) -> int:
    """Devices of an axis that is bound by `jax.shard_map`; raises ValueError if it is not."""
    try:
        size: int = lax.axis_size(axis_name)
    except NameError as error:
        raise UserError(
            f"no axis {axis_name!r} is bound: call this inside shard_map over a mesh that has it"
        ) from error
    return size
