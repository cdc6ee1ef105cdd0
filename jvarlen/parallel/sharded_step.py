"""The first state, and the step, on a layout that shards state or rows.

ZeRO-1 replaces the update and the reduction by those of shards, ZeRO-2 also accumulation, and ZeRO-3 gathers layers;
stages replace accumulation and reduction. The compiler splits the update, so any Optax optimizer gives the same as
unsharded.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from jvarlen._common.pytree import copy_arrays, has_host_arrays, has_shapes, is_key, with_sharding
from jvarlen._common.types import Array, Batch, Extra, Grads, OptState, Params, PyTree, Shapes, Shardings, Specs
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import replicate
from jvarlen.distributed.placement import Placement
from jvarlen.parallel import layers, state_layout
from jvarlen.parallel.layers import LayeredModel, LayeredParams, Model, OwnLeavesState
from jvarlen.parallel.layout_checks import check_layout, check_model
from jvarlen.parallel.state_layout import StateLayout
from jvarlen.parallel.step_program import StepProgram
from jvarlen.parallel.zero import gather_by_layers, gather_shards
from jvarlen.training.averages import EvalParams
from jvarlen.training.groups import step_of_sums
from jvarlen.training.reduction import Shards, sum_over_shards
from jvarlen.training.step import StepFn, StepHalves, are_finite
from jvarlen.training.step_sums import LossProgram, StepSums, SumsOf
from jvarlen.training.train_state import Metrics, Optimizer, TrainState, new_state
from jvarlen.training.trainable import TrainedOf, merge_trained, where_trained

__all__ = ["ShardedProgram", "SumModel", "model_on_axes"]

# The sums of a step, of a model whose functions run on the axes of the layout.
SumModel: TypeAlias = Callable[[Model, Shards, TrainedOf | None], SumsOf]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ShardedProgram(StepProgram):
    """The parts of a step on such a layout."""

    placement: Placement
    sum_model: SumModel | None = None  # in place of the program that the layout names

    def __post_init__(self):
        check_model(layers.model_of(self.model), self.placement.layout)

    def init(self, params: Params, extra: Extra, seed: int | None) -> TrainState:
        """The state before the first step. No device ever holds the whole optimizer state."""
        layout, mesh, model = self.placement.layout, self.placement.program_mesh, layers.model_of(self.model)
        check_layout(layout, params, model)
        is_abstract = has_shapes(params)
        params = whole = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "shape") else np.asarray(leaf), params)
        is_on_host = not is_abstract and (mesh.is_multi_process or has_host_arrays(params) or _are_on_one_cpu(params))
        if is_on_host:  # read when they are placed
            params = jax.eval_shape(lambda params: params, params)
        model, params, optimizer, trained_of = state_layout.stacked_for(
            layout, model, params, self.optimizer, mesh, self.trainable
        )
        states = StateLayout.of(params, model, layout)
        params = state_layout.extend_params(params, model, layout)

        def init(params: Params) -> TrainState:
            state = new_state(state_layout.crop_params(params, model, layout), optimizer, trained_of=trained_of)
            return states.pad(state)

        others = functools.partial(new_state, (), optax.identity(), extra=extra, seed=seed)
        shapes = jax.eval_shape(init, params)._replace(params=params)
        shardings = state_layout.shardings_on(mesh, states.specs(shapes))
        if is_abstract:
            on_all = NamedSharding(mesh, state_layout.WHOLE)
            whole = jax.tree.map(functools.partial(with_sharding, on_all), jax.eval_shape(others))
            return whole._replace(
                params=jax.tree.map(with_sharding, shardings.params, params),
                opt_state=jax.tree.map(with_sharding, shardings.opt_state, shapes.opt_state),
            )
        if is_on_host:
            own = shapes.opt_state.own if isinstance(shapes.opt_state, OwnLeavesState) else None
            params = _place_slices(whole, own, params, shardings.params)
        else:
            params = jax.tree.map(lambda leaf, to: jax.device_put(leaf.copy(), to), params, shardings.params)
        opt_state = _run_init(lambda params: init(params).opt_state, shardings.opt_state, params)
        return TrainState(params, opt_state, *replicate(copy_arrays(others()[2:]), mesh))

    def step(self, *, norms: bool) -> tuple[StepFn, StepHalves]:
        """The train step of one group, and of several in parts."""
        optimizer = self._optimizer_on_layout(self.optimizer)
        step, halves = step_of_sums(self.sums_of(self._trained_of), optimizer, norms=norms)
        return self._on_layout(step), halves._replace(update=self._on_layout(halves.update))

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
        """Whole parameters of a state without the zeros that extend vocabularies and layers."""
        return state_layout.crop_params(params, self._own_model, self.placement.layout)

    def _sums_of_model(
        self, model: Model, trained_of: TrainedOf | None, carry: Callable[[Model], Model] = lambda model: model
    ) -> SumsOf:
        """The sums of a step, from parameters on the layout, to gradients in shards."""

        def on_layout(state: TrainState, batch: Batch = None) -> tuple[SumsOf, TrainState, Specs]:
            """The sums of this batch, or if None those of any, of a padded state; and how gradients lie."""
            layout, params, states = self.placement.layout, state.params, self._state_layout(state.params)
            on_axes, rows_along = model_on_axes(model, layout, params, batch)
            state = state._replace(params=states.pad_params(params))
            param_specs = grad_specs = states.other_specs
            trained = None if trained_of is None else layers.trained_in(state.opt_state, trained_of)
            if layout.zero:
                grad_specs = states.shard_specs(state.params, padded=layout.zero < 3)
            if layout.zero == 3:
                param_specs = grad_specs
            if trained is None:
                grad_specs = None
            elif grad_specs is not None:
                grad_specs = where_trained(trained(params), grad_specs)
            shards = Shards(
                mesh=self.placement.program_mesh,
                axis_name=layout.data_axes,
                layout_axes=self.placement.axes,  # the program's mesh has them by the names of the layout
                rows_along=rows_along,
                param_specs=param_specs,
                grad_specs=grad_specs,
                accumulates_shards=layout.zero > 1,
                reduce_dtype=layout.reduce_dtype,
                grad_bucket_bytes=layout.grad_bucket_bytes,
            )
            sum_model = self.sum_model or functools.partial(_sum_model, layout)
            return sum_model(carry(on_axes), shards, trained), state, grad_specs

        def whole(state: TrainState, batch: Batch) -> StepSums:
            sums_of, padded, grad_specs = on_layout(state, batch)
            return self._unpad_grads(sums_of.whole(padded, batch), state, grad_specs)

        def accumulate(state: TrainState, batch: Batch, first: Array, before: StepSums | None) -> StepSums:
            sums_of, padded, _ = on_layout(state, batch)
            return sums_of.accumulate(padded, batch, first, before)

        def reduce(state: TrainState, sums: StepSums) -> StepSums:
            sums_of, padded, grad_specs = on_layout(state)
            return self._unpad_grads(sums_of.reduce(padded, sums), state, grad_specs)

        def shardings(state: TrainState) -> PyTree:
            sums_of, padded, _ = on_layout(state)
            return sums_of.shardings(padded)

        return SumsOf(whole, accumulate, reduce, shardings)

    def _unpad_grads(self, sums: StepSums, state: TrainState, grad_specs: Specs) -> StepSums:
        """The sums with gradients in the shapes of the parameters, and 0 for layers that are not trained."""
        if grad_specs is None:
            return sums
        grads = state_layout.constrain(sums.grads, state_layout.shardings_on(self.placement.program_mesh, grad_specs))
        trained = where_trained(grads, state.params)
        grads = jax.tree.map(lambda grad, param: state_layout.crop(grad, param.shape), grads, trained)
        return sums._replace(grads=_of_trained_layers(grads, state))

    @property
    def _own_model(self) -> Model:
        """The model whose functions take the arrays of the layout."""
        return state_layout.without_stack(layers.model_of(self.model), self.placement.layout)

    def _state_layout(self, params: Params) -> StateLayout:
        return StateLayout.of(params, self._own_model, self.placement.layout)

    def _trained_in(self, state: TrainState) -> Params:
        return layers.trained_in(state.opt_state, self._trained_of)(state.params)

    def _optimizer_on_layout(self, optimizer: Optimizer) -> Optimizer:
        mesh = self.placement.program_mesh
        return state_layout.optimizer_on(self.placement.layout, layers.model_of(self.model), optimizer, mesh=mesh)

    def _on_layout(self, unpadded_step: StepFn) -> StepFn:
        """A step of states on the layout, from one of states without padding."""
        # Before the step, vocabularies and layers lose the zeros that extend them, and arrays of the optimizer those
        # that pad shards, so that no norm, mask or moment sees padding. After it, both are padded again, and every
        # array is placed where it came from, so that the next step takes the state without moving anything. Arrays that
        # are not trained are the ones that came in, padding included; so is the key, which has no sharding.

        def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            padded, trained = state.params, self._trained_in(state)
            state = state._replace(params=merge_trained(self.crop(trained), padded))
            states = self._state_layout(state.params)
            shardings = state_layout.shardings_on(self.placement.program_mesh, states.specs(state))
            following, metrics = unpadded_step(states.unpad(state), batch)
            params = where_trained(trained, states.pad_params(following.params))
            if self.placement.layout.zero:
                before = state.params._replace(layers=padded.layers) if isinstance(padded, LayeredParams) else padded
                params = self._round_on_shards(params, trained, before, states)
            following = states.pad(following)._replace(params=merge_trained(params, padded), key=None)
            following = state_layout.constrain(following, shardings._replace(key=None))._replace(key=state.key)
            changed = where_trained(trained, following.params), following.extra
            return following, metrics._replace(params_finite=are_finite(changed))  # on the layout

        return train_step

    def _round_on_shards(self, params: Params, trained: Params, before: Params, states: StateLayout) -> Params:
        """Updated parameters, whose updates each device has added on its shards; below ZeRO-3 they are whole again."""
        # Updates may be wider than the parameters: what is gathered is the sum in the parameters' type. Stacked layers
        # are gathered one after the other.
        mesh = self.placement.program_mesh

        def on_shards(leaf: Array, spec: PartitionSpec) -> jax.Array:
            padded = state_layout.constrain(states.pad_array(leaf, spec), NamedSharding(mesh, spec))
            return state_layout.crop(padded, leaf.shape)

        params = jax.tree.map(on_shards, params, where_trained(trained, states.shard_specs(before)))
        if states.layout.zero == 3 or not isinstance(params, LayeredParams):
            return params
        specs, beside = states.shard_specs(before, padded=False), states.other_specs
        beside = jax.tree.map(lambda _: state_layout.WHOLE, specs) if beside is None else beside
        into, specs, beside = (where_trained(trained.layers, each.layers) for each in (before, specs, beside))
        return params._replace(layers=gather_by_layers(params.layers, into, specs, beside, mesh))


def _are_on_one_cpu(params: Params) -> bool:
    """Whether all arrays are whole on a CPU, where NumPy takes slices of them without programs to compile."""

    def is_on_one_cpu(leaf: Array) -> bool:
        if not isinstance(leaf, jax.Array) or is_key(leaf):
            return False
        return [device.platform for device in leaf.devices()] == ["cpu"]

    return all(map(is_on_one_cpu, jax.tree.leaves(params)))


def _place_slices(params: Params, own: PyTree, on_layout: Shapes, shardings: Shardings) -> PyTree:
    """Whole parameters in the form of a layout: stacked as `own` says (None: not at all), and padded to its shapes."""
    # `on_layout` and `shardings`: shapes and shardings of the layout. A slice is read once, and copied.
    places = [layers.OwnLeaf(place, None) for place in range(len(jax.tree.leaves(params)))]
    if own is not None:
        places = jax.tree.leaves(own, is_leaf=layers.is_own_leaf)
    arrays: dict[int, dict[int | None, Array]] = {}
    for leaf, at in zip(jax.tree.leaves(params), places, strict=True):
        arrays.setdefault(at.place, {})[at.layer] = leaf

    def place(of_layers: dict[int | None, Array], shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.Array:
        read: dict[Hashable, np.ndarray] = {}

        def slice_at(index: Array) -> np.ndarray:
            key = tuple((part.start, part.stop) for part in index)
            if key not in read:
                read[key] = _read(of_layers, index, shape.shape)
            return read[key]

        return jax.make_array_from_callback(shape.shape, sharding, slice_at)

    structure = jax.tree.structure(on_layout)
    shapes, lie = jax.tree.leaves(on_layout), jax.tree.leaves(shardings)
    return jax.tree.unflatten(structure, map(place, [arrays[i] for i in range(len(arrays))], shapes, lie))


def _read(of_layers: dict[int | None, Array], index: tuple[slice, ...], shape: Sequence[int]) -> np.ndarray:
    """A slice of an array of the layout, made of that of one array, or of each layer; zeros after its end."""

    def part_of(array: Array, index: tuple[slice, ...]) -> np.ndarray:
        # A subclass of NumPy arrays may read only the slices that it is asked for; `np.asarray` could read more.
        return (array if isinstance(array, np.ndarray) else np.asarray(array))[index]

    if None in of_layers:
        found = np.array(part_of(of_layers[None], index), order="C")
    else:
        here = range(len(of_layers))[index[0]]
        parts = [part_of(of_layers[i], index[1:]) for i in here]
        found = np.stack(parts) if parts else np.zeros_like(part_of(of_layers[0], index[1:])[np.newaxis][:0])
    sizes = [len(range(*part.indices(size))) for part, size in zip(index, shape, strict=True)]
    if found.shape == (*sizes,):
        return found
    return np.pad(found, [(0, size - there) for size, there in zip(sizes, found.shape, strict=True)])


def _run_init(init: Callable[[Params], OptState], shardings: Shardings, params: Params) -> PyTree:
    """An optimizer's first state; its constants, such as planned rates, are arguments of the program."""
    closed, shape = jax.make_jaxpr(init, return_shape=True)(params)

    def of_leaves(consts: list[Array], *leaves: Array) -> PyTree:
        outputs = jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    consts = [np.asarray(const) for const in closed.consts]
    return jax.jit(of_leaves, out_shardings=shardings)(consts, *jax.tree.leaves(params))


def _of_trained_layers(grads: Grads, state: TrainState, fixed: Params = None) -> PyTree:
    """Arrays with 0, or with those of `fixed`, for layers that are not trained beside trained ones."""
    if not isinstance(state.opt_state, OwnLeavesState):
        return grads
    trained: dict[int, dict[int | None, bool]] = {}
    for at in jax.tree.leaves(state.opt_state.own, is_leaf=layers.is_own_leaf):
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


def _sum_model(layout: Layout, model: Model, shards: Shards, trained_of: TrainedOf | None) -> SumsOf:
    """The sums of a step of a model on the layout's axes."""
    if not isinstance(model, LayeredModel):
        gather = None if layout.zero < 3 else functools.partial(gather_shards, specs=shards.param_specs)
        return sum_over_shards(LossProgram(model, trained_of, gather), shards)
    if layout.stage == 1:
        from jvarlen.parallel.layer_loop import sum_by_layers

        return sum_by_layers(model, shards, remat=layout.remat_in_force, trained_of=trained_of)
    from jvarlen.parallel.pipeline import sum_scheduled

    return sum_scheduled(model, shards, layout, trained_of)


def model_on_axes(model: Model, layout: Layout, params: Params, batch: Batch) -> tuple[Model, str | None]:
    """A model whose functions run inside `shard_map` over a layout's axes, and the axis along which rows are spread."""
    # Rows that are too short are not spread: None. Parameters and the batch are arrays or shapes of the whole; None, if
    # no function of the model is called.
    rows_along = None
    if layout.context > 1 and isinstance(model, LayeredModel) and batch is not None:
        from jvarlen.parallel.context import CONTEXT_AXIS, context_model, row_length

        stacked = params if model.stack is None else jax.eval_shape(model.stack, params)
        seq_length = row_length(model, stacked.ends, batch)
        if seq_length >= layout.context_from:
            model, rows_along = context_model(model, seq_length), CONTEXT_AXIS
    if layout.tensor > 1 and isinstance(model, LayeredModel):
        from jvarlen.parallel.tensor import TENSOR_AXIS, tensor_parallel_model

        model = tensor_parallel_model(
            model, layers.Axes(tensor=TENSOR_AXIS, sequence_parallel=layout.sequence_parallel)
        )
    return model, rows_along
