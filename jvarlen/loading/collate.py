"""Collate functions: the samples of one step as host arrays of a bucket's shape.

Letters: M microbatches, B rows, P samples of a row, T positions, S and U positions of source and target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, Integer

from jvarlen._common.checks import UserError, list_offenders
from jvarlen.batches.batches import Batch, PackedBatch, PackedPairBatch, PairBatch
from jvarlen.planning.buckets import AnyBucket
from jvarlen.planning.samples import WeightedTokens

__all__ = ["StepSamples", "pack_pairs_to_bucket", "pack_to_bucket", "pad_pairs_to_bucket", "pad_to_bucket"]

_INT32 = np.iinfo(np.int32)


class StepSamples(NamedTuple):
    """The input of a collate function: the samples of one step, as the dataset returned them.

    If several processes train together, M counts the microbatches of this process.

    Attributes:
      bucket: the shape to fill.
      ids: int64[M, B], the sample of every row, or int64[M, B, P], the samples of every packed row; −1 for none. Dummy
        rows come last in their microbatch.
      samples: M lists of the samples, in the order of `ids`.
      num_tokens: real tokens that were planned for these rows, truncated samples with their cut length; None if unknown
        for this part of the step.
      truncate: whether the plan truncates samples that are longer than the bucket.
      num_sequences: real samples of the whole step, on all processes.
      starts: int64[M, B, P], the token of its sample with which each piece begins, −1 for none. A piece ends with its
        sample, or is as long as the bucket. None where the plan splits no sample.
    """

    bucket: AnyBucket
    ids: Int64[np.ndarray, "M B *P"]
    samples: list[list[Any]]
    num_tokens: int | None
    truncate: bool
    num_sequences: int
    starts: Int64[np.ndarray, "M B P"] | None = None


def pad_to_bucket(step: StepSamples) -> Batch:
    """Pads the samples of a step with zeros to the shape of its bucket.

    Args:
      step: its samples are 1-D integer arrays whose tokens fit int32, or `WeightedTokens` of such.

    Returns:
      A `Batch` of NumPy arrays.

    Raises:
      ValueError: a sample is not 1-D integers; it is longer than the bucket, and the plan does not truncate; the
        lengths of the samples are not the planned ones; or the plan is packed. The samples are listed.
    """
    _check_kind(step, "pad_to_bucket", num_lengths=1, is_packed=False)
    max_length = step.bucket.lengths[0]
    samples, weights = _cut(step)
    tokens_MxBxT, lengths_MxB, is_token_MxBxT = _padded(step.ids, samples, max_length)
    _check_planned(step, lengths_MxB[step.ids >= 0])
    return Batch(tokens_MxBxT, lengths_MxB, _placed(weights, is_token_MxBxT), np.float32(step.num_sequences))


def pack_to_bucket(step: StepSamples) -> PackedBatch:
    """Concatenates the samples of each packed row, and pads the rows to the shape of the bucket.

    Args:
      step: a step of a packed plan; its samples are 1-D integer arrays whose tokens fit int32, or `WeightedTokens` of
        such.

    Returns:
      A `PackedBatch` of NumPy arrays.

    Raises:
      ValueError: as `pad_to_bucket`; or the plan is not packed.
    """
    _check_kind(step, "pack_to_bucket", num_lengths=1, is_packed=True)
    samples, weights = _cut(step)
    tokens = _checked_tokens(step.ids[step.ids >= 0], samples)
    lengths = np.fromiter(map(len, samples), np.int64, len(samples))
    _check_planned(step, lengths)
    packed = _packed(step.ids, tokens, lengths, step.bucket.lengths[0])
    return PackedBatch(*packed[:3], _placed(weights, packed.is_token), np.float32(step.num_sequences))


def pad_pairs_to_bucket(step: StepSamples) -> PairBatch:
    """Pads both sides of each pair with zeros to the shape of the bucket.

    Args:
      step: a step of a plan of pairs; its samples are (source, target) of 1-D integer arrays whose tokens fit int32. A
        target may also be `WeightedTokens`.

    Returns:
      A `PairBatch` of NumPy arrays.

    Raises:
      ValueError: as `pad_to_bucket`.
    """
    _check_kind(step, "pad_pairs_to_bucket", num_lengths=2, is_packed=False)
    sources, _ = _cut(step, side=0)
    targets, weights = _cut(step, side=1)
    source, target = (
        _padded(step.ids, samples, length)
        for samples, length in zip((sources, targets), step.bucket.lengths, strict=True)
    )
    _check_planned(step, (source[1] + target[1])[step.ids >= 0])
    return PairBatch(*source[:2], *target[:2], _placed(weights, target[2]), np.float32(step.num_sequences))


def pack_pairs_to_bucket(step: StepSamples) -> PackedPairBatch:
    """Concatenates the sources of each packed row, and its targets, and pads both to the shape of the bucket.

    Args:
      step: a step of a packed plan of pairs; its samples are as for `pad_pairs_to_bucket`.

    Returns:
      A `PackedPairBatch` of NumPy arrays.

    Raises:
      ValueError: as `pad_to_bucket`; or the plan is not packed.
    """
    _check_kind(step, "pack_pairs_to_bucket", num_lengths=2, is_packed=True)
    sources, _ = _cut(step, side=0)
    targets, weights = _cut(step, side=1)
    sides = sources, targets
    tokens = [_checked_tokens(step.ids[step.ids >= 0], samples) for samples in sides]
    lengths = [np.fromiter(map(len, samples), np.int64, len(samples)) for samples in sides]
    _check_planned(step, lengths[0] + lengths[1])
    source, target = (_packed(step.ids, *of_side) for of_side in zip(tokens, lengths, step.bucket.lengths, strict=True))
    num_sequences = np.float32(step.num_sequences)
    return PackedPairBatch(*source[:3], *target[:3], _placed(weights, target.is_token), num_sequences)


_COLLATE_NAMES = {
    (1, False): ("samples, one a row", "pad_to_bucket"),
    (1, True): ("packed rows", "pack_to_bucket"),
    (2, False): ("pairs", "pad_pairs_to_bucket"),
    (2, True): ("packed rows of pairs", "pack_pairs_to_bucket"),
}


def _check_kind(step: StepSamples, name: str, *, num_lengths: int, is_packed: bool) -> None:
    """Raises ValueError where the plan is of another kind than the collate function is for."""
    own = len(step.bucket.lengths), step.ids.ndim == 3
    if own == (num_lengths, is_packed):
        return
    kind, fitting = _COLLATE_NAMES[own]
    raise UserError(f"{name} does not go with this plan, which is of {kind}: collate it with {fitting}")


def _cut(step: StepSamples, side: int | None = None) -> tuple[list[np.ndarray], Float32[np.ndarray, " tokens"] | None]:
    """The tokens of each sample of the step, in the order of its ids, and the loss weights of all, one after the other.

    They are cut at the bucket, or to their piece, where the plan does so. Weights are None where no sample has any of
    its own. Of pairs, those of one side.
    """
    flat = [sample if side is None else sample[side] for microbatch in step.samples for sample in microbatch]
    samples = [sample.tokens if isinstance(sample, WeightedTokens) else np.asarray(sample) for sample in flat]
    weights = None
    if any(isinstance(sample, WeightedTokens) for sample in flat):
        weights = [
            sample.weights if isinstance(sample, WeightedTokens) else np.ones(len(tokens), np.float32)
            for sample, tokens in zip(flat, samples, strict=True)
        ]
    if step.truncate or step.starts is not None:
        most = step.bucket.lengths[side or 0]
        starts = [0] * len(samples) if step.starts is None else step.starts[step.ids >= 0].tolist()
        pieces = [slice(start, start + most) for start in starts]
        samples = [tokens[piece] for tokens, piece in zip(samples, pieces, strict=True)]
        weights = weights and [of_sample[piece] for of_sample, piece in zip(weights, pieces, strict=True)]
    return samples, None if weights is None else np.concatenate(weights)


def _placed(
    weights: Float32[np.ndarray, " tokens"] | None, is_token_MxBxT: Bool[np.ndarray, "M B T"]
) -> Float32[np.ndarray, "M B T"]:
    """The loss weights where the tokens are; 1 if None."""
    weights_MxBxT = is_token_MxBxT.astype(np.float32)
    if weights is not None:
        weights_MxBxT[is_token_MxBxT] = weights
    return weights_MxBxT


def _padded(
    ids_MxB: Int64[np.ndarray, "M B"], samples: Sequence[np.ndarray], max_length: int
) -> tuple[Int32[np.ndarray, "M B T"], Int32[np.ndarray, "M B"], Bool[np.ndarray, "M B T"]]:
    """Tokens, lengths and where tokens are."""
    ids = ids_MxB[ids_MxB >= 0]
    tokens = _checked_tokens(ids, samples)
    lengths = np.fromiter(map(len, samples), np.int32, len(samples))
    too_long = lengths > max_length
    if too_long.any():
        offenders = list_offenders(ids[too_long], lengths[too_long], max_length)
        raise UserError(f"samples longer than their bucket: {offenders}")
    lengths_MxB = np.zeros(ids_MxB.shape, np.int32)
    lengths_MxB[ids_MxB >= 0] = lengths
    is_token_MxBxT = np.arange(max_length, dtype=np.int32) < lengths_MxB[..., None]
    tokens_MxBxT = np.zeros(is_token_MxBxT.shape, np.int32)
    tokens_MxBxT[is_token_MxBxT] = tokens
    return tokens_MxBxT, lengths_MxB, is_token_MxBxT


class _Packed(NamedTuple):
    """The arrays of packed rows."""

    tokens: Int32[np.ndarray, "M B T"]
    segment_ids: Int32[np.ndarray, "M B T"]
    positions: Int32[np.ndarray, "M B T"]
    is_token: Bool[np.ndarray, "M B T"]


def _packed(
    ids_MxBxP: Int64[np.ndarray, "M B P"],
    tokens: Integer[np.ndarray, " tokens"],
    lengths: Int64[np.ndarray, " n"],
    length: int,
) -> _Packed:
    """Tokens, segments, positions and where tokens are, from all tokens and the length of each sample."""
    is_sample_MxBxP = ids_MxBxP >= 0
    lengths_MxBxP = np.zeros(ids_MxBxP.shape, np.int64)
    lengths_MxBxP[is_sample_MxBxP] = lengths
    in_row_MxBx1 = lengths_MxBxP.sum(axis=2, keepdims=True)
    if (in_row_MxBx1 > length).any():
        at_fault = is_sample_MxBxP & (in_row_MxBx1 > length)
        offenders = list_offenders(ids_MxBxP[at_fault], lengths_MxBxP[at_fault], length)
        raise UserError(
            f"rows are longer than their bucket, so these are not the samples that were packed: {offenders}"
        )
    is_token_MxBxT = np.arange(length) < in_row_MxBx1

    def filled(values: np.ndarray) -> Int32[np.ndarray, "M B T"]:
        array_MxBxT = np.zeros(is_token_MxBxT.shape, np.int32)
        array_MxBxT[is_token_MxBxT] = values
        return array_MxBxT

    segments = np.repeat(np.nonzero(is_sample_MxBxP)[2] + 1, lengths)
    positions = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return _Packed(filled(tokens), filled(segments), filled(positions), is_token_MxBxT)


def _check_planned(step: StepSamples, lengths: Integer[np.ndarray, " n"]) -> None:
    if step.num_tokens is not None and lengths.sum() != step.num_tokens:
        ids = step.ids[step.ids >= 0]  # in the order of the samples: microbatch by microbatch
        raise UserError(
            f"the samples of a step hold {lengths.sum():,} tokens, but {step.num_tokens:,} were planned; this dataset "
            f"is not the one whose lengths were planned: {list_offenders(ids, lengths)}"
        )


def _checked_tokens(ids: Int64[np.ndarray, " n"], samples: Sequence[np.ndarray]) -> Integer[np.ndarray, " tokens"]:
    """All tokens, one sample after the other."""
    wrong = [
        f"id {i}: {sample.ndim}-D {sample.dtype}"
        for i, sample in zip(ids.tolist(), samples, strict=True)
        if sample.ndim != 1 or not np.issubdtype(sample.dtype, np.integer)
    ]
    if wrong:
        raise UserError(f"samples must be 1-D arrays of integer tokens: {', '.join(wrong[:5])}")
    tokens = np.concatenate([np.zeros(0, np.int32), *samples])  # a process's part of a step can be dummy rows alone
    if tokens.size and (tokens.min() < _INT32.min or tokens.max() > _INT32.max):
        raise UserError(f"tokens must fit int32; those of a step reach from {tokens.min()} to {tokens.max()}")
    return tokens
