"""Attention in chunks of queries, which skips what lies above the diagonal and no other sample: the baseline.

Letters: B rows, T positions, H query heads, N key/value heads, G = H / N, R = G · queries of a chunk, K head size.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

CHUNK = 256  # the most queries at a time
MOST_SLICES = 4  # of the keys, for causal queries
SAVED = "products with values"  # what the backward pass does not compute again


def attend_in_chunks(query: Any, key: Any, value: Any, *, segment_ids: Any = None, **_: Any) -> jax.Array:
    """Causal attention, called as `jvarlen.attend` is; lengths make no difference to what is causal."""
    (_, seq_length, _, head_size), num_kv_heads = query.shape, key.shape[2]
    half = CHUNK // 2
    size = min(half * -(-seq_length // CHUNK), CHUNK)
    num_chunks = -(-seq_length // size)
    run_length = size * -(-num_chunks // MOST_SLICES)
    key_BxNxTxK, value_BxNxTxK = (jnp.swapaxes(x, 1, 2) for x in (key, value))
    query_BxNxGxTxK = jnp.moveaxis(query.reshape(*query.shape[:2], num_kv_heads, -1, head_size), 1, 3)

    def attend_run(start: int) -> jax.Array:
        end = min(start + run_length, seq_length)
        keys, values = key_BxNxTxK[:, :, :end], value_BxNxTxK[:, :, :end]
        key_segments = None if segment_ids is None else segment_ids[:, :end]

        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(SAVED))
        def one_chunk(first_query: Any, query: jax.Array, query_segments: jax.Array | None) -> jax.Array:
            places_R = jnp.tile(jnp.arange(query.shape[3]), query.shape[2])
            mask = ((first_query + places_R)[:, None] >= jnp.arange(end))[None]
            if query_segments is not None and key_segments is not None:
                mask = mask & (query_segments[:, places_R, None] == key_segments[:, None])
            query_BxNxRxK = query.reshape(*query.shape[:2], -1, head_size)
            return attend_chunk(query_BxNxRxK, keys, values, mask).reshape(query.shape)

        queries = query_BxNxGxTxK[:, :, :, start:end]
        segments = None if segment_ids is None else segment_ids[:, start:end]
        if end - start <= size:
            return one_chunk(start, queries, segments)
        chunks = (
            jnp.arange(start, end, size),
            split(queries, 3, size),
            None if segments is None else split(segments, 1, size),
        )
        attended = jax.lax.map(lambda chunk: one_chunk(*chunk), jax.lax.optimization_barrier(chunks))
        return jnp.moveaxis(attended, 0, 3).reshape(*queries.shape[:3], -1, head_size)[:, :, :, : end - start]

    attended = jnp.concatenate([attend_run(start) for start in range(0, seq_length, run_length)], axis=3)
    return jnp.moveaxis(attended, 3, 1).reshape(query.shape)


def split(array: jax.Array, axis: int, size: int) -> jax.Array:
    """Chunks of an axis as a new first axis; the last one is filled with zeros."""
    num_chunks = -(-array.shape[axis] // size)
    padding = [(0, 0)] * array.ndim
    padding[axis] = (0, num_chunks * size - array.shape[axis])
    padded = jnp.pad(array, padding)
    return jnp.moveaxis(padded.reshape(*array.shape[:axis], num_chunks, size, *array.shape[axis + 1 :]), axis, 0)


def attend_chunk(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    """Sums are divided after the product with the values, which has fewer numbers."""
    logits_BxNxRxT = jnp.einsum("BNRK,BNTK->BNRT", query, key) * query.shape[-1] ** -0.5
    logits_BxNxRxT = jnp.where(mask[:, None], logits_BxNxRxT, jnp.finfo(jnp.float32).min)
    largest_BxNxRx1 = jax.lax.stop_gradient(jnp.max(logits_BxNxRxT, axis=-1, keepdims=True))
    powers_BxNxRxT = jnp.exp(logits_BxNxRxT - largest_BxNxRx1)
    sums_BxNxRx1 = jnp.sum(powers_BxNxRxT, axis=-1, keepdims=True)
    products_BxNxRxK = jnp.einsum("BNRT,BNTK->BNRK", powers_BxNxRxT, value)
    return checkpoint_name(products_BxNxRxK, SAVED) / sums_BxNxRx1
