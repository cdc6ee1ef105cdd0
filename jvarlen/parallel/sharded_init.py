"""The first state on a layout that shards state. No device ever holds the whole optimizer state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence

import jax
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import NamedSharding

from jvarlen._common.pytree import copy_arrays, has_host_arrays, has_shapes, with_sharding
from jvarlen._common.types import Array, Extra, OptState, Params, PyTree, Shapes, Shardings
from jvarlen.distributed.mesh import replicate
from jvarlen.distributed.placement import Placement
from jvarlen.parallel.layers import Model, OwnLeaf, OwnLeavesState, is_own_leaf
from jvarlen.parallel.layout_checks import check_layout
from jvarlen.parallel.state_layout import (
    WHOLE,
    StateLayout,
    crop_params,
    other_specs_of,
    shardings_on,
    split_vocabularies,
    stacked_for,
)
from jvarlen.training.train_state import Optimizer, TrainState, new_state
from jvarlen.training.trainable import Trainable

__all__ = ["init_sharded"]


def init_sharded(
    params: Params,
    optimizer: Optimizer,
    placement: Placement,
    model: Model,
    extra: Extra,
    seed: int | None,
    trainable: Trainable,
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
    states = StateLayout(layout, other_specs_of(params, model, layout))
    params = split_vocabularies(params, model, layout)

    def init(params: Params) -> TrainState:
        state = new_state(crop_params(params, model, layout), optimizer, trained_of=trained_of)
        return states.pad(state)

    others = functools.partial(new_state, (), optax.identity(), extra=extra, seed=seed)
    shapes = jax.eval_shape(init, params)._replace(params=params)
    shardings = shardings_on(mesh, states.specs(shapes))
    if is_abstract:
        whole = jax.tree.map(lambda leaf: with_sharding(NamedSharding(mesh, WHOLE), leaf), jax.eval_shape(others))
        return whole._replace(
            params=jax.tree.map(with_sharding, shardings.params, params),
            opt_state=jax.tree.map(with_sharding, shardings.opt_state, shapes.opt_state),
        )
    if is_on_host:
        own = shapes.opt_state.own if isinstance(shapes.opt_state, OwnLeavesState) else None
        params = _place_slices(whole, own, params, shardings.params)
    else:
        params = jax.tree.map(lambda leaf, sharding: jax.device_put(leaf.copy(), sharding), params, shardings.params)
    opt_state = _run_init(lambda params: init(params).opt_state, shardings.opt_state, params)
    return TrainState(params, opt_state, *replicate(copy_arrays(others()[2:]), mesh))


def _place_slices(params: Params, own: PyTree, on_layout: Shapes, shardings: Shardings) -> PyTree:
    """Whole parameters in the form of a layout: stacked as `own` says (None: not at all), and padded to its shapes."""
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
        # A subclass of NumPy arrays may read only the slices that it is asked for; `np.asarray` could read more.
        return (array if isinstance(array, np.ndarray) else np.asarray(array))[index]

    if None in of_layers:
        found = np.array(part_of(of_layers[None], index), order="C")
    else:
        found = np.stack([part_of(of_layers[i], index[1:]) for i in range(len(of_layers))[index[0]]])
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
