"""Fields of a batch: which axes of a sample's array have its length, and the other arrays of a batch.

Letters: M microbatches, B rows, P samples of a row, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from jvarlen._common.checks import UserError, is_number, list_first
from jvarlen.planning.buckets import AnyBucket

__all__ = [
    "LENGTH_NAMES", "PAIR_TOKENS", "PREFIXES", "RESERVED_NAMES", "TOKENS", "WEIGHTS", "Field", "FieldAxes", "Fields",
    "ParsedAxes", "arrays_spec", "axes_of", "name_axes", "parse_axes", "prefixes_of",
]  # fmt: skip

WEIGHTS = "weights"
PREFIXES = ("", "source_", "target_")  # of names of arrays of lengths, segments and positions
RESERVED_NAMES = frozenset([
    *(prefix + name for prefix in PREFIXES for name in ("lengths", "segment_ids", "positions")),
    "num_sequences", "ids", "is_real",
])  # fmt: skip
"""Names of arrays of every batch, which no field of a sample can have. `weights` of a sample are its loss weights."""
LENGTH_NAMES = ("length",), ("source", "target")
"""Names of the lengths of a sample that has one, and of a sample that has two."""

FieldAxes = Mapping[str, str | tuple[str, float]]
"""By the name of a field its axes, or its axes and its padding value, as `parse_axes` reads them."""


class Field(NamedTuple):
    """A field of samples: the arrays of a batch under one name.

    Attributes:
      name: the key in the batch.
      sides: which length of the sample each of the first axes has: 0, or 1 for the target of two; () if all samples
        have one shape.
      shape: the other axes.
      dtype: the name of the dtype in a batch.
      padding: the value where there is no sample; None: 0, or for positions the length of the bucket.
      positions_of: the length along which the values are positions in their own sample; None: they are no positions.
    """

    name: str
    sides: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    padding: float | None = None
    positions_of: int | None = None


Fields = tuple[Field, ...]

TOKENS: Fields = (Field("tokens", (0,), (), "int32"),)
PAIR_TOKENS: Fields = (Field("source_tokens", (0,), (), "int32"), Field("target_tokens", (1,), (), "int32"))


def prefixes_of(num_lengths: int) -> tuple[str, ...]:
    """The prefix of each length."""
    return PREFIXES[:1] if num_lengths == 1 else PREFIXES[1:]


class ParsedAxes(NamedTuple):
    """What is said of a field; attributes as in `Field`."""

    sides: tuple[int, ...]
    padding: float | None = None
    positions_of: int | None = None


def parse_axes(name: str, said: object, num_lengths: int) -> ParsedAxes:
    """Parses `"AXES"`, `"AXES of LENGTH"`, or one of these and a padding value in a tuple.

    AXES are the lengths that the first axes have, separated by a space, or "row" for none. Values of a field "of" a
    length are positions along it.
    """
    axes, *padding = said if isinstance(said, tuple) and said else (said,)
    known = LENGTH_NAMES[num_lengths - 1]
    choices = {"row": (), **{word: (side,) for side, word in enumerate(known)}}
    choices |= {f"{one} {other}": (*choices[one], *choices[other]) for one in known for other in known}
    words, *lengths = axes.split(" of ") if isinstance(axes, str) else [""]
    if words not in choices or len(lengths) > 1 or not set(lengths) <= set(known):
        raise UserError(
            f"axes of the field {name!r} must be one of {list_first(map(repr, choices))}, or for positions along a "
            f"length of their sample such as {f'{known[-1]} of {known[0]}'!r}; not {axes!r}"
        )
    if len(padding) != isinstance(said, tuple) or not all(
        is_number(value) or isinstance(value, bool | np.bool_) for value in padding
    ):
        raise UserError(f"the field {name!r} must be axes, or axes and a padding value as ({axes!r}, 0), not {said!r}")
    return ParsedAxes(choices[words], *padding or [None], *map(known.index, lengths))


def name_axes(sides: tuple[int, ...], num_lengths: int) -> str:
    """The axes as `parse_axes` reads them."""
    return " ".join(LENGTH_NAMES[num_lengths - 1][side] for side in sides) or "row"


def axes_of(said: str | tuple[str, float]) -> str:
    """The axes alone of what is said of a field."""
    return (said if isinstance(said, str) else said[0]).split(" of ")[0]


def arrays_spec(
    fields: Fields, bucket: AnyBucket, num_microbatches: int, samples_per_row: int | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and dtypes of the arrays of a batch; rows hold one sample unless `samples_per_row` is given."""
    shape_MxB = (num_microbatches, bucket.rows)
    shape_of_ids = shape_MxB if samples_per_row is None else (*shape_MxB, samples_per_row)
    shapes: dict[str, tuple[tuple[int, ...], npt.DTypeLike]] = {}
    for field in fields:
        leading = (*shape_MxB, *(bucket.lengths[side] for side in field.sides)) if field.sides else shape_of_ids
        shapes[field.name] = (*leading, *field.shape), np.dtype(field.dtype)
    for prefix, length in zip(prefixes_of(len(bucket.lengths)), bucket.lengths, strict=True):
        if samples_per_row is None:
            shapes[f"{prefix}lengths"] = shape_MxB, np.int32
        else:
            shapes |= {f"{prefix}{name}": ((*shape_MxB, length), np.int32) for name in ("segment_ids", "positions")}
    shapes[WEIGHTS] = (*shape_MxB, bucket.lengths[-1]), np.float32  # one a position, even if samples have one a sample
    shapes |= {"num_sequences": ((), np.float32), "ids": (shape_of_ids, np.int32), "is_real": (shape_of_ids, np.bool)}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in shapes.items()}
