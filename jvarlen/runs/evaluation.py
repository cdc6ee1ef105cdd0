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

from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.loading.loader import load
from jvarlen.planning.lengths import DataSource
from jvarlen.planning.plan import Plan
from jvarlen.training.train_state import Metrics

__all__ = ["Evaluation", "evaluate"]


class Evaluation(NamedTuple):
    """What one set of samples came to.

    Attributes:
      loss: Σ loss / Σ weight, in nats for a language model; 0 where nothing has weight.
      weight: Σ weight: for a language model the tokens, cut samples counted as cut.
      sums: what else the loss sums up, of scalars, over Σ weight.
    """

    loss: float
    weight: float
    sums: dict[str, float]

    @property
    def bits_per_token(self) -> float:
        """The loss in bits; a token is a byte where bytes are trained on."""
        return self.loss / math.log(2)


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
      eval_step: gives the state back, and `Metrics`; compiled for the buckets of all plans.
      state: what the step takes; it is left as it is.
      plans: of each set, by name.
      datasets: the samples of each.
      lengths: int64[H] of each, what it was planned for; None compares no lengths.
      must_stop: whether to break off before the next step, asked with the number of steps taken.
      mesh: where the batches go.
      max_steps: steps of each plan to take; None for all.
      loading: more arguments of `load`, the same for all sets.

    Returns:
      An `Evaluation` of each set, of the steps that were taken; None where it was broken off.
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
