"""A fast approximation of `estimate_memory` for many layouts at once; the best few are then estimated exactly.

State is counted exactly. A few traced steps give the bytes that passes hold for a token with padding; mesh axes split
them. Letters: C layouts, K buckets.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jaxtyping import Float64, Int64

from jvarlen._common.types import Extra, Params
from jvarlen.batches.batches import token_batch_spec
from jvarlen.batches.shapes import BatchSpec
from jvarlen.distributed.layout import Layout
from jvarlen.estimates import memory
from jvarlen.estimates.layout_table import REMATS, SCHEDULES, LayoutTable
from jvarlen.estimates.lifetimes import lifetimes_of
from jvarlen.estimates.memory import StateBytes, StepShapes, estimate_memory
from jvarlen.parallel.layers import LayeredModel, LayeredParams, num_layers_of
from jvarlen.planning.buckets import Bucket
from jvarlen.training.losses import LossFn
from jvarlen.training.train_state import Optimizer, TrainState
from jvarlen.training.trainable import Trainable

__all__ = ["MemoryModel"]


_T = TypeVar("_T", float, np.ndarray)


class _Held(NamedTuple, Generic[_T]):
    """Bytes on a device, for a token with padding or for a microbatch of each bucket."""

    kept: _T  # by a layer, for its backward pass
    rest: _T  # at the fullest point, without gradients of layers


class MemoryModel:
    """Bytes of a training step on a device, of K buckets on many layouts; arguments as for `estimate_memory`."""

    def __init__(
        self,
        model: LayeredModel | LossFn,
        optimizer: Optimizer,
        buckets: Sequence[Bucket],
        *,
        params: Params,
        trainable: Trainable = None,
        batch_spec: BatchSpec = token_batch_spec,
        extra: Extra = None,
    ):
        self._step = StepShapes.of_model(model, params, trainable=trainable, extra=extra, batch_spec=batch_spec)
        self._buckets = [Bucket(*bucket) for bucket in buckets]
        by_length = sorted(self._buckets, key=lambda bucket: bucket.length)
        self._shortest, self._longest = by_length[0], by_length[-1]
        stacks = isinstance(model, LayeredModel) and model.stack is not None
        self._stacked_bytes = memory.bytes_of(self._step.params.layers) if stacks else 0
        self._num_layers = num_layers_of(self._step.params) if isinstance(self._step.params, LayeredParams) else 0
        self._optimizer = optimizer
        self._state = functools.cache(self._shapes_of_state)
        self._state_bytes = functools.cache(self._count_state_bytes)
        self._held = functools.cache(self._trace)
        estimate = functools.partial(
            estimate_memory, model, optimizer, params=params, trainable=trainable, extra=extra, batch_spec=batch_spec
        )
        self._estimate = functools.cache(
            lambda layout, bucket, m, many: estimate(bucket, layout=layout, num_microbatches=m, many_groups=many)
        )

    def exact_bytes(self, layout: Layout, bucket: Bucket, num_microbatches: int, many_groups: bool = False) -> int:
        """The total of `estimate_memory`."""
        return self._estimate(layout, bucket, num_microbatches, many_groups).total

    def memory_bytes(
        self, table: LayoutTable, num_microbatches: int, many_groups: bool = False
    ) -> Float64[np.ndarray, "C K"]:
        """A guess of each bucket on each layout; meaningless where one cannot take the other."""
        per_shard = np.maximum(1, table.per_shard(self._buckets, num_microbatches))
        held, is_spread = self._state_of(table), table.is_spread(self._buckets)
        slots = self._slots_of(table, per_shard)
        layers = np.maximum(1, table.layers_per_part(self._num_layers))[:, None]
        passes = np.empty(per_shard.shape)
        keys = np.stack([table.tensor, table.sequence_parallel, table.remat], axis=1)
        different, place = np.unique(keys, axis=0, return_inverse=True)
        for number, (tensor, sequence_parallel, remat) in enumerate(different.tolist()):
            rows = np.flatnonzero(place.ravel() == number)
            kept, rest = self._bytes_in_buckets(tensor, bool(sequence_parallel), remat)
            passes[rows] = slots[rows] * layers[rows] * kept + rest
        peak = passes / np.where(is_spread, table.context[:, None], 1)
        # Where a step takes parameters as the model has them, it stacks those of the layers.
        is_own = (table.zero == 0) & (table.tensor == 1) & (table.context == 1) & (table.stage == 1)
        peak += (held.accumulated + held.gathered + np.where(is_own, self._stacked_bytes, 0))[:, None]
        one, two = (np.array([memory.bytes_of(self._step.batch(each, m)) for each in self._buckets]) for m in (1, 2))
        batch = one + (per_shard - 1) * (two - one)
        state = (held.params + held.opt_state)[:, None]
        num_bytes = state + batch + memory.temporary_bytes(peak, table.wide.virtual, table.wide.tensor)
        if many_groups:
            num_bytes = np.maximum(num_bytes, state + (held.accumulated + held.reduced)[:, None])
        return np.asarray(num_bytes)

    def state_bytes(self, table: LayoutTable) -> Float64[np.ndarray, " C"]:
        """Bytes of parameters and optimizer state on a device of each layout."""
        held = self._state_of(table)
        return held.params + held.opt_state

    def _slots_of(self, table: LayoutTable, per_shard: Int64[np.ndarray, "C K"]) -> Float64[np.ndarray, "C K"]:
        """How many microbatches layers keep something of."""
        slots = np.ones(per_shard.shape)
        for index in np.unique(table.schedule[table.stage > 1]).tolist():
            rows = np.flatnonzero((table.schedule == index) & (table.stage > 1))
            stage, virtual = table.stage[rows, None], table.virtual[rows, None]
            slots[rows] = memory.kept_slots(SCHEDULES[index], stage, per_shard[rows], virtual)
            if SCHEDULES[index] == "zero_bubble":  # as measured: what is handed on to weight gradients
                slots[rows] *= 1.7
        return slots

    def _bytes_in_buckets(self, tensor: int, sequence_parallel: bool, remat: int) -> _Held[np.ndarray]:
        """Bytes of a microbatch of each bucket, float64[K]; on more devices than two from those on one and on two."""
        lengths = [bucket.length for bucket in self._buckets]
        tokens = np.array([bucket.padded_tokens for bucket in self._buckets])
        known = self._shortest.length, self._longest.length
        short, long = (self._held(bucket, 1, False, remat) for bucket in (self._shortest, self._longest))
        one = [tokens * np.interp(lengths, known, each) for each in zip(short, long, strict=True)]
        if tensor == 1:
            return _Held(*one)
        # A part of each is split. With sequence_parallel all of it is, and gathered tokens are new.
        of_two = zip(self._held(self._longest, 2, sequence_parallel, remat), long, strict=True)
        ratios = [two / whole for two, whole in of_two]
        splits = [1 if sequence_parallel else 2 * (1 - ratio) for ratio in ratios]
        factors = [r - split * (1 / 2 - 1 / tensor) for r, split in zip(ratios, splits, strict=True)]
        return _Held(*(each * factor for each, factor in zip(one, factors, strict=True)))

    def _trace(self, bucket: Bucket, tensor: int, sequence_parallel: bool, remat: int) -> _Held[float]:
        """Bytes for each token with padding of a bucket."""
        layout = Layout(data=1, tensor=tensor, sequence_parallel=sequence_parallel, remat=REMATS[remat])
        bucket = bucket._replace(length=bucket.length + bucket.length % tensor)
        arrays = lifetimes_of(ClosedJaxpr(memory.step_jaxpr(self._step.split(layout), layout, bucket, 2), ()))
        state = memory.state_bytes(layout, self._state(tensor), self._step.model, self._step.trained_of)
        if not self._num_layers:
            return _Held(0, float(arrays.peak() - state.accumulated - state.gathered) / bucket.padded_tokens)
        in_loop = arrays.peak(np.where(arrays.in_loop, arrays.num_bytes, 0))
        kept, rest = (in_loop - state.accumulated) / self._num_layers, arrays.peak() - in_loop
        return _Held(kept / bucket.padded_tokens, rest / bucket.padded_tokens)

    def _state_of(self, table: LayoutTable) -> StateBytes[np.ndarray]:
        """Bytes of the state on each layout."""
        num_slots = table.num_slots(self._num_layers)
        num_slots = np.where(num_slots == self._num_layers, 0, num_slots)
        keys = np.stack([table.tensor, table.zero, table.num_shards, table.stage, table.virtual > 1, num_slots], axis=1)
        different, place = np.unique(keys, axis=0, return_inverse=True)
        held = np.array([self._state_bytes(*key) for key in different.tolist()], np.float64)
        return StateBytes(*held[place.ravel()].T)

    def _count_state_bytes(
        self, tensor: int, zero: int, num_shards: int, stage: int, is_interleaved: int, num_slots: int
    ) -> StateBytes[int]:
        layout = Layout(data=num_shards, tensor=tensor, zero=zero, stage=stage, virtual=1 + is_interleaved)
        return memory.state_bytes(layout, self._state(tensor, num_slots), self._step.model, self._step.trained_of)

    def _shapes_of_state(self, tensor: int, num_slots: int = 0) -> TrainState:
        """The state, split for "tensor", with room for more layers where stages do not divide them."""
        step = self._step.split(Layout(data=1, tensor=tensor))
        if num_slots:
            layers = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((num_slots, *leaf.shape[1:]), leaf.dtype), step.params.layers
            )
            step = dataclasses.replace(step, params=step.params._replace(layers=layers))
        return step.state(self._optimizer)
