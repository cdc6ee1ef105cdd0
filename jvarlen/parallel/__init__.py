"""Parallelism: how a step spreads over devices. Its results are those of one device.

- `layers`: a model by layers, which most of the others split.
- `tensor`: matrix products and parameters split over devices, and sequence parallelism between them.
- `cross_entropy`: that over a vocabulary, some tokens at a time.
- `train`: the train step and the eval step. `layout_checks`: which layouts go with which models and buckets.
  `state_layout`: how states lie on layouts that shard state or rows. `sharded_init`: their first form. `sharded_step`:
  the step. `zero`: the shards of ZeRO.
  `device_layers`: what one device computes of a model by layers. `layer_loop`: the sums of its step without stages.
- `step_loss`: losses of the sums and of all samples of a step.
- `own_leaves`: optimizers that see the model's own parameters where layers are stacked.
- `portable`: the single-device form of the states of any layout, for checkpoints.
- `context`: attention over rows whose positions are spread over a mesh axis.
- `schedules`: which stage of a pipeline works on what, when, and what it holds, also as tables of ticks for a program.
  `pipeline`: that program, for a model by layers. `passes`: a layer and its derivative, cut into passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jvarlen._common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from jvarlen.distributed.layout import Layout
    from jvarlen.distributed.placement import Placement
    from jvarlen.parallel.context import attend_over_axis
    from jvarlen.parallel.cross_entropy import chunked_cross_entropy
    from jvarlen.parallel.layers import Axes, LayeredModel, LayeredParams, StepLoss, layered_loss_fn
    from jvarlen.parallel.portable import portable_form
    from jvarlen.parallel.schedules import Schedule, Timeline, make_schedule
    from jvarlen.parallel.tensor import (
        TensorSpec,
        column_linear,
        enter_tensor_parallel,
        leave_tensor_parallel,
        row_linear,
        sum_over_positions,
        take_features,
        take_positions,
        vocabulary_cross_entropy,
        vocabulary_embedding,
    )
    from jvarlen.parallel.train import EvalStep, TrainStep, make_eval_step, make_train_step
    from jvarlen.training.train_state import divide_once

__all__ = [
    "Axes", "EvalStep", "LayeredModel", "LayeredParams", "Layout", "Placement", "Schedule", "StepLoss", "TensorSpec",
    "Timeline", "TrainStep", "attend_over_axis", "chunked_cross_entropy", "column_linear",
    "divide_once", "enter_tensor_parallel", "layered_loss_fn",
    "leave_tensor_parallel", "make_eval_step", "make_schedule", "make_train_step",
    "portable_form", "row_linear", "sum_over_positions", "take_features",
    "take_positions", "vocabulary_cross_entropy", "vocabulary_embedding",
]  # fmt: skip

__getattr__, __dir__ = lazy_imports(__name__)
