"""Training step: in go a loss and an optimizer, out comes a pure function (state, batch) -> (state, metrics).

The loss of a step is Σ loss / Σ weight over all its microbatches, divided once, so that every split of a step over
shards and accumulation gives the same gradient. Letters: M microbatches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from jvarlen.collate import count_tokens
from jvarlen.distributed import check_shards_divide

__all__ = [
    "LossFn",
    "Metrics",
    "StepFn",
    "TrainState",
    "init_train_state",
    "make_eval_step",
    "make_train_step",
    "microbatches_of",
]

LossFn = Callable[[Any, Any], tuple[jax.Array, jax.Array]]
StepFn = Callable[[Any, Any], tuple[Any, "Metrics"]]


class TrainState(NamedTuple):
    """What a step changes.

    Attributes:
      params: pytree of arrays.
      opt_state: the optimizer's.
    """

    params: Any
    opt_state: Any


class Metrics(NamedTuple):
    """What a step measures, before the division, so that sums over steps are exact.

    Attributes:
      loss_sum: float32[], Σ loss × weight.
      weight_sum: float32[], Σ weight: the predicted tokens, for a language model.
      num_tokens: float32[], real tokens; None for a batch that is none of `jvarlen`'s.
    """

    loss_sum: jax.Array
    weight_sum: jax.Array
    num_tokens: jax.Array | None = None

    @property
    def loss(self) -> jax.Array | np.ndarray:
        """Σ loss / Σ weight, and 0 where Σ weight is 0.

        Outside of traced functions it is divided on the host: that waits for the step, and compiles nothing.
        """
        if isinstance(self.loss_sum, jax.core.Tracer):
            return _divide_once(self.loss_sum, self.weight_sum)
        loss_sum, weight_sum = np.asarray(self.loss_sum), np.asarray(self.weight_sum)
        return np.divide(loss_sum, weight_sum, out=np.zeros_like(loss_sum), where=weight_sum > 0)


def init_train_state(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step.

    Args:
      params: pytree of arrays.
      optimizer: any Optax optimizer.

    Returns:
      `TrainState`.
    """
    return TrainState(params, optimizer.init(params))


def make_train_step(
    loss_fn: LossFn, optimizer: optax.GradientTransformation, *, mesh: Mesh | None = None, axis_name: str = "data"
) -> StepFn:
    """A train step with exact normalisation and accumulation over microbatches.

    Args:
      loss_fn: `loss_fn(params, microbatch) -> (loss_sum, weight_sum)`, two float scalars; the microbatch is the batch
        without its leading axis.
      optimizer: any Optax optimizer; `batch_size=batch.num_sequences` and, for the batches of `jvarlen.collate`,
        `num_tokens`, both of the whole step, are passed to its update.
      mesh: spreads a step's microbatches over `axis_name`; gradients are reduced once a step. None: one device.
      axis_name: the data-parallel axis of the mesh; its size must divide M.

    Returns:
      `train_step(state, batch) -> (state, Metrics)`: a plain function, to be compiled by `compile_buckets`. Every leaf
      of the batch that is not a scalar has leading axis M, and `batch.num_sequences` counts its real samples.

    Raises:
      ValueError: when it is traced, shards that do not divide M.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        metrics, grads = _sums(jax.value_and_grad(loss_fn, has_aux=True), state.params, batch, mesh, axis_name)
        grads = jax.tree.map(
            lambda grad, param: _divide_once(grad, metrics.weight_sum).astype(param.dtype), grads, state.params
        )
        counts = {"batch_size": batch.num_sequences}
        if metrics.num_tokens is not None:
            counts["num_tokens"] = metrics.num_tokens
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params, **counts)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), metrics

    return train_step


def make_eval_step(loss_fn: LossFn, *, mesh: Mesh | None = None, axis_name: str = "data") -> StepFn:
    """An evaluation step: the sums of a step without a gradient.

    Args:
      loss_fn: as for `make_train_step`.
      mesh: as for `make_train_step`.
      axis_name: as for `make_train_step`.

    Returns:
      `eval_step(params, batch) -> (params, Metrics)`: a plain function; the parameters come back unchanged, so that
      `compile_buckets` can donate them as it does a state.

    Raises:
      ValueError: when it is traced, shards that do not divide M.
    """

    def without_gradient(params: Any, microbatch: Any) -> tuple[tuple[jax.Array, jax.Array], None]:
        return loss_fn(params, microbatch), None

    def eval_step(params: Any, batch: Any) -> tuple[Any, Metrics]:
        metrics, _ = _sums(without_gradient, params, batch, mesh, axis_name)
        return params, metrics

    return eval_step


def microbatches_of(batch: Any) -> int:
    """M: the leading axis of a step's arrays."""
    return max(leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.ndim)


def _divide_once(total: jax.Array, weight_sum: jax.Array) -> jax.Array:
    """Total / weight_sum, and 0 where the weight is 0."""
    return jnp.where(weight_sum > 0, total / jnp.where(weight_sum > 0, weight_sum, 1), 0).astype(total.dtype)


def _sums(value_fn: Callable, params: Any, batch: Any, mesh: Mesh | None, axis_name: str) -> tuple[Metrics, Any]:
    """Metrics and gradients summed over all microbatches, on all shards."""
    num_microbatches = microbatches_of(batch)
    microbatches = jax.tree.map(lambda leaf: leaf if leaf.ndim else jnp.broadcast_to(leaf, (num_microbatches,)), batch)
    if mesh is None:
        return _accumulate(value_fn, params, microbatches)
    check_shards_divide(num_microbatches, mesh, axis_name)

    def on_shard(params: Any, microbatches: Any) -> tuple[Metrics, Any]:
        # Replicated parameters would put the gradients' all-reduce inside the loop; as varying ones they are reduced
        # after.
        params = jax.lax.pcast(params, axis_name, to="varying")
        return jax.lax.psum(_accumulate(value_fn, params, microbatches, varying_over=axis_name), axis_name)

    split, whole = PartitionSpec(axis_name), PartitionSpec()
    return jax.shard_map(on_shard, mesh=mesh, in_specs=(whole, split), out_specs=whole)(params, microbatches)


def _accumulate(
    value_fn: Callable, params: Any, microbatches: Any, *, varying_over: str | None = None
) -> tuple[Metrics, Any]:
    @functools.partial(jax.jit, inline=True)  # traced once, for the shapes of its sums and for the loop
    def one(microbatch: Any) -> tuple[Metrics, Any]:
        (loss_sum, weight_sum), grads = value_fn(params, microbatch)
        sums = Metrics(loss_sum, weight_sum, count_tokens(microbatch)), grads
        # Sums of many small numbers: whatever they are computed in, they are added in float32 at least.
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.promote_types(jnp.result_type(leaf), jnp.float32)), sums)

    def add(sums: Any, microbatch: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, one(microbatch)), None

    first = jax.tree.map(lambda leaf: leaf[0], microbatches)
    if all(leaf.shape[0] == 1 for leaf in jax.tree.leaves(microbatches)):
        return one(first)  # a loop of one turn, and its sums with zero, would cost time and memory
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(one, first))
    if varying_over is not None:
        zeros = jax.lax.pcast(zeros, varying_over, to="varying")
    return jax.lax.scan(add, zeros, microbatches)[0]
