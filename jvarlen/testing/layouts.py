"""Checks that a model trains to the same numbers on any layout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import optax

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import leaves_by_name
from jvarlen._common.types import Batch, Params
from jvarlen.distributed.layout import Layout
from jvarlen.parallel.layers import LayeredModel, StepLoss, layered_loss_fn
from jvarlen.parallel.train import TrainStep, make_train_step
from jvarlen.testing.partition import FloatDtype, differences_of, floats_in
from jvarlen.training.losses import LossFn
from jvarlen.training.trainable import Trainable

__all__ = ["assert_layout_invariant"]


def assert_layout_invariant(
    model: LayeredModel | LossFn | StepLoss,
    params: Params,
    batch: Batch,
    layouts: Iterable[Layout | str],
    *,
    optimizer: optax.GradientTransformation | None = None,
    trainable: Trainable = None,
    num_steps: int = 10,
    seed: int = 0,
    dtype: FloatDtype = "float64",
    rtol: float | None = None,
    **options: Any,
) -> list[Layout]:
    """Asserts that some steps give the same losses, gradient norms and parameters on any layout as on one device.

    All steps are on the same batch, and parameters are compared after the first and the last one. Layouts need devices:
    `jvarlen.distributed.split_cpu` splits the CPU into several.

    Args:
      model: as for `make_train_step`.
      params: as for `TrainStep.init`; floats are cast to `dtype`.
      batch: pytree of arrays that begin with axis M, or are scalars, such as a `Batch`; floats are cast to `dtype`.
      layouts: `Layout`s or their texts. Data shards must divide M, and data · context too if rows are not spread.
      optimizer: any Optax optimizer; None for AdamW, clipped by the norm of the whole gradient.
      trainable: as for `make_train_step`.
      num_steps: steps on each layout.
      seed: for a model that takes keys.
      dtype: what to compute in; `"float32"` for a model that takes nothing else.
      rtol: the largest difference allowed, relative to the loss, the norm, and the largest entry of each parameter.
        None: 1e-12, or 1e-5 in float32.
      **options: of `make_train_step`, such as `norms`.

    Returns:
      The layouts, which all agree.

    Raises:
      AssertionError: some layouts differ; the message names them, what differs, and by how much.
      ValueError: the batch has no weight; too few devices; or a layout that is not for this model or this batch.

    Example:
      >>> import jax.numpy as jnp
      >>> def loss_fn(params, microbatch):
      ...     return jnp.sum((microbatch @ params) ** 2), jnp.float32(len(microbatch))
      >>> assert_layout_invariant(loss_fn, np.ones((8, 8)), np.ones((2, 3, 8)), ["data1"])
      [Layout(data=1, stage=1, context=1, tensor=1, zero=0, schedule='eager_1f1b', virtual=1, ...)]
    """
    if optimizer is None:  # its eps keeps the rounding of gradients that should be 0 from becoming updates
        optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3, eps=1e-5))
    whole_loss_fn = layered_loss_fn(model) if isinstance(model, LayeredModel) else model
    chosen = [Layout.parse(layout) if isinstance(layout, str) else layout for layout in layouts]
    with floats_in(dtype, rtol) as (cast, rtol):
        params, batch = cast((params, batch))
        # A layout of one device has the axis "data", too.
        on_one = make_train_step(whole_loss_fn, optimizer, layout="data1", trainable=trainable, norms=True)
        expected = _take_steps(on_one, params, batch, num_steps, seed)

        def values_on(layout: Layout) -> dict[str, np.ndarray]:
            step = make_train_step(model, optimizer, layout=layout, trainable=trainable, norms=True, **options)
            assert step.placement is not None
            placed = jax.device_put(batch, step.placement.batch_shardings(batch))
            return _take_steps(step, params, placed, num_steps, seed)

        differences = {layout: differences_of(values_on(layout), expected, rtol) for layout in chosen}
    if differing := {layout: found for layout, found in differences.items() if found}:
        listed = (f"  {layout}: {list_first(found, '; ')}" for layout, found in differing.items())
        raise AssertionError(
            f"{len(differing)} of {len(chosen)} layouts differ from one device by more than {rtol:g} relative\n"
            + list_first(listed, "\n")
        )
    return chosen


def _take_steps(step: TrainStep, params: Params, batch: Batch, num_steps: int, seed: int) -> dict[str, np.ndarray]:
    """By name, loss and gradient norm of some steps, and parameters after the first and last."""
    values: dict[str, np.ndarray] = {}
    state, compiled = step.init(params, seed=seed), jax.jit(step)
    for number in range(num_steps):
        state, metrics = compiled(state, batch)
        if metrics.weight_sum == 0:
            raise UserError("the weights of the batch add up to 0.0: there is nothing to compare")
        if number in (0, num_steps - 1):
            gathered = leaves_by_name(step.gather_params(state))
            values |= {f"params{name} after step {number}": np.asarray(leaf) for name, leaf in gathered.items()}
        values[f"loss of step {number}"] = np.asarray(metrics.loss)
        values[f"norm of the gradient of step {number}"] = np.asarray(metrics.grad_norm)
    return values
