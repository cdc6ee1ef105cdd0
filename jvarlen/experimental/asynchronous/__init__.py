"""Training without waiting for the slowest worker, and steps on parameters of chosen age.

- `train`: worker processes compute gradients on the newest parameters, and the order in which they are applied.
- `arrival_log`: the log of a run, which repeats it bit for bit.
- `stale_step`: chosen staleness in one program.
- `programs`: the gradient of a microbatch and the update as separate programs. `worker`: the worker processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jvarlen._common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from jvarlen.experimental.asynchronous.arrival_log import ArrivalLog, AsyncRun, replay
    from jvarlen.experimental.asynchronous.stale_step import PastVersions, keep_versions, make_stale_train_step
    from jvarlen.experimental.asynchronous.train import train_async

__all__ = [
    "ArrivalLog",
    "AsyncRun",
    "PastVersions",
    "keep_versions",
    "make_stale_train_step",
    "replay",
    "train_async",
]

__getattr__, __dir__ = lazy_imports(__name__)
