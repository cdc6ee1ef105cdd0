"""Checks that a loss is the same for packed rows as for padded ones. Letters: N samples, B rows, T positions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import optax

from jvarlen._common.checks import UserError, list_first
from jvarlen.batches.batches import arrays_by_name, with_arrays
from jvarlen.batches.fields import LENGTH_NAMES, PREFIXES, WEIGHTS, Fields
from jvarlen.distributed.layout import Layout
from jvarlen.loading.collate import CollateFields, StepSamples, collate_for, value_of
from jvarlen.loading.fields import FieldAxes, find_fields
from jvarlen.planning.buckets import Bucket, PairBucket
from jvarlen.planning.lengths import check_lengths
from jvarlen.planning.samples import WeightedTokens, to_tokens
from jvarlen.testing.partition import (
    FloatDtype,
    check_finite,
    differences_of,
    floats_in,
    hint_of_rounding,
    make_step_values,
)
from jvarlen.training.losses import LossFn
from jvarlen.training.train_state import new_state

__all__ = ["assert_packing_invariant"]

_MOST_EXAMINED = 5  # of the samples that differ: each takes a step for every sample in its row

_TARGETS = (
    "targets across samples: the first token of a sample is predicted by the sample before it; take inputs, targets "
    "and weights of jvarlen.batches.next_token_targets(microbatch)"
)
_STATE = (
    "attention or state across samples: mask attention by microbatch.segment_ids, as attend does, and "
    "reset the state of a recurrence or convolution where microbatch.positions is 0"
)
_LATER = (
    "a position sees or predicts what comes after its sample: mask attention by microbatch.segment_ids, and take "
    "targets and weights of jvarlen.batches.next_token_targets(microbatch)"
)
_POSITIONS = "positions count through the row: take microbatch.positions, which begin at 0 in every sample"
_NO_SAMPLE = (
    "a term or a count that belongs to no sample, such as one a row or a mean over the row, or a loss that does not "
    "multiply by microbatch.weights"
)


def assert_packing_invariant(
    loss_fn: LossFn,
    params: Any,
    samples: Iterable[Any],
    *,
    fields: FieldAxes | None = None,
    extra: Any = None,
    dtype: FloatDtype = "float64",
    rtol: float | None = None,
) -> None:
    """Asserts that samples packed into rows give the same sums and gradients as the same samples padded.

    Padded, each sample has a row. Packed, they fill two rows in the given order, or one if they are fewer than four,
    with padding at the end. Σ loss, Σ weight, further sums, the gradient and the change of `extra` must agree;
    in float64, a mistake stands out from rounding. Samples that differ by themselves are named, and so is the
    neighbour that they depend on.

    Use a few short samples of different lengths and tokens, and parameters that are not all 0, so that every part of
    the model has an effect. What no sample shows is not seen: of a window of 8 positions, samples of 20 tokens show it.

    Args:
      loss_fn: as for `make_train_step`, for a `Batch` and a `PackedBatch`; of pairs, for a `PairBatch` and a
        `PackedPairBatch`. One that reads `segment_ids` or `positions` of the padded rows gets these packed, one sample
        a row.
      params: pytree of arrays; floats are cast to `dtype`.
      samples: N ≥ 2 of them, 1-D integers or `WeightedTokens`; pairs (source, target) of these; or mappings or
        dataclasses, whose batches are dicts.
      fields: of such, as for `load`.
      extra: for a loss that takes it; floats are cast to `dtype`.
      dtype: what to compute in; `"float32"` for a loss that takes nothing else, as if a scan begins with float32.
      rtol: the largest difference allowed, relative to the sums, and for any entry of the gradient relative to the
        largest. None: 1e-12, or 1e-5 in float32. A loss that computes in float32 inside, as
        `jax.nn.dot_product_attention` does, needs about 1e-5.

    Raises:
      AssertionError: packed rows differ, or the loss cannot take them; the message names values, errors, samples, and
        the likely mistake.
      ValueError: fewer than two samples, or invalid ones; no weight; or a loss that needs a `key`, which would draw
        other random numbers for rows of another shape.

    Example:
      >>> import jax.numpy as jnp
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
        step = make_step_values(loss_fn, state, Layout(data=1).on())

        def values_of(batch: Any) -> dict[str, np.ndarray]:
            try:
                return step(cast(batch))
            except (AttributeError, KeyError) as error:
                if not _is_missing(error, "lengths"):
                    raise
                raise AssertionError(f"loss_fn cannot take packed rows: {error}") from error

        expected: dict[str, np.ndarray] | None
        try:
            expected = values_of(padded.batch())
        except (AttributeError, KeyError) as error:  # of what packed rows alone have
            if not _is_missing(error, "segment_ids", "positions"):
                raise
            expected = None
        if expected is None:
            padded = padded._replace(ids_BxP=padded.ids_BxP[:, None])
            expected = values_of(padded.batch())
        check_finite(expected)
        differing = differences_of(values_of(packed.batch()), expected, rtol)
        if not differing:
            return
        hint = hint_of_rounding(differing)
        lines, likely = ([], hint) if hint else _explain(values_of, padded, packed, rtol)
    sums_first = sorted(differing, key=lambda one: one.name.startswith("gradient"))
    raise AssertionError(
        f"packed rows differ from padded ones by more than {rtol:g} relative: {list_first(sums_first, '; ')}\n"
        + "".join(f"  {line}\n" for line in lines)
        + f"likely: {likely}"
    )


def _is_missing(error: AttributeError | KeyError, *names: str) -> bool:
    """Whether an array of these, of any side, was asked for where it is not."""
    asked = error.name if isinstance(error, AttributeError) else error.args[0]
    return any(asked == prefix + name for prefix in PREFIXES for name in names)


class _Layout(NamedTuple):
    """Samples, and the places of their ids in rows: int64[B] or, packed, int64[B, P], −1 where there is none."""

    samples: Sequence[Any]
    ids_BxP: np.ndarray
    bucket: Any
    fields: Fields | None

    def batch(self) -> Any:
        """The only microbatch of a step."""
        of_tokens = collate_for(len(self.bucket.lengths), is_packed=self.ids_BxP.ndim == 2)
        collate = of_tokens if self.fields is None else CollateFields(self.fields)
        in_order = [self.samples[i] for i in self.ids_BxP.ravel().tolist() if i >= 0]
        return collate(StepSamples(self.bucket, self.ids_BxP[None], [in_order], None, False, len(in_order)))

    def owners(self) -> np.ndarray:
        """The sample of each place of `weights`, 1 for the first; 0 where there is no token."""
        arrays = arrays_by_name(self.batch()) or {}
        prefix = PREFIXES[-1] if len(self.bucket.lengths) > 1 else PREFIXES[0]
        if self.ids_BxP.ndim == 2:
            segments = arrays[f"{prefix}segment_ids"]
        else:
            segments = (np.arange(self.bucket.lengths[-1]) < arrays[f"{prefix}lengths"][..., None]).astype(int)
        ids = arrays["ids"].reshape(1, self.bucket.rows, -1)
        return np.where(segments > 0, np.take_along_axis(ids, np.maximum(segments, 1) - 1, axis=2) + 1, 0)

    def neighbours(self, i: int) -> list[int]:
        """The samples that share a row with sample i, those before it first, the nearest first."""
        row = next(row for row in self.ids_BxP.tolist() if i in row)
        place = row.index(i)
        return [*row[:place][::-1], *(j for j in row[place + 1 :] if j >= 0)]


def _rows_of(samples: list[Any], axes: FieldAxes | None) -> tuple[_Layout, _Layout]:
    """The samples padded, one a row, and packed in one or two rows."""
    if len(samples) < 2:
        raise UserError(f"samples that share a row are needed, at least two: there are {len(samples)}")
    num_lengths = 2 if any(word in LENGTH_NAMES[1] for word in (axes or {}).values()) else 1
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
    bucket = Bucket if len(longest) == 1 else PairBucket
    padded = _Layout(samples, np.arange(len(samples)), bucket(len(samples), *longest), fields)
    return padded, _Layout(samples, ids, bucket(len(ids), *fullest), fields)


def _sides(sample: Any) -> tuple[Any, ...]:
    """The sample alone, or the source and target of a pair."""
    is_pair = isinstance(sample, tuple | list) and len(sample) == 2 and np.ndim(sample[0]) > 0
    return tuple(sample) if is_pair else (sample,)


def _values_of(sample: Any, fields: Fields | None) -> dict[Any, np.ndarray]:
    """The tokens of each side of a sample, or its fields, without loss weights."""
    if fields is None:
        return dict(enumerate(map(to_tokens, _sides(sample))))
    return {field.name: np.asarray(value_of(sample, field.name)) for field in fields if field.name != WEIGHTS}


def _with_values(sample: Any, values: dict[Any, np.ndarray], fields: Fields | None) -> Any:
    """The sample with others in their place."""
    if fields is not None:
        return {field.name: values.get(field.name, value_of(sample, field.name)) for field in fields}
    sides = _sides(sample)
    changed = [
        WeightedTokens(values[side], each.weights) if isinstance(each, WeightedTokens) else values[side]
        for side, each in enumerate(sides)
    ]
    return tuple(changed) if len(sides) > 1 else changed[0]


def _explain(
    values_of: Callable[[Any], dict[str, np.ndarray]], padded: _Layout, packed: _Layout, rtol: float
) -> tuple[list[str], str]:
    """Which samples differ by themselves, on what they depend, and the likely mistakes."""

    def sums_of(rows: _Layout, owners: np.ndarray, i: int) -> np.ndarray:
        batch = rows.batch()
        weights = np.where(owners == i + 1, (arrays_by_name(batch) or {})[WEIGHTS], np.float32(0))
        values = values_of(with_arrays(batch, {WEIGHTS: weights}))
        return np.array([values["loss_sum"], values["weight_sum"]])

    def differ(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        return ~(np.abs(one - other) <= rtol * np.abs(other))

    ids = range(len(packed.samples))
    owners_padded, owners_packed = padded.owners(), packed.owners()
    if sums_of(padded, owners_padded, -1).any() or sums_of(packed, owners_packed, -1).any():  # without any weight
        return [], _NO_SAMPLE
    alone = np.stack([sums_of(padded, owners_padded, i) for i in ids])
    beside = np.stack([sums_of(packed, owners_packed, i) for i in ids])
    is_other = differ(beside, alone)
    others = np.flatnonzero(is_other.any(axis=1)).tolist()
    values = [_values_of(sample, packed.fields) for sample in packed.samples]
    known = {name: np.unique(np.concatenate([each[name].ravel() for each in values])) for name in values[0]}

    def leaks_from(i: int, j: int) -> bool:
        others = {
            name: known[name][(np.searchsorted(known[name], value) + 1) % len(known[name])]
            for name, value in values[j].items()
        }
        changed = list(packed.samples)
        changed[j] = _with_values(changed[j], others, packed.fields)
        return bool(differ(sums_of(packed._replace(samples=changed), owners_packed, i), beside[i]).any())

    lines: list[str] = []
    mistakes: dict[str, None] = {}  # in the order found
    for i in others[:_MOST_EXAMINED]:
        (loss, weight), (loss_alone, weight_alone) = beside[i], alone[i]
        if is_other[i, 1]:
            lines.append(f"sample {i}: Σ weight is {weight:.9g} packed, {weight_alone:.9g} padded")
            mistakes[_TARGETS] = None
            continue
        source = next((j for j in packed.neighbours(i) if leaks_from(i, j)), None)
        said = f"sample {i}: Σ loss is {loss:.9g} packed, {loss_alone:.9g} padded, "
        if source is None:
            lines.append(said + "whatever the tokens of the other samples are")
        else:
            lines.append(
                said + f"and changes with the tokens of sample {source}, {'before' if source < i else 'after'} it"
            )
        mistakes[_POSITIONS if source is None else _STATE if source < i else _LATER] = None
    if len(others) > _MOST_EXAMINED:
        lines.append(f"and {len(others) - _MOST_EXAMINED} more samples")
    return lines, "; or ".join(mistakes) or _NO_SAMPLE
