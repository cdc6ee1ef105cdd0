"""The sums of a step with a `StepLoss`, on any layout.

It takes two passes of what it takes for any other loss: one for the sums, without gradients, and one for the
gradient of Σ ⟨gradient of the loss, sums of a microbatch⟩. Letters: L layers, M microbatches of a step, B rows of each.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import check_arrays, describe, have_same_containers, leaves_by_name
from jvarlen._common.types import Array, Batch, Extra, Grads, Params, PyTree, Shapes, Sums
from jvarlen.batches.batches import count_tokens
from jvarlen.parallel.layers import Axes, LayeredModel, Model, StepLoss, axes_of, check_layer, num_layers_of
from jvarlen.training.losses import bind_loss, check_extra, check_real, takes_argument
from jvarlen.training.step_sums import NextExtra, StepSums, SumsFn, field_of, first_of, microbatches_of, split_step
from jvarlen.training.train_state import MicrobatchKeys, TrainState
from jvarlen.training.trainable import TrainedOf

__all__ = ["model_to_estimate", "sum_step_loss"]


# The sums of a step with an ordinary model, whose layers hand on their sums once the function has changed it.
SumsMaker: TypeAlias = Callable[[Model, Callable[[Model], Model], TrainedOf | None], SumsFn]


class _Given(NamedTuple):
    """A microbatch and what a pass needs beside it; for a step, all with a leading axis M."""

    batch: Batch
    index: Array  # int32[], which microbatch of the step it is
    extra: Extra  # for models by layers
    gradients: Grads = None  # of the loss for the values; None in the pass that computes these

    @property
    def num_tokens(self) -> PyTree:
        """The number of tokens, as a step counts those of a batch."""
        counted = field_of(self.batch, "num_tokens")
        return count_tokens(self.batch) if counted is None else counted


def sum_step_loss(
    step_loss: StepLoss,
    sum_of: SumsMaker,
    trained_of: TrainedOf | None,  # None: no gradients
    whole_of: Callable[[Params], Params] = lambda params: params,
) -> SumsFn:
    """The sums of a step with such a loss, whose weight is 1; `whole_of` makes parameters those of the whole model."""
    # `sum_of(model, carry, trained_of)` are those of an ordinary model, of which `carry`, on the axes of the layout,
    # makes one whose layers hand on their sums.
    model = step_loss.sums

    def sums_of(state: TrainState, batch: Batch) -> StepSums:
        num_microbatches = microbatches_of(batch)

        def repeat(tree: PyTree) -> PyTree:
            return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_microbatches, *leaf.shape)), tree)

        extra = repeat(state.extra) if isinstance(model, LayeredModel) else None
        given = _Given(batch, jnp.arange(num_microbatches, dtype=jnp.int32), extra)
        one = functools.partial(_values_of_one, model, whole_of)
        shapes = jax.eval_shape(one, state._replace(opt_state=None), given)
        carry = functools.partial(_carry_sums, shapes=shapes.get("layer_sums"))
        values_of = _finish_with(model, functools.partial(_values, num_microbatches=num_microbatches))
        first = sum_of(values_of, carry, None)(state, given)

        def loss_of(values: dict[str, Sums]) -> tuple[jax.Array, Sums]:
            values = _of_step(values, shapes)
            loss, metrics = _check_loss(_call(step_loss.loss, values, state.extra), first.loss_sum.dtype)
            return loss, (metrics, values)

        if trained_of is None:
            loss, (metrics, _) = loss_of(dict(first.sums))
            return first._replace(loss_sum=loss, weight_sum=jnp.ones_like(loss), sums=metrics, extra=())
        (loss, (metrics, values)), gradients = jax.value_and_grad(loss_of, has_aux=True)(dict(first.sums))
        gradients = {name: each if name == "rows" else repeat(each) for name, each in gradients.items()}
        product_of = _finish_with(model, _inner_product)
        second = sum_of(product_of, carry, trained_of)(state, given._replace(gradients=gradients))
        sums = first._replace(loss_sum=loss, weight_sum=jnp.ones_like(loss), sums=metrics, extra=(), grads=second.grads)
        if step_loss.next_extra is None:
            return sums
        following = check_extra("next_extra", _call(step_loss.next_extra, values, state.extra), state.extra)
        return sums._replace(extra=NextExtra(following))

    return sums_of


def model_to_estimate(model: Any) -> PyTree:
    """An ordinary model that computes of a microbatch what the pass for gradients does."""
    if not isinstance(model, StepLoss):
        return model

    def add_up(values: dict[str, Sums], _: _Given) -> tuple[PyTree, ...]:
        return _product(values, jax.tree.map(lambda leaf: jnp.ones((), _wide(leaf)), values)), 1.0, {}

    own, each = model.sums, _finish_with(model.sums, add_up)
    if not isinstance(own, LayeredModel):
        return functools.wraps(own)(lambda params, batch, **others: each(params, _Given(batch, 0, None), **others))

    def layer(layer_params: Params, x: PyTree, batch: Batch, axes: Axes) -> PyTree:
        return _split_layer(x, own.layer(layer_params, x, batch, axes))[0]

    def loss(ends: Params, x: PyTree, batch: Batch, axes: Axes) -> PyTree:
        return each.loss(ends, x, _Given(batch, 0, axes.extra), axes)

    return own._replace(layer=layer, loss=loss)


def _finish_with(model: Model, finish: Callable[[dict[str, Sums], _Given], Any]) -> PyTree:
    """The model of one pass, which takes `_Given` and returns what `finish` makes of a microbatch's sums and rows."""
    if isinstance(model, LayeredModel):

        def unwrap(call: Callable[..., PyTree]) -> Callable[..., PyTree]:
            def run(*args: PyTree) -> PyTree:
                *others, given, axes = args
                return call(*others, given.batch, axes._replace(extra=given.extra))

            return run

        def loss(ends: Params, x: PyTree, given: _Given, axes: Axes) -> PyTree:
            return finish(_check_outputs(unwrap(model.loss)(ends, x, given, axes), "loss", given.batch), given)

        return model._replace(embed=unwrap(model.embed), layer=unwrap(model.layer), loss=loss)

    @functools.wraps(model)
    def loss_fn(params: Params, given: _Given, **others: PyTree) -> tuple[PyTree, ...]:
        values = _check_outputs(model(params, given.batch, **others), getattr(model, "__name__", "sums"), given.batch)
        return (*finish(values, given), *([others["extra"]] if "extra" in others else []))

    return loss_fn


def _values(values: dict[str, Sums], given: _Given, num_microbatches: int) -> tuple[PyTree, ...]:
    """What a microbatch adds to the sums of the step, and to its rows, which are 0 outside the microbatch."""

    def place(leaf: jax.Array) -> jax.Array:
        leaf = _in_parts(leaf)
        return _place(jnp.zeros((num_microbatches, *leaf.shape), leaf.dtype), leaf, given.index)

    placed = {**values, "rows": jax.tree.map(place, values["rows"])}
    return jnp.float32(0), 1.0, placed


def _inner_product(values: dict[str, Sums], given: _Given) -> tuple[PyTree, ...]:
    """A function whose gradient is the microbatch's share of the gradient."""
    return _product(values, {name: given.gradients[name] for name in values}), 1.0, {}


def _place(of_all: jax.Array, leaf: jax.Array, index: Array) -> jax.Array:
    return of_all.at[index].set(leaf.astype(of_all.dtype))


def _product(values: PyTree, gradients: Grads) -> PyTree:
    pairs = zip(jax.tree.leaves(values), jax.tree.leaves(gradients), strict=True)
    products = [jnp.sum(leaf.astype(grad.dtype) * grad) for leaf, grad in pairs if _is_float(leaf)]
    return functools.reduce(operator.add, products or [jnp.float32(0)])


def _carry_sums(on_axes: Any, shapes: Shapes) -> PyTree:
    """A model that passes the sums of its layers, [L, …], or their share of the derivative, on with x."""
    if shapes is None:
        return on_axes

    def embed(ends: Params, given: _Given, axes: Axes) -> PyTree:
        x, gradients = on_axes.embed(ends, given, axes), given.gradients
        if gradients is not None:
            return x, jnp.zeros((), _wide(gradients))
        return x, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def layer(own: PyTree, x_and_carried: PyTree, given: _Given, axes: Axes) -> PyTree:
        x, carried = x_and_carried
        following, sums = _split_layer(x, on_axes.layer(own, x, given, axes))
        check_layer(x, following)
        one, other = ({name: leaf.shape for name, leaf in leaves_by_name(each).items()} for each in (sums, shapes))
        if one != {name: shape[1:] for name, shape in other.items()}:
            raise UserError(f"layers must return the same sums, and in every call: now {one}, before {other}")
        if given.gradients is None:
            place = functools.partial(_place, index=axes.layer)
            return following, jax.tree.map(place, carried, sums)
        gradients = jax.tree.map(lambda leaf: leaf[axes.layer], given.gradients["layer_sums"])
        return following, carried + _product(sums, gradients)

    def loss(ends: Params, x_and_carried: PyTree, given: _Given, axes: Axes) -> tuple[PyTree, ...]:
        x, carried = x_and_carried
        loss_sum, weight_sum, sums = on_axes.loss(ends, x, given, axes)
        if given.gradients is None:
            return loss_sum, weight_sum, sums | {"layer_sums": carried}
        return loss_sum + carried, weight_sum, sums

    return on_axes._replace(embed=embed, layer=layer, loss=loss)


def _values_of_one(
    model: Model, whole_of: Callable[[Params], Params], state: TrainState, given: _Given
) -> dict[str, Sums]:
    """The sums and rows of a microbatch, and something like the sums of all layers, by name."""
    microbatch, key = first_of(split_step(state, given))
    key = key.key if isinstance(key, MicrobatchKeys) else key
    params = whole_of(state.params)
    if not isinstance(model, LayeredModel):
        loss_fn = _finish_with(model, lambda values, _: (0.0, 1.0, values))
        return {**bind_loss(loss_fn, state)(params, microbatch, key)[1].sums}
    each = _finish_with(model, lambda values, _: values)
    params = params if model.stack is None else model.stack(params)
    num_layers = num_layers_of(params)
    x = jax.tree.map(jnp.asarray, each.embed(params.ends, microbatch, axes_of(key, num_layers)))
    own = jax.tree.map(lambda leaf: leaf[0], params.layers)
    _, sums = _split_layer(x, each.layer(own, x, microbatch, axes_of(key, jnp.int32(0), jnp.int32(0))))
    found = each.loss(params.ends, x, microbatch, axes_of(key, num_layers + 1))
    if sums:
        found["layer_sums"] = jax.tree.map(lambda leaf: jnp.zeros((num_layers, *leaf.shape), _wide(leaf)), sums)
    return found


def _split_layer(x: PyTree, returned: PyTree) -> tuple[Any, Any]:
    """The output of a layer, and its sums; None if it returns none."""
    if isinstance(returned, tuple) and len(returned) == 2 and not have_same_containers(x, returned):
        return returned[0], _arrays(returned[1], "a layer", "x or (x, sums)")
    return returned, None


def _check_outputs(returned: PyTree, name: str, batch: Batch) -> dict[str, Sums]:
    """The sums and rows of a microbatch."""
    sums, rows = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    sums, rows = (_arrays(each, name, "sums or (sums, rows)") for each in (sums, rows))
    num_rows = {leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.ndim}
    others = {at: leaf for at, leaf in leaves_by_name(rows).items() if not num_rows & {*leaf.shape[:1]}}
    if wrong := [f"{at} {describe(leaf)}" for at, leaf in others.items()]:
        raise UserError(f"rows of {name} must begin with the axis of the microbatch's rows, not {list_first(wrong)}")
    return {"sums": sums, "rows": rows}


def _arrays(given: PyTree, name: str, wanted: str) -> PyTree:
    if not isinstance(given, Mapping):
        raise UserError(f"{name} of a StepLoss must return {wanted}, dicts of arrays, not a {type(given).__name__}")
    check_arrays(given, f"what {name} of a StepLoss returns")
    arrays = jax.tree.map(jnp.asarray, dict(given))
    check_real(f"{name} of a StepLoss", arrays)
    return arrays


def _call(function: Callable[..., Any], values: dict[str, Sums], extra: Extra) -> PyTree:
    offered = {"rows": values["rows"], "layer_sums": values.get("layer_sums"), "extra": extra}
    return function(values["sums"], **{name: each for name, each in offered.items() if takes_argument(function, name)})


def _check_loss(returned: PyTree, dtype: Any) -> tuple[jax.Array, Sums]:
    """The loss and the sums for metrics."""
    loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    is_float = isinstance(loss, float) or _is_float(loss)
    if np.shape(loss) or not is_float or not isinstance(metrics, Mapping):
        raise UserError("the loss of a StepLoss must return a float scalar, or that and a dict of arrays for metrics")
    check_real("the loss of a StepLoss", metrics)
    dtype = np.promote_types(dtype, _wide((loss, metrics)))
    return jnp.asarray(loss, dtype), jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), dict(metrics))


def _of_step(values: dict[str, Sums], shapes: dict[str, Shapes]) -> dict[str, Sums]:
    """The sums, and the rows of the step in the order of the plan, in the types of the loss."""

    def in_order(leaf: jax.Array, shape: Any) -> jax.Array:
        leaf = jnp.swapaxes(leaf, 0, 1).reshape(-1, *leaf.shape[2:])
        if not _is_large(shape.dtype):
            return leaf.astype(shape.dtype)
        parts = [leaf[..., k].astype(shape.dtype) << 16 * k for k in range(leaf.shape[-1])]
        return functools.reduce(operator.add, parts)

    return {**values, "rows": jax.tree.map(in_order, values["rows"], shapes["rows"])}


def _in_parts(leaf: jax.Array) -> jax.Array:
    """Large integers as parts of 16 bits, [..., P], for they are added as floats."""
    if not _is_large(leaf.dtype):
        return leaf
    return jnp.stack([(leaf >> shift) & 0xFFFF for shift in range(0, 8 * leaf.dtype.itemsize, 16)], -1)


def _is_large(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize > 2


def _is_float(leaf: Array) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def _wide(tree: PyTree) -> PyTree:
    """The widest type of the floats of a tree, and of float32."""
    return np.result_type(np.float32, *(leaf.dtype for leaf in jax.tree.leaves(tree) if _is_float(leaf)))
