"""The form of a state that all layouts share and checkpoints hold: that of one device."""

# On a layout, the arrays of the layers may be stacked, and vocabularies, layers and shards be padded. Each array of one
# device is then one of the layout, or one layer of it. Arrays of the optimizer follow their parameters.

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import differences
from jvarlen._common.types import Array, Params, PyTree
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import auto_axes
from jvarlen.distributed.placement import Placement
from jvarlen.parallel.layers import Model, OwnLeaf, is_own_leaf
from jvarlen.parallel.own_leaves import own_leaves_of, places_in
from jvarlen.parallel.state_layout import crop, extend_params, pad_to, stack_of
from jvarlen.parallel.zero import MIN_SHARDED
from jvarlen.training.train_state import Optimizer, TrainState, new_state
from jvarlen.training.trainable import Trainable, select_trained

__all__ = ["PortableForm", "portable_form", "portable_params"]


def portable_form(
    state: TrainState,
    model: Model | None,
    optimizer: Optimizer,
    *,
    placement: Placement,
    params: Params,
    made: TrainState,
    trainable: Trainable = None,
) -> PortableForm:
    """The form of one device for the states of a layout, from what their step has.

    `params` are the shapes of one device, and `made` the state that the step makes of them.
    Raises ValueError where the state is not of these, or `stack` does more than stack arrays. Arrays are listed.
    """
    _check_state(state, made)
    sources, structure = _sources_of_state(params, optimizer, placement.layout, model, trainable)
    return PortableForm(state, sources, structure, placement.program_mesh)


def portable_params(params: Params, whole: PyTree, *, layout: Layout, model: Model | None) -> PyTree:
    """The parameters of one device, in the shapes of `whole`, from whole ones of a state of a layout; may be traced."""
    sources = _sources_of_params(whole, layout, model)[0]
    return jax.tree.unflatten(jax.tree.structure(whole), _take(jax.tree.leaves(params), sources))


class PortableForm:
    """How the state of a layout becomes that of one device, and back, on the devices."""

    def __init__(self, state: TrainState, sources: Sequence[_Source], structure: jax.tree_util.PyTreeDef, mesh: Mesh):
        leaves = jax.tree.leaves(state[:2])
        self._sources, self._structure, self._mesh = sources, structure, auto_axes(mesh)
        self._changed = [source for source in sources if source.is_changed]
        first = {source.leaf: source for source in reversed(self._changed)}
        self._routes = {leaf: _route(first[leaf], leaves[leaf]) for leaf in sorted(first)}
        others = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state[2:])
        self.shapes = self._state([jax.ShapeDtypeStruct(s.shape, leaves[s.leaf].dtype) for s in sources], others)
        num_params = len(jax.tree.leaves(state.params))
        parts = [[s for s in self._changed if (s.leaf < num_params) == of_params] for of_params in (True, False)]
        self._takes = [self._compile_take(part, leaves) for part in parts if part]

    def save(self, state: TrainState) -> TrainState:
        """The state of one device; arrays that are the same are shared."""
        leaves = jax.tree.leaves(state[:2])
        takes = [(take, there) for take, there in self._takes if there[-1] < len(leaves)]
        made = iter([array for take, there in takes for array in take([leaves[leaf] for leaf in there])])
        saved = [next(made) if s.is_changed else leaves[s.leaf] for s in self._sources if s.leaf < len(leaves)]
        if state.opt_state is None:
            return state._replace(params=jax.tree.unflatten(self._structure.children()[0], saved))
        return self._state(saved, state[2:])

    def like(self, state: TrainState) -> TrainState:
        """The result of `save`, with `jax.ShapeDtypeStruct` in place of arrays that `save` makes."""
        leaves = jax.tree.leaves(state[:2])

        def like(source: _Source) -> PyTree:
            if not source.is_changed:
                return leaves[source.leaf]
            return jax.ShapeDtypeStruct(source.shape, leaves[source.leaf].dtype, sharding=self._sharding_of(source))

        return self._state(map(like, self._sources), state[2:])

    def restore(self, saved: TrainState, state: TrainState) -> TrainState:
        """The inverse of `save`, in the shapes and shardings of `state`."""
        leaves, structure = jax.tree.flatten(state[:2])
        shapes = {leaf: leaves[leaf].shape for leaf in self._routes}
        shardings = [leaves[leaf].sharding for leaf in self._routes]
        parts = dict(zip(self._sources, jax.tree.leaves(saved[:2]), strict=True))

        def join(parts: list[jax.Array]) -> list[jax.Array]:
            joined = _join(parts, self._changed)
            return [self._send(pad_to(joined[i], shapes[i]), reversed(route)) for i, route in self._routes.items()]

        for source, part in parts.items():
            leaves[source.leaf] = part
        if self._changed:
            made = jax.jit(join, out_shardings=shardings)([parts[source] for source in self._changed])
            for leaf, array in zip(self._routes, made, strict=True):
                leaves[leaf] = array
        return TrainState._make((*jax.tree.unflatten(structure, leaves), *saved[2:]))

    def _state(self, leaves: Iterable[Array], others: Sequence[PyTree]) -> TrainState:
        return TrainState._make((*jax.tree.unflatten(self._structure, leaves), *others))

    def _sharding_of(self, source: _Source) -> NamedSharding:
        axes = list(self._routes[source.leaf][-1])
        if source.layer is not None:
            axes.pop(source.axis)
        return NamedSharding(self._mesh, PartitionSpec(*axes))

    def _send(self, array: jax.Array, route: Iterable[PartitionSpec]) -> jax.Array:
        for spec in route:
            array = jax.lax.with_sharding_constraint(array, NamedSharding(self._mesh, spec))
        return array

    def _compile_take(
        self, sources: Sequence[_Source], leaves: Sequence[Array]
    ) -> tuple[Callable[[list[Array]], list[Array]], list[int]]:
        """Compiles `take` ahead, because runs save when nothing may compile any more; also returns its leaves."""
        there = sorted({source.leaf for source in sources})

        def take(given: list[jax.Array]) -> list[jax.Array]:
            arrived = {leaf: self._send(array, self._routes[leaf]) for leaf, array in zip(there, given, strict=True)}
            return _take(arrived, sources)

        out_shardings = [self._sharding_of(source) for source in sources]
        return jax.jit(take, out_shardings=out_shardings).lower([leaves[leaf] for leaf in there]).compile(), there


class _Source(NamedTuple):
    """The place of an array of one device among those of a layout."""

    leaf: int  # the place of the array of the layout among all leaves
    shape: tuple[int, ...]  # on one device
    shape_there: tuple[int, ...]  # of the array of the layout, without padding
    layer: int | None = None  # which layer of it; None if it is not stacked
    axis: int = 0  # of the layers
    is_padded: bool = False  # whether zeros extend it, as a vocabulary

    @property
    def is_changed(self) -> bool:
        """Whether the array is not that of the layout, apart from zeros that pad shards."""
        return self.layer is not None or self.is_padded


def _check_state(state: TrainState, made: TrainState) -> None:
    """Raises ValueError that lists the arrays of a state which are not those that its step makes."""
    if differing := differences(*(TrainState(*each[:2]) for each in (state, made))):
        listed = (f"{name}: {change}" for name, change in differing.items())
        raise UserError(
            "the state is not of these params and the optimizer, layout, model and trainable of this train step, whose "
            f"state has other arrays: {list_first(listed, '; ')}"
        )


def _sources_of_state(
    params: Params, optimizer: Optimizer, layout: Layout, model: Model | None, trainable: Trainable
) -> tuple[list[_Source], jax.tree_util.PyTreeDef]:
    """The sources of parameters and of the arrays of the optimizer, and the structure of both on one device."""
    sources, own, padded = _sources_of_params(params, layout, model)
    trained_of = functools.partial(select_trained, trainable=trainable)
    whole = jax.eval_shape(lambda params: new_state(params, optimizer, trained_of=trained_of), params)[:2]
    paths, at = jax.tree.leaves_with_path(params), jax.tree.leaves(own, is_leaf=is_own_leaf)
    of_params = {path: (at, leaf) for (path, leaf), at in zip(paths, at, strict=True)}
    num_layers = max(source.layer or 0 for source in sources) + 1
    num_params = 1 + max(source.leaf for source in sources)
    for leaf, place in zip(jax.tree.leaves(whole[1]), places_in(whole[1], of_params, num_layers), strict=True):
        shape = leaf.shape
        if place.layer is not None:
            shape = (*shape[: place.axis], num_layers, *shape[place.axis :])
        of_layer = place.layer, place.axis
        sources.append(_Source(num_params + place.array, leaf.shape, shape, *of_layer, place.param in padded))
    return sources, jax.tree.structure(whole)


def _sources_of_params(params: Params, layout: Layout, model: Model | None) -> tuple[list[_Source], PyTree, set[int]]:
    """The sources of parameters, also as a tree of `OwnLeaf`, and which arrays of the layout are padded."""
    if (stack := stack_of(model, layout)) is not None:
        own, on_layout = own_leaves_of(params, stack), jax.eval_shape(stack, params)
    else:
        leaves, structure = jax.tree.flatten(params)
        own, on_layout = jax.tree.unflatten(structure, [OwnLeaf(i, None) for i in range(len(leaves))]), params
    there = jax.tree.leaves(on_layout)
    split = jax.eval_shape(lambda params: extend_params(params, model, layout), on_layout)
    padded = {i for i, leaf in enumerate(jax.tree.leaves(split)) if leaf.shape != np.shape(there[i])}
    sources = [
        _Source(at.place, leaf.shape, there[at.place].shape, at.layer, 0, at.place in padded)
        for at, leaf in zip(jax.tree.leaves(own, is_leaf=is_own_leaf), jax.tree.leaves(params), strict=True)
    ]
    return sources, own, padded


def _take(leaves: Mapping[int, Array] | Sequence[Array], sources: Sequence[_Source]) -> list[Array]:
    """The arrays of one device, from those of a layout."""
    taken = []
    for source in sources:
        leaf = leaves[source.leaf]
        if source.is_changed:
            leaf = crop(leaf, source.shape_there)
        if source.layer is not None:
            leaf = jax.lax.index_in_dim(leaf, source.layer, source.axis, keepdims=False)
        taken.append(leaf)
    return taken


def _join(parts: Sequence[Array], sources: Sequence[_Source]) -> dict[int, Array]:
    """The arrays of a layout by their places, without padding, from those of one device."""
    layers: dict[int, dict[int | None, Array]] = {}
    for part, source in zip(parts, sources, strict=True):
        layers.setdefault(source.leaf, {})[source.layer] = part
    axes = {source.leaf: source.axis for source in sources}
    return {
        leaf: of_layers[None]
        if None in of_layers
        else jnp.stack([of_layers[i] for i in range(len(of_layers))], axes[leaf])
        for leaf, of_layers in layers.items()
    }


def _route(source: _Source, leaf: jax.Array | jax.ShapeDtypeStruct) -> list[PartitionSpec]:
    """The way of an array of a layout to where it can be rearranged without communication, spread over all devices."""
    # Axes of the mesh leave, one at a time, dimensions that are stacked or padded, for others that they divide: an
    # all-to-all each. Those along which the array is whole follow. The last spec has an entry a dimension.
    assert isinstance(leaf.sharding, NamedSharding)
    mesh, ndim = leaf.sharding.mesh, leaf.ndim
    spec = [*leaf.sharding.spec, *(None,) * (ndim - len(leaf.sharding.spec))]
    axes: list[list[str]] = [[] if names is None else [names] if isinstance(names, str) else [*names] for names in spec]
    fixed = {dim for dim in range(ndim) if leaf.shape[dim] != source.shape_there[dim]}
    if source.layer is not None:
        fixed.add(source.axis)
    if math.prod(source.shape) < MIN_SHARDED:
        return [PartitionSpec(*(None,) * ndim)]

    def add(name: str) -> None:
        sizes = {dim: leaf.shape[dim] // math.prod(mesh.shape[axis] for axis in axes[dim]) for dim in range(ndim)}
        dims = [dim for dim, size in sizes.items() if dim not in fixed and size % mesh.shape[name] == 0]
        if dims:
            axes[max(dims, key=lambda dim: sizes[dim])].append(name)

    def spec_of() -> PartitionSpec:
        return PartitionSpec(*(tuple(names) or None for names in axes))

    route = []
    for dim in sorted(fixed):
        while axes[dim]:
            add(axes[dim].pop())
            route.append(spec_of())
    for name, size in mesh.shape.items():
        if size > 1 and not any(name in names for names in axes):
            add(name)
    return [*route, spec_of()]
