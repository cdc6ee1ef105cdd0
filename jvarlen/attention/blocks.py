"""Attention in loops over blocks: each block of queries meets only the blocks of keys that hold its samples.

For a CPU, and wherever no kernel serves. Letters: B rows, Q queries, T keys, H query heads, N key/value heads, K head
size, C positions of a block, I blocks of queries, J of keys, G = H / N, R = G · C.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jvarlen.attention.masks import UNSEEN, Inputs, StaticMask, block_ranges, is_seen, query_places, varying_axes

__all__ = ["BLOCK", "backward", "forward", "product"]

_Tree = TypeVar("_Tree")

BLOCK = 64  # positions; larger ones compute more pairs of other samples, smaller ones are slower a pair


def forward(
    static: StaticMask, inputs: Inputs, *, together: bool = False
) -> tuple[Float[Array, "B Q H K"], Float[Array, "B H Q"]]:
    """Outputs, and logarithms of the softmax's sums, in float32 at least; 0 and `UNSEEN` where no key is seen.

    With `together`, all rows visit the blocks that any of them needs, for rows that a compiler splits between devices.
    """
    return _by_rows(_forward, together, static, inputs)


def backward(
    static: StaticMask, inputs: Inputs, output: Array, log_sums: Array, grad: Array, *, together: bool = False
) -> tuple[Array, Array, Array]:
    """Gradients of queries, keys and values, in float32 at least."""
    return _by_rows(_backward, together, static, inputs, output, log_sums, grad)


def _by_rows(
    function: Callable[..., _Tree], together: bool, static: StaticMask, inputs: Inputs, *others: Array
) -> _Tree:
    """A function of rows, one after another or together."""
    first, end = block_ranges(static, inputs.masks, BLOCK, BLOCK)
    if not together:
        return function(static, (first.reshape(-1), end.reshape(-1)), inputs, *others)
    last = jnp.max(end, axis=0)
    first = jnp.minimum(jnp.min(jnp.where(first < end, first, last), axis=0), last)

    def run_row(*row: Inputs | Array) -> _Tree:
        inputs, *others = jax.tree.map(lambda leaf: leaf[None], row)
        inputs = _with_window(inputs, window)
        return jax.tree.map(lambda leaf: leaf[0], function(static, (first, last), inputs, *others))

    window = inputs.masks.window
    return jax.vmap(run_row)(_with_window(inputs, None), *others)


def _with_window(inputs: Inputs, window: Array | None) -> Inputs:
    return inputs._replace(masks=inputs.masks._replace(window=window))


def _forward(static: StaticMask, ranges: tuple[Array, Array], inputs: Inputs) -> tuple[Array, Array]:
    blocks = _Blocks.of(static, ranges, inputs)
    wide = blocks.wide
    smallest = jnp.finfo(wide).min

    def one_block(place: Array) -> tuple[Array, Array]:
        queries = blocks.queries_at(place)

        def add(j: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            largest, powers, products = sums
            keys = blocks.keys_at(queries, j)
            logits_NxRxC = product("NRK,NCK->NRC", queries.query, keys.key)
            logits_NxRxC = jnp.where(blocks.mask(queries, keys), logits_NxRxC, smallest)
            new_largest = jnp.maximum(largest, jnp.max(logits_NxRxC, axis=2))
            powers_NxRxC = jnp.exp(logits_NxRxC - new_largest[..., None])
            shrunk = jnp.exp(largest - new_largest)
            added = product("NRC,NCK->NRK", powers_NxRxC.astype(keys.value.dtype), keys.value)
            return new_largest, powers * shrunk + jnp.sum(powers_NxRxC, axis=2), products * shrunk[..., None] + added

        # A query may meet its sample in a later block. Its sums until then are multiplied by exp(−∞).
        num_kv_heads, num_queries, head_size = queries.query.shape
        line = jnp.zeros((num_kv_heads, num_queries), wide)
        sums = line + smallest, line, jnp.zeros((num_kv_heads, num_queries, head_size), wide)
        sums = _vary_as(sums, blocks)
        largest, powers, products = lax.fori_loop(queries.first, queries.end, add, sums)
        sees = largest > smallest
        powers = jnp.where(sees, powers, 1)
        output = jnp.where(sees[..., None], products / powers[..., None], 0)
        return _positions(output), jnp.where(sees, largest + jnp.log(powers), UNSEEN)

    output, log_sums = lax.map(one_block, jnp.arange(len(blocks.query), dtype=jnp.int32))
    shape = inputs.query.shape
    return _whole(output, shape), blocks.whole_lines(log_sums, shape)


def _backward(
    static: StaticMask, ranges: tuple[Array, Array], inputs: Inputs, output: Array, log_sums: Array, grad: Array
) -> tuple[Array, Array, Array]:
    blocks = _Blocks.of(static, ranges, inputs)
    wide = blocks.wide
    grads, outputs, lines = _split(grad), _split(output), blocks.split_lines(log_sums)

    def one_block(kv_grads: tuple[Array, Array], place: Array) -> tuple[tuple[Array, Array], Array]:
        queries = blocks.queries_at(place)
        grad, output = (blocks.heads(_at(x, place)) for x in (grads, outputs))
        log_sum, inner = _at(lines, place), jnp.sum(grad.astype(wide) * output.astype(wide), axis=-1)
        grad = grad.astype(queries.query.dtype)

        def add(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            query_grads, key_grads, value_grads = state
            keys = blocks.keys_at(queries, j)
            # By keys, then queries: so no product but the last takes a transposed factor.
            logits = product("NCK,NRK->NCR", keys.key, queries.query)
            weights = jnp.exp(blocks.where_seen(queries, keys, logits - log_sum[:, None], UNSEEN))
            weight_grads = product("NCK,NRK->NCR", keys.value, grad)
            logit_grads = (weights * (weight_grads - inner[:, None])).astype(queries.query.dtype)
            value_grads = _add(value_grads, keys.place, product("NCR,NRK->NCK", weights.astype(grad.dtype), grad))
            key_grads = _add(key_grads, keys.place, product("NCR,NRK->NCK", logit_grads, queries.query))
            return query_grads + product("NCR,NCK->NRK", logit_grads, keys.key), key_grads, value_grads

        zeros = _vary_as(jnp.zeros(queries.query.shape, wide), blocks)
        query_grads, *kv = lax.fori_loop(queries.first, queries.end, add, (zeros, *kv_grads))
        # The queries are scaled in the blocks, and so are the gradients of keys.
        return (kv[0], kv[1]), _positions(query_grads * static.scale)

    zeros = _vary_as(jnp.zeros(blocks.key.shape, wide), blocks)
    places = jnp.arange(len(blocks.query), dtype=jnp.int32)
    (key_grads, value_grads), query_grads = lax.scan(one_block, (zeros, zeros), places)
    shape, kv_shape = inputs.query.shape, inputs.key.shape
    return _whole(query_grads, shape), _whole(key_grads, kv_shape), _whole(value_grads, kv_shape)


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
    """Rows in blocks; those of all rows are one axis. Blocks are transposed where they are taken, in no new memory."""

    static: StaticMask
    window: Array | None
    query: Float[Array, "BI C H K"]
    key: Float[Array, "BJ C N K"]
    value: Float[Array, "BJ C N K"]
    query_ids: Int32[Array, "BI C"]
    key_ids: Int32[Array, "BJ C"]
    query_places: Int32[Array, "BI C"]
    num_rows: int
    first: Int32[Array, " BI"]
    end: Int32[Array, " BI"]

    @classmethod
    def of(cls, static: StaticMask, ranges: tuple[Array, Array], inputs: Inputs) -> _Blocks:
        query, key, value, masks = inputs
        # If ids did not depend on the queries, JAX would compute what depends on them before a loop over layers.
        query, masks, ranges = lax.optimization_barrier((query, masks, ranges))
        if query.dtype == jnp.float16:  # CPUs do not multiply it
            query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        num_rows, places = len(query), query_places(masks, query.shape[1])
        query, key, value, query_ids, key_ids = map(_split, (query, key, value, masks.query_ids, masks.key_ids))
        return cls(static, masks.window, query, key, value, query_ids, key_ids, _split(places), num_rows, *ranges)

    @property
    def wide(self) -> jnp.dtype:
        return jnp.promote_types(self.query.dtype, jnp.float32)

    def queries_at(self, place: Array) -> _Queries:
        row = place // (len(self.query) // self.num_rows)
        query, ids, places = (_at(x, place) for x in (self.query, self.query_ids, self.query_places))
        first, end = (_at(x, place) for x in (self.first, self.end))
        scaled = self.heads((query.astype(self.wide) * self.static.scale).astype(query.dtype))
        return _Queries(scaled, ids, places, first, end, row)

    def keys_at(self, queries: _Queries, block: Array) -> _Keys:
        place = queries.row * (len(self.key) // self.num_rows) + block
        key, value = (_at(x, place).swapaxes(0, 1) for x in (self.key, self.value))
        places = block * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        return _Keys(key, value, _at(self.key_ids, place), places, place)

    def heads(self, block: Float[Array, "C H K"]) -> Float[Array, "N R K"]:
        """A block of positions of queries by heads of keys."""
        grouped_CxNxGxK = block.reshape(BLOCK, self.key.shape[2], -1, block.shape[2])
        return grouped_CxNxGxK.transpose(1, 2, 0, 3).reshape(self.key.shape[2], -1, block.shape[2])

    def where_seen(self, queries: _Queries, keys: _Keys, logits: Float[Array, "N C R"], otherwise: float) -> Array:
        """The logits by keys, then queries, where these see the keys."""
        # With one axis for heads and queries, the mask would be read in steps, and nothing be vectorized.
        masks = queries.ids, keys.ids, queries.places, keys.places
        seen_CxC = is_seen(self.static, self.window, *masks, keys_first=True)
        by_heads_NxCxGxC = logits.reshape(*logits.shape[:2], -1, BLOCK)
        return jnp.where(seen_CxC[:, None], by_heads_NxCxGxC, otherwise).reshape(logits.shape)

    def mask(self, queries: _Queries, keys: _Keys) -> Bool[Array, "R C"]:
        seen_CxC = is_seen(self.static, self.window, queries.ids, keys.ids, queries.places, keys.places)
        return jnp.tile(seen_CxC, (self.query.shape[2] // self.key.shape[2], 1))

    def split_lines(self, lines: Float[Array, "B H Q"]) -> Float[Array, "BI N R"]:
        blocks_BIxCxH = _split(jnp.moveaxis(lines, 1, 2))
        return jnp.moveaxis(blocks_BIxCxH, 1, 2).reshape(len(blocks_BIxCxH), self.key.shape[2], -1)

    def whole_lines(self, blocks: Float[Array, "BI N R"], shape: tuple[int, ...]) -> Float[Array, "B H Q"]:
        """The inverse of `split_lines`."""
        blocks_BIxCxH = jnp.moveaxis(blocks.reshape(len(blocks), -1, BLOCK), 1, 2)
        return jnp.moveaxis(_whole(blocks_BIxCxH, shape[:3]), 1, 2)


def _split(array: Array) -> Array:
    """[B, T, …] as [B · blocks, C, …], zeros after the last of a row."""
    padding = [(0, 0)] * array.ndim
    padding[1] = (0, -array.shape[1] % BLOCK)
    return jnp.pad(array, padding).reshape(-1, BLOCK, *array.shape[2:])


def _whole(blocks: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `_split`."""
    return blocks.reshape(shape[0], -1, *shape[2:])[:, : shape[1]]


def _positions(block: Float[Array, "N R K"]) -> Float[Array, "C H K"]:
    """The inverse of `_Blocks.heads`."""
    return jnp.moveaxis(block.reshape(-1, BLOCK, block.shape[2]), 1, 0)


def product(subscripts: str, x: Array, y: Array) -> Array:
    """A product of matrices with sums in float32 at least."""
    precision = lax.DotAlgorithmPreset.BF16_BF16_F32 if x.dtype == jnp.bfloat16 else None
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum(subscripts, x, y, precision=precision, preferred_element_type=wide)


def _at(array: Array, place: Array) -> Array:
    return lax.dynamic_index_in_dim(array, place, 0, keepdims=False)


def _add(array: Array, place: Array, added: Array) -> Array:
    """Adds [N, C, K] to a block of positions, [C, N, K]."""
    return lax.dynamic_update_index_in_dim(array, _at(array, place) + added.swapaxes(0, 1), place, 0)


def _vary_as(tree: _Tree, blocks: _Blocks) -> _Tree:
    """Makes the initial value of a loop vary over the mesh axes of what it adds, as `shard_map` may check."""
    axes = tuple(varying_axes(blocks.query))
    return lax.pcast(tree, axes, to="varying") if axes else tree
