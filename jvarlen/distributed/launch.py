"""Starts the devices and processes of a command."""

from __future__ import annotations

import dataclasses

import jax
from jax.sharding import Mesh

from jvarlen._common.checks import check_at_least
from jvarlen.distributed.mesh import data_mesh, split_cpu
from jvarlen.distributed.processes import initialize_processes

__all__ = ["DeviceConfig", "launch"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """The devices and processes that compute."""

    devices: int | None = dataclasses.field(default=None, metadata={"scope": "process"})
    """Number of devices, for each process. Without accelerators the CPU is split into this many. None for all."""
    distributed: bool = dataclasses.field(default=False, metadata={"scope": "call"})
    """Several processes compute together. Also implied by any of the three settings that follow.
    JAX finds those that are not given in its environment (Slurm, Open MPI, cloud TPUs, Kubernetes)."""
    coordinator: str | None = dataclasses.field(default=None, metadata={"scope": "call"})
    """Host and port of process 0."""
    num_processes: int | None = dataclasses.field(default=None, metadata={"scope": "call"})
    """Number of processes."""
    process_id: int | None = dataclasses.field(default=None, metadata={"scope": "call"})
    """Index of this process, from 0."""

    def __post_init__(self):
        check_at_least(self, 1, "devices", "num_processes")
        check_at_least(self, 0, "process_id")

    @property
    def has_processes(self) -> bool:
        """Whether several processes compute together."""
        return self.distributed or any(x is not None for x in (self.coordinator, self.num_processes, self.process_id))


def launch(config: DeviceConfig) -> Mesh:
    """Connects the processes and makes a mesh of one axis. Call it before anything else that touches a device.

    Args:
      config: which devices and processes.

    Returns:
      A mesh with the axis "data".

    Raises:
      ValueError: there are too few devices, or JAX does not find a setting that was not given.
      RuntimeError: JAX has used its devices already, or not all processes connected.
    """
    if config.devices is not None:
        split_cpu(config.devices)
    if config.has_processes and not jax.distributed.is_initialized():
        initialize_processes(config.coordinator, config.num_processes, config.process_id)
    return data_mesh(config.devices, of_each_process=True)
