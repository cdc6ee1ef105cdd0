"""States and steps of layouts that shard state or rows.

ZeRO-1 replaces the update and the reduction by those of shards, ZeRO-2 also accumulation, and ZeRO-3 gathers layers;
stages replace accumulation and reduction. The compiler splits the update, so any Optax optimizer gives the same as
unsharded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jvarlen._common.pytree import has_host_arrays, has_shapes, own_copy, with_sharding
from jvarlen._common.types import (
    Array,
    Batch,
    Extra,
    Grads,
    KeyPath,
    OptState,
    Params,
    PyTree,
    Shapes,
    Shardings,
    Specs,
)
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import axes_in, replicate
from jvarlen.distributed.placement import Placement
from jvarlen.parallel.layers import (
    Axes,
    LayeredModel,
    LayeredParams,
    OwnLeaf,
    OwnLeavesState,
    StepLoss,
    is_own_leaf,
    model_of,
    staged_specs,
    trained_in,
    trained_on_layout,
)
from jvarlen.parallel.layout_checks import check_layout
from jvarlen.parallel.zero import gather_by_layers, shard_specs
from jvarlen.training.losses import LossFn
from jvarlen.training.master_weights import EvalParams
from jvarlen.training.reduction import Shards, sum_over_shards
from jvarlen.training.step import StepFn, are_finite, step_of_sums
from jvarlen.training.step_sums import StepSums
from jvarlen.training.train_state import Metrics, Optimizer, TrainState, new_state
from jvarlen.training.trainable import Trainable, TrainedOf, merge_trained, select_trained, where_trained

__all__ = [
    "average_on_layout", "crop", "init_sharded", "make_sharded_step", "model_on_axes", "optimizer_on", "other_specs_of",
    "pad_to", "padded_shape", "place_slices", "split_specs", "stacked_for", "stacks_layers", "state_specs",
    "sums_on_layout", "unpadded",
]  # fmt: skip

_WHOLE = PartitionSpec()


def init_sharded(
    params: Params,
    optimizer: Optimizer,
    placement: Placement,
    model: LayeredModel | LossFn,
    *,
    extra: Extra = None,
    seed: int | None = None,
    trainable: Trainable = None,
) -> TrainState:
    """`TrainStep.init` on a layout that shards state. No device ever holds the whole optimizer state."""
    layout, mesh = placement.layout, placement.program_mesh
    check_layout(layout, params, model)
    is_abstract = has_shapes(params)
    params = whole = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "shape") else np.asarray(leaf), params)
    is_on_host = not is_abstract and (mesh.is_multi_process or has_host_arrays(params))
    if is_on_host:  # read when they are placed
        params = jax.eval_shape(lambda params: params, params)
    model, params, optimizer, trained_of = stacked_for(layout, model, params, optimizer, mesh, trainable)
    other_specs = other_specs_of(params, model, layout)
    if (specs := split_specs(model, layout)) is not None:
        from jvarlen.parallel.tensor import split_params

        split = functools.partial(split_params, specs=specs, num_devices=layout.tensor)
        params = jax.eval_shape(split, params) if has_shapes(params) else split(params)

    def init(params: Params) -> TrainState:
        state = new_state(_cropped(params, model, layout), optimizer, trained_of=trained_of)
        return _padded(state, layout, other_specs)

    others = functools.partial(new_state, (), optax.identity(), extra=extra, seed=seed)
    shapes = jax.eval_shape(init, params)._replace(params=params)
    shardings = _on(mesh, state_specs(shapes, layout, other_specs))
    if is_abstract:
        whole = jax.tree.map(lambda leaf: with_sharding(NamedSharding(mesh, _WHOLE), leaf), jax.eval_shape(others))
        return whole._replace(
            params=jax.tree.map(with_sharding, shardings.params, params),
            opt_state=jax.tree.map(with_sharding, shardings.opt_state, shapes.opt_state),
        )
    if is_on_host:
        own = shapes.opt_state.own if isinstance(shapes.opt_state, OwnLeavesState) else None
        params = place_slices(whole, own, params, shardings.params)
    else:
        params = jax.tree.map(lambda leaf, sharding: jax.device_put(leaf.copy(), sharding), params, shardings.params)
    opt_state = _run_init(lambda params: init(params).opt_state, shardings.opt_state, params)
    return TrainState(params, opt_state, *replicate(own_copy(others()[2:]), mesh))


def place_slices(params: Params, own: PyTree, on_layout: Shapes, shardings: Shardings) -> PyTree:
    """Whole parameters, as a layout has them: stacked as `own` says (None: not at all), and padded to its shapes."""
    # `on_layout` and `shardings`: shapes and shardings of the layout. A slice is read once, and copied.
    places = [OwnLeaf(place, None) for place in range(len(jax.tree.leaves(params)))]
    if own is not None:
        places = jax.tree.leaves(own, is_leaf=is_own_leaf)
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
        # NumPy arrays stay what they are: `np.asarray` reads what a class of its own would.
        return (array if isinstance(array, np.ndarray) else np.asarray(array))[index]

    if None in of_layers:
        found = np.array(part_of(of_layers[None], index), order="C")
    else:
        found = np.stack([part_of(of_layers[i], index[1:]) for i in range(len(of_layers))[index[0]]])
    sizes = [len(range(*part.indices(size))) for part, size in zip(index, shape, strict=True)]
    if found.shape == (*sizes,):
        return found
    return np.pad(found, [(0, size - there) for size, there in zip(sizes, found.shape, strict=True)])


def _run_init(init: Callable[[Any], Any], shardings: Shardings, params: Params) -> PyTree:
    """An optimizer's first state; its constants, such as planned rates, are arguments of the program."""
    closed, shape = jax.make_jaxpr(init, return_shape=True)(params)

    def of_leaves(consts: list[Array], *leaves: Any) -> PyTree:
        outputs = jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    consts = [np.asarray(const) for const in closed.consts]
    return jax.jit(of_leaves, out_shardings=shardings)(consts, *jax.tree.leaves(params))


def make_sharded_step(
    model: LayeredModel | LossFn | StepLoss,
    optimizer: Optimizer,
    placement: Placement,
    *,
    norms: bool,
    trainable: Trainable = None,
    sum_of: Callable[..., StepSums] | None = None,
) -> StepFn:
    """A train step of states that lie as a layout says; `sum_of` as for `sums_on_layout`."""
    layout, mesh = placement.layout, placement.program_mesh
    optimizer, own = optimizer_on(layout, model_of(model), optimizer, mesh=mesh), _of_stacked(model_of(model), layout)
    trained_of = functools.partial(select_trained, trainable=trainable)
    sums_of = sums_on_layout(model, placement, trained_of=trained_of, sum_of=sum_of)
    return _on_layout(step_of_sums(sums_of, optimizer, norms=norms), own, placement, trained_of)


def average_on_layout(
    average: EvalParams, model: LayeredModel | LossFn, optimizer: Optimizer, placement: Placement, trainable: Trainable
) -> Callable[[TrainState], Params]:
    """The trained parameters to evaluate, from a state that lies as a layout says."""

    def update(params: Params, opt_state: OptState, _: Params) -> tuple[Params, OptState]:
        return average(opt_state, params), opt_state

    layout, mesh = placement.layout, placement.program_mesh
    averaging = optimizer_on(layout, model, optax.GradientTransformation(optimizer.init, update), mesh=mesh)
    trained_of = functools.partial(select_trained, trainable=trainable)

    def of_whole(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        trained = trained_in(state.opt_state, trained_of)(state.params)
        averages = _of_trained_layers(averaging.update(trained, state.opt_state, trained)[0], state, trained)
        return state._replace(params=merge_trained(averages, state.params)), Metrics(0.0, 0.0)

    step = _on_layout(of_whole, _of_stacked(model, layout), placement, trained_of)
    return lambda state: trained_in(state.opt_state, trained_of)(step(state, None)[0].params)


def _on_layout(of_whole: StepFn, model: LayeredModel | LossFn, placement: Placement, trained_of: TrainedOf) -> StepFn:
    """A step of states without padding, for those that lie as a layout says."""
    layout, mesh = placement.layout, placement.program_mesh

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        whole = state.params
        trained = trained_in(state.opt_state, trained_of)(whole)
        state = state._replace(params=merge_trained(_cropped(trained, model, layout), whole))
        other_specs = other_specs_of(state.params, model, layout)
        shardings = _on(mesh, state_specs(state, layout, other_specs))
        following, metrics = of_whole(unpadded(state, layout, other_specs), batch)
        params = _pad_params(following.params, layout, other_specs)
        params = where_trained(trained, params)
        if layout.zero:  # added on shards, then gathered in the type of the parameters: updates may be wider

            def on_shards(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
                wide = _constrain(_pad(leaf, spec, layout.axis_sizes), NamedSharding(mesh, spec))
                return crop(wide, leaf.shape)

            specs = shard_specs(state.params, layout, other_specs=other_specs)
            params = jax.tree.map(on_shards, params, where_trained(trained, specs))
            if layout.zero < 3 and isinstance(params, LayeredParams):
                specs = shard_specs(state.params, layout, padded=False, other_specs=other_specs)
                beside = jax.tree.map(lambda _: _WHOLE, specs) if other_specs is None else other_specs
                into, specs, beside = (where_trained(trained.layers, x.layers) for x in (state.params, specs, beside))
                params = params._replace(layers=gather_by_layers(params.layers, into, specs, beside, mesh))
        following = _padded(following, layout, other_specs)._replace(params=merge_trained(params, whole), key=None)
        following = _constrain(following, shardings._replace(key=None))._replace(key=state.key)  # as it was
        changed = where_trained(trained, following.params), following.extra
        metrics = metrics._replace(params_finite=are_finite(changed))  # as they lie
        return following, metrics

    return train_step


def sums_on_layout(
    model: LayeredModel | LossFn | StepLoss,
    placement: Placement,
    *,
    trained_of: TrainedOf | None,  # of own parameters; None: no gradients
    sum_of: Callable[..., StepSums] | None = None,  # of the model on this layout's axes, a state, a batch, and more
) -> Callable[[TrainState, Batch], StepSums]:
    """The sums of a step, from parameters that lie as the layout says, to gradients in shards."""
    layout, mesh = placement.layout, placement.program_mesh
    own, sum_model = _of_stacked(model_of(model), layout), sum_of or functools.partial(_sum_model, layout)
    if isinstance(model, StepLoss):
        from jvarlen.parallel.step_loss import sum_step_loss

        def sums_with(each: Any, carry: Callable[[Any], Any], trained: TrainedOf | None) -> PyTree:
            def carried(on_axes: Any, *given: PyTree) -> StepSums:
                return sum_model(carry(on_axes), *given)

            return sums_on_layout(each, placement, trained_of=trained, sum_of=carried)

        whole_of = functools.partial(_cropped, model=own, layout=layout)
        return sum_step_loss(model._replace(sums=own), sums_with, trained_of, whole_of)

    def sums_of(state: TrainState, batch: Batch) -> StepSums:
        params, other_specs = state.params, other_specs_of(state.params, own, layout)
        on_axes, rows_along = model_on_axes(own, layout, params, batch)
        state = state._replace(params=_pad_params(params, layout, other_specs))
        param_specs = grad_specs = other_specs
        on_layout = None if trained_of is None else trained_in(state.opt_state, trained_of)
        if layout.zero:
            grad_specs = shard_specs(state.params, layout, padded=layout.zero < 3, other_specs=other_specs)
        if layout.zero == 3:
            param_specs = grad_specs
        if on_layout is None:
            grad_specs = None
        elif grad_specs is not None:
            grad_specs = where_trained(on_layout(params), grad_specs)
        shards = Shards(
            mesh=mesh,
            axis_name=layout.data_axes,
            layout_axes=placement.axes,  # the program's mesh has them by the names of the layout
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
        grads = _constrain(sums.grads, _on(mesh, grad_specs))
        grads = jax.tree.map(lambda grad, param: crop(grad, param.shape), grads, where_trained(grads, params))
        return sums._replace(grads=_of_trained_layers(grads, state))

    return sums_of


def _of_trained_layers(grads: Grads, state: TrainState, fixed: Params = None) -> PyTree:
    """The same with 0, or those of `fixed`, for layers that are not trained, in arrays where others are."""
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
    layout: Layout, model: Any, state: TrainState, batch: Batch, shards: Shards, trained_of: Any
) -> StepSums:
    """The sums of a step of a model on the layout's axes."""
    options: dict[str, Any] = {"trained_of": trained_of}
    if not isinstance(model, LayeredModel):
        return sum_over_shards(model, shards, **options)(state, batch)
    options["remat"] = layout.remat_in_force
    if layout.stage > 1:
        from jvarlen.parallel.pipeline import sum_scheduled

        options |= {"schedule": layout.schedule, "num_virtual": layout.virtual}
        return sum_scheduled(model, shards, **options)(state, batch)
    from jvarlen.parallel.layer_loop import sum_by_layers

    return sum_by_layers(model, shards, **options)(state, batch)


def model_on_axes(
    model: LayeredModel | LossFn, layout: Layout, params: Params, batch: Batch
) -> tuple[LayeredModel | LossFn, str | None]:
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


def stacks_layers(model: LayeredModel | LossFn | None, layout: Layout) -> bool:
    """Whether states of the layout have the arrays that the model's own parameters are stacked to."""
    return isinstance(model, LayeredModel) and model.stack is not None and not layout.is_data_parallel


def _of_stacked(model: Any, layout: Layout) -> PyTree:
    return model._replace(stack=None) if stacks_layers(model, layout) else model


def stacked_for(
    layout: Layout,
    model: LayeredModel | LossFn | None,
    params: Params,
    optimizer: Optimizer,
    mesh: Mesh | None = None,
    trainable: Trainable = None,
) -> tuple[Any, Params, Optimizer, TrainedOf]:
    """A model, its parameters, arrays or shapes, its optimizer, and what is trained, for the arrays of a layout."""
    own = None
    trained_of: TrainedOf = functools.partial(select_trained, trainable=trainable)
    if isinstance(model, LayeredModel) and model.stack is not None and stacks_layers(model, layout):
        from jvarlen.parallel.own_leaves import own_leaves_of

        own = own_leaves_of(params, model.stack, trainable)
        trained_of = trained_on_layout(own)
        params = jax.eval_shape(model.stack, params) if has_shapes(params) else model.stack(params)
    return _of_stacked(model, layout), params, optimizer_on(layout, model, optimizer, own, mesh), trained_of


def optimizer_on(
    layout: Layout,
    model: LayeredModel | LossFn | None,
    optimizer: Optimizer,
    own: PyTree = None,
    mesh: Mesh | None = None,
) -> Optimizer:
    """An optimizer that sees the model's own parameters; `own` tells how they lie, if its state does not."""
    if not stacks_layers(model, layout):
        return optimizer
    from jvarlen.parallel.own_leaves import on_own_leaves

    return on_own_leaves(optimizer, own, mesh=mesh)


def split_specs(model: LayeredModel | LossFn | None, layout: Layout) -> LayeredParams | None:
    """How a model is split over "tensor"; None if that has one device."""
    if layout.tensor == 1:
        return None
    assert isinstance(model, LayeredModel)
    return model.specs


def other_specs_of(params: Params, model: LayeredModel | LossFn | None, layout: Layout) -> PyTree:
    """How parameters lie along "stage" and "tensor"; None if both have one device."""
    specs = split_specs(model, layout)
    if specs is not None:
        from jvarlen.parallel.tensor import partition_specs

        specs = partition_specs(specs)
    if layout.stage == 1:
        return specs
    return staged_specs(jax.tree.map(lambda _: _WHOLE, params) if specs is None else specs)


def state_specs(state: TrainState, layout: Layout, other_specs: Specs = None) -> TrainState:
    """How a state lies over the axes, as a `TrainState` of specs; arrays of the optimizer may be padded."""
    # An array of the optimizer lies as the parameter whose path is the end of its own, such as `['embed']` of
    # `[0].mu['embed']`, and whose shape is its own or the end of it; others are whole.
    whole = jax.tree.map(lambda _: _WHOLE, state)
    params = whole.params if other_specs is None else other_specs
    if layout.zero == 3:
        params = shard_specs(state.params, layout, padded=False, other_specs=other_specs)
    opt_state = _map_arrays(lambda leaf, spec, shape: spec, state, layout, other_specs)
    return whole._replace(params=params, opt_state=opt_state)


def _map_arrays(
    change: Callable[[Any, PartitionSpec, tuple[int, ...]], Any], state: TrainState, layout: Layout, other_specs: Specs
) -> PyTree:
    """The optimizer's state with `change(array, spec, shape)`; shapes are those without padding."""
    lie = other_specs
    if layout.zero:
        lie = shard_specs(state.params, layout, other_specs=other_specs)
    params = {} if lie is None else _by_path(state, jax.tree.leaves(lie))

    # By path, not by Optax's own search: that calls `init` with placeholders, which some optimizers do not take.
    def of_array(path: tuple[PyTree, ...], leaf: Array) -> PyTree:
        found = np.shape(leaf)
        for begin in range(len(path) + 1):  # the longest end first
            for shape, spec in params.get(path[begin:], ()):
                leading = found[: len(found) - len(shape)]  # such as the history of L-BFGS
                if any(spec) and found[len(leading) :] in (shape, padded_shape(shape, spec, layout.axis_sizes)):
                    return change(leaf, PartitionSpec(*(None,) * len(leading), *spec), leading + shape)
        return change(leaf, _WHOLE, found)

    return jax.tree.map_with_path(of_array, state.opt_state)


def _by_path(
    state: TrainState, specs: list[PartitionSpec]
) -> dict[KeyPath, list[tuple[tuple[int, ...], PartitionSpec]]]:
    """Shapes and specs of parameters by the paths that arrays of the optimizer have; of a layer of a stack, both."""
    lie = list(zip(map(np.shape, jax.tree.leaves(state.params)), specs, strict=True))
    if not isinstance(state.opt_state, OwnLeavesState):
        paths = [path for path, _ in jax.tree.leaves_with_path(state.params)]
        return {path: [each] for path, each in zip(paths, lie, strict=True)}
    found = {}
    for path, at in jax.tree.leaves_with_path(state.opt_state.own, is_leaf=is_own_leaf):
        shape, spec = lie[at.place]
        found[path] = [(shape, spec)] + ([] if at.layer is None else [(shape[1:], PartitionSpec(*spec[1:]))])
    return found


def unpadded(state: TrainState, layout: Layout, other_specs: Specs) -> TrainState:
    """A state whose optimizer has arrays in the shapes of their parameters."""
    arrays = _map_arrays(lambda leaf, spec, shape: crop(leaf, shape), state, layout, other_specs)
    return state._replace(opt_state=arrays)


def _padded(state: TrainState, layout: Layout, other_specs: Specs) -> TrainState:
    """The inverse of `unpadded`, with zeros."""
    arrays = _map_arrays(lambda leaf, spec, shape: _pad(leaf, spec, layout.axis_sizes), state, layout, other_specs)
    return state._replace(opt_state=arrays)


def _cropped(params: Params, model: LayeredModel | LossFn, layout: Layout) -> PyTree:
    """Parameters in the shapes that the optimizer sees."""
    specs = split_specs(model, layout)
    if specs is None:
        return params
    from jvarlen.parallel.tensor import merge_params

    return merge_params(params, where_trained(params, specs))


def _pad_params(params: Params, layout: Layout, other_specs: Specs) -> PyTree:
    """The inverse of `_cropped`."""
    if other_specs is None:
        return params
    return jax.tree.map(lambda leaf, spec: _pad(leaf, spec, layout.axis_sizes), params, other_specs)


def padded_shape(shape: tuple[int, ...], spec: PartitionSpec, axis_sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an array whose sharded dimensions are padded to multiples of the sizes of their axes, if known."""
    axes = [*spec, *(None,) * (len(shape) - len(spec))]
    multiples = [math.prod(axis_sizes.get(name, 1) for name in axes_in([axis])) for axis in axes]
    return tuple(-(-size // multiple) * multiple for size, multiple in zip(shape, multiples, strict=True))


def _pad(leaf: jax.Array, spec: PartitionSpec, axis_sizes: Mapping[str, int]) -> jax.Array:
    return pad_to(leaf, padded_shape(np.shape(leaf), spec, axis_sizes))


def pad_to(leaf: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """An array with zeros at the end of dimensions."""
    if shape == np.shape(leaf):
        return leaf
    return jnp.pad(leaf, [(0, to - size) for size, to in zip(leaf.shape, shape, strict=True)])


def crop(leaf: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """An array without what was padded."""
    return leaf if shape == np.shape(leaf) else leaf[tuple(map(slice, shape))]


def _on(mesh: Mesh, specs: Specs) -> PyTree:
    return jax.tree.map(functools.partial(NamedSharding, mesh), specs)


def _constrain(tree: PyTree, shardings: Shardings) -> PyTree:
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, shardings)
