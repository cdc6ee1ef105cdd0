"""Pipeline parallelism for a model of any stages, as a model by layers with one layer a stage.

Letters: M microbatches of a step, m those of a data shard, S stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jvarlen._common.checks import UserError, check_at_least_one, list_first
from jvarlen._common.pytree import leaves_by_name
from jvarlen.distributed.layout import Keeps
from jvarlen.distributed.mesh import DATA_AXIS, STAGE_AXIS, num_shards_of
from jvarlen.parallel.layers import LayeredModel, LayeredParams
from jvarlen.parallel.scheduled import sum_scheduled
from jvarlen.training.losses import LossFn
from jvarlen.training.step import StepFn, metrics_of, step_of_sums
from jvarlen.training.step_sums import StepSums
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
        (num_devices // num_stages, num_stages),
        (DATA_AXIS, STAGE_AXIS),
        axis_types=(AxisType.Auto,) * 2,
        devices=devices[:num_devices],
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
    sums_of = _sums_of(stages, mesh, rematerialize=rematerialize)
    return step_of_sums(sums_of, _sums_of(stages, mesh, with_grads=False), optimizer)


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
    sums_of = _sums_of(stages, mesh, with_grads=False)

    def eval_step(params: StagedParams, batch: Any) -> tuple[StagedParams, Metrics]:
        return params, metrics_of(sums_of(TrainState(params, None), batch), batch)

    return eval_step


def make_pipeline_loss_fn(stages: Stages, *, mesh: Mesh, rematerialize: bool = False) -> LossFn:
    """The loss of a whole step; its gradient by the parameters is computed with it, by the schedule `eager_1f1b`.

    A step takes m + S − 1 ticks forward, and as many backward. An idle stage computes nothing. A stage keeps what its
    backward pass takes from its forward pass, of at most 2 S − 1 microbatches. Weights are not differentiated, even if
    they depend on the parameters.

    Args:
      stages: the model.
      mesh: has axes `"data"` and `"stage"`.
      rematerialize: keeps only the input of the stage, and runs the stage again in the backward pass.

    Returns:
      `loss_fn(params, batch) -> (loss_sum, weight_sum)`, summed over all microbatches and shards. `params` are
      `StagedParams`; every leaf of the batch that is not a scalar has leading axis M.

    Raises:
      ValueError: an axis of the mesh is missing. When it is traced: parameters that are not of S stages, data shards
        that do not divide M, or a stage whose output differs from its input in shape or dtype.

    Example:
      >>> def loss(ends, x, microbatch):
      ...     return x.sum(), np.float32(x.size)
      >>> stages = Stages(lambda ends, microbatch: microbatch, lambda own, x, microbatch: own * x, loss)
      >>> loss_fn = make_pipeline_loss_fn(stages, mesh=pipeline_mesh(1, num_devices=1))
      >>> loss_sum, weight_sum = jax.jit(loss_fn)(StagedParams((), np.array([3.0])), np.ones((2, 4)))
      >>> float(loss_sum), float(weight_sum)
      (24.0, 8.0)

    References:
      Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism".
    """
    with_grads = _sums_of(stages, mesh, rematerialize=rematerialize)
    without_grads = _sums_of(stages, mesh, with_grads=False)

    def loss_fn(params: StagedParams, batch: Any) -> tuple[jax.Array, jax.Array]:
        @jax.custom_vjp
        def loss_of(params: StagedParams) -> tuple[jax.Array, jax.Array]:
            sums = without_grads(TrainState(params, None), batch)
            return sums.loss, sums.weight

        def forward(params: StagedParams) -> tuple[tuple[jax.Array, jax.Array], Any]:
            sums = with_grads(TrainState(params, None), batch)
            return (sums.loss, sums.weight), sums.grads

        def backward(grads: Any, of_sums: tuple[jax.Array, jax.Array]) -> tuple[Any]:
            return (jax.tree.map(lambda grad, leaf: (grad * of_sums[0]).astype(leaf.dtype), grads, params),)

        loss_of.defvjp(forward, backward)
        return loss_of(params)

    return loss_fn


def _sums_of(
    stages: Stages, mesh: Mesh, *, with_grads: bool = True, rematerialize: bool = False
) -> Callable[[TrainState, Any], StepSums]:
    """The sums of a step, by the program of a model by layers."""
    model = LayeredModel(
        lambda ends, microbatch, axes: stages.embed(ends, microbatch),
        lambda own, x, microbatch, axes: stages.stage(own, x, microbatch),
        lambda ends, x, microbatch, axes: stages.loss(ends, x, microbatch),
    )
    keeps: Keeps = "inputs" if rematerialize else "residuals"
    sums_of_layers = sum_scheduled(model, mesh=mesh, keeps=keeps, with_grads=with_grads)

    def sums_of(state: TrainState, batch: Any) -> StepSums:
        _check_stages(state.params, mesh)
        sums = sums_of_layers(state._replace(params=LayeredParams(*state.params), key=None), batch)
        return sums._replace(grads=StagedParams(*sums.grads)) if with_grads else sums

    return sums_of


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
