"""What a step holds on a device, before anything is compiled.

Letters: P parameters, L layers, S stages, V chunks of a stage, M microbatches of a data shard.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var
from jax.sharding import AbstractMesh, PartitionSpec

from jvarlen._common.checks import UserError
from jvarlen._common.text_table import text_table
from jvarlen.batches.batches import token_batch_spec
from jvarlen.compiling.lifetimes import Lifetimes, lifetimes_of
from jvarlen.distributed.layout import Keeps, Layout
from jvarlen.distributed.mesh import DATA_AXIS, axes_in
from jvarlen.parallel.layers import Axes, LayeredModel, LayeredParams, keeping_inputs, layered_loss_fn, num_layers_of
from jvarlen.parallel.residuals import floats_of, split_passes, with_floats
from jvarlen.parallel.scheduled import BufferSlots, buffer_slots
from jvarlen.parallel.tensor import split_params
from jvarlen.parallel.train import Accumulate, check_layout, model_on_axes, other_specs_of
from jvarlen.parallel.zero import padded_shape, shard_specs, state_specs
from jvarlen.planning.buckets import check_buckets
from jvarlen.training.losses import LossFn, bind_loss
from jvarlen.training.train_state import TrainState, init_train_state

__all__ = [
    "DeviceArrays",
    "MemoryBill",
    "OneMicrobatch",
    "StateBytes",
    "batch_bytes",
    "buffer_bytes",
    "memory_bill",
    "shapes_on",
    "stacked_shapes",
    "state_bytes",
    "temporary_bytes",
]

_ONE_DEVICE = Layout()
# A compiler's order of equations is not always the one that holds least, least of all where much is in one loop: layers
# that are run again, or a single layer and the ends. As measured.
_MARGIN, _MARGIN_AGAIN, _MARGIN_OF_ONE = 1.12, 1.28, 1.3


class MemoryBill(NamedTuple):
    """What a step holds on the fullest device, in bytes; `str` is a table.

    Attributes:
      params: parameters.
      grads: gradients, in the type of their parameters, as the papers count them.
      accumulation: what sums of gradients in float32 take beyond `grads`; 0 for parameters in float32.
      opt_state: the state of the optimizer, and `extra`.
      gathered: parameters and gradients that are there for a time only: at ZeRO-3 those of the ends or of one layer,
        or with stages all parameters of the stage; below, the gradients of a microbatch, with stages those of the ends
        and one chunk, before they are added to `grads`. With several chunks also layers that change places.
      activations: what the forward pass of one microbatch leaves to the backward pass, as the model is written; with
        stages that of one chunk of layers, and the buffers of the schedule. None if no model was given.
      workspace: what else is there at the fullest point of the step: results that are used at once, and the batch. None
        if no model was given.

    At the fullest point not all of what is there for a time only is there at once: `gathered` and then `activations`
    are counted first, and `workspace` is the rest.
    """

    params: int
    grads: int
    accumulation: int
    opt_state: int
    gathered: int
    activations: int | None
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


def memory_bill(
    layout: Layout,
    params: Any,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    bucket: tuple[int, ...] | None = None,
    *,
    model: LayeredModel | LossFn | None = None,
    extra: Any = None,
    batch_spec: Any = token_batch_spec,
    accumulate: Accumulate | None = None,
    keeps: Keeps | None = None,
    microbatches_per_step: int | None = None,
) -> MemoryBill:
    """What a step of a bucket, without token slices, holds on a device, for a layout that need not fit this machine.

    Nothing is computed or compiled: shapes are enough. The state is counted exactly. What is there for a time is that
    of the fullest point of a traced microbatch, fused as a compiler would, and 12 % to 30 % more, since compilers do
    not always find the order that holds least.

    Args:
      layout: what is sharded, over any number of devices.
      params: pytree of arrays or `jax.ShapeDtypeStruct`, as for `init_state`.
      optimizer: any Optax optimizer.
      bucket: the shape of a microbatch; None counts no activations.
      model: as for `make_train_step`; None counts no activations.
      extra: as for `init_state`.
      batch_spec: `batch_spec(bucket, 1)` gives the batch's pytree of `jax.ShapeDtypeStruct`.
      accumulate: as for `make_train_step`.
      keeps: likewise.
      microbatches_per_step: those of a step over all devices, which stages count with; None: as many as stages for each
        data shard, and at least two.

    Returns:
      The bill.

    Raises:
      ValueError: a layout that is not supported, or not for this model or these parameters; a bucket or a number of
        microbatches that it cannot take.

    Example:
      >>> params = {"w": jax.ShapeDtypeStruct((1024, 4096), np.float32)}
      >>> print(memory_bill(Layout(data=4, zero=2), params, optax.adam(1e-3)))
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
    layout = dataclasses.replace(layout, keeps=keeps or layout.keeps)
    check_layout(layout, params, model)
    params = shapes_on(layout, params, model)
    state = jax.eval_shape(lambda params: init_train_state(params, optimizer, extra=extra), params)
    held = state_bytes(layout, state, model, accumulate)
    bill = MemoryBill(
        params=held.params,
        grads=held.grads,
        accumulation=held.accumulated - held.grads,
        opt_state=held.opt_state,
        gathered=held.whole + held.once,
        activations=None,
        workspace=None,
    )
    if model is None or bucket is None:
        return bill
    num_layers = None
    if layout.stage > 1:
        num_layers = num_layers_of(params) // (layout.stage * layout.chunks)
    one = OneMicrobatch(model, layout, params, extra, bucket, batch_spec, num_layers)
    num_shards = layout.data if one.rows_along else layout.num_shards
    of_shard = max(2, layout.stage)
    if microbatches_per_step is not None:
        if microbatches_per_step % num_shards:
            raise UserError(
                f"{microbatches_per_step} microbatches a step do not spread over {num_shards} shards of {layout}"
            )
        of_shard = microbatches_per_step // num_shards
    arrays = one.arrays()
    slots = buffer_slots(layout.schedule, layout.stage, of_shard, layout.chunks)
    temporary = temporary_bytes(
        held,
        arrays,
        arrays.lifetimes.peak(),
        arrays.lifetimes.peak(np.where(arrays.is_grad, 0, arrays.lifetimes.num_bytes)),
        slots,
        has_stages=layout.stage > 1,
        zero=layout.zero,
        chunks=layout.chunks,
        keeps_inputs=layout.kept == "inputs",
        num_layers=num_layers or 0,
        of_shard=of_shard,
    )
    others = math.ceil(temporary) - held.accumulated
    gathered = min(bill.gathered, others)
    of_buffers = 0
    if layout.stage > 1:
        of_buffers = int(buffer_bytes(arrays, slots, keeps_inputs=layout.kept == "inputs", num_layers=num_layers))
    activations = min(one.residual_bytes() + of_buffers, others - gathered)
    workspace = others - gathered - activations + batch_bytes(batch_spec, bucket, of_shard)
    return bill._replace(gathered=gathered, activations=activations, workspace=workspace)


def shapes_on(layout: Layout, params: Any, model: LayeredModel | LossFn | None) -> Any:
    """Shapes of whole parameters, split for "tensor"."""
    if isinstance(model, LayeredModel) and model.specs is not None and layout.tensor > 1:
        params = jax.eval_shape(functools.partial(split_params, specs=model.specs, num_devices=layout.tensor), params)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf)), params)


def stacked_shapes(model: Any, params: Any) -> tuple[Any, Any]:
    """A model whose parameters are stacked, if it is one by layers, and the shapes of these parameters."""
    if isinstance(model, LayeredModel) and model.stack is not None:
        model, params = model._replace(stack=None), jax.eval_shape(model.stack, params)
    return model, shapes_on(_ONE_DEVICE, params, None)


class StateBytes(NamedTuple):
    """Bytes of a device that do not depend on the bucket; integers, or arrays of several layouts.

    Attributes:
      params: parameters.
      opt_state: the state of the optimizer, and `extra`.
      grads: gradients, in the type of their parameters.
      accumulated: sums of gradients, in float32 at least.
      whole: what ZeRO-3 gathers for a time: parameters of a stage, or those and the gradients of one layer or of the
        ends, whichever are more. Besides, layers that change places between chunks.
      once: whole gradients of one microbatch; with stages those of the ends and one chunk.
    """

    params: Any
    opt_state: Any
    grads: Any
    accumulated: Any
    whole: Any
    once: Any


def state_bytes(
    layout: Layout, state: TrainState, model: LayeredModel | LossFn | None, accumulate: Accumulate | None = None
) -> StateBytes:
    """Those of a state of shapes, whose parameters are split for "tensor"."""
    params = state.params
    other_specs = other_specs_of(params, model, layout)
    specs_of_state = state_specs(state, layout, other_specs)
    beside = jax.tree.map(lambda _: PartitionSpec(), params) if other_specs is None else other_specs
    specs = beside
    if layout.zero >= 2 and accumulate != "whole" and layout.stage == 1:
        specs = shard_specs(params, layout, padded=layout.zero == 2, other_specs=other_specs)
    wide = jax.tree.map(_accumulated, params)
    if layout.stage > 1:
        ends, layers = _bytes_of(wide.ends, beside.ends, layout), _bytes_of(wide.layers, beside.layers, layout)
        once = ends + layers // layout.chunks
    else:
        once = _bytes_of(params, beside, layout) if layout.zero < 3 else 0
    return StateBytes(
        params=_bytes_of(params, specs_of_state.params, layout),
        opt_state=_bytes_of((state.opt_state, state.extra), (specs_of_state.opt_state, specs_of_state.extra), layout),
        grads=_bytes_of(params, specs, layout),
        accumulated=_bytes_of(wide, specs, layout),
        whole=_whole_bytes(params, layout, model, other_specs),
        once=once,
    )


def batch_bytes(batch_spec: Any, bucket: tuple[int, ...], of_shard: int) -> int:
    """Bytes of the microbatches of a data shard."""
    return _bytes_of(batch_spec(check_buckets([bucket])[0], of_shard))


def buffer_bytes(arrays: DeviceArrays, slots: BufferSlots, *, keeps_inputs: Any, num_layers: Any) -> Any:
    """What a stage holds in the buffers of its schedule, and of each what an action takes and returns."""
    kept = (arrays.kept + arrays.handed) * num_layers
    moving = (slots.inputs + 2) * arrays.x + (slots.gradients + 2) * arrays.floats
    residuals = (slots.kept + 4) * kept + (slots.outputs + 4) * arrays.x
    return moving + np.where(keeps_inputs, slots.kept * arrays.x, residuals)


def temporary_bytes(
    held: StateBytes,
    arrays: DeviceArrays,
    peak: Any,
    peak_without_grads: Any,
    slots: BufferSlots,
    *,
    has_stages: Any,
    zero: Any,
    chunks: Any,
    keeps_inputs: Any,
    num_layers: Any,
    of_shard: Any,
) -> Any:
    """What a step holds beside its state and its batch at the fullest point, in bytes; numbers or arrays of layouts.

    Args:
      held: of the state.
      arrays: of a microbatch.
      peak: bytes of `arrays.lifetimes` at its fullest point.
      peak_without_grads: likewise, without the gradients.
      slots: of the buffers of the schedule.
      has_stages: whether there are several.
      zero: the ZeRO level.
      chunks: V.
      keeps_inputs: whether stages keep inputs.
      num_layers: of a chunk.
      of_shard: M.
    """
    of_stages = np.where((num_layers == 1) & (chunks == 1), _MARGIN_OF_ONE, _MARGIN)
    margin = np.where(has_stages, of_stages, np.where(keeps_inputs, _MARGIN_AGAIN, _MARGIN))
    peak, peak_without_grads = margin * peak, margin * peak_without_grads
    sums = np.where(of_shard > 1, held.accumulated, 0)  # of one microbatch, they are its gradients
    below = np.where(zero == 2, held.accumulated, sums) + peak
    sharded = sums + held.grads + peak_without_grads + held.whole
    buffers = buffer_bytes(arrays, slots, keeps_inputs=keeps_inputs, num_layers=num_layers)
    # Copies that branches make of sums of several chunks, as measured.
    copied = np.where(chunks > 1, 1.6 * held.accumulated + 5 * (arrays.x + arrays.floats), 0)
    kept = np.where(keeps_inputs, 0, arrays.kept * num_layers)  # which are in the buffers
    staged = held.accumulated + held.whole + copied + buffers + np.maximum(peak - kept, 0)
    return np.where(has_stages, staged, np.where(zero == 3, sharded, below))


def _accumulated(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The sum of gradients of a parameter: in float32 at least."""
    return jax.ShapeDtypeStruct(leaf.shape, np.promote_types(leaf.dtype, np.float32))


def _bytes_of(tree: Any, specs: Any = None, layout: Layout = _ONE_DEVICE) -> int:
    """Bytes of arrays on one device, by specs that tell what is in shards; None: nothing is."""
    leaves = jax.tree.leaves(tree)
    in_specs = [PartitionSpec()] * len(leaves) if specs is None else jax.tree.leaves(specs, is_leaf=_is_spec)
    return sum(
        math.prod(_local_shape(leaf.shape, spec, layout)) * leaf.dtype.itemsize
        for leaf, spec in zip(leaves, in_specs, strict=True)
    )


def _local_shape(shape: tuple[int, ...], spec: PartitionSpec, layout: Layout) -> tuple[int, ...]:
    """The shape on one device of an array whose sharded dimensions are padded."""
    num_parts = [math.prod(layout.axis_sizes[axis] for axis in axes_in([axes])) for axes in spec]
    num_parts += [1] * (len(shape) - len(spec))
    whole = padded_shape(shape, spec, layout.axis_sizes)
    return tuple(size // parts for size, parts in zip(whole, num_parts, strict=True))


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)


def _whole_bytes(params: Any, layout: Layout, model: LayeredModel | LossFn | None, other_specs: Any) -> int:
    """`StateBytes.whole`."""
    moved = 0
    if layout.chunks > 1:
        moved = _bytes_of(params.layers, other_specs.layers, layout)
    if layout.zero < 3:
        return moved
    if layout.stage == 1 and isinstance(model, LayeredModel) and model.stack is not None:
        params, other_specs = jax.eval_shape(model.stack, params), None
    beside = jax.tree.map(lambda _: PartitionSpec(), params) if other_specs is None else other_specs
    specs = shard_specs(params, layout, padded=False, other_specs=beside)

    def gathered(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec, there: PartitionSpec, num_layers: int = 1) -> int:
        if DATA_AXIS not in axes_in(spec):
            return 0
        of_params = _bytes_of(leaf, there, layout)
        if layout.stage > 1:
            return of_params
        return (of_params + _bytes_of(_accumulated(leaf), there, layout)) // num_layers

    ends = sum(jax.tree.leaves(jax.tree.map(gathered, params.ends, specs.ends, beside.ends)))
    layers = jax.tree.map(
        lambda leaf, spec, there: gathered(leaf, spec, there, leaf.shape[0] if layout.stage == 1 else 1),
        params.layers,
        specs.layers,
        beside.layers,
    )
    of_layers = sum(jax.tree.leaves(layers))
    return moved + (ends + of_layers if layout.stage > 1 else max(ends, of_layers))


class DeviceArrays(NamedTuple):
    """What one microbatch of some layers computes on a device, in bytes of its arrays.

    Attributes:
      lifetimes: of the arrays of its gradient.
      is_grad: bool[N], which of them are gradients.
      x: bytes of what goes from layer to layer; like the following, 0 without stages.
      floats: of its leaves that have gradients.
      of_kept: of each residual of one layer.
      of_handed: of what one layer's backward pass hands to weight gradients of their own, if it does.
    """

    lifetimes: Lifetimes
    is_grad: np.ndarray
    x: int
    floats: int
    of_kept: tuple[int, ...]
    of_handed: tuple[int, ...]

    @property
    def kept(self) -> int:
        """All residuals of one layer."""
        return sum(self.of_kept)

    @property
    def handed(self) -> int:
        """All that one layer's backward pass hands on."""
        return sum(self.of_handed)


def _device_arrays(
    jaxpr: Jaxpr, *, x: int = 0, floats: int = 0, kept: tuple[int, ...] = (), handed: tuple[int, ...] = ()
) -> DeviceArrays:
    lifetimes = lifetimes_of(ClosedJaxpr(jaxpr, ()))
    return DeviceArrays(lifetimes, lifetimes.end == lifetimes.num_points, x, floats, kept, handed)


class OneMicrobatch:
    """A microbatch of a bucket on one device of a layout, to be traced.

    Args:
      model: as for `memory_bill`.
      layout: binds "tensor" and "sequence", and tells what is kept.
      params: shapes of the whole parameters, split for "tensor".
      extra: as for `init_state`.
      bucket: of the microbatch.
      batch_spec: as for `memory_bill`.
      num_layers: how many layers are run; None: all.
    """

    def __init__(
        self,
        model: LayeredModel | LossFn,
        layout: Layout,
        params: Any,
        extra: Any,
        bucket: tuple[int, ...],
        batch_spec: Any,
        num_layers: int | None = None,
    ):
        batch = batch_spec(check_buckets([bucket])[0], 1)
        self._microbatch = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) if leaf.shape else leaf, batch
        )
        self._layout = layout
        other_specs = other_specs_of(params, model, layout)
        self._model, self.rows_along = model_on_axes(model, layout, params, batch)
        if isinstance(self._model, LayeredModel) and layout.stage == 1 and layout.kept == "inputs":
            self._model = keeping_inputs(self._model)
        self._params = params
        if other_specs is not None:
            self._params = jax.tree.map(
                lambda leaf, spec: jax.ShapeDtypeStruct(_local_shape(leaf.shape, spec, layout), leaf.dtype),
                params,
                other_specs,
            )
        if num_layers is not None:
            layers = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((num_layers, *leaf.shape[1:]), leaf.dtype), self._params.layers
            )
            self._params = self._params._replace(layers=layers)
        self._extra = extra

    def arrays(self) -> DeviceArrays:
        """What it computes."""
        return self._staged_arrays() if self._layout.stage > 1 else _device_arrays(self.jaxpr(with_grads=True))

    def jaxpr(self, *, with_grads: bool) -> Jaxpr:
        """The loss, or its gradient, as a device computes it without stages."""
        loss = self._loss()

        def grads(params: Any, *others: Any) -> Any:
            loss_sum, pull, sums = jax.vjp(lambda params: loss(params, *others), params, has_aux=True)
            return pull(jax.numpy.ones_like(loss_sum)), loss_sum, sums

        return self._on_device(grads if with_grads else loss, self._params, *self._given())[0]

    def x_bytes(self) -> int:
        """Bytes of what goes from layer to layer."""
        model, key = self._model, self._key()
        assert isinstance(model, LayeredModel)

        def embed(ends: Any, microbatch: Any, key: Any) -> Any:
            return model.embed(ends, microbatch, Axes(key=key))

        return _bytes_of(jax.eval_shape(embed, self._params.ends, self._microbatch, key))

    def _staged_arrays(self) -> DeviceArrays:
        """Of the actions of a stage with all parts of the model, one after the other."""
        model = self._model
        sizes: dict[str, Any] = {}
        assert isinstance(model, LayeredModel)
        splits = self._layout.schedule == "zero_bubble"

        def actions(params: LayeredParams, microbatch: Any, key: Any) -> Any:
            axes = Axes(key=key)

            def embed(ends: Any) -> Any:
                return jax.tree.map(jax.numpy.asarray, model.embed(ends, microbatch, axes))

            def run_layer(own: Any, x: Any, microbatch: Any, key: Any) -> Any:
                return model.layer(own, x, microbatch, Axes(key=key))

            def loss(ends: Any, floats: Any) -> Any:
                return model.loss(ends, with_floats(y, floats), microbatch, axes)[0]

            others, x = (microbatch, key), embed(params.ends)
            own = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params.layers)
            passes = split_passes(run_layer, own, x, *others, weights_apart=splits)
            y, kept = jax.lax.scan(lambda x, own: passes.forward(own, x, *others), x, params.layers)
            of_ends, of_y = jax.grad(loss, argnums=(0, 1))(params.ends, floats_of(y))
            given = params.layers, kept
            of_x, rest = jax.lax.scan(lambda of_y, of: passes.backward(*of, of_y, *others), of_y, given, reverse=True)
            num_layers = jax.tree.leaves(params.layers)[0].shape[0]

            def of_layer(tree: Any) -> tuple[int, ...]:
                return tuple(_bytes_of(leaf) // num_layers for leaf in jax.tree.leaves(tree))

            sizes.update(x=_bytes_of(x), floats=_bytes_of(floats_of(x)), kept=of_layer(kept))
            if passes.weights is not None:
                sizes["handed"] = of_layer(rest)
                run_weights = passes.weights
                rest = jax.lax.scan(lambda _, of: (None, run_weights(*of, *others)), None, (*given, rest))[1]
            _, pull = jax.vjp(lambda ends: floats_of(embed(ends)), params.ends)
            return jax.tree.map(jax.numpy.add, of_ends, pull(of_x)[0]), rest

        jaxpr, _ = self._on_device(actions, self._params, self._microbatch, self._key())
        return _device_arrays(jaxpr, **sizes)

    def residual_bytes(self) -> int:
        """Bytes of what the backward pass needs and is not an argument: parameters, or the microbatch."""
        loss = self._loss()

        def residuals(params: Any, *others: Any) -> Any:
            return jax.vjp(lambda params: loss(params, *others), params, has_aux=True)[1]

        jaxpr, shapes = self._on_device(residuals, self._params, *self._given())
        given = {*jaxpr.invars, *jaxpr.constvars}
        saved = zip(jaxpr.outvars, jax.tree.leaves(shapes), strict=True)
        return _bytes_of(
            list({id(var): shape for var, shape in saved if isinstance(var, Var) and var not in given}.values())
        )

    def _loss(self) -> Any:
        """`loss(params, microbatch, key, extra)`, in the form of `bind_loss`."""
        loss_fn = layered_loss_fn(self._model) if isinstance(self._model, LayeredModel) else self._model

        def loss(params: Any, microbatch: Any, key: Any, extra: Any) -> Any:
            return bind_loss(loss_fn, TrainState(None, None, extra=extra, key=key))(params, microbatch, key)

        return loss

    def _given(self) -> tuple[Any, Any, Any]:
        """What a loss takes beside parameters; with a key, which layers may draw masks from."""
        return self._microbatch, self._key(), self._extra

    def _key(self) -> Any:
        return jax.eval_shape(lambda: jax.random.key(0))

    def _on_device(self, call: Any, *args: Any) -> tuple[Jaxpr, Any]:
        """What a device computes, and the shapes of its results."""
        mesh = AbstractMesh(tuple(self._layout.axis_sizes.values()), tuple(self._layout.axis_sizes))
        whole = PartitionSpec()
        on_device = jax.shard_map(call, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
        closed, shapes = jax.make_jaxpr(on_device, return_shape=True)(*args)
        (equation,) = closed.jaxpr.eqns
        return equation.params["jaxpr"], shapes
