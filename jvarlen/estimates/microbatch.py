"""One microbatch on one device of a layout, traced, and the bytes of arrays there."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, PartitionSpec

from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import axes_in
from jvarlen.parallel.layers import Axes, LayeredModel, LayeredParams, layered_loss_fn, trained_if_stacked
from jvarlen.parallel.sharded_step import model_on_axes
from jvarlen.parallel.state_layout import other_specs_of, padded_shape, split_specs
from jvarlen.parallel.tensor import split_params
from jvarlen.planning.buckets import check_buckets
from jvarlen.training.losses import LossFn, bind_loss
from jvarlen.training.train_state import TrainState
from jvarlen.training.trainable import TrainedOf, merge_trained, where_trained

__all__ = ["OneMicrobatch", "bytes_of", "shapes_on", "stacked_shapes", "with_layers"]

_ONE_DEVICE = Layout(data=1)


class OneMicrobatch:
    """A microbatch of a bucket on one device of a layout, to be traced."""

    def __init__(
        self,
        model: LayeredModel | LossFn,
        layout: Layout,
        params: Any,  # shapes of whole ones, split for "tensor"
        trained_of: TrainedOf,
        extra: Any,
        bucket: tuple[int, ...],
        batch_spec: Any,
        num_layers: int | None = None,  # of these parameters; None: all
    ):
        batch = batch_spec(check_buckets([bucket]).shapes[0], 1)
        self._microbatch = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) if leaf.shape else leaf, batch
        )
        self._layout = layout
        other_specs = other_specs_of(params, model, layout)
        self._model = model_on_axes(model, layout, params, batch)[0]
        self._params = params
        if other_specs is not None:

            def on_device(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
                return jax.ShapeDtypeStruct(_local_shape(leaf.shape, spec, layout), leaf.dtype)

            self._params = jax.tree.map(on_device, params, other_specs)
        if num_layers is not None:
            self._params = with_layers(self._params, num_layers)
        self._trained = trained_of(self._params)
        self._key = jax.eval_shape(lambda: jax.random.key(0))  # which layers may draw masks from
        self._given = self._microbatch, self._key, extra  # what a loss takes beside parameters

    def jaxpr(self, *, with_grads: bool) -> Jaxpr:
        """The loss, or its gradient, as a device computes it without stages."""
        loss = self._loss()

        def grads(params: Any, *others: Any) -> Any:
            trained = where_trained(self._trained, params)
            loss_sum, pull, sums = jax.vjp(lambda own: loss(merge_trained(own, params), *others), trained, has_aux=True)
            return pull(jax.numpy.ones_like(loss_sum)), loss_sum, sums

        mesh = AbstractMesh(tuple(self._layout.axis_sizes.values()), tuple(self._layout.axis_sizes))
        whole = PartitionSpec()
        call = grads if with_grads else loss
        on_device = jax.shard_map(call, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
        (equation,) = jax.make_jaxpr(on_device)(self._params, *self._given).jaxpr.eqns
        return equation.params["jaxpr"]

    def x_bytes(self) -> int:
        """Bytes of what goes from layer to layer."""
        model, key = self._model, self._key
        assert isinstance(model, LayeredModel)

        def embed(ends: Any, microbatch: Any, key: Any) -> Any:
            return model.embed(ends, microbatch, Axes(key=key))

        return bytes_of(jax.eval_shape(embed, self._params.ends, self._microbatch, key))

    def _loss(self) -> Any:
        """`loss(params, microbatch, key, extra)`, in the form of `bind_loss`."""
        loss_fn: Any = self._model
        if isinstance(loss_fn, LayeredModel):
            recomputes = self._layout.stage == 1 and self._layout.remat_in_force == "full"
            loss_fn = layered_loss_fn(_rematerialized(loss_fn) if recomputes else loss_fn)

        def loss(params: Any, microbatch: Any, key: Any, extra: Any) -> Any:
            return bind_loss(loss_fn, TrainState(None, None, extra=extra, key=key))(params, microbatch, key)

        return loss


def _rematerialized(model: LayeredModel) -> LayeredModel:
    """The same model, whose layers keep only their inputs."""

    def layer(layer_params: Any, x: Any, microbatch: Any, axes: Axes) -> Any:
        def run(layer_params: Any, x: Any, microbatch: Any) -> Any:
            return model.layer(layer_params, x, microbatch, axes)

        return jax.checkpoint(run, prevent_cse=False)(layer_params, x, microbatch)  # layers are in a loop

    return model._replace(layer=layer)


def shapes_on(layout: Layout, params: Any, model: LayeredModel | LossFn | None) -> Any:
    """Shapes of whole parameters, split for "tensor"."""
    if (specs := split_specs(model, layout)) is not None:
        params = jax.eval_shape(functools.partial(split_params, specs=specs, num_devices=layout.tensor), params)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf)), params)


def stacked_shapes(model: Any, params: Any, trained_of: TrainedOf) -> tuple[Any, Any, TrainedOf]:
    """A model whose parameters are stacked, if it is one by layers, the shapes of these, and what is trained."""
    if isinstance(model, LayeredModel) and model.stack is not None:
        trained_of = trained_if_stacked(params, model.stack, trained_of(params))
        model, params = model._replace(stack=None), jax.eval_shape(model.stack, params)
    return model, shapes_on(_ONE_DEVICE, params, None), trained_of


def with_layers(params: LayeredParams, num_layers: int) -> LayeredParams:
    """Shapes of the parameters of a model with this many layers."""
    layers = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((num_layers, *leaf.shape[1:]), leaf.dtype), params.layers)
    return params._replace(layers=layers)


def bytes_of(tree: Any, specs: Any = None, layout: Layout = _ONE_DEVICE) -> int:
    """Bytes of arrays on one device, by specs that tell what is in shards; None: nothing is."""
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
