"""Which layouts go with which models, parameters and buckets. Each check raises ValueError."""

from __future__ import annotations

import jax

from jvarlen._common.checks import UserError
from jvarlen._common.types import Params
from jvarlen.distributed.layout import Layout
from jvarlen.parallel.layers import LayeredModel, LayeredParams, Model, layers_per_part, num_layers_of

__all__ = ["check_bucket", "check_layout", "check_model"]


def check_layout(layout: Layout, params: Params, model: Model | None) -> None:
    """Raises ValueError if a layout does not take this model, None if it is unknown, or these parameters."""
    check_model(model, layout)
    if isinstance(model, LayeredModel):
        params = params if model.stack is None else jax.eval_shape(model.stack, params)
        num_layers_of(params)
    if layout.stage > 1:
        if not isinstance(params, LayeredParams):
            raise UserError(f"stage{layout.stage} takes LayeredParams, not a {type(params).__name__}")
        num_layers, num_parts = num_layers_of(params), layout.stage * layout.virtual
        said = model.num_layers if isinstance(model, LayeredModel) else None
        if said not in (None, num_layers):
            raise UserError(f"the num_layers of the LayeredModel are {said}, and its parameters have {num_layers}")
        if layers_per_part(num_layers, layout) * num_parts != num_layers and model is not None and said is None:
            raise UserError(
                f"{num_layers} layers do not divide into the {num_parts} equal parts of {layout}: stages of different "
                f"sizes need LayeredModel(…, num_layers={num_layers})"
            )


def check_model(model: Model | None, layout: Layout) -> None:
    """Raises ValueError if a layout is not supported or does not take such a model; None is unknown."""
    if layout.stage > 1 or layout.virtual > 1:
        from jvarlen.parallel.schedules import check_schedule

        check_schedule(layout.schedule, layout.stage, layout.stage, layout.virtual)
    for word, is_there, axis in (
        ("sequence_parallel", layout.sequence_parallel, "tensor"),
        (f"context_from{layout.context_from}", layout.context_from > 0, "context"),
        (f"virtual{layout.virtual}", layout.virtual > 1, "stage"),
        (f"layers{layout.layers}", layout.layers > 0, "stage"),
    ):
        if is_there and getattr(layout, axis) == 1:
            raise UserError(f"{word} of the layout {layout} needs {axis}N, with several devices")
    layered = model if isinstance(model, LayeredModel) else None
    if layout.tensor > 1 and (layered is None or layered.specs is None):
        raise UserError(f"tensor{layout.tensor} takes a LayeredModel with specs")
    if model is None:
        return
    if layout.context > 1 and (layered is None or not layered.by_positions):
        raise UserError(
            f"context{layout.context} takes a LayeredModel with by_positions=True, whose functions take the "
            "positions of axes.positions and attend by attend_over_axis"
        )
    name = getattr(model, "__name__", type(model).__name__)
    if layered is None:
        if layout.stage > 1:
            raise UserError(f"stage{layout.stage} takes a LayeredModel, and {name} is a loss function")
        if layout.remat_in_force != "none":
            raise UserError(f"remat_{layout.remat} takes a LayeredModel, whose layers can be run again")


def check_bucket(layout: Layout, bucket: tuple[int, ...], num_microbatches: int) -> None:
    """Raises ValueError if a layout cannot take steps of a bucket. Buckets of pairs are not checked."""
    if len(bucket) != 2:
        return
    length = bucket[1]
    is_spread = layout.context > 1 and length >= layout.context_from
    num_shards = layout.data if is_spread else layout.num_shards
    if num_microbatches % num_shards:
        raise UserError(
            f"{num_microbatches} microbatches a step do not spread over the {num_shards} shards that {layout} has "
            f"for rows of {length}"
        )
    if is_spread:
        from jvarlen.parallel.context import context_positions

        length = context_positions(length, layout.context).shape[1]
    if layout.sequence_parallel and length % layout.tensor:
        raise UserError(f"sequence_parallel of {layout} takes a multiple of {layout.tensor} positions, not {length}")
    if layout.stage > 1:
        from jvarlen.parallel.schedules import check_schedule

        check_schedule(layout.schedule, layout.stage, num_microbatches // num_shards, layout.virtual)
