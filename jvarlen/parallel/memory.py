"""The memory of a step on a device, before anything is compiled.

Letters: P parameters, L layers, S stages, V chunks of a stage, M microbatches of a data shard.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jvarlen._common.pytree import check_arrays
from jvarlen._common.text_table import text_table
from jvarlen.batches.batches import token_batch_spec
from jvarlen.distributed.layout import Layout, ScheduleName
from jvarlen.distributed.mesh import DATA_AXIS, axes_in
from jvarlen.parallel.layers import LayeredModel, LayeredParams, num_layers_of, trained_when_stacked
from jvarlen.parallel.layout_checks import check_bucket, check_layout
from jvarlen.parallel.microbatch import ArrayBytes, OneMicrobatch, accumulated, bytes_of, shapes_on, stacked_shapes
from jvarlen.parallel.sharded import other_specs_of, stacked_for, state_specs
from jvarlen.parallel.zero import shard_specs
from jvarlen.planning.buckets import check_buckets
from jvarlen.training.losses import LossFn
from jvarlen.training.train_state import TrainState, new_state
from jvarlen.training.trainable import Trainable, TrainedOf, where_trained

__all__ = [
    "BufferSlots", "MemoryEstimate", "StateBytes", "batch_bytes", "buffer_bytes", "buffer_slots", "estimate_memory",
    "stacked_bytes", "state_bytes", "temporary_bytes",
]  # fmt: skip

# A compiler's order of equations is not always the one that holds least, least of all where layers are run again. As
# measured.
_MARGIN, _MARGIN_AGAIN = 1.12, 1.28


class MemoryEstimate(NamedTuple):
    """The memory of a step on the fullest device, in bytes; `str` is a table.

    Attributes:
      params: parameters.
      grads: gradients, in the type of their parameters.
      accumulation: what sums of gradients in float32 take beyond `grads`.
      opt_state: the state of the optimizer, and `extra`.
      gathered: temporary parameters and gradients: at ZeRO-3 those of the ends or of one layer, or with stages all of
        the stage; below, the gradients of a microbatch. With several chunks also layers that change places, and where
        `LayeredModel.stack` is called in the step, what it stacks.
      activations: what the forward pass of one microbatch leaves to the backward pass; with stages the buffers of the
        schedule. None if no model was given.
      workspace: the rest at the peak of the step, and the batch. None if no model was given.
    """

    params: int
    grads: int
    accumulation: int
    opt_state: int
    gathered: int
    activations: int | None = None
    workspace: int | None = None

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer state: what the papers on ZeRO count."""
        return self.params + self.grads + self.opt_state

    @property
    def total(self) -> int:
        """The sum of all."""
        return sum(number or 0 for number in self)

    def __str__(self) -> str:
        rows = [[name, f"{number:,}"] for name, number in self._asdict().items() if number is not None]
        return text_table([["held by a device", "bytes"], *rows, ["total", f"{self.total:,}"]])


def estimate_memory(
    layout: Layout,
    params: Any,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    bucket: tuple[int, ...] | None = None,
    *,
    model: LayeredModel | LossFn | None = None,
    trainable: Trainable = None,
    extra: Any = None,
    batch_spec: Any = token_batch_spec,
    microbatches_per_step: int | None = None,
) -> MemoryEstimate:
    """The memory of a step on a device, for a layout that need not fit this machine.

    Nothing is compiled. The state is counted exactly. Temporary memory is the peak of a traced microbatch, fused as a
    compiler would, plus 12 % to 30 %, because compilers do not always find the order that holds least.

    Args:
      layout: what is sharded, over any number of devices.
      params: pytree of arrays or `jax.ShapeDtypeStruct`, as for `TrainStep.init`.
      optimizer: any Optax optimizer.
      bucket: the shape of a microbatch; None counts no activations.
      model: as for `make_train_step`; None counts no activations.
      trainable: as for `make_train_step`.
      extra: as for `TrainStep.init`.
      batch_spec: `batch_spec(bucket, 1)` gives the batch's pytree of `jax.ShapeDtypeStruct`.
      microbatches_per_step: those of a step over all devices, which stages count with; None: as many as stages for each
        data shard, and at least two.

    Returns:
      The estimate.

    Raises:
      ValueError: a layout that is not supported, or not for this model or these parameters; a bucket or a number of
        microbatches that it cannot take.

    Example:
      >>> params = {"w": jax.ShapeDtypeStruct((1024, 4096), np.float32)}
      >>> print(estimate_memory(Layout(data=4, zero=2), params, optax.adam(1e-3)))
      held by a device       bytes
      params            16,777,216
      grads              4,194,304
      accumulation               0
      opt_state          8,388,612
      gathered          16,777,216
      total             46,137,348

    References:
      Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", figure 1.
    """
    check_arrays(params)
    check_layout(layout, params, model)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf)), params)
    model, params, optimizer, trained_of = stacked_for(layout, model, params, optimizer, trainable=trainable)
    params = shapes_on(layout, params, model)
    state = jax.eval_shape(lambda params: new_state(params, optimizer, extra=extra, trained_of=trained_of), params)
    held = state_bytes(layout, state, model, trained_of)
    estimate = MemoryEstimate(
        params=held.params,
        grads=held.grads,
        accumulation=held.accumulated - held.grads,
        opt_state=held.opt_state,
        gathered=held.whole + held.once + held.stacked,
    )
    if model is None or bucket is None:
        return estimate
    has_stages = layout.stage > 1
    num_layers = num_layers_of(params) // (layout.stage * layout.virtual) if has_stages else None
    model, params, trained_of = stacked_shapes(model, params, trained_of)
    one = OneMicrobatch(model, layout, params, trained_of, extra, bucket, batch_spec, num_layers)
    of_shard = max(2, layout.stage)
    if microbatches_per_step is not None:
        check_bucket(layout, bucket, microbatches_per_step)
        of_shard = microbatches_per_step // (layout.num_shards if one.rows_along is None else layout.data)
    arrays = one.arrays().num_bytes()
    slots = buffer_slots(layout.schedule, layout.stage, of_shard, layout.virtual)
    of_layout = {"by_layers": isinstance(model, LayeredModel), "has_stages": has_stages, "zero": layout.zero}
    of_layout |= {"recomputes": layout.remat_in_force == "full", "num_layers": num_layers or 0}
    of_layout |= {"chunks": layout.virtual, "of_shard": of_shard}
    temporary = temporary_bytes(held, arrays, slots, **of_layout)
    others = math.ceil(temporary) - held.accumulated
    gathered = min(estimate.gathered, others)
    kept = buffer_bytes(arrays, slots, num_layers=num_layers) if has_stages else one.residual_bytes()
    activations = min(int(kept), others - gathered)
    workspace = others - gathered - activations + batch_bytes(batch_spec, bucket, of_shard)
    return estimate._replace(gathered=gathered, activations=activations, workspace=workspace)


class StateBytes(NamedTuple):
    """Bytes of a device that do not depend on the bucket; integers, or arrays of several layouts."""

    params: Any
    opt_state: Any  # and `extra`
    grads: Any  # in the type of their parameters
    accumulated: Any  # sums of gradients, in float32 at least
    # What ZeRO-3 gathers for a time: parameters of a stage, or those and the gradients of one layer or of the ends,
    # whichever are more. Besides, layers that change places between chunks.
    whole: Any
    # Whole gradients of one microbatch; of a model by layers those of one layer, with stages also those of the ends.
    once: Any
    stacked: Any  # copies of layers' own parameters, where a step stacks them


def state_bytes(
    layout: Layout,
    state: TrainState,
    model: LayeredModel | LossFn | None,
    trained_of: TrainedOf,
) -> StateBytes:
    """Those of a state of shapes, whose parameters are split for "tensor"."""
    params = state.params
    trained = trained_of(params)
    other_specs = other_specs_of(params, model, layout)
    specs_of_state = state_specs(state, layout, other_specs)
    beside = jax.tree.map(lambda _: PartitionSpec(), params) if other_specs is None else other_specs
    specs = beside
    if layout.zero > 1 and layout.stage == 1:
        specs = shard_specs(params, layout, padded=layout.zero == 2, other_specs=other_specs)
    wide, specs, of_grads = jax.tree.map(accumulated, trained), *(where_trained(trained, x) for x in (specs, beside))
    stack = model.stack if isinstance(model, LayeredModel) else None
    if layout.stage > 1:
        ends, layers = bytes_of(wide.ends, of_grads.ends, layout), bytes_of(wide.layers, of_grads.layers, layout)
        once = ends + layers * layout.stage // num_layers_of(params)
    else:
        once = bytes_of(trained, of_grads, layout) if layout.zero < 3 else 0
        if isinstance(model, LayeredModel) and layout.zero < 3:
            stacked = params if stack is None else jax.eval_shape(stack, params)
            of_layers, lie = wide, of_grads
            if stack is not None:
                of_layers = jax.tree.map(accumulated, trained_when_stacked(params, stack, trained)(stacked))
                lie = jax.tree.map(lambda _: PartitionSpec(), of_layers)
            once = bytes_of(of_layers.layers, lie.layers, layout) // num_layers_of(stacked)
    return StateBytes(
        params=bytes_of(params, specs_of_state.params, layout),
        opt_state=bytes_of((state.opt_state, state.extra), (specs_of_state.opt_state, specs_of_state.extra), layout),
        grads=bytes_of(trained, specs, layout),
        accumulated=bytes_of(wide, specs, layout),
        whole=_whole_bytes(params, trained, layout, model, other_specs),
        once=once,
        stacked=0 if stack is None else stacked_bytes(jax.eval_shape(stack, params)),
    )


def stacked_bytes(stacked: LayeredParams) -> int:
    """Bytes of the layers that a step stacks, where the state has the model's own parameters."""
    return bytes_of(stacked.layers)


def batch_bytes(batch_spec: Any, bucket: tuple[int, ...], of_shard: int) -> int:
    """Bytes of the microbatches of a data shard."""
    return bytes_of(batch_spec(check_buckets([bucket])[0], of_shard))


def buffer_bytes(arrays: ArrayBytes, slots: BufferSlots, *, num_layers: Any) -> Any:
    """What a stage holds in the buffers of its schedule, and what an action takes and gives, and what arrives."""
    of_layers = slots.kept * (arrays.kept + arrays.handed) * num_layers
    return of_layers + (slots.inputs + slots.outputs + 3) * arrays.x + (slots.gradients + 3) * arrays.floats


def temporary_bytes(
    held: StateBytes,
    arrays: ArrayBytes,
    slots: BufferSlots,
    *,
    by_layers: Any,
    has_stages: Any,
    zero: Any,
    chunks: Any,
    recomputes: Any,
    num_layers: Any,
    of_shard: Any,
) -> Any:
    """What a step holds beside its state and its batch at the fullest point, in bytes; numbers or arrays of layouts."""
    margin = np.where(recomputes & ~np.asarray(has_stages), _MARGIN_AGAIN, _MARGIN)
    peak, peak_without_grads = margin * arrays.peak, margin * arrays.peak_without_grads
    sums = np.where(of_shard > 1, held.accumulated, 0)  # of one microbatch, they are its gradients
    below = np.where(zero == 2, held.accumulated, sums) + peak
    layered = held.accumulated + peak_without_grads + held.whole + held.once
    # What layers keep is in the buffers, but for the layer that runs. Sums of several chunks move back to where the
    # parameters are, and of a chunk what is sent and arrives is there as well.
    kept = (arrays.kept + arrays.handed) * (num_layers - 1)
    ticks = buffer_bytes(arrays, slots, num_layers=num_layers) + np.maximum(peak_without_grads - kept, 0)
    moved = np.where(chunks > 1, held.accumulated * (1 + 2 / np.maximum(chunks, 1)), 0)
    staged = held.accumulated + held.whole + np.maximum(ticks, moved)
    return np.where(has_stages, staged, np.where(by_layers, layered, below)) + held.stacked


def _whole_bytes(
    params: Any, trained: Any, layout: Layout, model: LayeredModel | LossFn | None, other_specs: Any
) -> int:
    """`StateBytes.whole`."""
    moved = bytes_of(params.layers, other_specs.layers, layout) if layout.virtual > 1 else 0
    if layout.zero < 3:
        return moved
    beside = jax.tree.map(lambda _: PartitionSpec(), params) if other_specs is None else other_specs
    specs = shard_specs(params, layout, padded=False, other_specs=beside)

    def gathered(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec, there: PartitionSpec) -> int:
        return bytes_of(leaf, there, layout) if DATA_AXIS in axes_in(spec) else 0

    found = [jax.tree.map(gathered, params, specs, beside)]
    if layout.stage == 1:
        of_grads = [where_trained(trained, tree) for tree in (specs, beside)]
        found.append(jax.tree.map(gathered, jax.tree.map(accumulated, trained), *of_grads))
    ends, layers = (sum(jax.tree.leaves([part[i] for part in found])) for i in (0, 1))
    return moved + (ends + layers if layout.stage > 1 else max(ends, layers // num_layers_of(params)))


class BufferSlots(NamedTuple):
    """How many of each a stage holds, by buffer of the program; integers, or arrays of several schedules."""

    inputs: Any  # that arrive
    kept: Any  # by forward passes, and handed on from backward passes to weight gradients
    outputs: Any  # of the last part
    gradients: Any  # that arrive, of outputs


def buffer_slots(name: ScheduleName, num_stages: Any, num_microbatches: Any, num_chunks: Any = 1) -> BufferSlots:
    """The slots of a schedule's buffers (S ≥ 2), without tables; at most one more of `inputs` and `gradients`."""
    s, m, v = np.asarray(num_stages), np.asarray(num_microbatches), np.asarray(num_chunks)
    one = np.ones(np.broadcast_shapes(s.shape, m.shape, v.shape), np.int64)
    if name == "interleaved":
        return BufferSlots(2 * one, np.where(m > s, (v + 1) * s - 1, v * s), one, np.maximum(2, (s + 1) // 2))
    most = {"gpipe": m, "1f1b": s, "eager_1f1b": 2 * s - 1, "zero_bubble": s}[name]
    kept = np.minimum(most, m) * one
    return BufferSlots(one, kept, kept if name == "gpipe" else one, one)
