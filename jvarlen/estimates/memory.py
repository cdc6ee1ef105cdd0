"""The memory of a step on a device, before anything is compiled.

Letters: P parameters, L layers, S stages, V virtual stages, M microbatches of a data shard.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import Mesh, PartitionSpec

from jvarlen._common.pytree import check_arrays
from jvarlen._common.terminal import text_table
from jvarlen.batches.batches import token_batch_spec
from jvarlen.distributed.layout import Layout, ScheduleName
from jvarlen.distributed.mesh import DATA_AXIS, axes_in
from jvarlen.distributed.placement import Placement
from jvarlen.estimates.lifetimes import lifetimes_of
from jvarlen.estimates.microbatch import bytes_of, shapes_on
from jvarlen.parallel.layers import LayeredModel, StepLoss, num_layers_of
from jvarlen.parallel.layout_checks import check_bucket, check_layout
from jvarlen.parallel.sharded_step import ShardedProgram, model_on_axes
from jvarlen.parallel.state_layout import other_specs_of, stacked_for, state_specs
from jvarlen.parallel.step_loss import model_to_estimate
from jvarlen.parallel.zero import shard_specs
from jvarlen.planning.buckets import check_buckets
from jvarlen.training.losses import LossFn
from jvarlen.training.train_state import TrainState, new_state
from jvarlen.training.trainable import Trainable, TrainedOf, where_trained

__all__ = [
    "BufferSlots", "MemoryEstimate", "StateBytes", "batch_bytes", "buffer_slots", "estimate_memory", "state_bytes",
    "step_jaxpr", "temporary_bytes",
]  # fmt: skip

# A compiler's order of equations is not always the one that holds least, least of all where chunks of layers change
# places, and what is freed leaves gaps: the most of them on TPUs, with parts of a vocabulary. As measured.
_MARGIN, _MARGIN_OF_PARTS = 1.1, 1.15


class MemoryEstimate(NamedTuple):
    """The memory of a step on the fullest device, in bytes; `str` is a table.

    Attributes:
      params: parameters.
      grads: gradients, in the type of their parameters.
      accumulation: what sums of gradients in float32 take beyond `grads`.
      opt_state: the state of the optimizer, and `extra`.
      gathered: temporary parameters and gradients: at ZeRO-3 those of the ends or of one layer, or with stages all
        parameters of the stage; of a loss function, the gradients of a microbatch. With virtual stages also layers that
        change places, and where `LayeredModel.stack` is called in the step, what it stacks.
      activations: what the forward pass of one microbatch leaves to the backward pass; with stages the buffers of the
        schedule; of a loss function all that its passes hold. None if no model was given.
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
    model: LayeredModel | LossFn | StepLoss | None,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    bucket: tuple[int, ...] | None = None,
    *,
    layout: Layout | str,
    params: Any,
    trainable: Trainable = None,
    extra: Any = None,
    batch_spec: Any = token_batch_spec,
    num_microbatches: int | None = None,
) -> MemoryEstimate:
    """The memory of a step on a device, for a layout that need not fit this machine.

    Nothing is compiled. The state is counted exactly. Temporary memory is the peak of the traced step, fused as a
    compiler would, plus 10 %, or 15 % with virtual stages or a tensor axis, because compilers do not always
    find the order that holds least, and leave gaps.

    Args:
      model: as for `make_train_step`; None counts no activations. Of a `StepLoss` without the rows of the step.
      optimizer: any Optax optimizer.
      bucket: the shape of a microbatch; None counts no activations.
      layout: what is sharded, over any number of devices; or its text.
      params: pytree of arrays or `jax.ShapeDtypeStruct`, as for `TrainStep.init`.
      trainable: as for `make_train_step`.
      extra: as for `TrainStep.init`.
      batch_spec: `batch_spec(bucket, 1)` gives the batch's pytree of `jax.ShapeDtypeStruct`.
      num_microbatches: those of a step over all devices, which stages count with; None: as many as stages for each
        data shard, and at least two.

    Returns:
      The estimate.

    Raises:
      ValueError: a layout that is not supported, or not for this model or these parameters; a bucket or a number of
        microbatches that it cannot take.

    Example:
      >>> params = {"w": jax.ShapeDtypeStruct((1024, 4096), np.float32)}
      >>> print(estimate_memory(None, optax.adam(1e-3), layout="data4.zero2", params=params))
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
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    own: Any = model_to_estimate(model)
    check_layout(layout, params, own)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf)), params)
    own, params, optimizer, trained_of = stacked_for(layout, own, params, optimizer, trainable=trainable)
    params = shapes_on(layout, params, own)
    state = jax.eval_shape(lambda params: new_state(params, optimizer, extra=extra, trained_of=trained_of), params)
    held = state_bytes(layout, state, own, trained_of)
    estimate = MemoryEstimate(
        params=held.params,
        grads=held.grads,
        accumulation=held.accumulated - held.grads,
        opt_state=held.opt_state,
        gathered=held.gathered,
    )
    if own is None or bucket is None:
        return estimate
    rows_along = model_on_axes(own, layout, params, batch_spec(check_buckets([bucket]).shapes[0], 1))[1]
    of_shard = max(2, layout.stage)
    if num_microbatches is not None:
        check_bucket(layout, bucket, num_microbatches)
        of_shard = num_microbatches // (layout.num_shards if rows_along is None else layout.data)
    of_device = own, layout, params, trained_of, extra, bucket, batch_spec
    arrays = lifetimes_of(ClosedJaxpr(step_jaxpr(*of_device, of_shard), ()))
    others = math.ceil(temporary_bytes(arrays.peak(), layout.virtual, layout.tensor)) - held.accumulated
    if isinstance(own, LayeredModel):
        kept = int(arrays.peak(np.where(arrays.in_loop, arrays.num_bytes, 0))) - held.accumulated
    else:
        kept = others - estimate.gathered
    activations = min(max(kept, 0), others)
    gathered = min(estimate.gathered, others - activations)
    workspace = others - gathered - activations + batch_bytes(batch_spec, bucket, of_shard)
    return estimate._replace(gathered=gathered, activations=activations, workspace=workspace)


class StateBytes(NamedTuple):
    """Bytes of a device that do not depend on the bucket; integers, or arrays of several layouts."""

    params: Any
    opt_state: Any  # and `extra`
    grads: Any  # in the type of their parameters
    accumulated: Any  # sums of gradients, in float32 at least
    gathered: Any  # as in `MemoryEstimate`


def state_bytes(
    layout: Layout, state: TrainState, model: LayeredModel | LossFn | None, trained_of: TrainedOf
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
    wide, specs = jax.tree.map(_accumulated, trained), where_trained(trained, specs)
    gathered = 0
    if layout.zero == 3:
        gathered = _gathered_bytes(params, wide, layout, beside)
    elif not isinstance(model, LayeredModel) and layout.stage == 1:
        gathered = bytes_of(trained, where_trained(trained, beside), layout)
    elif isinstance(model, LayeredModel) and model.stack is not None:
        gathered = bytes_of(jax.eval_shape(model.stack, params).layers)
    return StateBytes(
        params=bytes_of(params, specs_of_state.params, layout),
        opt_state=bytes_of((state.opt_state, state.extra), (specs_of_state.opt_state, specs_of_state.extra), layout),
        grads=bytes_of(trained, specs, layout),
        accumulated=bytes_of(wide, specs, layout),
        gathered=gathered + (bytes_of(params.layers, beside.layers, layout) if layout.virtual > 1 else 0),
    )


def batch_bytes(batch_spec: Any, bucket: tuple[int, ...], of_shard: int) -> int:
    """Bytes of the microbatches of a data shard."""
    return bytes_of(batch_spec(check_buckets([bucket]).shapes[0], of_shard))


def temporary_bytes(peak: Any, num_virtual: Any, tensor: Any) -> Any:
    """What a step holds beside its state and its batch at the fullest point, in bytes; numbers or arrays of layouts."""
    return np.where(np.maximum(num_virtual, tensor) > 1, _MARGIN_OF_PARTS, _MARGIN) * peak


def step_jaxpr(
    model: LayeredModel | LossFn,
    layout: Layout,
    params: Any,  # shapes of whole ones, as the state has them
    trained_of: TrainedOf,
    extra: Any,
    bucket: tuple[int, ...],
    batch_spec: Any,
    of_shard: int,
) -> Jaxpr:
    """What a device computes in a step but for the update: the sums of its microbatches, reduced."""
    mesh = Mesh(np.empty(tuple(layout.axis_sizes.values()), object), tuple(layout.axis_sizes))  # of no devices
    placement = Placement(layout=layout, mesh=mesh, axes={name: name for name in layout.axis_sizes})
    of_one = batch_spec(check_buckets([bucket]).shapes[0], 1)
    shards = layout.num_shards if model_on_axes(model, layout, params, of_one)[1] is None else layout.data
    state = jax.eval_shape(lambda: new_state((), optax.identity(), seed=0))
    state = state._replace(params=params, opt_state=None, extra=extra)
    program = ShardedProgram(model=model, optimizer=optax.identity(), placement=placement)
    closed = jax.make_jaxpr(program.sums_of(trained_of))(
        state, batch_spec(check_buckets([bucket]).shapes[0], of_shard * shards)
    )
    return next(eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "shard_map").params["jaxpr"]


def _accumulated(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The sum of gradients of a parameter: in float32 at least."""
    return jax.ShapeDtypeStruct(leaf.shape, np.promote_types(leaf.dtype, np.float32))


def _gathered_bytes(params: Any, wide: Any, layout: Layout, beside: Any) -> int:
    """What ZeRO-3 gathers: of a stage its parameters, or those and the gradients of one layer or of the ends."""
    specs = shard_specs(params, layout, padded=False, other_specs=beside)

    def gathered(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec, there: PartitionSpec) -> int:
        return bytes_of(leaf, there, layout) if DATA_AXIS in axes_in(spec) else 0

    found = [jax.tree.map(gathered, params, specs, beside)]
    if layout.stage == 1:
        found.append(jax.tree.map(gathered, wide, *(where_trained(wide, tree) for tree in (specs, beside))))
    ends, layers = (sum(jax.tree.leaves([part[i] for part in found])) for i in (0, 1))
    return ends + layers if layout.stage > 1 else max(ends, layers // num_layers_of(params))


class BufferSlots(NamedTuple):
    """How many of each a stage holds, by buffer of the program; integers, or arrays of several schedules."""

    inputs: Any  # that arrive
    kept: Any  # by forward passes, and handed on from backward passes to weight gradients
    outputs: Any  # of the last part
    gradients: Any  # that arrive, of outputs


def buffer_slots(name: ScheduleName, num_stages: Any, num_microbatches: Any, num_virtual: Any = 1) -> BufferSlots:
    """The slots of a schedule's buffers (S ≥ 2), without tables; at most one more of `inputs` and `gradients`."""
    s, m, v = np.asarray(num_stages), np.asarray(num_microbatches), np.asarray(num_virtual)
    one = np.ones(np.broadcast_shapes(s.shape, m.shape, v.shape), np.int64)
    if name == "interleaved":
        return BufferSlots(2 * one, np.where(m > s, (v + 1) * s - 1, v * s), one, np.maximum(2, (s + 1) // 2))
    most = {"gpipe": m, "1f1b": s, "eager_1f1b": 2 * s - 1, "zero_bubble": s}[name]
    kept = np.minimum(most, m) * one
    return BufferSlots(one, kept, kept if name == "gpipe" else one, one)
