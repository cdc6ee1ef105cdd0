"""Meshes, shardings and processes.

- `layout`: which axes a mesh has and what is sharded, as a text such as `data4.zero2`.
- `mesh`: the axes and the devices of a device mesh.
- `placement`: a layout on devices, and how a step's arrays are sharded there.
- `grad_buckets`: which gradients are reduced together, and when.
- `processes`: processes that start together, agree, and end together, also when one of them stalls.
- `launch`: starts the devices and processes of a command, and keeps the memory of its steps on a CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jvarlen._common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from jvarlen.distributed.grad_buckets import assign_grad_buckets
    from jvarlen.distributed.mesh import split_cpu
    from jvarlen.distributed.processes import agree, initialize_processes, together

__all__ = [
    "agree", "assign_grad_buckets", "initialize_processes", "split_cpu", "together",
]  # fmt: skip

__getattr__, __dir__ = lazy_imports(__name__)
