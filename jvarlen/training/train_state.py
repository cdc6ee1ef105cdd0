"""The state of a training step, its random keys, and the metrics of a step.

Each microbatch of a step has different keys, whatever the split of the step.
"""

from __future__ import annotations

import collections
import contextlib
import math
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import is_key
from jvarlen._common.types import Array, Extra, Key, KeyPath, OptState, Params, PyTree, Sums
from jvarlen.training.trainable import TrainedOf, select_trained

__all__ = [
    "MasterWeightsOptimizer", "MetricSums", "Metrics", "MicrobatchKeys", "Optimizer", "TrainState", "check_state",
    "divide_once", "has_keys", "key_of_seed", "keys_of_microbatches", "new_state",
]  # fmt: skip

# What every function that takes an optimizer takes.
Optimizer: TypeAlias = optax.GradientTransformation | optax.MultiSteps


class TrainState(NamedTuple):
    """The state that a step changes.

    Attributes:
      params: pytree of arrays.
      opt_state: the state of the optimizer, of trained parameters alone.
      extra: pytree of arrays that are not parameters, such as running statistics, which the loss takes and returns;
        None if it has none.
      key: typed key[], from which the keys of all microbatches are derived; None if the loss takes no key.
      step: int32[], steps taken; None if the loss takes no key, and `extra` holds none.
    """

    params: Params
    opt_state: OptState
    extra: Extra = None
    key: Key = None
    step: Array = None


class Metrics(NamedTuple):
    """The metrics of a step as undivided sums. `MetricSums` adds up those of several steps.

    Attributes:
      loss_sum: float[], Σ of the loss function's losses, weights included; float32, or float64 if the loss returns any
        float of 64 bits, or gradients have them. So are the other sums.
      weight_sum: float[], Σ weight: for a language model, the number of predicted tokens.
      num_tokens: float[], real tokens; None if neither the batch type nor a field `num_tokens` gives them.
      sums: further sums that the loss returns, by name.
      grad_norm: float[], global norm of the gradient of the step's loss; None unless requested, and in a sum of steps.
      update_norm: float[], global norm of the update of the parameters, as `grad_norm`.
      grads_finite: bool[], whether the numbers of the step's gradient are finite, and their squares. Where not, `extra`
        keeps its value, and the optimizer may reject the step, as `optax.apply_if_finite` does. None in evaluations,
        and in a sum of steps.
      params_finite: bool[], whether the trained parameters after the step are finite, and `extra`. None as
        `grads_finite`.
    """

    loss_sum: Array
    weight_sum: Array
    num_tokens: Array = None
    sums: Mapping[str, Sums] = {}
    grad_norm: Array = None
    update_norm: Array = None
    grads_finite: Array = None
    params_finite: Array = None

    @property
    def loss(self) -> jax.Array | np.ndarray:
        """Σ loss / Σ weight, and 0 where Σ weight is 0.

        Outside traced functions the division is on the host: it waits for the step and compiles nothing.
        """
        if isinstance(self.loss_sum, jax.core.Tracer):
            return divide_once(self.loss_sum, self.weight_sum)
        loss_sum, weight_sum = map(np.asarray, jax.device_get((self.loss_sum, self.weight_sum)))
        nothing = np.zeros_like(loss_sum, np.result_type(loss_sum, np.float32))
        return np.divide(loss_sum, weight_sum, out=nothing, where=weight_sum != 0)

    def __add__(self, other: PyTree) -> PyTree:
        """Raises an error: the sum of two tuples is a longer one."""
        raise UserError("Metrics are added up by MetricSums: sums.add(metrics) of every step, then sums.total")

    def __radd__(self, other: PyTree) -> PyTree:
        """Raises an error, as `sum` calls this."""
        return self + other


class MetricSums:
    """Sums of the metrics of steps, added up on the host in float64.

    Counts are exact up to 2**53; those of a single step, in float32, up to 2**24.

    Example:
      >>> sums = MetricSums()
      >>> for loss_sum in (3.0, 6.0):
      ...     sums.add(Metrics(jnp.float32(loss_sum), jnp.float32(2)))
      >>> float(sums.total.weight_sum), sums.loss
      (4.0, 2.25)
    """

    def __init__(self) -> None:
        self._total = Metrics(0.0, 0.0)
        self._num_added = self._num_without_weight = 0
        self._pending: collections.deque[Metrics] = collections.deque()

    def add(self, metrics: Metrics) -> None:
        """Adds the metrics of a step: at once if the device has computed them, or in a later call. Never waits for it.

        Args:
          metrics: of a step; all have the same names in `sums`. Norms, and what is finite, are left out.
        """
        self._pending.append(metrics._replace(grad_norm=None, update_norm=None, grads_finite=None, params_finite=None))
        while self._pending and all(
            leaf.is_ready() for leaf in jax.tree.leaves(self._pending[0]) if hasattr(leaf, "is_ready")
        ):
            self._add_first()

    @property
    def total(self) -> Metrics:
        """The sums in float64, on the host; waits for the steps that are still running."""
        while self._pending:
            self._add_first()
        return self._total

    @property
    def loss(self) -> float:
        """Σ loss / Σ weight of all steps; NaN if nothing has weight, for then there is no loss. Waits like `total`."""
        return float(self.total.loss) if self.total.weight_sum else math.nan

    @property
    def num_steps(self) -> int:
        """Steps that were added."""
        return self._num_added + len(self._pending)

    @property
    def num_steps_without_weight(self) -> int:
        """How many of them have Σ weight 0, as if no sample had a target; waits like `total`."""
        _ = self.total
        return self._num_without_weight

    def _add_first(self) -> None:
        fetched = jax.device_get(self._pending.popleft())
        wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64)[()], fetched)
        self._total = jax.tree.map(operator.add, self._total, wide) if self._num_added else wide
        self._num_added += 1
        self._num_without_weight += bool(wide.weight_sum == 0)


class MasterWeightsOptimizer(optax.GradientTransformationExtraArgs):
    """The optimizer of `with_float32_master`: train steps do not round its gradients to the parameters' type."""


def new_state(
    params: Params,
    optimizer: Optimizer,
    *,
    extra: Extra = None,
    seed: int | None = None,
    trained_of: TrainedOf = select_trained,
) -> TrainState:
    """The state before the first step, where its parameters are. `TrainStep.init` places it."""
    opt_state = optimizer.init(trained_of(params))
    if seed is None and not has_keys(extra):
        return TrainState(params, opt_state, extra)
    key = None if seed is None else key_of_seed(seed)
    return TrainState(params, opt_state, extra, key, jnp.zeros((), np.int32))


def key_of_seed(seed: int) -> jax.Array:
    """The key of a seed below 2**63; `jax.random.key` drops what is above 32 bits unless 64-bit types are enabled."""
    with jax.enable_x64(True) if seed >= 2**32 else contextlib.nullcontext():
        return jax.random.key(seed)


class MicrobatchKeys(NamedTuple):
    """The random keys of a microbatch, or of all of them, with a leading axis."""

    key: Key  # for a loss that takes one
    in_extra: list[Array]  # in place of the keys in `extra`

    def put_in(self, extra: Extra) -> PyTree:
        """`extra` with the keys of this microbatch."""
        leaves, structure = jax.tree.flatten(extra)
        keys = iter(self.in_extra)
        return jax.tree.unflatten(structure, [next(keys) if is_key(leaf) else leaf for leaf in leaves])


def has_keys(extra: Extra) -> bool:
    """Whether leaves of `extra` are random keys; raises ValueError for keys without a type."""
    leaves = jax.tree.leaves_with_path(extra)
    untyped = [
        jax.tree_util.keystr(path)
        for path, leaf in leaves
        if getattr(leaf, "dtype", None) == np.uint32
        and np.shape(leaf)[-1:] in ((2,), (4,))  # of threefry, of rbg
        and _name_of(path) != "count"  # of uses of a key, as NNX has them
    ]
    if untyped:
        raise UserError(
            f"extra holds {list_first(untyped)}, of the form of an old-style random key, which all microbatches of a "
            "step would share: make it a typed one (jax.random.key, jax.random.wrap_key_data), or take it out and let "
            "the loss take a key, loss_fn(params, microbatch, key). If it is not a key, take another type than uint32"
        )
    return any(is_key(leaf) for _, leaf in leaves)


def _name_of(path: KeyPath) -> str:
    """The last name of a path, which of a variable of NNX is followed by "value"."""
    names = [jax.tree_util.keystr((key,), simple=True) for key in path]
    return next((name for name in reversed(names) if name != "value"), "")


def keys_of_microbatches(extra: Extra, step: Array, indices: Array, keys: Key) -> PyTree:
    """The keys of microbatches by their indices; only those of the loss, `keys`, if there are none in `extra`."""
    if not has_keys(extra):
        return keys
    if step is None:
        raise UserError("extra holds random keys, and the state counts no steps: step.init(params, extra=…) makes one")

    def of_each(key: Key) -> PyTree:
        def fold(key: Key, index: Array) -> PyTree:
            return jax.random.fold_in(jax.random.fold_in(key, step), index)

        for _ in key.shape:
            fold = jax.vmap(fold, (0, None))
        return jax.vmap(fold, (None, 0))(key, indices)

    return MicrobatchKeys(keys, [of_each(leaf) for leaf in jax.tree.leaves(extra) if is_key(leaf)])


def check_state(state: Any) -> None:
    """Raises ValueError for a state of another library."""
    if not isinstance(state, TrainState):
        raise UserError(f"the state must be a jvarlen.TrainState, of train_step.init(params), not a {type(state)}")


def divide_once(total: Array, weight_sum: Array) -> jax.Array:
    """Σ total / Σ weight of a step, and 0 where Σ weight is exactly 0: value and derivatives, which are never NaN.

    A step divides by it once, after all of its microbatches. A `StepLoss` calls it for each of its ratios.

    Args:
      total: numbers[...], a sum over the step.
      weight_sum: numbers[] or [...], what it is divided by.

    Returns:
      Array[...] in the type of `total`; of integers, in JAX's default float.

    Example:
      >>> divide_once(jnp.array([3.0, 4.0]), jnp.array([2.0, 0.0])).tolist()
      [1.5, 0.0]
    """
    dtype = jnp.result_type(total, float)
    total, weight_sum = jnp.asarray(total, dtype), jnp.asarray(weight_sum, dtype)
    return _divide(total, weight_sum)


@jax.custom_jvp
def _divide(total: Array, weight_sum: Array) -> jax.Array:
    # XLA divides by it in the kernel of an update, as it has no other operand, and keeps no array of constant zeros,
    # with which the loops begin, until here.
    return jnp.where(weight_sum == 0, weight_sum, total / weight_sum)


@_divide.defjvp
def _divide_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[jax.Array, jax.Array]:
    quotient, weight_sum = _divide(*primals), primals[1]
    change = (tangents[0] - quotient * tangents[1]) / jnp.where(weight_sum == 0, 1, weight_sum)
    return quotient, jnp.where(weight_sum == 0, 0, change)
