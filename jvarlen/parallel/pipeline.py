"""Pipeline parallelism: a train step for a model cut into stages.

All microbatches of a step have one shape, so they can follow each other through the stages: in tick t, stage s works on
microbatch t − s. Letters: M microbatches of a step, m those of a data shard, S stages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jvarlen._common.checks import UserError, check_at_least_one, list_first
from jvarlen._common.pytree import leaves_by_name
from jvarlen.distributed.mesh import DATA_AXIS, STAGE_AXIS, auto_axes, check_shards_divide, num_shards_of
from jvarlen.training.losses import LossFn
from jvarlen.training.step import StepFn, metrics_of, update_state
from jvarlen.training.step_sums import microbatches_of, sum_microbatch
from jvarlen.training.train_state import Metrics, TrainState

__all__ = [
    "STAGE_AXIS",
    "StagedParams",
    "Stages",
    "bubble_fraction",
    "make_pipeline_eval_step",
    "make_pipeline_loss_fn",
    "make_pipeline_train_step",
    "pipeline_mesh",
    "place_stages",
]

_AXES = (DATA_AXIS, STAGE_AXIS)


class Stages(NamedTuple):
    """A model cut into stages: three pure functions of one microbatch, the batch without its leading axis.

    Attributes:
      embed: `embed(ends, microbatch) -> x`, the input of the first stage; a pytree of arrays.
      stage: `stage(stage_params, x, microbatch) -> x`, with the same shapes and dtypes.
      loss: `loss(ends, x, microbatch) -> (loss_sum, weight_sum)`, two float scalars, from the output of the last stage.
    """

    embed: Callable[[Any, Any], Any]
    stage: Callable[[Any, Any, Any], Any]
    loss: Callable[[Any, Any, Any], tuple[jax.Array, jax.Array]]


class StagedParams(NamedTuple):
    """The parameters of a model cut into stages.

    Attributes:
      ends: pytree of arrays for `embed` and `loss`, on every device. It is one tree, so that both may use the same
        weights.
      stages: pytree of arrays with leading axis S; a device holds those of its own stage.
    """

    ends: Any
    stages: Any


def bubble_fraction(num_stages: int, num_microbatches: int) -> float:
    """The share of a step's ticks in which a stage has nothing to do: (S − 1) / (M + S − 1).

    Args:
      num_stages: S, at least 1.
      num_microbatches: consecutive microbatches, at least 1: those of one data shard.

    Returns:
      A share in [0, 1).

    Raises:
      ValueError: a number below 1.

    Example:
      >>> bubble_fraction(4, 9)
      0.25

    References:
      Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", section 2.3.
    """
    check_at_least_one(num_stages=num_stages, num_microbatches=num_microbatches)
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


def pipeline_mesh(num_stages: int, num_devices: int | None = None) -> Mesh:
    """A mesh with axes `"data"` and `"stage"`, for one pipeline or several in parallel.

    If the devices belong to several processes, all devices of a pipeline must belong to one process, which reads its
    batches.

    Args:
      num_stages: S; neighbouring stages are on neighbouring devices.
      num_devices: how many of `jax.devices()`, from the first; None for all.

    Returns:
      A `jax.sharding.Mesh` with Auto axes, of num_devices / S and S devices.

    Raises:
      ValueError: there are too few devices, or S does not divide their number.

    Example:
      >>> dict(pipeline_mesh(1, num_devices=1).shape)
      {'data': 1, 'stage': 1}
    """
    devices = jax.devices()
    num_devices = len(devices) if num_devices is None else num_devices
    if not 1 <= num_devices <= len(devices):
        raise UserError(f"num_devices must be between 1 and {len(devices)}, not {num_devices}")
    if num_stages < 1 or num_devices % num_stages:
        raise UserError(f"num_stages must divide the {num_devices} devices, and {num_stages} does not")
    # Auto axes: with explicit ones, shard_map refuses arrays that were not placed by hand.
    return jax.make_mesh(
        (num_devices // num_stages, num_stages), _AXES, axis_types=(AxisType.Auto,) * 2, devices=devices[:num_devices]
    )


def place_stages(params: StagedParams, mesh: Mesh) -> StagedParams:
    """Puts every stage on its devices, and the ends on all. An optimizer state made from the result is placed alike.

    Args:
      params: arrays.
      mesh: has axes `"data"` and `"stage"`.

    Returns:
      `StagedParams` of arrays on the mesh, for `init_train_state` and `compile_buckets`.

    Raises:
      ValueError: an axis is missing, or the leading axis of some leaves is not S; they are listed.
    """
    _check_stages(params, mesh)
    return jax.device_put(
        params, StagedParams(NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(STAGE_AXIS)))
    )


def make_pipeline_train_step(
    stages: Stages, optimizer: optax.GradientTransformation, *, mesh: Mesh, rematerialize: bool = False
) -> StepFn:
    """A train step with the result of `make_train_step` on the unsplit model, and the stages on the devices of a mesh.

    Args:
      stages: the model.
      optimizer: any Optax optimizer. It gets the gradients of all stages at once, so a global norm is that of the whole
        model.
      mesh: has axes `"data"`, over which a step's microbatches are spread, and `"stage"`.
      rematerialize: as for `make_pipeline_loss_fn`.

    Returns:
      `train_step(state, batch) -> (state, Metrics)`: a plain function, to be compiled by `compile_buckets` with the
      same mesh. The state's `params` are `StagedParams`.

    Raises:
      ValueError: as `make_pipeline_loss_fn`.
    """
    loss_fn = make_pipeline_loss_fn(stages, mesh=mesh, rematerialize=rematerialize)
    optimizer = optax.with_extra_args_support(optimizer)

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        return update_state(optimizer, state, batch, sum_microbatch(loss_fn, state, batch))

    return train_step


def make_pipeline_eval_step(stages: Stages, *, mesh: Mesh) -> StepFn:
    """An evaluation step: the sums of a step without a gradient.

    Args:
      stages: the model.
      mesh: as for `make_pipeline_train_step`.

    Returns:
      `eval_step(params, batch) -> (params, Metrics)`: a plain function; `params` are `StagedParams`.

    Raises:
      ValueError: as `make_pipeline_loss_fn`.
    """
    loss_fn = make_pipeline_loss_fn(stages, mesh=mesh)

    def eval_step(params: StagedParams, batch: Any) -> tuple[StagedParams, Metrics]:
        return params, metrics_of(sum_microbatch(loss_fn, TrainState(params, None), batch, with_grads=False), batch)

    return eval_step


def make_pipeline_loss_fn(stages: Stages, *, mesh: Mesh, rematerialize: bool = False) -> LossFn:
    """The loss of a whole step; its gradient runs through the same pipeline backwards.

    A step takes m + S − 1 ticks forward, and as many backward. An idle stage computes nothing. For the backward pass,
    each tick keeps the input of the stage and the results of its matrix products; everything else is recomputed.

    Args:
      stages: the model.
      mesh: has axes `"data"` and `"stage"`.
      rematerialize: keeps only the input of the stage, and recomputes the matrix products too.

    Returns:
      `loss_fn(params, batch) -> (loss_sum, weight_sum)`, summed over all microbatches and shards. `params` are
      `StagedParams`; every leaf of the batch that is not a scalar has leading axis M.

    Raises:
      ValueError: an axis of the mesh is missing. When it is traced: parameters that are not of S stages, data shards
        that do not divide M, or a stage whose output differs from its input in shape or dtype.

    Example:
      >>> def loss(ends, x, microbatch):
      ...     return jnp.sum(x), jnp.float32(x.size)
      >>> stages = Stages(lambda ends, microbatch: microbatch, lambda own, x, microbatch: own * x, loss)
      >>> loss_fn = make_pipeline_loss_fn(stages, mesh=pipeline_mesh(1, num_devices=1))
      >>> loss_sum, weight_sum = jax.jit(loss_fn)(StagedParams((), jnp.array([3.0])), jnp.ones((2, 4)))
      >>> float(loss_sum), float(weight_sum)
      (24.0, 8.0)

    References:
      Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism".
    """
    num_shards, num_stages = (num_shards_of(mesh, axis_name) for axis_name in _AXES)
    params_spec = StagedParams(PartitionSpec(), PartitionSpec(STAGE_AXIS))

    def loss_fn(params: StagedParams, batch: Any) -> tuple[jax.Array, jax.Array]:
        _check_stages(params, mesh)
        num_microbatches = microbatches_of(batch)
        check_shards_divide(num_microbatches, mesh)

        def on_device(params: StagedParams, batch: Any) -> tuple[jax.Array, jax.Array]:
            types = jax.tree.map(lambda leaf: leaf.dtype, params)
            # The gradients of all ticks are summed, in float32 at least.
            ends, stages_of_one = jax.tree.map(lambda leaf: leaf.astype(_sum_type(leaf)), params)
            own = jax.tree.map(lambda leaf: leaf[0], stages_of_one)
            typed = Stages(
                lambda ends, microbatch: stages.embed(_cast(ends, types.ends), microbatch),
                lambda own, x, microbatch: stages.stage(_cast(own, types.stages), x, microbatch),
                lambda ends, x, microbatch: stages.loss(_cast(ends, types.ends), x, microbatch),
            )
            sums = _run_ticks(
                typed, ends, own, batch, num_stages, num_microbatches // num_shards, rematerialize=rematerialize
            )
            return jax.lax.psum(sums, _AXES)

        batch_spec = jax.tree.map(lambda leaf: PartitionSpec(DATA_AXIS) if leaf.ndim else PartitionSpec(), batch)
        # Unchecked: checked axes refuse loops and branches of a stage that start from constants, and would reduce
        # gradients in every tick, in branches that not all devices take.
        on_devices = jax.shard_map(
            on_device,
            mesh=auto_axes(mesh),
            in_specs=(params_spec, batch_spec),
            out_specs=PartitionSpec(),
            axis_names=set(_AXES),
            check_vma=False,
        )
        return on_devices(params, batch)

    return loss_fn


def _run_ticks(
    stages: Stages, ends: Any, own: Any, batch: Any, num_stages: int, num_microbatches: int, *, rematerialize: bool
) -> tuple[jax.Array, jax.Array]:
    """The sums of one device: those of its microbatches on the last stage, and 0 on other stages."""
    stage_index = jax.lax.axis_index(STAGE_AXIS)

    def microbatch_at(index: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[index] if leaf.ndim else leaf, batch)

    first = microbatch_at(0)
    no_x = _zeros(jax.eval_shape(lambda: stages.embed(ends, first)))
    _check_stage(no_x, jax.eval_shape(lambda: stages.stage(own, no_x, first)))
    no_sums = _zeros(jax.eval_shape(lambda: stages.loss(ends, no_x, first)), _sum_type)

    def work(received: Any, sums: Any, microbatch: Any) -> tuple[Any, Any]:
        x = jax.lax.cond(stage_index == 0, lambda: stages.embed(ends, microbatch), lambda: received)
        x = stages.stage(own, x, microbatch)
        is_last = stage_index == num_stages - 1
        return x, jax.lax.cond(is_last, lambda: _add(sums, stages.loss(ends, x, microbatch)), lambda: sums)

    # Without it, or within the branch, all that the backward pass needs would be kept for every tick, parameters
    # included; around the branch, what all ticks share is kept once.
    @functools.partial(
        jax.checkpoint,
        policy=None if rematerialize else jax.checkpoint_policies.dots_saveable,
        prevent_cse=False,  # forward and backward are different loops
    )
    def work_or_idle(received: Any, sums: Any, t: jax.Array) -> tuple[Any, Any]:
        index = t - stage_index
        # Idle, a device takes the other branch, forward and backward: to compute on whatever is there and to leave the
        # result out would turn an infinite derivative into 0 · ∞ = NaN.
        return jax.lax.cond(
            (index >= 0) & (index < num_microbatches),
            lambda: work(received, sums, microbatch_at(index)),
            lambda: (no_x, sums),
        )

    to_next = [(s, s + 1) for s in range(num_stages - 1)]

    def tick(carry: tuple[Any, Any], t: jax.Array) -> tuple[tuple[Any, Any], None]:
        x, sums = work_or_idle(*carry, t)
        return (jax.lax.ppermute(x, STAGE_AXIS, to_next), sums), None

    (_, sums), _ = jax.lax.scan(tick, (no_x, no_sums), jnp.arange(num_microbatches + num_stages - 1))
    return sums


def _sum_type(leaf: Any) -> Any:
    return jnp.promote_types(leaf.dtype, jnp.float32)


def _cast(params: Any, types: Any) -> Any:
    return jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), params, types)


def _add(sums: Any, more: Any) -> Any:
    return jax.tree.map(lambda total, value: (total + value).astype(total.dtype), sums, more)


def _zeros(spec: Any, dtype_of: Callable[[Any], Any] = lambda leaf: leaf.dtype) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype_of(leaf)), spec)


def _check_stages(params: StagedParams, mesh: Mesh) -> None:
    num_shards_of(mesh, DATA_AXIS)
    num_stages = num_shards_of(mesh, STAGE_AXIS)
    wrong = [
        f"{name} {np.shape(leaf)}"
        for name, leaf in leaves_by_name(params.stages).items()
        if np.shape(leaf)[:1] != (num_stages,)
    ]
    if wrong:
        raise UserError(
            f"the mesh has {num_stages} stages, which must be the leading axis of all parameters of stages; not so: "
            f"{list_first(wrong)}"
        )


def _check_stage(given: Any, returned: Any) -> None:
    shapes = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), x) for x in (given, returned)]
    if shapes[0] != shapes[1]:
        raise UserError(f"a stage must return the shapes of its input; it takes {shapes[0]} and returns {shapes[1]}")
