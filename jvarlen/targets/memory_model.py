"""Memory of a step on a device, for all buckets on many layouts at once: `estimate_memory`, interpolated.

A step without shards of state is traced at a few sizes; each of its arrays grows as a product of powers of rows,
length, devices and layers. What ZeRO shards and gathers is counted. Letters: C layouts, K buckets, L layers, S stages,
V chunks, U different rows of a table, N arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr
from jaxtyping import Float64

from jvarlen.batches.batches import token_batch_spec
from jvarlen.compiling.lifetimes import Lifetimes, lifetimes_of
from jvarlen.distributed.layout import Layout
from jvarlen.parallel.layers import LayeredModel, LayeredParams, num_layers_of
from jvarlen.parallel.memory import (
    StateBytes,
    batch_bytes,
    buffer_slots,
    estimate_memory,
    state_bytes,
    step_jaxpr,
    temporary_bytes,
)
from jvarlen.parallel.microbatch import shapes_on, stacked_shapes, with_layers
from jvarlen.planning.buckets import Bucket
from jvarlen.targets.layout_table import SCHEDULES, LayoutTable
from jvarlen.training.losses import LossFn
from jvarlen.training.train_state import TrainState, new_state
from jvarlen.training.trainable import Trainable, TrainedOf, select_trained

__all__ = ["MemoryModel"]

_FEW_LAYERS = 12
_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109)
# Whether a step stacks the model's own parameters, has stages, and these weight gradients as actions of their own.
_WHAT = ("own", "plain", "staged", "splits")


class _Kind(NamedTuple):
    """Key of a traced program; programs with one key differ only in rows and layers."""

    length: int
    tensor: int
    sequence_parallel: bool
    context: int  # parts of a row
    has_one_layer: bool  # a part of the model is one layer, which is no loop
    recomputes: bool
    num_stages: int
    what: str  # one of `_WHAT`


class _Arrays(NamedTuple):
    """Sizes of all arrays of a kind."""

    live: np.ndarray  # bool[points, N], what is alive at a point, of all points that may be the fullest
    scale: np.ndarray  # float64[N], bytes where all sizes are 1
    powers: np.ndarray  # bool[N, 2], whether they grow with rows, and with layers

    def at(self, rows: Float64[np.ndarray, " K"], layers: int) -> Float64[np.ndarray, " K"]:
        """Bytes at the fullest point."""
        growth = np.where(self.powers[:, :1], rows, 1.0) * np.where(self.powers[:, 1:], layers, 1)
        return np.asarray((self.live @ (self.scale[:, None] * growth)).max(axis=0))


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
        held = self._state_of(table)
        # The peak is traced with whole sums, and without what is gathered.
        whole = self._state_of(table._replace(zero=np.zeros_like(table.zero))).accumulated
        added = np.where((table.zero == 3) | (table.virtual > 1), held.gathered, 0)
        peak = self._peaks_of(table, of_shard) + (held.accumulated - whole + added)[:, None]
        temporary = temporary_bytes(peak, table.virtual[:, None])
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

    def _kept_of(self, table: LayoutTable, of_shard: np.ndarray) -> np.ndarray:
        """`BufferSlots.kept`, [C, K]."""
        kept = np.ones(of_shard.shape)
        for index in np.unique(table.schedule[table.stage > 1]).tolist():
            rows = np.flatnonzero((table.schedule == index) & (table.stage > 1))
            stage, virtual = table.stage[rows, None], table.virtual[rows, None]
            kept[rows] = buffer_slots(SCHEDULES[index], stage, of_shard[rows], virtual).kept
        return kept

    def _state_of(self, table: LayoutTable) -> StateBytes:
        """Of each layout."""
        keys = np.stack([table.tensor, table.zero, table.num_shards, table.stage > 1], axis=1)
        different, place = np.unique(keys, axis=0, return_inverse=True)
        parts = np.stack([self._state_parts(*key) for key in different.tolist()])
        one, more, moved = np.moveaxis(parts[place.ravel()], (1, 2), (0, 1))
        per_stage = np.maximum(1, self._num_layers // table.stage)
        return StateBytes(*(one + (per_stage - 1) * more + np.where(table.virtual > 1, per_stage, 0) * moved))

    def _make_state_parts(self, tensor: int, zero: int, num_shards: int, has_stages: int) -> np.ndarray:
        """float64[3, fields of `StateBytes`]: of stages with one layer, more for each further one, and moved ones."""
        sizes: dict[str, Any] = {"data": num_shards, "tensor": tensor, "zero": zero}

        def held(num_layers: int | None = None, **options: Any) -> np.ndarray:
            state = self._state_shapes(tensor, num_layers)
            return np.array(state_bytes(Layout(**sizes, **options), state, self._model, self._trained_of), np.float64)

        if not has_stages:
            return np.stack([held(), *np.zeros((2, len(StateBytes._fields)))])
        one, two = held(2, stage=2), held(4, stage=2)
        moved = np.zeros(len(StateBytes._fields))
        gathered = StateBytes._fields.index("gathered")
        moved[gathered] = (held(4, stage=2, virtual=2, schedule="interleaved") - two)[gathered] / 2
        return np.stack([one, two - one, moved])

    def _make_state_shapes(self, tensor: int, num_layers: int | None) -> TrainState:
        params = self._params if num_layers is None else with_layers(self._params, num_layers)
        params = shapes_on(Layout(data=1, tensor=tensor), params, self._model)
        others: dict[str, Any] = {"extra": self._extra, "trained_of": self._trained_of}
        return jax.eval_shape(lambda params: new_state(params, self._optimizer, **others), params)

    def _peaks_of(self, table: LayoutTable, of_shard: np.ndarray) -> Float64[np.ndarray, "C K"]:
        """Of steps without ZeRO."""
        splits = table.schedule == SCHEDULES.index("zero_bubble")
        is_own = (table.zero == 0) & (table.tensor == 1) & (table.context == 1) & self._stacks
        what = np.where(table.stage > 1, np.where(splits, 3, 2), np.where(is_own, 0, 1))
        recomputes = table.recomputes & isinstance(self._model, LayeredModel)
        columns = what, recomputes, table.tensor, table.sequence_parallel, table.context, self._layers_of(table)
        different, place = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
        is_spread, kept = table.is_spread(self._buckets), self._kept_of(table, of_shard)
        found = np.zeros(is_spread.shape)
        for number, (kind, again, tensor, parallel, context, layers) in enumerate(different.tolist()):
            mine = np.flatnonzero(place.ravel() == number)
            for parts in {1, context}:
                chosen = is_spread[mine] == (parts > 1)
                if chosen.any():
                    of_kind = _WHAT[kind], bool(again), tensor, bool(parallel), parts, layers
                    at = self._at(*of_kind, 1 if kind < 2 else 2)
                    if kind >= 2:  # of two stages, and more for each further microbatch of which residuals are kept
                        at = at + (self._at(*of_kind, 3) - at) * (kept[mine] - 2)
                    found[mine] = np.where(chosen, at, found[mine])
        return found

    def _count_at(
        self, what: str, again: bool, tensor: int, sequence_parallel: bool, context: int, layers: int, stages: int
    ) -> Float64[np.ndarray, " K"]:
        """Of every bucket."""
        # Programs are traced for few devices along one axis. More devices hold what follows from two of their divisors:
        # a constant, and a part that they share. Of two axes, each holds its share of what the other leaves.
        if max(tensor, context) > 1 and (what == "splits" or stages > 2):  # as with two stages in the usual order
            alone, split = (
                self._at("staged", again, *of, layers, 2)
                for of in ((1, False, 1), (tensor, sequence_parallel, context))
            )
            return self._at(what, again, 1, False, 1, layers, stages) * split / alone
        if tensor > 1 and context > 1:
            whole = self._at(what, again, 1, False, 1, layers, stages)
            split = self._at(what, again, tensor, sequence_parallel, 1, layers, stages)
            spread = self._at(what, again, 1, False, context, layers, stages)
            return split / whole * spread
        size = max(tensor, context)
        fewer = [each for each in range(2, size) if size % each == 0][:2]
        if len(fewer) < 2:
            kind = _Kind(0, tensor, sequence_parallel, context, layers == 1, again, stages, what)
            return self._traced_at(kind, layers)
        few, more = (
            self._at(what, again, *((each, sequence_parallel, 1) if tensor > 1 else (1, False, each)), layers, stages)
            for each in fewer
        )
        shared = (few - more) / (1 / fewer[0] - 1 / fewer[1])
        return np.maximum(more - shared * (1 / fewer[1] - 1 / size), more * fewer[1] / size)

    def _traced_at(self, kind: _Kind, layers: int) -> Float64[np.ndarray, " K"]:
        """Of programs that are traced for few lengths, and grow as a polynomial in between."""
        rows, lengths = np.array(self._buckets, np.float64).T
        if self._num_layers > _FEW_LAYERS:  # that one layer is no loop makes little of a difference
            kind = kind._replace(has_one_layer=False)
        multiple = (2 * kind.context if kind.context > 1 else 1) * (kind.tensor if kind.sequence_parallel else 1)
        known = np.unique([-(-length // multiple) * multiple for length in self._lengths])
        kinds = [kind._replace(length=length) for length in known.tolist()]
        values = np.stack([self._arrays_of_kind(each).at(rows, layers) for each in kinds])  # [lengths, K]
        if len(known) == 1:
            return values[0] * np.maximum(lengths / known[0], 1)
        upper = np.clip(np.searchsorted(known, lengths), 1, len(known) - 1)
        columns = np.arange(len(rows))
        low, high = (values[place, columns] for place in (upper - 1, upper))
        slopes = np.diff(values, axis=0) / np.diff(known)[:, None]
        found = low + (lengths - known[upper - 1]) * slopes[upper - 1, columns]
        if len(known) == 3:  # what grows with the square is below the line
            square = np.maximum((slopes[1] - slopes[0]) / (known[2] - known[0]), 0)
            found += (lengths - known[upper - 1]) * (lengths - known[upper]) * square
        return np.maximum(found, np.where(lengths >= known[0], np.minimum(low, high), 0))

    def _make_arrays(self, kind: _Kind) -> _Arrays:
        # Numbers of rows and of layers that divide no other size: what they divide tells what depends on them.
        sizes_of_params = {size for leaf in jax.tree.leaves(self._params) for size in leaf.shape} | {kind.length}
        primes = (each for each in _PRIMES if all(size % each for size in sizes_of_params))
        rows, layers = next(primes), next(primes) if kind.num_stages > 1 and not kind.has_one_layer else 1
        lifetimes = self._trace(kind, rows, layers)
        sizes = lifetimes.num_bytes
        powers = np.stack([sizes % rows == 0, (sizes % layers == 0) & (layers > 1)], axis=1) & (sizes > 0)[:, None]
        scale = sizes / np.where(powers, [rows, layers], 1).prod(axis=1)
        points = np.unique(lifetimes.begin)[:, None]  # only there can it become fuller
        return _Arrays((lifetimes.begin <= points) & (lifetimes.end > points), scale, powers)

    def _trace(self, kind: _Kind, rows: int, layers: int) -> Lifetimes:
        axes: dict[str, Any] = {"data": 1, "tensor": kind.tensor, "context": kind.context, "stage": kind.num_stages}
        axes["sequence_parallel"] = kind.sequence_parallel
        if kind.num_stages > 1:
            axes["schedule"] = "zero_bubble" if kind.what == "splits" else "1f1b"
        model, params, trained_of = self._model, self._params, self._trained_of
        if kind.what == "own":
            model, params, trainable = self._own
            trained_of = functools.partial(select_trained, trainable=trainable)
        elif kind.num_stages > 1:
            params = with_layers(params, layers * kind.num_stages)
        layout = Layout(**axes, remat="full" if kind.recomputes else "none")
        given = trained_of, self._extra, Bucket(rows, kind.length), self._batch_spec
        of_shard = 6 if kind.num_stages > 1 else 2
        jaxpr = step_jaxpr(model, layout, shapes_on(layout, params, model), *given, of_shard)
        return lifetimes_of(ClosedJaxpr(jaxpr, ()))
