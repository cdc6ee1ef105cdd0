"""The training step, a pure function (state, batch) -> (state, metrics): accumulate, reduce, update.

The loss of a step is Σ loss / Σ weight over all its microbatches, divided once, so every split of a step over shards
and accumulation gives the same gradient. Letters: M microbatches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jvarlen._common.checks import UserError
from jvarlen.training.losses import LossFn
from jvarlen.training.optimizers import OptimizerOfMaster
from jvarlen.training.step_sums import StepSums, field_of, next_extra, sum_step
from jvarlen.training.train_state import Metrics, TrainState, divide_once

__all__ = [
    "StepFn",
    "make_eval_step",
    "make_train_step",
    "metrics_of",
    "step_of_sums",
    "update_state",
    "with_extra_args",
]

StepFn = Callable[[Any, Any], tuple[Any, Metrics]]


def make_train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    *,
    mesh: Mesh | None = None,
    axis_name: str = "data",
    norms: bool = False,
) -> StepFn:
    """A train step with exact normalisation and accumulation over microbatches.

    The simplest loss is `loss_fn(params, microbatch) -> (loss_sum, weight_sum)`. It may have further parameters, by
    these names, and return more:

    - `key`: a typed key of its own for every microbatch, the same on any number of devices:
      `fold_in(fold_in(state.key, state.step), i)` for microbatch i of the step. `init_train_state(…, seed=)` sets it.
    - `extra`: `state.extra`, arrays that are not parameters, with their values before the step. The loss returns the
      next values last. Floats change by the mean of the microbatches' changes, weighted by their `weight_sum`; integers
      by the sum of the changes of microbatches that have weight; other types, such as keys, do not change.
    - It may return `(loss_sum, weight_sum, sums)` with a dict of arrays, summed over the step into `Metrics.sums`.

    The gradient is that of Σ loss alone, divided by Σ weight: weights are not differentiated, even if they depend on
    the parameters.

    Args:
      loss_fn: a function of the parameters and a microbatch, the batch without its leading axis; see above. Its two
        sums are scalars over the rows that it gets; the step adds those of other shards.
      optimizer: any Optax optimizer, such as `with_float32_master` for parameters in bfloat16. Its update gets the
        extra arguments that it names, or all if it accepts any: `batch_size=batch.num_sequences` and `num_tokens`, both
        of the whole step; `value`, the loss of the step, and `grad`, its gradient; `value_fn(params)` and
        `grad_fn(params)`, the loss of the same step and its gradient for other parameters.
      mesh: a step's microbatches are spread over `axis_name`, and gradients are reduced once a step. Other axes of the
        mesh are left to the compiler: parameters may be sharded over them. None: one device.
      axis_name: the data-parallel axis of the mesh; its size must divide M.
      norms: whether the metrics include the global norms of gradient and updates.

    Returns:
      `train_step(state, batch) -> (state, Metrics)`: a plain function, to be compiled by `compile_buckets`. The batch
      is any pytree whose leaves, except scalars, have leading axis M. A scalar field `num_sequences` (attribute or key
      of a dict) counts the step's real samples. A field `num_tokens`, a scalar of the step or a count for each
      microbatch, counts its tokens; the batch types of `jvarlen` do not need it.

    Raises:
      ValueError: when it is traced: shards that do not divide M; a loss that takes a key or `extra` that the state does
        not hold, returns another form, or reduces its sums over the mesh itself; a mesh other than the one it is
        compiled for.
    """
    sums_of = sum_step(loss_fn, mesh=mesh, axis_name=axis_name)
    values_of = sum_step(loss_fn, mesh=mesh, axis_name=axis_name, with_grads=False)
    return step_of_sums(sums_of, values_of, optimizer, norms=norms)


def step_of_sums(
    sums_of: Callable[[TrainState, Any], StepSums],
    values_of: Callable[[TrainState, Any], StepSums],
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    *,
    norms: bool = False,
) -> StepFn:
    """A train step from functions that give the sums of a step, with and without gradients: it adds the update."""
    optimizer = with_extra_args(optimizer)

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        value_fn = _value_fn(sums_of, values_of, state, batch)
        return update_state(optimizer, state, batch, sums_of(state, batch), value_fn=value_fn, norms=norms)

    return train_step


def with_extra_args(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """The optimizer as `update_state` takes it: its update may get extra arguments."""
    if isinstance(optimizer, optax.MultiSteps):  # its gradient_transformation() would tell the optimizer inside nothing
        optimizer = optax.GradientTransformationExtraArgs(optimizer.init, optimizer.update)
    return optax.with_extra_args_support(optimizer)


def make_eval_step(loss_fn: LossFn, *, mesh: Mesh | None = None, axis_name: str = "data") -> StepFn:
    """An evaluation step: the sums of a step without a gradient.

    Args:
      loss_fn: as for `make_train_step`.
      mesh: as for `make_train_step`.
      axis_name: as for `make_train_step`.

    Returns:
      `eval_step(state, batch) -> (state, Metrics)`: a plain function. The state is a `TrainState`, or only parameters
      for a loss that takes nothing else. It is returned unchanged, and `compile_buckets` does not donate it.

    Raises:
      ValueError: as `make_train_step`.
    """
    sums_of = sum_step(loss_fn, mesh=mesh, axis_name=axis_name, with_grads=False)

    def eval_step(state: Any, batch: Any) -> tuple[Any, Metrics]:
        sums = sums_of(state if isinstance(state, TrainState) else TrainState(state, None), batch)
        return state, metrics_of(sums, batch)

    return eval_step


def update_state(
    optimizer: optax.GradientTransformationExtraArgs,
    state: TrainState,
    batch: Any,
    sums: StepSums,
    *,
    value_fn: Callable[[Any], jax.Array] | None = None,
    norms: bool = False,
) -> tuple[TrainState, Metrics]:
    """The state and the metrics after a step, from its sums; the optimizer is told the counts of the batch."""
    metrics = metrics_of(sums, batch)
    if isinstance(optimizer, OptimizerOfMaster):
        grads = jax.tree.map(lambda grad: divide_once(grad, sums.weight), sums.grads)
    else:
        grads = _mean_grads(sums, state.params)
    told = {
        "batch_size": _scalar_field(batch, "num_sequences"),
        "num_tokens": metrics.num_tokens,
        "value": metrics.loss,
        "grad": grads,
        "value_fn": value_fn,
        "grad_fn": None if value_fn is None else lambda params, _turn=None: jax.grad(value_fn)(params),
    }
    parameters = inspect.signature(optimizer.update).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    told = {name: value for name, value in told.items() if value is not None and (takes_any or name in parameters)}
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params, **told)
    if norms:
        metrics = metrics._replace(grad_norm=optax.tree.norm(grads), update_norm=optax.tree.norm(updates))
    return (
        state._replace(
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            extra=next_extra(state.extra, sums) if sums.extra else state.extra,
            step=None if state.step is None else state.step + 1,
        ),
        metrics,
    )


def _value_fn(
    sums_of: Callable[[TrainState, Any], StepSums],
    values_of: Callable[[TrainState, Any], StepSums],
    state: TrainState,
    batch: Any,
) -> Callable[..., jax.Array]:
    """The loss of a step for other parameters.

    Its derivative, forward or backward, is the gradient of the step: accumulated and reduced as the step's own.
    """

    @jax.custom_jvp
    def loss_at(params: Any) -> jax.Array:
        return _loss_of(values_of(state._replace(params=params), batch))

    @loss_at.defjvp
    def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[jax.Array, jax.Array]:
        (params,), (changes,) = primals, tangents
        sums = sums_of(state._replace(params=params), batch)
        loss = _loss_of(sums)

        def product(grad: jax.Array, change: jax.Array) -> jax.Array:
            wide = np.promote_types(grad.dtype, loss.dtype)
            return jnp.sum(grad.astype(wide) * change.astype(wide)).real.astype(loss.dtype)

        products = jax.tree.leaves(jax.tree.map(product, _mean_grads(sums, params), changes))
        return loss, sum(products, jnp.zeros_like(loss))

    def value_fn(params: Any, batch_size: Any = None, num_tokens: Any = None, grad_fn: Any = None) -> jax.Array:
        del batch_size, num_tokens, grad_fn  # line searches of Optax hand on all that they are told, or refuse it
        return loss_at(params)

    return value_fn


def _mean_grads(sums: StepSums, params: Any) -> Any:
    return jax.tree.map(lambda grad, param: divide_once(grad, sums.weight).astype(param.dtype), sums.grads, params)


def _loss_of(sums: StepSums) -> jax.Array:
    return divide_once(sums.loss, sums.weight)


def metrics_of(sums: StepSums, batch: Any) -> Metrics:
    """The metrics of a step, from its sums and the counts of its batch."""
    num_tokens = field_of(batch, "num_tokens")
    of_step = None if num_tokens is None or num_tokens.ndim else num_tokens.astype(sums.loss.dtype)
    return Metrics(sums.loss, sums.weight, sums.num_tokens if of_step is None else of_step, sums.sums)


def _scalar_field(batch: Any, name: str) -> jax.Array | None:
    value = field_of(batch, name)
    if value is not None and jnp.ndim(value):
        raise UserError(f"{name} of the batch must be a scalar, of the whole step, not an array {jnp.shape(value)}")
    return value
