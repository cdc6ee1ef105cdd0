"""Copies that optimizers keep of parameters: in float32, of those in fewer bits; and averages to evaluate."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.keywords import check_keywords
from jvarlen._common.pytree import describe, leaves_by_name
from jvarlen._common.types import Array, Grads, OptState, Params, PyTree
from jvarlen.training.step import with_extra_args
from jvarlen.training.train_state import MasterWeightsOptimizer, Optimizer

__all__ = ["EvalParams", "Float32MasterState", "average_in_types", "keeps_schedule_free", "with_float32_master"]

EvalParams = Callable[[OptState, Params], Params]  # (opt_state, params) -> params, of trained parameters alone


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
    """An optimizer of float32 copies, for parameters in bfloat16 or float16, whose small updates would be lost.

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
        master = jax.tree.map(lambda leaf: _wide(leaf) if _is_narrow(leaf) else optax.MaskedNode(), params)
        return Float32MasterState(master, inner.init(jax.tree.map(_wide, params)))

    @functools.wraps(inner.update)  # whose signature names the extra arguments that it takes
    def update(grads: Grads, state: Float32MasterState, params: Params = None, **extra_args: Any) -> tuple[Any, Any]:
        if params is None:
            raise UserError("with_float32_master needs the parameters: optimizer.update(grads, state, params)")
        before = jax.tree.map(lambda leaf, master: master if _is_narrow(leaf) else leaf, params, state.master)
        updates, inner_state = inner.update(jax.tree.map(_wide, grads), state.inner_state, before, **extra_args)
        after = optax.apply_updates(before, updates)
        # The difference in float32 of two values of few bits is exact enough that the sum is the rounded copy.
        changes = jax.tree.map(
            lambda leaf, update, new: _wide(new.astype(leaf.dtype)) - _wide(leaf) if _is_narrow(leaf) else update,
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


def _wide(leaf: Array) -> PyTree:
    return leaf.astype(jnp.float32) if _is_narrow(leaf) else leaf


def keeps_schedule_free(opt_state: OptState) -> bool:
    """Whether `optax.contrib.schedule_free` is a part of an optimizer, by its state."""
    return any(map(_is_schedule_free, jax.tree.leaves(opt_state, is_leaf=_is_schedule_free)))


def average_in_types(eval_params: EvalParams | None) -> EvalParams:
    """The function of a user, or that of schedule-free (None), whose result has the types of the parameters."""

    def average(opt_state: OptState, params: Params) -> PyTree:
        given = (eval_params or _schedule_free_average)(opt_state, params)
        found, expected = leaves_by_name(given), leaves_by_name(params)
        both = {name: (found.get(name), expected.get(name)) for name in {**found, **expected}}
        if differing := [
            f"{name} {describe(one)}, not {describe(other)}"
            for name, (one, other) in both.items()
            if getattr(one, "shape", None) != getattr(other, "shape", None)
        ]:
            raise UserError(f"eval_params must return the trained parameters: {list_first(differing, '; ')}")
        return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), given, params)

    return average


def _schedule_free_average(opt_state: OptState, params: Params) -> PyTree:
    if isinstance(opt_state, Float32MasterState):
        masters = opt_state.master
        params = jax.tree.map(lambda leaf, master: master if _is_narrow(leaf) else leaf, params, masters)
    for part in filter(_is_schedule_free, jax.tree.leaves(opt_state, is_leaf=_is_schedule_free)):

        def of_leaf(z: Array, leaf: Array, part: Any = part) -> PyTree:
            if isinstance(z, optax.MaskedNode):  # of another part, as of `optax.partition`
                return leaf
            return optax.contrib.schedule_free_eval_params(part._replace(z=z), leaf)

        params = jax.tree.map(of_leaf, part.z, params, is_leaf=lambda node: isinstance(node, optax.MaskedNode))
    return params


def _is_schedule_free(node: PyTree) -> bool:
    return isinstance(node, optax.contrib.ScheduleFreeState)
