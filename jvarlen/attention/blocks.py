"""Attention in loops over blocks: each block of queries meets only the blocks of keys that hold its samples.

For a CPU, and wherever no kernel serves. Letters: B rows, Q queries, T keys, H query heads, N key/value heads, K head
size, C positions of a block, I blocks of queries, J of keys, G = H / N, R = G · C.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jvarlen.attention.seen import UNSEEN, How, Seen, block_ranges, is_seen, varying_axes

__all__ = ["BLOCK", "backward", "forward", "product"]

BLOCK = 64  # positions; larger ones compute more pairs of other samples, smaller ones are slower a pair


def forward(
    how: How, query: Float[Array, "B Q H K"], key: Float[Array, "B T N K"], value: Float[Array, "B T N K"], seen: Seen
) -> tuple[Float[Array, "B Q H K"], Float[Array, "B H Q"]]:
    """Outputs, and logarithms of the softmax's sums, in float32 at least; 0 and `UNSEEN` where no key is seen."""
    blocks = _Blocks.of(how, query, key, value, seen)
    wide = blocks.wide
    _, num_kv_heads, num_queries, head_size = blocks.query.shape
    smallest = jnp.finfo(wide).min

    def one_block(place: Array) -> tuple[Array, Array]:
        queries = blocks.queries_at(place)

        def add(j: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            largest, powers, products = sums
            keys = blocks.keys_at(queries, j)
            logits_NxCxR = jnp.where(blocks.mask(queries, keys), blocks.logits(queries, keys), smallest)
            new_largest = jnp.maximum(largest, jnp.max(logits_NxCxR, axis=1))
            powers_NxCxR = jnp.exp(logits_NxCxR - new_largest[:, None])
            shrunk = jnp.exp(largest - new_largest)
            added = product("NCR,NCK->NRK", powers_NxCxR.astype(keys.value.dtype), keys.value)
            return new_largest, powers * shrunk + jnp.sum(powers_NxCxR, axis=1), products * shrunk[..., None] + added

        # A query may meet its own sample in a later block. What it has summed until then is multiplied by exp(−∞).
        shape = (num_kv_heads, num_queries)
        sums = (jnp.full(shape, smallest, wide), jnp.zeros(shape, wide), jnp.zeros((*shape, head_size), wide))
        sums = _varying_as(sums, blocks)
        largest, powers, products = lax.fori_loop(queries.first, queries.end, add, sums)
        sees = largest > smallest
        powers = jnp.where(sees, powers, 1)
        output = jnp.where(sees[..., None], products / powers[..., None], 0)
        return output, jnp.where(sees, largest + jnp.log(powers), UNSEEN)

    output, log_sums = lax.map(one_block, jnp.arange(len(blocks.query), dtype=jnp.int32))
    return blocks.whole_queries(output, query.shape), blocks.whole_lines(log_sums, query.shape)


def backward(
    how: How, query: Array, key: Array, value: Array, seen: Seen, output: Array, log_sums: Array, grad: Array
) -> tuple[Array, Array, Array]:
    """Gradients of queries, keys and values, in float32 at least."""
    blocks = _Blocks.of(how, query, key, value, seen)
    wide = blocks.wide
    inner = jnp.moveaxis(jnp.sum(grad.astype(wide) * output.astype(wide), axis=-1), 1, 2)
    grads, lines, inner = blocks.split_queries(grad), blocks.split_lines(log_sums), blocks.split_lines(inner)

    def one_block(kv_grads: tuple[Array, Array], place: Array) -> tuple[tuple[Array, Array], Array]:
        queries = blocks.queries_at(place)
        grad, log_sum, inner_of = (_at(x, place) for x in (grads, lines, inner))

        def add(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            query_grads, key_grads, value_grads = state
            keys = blocks.keys_at(queries, j)
            logits = blocks.logits(queries, keys)
            weights = jnp.exp(jnp.where(blocks.mask(queries, keys), logits - log_sum[:, None], UNSEEN))
            weight_grads = product("NCK,NRK->NCR", keys.value, grad)
            logit_grads = (weights * (weight_grads - inner_of[:, None])).astype(queries.query.dtype)
            value_grads = _add(value_grads, keys.place, product("NCR,NRK->NCK", weights.astype(grad.dtype), grad))
            key_grads = _add(key_grads, keys.place, product("NCR,NRK->NCK", logit_grads, queries.query))
            return query_grads + product("NCR,NCK->NRK", logit_grads, keys.key), key_grads, value_grads

        zeros = _varying_as(jnp.zeros(queries.query.shape, wide), blocks)
        query_grads, *kv = lax.fori_loop(queries.first, queries.end, add, (zeros, *kv_grads))
        return (kv[0], kv[1]), query_grads

    zeros = _varying_as(jnp.zeros(blocks.key.shape, wide), blocks)
    places = jnp.arange(len(blocks.query), dtype=jnp.int32)
    (key_grads, value_grads), query_grads = lax.scan(one_block, (zeros, zeros), places)
    # The queries are scaled in the blocks, and so are the gradients of keys.
    query_grads = blocks.whole_queries(query_grads, query.shape) * how.scale
    return query_grads, blocks.whole_keys(key_grads, key.shape), blocks.whole_keys(value_grads, key.shape)


class _Queries(NamedTuple):
    """A block of queries; the heads of a group are more queries."""

    query: Float[Array, "N R K"]
    ids: Int32[Array, " C"]
    places: Int32[Array, " C"]
    first: Array  # of the blocks of keys that it meets
    end: Array
    row: Array


class _Keys(NamedTuple):
    key: Float[Array, "N C K"]
    value: Float[Array, "N C K"]
    ids: Int32[Array, " C"]
    places: Int32[Array, " C"]
    place: Array  # among the blocks of all rows


class _Blocks(NamedTuple):
    """Rows in blocks; those of all rows are one axis."""

    how: How
    window: Array | None
    query: Float[Array, "BI N R K"]  # scaled
    key: Float[Array, "BJ N C K"]
    value: Float[Array, "BJ N C K"]
    query_ids: Int32[Array, "BI C"]
    key_ids: Int32[Array, "BJ C"]
    offset: Int32[Array, " B"]
    first: Int32[Array, " BI"]
    end: Int32[Array, " BI"]

    @classmethod
    def of(cls, how: How, query: Array, key: Array, value: Array, seen: Seen) -> _Blocks:
        # If ids did not depend on the queries, JAX would compute what depends on them before a loop over layers.
        query, seen = lax.optimization_barrier((query, seen))
        if query.dtype == jnp.float16:  # which a CPU does not multiply
            query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        num_kv_heads = key.shape[2]
        first, end = block_ranges(how, seen, BLOCK, BLOCK)
        query_ids, key_ids = (_split(ids).reshape(-1, BLOCK) for ids in (seen.query_ids, seen.key_ids))
        query = _split_heads(query * jnp.asarray(how.scale, query.dtype), num_kv_heads)
        key, value = (_split_heads(x, num_kv_heads) for x in (key, value))
        ranges = first.reshape(-1), end.reshape(-1)
        return cls(how, seen.window, query, key, value, query_ids, key_ids, seen.offset, *ranges)

    @property
    def wide(self) -> Any:
        return jnp.promote_types(self.query.dtype, jnp.float32)

    def queries_at(self, place: Array) -> _Queries:
        num_rows = len(self.offset)
        row, block = jnp.divmod(place, len(self.query) // num_rows)
        places = _at(self.offset, row) + block * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        query, ids, first, end = (_at(x, place) for x in (self.query, self.query_ids, self.first, self.end))
        return _Queries(query, ids, places, first, end, row)

    def keys_at(self, queries: _Queries, block: Array) -> _Keys:
        place = queries.row * (len(self.key) // len(self.offset)) + block
        key, value, ids = (_at(x, place) for x in (self.key, self.value, self.key_ids))
        return _Keys(key, value, ids, block * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32), place)

    def mask(self, queries: _Queries, keys: _Keys) -> Bool[Array, "C R"]:
        seen_CxC = is_seen(self.how, self.window, queries.ids, keys.ids, queries.places, keys.places, keys_first=True)
        return jnp.tile(seen_CxC, (1, self.query.shape[2] // BLOCK))

    def logits(self, queries: _Queries, keys: _Keys) -> Float[Array, "N C R"]:
        """By keys, then queries: maxima and sums over an outer axis are faster on a CPU."""
        return product("NCK,NRK->NCR", keys.key, queries.query)

    def split_queries(self, array: Float[Array, "B Q H K"]) -> Float[Array, "BI N R K"]:
        return _split_heads(array.astype(self.query.dtype), self.query.shape[1])

    def whole_queries(self, blocks: Float[Array, "BI N R K"], shape: tuple[int, ...]) -> Float[Array, "B Q H K"]:
        """The inverse of `split_queries`."""
        num_rows, num_queries, num_heads, head_size = shape
        num_kv_heads = blocks.shape[1]
        blocks_BxIxNxGxCxK = blocks.reshape(num_rows, -1, num_kv_heads, num_heads // num_kv_heads, BLOCK, head_size)
        return blocks_BxIxNxGxCxK.transpose(0, 1, 4, 2, 3, 5).reshape(num_rows, -1, num_heads, head_size)[
            :, :num_queries
        ]

    def whole_keys(self, blocks: Float[Array, "BJ N C K"], shape: tuple[int, ...]) -> Float[Array, "B T N K"]:
        return self.whole_queries(blocks, shape)

    def split_lines(self, lines: Float[Array, "B H Q"]) -> Float[Array, "BI N R"]:
        return _split_heads(jnp.moveaxis(lines, 1, 2)[..., None], self.query.shape[1])[..., 0]

    def whole_lines(self, blocks: Float[Array, "BI N R"], shape: tuple[int, ...]) -> Float[Array, "B H Q"]:
        return jnp.moveaxis(self.whole_queries(blocks[..., None], (*shape[:3], 1))[..., 0], 1, 2)


def _split(array: Array) -> Array:
    """[B, T, …] as [B, blocks, C, …], zeros after the last."""
    padding = [(0, 0)] * array.ndim
    padding[1] = (0, -array.shape[1] % BLOCK)
    return jnp.pad(array, padding).reshape(array.shape[0], -1, BLOCK, *array.shape[2:])


def _split_heads(array: Float[Array, "B T H K"], num_kv_heads: int) -> Float[Array, "BI N R K"]:
    blocks_BxIxCxHxK = _split(array)
    grouped = blocks_BxIxCxHxK.reshape(-1, BLOCK, num_kv_heads, array.shape[2] // num_kv_heads, array.shape[3])
    return grouped.transpose(0, 2, 3, 1, 4).reshape(len(grouped), num_kv_heads, -1, array.shape[3])


def product(subscripts: str, x: Array, y: Array) -> Array:
    """A product of matrices with sums in float32 at least."""
    precision = lax.DotAlgorithmPreset.BF16_BF16_F32 if x.dtype == jnp.bfloat16 else None
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum(subscripts, x, y, precision=precision, preferred_element_type=wide)


def _at(array: Array, place: Any) -> Array:
    return lax.dynamic_index_in_dim(array, place, 0, keepdims=False)


def _add(array: Array, place: Any, added: Array) -> Array:
    return lax.dynamic_update_index_in_dim(array, _at(array, place) + added, place, 0)


def _varying_as(tree: Any, blocks: _Blocks) -> Any:
    """What a loop starts with, as varying as what it adds: `shard_map` may check that."""
    axes = tuple(varying_axes(blocks.query))
    return lax.pcast(tree, axes, to="varying") if axes else tree
