"""Training in several processes on one host, which goes on with those that survive.

- `__main__`: `python -m jvarlen.experimental.elastic 4 -- jvarlen train …`.
- `supervisor`: starts the processes, and starts them again when some are lost.
- `survivors`: the layout of the devices that are left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jvarlen._common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from jvarlen.experimental.elastic.supervisor import Start, keep_training
    from jvarlen.experimental.elastic.survivors import surviving_layout

__all__ = ["Start", "keep_training", "surviving_layout"]

__getattr__, __dir__ = lazy_imports(__name__)
