"""Steps of microbatches with different shapes."""

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from torch_ref.checks import check_integer, known_keywords
from torch_ref.planning.balance import check_costs, in_units
from torch_ref.planning.buckets import Buckets
from torch_ref.planning.budget import Cost
from torch_ref.planning.plan import Plan

__all__ = ["MixedPlan", "make_mixed_plan"]


@dataclass(frozen=True, kw_only=True, eq=False)
class MixedPlan:
    """A plan of single microbatches whose steps are runs of them, of one bucket or several.

    Attributes:
        plan: step i of it is microbatch i; M = 1.
        step_offsets: int64[S + 1]; step s consists of microbatches step_offsets[s] to step_offsets[s + 1] - 1.
    """

    plan: Plan
    step_offsets: NDArray[np.int64]

    def __post_init__(self) -> None:
        """Lock the offsets: the digest is computed once."""
        self.step_offsets.setflags(write=False)

    @property
    def buckets(self) -> Buckets:
        """The static shapes of microbatches, by ascending length."""
        return self.plan.buckets

    @property
    def num_steps(self) -> int:
        """S, the number of steps."""
        return len(self.step_offsets) - 1

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of all steps."""
        return self.plan.num_steps

    @property
    def num_samples(self) -> int:
        """The number of real samples."""
        return self.plan.num_samples

    @property
    def num_sequences(self) -> NDArray[np.int64]:
        """int64[S], real samples of each step."""
        return self._per_step(self.plan.num_sequences)

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """int64[S], real tokens of each step."""
        return self._per_step(self.plan.num_tokens)

    @cached_property
    def digest(self) -> str:
        """SHA-256 as 64 hex digits, over the digest of the microbatches and where steps begin."""
        numbers = [self.num_steps, *self.step_offsets.tolist()]
        packed = b"".join(number.to_bytes(8, "little") for number in numbers)
        return sha256(b"jvarlen-mixed-plan-1\x00" + bytes.fromhex(self.plan.digest) + packed).hexdigest()

    def ranks(self, num_ranks: int, cost: Cost | None = None) -> NDArray[np.int32]:
        """Return who computes which microbatch; not part of the digest, as no result depends on it.

        Args:
            num_ranks: how many share each step; some may get nothing of one.
            cost: the cost of a microbatch, called as cost(rows, length) with int64 arrays; None counts positions.

        Returns:
            int32[number of microbatches]. From the most to the least costly of a step, ties by index, each goes to the
            rank with the least work so far, ties by rank.

        Raises:
            ValueError: if there is no rank, or a cost is negative or not finite.
        """
        shapes = np.array(self.buckets.shapes, dtype=np.int64)[self.plan.step_bucket]
        sizes = self.plan.buckets.row_sizes[self.plan.step_bucket]
        costs = shapes[:, 0] * sizes if cost is None else np.asarray(cost(*shapes.T))
        units = in_units(check_costs(costs))
        check_integer("num_ranks", num_ranks)
        owners = np.zeros(len(units), dtype=np.int32)
        for begin, end in pairwise(self.step_offsets.tolist()):
            work = [0] * min(num_ranks, end - begin)
            for i in sorted(range(begin, end), key=lambda i: (-units[i], i)):
                owners[i] = work.index(min(work))
                work[owners[i]] += units[i]
        return owners

    def _per_step(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.diff(np.concatenate([[0], np.cumsum(counts)])[self.step_offsets])


@known_keywords
def make_mixed_plan(plan: Plan, num_microbatches: int) -> MixedPlan:
    """Make steps of equally many consecutive microbatches of the plan; the last step may have fewer.

    Args:
        plan: a plan with one microbatch a step.
        num_microbatches: the microbatches of one update of the optimizer, >= 1.

    Returns:
        The plan of these steps.

    Raises:
        ValueError: if a step of the plan has several microbatches, or the number is below 1.

    Example:
        >>> from torch_ref.planning.make_plan import make_plan
        >>> mixed = make_mixed_plan(make_plan([1, 2, 2, 4], [(2, 2), (1, 4)], order="length"), 2)
        >>> mixed.num_tokens.tolist()
        [5, 4]
    """
    size = check_integer("num_microbatches", num_microbatches)
    if plan.num_microbatches != 1:
        raise ValueError(
            f"mixed steps are made of single microbatches: the plan must have num_microbatches=1, it has "
            f"{plan.num_microbatches}"
        )
    offsets = [*range(0, plan.num_steps, size), plan.num_steps]
    return MixedPlan(plan=plan, step_offsets=np.array(offsets, dtype=np.int64))
