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

from jvarlen._common.checks import UserError
from jvarlen._common.pytree import leaves_by_name
from jvarlen._common.types import Array, Batch, Extra, Grads, Params, PyTree, Shapes, Sums
from jvarlen.parallel.layers import Axes, LayeredModel, Model, StepLoss
from jvarlen.parallel.step_values import (
    Given,
    carry_sums,
    finish_with,
    inner_product,
    is_float,
    is_large,
    product_of,
    repeat,
    split_layer,
    values_of_one,
    values_to_add,
    wide,
    with_gradients,
)
from jvarlen.training.groups import (
    GroupSumsOf,
    SumsSoFar,
    add_group,
    reduce_groups,
    shardings_of_sums,
    zeros_on,
)
from jvarlen.training.losses import check_extra, check_real, takes_argument
from jvarlen.training.step_sums import NextExtra, StepSums, SumsOf, microbatches_of
from jvarlen.training.train_state import TrainState
from jvarlen.training.trainable import TrainedOf

__all__ = ["model_to_estimate", "sum_step_loss"]


# The sums of a step with an ordinary model, whose layers hand on their sums once the function has changed it.
SumsMaker: TypeAlias = Callable[[Model, Callable[[Model], Model], TrainedOf | None], SumsOf]


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
    step_loss: StepLoss,
    sum_of: SumsMaker,
    trained_of: TrainedOf | None,  # None: no gradients
    whole_of: Callable[[Params], Params] = lambda params: params,
) -> GroupSumsOf:
    """The sums of a step with such a loss, whose weight is 1; `whole_of` makes parameters those of the whole model."""
    # `sum_of(model, carry, trained_of)` are those of an ordinary model, of which `carry`, on the axes of the layout,
    # makes one whose layers hand on their sums.
    passes = _Passes(step_loss, sum_of, trained_of, whole_of)
    has_grads = trained_of is not None
    return GroupSumsOf(
        whole=passes.whole,
        zeros=passes.zeros,
        accumulate=passes.add_values,
        reduce=passes.reduce_grads if has_grads else passes.reduce_values,
        between=passes.between if has_grads else None,
        accumulate_again=passes.add_grads if has_grads else None,
        holds_rows=passes.holds_rows,
    )


@dataclasses.dataclass(frozen=True)
class _Passes:
    """The two passes over the groups of a step, for values and for gradients."""

    step_loss: StepLoss
    sum_of: SumsMaker
    trained_of: TrainedOf | None
    whole_of: Callable[[Params], Params]

    @property
    def model(self) -> Model:
        return self.step_loss.sums

    def given(self, state: TrainState, batch: Batch, num_rows: Array = None) -> Given:
        """What the first pass takes of a group, whose first row is this one."""
        num_microbatches = microbatches_of(batch)
        row = jnp.arange(num_microbatches, dtype=jnp.int32)
        row = row if num_rows is None else num_rows + row
        extra = repeat(state.extra, num_microbatches) if isinstance(self.model, LayeredModel) else None
        return Given(batch, row, extra)

    def shapes(self, state: TrainState, given: Given) -> dict[str, Shapes]:
        """The sums and rows of a microbatch, by name."""
        one = functools.partial(values_of_one, self.model, self.whole_of)
        return jax.eval_shape(one, state._replace(opt_state=None), given)

    def holds_rows(self, state: TrainState, batch: Batch) -> bool:
        """Whether microbatches of such batches return rows."""
        return bool(_dtypes_of(self.shapes(state, jax.eval_shape(self.given, state, batch))))

    def values_of(
        self, shapes: dict[str, Shapes] | None = None, given: Given | None = None, most: int | None = None
    ) -> SumsOf:
        """The sums of the first pass; only their reduction, without shapes of a microbatch."""
        num_microbatches = 0 if given is None else microbatches_of(given)
        carry = functools.partial(carry_sums, shapes=(shapes or {}).get("layer_sums"))
        finish = functools.partial(values_to_add, num_microbatches=num_microbatches, most=most)
        return self.sum_of(finish_with(self.model, finish), carry, None)

    def grads_of(self, shapes: dict[str, Shapes] | None = None) -> SumsOf:
        """The sums of the second pass; only their reduction, without shapes of a microbatch."""
        carry = functools.partial(carry_sums, shapes=(shapes or {}).get("layer_sums"))
        return self.sum_of(finish_with(self.model, inner_product), carry, self.trained_of)

    def whole(self, state: TrainState, batch: Batch) -> StepSums:
        """The sums of a step of one group."""
        given = self.given(state, batch)
        shapes = self.shapes(state, given)
        rows = _Rows(None, _dtypes_of(shapes))
        sums, gradients = self.end_values(state, self.values_of(shapes, given).whole(state, given), rows)
        if self.trained_of is None:
            return sums
        given = with_gradients(given, gradients, shapes)
        return sums._replace(grads=self.grads_of(shapes).whole(state, given).grads)

    def end_values(self, state: TrainState, first: StepSums, rows: _Rows) -> tuple[StepSums, Grads]:
        """The sums of the step but for its gradients, from those of the first pass, and the gradients of the loss."""

        def loss_of(values: dict[str, Sums]) -> tuple[jax.Array, Any]:
            values = _of_step(values, rows.dtypes)
            loss, metrics = _check_loss(_call(self.step_loss.loss, values, state.extra), first.loss_sum.dtype)
            return loss, (metrics, values)

        if self.trained_of is None:
            loss, (metrics, _) = loss_of(dict(first.sums))
            return first._replace(loss_sum=loss, weight_sum=jnp.ones_like(loss), sums=metrics, extra=()), None
        (loss, (metrics, values)), gradients = jax.value_and_grad(loss_of, has_aux=True)(dict(first.sums))
        sums = first._replace(loss_sum=loss, weight_sum=jnp.ones_like(loss), sums=metrics, extra=())
        if (next_extra := self.step_loss.next_extra) is not None:
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
            return values, add_group(grads_of, state, batch, given=with_gradients(given, gradients, shapes))

        lie = tuple(shardings_of_sums(each, state) for each in (values_of, grads_of))
        lie = lie if self.trained_of is not None else (lie[0], None)
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
        given = with_gradients(given, sums.of_values, shapes, sums.num_rows)
        grads = add_group(self.grads_of(shapes), state, batch, sums.grads, given)
        return sums._replace(grads=grads, num_rows=sums.num_rows + _num_rows(batch, shapes))

    def reduce_values(self, state: TrainState, sums: _Values) -> tuple[StepSums, Batch]:
        """The sums of the step without gradients, and its counts."""
        of_step, _, counts = self._end(state, sums)
        return of_step, counts

    def reduce_grads(self, state: TrainState, sums: _Gradients) -> tuple[StepSums, Batch]:
        """The sums of the step, and its counts."""
        grads = self.grads_of().reduce(state, sums.grads.sums).grads
        return sums.of_step._replace(grads=grads), sums.counts

    def _end(self, state: TrainState, sums: _Values) -> tuple[StepSums, Grads, Batch]:
        first, counts = reduce_groups(self.values_of(), state, sums.values)
        of_step, gradients = self.end_values(state, first, sums.rows)
        # Where there was no room for all rows, no number is better than a wrong one.
        is_whole = sums.num_rows <= (sums.rows.most or 0)

        def or_nan(leaf: jax.Array) -> jax.Array:
            return jnp.where(is_whole, leaf, jnp.nan) if is_float(leaf) else leaf

        return *jax.tree.map(or_nan, (of_step, gradients)), counts


def model_to_estimate(model: Any) -> PyTree:
    """An ordinary model that computes of a microbatch what the pass for gradients does."""
    if not isinstance(model, StepLoss):
        return model

    def add_up(values: dict[str, Sums], _: Given) -> tuple[PyTree, ...]:
        return product_of(values, jax.tree.map(lambda leaf: jnp.ones((), wide(leaf)), values)), 1.0, {}

    own, each = model.sums, finish_with(model.sums, add_up)
    if not isinstance(own, LayeredModel):
        return functools.wraps(own)(lambda params, batch, **others: each(params, Given(batch, 0, None), **others))

    def layer(layer_params: Params, x: PyTree, batch: Batch, axes: Axes) -> PyTree:
        return split_layer(x, own.layer(layer_params, x, batch, axes))[0]

    def loss(ends: Params, x: PyTree, batch: Batch, axes: Axes) -> PyTree:
        return each.loss(ends, x, Given(batch, 0, axes.extra), axes)

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
    if np.shape(loss) or not (isinstance(loss, float) or is_float(loss)) or not isinstance(metrics, Mapping):
        raise UserError("the loss of a StepLoss must return a float scalar, or that and a dict of arrays for metrics")
    check_real("the loss of a StepLoss", metrics)
    dtype = np.promote_types(dtype, wide((loss, metrics)))
    return jnp.asarray(loss, dtype), jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), dict(metrics))


def _of_step(values: dict[str, Sums], dtypes: tuple[np.dtype, ...]) -> dict[str, Sums]:
    """The sums, and the rows of the step in the order of the plan, in the types of the loss."""

    def in_type(leaf: jax.Array, dtype: np.dtype) -> jax.Array:
        if not is_large(dtype):
            return leaf.astype(dtype)
        parts = [leaf[..., k].astype(dtype) << 16 * k for k in range(leaf.shape[-1])]
        return functools.reduce(operator.add, parts)

    leaves, structure = jax.tree.flatten(values["rows"])
    return {**values, "rows": jax.tree.unflatten(structure, map(in_type, leaves, dtypes))}
