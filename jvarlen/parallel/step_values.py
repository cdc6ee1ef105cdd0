"""What a microbatch adds to the sums of a step with a `StepLoss`, in each of the two passes.

Letters: L layers, M microbatches of a group, B rows of each.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import check_arrays, describe, have_same_containers, leaves_by_name
from jvarlen._common.types import Array, Batch, Extra, Grads, Params, PyTree, Shapes, Sums
from jvarlen.batches.batches import count_tokens
from jvarlen.parallel.layers import Axes, LayeredModel, Model, axes_of, check_layer, num_layers_of
from jvarlen.training.losses import bind_loss, check_real
from jvarlen.training.step_sums import field_of, first_of, microbatches_of, split_step
from jvarlen.training.train_state import MicrobatchKeys, TrainState

__all__ = [
    "Given", "carry_sums", "finish_with", "inner_product", "is_float", "is_large", "product_of", "repeat",
    "split_layer", "values_of_one", "values_to_add", "wide", "with_gradients",
]  # fmt: skip


class Given(NamedTuple):
    """A microbatch and what a pass needs beside it; for a step, all with a leading axis M."""

    batch: Batch
    row: Array  # int32[], where its first row is among those of the step
    extra: Extra  # for models by layers
    gradients: Grads = None  # of the loss for the values; None in the pass that computes these

    @property
    def num_tokens(self) -> PyTree:
        """The number of tokens, as a step counts those of a batch."""
        counted = field_of(self.batch, "num_tokens")
        return count_tokens(self.batch) if counted is None else counted


def finish_with(model: Model, finish: Callable[[dict[str, Sums], Given], Any]) -> PyTree:
    """The model of one pass, which takes `Given` and returns what `finish` makes of a microbatch's sums and rows."""
    if isinstance(model, LayeredModel):

        def unwrap(call: Callable[..., PyTree]) -> Callable[..., PyTree]:
            def run(*args: PyTree) -> PyTree:
                *others, given, axes = args
                return call(*others, given.batch, axes._replace(extra=given.extra))

            return run

        def loss(ends: Params, x: PyTree, given: Given, axes: Axes) -> PyTree:
            return finish(_check_outputs(unwrap(model.loss)(ends, x, given, axes), "loss", given.batch), given)

        return model._replace(embed=unwrap(model.embed), layer=unwrap(model.layer), loss=loss)

    @functools.wraps(model)
    def loss_fn(params: Params, given: Given, **others: PyTree) -> tuple[PyTree, ...]:
        values = _check_outputs(model(params, given.batch, **others), getattr(model, "__name__", "sums"), given.batch)
        return (*finish(values, given), *([others["extra"]] if "extra" in others else []))

    return loss_fn


def repeat(tree: PyTree, num_microbatches: int) -> PyTree:
    """A tree with a leading axis M."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_microbatches, *leaf.shape)), tree)


def values_to_add(values: dict[str, Sums], given: Given, num_microbatches: int, most: int | None) -> tuple[PyTree, ...]:
    """What a microbatch adds to the sums of the step, and to its rows, which are 0 outside the microbatch."""

    def place(leaf: jax.Array) -> jax.Array:
        leaf = _in_parts(leaf)
        num_rows = num_microbatches * len(leaf) if most is None else most
        places = given.row + num_microbatches * np.arange(len(leaf), dtype=np.int32)
        return jnp.zeros((num_rows, *leaf.shape[1:]), leaf.dtype).at[places].set(leaf)

    placed = {**values, "rows": jax.tree.map(place, values["rows"])}
    return jnp.float32(0), 1.0, placed


def with_gradients(given: Given, gradients: Grads, shapes: dict[str, Shapes], num_rows: Array = None) -> Given:
    """What the second pass takes of a group, of whose rows the first is this one."""
    num_microbatches = microbatches_of(given)

    def of_rows(leaf: jax.Array, shape: Any) -> jax.Array:
        of_group = num_microbatches * shape.shape[0]
        leaf = leaf if num_rows is None else jax.lax.dynamic_slice_in_dim(leaf, num_rows, of_group)
        return leaf[:of_group].reshape(-1, num_microbatches, *leaf.shape[1:]).swapaxes(0, 1)

    rows = jax.tree.map(of_rows, gradients["rows"], shapes["rows"])
    return given._replace(gradients=repeat({**gradients, "rows": None}, num_microbatches) | {"rows": rows})


def inner_product(values: dict[str, Sums], given: Given) -> tuple[PyTree, ...]:
    """A function whose gradient is the microbatch's share of the gradient."""
    return product_of(values, {name: given.gradients[name] for name in values}), 1.0, {}


def _place(of_all: jax.Array, leaf: jax.Array, index: Array) -> jax.Array:
    return of_all.at[index].set(leaf.astype(of_all.dtype))


def product_of(values: PyTree, gradients: Grads) -> PyTree:
    """The sum of the products of floats and their gradients."""
    pairs = zip(jax.tree.leaves(values), jax.tree.leaves(gradients), strict=True)
    products = [jnp.sum(leaf.astype(grad.dtype) * grad) for leaf, grad in pairs if is_float(leaf)]
    return functools.reduce(operator.add, products or [jnp.float32(0)])


def carry_sums(on_axes: Any, shapes: Shapes) -> PyTree:
    """A model that passes the sums of its layers, [L, …], or their share of the derivative, on with x."""
    if shapes is None:
        return on_axes

    def embed(ends: Params, given: Given, axes: Axes) -> PyTree:
        x, gradients = on_axes.embed(ends, given, axes), given.gradients
        if gradients is not None:
            return x, jnp.zeros((), wide(gradients))
        return x, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def layer(own: PyTree, x_and_carried: PyTree, given: Given, axes: Axes) -> PyTree:
        x, carried = x_and_carried
        following, sums = split_layer(x, on_axes.layer(own, x, given, axes))
        check_layer(x, following)
        one, other = ({name: leaf.shape for name, leaf in leaves_by_name(each).items()} for each in (sums, shapes))
        if one != {name: shape[1:] for name, shape in other.items()}:
            raise UserError(f"layers must return the same sums, and in every call: now {one}, before {other}")
        if given.gradients is None:
            place = functools.partial(_place, index=axes.layer)
            return following, jax.tree.map(place, carried, sums)
        gradients = jax.tree.map(lambda leaf: leaf[axes.layer], given.gradients["layer_sums"])
        return following, carried + product_of(sums, gradients)

    def loss(ends: Params, x_and_carried: PyTree, given: Given, axes: Axes) -> tuple[PyTree, ...]:
        x, carried = x_and_carried
        loss_sum, weight_sum, sums = on_axes.loss(ends, x, given, axes)
        if given.gradients is None:
            return loss_sum, weight_sum, sums | {"layer_sums": carried}
        return loss_sum + carried, weight_sum, sums

    return on_axes._replace(embed=embed, layer=layer, loss=loss)


def values_of_one(
    model: Model, whole_of: Callable[[Params], Params], state: TrainState, given: Given
) -> dict[str, Sums]:
    """The sums and rows of a microbatch, and something like the sums of all layers, by name."""
    microbatch, key = first_of(split_step(state, given))
    key = key.key if isinstance(key, MicrobatchKeys) else key
    params = whole_of(state.params)
    if not isinstance(model, LayeredModel):
        loss_fn = finish_with(model, lambda values, _: (0.0, 1.0, values))
        return {**bind_loss(loss_fn, state)(params, microbatch, key)[1].sums}
    each = finish_with(model, lambda values, _: values)
    params = params if model.stack is None else model.stack(params)
    num_layers = num_layers_of(params)
    x = jax.tree.map(jnp.asarray, each.embed(params.ends, microbatch, axes_of(key, num_layers)))
    own = jax.tree.map(lambda leaf: leaf[0], params.layers)
    _, sums = split_layer(x, each.layer(own, x, microbatch, axes_of(key, jnp.int32(0), jnp.int32(0))))
    found = each.loss(params.ends, x, microbatch, axes_of(key, num_layers + 1))
    if sums:
        found["layer_sums"] = jax.tree.map(lambda leaf: jnp.zeros((num_layers, *leaf.shape), wide(leaf)), sums)
    return found


def split_layer(x: PyTree, returned: PyTree) -> tuple[Any, Any]:
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


def _in_parts(leaf: jax.Array) -> jax.Array:
    """Large integers as parts of 16 bits, [..., P], for they are added as floats."""
    if not is_large(leaf.dtype):
        return leaf
    return jnp.stack([(leaf >> shift) & 0xFFFF for shift in range(0, 8 * leaf.dtype.itemsize, 16)], -1)


def is_large(dtype: Any) -> bool:
    """Whether a type is of integers that floats do not hold."""
    return jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize > 2


def is_float(leaf: Array) -> bool:
    """Whether a leaf is an array of floats."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def wide(tree: PyTree) -> PyTree:
    """The widest type of the floats of a tree, and of float32."""
    return np.result_type(np.float32, *(leaf.dtype for leaf in jax.tree.leaves(tree) if is_float(leaf)))
