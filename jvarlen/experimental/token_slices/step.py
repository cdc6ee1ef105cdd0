"""The train step of a layout with stages, through which rows go in slices."""

from __future__ import annotations

from typing import cast

import optax

from jvarlen._common.checks import UserError
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.placement import Placement, placement_of
from jvarlen.experimental.token_slices.cuts import Slices
from jvarlen.experimental.token_slices.program import check_by_positions, sum_sliced
from jvarlen.parallel.layers import LayeredModel, num_slots_of
from jvarlen.parallel.sharded_step import ShardedProgram, SumModel
from jvarlen.parallel.train import TrainStep
from jvarlen.training.reduction import Shards
from jvarlen.training.step_sums import SumsOf
from jvarlen.training.trainable import TrainedOf

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
      model: works by positions, and attends by `attend_over_slices`, such as `sliced_model`.
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
    _check_layout(placement.layout)
    check_by_positions(model)
    if num_slots_of(model, placement.layout) is not None:
        raise UserError(f"slices take stages of as many layers each, not {model.num_layers} on {placement.layout}")

    def sum_model(model: LayeredModel, shards: Shards, trained_of: TrainedOf | None) -> SumsOf:
        return sum_sliced(model, shards, slices=slices, trained_of=trained_of)

    program = ShardedProgram(
        model=model,
        optimizer=optimizer,
        placement=placement,
        trainable=model.trainable,
        sum_model=cast(SumModel, sum_model),
    )
    function, halves = program.step(norms=norms)
    return TrainStep(
        function=function,
        halves=halves,
        model=model,
        optimizer=optimizer,
        placement=placement,
        trainable=model.trainable,
    )


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
            f"slices keep inputs, and keys and values, and run layers again: leave remat_{layout.remat} out of {layout}"
        )
