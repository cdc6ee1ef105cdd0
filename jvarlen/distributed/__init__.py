"""Meshes, shardings and processes.

- `mesh`: the device mesh, and how a step's arrays are sharded over it.
- `grad_buckets`: which gradients are reduced together, and when.
- `processes`: processes that start together, agree, and end together.
- `launch`: starts the devices and processes of a command.
- `cpu_memory`: keeps the memory of steps on a CPU from one step to the next.
- `watchdog`: ends all processes when one of them stalls.
"""

from jvarlen.distributed.grad_buckets import assign_grad_buckets
from jvarlen.distributed.mesh import batch_shardings, data_mesh, devices_of, replicate, split_cpu
from jvarlen.distributed.mesh import split_cpu as divide_processor  # its name before
from jvarlen.distributed.processes import agree, initialize_processes, together

__all__ = [
    "agree",
    "assign_grad_buckets",
    "batch_shardings",
    "data_mesh",
    "devices_of",
    "divide_processor",
    "initialize_processes",
    "replicate",
    "split_cpu",
    "together",
]
