"""Optax pieces: learning rates that follow the batch size, and float32 copies of parameters.

Letters: S steps of all plans.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float64

from jvarlen._common.checks import UserError, check_choices
from jvarlen._common.keywords import check_keywords
from jvarlen._common.types import Array, Grads, OptState, Params, PyTree
from jvarlen.training import rates as learning_rates
from jvarlen.training.rates import BaseSchedule, BatchSizes, BatchSizeUnit, Rule, ScheduleUnit, lr_scale, lr_sequence
from jvarlen.training.step import with_extra_args
from jvarlen.training.train_state import MasterWeightsOptimizer, Optimizer

__all__ = [
    "Float32MasterState", "PlannedState", "batch_size_given", "masters_of", "planned_state", "scale_by_batch_size",
    "scale_by_planned_rate", "scale_by_rates", "widened", "with_float32_master", "with_known_tables", "with_tables_of",
    "without_tables",
]  # fmt: skip


class PlannedState(NamedTuple):
    """What an optimizer knows of all planned steps. Checkpoints keep the count alone: a resumed training has its plan.

    Attributes:
      count: int32[], updates so far.
      table: float32[..., R], float64 with 64-bit types enabled: the values of S steps, such as their rates; then up to
        a power of two the largest float.
    """

    count: Array
    table: Array


@check_keywords
def scale_by_planned_rate(
    plan: BatchSizes,
    base_schedule: BaseSchedule,
    base_batch_size: float,
    *,
    rule: Rule = "linear",
    unit: BatchSizeUnit = "sequences",
    counted_in: ScheduleUnit = "steps",
) -> optax.GradientTransformationExtraArgs:
    """Scales updates by the learning rates of a plan; it goes last in a chain, after an optimizer of rate 1.

    The rates are exactly `lr_sequence` rounded to float32 (with 64-bit types enabled, `lr_sequence` itself). They are
    in the optimizer state, so that other rates, and up to 16,384 steps another number of steps, take the same compiled
    program. `open_checkpoints` saves the count of steps and not the rates: a resumed training has those of its plan.

    Args:
      plan: as in `lr_sequence`; pass the plans, or the batch sizes, of all epochs.
      base_schedule: as in `lr_sequence`.
      base_batch_size: as in `lr_sequence`.
      rule: as in `lr_scale`.
      unit: as in `lr_sequence`.
      counted_in: as in `lr_sequence`.

    Returns:
      An `optax.GradientTransformationExtraArgs` with `PlannedState`. After S updates the rate is NaN. Updates keep
      their dtypes.

    Raises:
      ValueError: arguments that `lr_sequence` rejects.

    Example:
      >>> from jvarlen.planning.make_plan import make_plan
      >>> plan = make_plan([3] * 14, [(10, 3)], order="length")
      >>> optimizer = optax.chain(optax.sgd(1.0), scale_by_planned_rate(plan, 1e-3, 2))
      >>> updates, state = optimizer.update(jnp.ones(()), optimizer.init(jnp.ones(())))
      >>> updates, state = optimizer.update(jnp.ones(()), state)
      >>> bool(updates == -np.float32(2e-3))
      True
    """
    return scale_by_rates(
        lr_sequence(plan, base_schedule, base_batch_size, rule=rule, unit=unit, counted_in=counted_in)
    )


def scale_by_rates(rates_S: Float64[np.ndarray, " S"]) -> optax.GradientTransformationExtraArgs:
    """`scale_by_planned_rate` with the rates of all steps."""

    def init_fn(params: Params) -> PlannedState:
        del params
        return planned_state(rates_S)

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        rate = state.table.at[state.count].get(mode="fill", fill_value=jnp.nan)
        rate = jnp.where(rate == jnp.finfo(rate.dtype).max, jnp.nan, rate)
        return _scale(updates, rate), state._replace(count=optax.safe_increment(state.count))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def planned_state(values: Float64[np.ndarray, "*C S"]) -> PlannedState:
    """The state before the first of S steps, which have these values."""
    dtype, num_steps = jnp.result_type(float), values.shape[-1]
    padding = [*[(0, 0)] * (values.ndim - 1), (0, learning_rates.table_size(num_steps) - num_steps)]
    table = values.astype(dtype)  # NumPy's rounding, of float64 to float32
    table = np.pad(table, padding, constant_values=np.finfo(dtype).max)  # finite, as `fit` wants states
    return PlannedState(jnp.zeros((), np.int32), jnp.asarray(table))


def without_tables(state: PyTree) -> PyTree:
    """A state without what is planned."""
    return jax.tree.map(
        lambda node: node._replace(table=None) if _is_planned(node) else node, state, is_leaf=_is_planned
    )


def with_tables_of(given: PyTree, state: PyTree) -> PyTree:
    """The inverse of `without_tables`, with the tables of another state; ValueError if it holds only shapes."""

    def with_table(node: PyTree, like: PyTree) -> PyTree:
        if not _is_planned(node):
            return node
        if isinstance(like.table, jax.ShapeDtypeStruct):
            raise UserError(
                "a checkpoint does not hold the planned rates: restore to a state that does, as init makes it"
            )
        return like._replace(count=node.count)

    return jax.tree.map(with_table, given, state, is_leaf=_is_planned)


def with_known_tables(state: PyTree, optimizer: Optimizer) -> PyTree:
    """A state with the tables as arrays where it has only their shapes; this needs no parameters."""
    if not any(map(_has_shape, jax.tree.leaves(state, is_leaf=_is_planned))):
        return state  # other optimizers may refuse a tree of nothing
    of_nothing = jax.tree.leaves(optimizer.init(()), is_leaf=_is_planned)
    known = (np.asarray(node.table) for node in of_nothing if _is_planned(node))

    def with_table(node: PyTree) -> PyTree:
        if not _has_shape(node):
            return node
        table, sharding = next(known), node.table.sharding
        if sharding is None:
            return node._replace(table=jnp.asarray(table))
        return node._replace(table=jax.make_array_from_callback(table.shape, sharding, lambda index: table[index]))

    return jax.tree.map(with_table, state, is_leaf=_is_planned)


def _is_planned(node: PyTree) -> bool:
    return isinstance(node, PlannedState)


def _has_shape(node: PyTree) -> bool:
    return _is_planned(node) and isinstance(node.table, jax.ShapeDtypeStruct)


def _scale(updates: Params, scale: jax.Array) -> PyTree:
    def scale_one(update: jax.Array) -> jax.Array:
        wide = np.promote_types(update.dtype, scale.dtype)  # said, as strict promotion wants it
        return (update.astype(wide) * scale.astype(wide)).astype(update.dtype)

    return jax.tree.map(scale_one, updates)


@check_keywords
def scale_by_batch_size(
    base_batch_size: float | jax.Array, *, rule: Rule = "linear", unit: BatchSizeUnit = "sequences"
) -> optax.GradientTransformationExtraArgs:
    """Scales updates by the batch size of the step, which scales the learning rate of the optimizer before it.

    Put it last in a chain: then it scales AdamW's decoupled weight decay too, as a learning rate would.

    Args:
      base_batch_size: the batch size that the base rate was tuned for, > 0, in `unit`. It may be traced, as in
        `optax.inject_hyperparams`; an invalid traced value scales by NaN.
      rule: as in `lr_scale`; a function must accept JAX arrays.
      unit: what the batch size counts: real `"sequences"`, from the extra argument `batch_size` of `update`, or real
        `"tokens"`, from `num_tokens`. `make_train_step` passes both where the batch has them; of pairs it counts both
        lengths, whatever the plan's `size` is.

    Returns:
      A stateless `optax.GradientTransformationExtraArgs`. The scale is float32 (float64 with 64-bit types enabled);
      updates keep their dtypes. Without its extra argument, `update` raises TypeError; others are ignored.

    Raises:
      ValueError: an unknown rule or unit, or a base batch size that is not positive.

    Example:
      >>> optimizer = optax.chain(optax.sgd(1.0), scale_by_batch_size(2))
      >>> updates, _ = optimizer.update(jnp.ones(()), optimizer.init(jnp.ones(())), batch_size=jnp.float32(6))
      >>> float(updates)
      -3.0

    References:
      As for `lr_scale`.
    """
    check_choices(unit=(unit, BatchSizeUnit))
    base: Any = base_batch_size
    if isinstance(base, jax.core.Tracer):
        lr_scale(1.0, 1.0, rule)  # raises for an unknown rule here
        base = jnp.where((base > 0) & (base < jnp.inf), base, jnp.nan)
    else:
        lr_scale(base, base, rule)

    def update_fn(updates, state, params=None, **extra_args):
        del params
        ratio = batch_size_given(extra_args, unit, "scale_by_batch_size", "scale_by_planned_rate") / base
        scale = learning_rates.apply_rule(jnp, ratio, rule)
        return _scale(updates, scale), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update_fn)


def batch_size_given(extra_args: Mapping[str, Array], unit: BatchSizeUnit, function: str, instead: str) -> jax.Array:
    """The batch size of the step, float[]; TypeError that names the function which needs it, and what does not."""
    name = {"sequences": "batch_size", "tokens": "num_tokens"}[unit]
    if name not in extra_args:
        raise TypeError(
            f"{function}(unit={unit!r}) needs the extra argument {name} of update, as in "
            f"optimizer.update(grads, opt_state, params, {name}=…); a trainer that passes none, such as "
            f"apply_gradients of a Flax TrainState, takes {instead} in its place"
        )
    return jnp.asarray(extra_args[name], float)


class Float32MasterState(NamedTuple):
    """The state of `with_float32_master`.

    Attributes:
      master: float32 copies of parameters with fewer bits, and `optax.MaskedNode()` elsewhere.
      inner_state: of the optimizer.
    """

    master: Params
    inner_state: OptState


@check_keywords
def with_float32_master(optimizer: Optimizer) -> optax.GradientTransformationExtraArgs:
    """An optimizer of float32 copies, for parameters in bfloat16, whose small updates would be lost.

    The optimizer updates a float32 copy, its state is float32, and the parameters are the copy rounded. With Adam a
    parameter takes 2 bytes, and its state 12. It is the outermost: `with_float32_master(optax.chain(…))`.

    Args:
      optimizer: any Optax optimizer; its parameters and gradients are float32. Its update gets the extra arguments that
        this one gets.

    Returns:
      An Optax optimizer, for train steps and `optax.apply_updates`: the parameters become exactly the rounded copies.
      Parameters of 32 bits or more are updated as without it.

    Raises:
      ValueError: when it updates: no parameters are given.

    References:
      Micikevicius et al. 2018, "Mixed Precision Training", section 3.1.

    Example:
      >>> params = jnp.ones(2, jnp.bfloat16)
      >>> optimizer = with_float32_master(optax.sgd(1e-3))
      >>> state = optimizer.init(params)
      >>> for _ in range(4):
      ...     updates, state = optimizer.update(jnp.ones(2), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> float(params[0]), round(float(state.master[0]), 4)
      (0.99609375, 0.996)
    """
    inner = with_extra_args(optimizer)

    def init(params: Params) -> Float32MasterState:
        master = jax.tree.map(lambda leaf: widened(leaf) if _is_narrow(leaf) else optax.MaskedNode(), params)
        return Float32MasterState(master, inner.init(jax.tree.map(widened, params)))

    @functools.wraps(inner.update)  # whose signature names the extra arguments that it takes
    def update(grads: Grads, state: Float32MasterState, params: Params = None, **extra_args: Any) -> tuple[Any, Any]:
        if params is None:
            raise UserError("with_float32_master needs the parameters: optimizer.update(grads, state, params)")
        before = masters_of(state, params)
        updates, inner_state = inner.update(jax.tree.map(widened, grads), state.inner_state, before, **extra_args)
        after = optax.apply_updates(before, updates)
        # The difference in float32 of two values of few bits is exact enough that the sum is the rounded copy.
        changes = jax.tree.map(
            lambda leaf, update, new: widened(new.astype(leaf.dtype)) - widened(leaf) if _is_narrow(leaf) else update,
            params,
            updates,
            after,
        )
        master = jax.tree.map(lambda leaf, new: new if _is_narrow(leaf) else optax.MaskedNode(), params, after)
        return changes, Float32MasterState(master, inner_state)

    return MasterWeightsOptimizer(init, update)


def _is_narrow(leaf: Array) -> bool:
    dtype = jnp.result_type(leaf)
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def masters_of(state: OptState, params: Params) -> PyTree:
    """The parameters as the optimizer has them: float32 copies, where the state of `with_float32_master` has some."""
    if not isinstance(state, Float32MasterState):
        return params
    return jax.tree.map(lambda leaf, master: master if _is_narrow(leaf) else leaf, params, state.master)


def widened(leaf: Array) -> PyTree:
    """In float32 if it has fewer bits."""
    return leaf.astype(jnp.float32) if _is_narrow(leaf) else leaf
