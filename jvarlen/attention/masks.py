"""Boolean attention masks from row lengths or segment ids; True marks what takes part.

A B×T×T mask takes memory that grows with T²; `jvarlen.attention` avoids it. Letters: B rows, T positions.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Integer

__all__ = ["attention_mask", "padding_mask", "segment_mask"]


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


def attention_mask(lengths: Integer[Array, " B"], seq_length: int, *, causal: bool = True) -> Bool[Array, "B T T"]:
    """Which positions (last axis) each position (middle axis) may attend to.

    Args:
      lengths: int[B] of any integer type, tokens a row; 0 for a padding row.
      seq_length: T.
      causal: whether a position sees only itself and what comes before it.

    Returns:
      bool[B, T, T]; `mask[:, None]` adds the axis of heads that `jax.nn.dot_product_attention` expects, B×H×T×T.

    Example:
      >>> attention_mask(jnp.array([2]), 3).astype(int).tolist()
      [[[1, 0, 0], [1, 1, 0], [1, 1, 0]]]
    """
    is_key_BxTxT = jnp.broadcast_to(padding_mask(lengths, seq_length)[:, None], (len(lengths), seq_length, seq_length))
    return jnp.tril(is_key_BxTxT) if causal else is_key_BxTxT


def segment_mask(
    query_segments: Integer[Array, "B Q"],
    key_segments: Integer[Array, "B T"],
    *,
    causal: bool = True,
) -> Bool[Array, "B Q T"]:
    """Which positions (last axis) the queries (middle axis) of packed rows may attend to: those of their own sample.

    Args:
      query_segments: int[B, Q] of any integer type, the segments of the first, or without `causal` of any, positions.
      key_segments: int[B, T], likewise, the segments of all positions.
      causal: whether a position sees only itself and what comes before it.

    Returns:
      bool[B, Q, T].

    Example:
      >>> segments = jnp.array([[1, 1, 2, 0]])
      >>> segment_mask(segments, segments).astype(int).tolist()
      [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]]
    """
    is_same_BxQxT = query_segments[:, :, None] == key_segments[:, None, :]
    if not causal:
        return is_same_BxQxT
    return is_same_BxQxT & (jnp.arange(key_segments.shape[1]) <= jnp.arange(query_segments.shape[1])[:, None])
