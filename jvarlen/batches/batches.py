"""Batch types, their shapes for a bucket, and their token counts.

Letters: M microbatches, B rows, P samples of a row, T positions, S and U positions of source and target.
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
    "mark_padding_rows",
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
      ids: int32[M, B], the sample of each row; −1: a padding row.
      is_real: bool[M, B], whether a row holds a sample.
    """

    tokens: Any
    lengths: Any
    weights: Any
    num_sequences: Any
    ids: Any
    is_real: Any


class PackedBatch(NamedTuple):
    """The arrays of one step whose rows hold several samples, a pytree.

    Attributes:
      tokens: int32[M, B, T], zero where there is no token.
      segment_ids: int32[M, B, T], the sample of each token: 1, 2, … within its row, 0 where there is no token.
      positions: int32[M, B, T], the place of each token in its own sample, from 0.
      weights: float32[M, B, T], the loss weights of tokens, 1 unless the samples have their own; 0 elsewhere.
      num_sequences: float32[], real samples in the whole step.
      ids: int32[M, B, P], the samples of each row, of which entry p has the number p + 1 in it; −1: none. P is
        `samples_per_row` of the plan.
      is_real: bool[M, B, P], which of them there are.
    """

    tokens: Any
    segment_ids: Any
    positions: Any
    weights: Any
    num_sequences: Any
    ids: Any
    is_real: Any


class PairBatch(NamedTuple):
    """The arrays of one step of pairs, a pytree.

    Attributes:
      source_tokens: int32[M, B, S], zero where there is no token.
      source_lengths: int32[M, B], 0 for a padding row.
      target_tokens: int32[M, B, U].
      target_lengths: int32[M, B].
      weights: float32[M, B, U], the loss weights of target tokens, 1 unless the targets have their own; 0 elsewhere.
      num_sequences: float32[], real pairs in the whole step.
      ids: int32[M, B], the pair of each row; −1: a padding row.
      is_real: bool[M, B], whether a row holds a pair.
    """

    source_tokens: Any
    source_lengths: Any
    target_tokens: Any
    target_lengths: Any
    weights: Any
    num_sequences: Any
    ids: Any
    is_real: Any


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
      ids: int32[M, B, P], the pairs of each row, of which entry p has the number p + 1 in it; −1: none. P is
        `samples_per_row` of the plan.
      is_real: bool[M, B, P], which of them there are.
    """

    source_tokens: Any
    source_segment_ids: Any
    source_positions: Any
    target_tokens: Any
    target_segment_ids: Any
    target_positions: Any
    weights: Any
    num_sequences: Any
    ids: Any
    is_real: Any


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
    return Batch(_integers(shape_MxBxT), _integers(shape_MxB), _floats(shape_MxBxT), *_of_samples(shape_MxB))


def packed_batch_spec(bucket: Bucket, microbatches_per_step: int, samples_per_row: int) -> PackedBatch:
    """The shapes and dtypes of the batches of `pack_to_bucket`; `BatchShapes.of_plan` knows those of a plan.

    Args:
      bucket: the shape.
      microbatches_per_step: M.
      samples_per_row: P, as the plan has it for the bucket.

    Returns:
      A `PackedBatch` of `jax.ShapeDtypeStruct`.
    """
    shape_MxBxT = (microbatches_per_step, bucket.rows, bucket.length)
    integers = _integers(shape_MxBxT)
    of_samples = _of_samples((*shape_MxBxT[:2], samples_per_row))
    return PackedBatch(integers, integers, integers, _floats(shape_MxBxT), *of_samples)


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
    of_samples = _of_samples(shape_MxB)
    return PairBatch(
        _integers(shape_MxBxS), lengths, _integers(shape_MxBxU), lengths, _floats(shape_MxBxU), *of_samples
    )


def packed_pair_batch_spec(bucket: PairBucket, microbatches_per_step: int, samples_per_row: int) -> PackedPairBatch:
    """The shapes and dtypes of the batches of `pack_pairs_to_bucket`; `BatchShapes.of_plan` knows those of a plan.

    Args:
      bucket: the shape.
      microbatches_per_step: M.
      samples_per_row: P, as the plan has it for the bucket.

    Returns:
      A `PackedPairBatch` of `jax.ShapeDtypeStruct`.
    """
    shape_MxBxS, shape_MxBxU = ((microbatches_per_step, bucket.rows, length) for length in bucket.lengths)
    source, target = _integers(shape_MxBxS), _integers(shape_MxBxU)
    of_samples = _of_samples((*shape_MxBxU[:2], samples_per_row))
    return PackedPairBatch(source, source, source, target, target, target, _floats(shape_MxBxU), *of_samples)


def _integers(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.int32)


def _floats(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)


def _of_samples(shape: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """How many samples there are, their ids, and which are real."""
    return _floats(()), _integers(shape), jax.ShapeDtypeStruct(shape, np.bool)


def mark_padding_rows(batch: Any) -> Any:
    """The batch, or anything else, with the id −1 where its `is_real` is false, as in rows of zeros that were added."""
    arrays = batch._asdict() if isinstance(batch, Batch | PackedBatch | PairBatch | PackedPairBatch) else batch
    if not isinstance(arrays, dict) or not {"ids", "is_real"} <= arrays.keys():
        return batch
    ids = np.where(arrays["is_real"], arrays["ids"], arrays["ids"].dtype.type(-1))
    return {**batch, "ids": ids} if arrays is batch else batch._replace(ids=ids)


def count_tokens(batch: Any, dtype: Any = jnp.float32) -> jax.Array | None:
    """Real tokens of a batch or of a microbatch.

    Args:
      batch: a `Batch`, `PackedBatch`, `PairBatch` or `PackedPairBatch`, or a microbatch; traced or not.
      dtype: of the result.

    Returns:
      float[], exact up to 2²⁴ tokens in float32; None for other types.

    Example:
      >>> lengths = np.array([[3, 0]])
      >>> float(count_tokens(Batch(None, lengths, None, np.float32(1), None, None)))
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
    num_rows = int(np.prod(batch.weights.shape[:2]))  # of packed rows, each is one sample
    ids = np.full(batch.ids.shape, -1, np.int32)
    ids.reshape(num_rows, -1)[:, 0] = np.arange(num_rows)
    full: dict[str, Any] = {"num_sequences": np.float32(num_rows), "ids": ids, "is_real": ids >= 0}
    for name, array in batch._asdict().items():
        if name.endswith(("lengths", "positions")):
            side = name.removesuffix("lengths").removesuffix("positions")
            length = getattr(batch, f"{side}tokens").shape[2]
            values = length if name.endswith("lengths") else np.arange(length)
            full[name] = np.broadcast_to(np.asarray(values, np.int32), array.shape)
    return batch._replace(**full)
