"""Attention within the samples of padded or packed rows.

Built on `jax.nn.dot_product_attention`. Where possible it is given lengths or segments instead of a B×T×T mask.
Letters: B rows, T positions, Q queries at a time, H query heads, N key/value heads, G = H / N, K head size.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from jvarlen._common.checks import UserError
from jvarlen.attention.masks import attention_mask, padding_mask, segment_mask

__all__ = [
    "AttentionImplementation",
    "SegmentAttentionImplementation",
    "attend",
    "attend_by_mask",
    "attend_within_segments",
]

AttentionImplementation = Literal["xla", "mask", "chunked", "cudnn"]
SegmentAttentionImplementation = Literal["xla", "cudnn", "chunked"]

_CHUNK = 256  # queries at a time
_LONG = 1024  # positions from which memory for all of T² is worth saving


def attend(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T N K"],
    value: Float[Array, "B T N K"],
    lengths: Integer[Array, " B"],
    *,
    causal: bool = True,
    implementation: AttentionImplementation | None = None,
) -> Float[Array, "B T H K"]:
    """Attention within rows of one sample each; keys past a row's length are masked.

    Every implementation gives the same outputs at the tokens of a row, and the same gradients.

    Args:
      query: float[B, T, H, K].
      key: float[B, T, N, K]; N divides H, and head h of the queries attends to head h // (H / N).
      value: float[B, T, N, K].
      lengths: int[B] of any integer type, tokens a row; 0 for a dummy row.
      causal: whether a position sees only itself and what comes before it.
      implementation: `"xla"` and `"cudnn"` are those of `jax.nn.dot_product_attention`, which gets the lengths. With
        `"xla"` the mask is made on the fly, but the logits of all pairs of positions take memory. `"cudnn"` holds
        nothing of size T²; it needs a GPU and 16-bit floats. `"mask"` passes the B×T×T mask. `"chunked"` is that of
        `attend_within_segments`, with the padding as a segment of its own. None: chunked for rows of 1,024 positions or
        more, by measurements on a CPU, and `"xla"` for shorter ones.

    Returns:
      float[B, T, H, K]; values past a row's length are meaningless but finite.

    Example:
      >>> values = jnp.arange(3.0).reshape(1, 3, 1, 1)
      >>> zeros = jnp.zeros((1, 3, 1, 1))  # so that each position gets the mean of what it sees
      >>> [attend(zeros, zeros, values, jnp.array([2]), implementation=x).ravel()[:2].tolist() for x in ("xla", "mask")]
      [[0.0, 0.5], [0.0, 0.5]]
    """
    seq_length = query.shape[1]
    implementation = implementation or _chosen_for(seq_length)
    if implementation == "chunked":
        segment_ids = padding_mask(lengths, seq_length).astype(jnp.int32)
        return attend_within_segments(query, key, value, segment_ids, causal=causal, implementation="chunked")
    if implementation == "mask" or query.dtype == jnp.float64:
        return attend_by_mask(query, key, value, attention_mask(lengths, seq_length, causal=causal))
    one_at_least = jnp.maximum(
        lengths.astype(jnp.int32), 1
    )  # a row that sees nothing must be finite in any implementation
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=causal, key_value_seq_lengths=one_at_least, implementation=implementation
    )


def attend_within_segments(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T N K"],
    value: Float[Array, "B T N K"],
    segment_ids: Integer[Array, "B T"],
    *,
    causal: bool = True,
    implementation: SegmentAttentionImplementation | None = None,
) -> Float[Array, "B T H K"]:
    """Attention within the samples of packed rows; no position sees another sample.

    Args:
      query: float[B, T, H, K].
      key: float[B, T, N, K], as in `attend`.
      value: float[B, T, N, K].
      segment_ids: int[B, T] of any integer type, the sample of each position; 0 where there is no token.
      causal: whether a position sees only itself and what comes before it.
      implementation: `"xla"` and `"cudnn"` are those of `jax.nn.dot_product_attention`, with a B×T×T mask. `"chunked"`
        computes some queries at a time, on any device: memory grows with T instead of T², also in the backward pass,
        which recomputes the attention. None: chunked for rows of 1,024 positions or more, and `"xla"` for shorter ones.

    Returns:
      float[B, T, H, K]; values at positions without a token are meaningless.

    References:
      Queries in chunks: Rabe and Staats 2021, "Self-attention Does Not Need O(n²) Memory".
    """
    seq_length = query.shape[1]
    implementation = implementation or _chosen_for(seq_length)
    if implementation != "chunked":
        mask_BxTxT = segment_mask(segment_ids, segment_ids, causal=causal)
        return attend_by_mask(query, key, value, mask_BxTxT, implementation)
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
        mask_BxQxT = segment_mask(segments_BxQ, segment_ids, causal=causal, first_query=first_query)
        return attend_by_mask(query_BxQxHxK, key.astype(query.dtype), value.astype(query.dtype), mask_BxQxT)

    first_queries = jnp.arange(num_chunks) * _CHUNK
    attended = jax.lax.map(one_chunk, (in_chunks(query), in_chunks(segment_ids), first_queries))
    return jnp.moveaxis(attended, 0, 1).reshape(query.shape[0], -1, *query.shape[2:])[:, :seq_length]


def _chosen_for(seq_length: int) -> Literal["xla", "chunked"]:
    return "chunked" if seq_length >= _LONG else "xla"


def attend_by_mask(
    query: Float[Array, "B Q H K"],
    key: Float[Array, "B T N K"],
    value: Float[Array, "B T N K"],
    mask: Bool[Array, "B Q T"],
    implementation: Literal["xla", "cudnn"] | None = None,
) -> Float[Array, "B Q H K"]:
    """Attention of some queries to keys that a mask allows.

    Args:
      query: float[B, Q, H, K].
      key: float[B, T, N, K], as in `attend`.
      value: float[B, T, N, K].
      mask: bool[B, Q, T], whether a query sees a key; each sees at least one.
      implementation: of `jax.nn.dot_product_attention`; None leaves it to JAX.

    Returns:
      float[B, Q, H, K].
    """
    mask = mask[:, None]
    if query.dtype != jnp.float64:
        return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation=implementation)
    # The same in float64, whose softmax `jax.nn.dot_product_attention` takes in float32.
    num_heads, num_kv_heads = query.shape[2], key.shape[2]
    if num_heads % num_kv_heads:
        raise UserError(f"{num_heads} heads of queries must be a multiple of the {num_kv_heads} of keys and values")
    query_BxQxNxGxK = query.reshape(*query.shape[:2], num_kv_heads, -1, query.shape[3])
    logits_BxNxGxQxT = jnp.einsum("BQNGK,BTNK->BNGQT", query_BxQxNxGxK, key) / jnp.sqrt(query.shape[3])
    logits_BxNxGxQxT = jnp.where(mask[:, None], logits_BxNxGxQxT, jnp.finfo(query.dtype).min)
    weights_BxNxGxQxT = jax.nn.softmax(logits_BxNxGxQxT, axis=-1)
    return jnp.einsum("BNGQT,BTNK->BQNGK", weights_BxNxGxQxT, value).reshape(query.shape)
