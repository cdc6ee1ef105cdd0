"""The train step of a layout with stages, through which rows go in slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax
from jax.sharding import Mesh

from jvarlen._common.checks import UserError
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import Placement, placement_of
from jvarlen.experimental.token_slices.cuts import Slices
from jvarlen.experimental.token_slices.program import check_by_positions, sum_sliced
from jvarlen.parallel.layers import LayeredModel
from jvarlen.parallel.sharded import (
    check_model,
    model_on_axes,
    other_specs_of,
    pad_params,
    step_on_layout,
    sums_on_shards,
)
from jvarlen.parallel.train import TrainStep
from jvarlen.parallel.zero import shard_specs
from jvarlen.training.step import step_of_sums
from jvarlen.training.step_sums import StepSums
from jvarlen.training.train_state import TrainState

__all__ = ["make_sliced_train_step"]


def make_sliced_train_step(
    model: LayeredModel,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    *,
    layout: Layout | str | Placement,
    slices: Slices,
    norms: bool = False,
) -> TrainStep:
    """A train step of a model in stages, to which rows come a slice of positions at a time.

    A stage keeps inputs, keys and values, and recomputes its layers in the backward pass.

    Args:
      model: works by positions.
      optimizer: as for `make_train_step`.
      layout: likewise; it has stages, and names no schedule: slices have an order of their own.
      slices: their number, for lengths that differ by 1 at most; or their lengths for a row length, by a mapping or a
        function, such as one that calls `choose_slices`.
      norms: as for `make_train_step`.

    Returns:
      `TrainStep`, with the result of the unsplit step.

    Raises:
      ValueError: a layout without stages, with another schedule, with rows or positions that are spread, or that keeps
        residuals; a model that does not work by positions; when it is traced: slices that are below 1 or do not sum to
        the row length, or functions of the model that do not return `[B, S, …]` for S positions.

    References:
      Li et al. 2021, "TeraPipe: Token-Level Pipeline Parallelism for Training Large-Scale Language Models".
    """
    placement = placement_of(layout)
    assert placement is not None
    layout, mesh = placement.layout, placement.program_mesh
    check_model(model, layout)
    _check_layout(layout)
    check_by_positions(model)
    sums_of, values_of = (_sums_of(model, mesh, layout, slices, with_grads=with_grads) for with_grads in (True, False))
    function = step_on_layout(step_of_sums(sums_of, values_of, optimizer, norms=norms), model, mesh, layout)
    return TrainStep(function=function, model=model, optimizer=optimizer, placement=placement)


def _check_layout(layout: Layout) -> None:
    if layout.stage == 1:
        raise UserError(f"slices need stages, through which they follow each other, and the layout {layout} has none")
    if layout.schedule != Layout.schedule:
        raise UserError(
            f"slices have an order of their own, token_slices: leave {layout.schedule} out of the layout {layout}"
        )
    if layout.context > 1:
        raise UserError(f"slices of rows do not go with context{layout.context}, which spreads them: {layout}")
    if layout.sequence_parallel:
        raise UserError(f"slices of rows do not go with sequence_parallel, which spreads their positions: {layout}")
    if layout.remat_in_force != "full":
        raise UserError(
            f"slices keep inputs, and keys and values, and run layers again: leave remat_none out of {layout}"
        )


def _sums_of(
    whole_model: LayeredModel, mesh: Mesh, layout: Layout, slices: Slices, *, with_grads: bool
) -> Callable[[TrainState, Any], StepSums]:
    """The sums of a step over all shards, from parameters that lie as the layout says, to gradients in shards."""

    def sums_of(state: TrainState, batch: Any) -> StepSums:
        model, _ = model_on_axes(whole_model, layout, state.params, batch)
        assert isinstance(model, LayeredModel)
        params, other_specs = state.params, other_specs_of(state.params, whole_model, layout)
        state = state._replace(params=pad_params(params, layout, other_specs))
        param_specs = grad_specs = other_specs
        if layout.zero:
            grad_specs = shard_specs(state.params, layout, padded=layout.zero < 3, other_specs=other_specs)
        if layout.zero == 3:
            param_specs = grad_specs
        sum_step = sum_sliced(
            model,
            mesh=mesh,
            slices=slices,
            with_grads=with_grads,
            param_specs=param_specs,
            grad_specs=grad_specs,
            axis_name=layout.data_axes,
        )
        return sums_on_shards(sum_step(state, batch), params, grad_specs, mesh)

    return sums_of
