"""The state and the metrics of a training step.

Letters: M microbatches.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

__all__ = ["Metrics", "TrainState", "divide_once", "init_train_state"]


class TrainState(NamedTuple):
    """What a step changes.

    Attributes:
      params: pytree of arrays.
      opt_state: the optimizer's.
      extra: pytree of arrays that are no parameters, such as running statistics, which the loss takes and returns; None
        where it has none.
      key: typed key[], from which the keys of all microbatches come; None where the loss takes no key.
      step: int32[], steps taken; None where the loss takes no key.
    """

    params: Any
    opt_state: Any
    extra: Any = None
    key: Any = None
    step: Any = None


class Metrics(NamedTuple):
    """What a step measures, before the division, so that sums over steps are exact: `metrics + metrics` adds them.

    Attributes:
      loss_sum: float[], Σ loss × weight; float32, or wider where losses or gradients are.
      weight_sum: float[], Σ weight: the predicted tokens, for a language model.
      num_tokens: float[], real tokens; None where neither the batch type nor a field `num_tokens` tells them.
      sums: what else the loss sums up, by name, as it returns them.
      grad_norm: float[], global norm of the gradient of the step's loss; None unless asked for, and in a sum of steps.
      update_norm: float[], global norm of what is added to the parameters; likewise.
    """

    loss_sum: Any
    weight_sum: Any
    num_tokens: Any = None
    sums: Mapping[str, Any] = {}
    grad_norm: Any = None
    update_norm: Any = None

    @property
    def loss(self) -> jax.Array | np.ndarray:
        """Σ loss / Σ weight, and 0 where Σ weight is 0.

        Outside of traced functions it is divided on the host: that waits for the step, and compiles nothing.
        """
        if isinstance(self.loss_sum, jax.core.Tracer):
            return divide_once(self.loss_sum, self.weight_sum)
        loss_sum, weight_sum = map(np.asarray, jax.device_get((self.loss_sum, self.weight_sum)))
        return np.divide(loss_sum, weight_sum, out=np.zeros_like(loss_sum), where=weight_sum != 0)

    def __add__(self, other: Any) -> Metrics:
        if not isinstance(other, Metrics):
            return NotImplemented
        return jax.tree.map(operator.add, self._without_norms(), other._without_norms())

    def __radd__(self, other: Any) -> Metrics:
        return self if isinstance(other, int) and other == 0 else NotImplemented  # where `sum` begins

    def _without_norms(self) -> Metrics:
        return self._replace(grad_norm=None, update_norm=None)


def init_train_state(
    params: Any,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    *,
    extra: Any = None,
    seed: int | None = None,
) -> TrainState:
    """The state before the first step.

    Args:
      params: pytree of arrays.
      optimizer: any Optax optimizer.
      extra: pytree of arrays, for a loss that takes `extra`.
      seed: for a loss that takes `key`; decides all its keys.

    Returns:
      `TrainState`.
    """
    opt_state = optimizer.init(params)
    if seed is None:
        return TrainState(params, opt_state, extra)
    return TrainState(params, opt_state, extra, jax.random.key(seed), jnp.zeros((), np.int32))


def divide_once(total: jax.Array, weight_sum: jax.Array) -> jax.Array:
    """Total / weight_sum, and 0 where the weight is exactly 0."""
    weight_sum = weight_sum.astype(total.dtype)
    return jnp.where(weight_sum == 0, 0, total / jnp.where(weight_sum == 0, 1, weight_sum)).astype(total.dtype)
