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
    shape_MxB = (microbatches_per_step, bucket.rows)
    shape_MxBxT = (*shape_MxB, bucket.length)
    return Batch(_integers(shape_MxBxT), _integers(shape_MxB), _floats(shape_MxBxT), _floats(()))


def packed_batch_spec(bucket: Bucket, microbatches_per_step: int) -> PackedBatch:
    """The shapes and dtypes of the batches of `pack_to_bucket`.

    Args:
      bucket: the shape.
      microbatches_per_step: M.

    Returns:
      A `PackedBatch` of `jax.ShapeDtypeStruct`.
    """
    shape_MxBxT = (microbatches_per_step, bucket.rows, bucket.length)
    integers = _integers(shape_MxBxT)
    return PackedBatch(integers, integers, integers, _floats(shape_MxBxT), _floats(()))


def pair_batch_spec(bucket: PairBucket, microbatches_per_step: int) -> PairBatch:
    """The shapes and dtypes of the batches of `pad_pairs_to_bucket`.

    Args:
      bucket: the shape.
      microbatches_per_step: M.

    Returns:
      A `PairBatch` of `jax.ShapeDtypeStruct`.
    """
    shape_MxB = (microbatches_per_step, bucket.rows)
    shape_MxBxS, shape_MxBxU = ((*shape_MxB, length) for length in bucket.lengths)
    lengths = _integers(shape_MxB)
    return PairBatch(
        _integers(shape_MxBxS), lengths, _integers(shape_MxBxU), lengths, _floats(shape_MxBxU), _floats(())
    )


def packed_pair_batch_spec(bucket: PairBucket, microbatches_per_step: int) -> PackedPairBatch:
    """The shapes and dtypes of the batches of `pack_pairs_to_bucket`.

    Args:
      bucket: the shape.
      microbatches_per_step: M.

    Returns:
      A `PackedPairBatch` of `jax.ShapeDtypeStruct`.
    """
    shape_MxBxS, shape_MxBxU = ((microbatches_per_step, bucket.rows, length) for length in bucket.lengths)
    source, target = _integers(shape_MxBxS), _integers(shape_MxBxU)
    return PackedPairBatch(source, source, source, target, target, target, _floats(shape_MxBxU), _floats(()))


def _integers(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.int32)


def _floats(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)


def count_tokens(batch: Any, dtype: Any = jnp.float32) -> jax.Array | None:
    """Real tokens of a batch or of a microbatch.

    Args:
      batch: a `Batch`, `PackedBatch`, `PairBatch` or `PackedPairBatch`, or a microbatch; traced or not.
      dtype: of the result.

    Returns:
      float[], exact up to 2²⁴ tokens in float32; None for other types.

    Example:
      >>> lengths = np.array([[3, 0]])
      >>> float(count_tokens(Batch(None, lengths, None, np.float32(1))))
      3.0
    """
    if not isinstance(batch, Batch | PackedBatch | PairBatch | PackedPairBatch):
        return None
    arrays = batch._asdict()
    counted = [array for name, array in arrays.items() if name.endswith("lengths")]
    counted += [array > 0 for name, array in arrays.items() if name.endswith("segment_ids")]
    return jnp.asarray(sum(jnp.sum(array) for array in counted), dtype)


def full_batch(spec: Any) -> Any:
    """A batch without padding, for measuring a step.

    Args:
      spec: a batch of `jax.ShapeDtypeStruct`, as `token_batch_spec` gives it; or another pytree of them.

    Returns:
      A pytree of NumPy arrays: the lengths and positions of full rows, typed keys, and otherwise ones.
    """
    batch = jax.tree.map(lambda leaf: zeros_of(leaf) if is_key(leaf) else np.ones(leaf.shape, leaf.dtype), spec)
    if not isinstance(batch, Batch | PackedBatch | PairBatch | PackedPairBatch):
        return batch
    full: dict[str, Any] = {
        "num_sequences": np.prod(batch.weights.shape[:2], dtype=np.float32)
    }  # of packed rows, each is one sample
    for name, array in batch._asdict().items():
        if name.endswith(("lengths", "positions")):
            side = name.removesuffix("lengths").removesuffix("positions")
            length = getattr(batch, f"{side}tokens").shape[2]
            values = length if name.endswith("lengths") else np.arange(length)
            full[name] = np.broadcast_to(np.asarray(values, np.int32), array.shape)
    return batch._replace(**full)
