"""The step on a layout that shards state or rows.

ZeRO-1 replaces the update and the reduction by those of shards, ZeRO-2 also accumulation, and ZeRO-3 gathers layers;
stages replace accumulation and reduction. The compiler splits the update, so any Optax optimizer gives the same as
unsharded.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jvarlen._common.types import Array, Batch, Extra, Grads, OptState, Params, PyTree
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.placement import Placement
from jvarlen.parallel.layers import (
    Axes,
    LayeredModel,
    LayeredParams,
    Model,
    OwnLeavesState,
    StepLoss,
    is_own_leaf,
    model_of,
    trained_in,
)
from jvarlen.parallel.layout_checks import check_model
from jvarlen.parallel.sharded_init import init_sharded
from jvarlen.parallel.state_layout import (
    WHOLE,
    StateLayout,
    constrain,
    crop,
    crop_params,
    optimizer_on,
    other_specs_of,
    shardings_on,
    without_stack,
)
from jvarlen.parallel.zero import gather_by_layers
from jvarlen.training.optimizers import EvalParams
from jvarlen.training.reduction import Shards, sum_over_shards
from jvarlen.training.step import StepFn, are_finite, step_of_sums
from jvarlen.training.step_sums import LossProgram, StepSums, SumsFn
from jvarlen.training.train_state import Metrics, Optimizer, TrainState
from jvarlen.training.trainable import Trainable, TrainedOf, merge_trained, select_trained, where_trained

__all__ = ["ShardedProgram", "SumModel", "model_on_axes"]

# The sums of a step, from a model whose functions run on the axes of the layout.
SumModel: TypeAlias = Callable[[Model, TrainState, Batch, Shards, TrainedOf | None], StepSums]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ShardedProgram:
    """The parts of a step on such a layout: a `StepProgram`."""

    model: Model | StepLoss
    optimizer: Optimizer
    placement: Placement
    trainable: Trainable = None
    sum_model: SumModel | None = None  # in place of the program that the layout names

    def __post_init__(self):
        check_model(model_of(self.model), self.placement.layout)

    def init(self, params: Params, extra: Extra, seed: int | None) -> TrainState:
        """The state before the first step."""
        model = model_of(self.model)
        return init_sharded(params, self.optimizer, self.placement, model, extra, seed, self.trainable)

    def step(self, *, norms: bool) -> StepFn:
        """The train step."""
        sums_of = self.sums_of(self._trained_of)
        return self._on_layout(step_of_sums(sums_of, self._optimizer_on_layout(self.optimizer), norms=norms))

    def average(self, average: EvalParams) -> Callable[[TrainState], Params]:
        """The trained parameters to evaluate, from a state."""

        def update(params: Params, opt_state: OptState, _: Params) -> tuple[Params, OptState]:
            return average(opt_state, params), opt_state

        averaging = self._optimizer_on_layout(optax.GradientTransformationExtraArgs(self.optimizer.init, update))

        def replace_trained(state: TrainState, _: Batch) -> tuple[TrainState, Metrics]:
            trained = self._trained_in(state)
            averages = _of_trained_layers(averaging.update(trained, state.opt_state, trained)[0], state, trained)
            return state._replace(params=merge_trained(averages, state.params)), Metrics(0.0, 0.0)

        step = self._on_layout(replace_trained)
        return lambda state: self._trained_in(step(state, None)[0])

    def crop(self, params: Params) -> Params:
        """Whole parameters of a state without the zeros that extend vocabularies."""
        return crop_params(params, self._own_model, self.placement.layout)

    def sums_of(self, trained_of: TrainedOf | None) -> SumsFn:
        """The sums of a step, from parameters on the layout, to gradients in shards; None computes no gradients."""
        layout, mesh, sum_model = self.placement.layout, self.placement.program_mesh, self._sum_model
        if isinstance(self.model, StepLoss):
            from jvarlen.parallel.step_loss import sum_step_loss

            def sums_with(each: Model, carry: Callable[[Model], Model], trained: TrainedOf | None) -> SumsFn:
                carried: SumModel = lambda on_axes, *given: sum_model(carry(on_axes), *given)  # noqa: E731
                return dataclasses.replace(self, model=each, sum_model=carried).sums_of(trained)

            return sum_step_loss(self.model._replace(sums=self._own_model), sums_with, trained_of, self.crop)

        def sums_of(state: TrainState, batch: Batch) -> StepSums:
            params, states = state.params, self._state_layout(state.params)
            on_axes, rows_along = model_on_axes(self._own_model, layout, params, batch)
            state = state._replace(params=states.pad_params(params))
            param_specs = grad_specs = states.other_specs
            on_layout = None if trained_of is None else trained_in(state.opt_state, trained_of)
            if layout.zero:
                grad_specs = states.shard_specs(state.params, padded=layout.zero < 3)
            if layout.zero == 3:
                param_specs = grad_specs
            if on_layout is None:
                grad_specs = None
            elif grad_specs is not None:
                grad_specs = where_trained(on_layout(params), grad_specs)
            shards = Shards(
                mesh=mesh,
                axis_name=layout.data_axes,
                layout_axes=self.placement.axes,  # the program's mesh has them by the names of the layout
                rows_along=rows_along,
                param_specs=param_specs,
                grad_specs=grad_specs,
                accumulates_shards=layout.zero > 1,
                reduce_dtype=layout.reduce_dtype,
                grad_bucket_bytes=layout.grad_bucket_bytes,
            )
            sums = sum_model(on_axes, state, batch, shards, on_layout)
            if grad_specs is None:
                return sums
            grads = constrain(sums.grads, shardings_on(mesh, grad_specs))
            grads = jax.tree.map(lambda grad, param: crop(grad, param.shape), grads, where_trained(grads, params))
            return sums._replace(grads=_of_trained_layers(grads, state))

        return sums_of

    @property
    def _own_model(self) -> Model:
        """The model whose functions take the arrays of the layout."""
        return without_stack(model_of(self.model), self.placement.layout)

    @property
    def _sum_model(self) -> SumModel:
        return self.sum_model or functools.partial(_sum_model, self.placement.layout)

    def _state_layout(self, params: Params) -> StateLayout:
        layout = self.placement.layout
        return StateLayout(layout, other_specs_of(params, self._own_model, layout))

    def _trained_of(self, params: Params) -> Params:
        return select_trained(params, self.trainable)

    def _trained_in(self, state: TrainState) -> Params:
        return trained_in(state.opt_state, self._trained_of)(state.params)

    def _optimizer_on_layout(self, optimizer: Optimizer) -> Optimizer:
        mesh = self.placement.program_mesh
        return optimizer_on(self.placement.layout, model_of(self.model), optimizer, mesh=mesh)

    def _on_layout(self, unpadded_step: StepFn) -> StepFn:
        """A step of states on the layout, from one of states without padding."""
        # Before the step, vocabularies lose the zeros that extend them, and arrays of the optimizer those that pad
        # shards, so that no norm, mask or moment sees padding. After it, both are padded again, and every array is
        # placed where it came from, so that the next step takes the state without moving anything. Arrays that are not
        # trained are the ones that came in, padding included; so is the key, which has no sharding.

        def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            padded, trained = state.params, self._trained_in(state)
            state = state._replace(params=merge_trained(self.crop(trained), padded))
            states = self._state_layout(state.params)
            shardings = shardings_on(self.placement.program_mesh, states.specs(state))
            following, metrics = unpadded_step(states.unpad(state), batch)
            params = where_trained(trained, states.pad_params(following.params))
            if self.placement.layout.zero:
                params = self._round_on_shards(params, trained, state.params, states)
            following = states.pad(following)._replace(params=merge_trained(params, padded), key=None)
            following = constrain(following, shardings._replace(key=None))._replace(key=state.key)
            changed = where_trained(trained, following.params), following.extra
            return following, metrics._replace(params_finite=are_finite(changed))  # on the layout

        return train_step

    def _round_on_shards(self, params: Params, trained: Params, before: Params, states: StateLayout) -> Params:
        """Updated parameters, whose updates each device has added on its shards; below ZeRO-3 they are whole again."""
        # Updates may be wider than the parameters: what is gathered is the sum in the parameters' type. Stacked layers
        # are gathered one after the other.
        mesh = self.placement.program_mesh

        def on_shards(leaf: Array, spec: PartitionSpec) -> jax.Array:
            return crop(constrain(states.pad_array(leaf, spec), NamedSharding(mesh, spec)), leaf.shape)

        params = jax.tree.map(on_shards, params, where_trained(trained, states.shard_specs(before)))
        if states.layout.zero == 3 or not isinstance(params, LayeredParams):
            return params
        specs, beside = states.shard_specs(before, padded=False), states.other_specs
        beside = jax.tree.map(lambda _: WHOLE, specs) if beside is None else beside
        into, specs, beside = (where_trained(trained.layers, each.layers) for each in (before, specs, beside))
        return params._replace(layers=gather_by_layers(params.layers, into, specs, beside, mesh))


def _of_trained_layers(grads: Grads, state: TrainState, fixed: Params = None) -> PyTree:
    """Arrays with 0, or with those of `fixed`, for layers that are not trained beside trained ones."""
    if not isinstance(state.opt_state, OwnLeavesState):
        return grads
    trained: dict[int, dict[int | None, bool]] = {}
    for at in jax.tree.leaves(state.opt_state.own, is_leaf=is_own_leaf):
        trained.setdefault(at.place, {})[at.layer] = at.is_trained

    def of_array(grad: Array, other: PyTree, of_layers: dict[int | None, bool]) -> PyTree:
        if grad is None or all(of_layers.values()):
            return grad
        is_trained = np.array([of_layers[layer] for layer in range(len(of_layers))])
        return jnp.where(is_trained.reshape(-1, *(1,) * (grad.ndim - 1)), grad, other)

    leaves, structure = jax.tree.flatten(grads, is_leaf=lambda leaf: leaf is None)
    others = [0] * len(leaves) if fixed is None else jax.tree.leaves(fixed, is_leaf=lambda leaf: leaf is None)
    of_arrays = (of_array(*each, trained[place]) for place, each in enumerate(zip(leaves, others, strict=True)))
    return jax.tree.unflatten(structure, of_arrays)


def _sum_model(
    layout: Layout, model: Model, state: TrainState, batch: Batch, shards: Shards, trained_of: TrainedOf | None
) -> StepSums:
    """The sums of a step of a model on the layout's axes."""
    if not isinstance(model, LayeredModel):
        return sum_over_shards(LossProgram(model, trained_of), shards)(state, batch)
    if layout.stage == 1:
        from jvarlen.parallel.layer_loop import sum_by_layers

        return sum_by_layers(model, shards, remat=layout.remat_in_force, trained_of=trained_of)(state, batch)
    from jvarlen.parallel.pipeline import sum_scheduled

    sums_of = sum_scheduled(
        model,
        shards,
        schedule=layout.schedule,
        num_virtual=layout.virtual,
        remat=layout.remat_in_force,
        trained_of=trained_of,
    )
    return sums_of(state, batch)


def model_on_axes(model: Model, layout: Layout, params: Params, batch: Batch) -> tuple[Model, str | None]:
    """A model whose functions run inside `shard_map` over a layout's axes, and the axis along which rows are spread."""
    # Rows that are too short are not spread: None. Parameters and the batch are arrays or shapes of the whole.
    rows_along = None
    if layout.context > 1 and isinstance(model, LayeredModel):
        from jvarlen.parallel.context import CONTEXT_AXIS, context_model, row_length

        stacked = params if model.stack is None else jax.eval_shape(model.stack, params)
        seq_length = row_length(model, stacked.ends, batch)
        if seq_length >= layout.context_from:
            model, rows_along = context_model(model, seq_length), CONTEXT_AXIS
    if layout.tensor > 1 and isinstance(model, LayeredModel):
        from jvarlen.parallel.tensor import TENSOR_AXIS, tensor_parallel_model

        model = tensor_parallel_model(model, Axes(tensor=TENSOR_AXIS, sequence_parallel=layout.sequence_parallel))
    return model, rows_along
