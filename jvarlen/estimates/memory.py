"""The memory of a step on a device, before anything is compiled.

Letters: P parameters, L layers, S stages, V virtual stages, M microbatches of a data shard.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Generic, NamedTuple, TypeVar

import jax
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import Mesh, PartitionSpec

from jvarlen._common.pytree import check_arrays
from jvarlen._common.terminal import text_table
from jvarlen._common.types import Array, Batch, Extra, Params, PyTree, Shapes, Specs
from jvarlen.batches.batches import token_batch_spec
from jvarlen.batches.shapes import BatchSpec
from jvarlen.distributed.layout import Layout, ScheduleName
from jvarlen.distributed.mesh import DATA_AXIS, axes_in
from jvarlen.distributed.placement import Placement
from jvarlen.estimates.lifetimes import lifetimes_of
from jvarlen.parallel.layers import (
    LayeredModel,
    LayeredParams,
    StepLoss,
    num_layers_of,
    trainable_of,
    trained_if_stacked,
)
from jvarlen.parallel.layout_checks import check_bucket, check_layout
from jvarlen.parallel.sharded_step import ShardedProgram, model_on_axes
from jvarlen.parallel.state_layout import StateLayout, extend_params, other_specs_of, padded_shape, stacked_for
from jvarlen.parallel.step_loss import model_to_estimate
from jvarlen.parallel.zero import shard_specs
from jvarlen.planning.buckets import check_buckets
from jvarlen.training.losses import LossFn
from jvarlen.training.train_state import Optimizer, TrainState, new_state
from jvarlen.training.trainable import Trainable, TrainedOf, select_trained, where_trained

__all__ = [
    "MemoryEstimate", "StateBytes", "StepShapes", "bytes_of", "estimate_memory", "kept_slots", "local_shape",
    "state_bytes", "step_jaxpr", "temporary_bytes",
]  # fmt: skip

_Bytes = TypeVar("_Bytes", int, np.ndarray)
_ONE_DEVICE = Layout(data=1)

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
        parameters of the stage; of a loss function, the gradients of a microbatch, and at ZeRO-3 all parameters. With
        virtual stages also layers that change places, and where `LayeredModel.stack` is called in the step, what it
        stacks.
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
    optimizer: Optimizer,
    bucket: tuple[int, ...] | None = None,
    *,
    layout: Layout | str,
    params: Params,
    trainable: Trainable = None,
    extra: Extra = None,
    batch_spec: BatchSpec = token_batch_spec,
    num_microbatches: int | None = None,
    many_groups: bool = False,
) -> MemoryEstimate:
    """The memory of a step on a device, for a layout that need not fit this machine.

    Nothing is compiled. The state is counted exactly. Temporary memory is the peak of the traced step, fused as a
    compiler would, plus 10 %, or 15 % with virtual stages or a tensor axis, because compilers do not always
    find the order that holds least, and leave gaps.

    Args:
      model: as for `make_train_step`; None counts no activations. The rows of a `StepLoss` do not count.
      optimizer: any Optax optimizer.
      bucket: the shape of a microbatch; None counts no activations.
      layout: what is sharded, over any number of devices; or its text.
      params: pytree of arrays or `jax.ShapeDtypeStruct`, as for `TrainStep.init`.
      trainable: as for `make_train_step`.
      extra: as for `TrainStep.init`.
      batch_spec: `batch_spec(bucket, 1)` gives the batch's pytree of `jax.ShapeDtypeStruct`.
      num_microbatches: those of a step over all devices, which stages count with; None: as many as stages for each
        data shard, and at least two.
      many_groups: whether steps have several groups: then sums stand between programs, whole on each device at ZeRO-0
        and ZeRO-1, and the estimate is that of the program that holds more, a pass over a group or the update.

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
    estimated, trainable = model_to_estimate(model), trainable_of(model, trainable)
    check_layout(layout, params, estimated)
    params = jax.eval_shape(lambda params: params, params)
    traced, params, optimizer, trained_of = stacked_for(layout, estimated, params, optimizer, trainable=trainable)
    whole = StepShapes(model=traced, params=params, trained_of=trained_of, extra=extra, batch_spec=batch_spec)
    step = whole.split(layout)
    state = jax.eval_shape(StateLayout.of(params, traced, layout).pad, whole.state(optimizer))
    held = state_bytes(layout, state._replace(params=step.params), traced, trained_of)
    estimate = MemoryEstimate(
        params=held.params,
        grads=held.grads,
        accumulation=held.accumulated - held.grads,
        opt_state=held.opt_state,
        gathered=held.gathered,
    )
    if model is None or bucket is None:
        return estimate
    per_shard = max(2, layout.stage)
    if num_microbatches is not None:
        check_bucket(layout, bucket, num_microbatches)
        per_shard = num_microbatches // _num_shards(step, layout, bucket)
    arrays = lifetimes_of(ClosedJaxpr(step_jaxpr(step, layout, bucket, per_shard), ()))
    others = math.ceil(temporary_bytes(arrays.peak(), layout.virtual, layout.tensor)) - held.accumulated
    if isinstance(traced, LayeredModel):
        kept = int(arrays.peak(np.where(arrays.in_loop, arrays.num_bytes, 0))) - held.accumulated
    else:
        kept = others - estimate.gathered
    batch_bytes = bytes_of(step.batch(bucket, per_shard))
    if many_groups and held.reduced > others + batch_bytes:
        return estimate._replace(gathered=0, activations=0, workspace=held.reduced)
    activations = min(max(kept, 0), others)
    gathered = min(estimate.gathered, others - activations)
    workspace = others - gathered - activations + batch_bytes
    return estimate._replace(gathered=gathered, activations=activations, workspace=workspace)


class StateBytes(NamedTuple, Generic[_Bytes]):
    """Bytes of a device that do not depend on the bucket; integers, or arrays of several layouts."""

    params: _Bytes
    opt_state: _Bytes  # and `extra`
    grads: _Bytes  # in the type of their parameters
    accumulated: _Bytes  # sums of gradients, in float32 at least
    gathered: _Bytes  # as in `MemoryEstimate`
    reduced: _Bytes  # sums of gradients over all devices, as an update apart has them beside its own


def state_bytes(
    layout: Layout, state: TrainState, model: LayeredModel | LossFn | None, trained_of: TrainedOf
) -> StateBytes[int]:
    """The bytes of a state of shapes, whose parameters are split for "tensor"."""
    params, trained = state.params, trained_of(state.params)
    other_specs = other_specs_of(params, model, layout)
    specs_of_state = StateLayout(layout, other_specs).specs(state)
    beside = jax.tree.map(lambda _: PartitionSpec(), params) if other_specs is None else other_specs
    specs = beside
    if layout.zero > 1 and layout.stage == 1:
        specs = shard_specs(params, layout, padded=layout.zero == 2, other_specs=other_specs)
    wide, specs = jax.tree.map(_widen, trained), where_trained(trained, specs)
    gathered = 0
    if layout.zero == 3:
        by_layers = isinstance(model, LayeredModel) or (model is None and isinstance(params, LayeredParams))
        gathered = _gathered_bytes(params, wide if by_layers else trained, layout, beside, by_layers)
    elif not isinstance(model, LayeredModel) and layout.stage == 1:
        gathered = bytes_of(trained, where_trained(trained, beside), layout)
    elif isinstance(model, LayeredModel) and model.stack is not None:
        gathered = bytes_of(jax.eval_shape(model.stack, params).layers)
    return StateBytes(
        params=bytes_of(params, specs_of_state.params, layout),
        opt_state=bytes_of((state.opt_state, state.extra), (specs_of_state.opt_state, specs_of_state.extra), layout),
        grads=bytes_of(trained, specs, layout),
        accumulated=bytes_of(wide, specs, layout),
        reduced=bytes_of(wide, where_trained(trained, beside), layout) // (layout.num_shards if layout.zero else 1),
        gathered=gathered + (bytes_of(params.layers, beside.layers, layout) if layout.virtual > 1 else 0),
    )


def temporary_bytes(peak: Array, num_virtual: Array, tensor: Array) -> Array:
    """Bytes that a step holds beside its state and its batch at the fullest point; numbers or arrays of layouts."""
    return np.where(np.maximum(num_virtual, tensor) > 1, _MARGIN_OF_PARTS, _MARGIN) * peak


def _num_shards(step: StepShapes, layout: Layout, bucket: tuple[int, ...]) -> int:
    """The data shards over which the microbatches of a bucket are spread."""
    rows_along = model_on_axes(step.model, layout, step.params, step.batch(bucket, 1))[1]
    return layout.num_shards if rows_along is None else layout.data


def step_jaxpr(step: StepShapes, layout: Layout, bucket: tuple[int, ...], per_shard: int) -> Jaxpr:
    """The part of a step before the update on one device: the sums of its microbatches, reduced."""
    mesh = Mesh(np.empty(tuple(layout.axis_sizes.values()), object), tuple(layout.axis_sizes))  # of no devices
    placement = Placement(layout=layout, mesh=mesh, axes={name: name for name in layout.axis_sizes})
    state = jax.eval_shape(lambda: new_state((), optax.identity(), seed=0))
    state = state._replace(params=step.params, opt_state=None, extra=step.extra)
    program = ShardedProgram(model=step.model, optimizer=optax.identity(), placement=placement)
    batch = step.batch(bucket, per_shard * _num_shards(step, layout, bucket))
    closed = jax.make_jaxpr(program.sums_of(step.trained_of).whole)(state, batch)
    return next(eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "shard_map").params["jaxpr"]


def _widen(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The sum of gradients of a parameter: in float32 at least."""
    return jax.ShapeDtypeStruct(leaf.shape, np.promote_types(leaf.dtype, np.float32))


def _gathered_bytes(params: Shapes, grads: Shapes, layout: Layout, beside: Specs, by_layers: bool) -> int:
    """Bytes that ZeRO-3 gathers: parameters of a stage, or those and gradients of one layer, or of the ends, or all."""
    specs = shard_specs(params, layout, padded=False, other_specs=beside)

    def bytes_to_gather(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec, there: PartitionSpec) -> int:
        return bytes_of(leaf, there, layout) if DATA_AXIS in axes_in(spec) else 0

    found = [jax.tree.map(bytes_to_gather, params, specs, beside)]
    if layout.stage == 1:
        found.append(jax.tree.map(bytes_to_gather, grads, *(where_trained(grads, tree) for tree in (specs, beside))))
    if not by_layers:
        return sum(jax.tree.leaves(found))
    ends, layers = (sum(jax.tree.leaves([part[i] for part in found])) for i in (0, 1))
    return ends + layers if layout.stage > 1 else max(ends, layers // num_layers_of(params))


def kept_slots(name: ScheduleName, num_stages: Array, num_microbatches: Array, num_virtual: Array = 1) -> Array:
    """The number of microbatches that a stage (S ≥ 2) keeps arrays of, between passes or for weight gradients."""
    s, m, v = np.asarray(num_stages), np.asarray(num_microbatches), np.asarray(num_virtual)
    if name == "interleaved":
        return np.where(m > s, (v + 1) * s - 1, v * s)
    return np.minimum({"gpipe": m, "1f1b": s, "eager_1f1b": 2 * s - 1, "zero_bubble": s}[name], m)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShapes:
    """A model, and shapes of what its step takes."""

    model: LayeredModel | LossFn
    params: Shapes  # whole
    trained_of: TrainedOf
    extra: Extra
    batch_spec: BatchSpec

    @classmethod
    def of_model(
        cls, model: LayeredModel | LossFn, params: Params, *, trainable: Trainable, extra: Extra, batch_spec: BatchSpec
    ) -> StepShapes:
        """Shapes of the step of a model, with stacked parameters if it is a model by layers."""
        trained_of: TrainedOf = functools.partial(select_trained, trainable=trainable_of(model, trainable))
        if isinstance(model, LayeredModel) and model.stack is not None:
            stack = model.stack
            trained_of = trained_if_stacked(params, stack, trained_of(params))
            model, params = model._replace(stack=None), jax.eval_shape(stack, params)
        params = _shapes_on(_ONE_DEVICE, params, None)
        return cls(model=model, params=params, trained_of=trained_of, extra=extra, batch_spec=batch_spec)

    def split(self, layout: Layout) -> StepShapes:
        """These shapes, with parameters split for "tensor"."""
        return dataclasses.replace(self, params=_shapes_on(layout, self.params, self.model))

    def batch(self, bucket: tuple[int, ...], num_microbatches: int) -> Batch:
        """The batch of a step."""
        return self.batch_spec(check_buckets([bucket]).shapes[0], num_microbatches)

    def state(self, optimizer: Optimizer) -> TrainState:
        """The state of a step."""
        init = functools.partial(new_state, optimizer=optimizer, extra=self.extra, trained_of=self.trained_of)
        return jax.eval_shape(init, self.params)


def _shapes_on(layout: Layout, params: Params, model: LayeredModel | LossFn | None) -> Shapes:
    """Shapes of whole parameters, with the zeros that extend them."""
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf)), params)
    return extend_params(params, model, layout)


def bytes_of(tree: PyTree, specs: Specs = None, layout: Layout = _ONE_DEVICE) -> int:
    """Bytes of arrays on one device; `specs` say what is sharded; None means nothing."""
    leaves = jax.tree.leaves(tree)
    in_specs = [PartitionSpec()] * len(leaves) if specs is None else jax.tree.leaves(specs)
    return sum(
        math.prod(local_shape(leaf.shape, spec, layout)) * leaf.dtype.itemsize
        for leaf, spec in zip(leaves, in_specs, strict=True)
    )


def local_shape(shape: tuple[int, ...], spec: PartitionSpec, layout: Layout) -> tuple[int, ...]:
    """The shape on one device of an array whose sharded dimensions are padded."""
    num_parts = [math.prod(layout.axis_sizes[axis] for axis in axes_in([axes])) for axes in spec]
    num_parts += [1] * (len(shape) - len(spec))
    whole = padded_shape(shape, spec, layout.axis_sizes)
    return tuple(size // parts for size, parts in zip(whole, num_parts, strict=True))
