"""Evaluation: in go parameters and planned sets of samples, out come the bits that a token of each takes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int64

from jvarlen.collate import pack_to_bucket, pad_to_bucket
from jvarlen.compiled_buckets import CompiledBuckets
from jvarlen.lengths import DataSource
from jvarlen.loader import load
from jvarlen.plan import Plan

__all__ = ["Evaluation", "evaluate"]


class Evaluation(NamedTuple):
    """What one set of samples came to.

    Attributes:
      bits_per_token: the mean over its tokens, in bits; a token is a byte where bytes are trained on.
      num_tokens: how many these are; cut samples count as cut.
    """

    bits_per_token: float
    num_tokens: int


def evaluate(
    eval_step: CompiledBuckets,
    params: Any,
    plans: Mapping[str, Plan],
    datasets: Mapping[str, DataSource],
    lengths: Mapping[str, Int64[np.ndarray, " H"]],
    *,
    must_stop: Callable[[int], bool],
    mesh: Mesh | None = None,
    max_steps: int | None = None,
    **loading: Any,
) -> tuple[Any, dict[str, Evaluation] | None]:
    """Evaluates parameters on all samples of each plan.

    Args:
      eval_step: gives the parameters back, and `Metrics`; compiled for the buckets of all plans.
      params: a pytree; the step takes its buffers over.
      plans: of each set, by name.
      datasets: the samples of each.
      lengths: int64[H] of each, what it was planned for.
      must_stop: whether to break off before the next step, asked with the number of steps taken.
      mesh: where the batches go.
      max_steps: steps of each plan to take; None for all.
      loading: more arguments of `load`, the same for all sets.

    Returns:
      The parameters, and an `Evaluation` of each set, of the steps that were taken; None where it was broken off.
    """
    evaluations: dict[str, Evaluation] = {}
    num_steps = 0
    for name, plan in plans.items():
        collate = pack_to_bucket if plan.is_packed else pad_to_bucket
        sums = []
        reading = load(plan, datasets[name], mesh=mesh, collate=collate, lengths=lengths[name], **loading)
        with contextlib.closing(reading) as batches:
            for batch in itertools.islice(batches, max_steps):
                if must_stop(num_steps):
                    return params, None
                params, metrics = eval_step(params, batch)
                sums.append(metrics)
                num_steps += 1
        loss = sum(float(metrics.loss_sum) for metrics in sums)
        weight = sum(float(metrics.weight_sum) for metrics in sums)
        evaluations[name] = Evaluation(loss / max(weight, 1.0) / float(np.log(2)), round(weight))
    return params, evaluations
