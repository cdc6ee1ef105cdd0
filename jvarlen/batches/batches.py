"""Batch types, their shapes for a bucket, and their token counts.

Letters: M microbatches, B rows, T positions, S and U positions of source and target.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jvarlen._common.pytree import is_key, zeros_of
from jvarlen.planning.buckets import Bucket, PairBucket

__all__ = [
    "Batch",
    "PackedBatch",
    "PackedPairBatch",
    "PairBatch",
    "count_tokens",
    "full_batch",
    "packed_batch_spec",
    "packed_pair_batch_spec",
    "pair_batch_spec",
    "token_batch_spec",
]


class Batch(NamedTuple):
    """The arrays of one step, a pytree.

    Attributes:
      tokens: int32[M, B, T], zero where there is no token.
      lengths: int32[M, B], tokens a row; 0 marks a padding row.
      weights: float32[M, B, T], the loss weights of tokens, 1 unless the samples have their own; 0 elsewhere.
      num_sequences: float32[], real samples in the whole step.
    """

    tokens: Any
    lengths: Any
    weights: Any
    num_sequences: Any


class PackedBatch(NamedTuple):
    """The arrays of one step whose rows hold several samples, a pytree.

    Attributes:
      tokens: int32[M, B, T], zero where there is no token.
      segment_ids: int32[M, B, T], the sample of each token: 1, 2, … within its row, 0 where there is no token.
      positions: int32[M, B, T], the place of each token in its own sample, from 0.
      weights: float32[M, B, T], the loss weights of tokens, 1 unless the samples have their own; 0 elsewhere.
      num_sequences: float32[], real samples in the whole step.
    """

    tokens: Any
    segment_ids: Any
    positions: Any
    weights: Any
    num_sequences: Any


class PairBatch(NamedTuple):
    """The arrays of one step of pairs, a pytree.

    Attributes:
      source_tokens: int32[M, B, S], zero where there is no token.
      source_lengths: int32[M, B], 0 for a padding row.
      target_tokens: int32[M, B, U].
      target_lengths: int32[M, B].
      weights: float32[M, B, U], the loss weights of target tokens, 1 unless the targets have their own; 0 elsewhere.
      num_sequences: float32[], real pairs in the whole step.
    """

    source_tokens: Any
    source_lengths: Any
    target_tokens: Any
    target_lengths: Any
    weights: Any
    num_sequences: Any


class PackedPairBatch(NamedTuple):
    """The arrays of one step whose rows hold several pairs, a pytree.

    `segment_mask(target_segment_ids, source_segment_ids, causal=False)` is the mask of cross-attention.

    Attributes:
      source_tokens: int32[M, B, S], zero where there is no token.
      source_segment_ids: int32[M, B, S], the pair of each token: 1, 2, … within its row, 0 where there is no token.
      source_positions: int32[M, B, S], the place of each token in its own source, from 0.
      target_tokens: int32[M, B, U].
      target_segment_ids: int32[M, B, U], with the same number as the source of the pair.
      target_positions: int32[M, B, U].
      weights: float32[M, B, U], the loss weights of target tokens, 1 unless the targets have their own; 0 elsewhere.
      num_sequences: float32[], real pairs in the whole step.
    """

    source_tokens: Any
    source_segment_ids: Any
    source_positions: Any
    target_tokens: Any
    target_segment_ids: Any
    target_positions: Any
    weights: Any
    num_sequences: Any


def token_batch_spec(bucket: Bucket, microbatches_per_step: int) -> Batch:
    """The shapes and dtypes of the batches of `pad_to_bucket`.

    Args:
      bucket: the shape.
      microbatches_per_step: M.

    Returns:
      A `Batch` of `jax.ShapeDtypeStruct`.
    """
    shape_MxBxT = (microbatches_per_step, bucket.rows, bucket.length)
    return Batch(
        tokens=jax.ShapeDtypeStruct(shape_MxBxT, np.int32),
        lengths=jax.ShapeDtypeStruct(shape_MxBxT[:2], np.int32),
        weights=jax.ShapeDtypeStruct(shape_MxBxT, np.float32),
        num_sequences=jax.ShapeDtypeStruct((), np.float32),
    )


def packed_batch_spec(bucket: Bucket, microbatches_per_step: int) -> PackedBatch:
    """The shapes and dtypes of the batches of `pack_to_bucket`.

    Args:
      bucket: the shape.
      microbatches_per_step: M.

    Returns:
      A `PackedBatch` of `jax.ShapeDtypeStruct`.
    """
    shape_MxBxT = (microbatches_per_step, bucket.rows, bucket.length)
    integers = jax.ShapeDtypeStruct(shape_MxBxT, np.int32)
    weights = jax.ShapeDtypeStruct(shape_MxBxT, np.float32)
    return PackedBatch(integers, integers, integers, weights, jax.ShapeDtypeStruct((), np.float32))


def pair_batch_spec(bucket: PairBucket, microbatches_per_step: int) -> PairBatch:
    """The shapes and dtypes of the batches of `pad_pairs_to_bucket`.

    Args:
      bucket: the shape.
      microbatches_per_step: M.

    Returns:
      A `PairBatch` of `jax.ShapeDtypeStruct`.
    """
    shape_MxB = (microbatches_per_step, bucket.rows)
    lengths = jax.ShapeDtypeStruct(shape_MxB, np.int32)
    source, target = (jax.ShapeDtypeStruct((*shape_MxB, length), np.int32) for length in bucket.lengths)
    weights = jax.ShapeDtypeStruct(target.shape, np.float32)
    return PairBatch(source, lengths, target, lengths, weights, jax.ShapeDtypeStruct((), np.float32))


def packed_pair_batch_spec(bucket: PairBucket, microbatches_per_step: int) -> PackedPairBatch:
    """The shapes and dtypes of the batches of `pack_pairs_to_bucket`.

    Args:
      bucket: the shape.
      microbatches_per_step: M.

    Returns:
      A `PackedPairBatch` of `jax.ShapeDtypeStruct`.
    """
    source, target = (
        jax.ShapeDtypeStruct((microbatches_per_step, bucket.rows, length), np.int32) for length in bucket.lengths
    )
    weights = jax.ShapeDtypeStruct(target.shape, np.float32)
    num_sequences = jax.ShapeDtypeStruct((), np.float32)
    return PackedPairBatch(source, source, source, target, target, target, weights, num_sequences)


def count_tokens(batch: Any, dtype: Any = jnp.float32) -> jax.Array | None:
    """Real tokens of a batch or of a microbatch.

    Args:
      batch: a `Batch`, `PackedBatch`, `PairBatch` or `PackedPairBatch`; traced or not.
      dtype: of the result; use that of the losses and weights that it is summed together with.

    Returns:
      float[] (exact up to 2²⁴ tokens in float32); None for anything else.

    Example:
      >>> lengths = np.array([[3, 0]])
      >>> float(count_tokens(Batch(None, lengths, None, np.float32(1))))
      3.0
    """
    if isinstance(batch, Batch):
        counted = [batch.lengths]
    elif isinstance(batch, PackedBatch):
        counted = [batch.segment_ids > 0]
    elif isinstance(batch, PairBatch):
        counted = [batch.source_lengths, batch.target_lengths]
    elif isinstance(batch, PackedPairBatch):
        counted = [batch.source_segment_ids > 0, batch.target_segment_ids > 0]
    else:
        return None
    return jnp.asarray(sum(jnp.sum(array) for array in counted), dtype)


def full_batch(spec: Any) -> Any:
    """A batch without padding, for measuring a step.

    Args:
      spec: a batch of `jax.ShapeDtypeStruct`, as `token_batch_spec` gives it; or another pytree of them.

    Returns:
      A pytree of NumPy arrays: the lengths and positions of full rows, typed keys, and otherwise ones.
    """
    batch = jax.tree.map(lambda leaf: zeros_of(leaf) if is_key(leaf) else np.ones(leaf.shape, leaf.dtype), spec)
    if isinstance(batch, Batch | PackedBatch | PairBatch | PackedPairBatch):
        num_rows = np.prod(batch.weights.shape[:2], dtype=np.float32)  # of packed ones, each row is one sample
        batch = batch._replace(num_sequences=num_rows)
    if isinstance(batch, Batch):
        return batch._replace(lengths=batch.lengths * np.int32(batch.tokens.shape[2]))
    if isinstance(batch, PackedBatch):
        return batch._replace(positions=_positions_of_full_rows(batch.tokens))
    if isinstance(batch, PackedPairBatch):
        return batch._replace(
            source_positions=_positions_of_full_rows(batch.source_tokens),
            target_positions=_positions_of_full_rows(batch.target_tokens),
        )
    if isinstance(batch, PairBatch):
        return batch._replace(
            source_lengths=batch.source_lengths * np.int32(batch.source_tokens.shape[2]),
            target_lengths=batch.target_lengths * np.int32(batch.target_tokens.shape[2]),
        )
    return batch


def _positions_of_full_rows(tokens_MxBxT: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.arange(tokens_MxBxT.shape[2], dtype=np.int32), tokens_MxBxT.shape)
