"""Collates the samples of a step: fields padded, packed or stacked to the shape of a bucket.

Letters: m microbatches, B rows of each, P samples of a row, T positions, D lengths of a sample, n samples.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_ref.loading.batch import AnyBatch, Batch, PairBatch
from torch_ref.loading.fields import Array, Field, FieldReader, FieldSpec, list_by_id, list_first, write_spec
from torch_ref.planning.buckets import Bucket, MultiLengthBucket
from torch_ref.planning.lengths import row_sizes
from torch_ref.planning.plan import Plan

__all__ = ["Collator", "Placed"]

_IGNORED = -100  # torch's cross_entropy leaves such targets out
_OTHER = "the plan was made for other lengths than the dataset has"


class Placed(NamedTuple):
    """The samples of a batch and their places in it.

    Attributes:
        ids: int64[m, B, P'], their ids, -1 for none; P' is 1 where a row is a sample.
        is_real: bool[m, B], False for rows whose samples only fill them.
        samples: [n] what the dataset holds, in the order of those ids.
        starts: int64[m, B, P'] or [m, B, P', D], the tokens of its sample before what a row has of it; None where that
            is nowhere more than none.
        stops: shaped as `starts`, those up to its end, or more where the sample ends before.
    """

    ids: NDArray[np.int64]
    is_real: NDArray[np.bool_]
    samples: Sequence[Any]
    starts: NDArray[np.int64] | None = None
    stops: NDArray[np.int64] | None = None


class _Cuts(NamedTuple):
    """For each sample, int64[n, D]: its lengths, where it is cut, what is left, and where in its row that begins."""

    sizes: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    offsets: NDArray[np.int64]


class Collator:
    """Makes the batches of a plan.

    Args:
        plan: the plan.
        dataset: sample i is `dataset[i]`.
        axes: of each field by name, as `load` takes them.
    """

    def __init__(self, plan: Plan, dataset: Any, axes: Mapping[str, FieldSpec] | None) -> None:
        """Check the axes."""
        self._plan, self._is_packed = plan, plan.row_offsets is not None
        self._reader = FieldReader(plan, dataset, axes)

    def batch(
        self,
        bucket: Bucket | MultiLengthBucket,
        placed: Placed,
        num_sequences: int,
        num_tokens: int | None = None,
        num_microbatches: int | None = None,
    ) -> AnyBatch:
        """Return the batch of some samples of a bucket, whose real ones were planned with this number of tokens."""
        is_sample, shape, limits = placed.ids >= 0, placed.is_real.shape, list(bucket[1:])
        ids, (m, row_of_m, slot) = placed.ids[is_sample], np.nonzero(is_sample)
        rows = m * bucket.rows + row_of_m
        is_real = placed.is_real.reshape(-1)[rows]
        fields, columns = self._reader.read(ids.tolist(), placed.samples)
        cuts = self._cut(ids, rows, _measure(ids, len(limits), fields, columns), limits, placed)
        if num_tokens is not None:
            self._check_tokens(ids[is_real], cuts.lengths[is_real], num_tokens)

        made, places = self._place_sides(rows, slot, cuts, shape, limits)
        num_slots = self._plan.samples_per_row[self._plan.buckets.shapes.index(bucket)]
        of_samples = (*shape, num_slots) if self._is_packed else shape
        at_sample = rows * num_slots + slot if self._is_packed else rows
        weights: Tensor | None = None
        for name, field in fields.items():
            column = _cut_values(field, columns[name], cuts)
            if name == "weights":
                weights = field.join(column)
                continue
            if field.positions_of is not None:
                field, column = _move_positions(name, field, column, ids, cuts, limits)
            around = (*shape, *(limits[side] for side in field.sides)) if field.sides else of_samples
            if len(field.sides) > 1:
                made[name] = values = _fill_corners(field, column, rows, around)
            else:
                at = places[field.sides[0]] if field.sides else at_sample
                values = field.join(column if field.sides else [value[None] for value in column])
                made[name] = _scatter(around, at, values, field.padding)
            if self._reader.fields is not None:
                self._check_padding(name, field, column, values, ids)
        of_tokens = _weigh_tokens(ids, is_real, cuts.lengths[:, -1], weights)
        made["weights"] = _scatter((*shape, limits[-1]), places[-1], of_tokens)
        made["ids"] = _scatter(of_samples, at_sample, np.where(is_real, ids, -1) + 1) - 1
        made["is_real"] = made["ids"] >= 0
        if self._reader.fields is None:
            kind = Batch if len(limits) == 1 else PairBatch
            return kind(**made, num_sequences=float(num_sequences), num_microbatches=num_microbatches)
        if num_microbatches is not None:
            made["num_microbatches"] = torch.tensor(num_microbatches)
        return made | {"num_sequences": torch.tensor(float(num_sequences))}

    def _place_sides(
        self, rows: NDArray[np.int64], slot: NDArray[np.int64], cuts: _Cuts, shape: tuple[int, ...], limits: list[int]
    ) -> tuple[dict[str, Tensor], list[NDArray[np.int64]]]:
        """Return what a batch tells of where samples lie, and for each side the places of its elements in [m, B, T]."""
        made: dict[str, Tensor] = {}
        places = []
        for side, word in enumerate(self._reader.words):
            prefix = "" if len(limits) == 1 else f"{word}_"
            count, in_rows = cuts.lengths[:, side], (*shape, limits[side])
            positions = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
            places.append(positions + np.repeat(rows * limits[side] + cuts.offsets[:, side], count))
            if self._is_packed:
                made[f"{prefix}segment_ids"] = _scatter(in_rows, places[-1], np.repeat(slot + 1, count))
                made[f"{prefix}positions"] = _scatter(in_rows, places[-1], positions)
            if not (self._is_packed and self._reader.fields is not None):
                made[f"{prefix}lengths"] = torch.from_numpy(_sum_by_row(rows, count, math.prod(shape)).reshape(shape))
        return made, places

    def _check_padding(
        self, name: str, field: Field, column: list[Array], values: Tensor, ids: NDArray[np.int64]
    ) -> None:
        """Refuse -100 in an integer field whose padding nobody has said: losses ignore that value, and learn 0."""
        if field.padding is not None or not field.is_signed or not values.numel() or values.min().item() > _IGNORED:
            return  # in less time than the next
        if not (values == _IGNORED).any():
            return
        specs = {each: write_spec(of, self._reader.words) for each, of in (self._reader.fields or {}).items()}
        axes = specs[name]
        holding = [i for i, value in zip(ids.tolist(), column, strict=True) if (value == _IGNORED).any()]
        raise ValueError(
            f"the field {name} is {_IGNORED} in samples, a target that losses leave out, but would be 0 in padding, a "
            f"target that they learn: give all fields, fields={specs | {name: (axes, _IGNORED)}}, or ({axes!r}, 0) to "
            f"keep 0: id {list_first(holding)}"
        )

    def _check_tokens(self, ids: NDArray[np.int64], lengths: NDArray[np.int64], num_tokens: int) -> None:
        found = int(row_sizes(lengths, self._plan.size).sum())
        if found != num_tokens:
            listed = list_by_id(ids, [*map(_unwrap, lengths.tolist())])
            raise ValueError(f"{_OTHER}: samples of a step hold {found} tokens, planned were {num_tokens}: {listed}")

    def _cut(
        self,
        ids: NDArray[np.int64],
        rows: NDArray[np.int64],
        sizes: NDArray[np.int64],
        limits: list[int],
        placed: Placed,
    ) -> _Cuts:
        """Cut samples of these lengths, and place them in rows one after the other."""
        starts, lengths, is_sample = np.zeros_like(sizes), sizes, placed.ids >= 0
        if placed.starts is not None and placed.stops is not None:
            starts += placed.starts[is_sample].reshape(sizes.shape)
            lengths = np.minimum(sizes, placed.stops[is_sample].reshape(sizes.shape)) - starts
        elif self._plan.overlong == "truncate":  # only to the longest: elsewhere the plan is for other lengths
            is_longest = np.equal(limits, np.max(self._plan.buckets.shapes, axis=0)[1:])
            lengths = np.where(is_longest, np.minimum(lengths, limits), lengths)
        is_empty = lengths[:, 0] < 1
        if is_empty.any():
            empty = list_first(ids[is_empty].tolist())
            raise ValueError(f"samples must have elements where the plan has some: id {empty}")
        before = np.cumsum(lengths, axis=0) - lengths
        offsets = before - before[np.searchsorted(rows, rows)]
        sums = np.stack([_sum_by_row(rows, count, placed.is_real.size) for count in lengths.T], axis=1)
        too_long = np.any(sums > np.array(limits), axis=1)[rows]
        if too_long.any():
            found = [f"{_unwrap(values)} (limit {_unwrap(limits)})" for values in lengths[too_long].tolist()]
            kind = "rows" if self._is_packed else "samples"
            words = self._reader.words
            order = (
                ""
                if words[-1] in ("length", "target")
                else f", or its lengths are not {', '.join(words)} in this order, as fields= name them"
            )
            raise ValueError(
                f"{_OTHER}{order}: {kind} are longer than their bucket: {list_by_id(ids[too_long], found)}"
            )
        return _Cuts(sizes, starts, lengths, offsets)


def _measure(
    ids: NDArray[np.int64], num_sides: int, fields: dict[str, Field], columns: dict[str, list[Array]]
) -> NDArray[np.int64]:
    """Return the lengths of samples, int64[n, D], in which all their fields agree."""
    lengths = np.full((len(ids), num_sides), -1)
    for name, field in fields.items():
        for axis, side in enumerate(field.sides):
            sizes = np.array([value.shape[axis] for value in columns[name]], dtype=np.int64)
            differs = np.flatnonzero((lengths[:, side] >= 0) & (sizes != lengths[:, side]))
            if len(differs):
                found = [f"{sizes[k]} of {name}, {lengths[k, side]} of others" for k in differs]
                raise ValueError(f"fields of a sample differ in length: {list_by_id(ids[differs], found)}")
            lengths[:, side] = sizes
    return lengths


def _cut_values(field: Field, column: list[Array], cuts: _Cuts) -> list[Array]:
    if not field.sides or (cuts.lengths == cuts.sizes).all():
        return column
    firsts, lasts = (bounds[:, list(field.sides)].tolist() for bounds in (cuts.starts, cuts.starts + cuts.lengths))
    return [value[tuple(map(slice, *bounds))] for value, *bounds in zip(column, firsts, lasts, strict=True)]


def _move_positions(
    name: str, field: Field, column: list[Array], ids: NDArray[np.int64], cuts: _Cuts, limits: list[int]
) -> tuple[Field, list[Array]]:
    """Return positions in rows for those in samples, all of which must be in the part that is left of the sample."""
    side = cast(int, field.positions_of)
    moved: list[Array] = []
    wrong = []
    first, length, offset = (each[:, side].tolist() for each in (cuts.starts, cuts.lengths, cuts.offsets))
    for place, value in enumerate(column):
        in_sample = torch.as_tensor(value).long()
        is_inside = (in_sample >= first[place]) & (in_sample < first[place] + length[place])
        is_none = (in_sample < 0) & (in_sample == (0 if field.padding is None else field.padding))
        if outside := in_sample[~(is_inside | is_none)].unique().tolist():
            kept = f"{first[place]} to {first[place] + length[place] - 1}"
            wrong.append(f"id {ids[place]}: {list_first(outside)} (its row holds {kept})")
        moved.append(torch.where(is_none, in_sample, in_sample - first[place] + offset[place]))
    if wrong:
        raise ValueError(
            f"the field {name} has positions that are not in their samples, or not in the part that a row holds: leave "
            f"these out, or plan so that such samples are not cut: {list_first(wrong)}"
        )
    return field._replace(padding=limits[side] if field.padding is None else field.padding), moved


def _weigh_tokens(
    ids: NDArray[np.int64], is_real: NDArray[np.bool_], lengths: NDArray[np.int64], given: Tensor | None
) -> Tensor:
    """Return the loss weight of each token: the given one, or 1, and 0 where its sample is not real."""
    of_tokens = torch.from_numpy(np.repeat(is_real.astype(np.float32), lengths))
    if given is None:
        return of_tokens
    is_bad = ~(given.isfinite() & (given >= 0)).numpy()
    if is_bad.any():
        found = list_by_id(np.repeat(ids, lengths)[is_bad], given.numpy()[is_bad].tolist())
        raise ValueError(f"weights must be finite and at least 0: {found}")
    return given * of_tokens


def _unwrap(lengths: list[int]) -> int | list[int]:
    """Return the length of a sample, or its lengths."""
    return lengths[0] if len(lengths) == 1 else lengths


def _sum_by_row(rows: NDArray[np.int64], lengths: NDArray[np.int64], num_rows: int) -> NDArray[np.int64]:
    sums = np.zeros(num_rows, dtype=np.int64)
    np.add.at(sums, rows, lengths)
    return sums


def _scatter(
    shape: tuple[int, ...],
    places: NDArray[np.int64],
    values: Tensor | NDArray[np.int64],
    padding: float | None = None,
) -> Tensor:
    """Return the values [n, ...] at places of the flattened shape, [*shape, ...], and padding at all others."""
    values = values if isinstance(values, Tensor) else torch.from_numpy(values)
    flat = torch.zeros((math.prod(shape), *values.shape[1:]), dtype=values.dtype)
    if padding:
        flat.fill_(padding)
    flat[torch.from_numpy(places)] = values
    return flat.view(*shape, *values.shape[1:])


def _fill_corners(field: Field, column: list[Array], rows: NDArray[np.int64], shape: tuple[int, ...]) -> Tensor:
    """Return the field's padding [m, B, *lengths, ...] with a value in the corner of each row."""
    filled = torch.full((*shape, *field.shape), field.padding or 0, dtype=field.dtype)
    flat = filled.flatten(0, 1)
    for row, value in zip(rows.tolist(), column, strict=True):
        corner = tuple(slice(size) for size in value.shape[: len(field.sides)])
        flat[(row, *corner)] = torch.as_tensor(value)
    return filled
