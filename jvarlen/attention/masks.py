"""Masks: which positions hold tokens, and which positions each may attend to.

Letters: B rows, T positions, Q queries.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Integer

from jvarlen._common.checks import UserError

__all__ = ["padding_mask", "segment_mask", "window_in_force"]


def window_in_force(window: Any, seq_length: int, *, causal: bool = True) -> Any:
    """The window of rows of this length: None if it hides nothing, an int, or an array of at least 1."""
    window = int(window) if isinstance(window, np.integer) else window
    if window is None or (isinstance(window, int) and not 0 < window < seq_length):
        return None
    if not causal:
        raise UserError("a window is for causal attention: leave window= out, or causal=False")
    return window if isinstance(window, int) else jnp.where(window > 0, window, jnp.int32(seq_length)).astype(jnp.int32)


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


def segment_mask(
    query_segments: Integer[Array, "B Q"],
    key_segments: Integer[Array, "B T"],
    *,
    causal: bool = True,
    window: int | Integer[Array, ""] | None = None,
) -> Bool[Array, "B Q T"]:
    """Which positions (last axis) the queries (middle axis) of packed rows may attend to: those of their own sample.

    `mask[:, None]` has the axis of heads that `jax.nn.dot_product_attention` expects. Of padded rows,
    `padding_mask(lengths, seq_length).astype(int)` are segments.

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
    distance_QxT = jnp.arange(query_segments.shape[1])[:, None] - jnp.arange(key_segments.shape[1])
    is_before_QxT = (distance_QxT >= 0) if window is None else (distance_QxT >= 0) & (distance_QxT < window)
    return is_same_BxQxT & is_before_QxT
