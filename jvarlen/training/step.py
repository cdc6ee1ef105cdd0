"""The update of a training step, and the step (state, batch) -> (state, metrics) from its sums and the update."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jvarlen._common.checks import UserError
from jvarlen._common.types import Batch, Params, PyTree, StepHalves
from jvarlen.training.step_sums import StepSums, SumsFn, field_of, next_extra
from jvarlen.training.train_state import MasterWeightsOptimizer, Metrics, Optimizer, TrainState, divide_once
from jvarlen.training.trainable import merge_trained, where_trained

__all__ = ["StepFn", "StepHalves", "are_finite", "metrics_of", "step_of_sums", "update_state", "with_extra_args"]

_SMALL = 2**16  # numbers

StepFn = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def step_of_sums(sums_of: SumsFn, optimizer: Optimizer, *, norms: bool = False, is_whole: bool = False) -> StepFn:
    """A train step from a function that gives the sums of a step; `is_whole`: every device has all of the state."""
    optimizer = with_extra_args(optimizer)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        return update_state(optimizer, state, batch, sums_of(state, batch), norms=norms, is_whole=is_whole)

    return train_step


def with_extra_args(optimizer: Optimizer) -> optax.GradientTransformationExtraArgs:
    """The optimizer as `update_state` takes it: its update may get extra arguments."""
    if isinstance(optimizer, optax.MultiSteps):  # its gradient_transformation() would drop the extra arguments
        optimizer = optax.GradientTransformationExtraArgs(optimizer.init, optimizer.update)
    return optax.with_extra_args_support(optimizer)


def update_state(
    optimizer: optax.GradientTransformationExtraArgs,
    state: TrainState,
    batch: Batch,
    sums: StepSums,
    *,
    norms: bool = False,
    is_whole: bool = False,
) -> tuple[TrainState, Metrics]:
    """The state and the metrics after a step, from its sums; the optimizer gets the counts of the batch."""
    metrics, num_sequences = metrics_of(sums, batch), field_of(batch, "num_sequences")
    if num_sequences is not None and jnp.ndim(num_sequences):
        raise UserError(
            f"num_sequences of the batch must be a scalar, of the whole step, not an array {jnp.shape(num_sequences)}"
        )
    trained = where_trained(sums.grads, state.params)
    grads = _mean_grads(sums, None if isinstance(optimizer, MasterWeightsOptimizer) else trained)
    counts = {
        "batch_size": num_sequences,
        "num_tokens": metrics.num_tokens,
        "value": sums.loss,  # 0 without weight, so that no optimizer makes NaN of it
    }
    parameters = inspect.signature(optimizer.update).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    extra_args = {
        name: value for name, value in counts.items() if value is not None and (takes_any or name in parameters)
    }
    updates, opt_state = optimizer.update(grads, state.opt_state, trained, **extra_args)
    if norms:
        metrics = metrics._replace(grad_norm=optax.tree.norm(grads), update_norm=optax.tree.norm(updates))
    seen = _join_small if is_whole else jax.tree.leaves
    grads_finite, extra = are_finite(list(map(_sum_of_squares, seen(grads)))), state.extra
    if sums.extra:  # an optimizer that rejects such a gradient does not reject `extra`
        extra = jax.tree.map(functools.partial(jnp.where, grads_finite), next_extra(extra, sums), extra)
    trained = optax.apply_updates(trained, updates)
    state = state._replace(
        params=merge_trained(trained, state.params),
        opt_state=opt_state,
        extra=extra,
        step=None if state.step is None else state.step + 1,
    )
    params_finite = are_finite(seen((trained, state.extra)))
    return state, metrics._replace(grads_finite=grads_finite, params_finite=params_finite)


def are_finite(tree: PyTree) -> jax.Array:
    """Whether all floats of a tree are finite."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return functools.reduce(jnp.logical_and, (jnp.isfinite(leaf).all() for leaf in floats), jnp.array(True))


def _join_small(tree: PyTree) -> list[jax.Array]:
    """The leaves of a tree, small ones joined in one array: an operation for each would slow small models down."""

    def is_small(leaf: jax.Array) -> bool:
        return leaf.size <= _SMALL and leaf.dtype.itemsize <= 4 and jnp.issubdtype(leaf.dtype, jnp.floating)

    leaves = jax.tree.leaves(tree)
    small = [leaf.astype(np.float32).ravel() for leaf in leaves if is_small(leaf)]
    return [leaf for leaf in leaves if not is_small(leaf)] + ([jnp.concatenate(small)] if small else [])


def _sum_of_squares(grad: jax.Array) -> jax.Array:
    """The sum of squares, in 32 bits at least; not finite if a value is not, and faster than a test of each."""
    # Without a barrier, squares that the optimizer computes as well are kept in memory for both.
    grad = jax.lax.optimization_barrier(jax.lax.stop_gradient(grad))
    return jnp.sum(jnp.square(jnp.abs(grad.astype(np.promote_types(grad.dtype, np.float32)))))


def _mean_grads(sums: StepSums, params: Params) -> PyTree:
    """Gradients of the loss, in the types of the parameters; if `params` is None, in the types of the sums."""
    means = jax.tree.map(lambda grad: divide_once(grad, sums.weight_sum), sums.grads)
    return means if params is None else jax.tree.map(lambda mean, param: mean.astype(param.dtype), means, params)


def metrics_of(sums: StepSums, batch: Batch) -> Metrics:
    """The metrics of a step, from its sums and the counts of its batch."""
    num_tokens = field_of(batch, "num_tokens")
    step_tokens = None if num_tokens is None or num_tokens.ndim else num_tokens.astype(sums.loss_sum.dtype)
    return Metrics(sums.loss_sum, sums.weight_sum, sums.num_tokens if step_tokens is None else step_tokens, sums.sums)
