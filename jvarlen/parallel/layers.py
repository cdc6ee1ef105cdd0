"""A model by layers: pure functions of one microbatch, and parameters stacked over the layers. Letters: L layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import describe, differences, leaves_by_name
from jvarlen._common.types import Array, Extra, Key, Microbatch, OptState, Params, PyTree
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import STAGE_AXIS
from jvarlen.training.losses import LossFn
from jvarlen.training.trainable import Trainable, TrainedOf, merge_trained

__all__ = [
    "Axes", "LayeredModel", "LayeredParams", "Model", "OwnLeaf", "OwnLeavesState", "StepLoss", "axes_of", "bind_axes",
    "bounds_of_cut", "check_layer", "is_own_leaf", "layered_loss_fn", "layers_of_stages", "layers_per_part", "map_own",
    "model_of", "needs_key", "num_layers_of", "num_slots_of", "staged_specs", "trainable_of", "trained_if_stacked",
    "trained_in", "trained_on_layout", "unstack_own",
]  # fmt: skip


class Axes(NamedTuple):
    """The mesh axes and the context in which the functions of a model by layers run. `Axes()` is the unsplit model.

    Attributes:
      tensor: the mesh axis that matrix products are split over; None if they are whole.
      context: the mesh axis that positions are split over; None if rows are whole.
      sequence_parallel: whether activations between layers are sharded by position over `tensor`.
      positions: int[S], the place in the row of each position of this shard; None if rows are whole.
      key: typed key[], the random key of this call; None if the state has none.
      layer: int32[] or int, the index of the layer among all L in `layer`; None in `embed` and `loss`.
      extra: that of the state, in a `StepLoss`.
    """

    tensor: str | None = None
    context: str | None = None
    sequence_parallel: bool = False
    positions: Array = None
    key: Key = None
    layer: Array = None
    extra: Extra = None


class LayeredParams(NamedTuple):
    """The parameters of a model by layers.

    Attributes:
      ends: pytree of arrays for `embed` and `loss`. It is one tree, so that both may use the same weights.
      layers: pytree of arrays with leading axis L. Integers and booleans, here and in `ends`, are constants, such as
        the kind of each layer.
    """

    ends: Params
    layers: Params


class LayeredModel(NamedTuple):
    """A model by layers: three pure functions of one microbatch, the batch without its leading axis.

    Attributes:
      embed: `embed(ends, microbatch, axes) -> x`, the input of the first layer; a pytree of arrays.
      layer: `layer(layer_params, x, microbatch, axes) -> x`, with the same shapes and dtypes. Except under sequence
        parallelism, all devices of `axes.tensor` have the same x. In a `StepLoss` it may return `(x, sums)`, and `loss`
        returns what that says.
      loss: `loss(ends, x, microbatch, axes) -> (loss_sum, weight_sum)`, two float scalars, from the output of the last
        layer; and optionally a dict of further sums.
      specs: a `PartitionSpec` or a `TensorSpec` for every leaf of the parameters, without the layer axis, that tells
        what is split along the axis `"tensor"`; None if nothing is.
      stack: `stack(params) -> LayeredParams`, for parameters that have another form; it may only regroup and stack
        arrays. Optimizers and their masks see the parameters as they were before. None for `LayeredParams`.
      by_positions: whether the functions work on some positions of a row, those of `axes.positions`, so that rows can
        be spread over `"context"`: they get whole rows in the microbatch and take their positions, x is `[B, S, …]` for
        S positions, and a position depends on earlier ones only through `attend_over_axis`. The loss sums over these
        positions: the sums of all parts are added, so that a mean over positions would be another number.
      trainable: what `trainable=None` means for this model, as for `make_train_step`. None: all floats.
      needs_key: whether a training step needs random keys, so that `TrainStep.init` asks for a seed.
      num_layers: L, which stages of different sizes need.
    """

    embed: Callable[..., Any]
    layer: Callable[..., Any]
    loss: Callable[..., tuple[PyTree, ...]]
    specs: LayeredParams | None = None
    stack: Callable[[Any], LayeredParams] | None = None
    by_positions: bool = False
    trainable: Trainable = None
    needs_key: bool = False
    num_layers: int | None = None


Model: TypeAlias = LayeredModel | LossFn
"""A model by layers, or a loss function."""


class StepLoss(NamedTuple):
    """A loss that is not a sum over microbatches: of sums over the whole step, or of its samples together.

    `make_train_step`, `make_eval_step` and `fit` take it in place of a loss. Loss and gradient are those of the whole
    step, the same on any layout and for any number of microbatches. A step computes the forward pass twice. In metrics
    the loss of a step has weight 1, so that an evaluation is the mean of its steps.

    Attributes:
      sums: `sums(params, microbatch) -> sums`, or `-> (sums, rows)`, with the parameters `key` and `extra` as for
        `make_train_step`. Two dicts of real arrays: `sums` are added over the microbatches of the step, in float32 at
        least, and `rows`, which are [B, …], become [M · B, …]: row j is row j // M of microbatch j mod M, as in plans,
        and rows without a sample are among them. Rows of several groups come in the order of groups; zeros may follow
        them. Each device holds all rows. Or a `LayeredModel` whose `loss` returns
        this. Its `layer` may return `(x, sums)`, again a dict, with the same shapes in all layers. All its functions
        find `state.extra` in `axes.extra`. On the axis `"context"` sums and rows are added over positions as well.
      loss: `loss(sums) -> float[]`, or with a dict of arrays for `Metrics.sums`. It may have further parameters by
        these names: `rows`; `layer_sums`, the sums of all layers, [L, …]; `extra`, that of the state. A sum that may be
        0 is divided by with `divide_once`: 0 / 0 makes all parameters NaN.
      next_extra: `next_extra(sums, …) -> extra`, with the same parameters as `loss`, returns `state.extra` after the
        step, such as running statistics of all samples; keys as well. None leaves `extra` as it is.

    Example:
      >>> def sums(scale, x):  # two denominators
      ...     return {"errors": jnp.sum((scale * x) ** 2), "numbers": x.size, "sizes": scale**2, "calls": 1}
      >>> def loss(sums):
      ...     return sums["errors"] / sums["numbers"] + sums["sizes"] / sums["calls"]
      >>> from jvarlen import make_train_step
      >>> import optax
      >>> step = make_train_step(StepLoss(sums, loss), optax.sgd(0.5))
      >>> state, metrics = step(step.init(jnp.float32(3)), jnp.array([[1.0, 2.0], [3.0, 4.0]]))
      >>> float(metrics.loss)
      76.5
    """

    sums: Model
    loss: Callable[..., Any]
    next_extra: Callable[..., Any] | None = None


def layered_loss_fn(model: LayeredModel, *, takes_key: bool = True) -> LossFn:
    """The loss of the whole model on one device, by a scan over the layers.

    Args:
      model: the model.
      takes_key: False: `axes.key` is None whatever the state has, as for evaluations without dropout.

    Returns:
      `loss_fn(params, microbatch, key=None) -> (loss_sum, weight_sum)` for `make_train_step`; `params` are
      `LayeredParams`, or what `model.stack` takes. If the state has a key, layer l gets `fold_in(key, l)` of the
      microbatch's key as `axes.key`, `embed` the one of L, and `loss` the one of L + 1. It raises ValueError for
      parameters that are not `LayeredParams` with one leading axis, or a layer whose output differs from its input in
      shape or dtype.

    Example:
      >>> model = LayeredModel(
      ...     lambda ends, microbatch, axes: microbatch,
      ...     lambda own, x, microbatch, axes: own * x,
      ...     lambda ends, x, microbatch, axes: (jnp.sum(x), jnp.float32(x.size)),
      ... )
      >>> loss_sum, weight_sum = layered_loss_fn(model)(LayeredParams((), jnp.array([3.0, 2.0])), jnp.ones(4))
      >>> float(loss_sum), float(weight_sum)
      (24.0, 4.0)
    """

    def loss_fn(params: Params, microbatch: Microbatch, key: Key = None) -> tuple[PyTree, ...]:
        params = params if model.stack is None else model.stack(params)
        num_layers = num_layers_of(params)

        def run_layer(x: PyTree, layer_and_index: tuple[Any, jax.Array]) -> tuple[Any, None]:
            layer_params, index = layer_and_index
            following = model.layer(layer_params, x, microbatch, axes_of(key, index, index))
            check_layer(x, following)
            return following, None

        x = model.embed(params.ends, microbatch, axes_of(key, num_layers))
        x = jax.tree.map(jnp.asarray, x)
        x, _ = jax.lax.scan(run_layer, x, (params.layers, jnp.arange(num_layers, dtype=jnp.int32)))
        return model.loss(params.ends, x, microbatch, axes_of(key, num_layers + 1))

    made = loss_fn if takes_key else lambda params, microbatch: loss_fn(params, microbatch)
    vars(made).update(trainable=model.trainable, needs_key=model.needs_key and takes_key)
    return made


def axes_of(key: Key, index: Array, layer: Array = None) -> Axes:
    """The axes of a layer, of `embed`, with index L, or of `loss`, with L + 1, from the key of the microbatch."""
    return Axes(key=None if key is None else jax.random.fold_in(key, index), layer=layer)


def model_of(model: Model | StepLoss | None) -> Any:
    """The loss function or model by layers whose parameters are trained."""
    return model.sums if isinstance(model, StepLoss) else model


def trainable_of(model: Model | StepLoss | None, trainable: Trainable) -> Trainable:
    """What is trained: `trainable`, or if that is None what the model says."""
    return _said_by(model, "trainable") if trainable is None else trainable


def needs_key(model: Model | StepLoss) -> bool:
    """Whether the model says that a training step needs random keys, and an evaluation none."""
    return bool(_said_by(model, "needs_key"))


def _said_by(model: Model | StepLoss | None, name: str) -> Any:
    """A field of a model by layers, or that attribute of a loss function; None if there is none."""
    own = model_of(model)
    while isinstance(own, functools.partial):
        own = own.func
    return getattr(own, name, None)


def bind_axes(model: LayeredModel, change: Callable[[Axes], Axes]) -> LayeredModel:
    """The model whose functions get changed axes, inside `shard_map`."""

    def bind(call: Callable[..., PyTree]) -> Callable[..., PyTree]:
        return lambda *args: call(*args[:-1], change(args[-1]))

    return model._replace(embed=bind(model.embed), layer=bind(model.layer), loss=bind(model.loss))


def num_layers_of(params: Params) -> int:
    """L; raises ValueError if these are not `LayeredParams` whose layers are stacked along one leading axis."""
    if not isinstance(params, LayeredParams):
        raise UserError(f"a model by layers takes LayeredParams, not a {type(params).__name__}")
    axes = {name: np.shape(leaf)[:1] for name, leaf in leaves_by_name(params.layers).items()}
    if len(set(axes.values())) != 1 or () in axes.values():
        listed = [f"{name or 'layers'} {describe(leaf)}" for name, leaf in leaves_by_name(params.layers).items()]
        raise UserError(
            "parameters of layers must be arrays with one leading axis, that of the layers: "
            f"{list_first(listed) if listed else 'there are none'}"
        )
    return next(iter(axes.values()))[0]


def bounds_of_cut(num_layers: int, num_parts: Array) -> tuple[Array, Array]:
    """The least and the most layers of each of so many parts of a model but the last ones."""
    least = -(-num_layers // num_parts)
    most = np.maximum(least, (num_layers - 1) // np.maximum(num_parts - 2, 1))
    return least, np.where(num_parts > 2, most, num_layers)


def layers_per_part(num_layers: int, layout: Layout) -> int:
    """Layers of each of the S · V parts of a model but the last ones, which have what is left."""
    # As all but the last have as many, parts begin where arrays of equal parts do. No other cut has a smaller largest
    # part, but for what `embed` takes of the first.
    num_parts, virtual = layout.stage * layout.virtual, f" of {layout.virtual} virtual stages"
    stages = f"{layout.stage} stages{virtual if layout.virtual > 1 else ''}"
    least, most = bounds_of_cut(num_layers, num_parts)
    if num_layers < layout.stage or num_layers <= least * (num_parts - layout.stage):
        raise UserError(f"{num_layers} layers do not make {stages}: each has at least one, and some have {least}")
    if layout.layers and not least <= layout.layers <= most:
        raise UserError(
            f"layers{layout.layers} of the layout {layout} does not cut {num_layers} layers into {stages}, the last of "
            f"which has what is left: take {least} to {most}"
        )
    return layout.layers or least


def layers_of_stages(num_layers: int, layout: Layout) -> list[int]:
    """How many layers each stage has."""
    size = layers_per_part(num_layers, layout)
    left = num_layers - size * np.arange(layout.stage * layout.virtual)
    return np.clip(left, 0, size).reshape(layout.virtual, layout.stage).sum(axis=0).tolist()


def num_slots_of(model: Model | None, layout: Layout) -> int | None:
    """How many layers the arrays of a layout have room for, if that is not L."""
    if layout.stage == 1 or not isinstance(model, LayeredModel) or model.num_layers is None:
        return None
    num_slots = layers_per_part(model.num_layers, layout) * layout.stage * layout.virtual
    return None if num_slots == model.num_layers else num_slots


def staged_specs(specs: LayeredParams) -> LayeredParams:
    """The same specs, with the layers along `"stage"`."""
    layers = jax.tree.map(lambda spec: PartitionSpec(STAGE_AXIS, *spec[1:]), specs.layers)
    return specs._replace(layers=layers)


def check_layer(given: PyTree, returned: PyTree) -> None:
    """Raises ValueError if a layer returns other shapes or dtypes than it takes."""
    if differing := differences(given, returned):
        listed = list_first((f"{name or 'x'}: {change}" for name, change in differing.items()), "; ")
        raise UserError(f"a layer must return x of the shapes and dtypes that it takes: {listed}")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class OwnLeaf:
    """Where a layout has a parameter of the model; a node without leaves."""

    place: int  # which of the arrays of the layout
    layer: int | None  # which layer of it; None means the whole array
    is_trained: bool = True


class OwnLeavesState(NamedTuple):
    """The state of an optimizer that sees parameters as the model has them, while the layout stacks them."""

    own: PyTree  # a tree like the model's parameters, of `OwnLeaf`
    # Where the optimizer has an array for each layer, they are stacked in the place of the first one, and the other
    # places are empty.
    inner_state: OptState


def unstack_own(stacked: Params, opt_state: OptState) -> PyTree:
    """Parameters as the model has them, from the arrays of a layout that may stack them."""
    if not isinstance(opt_state, OwnLeavesState):
        return stacked
    arrays = jax.tree.leaves(stacked)
    return map_own(lambda at: arrays[at.place] if at.layer is None else arrays[at.place][at.layer], opt_state.own)


def trained_if_stacked(params: Params, stack: Callable[[Any], LayeredParams], trained: Params) -> TrainedOf:
    """Selects stacked arrays with a trained layer."""
    flags = jax.tree.map(lambda leaf: np.zeros((1,) * np.ndim(leaf), bool), params)
    flags = merge_trained(jax.tree.map(lambda leaf: np.ones((1,) * np.ndim(leaf), bool), trained), flags)
    with jax.ensure_compile_time_eval():
        stacked = jax.tree.map(lambda of_layers: bool(np.asarray(of_layers).any()), stack(flags))
    return lambda params: jax.tree.map(lambda is_trained, leaf: leaf if is_trained else None, stacked, params)


def trained_on_layout(own: PyTree) -> TrainedOf:
    """Selects arrays of a layout with a trained layer."""
    trained = {at.place for at in jax.tree.leaves(own, is_leaf=is_own_leaf) if at.is_trained}

    def trained_of(params: Params) -> PyTree:
        leaves, structure = jax.tree.flatten(params)
        return jax.tree.unflatten(structure, [leaf if i in trained else None for i, leaf in enumerate(leaves)])

    return trained_of


def trained_in(opt_state: OptState, trained_of: TrainedOf) -> TrainedOf:
    """Selects the trained parameters of a state, as `trained_of` selects those of the model."""
    return trained_on_layout(opt_state.own) if isinstance(opt_state, OwnLeavesState) else trained_of


def is_own_leaf(node: PyTree) -> bool:
    """Whether a node is an `OwnLeaf`."""
    return isinstance(node, OwnLeaf)


def map_own(change: Callable[[OwnLeaf], Any], own: PyTree) -> PyTree:
    """A tree like the model's parameters, from one of `OwnLeaf`."""
    return jax.tree.map(change, own, is_leaf=is_own_leaf)
