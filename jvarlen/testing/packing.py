"""Checks that a loss is the same for packed rows as for padded ones. Letters: N samples, B rows, T positions."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import optax

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.types import Batch, Extra, Params
from jvarlen.batches.fields import LENGTH_NAMES, FieldAxes, Fields, axes_of
from jvarlen.data.samples import Sample
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.placement import place
from jvarlen.loading.collate import CollateFields, StepSamples, collate_tokens
from jvarlen.loading.fields import find_fields
from jvarlen.planning.buckets import AnyBucket, bucket_of
from jvarlen.planning.lengths import check_lengths
from jvarlen.testing.partition import FloatDtype, check_comparable, differences_of, floats_in, make_step_values
from jvarlen.training.losses import LossFn
from jvarlen.training.train_state import new_state

__all__ = ["assert_packing_invariant"]

_LIKELY = (
    "targets across samples (take inputs, targets and weights of jvarlen.batches.next_token_targets(microbatch)); "
    "attention or state across samples (mask by microbatch.segment_ids, as attend does, and reset the state of a "
    "recurrence or convolution where microbatch.positions is 0); positions that count through the row (take "
    "microbatch.positions); a term or count that belongs to no sample, such as one a row, or without "
    "microbatch.weights; or loss_fn computes in float32 inside (then give rtol=1e-5)"
)


def assert_packing_invariant(
    loss_fn: LossFn,
    params: Params,
    samples: Iterable[Sample],
    *,
    fields: FieldAxes | None = None,
    extra: Extra = None,
    dtype: FloatDtype = "float64",
    rtol: float | None = None,
) -> None:
    """Asserts that samples packed into rows give the same sums and gradients as the same samples padded.

    Padded, each sample has a row. Packed, they fill two rows in the given order, or one if they are fewer than four,
    with padding at the end. Σ loss, Σ weight, further sums, the gradient and the change of `extra` must agree.

    Use a few short samples of different lengths and tokens, and parameters that are not all 0. What no sample shows is
    not seen: of a window of 8 positions, samples of 20 tokens show it.

    Args:
      loss_fn: as for `make_train_step`, for a `Batch` and a `PackedBatch`; of pairs, for a `PairBatch` and a
        `PackedPairBatch`. One that reads `segment_ids` or `positions` of the padded rows gets these packed, one sample
        a row.
      params: pytree of arrays; floats are cast to `dtype`.
      samples: N ≥ 2 of them, 1-D integers or `WeightedTokens`; pairs (source, target) of these; or mappings or
        dataclasses, whose batches are dicts.
      fields: of such, as for `load`.
      extra: for a loss that takes it; floats are cast to `dtype`.
      dtype: as for `assert_partition_invariant`.
      rtol: as for `assert_partition_invariant`.

    Raises:
      AssertionError: packed rows differ; the message names values, errors and the likely mistakes.
      ValueError: fewer than two samples, or invalid ones; no weight; or a loss that needs a `key`, which would draw
        other random numbers for rows of another shape.

    Example:
      >>> from jvarlen.batches import next_token_targets
      >>> def right(table, microbatch):
      ...     inputs, targets, weights = next_token_targets(microbatch)
      ...     return (table[inputs, targets] * weights).sum(), weights.sum()
      >>> def wrong(table, microbatch):
      ...     weights = microbatch.weights[:, 1:]
      ...     return (table[microbatch.tokens[:, :-1], microbatch.tokens[:, 1:]] * weights).sum(), weights.sum()
      >>> samples = [[1, 2, 0], [3, 1], [2, 2, 1, 3]]
      >>> table = np.arange(16.0).reshape(4, 4)
      >>> assert_packing_invariant(right, table, samples)
      >>> assert_packing_invariant(wrong, table, samples)
      Traceback (most recent call last):
      AssertionError: packed rows differ from padded ones by more than 1e-12 relative...

    References:
      Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination", arXiv:2107.02027.
    """
    key = inspect.signature(loss_fn).parameters.get("key")
    if key is not None and key.default is key.empty:
        raise UserError("loss_fn needs a key, whose random numbers differ in rows of another shape: leave out dropout")
    padded, packed = _rows_of(list(samples), fields)
    with floats_in(dtype, rtol) as (cast, rtol):
        state = new_state(cast(params), optax.identity(), extra=cast(extra))
        step = make_step_values(loss_fn, state, place(Layout(data=1)))

        try:
            expected = step(cast(padded.batch()))
        except (AttributeError, KeyError):  # of what packed rows alone have; then each holds one sample
            expected = step(cast(padded._replace(ids_BxP=padded.ids_BxP[:, None]).batch()))
        check_comparable(expected)
        differing = differences_of(step(cast(packed.batch())), expected, rtol)
    if differing:
        sums_first = sorted(differing, key=lambda one: one.startswith("gradient"))
        raise AssertionError(
            f"packed rows differ from padded ones by more than {rtol:g} relative: {list_first(sums_first, '; ')}\n"
            f"likely: {_LIKELY}"
        )


class _Layout(NamedTuple):
    """Samples, and the places of their ids in rows: int64[B] or, packed, int64[B, P], −1 where there is none."""

    samples: Sequence[Sample]
    ids_BxP: np.ndarray
    bucket: AnyBucket
    fields: Fields | None

    def batch(self) -> Batch:
        """The only microbatch of a step."""
        collate = collate_tokens if self.fields is None else CollateFields(self.fields)
        in_order = [self.samples[i] for i in self.ids_BxP.ravel().tolist() if i >= 0]
        return collate(StepSamples(self.bucket, self.ids_BxP[None], [in_order], None, False, len(in_order)))


def _rows_of(samples: list[Sample], axes: FieldAxes | None) -> tuple[_Layout, _Layout]:
    """The samples padded, one a row, and packed in one or two rows."""
    if len(samples) < 2:
        raise UserError(f"samples that share a row are needed, at least two: there are {len(samples)}")
    words = {word for said in (axes or {}).values() for word in axes_of(said).split()}
    if wrong := words - {"row"}.union(*LENGTH_NAMES):
        raise UserError(
            f"lengths in packed rows are 'length', or of pairs 'source' and 'target', and fields= has "
            f"{list_first(map(repr, sorted(wrong)))}"
        )
    num_lengths = 2 if words & {*LENGTH_NAMES[1]} else 1
    is_pair = axes is None and isinstance(samples[0], tuple)  # also a named one
    fields = None if is_pair else find_fields(samples, axes, num_lengths, is_packed=True)
    if fields is None:
        sizes = [list(map(len, _sides(sample))) for sample in samples]
    else:
        sizes = list(map(CollateFields(fields).lengths_of, samples))
    lengths_NxD = np.stack([check_lengths(list(of_side)) for of_side in zip(*sizes, strict=True)], axis=1)
    halves = np.array_split(np.arange(len(samples)), 2 if len(samples) > 3 else 1)
    ids = np.full((len(halves), max(map(len, halves))), -1)
    for row, half in zip(ids, halves, strict=True):
        row[: len(half)] = half
    longest = lengths_NxD.max(axis=0).tolist()
    fullest = (np.stack([lengths_NxD[half].sum(axis=0) for half in halves]).max(axis=0) + 1).tolist()  # with padding
    padded = _Layout(samples, np.arange(len(samples)), bucket_of(len(samples), *longest), fields)
    return padded, _Layout(samples, ids, bucket_of(len(ids), *fullest), fields)


def _sides(sample: Sample) -> tuple[Sample, ...]:
    """The sample alone, or the source and target of a pair."""
    is_pair = isinstance(sample, tuple | list) and len(sample) == 2 and np.ndim(sample[0]) > 0
    return tuple(sample) if is_pair else (sample,)
