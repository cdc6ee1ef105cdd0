"""Fields of a batch: which axes of a sample's array have its length, and the other arrays of a batch.

Letters: M microbatches, B rows, P samples of a row, T positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from jvarlen._common.checks import UserError, is_number, list_first
from jvarlen.planning.buckets import AnyBucket

__all__ = [
    "ATTENTION_WINDOW", "LENGTH_NAMES", "PAIR_TOKENS", "PREFIXES", "RESERVED_NAMES", "TOKENS", "WEIGHTS", "Field",
    "FieldAxes", "Fields", "ParsedAxes", "arrays_spec", "axes_of", "length_names_of", "names_of_lengths", "parse_axes",
    "prefixes_in", "prefixes_of", "say_field",
]  # fmt: skip

WEIGHTS, ATTENTION_WINDOW = "weights", "attention_window"
PREFIXES = ("", "source_", "target_")  # of names of arrays of lengths, segments and positions
RESERVED_NAMES = frozenset([
    *(prefix + name for prefix in PREFIXES for name in ("lengths", "segment_ids", "positions")),
    "num_sequences", "ids", "is_real", ATTENTION_WINDOW,
])  # fmt: skip
"""Names of arrays of every batch, which no field of a sample can have. `weights` of a sample are its loss weights."""
LENGTH_NAMES = ("length",), ("source", "target")
"""Names of the lengths of a sample that has one, and of a sample that has two, unless `fields=` has other words."""

FieldAxes = Mapping[str, str | tuple[str, float]]
"""By the name of a field its axes, or its axes and its padding value, as `parse_axes` reads them."""


class Field(NamedTuple):
    """A field of samples: the arrays of a batch under one name.

    Attributes:
      name: the key in the batch.
      sides: which length of the sample each of the first axes has, from 0, such as 1 for the target of two; () if all
        samples have one shape.
      shape: the other axes.
      dtype: the name of the dtype in a batch.
      padding: the value where there is no sample; None: 0, or for positions the length of the bucket.
      positions_of: the length along which the values are positions in their own sample; None: they are no positions.
      length_names: the names of all lengths of a sample, where `fields=` names them by words of its own.
    """

    name: str
    sides: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    padding: float | None = None
    positions_of: int | None = None
    length_names: tuple[str, ...] = ()


Fields = tuple[Field, ...]

TOKENS: Fields = (Field("tokens", (0,), (), "int32"),)
PAIR_TOKENS: Fields = (Field("source_tokens", (0,), (), "int32"), Field("target_tokens", (1,), (), "int32"))


def names_of_lengths(axes: FieldAxes | None, num_lengths: int) -> tuple[str, ...]:
    """The names of the lengths of a sample; those that `axes` mentions, in this order, where they are its own."""
    known = LENGTH_NAMES[num_lengths - 1] if num_lengths <= len(LENGTH_NAMES) else ()
    said = [one if isinstance(one, str) else one[0] for one in (axes or {}).values() if isinstance(one, str) or one]
    of_axes = [word for text in said if isinstance(text, str) for word in text.replace(" of ", " ").split()]
    words = tuple(word for word in dict.fromkeys(of_axes) if word != "row")
    if num_lengths == 1 or (known and not words) or {*words} & {*known}:
        return known
    of_others = {name for names in LENGTH_NAMES for name in names}
    if len(words) != num_lengths or {*words} & of_others or not all(map(str.isidentifier, words)):
        none_of = f"words such as frames, height and width, none of them {list_first(map(repr, sorted(of_others)))}"
        ways = f"{' and '.join(map(repr, known))}, or by other words such as height and width" if known else none_of
        raise UserError(
            f"fields= must name the {num_lengths} lengths of a sample, in their order, by {ways}: it names "
            f"{len(words)}, {list_first(map(repr, words)) or 'none'}"
        )
    return words


def length_names_of(fields: Fields, num_lengths: int) -> tuple[str, ...]:
    """The names of the lengths of samples with these fields."""
    own = next((field.length_names for field in fields if field.length_names), None)
    return own or LENGTH_NAMES[num_lengths - 1]


def prefixes_of(fields: Fields, num_lengths: int) -> tuple[str, ...]:
    """What the names of the arrays of each length begin with."""
    return ("",) if num_lengths == 1 else tuple(f"{name}_" for name in length_names_of(fields, num_lengths))


def prefixes_in(arrays: Iterable[str]) -> tuple[str, ...]:
    """What the names of the arrays of each length begin with, by those of a batch."""
    names = {*arrays}
    for of_number in (PREFIXES[:1], PREFIXES[1:]):
        if any(f"{of_number[0]}{name}" in names for name in ("lengths", "segment_ids")):
            return of_number
    return tuple(name.removesuffix("lengths") for name in sorted(names) if name.endswith("_lengths"))


class ParsedAxes(NamedTuple):
    """What is said of a field; attributes as in `Field`."""

    sides: tuple[int, ...]
    padding: float | None = None
    positions_of: int | None = None


def parse_axes(name: str, said: object, known: tuple[str, ...]) -> ParsedAxes:
    """Parses `"AXES"`, `"AXES of LENGTH"`, or one of these and a padding value in a tuple.

    AXES are the known lengths that the first axes have, at most as many or two, separated by a space, or "row" for
    none. Values of a field "of" a length are positions along it.
    """
    axes, *padding = said if isinstance(said, tuple) and said else (said,)
    choices = {"row": (), **{word: (side,) for side, word in enumerate(known)}}
    choices |= {f"{one} {other}": (*choices[one], *choices[other]) for one in known for other in known}
    text, *lengths = axes.split(" of ") if isinstance(axes, str) else [""]
    words = [] if text == "row" else text.split(" ")
    if not {*words, *lengths} <= {*known} or len(words) > max(2, len(known)) or len(lengths) > 1:
        raise UserError(
            f"axes of the field {name!r} must be one of {list_first(map(repr, choices))}, or for positions along a "
            f"length of their sample such as {f'{known[-1]} of {known[0]}'!r}; not {axes!r}"
        )
    if len(padding) != isinstance(said, tuple) or not all(
        is_number(value) or isinstance(value, bool | np.bool_) for value in padding
    ):
        raise UserError(f"the field {name!r} must be axes, or axes and a padding value as ({axes!r}, 0), not {said!r}")
    return ParsedAxes(tuple(map(known.index, words)), *padding or [None], *map(known.index, lengths))


def say_field(field: Field, num_lengths: int) -> str | tuple[str, float]:
    """What `fields=` says of a field, as `parse_axes` reads it."""
    names = length_names_of((field,), num_lengths)
    axes = " ".join(names[side] for side in field.sides) or "row"
    axes += f" of {names[field.positions_of]}" if field.positions_of is not None else ""
    return axes if field.padding is None else (axes, field.padding)


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
    for prefix, length in zip(prefixes_of(fields, len(bucket.lengths)), bucket.lengths, strict=True):
        if samples_per_row is None:
            shapes[f"{prefix}lengths"] = shape_MxB, np.int32
        else:
            shapes |= {f"{prefix}{name}": ((*shape_MxB, length), np.int32) for name in ("segment_ids", "positions")}
    shapes[WEIGHTS] = (*shape_MxB, bucket.lengths[-1]), np.float32  # one a position, even if samples have one a sample
    shapes |= {"num_sequences": ((), np.float32), "ids": (shape_of_ids, np.int32), "is_real": (shape_of_ids, np.bool)}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in shapes.items()}
