"""Batch types, their shapes for a bucket, their token counts, and their next-token targets.

Letters: M microbatches, B rows, P samples of a row, T positions, S and U positions of source and target.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jvarlen._common.answers import find_answers
from jvarlen._common.checks import UserError, check_at_least_zero, if_given
from jvarlen._common.pytree import is_key, zeros_of
from jvarlen._common.types import Array, PyTree
from jvarlen.batches.fields import ATTENTION_WINDOW, PAIR_TOKENS, PREFIXES, TOKENS, WEIGHTS, arrays_spec, prefixes_in
from jvarlen.planning.buckets import AnyBucket

__all__ = [
    "Batch", "PackedBatch", "PackedPairBatch", "PairBatch", "StepBatch", "TokenBatch", "arrays_by_name", "batch_type",
    "count_tokens", "count_without_target", "full_batch", "mark_padding_rows", "next_token_targets",
    "sample_positions", "sum_by_sample", "token_batch_spec", "with_arrays",
]  # fmt: skip


class Batch(NamedTuple):
    """The arrays of one step, or of a group of a step, a pytree.

    Attributes:
      tokens: int32[M, B, T], zero where there is no token.
      lengths: int32[M, B], tokens a row; 0 for a padding row, unless it repeats a sample.
      weights: float32[M, B, T], the loss weights of tokens, 1 unless the samples have their own; 0 elsewhere.
      num_sequences: float32[], real samples in the whole step, or in this group of a `StepBatch`.
      ids: int32[M, B], the sample of each row; −1: a padding row.
      is_real: bool[M, B], whether a row holds a sample.
    """

    tokens: Array
    lengths: Array
    weights: Array
    num_sequences: Array
    ids: Array
    is_real: Array


class PackedBatch(NamedTuple):
    """The arrays of one step whose rows hold several samples, a pytree.

    Attributes:
      tokens: int32[M, B, T], zero where there is no token.
      segment_ids: int32[M, B, T], the sample of each token: 1, 2, … within its row, 0 where there is no token.
      positions: int32[M, B, T], the place of each token in its sample, from 0.
      weights: float32[M, B, T], the loss weights of tokens, 1 unless the samples have their own; 0 elsewhere.
      num_sequences: float32[], real samples in the whole step, or in this group of a `StepBatch`.
      ids: int32[M, B, P], the samples of each row: entry p is segment p + 1; −1: none. P is `samples_per_row` of the
        plan.
      is_real: bool[M, B, P], whether there is such a sample.
    """

    tokens: Array
    segment_ids: Array
    positions: Array
    weights: Array
    num_sequences: Array
    ids: Array
    is_real: Array


class PairBatch(NamedTuple):
    """The arrays of one step of pairs, a pytree.

    Attributes:
      source_tokens: int32[M, B, S], zero where there is no token.
      source_lengths: int32[M, B], as in a `Batch`.
      target_tokens: int32[M, B, U].
      target_lengths: int32[M, B].
      weights: float32[M, B, U], the loss weights of target tokens, 1 unless the targets have their own; 0 elsewhere.
      num_sequences: float32[], real pairs in the whole step, or in this group of a `StepBatch`.
      ids: int32[M, B], the pair of each row; −1: a padding row.
      is_real: bool[M, B], whether a row holds a pair.
    """

    source_tokens: Array
    source_lengths: Array
    target_tokens: Array
    target_lengths: Array
    weights: Array
    num_sequences: Array
    ids: Array
    is_real: Array


class PackedPairBatch(NamedTuple):
    """The arrays of one step whose rows hold several pairs, a pytree.

    Cross-attention is `attend` with `segment_ids=target_segment_ids, key_segment_ids=source_segment_ids, causal=False`.

    Attributes:
      source_tokens: int32[M, B, S], zero where there is no token.
      source_segment_ids: int32[M, B, S], the pair of each token: 1, 2, … within its row, 0 where there is no token.
      source_positions: int32[M, B, S], the place of each token in its source, from 0.
      target_tokens: int32[M, B, U].
      target_segment_ids: int32[M, B, U], with the same number as the source of the pair.
      target_positions: int32[M, B, U].
      weights: float32[M, B, U], the loss weights of target tokens, 1 unless the targets have their own; 0 elsewhere.
      num_sequences: float32[], real pairs in the whole step, or in this group of a `StepBatch`.
      ids: int32[M, B, P], the pairs of each row: entry p is segment p + 1; −1: none. P is `samples_per_row` of the
        plan.
      is_real: bool[M, B, P], whether there is such a pair.
    """

    source_tokens: Array
    source_segment_ids: Array
    source_positions: Array
    target_tokens: Array
    target_segment_ids: Array
    target_positions: Array
    weights: Array
    num_sequences: Array
    ids: Array
    is_real: Array


class StepBatch(NamedTuple):
    """The batches of a step of several groups, a pytree.

    Attributes:
      groups: the batch of each group, of any type. The counts of a group are its own, and a step adds them.
      num_sequences: float32[], real samples in the whole step, for who reads batches: the sum of those of the groups.
    """

    groups: tuple[PyTree, ...]
    num_sequences: Array


TokenBatch: TypeAlias = Batch | PackedBatch | PairBatch | PackedPairBatch


def batch_type(num_lengths: int, is_packed: bool) -> type[TokenBatch]:
    """The type of batches of tokens, or of pairs of them, whose rows hold one sample or several."""
    if num_lengths > 2:
        raise UserError(f"samples of {num_lengths} lengths have named fields: give fields={{name: axes, …}}")
    return {1: (Batch, PackedBatch), 2: (PairBatch, PackedPairBatch)}[num_lengths][is_packed]


def token_batch_spec(bucket: AnyBucket, num_microbatches: int, samples_per_row: int | None = None) -> TokenBatch:
    """The shapes and dtypes of the batches of `collate_tokens`; `BatchShapes.of_plan` knows those of a plan.

    Args:
      bucket: the shape.
      num_microbatches: M.
      samples_per_row: P of packed rows, as the plan has it for the bucket; None: a row holds one sample.

    Returns:
      A `Batch`, `PackedBatch`, `PairBatch` or `PackedPairBatch` of `jax.ShapeDtypeStruct`.
    """
    num_lengths = len(bucket.lengths)
    kind = batch_type(num_lengths, samples_per_row is not None)
    return kind(**arrays_spec((TOKENS, PAIR_TOKENS)[num_lengths - 1], bucket, num_microbatches, samples_per_row))


def arrays_by_name(batch: PyTree) -> dict[str, Array] | None:
    """The arrays of a batch of tokens or of named fields; None for anything else."""
    if isinstance(batch, TokenBatch):
        return batch._asdict()
    return batch if isinstance(batch, dict) and {WEIGHTS, "num_sequences", "ids", "is_real"} <= batch.keys() else None


def with_arrays(batch: PyTree, arrays: dict[str, Array]) -> PyTree:
    """The batch with some arrays replaced."""
    return {**batch, **arrays} if isinstance(batch, dict) else batch._replace(**arrays)


def mark_padding_rows(batch: PyTree) -> PyTree:
    """Sets the id −1 where `is_real` is false, as in added rows of zeros; other trees stay as they are."""
    if (arrays := arrays_by_name(batch)) is None:
        return batch
    return with_arrays(batch, {"ids": np.where(arrays["is_real"], arrays["ids"], arrays["ids"].dtype.type(-1))})


def count_tokens(batch: PyTree, dtype: DTypeLike = jnp.float32) -> jax.Array | None:
    """Real tokens of a batch or of a microbatch, without those of rows that only repeat a sample.

    Args:
      batch: a `Batch`, `PackedBatch`, `PairBatch` or `PackedPairBatch`, a batch of named fields, or a microbatch;
        traced or not.
      dtype: the dtype of the result.

    Returns:
      float[], exact up to 2²⁴ tokens in float32; None for other types.

    Example:
      >>> lengths, ids = np.array([[3, 3]]), np.array([[7, -1]])
      >>> float(count_tokens(Batch(None, lengths, None, np.float32(1), ids, ids >= 0)))
      3.0
    """
    if (arrays := arrays_by_name(batch)) is None:
        return None
    is_real = jnp.asarray(arrays["is_real"])  # [M, B], or [M, B, P] of packed rows
    prefixes = prefixes_in(arrays)
    counted = [(arrays[name], is_real) for prefix in prefixes if (name := f"{prefix}lengths") in arrays]
    counted += [
        (arrays[name] > 0, is_real.any(axis=-1, keepdims=True))
        for prefix in prefixes
        if (name := f"{prefix}segment_ids") in arrays
    ]
    return jnp.asarray(sum(jnp.sum(array, where=where) for array, where in counted), dtype)


def count_without_target(batch: PyTree) -> int:
    """Counts the samples, in a batch that the library made, whose tokens, or a pair's target, all have weight 0."""
    arrays = arrays_by_name(batch)
    assert arrays is not None
    is_real, has_weight = arrays["is_real"], arrays["weights"] > 0
    segments = arrays.get("target_segment_ids", arrays.get("segment_ids"))
    if segments is None:
        return int((is_real & ~has_weight.any(axis=2)).sum())
    if np.array_equal(has_weight, segments > 0):  # a quick check of the usual case
        return 0
    m, b, _ = np.nonzero(has_weight)
    has_target = np.zeros((*is_real.shape[:2], is_real.shape[2] + 1), bool)
    has_target[m, b, segments[has_weight]] = True
    return int((is_real & ~has_target[..., 1:]).sum())


def full_batch(spec: PyTree, bucket: AnyBucket | None = None) -> PyTree:
    """A batch without padding, for measuring a step.

    Args:
      spec: a batch of `jax.ShapeDtypeStruct`, as `token_batch_spec` gives it; or another pytree of them.
      bucket: the batch's shape, which named fields of two lengths need.

    Returns:
      A pytree of NumPy arrays: the lengths and positions of full rows, typed keys, and otherwise ones.

    Raises:
      ValueError: named fields of two lengths without a bucket.
    """
    batch = jax.tree.map(lambda leaf: zeros_of(leaf) if is_key(leaf) else np.ones(leaf.shape, leaf.dtype), spec)
    if (arrays := arrays_by_name(batch)) is None:
        return batch
    num_rows = int(np.prod(arrays[WEIGHTS].shape[:2]))  # a packed row is one sample
    ids = np.full(arrays["ids"].shape, -1, np.int32)
    ids.reshape(num_rows, -1)[:, 0] = np.arange(num_rows)
    full: dict[str, Array] = {"num_sequences": np.float32(num_rows), "ids": ids, "is_real": ids >= 0}
    if ATTENTION_WINDOW in arrays:
        full[ATTENTION_WINDOW] = np.int32(0)  # all
    prefixes = prefixes_in(arrays)
    if not {*prefixes} <= {*PREFIXES}:
        raise UserError(f"a full batch of lengths of names of your own, such as {prefixes[0][:-1]!r}, is not made")
    for prefix in prefixes:
        if (name := f"{prefix}positions") in arrays:
            full[name] = np.broadcast_to(np.arange(arrays[name].shape[2], dtype=np.int32), arrays[name].shape)
        if (name := f"{prefix}lengths") in arrays:
            if prefix != "source_":
                length = arrays[WEIGHTS].shape[2]
            elif bucket is not None:
                length = bucket.lengths[0]
            elif not isinstance(batch, dict):
                length = arrays["source_tokens"].shape[2]
            else:
                raise UserError("a full batch of named fields of two lengths needs bucket=")
            full[name] = np.full(arrays[name].shape, length, np.int32)
    return with_arrays(batch, full)


def next_token_targets(
    microbatch: TokenBatch | dict[str, Array], *, begin_token: int | None = None
) -> tuple[Array, Array, Array]:
    """The input of each position, the token that it predicts, and the loss weight of that token.

    Input and target always belong to the same sample, in padded and in packed rows. For pairs, they are target tokens.
    All three have the shape of the tokens, so that `segment_ids`, `positions` and `lengths` go with the inputs as they
    are. A target has the weight of its token.

    The first token of a sample is not a target, so that a sample of l tokens has l − 1 targets, or l if a `begin_token`
    is put before it. Here each segment is a sample, also a chunk of a sample that was cut at the end of a row. Answers
    that share a prompt, of samples that `jvarlen.data.share_prompts` makes, follow it: their first tokens are targets.

    Call it on whole rows. If the positions of rows are spread over a mesh axis, take this device's part of the
    results: `targets[:, axes.positions]`.

    Args:
      microbatch: tokens int[..., T], such as the [B, T] of a microbatch or the [M, B, T] of a batch. Named fields must
        have `tokens`, or for two lengths `target_tokens`.
      begin_token: the input at the first position of every sample; None: inputs are the tokens themselves.

    Returns:
      Inputs int[..., T], targets int[..., T] and weights float[..., T]. Weights are 0 where there is no target; the
      targets there are any tokens of the row. NumPy arrays if those of the microbatch are.

    Raises:
      ValueError: the batch has another type, no such tokens, or tokens of another shape than the loss weights; or
        `begin_token` is not an integer of at least 0.

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
    held = arrays_by_name(microbatch) or {}
    is_pair = "target_lengths" in held or "target_segment_ids" in held
    prefix = "target_" if is_pair else ""
    arrays = {name.removeprefix(prefix): array for name, array in held.items() if name.startswith((prefix, WEIGHTS))}
    if "tokens" not in arrays:
        raise UserError(
            "next_token_targets needs the field target_tokens in a batch of two lengths: the tokens that are "
            "predicted, along the target, as the loss weights are. Rename your field, and make its length the target"
            if is_pair
            else "next_token_targets takes a Batch, PackedBatch, PairBatch or PackedPairBatch of jvarlen.batches, or "
            f"a batch of named fields with tokens, not a {type(microbatch).__name__}"
        )
    check_at_least_zero(**if_given(begin_token=begin_token))
    np_: Any = jnp if any(isinstance(array, jax.Array) for array in arrays.values()) else np
    tokens, weights = np_.asarray(arrays["tokens"]), np_.asarray(arrays["weights"])
    if tokens.shape != weights.shape:
        raise UserError(f"tokens have shape {tokens.shape}, but the loss weights {weights.shape}")
    is_first = np_.arange(tokens.shape[-1]) == 0
    if "segment_ids" in arrays:  # a token continues a sample if the one before it has the position before in the same
        segments, positions = arrays["segment_ids"], arrays["positions"]
        is_first = is_first | (segments != np_.roll(segments, 1, axis=-1))
        is_first |= positions != np_.roll(positions, 1, axis=-1) + 1
    before, is_apart = np_.roll(tokens, 1, axis=-1), False
    if "answer_ids" in arrays:
        shifts, positions = _shifts_and_positions(arrays)
        is_apart = shifts != np_.where(is_first, 0, np_.roll(shifts, 1, axis=-1))  # from the prompt, by other answers
        places = np_.arange(tokens.shape[-1]) - 1 - np_.where(is_apart, shifts, 0)
        before = np_.take_along_axis(tokens, places % tokens.shape[-1], axis=-1)
        is_first = is_first | (is_apart & (positions == 0))
    if begin_token is None:
        return tokens, np_.roll(tokens, -1, axis=-1), np_.roll(np_.where(is_first | is_apart, 0, weights), -1, axis=-1)
    # As an array: a Python number would take the type of the tokens, and could wrap around in it.
    begin = np.int32(begin_token)
    return np_.where(is_first, begin, before), tokens, weights


def sum_by_sample(
    values: Array, microbatch: TokenBatch | dict[str, Array], side: Literal["source", "target"] | None = None
) -> jax.Array:
    """The sum of values of tokens over each sample, in padded and in packed rows.

    Args:
      values: number[B, T, …], of the positions of rows; those of padding do not count.
      microbatch: of tokens or of named fields, without its leading axis.
      side: of two lengths, along which one the values are.

    Returns:
      number[B, …], one sum a row, or number[B, P, …] of packed rows, as the microbatch's `ids` and fields of samples.
      0 where there is no sample.

    Raises:
      ValueError: the batch has another type, or no such side.

    Example:
      >>> ids, none = np.array([[4, 7, -1]]), np.zeros((1, 5))
      >>> segments = np.array([[1, 1, 2, 2, 0]])
      >>> microbatch = PackedBatch(none, segments, none, none, np.float32(2), ids, ids >= 0)
      >>> sum_by_sample(np.array([[1.0, 2.0, 3.0, 4.0, 5.0]]), microbatch).tolist()
      [[3.0, 7.0, 0.0]]
    """
    arrays, prefix = arrays_by_name(microbatch) or {}, f"{side}_" if side else ""
    segments, lengths = (arrays.get(f"{prefix}{name}") for name in ("segment_ids", "lengths"))
    if segments is None and lengths is None:
        found = sorted(name for name in arrays if name.endswith(("lengths", "segment_ids")))
        raise UserError(f"sum_by_sample needs to know where samples lie: with side={side!r}, the batch has {found}")
    values, is_real = jnp.asarray(values), jnp.asarray(arrays["is_real"])
    if segments is None:  # a row is one sample
        segments, is_real = jnp.arange(values.shape[1]) < jnp.asarray(lengths)[:, None], is_real[:, None]
    is_in_BxPxT = jnp.asarray(segments)[:, None] == 1 + jnp.arange(is_real.shape[1])[:, None]
    is_in_BxPxT &= is_real[..., None]
    is_token = is_in_BxPxT.any(axis=1).reshape(*values.shape[:2], *(1,) * (values.ndim - 2))
    wide = jax.eval_shape(jnp.sum, values).dtype  # integers of few bits would wrap around
    values = jnp.where(is_token, values, 0).astype(wide)  # 0 · ∞ is no number
    sums = jnp.einsum("bpt,bt...->bp...", is_in_BxPxT.astype(values.dtype), values, precision="highest")
    return sums.reshape(*np.shape(arrays["is_real"]), *values.shape[2:])


def sample_positions(microbatch: TokenBatch | dict[str, Array]) -> Array:
    """The place of each token in its sample, such as for a rotary embedding.

    These are `positions` of packed rows and 0, 1, … of others; but those of an answer follow those of its prompt, also
    where other answers that share the prompt lie between them.

    Args:
      microbatch: samples of one length, as for `next_token_targets`.

    Returns:
      int32[..., T], 0 or any where there is no token.

    Raises:
      ValueError: the batch has another type.

    Example:
      >>> ids = np.array([[0, 0, 1, 1, 2, 2]])  # two answers that share two tokens
      >>> zeros = np.zeros((1, 6))
      >>> microbatch = {"answer_ids": ids, "weights": zeros, "num_sequences": 1, "ids": zeros, "is_real": zeros}
      >>> sample_positions(microbatch).tolist()
      [[0, 1, 2, 3, 2, 3]]
    """
    arrays = arrays_by_name(microbatch) or {}
    if not arrays.keys() & {"positions", WEIGHTS}:
        raise UserError(f"sample_positions takes a batch of samples of one length, not a {type(microbatch).__name__}")
    return _shifts_and_positions(arrays)[1]


def _shifts_and_positions(arrays: dict[str, Array]) -> tuple[Array, Array]:
    """The tokens of other answers between each token and its prompt, and its place in its sample."""
    positions = arrays.get("positions")
    if positions is None:
        shape = arrays[WEIGHTS].shape
        positions = np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape)
    if (answer_ids := arrays.get("answer_ids")) is None:
        return np.zeros_like(positions), positions
    shifts = find_answers(arrays.get("segment_ids", np.ones(answer_ids.shape, np.int32)), answer_ids).shifts
    return shifts, positions - shifts
