"""The sums of a step with a `StepLoss`, on any layout.

It takes two passes of what it takes for any other loss: one for the sums, without gradients, and one for the
gradient of Σ ⟨gradient of the loss, sums of a microbatch⟩. Letters: L layers, M microbatches of a group, B rows of
each.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import check_arrays, describe, have_same_containers, leaves_by_name
from jvarlen._common.types import Array, Batch, Extra, Grads, Params, PyTree, Shapes, StepHalves, Sums
from jvarlen.batches.batches import count_tokens
from jvarlen.parallel.layers import Axes, LayeredModel, Model, StepLoss, axes_of, check_layer, num_layers_of
from jvarlen.training.groups import GroupSumsOf, SumsSoFar, add_group, reduce_groups, shardings_of_sums, zeros_on
from jvarlen.training.losses import bind_loss, check_extra, check_real, takes_argument
from jvarlen.training.step_sums import NextExtra, StepSums, SumsOf, field_of, first_of, microbatches_of, split_step
from jvarlen.training.train_state import MicrobatchKeys, TrainState
from jvarlen.training.trainable import TrainedOf

__all__ = ["model_to_estimate", "sum_step_loss"]

# The sums of a step with an ordinary model, whose layers hand on their sums once the function has changed it.
SumsMaker: TypeAlias = Callable[[Model, TrainedOf | None, Callable[[Model], Model]], SumsOf]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Rows:
    """The rows of a step."""

    most: int | None  # for which arrays have room; None: those of one group, whose arrays may differ in their number
    dtypes: tuple[np.dtype, ...]  # of the arrays of rows


class _Values(NamedTuple):
    """The sums of the first pass over the groups of a step."""

    values: SumsSoFar
    num_rows: Array  # int32[], so far
    rows: _Rows
    grads: SumsSoFar | None  # zeros, which the second pass adds to; None without gradients


class _Gradients(NamedTuple):
    """The sums of the second pass."""

    of_step: StepSums  # without gradients
    counts: Batch  # as for `metrics_of`
    of_values: Grads  # of the loss
    num_rows: Array  # int32[], so far
    grads: SumsSoFar


def sum_step_loss(
    step_loss: StepLoss, sum_of: SumsMaker, trained_of: TrainedOf | None, whole_of: Callable[[Params], Params]
) -> GroupSumsOf:
    """The sums of a step with such a loss, whose weight is 1; `whole_of` makes parameters those of the whole model."""
    # `sum_of(model, trained_of, carry)` are those of an ordinary model, of which `carry`, on the axes of the layout,
    # makes one whose layers hand on their sums. Without `trained_of` there are no gradients.
    passes = _Passes(step_loss, sum_of, trained_of, whole_of)
    halves = StepHalves(passes.zeros, passes.add_values, passes.reduce_values, holds_rows=passes.holds_rows)
    if trained_of is not None:
        halves = halves._replace(update=passes.reduce_grads, between=passes.between, accumulate_again=passes.add_grads)
    return GroupSumsOf(passes.whole, halves)


@dataclasses.dataclass(frozen=True)
class _Passes:
    """The two passes over the groups of a step, for values and for gradients."""

    step_loss: StepLoss
    sum_of: SumsMaker
    trained_of: TrainedOf | None
    whole_of: Callable[[Params], Params]

    def given(self, state: TrainState, batch: Batch, num_rows: Array = None) -> _Given:
        """What the first pass takes of a group, whose first row is this one."""
        num_microbatches = microbatches_of(batch)
        row = jnp.arange(num_microbatches, dtype=jnp.int32)
        row = row if num_rows is None else num_rows + row
        extra = _repeat(state.extra, num_microbatches) if isinstance(self.step_loss.sums, LayeredModel) else None
        return _Given(batch, row, extra)

    def shapes(self, state: TrainState, given: _Given) -> dict[str, Shapes]:
        """The sums and rows of a microbatch, by name."""
        one = functools.partial(_values_of_one, self.step_loss.sums, self.whole_of)
        return jax.eval_shape(one, state._replace(opt_state=None), given)

    def holds_rows(self, state: TrainState, batch: Batch) -> bool:
        """Whether microbatches of such batches return rows."""
        return bool(_dtypes_of(self.shapes(state, jax.eval_shape(self.given, state, batch))))

    def values_of(self, shapes: dict[str, Shapes], given: _Given | None = None, most: int | None = None) -> SumsOf:
        """The sums of the first pass; only their reduction, without a microbatch."""
        num_microbatches = 0 if given is None else microbatches_of(given)
        finish = functools.partial(_values_to_add, num_microbatches=num_microbatches, most=most)
        return self._sums_of(finish, shapes, None)

    def grads_of(self, shapes: dict[str, Shapes]) -> SumsOf:
        """The sums of the second pass; only their reduction, without shapes of a microbatch."""
        return self._sums_of(_inner_product, shapes, self.trained_of)

    def _sums_of(self, finish: Callable[..., PyTree], shapes: dict[str, Shapes], trained: TrainedOf | None) -> SumsOf:
        carry = functools.partial(_carry_sums, shapes=shapes.get("layer_sums"))
        return self.sum_of(_finish_with(self.step_loss.sums, finish), trained, carry)

    def whole(self, state: TrainState, batch: Batch) -> StepSums:
        """The sums of a step of one group."""
        given = self.given(state, batch)
        shapes = self.shapes(state, given)
        rows = _Rows(None, _dtypes_of(shapes))
        sums, gradients = self.end_values(state, self.values_of(shapes, given).whole(state, given), rows)
        if self.trained_of is None:
            return sums
        given = _with_gradients(given, gradients, shapes)
        return sums._replace(grads=self.grads_of(shapes).whole(state, given).grads)

    def end_values(self, state: TrainState, first: StepSums, rows: _Rows) -> tuple[StepSums, Grads]:
        """The sums of the step but for its gradients, from those of the first pass, and the gradients of the loss."""

        def loss_of(values: dict[str, Sums]) -> tuple[jax.Array, Any]:
            values = _of_step(values, rows.dtypes)
            loss, metrics = _check_loss(_call(self.step_loss.loss, values, state.extra), first.loss_sum.dtype)
            return loss, (metrics, values)

        values, gradients, next_extra = dict(first.sums), None, None
        if self.trained_of is None:
            loss, (metrics, _) = loss_of(values)
        else:
            (loss, (metrics, values)), gradients = jax.value_and_grad(loss_of, has_aux=True)(values)
            next_extra = self.step_loss.next_extra
        sums = first._replace(loss_sum=loss, weight_sum=jnp.ones_like(loss), sums=metrics, extra=())
        if next_extra is not None:
            following = check_extra("next_extra", _call(next_extra, values, state.extra), state.extra)
            sums = sums._replace(extra=NextExtra(following))
        return sums, gradients

    def zeros(self, state: TrainState, batch: Batch, most_rows: int) -> _Values:
        """The sums before the first group."""
        given = jax.eval_shape(self.given, state, batch)
        shapes = self.shapes(state, given)
        values_of, grads_of = self.values_of(shapes, given, most_rows), self.grads_of(shapes)

        def add_first(state: TrainState, batch: Batch) -> tuple[SumsSoFar, SumsSoFar | None]:
            given = self.given(state, batch)
            values = add_group(values_of, state, batch, given=given)
            if self.trained_of is None:
                return values, None
            gradients = dict(values_of.reduce(state, values.sums).sums)  # of the same shapes
            return values, add_group(grads_of, state, batch, given=_with_gradients(given, gradients, shapes))

        of_grads = None if self.trained_of is None else shardings_of_sums(grads_of, state)
        lie = shardings_of_sums(values_of, state), of_grads
        values, grads = zeros_on(jax.eval_shape(add_first, state, batch), lie)
        return _Values(values, jnp.int32(0), _Rows(most_rows, _dtypes_of(shapes)), grads)

    def add_values(self, state: TrainState, batch: Batch, sums: _Values) -> _Values:
        """Adds those of a group in the first pass."""
        given = self.given(state, batch, sums.num_rows)
        shapes = self.shapes(state, given)
        values = add_group(self.values_of(shapes, given, sums.rows.most), state, batch, sums.values, given)
        return sums._replace(values=values, num_rows=sums.num_rows + _num_rows(batch, shapes))

    def between(self, state: TrainState, sums: _Values) -> _Gradients:
        """The sums before the first group in the second pass."""
        of_step, gradients, counts = self._end(state, sums)
        assert sums.grads is not None
        return _Gradients(of_step, counts, gradients, jnp.zeros_like(sums.num_rows), sums.grads)

    def add_grads(self, state: TrainState, batch: Batch, sums: _Gradients) -> _Gradients:
        """Adds those of a group in the second pass."""
        given = self.given(state, batch, sums.num_rows)
        shapes = self.shapes(state, given)
        given = _with_gradients(given, sums.of_values, shapes, sums.num_rows)
        grads = add_group(self.grads_of(shapes), state, batch, sums.grads, given)
        return sums._replace(grads=grads, num_rows=sums.num_rows + _num_rows(batch, shapes))

    def reduce_values(self, state: TrainState, sums: _Values) -> tuple[StepSums, Batch]:
        """The sums of the step without gradients, and its counts."""
        of_step, _, counts = self._end(state, sums)
        return of_step, counts

    def reduce_grads(self, state: TrainState, sums: _Gradients) -> tuple[StepSums, Batch]:
        """The sums of the step, and its counts."""
        grads = self.grads_of({}).reduce(state, sums.grads.sums).grads
        return sums.of_step._replace(grads=grads), sums.counts

    def _end(self, state: TrainState, sums: _Values) -> tuple[StepSums, Grads, Batch]:
        first, counts = reduce_groups(self.values_of({}), state, sums.values)
        of_step, gradients = self.end_values(state, first, sums.rows)
        # Where there was no room for all rows, no number is better than a wrong one.
        is_whole = sums.num_rows <= (sums.rows.most or 0)
        or_nan = lambda leaf: jnp.where(is_whole, leaf, jnp.nan) if _is_float(leaf) else leaf  # noqa: E731
        return *jax.tree.map(or_nan, (of_step, gradients)), counts


def model_to_estimate(model: Any) -> PyTree:
    """An ordinary model that computes of a microbatch what the pass for gradients does."""
    if not isinstance(model, StepLoss):
        return model

    def add_up(values: dict[str, Sums], _: _Given) -> tuple[PyTree, ...]:
        return _product_of(values, jax.tree.map(lambda leaf: jnp.ones((), _wide(leaf)), values)), 1.0, {}

    own, each = model.sums, _finish_with(model.sums, add_up)
    if not isinstance(own, LayeredModel):
        return functools.wraps(own)(lambda params, batch, **others: each(params, _Given(batch, 0, None), **others))

    def layer(layer_params: Params, x: PyTree, batch: Batch, axes: Axes) -> PyTree:
        return _split_layer(x, own.layer(layer_params, x, batch, axes))[0]

    def loss(ends: Params, x: PyTree, batch: Batch, axes: Axes) -> PyTree:
        return each.loss(ends, x, _Given(batch, 0, axes.extra), axes)

    return own._replace(layer=layer, loss=loss)


def _num_rows(batch: Batch, shapes: dict[str, Shapes]) -> int:
    """The rows of a group, M · B; raises ValueError if arrays of rows differ in it."""
    num_rows = {name: leaf.shape[0] for name, leaf in leaves_by_name(shapes["rows"]).items()}
    if len({*num_rows.values()}) > 1:
        raise UserError(f"rows of a step of several groups must begin with the same axis: {num_rows}")
    return microbatches_of(batch) * max(num_rows.values(), default=0)


def _dtypes_of(shapes: dict[str, Shapes]) -> tuple[np.dtype, ...]:
    return tuple(np.dtype(leaf.dtype) for leaf in jax.tree.leaves(shapes["rows"]))


def _call(function: Callable[..., Any], values: dict[str, Sums], extra: Extra) -> PyTree:
    offered = {"rows": values["rows"], "layer_sums": values.get("layer_sums"), "extra": extra}
    return function(values["sums"], **{name: each for name, each in offered.items() if takes_argument(function, name)})


def _check_loss(returned: PyTree, dtype: Any) -> tuple[jax.Array, Sums]:
    """The loss and the sums for metrics."""
    loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if np.shape(loss) or not (isinstance(loss, float) or _is_float(loss)) or not isinstance(metrics, Mapping):
        raise UserError("the loss of a StepLoss must return a float scalar, or that and a dict of arrays for metrics")
    check_real("the loss of a StepLoss", metrics)
    dtype = np.promote_types(dtype, _wide((loss, metrics)))
    return jnp.asarray(loss, dtype), jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), dict(metrics))


def _of_step(values: dict[str, Sums], dtypes: tuple[np.dtype, ...]) -> dict[str, Sums]:
    """The sums, and the rows of the step in the order of the plan, in the types of the loss."""

    def in_type(leaf: jax.Array, dtype: np.dtype) -> jax.Array:
        if not _is_large(dtype):
            return leaf.astype(dtype)
        parts = [leaf[..., k].astype(dtype) << 16 * k for k in range(leaf.shape[-1])]
        return functools.reduce(operator.add, parts)

    leaves, structure = jax.tree.flatten(values["rows"])
    return {**values, "rows": jax.tree.unflatten(structure, map(in_type, leaves, dtypes))}


class _Given(NamedTuple):
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


def _repeat(tree: PyTree, num_microbatches: int) -> PyTree:
    """A tree with a leading axis M."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_microbatches, *leaf.shape)), tree)


def _values_to_add(values: dict[str, Sums], given: _Given, num_microbatches: int, most: int | None) -> PyTree:
    """What a microbatch adds to the sums of the step, and to its rows, which are 0 outside the microbatch."""

    def place(leaf: jax.Array) -> jax.Array:
        leaf = _in_parts(leaf)
        num_rows = num_microbatches * len(leaf) if most is None else most
        places = given.row + num_microbatches * np.arange(len(leaf), dtype=np.int32)
        return jnp.zeros((num_rows, *leaf.shape[1:]), leaf.dtype).at[places].set(leaf)

    placed = {**values, "rows": jax.tree.map(place, values["rows"])}
    return jnp.float32(0), 1.0, placed


def _with_gradients(given: _Given, gradients: Grads, shapes: dict[str, Shapes], num_rows: Array = None) -> _Given:
    """What the second pass takes of a group, of whose rows the first is this one."""
    num_microbatches = microbatches_of(given)

    def of_rows(leaf: jax.Array, shape: Any) -> jax.Array:
        of_group = num_microbatches * shape.shape[0]
        leaf = leaf if num_rows is None else jax.lax.dynamic_slice_in_dim(leaf, num_rows, of_group)
        return leaf[:of_group].reshape(-1, num_microbatches, *leaf.shape[1:]).swapaxes(0, 1)

    rows = jax.tree.map(of_rows, gradients["rows"], shapes["rows"])
    return given._replace(gradients=_repeat({**gradients, "rows": None}, num_microbatches) | {"rows": rows})


def _inner_product(values: dict[str, Sums], given: _Given) -> tuple[PyTree, ...]:
    """A function whose gradient is the microbatch's share of the gradient."""
    return _product_of(values, {name: given.gradients[name] for name in values}), 1.0, {}


def _product_of(values: PyTree, gradients: Grads) -> PyTree:
    """The sum of the products of floats and their gradients."""
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
            return following, jax.tree.map(lambda total, leaf: total.at[axes.layer].set(leaf), carried, sums)
        gradients = jax.tree.map(lambda leaf: leaf[axes.layer], given.gradients["layer_sums"])
        return following, carried + _product_of(sums, gradients)

    def loss(ends: Params, x_and_carried: PyTree, given: _Given, axes: Axes) -> tuple[PyTree, ...]:
        x, carried = x_and_carried
        loss_sum, weight_sum, sums = on_axes.loss(ends, x, given, axes)
        if given.gradients is None:
            return loss_sum, weight_sum, sums | {"layer_sums": carried}
        return loss_sum + carried, weight_sum, sums

    return on_axes._replace(embed=embed, layer=layer, loss=loss)


def _values_of_one(model: Model, whole_of: Callable[[Params], Params], state: TrainState, given: _Given) -> PyTree:
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


def _in_parts(leaf: jax.Array) -> jax.Array:
    """Large integers as parts of 16 bits, [..., P], for they are added as floats."""
    if not _is_large(leaf.dtype):
        return leaf
    return jnp.stack([(leaf >> shift) & 0xFFFF for shift in range(0, 8 * leaf.dtype.itemsize, 16)], -1)


def _is_large(dtype: Any) -> bool:
    """Whether a type is of integers that floats do not hold."""
    return jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize > 2


def _is_float(leaf: Array) -> bool:
    """Whether a leaf is an array of floats."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def _wide(tree: PyTree) -> PyTree:
    """The widest type of the floats of a tree, and of float32."""
    return np.result_type(np.float32, *(leaf.dtype for leaf in jax.tree.leaves(tree) if _is_float(leaf)))
