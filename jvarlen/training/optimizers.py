"""Learning rates that follow the batch size, as Optax pieces.

Letters: S steps of all plans.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from jaxtyping import Float64

from jvarlen._common.checks import UserError, check_choices, list_first
from jvarlen.planning.steps import StepPlan
from jvarlen.training.rates import (
    BaseSchedule,
    BatchSizeUnit,
    Rule,
    ScheduleUnit,
    apply_rule,
    lr_scale,
    lr_sequence,
)

__all__ = [
    "planned_schedule",
    "scale_by_batch_size",
    "table_schedule",
]


def planned_schedule(
    plan: StepPlan | Iterable[StepPlan | int] | npt.ArrayLike,
    base_schedule: BaseSchedule,
    base_batch_size: float,
    *,
    rule: Rule = "linear",
    unit: BatchSizeUnit = "sequences",
    counted_in: ScheduleUnit = "steps",
) -> optax.Schedule:
    """The learning rates of a plan as an ordinary Optax schedule: step count -> rate.

    After a resume, the count in the optimizer state continues, and so do the rates. They are exactly `lr_sequence`
    rounded to float32 (with 64-bit types enabled, `lr_sequence` itself), in a table that is a constant of the compiled
    program: a plan with other rates compiles again. With `scale_by_batch_size` it does not.

    Args:
      plan: as in `lr_sequence`; pass the plans, or the batch sizes, of all epochs that the schedule shall cover.
      base_schedule: as in `lr_sequence`.
      base_batch_size: as in `lr_sequence`.
      rule: as in `lr_scale`.
      unit: as in `lr_sequence`.
      counted_in: as in `lr_sequence`.

    Returns:
      A function from a count, or an array of counts, to float32 of its shape. It raises ValueError for a count outside
      0 … S−1; a traced one gives NaN there.

    Raises:
      ValueError: arguments that `lr_sequence` rejects.

    Example:
      >>> from jvarlen.planning.plan import make_plan
      >>> schedule = planned_schedule(make_plan([3] * 14, [(10, 3)], order="length"), 1e-3, 2)
      >>> schedule(np.arange(2)).tolist() == np.float32([5e-3, 2e-3]).tolist()
      True

    References:
      As for `lr_scale`.
    """
    rates = lr_sequence(plan, base_schedule, base_batch_size, rule=rule, unit=unit, counted_in=counted_in)
    return table_schedule(rates)


def table_schedule(rates_S: Float64[np.ndarray, " S"]) -> optax.Schedule:
    """A schedule that looks rates up in a table, as `planned_schedule` says."""
    num_steps = len(rates_S)

    def schedule(count: Any) -> jax.Array:
        if not isinstance(count, jax.core.Tracer):
            given = np.atleast_1d(count)
            if len(wrong := given[(given < 0) | (given >= num_steps)]):
                raise UserError(
                    f"{num_steps:,} steps are planned, counted 0 to {num_steps - 1:,}; there is no rate for "
                    f"{list_first(wrong.tolist())}: give the plans of all epochs"
                )
        counts = jnp.asarray(count)
        table_S = jnp.asarray(rates_S.astype(jnp.result_type(float)))  # NumPy's rounding, of float64 to float32
        rates = jnp.take(table_S, counts, mode="clip")
        return jnp.where((counts >= 0) & (counts < num_steps), rates, jnp.nan)

    return schedule


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
        lengths, whatever the plan's `pair_size` is.

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

      Groups of parameters, each with a base rate and a rule of its own, or left unscaled:

      >>> matrices = optax.chain(optax.adamw(1e-3), scale_by_batch_size(256, rule="sqrt"))
      >>> embeddings = optax.chain(optax.sgd(0.1), scale_by_batch_size(32_768, unit="tokens"))
      >>> groups = {"matrices": matrices, "embeddings": embeddings, "norms": optax.adam(1e-4)}
      >>> optimizer = optax.partition(groups, {"embed": "embeddings", "w": "matrices", "scale": "norms"})

    References:
      As for `lr_scale`.
    """
    check_choices(unit=(unit, BatchSizeUnit))
    base: Any = base_batch_size
    if isinstance(base, jax.core.Tracer):
        lr_scale(1.0, 1.0, rule)  # what it refuses is refused here
        base = jnp.where((base > 0) & (base < jnp.inf), base, jnp.nan)
    else:
        lr_scale(base, base, rule)
    name = {"sequences": "batch_size", "tokens": "num_tokens"}[unit]

    def update_fn(updates, state, params=None, **extra_args):
        del params
        if name not in extra_args:
            raise TypeError(
                f"scale_by_batch_size(unit={unit!r}) needs the extra argument {name} of update, as in "
                f"optimizer.update(grads, opt_state, params, {name}=…); a trainer that passes none, such as "
                "apply_gradients of a Flax TrainState, takes planned_schedule as its learning rate instead"
            )
        ratio = jnp.asarray(extra_args[name], float) / base
        scale = apply_rule(jnp, ratio, rule)

        def scaled(update):
            wide = np.promote_types(update.dtype, scale.dtype)  # said, as strict promotion wants it
            return (update.astype(wide) * scale.astype(wide)).astype(update.dtype)

        return jax.tree.map(scaled, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update_fn)
