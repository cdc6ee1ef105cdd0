"""Context parallelism: causal attention over rows whose positions are spread over a mesh axis.

A row is cut into 2N chunks, and device d of N holds chunks d and 2N − 1 − d: "zigzag". Early positions see few keys and
late ones many, so that each device has the same work: 2N + 1 of the pairs of chunks that causal attention looks at.
Three of them are within a device, where two are half masked, and two with the keys of each other device, both whole.

The functions of a model call `attend_over_axis` inside `shard_map(check_vma=False)`; everything else in a causal model
is local to a position. Losses are sums over the positions of this device, so that the sum of all devices' losses is the
loss, and the sum of their gradients its gradient. Attention returns the gradients of keys and values to their devices.

Letters: N devices of the axis, T positions of a row, S = T / N those of this device, C = T / 2N of a chunk, B rows,
H heads of queries, J of keys and values, G = H / J, K head size, Q queries at a time, M times, R = G · Q.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32, Integer

from jvarlen._common.checks import UserError, check_at_least_one, check_choices, list_first
from jvarlen._common.pytree import describe, leaves_by_name
from jvarlen.attention.attention import attend, attend_last, attend_within_segments
from jvarlen.parallel.layers import Axes, LayeredModel

__all__ = [
    "SEQUENCE_AXIS",
    "OverAxisImplementation",
    "attend_over_axis",
    "row_length",
    "sequence_model",
    "sequence_positions",
    "shard_positions",
    "spread_rows",
    "unspread_rows",
]

SEQUENCE_AXIS = "sequence"
"""The mesh axis that positions are spread over."""

OverAxisImplementation = Literal["gather", "ring"]

_QUERIES = 256  # the most at a time


def sequence_positions(seq_length: int, num_shards: int) -> Int32[np.ndarray, "N S"]:
    """Which positions of a row each shard holds: chunks i and 2N − 1 − i of 2N.

    Args:
      seq_length: T, a multiple of 2N.
      num_shards: N.

    Returns:
      int32[N, T / N], ascending in each shard.

    Raises:
      ValueError: a length that is not a multiple of 2N.

    Example:
      >>> sequence_positions(8, 2).tolist()
      [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    check_at_least_one(seq_length=seq_length, num_shards=num_shards)
    multiple = 2 * num_shards
    if seq_length % multiple:
        below = seq_length // multiple * multiple
        nearest = f"{below} and {below + multiple}" if below else f"{multiple}"
        raise UserError(
            f"a row of {seq_length} positions cannot be spread over {num_shards} shards in {multiple} equal chunks: "
            f"nearest are {nearest} positions, and length_multiple={multiple} makes only such buckets"
        )
    chunks = np.arange(seq_length, dtype=np.int32).reshape(multiple, -1)
    return np.concatenate([chunks[:num_shards], chunks[num_shards:][::-1]], axis=1)


def shard_positions(seq_length: int) -> Int32[Array, " S"]:
    """The positions of this device, inside `shard_map`: `positions` of `Axes`.

    Args:
      seq_length: T, of whole rows.

    Returns:
      int32[T / N] for N devices along "sequence", a row of `sequence_positions`.

    Raises:
      ValueError: a length that is not a multiple of 2N, or an axis that is not bound.
    """
    return jnp.asarray(sequence_positions(seq_length, _size_of(SEQUENCE_AXIS)))[lax.axis_index(SEQUENCE_AXIS)]


def row_length(model: LayeredModel, ends: Any, batch: Any) -> int:
    """T: what `embed` returns for whole rows is `[B, T, …]`.

    Args:
      model: works by positions.
      ends: its parameters of `embed`; arrays or shapes.
      batch: of a step; arrays or shapes, with a leading axis of microbatches.

    Raises:
      ValueError: `embed` returns something else.
    """

    def embed(ends: Any, batch: Any) -> Any:
        microbatch = jax.tree.map(lambda leaf: leaf[0] if leaf.ndim else leaf, batch)
        return jax.tree.map(jnp.asarray, model.embed(ends, microbatch, Axes(key=jax.random.key(0))))

    x = jax.eval_shape(embed, ends, batch)
    lengths = {leaf.shape[1] if leaf.ndim > 1 else 0 for leaf in jax.tree.leaves(x)}
    if len(lengths) != 1 or 0 in lengths:
        listed = [f"{name or 'x'} {describe(leaf)}" for name, leaf in leaves_by_name(x).items()]
        raise UserError(f"a model by positions has x of arrays [B, T, …] for T positions, not {list_first(listed)}")
    return int(lengths.pop())


def sequence_model(model: LayeredModel, seq_length: int) -> LayeredModel:
    """A model whose functions compute the positions of this device, inside `shard_map` over the sequence axis.

    Args:
      model: works by positions.
      seq_length: T, of whole rows.

    Returns:
      A model for `layered_loss_fn`. Its sums are those of the positions of this device.

    Raises:
      ValueError: a length that is not a multiple of 2N.
    """

    def bound(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_with_axes(*args: Any) -> Any:
            *others, given = args
            return call(*others, given._replace(sequence=SEQUENCE_AXIS, positions=shard_positions(seq_length)))

        return call_with_axes

    def embed(ends: Any, microbatch: Any, axes: Axes) -> Any:
        x = bound(model.embed)(ends, microbatch, axes)
        positions = seq_length // _size_of(SEQUENCE_AXIS)
        if axes.sequence_parallel and axes.tensor is not None:
            positions //= _size_of(axes.tensor)
        wrong = [name or "x" for name, leaf in leaves_by_name(x).items() if np.shape(leaf)[1:2] != (positions,)]
        if wrong:
            raise UserError(
                f"embed returned {describe(leaves_by_name(x)[wrong[0].removeprefix('x')])} for {positions} of "
                f"{seq_length} positions: arrays of a model by positions are [B, S, …] for the S of axes.positions"
            )
        return x

    return model._replace(embed=embed, layer=bound(model.layer), loss=bound(model.loss))


def spread_rows(arrays: Any, num_shards: int) -> Any:
    """Reorders positions, so that N equal parts of the last axis are the shards of `sequence_positions`.

    A `NamedSharding` of the last axis then gives each device its positions. Anything that depends on neighbours, such
    as the target of a position, must be computed before, from whole rows.

    Args:
      arrays: array [..., T] or a pytree of them, of NumPy or JAX, T a multiple of 2N.
      num_shards: N.

    Returns:
      Arrays with the same shapes and dtypes.

    Raises:
      ValueError: arrays whose last axes differ, such as the lengths of a batch, or are not a multiple of 2N.

    Example:
      >>> spread_rows(np.array([[10, 11, 12, 13, 14, 15, 16, 17]]), 2).tolist()
      [[10, 11, 16, 17, 12, 13, 14, 15]]
    """
    order = sequence_positions(_length_of(arrays), num_shards).reshape(-1)
    return jax.tree.map(lambda array: array[..., order], arrays)


def unspread_rows(arrays: Any, num_shards: int) -> Any:
    """Puts positions back in order: the inverse of `spread_rows`.

    Args:
      arrays: the result of `spread_rows`, or arrays of that order.
      num_shards: N.

    Returns:
      Arrays with the same shapes and dtypes.

    Raises:
      ValueError: as `spread_rows`.
    """
    order = np.argsort(sequence_positions(_length_of(arrays), num_shards).reshape(-1))
    return jax.tree.map(lambda array: array[..., order], arrays)


def attend_over_axis(
    query: Float[Array, "B S H K"],
    key: Float[Array, "_ _ J K"],
    value: Float[Array, "_ _ J K"],
    *,
    axes: Axes,
    segment_ids: Integer[Array, "_ _"] | None = None,
    implementation: str = "gather",
) -> Float[Array, "B S H K"]:
    """Causal attention of this device's queries to the keys and values of all devices of an axis, or earlier slices.

    Equal to `attend` and `attend_within_segments` on whole rows. It skips pairs of chunks that are fully masked, and
    holds no logits of more than 256 queries and one chunk of keys. Its gradient recomputes them.

    Args:
      query: float[B, S, H, K], at the positions of `shard_positions`.
      key: float[B, S, J, K]; J divides H, and head h of the queries attends to head h // (H / J).
      value: float[B, S, J, K].
      axes: `axes.sequence` is the mesh axis. With `axes.earlier`, S positions are a slice of rows. Both None: rows are
        whole, S = T.
      segment_ids: int[B, S] of any integer type, the sample of each position of packed rows, 0 where there is no token.
        None: a row is one sample. Its length is not needed: no token attends to what follows its end.
      implementation: `"gather"` gathers the keys and values of all positions. `"ring"` passes them from device to
        device, so that a device holds those of three at a time; it does not work with stages. Both send the same number
        of bytes.

    Returns:
      float[B, S, H, K]; values at positions without a token are meaningless but finite.

    Raises:
      ValueError: an axis that is not bound, an odd S, heads of queries that are not a multiple of those of keys,
        arrays that do not have the same B and S, or an unknown implementation.

    References:
      Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context". Dao et al. 2022,
      "FlashAttention", for the gradient. Dubey et al. 2024, "The Llama 3 Herd of Models", for gathered keys and values.
    """
    check_choices(implementation=(implementation, OverAxisImplementation))
    _check_arrays(query, key, value, segment_ids)
    if axes.earlier is not None:
        own = key, value, segment_ids
        whole = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), axes.earlier(own), own)
        return attend_last(query, *whole)
    if axes.sequence is None:
        if segment_ids is not None:
            return attend_within_segments(query, key, value, segment_ids)
        return attend(query, key, value, jnp.full(len(query), query.shape[1]))
    num_devices = _size_of(axes.sequence)
    sequence_positions(query.shape[1] * num_devices, num_devices)  # an odd S is refused
    segments_Nx2xBxC = None
    if segment_ids is not None:
        segments_Nx2xBxC = lax.all_gather(_halves(segment_ids), axes.sequence)
    return _attend(query, key, value, segments_Nx2xBxC, axes.sequence, implementation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(query: Array, key: Array, value: Array, segments: Array | None, axis_name: str, implementation: str) -> Any:
    return _attend_forward(query, key, value, segments, axis_name, implementation)[0]


class _Queries(NamedTuple):
    """Queries and what belongs to them, M parts of a half; the leading axis of all is that of the halves.

    Attributes:
      query: [2, M, B, J, R, K].
      places: int32[2, M, R], in the chunk.
      segments: int[2, M, B, R]; None if rows are not packed.
    """

    query: Array
    places: Array
    segments: Array | None


class _Sums(NamedTuple):
    """Of the softmax so far: the largest logit, sums of powers, and their products with values, float32 at least.

    Attributes:
      largest: [2, M, B, J, R].
      powers: [2, M, B, J, R].
      products: [2, M, B, J, R, K].
    """

    largest: Array
    powers: Array
    products: Array


def _attend_forward(
    query: Array, key: Array, value: Array, segments: Array | None, axis_name: str, implementation: str
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
        of_queries, of_keys, is_causal = pair
        keys, values = _at(kv, of_keys)
        key_segments = None if segments is None else _at(_at(segments, source), of_keys)

        def add_to_part(part: tuple[_Queries, _Sums]) -> _Sums:
            queries, sums = part
            logits = _logits(queries, keys, key_segments, is_causal)
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
    sums = visit(sums, kv, own, _own_pairs())
    sums = _visit_others(kv, sums, visit, axis_name, implementation)
    output = _whole_of(sums.products / sums.powers[..., None], query.shape).astype(query.dtype)
    log_sums = sums.largest + jnp.log(sums.powers)
    return output, (query, key, value, segments, output, log_sums)


def _attend_backward(axis_name: str, implementation: str, kept: Any, grad: Array) -> tuple[Any, ...]:
    # Layers outside of a loop would keep what the forward pass received, for being the same computation as here.
    query, key, value, segments, output, log_sums = lax.optimization_barrier(kept)
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
        of_queries, of_keys, is_causal = pair
        keys, values = _at(kv, of_keys)
        key_segments = None if segments is None else _at(_at(segments, source), of_keys)

        def add_part(kv_grads: Array, part: tuple[Any, ...]) -> tuple[Array, Array]:
            queries, grads, inner, log_sums = part
            logits = _logits(queries, keys, key_segments, is_causal)
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
    query_grads, kv_grads = grads_with(jnp.zeros(queries.query.shape, wide), kv, own, _own_pairs())
    shape = kv.shape if implementation == "ring" else (_size_of(axis_name), *kv.shape)
    query_grads, elsewhere = _visit_others(kv, (query_grads, jnp.zeros(shape, wide)), visit, axis_name, implementation)
    if implementation == "gather":
        elsewhere = lax.psum_scatter(elsewhere, axis_name)
    key_grads, value_grads = jnp.moveaxis(kv_grads + elsewhere, 1, 0)
    return (
        _whole_of(query_grads, query.shape).astype(query.dtype),
        *(_joined(jnp.moveaxis(x, 3, 2)).astype(like.dtype) for x, like in ((key_grads, key), (value_grads, value))),
        None,
    )


_attend.defvjp(_attend_forward, _attend_backward)


class _Pairs(NamedTuple):
    """Pairs of a half of own queries and a half of a device's keys, each an array with an item a pair.

    Attributes:
      of_queries: int32, 0 for the early ones.
      of_keys: int32.
      is_causal: whether a query sees only the keys up to its place; else it sees all.
    """

    of_queries: Array
    of_keys: Array
    is_causal: Array


def _own_pairs() -> _Pairs:
    return _Pairs(jnp.array([0, 1, 1]), jnp.array([0, 0, 1]), jnp.array([True, False, True]))


def _pairs_with(source: Array, own: Array) -> _Pairs:
    """Pairs of own queries and another device's keys; no other pair has a query that sees a key.

    Late queries see the early keys of everybody. Besides, from a device before this one, the early queries see the
    early keys, and from one after it, the late queries the late keys.
    """
    late = (source > own).astype(jnp.int32)
    return _Pairs(jnp.stack([1, late]), jnp.stack([0, late]), jnp.array([False, False]))


def _visit_others(
    kv: Array, state: Any, visit: Callable[[Any, Array, Array, _Pairs], Any], axis_name: str, implementation: str
) -> Any:
    """The state after `visit(state, kv, source, pairs)` with the keys and values of all other devices."""
    num_devices, own = _size_of(axis_name), lax.axis_index(axis_name)
    if num_devices == 1:
        return state

    def visit_at(state: Any, kv: Array, source: Array) -> Any:
        return visit(state, kv, source, _pairs_with(source, own))

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
    num_devices = _size_of(axis_name)
    return lax.ppermute(array, axis_name, [(i, (i + 1) % num_devices) for i in range(num_devices)])


def _logits(
    queries: _Queries, keys: Float[Array, "B J C K"], key_segments: Integer[Array, "B C"] | None, is_causal: Array
) -> Float[Array, "B J R C"]:
    """Of one part of queries; those that are masked are the smallest number, as a query may see no key of a chunk."""
    logits = _product("BJRK,BJCK->BJRC", queries.query, keys) * keys.shape[-1] ** -0.5
    smallest = jnp.finfo(logits.dtype).min
    is_seen_RxC = ~is_causal | (queries.places[:, None] >= jnp.arange(keys.shape[2]))
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
    parts_2xBxMxQxHxK = _split(_halves(array))
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
    return jnp.stack([jnp.moveaxis(_halves(x), 2, 3) for x in (key, value)], axis=1)


def _halves(array: Array) -> Array:
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


def _size_of(axis_name: str) -> int:
    try:
        size: int = lax.axis_size(axis_name)
    except NameError as error:
        raise UserError(
            f"no axis {axis_name!r} is bound: call this inside shard_map over a mesh that has it"
        ) from error
    return size


def _length_of(arrays: Any) -> int:
    """T of arrays [..., T]; raises ValueError if they differ."""
    leaves = leaves_by_name(arrays)
    lengths = {np.shape(leaf)[-1:] for leaf in leaves.values()}
    if len(lengths) != 1 or () in lengths:
        listed = list_first(f"{name or 'it'} {describe(leaf)}" for name, leaf in leaves.items())
        raise UserError(f"rows are spread along one last axis, that of all arrays: {listed or 'there are none'}")
    return int(lengths.pop()[0])


def _check_arrays(query: Array, key: Array, value: Array, segment_ids: Array | None) -> None:
    shapes = {"query": query, "key": key, "value": value}
    if segment_ids is not None:
        shapes["segment_ids"] = segment_ids
    listed = ", ".join(f"{name} {describe(array)}" for name, array in shapes.items())
    if len({array.shape[:2] for array in shapes.values()}) > 1 or key.shape != value.shape:
        raise UserError(f"queries, keys, values and segments must be of the same rows and positions: {listed}")
    if query.shape[2] % key.shape[2]:
        raise UserError(
            f"{query.shape[2]} heads of queries must be a multiple of the {key.shape[2]} of keys and values"
        )
