"""Parameters to evaluate, where an optimizer keeps an average of those that it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import describe, leaves_by_name
from jvarlen.training.master_weights import Float32MasterState

__all__ = ["EvalParams", "average_in_types", "keeps_schedule_free"]

EvalParams = Callable[[Any, Any], Any]  # (opt_state, params) -> params, of trained parameters alone


def keeps_schedule_free(opt_state: Any) -> bool:
    """Whether `optax.contrib.schedule_free` is a part of an optimizer, by its state."""
    return any(map(_is_schedule_free, jax.tree.leaves(opt_state, is_leaf=_is_schedule_free)))


def average_in_types(eval_params: EvalParams | None) -> EvalParams:
    """The function of a user, or that of schedule-free (None), whose result has the types of the parameters."""

    def average(opt_state: Any, params: Any) -> Any:
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


def _schedule_free_average(opt_state: Any, params: Any) -> Any:
    if isinstance(opt_state, Float32MasterState):

        def wide(master: Any, leaf: Any) -> Any:
            return leaf if isinstance(master, optax.MaskedNode) else master

        params = jax.tree.map(wide, opt_state.master, params, is_leaf=_is_masked)
    for part in filter(_is_schedule_free, jax.tree.leaves(opt_state, is_leaf=_is_schedule_free)):

        def of_leaf(z: Any, leaf: Any, part: Any = part) -> Any:
            if isinstance(z, optax.MaskedNode):  # of another part, as of `optax.partition`
                return leaf
            return optax.contrib.schedule_free_eval_params(part._replace(z=z), leaf)

        params = jax.tree.map(of_leaf, part.z, params, is_leaf=_is_masked)
    return params


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _is_schedule_free(node: Any) -> bool:
    return isinstance(node, optax.contrib.ScheduleFreeState)
