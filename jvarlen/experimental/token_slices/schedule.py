"""The order of slices of rows in the stages of a pipeline. NumPy only.

Letters: S stages, M microbatches of a data shard, K slices of a row, A actions of a stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float64

from jvarlen._common.checks import check_at_least_one
from jvarlen.parallel.schedules import BACKWARD, FORWARD, Schedule, schedule_of

__all__ = ["TokenSlices", "token_slices"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenSlices(Schedule):
    """A schedule whose microbatches are slices: number m · K + k is slice k of microbatch m.

    `simulate` also takes costs that broadcast to [S, K], such as [1, K] for each slice.

    Attributes:
      num_slices: K.
    """

    num_slices: int

    def _durations(self, costs: Mapping[str, Any]) -> Float64[np.ndarray, "S A"]:
        shape = self.num_stages, self.num_slices
        costs = {kind: np.reshape(cost, (-1, 1)) if np.ndim(cost) == 1 else cost for kind, cost in costs.items()}
        stage, k = np.arange(self.num_stages)[:, None], self.actions[..., 1] % self.num_slices
        return self._check_costs(costs, shape)[self.actions[..., 0], stage, k]


def token_slices(num_stages: int, num_microbatches: int, num_slices: int) -> TokenSlices:
    """TeraPipe: GPipe over slices of tokens, for causal models. A stage holds M · K activations, of one slice each.

    Forward passes of a microbatch are in the order of its slices: a slice attends to the keys and values of earlier
    ones. Backward passes are in the reverse order: a slice needs the gradients of its keys and values from later ones.

    Args:
      num_stages: S, at least 1.
      num_microbatches: M, at least 1.
      num_slices: K, at least 1; `choose_slices` returns their lengths.

    Returns:
      The schedule. For slices of one cost, its bubble is (S − 1) / (M K + S − 1), with synchronous ticks too.

    Raises:
      ValueError: a number below 1.

    Example:
      >>> token_slices(2, 1, 2).simulate({"F": [[3, 1]], "B": 1}, "mpmd").makespan
      10.0

    References:
      Li et al. 2021, "TeraPipe: Token-Level Pipeline Parallelism for Training Large-Scale Language Models".
    """
    check_at_least_one(num_stages=num_stages, num_microbatches=num_microbatches, num_slices=num_slices)
    m, k = np.indices((num_microbatches, num_slices)).reshape(2, -1)
    numbers = np.concatenate([m * num_slices + k, m * num_slices + num_slices - 1 - k])
    kinds = np.repeat([FORWARD, BACKWARD], len(m))
    actions = np.stack([kinds, numbers, np.zeros_like(numbers)], axis=1).astype(np.int32)
    schedule = schedule_of("token_slices", num_stages, num_microbatches * num_slices, lambda *_: actions)
    return TokenSlices(**vars(schedule), num_slices=num_slices)
