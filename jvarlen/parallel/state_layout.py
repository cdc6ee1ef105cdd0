"""How a layout arranges states, if it shards state or rows: stacked layers, specs and padding.

A state on such a layout differs from that of one device in three ways. The layers of a model with `stack` are stacked.
Vocabularies that "tensor" splits are extended by zeros, layers that stages do not divide, and arrays of the optimizer
that ZeRO cannot divide evenly. Optimizers see none of it: `unpad` and `crop_params` take the padding off before an
update, `pad` and `pad_params` put it back, and `optimizer_on` shows an optimizer the model's parameters unstacked.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jvarlen._common.pytree import has_shapes, with_sharding
from jvarlen._common.types import Array, KeyPath, OptState, Params, PyTree, Shapes, Shardings, Specs
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import STAGE_AXIS, axes_in
from jvarlen.parallel import layers
from jvarlen.parallel.layers import LayeredModel, LayeredParams, Model, OwnLeavesState
from jvarlen.parallel.zero import shard_specs
from jvarlen.training.train_state import Optimizer, TrainState
from jvarlen.training.trainable import Trainable, TrainedOf, select_trained, where_trained

__all__ = [
    "WHOLE", "StateLayout", "constrain", "crop", "crop_params", "extend_params", "optimizer_on", "other_specs_of",
    "pad_to", "padded_shape", "place_opt_state", "shardings_on", "split_specs", "stack_of", "stacked_for",
    "without_stack",
]  # fmt: skip

WHOLE = PartitionSpec()


def stack_of(model: Model | None, layout: Layout) -> Callable[[Any], LayeredParams] | None:
    """What makes the stacked arrays, if states of the layout hold such in place of the model's parameters."""
    return model.stack if isinstance(model, LayeredModel) and not layout.is_data_parallel else None


def without_stack(model: Any, layout: Layout) -> Any:
    """The model whose functions take the arrays of the layout."""
    return model if stack_of(model, layout) is None else model._replace(stack=None)


def stacked_for(
    layout: Layout,
    model: Model | None,
    params: Params,
    optimizer: Optimizer,
    mesh: Mesh | None = None,
    trainable: Trainable = None,
) -> tuple[Any, Params, Optimizer, TrainedOf]:
    """A model, its parameters, arrays or shapes, its optimizer, and what is trained, for the arrays of a layout."""
    own = None
    trained_of: TrainedOf = functools.partial(select_trained, trainable=trainable)
    if (stack := stack_of(model, layout)) is not None:
        from jvarlen.parallel.own_leaves import own_leaves_of

        own = own_leaves_of(params, stack, trainable)
        trained_of = layers.trained_on_layout(own)
        params = jax.eval_shape(stack, params) if has_shapes(params) else stack(params)
    return without_stack(model, layout), params, optimizer_on(layout, model, optimizer, own, mesh), trained_of


def optimizer_on(
    layout: Layout, model: Model | None, optimizer: Optimizer, own: PyTree = None, mesh: Mesh | None = None
) -> Optimizer:
    """An optimizer that sees parameters as the model has them; `own` places them, if its state does not."""
    if stack_of(model, layout) is None:
        return optimizer
    from jvarlen.parallel.own_leaves import on_own_leaves

    return on_own_leaves(optimizer, own, mesh=mesh)


def split_specs(model: Model | None, layout: Layout) -> LayeredParams | None:
    """How a model is split over "tensor"; None if that has one device."""
    return model.specs if isinstance(model, LayeredModel) and layout.tensor > 1 else None


def extend_params(params: Params, model: Model | None, layout: Layout) -> Params:
    """Parameters, arrays or shapes, with zeros after vocabularies and layers that the axes would not divide."""
    specs, num_slots = split_specs(model, layout), layers.num_slots_of(model, layout)

    def extend(params: Params) -> Params:
        if specs is not None:
            from jvarlen.parallel.tensor import split_params

            params = split_params(params, specs, layout.tensor)
        if num_slots is None:
            return params
        of_layers = jax.tree.map(lambda leaf: pad_to(leaf, (num_slots, *np.shape(leaf)[1:])), params.layers)
        return params._replace(layers=of_layers)

    return jax.eval_shape(extend, params) if has_shapes(params) else extend(params)


def other_specs_of(params: Params, model: Model | None, layout: Layout) -> Specs:
    """Specs of parameters along "stage" and "tensor"; None if both have one device."""
    specs = split_specs(model, layout)
    if specs is not None:
        from jvarlen.parallel.tensor import partition_specs

        specs = partition_specs(specs)
    if layout.stage == 1:
        return specs
    return layers.staged_specs(jax.tree.map(lambda _: WHOLE, params) if specs is None else specs)


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """The specs and the padding of the states of a model on a layout."""

    layout: Layout
    other_specs: Specs  # of the parameters, along "stage" and "tensor"; None: nothing is split there
    num_slots: int | None = None  # layers that arrays have room for, if these are more than the model's

    @classmethod
    def of(cls, params: Params, model: Model | None, layout: Layout) -> StateLayout:
        """That of a model with these parameters."""
        return cls(layout, other_specs_of(params, model, layout), layers.num_slots_of(model, layout))

    @property
    def multiples(self) -> dict[str, int]:
        """What dimensions along each axis are extended to multiples of."""
        sizes = self.layout.axis_sizes
        return sizes if self.num_slots is None else sizes | {STAGE_AXIS: self.num_slots}

    def shard_specs(self, params: Params, *, padded: bool = True) -> Specs:
        """Specs of parameters, or if `padded` of gradients and optimizer state, over all axes."""
        return shard_specs(params, self.layout, padded=padded, other_specs=self.other_specs)

    def specs(self, state: TrainState) -> TrainState:
        """A `TrainState` of specs over the axes; arrays of the optimizer may be padded."""
        # An array of the optimizer is sharded as the parameter whose path ends its path, such as `['embed']` in
        # `[0].mu['embed']`, and whose shape equals or ends its shape; others are whole.
        whole = jax.tree.map(lambda _: WHOLE, state)
        params = whole.params if self.other_specs is None else self.other_specs
        if self.layout.zero == 3:
            params = self.shard_specs(state.params, padded=False)
        return whole._replace(params=params, opt_state=self._map_arrays(lambda leaf, spec, shape: spec, state))

    def unpad(self, state: TrainState) -> TrainState:
        """A state whose optimizer has arrays in the shapes of their parameters."""
        return state._replace(opt_state=self._map_arrays(lambda leaf, spec, shape: crop(leaf, shape), state))

    def pad(self, state: TrainState) -> TrainState:
        """The inverse of `unpad`, with zeros."""
        return state._replace(opt_state=self._map_arrays(lambda leaf, spec, shape: self.pad_array(leaf, spec), state))

    def pad_params(self, params: Params) -> Params:
        """The inverse of `crop_params`."""
        return params if self.other_specs is None else jax.tree.map(self.pad_array, params, self.other_specs)

    def pad_array(self, leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
        """An array whose sharded dimensions zeros extend to multiples of the sizes of their axes."""
        return pad_to(leaf, padded_shape(np.shape(leaf), spec, self.multiples))

    def _map_arrays(
        self, change: Callable[[Array, PartitionSpec, tuple[int, ...]], PyTree], state: TrainState
    ) -> OptState:
        """The optimizer's state with `change(array, spec, shape)`; shapes are those without padding."""
        lie = self.shard_specs(state.params) if self.layout.zero else self.other_specs
        params = {} if lie is None else _by_path(state, jax.tree.leaves(lie))

        # By path, not by Optax's search, which calls `init` with placeholders, which some optimizers do not take.
        def of_array(path: KeyPath, leaf: Array) -> PyTree:
            found = np.shape(leaf)
            for begin in range(len(path) + 1):  # the longest end first
                for shape, spec in params.get(path[begin:], ()):
                    leading = found[: len(found) - len(shape)]  # such as the history of L-BFGS
                    padded = padded_shape(shape, spec, self.multiples)
                    if any(spec) and found[len(leading) :] in (shape, padded):
                        return change(leaf, PartitionSpec(*(None,) * len(leading), *spec), leading + shape)
            return change(leaf, WHOLE, found)

        return jax.tree.map_with_path(of_array, state.opt_state)


def place_opt_state(state: TrainState, shardings: Shardings) -> Shapes:
    """Shapes of the optimizer's state, sharded like the matching parameters; these shardings may be None."""
    (mesh, *_) = [sharding.mesh for sharding in jax.tree.leaves(shardings)]
    specs = jax.tree.map(
        lambda sharding: WHOLE if sharding is None else sharding.spec, shardings, is_leaf=lambda leaf: leaf is None
    )
    specs = StateLayout(Layout(data=1), specs).specs(state).opt_state
    return jax.tree.map(lambda leaf, spec: with_sharding(NamedSharding(mesh, spec), leaf), state.opt_state, specs)


def _by_path(
    state: TrainState, specs: list[PartitionSpec]
) -> dict[KeyPath, list[tuple[tuple[int, ...], PartitionSpec]]]:
    """Shapes and specs of parameters by their paths in the optimizer; layers of a stack also without its axis."""
    lie = list(zip(map(np.shape, jax.tree.leaves(state.params)), specs, strict=True))
    if not isinstance(state.opt_state, OwnLeavesState):
        paths = [path for path, _ in jax.tree.leaves_with_path(state.params)]
        return {path: [each] for path, each in zip(paths, lie, strict=True)}
    found = {}
    for path, at in jax.tree.leaves_with_path(state.opt_state.own, is_leaf=layers.is_own_leaf):
        shape, spec = lie[at.place]
        found[path] = [(shape, spec)] + ([] if at.layer is None else [(shape[1:], PartitionSpec(*spec[1:]))])
    return found


def crop_params(params: Params, model: Model, layout: Layout) -> Params:
    """Parameters in the shapes that the optimizer sees."""
    if (specs := split_specs(model, layout)) is not None:
        from jvarlen.parallel.tensor import merge_params

        params = merge_params(params, where_trained(params, specs))
    if layers.num_slots_of(model, layout) is None:
        return params
    assert isinstance(model, LayeredModel)
    return params._replace(layers=jax.tree.map(lambda leaf: leaf[: model.num_layers], params.layers))


def padded_shape(shape: tuple[int, ...], spec: PartitionSpec, axis_sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an array whose sharded dimensions are padded to multiples of the sizes of their axes, if known."""
    axes = [*spec, *(None,) * (len(shape) - len(spec))]
    multiples = [math.prod(axis_sizes.get(name, 1) for name in axes_in([axis])) for axis in axes]
    return tuple(-(-size // multiple) * multiple for size, multiple in zip(shape, multiples, strict=True))


def pad_to(leaf: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """An array with zeros at the end of dimensions."""
    if shape == np.shape(leaf):
        return leaf
    return jnp.pad(leaf, [(0, to - size) for size, to in zip(leaf.shape, shape, strict=True)])


def crop(leaf: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """An array without what was padded."""
    return leaf if shape == np.shape(leaf) else leaf[tuple(map(slice, shape))]


def shardings_on(mesh: Mesh, specs: Specs) -> Shardings:
    """The shardings over a mesh of these specs."""
    return jax.tree.map(functools.partial(NamedSharding, mesh), specs)


def constrain(tree: PyTree, shardings: Shardings) -> PyTree:
    """The arrays of a traced function, which the compiler is to place so."""
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, shardings)
