"""The sums of a step of a model by layers without stages, by explicit passes: no derivative is taken of a loop.

What a step holds is then what it says: residuals of one microbatch, one copy of the sums of gradients, and at ZeRO-3
the parameters of two layers. Letters: L layers, M microbatches of a data shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, PartitionSpec

from jvarlen.distributed.layout import ReduceDtype, Remat
from jvarlen.distributed.mesh import DATA_AXIS
from jvarlen.parallel.layer_loop import DeviceLayers, Part, buffer_of, wide_zeros, zeros_of_shapes
from jvarlen.parallel.layers import LayeredModel, LayeredParams, num_layers_of, trained_when_stacked
from jvarlen.parallel.zero import along_data, reduce_to_shard, specs_of_layer
from jvarlen.training.reduction import check_reduced, count_once, reduce_sums, sharded_dims, sum_in_shards
from jvarlen.training.step_sums import StepSums, first_of, microbatches_of, split_step
from jvarlen.training.train_state import TrainState
from jvarlen.training.trainable import TrainedOf, merge_trained, select_trained, where_trained

__all__ = ["sum_by_layers"]


def sum_by_layers(
    model: LayeredModel,
    *,
    remat: Remat = "none",
    trained_of: TrainedOf | None = select_trained,  # None: no gradients
    mesh: Mesh | None = None,  # None: one device
    axis_name: str | tuple[str, ...] = DATA_AXIS,
    layout_axes: Iterable[str] = (),
    rows_along: str | None = None,
    param_specs: Any = None,  # what of each parameter lies along the axis, which is gathered layer by layer
    grad_specs: Any = None,  # what of each gradient lies along the axis after the reduction
    accumulates_shards: bool = False,  # whether gradients are reduced layer by layer
    reduce_dtype: ReduceDtype = "float32",
) -> Callable[[TrainState, Any], StepSums]:
    """What `sum_step` and `sum_over_shards` give for `layered_loss_fn(model)`."""

    def sum_microbatches(params: Any, microbatches_and_keys: Any) -> StepSums:
        stacked, first = params if model.stack is None else model.stack(params), first_of(microbatches_and_keys)
        num_layers, own = num_layers_of(stacked), None if trained_of is None else trained_of(params)
        whole = jax.tree.map(lambda _: PartitionSpec(), stacked)
        if own is None:
            trained = jax.tree.map(lambda _: None, stacked)
        elif model.stack is None:
            trained = where_trained(own, stacked)
        else:
            trained = trained_when_stacked(params, model.stack, own)(stacked)
        specs = None if own is None else grad_specs
        how: dict[str, Any] = {"num_layers": num_layers, "trained": trained, "first": first, "remat": remat}
        how["reduce_dtype"] = reduce_dtype
        how["param_specs"] = whole if param_specs is None else param_specs
        how["grad_specs"] = where_trained(trained, specs if accumulates_shards and specs is not None else whole)
        device = DeviceLayers(model=model, params=stacked, **how)

        def add_first(given: Any) -> StepSums:
            return _add(device, None, device.ahead(0), given)[0]

        traced, shapes = jax.make_jaxpr(add_first, return_shape=True)(first)
        if mesh is not None:
            check_reduced(traced, shapes, "loss_fn", axis_name)
        if microbatches_of(microbatches_and_keys) == 1:  # a loop of one turn, and its zeros, would cost time and memory
            sums = jaxpr_as_fun(traced)(*jax.tree.leaves(first))
            sums = jax.tree.unflatten(jax.tree.structure(shapes), sums)
        else:
            begin = zeros_of_shapes(shapes), device.ahead(0)
            (sums, _), _ = jax.lax.scan(
                lambda carry, given: (_add(device, *carry, given), None), begin, microbatches_and_keys
            )
        if mesh is not None:
            sums = count_once(sums, rows_along)
            if specs is not None and not accumulates_shards:
                sums = sums._replace(grads=_reduced(sums.grads, specs, reduce_dtype))
            dims = sharded_dims(specs, sums.grads, axis_name)
            is_whole = [i for i, dim in enumerate(dims) if dim is None]
            sums = reduce_sums(sums, axis_name, dims, (), is_whole, reduce_dtype)
        stack = model.stack
        if own is None or stack is None:
            return sums

        def stack_trained(own: Any) -> Any:
            return where_trained(trained, stack(merge_trained(own, params)))

        # With specs, what is stacked lies as the parameters do, and gradients may be shards.
        zeros = jax.tree.map(wide_zeros, own if specs is None else sums.grads)
        return sums._replace(grads=jax.vjp(stack_trained, zeros)[1](sums.grads)[0])

    def sums_of(state: TrainState, batch: Any) -> StepSums:
        given = split_step(state, batch, takes_key=True)
        if mesh is not None:
            lie: dict[str, Any] = {"axis_name": axis_name, "layout_axes": layout_axes, "rows_along": rows_along}
            lie |= {"param_specs": param_specs, "grad_specs": None if trained_of is None else grad_specs}
            return sum_in_shards(
                lambda state, given: sum_microbatches(state.params, given), state, given, mesh=mesh, **lie
            )
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((state.params, given)))
        return (sum_microbatches if is_traced else jax.jit(sum_microbatches))(state.params, given)

    return sums_of


def _reduced(grads: LayeredParams, specs: LayeredParams, sent: ReduceDtype) -> LayeredParams:
    """Whole sums of this device to shards of those of all, a layer at a time."""

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


def _add(device: DeviceLayers, sums: StepSums | None, ahead: Any, given: tuple[Any, Any]) -> tuple[StepSums, Any]:
    """The sums with those of a microbatch; before and after, `ahead` is the first layer as the loops take it."""
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
        of_layers = zeros_of_shapes(device.sum_shapes.layers, zero)
    of_x, of_layers, ahead = device.backward(part, kept, of_x, of_layers, ahead)
    totals = device.backward_embed(of_embed, of_x, given, totals)
    if sums is None:
        totals = merge_trained(totals, zeros_of_shapes(device.sum_shapes.ends))
    return of_one._replace(grads=LayeredParams(totals, of_layers)), ahead
