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
from jax.extend.core import Jaxpr, Var
from jax.sharding import AbstractMesh, PartitionSpec

from jvarlen._common.checks import UserError
from jvarlen._common.text_table import text_table
from jvarlen.batches.batches import token_batch_spec
from jvarlen.distributed.mesh import DATA_AXIS, axes_in
from jvarlen.parallel.layers import Axes, LayeredModel, keeping_inputs, layered_loss_fn
from jvarlen.parallel.layout import Keeps, Layout
from jvarlen.parallel.scheduled import make_schedule
from jvarlen.parallel.tensor import split_params
from jvarlen.parallel.train import Accumulate, check_layout, model_on_axes, other_specs_of
from jvarlen.parallel.zero import padded_shape, shard_specs, state_specs
from jvarlen.planning.buckets import check_buckets
from jvarlen.training.losses import LossFn, bind_loss, takes_argument
from jvarlen.training.train_state import TrainState, init_train_state

__all__ = ["MemoryBill", "memory_bill"]

_ONE_DEVICE = Layout()


class MemoryBill(NamedTuple):
    """What a step holds on the fullest device, in bytes; `str` is a table.

    Attributes:
      params: parameters.
      grads: gradients, in the type of their parameters, as the papers count them.
      accumulation: what sums of gradients in float32 take beyond `grads`; 0 for parameters in float32.
      opt_state: the state of the optimizer, and `extra`.
      gathered: parameters and gradients that are there for a time only: at ZeRO-3 those of the ends and of one layer,
        or with stages all parameters of the stage; below, the gradients of a microbatch, with stages those of the ends
        and one chunk, before they are added to `grads`. With several chunks also layers that change places.
      activations: what the forward pass of one microbatch leaves to the backward pass, before the compiler shares
        memory; with stages that of one chunk of layers, and the buffers of the schedule. None if no model was given.
    """

    params: int
    grads: int
    accumulation: int
    opt_state: int
    gathered: int
    activations: int | None

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

    Nothing is computed or compiled: shapes are enough. The state is counted exactly, what the backward pass needs as
    the model is written; a compiled program may hold less, and holds its own temporaries beside.

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
        data shard.

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
    if isinstance(model, LayeredModel) and layout.stage == 1 and layout.kept == "inputs":
        model = keeping_inputs(model)
    if isinstance(model, LayeredModel) and model.specs is not None and layout.tensor > 1:
        params = jax.eval_shape(functools.partial(split_params, specs=model.specs, num_devices=layout.tensor), params)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf)), params)
    state = jax.eval_shape(lambda params: init_train_state(params, optimizer, extra=extra), params)
    other_specs = other_specs_of(params, model, layout)
    specs_of_state = state_specs(state, layout, other_specs)
    specs = jax.tree.map(lambda _: PartitionSpec(), params) if other_specs is None else other_specs
    if layout.zero >= 2 and accumulate != "whole" and layout.stage == 1:
        specs = shard_specs(params, layout, padded=layout.zero == 2, other_specs=other_specs)
    wide = jax.tree.map(_accumulated, params)
    grads = _bytes_of(params, specs, layout)
    activations = None
    if model is not None and bucket is not None:
        on_device = _Activations(model, layout, state, other_specs, bucket, batch_spec)
        activations = on_device.num_bytes(microbatches_per_step)
    return MemoryBill(
        params=_bytes_of(params, specs_of_state.params, layout),
        grads=grads,
        accumulation=_bytes_of(wide, specs, layout) - grads,
        opt_state=_bytes_of((state.opt_state, state.extra), (specs_of_state.opt_state, specs_of_state.extra), layout),
        gathered=_gathered_bytes(params, layout, model, other_specs),
        activations=activations,
    )


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


def _gathered_bytes(params: Any, layout: Layout, model: LayeredModel | LossFn | None, other_specs: Any) -> int:
    """Bytes of parameters and gradients that exist for a time only."""
    beside = jax.tree.map(lambda _: PartitionSpec(), params) if other_specs is None else other_specs
    if layout.stage > 1:
        wide = jax.tree.map(_accumulated, params)
        grads = (
            _bytes_of(wide.ends, beside.ends, layout) + _bytes_of(wide.layers, beside.layers, layout) // layout.chunks
        )
        moved = _bytes_of(params.layers, beside.layers, layout) if layout.chunks > 1 else 0
        if layout.zero < 3:
            return grads + moved
        specs = shard_specs(params, layout, padded=False, other_specs=other_specs)
        in_shards = jax.tree.map(
            lambda leaf, spec, there: _bytes_of(leaf, there, layout) if DATA_AXIS in axes_in(spec) else 0,
            params, specs, beside,
        )  # fmt: skip
        return grads + moved + sum(jax.tree.leaves(in_shards))
    if layout.zero < 3:
        return _bytes_of(params, beside, layout)
    if isinstance(model, LayeredModel) and model.stack is not None:
        params = jax.eval_shape(model.stack, params)
        beside = jax.tree.map(lambda _: PartitionSpec(), params)
    specs = shard_specs(params, layout, padded=False, other_specs=beside)

    def of_shards(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec, there: PartitionSpec, num_layers: int = 1) -> int:
        if DATA_AXIS not in axes_in(spec):
            return 0
        return (_bytes_of(leaf, there, layout) + _bytes_of(_accumulated(leaf), there, layout)) // num_layers

    ends = jax.tree.map(of_shards, params.ends, specs.ends, beside.ends)
    layer = jax.tree.map(
        lambda leaf, spec, there: of_shards(leaf, spec, there, leaf.shape[0]),
        params.layers,
        specs.layers,
        beside.layers,
    )
    return sum(jax.tree.leaves((ends, layer)))


class _Activations:
    """Counts what the forward pass of a microbatch leaves to the backward pass, on one device."""

    def __init__(
        self,
        model: LayeredModel | LossFn,
        layout: Layout,
        state: TrainState,
        other_specs: Any,
        bucket: tuple[int, ...],
        batch_spec: Any,
    ):
        batch = batch_spec(check_buckets([bucket])[0], 1)
        self._microbatch = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) if leaf.shape else leaf, batch
        )
        self._layout = layout
        self._model, self._rows_along = model_on_axes(model, layout, state.params, batch)
        self._params = state.params
        if other_specs is not None:
            self._params = jax.tree.map(
                lambda leaf, spec: jax.ShapeDtypeStruct(_local_shape(leaf.shape, spec, layout), leaf.dtype),
                state.params,
                other_specs,
            )
        self._state = state._replace(opt_state=None, params=None)

    def num_bytes(self, microbatches_per_step: int | None) -> int:
        """Bytes of one microbatch, or with stages of one chunk of its layers and of the schedule's buffers."""
        layout, params = self._layout, self._params
        if layout.stage == 1:
            return _bytes_of(self._residuals(params))
        params = params._replace(
            layers=jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0] // layout.chunks, *leaf.shape[1:]), leaf.dtype),
                params.layers,
            )
        )
        num_shards = layout.data if self._rows_along else layout.num_shards
        of_shard = layout.stage
        if microbatches_per_step is not None:
            if microbatches_per_step % num_shards:
                raise UserError(
                    f"{microbatches_per_step} microbatches a step do not spread over {num_shards} shards of {layout}"
                )
            of_shard = microbatches_per_step // num_shards
        tables = make_schedule(layout.schedule, layout.stage, of_shard, layout.chunks).tables()
        x = self._input(params)
        floats = [leaf for leaf in jax.tree.leaves(x) if np.issubdtype(leaf.dtype, np.inexact)]
        of_chunk = _bytes_of(self._residuals(params))
        # And what a tick sends and receives.
        inputs, gradients = (tables.num_inputs + 2) * _bytes_of(x), (tables.num_gradients + 2) * _bytes_of(floats)
        if layout.kept == "inputs":
            return inputs + gradients + tables.num_activations * _bytes_of(x) + of_chunk
        # Where weight gradients come later, B hands them as many gradients as there are residuals, about.
        kept = of_chunk * (2 if layout.schedule == "zero_bubble" else 1)
        return inputs + gradients + tables.num_activations * kept

    def _input(self, params: Any) -> Any:
        """The shapes of what goes from layer to layer."""
        model = self._model
        assert isinstance(model, LayeredModel)

        def embed(ends: Any, microbatch: Any, key: Any) -> Any:
            return jax.tree.map(jax.numpy.asarray, model.embed(ends, microbatch, Axes(key=key)))

        return self._on_device(embed, params.ends, self._microbatch, self._key(embed=True))[1]

    def _residuals(self, params: Any) -> list[jax.ShapeDtypeStruct]:
        """What the backward pass needs and is not an argument: parameters, or the microbatch."""
        loss_fn = layered_loss_fn(self._model) if isinstance(self._model, LayeredModel) else self._model

        def residuals(params: Any, microbatch: Any, key: Any) -> Any:
            loss = bind_loss(loss_fn, self._state)
            return jax.vjp(lambda params: loss(params, microbatch, key), params, has_aux=True)[1]

        key = self._key(embed=takes_argument(loss_fn, "key"))
        jaxpr, shapes = self._on_device(residuals, params, self._microbatch, key)
        given = {*jaxpr.invars, *jaxpr.constvars}
        saved = zip(jaxpr.outvars, jax.tree.leaves(shapes), strict=True)
        return list({id(var): shape for var, shape in saved if isinstance(var, Var) and var not in given}.values())

    def _key(self, *, embed: bool) -> Any:
        return jax.eval_shape(lambda: jax.random.key(0)) if embed else None

    def _on_device(self, call: Any, *args: Any) -> tuple[Jaxpr, Any]:
        """What a device computes, and the shapes of its results."""
        mesh = AbstractMesh(tuple(self._layout.axis_sizes.values()), tuple(self._layout.axis_sizes))
        whole = PartitionSpec()
        on_device = jax.shard_map(call, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
        closed, shapes = jax.make_jaxpr(on_device, return_shape=True)(*args)
        (equation,) = closed.jaxpr.eqns
        return equation.params["jaxpr"], shapes
