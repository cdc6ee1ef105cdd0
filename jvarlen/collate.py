"""Collation: in go the samples of one step, out comes a `Batch` of host arrays in the shape of a bucket.

Letters: M microbatches, B rows, T positions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int64

from jvarlen.buckets import Bucket
from jvarlen.lengths import list_offenders

__all__ = ["Batch", "StepSamples", "pad_to_bucket", "token_batch_spec"]

_INT32 = np.iinfo(np.int32)


class Batch(NamedTuple):
    """One step's arrays: a pytree.

    Attributes:
      tokens: int32[M, B, T], zero where there is no token.
      lengths: int32[M, B], tokens a row; 0 marks a dummy row.
      weights: float32[M, B, T], 1 on tokens and 0 elsewhere.
      num_sequences: float32[], real samples in the whole step.
    """

    tokens: Any
    lengths: Any
    weights: Any
    num_sequences: Any


class StepSamples(NamedTuple):
    """What a collate function gets: the samples of one step, as the dataset gave them.

    Attributes:
      bucket: the shape to fill.
      ids: int64[M, B], the sample of every row; −1 for a dummy row. Dummy rows are the last of their microbatch.
      samples: M lists of the samples of the real rows, in the order of `ids`.
      num_tokens: real tokens that were planned for the step, cut samples counted as cut.
      truncate: whether the plan cuts samples that are longer than the bucket.
    """

    bucket: Bucket
    ids: Int64[np.ndarray, "M B"]
    samples: list[list[Any]]
    num_tokens: int
    truncate: bool


def pad_to_bucket(step: StepSamples) -> Batch:
    """Pads the samples of a step with zeros to the shape of its bucket.

    Args:
      step: its samples are 1-D integer arrays whose tokens fit int32.

    Returns:
      A `Batch` of NumPy arrays.

    Raises:
      ValueError: a sample is not 1-D integers; it is longer than the bucket, and the plan does not cut; or the lengths
        of the samples are not those that were planned. The samples are named.
    """
    num_rows, max_length = step.bucket
    samples = [np.asarray(sample) for microbatch in step.samples for sample in microbatch]
    ids = step.ids[step.ids >= 0]  # in the order of `samples`: microbatch by microbatch
    _check_tokens(ids, samples)
    if step.truncate:
        samples = [sample[:max_length] for sample in samples]
    lengths = np.fromiter(map(len, samples), np.int32, len(samples))
    too_long = lengths > max_length
    if too_long.any():
        raise ValueError(
            f"samples longer than their bucket: {list_offenders(ids[too_long], lengths[too_long], max_length)}"
        )
    if lengths.sum() != step.num_tokens:
        raise ValueError(
            f"the samples of a step hold {lengths.sum():,} tokens, but {step.num_tokens:,} were planned; this dataset "
            f"is not the one whose lengths were planned: {list_offenders(ids, lengths)}"
        )
    joined = np.concatenate(samples)
    if joined.min() < _INT32.min or joined.max() > _INT32.max:
        raise ValueError(f"tokens must fit int32; those of a step reach from {joined.min()} to {joined.max()}")
    lengths_MxB = np.zeros((len(step.samples), num_rows), np.int32)
    lengths_MxB[step.ids >= 0] = lengths
    is_token_MxBxT = np.arange(max_length, dtype=np.int32) < lengths_MxB[..., None]
    tokens_MxBxT = np.zeros(is_token_MxBxT.shape, np.int32)
    tokens_MxBxT[is_token_MxBxT] = joined
    return Batch(tokens_MxBxT, lengths_MxB, is_token_MxBxT.astype(np.float32), np.float32(len(samples)))


def _check_tokens(ids: Int64[np.ndarray, " n"], samples: list[np.ndarray]) -> None:
    wrong = [
        f"id {i}: {sample.ndim}-D {sample.dtype}"
        for i, sample in zip(ids.tolist(), samples, strict=True)
        if sample.ndim != 1 or not np.issubdtype(sample.dtype, np.integer)
    ]
    if wrong:
        raise ValueError(f"samples must be 1-D arrays of integer tokens: {', '.join(wrong[:5])}")


def token_batch_spec(bucket: Bucket, microbatches_per_step: int) -> Batch:
    """The shapes and dtypes of what `pad_to_bucket` makes.

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
