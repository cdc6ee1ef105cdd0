"""A plan played out on a cluster: seconds by cause, with devices of uneven speed, failures and checkpoints.

- `run`: a simulated run.
- `noise`: devices of uneven speed. `failures`: hosts that fail.
- `figures`: its picture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jvarlen._common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from jvarlen.experimental.simulation.failures import Failures, Interruption
    from jvarlen.experimental.simulation.figures import draw_simulation
    from jvarlen.experimental.simulation.noise import Noise
    from jvarlen.experimental.simulation.run import Simulation, simulate

__all__ = ["Failures", "Interruption", "Noise", "Simulation", "draw_simulation", "simulate"]

__getattr__, __dir__ = lazy_imports(__name__)
