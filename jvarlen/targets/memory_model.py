"""Memory of a step on a device, for all buckets on many layouts at once: `estimate_memory`, interpolated.

A microbatch is traced at a few sizes; each of its arrays grows as a product of powers of rows, length, devices and
layers. Letters: C layouts, K buckets, L layers, S stages, V chunks, U different rows of a table, N arrays.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jaxtyping import Float64

from jvarlen.batches.batches import token_batch_spec
from jvarlen.distributed.layout import Layout
from jvarlen.parallel.layers import LayeredModel, LayeredParams, num_layers_of
from jvarlen.parallel.memory import (
    BufferSlots,
    StateBytes,
    batch_bytes,
    buffer_slots,
    estimate_memory,
    stacked_bytes,
    state_bytes,
    temporary_bytes,
)
from jvarlen.parallel.microbatch import ArrayBytes, DeviceArrays, OneMicrobatch, shapes_on, stacked_shapes, with_layers
from jvarlen.planning.buckets import Bucket
from jvarlen.targets.layout_table import SCHEDULES, LayoutTable
from jvarlen.training.losses import LossFn
from jvarlen.training.train_state import TrainState, new_state
from jvarlen.training.trainable import Trainable, TrainedOf, select_trained

__all__ = ["MemoryModel"]

_FEW_LAYERS = 12
_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109)
# Layers hold inputs and run again; they do not; stages; stages where weight gradients are actions of their own.
_WHAT = ("runs_again", "plain", "staged", "splits", "staged_again", "splits_again")


class _Kind(NamedTuple):
    """Key of a traced program; programs with one key differ only in rows and layers."""

    length: int
    tensor: int
    sequence_parallel: bool
    context: int  # parts of a row
    has_one_layer: bool  # a part of the model is one layer, which is no loop
    what: str  # one of `_WHAT`


class _Arrays(NamedTuple):
    """Sizes of all arrays of a kind."""

    # For each field of `ArrayBytes`, float64[points, N]: the arrays that are alive at a point, of all points that may
    # be the fullest, or that it is the sum of.
    which: tuple[np.ndarray, ...]
    scale: np.ndarray  # float64[N], bytes where all sizes are 1
    powers: np.ndarray  # bool[N, 2], whether they grow with rows, and with layers

    def at(self, rows: Float64[np.ndarray, " K"], layers: int) -> Float64[np.ndarray, "6 K"]:
        """The fields of `ArrayBytes`."""
        growth = np.where(self.powers[:, :1], rows, 1.0) * np.where(self.powers[:, 1:], layers, 1)
        return np.stack([(which @ (self.scale[:, None] * growth)).max(axis=0) for which in self.which])


class MemoryModel:
    """Bytes of a training step on a device, of K buckets on many layouts; arguments as for `estimate_memory`."""

    def __init__(
        self,
        model: LayeredModel | LossFn,
        params: Any,
        optimizer: optax.GradientTransformation | optax.MultiSteps,
        buckets: Sequence[Bucket],
        *,
        trainable: Trainable = None,
        batch_spec: Any = token_batch_spec,
        extra: Any = None,
    ):
        trained_of: TrainedOf = functools.partial(select_trained, trainable=trainable)
        self._model, self._params, self._trained_of = stacked_shapes(model, params, trained_of)
        self._stacks = isinstance(model, LayeredModel) and model.stack is not None
        self._own = model, params, trainable
        self._optimizer = optimizer
        self._buckets = [Bucket(*bucket) for bucket in buckets]
        self._batch_spec, self._extra = batch_spec, extra
        self._num_layers = num_layers_of(self._params) if isinstance(self._params, LayeredParams) else 0
        self._state_parts = functools.cache(self._make_state_parts)
        self._arrays_of_kind = functools.cache(self._make_arrays)
        self._at = functools.cache(self._count_at)
        self._state_shapes = functools.cache(self._make_state_shapes)
        lengths = sorted({bucket.length for bucket in self._buckets})
        self._lengths = sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]})

    def memory_bytes(self, table: LayoutTable, microbatches_per_step: int) -> Float64[np.ndarray, "C K"]:
        """`estimate_memory(…).total` of each bucket on each layout; meaningless where one cannot take the other."""
        of_shard = np.maximum(1, table.of_shard(self._buckets, microbatches_per_step))
        has_stages = (table.stage > 1)[:, None]
        held = self._state_of(table)
        temporary = temporary_bytes(
            StateBytes(*(np.asarray(part, np.float64)[:, None] for part in held)),
            self._arrays_of(table),
            self._slots_of(table, of_shard),
            by_layers=isinstance(self._model, LayeredModel),
            has_stages=has_stages,
            zero=table.zero[:, None],
            chunks=table.virtual[:, None],
            recomputes=table.recomputes[:, None],
            num_layers=self._layers_of(table)[:, None],
            of_shard=of_shard,
        )
        one, two = (
            np.array([batch_bytes(self._batch_spec, bucket, num) for bucket in self._buckets]) for num in (1, 2)
        )
        batch = one + (of_shard - 1) * (two - one)
        return np.asarray((held.params + held.opt_state)[:, None] + batch + np.ceil(temporary))

    def state_bytes(self, table: LayoutTable) -> Float64[np.ndarray, " C"]:
        """Bytes of parameters and optimizer state on a device of each layout."""
        held = self._state_of(table)
        return held.params + held.opt_state

    def exact_bytes(self, layout: Layout, bucket: Bucket, microbatches_per_step: int) -> int:
        """Bytes of one layout and bucket, for which its own program is traced."""
        model, params, trainable = self._own
        options = {"extra": self._extra, "batch_spec": self._batch_spec, "microbatches_per_step": microbatches_per_step}
        options |= {"model": model, "trainable": trainable}
        return estimate_memory(layout, params, self._optimizer, bucket, **options).total

    def _layers_of(self, table: LayoutTable) -> np.ndarray:
        """Layers of a chunk."""
        return np.maximum(1, self._num_layers // (table.stage * table.virtual))

    def _slots_of(self, table: LayoutTable, of_shard: np.ndarray) -> BufferSlots:
        slots = np.ones((4, *of_shard.shape))
        for index in np.unique(table.schedule[table.stage > 1]).tolist():
            rows = np.flatnonzero((table.schedule == index) & (table.stage > 1))
            stage, virtual = table.stage[rows, None], table.virtual[rows, None]
            for part, own in zip(slots, buffer_slots(SCHEDULES[index], stage, of_shard[rows], virtual), strict=True):
                part[rows] = own
        return BufferSlots(*slots)

    def _state_of(self, table: LayoutTable) -> StateBytes:
        """Of each layout."""
        keys = np.stack([table.tensor, table.zero, table.num_shards, table.stage > 1], axis=1)
        different, place = np.unique(keys, axis=0, return_inverse=True)
        parts = np.stack([self._state_parts(*key) for key in different.tolist()])
        one, more, moved = np.moveaxis(parts[place.ravel()], (1, 2), (0, 1))
        per_stage = np.maximum(1, self._num_layers // table.stage)
        held = StateBytes(*(one + (per_stage - 1) * more + np.where(table.virtual > 1, per_stage, 0) * moved))
        is_whole = (table.zero == 0) & (table.tensor == 1) & (table.stage == 1) & (table.context == 1)
        return held._replace(stacked=np.where(is_whole, held.stacked, 0))

    def _make_state_parts(self, tensor: int, zero: int, num_shards: int, has_stages: int) -> np.ndarray:
        """float64[3, fields of `StateBytes`]: of stages with one layer, more for each further one, and moved ones."""
        sizes: dict[str, Any] = {"data": num_shards, "tensor": tensor, "zero": zero}

        def held(num_layers: int | None = None, **options: Any) -> np.ndarray:
            state = self._state_shapes(tensor, num_layers)
            return np.array(state_bytes(Layout(**sizes, **options), state, self._model, self._trained_of), np.float64)

        if not has_stages:
            parts = np.stack([held(), *np.zeros((2, len(StateBytes._fields)))])
            if self._stacks:
                parts[0, StateBytes._fields.index("stacked")] = stacked_bytes(self._params)
            return parts
        one, two = held(2, stage=2), held(4, stage=2)
        moved = np.zeros(len(StateBytes._fields))
        whole = StateBytes._fields.index("whole")
        moved[whole] = (held(4, stage=2, virtual=2, schedule="interleaved") - two)[whole] / 2
        return np.stack([one, two - one, moved])

    def _make_state_shapes(self, tensor: int, num_layers: int | None) -> TrainState:
        params = self._params if num_layers is None else with_layers(self._params, num_layers)
        params = shapes_on(Layout(data=1, tensor=tensor), params, self._model)
        others: dict[str, Any] = {"extra": self._extra, "trained_of": self._trained_of}
        return jax.eval_shape(lambda params: new_state(params, self._optimizer, **others), params)

    def _arrays_of(self, table: LayoutTable) -> ArrayBytes:
        """float64[C, K] each."""
        has_stages = table.stage > 1
        splits = table.schedule == SCHEDULES.index("zero_bubble")
        runs_again = table.recomputes & isinstance(self._model, LayeredModel)
        what = np.where(has_stages, 2 + splits + 2 * table.recomputes, np.where(runs_again, 0, 1))
        keys = np.stack([what, table.tensor, table.sequence_parallel, table.context, self._layers_of(table)], axis=1)
        different, place = np.unique(keys, axis=0, return_inverse=True)
        is_spread = table.is_spread(self._buckets)
        found = np.zeros((6, *is_spread.shape))
        for number, (kind, tensor, parallel, context, layers) in enumerate(different.tolist()):
            mine = np.flatnonzero(place.ravel() == number)
            for parts in {1, context}:
                chosen = is_spread[mine] == (parts > 1)
                if chosen.any():
                    at = self._at(_WHAT[kind], tensor, bool(parallel), parts, layers)
                    found[:, mine] = np.where(chosen, at[:, None], found[:, mine])
        return ArrayBytes(*found)

    def _count_at(self, what: str, tensor: int, sequence_parallel: bool, context: int, layers: int) -> np.ndarray:
        """float64[6, K], of every bucket."""
        # Programs are traced for few devices along one axis. More devices hold what follows from two of their divisors:
        # a constant, and a part that they share. Of two axes, each holds its share of what the other leaves.
        if tensor > 1 and context > 1:
            whole = self._at(what, 1, False, 1, layers)
            split = self._at(what, tensor, sequence_parallel, 1, layers)
            spread = self._at(what, 1, False, context, layers)
            return np.divide(split, whole, out=np.ones_like(whole), where=whole > 0) * spread
        size = max(tensor, context)
        fewer = [each for each in range(2, size) if size % each == 0][:2]
        if len(fewer) < 2:
            return self._traced_at(_Kind(0, tensor, sequence_parallel, context, layers == 1, what), layers)
        few, more = (
            self._at(what, *((each, sequence_parallel, 1) if tensor > 1 else (1, False, each)), layers)
            for each in fewer
        )
        shared = (few - more) / (1 / fewer[0] - 1 / fewer[1])
        return np.maximum(more - shared * (1 / fewer[1] - 1 / size), more * fewer[1] / size)

    def _traced_at(self, kind: _Kind, layers: int) -> np.ndarray:
        """float64[6, K], of programs that are traced for few lengths, and grow as a polynomial in between."""
        rows, lengths = np.array(self._buckets, np.float64).T
        if self._num_layers > _FEW_LAYERS:  # that one layer is no loop makes little of a difference
            kind = kind._replace(has_one_layer=False)
        multiple = (2 * kind.context if kind.context > 1 else 1) * (kind.tensor if kind.sequence_parallel else 1)
        known = np.unique([-(-length // multiple) * multiple for length in self._lengths])
        kinds = [kind._replace(length=length) for length in known.tolist()]
        values = np.stack([self._arrays_of_kind(each).at(rows, layers) for each in kinds])  # [lengths, 6, K]
        if len(known) == 1:
            return values[0] * np.maximum(lengths / known[0], 1)
        upper = np.clip(np.searchsorted(known, lengths), 1, len(known) - 1)
        columns = np.arange(len(rows))
        low, high = (values[place, :, columns].T for place in (upper - 1, upper))
        slopes = np.diff(values, axis=0) / np.diff(known)[:, None, None]
        found = low + (lengths - known[upper - 1]) * slopes[upper - 1, :, columns].T
        if len(known) == 3:  # what grows with the square is below the line
            square = np.maximum((slopes[1] - slopes[0]) / (known[2] - known[0]), 0)
            found += (lengths - known[upper - 1]) * (lengths - known[upper]) * square
        return np.maximum(found, np.where(lengths >= known[0], np.minimum(low, high), 0))

    def _make_arrays(self, kind: _Kind) -> _Arrays:
        # Numbers of rows and of layers that divide no other size: what they divide tells what depends on them.
        sizes_of_params = {size for leaf in jax.tree.leaves(self._params) for size in leaf.shape} | {kind.length}
        primes = (each for each in _PRIMES if all(size % each for size in sizes_of_params))
        rows, layers = next(primes), 1 if kind.has_one_layer else next(primes)
        first = self._trace(kind, rows, layers)
        last = [(first.x,), (first.floats,), first.kept, first.handed]
        sizes = np.array([*first.lifetimes.num_bytes, *itertools.chain(*last)], np.int64)
        powers = np.stack([sizes % rows == 0, (sizes % layers == 0) & (layers > 1)], axis=1) & (sizes > 0)[:, None]
        scale = sizes / np.where(powers, [rows, layers], 1).prod(axis=1)
        lifetimes = first.lifetimes
        points = np.unique(lifetimes.begin)[:, None]  # only there can it become fuller
        live = np.asarray((lifetimes.begin <= points) & (lifetimes.end > points), np.float64)  # [points, N]
        part = np.repeat(np.arange(5), [live.shape[1], *map(len, last)])
        peaks = [np.zeros((len(live), len(sizes))) for _ in range(2)]
        peaks[0][:, part == 0] = live
        peaks[1][:, part == 0] = np.where(first.is_grad, 0, live)
        sums = [(part == i).astype(np.float64)[None] for i in range(1, 5)]
        return _Arrays((*peaks, *sums), scale, powers)

    def _trace(self, kind: _Kind, rows: int, layers: int) -> DeviceArrays:
        axes: dict[str, Any] = {"data": 1, "tensor": kind.tensor, "context": kind.context}
        axes["sequence_parallel"] = kind.sequence_parallel
        if kind.what.startswith(("staged", "splits")):
            axes |= {"stage": 2, "schedule": "zero_bubble" if kind.what.startswith("splits") else "1f1b"}
        layout = Layout(**axes, remat="full" if kind.what.endswith("again") else "none")
        params, bucket = shapes_on(layout, self._params, self._model), Bucket(rows, kind.length)
        num_layers = layers if self._num_layers else None
        given = self._trained_of, self._extra, bucket, self._batch_spec
        return OneMicrobatch(self._model, layout, params, *given, num_layers).arrays()
