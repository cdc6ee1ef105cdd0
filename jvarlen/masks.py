"""Masks: in go the lengths of rows, out come boolean masks; True marks what takes part.

The B×T×T mask costs memory that grows with T². `jax.nn.dot_product_attention` says the same with
`key_value_seq_lengths=lengths` and `is_causal=True`, which the models here use. Letters: B rows, T positions.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

__all__ = ["attention_mask", "padding_mask"]


def padding_mask(lengths: Int[Array, " B"], seq_length: int) -> Bool[Array, "B T"]:
    """Which positions hold tokens.

    Args:
      lengths: int[B], tokens a row; 0 for a dummy row.
      seq_length: T.

    Returns:
      bool[B, T], True on tokens.

    Example:
      >>> padding_mask(jnp.array([2, 0]), 3).tolist()
      [[True, True, False], [False, False, False]]
    """
    return jnp.arange(seq_length) < lengths[:, None]


def attention_mask(lengths: Int[Array, " B"], seq_length: int, *, causal: bool = True) -> Bool[Array, "B T T"]:
    """Which positions (last axis) each position (middle axis) may attend to.

    Args:
      lengths: int[B], tokens a row; 0 for a dummy row.
      seq_length: T.
      causal: whether a position sees only itself and what comes before it.

    Returns:
      bool[B, T, T]; add an axis for the heads, `mask[:, None]`, where `jax.nn.dot_product_attention` wants B×H×T×T.

    Example:
      >>> attention_mask(jnp.array([2]), 3).astype(int).tolist()
      [[[1, 0, 0], [1, 1, 0], [1, 1, 0]]]
    """
    is_key_BxTxT = jnp.broadcast_to(padding_mask(lengths, seq_length)[:, None], (len(lengths), seq_length, seq_length))
    return jnp.tril(is_key_BxTxT) if causal else is_key_BxTxT
