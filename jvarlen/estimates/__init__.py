"""Estimates before a step is compiled for its devices: memory, communication, seconds, the choice of a layout.

- `lifetimes`: when the arrays of a traced function are alive. `memory`: the memory of a step on a device.
- `hlo`: collectives of a compiled program. `communication`: what a compiled step communicates.
- `cluster`: devices, memory and links, from presets or files.
- `layout_table`: many layouts as columns of numbers.
- `model_costs`: matrix products and collectives of a model. `step_seconds`: the time of a step on each layout.
- `memory_model`: the bytes of a step on many layouts at once, fitted to `estimate_memory`.
- `choice`: every layout, the cost of a plan on each, and the one that fits with the least estimated time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jvarlen._common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from jvarlen.estimates.cluster import Cluster
    from jvarlen.estimates.communication import estimate_communication
    from jvarlen.estimates.memory import estimate_memory

__all__ = ["Cluster", "estimate_communication", "estimate_memory"]

__getattr__, __dir__ = lazy_imports(__name__)
