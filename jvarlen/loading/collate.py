"""Collate functions: the samples of one step as host arrays of a bucket's shape.

Letters: M microbatches, B rows, P samples of a row, T positions, S and U positions of source and target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, Integer

from jvarlen._common.checks import UserError, list_first, list_offenders
from jvarlen.batches.batches import Batch, PackedBatch, PackedPairBatch, PairBatch
from jvarlen.planning.buckets import AnyBucket
from jvarlen.planning.lengths import PairSize, row_sizes
from jvarlen.planning.samples import WeightedTokens, fields_of

__all__ = [
    "OWN_COLLATE",
    "CollateFn",
    "StepSamples",
    "collate_for",
    "count_without_target",
    "pack_pairs_to_bucket",
    "pack_to_bucket",
    "pad_pairs_to_bucket",
    "pad_to_bucket",
]

_INT32 = np.iinfo(np.int32)


class StepSamples(NamedTuple):
    """The input of a collate function: the samples of one step, as the dataset returned them.

    If several processes train together, M counts the microbatches of this process.

    Attributes:
      bucket: the shape to fill.
      ids: int64[M, B], the sample of every row, or int64[M, B, P], the samples of every packed row; −1 for none.
        Padding rows come last in their microbatch. P is `samples_per_row`.
      samples: M lists of the samples, in the order of `ids`.
      num_tokens: real tokens that were planned for these rows, truncated samples with their cut length; None if unknown
        for this part of the step.
      truncate: whether the plan truncates samples that are longer than the bucket.
      num_sequences: real samples of the whole step, on all processes.
      starts: int64[M, B, P], the token of its sample with which each chunk begins, −1 for none. None where the plan
        splits no sample.
      stops: int64[M, B, P], the token before which each chunk ends, where its row ends; at most, if it is the last one
        of its sample: `sample[start:stop]`.
      pair_size: what a sample of two lengths counts in `num_tokens`, as in `Budget`.
    """

    bucket: AnyBucket
    ids: Int64[np.ndarray, "M B *P"]
    samples: list[list[Any]]
    num_tokens: int | None
    truncate: bool
    num_sequences: int
    starts: Int64[np.ndarray, "M B P"] | None = None
    stops: Int64[np.ndarray, "M B P"] | None = None
    pair_size: PairSize = "sum"

    @property
    def samples_per_row(self) -> int:
        """P, the same in every step of the bucket: the most samples that a row can hold; 1 where nothing is packed."""
        return self.ids.shape[2] if self.ids.ndim == 3 else 1


CollateFn = Callable[[StepSamples], Any]


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
    return Batch(*_collated(step, pad_to_bucket))


def pack_to_bucket(step: StepSamples) -> PackedBatch:
    """Concatenates the samples of each packed row, and pads the rows to the shape of the bucket.

    Args:
      step: a step of a packed plan; its samples are 1-D integer arrays that fit int32, or `WeightedTokens`.

    Returns:
      A `PackedBatch` of NumPy arrays.

    Raises:
      ValueError: as `pad_to_bucket`; or the plan is not packed.
    """
    return PackedBatch(*_collated(step, pack_to_bucket))


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
    return PairBatch(*_collated(step, pad_pairs_to_bucket))


def pack_pairs_to_bucket(step: StepSamples) -> PackedPairBatch:
    """Concatenates the sources of each packed row, and its targets, and pads both to the shape of the bucket.

    Args:
      step: a step of a packed plan of pairs; its samples are as for `pad_pairs_to_bucket`.

    Returns:
      A `PackedPairBatch` of NumPy arrays.

    Raises:
      ValueError: as `pad_to_bucket`; or the plan is not packed.
    """
    return PackedPairBatch(*_collated(step, pack_pairs_to_bucket))


_COLLATE: dict[tuple[int, bool], tuple[CollateFn, str]] = {
    (1, False): (pad_to_bucket, "samples, one a row"),
    (1, True): (pack_to_bucket, "packed rows"),
    (2, False): (pad_pairs_to_bucket, "pairs"),
    (2, True): (pack_pairs_to_bucket, "packed rows of pairs"),
}


OWN_COLLATE = tuple(collate for collate, _ in _COLLATE.values())


def collate_for(num_lengths: int, is_packed: bool) -> CollateFn:
    """The function for a plan whose buckets have so many lengths, and whose rows hold one sample or several."""
    return _COLLATE[num_lengths, is_packed][0]


def count_without_target(step: StepSamples) -> int:
    """How many samples have no target: weight 0 on all tokens that are left, of a pair on those of its target."""
    is_pairs = len(step.bucket.lengths) > 1
    flat = [sample[1] if is_pairs else sample for microbatch in step.samples for sample in microbatch]
    if not any(issubclass(kind, WeightedTokens) for kind in set(map(type, flat))):
        return 0
    chunks = _chunks(step, -1) or [slice(None)] * len(flat)
    return sum(
        isinstance(sample, WeightedTokens) and not sample.weights[chunk].any()
        for sample, chunk in zip(flat, chunks, strict=True)
    )


def _collated(step: StepSamples, collate: Callable[..., Any]) -> tuple[Any, ...]:
    """The arrays of a batch in their order: those of each side, loss weights, number of samples, ids, is_real."""
    is_packed, lengths_of_bucket = step.ids.ndim == 3, step.bucket.lengths
    own, kind = _COLLATE[len(lengths_of_bucket), is_packed]
    if own is not collate:
        raise UserError(
            f"{collate.__name__} does not go with this plan, which is of {kind}: collate it with {own.__name__}"
        )
    ids = step.ids[step.ids >= 0]
    sides = []
    for side, length in enumerate(lengths_of_bucket):
        samples, weights = _cut(step, ids, side if len(lengths_of_bucket) > 1 else None)
        tokens = _checked_tokens(samples)
        lengths = np.fromiter(map(len, samples), np.int64, len(samples))
        if not is_packed and (too_long := lengths > length).any():
            offenders = list_offenders(ids[too_long], lengths[too_long], length)
            raise UserError(f"samples longer than their bucket: {offenders}")
        sides.append((tokens, lengths, length))
    _check_planned(step, ids, np.stack([lengths for _, lengths, _ in sides], axis=1))
    rows = [(_packed if is_packed else _padded)(step.ids, *side) for side in sides]
    is_token = rows[-1][0]
    weights_MxBxT = is_token.astype(np.float32)
    if weights is not None:
        weights_MxBxT[is_token] = weights
    arrays = [array for _, *of_side in rows for array in of_side]
    if step.ids.max(initial=0) > _INT32.max:
        raise UserError(f"ids of samples must fit int32, and this step has {step.ids.max()}: give your own collate=")
    return *arrays, weights_MxBxT, np.float32(step.num_sequences), step.ids.astype(np.int32), step.ids >= 0


def _cut(
    step: StepSamples, ids: Int64[np.ndarray, " n"], side: int | None
) -> tuple[list[np.ndarray], Float32[np.ndarray, " tokens"] | None]:
    """The tokens of each sample, cut as planned, and the loss weights of all; None where no sample has its own."""
    whole = [sample for microbatch in step.samples for sample in microbatch]
    try:
        flat = whole if side is None else [pair[side] for pair in whole]
        samples = [sample.tokens if isinstance(sample, WeightedTokens) else np.asarray(sample) for sample in flat]
        are_tokens = all(tokens.ndim == 1 and tokens.dtype.kind in "iu" for tokens in samples)
        are_tokens &= side is None or set(map(len, whole)) <= {2}  # further fields would be lost
    except (LookupError, TypeError, ValueError):  # no pairs, or fields of several sizes
        are_tokens = False
    if not are_tokens:
        kinds = [_kind_if_no_tokens(sample, side) for sample in whole]
        listed = [f"id {i}: {kind}" for i, kind in zip(ids.tolist(), kinds, strict=True) if kind]
        what = "samples must be 1-D arrays of integer tokens" + ("" if side is None else ", source and target")
        raise UserError(f"{what}; for others, give load your own collate=: {list_first(listed, '; ')}")
    weights = None
    if any(isinstance(sample, WeightedTokens) for sample in flat):
        weights = [
            sample.weights if isinstance(sample, WeightedTokens) else np.ones(len(tokens), np.float32)
            for sample, tokens in zip(flat, samples, strict=True)
        ]
    if chunks := _chunks(step, side or 0):
        samples = [tokens[chunk] for tokens, chunk in zip(samples, chunks, strict=True)]
        weights = weights and [of_sample[chunk] for of_sample, chunk in zip(weights, chunks, strict=True)]
    return samples, None if weights is None else np.concatenate(weights)


def _chunks(step: StepSamples, side: int) -> list[slice]:
    """The part of each sample that its row holds; empty if all are whole."""
    is_sample = step.ids >= 0
    if step.starts is not None and step.stops is not None:
        return list(map(slice, step.starts[is_sample].tolist(), step.stops[is_sample].tolist()))
    return [slice(step.bucket.lengths[side])] * int(is_sample.sum()) if step.truncate else []


def _padded(
    ids_MxB: Int64[np.ndarray, "M B"],
    tokens: Integer[np.ndarray, " tokens"],
    lengths: Int64[np.ndarray, " n"],
    length: int,
) -> tuple[Bool[np.ndarray, "M B T"], Int32[np.ndarray, "M B T"], Int32[np.ndarray, "M B"]]:
    """Where tokens are; tokens and lengths."""
    lengths_MxB = np.zeros(ids_MxB.shape, np.int32)
    lengths_MxB[ids_MxB >= 0] = lengths
    is_token_MxBxT = np.arange(length, dtype=np.int32) < lengths_MxB[..., None]
    return is_token_MxBxT, _filled(is_token_MxBxT, tokens), lengths_MxB


def _packed(
    ids_MxBxP: Int64[np.ndarray, "M B P"],
    tokens: Integer[np.ndarray, " tokens"],
    lengths: Int64[np.ndarray, " n"],
    length: int,
) -> tuple[
    Bool[np.ndarray, "M B T"], Int32[np.ndarray, "M B T"], Int32[np.ndarray, "M B T"], Int32[np.ndarray, "M B T"]
]:
    """Where tokens are; tokens, segments and positions."""
    is_sample_MxBxP = ids_MxBxP >= 0
    lengths_MxBxP = np.zeros(ids_MxBxP.shape, np.int64)
    lengths_MxBxP[is_sample_MxBxP] = lengths
    in_row_MxBx1 = lengths_MxBxP.sum(axis=2, keepdims=True)
    if (in_row_MxBx1 > length).any():
        at_fault = is_sample_MxBxP & (in_row_MxBx1 > length)
        offenders = list_offenders(ids_MxBxP[at_fault], lengths_MxBxP[at_fault], length)
        raise UserError(f"rows longer than their bucket, so these are not the samples that were packed: {offenders}")
    is_token_MxBxT = np.arange(length) < in_row_MxBx1
    segments = np.repeat(np.nonzero(is_sample_MxBxP)[2] + 1, lengths)
    positions = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return is_token_MxBxT, *(_filled(is_token_MxBxT, values) for values in (tokens, segments, positions))


def _filled(
    is_token_MxBxT: Bool[np.ndarray, "M B T"], values: Integer[np.ndarray, " tokens"]
) -> Int32[np.ndarray, "M B T"]:
    array_MxBxT = np.zeros(is_token_MxBxT.shape, np.int32)
    array_MxBxT[is_token_MxBxT] = values
    return array_MxBxT


def _check_planned(step: StepSamples, ids: Int64[np.ndarray, " n"], lengths: Int64[np.ndarray, "n sides"]) -> None:
    if step.num_tokens is None:
        return
    if (found := row_sizes(lengths, step.pair_size).sum()) != step.num_tokens:
        listed = list_offenders(ids, lengths if lengths.shape[1] > 1 else lengths[:, 0])
        raise UserError(
            f"the samples of a step hold {found:,} tokens, but {step.num_tokens:,} were planned; this dataset is not "
            f"the one whose lengths were planned: {listed}"
        )


def _kind_if_no_tokens(sample: Any, side: int | None) -> str | None:
    """What a sample is, or a side of it, if that is no 1-D array of integers."""
    try:
        if side is not None and len(sample) != 2:
            raise ValueError
        part = sample if side is None else sample[side]
        tokens = part.tokens if isinstance(part, WeightedTokens) else np.asarray(part)
        kind = None if tokens.ndim == 1 and tokens.dtype.kind in "iu" else f"{tokens.ndim}-D {tokens.dtype}"
    except (LookupError, TypeError, ValueError):
        kind = type(sample).__name__
    return kind and (fields_of(sample) or kind)


def _checked_tokens(samples: Sequence[np.ndarray]) -> Integer[np.ndarray, " tokens"]:
    """All tokens, one sample after the other."""
    tokens = np.concatenate([np.zeros(0, np.int32), *samples])  # a process's part of a step can be padding rows alone
    if tokens.size and (tokens.min() < _INT32.min or tokens.max() > _INT32.max):
        raise UserError(f"tokens must fit int32; those of a step reach from {tokens.min()} to {tokens.max()}")
    return tokens
