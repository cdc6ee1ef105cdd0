"""Learning rate from batch size: in go a schedule and the sequences of every step, out come the rates in force.

The rate of step t is base(t) × s(n_t / n_ref): s is the identity (linear scaling), the square root, 1 or a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from jaxtyping import Float64

from jvarlen.lengths import list_offenders
from jvarlen.planned_steps import PlannedSteps

__all__ = ["Rule", "lr_scale", "lr_sequence", "scale_by_batch_size"]

Rule = Literal["linear", "sqrt"] | Callable[[Any], Any] | None
BaseSchedule = float | npt.ArrayLike | Callable[[Any], Any]


def lr_scale(batch_size: npt.ArrayLike, base_batch_size: float, rule: Rule = "linear") -> Any:
    """The factor on the learning rate for a batch size.

    Args:
      batch_size: number or array ≥ 0, in sequences (or in tokens, where `base_batch_size` is).
      base_batch_size: the batch size that the base rate was tuned for, > 0, in the same unit.
      rule: `"linear"`, `"sqrt"`, None (no scaling), or a function of the ratio.

    Returns:
      float64 of the shape of `batch_size`.

    Raises:
      ValueError: an unknown rule, a negative or NaN batch size, a base batch size that is not positive.

    Example:
      >>> float(lr_scale(1024, 256, "sqrt"))
      2.0

    References:
      Linear: Goyal et al. 2017, "Accurate, Large Minibatch SGD". Square root: Krizhevsky 2014, "One weird trick", and
      for Adam Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms".
    """
    sizes = np.asarray(batch_size, np.float64)
    wrong = np.flatnonzero(~(np.isfinite(sizes) & (sizes >= 0)))
    if len(wrong):
        raise ValueError(f"batch sizes must be finite and at least 0: {list_offenders(wrong, sizes.ravel()[wrong], 0)}")
    return np.asarray(_apply_rule(np, sizes / _check_base(base_batch_size), rule), np.float64)[()]


def lr_sequence(
    plan: PlannedSteps,
    base_schedule: BaseSchedule,
    base_batch_size: float,
    *,
    rule: Rule = "linear",
    unit: Literal["sequences", "tokens"] = "sequences",
) -> Float64[np.ndarray, " S"]:
    """The learning rate of every step of a plan, in float64 on the host.

    Args:
      plan: a plan, or a distributed one; S steps.
      base_schedule: a number, an array of S rates, or a function from the step index, such as an Optax schedule (which
        is evaluated in float64 here).
      base_batch_size: the batch size that the base rate was tuned for, in `unit` a step.
      rule: as in `lr_scale`.
      unit: what the batch size counts: real `"sequences"` or real `"tokens"`.

    Returns:
      float64[S].

    Raises:
      ValueError: an unknown unit or rule, an array that has not S entries, a base batch size that is not positive.

    Example:
      >>> from jvarlen.plan import make_plan
      >>> plan = make_plan([3] * 14, [(10, 3)])
      >>> lr_sequence(plan, 1e-3, 2).tolist()
      [0.005, 0.002]
    """
    if unit not in ("sequences", "tokens"):
        raise ValueError(f'unit must be "sequences" or "tokens", not {unit!r}')
    batch_sizes = plan.num_sequences if unit == "sequences" else plan.num_tokens
    return base_rates(base_schedule, plan.num_steps) * lr_scale(batch_sizes, base_batch_size, rule)


def base_rates(base_schedule: BaseSchedule, num_steps: int) -> Float64[np.ndarray, " S"]:
    """The base rate of every step, before any scaling by batch size: float64[num_steps]."""
    if not callable(base_schedule):
        rates = np.asarray(base_schedule, np.float64)
        if rates.shape not in ((), (num_steps,)):
            raise ValueError(f"base_schedule has shape {rates.shape}, the plan {num_steps} steps")
        return np.broadcast_to(rates, (num_steps,)).copy()
    with jax.enable_x64(True):  # Optax schedules compute in float32 otherwise
        try:
            rates = np.asarray(base_schedule(np.arange(num_steps)), np.float64)
        except (TypeError, ValueError):  # a function of one step only
            rates = np.array([float(base_schedule(step)) for step in range(num_steps)])
    return np.broadcast_to(rates, (num_steps,)).copy()


def scale_by_batch_size(base_batch_size: float, *, rule: Rule = "linear") -> optax.GradientTransformationExtraArgs:
    """Scales updates by the batch size of the step, which scales the learning rate of the optimizer before it.

    Put it last in a chain: what it scales includes AdamW's decoupled weight decay, as a change of the learning rate
    would. `update` takes the extra argument `batch_size`, a number or float32[]; an array does not retrace when it
    changes.

    Args:
      base_batch_size: the batch size that the base rate was tuned for, > 0.
      rule: as in `lr_scale`; a function must accept JAX arrays.

    Returns:
      A stateless `optax.GradientTransformationExtraArgs`.

    Raises:
      ValueError: an unknown rule, or a base batch size that is not positive.

    Example:
      >>> optimizer = optax.chain(optax.sgd(1.0), scale_by_batch_size(2))
      >>> updates, _ = optimizer.update(jnp.ones(()), optimizer.init(jnp.ones(())), batch_size=jnp.float32(6))
      >>> float(updates)
      -3.0

    References:
      As for `lr_scale`.
    """
    base = _check_base(base_batch_size)
    _apply_rule(np, 1.0, rule)

    def update_fn(updates, state, params=None, *, batch_size, **extra_args):
        del params, extra_args
        scale = _apply_rule(jnp, jnp.asarray(batch_size, jnp.float32) / jnp.float32(base), rule)
        return jax.tree.map(lambda update: (update * scale).astype(update.dtype), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update_fn)


def _apply_rule(numpy: Any, ratio: Any, rule: Rule) -> Any:
    if rule is None:
        return numpy.ones_like(ratio)
    if callable(rule):
        return rule(ratio)
    if rule == "linear":
        return ratio
    if rule == "sqrt":
        return numpy.sqrt(ratio)
    raise ValueError(f'rule must be "linear", "sqrt", None or a function of the ratio, not {rule!r}')


def _check_base(base_batch_size: float) -> float:
    if not 0 < base_batch_size < math.inf:
        raise ValueError(f"base_batch_size must be finite and above 0, not {base_batch_size}")
    return float(base_batch_size)
