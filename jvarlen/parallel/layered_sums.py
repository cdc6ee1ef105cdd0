"""The sums of a step of a model by layers without stages, by explicit passes: no derivative is taken of a loop.

What a step holds is then what it says: residuals of one microbatch, one copy of the sums of gradients, and at ZeRO-3
the parameters of two layers. Letters: L layers, M microbatches of a data shard.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var, jaxpr_as_fun
from jax.sharding import Mesh, PartitionSpec

from jvarlen.distributed.layout import Remat
from jvarlen.distributed.mesh import DATA_AXIS
from jvarlen.parallel.layer_loop import LayerLoop, widened
from jvarlen.parallel.layers import LayeredModel, LayeredParams, axes_of_ends, num_layers_of, trained_when_stacked
from jvarlen.parallel.passes import Passes, floats_of, split_passes, with_floats
from jvarlen.parallel.zero import along_data, gather_shards, reduce_to_shard, specs_of_layer
from jvarlen.training.losses import bind_loss
from jvarlen.training.reduction import check_reduced, count_once, reduce_sums, sharded_dims, sum_in_shards
from jvarlen.training.step_sums import StepSums, first_of, microbatches_of, split_step, sums_of_outputs
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
) -> Callable[[TrainState, Any], StepSums]:
    """What `sum_step` and `sum_over_shards` give for `layered_loss_fn(model)`."""

    def sum_microbatches(params: Any, microbatches_and_keys: Any) -> StepSums:
        stacked = _stacked(model, params)
        own = None if trained_of is None else trained_of(params)
        trained = jax.tree.map(lambda _: None, stacked)
        if own is not None:
            trained = _trained_of_stacked(model, params, own)(stacked)
        first = first_of(microbatches_and_keys)
        options: dict[str, Any] = {"first": first, "remat": remat, "has_grads": own is not None}
        options["param_specs"] = param_specs
        options["grad_specs"] = grad_specs if accumulates_shards and own is not None else None
        device = _Device(model=model, params=stacked, trained=trained, **options)
        traced, shapes = jax.make_jaxpr(device.sum_first, return_shape=True)(first)
        if mesh is not None:
            check_reduced(traced, shapes, "loss_fn", axis_name)
        if microbatches_of(microbatches_and_keys) == 1:  # a loop of one turn, and its zeros, would cost time and memory
            sums = jaxpr_as_fun(traced)(*jax.tree.leaves(first))
            sums = jax.tree.unflatten(jax.tree.structure(shapes), sums)
        else:
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            begin = zeros, device.loop.at(stacked.layers, 0)
            added = jax.lax.scan(lambda carry, given: (device.add(*carry, given), None), begin, microbatches_and_keys)
            sums = added[0][0]
        if mesh is not None:
            sums = count_once(sums, rows_along)
            in_shards = sums.grads
            if own is not None and grad_specs is not None and not accumulates_shards:
                in_shards = _reduced(sums.grads, grad_specs)
            dims = sharded_dims(grad_specs if own is not None else None, in_shards, axis_name)
            is_whole = [i for i, dim in enumerate(dims) if dim is None]
            sums = reduce_sums(sums._replace(grads=in_shards), axis_name, dims, (), is_whole)
        return sums if own is None else sums._replace(grads=_own_grads(model, params, own, sums.grads))

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


def _stacked(model: LayeredModel, params: Any) -> LayeredParams:
    stacked = params if model.stack is None else model.stack(params)
    num_layers_of(stacked)
    return stacked


def _trained_of_stacked(model: LayeredModel, params: Any, trained: Any) -> TrainedOf:
    if model.stack is None:
        return lambda stacked: where_trained(trained, stacked)
    return trained_when_stacked(params, model.stack, trained)


def _own_grads(model: LayeredModel, params: Any, trained: Any, grads: LayeredParams) -> Any:
    """Gradients of parameters as the state has them, by the transpose of what stacked them."""
    if model.stack is None:
        return grads
    is_alike = _form(params) == _form(jax.eval_shape(model.stack, params))  # then these may be shards
    zeros = widened(jax.tree.map(jnp.zeros_like, grads if is_alike else trained))

    def stack(trained: Any) -> Any:
        return where_trained(grads, _stacked(model, merge_trained(trained, params)))

    return jax.vjp(stack, zeros)[1](grads)[0]


def _form(tree: Any) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, *map(np.shape, leaves)


def _reduced(grads: LayeredParams, specs: LayeredParams) -> LayeredParams:
    """Whole sums of this device to shards of those of all, a layer at a time."""

    def of_layers(grad: jax.Array, spec: PartitionSpec) -> jax.Array:
        if along_data(spec) is None:
            return grad

        def turn(index: jax.Array, grad: jax.Array) -> jax.Array:
            shard = reduce_to_shard(grad[index], spec)
            return jax.lax.dynamic_update_slice(grad, shard[np.newaxis], (index, *(0,) * shard.ndim))

        shard = jax.eval_shape(lambda: reduce_to_shard(grad[0], spec))
        # Each shard begins where its layer was: shards beside all layers would be half as much again, or more.
        return jax.lax.fori_loop(0, len(grad), turn, grad)[:, *map(slice, shard.shape)]

    layers = jax.tree.map(of_layers, grads.layers, specs_of_layer(specs.layers))
    return LayeredParams(jax.tree.map(reduce_to_shard, grads.ends, specs.ends), layers)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Device:
    """What one device computes of a microbatch; `given` is that and its key."""

    model: LayeredModel
    params: LayeredParams  # stacked; shards where `param_specs` say so
    trained: LayeredParams  # a tree like the parameters, None in place of those that have no gradient
    first: tuple[Any, Any]  # the first of what is given
    remat: Remat
    has_grads: bool
    param_specs: LayeredParams | None
    grad_specs: LayeredParams | None  # of sums that are shards; None: all are whole

    @functools.cached_property
    def num_layers(self) -> int:
        return num_layers_of(self.params)

    @functools.cached_property
    def loop(self) -> LayerLoop:
        """The loops over all layers."""
        is_gathered = any(map(along_data, jax.tree.leaves(self.param_specs)))
        own = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), self.params.layers)
        lie: dict[str, Any] = {}
        if self.param_specs is not None and is_gathered:
            lie["gather"] = functools.partial(gather_shards, specs=specs_of_layer(self.param_specs.layers))
            own = jax.eval_shape(lie["gather"], own)
        if self.grad_specs is not None:
            specs = specs_of_layer(self.grad_specs.layers)
            lie["reduce"] = lambda grads: jax.tree.map(reduce_to_shard, grads, specs)
        x = jax.eval_shape(self.embed, jax.eval_shape(self.ends), *self.first)
        example = own, x, *self.first
        return LayerLoop(layer=self.model.layer, example=example, trained=self.trained.layers, remat=self.remat, **lie)

    @functools.cached_property
    def trained_in_embed(self) -> Any:
        """Of the ends what `embed` uses and is trained."""
        return _where_used(self.trained.ends, self.embed, jax.eval_shape(self.ends), *self.first)

    @functools.cached_property
    def embed_passes(self) -> Passes:
        """Those of `embed`, as a function of what is trained of the ends."""

        def run(trained: Any, _: tuple[()], ends: Any, *given: Any) -> Any:
            return self.embed(merge_trained(trained, ends), *given)

        ends = jax.eval_shape(self.ends)
        trained = where_trained(self.trained_in_embed, ends)
        return split_passes(run, trained, (), ends, *self.first, remat=self.remat)

    def ends(self) -> Any:
        """Whole ends; what a caller does not use of them is not gathered."""
        return self.params.ends if self.param_specs is None else gather_shards(self.params.ends, self.param_specs.ends)

    def embed(self, ends: Any, microbatch: Any, key: Any) -> Any:
        axes = axes_of_ends(key, self.num_layers)
        return jax.tree.map(jnp.asarray, self.model.embed(ends, microbatch, axes))

    def sum_first(self, given: tuple[Any, Any]) -> StepSums:
        """The sums of one microbatch."""
        return self.add(None, self.loop.at(self.params.layers, 0), given)[0]

    def add(self, sums: StepSums | None, ahead: Any, given: tuple[Any, Any]) -> tuple[StepSums, Any]:
        """The sums with those of a microbatch; before and after, `ahead` is the first layer as the loops take it."""
        layers, loop = self.params.layers, self.loop
        has_backward = self.has_grads and bool(jax.tree.leaves((self.trained.layers, self.trained_in_embed)))
        ends = self.ends()
        if has_backward:
            x, of_embed = self.embed_passes.forward(where_trained(self.trained_in_embed, ends), (), ends, *given)
            x, residuals, ahead = loop.forward(layers, x, given, ahead=ahead)
        else:
            x, ahead = loop.run(layers, self.embed(ends, *given), given, ahead=ahead)
        of_one, of_ends, of_x = self.sum_loss(x, given)
        if sums is not None:
            of_one = jax.tree.map(jnp.add, sums._replace(grads=None), of_one)
        if not self.has_grads:
            return of_one, ahead
        totals, of_layers = (self.no_grads, None) if sums is None else sums.grads
        # Whole gradients of the ends are not held during the loop, nor its sums before it.
        zero, of_x, totals = jax.lax.optimization_barrier((jnp.float32(0), of_x, self.added(totals, of_ends)))
        if sums is None:
            of_layers = loop.no_sums(self.num_layers, zero)
        if has_backward:
            of_x, of_layers, ahead = loop.backward(layers, residuals, of_x, given, of_layers, ahead=ahead)
            ends = self.ends()
            trained = where_trained(self.trained_in_embed, ends)
            totals = self.added(totals, self.embed_passes.backward(trained, of_embed, of_x, ends, *given)[1])
        if sums is None:
            shapes = jax.eval_shape(lambda: self.reduced(where_trained(self.trained.ends, self.ends())))
            totals = merge_trained(totals, jax.tree.map(jnp.zeros_like, shapes))
        return of_one._replace(grads=LayeredParams(totals, of_layers)), ahead

    def sum_loss(self, x: Any, given: tuple[Any, Any]) -> tuple[StepSums, Any, list[Any]]:
        """The sums of the loss, and the gradients of what is trained of the ends and of the floats of x."""
        microbatch, key = given
        ends, axes = self.ends(), axes_of_ends(key, self.num_layers + 1)

        def loss_fn(trained_and_floats: Any, microbatch: Any) -> tuple[Any, ...]:
            trained, floats = trained_and_floats
            return self.model.loss(merge_trained(trained, ends), with_floats(x, floats), microbatch, axes)

        used = _where_used(self.trained.ends, lambda ends: self.model.loss(ends, x, microbatch, axes), ends)
        of = where_trained(used, ends), floats_of(x)
        loss = bind_loss(loss_fn, TrainState(None, None))
        of_ends: Any = None
        of_x: list[Any] = []
        if self.has_grads:
            (loss_sum, outputs), (of_ends, of_x) = jax.value_and_grad(loss, has_aux=True)(of, microbatch, None)
        else:
            loss_sum, outputs = loss(of, microbatch, None)
        return sums_of_outputs(loss_sum, outputs, microbatch, self.trained), of_ends, of_x

    @property
    def no_grads(self) -> Any:
        """The sums for the ends before there are any."""
        return jax.tree.map(lambda _: None, self.trained.ends)

    def reduced(self, grads: Any) -> Any:
        """Gradients of ends as their sums have them."""
        if self.grad_specs is None:
            return widened(grads)
        return jax.tree.map(reduce_to_shard, grads, where_trained(grads, self.grad_specs.ends))

    def added(self, totals: Any, grads: Any) -> Any:
        """The sums for the ends with gradients of some of them."""

        def add(total: Any, grad: Any) -> Any:
            return total if grad is None else grad if total is None else total + grad

        return jax.tree.map(add, totals, self.reduced(grads), is_leaf=lambda leaf: leaf is None)


def _where_used(trained: Any, call: Callable[..., Any], ends: Any, *others: Any) -> Any:
    """What is trained of the ends and used by a function of them, and None in place of the others."""
    jaxpr = jax.make_jaxpr(call)(ends, *others).jaxpr
    taken = (*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars)
    used = {var for atoms in taken for var in atoms if isinstance(var, Var)}
    variables = jax.tree.unflatten(jax.tree.structure(ends), jaxpr.invars[: len(jax.tree.leaves(ends))])
    return jax.tree.map(lambda leaf, var: leaf if var in used else None, trained, where_trained(trained, variables))
