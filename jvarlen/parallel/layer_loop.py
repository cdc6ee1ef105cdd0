"""A step of a model by layers without pipeline stages: a loop over microbatches, and in it loops over layers.

On one device the sums are those of `device_layers`. On data shards they are reduced once, after the loop over
microbatches, where gradients are held whole: to whole sums, or at ZeRO-1 to shards. At ZeRO-2 and 3 the sums are
shards, to which each layer's gradient is reduced inside the loops.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from jvarlen._common.types import Params, PyTree
from jvarlen.distributed.layout import ReduceDtype, Remat
from jvarlen.parallel.device_layers import DeviceLayers, Given, Part, buffer_of, wide_zeros, zeros_for
from jvarlen.parallel.layers import LayeredModel, LayeredParams, num_layers_of, trained_if_stacked
from jvarlen.parallel.zero import along_data, reduce_to_shard, specs_of_layer
from jvarlen.training.reduction import Shards, check_reduced, reduce_sums, sum_in_shards
from jvarlen.training.step_sums import StepSums, SumsOf, check_same_sums, first_of, microbatches_of, sum_on_device
from jvarlen.training.train_state import TrainState
from jvarlen.training.trainable import TrainedOf, merge_trained, select_trained, where_trained

__all__ = ["reduce_by_layers", "sum_by_layers"]


def sum_by_layers(
    model: LayeredModel,
    shards: Shards | None = None,  # None: one device
    *,
    remat: Remat = "none",
    trained_of: TrainedOf | None = select_trained,  # None: no gradients
) -> SumsOf:
    """Sums of a step, equal to those of one device, or of `sum_over_shards`, for `layered_loss_fn(model)`."""

    def own_of(params: Params) -> PyTree:
        return None if trained_of is None else trained_of(params)

    def sum_given(state: TrainState, given: PyTree, before: StepSums | None) -> StepSums:
        params, first = state.params, first_of(given)
        stacked = params if model.stack is None else model.stack(params)
        trained = _where_stacked(model, params, stacked, own_of(params))
        param_specs = whole = jax.tree.map(lambda _: PartitionSpec(), stacked)
        grad_specs = where_trained(trained, whole)
        if shards is not None and shards.param_specs is not None:
            param_specs = shards.param_specs
        if shards is not None and shards.accumulates_shards and shards.grad_specs is not None:
            grad_specs = shards.grad_specs
        device = DeviceLayers(
            model=model,
            params=stacked,
            trained=trained,
            num_layers=num_layers_of(stacked),
            first=first,
            remat=remat,
            param_specs=param_specs,
            grad_specs=grad_specs,
            reduce_dtype="float32" if shards is None else shards.reduce_dtype,
        )
        if shards is None:
            return _accumulate(device, given, None, before)
        return shards.sum_once(functools.partial(_accumulate, device, given, shards), before)

    def reduce(params: Params, sums: StepSums) -> StepSums:
        sums = sums if shards is None else _reduce(sums, shards)
        own, stack = own_of(params), model.stack
        if own is None or stack is None:
            return sums
        trained = _where_stacked(model, params, jax.eval_shape(stack, params), own)

        def stack_trained(own: Params) -> Params:
            return where_trained(trained, stack(merge_trained(own, params)))

        # With specs, stacked arrays are sharded as the parameters are, and gradients may be shards.
        has_specs = shards is not None and shards.grad_specs is not None
        zeros = jax.tree.map(wide_zeros, sums.grads if has_specs else own)
        return sums._replace(grads=jax.vjp(stack_trained, zeros)[1](sums.grads)[0])

    if shards is None:
        return sum_on_device(sum_given, lambda state, sums: reduce(state.params, sums))

    def sum_shard(state: TrainState, given: PyTree, before: StepSums | None, is_whole: bool) -> StepSums:
        sums = sum_given(state, given, before)
        return reduce(state.params, sums) if is_whole else sums

    return sum_in_shards(sum_shard, reduce, shards)


def _where_stacked(model: LayeredModel, params: Params, stacked: LayeredParams, own: Params | None) -> LayeredParams:
    """Stacked arrays with a trained layer, and None for the others; `own`: the trained parameters of the model."""
    if own is None:
        return jax.tree.map(lambda _: None, stacked)
    if model.stack is None:
        return where_trained(own, stacked)
    return trained_if_stacked(params, model.stack, own)(stacked)


def _accumulate(
    device: DeviceLayers, microbatches_and_keys: PyTree, shards: Shards | None, before: StepSums | None
) -> StepSums:
    """The sums over microbatches; raises ValueError if the loss reduces them itself over the axes of the shards."""

    def add_first(given: Given) -> StepSums:
        return _add(device, None, device.ahead(0), given)[0]

    traced, shapes = jax.make_jaxpr(add_first, return_shape=True)(device.first)
    if shards is not None:
        check_reduced(traced, shapes, "loss_fn", shards.axis_name)
    if before is not None:
        check_same_sums(before, shapes)
    elif microbatches_of(microbatches_and_keys) == 1:  # a loop of one turn, and its zeros, would cost time and memory
        sums = jaxpr_as_fun(traced)(*jax.tree.leaves(device.first))
        return jax.tree.unflatten(jax.tree.structure(shapes), sums)
    begin = zeros_for(shapes) if before is None else before, device.ahead(0)
    (sums, _), _ = jax.lax.scan(lambda carry, given: (_add(device, *carry, given), None), begin, microbatches_and_keys)
    return sums


def _reduce(sums: StepSums, shards: Shards) -> StepSums:
    """The sums over the shards."""
    if shards.grad_specs is not None and not shards.accumulates_shards:
        sums = sums._replace(grads=reduce_by_layers(sums.grads, shards.grad_specs, shards.reduce_dtype))
    return reduce_sums(sums, shards)


def reduce_by_layers(grads: LayeredParams, specs: LayeredParams, sent: ReduceDtype) -> LayeredParams:
    """Reduces whole sums of the devices to shards of their sum, a layer at a time."""

    def of_layers(grad: jax.Array, spec: PartitionSpec) -> jax.Array:
        if along_data(spec) is None:
            return grad

        def turn(index: jax.Array, grad: jax.Array) -> jax.Array:
            shard = reduce_to_shard(grad[index], spec, sent)
            return jax.lax.dynamic_update_slice(grad, shard[np.newaxis], (index, *(0,) * shard.ndim))

        shard = jax.eval_shape(lambda: reduce_to_shard(grad[0], spec))
        # Each shard begins where its layer was: shards beside all layers would be half as much again, or more.
        return jax.lax.fori_loop(0, len(grad), turn, grad)[:, *map(slice, shard.shape)]

    layers = jax.tree.map(of_layers, grads.layers, specs_of_layer(specs.layers))
    return LayeredParams(jax.tree.map(functools.partial(reduce_to_shard, sent=sent), grads.ends, specs.ends), layers)


def _add(device: DeviceLayers, sums: StepSums | None, ahead: PyTree, given: Given) -> tuple[StepSums, Params]:
    """Adds the sums of a microbatch; `ahead` is the first layer in the form of the loops, before and after."""
    part = Part(given, device.num_layers)
    x, of_embed = device.forward_embed(given)
    x, kept, ahead = device.forward(part, x, buffer_of(device.residual_shapes[0], part.num_layers), ahead)
    of_one, of_ends, of_x = device.sum_loss(x, given)
    if sums is not None:
        of_one = jax.tree.map(jnp.add, sums._replace(grads=None), of_one)
    if not device.has_grads:
        return of_one, ahead
    totals, of_layers = (jax.tree.map(lambda _: None, of_ends), None) if sums is None else sums.grads
    # Whole gradients of the ends are not held during the loop, nor its sums before it.
    zero, of_x, totals = jax.lax.optimization_barrier((jnp.float32(0), of_x, device.add_ends(totals, of_ends)))
    if sums is None:
        of_layers = zeros_for(device.sum_shapes.layers, zero)
    of_x, of_layers, ahead = device.backward(part, kept, of_x, of_layers, ahead)
    totals = device.backward_embed(of_embed, of_x, given, totals)
    if sums is None:
        totals = merge_trained(totals, zeros_for(device.sum_shapes.ends))
    return of_one._replace(grads=LayeredParams(totals, of_layers)), ahead
