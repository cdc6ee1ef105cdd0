"""Meshes, shardings and processes.

- `mesh`: the mesh of devices, and how a step's arrays lie on it.
- `processes`: starting together, agreeing, ending together.
- `watchdog`: a process that stalls ends the others.
"""

from jvarlen.distributed.mesh import batch_shardings, data_mesh, devices_of, replicate, split_cpu
from jvarlen.distributed.mesh import split_cpu as divide_processor  # its name before
from jvarlen.distributed.processes import agree, initialize_processes, together

__all__ = [
    "agree",
    "batch_shardings",
    "data_mesh",
    "devices_of",
    "divide_processor",
    "initialize_processes",
    "replicate",
    "split_cpu",
    "together",
]
