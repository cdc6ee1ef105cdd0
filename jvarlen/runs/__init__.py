"""A whole training: from settings to a run directory.

- `config`, `plan_config`: frozen, checked settings. `model`: what `model=` means.
- `shapes`, `training_plan`: the shapes that settings lead to; the plans of all epochs.
- `task`, `data`: what is trained, and on which samples.
- `prepare`: data, shapes, layout and plan, before anything is placed or compiled.
- `fit`: all of it, in order, with the loop and its evaluations.
- `steps`: the seconds of steps, their display and traces.
- `directory`: the files of a run.
- `commands`: those besides `train`. `measure_costs`: cost models of steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jvarlen._common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from jvarlen._common.interrupts import exit_code_of_interrupt, remembered_interrupts
    from jvarlen.runs.fit import FitResult

__all__ = ["FitResult", "exit_code_of_interrupt", "remembered_interrupts"]

__getattr__, __dir__ = lazy_imports(__name__)
