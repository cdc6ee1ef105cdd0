"""Many layouts as columns of numbers, so that their cost is computed at once. NumPy only.

Letters: C layouts, K buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
from jaxtyping import Bool, Int64

from jvarlen.distributed.layout import Layout, Remat, ScheduleName
from jvarlen.planning.buckets import Bucket

__all__ = ["SCHEDULES", "LayoutTable", "layout_table"]

SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)


class LayoutTable(NamedTuple):
    """Layouts, a row each.

    Attributes:
      data: int64[C], as of `Layout`.
      stage: likewise.
      context: likewise.
      tensor: likewise.
      zero: likewise.
      schedule: int64[C], the index in `SCHEDULES`; 0 without stages.
      virtual: int64[C], as of `Layout`.
      sequence_parallel: bool[C], likewise.
      context_from: int64[C], likewise.
      recomputes: bool[C], whether layers run again in the backward pass.
    """

    data: Int64[np.ndarray, " C"]
    stage: Int64[np.ndarray, " C"]
    context: Int64[np.ndarray, " C"]
    tensor: Int64[np.ndarray, " C"]
    zero: Int64[np.ndarray, " C"]
    schedule: Int64[np.ndarray, " C"]
    virtual: Int64[np.ndarray, " C"]
    sequence_parallel: Bool[np.ndarray, " C"]
    context_from: Int64[np.ndarray, " C"]
    recomputes: Bool[np.ndarray, " C"]

    @property
    def num_shards(self) -> Int64[np.ndarray, " C"]:
        """Devices along "data" and "context"."""
        return self.data * self.context

    @property
    def num_devices(self) -> Int64[np.ndarray, " C"]:
        """The product of the sizes of the axes."""
        return self.data * self.stage * self.context * self.tensor

    def take(self, rows: Any) -> LayoutTable:
        """Some of the layouts.

        Args:
          rows: their indices, or a mask.

        Returns:
          Their table.
        """
        return LayoutTable(*(column[rows] for column in self))

    def layout(self, row: int) -> Layout:
        """One of the layouts.

        Args:
          row: its index.

        Returns:
          The layout.
        """
        values = {name: column[row].item() for name, column in self._asdict().items()}
        recomputes, schedule = values.pop("recomputes"), SCHEDULES[values.pop("schedule")]
        has_stages = values["stage"] > 1
        remat: Remat | None = None if recomputes == has_stages else "full" if recomputes else "none"
        return Layout(**values, remat=remat, **({"schedule": schedule} if has_stages else {}))

    def is_spread(self, buckets: Sequence[Bucket]) -> Bool[np.ndarray, "C K"]:
        """Whether the positions of a bucket's rows are spread over "context".

        Args:
          buckets: K buckets.

        Returns:
          bool[C, K].
        """
        lengths = np.array([bucket.length for bucket in buckets])
        return (self.context > 1)[:, None] & (lengths >= self.context_from[:, None])

    def of_shard(self, buckets: Sequence[Bucket], microbatches_per_step: int) -> Int64[np.ndarray, "C K"]:
        """Microbatches of a data shard.

        Args:
          buckets: K buckets.
          microbatches_per_step: those of a step over all devices.

        Returns:
          int64[C, K]; 0 where they do not divide.
        """
        shards = np.where(self.is_spread(buckets), self.data[:, None], self.num_shards[:, None])
        return np.where(microbatches_per_step % shards == 0, microbatches_per_step // shards, 0)


def layout_table(layouts: Sequence[Layout]) -> LayoutTable:
    """The table of some layouts.

    Args:
      layouts: C of them.

    Returns:
      A `LayoutTable` of C rows.
    """

    def column(name: str, dtype: Any = np.int64) -> np.ndarray:
        return np.array([getattr(layout, name) for layout in layouts], dtype)

    return LayoutTable(
        data=column("data"),
        stage=column("stage"),
        context=column("context"),
        tensor=column("tensor"),
        zero=column("zero"),
        schedule=np.array(
            [SCHEDULES.index(layout.schedule) if layout.stage > 1 else 0 for layout in layouts], np.int64
        ),
        virtual=column("virtual"),
        sequence_parallel=column("sequence_parallel", np.bool_),
        context_from=column("context_from"),
        recomputes=np.array([layout.remat_in_force == "full" for layout in layouts], np.bool_),
    )
