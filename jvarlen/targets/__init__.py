"""Devices that are elsewhere: the seconds and bytes of a step there, by compiling it for them.

- `target`: devices that are only compiled for. `compile_for`: a step compiled for them. `report`: the compiler's
  figures. `dump`: the texts that hold them, and the launches of a GPU's host. `buffers`: the largest arrays in memory.
- `program_seconds`: the time of a compiled step.
- `finalists`: the best layouts of a search, compiled.
- `row_choice`: the rows of buckets that fit. `compiled_bytes`: the bytes of steps between compiled programs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jvarlen._common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from jvarlen.targets.finalists import compile_finalists
    from jvarlen.targets.report import TargetReport, TargetRow
    from jvarlen.targets.row_choice import RowChoice, choose_rows
    from jvarlen.targets.target import Target

__all__ = ["RowChoice", "Target", "TargetReport", "TargetRow", "choose_rows", "compile_finalists"]

__getattr__, __dir__ = lazy_imports(__name__)
