"""The update of a training step, from its sums, and its metrics."""

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
from jvarlen.training.step_sums import StepSums, field_of, next_extra
from jvarlen.training.train_state import MasterWeightsOptimizer, Metrics, Optimizer, TrainState, divide_once
from jvarlen.training.trainable import merge_trained, where_trained

__all__ = ["StepFn", "StepHalves", "are_finite", "metrics_of", "update_state", "with_extra_args"]

StepFn = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


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
    following = optax.apply_updates(trained, updates)
    grads_finite, params_finite = _which_are_finite(grads, following, is_whole=is_whole)
    if norms:
        metrics = metrics._replace(grad_norm=optax.tree.norm(grads), update_norm=optax.tree.norm(updates))
    extra = state.extra
    if sums.extra:  # an optimizer that rejects such a gradient does not reject `extra`
        extra = jax.tree.map(functools.partial(jnp.where, grads_finite), next_extra(extra, sums), extra)
    state = state._replace(
        params=merge_trained(following, state.params),
        opt_state=opt_state,
        extra=extra,
        step=None if state.step is None else state.step + 1,
    )
    params_finite &= are_finite(state.extra)
    return state, metrics._replace(grads_finite=grads_finite, params_finite=params_finite)


def are_finite(tree: PyTree) -> jax.Array:
    """Whether all floats of a tree are finite."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return functools.reduce(jnp.logical_and, (jnp.isfinite(leaf).all() for leaf in floats), jnp.array(True))


def _which_are_finite(grads: PyTree, params: PyTree, *, is_whole: bool) -> tuple[jax.Array, jax.Array]:
    """Whether all squares of gradients are finite, and all parameters."""

    def square(grad: jax.Array) -> jax.Array:
        return jnp.square(grad.astype(np.promote_types(grad.dtype, np.float32)))

    def codes_of(grad: jax.Array, param: jax.Array) -> jax.Array:
        """1 for a gradient and 2 for a parameter that is not, of each row."""
        is_odd = ~jnp.isfinite(square(grad)), ~jnp.isfinite(param)
        codes = is_odd[0].astype(np.uint8) | is_odd[1].astype(np.uint8) << 1
        return jax.lax.reduce(codes, np.uint8(0), jax.lax.bitwise_or, [*range(codes.ndim)][-1:]).ravel()

    if not is_whole:  # devices reduce flags, and no codes
        return are_finite(list(map(square, jax.tree.leaves(grads)))), are_finite(params)
    # The kernel of a leaf's update gives the codes of its rows, and one more joins them: on GPUs its start counts.
    codes = map(codes_of, jax.tree.leaves(grads), jax.tree.leaves(params))
    joined = jnp.concatenate([jnp.zeros(0, np.uint8), *codes])
    return ~(joined & 1).any(), ~(joined & 2).any()


def _mean_grads(sums: StepSums, params: Params) -> PyTree:
    """Gradients of the loss, in the types of the parameters; if `params` is None, in the types of the sums."""
    means = jax.tree.map(lambda grad: divide_once(grad, sums.weight_sum), sums.grads)
    return means if params is None else jax.tree.map(lambda mean, param: mean.astype(param.dtype), means, params)


def metrics_of(sums: StepSums, batch: Batch) -> Metrics:
    """The metrics of a step, from its sums and the counts of its batch."""
    num_tokens = field_of(batch, "num_tokens")
    step_tokens = None if num_tokens is None or num_tokens.ndim else num_tokens.astype(sums.loss_sum.dtype)
    return Metrics(sums.loss_sum, sums.weight_sum, sums.num_tokens if step_tokens is None else step_tokens, sums.sums)
