"""The arguments and results of a loss, and one signature for all losses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jvarlen._common.checks import UserError, is_number, list_first
from jvarlen._common.pytree import describe, differences, have_same_containers, is_key, leaves_by_name
from jvarlen._common.types import Extra, Key, Microbatch, Params, PyTree, Sums
from jvarlen.training.train_state import TrainState

__all__ = ["LossFn", "LossOutputs", "bind_loss", "check_extra", "check_real", "takes_argument"]

LossFn = Callable[..., tuple[PyTree, ...]]


class LossOutputs(NamedTuple):
    """The outputs of a loss besides Σ loss: Σ weight, further sums, and the next `extra`, None if it takes none."""

    weight_sum: jax.Array
    sums: Mapping[str, Sums]
    extra: Extra


def takes_argument(loss_fn: LossFn, name: str) -> bool:
    """Whether a loss function has a parameter of this name; raises ValueError if it is not a function."""
    if not callable(loss_fn):
        raise UserError(f"this takes a loss function, not a {type(loss_fn).__name__}")
    return name in inspect.signature(loss_fn).parameters


def bind_loss(loss_fn: LossFn, state: TrainState) -> Callable[[Params, Microbatch, Key], tuple[jax.Array, LossOutputs]]:
    """The loss as `loss(params, microbatch, key) -> (loss_sum, LossOutputs)`, with `extra` of the state."""
    parameters = inspect.signature(loss_fn).parameters
    name = getattr(loss_fn, "__name__", "loss_fn")
    for argument, how in (("key", "seed=0"), ("extra", "extra=…")):
        is_needed = argument in parameters and parameters[argument].default is inspect.Parameter.empty
        if is_needed and getattr(state, argument) is None:
            raise UserError(f"{name} takes {argument}: step.init(params, {how}) gives the state one")
    takes_key = "key" in parameters and state.key is not None
    takes_extra = "extra" in parameters and state.extra is not None

    def loss(params: Params, microbatch: Microbatch, key: Key) -> tuple[jax.Array, LossOutputs]:
        # Made again, as it may change them in place; NNX's variables it may only under the trace that made them.
        microbatch, extra = jax.tree.map(lambda leaf: leaf, (microbatch, state.extra))
        arguments = ({"key": key} if takes_key else {}) | ({"extra": extra} if takes_extra else {})
        returned = loss_fn(params, microbatch, **arguments)
        wanted = "(loss_sum, weight_sum[, sums]" + (", extra)" if takes_extra else ")")
        if not isinstance(returned, tuple) or len(returned) not in (2 + takes_extra, 3 + takes_extra):
            got = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else f"one value, {describe(returned)}"
            raise UserError(f"{name} must return {wanted}, not {got}")
        loss_sum, weight_sum, *rest = returned
        next_extra = check_extra(name, rest.pop(), state.extra) if takes_extra else None
        sums = rest[0] if rest else {}
        if not isinstance(sums, Mapping):
            raise UserError(f"{name} must return {wanted}, sums a dict of arrays, not a {type(sums).__name__}")
        for what, value in (("loss_sum", loss_sum), ("weight_sum", weight_sum)):
            has_shape = hasattr(value, "shape")
            if np.shape(value) if has_shape else not is_number(value):
                kind = describe(value) if has_shape else f"a {type(value).__name__}"
                raise UserError(
                    f"{name} must return a scalar {what}, not {kind}: sum over the rows. A loss that gives (mean, aux) "
                    "is one of Σ loss, Σ weight, and a dict of further sums"
                )
        check_real(name, {"loss_sum": loss_sum, "weight_sum": weight_sum, "sums": dict(sums)})
        loss_sum, weight_sum = jnp.asarray(loss_sum), jnp.asarray(weight_sum)
        return loss_sum, LossOutputs(weight_sum, jax.tree.map(jnp.asarray, dict(sums)), next_extra)

    return loss


def check_real(name: str, arrays: Mapping[str, PyTree]) -> None:
    """Raises ValueError that lists what a function returns and what is not a real number."""
    named = leaves_by_name(arrays).items()
    if wrong := [f"{at} {describe(leaf)}" for at, leaf in named if is_key(leaf) or jnp.iscomplexobj(leaf)]:
        raise UserError(
            f"{name} must return real numbers, not {list_first(wrong)}: return the real and the imaginary part of a "
            "complex one"
        )


def check_extra(name: str, returned: PyTree, given: PyTree) -> PyTree:
    """The next `extra`; raises ValueError if its structure, shapes or dtypes changed."""
    differing = [f"{leaf or 'it'}: {change}" for leaf, change in differences(given, returned).items()]
    if differing or not have_same_containers(given, returned):
        listed = list_first(differing, "; ") or "its containers differ"
        raise UserError(f"{name} must return extra as it takes it, and last: {listed}")
    return returned
