"""Bytes that a step holds on a device, for all buckets on many layouts at once: what `memory_bill` says, interpolated.

A microbatch is traced at a few sizes; each of its arrays grows as a product of powers of rows, length, devices and
layers. Letters: C layouts, K buckets, L layers, S stages, V chunks, U different rows of a table, N arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jaxtyping import Float64

from jvarlen.batches.batches import token_batch_spec
from jvarlen.clusters.layout_table import SCHEDULES, LayoutTable
from jvarlen.parallel.layers import LayeredModel, LayeredParams
from jvarlen.parallel.layout import Layout, Schedule
from jvarlen.parallel.memory import (
    DeviceArrays,
    OneMicrobatch,
    StateBytes,
    batch_bytes,
    shapes_on,
    state_bytes,
    temporary_bytes,
)
from jvarlen.parallel.scheduled import BufferSlots, buffer_slots
from jvarlen.planning.buckets import Bucket
from jvarlen.training.losses import LossFn
from jvarlen.training.train_state import TrainState, init_train_state

__all__ = ["MemoryModel"]

_TOLERANCE = 0.005
_WHAT = ("runs_again", "plain", "staged", "splits")


class _Sizes(NamedTuple):
    """What the arrays of a microbatch depend on; numbers, or arrays."""

    rows: Any
    length: Any
    layers: Any


class _Kind(NamedTuple):
    """A program: those of one kind differ in their sizes only.

    Attributes:
      tensor: devices along "tensor"; like `sequence`, another size is another program.
      sequence_parallel: as of the layout.
      sequence: parts of a row.
      has_one_layer: whether a part of the model is one layer, which is no loop.
      what: `"plain"`; or `"runs_again"`: layers hold inputs; or of stages, `"staged"` or with `"splits"`, where weight
        gradients are actions of their own.
    """

    tensor: int
    sequence_parallel: bool
    sequence: int
    has_one_layer: bool
    what: str


_SIMPLEST = _Kind(1, False, 1, False, "plain")


class _Arrays(NamedTuple):
    """Sizes of all arrays of a kind, for a range of lengths.

    Attributes:
      live: float64[points, N], which arrays are alive at a point; of all points that may be the fullest.
      live_without_grads: likewise, without gradients.
      scale: float64[N + 4], bytes where all sizes are 1; at last those of `x`, `floats`, `kept` and `handed`.
      powers: float64[N + 4, 3], by `_Sizes`.
    """

    live: np.ndarray
    live_without_grads: np.ndarray
    scale: np.ndarray
    powers: np.ndarray

    def at(self, sizes: _Sizes) -> np.ndarray:
        """float64[6, U]: the two peaks, and the last four."""
        logs = np.log(np.broadcast_arrays(*(np.asarray(size, np.float64) for size in sizes)))
        terms, place = np.unique(self.powers, axis=0, return_inverse=True)
        values = np.exp(terms @ logs.reshape(len(logs), -1))  # of each product of powers
        place = place.ravel()

        def summed(weights: np.ndarray) -> np.ndarray:
            of_terms = np.zeros((len(weights), len(terms)))
            np.add.at(of_terms.T, place[: weights.shape[1]], (weights * self.scale[: weights.shape[1]]).T)
            return (np.unique(of_terms, axis=0) @ values).max(axis=0, initial=0)

        last = self.scale[-4:, None] * values[place[-4:]]
        return np.stack([summed(self.live), summed(self.live_without_grads), *last])


class MemoryModel:
    """Bytes of a training step on a device.

    Args:
      model: as for `memory_bill`.
      params: pytree of arrays or shapes, as for `memory_bill`.
      optimizer: any Optax optimizer.
      buckets: K shapes of microbatches.
      batch_spec: as for `memory_bill`.
      extra: as for `init_state`.
    """

    def __init__(
        self,
        model: LayeredModel | LossFn,
        params: Any,
        optimizer: optax.GradientTransformation | optax.MultiSteps,
        buckets: Sequence[Bucket],
        *,
        batch_spec: Any = token_batch_spec,
        extra: Any = None,
    ):
        self._model, self._optimizer = model, optimizer
        self._params = shapes_on(Layout(), params, None)
        self._buckets = [Bucket(*bucket) for bucket in buckets]
        self._batch_spec, self._extra = batch_spec, extra
        stacked = self._params
        if isinstance(model, LayeredModel) and model.stack is not None:
            stacked = jax.eval_shape(model.stack, self._params)
        self._num_layers = jax.tree.leaves(stacked.layers)[0].shape[0] if isinstance(stacked, LayeredParams) else 1
        self._can_stage = isinstance(self._params, LayeredParams)
        self._states: dict[tuple[int, ...], list[StateBytes]] = {}
        self._traced: dict[tuple[_Kind, _Sizes], DeviceArrays] = {}
        self._arrays: dict[_Kind, list[tuple[int, _Arrays]]] = {}

    def memory_bytes(self, table: LayoutTable, microbatches_per_step: int) -> Float64[np.ndarray, "C K"]:
        """What a step of each bucket holds on a device of each layout: `memory_bill(…).total`.

        Args:
          table: C layouts. Where one cannot take a bucket, the value means nothing.
          microbatches_per_step: those of a step over all devices.

        Returns:
          float64[C, K], bytes.
        """
        of_shard = np.maximum(1, table.of_shard(self._buckets, microbatches_per_step))
        has_stages = (table.stage > 1)[:, None]
        held = self._state_of(table)
        of_arrays = self._arrays_of(table)
        temporary = temporary_bytes(
            StateBytes(*(np.asarray(part, np.float64)[:, None] for part in held)),
            of_arrays,
            of_arrays[0],
            of_arrays[1],
            self._slots_of(table, of_shard),
            has_stages=has_stages,
            zero=table.zero[:, None],
            chunks=table.chunks[:, None],
            keeps_inputs=table.keeps_inputs[:, None],
            num_layers=self._layers_of(table)[:, None],
            of_shard=of_shard,
        )
        one, two = (
            np.array([batch_bytes(self._batch_spec, bucket, num) for bucket in self._buckets]) for num in (1, 2)
        )
        batch = one + (of_shard - 1) * (two - one)
        return np.asarray((held.params + held.opt_state)[:, None] + batch + np.ceil(temporary))

    def _layers_of(self, table: LayoutTable) -> np.ndarray:
        """Layers of a chunk."""
        return np.maximum(1, self._num_layers // (table.stage * table.chunks))

    def _slots_of(self, table: LayoutTable, of_shard: np.ndarray) -> BufferSlots:
        slots = BufferSlots(*np.ones((4, *of_shard.shape)))
        for index in np.unique(table.schedule[table.stage > 1]).tolist():
            rows = np.flatnonzero((table.schedule == index) & (table.stage > 1))
            found = buffer_slots(SCHEDULES[index], table.stage[rows, None], of_shard[rows], table.chunks[rows, None])
            for part, own in zip(slots, found, strict=True):
                part[rows] = own
        return slots

    def state_bytes(self, table: LayoutTable) -> Float64[np.ndarray, " C"]:
        """Parameters and optimizer state on a device of each layout.

        Args:
          table: C layouts.

        Returns:
          float64[C], bytes.
        """
        held = self._state_of(table)
        return held.params + held.opt_state

    def _state_of(self, table: LayoutTable) -> StateBytes:
        """Of each layout."""
        keys = np.stack([table.tensor, table.zero, table.num_shards, table.stage > 1], axis=1)
        different, place = np.unique(keys, axis=0, return_inverse=True)
        # Of stages with one layer, more for each further one, and for each that changes place.
        parts = np.array([[[*each] for each in self._state_parts(*key)] for key in different.tolist()], np.float64)
        one, more, moved = np.moveaxis(parts[place.ravel()], (1, 2), (0, 1))
        per_stage = np.maximum(1, self._num_layers // table.stage)
        return StateBytes(*(one + (per_stage - 1) * more + np.where(table.chunks > 1, per_stage, 0) * moved))

    def _state_parts(self, tensor: int, zero: int, num_shards: int, has_stages: int) -> list[StateBytes]:
        key = tensor, zero, num_shards, has_stages
        if key not in self._states:
            layout = Layout(data=num_shards, tensor=tensor, zero=zero)
            nothing = StateBytes(*[0] * len(StateBytes._fields))
            if not has_stages:
                self._states[key] = [self._state_bytes(layout), nothing, nothing]
            else:
                staged = Layout(data=num_shards, tensor=tensor, zero=zero, stage=2)
                moving = Layout(data=num_shards, tensor=tensor, zero=zero, stage=2, chunks=2, schedule="interleaved")
                one, two, moved = (
                    self._state_bytes(layout, num) for layout, num in ((staged, 2), (staged, 4), (moving, 4))
                )
                more = StateBytes(*(b - a for a, b in zip(one, two, strict=True)))
                whole = (moved.whole - two.whole) / 2
                self._states[key] = [one, more, nothing._replace(whole=whole)]
        return self._states[key]

    def _state_bytes(self, layout: Layout, num_layers: int | None = None) -> StateBytes:
        return state_bytes(layout, self._state_shapes(layout.tensor, num_layers), self._model)

    @functools.cache  # noqa: B019
    def _state_shapes(self, tensor: int, num_layers: int | None) -> TrainState:
        params = self._params
        if num_layers is not None:
            layers = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((num_layers, *leaf.shape[1:]), leaf.dtype), params.layers
            )
            params = params._replace(layers=layers)
        params = shapes_on(Layout(tensor=tensor), params, self._model)
        return jax.eval_shape(lambda params: init_train_state(params, self._optimizer, extra=self._extra), params)

    def _arrays_of(self, table: LayoutTable) -> Any:
        """float64[6, C, K]: two peaks, and the other sizes of `DeviceArrays`; each a field."""
        has_stages = table.stage > 1
        splits = table.schedule == SCHEDULES.index("zero_bubble")
        what = np.where(
            has_stages,
            np.where(splits, 3, 2),
            np.where(table.keeps_inputs & isinstance(self._model, LayeredModel), 0, 1),
        )
        keys = np.stack([what, table.tensor, table.sequence_parallel, table.sequence, self._layers_of(table)], axis=1)
        different, place = np.unique(keys, axis=0, return_inverse=True)
        place = place.ravel()
        is_spread = table.is_spread(self._buckets)
        whole_there = self._arrays_at(different, False) if not is_spread.all() else None
        if not is_spread.any():
            assert whole_there is not None
            found = whole_there[:, place]
        else:
            spread_there = self._arrays_at(different, True)
            found = spread_there[:, place]
            if whole_there is not None:
                found = np.where(is_spread, found, whole_there[:, place])
        return _AtSizes(*found)

    def _arrays_at(self, keys: np.ndarray, is_spread: bool) -> np.ndarray:
        """float64[6, U, K]."""
        found = np.zeros((6, len(keys), len(self._buckets)))
        lengths = np.array([bucket.length for bucket in self._buckets])
        rows = np.array([bucket.rows for bucket in self._buckets])
        sequence = keys[:, 3] if is_spread else np.ones(len(keys), np.int64)
        kinds = np.stack([keys[:, 1], keys[:, 2], sequence, keys[:, 4] == 1, keys[:, 0]], axis=1)
        different, kind_of = np.unique(kinds, axis=0, return_inverse=True)
        for number, (tensor, parallel, size, is_one, what) in enumerate(different.tolist()):
            if is_spread and size == 1:
                continue
            mine = np.flatnonzero(kind_of.ravel() == number)
            below = -1
            for longest, arrays in self._arrays_of_kind(_Kind(tensor, parallel, size, is_one, _WHAT[what])):
                columns = np.flatnonzero((lengths > below) & (lengths <= longest))
                below = longest
                sizes = _Sizes(rows[columns], lengths[columns], keys[mine, 4, None])
                found[:, mine[:, None], columns] = arrays.at(sizes).reshape(6, len(mine), len(columns))
        return found

    def _arrays_of_kind(self, kind: _Kind) -> list[tuple[int, _Arrays]]:
        """Sizes of arrays, and up to which length they hold, in rising order."""
        if kind not in self._arrays:
            lengths = np.array(sorted({bucket.length for bucket in self._buckets}))
            parts = [lengths]
            if kind != _SIMPLEST:  # programs change at about the same lengths
                limits = [longest for longest, _ in self._arrays_of_kind(_SIMPLEST)]
                parts = np.split(lengths, np.searchsorted(lengths, limits[:-1], side="right"))
            self._arrays[kind] = [each for part in parts for each in self._fit(kind, part.tolist())]
        return self._arrays[kind]

    def _fit(self, kind: _Kind, lengths: list[int]) -> list[tuple[int, _Arrays]]:
        """Halves the lengths until each part has one program."""
        fitted = self._fit_one(kind, lengths[0], lengths[-1])
        middle = len(lengths) // 2
        if fitted is not None and len(lengths) > 2 and kind == _SIMPLEST:
            sizes = self._base(kind, lengths[middle])
            if abs(fitted.at(sizes)[0, 0] / self._trace(kind, sizes).lifetimes.peak() - 1) > _TOLERANCE:
                fitted = None
        if fitted is not None:
            return [(lengths[-1], fitted)]
        assert middle, "rows and layers make no other program"
        return [*self._fit(kind, lengths[:middle]), *self._fit(kind, lengths[middle:])]

    def _base(self, kind: _Kind, length: int) -> _Sizes:
        multiple = 2 * kind.sequence * kind.tensor if kind.sequence > 1 or kind.sequence_parallel else 1
        length = -(-length // multiple) * multiple
        return _Sizes(2, length, 1 if kind.has_one_layer else 2)

    def _fit_one(self, kind: _Kind, shortest: int, longest: int) -> _Arrays | None:
        """None: the programs of two lengths differ."""
        base, longer = (self._base(kind, length) for length in (shortest, longest))
        wider = base._replace(rows=10, layers=14 if base.layers > 1 else 1)
        traced = [self._trace(kind, each) for each in (base, wider, longer)]
        if any(not _have_one_program(traced[0], each) for each in traced):
            return None
        sizes = [np.array([*each.lifetimes.num_bytes, each.x, each.floats, each.kept, each.handed]) for each in traced]
        logs = [np.log(np.maximum(each, 1)) for each in sizes]
        ratios = np.log(wider) - np.log(base)
        possible = np.array([(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1)])
        powers = possible[np.abs((logs[1] - logs[0])[:, None] - possible @ ratios).argmin(axis=1)].astype(np.float64)
        if longer.length > base.length:
            powers[:, 1] = np.round((logs[2] - logs[0]) / np.log(longer.length / base.length), 6)
        scale = sizes[0] / np.exp(powers @ np.log(base))
        first = traced[0]
        live = _live(first)
        return _Arrays(live, np.where(first.is_grad, 0, live), scale, powers)

    def _trace(self, kind: _Kind, sizes: _Sizes) -> DeviceArrays:
        key = kind, sizes
        if key not in self._traced:
            axes: dict[str, Any] = {
                "tensor": kind.tensor,
                "sequence": kind.sequence,
                "sequence_parallel": bool(kind.sequence_parallel),
            }
            if kind.what in ("staged", "splits"):
                schedule: Schedule = "zero_bubble" if kind.what == "splits" else "1f1b"
                layout = Layout(**axes, stage=2, schedule=schedule)
            else:
                layout = Layout(**axes, keeps="inputs" if kind.what == "runs_again" else None)
            one = OneMicrobatch(
                self._model,
                layout,
                shapes_on(layout, self._params, self._model),
                self._extra,
                Bucket(sizes.rows, sizes.length),
                self._batch_spec,
                sizes.layers if self._can_stage else None,
            )
            self._traced[key] = one.arrays()
        return self._traced[key]


class _AtSizes(NamedTuple):
    """As `DeviceArrays`, for many sizes; each is float64[C, K]."""

    peak: np.ndarray
    peak_without_grads: np.ndarray
    x: np.ndarray
    floats: np.ndarray
    kept: np.ndarray
    handed: np.ndarray


def _have_one_program(one: DeviceArrays, other: DeviceArrays) -> bool:
    first, second = one.lifetimes, other.lifetimes
    return all(np.array_equal(getattr(first, name), getattr(second, name)) for name in ("begin", "end"))


def _live(arrays: DeviceArrays) -> np.ndarray:
    """float64[points, N]."""
    lifetimes = arrays.lifetimes
    points = np.unique(lifetimes.begin)[:, None]  # only there can it become fuller
    return np.asarray((lifetimes.begin <= points) & (lifetimes.end > points), np.float64)
