"""Steps whose microbatches have different shapes.

Letters: S steps, N microbatches, p ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import heapq

import numpy as np
from jaxtyping import Float, Int32, Int64

from jvarlen._common.checks import UserError, check_at_least_one
from jvarlen.planning.balance import costs_in_units
from jvarlen.planning.buckets import AnyBucket, Buckets
from jvarlen.planning.budget import CostFn, evaluate_cost
from jvarlen.planning.plan import Plan

__all__ = ["MixedPlan", "make_mixed_plan"]

_DIGEST_NAME = b"jvarlen-mixed-plan-1\0"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MixedPlan:
    """The microbatches of a plan, grouped into steps whose microbatches may be of different buckets.

    Microbatch i is step i of `plan`. Step s holds the consecutive microbatches `step_offsets[s]` to `step_offsets[s+1]
    − 1`. Which rank computes which of them belongs to the layout: `ranks` decides it, and the digest leaves it out.

    Attributes:
      plan: the microbatches in their order, N in all; its `num_microbatches` is 1.
      step_offsets: int64[S+1], the microbatches before each step; the last is N.
    """

    plan: Plan
    step_offsets: Int64[np.ndarray, " S_plus_1"]

    def __post_init__(self):
        self.step_offsets.setflags(write=False)  # the digest is computed once

    @property
    def buckets(self) -> Buckets[AnyBucket]:
        """The static shapes of the microbatches, lengths ascending."""
        return self.plan.buckets

    @property
    def num_microbatches(self) -> int:
        """N, the microbatches of all steps."""
        return self.plan.num_steps

    @property
    def num_steps(self) -> int:
        """S, the number of steps."""
        return len(self.step_offsets) - 1

    @property
    def num_samples(self) -> int:
        """The number of real samples; each comes exactly once."""
        return self.plan.num_samples

    @functools.cached_property
    def num_sequences(self) -> Int64[np.ndarray, " S"]:
        """int64[S], real samples of each step."""
        return self._sums(self.plan.num_sequences)

    @functools.cached_property
    def num_tokens(self) -> Int64[np.ndarray, " S"]:
        """int64[S], real tokens of each step."""
        return self._sums(self.plan.num_tokens)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 in hex of everything that decides the steps: of the plan's digest, of S and of `step_offsets`."""
        sha = hashlib.sha256(_DIGEST_NAME + bytes.fromhex(self.plan.digest))
        sha.update(np.array(self.num_steps, "<i8").tobytes())
        sha.update(self.step_offsets.astype("<i8", copy=False).tobytes())
        return sha.hexdigest()

    def ranks(self, num_ranks: int, cost: CostFn | None = None) -> Int32[np.ndarray, " N"]:
        """The rank of each microbatch, so that the slowest rank of a step has little to do.

        Longest first: the microbatches of a step by descending cost, ties by index, each to the rank that has the least
        so far, ties by rank.

        Args:
          num_ranks: p, of data parallelism. In a step of fewer microbatches, some ranks have none.
          cost: cost(rows, length) of one microbatch, as in `Budget`; None: its positions.

        Returns:
          int32[N], from 0 to p − 1.

        Raises:
          ValueError: no ranks; a cost that is not finite or below 0.

        References:
          Longest first: Graham 1969, "Bounds on Multiprocessing Timing Anomalies". Its slowest rank has at most 4/3 −
          1/(3p) of the least possible.
        """
        check_at_least_one(num_ranks=num_ranks)
        costs = costs_in_units(self._bucket_costs(cost)[self.plan.step_bucket])
        ranks = np.empty(self.num_microbatches, np.int32)
        for start, end in zip(self.step_offsets[:-1].tolist(), self.step_offsets[1:].tolist(), strict=True):
            loads = [(0, rank) for rank in range(min(num_ranks, end - start))]
            for index in start + np.argsort(-costs[start:end], kind="stable"):
                load, ranks[index] = loads[0]
                heapq.heapreplace(loads, (load + int(costs[index]), int(ranks[index])))
        return ranks

    def _bucket_costs(self, cost: CostFn | None) -> Float[np.ndarray, " K"]:
        if cost is None:
            return self.plan.buckets.padded_tokens.astype(np.float64)
        return evaluate_cost(cost, *np.array(self.buckets.shapes, np.int64).T)

    def _sums(self, values: Int64[np.ndarray, " N"]) -> Int64[np.ndarray, " S"]:
        """The sum over the microbatches of each step, read-only."""
        sums = np.add.reduceat(values, self.step_offsets[:-1])
        sums.setflags(write=False)
        return sums


def make_mixed_plan(plan: Plan, num_microbatches: int) -> MixedPlan:
    """Groups the microbatches of a plan into steps, whatever their buckets.

    Each step takes the next `num_microbatches` microbatches in the order of the plan; the last step takes the
    rest.

    Args:
      plan: with `num_microbatches` 1, so that each of its steps is one microbatch.
      num_microbatches: how many microbatches are one optimizer update. It can be any number: ranks need not
        divide it.

    Returns:
      A `MixedPlan`.

    Raises:
      ValueError: a plan of steps with several microbatches; a number below 1.

    Example:
      >>> from jvarlen.planning.make_plan import make_plan
      >>> mixed = make_mixed_plan(make_plan([3, 1, 4, 2, 8], [(2, 4), (1, 8)], order="length"), 2)
      >>> mixed.step_offsets.tolist(), mixed.num_sequences.tolist(), mixed.ranks(2).tolist()
      ([0, 2, 3], [4, 1], [0, 1, 0])
    """
    check_at_least_one(num_microbatches=num_microbatches)
    if plan.num_microbatches != 1:
        raise UserError(
            f"the plan has {plan.num_microbatches} microbatches a step, all of one bucket; steps of mixed buckets "
            "need a plan made with num_microbatches=1"
        )
    offsets = np.append(np.arange(0, plan.num_steps, int(num_microbatches), dtype=np.int64), plan.num_steps)
    return MixedPlan(plan=plan, step_offsets=offsets)
