"""The rules of a plan: the arguments of `make_plan` beside lengths and buckets, as one value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy.typing as npt

from jvarlen.planning.lengths import PackedOverlong
from jvarlen.planning.order import Order, Pacing
from jvarlen.planning.step_sizes import StepSizes

__all__ = ["PackingChoice", "PackingMethod", "PlanRules", "RowPacking", "SamplesPerRow"]

PackingMethod = Literal["best_fit", "wrapped"]
RowPacking = Literal["padded", PackingMethod]  # padded: one sample a row
PackingChoice = Literal[RowPacking, "auto"]
SamplesPerRow = int | Sequence[int]


class PlanRules(NamedTuple):
    """In which order samples and steps come, how they share rows, and which are cut."""

    order: Order
    difficulty: npt.ArrayLike | None = None  # None where it is the length
    seed: int = 0
    epoch: int = 0
    pacing: Pacing | None = None
    overlong: PackedOverlong = "error"
    packing: PackingChoice = "padded"
    row_lengths: Sequence[int] | None = None
    samples_per_row: SamplesPerRow | None = None
    step_sizes: StepSizes | None = None

    @property
    def is_plain(self) -> bool:
        """Whether samples come by a word alone."""
        return isinstance(self.order.by, str) and self.order.sample_blocks is self.difficulty is self.pacing is None

    @property
    def emits_by_arrival(self) -> bool:
        """Whether a step comes when its last sample does."""
        return not self.is_plain or self.order.by == "dataset"
