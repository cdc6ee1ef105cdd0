"""The fields of samples: their axes and dtypes, and their values as arrays.

Letters: D lengths of a sample; n samples.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property, reduce
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_ref.checks import INT64_MAX, MAX_LISTED, to_tensor
from torch_ref.loading.weighted import WeightedTokens, is_record, values_of_record
from torch_ref.planning.plan import Plan

__all__ = [
    "Array",
    "Field",
    "FieldReader",
    "FieldSpec",
    "list_by_id",
    "list_first",
    "parse_spec",
    "read_samples",
    "write_spec",
]

_NUM_PROBES = 16
_OF_SIDES = ("lengths", "segment_ids", "positions")
_USUAL_WORDS = {1: ("length",), 2: ("source", "target")}
_NOT_OWN = ("length", "source", "target")
_RESERVED = (
    "num_microbatches",
    "num_sequences",
    "ids",
    "is_real",
    *(side + name for side in ("", "source_", "target_") for name in _OF_SIDES),
)

Array = NDArray[Any] | Tensor
FieldSpec = str | tuple[str, float]  # what `load` takes for a field: its axes, or these and a padding value
Columns = dict[str, list[Array | None]]  # the values of each field, sample by sample; None where torch has no tensor


class Field(NamedTuple):
    """A field of all samples.

    Attributes:
        sides: of each leading axis that has a length of the sample, which one; none: the field is stacked.
        dtype: in batches.
        shape: of its other axes.
        any_dtype: whether samples may have it in any dtype.
        padding: its value where there is no sample; None: 0, or where positions are padded, the length of the bucket.
        positions_of: which length of the sample its values are positions along; None: they are none.
    """

    sides: tuple[int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    any_dtype: bool = False
    padding: float | None = None
    positions_of: int | None = None

    @property
    def is_signed(self) -> bool:
        """Whether its values are integers that may be negative."""
        return self.dtype in (torch.int8, torch.int16, torch.int32, torch.int64)

    def holds(self, value: Array | None) -> bool:
        """Return whether a value has these axes, and a dtype of the same kind that is no wider."""
        return (
            value is not None
            and value.ndim == len(self.sides) + len(self.shape)
            and value.shape[len(self.sides) :] == self.shape
            and (self.any_dtype or _widens(_dtype_of(value), self.dtype))
        )

    def join(self, parts: list[Array]) -> Tensor:
        """Return parts [k, ...] of samples, maybe none, one after the other in this dtype."""
        if not parts:
            return torch.zeros((0, *self.shape), dtype=self.dtype)
        if all(isinstance(part, np.ndarray) for part in parts):
            return torch.from_numpy(np.concatenate(parts)).to(self.dtype)
        return torch.cat([part if isinstance(part, Tensor) else to_tensor(part) for part in parts]).to(self.dtype)


class _Spec(NamedTuple):
    """What is said of a field: the lengths of its leading axes, its padding, and the length its values lie along."""

    sides: tuple[int, ...]
    padding: float | None = None
    positions_of: int | None = None


def parse_spec(name: str, spec: object, words: Sequence[str]) -> _Spec:
    """Return what a spec says of a field: "AXES", "AXES of LENGTH", or a tuple of such a text and a padding value.

    AXES are names of lengths, or "row"; `words` are those there are.
    """
    text, padding = spec if isinstance(spec, tuple) and len(spec) == 2 else (spec, None)
    if text is not spec and (isinstance(padding, str) or not np.isscalar(padding) or not np.isreal(padding)):
        raise ValueError(f"fields[{name!r}] must be axes, or ({text!r}, padding value), a number, got {spec!r}")
    axes, _, along = text.partition(" of ") if isinstance(text, str) else ("", "", "")
    names = axes.split(" ")
    is_known = names == ["row"] or (set(names) <= set(words) and len(names) <= max(2, len(words)))
    if not names or not is_known or along not in ("", *words):
        expected = " or ".join(map(repr, [*words, " ".join([words[-1]] * 2), "row"]))
        raise ValueError(
            f"fields[{name!r}] must be {expected}, the axes of its first length, maybe with the length that its values "
            f"are positions along, {f'{words[-1]} of {words[0]}'!r}, got {text!r}"
        )
    sides = tuple(words.index(word) for word in names if word != "row")
    return _Spec(sides, padding, words.index(along) if along else None)


def _words_of(specs: Mapping[str, FieldSpec] | None, num_lengths: int) -> tuple[str, ...]:
    """Return the names of the lengths of samples: their own where specs mention as many others than the usual ones.

    Raises:
        ValueError: if samples have more than two lengths, and specs do not name as many.
    """
    usual = _USUAL_WORDS.get(num_lengths, ())
    if num_lengths == 1:
        return usual
    texts = [spec[0] if isinstance(spec, tuple) and spec else spec for spec in (specs or {}).values()]
    words: dict[str, None] = {}
    for text in texts:
        if isinstance(text, str):
            words |= dict.fromkeys(word for word in text.replace(" of ", " ").split() if word != "row")
    own = tuple(words)
    is_own = len(own) == num_lengths and all(word.isidentifier() and word not in _NOT_OWN for word in own)
    if not is_own and (not usual or (own and not words.keys() & {*usual})):
        others = f"as {' and '.join(usual)}, or " if usual else ""
        raise ValueError(
            f"samples of {num_lengths} lengths need fields=, a dict of names and axes, that names the lengths {others}"
            f"in their order by {num_lengths} words other than {', '.join(_NOT_OWN)}, got {len(own)}: "
            f"{', '.join(own) or 'none'}"
        )
    return own if is_own else usual


def write_spec(field: Field, words: Sequence[str]) -> FieldSpec:
    """Return what `parse_spec` reads as this field."""
    axes = " ".join(words[side] for side in field.sides) or "row"
    if field.positions_of is not None:
        axes = f"{axes} of {words[field.positions_of]}"
    return axes if field.padding is None else (axes, field.padding)


class FieldReader:
    """Reads the fields of samples, whose kind is given, or inferred from a few of them when it is first needed.

    Args:
        plan: the plan.
        dataset: sample i is `dataset[i]`.
        axes: of each field by name, as `load` takes them; None: inferred.
    """

    def __init__(self, plan: Plan, dataset: Any, axes: Mapping[str, FieldSpec] | None) -> None:
        """Check the axes."""
        self._plan, self._dataset = plan, dataset
        self.words = _words_of(axes if isinstance(axes, Mapping) else None, len(plan.buckets.shapes[0]) - 1)
        if plan.row_offsets is not None and self.words not in _USUAL_WORDS.values():
            raise ValueError(
                f"fields= name the lengths {', '.join(self.words)}, and packed rows take source and target only: call "
                "them so, or plan padded rows"
            )
        self._specs = None if axes is None else self._parse(axes)

    @cached_property
    def fields(self) -> dict[str, Field] | None:
        """The fields, as a few samples of the shortest and of the longest bucket show them; None for bare tokens."""
        plan = self._plan
        groups = np.argsort(plan.group_bucket, kind="stable")[[0, -1]]
        spread = np.linspace(0, plan.num_samples - 1, _NUM_PROBES).astype(np.int64)
        ids = list(dict.fromkeys(plan.sample_ids[[*plan.group_offsets[groups], *spread]].tolist()))
        first = read_samples(self._dataset, ids[:1])[ids[0]]
        if self._specs is None and not is_record(first):
            return None
        samples = [first, *read_samples(self._dataset, ids[1:]).values()]
        names = [name for name in self._specs or values_of_record(first) if name != "weights"]
        columns = _read_columns(ids, samples, names)
        shown = "; ".join(f"{name}: {', '.join(dict.fromkeys(map(_describe, c)))}" for name, c in columns.items())
        arrays = {name: [value for value in column if value is not None] for name, column in columns.items()}
        if any(len(column) < len(samples) for column in arrays.values()):
            raise ValueError(
                f"fields must be arrays of numbers: leave others out, with fields={self._example}. {shown}"
            )
        specs = self._specs or self._check_specs(self._infer_specs(arrays, shown))
        fields = {}
        for name, column in arrays.items():
            sized = [value for value in column if value.shape != (0,)] or column  # an empty list has no dtype
            spec, dtype = specs[name], _common_dtype(sized)
            ((shape, _),) = Counter(tuple(value.shape[len(spec.sides) :]) for value in sized).most_common(1)
            if spec.positions_of is not None:
                if any(_kind(dtype)):
                    raise ValueError(f"positions are integers, and the field {name} is {_name_dtype(dtype)}")
                dtype = torch.int64
            if spec.padding is not None and not _is_of(spec.padding, dtype):
                raise ValueError(f"the field {name} is {_name_dtype(dtype)}, which holds no padding of {spec.padding}")
            fields[name] = Field(spec.sides, dtype, shape, padding=spec.padding, positions_of=spec.positions_of)
        return fields

    def read(self, ids: list[int], samples: Sequence[Any]) -> tuple[dict[str, Field], dict[str, list[Array]]]:
        """Return the fields, and the values of each, all with the axes and of the kind that they must have."""
        if "fields" not in vars(self) and self._specs is None and samples and not is_record(samples[0]):
            self.fields = None  # without a look at others
        if self.fields is None:
            fields, columns = self._read_tokens(ids, samples)
        else:
            fields, columns = self.fields, _read_columns(ids, samples, list(self.fields))
            if any("weights" in values_of_record(sample) for sample in samples) or "weights" in (self._specs or ()):
                columns["weights"] = self._read_weights(ids, samples, columns)
                fields = fields | {"weights": Field((len(self.words) - 1,), torch.float32, any_dtype=True)}
        wrong = []
        for name, column in columns.items():
            field = fields[name]
            for place, value in enumerate(column):
                if field.holds(value):
                    continue
                if value is not None and value.shape == (0,) and field.sides:  # an empty list has no other axes
                    column[place] = torch.zeros((*(0 for _ in field.sides), *field.shape), dtype=field.dtype)
                else:
                    axes = [*(self.words[side] for side in field.sides), *map(str, field.shape)]
                    expected = f"{_name_dtype(field.dtype)} [{', '.join(axes)}]"
                    wrong.append(f"id {ids[place]}: {name} is {_describe(value)}, expected {expected}")
        if wrong:
            raise ValueError(f"samples are not as the others, or as fields= says: {list_first(wrong)}")
        return fields, cast(dict[str, list[Array]], columns)

    def _parse(self, fields: Mapping[str, FieldSpec]) -> dict[str, _Spec]:
        """Return what is said of each field."""
        if not isinstance(fields, Mapping) or not all(isinstance(name, str) for name in fields):
            raise ValueError(f"fields must be a dict of names and axes, such as {self._example}, got {fields!r}")
        return self._check_specs({name: parse_spec(name, spec, self.words) for name, spec in fields.items()})

    def _check_specs(self, specs: dict[str, _Spec]) -> dict[str, _Spec]:
        of_words = {f"{word}_lengths" for word in self.words}
        if reserved := [name for name in specs if name in _RESERVED or name in of_words]:
            raise ValueError(
                f"batches have {', '.join(reserved)} of their own: samples need other names for these fields"
            )
        square = [name for name, spec in specs.items() if len(spec.sides) > 1]
        if square and self._plan.row_offsets is not None:
            raise ValueError(f"packed rows cannot hold fields with two axes of the length: {', '.join(square)}")
        if specs.get("weights", _Spec(())) not in (_Spec(()), _Spec((len(self.words) - 1,))):
            raise ValueError(
                f"the field weights must be {self.words[-1]!r} or 'row', one a token or one a sample; padding has 0"
            )
        predicted, last = "target_tokens" if self.words == _USUAL_WORDS[2] else "tokens", len(self.words) - 1
        if last and predicted in specs and specs[predicted].sides != (last,):
            raise ValueError(
                f"next_token_targets takes {predicted} for tokens of the {self.words[-1]}, the last length: call the "
                "field otherwise"
            )
        others = [spec.sides for name, spec in specs.items() if name != "weights"]
        missing = [word for side, word in enumerate(self.words) if all(side not in each for each in others)]
        if missing:
            raise ValueError(f"no field of {', '.join(specs)} has the axis {' or '.join(map(repr, missing))}")
        return specs

    def _infer_specs(self, columns: dict[str, list[Array]], shown: str) -> dict[str, _Spec]:
        """Return which axes vary from sample to sample, all in the same way."""
        sizes = {tuple(value.shape[:1] for value in column) for column in columns.values()}
        varying = [of_field for of_field in sizes if len(set(of_field)) > 1]
        if len(self.words) > 1 or len(varying) != 1 or () in varying[0]:
            why = "samples have two" if len(self.words) > 1 else f"{len(varying) or 'no'} sizes vary in some samples"
            raise ValueError(f"the length of fields cannot be inferred, as {why}: give fields={self._example}. {shown}")

        def count_axes(column: list[Array]) -> int:
            number = 0
            while tuple(value.shape[number : number + 1] for value in column) == varying[0]:
                number += 1
            return number

        return {name: _Spec((0,) * count_axes(column)) for name, column in columns.items()}

    @property
    def _example(self) -> dict[str, str]:
        """An example of `fields`."""
        return {"tokens": "length", "label": "row"} if len(self.words) == 1 else {"nodes": "source", "edges": "target"}

    def _read_weights(self, ids: list[int], samples: Sequence[Any], columns: Columns) -> list[Array | None]:
        """Return the loss weights of samples with fields, one a token: 1 for those without, if they may lack them."""
        default = None if "weights" in (self._specs or ()) else 1
        given = [values_of_record(sample).get("weights", default) for sample in samples]
        if missing := [i for i, value in zip(ids, given, strict=True) if value is None]:
            raise ValueError(f"these samples have no field weights, which fields= names: id {list_first(missing)}")
        side, fields = len(self.words) - 1, self.fields or {}
        name, axis = next((name, of.sides.index(side)) for name, of in fields.items() if side in of.sides)
        weights: list[Array | None] = []
        for value, along in zip(map(_as_array, given), columns[name], strict=True):
            if value is not None and value.ndim == 0 and along is not None and along.ndim > axis:
                value = torch.as_tensor(value).expand(along.shape[axis])
            weights.append(value)
        return weights

    def _read_tokens(self, ids: list[int], samples: Sequence[Any]) -> tuple[dict[str, Field], Columns]:
        """Return the values of samples that are tokens, or pairs of them, and of weights where a sample has some."""
        names, by_side = ["tokens"], [list(samples)]
        if len(self.words) == 2:
            is_pair = [isinstance(pair, Sequence | np.ndarray | Tensor) and len(pair) == 2 for pair in samples]
            if wrong := [i for i, is_good in zip(ids, is_pair, strict=True) if not is_good]:
                raise ValueError(
                    f"samples must be pairs, (source, target), or have fields: id {list_first(wrong)} is none"
                )
            names = [f"{word}_tokens" for word in self.words]
            by_side = [[pair[side] for pair in samples] for side in range(2)]
        fields = {name: Field((side,), torch.int64) for side, name in enumerate(names)}
        columns = {
            name: [_as_array(value.tokens if isinstance(value, WeightedTokens) else value) for value in values]
            for name, values in zip(names, by_side, strict=True)
        }
        if any(isinstance(value, WeightedTokens) for value in by_side[-1]):
            fields["weights"] = Field((len(self.words) - 1,), torch.float32)
            columns["weights"] = [
                _as_array(value.weights) if isinstance(value, WeightedTokens) else np.ones(len(value), np.float32)
                for value in by_side[-1]
            ]
        return fields, columns


def read_samples(dataset: Any, ids: Iterable[int]) -> dict[int, Any]:
    """Return samples by id, each read once, and all at once by a dataset that can."""
    unique = list(dict.fromkeys(ids))
    read = getattr(dataset, "__getitems__", None)
    samples = [dataset[i] for i in unique] if read is None else list(read(unique)) if unique else []
    return dict(zip(unique, samples, strict=True))


def _read_columns(ids: Sequence[int], samples: Sequence[Any], names: Sequence[str]) -> Columns:
    """Return the values of the named fields of all samples."""
    records = [values_of_record(sample) if is_record(sample) else {} for sample in samples]
    missing = [
        f"id {i}: {lacking}"
        for i, record in zip(ids, records, strict=True)
        if (lacking := [name for name in names if name not in record])
    ]
    if missing:
        raise ValueError(
            f"samples must be dicts or dataclasses with fields {list(names)}; missing: {list_first(missing)}"
        )
    return {name: [_as_array(record[name]) for record in records] for name in names}


def _as_array(value: object) -> Array | None:
    """Return a value as an array, or None if torch has no tensor for it.

    Python's floats get torch's default dtype, unless they would become infinite in it; wide unsigned integers, with
    which torch computes next to nothing, int64.
    """
    if isinstance(value, Tensor):
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # lists of several lengths
        return None
    if array.dtype.kind == "u" and array.dtype.itemsize > 1 and array.max(initial=0) <= INT64_MAX:
        return array.astype(np.int64)
    if array.dtype.kind == "f" and not isinstance(value, np.ndarray | np.generic):
        wide = torch.from_numpy(array)
        narrow = wide.to(torch.get_default_dtype())
        return narrow if torch.equal(narrow.isinf(), wide.isinf()) else wide
    return array if array.dtype.kind in "biufc" and _torch_dtype(array.dtype) is not None else None


def _dtype_of(value: Array) -> torch.dtype:
    return value.dtype if isinstance(value, Tensor) else cast(torch.dtype, _torch_dtype(value.dtype))


@cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):  # of no such width, or byte order
        return None


def _common_dtype(values: list[Array]) -> torch.dtype:
    """Return the dtype that holds all values, without that of one odd sample where several have another."""
    dtypes = list(map(_dtype_of, values))
    kinds = [dtype if any(_kind(dtype)) else torch.int64 for dtype in dtypes]
    counts = Counter(kinds)
    least = min(2, max(counts.values()))
    return reduce(
        torch.promote_types, (dtype for dtype, kind in zip(dtypes, kinds, strict=True) if counts[kind] >= least)
    )


def _is_of(value: float, dtype: torch.dtype) -> bool:
    """Return whether a number is one of a dtype, as floats rounded."""
    if dtype.is_floating_point or dtype.is_complex:
        return not np.isfinite(value) or bool(torch.tensor(value, dtype=torch.float64).to(dtype).isfinite())
    least, most = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return bool(least <= value <= most and value % 1 == 0)


def _widens(given: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether numbers of a dtype go into another: of the same kind, or integers as others."""
    same = _kind(given) == _kind(wanted) or (not any(_kind(given)) and wanted is not torch.bool)
    return given == wanted or (same and torch.promote_types(given, wanted) == wanted)


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    return dtype is torch.bool, dtype.is_floating_point, dtype.is_complex


def _name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(value: Array | None) -> str:
    if value is None:
        return "no array of numbers, which text becomes when it is tokenized"
    return f"{_name_dtype(_dtype_of(value))} {list(value.shape)}"


def list_first(items: Sequence[object]) -> str:
    """Return the first few items as text, and how many more there are."""
    left = len(items) - MAX_LISTED
    return ", ".join(map(str, items[:MAX_LISTED])) + (f" and {left} more" if left > 0 else "")


def list_by_id(ids: NDArray[np.int64], values: Sequence[object]) -> str:
    """Likewise for values of samples, int64[n]."""
    return list_first([f"id {i}: {value}" for i, value in zip(ids.tolist(), values, strict=True)])
