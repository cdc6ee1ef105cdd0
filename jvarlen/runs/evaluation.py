"""Evaluates a state on planned sets of samples."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int64

from jvarlen._common.units import nats_to_bits
from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.loading.loader import load
from jvarlen.planning.lengths import DataSource
from jvarlen.planning.plan import Plan
from jvarlen.training.train_state import Metrics

__all__ = ["Evaluation", "evaluate"]


class Evaluation(NamedTuple):
    """The result of evaluating one set of samples.

    Attributes:
      loss: Σ loss / Σ weight, in nats for a language model; 0 if nothing has weight.
      weight: Σ weight; for a language model the tokens that are learned, truncated samples with their cut length.
      sums: further scalar sums of the loss, over Σ weight.
    """

    loss: float
    weight: float
    sums: dict[str, float]

    @property
    def bits_per_token(self) -> float:
        """The loss in bits per token; tokens are bytes if the model trains on bytes."""
        return nats_to_bits(self.loss)


def evaluate(
    eval_step: CompiledBuckets,
    state: Any,
    plans: Mapping[str, Plan],
    datasets: Mapping[str, DataSource],
    lengths: Mapping[str, Int64[np.ndarray, " H"] | None],
    *,
    must_stop: Callable[[int], bool],
    mesh: Mesh | None = None,
    max_steps: int | None = None,
    **loading: Any,
) -> dict[str, Evaluation] | None:
    """Evaluates a state on all samples of each plan.

    Args:
      eval_step: returns the state and `Metrics`; compiled for the buckets of all plans.
      state: the input of the step; it is not changed.
      plans: the plan of each set, by name.
      datasets: the samples of each set.
      lengths: int64[H] of each set, the lengths that it was planned for; None compares no lengths.
      must_stop: whether to stop before the next step, called with the number of steps taken.
      mesh: the mesh for the batches.
      max_steps: steps of each plan to take; None for all.
      loading: more arguments of `load`, the same for all sets.

    Returns:
      An `Evaluation` of each set, over the steps taken; None if it was stopped.
    """
    evaluations: dict[str, Evaluation] = {}
    num_steps = 0
    for name, plan in plans.items():
        steps = []
        reading = load(plan, datasets[name], mesh=mesh, lengths=lengths[name], **loading)
        with contextlib.closing(reading) as batches:
            for batch in itertools.islice(batches, max_steps):
                if must_stop(num_steps):
                    return None
                steps.append(eval_step(state, batch)[1])
                num_steps += 1
        on_host: list[Metrics] = jax.device_get(steps)
        weight = math.fsum(metrics.weight_sum for metrics in on_host)
        sums: dict[str, float] = {}
        for metrics in on_host:
            for of_sum, value in metrics.sums.items():
                if np.ndim(value) == 0:
                    sums[of_sum] = sums.get(of_sum, 0.0) + float(value)
        divisor = weight or 1.0
        loss = math.fsum(metrics.loss_sum for metrics in on_host) / divisor
        evaluations[name] = Evaluation(loss, weight, {of_sum: total / divisor for of_sum, total in sums.items()})
    return evaluations
