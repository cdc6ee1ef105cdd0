"""Parallelism: how a step spreads over devices. Its results are those of one device.

- `train`: makes the train step. `evaluation`: makes the eval step. `layout_checks`: rejects layouts that do not take a
  model or bucket.
- `step_program`: the parts of a step on one device or on data shards, and which ones a layout has.
- `layers`: the interface of a model by layers, three functions and stacked parameters, which users write.
- `device_layers`: runs those functions on one device, forward and backward, for one microbatch.
- `layer_loop`: runs `device_layers` for every microbatch of a step, on layouts without pipeline stages.
- `pipeline`: the same with stages. `schedules`: what each stage does when. `passes`: cuts a layer and its derivative
  into passes.
- `tensor`: matrix products and parameters split over devices, and sequence parallelism between them.
- `context`: attention over rows whose positions are spread over a mesh axis.
- `cross_entropy`: the loss of a large vocabulary, some tokens at a time.
- `state_layout`: how states are sharded, padded and stacked. `sharded_step`: the first such state, and a step
  of such states. `zero`: the shards of ZeRO.
- `own_leaves`: gives an optimizer the parameters as the model has them, although the layout stacks its layers.
- `portable`: converts the state of any layout to that of one device, for checkpoints.
- `step_loss`: losses of the sums and of all samples of a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jvarlen._common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from jvarlen.distributed.layout import Layout
    from jvarlen.distributed.placement import Placement
    from jvarlen.parallel.context import attend_over_axis
    from jvarlen.parallel.cross_entropy import chunked_cross_entropy, chunked_log_probs, vocabulary_cross_entropy
    from jvarlen.parallel.evaluation import EvalStep, make_eval_step
    from jvarlen.parallel.layers import Axes, LayeredModel, LayeredParams, StepLoss, layered_loss_fn
    from jvarlen.parallel.schedules import Schedule, Timeline, make_schedule
    from jvarlen.parallel.tensor import (
        TensorSpec,
        column_linear,
        enter_tensor_parallel,
        gather_heads,
        leave_tensor_parallel,
        row_linear,
        sum_over_positions,
        take_features,
        take_positions,
        vocabulary_embedding,
    )
    from jvarlen.parallel.train import TrainStep, make_train_step
    from jvarlen.training.train_state import divide_once

__all__ = [
    "Axes", "EvalStep", "LayeredModel", "LayeredParams", "Layout", "Placement", "Schedule", "StepLoss", "TensorSpec",
    "Timeline", "TrainStep", "attend_over_axis", "chunked_cross_entropy", "chunked_log_probs", "column_linear",
    "divide_once", "enter_tensor_parallel", "gather_heads", "layered_loss_fn", "leave_tensor_parallel",
    "make_eval_step", "make_schedule", "make_train_step", "row_linear", "sum_over_positions", "take_features",
    "take_positions", "vocabulary_cross_entropy", "vocabulary_embedding",
]  # fmt: skip

__getattr__, __dir__ = lazy_imports(__name__)
