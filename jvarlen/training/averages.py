"""Averages of the parameters that an optimizer keeps, which are evaluated in place of the trained ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jvarlen._common.checks import UserError, is_number, list_first
from jvarlen._common.pytree import describe, leaves_by_name
from jvarlen._common.types import Array, OptState, Params, PyTree
from jvarlen.training.optimizers import masters_of, widened

__all__ = ["EmaOfParamsState", "EvalParams", "average_in_types", "ema_of_params", "keeps_average", "without_average"]

EvalParams = Callable[[OptState, Params], Params]  # (opt_state, params) -> params, of trained parameters alone


class EmaOfParamsState(NamedTuple):
    """The state of `ema_of_params`. The parameters to evaluate are (1 − weight) · average + weight · parameters.

    Attributes:
      count: int32[], updates so far.
      weight: float32[] (float64 with 64-bit types enabled), that of the newest parameters in the average.
      average: of the parameters before the last update, in float32 where they have fewer bits.
    """

    count: Array
    weight: Array
    average: Params


def ema_of_params(decay: float) -> optax.GradientTransformationExtraArgs:
    """Keeps an exponential moving average of the parameters, to evaluate in place of them; updates pass unchanged.

    After t updates it is Σ dᵗ⁻ⁱ pᵢ / Σ dᵗ⁻ⁱ of the parameters p₁ … pₜ after each: the average with Adam's correction of
    the bias, in which the first parameters have no part. It may stand anywhere in a chain, and in other optimizers: it
    sees the parameters, not the updates. In `with_float32_master` it averages the float32 copies; inside of
    `optax.MultiSteps` it counts updates, not steps.

    `TrainStep.for_evaluation` finds the average on any layout. `fit` evaluates, saves and exports it.

    Args:
      decay: d, above 0 and below 1: about 1 / (1 − d) updates count. 0.999 is usual.

    Returns:
      An `optax.GradientTransformationExtraArgs` with `EmaOfParamsState`, which has the size of the trained parameters,
      in float32 or wider.

    Raises:
      ValueError: the decay; and when it updates, no parameters are given.

    Example:
      >>> from jvarlen.parallel.train import make_train_step
      >>> optimizer = optax.chain(optax.sgd(1.0), ema_of_params(0.5))
      >>> step = make_train_step(lambda params, x: (jnp.sum(params * x), jnp.float32(1)), optimizer)
      >>> state = step.init(jnp.float32(0))
      >>> for _ in range(2):  # the parameter becomes -1 and then -2
      ...     state, _ = step(state, jnp.ones((1, 1)))
      >>> round(float(step.for_evaluation(state).params), 4)  # (-1 / 2 - 2) / (1 / 2 + 1)
      -1.6667

    References:
      Polyak and Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging". Kingma and Ba 2015, "Adam",
      section 3, for the correction of the bias, as `optax.ema` has it.
    """
    if not (is_number(decay) and 0 < decay < 1):
        raise UserError(f"decay ({decay}) must be above 0 and below 1")

    def init(params: Params) -> EmaOfParamsState:
        average = jax.tree.map(lambda leaf: jnp.zeros_like(widened(leaf)), params)
        return EmaOfParamsState(jnp.zeros((), np.int32), jnp.ones((), float), average)

    def update(updates, state, params=None, **extra_args):
        del extra_args
        if params is None:
            raise UserError("ema_of_params needs the parameters: optimizer.update(grads, state, params)")
        count = optax.safe_increment(state.count)
        # 1 − dᵗ would lose the bits of a decay near 1. The first parameters are forgotten, as the next weight is 1 too.
        rest = -jnp.expm1(count.astype(state.weight.dtype) * math.log(decay))
        weight = jnp.where(count > 1, (1 - decay) / rest, 1).astype(state.weight.dtype)
        return updates, EmaOfParamsState(count, weight, _ema(state, params))

    return optax.GradientTransformationExtraArgs(init, update)


def _ema(state: EmaOfParamsState, params: Params) -> PyTree:
    """The average with the newest parameters."""

    def of_leaf(average: Array, leaf: Array) -> PyTree:
        weight = state.weight.astype(average.dtype)
        return (1 - weight) * average + weight * leaf.astype(average.dtype)

    return _of_own(of_leaf, state.average, params)


def _schedule_free(state: optax.contrib.ScheduleFreeState, params: Params) -> PyTree:
    """The parameters to evaluate of schedule-free."""

    def of_leaf(z: Array, leaf: Array) -> PyTree:
        return optax.contrib.schedule_free_eval_params(state._replace(z=z), leaf)

    return _of_own(of_leaf, state.z, params)


def _of_own(function: Callable[[Array, Array], PyTree], averages: PyTree, params: Params) -> PyTree:
    """A function of each average and its parameter; `MaskedNode` for all of another part, as of `optax.partition`."""

    def of_leaf(average: PyTree, leaf: PyTree) -> PyTree:
        is_of_other = isinstance(average, optax.MaskedNode)  # of a parameter, or of all below a name
        return jax.tree.map(lambda _: average, leaf) if is_of_other else function(average, leaf)

    return jax.tree.map(of_leaf, averages, params, is_leaf=lambda node: isinstance(node, optax.MaskedNode))


_AVERAGES: dict[type, Callable[..., PyTree]] = {
    EmaOfParamsState: _ema,
    optax.contrib.ScheduleFreeState: _schedule_free,
}


def keeps_average(opt_state: OptState) -> bool:
    """Whether `ema_of_params` or `optax.contrib.schedule_free` is a part of an optimizer, by its state."""
    return any(map(_is_average, jax.tree.leaves(opt_state, is_leaf=_is_average)))


def without_average(opt_state: OptState) -> PyTree:
    """A state of the optimizer without what `keeps_average` looks for."""
    return jax.tree.map(lambda node: optax.EmptyState() if _is_average(node) else node, opt_state, is_leaf=_is_average)


def average_in_types(eval_params: EvalParams | None) -> EvalParams:
    """The function of a user, or that of the averages that are found (None), with the types of the parameters."""

    def average(opt_state: OptState, params: Params) -> PyTree:
        given = (eval_params or _kept_average)(opt_state, params)
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


def _kept_average(opt_state: OptState, params: Params) -> PyTree:
    """The parameters to evaluate, of the one average that is kept of each."""
    parts = [node for node in jax.tree.leaves(opt_state, is_leaf=_is_average) if _is_average(node)]
    params = masters_of(opt_state, params)

    def choose(leaf: Array, *averages: Array) -> PyTree:
        kept = [average for average in averages if not isinstance(average, optax.MaskedNode)]
        if len(kept) > 1:
            raise UserError(
                f"the optimizer keeps {len(kept)} averages of a parameter: keep one of ema_of_params and "
                "schedule_free, or say which one to evaluate, make_train_step(…, eval_params=)"
            )
        return kept[0] if kept else leaf

    return jax.tree.map(choose, params, *(_AVERAGES[type(part)](part, params) for part in parts))


def _is_average(node: PyTree) -> bool:
    return type(node) in _AVERAGES
