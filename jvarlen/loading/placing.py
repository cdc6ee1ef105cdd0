"""Places samples in rows: where they lie along each length, their fields there, and the padding around them.

Letters: M microbatches, B rows, P samples of a row, T positions, n samples.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, Int64

from jvarlen._common.checks import UserError, list_first, list_offenders
from jvarlen.batches.fields import Field

__all__ = ["Column", "Side", "distinct", "packed_side", "padded_side", "place_field", "positions_in_rows", "zeros"]

_ALIGNMENT = 64  # bytes
_LONG = 128  # numbers of a sample; longer samples are copied faster one by one than all at once

Column: TypeAlias = list[np.ndarray] | np.ndarray
"""A field of all samples: an array of each, or one of n entries."""


class Side(NamedTuple):
    """The places of a step's samples in rows, along one of their lengths."""

    arrays: dict[str, np.ndarray]  # of the batch: lengths, or segments and positions
    is_token_MxBxT: Bool[np.ndarray, "M B T"]
    starts: Int64[np.ndarray, " n"]  # in all rows, one after the other
    num_tokens: int


def padded_side(
    is_sample_MxB: Bool[np.ndarray, "M B"],
    ids: Int64[np.ndarray, " n"],
    sizes: Int64[np.ndarray, " n"],
    length: int,
    name: str | None = None,
) -> Side:
    """One sample a row, each from its row's start; a length that the user has named is so called in errors."""
    if (too_long := sizes > length).any():
        along = "" if name is None else f" along {name!r}, or fields= names the lengths in another order than the plan"
        offenders = list_offenders(ids[too_long], sizes[too_long], length)
        raise UserError(f"samples longer than their bucket{along}: {offenders}")
    lengths_MxB = np.zeros(is_sample_MxB.shape, np.int32)
    lengths_MxB[is_sample_MxB] = sizes
    is_token_MxBxT = np.arange(length, dtype=np.int32) < lengths_MxB[..., None]
    starts = np.flatnonzero(is_sample_MxB) * length
    return Side({"lengths": lengths_MxB}, is_token_MxBxT, starts, int(sizes.sum()))


def packed_side(
    is_sample_MxBxP: Bool[np.ndarray, "M B P"],
    ids: Int64[np.ndarray, " n"],
    sizes: Int64[np.ndarray, " n"],
    length: int,
) -> Side:
    """The samples of a row one after the other."""
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
    segments, first = (np.repeat(values.astype(np.int32), runs[0]).reshape(shape) for values in runs[1:])
    is_token_MxBxT = segments > 0
    positions = np.subtract(np.arange(segments.size, dtype=np.int32).reshape(shape), first, out=zeros(shape, np.int32))
    positions *= is_token_MxBxT
    return Side({"segment_ids": segments, "positions": positions}, is_token_MxBxT, starts, int(sizes.sum()))


def distinct(arrays: Column, name: str) -> set[Any]:
    """The distinct values of an attribute."""
    return set(map(operator.attrgetter(name), arrays))


def zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
    """Zeros that begin at a multiple of 64 bytes: CPU devices take such arrays without a copy."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + num_bytes].view(dtype).reshape(shape)


def place_field(
    field: Field, column: Column, sides: list[Side], is_sample: Bool[np.ndarray, "M B *P"], lengths: tuple[int, ...]
) -> np.ndarray:
    """The field in rows or stacked, its padding value where there is no sample."""
    if not field.sides:
        placed, is_real = np.zeros((*is_sample.shape, *field.shape), field.dtype), is_sample
        placed[is_sample] = _fit(field, np.asarray(column))
    elif len(field.sides) == 1:
        placed, is_real = _place_tokens(field, column, sides[field.sides[0]]), sides[field.sides[0]].is_token_MxBxT
    else:
        placed = _place_squares(field, column, is_sample, lengths)
        is_real = is_sample
        for side in field.sides:
            along = sides[side].is_token_MxBxT
            is_real = is_real[..., None] & along.reshape(*is_sample.shape, *[1] * (is_real.ndim - 2), -1)
    if padding := field.padding:
        is_padding = ~is_real.reshape(*is_real.shape, *(1 for _ in field.shape))
        np.copyto(placed, np.asarray(padding, field.dtype), where=is_padding)
    return placed


def positions_in_rows(
    field: Field, column: Column, side: Side, starts: Int64[np.ndarray, " n"], sizes: Int64[np.ndarray, " n"]
) -> tuple[Field, Column]:
    """Positions in the rows, of positions in each whole sample, from whose start a row holds `sizes` from `starts`.

    Padding is the place after the row's end. A negative padding value stands for no position in samples, too.
    """
    length, counts = side.is_token_MxBxT.shape[-1], [array.size for array in column]
    flat = np.concatenate([np.zeros(0, np.int64), *map(np.ravel, column)]).astype(np.int64)
    first, size, row_start = (np.repeat(values, counts) for values in (starts, sizes, side.starts % length))
    is_none = (flat == field.padding) & (flat < 0)
    placed = flat - first
    if (is_outside := ((placed < 0) | (placed >= size)) & ~is_none).any():
        raise UserError(
            f"the field {field.name!r} holds the positions {list_first(np.unique(flat[is_outside]).tolist())}, and its "
            f"row holds its sample from {first[is_outside][0]} to {(first + size)[is_outside][0] - 1}: leave out what "
            "lies elsewhere, or plan so that this sample is not cut"
        )
    placed = np.where(is_none, flat, placed + row_start).astype(np.int32)
    field = field._replace(padding=length if field.padding is None else field.padding)
    if isinstance(column, np.ndarray):
        return field, placed.reshape(column.shape)
    ends = np.cumsum(counts).tolist()
    return field, [placed[end - each.size : end].reshape(each.shape) for end, each in zip(ends, column, strict=True)]


def _place_tokens(field: Field, arrays: Column, side: Side) -> np.ndarray:
    """The field in rows, zero where there is no sample."""
    placed = zeros((*side.is_token_MxBxT.shape, *field.shape), _wide_dtype(field, arrays))
    if side.num_tokens * math.prod(field.shape) >= _LONG * len(arrays):
        in_rows = placed.reshape(-1, *field.shape)
        for start, array in zip(side.starts.tolist(), arrays, strict=True):
            in_rows[start : start + len(array)] = array
    else:
        placed[side.is_token_MxBxT] = np.concatenate(arrays)
    return _fit(field, placed)


def _place_squares(
    field: Field, arrays: Column, is_sample_MxB: Bool[np.ndarray, "M B"], most: tuple[int, ...]
) -> np.ndarray:
    """Fields with several axes of lengths, zero where there is no sample."""
    shape = (*is_sample_MxB.shape, *(most[side] for side in field.sides), *field.shape)
    placed = zeros(shape, _wide_dtype(field, arrays))
    for (m, b), array in zip(np.argwhere(is_sample_MxB).tolist(), arrays, strict=True):
        placed[m, b][tuple(map(slice, array.shape[: len(field.sides)]))] = array
    return _fit(field, placed)


def _wide_dtype(field: Field, arrays: Column) -> np.dtype:
    """The dtype of the field; for integers, one that holds all values of the arrays."""
    wanted = np.dtype(field.dtype)
    return np.result_type(*distinct(arrays, "dtype")) if wanted.kind in "iu" and len(arrays) else wanted


def _fit(field: Field, values: np.ndarray) -> np.ndarray:
    """The values in the dtype of the field; raises ValueError for integers that do not fit it."""
    wanted = np.dtype(field.dtype)
    if wanted.kind in "iu" and not np.can_cast(values.dtype, wanted) and values.size:
        limits = np.iinfo(wanted)
        if values.min() < limits.min or values.max() > limits.max:
            raise UserError(f"{field.name} must fit {field.dtype}, and reach from {values.min()} to {values.max()}")
    return values.astype(wanted, copy=False)
