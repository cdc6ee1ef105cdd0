"""Inputs, targets and weights of a loss that predicts the next token."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvarlen._common.checks import UserError, check_at_least_zero, if_given
from jvarlen.batches.batches import Batch, PackedBatch, PackedPairBatch, PairBatch, arrays_by_name

__all__ = ["next_token_targets"]


def next_token_targets(
    microbatch: Batch | PackedBatch | PairBatch | PackedPairBatch | dict[str, Any], *, begin_token: int | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The input of each position, the token that it predicts, and the loss weight of that token.

    Input and target always belong to the same sample, in padded and in packed rows. Of pairs, they are target tokens.
    All three have the shape of the tokens, so that `segment_ids`, `positions` and `lengths` go with the inputs as they
    are. A target has the weight of its own token.

    The first token of a sample is no target, so that a sample of l tokens has l − 1, unless a `begin_token` is put
    before it: then a sample has l targets. A sample is what a segment holds: of a sample cut at the end of a row, each
    chunk is one.

    Call it on whole rows. If the positions of rows are spread over a mesh axis, take this device's of the results:
    `targets[:, axes.positions]`.

    Args:
      microbatch: tokens int[..., T], such as the [B, T] of a microbatch or the [M, B, T] of a batch. Of named fields,
        those called `tokens`.
      begin_token: the input at the first position of every sample; None: inputs are the tokens themselves.

    Returns:
      Inputs int[..., T], targets int[..., T] and weights float[..., T]. Weights are 0 where there is no target; the
      targets there are any tokens of the row.

    Raises:
      ValueError: a batch of another type, or a `begin_token` that is not an integer of at least 0.

    Example:
      >>> tokens, lengths, ids = np.array([[5, 6, 7, 0]]), np.array([3]), np.array([0])
      >>> microbatch = Batch(tokens, lengths, np.array([[1.0, 1.0, 1.0, 0.0]]), np.float32(1), ids, ids >= 0)
      >>> for array in next_token_targets(microbatch):
      ...     print(array.tolist())
      [[5, 6, 7, 0]]
      [[6, 7, 0, 5]]
      [[1.0, 1.0, 0.0, 0.0]]
      >>> for array in next_token_targets(microbatch, begin_token=9):
      ...     print(array.tolist())
      [[9, 5, 6, 7]]
      [[5, 6, 7, 0]]
      [[1.0, 1.0, 1.0, 0.0]]
    """
    held = arrays_by_name(microbatch)
    arrays = {name.removeprefix("target_"): array for name, array in (held or {}).items()}
    if "tokens" not in arrays:
        raise UserError(
            "next_token_targets takes a Batch, PackedBatch, PairBatch or PackedPairBatch of jvarlen.batches, or "
            f"a batch of named fields with tokens, not a {type(microbatch).__name__}"
        )
    check_at_least_zero(**if_given(begin_token=begin_token))
    tokens, weights = jnp.asarray(arrays["tokens"]), jnp.asarray(arrays["weights"])
    is_first = jnp.arange(tokens.shape[-1]) == 0
    if "segment_ids" in arrays:  # a token goes on with its sample if the one before it has the place before in the same
        segments, positions = arrays["segment_ids"], arrays["positions"]
        is_first |= (segments != jnp.roll(segments, 1, axis=-1)) | (positions != jnp.roll(positions, 1, axis=-1) + 1)
    if begin_token is None:
        return tokens, jnp.roll(tokens, -1, axis=-1), jnp.roll(jnp.where(is_first, 0, weights), -1, axis=-1)
    # As an array: a Python number would take the type of the tokens, and could wrap around in it.
    begin = np.int32(begin_token)
    return jnp.where(is_first, begin, jnp.roll(tokens, 1, axis=-1)), tokens, weights
