"""One microbatch on one device of a layout, traced, and the bytes of arrays there."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import numpy as np
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, PartitionSpec

from jvarlen._common.types import Array, Batch, Extra, Key, Microbatch, Params, PyTree, Shapes, Specs
from jvarlen.batches.shapes import BatchSpec
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import axes_in
from jvarlen.parallel.layers import Axes, LayeredModel, LayeredParams, layered_loss_fn, trained_if_stacked
from jvarlen.parallel.sharded_step import model_on_axes
from jvarlen.parallel.state_layout import other_specs_of, padded_shape, split_specs
from jvarlen.parallel.tensor import split_params
from jvarlen.planning.buckets import check_buckets
from jvarlen.training.losses import LossFn, bind_loss
from jvarlen.training.train_state import Optimizer, TrainState, new_state
from jvarlen.training.trainable import Trainable, TrainedOf, merge_trained, select_trained, where_trained

__all__ = ["OneMicrobatch", "StepShapes", "bytes_of", "shapes_on"]

_ONE_DEVICE = Layout(data=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShapes:
    """A model, and shapes of what its step takes."""

    model: LayeredModel | LossFn
    params: Shapes  # whole
    trained_of: TrainedOf
    extra: Extra
    batch_spec: BatchSpec

    @classmethod
    def stacked(
        cls, model: LayeredModel | LossFn, params: Params, *, trainable: Trainable, extra: Extra, batch_spec: BatchSpec
    ) -> StepShapes:
        """A model whose parameters are stacked if it is one by layers."""
        trained_of: TrainedOf = functools.partial(select_trained, trainable=trainable)
        if isinstance(model, LayeredModel) and model.stack is not None:
            stack = model.stack
            trained_of = trained_if_stacked(params, stack, trained_of(params))
            model, params = model._replace(stack=None), jax.eval_shape(stack, params)
        params = shapes_on(_ONE_DEVICE, params, None)
        return cls(model=model, params=params, trained_of=trained_of, extra=extra, batch_spec=batch_spec)

    def split(self, layout: Layout) -> StepShapes:
        """The same with parameters split for "tensor"."""
        return dataclasses.replace(self, params=shapes_on(layout, self.params, self.model))

    def with_layers(self, num_layers: int) -> StepShapes:
        """The same with this many layers."""
        return dataclasses.replace(self, params=_with_layers(self.params, num_layers))

    def batch(self, bucket: tuple[int, ...], num_microbatches: int) -> Batch:
        """The batch of a step."""
        return self.batch_spec(check_buckets([bucket]).shapes[0], num_microbatches)

    def state(self, optimizer: Optimizer) -> TrainState:
        """The state of a step."""
        init = functools.partial(new_state, optimizer=optimizer, extra=self.extra, trained_of=self.trained_of)
        return jax.eval_shape(init, self.params)


class OneMicrobatch:
    """A microbatch of a bucket on one device of a layout, to be traced."""

    def __init__(self, step: StepShapes, layout: Layout, bucket: tuple[int, ...], num_layers: int | None = None):
        """`step` has parameters that are split for "tensor"; None: all of their layers."""
        batch = step.batch(bucket, 1)
        self._microbatch = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) if leaf.shape else leaf, batch
        )
        self._layout = layout
        self._model = model_on_axes(step.model, layout, step.params, batch)[0]
        self._params = step.params
        if (other_specs := other_specs_of(step.params, step.model, layout)) is not None:

            def on_device(leaf: Array, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
                return jax.ShapeDtypeStruct(_local_shape(leaf.shape, spec, layout), leaf.dtype)

            self._params = jax.tree.map(on_device, self._params, other_specs)
        if num_layers is not None:
            self._params = _with_layers(self._params, num_layers)
        self._trained = step.trained_of(self._params)
        self._key = jax.eval_shape(lambda: jax.random.key(0))  # from which layers may draw masks
        self._extra = step.extra

    def jaxpr(self, *, with_grads: bool) -> Jaxpr:
        """The loss, or its gradient, as a device computes it without stages."""
        loss = self._loss()

        def grads(params: Params, *others: PyTree) -> PyTree:
            trained = where_trained(self._trained, params)
            loss_sum, pull, sums = jax.vjp(
                lambda trained: loss(merge_trained(trained, params), *others), trained, has_aux=True
            )
            return pull(jax.numpy.ones_like(loss_sum)), loss_sum, sums

        mesh, whole = (
            AbstractMesh(tuple(self._layout.axis_sizes.values()), tuple(self._layout.axis_sizes)),
            PartitionSpec(),
        )
        call = grads if with_grads else loss
        on_device = jax.shard_map(call, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
        (equation,) = jax.make_jaxpr(on_device)(self._params, self._microbatch, self._key, self._extra).jaxpr.eqns
        return equation.params["jaxpr"]

    def x_bytes(self) -> int:
        """Bytes of the activations between layers."""
        model = self._model
        assert isinstance(model, LayeredModel)

        def embed(ends: Params, microbatch: Microbatch, key: Key) -> PyTree:
            return model.embed(ends, microbatch, Axes(key=key))

        return bytes_of(jax.eval_shape(embed, self._params.ends, self._microbatch, self._key))

    def _loss(self) -> Callable[[Params, Microbatch, Key, Extra], PyTree]:
        """`loss(params, microbatch, key, extra)`, in the form of `bind_loss`."""
        loss_fn = self._model
        if isinstance(loss_fn, LayeredModel):
            recomputes = self._layout.stage == 1 and self._layout.remat_in_force == "full"
            loss_fn = layered_loss_fn(_rematerialize(loss_fn) if recomputes else loss_fn)

        def loss(params: Params, microbatch: Microbatch, key: Key, extra: Extra) -> PyTree:
            return bind_loss(loss_fn, TrainState(None, None, extra=extra, key=key))(params, microbatch, key)

        return loss


def _rematerialize(model: LayeredModel) -> LayeredModel:
    """The same model, whose layers keep only their inputs."""

    def layer(layer_params: Params, x: PyTree, microbatch: Microbatch, axes: Axes) -> PyTree:
        def run(layer_params: Params, x: PyTree, microbatch: Microbatch) -> PyTree:
            return model.layer(layer_params, x, microbatch, axes)

        return jax.checkpoint(run, prevent_cse=False)(layer_params, x, microbatch)  # layers are in a loop

    return model._replace(layer=layer)


def shapes_on(layout: Layout, params: Params, model: LayeredModel | LossFn | None) -> Shapes:
    """Shapes of whole parameters, split for "tensor"."""
    if (specs := split_specs(model, layout)) is not None:
        params = jax.eval_shape(functools.partial(split_params, specs=specs, num_devices=layout.tensor), params)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf)), params)


def _with_layers(params: LayeredParams, num_layers: int) -> LayeredParams:
    layers = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((num_layers, *leaf.shape[1:]), leaf.dtype), params.layers)
    return params._replace(layers=layers)


def bytes_of(tree: PyTree, specs: Specs = None, layout: Layout = _ONE_DEVICE) -> int:
    """Bytes of arrays on one device; `specs` say what is in shards, None: nothing is."""
    leaves = jax.tree.leaves(tree)
    in_specs = [PartitionSpec()] * len(leaves) if specs is None else jax.tree.leaves(specs)
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
