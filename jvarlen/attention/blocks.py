"""Attention in loops over blocks: each block of queries meets only the blocks of keys that hold its samples.

For a CPU, and wherever no kernel serves. Letters: B rows, Q queries, T keys, H query heads, N key/value heads, K head
size, C positions of a block, I blocks of queries, J of keys, G = H / N, R = G · C. S = B · I steps of one row each, or,
with `together`, I steps of all B rows; A of a step.
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
    how: How,
    query: Float[Array, "B Q H K"],
    key: Float[Array, "B T N K"],
    value: Float[Array, "B T N K"],
    seen: Seen,
    *,
    together: bool = False,
) -> tuple[Float[Array, "B Q H K"], Float[Array, "B H Q"]]:
    """Outputs, and logarithms of the softmax's sums, in float32 at least; 0 and `UNSEEN` where no key is seen.

    With `together`, a step has a block of every row, and visits what one of them needs: for rows that the compiler
    splits between devices.
    """
    blocks = _Blocks.of(how, query, key, value, seen, together=together)
    wide = blocks.wide
    _, *shape, head_size = blocks.query.shape
    smallest = jnp.finfo(wide).min

    def one_block(place: Array) -> tuple[Array, Array]:
        queries = blocks.queries_at(place)

        def add(j: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            largest, powers, products = sums
            keys = blocks.keys_at(queries, j)
            logits_AxNxCxR = jnp.where(blocks.mask(queries, keys), blocks.logits(queries, keys), smallest)
            new_largest = jnp.maximum(largest, jnp.max(logits_AxNxCxR, axis=2))
            powers_AxNxCxR = jnp.exp(logits_AxNxCxR - new_largest[:, :, None])
            shrunk = jnp.exp(largest - new_largest)
            added = product("ANCR,ANCK->ANRK", powers_AxNxCxR.astype(keys.value.dtype), keys.value)
            return new_largest, powers * shrunk + jnp.sum(powers_AxNxCxR, axis=2), products * shrunk[..., None] + added

        # A query may meet its own sample in a later block. What it has summed until then is multiplied by exp(−∞).
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
    how: How,
    query: Array,
    key: Array,
    value: Array,
    seen: Seen,
    output: Array,
    log_sums: Array,
    grad: Array,
    *,
    together: bool = False,
) -> tuple[Array, Array, Array]:
    """Gradients of queries, keys and values, in float32 at least."""
    blocks = _Blocks.of(how, query, key, value, seen, together=together)
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
            weights = jnp.exp(jnp.where(blocks.mask(queries, keys), logits - log_sum[:, :, None], UNSEEN))
            weight_grads = product("ANCK,ANRK->ANCR", keys.value, grad)
            logit_grads = (weights * (weight_grads - inner_of[:, :, None])).astype(queries.query.dtype)
            value_grads = _add(value_grads, keys.place, product("ANCR,ANRK->ANCK", weights.astype(grad.dtype), grad))
            key_grads = _add(key_grads, keys.place, product("ANCR,ANRK->ANCK", logit_grads, queries.query))
            return query_grads + product("ANCR,ANCK->ANRK", logit_grads, keys.key), key_grads, value_grads

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
    """A block of queries of the rows of a step; the heads of a group are more queries."""

    query: Float[Array, "A N R K"]
    ids: Int32[Array, "A C"]
    places: Int32[Array, "A C"]
    first: Array  # of the blocks of keys that it meets
    end: Array
    group: Array  # of rows


class _Keys(NamedTuple):
    key: Float[Array, "A N C K"]
    value: Float[Array, "A N C K"]
    ids: Int32[Array, "A C"]
    places: Int32[Array, " C"]
    place: Array  # among the blocks of all groups


class _Blocks(NamedTuple):
    """Rows in blocks. Groups of A rows have the same blocks in the same steps: each row by itself, or all together."""

    how: How
    window: Array | None
    query: Float[Array, "S A N R K"]  # scaled
    key: Float[Array, "SJ A N C K"]
    value: Float[Array, "SJ A N C K"]
    query_ids: Int32[Array, "S A C"]
    key_ids: Int32[Array, "SJ A C"]
    offset: Int32[Array, "groups A"]
    first: Int32[Array, " S"]
    end: Int32[Array, " S"]

    @classmethod
    def of(cls, how: How, query: Array, key: Array, value: Array, seen: Seen, *, together: bool) -> _Blocks:
        # If ids did not depend on the queries, JAX would compute what depends on them before a loop over layers.
        query, seen = lax.optimization_barrier((query, seen))
        if query.dtype == jnp.float16:  # which a CPU does not multiply
            query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        first, end = block_ranges(how, seen, BLOCK, BLOCK)
        offset = seen.offset[:, None]
        if together:
            first = jnp.min(jnp.where(first < end, first, jnp.max(end)), axis=0)
            first, end, offset = jnp.minimum(first, jnp.max(end, axis=0)), jnp.max(end, axis=0), offset.T
        num_groups, num_kv_heads = len(offset), key.shape[2]
        query_ids, key_ids = (_split(ids, num_groups) for ids in (seen.query_ids, seen.key_ids))
        query = _split_heads(query * jnp.asarray(how.scale, query.dtype), num_kv_heads, num_groups)
        key, value = (_split_heads(x, num_kv_heads, num_groups) for x in (key, value))
        ranges = first.reshape(-1), end.reshape(-1)
        return cls(how, seen.window, query, key, value, query_ids, key_ids, offset, *ranges)

    @property
    def wide(self) -> Any:
        return jnp.promote_types(self.query.dtype, jnp.float32)

    def queries_at(self, place: Array) -> _Queries:
        group, block = jnp.divmod(place, len(self.query) // len(self.offset))
        places = _at(self.offset, group)[:, None] + block * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        query, ids, first, end = (_at(x, place) for x in (self.query, self.query_ids, self.first, self.end))
        return _Queries(query, ids, places, first, end, group)

    def keys_at(self, queries: _Queries, block: Array) -> _Keys:
        place = queries.group * (len(self.key) // len(self.offset)) + block
        key, value, ids = (_at(x, place) for x in (self.key, self.value, self.key_ids))
        return _Keys(key, value, ids, block * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32), place)

    def mask(self, queries: _Queries, keys: _Keys) -> Bool[Array, "A 1 C R"]:
        seen_AxCxC = is_seen(self.how, self.window, queries.ids, keys.ids, queries.places, keys.places, keys_first=True)
        return jnp.tile(seen_AxCxC, (1, 1, self.query.shape[3] // BLOCK))[:, None]

    def logits(self, queries: _Queries, keys: _Keys) -> Float[Array, "A N C R"]:
        """By keys, then queries: maxima and sums over an outer axis are faster on a CPU."""
        return product("ANCK,ANRK->ANCR", keys.key, queries.query)

    def split_queries(self, array: Float[Array, "B Q H K"]) -> Float[Array, "S A N R K"]:
        return _split_heads(array.astype(self.query.dtype), self.query.shape[2], len(self.offset))

    def whole_queries(self, blocks: Float[Array, "S A N R K"], shape: tuple[int, ...]) -> Float[Array, "B Q H K"]:
        """The inverse of `split_queries`."""
        num_rows, num_queries, num_heads, head_size = shape
        num_steps, num_together, num_kv_heads = blocks.shape[:3]
        blocks_SxAxNxGxCxK = blocks.reshape(
            num_steps, num_together, num_kv_heads, num_heads // num_kv_heads, BLOCK, head_size
        )
        blocks_SxAxCxNxGxK = blocks_SxAxNxGxCxK.transpose(0, 1, 4, 2, 3, 5)
        if num_together == num_rows:
            blocks_SxAxCxNxGxK = jnp.swapaxes(blocks_SxAxCxNxGxK, 0, 1)
        return blocks_SxAxCxNxGxK.reshape(num_rows, -1, num_heads, head_size)[:, :num_queries]

    def whole_keys(self, blocks: Float[Array, "SJ A N C K"], shape: tuple[int, ...]) -> Float[Array, "B T N K"]:
        return self.whole_queries(blocks, shape)

    def split_lines(self, lines: Float[Array, "B H Q"]) -> Float[Array, "S A N R"]:
        return _split_heads(jnp.moveaxis(lines, 1, 2)[..., None], self.query.shape[2], len(self.offset))[..., 0]

    def whole_lines(self, blocks: Float[Array, "S A N R"], shape: tuple[int, ...]) -> Float[Array, "B H Q"]:
        return jnp.moveaxis(self.whole_queries(blocks[..., None], (*shape[:3], 1))[..., 0], 1, 2)


def _split(array: Array, num_groups: int) -> Array:
    """[B, T, …] as [S, A, C, …], zeros after the last."""
    padding = [(0, 0)] * array.ndim
    padding[1] = (0, -array.shape[1] % BLOCK)
    blocks = jnp.pad(array, padding).reshape(len(array), -1, BLOCK, *array.shape[2:])
    return jnp.swapaxes(blocks, 0, 1) if num_groups == 1 else blocks.reshape(-1, 1, *blocks.shape[2:])


def _split_heads(array: Float[Array, "B T H K"], num_kv_heads: int, num_groups: int) -> Float[Array, "S A N R K"]:
    blocks_SxAxCxHxK = _split(array, num_groups)
    num_steps, num_together, _, num_heads, head_size = blocks_SxAxCxHxK.shape
    grouped = blocks_SxAxCxHxK.reshape(
        num_steps, num_together, BLOCK, num_kv_heads, num_heads // num_kv_heads, head_size
    )
    return grouped.transpose(0, 1, 3, 4, 2, 5).reshape(num_steps, num_together, num_kv_heads, -1, head_size)


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
