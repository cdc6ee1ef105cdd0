"""Collate functions: the samples of one step as host arrays of a bucket's shape.

Letters: M microbatches, B rows, P samples of a row, T positions, n samples.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, Int64

from jvarlen._common.checks import UserError, list_first, list_offenders
from jvarlen.batches.batches import Batch, PackedBatch, PackedPairBatch, PairBatch, arrays_by_name, batch_type
from jvarlen.batches.fields import PAIR_TOKENS, TOKENS, WEIGHTS, Field, Fields, prefixes_of
from jvarlen.planning.buckets import AnyBucket
from jvarlen.planning.lengths import PairSize, row_sizes
from jvarlen.planning.samples import WeightedTokens, fields_of

__all__ = [
    "CollateFields",
    "CollateFn",
    "StepSamples",
    "collate_tokens",
    "count_without_target",
    "is_own",
    "value_of",
]

_ALIGNMENT = 64  # bytes
_LONG = 128  # numbers of a sample, from which on copying samples one by one is faster than all at once
_NARROWED = {np.dtype(np.float64): np.dtype(np.float32), np.dtype(np.complex128): np.dtype(np.complex64)}


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


def collate_tokens(step: StepSamples) -> Batch | PackedBatch | PairBatch | PackedPairBatch:
    """Puts the samples of a step into rows of its bucket, one in a row or, packed, one after the other.

    Args:
      step: its samples are 1-D integer arrays whose tokens fit int32, or `WeightedTokens` of such. Of pairs they are
        (source, target) of 1-D integer arrays; a target may also be `WeightedTokens`.

    Returns:
      A `Batch` of NumPy arrays, zero where no token is; a `PackedBatch` if the plan is packed; of pairs a `PairBatch`
      or a `PackedPairBatch`.

    Raises:
      ValueError: a sample is not 1-D integers; it is longer than the bucket, and the plan does not truncate; or the
        lengths of the samples are not the planned ones. The samples are listed.
    """
    return batch_type(len(step.bucket.lengths), step.ids.ndim == 3)(**_collated(step))


@dataclasses.dataclass(frozen=True)
class CollateFields:
    """Makes the batch, a dict of NumPy arrays, of samples with these fields."""

    fields: Fields

    def __call__(self, step: StepSamples) -> dict[str, Any]:
        """The arrays by name, as in a batch of tokens; raises ValueError that lists samples with other fields."""
        try:
            with np.errstate(over="raise"):
                return _collated(step, self.fields)
        except FloatingPointError:
            flat = itertools.chain.from_iterable(step.samples)
            wrong = [
                f"id {i}: {field.name}"
                for i, sample in zip(step.ids[step.ids >= 0].tolist(), flat, strict=True)
                for field in self.fields
                if _becomes_infinite(field, value_of(sample, field.name))
            ]
            raise UserError(f"numbers beyond the type that the field has in batches: {list_first(wrong)}") from None

    def lengths_of(self, sample: Any) -> list[int]:
        """The lengths of a sample: of each, the size that the first field with it has."""
        sizes: dict[int, int] = {}
        for field in self.fields:
            if any(side not in sizes for side in field.sides):
                shape = np.shape(value_of(sample, field.name))
                sizes |= {side: shape[axis] for axis, side in enumerate(field.sides) if side not in sizes}
        return [sizes[side] for side in sorted(sizes)]

    def cut(self, sample: Any, lengths: list[int]) -> dict[str, Any]:
        """The sample with every axis of a length cut to this one."""
        return {
            field.name: np.asarray(value_of(sample, field.name))[tuple(slice(lengths[side]) for side in field.sides)]
            for field in self.fields
        }


def is_own(collate: CollateFn) -> bool:
    """Whether the library made it."""
    return isinstance(collate, CollateFields) or collate is collate_tokens


def count_without_target(batch: Any) -> int:
    """How many samples of a batch, which the library made, have weight 0 on all tokens, of a pair on the target's."""
    arrays = arrays_by_name(batch)
    assert arrays is not None
    is_real, has_weight = arrays["is_real"], arrays["weights"] > 0
    segments = arrays.get("target_segment_ids", arrays.get("segment_ids"))
    if segments is None:
        return int((is_real & ~has_weight.any(axis=2)).sum())
    if np.array_equal(has_weight, segments > 0):  # which is quick
        return 0
    num_places = is_real.shape[2] + 1
    first_of_rows = num_places * np.arange(is_real[..., 0].size, dtype=np.int32).reshape(*is_real.shape[:2], 1)
    has_target = np.zeros(is_real[..., 0].size * num_places, bool)
    has_target[(segments + first_of_rows)[has_weight]] = True
    return int((is_real & ~has_target.reshape(*is_real.shape[:2], -1)[..., 1:]).sum())


def _chunks(step: StepSamples, flat: list[Any]) -> tuple[Int64[np.ndarray, " n"], list[Int64[np.ndarray, " n"]]] | None:
    """Where the part of each sample that its row holds begins, and ends on each side; None if all are whole."""
    if step.starts is not None and step.stops is not None:
        is_sample = step.ids >= 0
        return step.starts[is_sample], [step.stops[is_sample]]
    if step.truncate:
        return np.zeros(len(flat), np.int64), [np.full(len(flat), most) for most in step.bucket.lengths]
    return None


def _collated(step: StepSamples, fields: Fields | None = None) -> dict[str, Any]:
    """The arrays of a batch by name; without fields, of samples of tokens."""
    is_sample, lengths_of_bucket = step.ids >= 0, step.bucket.lengths
    ids, flat = step.ids[is_sample], [sample for microbatch in step.samples for sample in microbatch]
    if fields is None:
        fields, columns = _token_columns(flat, ids, len(lengths_of_bucket))
    else:
        columns = [_column(field, flat, ids) for field in fields]
    sizes_of_sides = _sizes(fields, columns, ids, len(lengths_of_bucket))
    if (chunks := _chunks(step, flat)) is not None:
        begins, of_sides = chunks
        columns = [_cut(*of_field, begins, of_sides) for of_field in zip(fields, columns, strict=True)]
        sizes_of_sides = [
            np.maximum(np.minimum(sizes, ends) - begins, 0)
            for sizes, ends in zip(sizes_of_sides, of_sides, strict=True)
        ]
    _check_planned(step, ids, np.stack(sizes_of_sides, axis=1))
    arrays: dict[str, Any] = {}
    sides: list[_Side] = []
    make_side = _packed_side if is_sample.ndim == 3 else _padded_side
    for prefix, sizes, length in zip(
        prefixes_of(len(lengths_of_bucket)), sizes_of_sides, lengths_of_bucket, strict=True
    ):
        sides.append(make_side(is_sample, ids, sizes, length))
        arrays |= {f"{prefix}{name}": array for name, array in sides[-1].arrays.items()}
    has_weight_MxBxT = sides[-1].is_token_MxBxT
    for field, column in zip(fields, columns, strict=True):
        if field.name == WEIGHTS and not field.sides:  # of a sample: the same at each of its positions
            arrays[WEIGHTS] = _zeros(has_weight_MxBxT.shape, np.float32)
            arrays[WEIGHTS][has_weight_MxBxT] = np.repeat(column, sizes_of_sides[-1])
        elif not field.sides:
            arrays[field.name] = np.zeros((*is_sample.shape, *field.shape), field.dtype)
            arrays[field.name][is_sample] = _checked(field, np.asarray(column))
        elif len(field.sides) == 1:
            arrays[field.name] = _placed(field, column, sides[field.sides[0]])
        else:
            arrays[field.name] = _squares(field, column, is_sample, lengths_of_bucket)
    if WEIGHTS not in arrays:
        arrays[WEIGHTS] = _zeros(has_weight_MxBxT.shape, np.float32)
        arrays[WEIGHTS][...] = has_weight_MxBxT
    elif not (arrays[WEIGHTS].min() >= 0 and arrays[WEIGHTS].max() < np.inf):
        weights = next(column for field, column in zip(fields, columns, strict=True) if field.name == WEIGHTS)
        wrong = [i for i, each in zip(ids.tolist(), weights, strict=True) if not np.all((each >= 0) & (each < np.inf))]
        raise UserError(f"loss weights must be finite and at least 0: id {list_first(wrong)}")
    if step.ids.max(initial=0) >= 2**31:
        raise UserError(f"ids of samples must fit int32, and this step has {step.ids.max()}: give your own collate=")
    return arrays | {
        "num_sequences": np.float32(step.num_sequences),
        "ids": step.ids.astype(np.int32),
        "is_real": step.ids >= 0,
    }


def value_of(sample: Any, name: str) -> Any:
    """A field of a mapping or dataclass."""
    return sample[name] if isinstance(sample, Mapping) else getattr(sample, name)


def _tokens(sample: Any) -> np.ndarray:
    tokens = sample.tokens if isinstance(sample, WeightedTokens) else np.asarray(sample)
    return tokens if tokens.size else tokens.astype(np.int32)  # an empty list has no type


def _token_columns(
    flat: list[Any], ids: Int64[np.ndarray, " n"], num_sides: int
) -> tuple[Fields, list[list[np.ndarray] | np.ndarray]]:
    """The tokens of each side, and where samples have them their loss weights, as fields."""
    columns: list[list[np.ndarray] | np.ndarray] = []
    try:
        of_sides = [flat] if num_sides == 1 else [[pair[side] for pair in flat] for side in range(2)]
        for of_side in of_sides:
            are_arrays = set(map(type, of_side)) <= {np.ndarray}
            columns.append(of_side if are_arrays and _are_integers(of_side) else list(map(_tokens, of_side)))
        are_tokens = all(_are_integers(column) and _each(column, "ndim") <= {1} for column in columns)
        are_tokens &= num_sides == 1 or set(map(len, flat)) <= {2}  # further fields would be lost
    except (LookupError, TypeError, ValueError):  # no pairs, or fields of several sizes
        are_tokens = False
    if not are_tokens:
        sides = [None] if num_sides == 1 else [0, 1]
        kinds = [next(filter(None, (_kind_if_no_tokens(each, side) for side in sides)), None) for each in flat]
        listed = [f"id {i}: {kind}" for i, kind in zip(ids.tolist(), kinds, strict=True) if kind]
        what = "samples must be 1-D arrays of integer tokens" + ("" if num_sides == 1 else ", source and target")
        raise UserError(f"{what}; for others, give load your own collate=: {list_first(listed, '; ')}")
    fields = TOKENS if num_sides == 1 else PAIR_TOKENS
    if not any(issubclass(kind, WeightedTokens) for kind in set(map(type, of_sides[-1]))):
        return fields, columns
    weights = [
        each.weights if isinstance(each, WeightedTokens) else np.ones(len(tokens), np.float32)
        for each, tokens in zip(of_sides[-1], columns[-1], strict=True)
    ]
    return (*fields, Field(WEIGHTS, (num_sides - 1,), (), "float32")), [*columns, weights]


def _column(field: Field, flat: list[Any], ids: Int64[np.ndarray, " n"]) -> list[np.ndarray] | np.ndarray:
    """The field of all samples: arrays of different lengths, or one array of n entries."""
    are_mappings = all(issubclass(kind, Mapping) for kind in set(map(type, flat)))
    errors = (LookupError, AttributeError, TypeError, ValueError)
    try:
        get = operator.itemgetter(field.name) if are_mappings else functools.partial(value_of, name=field.name)
        values = list(map(get, flat))
        if not field.sides:
            column = np.array(values) if values else np.zeros((0, *field.shape), field.dtype)
            if _fits(field, [column], 1) and _holds(field, values):
                return column
        else:
            arrays = values if set(map(type, values)) <= {np.ndarray} else list(map(np.asarray, values))
            if _fits(field, arrays, len(field.sides)) and _holds(field, arrays):
                return arrays
    except errors:
        pass
    arrays, wrong = [], []
    for i, sample in zip(ids.tolist(), flat, strict=True):
        try:
            array = np.asarray(value_of(sample, field.name))
        except errors as error:
            wrong.append(f"id {i}: {error!r}")
            continue
        if array.shape == (0,) and field.sides:  # an empty list
            array = np.zeros((0,) * len(field.sides) + field.shape, field.dtype)
        if not _fits(field, [array], len(field.sides)):
            wrong.append(f"id {i}: {array.dtype} {array.shape}")
        elif not _holds(field, [array]):
            wrong.append(f"id {i}: integers that this type does not hold exactly")
        arrays.append(array)
    if wrong or not field.sides:
        shape = ", ".join([*("any" for _ in field.sides), *map(str, field.shape)])
        raise UserError(
            f"the field {field.name!r} must be {field.dtype} ({shape}), as in other samples: {list_first(wrong, '; ')}"
        )
    return arrays


def _fits(field: Field, arrays: list[np.ndarray], num_axes: int) -> bool:
    """Whether all arrays have the type and shape of the field, after so many axes."""
    has_shape = {array.shape[num_axes:] for array in arrays} <= {field.shape} if field.shape else True
    return (
        has_shape
        and _each(arrays, "ndim") <= {num_axes + len(field.shape)}
        and all(_takes(field, dtype) for dtype in _each(arrays, "dtype"))
    )


def _are_integers(arrays: list[np.ndarray] | np.ndarray) -> bool:
    return {dtype.kind for dtype in _each(arrays, "dtype")} <= {"i", "u"}


def _each(arrays: list[np.ndarray] | np.ndarray, name: str) -> set[Any]:
    """The distinct values of an attribute."""
    return set(map(operator.attrgetter(name), arrays))


def _holds(field: Field, values: list[Any]) -> bool:
    """Whether integers among the values of a field of floats stay exact."""
    own = np.dtype(field.dtype)
    if own.kind not in "fc":
        return True
    integers = [each for each in map(np.asarray, values) if each.dtype.kind in "iu"]
    return all((each.astype(own) == each).all() for each in integers)


def _becomes_infinite(field: Field, value: npt.ArrayLike) -> bool:
    array, own = np.asarray(value), np.dtype(field.dtype)
    with np.errstate(over="ignore"):
        return own.kind in "fc" and not np.array_equal(np.isinf(array.astype(own)), np.isinf(array))


def _takes(field: Field, dtype: np.dtype) -> bool:
    """Whether values of this type go into the field; of integers, it is checked whether the values do."""
    own = np.dtype(field.dtype)
    if field.name == WEIGHTS:
        return dtype.kind in "biuf"
    if own.kind in "iu":
        return dtype.kind in "iu"
    if own in (dtype, _NARROWED.get(dtype)):
        return True
    return own.kind in "fc" and dtype.kind in "iufc" and (dtype.kind in "iu" or np.can_cast(dtype, own))


def _sizes(
    fields: Fields, columns: list[list[np.ndarray] | np.ndarray], ids: Int64[np.ndarray, " n"], num_sides: int
) -> list[Int64[np.ndarray, " n"]]:
    """The length of each sample on each side; raises ValueError where its fields differ."""
    found: dict[int, tuple[str, list[int]]] = {}
    for field, column in zip(fields, columns, strict=True):
        for axis, side in enumerate(field.sides):
            sizes = [array.shape[axis] for array in column] if axis else list(map(len, column))
            first_name, first_sizes = found.setdefault(side, (field.name, sizes))
            if sizes != first_sizes:
                differing = (
                    f"id {i}: {field.name} has {size}, {first_name} {first}"
                    for i, size, first in zip(ids.tolist(), sizes, first_sizes, strict=True)
                    if size != first
                )
                raise UserError(f"fields of one sample have different lengths: {list_first(differing, '; ')}")
    return [np.fromiter(found[side][1], np.int64, len(ids)) for side in range(num_sides)]


def _cut(
    field: Field,
    column: list[np.ndarray] | np.ndarray,
    begins: Int64[np.ndarray, " n"],
    ends_of_sides: list[Int64[np.ndarray, " n"]],
) -> list[np.ndarray] | np.ndarray:
    """The field of each sample, as much of it as its row holds."""
    if not field.sides:
        return column
    of_axes = [map(slice, begins.tolist(), ends_of_sides[side].tolist()) for side in field.sides]
    return [array[part] for array, part in zip(column, zip(*of_axes, strict=True), strict=True)]


class _Side(NamedTuple):
    """Where the samples of a step lie in rows, along one of their lengths."""

    arrays: dict[str, np.ndarray]  # that tell it in the batch
    is_token_MxBxT: Bool[np.ndarray, "M B T"]
    starts: Int64[np.ndarray, " n"]  # in all rows, one after the other
    num_tokens: int


def _padded_side(
    is_sample_MxB: Bool[np.ndarray, "M B"], ids: Int64[np.ndarray, " n"], sizes: Int64[np.ndarray, " n"], length: int
) -> _Side:
    if (too_long := sizes > length).any():
        raise UserError(f"samples longer than their bucket: {list_offenders(ids[too_long], sizes[too_long], length)}")
    lengths_MxB = np.zeros(is_sample_MxB.shape, np.int32)
    lengths_MxB[is_sample_MxB] = sizes
    is_token_MxBxT = np.arange(length, dtype=np.int32) < lengths_MxB[..., None]
    starts = np.flatnonzero(is_sample_MxB) * length
    return _Side({"lengths": lengths_MxB}, is_token_MxBxT, starts, int(sizes.sum()))


def _packed_side(
    is_sample_MxBxP: Bool[np.ndarray, "M B P"],
    ids: Int64[np.ndarray, " n"],
    sizes: Int64[np.ndarray, " n"],
    length: int,
) -> _Side:
    sizes_MxBxP = np.zeros(is_sample_MxBxP.shape, np.int64)
    sizes_MxBxP[is_sample_MxBxP] = sizes
    ends_MxBxP = np.cumsum(sizes_MxBxP, axis=2)
    if (is_over := ends_MxBxP[..., -1:] > length).any():
        at_fault = (is_sample_MxBxP & is_over)[is_sample_MxBxP]
        offenders = list_offenders(ids[at_fault], sizes[at_fault], length)
        raise UserError(f"rows longer than their bucket, so these are not the samples that were packed: {offenders}")
    shape = (*is_sample_MxBxP.shape[:2], length)
    row, place = np.nonzero(is_sample_MxBxP.reshape(-1, is_sample_MxBxP.shape[2]))
    starts = row * length + (ends_MxBxP - sizes_MxBxP)[is_sample_MxBxP]
    # Samples and the gaps before them in turn, and the gap after the last.
    runs = np.zeros((3, 2 * len(sizes) + 1), np.int64)
    runs[:, 1::2] = sizes, place + 1, starts
    runs[0, ::2] = np.diff(np.append(starts, np.prod(shape)), prepend=0)
    runs[0, 2::2] -= sizes
    segments, begins = (np.repeat(values.astype(np.int32), runs[0]).reshape(shape) for values in runs[1:])
    is_token_MxBxT = segments > 0
    positions = np.subtract(
        np.arange(segments.size, dtype=np.int32).reshape(shape), begins, out=_zeros(shape, np.int32)
    )
    positions *= is_token_MxBxT
    return _Side({"segment_ids": segments, "positions": positions}, is_token_MxBxT, starts, int(sizes.sum()))


def _zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
    """Zeros that begin at a multiple of 64 bytes: CPU devices take such arrays without a copy."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + num_bytes].view(dtype).reshape(shape)


def _placed(field: Field, arrays: list[np.ndarray] | np.ndarray, side: _Side) -> np.ndarray:
    """The field in rows, zero where no sample is."""
    placed = _zeros((*side.is_token_MxBxT.shape, *field.shape), _type_before_checks(field, arrays))
    if side.num_tokens * math.prod(field.shape) >= _LONG * len(arrays):
        in_rows = placed.reshape(-1, *field.shape)
        for start, array in zip(side.starts.tolist(), arrays, strict=True):
            in_rows[start : start + len(array)] = array
    else:
        placed[side.is_token_MxBxT] = np.concatenate(arrays)
    return _checked(field, placed)


def _squares(
    field: Field, arrays: list[np.ndarray] | np.ndarray, is_sample_MxB: Bool[np.ndarray, "M B"], most: tuple[int, ...]
) -> np.ndarray:
    """Pair features, zero where no sample is."""
    shape = (*is_sample_MxB.shape, *(most[side] for side in field.sides), *field.shape)
    placed = _zeros(shape, _type_before_checks(field, arrays))
    for (m, b), array in zip(np.argwhere(is_sample_MxB).tolist(), arrays, strict=True):
        placed[m, b, : array.shape[0], : array.shape[1]] = array
    return _checked(field, placed)


def _type_before_checks(field: Field, arrays: list[np.ndarray] | np.ndarray) -> np.dtype:
    """The type of the field, or of integers one that holds all values of the arrays."""
    own = np.dtype(field.dtype)
    return np.result_type(*_each(arrays, "dtype")) if own.kind in "iu" and len(arrays) else own


def _checked(field: Field, values: np.ndarray) -> np.ndarray:
    """The values in the type of the field; raises ValueError for integers that do not fit it."""
    own = np.dtype(field.dtype)
    if own.kind in "iu" and not np.can_cast(values.dtype, own) and values.size:
        limits = np.iinfo(own)
        if values.min() < limits.min or values.max() > limits.max:
            raise UserError(
                f"{field.name} must fit {field.dtype}; those of a step reach from {values.min()} to {values.max()}"
            )
    return values.astype(own, copy=False)


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
        tokens = _tokens(part)
        kind = None if tokens.ndim == 1 and tokens.dtype.kind in "iu" else f"{tokens.ndim}-D {tokens.dtype}"
    except (LookupError, TypeError, ValueError):
        kind = type(sample).__name__
    return kind and (fields_of(sample) or kind)
