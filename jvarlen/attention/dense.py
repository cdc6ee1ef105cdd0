"""Attention by masked products of queries with keys: all keys, or those up to the query if it is causal.

For short rows and few queries. Letters: B rows, Q queries, T keys, H query heads, N key/value heads, K head size,
G = H / N, S queries of a slice, R = G · S.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jvarlen.attention.blocks import product
from jvarlen.attention.masks import UNSEEN, Inputs, StaticMask, is_seen, query_places

__all__ = ["backward", "forward"]

_SLICE = 128  # queries, at least
_MOST_SLICES = 4  # each has its product: more slices compute less and take longer to compile


def forward(static: StaticMask, inputs: Inputs) -> tuple[Float[Array, "B Q H K"], Float[Array, "B H Q"]]:
    """Outputs, and logarithms of the softmax's sums, in float32 at least; 0 and `UNSEEN` where no key is seen."""
    heads = _Heads(static, inputs)
    outputs, log_sums = [], []
    for queries, num_keys in heads.slices():
        logits, mask = heads.logits(queries, num_keys), heads.mask(queries, num_keys)
        smallest = jnp.finfo(logits.dtype).min
        logits = jnp.where(mask, logits, smallest)
        largest = jnp.max(logits, axis=-1, keepdims=True)
        powers = jnp.exp(logits - largest)
        sums, sees = jnp.sum(powers, axis=-1, keepdims=True), largest > smallest
        products = product("BNRT,BNTK->BNRK", powers.astype(heads.value.dtype), heads.value[:, :, :num_keys])
        outputs.append(jnp.where(sees, products / sums, 0))
        log_sums.append(jnp.where(sees, largest + jnp.log(sums), UNSEEN))
    return heads.whole(outputs), jnp.moveaxis(heads.whole(log_sums)[..., 0], 1, 2)


def backward(
    static: StaticMask, inputs: Inputs, output: Array, log_sums: Array, grad: Array
) -> tuple[Array, Array, Array]:
    """Gradients of queries, keys and values, in float32 at least."""
    heads = _Heads(static, inputs)
    wide = heads.wide
    inner = heads.grouped(jnp.sum(grad.astype(wide) * output.astype(wide), axis=-1, keepdims=True))
    grads, lines = heads.grouped(grad.astype(heads.query.dtype)), heads.grouped(jnp.moveaxis(log_sums, 1, 2)[..., None])
    query_grads = []
    key_grads = value_grads = jnp.zeros((), wide)
    for queries, num_keys in heads.slices():
        logits, mask = heads.logits(queries, num_keys), heads.mask(queries, num_keys)
        query, grad, line, inner_of = (heads.part(x, queries) for x in (heads.query, grads, lines, inner))
        weights = jnp.exp(jnp.where(mask, logits - line, UNSEEN))
        weight_grads = product("BNRK,BNTK->BNRT", grad, heads.value[:, :, :num_keys])
        logit_grads = (weights * (weight_grads - inner_of)).astype(query.dtype)
        query_grads.append(product("BNRT,BNTK->BNRK", logit_grads, heads.key[:, :, :num_keys]) * static.scale)
        after = ((0, 0), (0, 0), (0, inputs.key.shape[1] - num_keys), (0, 0))
        key_grads = key_grads + jnp.pad(product("BNRT,BNRK->BNTK", logit_grads, query), after)
        value_grads = value_grads + jnp.pad(product("BNRT,BNRK->BNTK", weights.astype(grad.dtype), grad), after)
    return heads.whole(query_grads), jnp.swapaxes(key_grads, 1, 2), jnp.swapaxes(value_grads, 1, 2)


class _Heads:
    """Queries, keys and values by head; the heads of a group are more queries."""

    def __init__(self, static: StaticMask, inputs: Inputs):
        query, key, value, masks = inputs
        # If ids did not depend on the queries, JAX would compute masks, T² of them, before a loop over layers.
        query, self._masks = lax.optimization_barrier((query, masks))
        if query.dtype == jnp.float16:  # CPUs do not multiply it
            query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        self._static, self._shape, self._num_kv_heads = static, query.shape, key.shape[2]
        self.wide = jnp.promote_types(query.dtype, jnp.float32)
        self.query = self.grouped((query.astype(self.wide) * static.scale).astype(query.dtype))
        self.key, self.value = jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)

    def slices(self) -> Iterator[tuple[slice, int]]:
        """Runs of queries, each with the number of keys that some of them see."""
        num_queries, num_keys = self._shape[1], self.key.shape[2]
        offset = self._static.offset
        if not self._static.causal or offset is None:
            yield slice(0, num_queries), num_keys
            return
        size = max(_SLICE, -(-num_queries // _MOST_SLICES))
        for start in range(0, num_queries, size):
            end = min(start + size, num_queries)
            yield slice(start, end), max(1, min(offset + end, num_keys))

    def logits(self, queries: slice, num_keys: int) -> Float[Array, "B N R T"]:
        return product("BNRK,BNTK->BNRT", self.part(self.query, queries), self.key[:, :, :num_keys])

    def mask(self, queries: slice, num_keys: int) -> Array:
        """bool[B, 1, R, T]."""
        key_places = jnp.arange(num_keys, dtype=jnp.int32)
        masks = self._masks
        places = query_places(masks, self._shape[1])[:, queries]
        ids = masks.query_ids[:, queries], masks.key_ids[:, :num_keys]
        seen_BxSxT = is_seen(self._static, masks.window, *ids, places, key_places)
        return jnp.tile(seen_BxSxT, (1, self._shape[2] // self._num_kv_heads, 1))[:, None]

    def grouped(self, array: Float[Array, "B Q H K"]) -> Float[Array, "B N G Q K"]:
        num_rows, num_queries = array.shape[:2]
        return jnp.moveaxis(array.reshape(num_rows, num_queries, self._num_kv_heads, -1, array.shape[3]), 1, 3)

    def part(self, array: Float[Array, "B N G Q K"], queries: slice) -> Float[Array, "B N R K"]:
        part = array[:, :, :, queries]
        return part.reshape(*part.shape[:2], -1, part.shape[4])

    def whole(self, parts: list[Array]) -> Float[Array, "B Q H K"]:
        """The inverse of `grouped` and `part`."""
        num_rows, num_queries, num_heads, _ = self._shape
        of_group = num_heads // self._num_kv_heads
        grouped = [part.reshape(num_rows, self._num_kv_heads, of_group, -1, part.shape[3]) for part in parts]
        return jnp.moveaxis(jnp.concatenate(grouped, axis=3), 3, 1).reshape(num_rows, num_queries, num_heads, -1)
