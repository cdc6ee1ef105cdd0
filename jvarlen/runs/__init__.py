"""A whole training: from settings to a run directory.

- `config`, `plan_config`: frozen, checked settings, as asked for. `model`: the model that `model=` names.
- `settings`, `saved_config`: resolved settings, and their file in a run's directory.
- `shapes`, `training_plan`: the chosen shapes; the plans of all epochs.
- `task`, `data`: the model that is trained, and its samples.
- `prepare`: data, shapes, layout and plan, before anything is placed or compiled.
- `open_run`: directory, state and compiled steps. `loop`: the steps, and evaluations and hooks between them.
- `fit`: all of it, in order.
- `steps`: the seconds, display, traces, records and checks of steps.
- `directory`, `summary`: the files of a run, and its summary.
- `commands`: all commands besides `train`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jvarlen._common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from jvarlen._common.interrupts import exit_code_of_interrupt, remembered_interrupts
    from jvarlen.runs.fit import FitResult
    from jvarlen.runs.loop import Training, every

__all__ = ["FitResult", "Training", "every", "exit_code_of_interrupt", "remembered_interrupts"]

__getattr__, __dir__ = lazy_imports(__name__)
