"""Where to cut layers of different costs into pipeline stages. NumPy only.

Letters: L layers, S stages, M microbatches of a data shard.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64, Int64

from jvarlen._common.checks import UserError, check_at_least_one, list_first, list_offenders, offenders_where

__all__ = ["cut_layers"]

_EQUAL = 1e-12  # of the sum of costs: rounding of sums does not decide


def cut_layers(
    costs: npt.ArrayLike, num_stages: int, *, first: float = 0.0, last: float = 0.0
) -> Int64[np.ndarray, " S"]:
    """Layers of each pipeline stage such that a step takes the least time.

    M microbatches take the sum of the costs of stages and M − 1 times the largest: `Schedule.simulate` finds this for
    `gpipe` in mode `"mpmd"`, if backward passes take one multiple of forward passes. The sum is the same for all cuts.
    So the least largest cost is best for any M, and it bounds what `eager_1f1b` takes with synchronous ticks: at most M
    + S − 1 times the largest. Ties go to the cut with the smallest sum of squares, which is even in the other stages as
    well, and then to the one with the fewest layers on the first stages, which hold the most activations.

    The programs of `jvarlen.parallel` run `Layout.layers` on each stage but the last ones. Where layers cost the same,
    and `first` nothing, the largest of these stages costs no more than that of any cut.

    Dynamic programming is exact, in time O(S · L²).

    Args:
      costs: of each layer, [L], in seconds or any unit, finite and at least 0: forward and backward passes together.
      num_stages: S, from 1 to L. Each stage has at least one layer.
      first: what the first stage does besides, such as embedding tokens.
      last: what the last stage does besides, such as the loss.

    Returns:
      int64[S], consecutive layers of each stage, from the first; they sum to L.

    Raises:
      ValueError: costs that are negative or not finite, or not of one dimension; more stages than layers, or none.

    Example:
      >>> costs = np.ones(8)
      >>> layers = cut_layers(costs, 4, last=2)
      >>> layers.tolist()
      [2, 2, 3, 1]
      >>> stages = np.add.reduceat(costs, np.cumsum(layers) - layers) + [0, 0, 0, 2]
      >>> float(stages.max())  # two layers a stage take 4
      3.0

    References:
      Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training", section 3.1.
    """
    values = _check_costs(costs, first, last)
    check_at_least_one(num_stages=num_stages)
    num_layers = len(values)
    if num_stages > num_layers:
        raise UserError(f"{num_layers} layers do not make {num_stages} stages: a stage has at least one layer")
    before = np.concatenate([[0.0], np.cumsum(values)])
    of_layers = before - before[:, None]  # of those from the row's edge to the column's
    of_layers[np.tril_indices(num_layers + 1)] = np.inf
    extra = np.zeros(num_stages)
    extra[0] += first
    extra[-1] += last
    total = before[-1] + first + last

    least = np.where(np.arange(num_layers + 1) == num_layers, 0.0, np.inf)  # of the stages from an edge on
    for stage in reversed(range(num_stages)):
        least = np.maximum(of_layers + extra[stage], least).min(axis=1)
    limit = least[0] + _EQUAL * total

    squares = np.where(np.arange(num_layers + 1) == num_layers, 0.0, np.inf)
    ends = np.zeros((num_stages, num_layers + 1), np.int64)
    for stage in reversed(range(num_stages)):
        of_stage = of_layers + extra[stage]
        sums = np.where(of_stage <= limit, of_stage, np.inf) ** 2 + squares
        squares = sums.min(axis=1)
        ends[stage] = (sums <= squares[:, None] + _EQUAL * total**2).argmax(axis=1)  # the first
    edges = [0]
    for stage in range(num_stages):
        edges.append(int(ends[stage, edges[-1]]))
    return np.diff(np.array(edges, np.int64))


def _check_costs(costs: npt.ArrayLike, first: float, last: float) -> Float64[np.ndarray, " L"]:
    values = np.asarray(costs, np.float64)
    if values.ndim != 1:
        raise UserError(f"costs must have one dimension, that of layers, not shape {values.shape}")
    wrong, wrong_costs = offenders_where(~(np.isfinite(values) & (values >= 0)), values)
    if len(wrong):
        raise UserError(f"costs of layers must be finite and at least 0: {list_offenders(wrong, wrong_costs)}")
    ends = {"first": first, "last": last}
    if wrong_ends := [f"{name} ({value})" for name, value in ends.items() if not (np.isfinite(value) and value >= 0)]:
        raise UserError(f"must be finite and at least 0: {list_first(wrong_ends)}")
    return values
