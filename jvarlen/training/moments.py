"""AdamW and SGD whose moments forget by samples or tokens in place of steps.

Letters: S steps of all plans.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import ModuleType
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Int64

from jvarlen._common.checks import UserError, check_choices, is_number
from jvarlen._common.keywords import check_keywords
from jvarlen._common.types import Array, Params, PyTree
from jvarlen.training.optimizers import (
    PlannedState,
    batch_size_given,
    planned_state,
    scale_by_batch_size,
    scale_by_rates,
)
from jvarlen.training.rates import (
    BaseSchedule,
    BatchSizes,
    BatchSizeUnit,
    Rule,
    ScheduleUnit,
    base_rates,
    before_each,
    check_beta,
    counted_sizes,
    lr_scale,
)

__all__ = ["MomentsState", "SeenState", "adamw_by_batch_size", "sgd_by_batch_size"]

EpsRule = Literal["sqrt"] | None


class SeenState(NamedTuple):
    """What has been seen where batch sizes come with the steps.

    Attributes:
      count: int32[], updates so far.
      total: float32[] (float64 with 64-bit types enabled), Σ batch size / `base_batch_size` over them.
    """

    count: Array
    total: Array


class MomentsState(NamedTuple):
    """The state of the moments.

    Attributes:
      seen: a `SeenState`, or with `plan` a `PlannedState`, whose table is not in checkpoints.
      moments: of the gradients, and for AdamW of their squares; in the shapes and types of the parameters.
    """

    seen: SeenState | PlannedState
    moments: tuple[Params, ...]


@check_keywords
def adamw_by_batch_size(
    learning_rate: BaseSchedule,
    base_batch_size: float,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    unit: BatchSizeUnit = "sequences",
    rule: Rule = "sqrt",
    eps_rule: EpsRule = None,
    plan: BatchSizes | None = None,
    counted_in: ScheduleUnit = "steps",
) -> optax.GradientTransformationExtraArgs:
    """AdamW whose moments forget by samples (or tokens) in place of steps, and whose rate follows the batch size.

    At a step of n samples, with r = n / base_batch_size and R = Σ r over all steps so far:

    - a moment keeps β^r of its value and takes 1 − β^r of the gradient, or of its square: m and v;
    - the parameters move by −lr · rule(r) · (m̂ / (√v̂ + ε) + weight_decay · p), m̂ = m / (1 − b1^R), v̂ = v / (1 − b2^R).

    Batches of `base_batch_size` give `optax.adamw`, and one of twice the size counts as two for the half-life of both
    moments. A step of no samples leaves the moments as they are.

    Without `plan`, `update` takes the batch size as that of `scale_by_batch_size` does: `make_train_step` passes it.
    With `plan`, β^r, 1 − β^r, R and rates are rounded from float64 tables. Constant batches of `base_batch_size` at a
    constant rate then give float32 parameters the bits of `optax.adamw`, as tests on CPUs show: 1 − β^R is Optax's
    formula where R is the number of steps; elsewhere it has no cancellation. In float32 β^r itself is rounded to 3e-8:
    with b2 = 0.999, v of batches of `base_batch_size` / 128 may be off by 0.4 %. Like Optax's, moments have the type of
    the parameters: in bfloat16 wrap the optimizer in `with_float32_master`.

    Inside of `optax.MultiSteps` it sees the batch size of the last of the steps that make an update. A step that
    `optax.apply_if_finite` rejects stays the next one of `plan`: leave `plan` out there.

    Args:
      learning_rate: the rate at `base_batch_size`: a number or an Optax schedule; with `plan` as in `lr_sequence`.
      base_batch_size: the batch size that rate and betas were tuned for, > 0, in `unit` a step.
      b1: what a step of `base_batch_size` keeps of the first moment, at least 0 and below 1.
      b2: of the second moment.
      eps: ε, at least 0.
      weight_decay: decoupled, at least 0.
      unit: what the batch size counts: real `"sequences"` or real `"tokens"`.
      rule: how the rate follows r, as in `lr_scale`.
      eps_rule: `"sqrt"` divides ε by √r, as the square-root rule for Adam does; None leaves it.
      plan: as in `lr_sequence`; the plans, or the batch sizes, of all epochs. `open_checkpoints` does not save them.
      counted_in: with `plan`, what the argument of a schedule counts, as in `lr_sequence`.

    Returns:
      An Optax optimizer. After the last step of `plan`, parameters become NaN.

    Raises:
      ValueError: an argument out of its range; arguments that `lr_sequence` rejects. Without its extra argument,
        `update` raises TypeError.

    Example:
      >>> optimizer = adamw_by_batch_size(1e-3, 32, plan=[128, 32])
      >>> _, (moments, *_) = optimizer.update(jnp.ones(2), optimizer.init(jnp.ones(2)), jnp.ones(2))
      >>> round(float(moments.moments[0][0]), 4)  # 1 - 0.9 ** 4
      0.3439

    References:
      Half-lives in tokens: Marek et al. 2025, "Small Batch Size Training for Language Models". The square root for
      rate and ε: Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms".
    """
    check_beta("b1", b1)
    check_beta("b2", b2)
    for name, value in (("eps", eps), ("weight_decay", weight_decay)):
        if not (is_number(value) and 0 <= value < math.inf):
            raise UserError(f"{name} ({value!r}) must be a finite number, at least 0")
    if eps_rule not in ("sqrt", None):
        raise UserError(f'eps_rule must be "sqrt" or None, not {eps_rule!r}')
    steps, rates = _steps_and_rates(
        "adamw_by_batch_size", (b1, b2), learning_rate, base_batch_size, rule, unit, plan, counted_in
    )

    def update_fn(updates, state, params=None, **extra_args):
        del params
        step, seen = steps.next(state.seen, extra_args)

        def move(moment: int, values: PyTree) -> PyTree:
            kept, taken = step.shares[moment]
            return jax.tree.map(
                lambda value, old: (_like(taken, value) * value + _like(kept, old) * old).astype(old.dtype),
                values,
                state.moments[moment],
            )

        mean, square = move(0, updates), move(1, jax.tree.map(lambda grad: jnp.square(jnp.abs(grad)), updates))
        scales = [_bias(beta, step.total, seen.count) for beta in (b1, b2)]
        # Without samples, ε is no 0 / 0.
        added = jnp.where(step.total > 0, eps, 1)
        if eps_rule == "sqrt":
            added = jnp.where(step.ratio > 0, eps / jnp.sqrt(step.ratio), jnp.inf)

        def direction(mean: Array, square: Array) -> PyTree:
            root = jnp.sqrt(square / _like(scales[1], square))
            return mean / _like(scales[0], mean) / (root + _like(added, square))

        return jax.tree.map(direction, mean, square), MomentsState(seen, (mean, square))

    moments = optax.GradientTransformationExtraArgs(steps.init, update_fn)
    return optax.chain(moments, optax.add_decayed_weights(weight_decay), *rates)


@check_keywords
def sgd_by_batch_size(
    learning_rate: BaseSchedule,
    base_batch_size: float,
    *,
    momentum: float | None = None,
    nesterov: bool = False,
    unit: BatchSizeUnit = "sequences",
    rule: Rule = "linear",
    plan: BatchSizes | None = None,
    counted_in: ScheduleUnit = "steps",
) -> optax.GradientTransformationExtraArgs:
    """SGD whose momentum forgets by samples (or tokens) in place of steps, and whose rate follows the batch size.

    At a step of n samples, with r = n / base_batch_size, the momentum keeps β^r of its value and takes (1 − β^r) /
    (1 − β) of the gradient; the parameters move by −lr · rule(r) times it. Batches of `base_batch_size` give
    `optax.sgd`, to the bit as AdamW; in the momentum one of twice the size with an equal gradient counts as two.

    Args:
      learning_rate: as in `adamw_by_batch_size`.
      base_batch_size: as in `adamw_by_batch_size`.
      momentum: β, what a step of `base_batch_size` keeps, at least 0 and below 1; None for none.
      nesterov: whether the momentum is Nesterov's.
      unit: as in `adamw_by_batch_size`.
      rule: as in `adamw_by_batch_size`.
      plan: as in `adamw_by_batch_size`.
      counted_in: as in `adamw_by_batch_size`.

    Returns:
      An Optax optimizer. After the last step of `plan`, parameters become NaN.

    Raises:
      ValueError: an argument out of its range; arguments that `lr_sequence` rejects. Without its extra argument,
        `update` raises TypeError.

    Example:
      >>> optimizer = sgd_by_batch_size(1.0, 32, momentum=0.5, rule=None, plan=[64])
      >>> updates, _ = optimizer.update(jnp.ones(()), optimizer.init(jnp.ones(())))
      >>> float(updates)  # of 32 twice it would be 1 and then 0.5 + 1
      -1.5

    References:
      As for `lr_scale` and `beta_sequence`.
    """
    if momentum is not None:
        check_beta("momentum", momentum)
    beta = momentum or 0.0
    steps, rates = _steps_and_rates(
        "sgd_by_batch_size", (beta,), learning_rate, base_batch_size, rule, unit, plan, counted_in
    )
    if momentum is None:
        return optax.chain(*rates)

    def update_fn(updates, state, params=None, **extra_args):
        del params
        step, seen = steps.next(state.seen, extra_args)
        ((kept, taken),) = step.shares

        def move(old: Array, grad: Array) -> PyTree:
            return (_like(kept, old) * old + _like(taken / (1 - beta), grad) * grad).astype(old.dtype)

        trace = jax.tree.map(move, *state.moments, updates)
        updates = jax.tree.map(move, trace, updates) if nesterov else trace
        return updates, MomentsState(seen, (trace,))

    return optax.chain(optax.GradientTransformationExtraArgs(steps.init, update_fn), *rates)


class _Step(NamedTuple):
    """What the batch size of a step decides; total includes it."""

    ratio: Array
    total: Array
    shares: list[tuple[Array, Array]]  # of each moment, β^r and 1 − β^r


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Steps:
    """The batch sizes of all steps, planned or as they come, and what follows from them."""

    function: str  # as users call it
    betas: tuple[float, ...]
    base: float
    unit: BatchSizeUnit
    sizes: Int64[np.ndarray, " S"] | None

    def init(self, params: Params) -> MomentsState:
        seen: SeenState | PlannedState = SeenState(jnp.zeros((), np.int32), jnp.zeros((), float))
        if self.sizes is not None:
            ratios, totals = self.sizes / self.base, np.cumsum(self.sizes) / self.base
            shares = [share for beta in self.betas for share in _shares(np, beta, ratios)]
            seen = planned_state(np.stack([ratios, totals, *shares]))
        return MomentsState(seen, tuple(optax.tree.zeros_like(params) for _ in self.betas))

    def next(
        self, seen: SeenState | PlannedState, extra_args: Mapping[str, Array]
    ) -> tuple[_Step, SeenState | PlannedState]:
        """What the next step is, and the state after it."""
        if isinstance(seen, PlannedState) != (self.sizes is not None):
            raise UserError(f"{self.function} has plan= if its state is that of planned steps, else none")
        if isinstance(seen, PlannedState):
            # After the last step it is the rate that makes NaN: with a choice in each value, XLA would round otherwise
            # than Optax's constants.
            ratio, total, *shares = seen.table.at[..., seen.count].get(mode="clip")
            step = _Step(ratio, total, list(zip(shares[::2], shares[1::2], strict=True)))
            return step, seen._replace(count=optax.safe_increment(seen.count))
        ratio = batch_size_given(extra_args, self.unit, self.function, f"{self.function}(…, plan=)") / self.base
        seen = SeenState(optax.safe_increment(seen.count), seen.total + ratio)
        return _Step(ratio, seen.total, [_shares(jnp, beta, ratio) for beta in self.betas]), seen


def _steps_and_rates(
    function: str,
    betas: tuple[float, ...],
    learning_rate: BaseSchedule,
    base_batch_size: float,
    rule: Rule,
    unit: BatchSizeUnit,
    plan: BatchSizes | None,
    counted_in: ScheduleUnit,
) -> tuple[_Steps, list[optax.GradientTransformation]]:
    """The steps, and what scales the updates of each by −lr · rule(r)."""
    check_choices(unit=(unit, BatchSizeUnit), counted_in=(counted_in, ScheduleUnit))
    lr_scale(base_batch_size, base_batch_size, rule)
    base = float(base_batch_size)
    if plan is None:
        if counted_in != "steps" or not (callable(learning_rate) or np.ndim(learning_rate) == 0):
            raise UserError("an array of rates, and a schedule that is counted in sequences or tokens, needs plan=")
        steps = _Steps(function=function, betas=betas, base=base, unit=unit, sizes=None)
        scale = scale_by_batch_size(base, rule=rule, unit=unit)
        return steps, [optax.scale_by_learning_rate(learning_rate), scale]
    counted, sizes = counted_sizes(plan, unit, counted_in)  # once: the plans may come from an iterator
    rates = base_rates(learning_rate, before_each(counted)) * lr_scale(sizes, base, rule)
    steps = _Steps(function=function, betas=betas, base=base, unit=unit, sizes=sizes)
    return steps, [optax.scale(-1.0), scale_by_rates(rates)]


def _shares(numpy: ModuleType, beta: float, ratio: Array) -> tuple[Array, Array]:
    """β^r, and 1 − β^r without cancellation; 1 and 0 for r = 0, whatever β is."""
    exponent = ratio * math.log(beta) if beta else numpy.where(ratio > 0, -numpy.inf, 0.0)
    kept, taken = numpy.exp(exponent), -numpy.expm1(exponent)
    return numpy.where(ratio == 1, beta, kept), numpy.where(ratio == 1, 1 - beta, taken)


def _bias(beta: float, total: Array, count: Array) -> PyTree:
    """1 − β^R, which is 1 before the first sample; in steps of base batches, as Optax computes it."""
    as_in_optax = 1 - beta ** count.astype(total.dtype)
    scale = jnp.where(total == count.astype(total.dtype), as_in_optax, _shares(jnp, beta, total)[1])
    return jnp.where(total > 0, scale, 1)


def _like(scalar: Array, leaf: Array) -> jax.Array:
    """In the type of an array, as Optax's constants are."""
    return jnp.asarray(scalar, leaf.dtype)
