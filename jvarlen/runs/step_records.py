"""Records of steps, and what ends a run: values that are not finite, and nothing but steps without weight."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import leaves_by_name
from jvarlen._common.types import JsonObject
from jvarlen.runs.training_plan import TrainingPlan
from jvarlen.training.step import are_finite
from jvarlen.training.train_state import Metrics, MetricSums, TrainState

__all__ = ["Means", "check_finite", "check_weight", "means_of", "nonfinite_arrays", "with_metrics"]


class Means(NamedTuple):
    """The loss and the scalar sums of some steps over Σ weight."""

    loss: float | None  # in nats for a language model; None, like all sums, if nothing has weight
    weight: float  # Σ weight; for a language model the tokens that are learned, those of cut samples as cut
    sums: dict[str, float | None]


def means_of(total: Metrics) -> Means:
    """The means of sums, as `MetricSums` gives them."""
    scalars = {name: value for name, value in sorted(total.sums.items()) if np.ndim(value) == 0}
    weight = float(total.weight_sum)
    if not weight:
        return Means(None, weight, dict.fromkeys(scalars))
    return Means(float(total.loss), weight, {name: float(value) / weight for name, value in scalars.items()})


def with_metrics(record: JsonObject, metrics: Metrics) -> JsonObject:
    """The record of a step with its metrics, which are on the host."""
    sums = MetricSums()
    sums.add(metrics)
    means = means_of(sums.total)
    record["loss"] = means.loss
    if clashing := means.sums.keys() & (record.keys() | {"time_s"}):
        raise UserError(f"sums of the loss must have other names than figures of a step: {list_first(clashing)}")
    return record | means.sums


def check_finite(record: JsonObject, metrics: Metrics, newest: TrainState) -> None:
    """Raises FloatingPointError where a step was not rejected, and left, or is, what is not finite."""
    loss, step = record["loss"], f"step {record['step']} (counted from 0)"
    gradient = "finite" if metrics.grads_finite else "not finite"
    if not metrics.params_finite:
        raise FloatingPointError(
            f"parameters or extra are not finite after {step}: the loss is {loss}, the gradient is {gradient}; "
            "the run ends, with its last checkpoint from before"
        )
    if metrics.grads_finite and loss is not None and not math.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss} at {step}, and the gradient is finite; the run ends")
    if not metrics.grads_finite and (broken := nonfinite_arrays(newest)):
        raise FloatingPointError(
            f"the gradient of {step} is not finite, and the optimizer has not rejected it: not finite are "
            f"{list_first(broken)}; the run ends, with its last checkpoint from before"
        )


def nonfinite_arrays(state: TrainState) -> list[str]:
    """Names of the arrays of a state that are not finite; waits for it."""
    named = {
        name: leaf
        for name, leaf in leaves_by_name(state).items()
        # Scalars of an optimizer, such as the best loss so far, may begin as infinity.
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and (leaf.ndim or not name.startswith(".opt_state"))
    }
    return [name for name, is_finite in jax.device_get(_each_finite(named)).items() if not is_finite]


@jax.jit
def _each_finite(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(are_finite, arrays)


def check_weight(training: TrainingPlan, record: JsonObject, num_in_a_row: int) -> None:
    """Raises ValueError if all steps of an epoch, or of the run, were steps without weight, as the last ones."""
    num_done, epoch = record["step"] + 1, record["epoch"]
    is_whole_run = num_done == training.num_steps == num_in_a_row
    is_end_of_epoch = num_done == training.epoch_starts[epoch + 1]
    if is_whole_run or (is_end_of_epoch and num_in_a_row >= training.steps_of_epoch(epoch)):
        raise UserError(
            f"no token has weight in the loss in any of the last {num_in_a_row:,} steps, "
            f"{'the whole run' if is_whole_run else 'a whole epoch'}: nothing was learned; learn other parts "
            "(loss_on, loss_weights), or cut less (max_length)"
        )
