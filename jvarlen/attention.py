"""Attention: in go queries, keys, values and the lengths or segments of rows, out comes what each position attends to.

`jax.nn.dot_product_attention`, told of padding and of packed samples in ways that build no B×T×T mask where that can be
had. Letters: B rows, T positions, Q queries at a time, H heads, K head size.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jvarlen.masks import attention_mask, segment_mask

__all__ = ["AttentionImplementation", "attend", "attend_within_segments"]

AttentionImplementation = Literal["xla", "cudnn", "chunked"]

_CHUNK = 256  # queries at a time
_LONG = 1024  # positions from which memory for all of T² is worth saving


def attend(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T H K"],
    value: Float[Array, "B T H K"],
    lengths: Int[Array, " B"],
    *,
    causal: bool = True,
    implementation: Literal["xla", "cudnn"] | None = None,
) -> Float[Array, "B T H K"]:
    """Attention within rows of one sample each; keys past a row's length take no part.

    Args:
      query: float[B, T, H, K].
      key: float[B, T, H, K].
      value: float[B, T, H, K].
      lengths: int[B], tokens a row.
      causal: whether a position sees only itself and what comes before it.
      implementation: of `jax.nn.dot_product_attention`; `"cudnn"` builds nothing of size T².

    Returns:
      float[B, T, H, K]; positions past a row's length give numbers without meaning.
    """
    if query.dtype == jnp.float64:
        return _attend_in_float64(query, key, value, attention_mask(lengths, query.shape[1], causal=causal)[:, None])
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=causal, key_value_seq_lengths=lengths, implementation=implementation
    )


def attend_within_segments(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T H K"],
    value: Float[Array, "B T H K"],
    segment_ids: Int[Array, "B T"],
    *,
    causal: bool = True,
    implementation: AttentionImplementation | None = None,
) -> Float[Array, "B T H K"]:
    """Attention within the samples of packed rows; no position sees another sample.

    Args:
      query: float[B, T, H, K].
      key: float[B, T, H, K].
      value: float[B, T, H, K].
      segment_ids: int[B, T], the sample of each position; 0 where there is no token.
      causal: whether a position sees only itself and what comes before it.
      implementation: `"xla"` and `"cudnn"` are those of `jax.nn.dot_product_attention`, with a B×T×T mask. `"chunked"`
        takes some queries at a time, on any device: memory grows with T instead of T², in the backward pass as well,
        where it is computed again. None: chunked for rows of 1,024 positions or more.

    Returns:
      float[B, T, H, K]; positions without a token give numbers without meaning.

    References:
      Queries in chunks: Rabe and Staats 2021, "Self-attention Does Not Need O(n²) Memory".
    """
    seq_length = query.shape[1]
    if implementation is None:
        implementation = "chunked" if seq_length >= _LONG else "xla"
    if implementation != "chunked":
        mask_Bx1xTxT = segment_mask(segment_ids, segment_ids, causal=causal)[:, None]
        if query.dtype == jnp.float64:
            return _attend_in_float64(query, key, value, mask_Bx1xTxT)
        return jax.nn.dot_product_attention(query, key, value, mask=mask_Bx1xTxT, implementation=implementation)
    num_chunks = -(-seq_length // _CHUNK)
    filler = num_chunks * _CHUNK - seq_length

    def in_chunks(array: Array) -> Array:
        padded = jnp.pad(array, [(0, 0), (0, filler)] + [(0, 0)] * (array.ndim - 2))
        return jnp.moveaxis(padded.reshape(array.shape[0], num_chunks, _CHUNK, *array.shape[2:]), 1, 0)

    # In the backward pass the chunks' gradients of keys and values are summed, in float32 at least.
    summed_type = jnp.promote_types(key.dtype, jnp.float32)
    key, value = key.astype(summed_type), value.astype(summed_type)

    @jax.checkpoint
    def one_chunk(chunk: tuple[Array, Array, Array]) -> Array:
        query_BxQxHxK, segments_BxQ, first_query = chunk
        mask_Bx1xQxT = segment_mask(segments_BxQ, segment_ids, causal=causal, first_query=first_query)[:, None]
        if query.dtype == jnp.float64:
            return _attend_in_float64(query_BxQxHxK, key, value, mask_Bx1xQxT)
        in_type = query.dtype
        return jax.nn.dot_product_attention(
            query_BxQxHxK, key.astype(in_type), value.astype(in_type), mask=mask_Bx1xQxT
        )

    first_queries = jnp.arange(num_chunks) * _CHUNK
    attended = jax.lax.map(one_chunk, (in_chunks(query), in_chunks(segment_ids), first_queries))
    return jnp.moveaxis(attended, 0, 1).reshape(query.shape[0], -1, *query.shape[2:])[:, :seq_length]


def _attend_in_float64(
    query: Float[Array, "B Q H K"],
    key: Float[Array, "B T H K"],
    value: Float[Array, "B T H K"],
    mask: Bool[Array, "B 1 Q T"],
) -> Float[Array, "B Q H K"]:
    """What `jax.nn.dot_product_attention` computes, which takes the softmax in float32 whatever it is given."""
    logits_BxHxQxT = jnp.einsum("BQHK,BTHK->BHQT", query, key) / jnp.sqrt(query.shape[-1])
    weights_BxHxQxT = jax.nn.softmax(jnp.where(mask, logits_BxHxQxT, jnp.finfo(query.dtype).min), axis=-1)
    return jnp.einsum("BHQT,BTHK->BQHK", weights_BxHxQxT, value)
