"""Collate functions: the samples of one group of a step as host arrays of a bucket's shape.

Letters: M microbatches, B rows, P samples of a row, T positions, n samples.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Int64

from jvarlen._common.checks import UserError, list_first, list_offenders
from jvarlen._common.types import Array, PyTree
from jvarlen.batches.batches import TokenBatch, batch_type
from jvarlen.batches.fields import PAIR_TOKENS, TOKENS, WEIGHTS, Field, Fields, prefixes_of, say_field
from jvarlen.data.samples import Sample, WeightedTokens, describe_error, describe_fields, named_values
from jvarlen.loading.placing import (
    Column,
    Side,
    distinct,
    packed_side,
    padded_side,
    place_field,
    positions_in_rows,
    zeros,
)
from jvarlen.planning.buckets import AnyBucket
from jvarlen.planning.lengths import SampleSize, row_sizes

__all__ = [
    "CollateFields", "CollateFn", "RefusedSamplesError", "StepSamples", "UnsaidPaddingError", "collate_tokens",
    "is_builtin", "refused_samples", "value_of",
]  # fmt: skip

_IGNORED = -100  # the target that PyTorch's cross_entropy leaves out, and with it the trainers of Hugging Face
_NARROWED = {np.dtype(np.float64): np.dtype(np.float32), np.dtype(np.complex128): np.dtype(np.complex64)}


class StepSamples(NamedTuple):
    """The input of a collate function: the samples of one step, or group of a step, as the dataset returned them.

    Attributes:
      bucket: the shape to fill.
      ids: int64[M, B], the sample of every row, or int64[M, B, P], the samples of every packed row; −1 for none.
        Padding rows come last in their microbatch. M counts the microbatches of this process.
      samples: M lists of the samples, in the order of `ids`.
      num_tokens: real tokens that were planned for these rows; None if unknown for this part of the group.
      truncate: whether samples longer than the bucket are cut to it, as in the longest bucket of a plan that
        truncates; in other buckets, a longer sample differs from its planned length.
      num_sequences: real samples of the whole step or group, on all processes.
      starts: int64, shaped as `ids`, of pairs with a last axis of their sides: rows hold `sample[start:stop]`; −1 for
        none. None where rows hold samples from their beginning.
      stops: int64, as `starts`.
      size: how a sample of two lengths counts in `num_tokens`, as in `Budget`.
      lengths: int64, as `ids`, of a stream: the tokens of each sample in its row, and 0 for none; of two lengths, both
        along one more axis. None for plans.
    """

    bucket: AnyBucket
    ids: Int64[np.ndarray, "M B *P"]
    samples: list[list[Sample]]
    num_tokens: int | None
    truncate: bool
    num_sequences: int
    starts: Int64[np.ndarray, "M B *P_D"] | None = None
    stops: Int64[np.ndarray, "M B *P_D"] | None = None
    size: SampleSize = "sum"
    lengths: Int64[np.ndarray, "M B *P_sides"] | None = None

    @property
    def samples_per_row(self) -> int:
        """P, the same in every step of the bucket: the most samples that a row can hold; 1 where nothing is packed."""
        return self.ids.shape[2] if self.ids.ndim == 3 else 1


CollateFn: TypeAlias = Callable[[StepSamples], PyTree]


def collate_tokens(step: StepSamples) -> TokenBatch:
    """Puts the samples of a step into rows of its bucket, one in a row or, packed, one after the other.

    Args:
      step: its samples are 1-D integer arrays whose tokens fit int32, or `WeightedTokens` of such arrays. Pairs are
        (source, target) of 1-D integer arrays; a target may also be `WeightedTokens`.

    Returns:
      A `Batch` of NumPy arrays, zero where there is no token; a `PackedBatch` if the plan is packed; for pairs a
      `PairBatch` or a `PackedPairBatch`.

    Raises:
      ValueError: samples are not 1-D integers, are longer than the bucket and not to be cut, or have other lengths than
        planned. The samples are listed.
    """
    return batch_type(len(step.bucket.lengths), step.ids.ndim == 3)(**_collate(step))


@dataclasses.dataclass(frozen=True)
class CollateFields:
    """Collates samples with these fields into a dict of NumPy arrays."""

    fields: Fields

    def __call__(self, step: StepSamples) -> dict[str, Array]:
        """The arrays by name, as in a batch of tokens; raises ValueError that lists samples with other fields."""
        return _collate(step, self.fields)

    def lengths_of(self, sample: Sample) -> list[int]:
        """The lengths of a sample, each from the first field that has it."""
        sizes: dict[int, int] = {}
        for field in _skip_weights(self.fields):
            if any(side not in sizes for side in field.sides):
                shape = np.shape(value_of(sample, field.name))
                sizes |= {side: shape[axis] for axis, side in enumerate(field.sides) if side not in sizes}
        return [sizes[side] for side in sorted(sizes)]

    def cut(self, sample: Sample, parts: Sequence[slice]) -> dict[str, Array]:
        """The sample with every axis cut to the part of its length, and positions in what is left."""
        values = {}
        for field in _skip_weights(self.fields):
            values[field.name] = np.asarray(value_of(sample, field.name))[tuple(parts[side] for side in field.sides)]
            if field.positions_of is not None and (begin := parts[field.positions_of].start):
                values[field.name] = _move_back(values[field.name], begin, field.padding)
        if WEIGHTS in (held := named_values(sample)):
            values[WEIGHTS] = held[WEIGHTS] if np.ndim(held[WEIGHTS]) == 0 else np.asarray(held[WEIGHTS])[parts[-1]]
        return values


def _move_back(positions: np.ndarray, begin: int, padding: float | None) -> np.ndarray:
    """Positions after `begin`; negative and not `padding` where they are before it, which collating refuses."""
    none = min(padding or 0, 0)
    moved = positions.astype(np.int64) - begin
    return np.where((positions == none) & (positions < 0), positions, np.where(moved < 0, moved + none, moved))


def is_builtin(collate: CollateFn | None) -> bool:
    """Whether it is a collate function of the library."""
    return isinstance(collate, CollateFields) or collate is collate_tokens


class RefusedSamplesError(UserError):
    """Lists samples of a step that cannot be collated; keys of `reasons` are places in the step."""

    reasons: dict[int, str]

    @classmethod
    def of(cls, step: StepSamples, reasons: dict[int, str]) -> RefusedSamplesError:
        """The error; not by `__init__`, so that worker processes can send it."""
        ids = step.ids[step.ids >= 0].tolist()
        listed = list_first((f"id {ids[place]}: {reason}" for place, reason in reasons.items()), "; ")
        error = cls(f"samples that cannot be collated: {listed}")
        error.reasons = reasons
        return error


class UnsaidPaddingError(UserError):
    """What padding a field needs is unclear: the fault of no sample, so that none is left out for it."""


def refused_samples(collate: CollateFn, step: StepSamples) -> dict[int, str]:
    """Tries each sample of a step alone: the place of those that cannot be collated, and why, in one line."""
    refused = {}
    samples = (sample for microbatch in step.samples for sample in microbatch)
    for place, (at, sample) in enumerate(zip(np.argwhere(step.ids >= 0).tolist(), samples, strict=True)):
        alone = tuple(slice(i, i + 1) for i in at)
        parts = step.starts, step.stops, step.lengths
        starts, stops, lengths = (None if each is None else each[alone] for each in parts)
        one = step._replace(ids=step.ids[alone], samples=[[sample]], num_tokens=None)
        try:
            collate(one._replace(starts=starts, stops=stops, lengths=lengths))
        except (MemoryError, UnsaidPaddingError):
            raise
        except Exception as error:
            refused[place] = error.reasons[0] if isinstance(error, RefusedSamplesError) else describe_error(error)
    return refused


def _collate(step: StepSamples, fields: Fields | None = None) -> dict[str, Array]:
    """The arrays of a batch by name; raises ValueError that lists the samples that cannot be collated."""
    try:
        return _make_arrays(step, fields)
    except (MemoryError, UnsaidPaddingError):
        raise
    except Exception:
        reasons = refused_samples(functools.partial(_make_arrays, fields=fields), step)
        if not reasons:
            raise
        raise RefusedSamplesError.of(step, reasons) from None


@np.errstate(over="raise")  # where a number becomes infinite in the type of its field
def _make_arrays(step: StepSamples, fields: Fields | None) -> dict[str, Array]:
    """The arrays of a batch by name; without fields, samples are tokens."""
    is_sample, bucket_lengths = step.ids >= 0, step.bucket.lengths
    ids, flat = step.ids[is_sample], [sample for microbatch in step.samples for sample in microbatch]
    is_named = fields is not None
    if fields is None:
        fields, columns = _token_columns(flat, len(bucket_lengths))
    else:
        fields, columns = _named_columns(fields, flat, len(bucket_lengths))
    sizes_of_sides = _sizes(fields, columns, len(bucket_lengths))
    starts = np.zeros_like(sizes_of_sides)
    if step.truncate or step.starts is not None:  # a row may hold a part of its sample
        ranges = [starts, np.tile(np.array(bucket_lengths)[:, None], len(ids))]
        for i, given in enumerate((step.starts, step.stops)):
            if given is not None:
                ranges[i] = given[is_sample].reshape(len(ids), len(bucket_lengths)).T
        starts, stops = ranges
        columns = [_cut(*of_field, starts, stops) for of_field in zip(fields, columns, strict=True)]
        _check_begins(fields, columns, starts)
        sizes_of_sides = [*np.maximum(np.minimum(sizes_of_sides, stops) - starts, 0)]
    _check_planned(step, ids, np.stack(sizes_of_sides, axis=1))
    arrays: dict[str, Array] = {}
    sides: list[Side] = []
    prefixes, has_own_names = prefixes_of(fields, len(bucket_lengths)), any(field.length_names for field in fields)
    for prefix, sizes, length in zip(prefixes, sizes_of_sides, bucket_lengths, strict=True):
        if is_sample.ndim == 3:
            sides.append(packed_side(is_sample, ids, sizes, length))
        else:
            sides.append(padded_side(is_sample, ids, sizes, length, prefix[:-1] if has_own_names else None))
        arrays |= {f"{prefix}{name}": array for name, array in sides[-1].arrays.items()}
    has_weight_MxBxT = sides[-1].is_token_MxBxT
    arrays[WEIGHTS] = zeros(has_weight_MxBxT.shape, np.float32)
    arrays[WEIGHTS][...] = has_weight_MxBxT
    for field, column in zip(fields, columns, strict=True):
        if (of := field.positions_of) is not None:
            field, column = positions_in_rows(field, column, sides[of], starts[of], sizes_of_sides[of])
        arrays[field.name] = place_field(field, column, sides, is_sample, bucket_lengths)
        if is_named and field.padding is None and np.dtype(field.dtype).kind == "i":
            _check_padding(field, column, arrays[field.name], ids, fields, len(bucket_lengths))
    if not (arrays[WEIGHTS].min() >= 0 and arrays[WEIGHTS].max() < np.inf):
        raise UserError("loss weights must be finite and at least 0")
    if step.ids.max(initial=0) >= 2**31:
        raise UserError(f"ids of samples must fit int32, and this step has {step.ids.max()}: give your own collate=")
    return arrays | {
        "num_sequences": np.float32(step.num_sequences),
        "ids": step.ids.astype(np.int32),
        "is_real": is_sample,
    }


def _check_padding(
    field: Field, column: Column, placed: np.ndarray, ids: Int64[np.ndarray, " n"], fields: Fields, num_lengths: int
) -> None:
    """Raises ValueError if an integer field holds −100, which losses ignore, and so may learn from a padding of 0."""
    if placed.min(initial=0) <= _IGNORED and (placed == _IGNORED).any():  # the least is found in less time
        axes = say_field(field, num_lengths)
        said = {each.name: say_field(each, num_lengths) for each in _skip_weights(fields)} | {
            field.name: (axes, _IGNORED)
        }
        holding = (i for i, values in zip(ids.tolist(), column, strict=True) if (values == _IGNORED).any())
        raise UnsaidPaddingError(
            f"the field {field.name!r} holds {_IGNORED}, which losses ignore, and its padding would be 0, which they "
            f"learn: give all fields, as fields={said}, or ({axes!r}, 0) for {field.name!r} to keep 0; samples "
            f"{list_first(f'id {i}' for i in holding)}"
        )


def value_of(sample: Sample, name: str) -> Array:
    """A field of a mapping or dataclass."""
    return sample[name] if isinstance(sample, Mapping) else getattr(sample, name)


def _token_columns(flat: list[Sample], num_sides: int) -> tuple[Fields, list[Column]]:
    """The tokens of each side, and loss weights where samples have them, as fields."""
    if num_sides == 1:
        fields, by_side = TOKENS, [flat]
    elif all(len(pair) == 2 for pair in flat):
        fields, by_side = PAIR_TOKENS, [[pair[side] for pair in flat] for side in range(2)]
    else:
        raise UserError(f"no source and target, but {describe_fields(flat[0]) or type(flat[0]).__name__}")
    columns: list[Column] = [*map(_token_arrays, by_side)]
    if not any(issubclass(kind, WeightedTokens) for kind in set(map(type, by_side[-1]))):
        return fields, columns
    weights = [
        each.weights if isinstance(each, WeightedTokens) else np.ones(len(tokens), np.float32)
        for each, tokens in zip(by_side[-1], columns[-1], strict=True)
    ]
    return (*fields, Field(WEIGHTS, (num_sides - 1,), (), "float32")), [*columns, weights]


def _token_arrays(samples: list[Sample]) -> list[np.ndarray]:
    arrays = samples
    try:
        if set(map(type, samples)) != {np.ndarray} or 0 in distinct(samples, "size"):
            arrays = [np.asarray(each.tokens if isinstance(each, WeightedTokens) else each) for each in samples]
            arrays = [array if array.size else array.astype(np.int32) for array in arrays]  # an empty list has no type
        are_integers = {dtype.kind for dtype in distinct(arrays, "dtype")} <= {"i", "u"}
    except ValueError:  # fields of several sizes
        are_integers = False
    if not are_integers or not distinct(arrays, "ndim") <= {1}:
        if isinstance(samples[0], str | bytes):
            raise UserError("text, not tokens: a tokenizer gives these, and TokenDataset.from_bytes the bytes of texts")
        kind = describe_fields(samples[0]) or f"{np.ndim(samples[0])}-D {np.asarray(samples[0]).dtype}"
        raise UserError(f"no 1-D array of integer tokens, but {kind}; for other samples, give load your own collate=")
    return arrays


def _skip_weights(fields: Fields) -> Fields:
    return tuple(field for field in fields if field.name != WEIGHTS)


def _named_columns(fields: Fields, flat: list[Sample], num_sides: int) -> tuple[Fields, list[Column]]:
    """The fields of each sample. If one has loss weights, all get some along the last length, by default 1."""
    are_mappings = all(issubclass(kind, Mapping) for kind in set(map(type, flat)))
    others = _skip_weights(fields)
    columns = []
    for field in others:
        get = operator.itemgetter(field.name) if are_mappings else functools.partial(value_of, name=field.name)
        columns.append(_column(field, list(map(get, flat))))
    by_sample = [sample if isinstance(sample, Mapping) else named_values(sample) for sample in flat]
    are_weighted = [WEIGHTS in values for values in by_sample]
    if len(others) < len(fields) and not all(are_weighted):
        raise UserError(f"no field {WEIGHTS!r}, which fields= names")
    if not any(are_weighted):
        return others, columns
    sizes = _sizes(others, columns, num_sides)[-1]
    weights = [
        weight if np.ndim(weight := values.get(WEIGHTS, 1)) else np.full(size, weight)
        for values, size in zip(by_sample, sizes.tolist(), strict=True)
    ]
    field = Field(WEIGHTS, (num_sides - 1,), (), "float32")
    return (*others, field), [*columns, _column(field, weights)]


def _column(field: Field, values: list[Array]) -> Column:
    num_axes = len(field.sides)
    if not field.sides:
        num_axes, arrays = 1, [np.array(values) if values else np.zeros((0, *field.shape), field.dtype)]
    elif set(map(type, values)) == {np.ndarray}:
        arrays = values
    else:
        empty = np.zeros((*(0 for _ in field.sides), *field.shape), field.dtype)  # an empty list has no type
        arrays = [array if array.shape != (0,) else empty for array in map(np.asarray, values)]
    wanted, dtypes = np.dtype(field.dtype), distinct(arrays, "dtype")
    has_shape = distinct(arrays, "ndim") <= {num_axes + len(field.shape)} and (
        not field.shape or {array.shape[num_axes:] for array in arrays} <= {field.shape}
    )
    if not has_shape or not all(_can_hold(wanted, dtype) for dtype in dtypes):
        shape = ", ".join([*("any" for _ in field.sides), *map(str, field.shape)])
        found = f"{arrays[0].dtype} {arrays[0].shape if field.sides else arrays[0].shape[1:]}"
        has_floats = wanted.kind in "iu" and any(np.issubdtype(dtype, np.floating) for dtype in dtypes)
        raise UserError(
            f"the field {field.name!r} must be {field.dtype} ({shape}), as in other samples, not {found}"
            + "; give it in all samples as floats, or in all as integers" * has_floats
        )
    if wanted.kind in "fc":
        integers = (array for array in map(np.asarray, values) if array.dtype.kind in "iu")
        if not all((array.astype(wanted) == array).all() for array in integers):
            raise UserError(f"the field {field.name!r} is {field.dtype}, which does not hold these integers exactly")
    return arrays if field.sides else arrays[0]


def _can_hold(wanted: np.dtype, dtype: np.dtype) -> bool:
    """Whether a field of one dtype can hold values of another; whether integers fit is checked by their values."""
    if wanted.kind in "iu":
        return dtype.kind in "iu"
    return np.can_cast(dtype, wanted) or _NARROWED.get(dtype) == wanted or (wanted.kind in "fc" and dtype.kind in "iu")


def _sizes(fields: Fields, columns: list[Column], num_sides: int) -> list[Int64[np.ndarray, " n"]]:
    """The length of each sample on each side; raises ValueError where its fields differ."""
    found: dict[int, tuple[str, list[int]]] = {}
    for field, column in zip(fields, columns, strict=True):
        for axis, side in enumerate(field.sides):
            sizes = [array.shape[axis] for array in column] if axis else list(map(len, column))
            first_name, first_sizes = found.setdefault(side, (field.name, sizes))
            if sizes != first_sizes:
                raise UserError(f"different lengths: {field.name} has {sizes}, {first_name} {first_sizes}")
    return [np.fromiter(found[side][1], np.int64) for side in range(num_sides)]


def _cut(field: Field, column: Column, starts: Int64[np.ndarray, "D n"], stops: Int64[np.ndarray, "D n"]) -> Column:
    """The part of each sample's field that its row holds."""
    if not field.sides:
        return column
    by_axis = [map(slice, starts[side].tolist(), stops[side].tolist()) for side in field.sides]
    return [array[part] for array, part in zip(column, zip(*by_axis, strict=True), strict=True)]


def _check_begins(fields: Fields, columns: Sequence[Column], starts: Int64[np.ndarray, "D n"]) -> None:
    """Raises ValueError for a part of a sample that begins within answers: their prompt would be missing."""
    for field, column in zip(fields, columns, strict=True):
        if field.name != "answer_ids" or not field.sides:
            continue
        if any(start and np.any(array[:1]) for start, array in zip(starts[field.sides[0]], column, strict=True)):
            raise UserError(
                "a part of a sample begins within answers, without the prompt that they share: give share_prompts "
                'max_length= and plan with overlong="error", and not with packing="wrapped"'
            )


def _check_planned(step: StepSamples, ids: Int64[np.ndarray, " n"], lengths: Int64[np.ndarray, "n sides"]) -> None:
    if step.num_tokens is None:
        return
    if (found := row_sizes(lengths, step.size).sum()) != step.num_tokens:
        listed = list_offenders(ids, lengths if lengths.shape[1] > 1 else lengths[:, 0])
        raise UserError(
            f"the samples of a step hold {found:,} tokens, but {step.num_tokens:,} were planned; this dataset is not "
            f"the one whose lengths were planned: {listed}"
        )
