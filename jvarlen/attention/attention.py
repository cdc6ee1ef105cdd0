"""Attention within the samples of padded or packed rows.

Built on `jax.nn.dot_product_attention`. Where possible it is given lengths or segments instead of a B×T×T mask.
Letters: B rows, T positions, Q queries at a time, H query heads, N key/value heads, G = H / N, R = G · Q, K head size.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Integer

from jvarlen._common.checks import UserError
from jvarlen.attention import AttentionImplementation, SegmentAttentionImplementation

__all__ = [
    "attend", "attend_by_mask", "attend_in_chunks", "attend_within_segments", "attention_mask", "chosen_for",
    "padding_mask", "segment_mask", "window_in_force",
]  # fmt: skip

_CHUNK = 256  # the most queries at a time
_MOST_SLICES = 4  # of the keys, for causal queries: more waste less compute and take longer to compile
_SAVED = "products with values"  # what the backward pass does not compute again
_LONG = 1024  # positions from which memory for all of T² is worth saving on other devices than a CPU


def attend(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T N K"],
    value: Float[Array, "B T N K"],
    lengths: Integer[Array, " B"],
    *,
    causal: bool = True,
    window: int | Integer[Array, ""] | None = None,
    implementation: AttentionImplementation | None = None,
) -> Float[Array, "B T H K"]:
    """Attention within rows of one sample each; keys past a row's length are masked.

    Every implementation gives the same outputs at the tokens of a row, and the same gradients.

    Args:
      query: float[B, T, H, K].
      key: float[B, T, N, K]; N divides H, and head h of the queries attends to head h // (H / N).
      value: float[B, T, N, K].
      lengths: int[B] of any integer type, tokens a row; 0 for a padding row.
      causal: whether a position sees only itself and what comes before it.
      window: how many keys a causal query sees at most: its own position and those right before it, as in Mistral. An
        int, or int32[], such as the window of each layer in a scan; None and numbers below 1: all.
      implementation: `"xla"` and `"cudnn"` are those of `jax.nn.dot_product_attention`, which gets the lengths. `"xla"`
        holds the logits of all pairs of positions, `"cudnn"` nothing of size T²; it needs a GPU and 16-bit floats.
        `"mask"` passes the B×T×T mask. `"chunked"` is that of `attend_within_segments`. None: chunked on a CPU and for
        rows of 1,024 positions or more, else `"xla"`.

    Returns:
      float[B, T, H, K]; values past a row's length are meaningless but finite.

    Raises:
      ValueError: heads of queries that are not a multiple of those of keys, or a window of attention that is not
        causal.

    Example:
      >>> values = jnp.arange(3.0).reshape(1, 3, 1, 1)
      >>> zeros = jnp.zeros((1, 3, 1, 1))  # so that each position gets the mean of what it sees
      >>> [attend(zeros, zeros, values, jnp.array([2]), implementation=x).ravel()[:2].tolist() for x in ("xla", "mask")]
      [[0.0, 0.5], [0.0, 0.5]]
    """
    seq_length = query.shape[1]
    implementation = implementation or chosen_for(seq_length)
    window = window_in_force(window, seq_length, causal=causal)
    if implementation == "chunked":
        # Padding comes last, so that what is causal never sees it.
        segment_ids = None if causal else padding_mask(lengths, seq_length).astype(jnp.int32)
        return attend_in_chunks(query, key, value, segment_ids, causal=causal, window=window)
    if window is not None:  # what is padding sees itself, where its window holds no token
        lengths = jnp.full_like(lengths, seq_length, jnp.int32)
    if implementation == "mask" or query.dtype == jnp.float64 or isinstance(window, Array):
        mask_BxTxT = attention_mask(lengths, seq_length, causal=causal, window=window)
        by = None if implementation == "mask" else implementation
        return attend_by_mask(query, key, value, mask_BxTxT, by)
    if window is not None:
        before_and_after = (window - 1, 0)
        return _by_jax(query, key, value, implementation, is_causal=True, local_window_size=before_and_after)
    one_at_least = jnp.maximum(lengths.astype(jnp.int32), 1)  # what sees nothing must be finite in any implementation
    return _by_jax(query, key, value, implementation, is_causal=causal, key_value_seq_lengths=one_at_least)


def attend_within_segments(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T N K"],
    value: Float[Array, "B T N K"],
    segment_ids: Integer[Array, "B T"],
    *,
    causal: bool = True,
    window: int | Integer[Array, ""] | None = None,
    implementation: SegmentAttentionImplementation | None = None,
) -> Float[Array, "B T H K"]:
    """Attention within the samples of packed rows; no position sees another sample.

    Args:
      query: float[B, T, H, K].
      key: float[B, T, N, K], as in `attend`.
      value: float[B, T, N, K].
      segment_ids: int[B, T] of any integer type, the sample of each position; 0 where there is no token.
      causal: whether a position sees only itself and what comes before it.
      window: how many keys a causal query sees at most, as in `attend`.
      implementation: `"xla"` and `"cudnn"` are those of `jax.nn.dot_product_attention`, with a B×T×T mask. `"chunked"`
        computes some queries at a time, on any device: memory grows with T instead of T², also in the backward pass,
        which recomputes the attention. None: as in `attend`.

    Returns:
      float[B, T, H, K]; values at positions without a token are meaningless.

    Raises:
      ValueError: as `attend`.

    References:
      Queries in chunks: Rabe and Staats 2021, "Self-attention Does Not Need O(n²) Memory".
    """
    seq_length = query.shape[1]
    implementation = implementation or chosen_for(seq_length)
    if implementation != "chunked":
        mask_BxTxT = segment_mask(segment_ids, segment_ids, causal=causal, window=window)
        return attend_by_mask(query, key, value, mask_BxTxT, implementation)
    return attend_in_chunks(query, key, value, segment_ids, causal=causal, window=window)


def attend_in_chunks(
    query: Float[Array, "B Q H K"],
    key: Float[Array, "B T N K"],
    value: Float[Array, "B T N K"],
    segment_ids: Integer[Array, "B T"] | None,
    *,
    causal: bool,
    window: int | Integer[Array, ""] | None = None,
) -> Float[Array, "B Q H K"]:
    """Attention of the last Q positions, some queries at a time, of which causal ones get only the keys up to them."""
    # A slice of the keys needs a program of its own. There are a few of them at most, each for a run of chunks.
    window = window_in_force(window, key.shape[1], causal=causal)
    num_queries, num_kv_heads = query.shape[1], key.shape[2]
    before = key.shape[1] - num_queries
    _check_heads(query, key)
    half = _CHUNK // 2
    size = min(half * -(-num_queries // _CHUNK), _CHUNK)  # of a chunk: no row is one chunk but a short one
    num_chunks = -(-num_queries // size)
    # After many keys that all queries see, those of a run would save little, and runs take memory side by side.
    run_length = size * -(-num_chunks // _MOST_SLICES) if causal and not before else num_queries
    # In the backward pass the chunks' gradients of keys and values are summed, in float32 at least.
    summed_type = jnp.promote_types(key.dtype, jnp.float32)
    key_BxNxTxK, value_BxNxTxK = (jnp.swapaxes(x, 1, 2).astype(summed_type) for x in (key, value))
    query_BxNxGxTxK = jnp.moveaxis(query.reshape(*query.shape[:2], num_kv_heads, -1, query.shape[3]), 1, 3)

    def attend_run(start: int) -> Array:
        """Of the queries of one run."""
        end = min(start + run_length, num_queries)
        num_keys = before + end if causal else key.shape[1]
        keys, values = key_BxNxTxK[:, :, :num_keys], value_BxNxTxK[:, :, :num_keys]
        key_segments = None if segment_ids is None else segment_ids[:, :num_keys]

        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(_SAVED))
        def one_chunk(first_query: Array | int, query: Array, query_segments: Array | None) -> Array:
            # The heads of a group are more queries: products of matrices, not of more axes.
            places_R = jnp.tile(jnp.arange(query.shape[3]), query.shape[2])
            mask = None
            if causal:
                mask = _is_before((before + first_query + places_R)[:, None], jnp.arange(num_keys), window)[None]
            if query_segments is not None and key_segments is not None:
                mask_BxRxT = segment_mask(query_segments[:, places_R], key_segments, causal=False)
                mask = mask_BxRxT if mask is None else mask & mask_BxRxT
            query_BxNxRxK = query.reshape(*query.shape[:2], -1, query.shape[4])
            attended = _attend_chunk(query_BxNxRxK, keys.astype(query.dtype), values.astype(query.dtype), mask)
            return attended.reshape(query.shape)

        queries = query_BxNxGxTxK[:, :, :, start:end]
        segments = None if segment_ids is None else segment_ids[:, before + start : before + end]
        if end - start <= size:
            return one_chunk(start, queries, segments)
        first_queries = jnp.arange(start, end, size)
        chunks = (first_queries, _split(queries, 3, size), None if segments is None else _split(segments, 1, size))
        # If they did not depend on the queries, JAX would compute all masks, T² of them, before a loop over layers.
        chunks = jax.lax.optimization_barrier(chunks)
        attended = jax.lax.map(lambda chunk: one_chunk(*chunk), chunks)
        return jnp.moveaxis(attended, 0, 3).reshape(*queries.shape[:3], -1, queries.shape[4])[:, :, :, : end - start]

    attended = jnp.concatenate([attend_run(start) for start in range(0, num_queries, run_length)], axis=3)
    return jnp.moveaxis(attended, 3, 1).reshape(query.shape)


def _split(array: Array, axis: int, size: int) -> Array:
    """Chunks of an axis as a new first axis; the last one is filled with zeros."""
    num_chunks = -(-array.shape[axis] // size)
    padding = [(0, 0)] * array.ndim
    padding[axis] = (0, num_chunks * size - array.shape[axis])
    padded = jnp.pad(array, padding)
    return jnp.moveaxis(padded.reshape(*array.shape[:axis], num_chunks, size, *array.shape[axis + 1 :]), axis, 0)


def _attend_chunk(
    query: Float[Array, "B N R K"],
    key: Float[Array, "B N T K"],
    value: Float[Array, "B N T K"],
    mask: Bool[Array, "#B R T"] | None,
) -> Float[Array, "B N R K"]:
    """Softmax in float32 at least; sums are divided after the product with the values, which has fewer numbers."""
    type_of_sums = jnp.promote_types(query.dtype, jnp.float32)
    # Named, it holds in the backward pass as well, where one factor is a gradient in the type of the sums. That of
    # float16, in which nothing here is trained, is not for a CPU.
    precision = jax.lax.DotAlgorithmPreset.BF16_BF16_F32 if query.dtype == jnp.bfloat16 else None
    product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=type_of_sums)
    logits_BxNxRxT = product("BNRK,BNTK->BNRT", query, key)
    logits_BxNxRxT *= query.shape[-1] ** -0.5
    if mask is not None:
        logits_BxNxRxT = jnp.where(mask[:, None], logits_BxNxRxT, jnp.finfo(type_of_sums).min)
    largest_BxNxRx1 = jax.lax.stop_gradient(jnp.max(logits_BxNxRxT, axis=-1, keepdims=True))
    powers_BxNxRxT = jnp.exp(logits_BxNxRxT - largest_BxNxRx1)
    sums_BxNxRx1 = jnp.sum(powers_BxNxRxT, axis=-1, keepdims=True)
    products_BxNxRxK = product("BNRT,BNTK->BNRK", powers_BxNxRxT.astype(value.dtype), value)
    return (checkpoint_name(products_BxNxRxK, _SAVED) / sums_BxNxRx1).astype(query.dtype)


def _by_jax(
    query: Array, key: Array, value: Array, implementation: Literal["xla", "cudnn"] | None, **options: Any
) -> Array:
    """`jax.nn.dot_product_attention`, which multiplies float16 on GPUs alone."""
    dtype = query.dtype
    if dtype == jnp.float16 and implementation != "cudnn":
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    attended = jax.nn.dot_product_attention(query, key, value, implementation=implementation, **options)
    return attended.astype(dtype)


def _check_heads(query: Array, key: Array) -> None:
    if query.shape[2] % key.shape[2]:
        raise UserError(
            f"{query.shape[2]} heads of queries must be a multiple of the {key.shape[2]} of keys and values"
        )


def chosen_for(seq_length: int) -> Literal["xla", "chunked"]:
    """The implementation for rows of this length."""
    return "chunked" if seq_length >= _LONG or jax.default_backend() == "cpu" else "xla"


def attend_by_mask(
    query: Float[Array, "B Q H K"],
    key: Float[Array, "B T N K"],
    value: Float[Array, "B T N K"],
    mask: Bool[Array, "B Q T"],
    implementation: Literal["xla", "cudnn"] | None = None,
) -> Float[Array, "B Q H K"]:
    """Attention of some queries to keys that a mask allows; each query sees one at least."""
    mask = mask[:, None]
    if query.dtype != jnp.float64:
        return _by_jax(query, key, value, implementation, mask=mask)
    # The same in float64, whose softmax `jax.nn.dot_product_attention` takes in float32.
    _check_heads(query, key)
    query_BxQxNxGxK = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[3])
    logits_BxNxGxQxT = jnp.einsum("BQNGK,BTNK->BNGQT", query_BxQxNxGxK, key) / jnp.sqrt(query.shape[3])
    logits_BxNxGxQxT = jnp.where(mask[:, None], logits_BxNxGxQxT, jnp.finfo(query.dtype).min)
    weights_BxNxGxQxT = jax.nn.softmax(logits_BxNxGxQxT, axis=-1)
    return jnp.einsum("BNGQT,BTNK->BQNGK", weights_BxNxGxQxT, value).reshape(query.shape)


def window_in_force(window: Any, seq_length: int, *, causal: bool = True) -> Any:
    """The window of rows of this length: None if it hides nothing, an int, or an array of at least 1."""
    if window is None or (isinstance(window, int) and not 0 < window < seq_length):
        return None
    if not causal:
        raise UserError("a window is for causal attention: leave window= out, or causal=False")
    return window if isinstance(window, int) else jnp.where(window > 0, window, seq_length)


def _is_before(queries: Array, keys: Array, window: Any) -> Array:
    """Whether queries at these positions see keys at those; the window is one in force."""
    return (queries >= keys) if window is None else (queries >= keys) & (queries - keys < window)


def padding_mask(lengths: Integer[Array, " B"], seq_length: int) -> Bool[Array, "B T"]:
    """Which positions hold tokens.

    Args:
      lengths: int[B] of any integer type, tokens a row; 0 for a padding row.
      seq_length: T.

    Returns:
      bool[B, T], True on tokens.

    Example:
      >>> padding_mask(jnp.array([2, 0]), 3).tolist()
      [[True, True, False], [False, False, False]]
    """
    return jnp.arange(seq_length) < lengths[:, None]


def attention_mask(
    lengths: Integer[Array, " B"],
    seq_length: int,
    *,
    causal: bool = True,
    window: int | Integer[Array, ""] | None = None,
) -> Bool[Array, "B T T"]:
    """Which positions (last axis) each position (middle axis) may attend to.

    Args:
      lengths: int[B] of any integer type, tokens a row; 0 for a padding row.
      seq_length: T.
      causal: whether a position sees only itself and what comes before it.
      window: how many keys a causal query sees at most, as in `attend`.

    Returns:
      bool[B, T, T]; `mask[:, None]` adds the axis of heads that `jax.nn.dot_product_attention` expects, B×H×T×T.

    Example:
      >>> attention_mask(jnp.array([2]), 3).astype(int).tolist()
      [[[1, 0, 0], [1, 1, 0], [1, 1, 0]]]
    """
    is_key_BxTxT = jnp.broadcast_to(padding_mask(lengths, seq_length)[:, None], (len(lengths), seq_length, seq_length))
    window = window_in_force(window, seq_length, causal=causal)
    positions = jnp.arange(seq_length)
    return is_key_BxTxT & _is_before(positions[:, None], positions, window) if causal else is_key_BxTxT


def segment_mask(
    query_segments: Integer[Array, "B Q"],
    key_segments: Integer[Array, "B T"],
    *,
    causal: bool = True,
    window: int | Integer[Array, ""] | None = None,
) -> Bool[Array, "B Q T"]:
    """Which positions (last axis) the queries (middle axis) of packed rows may attend to: those of their own sample.

    Args:
      query_segments: int[B, Q] of any integer type, the segments of the first, or without `causal` of any, positions.
      key_segments: int[B, T], likewise, the segments of all positions.
      causal: whether a position sees only itself and what comes before it.
      window: how many keys a causal query sees at most, as in `attend`.

    Returns:
      bool[B, Q, T].

    Example:
      >>> segments = jnp.array([[1, 1, 2, 0]])
      >>> segment_mask(segments, segments).astype(int).tolist()
      [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]]
    """
    is_same_BxQxT = query_segments[:, :, None] == key_segments[:, None, :]
    window = window_in_force(window, key_segments.shape[1], causal=causal)
    if not causal:
        return is_same_BxQxT
    places_T = jnp.arange(key_segments.shape[1])
    return is_same_BxQxT & _is_before(places_T[: query_segments.shape[1], None], places_T, window)
