"""Devices that are elsewhere: the seconds and bytes of a layout there, before training, and the choice of a layout.

- `target`: devices that are only compiled for. `compile_for`: a step compiled for them. `report`: what the
  compiler says of it. `dump`: the texts in which it does, and what the host of a GPU launches.
  `buffers`: what fills the memory.
  `program_seconds`: the time of a compiled step.
  `row_choice`: the rows of buckets that fit, by programs compiled for them.
- `cluster`: devices, memory and links, from presets or files.
- `layout_table`: many layouts as columns of numbers.
- `model_costs`: matrix products and collectives of a model. `step_seconds`: the time of a step on each layout.
- `memory_model`: the bytes of a step on many layouts at once, a guess of `estimate_memory`.
- `choice`: every layout, the cost of a plan on each, and the one that fits with the least estimated time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jvarlen._common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from jvarlen.targets.cluster import Cluster
    from jvarlen.targets.report import TargetReport, TargetRow
    from jvarlen.targets.row_choice import RowChoice, choose_rows
    from jvarlen.targets.target import Target

__all__ = [
    "Cluster",
    "RowChoice",
    "Target",
    "TargetReport",
    "TargetRow",
    "choose_rows",
]

__getattr__, __dir__ = lazy_imports(__name__)
