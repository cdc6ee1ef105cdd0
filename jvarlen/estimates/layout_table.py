"""Many layouts as columns of numbers, so that their costs are computed at once. NumPy only.

Letters: C layouts, K buckets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, get_args

import numpy as np
from jaxtyping import Bool, Int64

from jvarlen._common.types import Array
from jvarlen.distributed.layout import Layout, ReduceDtype, Remat, ScheduleName
from jvarlen.parallel.layers import bounds_of_cut
from jvarlen.planning.buckets import Bucket

__all__ = ["REMATS", "SCHEDULES", "LayoutTable", "layout_table"]

REMATS: tuple[Remat, ...] = get_args(Remat)
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)


class LayoutTable(NamedTuple):
    """Layouts, a row each, with the fields of `Layout`; beside buckets, columns have the shape [C, 1]."""

    data: Int64[np.ndarray, " C"]
    stage: Int64[np.ndarray, " C"]
    context: Int64[np.ndarray, " C"]
    tensor: Int64[np.ndarray, " C"]
    zero: Int64[np.ndarray, " C"]
    schedule: Int64[np.ndarray, " C"]  # the index in `SCHEDULES`; 0 without stages
    virtual: Int64[np.ndarray, " C"]
    sequence_parallel: Bool[np.ndarray, " C"]
    context_from: Int64[np.ndarray, " C"]
    remat: Int64[np.ndarray, " C"]  # the index in `REMATS`
    reduces_bfloat16: Bool[np.ndarray, " C"]  # whether gradients are sent in bfloat16
    layers: Int64[np.ndarray, " C"]  # of a virtual stage; 0: as few as possible

    @property
    def num_shards(self) -> Int64[np.ndarray, " C"]:
        """Devices along "data" and "context"."""
        return self.data * self.context

    def layers_per_part(self, num_layers: int) -> Int64[np.ndarray, ...]:
        """Layers of each virtual stage but the last ones, which have what is left."""
        return np.where(self.layers > 0, self.layers, -(-num_layers // (self.stage * self.virtual)))

    def num_slots(self, num_layers: int) -> Int64[np.ndarray, ...]:
        """Layers that arrays have room for."""
        return self.layers_per_part(num_layers) * self.stage * self.virtual

    def takes_layers(self, num_layers: int) -> Bool[np.ndarray, ...]:
        """Whether stages cut so many layers, as in `layers_per_part`."""
        parts, size = self.stage * self.virtual, self.layers_per_part(num_layers)
        least, most = bounds_of_cut(num_layers, parts)
        return (
            (num_layers >= self.stage) & (num_layers > least * (parts - self.stage)) & (least <= size) & (size <= most)
        )

    @property
    def wide(self) -> LayoutTable:
        """With an axis for buckets."""
        return self.take((slice(None), None))

    def take(self, rows: Array | slice | tuple[slice | None, ...]) -> LayoutTable:
        """Some of the layouts, by indices or a mask."""
        return LayoutTable(*(column[rows] for column in self))

    def layout(self, row: int) -> Layout:
        """One of the layouts."""
        values = {name: column[row].item() for name, column in self._asdict().items()}
        remat, schedule = REMATS[values.pop("remat")], SCHEDULES[values.pop("schedule")]
        reduced: ReduceDtype = "bfloat16" if values.pop("reduces_bfloat16") else "float32"
        has_stages = values["stage"] > 1
        layout = Layout(**values, reduce_dtype=reduced, **({"schedule": schedule} if has_stages else {}))
        return layout if layout.remat_in_force == remat else dataclasses.replace(layout, remat=remat)

    def is_spread(self, buckets: Sequence[Bucket]) -> Bool[np.ndarray, "C K"]:
        """Whether the rows of a bucket are spread over "context"."""
        lengths = np.array([bucket.length for bucket in buckets])
        return (self.context > 1)[:, None] & (lengths >= self.context_from[:, None])

    def per_shard(self, buckets: Sequence[Bucket], num_microbatches: int) -> Int64[np.ndarray, "C K"]:
        """Microbatches of a data shard; 0 where the shards do not divide those of a step."""
        shards = np.where(self.is_spread(buckets), self.data[:, None], self.num_shards[:, None])
        return np.where(num_microbatches % shards == 0, num_microbatches // shards, 0)


def layout_table(layouts: Sequence[Layout]) -> LayoutTable:
    """The table of C layouts, for `step_seconds` and `MemoryModel`.

    Args:
      layouts: C of them.

    Returns:
      `LayoutTable`.
    """
    converted = {
        "schedule": [SCHEDULES.index(layout.schedule) if layout.stage > 1 else 0 for layout in layouts],
        "remat": [REMATS.index(layout.remat_in_force) for layout in layouts],
        "reduces_bfloat16": [layout.reduce_dtype == "bfloat16" for layout in layouts],
    }
    columns = (converted.get(name) or [getattr(layout, name) for layout in layouts] for name in LayoutTable._fields)
    return LayoutTable(*map(np.array, columns))
