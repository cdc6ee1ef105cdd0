"""Float32 copies of parameters in fewer bits, as an Optax piece."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jvarlen._common.checks import UserError
from jvarlen.training.step import with_extra_args
from jvarlen.training.train_state import MasterWeightsOptimizer, Optimizer

__all__ = ["Float32MasterState", "with_float32_master"]


class Float32MasterState(NamedTuple):
    """The state of `with_float32_master`.

    Attributes:
      master: float32 copies of parameters with fewer bits, and `optax.MaskedNode()` elsewhere.
      inner_state: of the optimizer.
    """

    master: Any
    inner_state: Any


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

    def init(params: Any) -> Float32MasterState:
        master = jax.tree.map(lambda leaf: _wide(leaf) if _is_narrow(leaf) else optax.MaskedNode(), params)
        return Float32MasterState(master, inner.init(jax.tree.map(_wide, params)))

    @functools.wraps(inner.update)  # whose signature names the extra arguments that it takes
    def update(grads: Any, state: Float32MasterState, params: Any = None, **told: Any) -> tuple[Any, Any]:
        if params is None:
            raise UserError("with_float32_master needs the parameters: optimizer.update(grads, state, params)")
        before = jax.tree.map(lambda leaf, master: master if _is_narrow(leaf) else leaf, params, state.master)
        updates, inner_state = inner.update(jax.tree.map(_wide, grads), state.inner_state, before, **told)
        after = optax.apply_updates(before, updates)
        # Of two values of few bits the difference in float32 is exact enough that the sum is the rounded copy.
        changes = jax.tree.map(
            lambda leaf, update, new: _wide(new.astype(leaf.dtype)) - _wide(leaf) if _is_narrow(leaf) else update,
            params,
            updates,
            after,
        )
        master = jax.tree.map(lambda leaf, new: new if _is_narrow(leaf) else optax.MaskedNode(), params, after)
        return changes, Float32MasterState(master, inner_state)

    return MasterWeightsOptimizer(init, update)


def _is_narrow(leaf: Any) -> bool:
    dtype = jnp.result_type(leaf)
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def _wide(leaf: Any) -> Any:
    return leaf.astype(jnp.float32) if _is_narrow(leaf) else leaf
