"""Memory of a step on many layouts: a guess of `estimate_memory`, by which those are chosen that it is asked for.

State is counted exactly. Few traced steps tell what passes hold at a position; mesh axes split it. Letters: C layouts,
K buckets, L layers.
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
from jvarlen.distributed.layout import Layout, Remat
from jvarlen.estimates.layout_table import SCHEDULES, LayoutTable
from jvarlen.estimates.lifetimes import lifetimes_of
from jvarlen.estimates.memory import (
    StateBytes,
    batch_bytes,
    buffer_slots,
    estimate_memory,
    state_bytes,
    step_jaxpr,
    temporary_bytes,
)
from jvarlen.estimates.microbatch import bytes_of, shapes_on, stacked_shapes, with_layers
from jvarlen.parallel.layers import LayeredModel, LayeredParams, num_layers_of
from jvarlen.planning.buckets import Bucket
from jvarlen.training.losses import LossFn
from jvarlen.training.train_state import TrainState, new_state
from jvarlen.training.trainable import Trainable, TrainedOf, select_trained

__all__ = ["MemoryModel"]


class _Held(NamedTuple):
    """Bytes that a position of a microbatch takes on a device."""

    kept: Any  # by a layer, for its backward pass
    rest: Any  # at the fullest point, without gradients of layers


class MemoryModel:
    """Bytes of a training step on a device, of K buckets on many layouts; arguments as for `estimate_memory`."""

    def __init__(
        self,
        model: LayeredModel | LossFn,
        optimizer: optax.GradientTransformation | optax.MultiSteps,
        buckets: Sequence[Bucket],
        *,
        params: Any,
        trainable: Trainable = None,
        batch_spec: Any = token_batch_spec,
        extra: Any = None,
    ):
        trained_of: TrainedOf = functools.partial(select_trained, trainable=trainable)
        self._model, self._params, self._trained_of = stacked_shapes(model, params, trained_of)
        self._optimizer = optimizer
        self._buckets = [Bucket(*bucket) for bucket in buckets]
        by_length = sorted(self._buckets, key=lambda bucket: bucket.length)
        self._shortest, self._longest = by_length[0], by_length[-1]
        stacks = isinstance(model, LayeredModel) and model.stack is not None
        self._stacked_bytes = bytes_of(self._params.layers) if stacks else 0
        self._batch_spec, self._extra = batch_spec, extra
        self._num_layers = num_layers_of(self._params) if isinstance(self._params, LayeredParams) else 0
        self._state_parts = functools.cache(self._make_state_parts)
        self._state_shapes = functools.cache(self._make_state_shapes)
        self._held = functools.cache(self._trace)

        @functools.cache
        def exact_bytes(layout: Layout, bucket: Bucket, num_microbatches: int) -> int:
            return estimate_memory(
                model,
                optimizer,
                bucket,
                layout=layout,
                params=params,
                trainable=trainable,
                extra=extra,
                batch_spec=batch_spec,
                num_microbatches=num_microbatches,
            ).total

        self.exact_bytes = exact_bytes

    def memory_bytes(self, table: LayoutTable, num_microbatches: int) -> Float64[np.ndarray, "C K"]:
        """A guess of each bucket on each layout; meaningless where one cannot take the other."""
        of_shard = np.maximum(1, table.of_shard(self._buckets, num_microbatches))
        held, is_spread = self._state_of(table), table.is_spread(self._buckets)
        slots = self._slots_of(table, of_shard)
        layers = np.maximum(1, self._num_layers // (table.stage * table.virtual))[:, None]
        passes = np.empty(of_shard.shape)
        keys = np.stack([table.tensor, table.sequence_parallel, table.recomputes], axis=1)
        different, place = np.unique(keys, axis=0, return_inverse=True)
        for number, (tensor, sequence_parallel, recomputes) in enumerate(different.tolist()):
            rows = np.flatnonzero(place.ravel() == number)
            kept, rest = self._in_buckets(tensor, bool(sequence_parallel), bool(recomputes))
            passes[rows] = slots[rows] * layers[rows] * kept + rest
        peak = passes / np.where(is_spread, table.context[:, None], 1)
        # Where a step takes the model's own parameters, it stacks those of the layers.
        is_own = (table.zero == 0) & (table.tensor == 1) & (table.context == 1) & (table.stage == 1)
        peak += (held.accumulated + held.gathered + np.where(is_own, self._stacked_bytes, 0))[:, None]
        one, two = (
            np.array([batch_bytes(self._batch_spec, bucket, num) for bucket in self._buckets]) for num in (1, 2)
        )
        batch = one + (of_shard - 1) * (two - one)
        held_always = (held.params + held.opt_state)[:, None] + batch
        return np.asarray(held_always + temporary_bytes(peak, table.wide.virtual, table.wide.tensor))

    def state_bytes(self, table: LayoutTable) -> Float64[np.ndarray, " C"]:
        """Bytes of parameters and optimizer state on a device of each layout."""
        held = self._state_of(table)
        return held.params + held.opt_state

    def _slots_of(self, table: LayoutTable, of_shard: np.ndarray) -> np.ndarray:
        """Microbatches of which layers keep something, [C, K]."""
        slots = np.ones(of_shard.shape)
        for index in np.unique(table.schedule[table.stage > 1]).tolist():
            rows = np.flatnonzero((table.schedule == index) & (table.stage > 1))
            stage, virtual = table.stage[rows, None], table.virtual[rows, None]
            slots[rows] = buffer_slots(SCHEDULES[index], stage, of_shard[rows], virtual).kept
            if SCHEDULES[index] == "zero_bubble":  # as measured: what is handed on to weight gradients
                slots[rows] *= 1.7
        return slots

    def _in_buckets(self, tensor: int, sequence_parallel: bool, recomputes: bool) -> _Held:
        """Of microbatches of all buckets, float64[K] each; on more devices than two from what one and two hold."""
        lengths = [bucket.length for bucket in self._buckets]
        tokens = np.array([bucket.padded_tokens for bucket in self._buckets])
        known = self._shortest.length, self._longest.length
        short, long = (self._held(bucket, 1, False, recomputes) for bucket in (self._shortest, self._longest))
        one = [tokens * np.interp(lengths, known, each) for each in zip(short, long, strict=True)]
        if tensor == 1:
            return _Held(*one)
        # A part of each is split. With sequence_parallel all that one device has is, and gathered positions are new.
        of_two = zip(self._held(self._longest, 2, sequence_parallel, recomputes), long, strict=True)
        ratios = [two / whole for two, whole in of_two]
        splits = [1 if sequence_parallel else 2 * (1 - ratio) for ratio in ratios]
        factors = [r - split * (1 / 2 - 1 / tensor) for r, split in zip(ratios, splits, strict=True)]
        return _Held(*(each * factor for each, factor in zip(one, factors, strict=True)))

    def _trace(self, bucket: Bucket, tensor: int, sequence_parallel: bool, recomputes: bool) -> _Held:
        remat: Remat = "full" if recomputes else "none"
        layout = Layout(data=1, tensor=tensor, sequence_parallel=sequence_parallel, remat=remat)
        bucket = bucket._replace(length=bucket.length + bucket.length % tensor)
        given = self._trained_of, self._extra, bucket, self._batch_spec
        jaxpr = step_jaxpr(self._model, layout, shapes_on(layout, self._params, self._model), *given, 2)
        arrays = lifetimes_of(ClosedJaxpr(jaxpr, ()))
        state = state_bytes(layout, self._state_shapes(tensor, None), self._model, self._trained_of)
        if not self._num_layers:
            return _Held(0, (arrays.peak() - state.accumulated - state.gathered) / bucket.padded_tokens)
        in_loop = arrays.peak(np.where(arrays.in_loop, arrays.num_bytes, 0))
        kept, rest = (in_loop - state.accumulated) / self._num_layers, arrays.peak() - in_loop
        return _Held(kept / bucket.padded_tokens, rest / bucket.padded_tokens)

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
