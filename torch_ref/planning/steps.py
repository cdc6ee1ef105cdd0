"""The steps of a plan: one group or several each, of microbatches of one bucket."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from torch_ref.planning.buckets import Bucket, Buckets, MultiLengthBucket, given_buckets

__all__ = ["PlannedSteps"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedSteps:
    """Shapes and sizes of steps.

    A step is one group or several, and a group is M microbatches of one bucket.

    Attributes:
        buckets: the K static shapes, `buckets.shapes`, by ascending length.
        num_microbatches: M, the microbatches of a group.
        group_bucket: int32[G], the bucket of each group.
        group_offsets: int64[G + 1]; the samples before each group.
        group_tokens: int64[G], real tokens of each group (of cut samples what is left of them, of pairs `size`).
        step_groups: int64[S + 1]; step s has the groups step_groups[s] to step_groups[s + 1] - 1. Where none are given,
            each group is a step.
    """

    buckets: Buckets
    num_microbatches: int
    group_bucket: NDArray[np.int32]
    group_offsets: NDArray[np.int64]
    group_tokens: NDArray[np.int64]
    step_groups: NDArray[np.int64] = None  # type: ignore[assignment]  # filled in below

    def __post_init__(self) -> None:
        """Check the buckets, and make each group a step where nothing else is given."""
        buckets = given_buckets(self.buckets, {"num_microbatches": self.num_microbatches})
        object.__setattr__(self, "buckets", buckets)
        if self.step_groups is None:
            object.__setattr__(self, "step_groups", np.arange(self.num_groups + 1))

    @property
    def num_steps(self) -> int:
        """S, the number of steps."""
        return len(self.step_groups) - 1

    @property
    def num_groups(self) -> int:
        """G, the number of groups."""
        return len(self.group_bucket)

    @property
    def has_many_groups(self) -> bool:
        """Whether a step has several groups."""
        return self.num_groups > self.num_steps

    @property
    def step_bucket(self) -> NDArray[np.int32]:
        """int32[S], the bucket of each step; a ValueError where steps have several groups."""
        if self.has_many_groups:
            raise ValueError("steps of this plan have several groups, each of its own bucket: read group_bucket")
        return self.group_bucket

    @cached_property
    def step_offsets(self) -> NDArray[np.int64]:
        """int64[S + 1]; step s holds `sample_ids[step_offsets[s]:step_offsets[s + 1]]`."""
        return _locked(self.group_offsets[self.step_groups])

    @cached_property
    def num_tokens(self) -> NDArray[np.int64]:
        """int64[S], real tokens of each step."""
        return _locked(np.add.reduceat(self.group_tokens, self.step_groups[:-1]))

    @property
    def rows_per_step(self) -> int:
        """The most rows of a step, with padding rows."""
        rows = np.array([bucket.rows for bucket in self.buckets.shapes])[self.group_bucket]
        return int(np.add.reduceat(rows, self.step_groups[:-1]).max()) * self.num_microbatches

    def groups(self, step: int) -> range:
        """Return the groups of a step, for `rows`, `chunks` and `ends`.

        Args:
            step: 0 <= step < num_steps.

        Returns:
            Their numbers; that of the step itself where each step is one group.

        Raises:
            IndexError: if there is no such step.
        """
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} is outside the plan's {self.num_steps} steps")
        return range(int(self.step_groups[step]), int(self.step_groups[step + 1]))

    def groups_of_buckets(self) -> dict[Bucket | MultiLengthBucket, int]:
        """Return how many groups each bucket has, possibly 0."""
        counts = np.bincount(self.group_bucket, minlength=len(self.buckets.shapes))
        return dict(zip(self.buckets.shapes, counts.tolist(), strict=True))

    @property
    def size(self) -> str:
        """What a sample of two lengths counts, as in `Budget`."""
        return self.buckets.size

    @cached_property
    def num_sequences(self) -> NDArray[np.int64]:
        """int64[S], real samples of each step."""
        return _locked(np.diff(self.step_offsets))

    @property
    def padding(self) -> float:
        """The share of all positions, padding rows included, that hold no real token."""
        return 1.0 - int(self.group_tokens.sum()) / int(self.positions.sum())

    @property
    def positions(self) -> NDArray[np.int64]:
        """int64[G], the positions of each group, padding rows included."""
        rows = np.array([bucket.rows for bucket in self.buckets.shapes], dtype=np.int64)
        return (rows * self.buckets.row_sizes * self.num_microbatches)[self.group_bucket]


def _locked(array: NDArray[np.int64]) -> NDArray[np.int64]:
    array.setflags(write=False)
    return array
