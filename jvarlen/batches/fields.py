"""Fields of a batch: which axes of a sample's array have its length, and the other arrays of a batch.

Letters: M microbatches, B rows, P samples of a row, T positions.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from jvarlen._common.checks import UserError, list_first
from jvarlen.planning.buckets import AnyBucket

__all__ = [
    "LENGTH_NAMES", "PAIR_TOKENS", "PREFIXES", "RESERVED_NAMES", "TOKENS", "WEIGHTS", "Field", "Fields", "arrays_spec",
    "parse_axes", "prefixes_of",
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


class Field(NamedTuple):
    """A field of samples: the arrays of a batch under one name.

    Attributes:
      name: the key in the batch.
      sides: which length of the sample each of the first axes has: 0, or 1 for the target of two; () if all samples
        have one shape.
      shape: the other axes.
      dtype: the name of the dtype in a batch.
    """

    name: str
    sides: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str


Fields = tuple[Field, ...]

TOKENS: Fields = (Field("tokens", (0,), (), "int32"),)
PAIR_TOKENS: Fields = (Field("source_tokens", (0,), (), "int32"), Field("target_tokens", (1,), (), "int32"))


def prefixes_of(num_lengths: int) -> tuple[str, ...]:
    """The prefix of each length."""
    return PREFIXES[:1] if num_lengths == 1 else PREFIXES[1:]


def parse_axes(name: str, axes: object, num_lengths: int) -> tuple[int, ...]:
    """The lengths that the first axes of a field have, by their names, separated by a space; "row" for none."""
    known = LENGTH_NAMES[num_lengths - 1]
    choices = {"row": (), **{word: (side,) for side, word in enumerate(known)}}
    choices |= {f"{one} {other}": (*choices[one], *choices[other]) for one in known for other in known}
    if axes not in choices:
        raise UserError(f"axes of the field {name!r} must be one of {list_first(map(repr, choices))}, not {axes!r}")
    return choices[axes]


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
