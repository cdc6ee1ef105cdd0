"""Collates the samples of a step: fields padded, packed or stacked to the shape of a bucket.

Letters: m microbatches, B rows of each, P samples of a row, T positions, S and U of source and target, n samples.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, reduce
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_ref.checks import INT64_MAX, MAX_LISTED, to_tensor
from torch_ref.loading.weighted import WeightedTokens, is_record, values_of_record
from torch_ref.planning.buckets import Bucket, PairBucket
from torch_ref.planning.lengths import row_sizes
from torch_ref.planning.plan import Plan

__all__ = [
    "AnyBatch",
    "Batch",
    "Collator",
    "OneBatch",
    "PairBatch",
    "Placed",
    "map_tensors",
    "read_samples",
    "values_of",
]

_NUM_PROBES = 16
_OTHER = "the plan was made for other lengths than the dataset has"
_OF_SIDES = ("lengths", "segment_ids", "positions")
_OWN = ("num_sequences", "ids", "is_real", *(side + name for side in ("", "source_", "target_") for name in _OF_SIDES))


class Batch(NamedTuple):
    """A replica's share of a step, or one microbatch of it (then without the leading m), whose samples are tokens.

    Attributes:
        tokens: int64[m, B, T], 0 where there is no token.
        lengths: int64[m, B], tokens of each row, 0 for a padding row unless it repeats a sample.
        weights: float32[m, B, T], of real tokens in the loss: 1 unless their samples have their own; 0 elsewhere.
        num_sequences: real samples of the whole step, over all replicas.
        segment_ids: int64[m, B, T] in batches of packed rows: 1 on the first sample of a row, 2 on the next and so on,
            0 on padding. None where a row is a sample.
        positions: int64[m, B, T] likewise: the place of each token in its sample, 0 on padding.
        ids: int64[m, B], the sample of each row, or int64[m, B, P], the samples of each packed row, of which entry p
            belongs to segment p + 1; P is `Plan.samples_per_row`. -1 for none, and for a repeated one.
        is_real: bool, as `ids`: False where that is -1.
    """

    tokens: Tensor
    lengths: Tensor
    weights: Tensor
    num_sequences: float
    segment_ids: Tensor | None = None
    positions: Tensor | None = None
    ids: Tensor | None = None
    is_real: Tensor | None = None


class PairBatch(NamedTuple):
    """The same of samples that are pairs of tokens, (source, target).

    Attributes:
        source_tokens: int64[m, B, S], as `Batch.tokens`.
        target_tokens: int64[m, B, U].
        source_lengths: int64[m, B], as `Batch.lengths`.
        target_lengths: int64[m, B].
        weights: float32[m, B, U], of target tokens.
        num_sequences: real pairs of the whole step, over all replicas.
        source_segment_ids: int64[m, B, S] in batches of packed rows, as `Batch.segment_ids`.
        target_segment_ids: int64[m, B, U], with the same number as the source of the pair.
        source_positions: int64[m, B, S] likewise, as `Batch.positions`.
        target_positions: int64[m, B, U].
        ids: int64[m, B] or int64[m, B, P], as `Batch.ids`.
        is_real: bool, as `ids`.
    """

    source_tokens: Tensor
    target_tokens: Tensor
    source_lengths: Tensor
    target_lengths: Tensor
    weights: Tensor
    num_sequences: float
    source_segment_ids: Tensor | None = None
    target_segment_ids: Tensor | None = None
    source_positions: Tensor | None = None
    target_positions: Tensor | None = None
    ids: Tensor | None = None
    is_real: Tensor | None = None


_Array = NDArray[Any] | Tensor
AnyBatch = Batch | PairBatch | dict[str, Tensor]
OneBatch = TypeVar("OneBatch", bound=AnyBatch)


def values_of(batch: AnyBatch) -> Mapping[str, Any]:
    """Return what a batch holds, by name."""
    return batch if isinstance(batch, dict) else batch._asdict()


def map_tensors(batch: OneBatch, change: Callable[[Tensor], Tensor]) -> OneBatch:
    """Return a batch of the same kind with its tensors changed."""
    changed = {name: change(value) for name, value in values_of(batch).items() if isinstance(value, Tensor)}
    return cast(OneBatch, changed if isinstance(batch, dict) else batch._replace(**cast(dict[str, Any], changed)))


class Placed(NamedTuple):
    """The samples of a batch and where they lie.

    Attributes:
        ids: int64[m, B, P'], their ids, -1 for none; P' is 1 where a row is a sample.
        is_real: bool[m, B], False for rows whose samples only fill them.
        samples: [n] what the dataset holds, in the order of those ids.
        starts: int64[m, B, P'], the tokens of its sample before each piece; None where no sample is split.
        ends: int64[m, B, P'], those up to its end, or more where the sample ends before.
    """

    ids: NDArray[np.int64]
    is_real: NDArray[np.bool_]
    samples: Sequence[Any]
    starts: NDArray[np.int64] | None = None
    ends: NDArray[np.int64] | None = None


class _Field(NamedTuple):
    """A field of all samples.

    Attributes:
        sides: of each leading axis that has a length of the sample, which one; none: the field is stacked.
        dtype: in batches.
        shape: of its other axes.
        any_dtype: whether samples may have it in any dtype.
    """

    sides: tuple[int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    any_dtype: bool = False

    def holds(self, value: _Array | None) -> bool:
        """Return whether a value has these axes, and a dtype of the same kind that is no wider."""
        return (
            value is not None
            and value.ndim == len(self.sides) + len(self.shape)
            and value.shape[len(self.sides) :] == self.shape
            and (self.any_dtype or _widens(_dtype_of(value), self.dtype))
        )

    @property
    def empty(self) -> Tensor:
        """A value of a sample whose lengths are 0."""
        return torch.zeros((*(0 for _ in self.sides), *self.shape), dtype=self.dtype)

    def joined(self, parts: list[_Array]) -> Tensor:
        """Return parts [k, ...] of samples, of which there can be none, one after the other in this dtype."""
        if not parts:
            return torch.zeros((0, *self.shape), dtype=self.dtype)
        if all(isinstance(part, np.ndarray) for part in parts):
            return torch.from_numpy(np.concatenate(parts)).to(self.dtype)
        return torch.cat([part if isinstance(part, Tensor) else to_tensor(part) for part in parts]).to(self.dtype)


class Collator:
    """Makes the batches of a plan; what its samples are is told, or read from a few of them when it is first needed.

    Args:
        plan: the plan.
        dataset: sample i is `dataset[i]`.
        fields: the axes of each field by name, as for `load`; None: read from the samples.
    """

    def __init__(self, plan: Plan, dataset: Any, fields: Mapping[str, str] | None) -> None:
        """Check the axes that are told."""
        self._plan, self._dataset, self._is_packed = plan, dataset, plan.row_offsets is not None
        self._words = ("length",) if len(plan.buckets.shapes[0]) == 2 else ("source", "target")
        self._told = None if fields is None else self._sides_of(fields)

    def batch(
        self, bucket: Bucket | PairBucket, placed: Placed, num_sequences: int, num_tokens: int | None = None
    ) -> AnyBatch:
        """Return the batch of some samples of a bucket, whose real ones were planned with so many tokens."""
        is_sample, shape, limits = placed.ids >= 0, placed.is_real.shape, list(bucket[1:])
        ids, (m, row_of_m, slot) = placed.ids[is_sample], np.nonzero(is_sample)
        rows = m * bucket.rows + row_of_m
        is_real = placed.is_real.reshape(-1)[rows]
        fields, columns = self._read(ids.tolist(), placed.samples)
        sizes = self._lengths(ids, fields, columns)
        starts, lengths, offsets = self._place(ids, rows, sizes, limits, placed)
        if num_tokens is not None:
            found = int(row_sizes(lengths[is_real], self._plan.pair_size).sum())
            if found != num_tokens:
                listed = _listed(ids[is_real], [*map(_plain, lengths[is_real].tolist())])
                raise ValueError(
                    f"{_OTHER}: samples of a step hold {found} tokens, planned were {num_tokens}: {listed}"
                )

        own: dict[str, Any] = {}
        places = []  # of each side, where its elements lie in [m, B, T]
        for side, word in enumerate(self._words):
            prefix = "" if len(self._words) == 1 else f"{word}_"
            count, in_rows = lengths[:, side], (*shape, limits[side])
            positions = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
            places.append(positions + np.repeat(rows * limits[side] + offsets[:, side], count))
            if self._is_packed:
                own[f"{prefix}segment_ids"] = _filled(in_rows, places[-1], np.repeat(slot + 1, count))
                own[f"{prefix}positions"] = _filled(in_rows, places[-1], positions)
            if not (self._is_packed and self._look.is_named):
                own[f"{prefix}lengths"] = torch.from_numpy(_sums(rows, count, placed.is_real.size).reshape(shape))
        num_slots = self._plan.samples_per_row[self._plan.buckets.shapes.index(bucket)]
        of_samples = (*shape, num_slots) if self._is_packed else shape
        at_sample = rows * num_slots + slot if self._is_packed else rows
        arrays: dict[str, Tensor] = {}
        weights: Tensor | None = None
        for name, field in fields.items():
            column = columns[name]
            if len(field.sides) > 1:
                of_axes = [limits[side] for side in field.sides]
                arrays[name] = _filled_corners(field, column, rows, lengths, (*shape, *of_axes))
                continue
            parts = column if field.sides else [value[None] for value in column]
            if field.sides and (lengths != sizes).any():
                cuts = zip(starts[:, field.sides[0]].tolist(), lengths[:, field.sides[0]].tolist(), strict=True)
                parts = [value[start : start + length] for value, (start, length) in zip(column, cuts, strict=True)]
            if name == "weights":
                weights = field.joined(parts)
            elif field.sides:
                arrays[name] = _filled((*shape, limits[field.sides[0]]), places[field.sides[0]], field.joined(parts))
            else:
                arrays[name] = _filled(of_samples, at_sample, field.joined(parts))
        own["weights"] = _filled((*shape, limits[-1]), places[-1], self._weights(ids, is_real, lengths[:, -1], weights))
        own["ids"] = _filled(of_samples, at_sample, np.where(is_real, ids, -1) + 1) - 1
        own["is_real"] = own["ids"] >= 0
        if not self._look.is_named:
            return (Batch if len(limits) == 1 else PairBatch)(**arrays, **own, num_sequences=float(num_sequences))
        return arrays | own | {"num_sequences": torch.tensor(float(num_sequences))}

    def _weights(
        self, ids: NDArray[np.int64], is_real: NDArray[np.bool_], lengths: NDArray[np.int64], given: Tensor | None
    ) -> Tensor:
        """Return the loss weight of each token: the given one, or 1, and 0 where its sample is not real."""
        of_tokens = torch.from_numpy(np.repeat(is_real.astype(np.float32), lengths))
        if given is None:
            return of_tokens
        is_bad = ~(given.isfinite() & (given >= 0)).numpy()
        if is_bad.any():
            found = _listed(np.repeat(ids, lengths)[is_bad], given.numpy()[is_bad].tolist())
            raise ValueError(f"weights must be finite and at least 0: {found}")
        return given * of_tokens

    def _sides_of(self, fields: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
        """Return which lengths the leading axes of each field have."""
        if not isinstance(fields, Mapping) or not all(isinstance(name, str) for name in fields):
            raise ValueError(f"fields must be a dict of names and axes, such as {self._like}, got {fields!r}")
        sides = {}
        for name, axes in fields.items():
            words = axes.split() if isinstance(axes, str) else []
            if not words or (words != ["row"] and not set(words) <= set(self._words)):
                expected = " or ".join(map(repr, [*self._words, " ".join([self._words[-1]] * 2), "row"]))
                raise ValueError(f"fields[{name!r}] must be {expected}, the axes of its first length, got {axes!r}")
            sides[name] = tuple(self._words.index(word) for word in words if word != "row")
        return self._check_sides(sides)

    def _check_sides(self, sides: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        if own := [name for name in sides if name in _OWN]:
            raise ValueError(f"batches have {', '.join(own)} of their own: samples need other names for these fields")
        square = [name for name, of_field in sides.items() if len(of_field) > 1]
        if square and self._is_packed:
            raise ValueError(f"packed rows cannot hold fields with two axes of the length: {', '.join(square)}")
        if sides.get("weights", ()) not in ((), (len(self._words) - 1,)):
            raise ValueError(f"the field weights must be {self._words[-1]!r} or 'row': one a token, or one a sample")
        others = [of_field for name, of_field in sides.items() if name != "weights"]
        missing = [word for side, word in enumerate(self._words) if all(side not in each for each in others)]
        if missing:
            raise ValueError(f"no field of {', '.join(sides)} has the axis {' or '.join(map(repr, missing))}")
        return sides

    @property
    def _tokens_alone(self) -> "_Look":
        names = ["tokens"] if len(self._words) == 1 else [f"{word}_tokens" for word in self._words]
        return _Look(False, {name: _Field((side,), torch.int64, ()) for side, name in enumerate(names)})

    @cached_property
    def _look(self) -> "_Look":
        """What a few samples show, of the shortest and of the longest bucket among them."""
        plan = self._plan
        steps = np.argsort(plan.step_bucket, kind="stable")[[0, -1]]
        spread = np.linspace(0, plan.num_samples - 1, _NUM_PROBES).astype(np.int64)
        ids = list(dict.fromkeys(plan.sample_ids[[*plan.step_offsets[steps], *spread]].tolist()))
        first = read_samples(self._dataset, ids[:1])[ids[0]]
        if self._told is None and not is_record(first):
            return self._tokens_alone
        samples = [first, *read_samples(self._dataset, ids[1:]).values()]
        columns = _columns(ids, samples, _but_weights(self._told or values_of_record(first)))
        shown = "; ".join(f"{name}: {', '.join(dict.fromkeys(map(_describe, c)))}" for name, c in columns.items())
        tensors = {name: [value for value in column if value is not None] for name, column in columns.items()}
        if any(len(column) < len(samples) for column in tensors.values()):
            raise ValueError(f"fields must be arrays of numbers: leave others out, with fields={self._like}. {shown}")
        sides = self._told or self._check_sides(self._inferred(tensors, shown))
        fields = {}
        for name, column in tensors.items():
            sized = [value for value in column if value.shape != (0,)] or column  # an empty list has no dtype
            dtype = _common_dtype(sized)
            ((shape, _),) = Counter(tuple(value.shape[len(sides[name]) :]) for value in sized).most_common(1)
            fields[name] = _Field(sides[name], dtype, shape)
        return _Look(True, fields)

    def _inferred(self, columns: dict[str, list[_Array]], shown: str) -> dict[str, tuple[int, ...]]:
        """Return which axes vary from sample to sample, all in the same way."""
        sizes = {tuple(value.shape[:1] for value in column) for column in columns.values()}
        varying = [of_field for of_field in sizes if len(set(of_field)) > 1]
        if len(self._words) > 1 or len(varying) != 1 or () in varying[0]:
            why = "samples have two" if len(self._words) > 1 else f"{len(varying) or 'no'} sizes vary in some samples"
            raise ValueError(f"the length of fields cannot be told, as {why}: give fields={self._like}. {shown}")

        def num_axes(column: list[_Array]) -> int:
            number = 0
            while tuple(value.shape[number : number + 1] for value in column) == varying[0]:
                number += 1
            return number

        return {name: (0,) * num_axes(column) for name, column in columns.items()}

    @property
    def _like(self) -> dict[str, str]:
        """What `fields` may look like."""
        return {"tokens": "length", "label": "row"} if len(self._words) == 1 else {"nodes": "source", "edges": "target"}

    def _read(self, ids: list[int], samples: Sequence[Any]) -> tuple[dict[str, _Field], dict[str, list[_Array]]]:
        """Return the fields, and the values of each, all as they must be."""
        if "_look" not in vars(self) and self._told is None and samples and not is_record(samples[0]):
            self._look = self._tokens_alone  # without a look at others
        is_named, fields = self._look
        if is_named:
            columns = _columns(ids, samples, list(fields))
            if any("weights" in values_of_record(sample) for sample in samples) or "weights" in (self._told or ()):
                columns["weights"] = self._weights_of(ids, samples, fields, columns)
                fields = fields | {"weights": _Field((len(self._words) - 1,), torch.float32, (), any_dtype=True)}
        else:
            fields, columns = self._tokens(ids, samples, fields)
        wrong = []
        for name, column in columns.items():
            field = fields[name]
            for place, value in enumerate(column):
                if field.holds(value):
                    continue
                if value is not None and value.shape == (0,) and field.sides:  # an empty list has no other axes
                    column[place] = field.empty
                else:
                    wrong.append(f"id {ids[place]}: {name} is {_describe(value)}, expected {self._expected(field)}")
        if wrong:
            raise ValueError(f"samples are not as the others, or as fields= says: {_first(wrong)}")
        return fields, cast(dict[str, list[_Array]], columns)

    def _weights_of(
        self,
        ids: list[int],
        samples: Sequence[Any],
        fields: dict[str, _Field],
        columns: dict[str, list[_Array | None]],
    ) -> list[_Array | None]:
        """Return the loss weights of samples with fields, one a token: 1 for those without, if they may lack them."""
        default = None if "weights" in (self._told or ()) else 1
        given = [values_of_record(sample).get("weights", default) for sample in samples]
        if missing := [i for i, value in zip(ids, given, strict=True) if value is None]:
            raise ValueError(f"these samples have no field weights, which fields= names: id {_first(missing)}")
        side = len(self._words) - 1
        name, axis = next((name, of.sides.index(side)) for name, of in fields.items() if side in of.sides)
        weights: list[_Array | None] = []
        for value, along in zip(map(_array, given), columns[name], strict=True):
            if value is not None and value.ndim == 0 and along is not None and along.ndim > axis:
                value = torch.as_tensor(value).expand(along.shape[axis])
            weights.append(value)
        return weights

    def _tokens(
        self, ids: list[int], samples: Sequence[Any], fields: dict[str, _Field]
    ) -> tuple[dict[str, _Field], dict[str, list[_Array | None]]]:
        """Return the values of samples that are tokens, or pairs of them, and of weights where a sample has some."""
        by_side = [list(samples)]
        if len(self._words) == 2:
            is_pair = [isinstance(pair, Sequence | np.ndarray | Tensor) and len(pair) == 2 for pair in samples]
            if wrong := [i for i, is_good in zip(ids, is_pair, strict=True) if not is_good]:
                raise ValueError(f"samples must be pairs, (source, target), or have fields: id {_first(wrong)} is none")
            by_side = [[pair[side] for pair in samples] for side in range(2)]
        columns = {
            name: [_array(value.tokens if isinstance(value, WeightedTokens) else value) for value in values]
            for name, values in zip(fields, by_side, strict=True)
        }
        if any(isinstance(value, WeightedTokens) for value in by_side[-1]):
            fields = fields | {"weights": _Field((len(self._words) - 1,), torch.float32, ())}
            columns["weights"] = [
                _array(value.weights) if isinstance(value, WeightedTokens) else np.ones(len(value), np.float32)
                for value in by_side[-1]
            ]
        return fields, columns

    def _expected(self, field: _Field) -> str:
        axes = [*(self._words[side] for side in field.sides), *map(str, field.shape)]
        return f"{_name(field.dtype)} [{', '.join(axes)}]"

    def _lengths(
        self, ids: NDArray[np.int64], fields: dict[str, _Field], columns: dict[str, list[_Array]]
    ) -> NDArray[np.int64]:
        """Return the lengths of samples, int64[n, D], in which all their fields agree."""
        lengths = np.full((len(ids), len(self._words)), -1)
        for name, field in fields.items():
            for axis, side in enumerate(field.sides):
                sizes = np.array([value.shape[axis] for value in columns[name]], dtype=np.int64)
                differs = np.flatnonzero((lengths[:, side] >= 0) & (sizes != lengths[:, side]))
                if len(differs):
                    found = [f"{sizes[k]} of {name}, {lengths[k, side]} of others" for k in differs]
                    raise ValueError(f"fields of a sample differ in length: {_listed(ids[differs], found)}")
                lengths[:, side] = sizes
        return lengths

    def _place(
        self,
        ids: NDArray[np.int64],
        rows: NDArray[np.int64],
        sizes: NDArray[np.int64],
        limits: list[int],
        placed: Placed,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return where samples are cut, what is left of them, and where in its row each begins: int64[n, D] each."""
        starts, lengths, is_sample = np.zeros_like(sizes), sizes, placed.ids >= 0
        if placed.starts is not None and placed.ends is not None:
            starts += placed.starts[is_sample][:, None]
            lengths = np.minimum(sizes, placed.ends[is_sample][:, None]) - starts
        elif self._plan.overlong == "truncate":  # only to the longest: elsewhere the plan is for other lengths
            is_longest = np.equal(limits, np.max(self._plan.buckets.shapes, axis=0)[1:])
            lengths = np.where(is_longest, np.minimum(lengths, limits), lengths)
        is_empty = lengths[:, 0] < 1
        if is_empty.any():
            raise ValueError(f"samples must have elements where the plan has some: id {_first(ids[is_empty].tolist())}")
        before = np.cumsum(lengths, axis=0) - lengths
        offsets = before - before[np.searchsorted(rows, rows)]
        sums = np.stack([_sums(rows, count, placed.is_real.size) for count in lengths.T], axis=1)
        too_long = np.any(sums > np.array(limits), axis=1)[rows]
        if too_long.any():
            found = [f"{_plain(values)} (limit {_plain(limits)})" for values in lengths[too_long].tolist()]
            kind = "rows" if self._is_packed else "samples"
            raise ValueError(f"{_OTHER}: {kind} are longer than their bucket: {_listed(ids[too_long], found)}")
        return starts, lengths, offsets


def read_samples(dataset: Any, ids: Iterable[int]) -> dict[int, Any]:
    """Return samples by id, each read once, and all at once by a dataset that can."""
    unique = list(dict.fromkeys(ids))
    read = getattr(dataset, "__getitems__", None)
    samples = [dataset[i] for i in unique] if read is None else list(read(unique)) if unique else []
    return dict(zip(unique, samples, strict=True))


class _Look(NamedTuple):
    """Whether samples name their fields, and what fields they have."""

    is_named: bool
    fields: dict[str, _Field]


def _but_weights(names: Iterable[str]) -> list[str]:
    return [name for name in names if name != "weights"]


def _columns(ids: Sequence[int], samples: Sequence[Any], names: Sequence[str]) -> dict[str, list[_Array | None]]:
    """Return the values of the named fields of all samples; None where torch has no tensor for one."""
    records = [values_of_record(sample) if is_record(sample) else {} for sample in samples]
    missing = [
        f"id {i}: {lacking}"
        for i, record in zip(ids, records, strict=True)
        if (lacking := [name for name in names if name not in record])
    ]
    if missing:
        raise ValueError(f"samples must be dicts or dataclasses with fields {list(names)}; missing: {_first(missing)}")
    return {name: [_array(record[name]) for record in records] for name in names}


def _array(value: Any) -> _Array | None:
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


def _dtype_of(value: _Array) -> torch.dtype:
    return value.dtype if isinstance(value, Tensor) else cast(torch.dtype, _torch_dtype(value.dtype))


@cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):  # of no such width, or byte order
        return None


def _common_dtype(values: list[_Array]) -> torch.dtype:
    """Return the dtype that holds all values, without that of one odd sample where several have another."""
    dtypes = list(map(_dtype_of, values))
    kinds = [dtype if any(_kind(dtype)) else torch.int64 for dtype in dtypes]
    counts = Counter(kinds)
    least = min(2, max(counts.values()))
    return reduce(
        torch.promote_types, (dtype for dtype, kind in zip(dtypes, kinds, strict=True) if counts[kind] >= least)
    )


def _widens(given: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether numbers of a dtype go into another: of the same kind, or integers as others."""
    same = _kind(given) == _kind(wanted) or (not any(_kind(given)) and wanted is not torch.bool)
    return given == wanted or (same and torch.promote_types(given, wanted) == wanted)


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    return dtype is torch.bool, dtype.is_floating_point, dtype.is_complex


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(value: _Array | None) -> str:
    if value is None:
        return "no array of numbers, which text becomes when it is tokenized"
    return f"{_name(_dtype_of(value))} {list(value.shape)}"


def _first(items: Sequence[Any]) -> str:
    left = len(items) - MAX_LISTED
    return ", ".join(map(str, items[:MAX_LISTED])) + (f" and {left} more" if left > 0 else "")


def _listed(ids: NDArray[np.int64], values: Sequence[Any]) -> str:
    return _first([f"id {i}: {value}" for i, value in zip(ids.tolist(), values, strict=True)])


def _plain(lengths: list[int]) -> int | list[int]:
    """Return the length of a sample, or its lengths."""
    return lengths[0] if len(lengths) == 1 else lengths


def _sums(rows: NDArray[np.int64], lengths: NDArray[np.int64], num_rows: int) -> NDArray[np.int64]:
    sums = np.zeros(num_rows, dtype=np.int64)
    np.add.at(sums, rows, lengths)
    return sums


def _filled(shape: tuple[int, ...], places: NDArray[np.int64], values: Tensor | NDArray[np.int64]) -> Tensor:
    """Return zeros [*shape, ...] with the values [n, ...] at places of the flattened shape."""
    values = values if isinstance(values, Tensor) else torch.from_numpy(values)
    flat = torch.zeros((math.prod(shape), *values.shape[1:]), dtype=values.dtype)
    flat[torch.from_numpy(places)] = values
    return flat.view(*shape, *values.shape[1:])


def _filled_corners(
    field: _Field, column: list[_Array], rows: NDArray[np.int64], lengths: NDArray[np.int64], shape: tuple[int, ...]
) -> Tensor:
    """Return zeros [m, B, *lengths, ...] with a value in the corner of each row."""
    filled = torch.zeros((*shape, *field.shape), dtype=field.dtype)
    flat = filled.flatten(0, 1)
    for row, value, size in zip(rows.tolist(), column, lengths[:, list(field.sides)].tolist(), strict=True):
        corner = tuple(slice(n) for n in size)
        flat[(row, *corner)] = torch.as_tensor(value[corner])
    return filled
