"""Starts the devices and processes of a command, and keeps the memory of its steps on a CPU."""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from typing import TYPE_CHECKING

from jvarlen._common.checks import UserError, check_counts, list_first
from jvarlen._common.settings import Settings
from jvarlen.distributed.layout import Layout

if TYPE_CHECKING:
    from jvarlen.distributed.placement import Placement

__all__ = ["DeviceConfig", "keep_memory_of_steps", "launch"]

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # of glibc's malloc.h
_MOST_KEPT_BYTES = 2**31 - 1  # at the end of the heap; an int
_HEAP_BYTES = 2**26  # of a thread; glibc gives back an empty one unless so much is kept free


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceConfig(Settings):
    """The devices and processes that compute."""

    devices: int | None = dataclasses.field(default=None, metadata={"scope": "process"})
    """Number of devices, for each process. Without accelerators the CPU is split into this many. None for all."""
    distributed: bool = dataclasses.field(default=False, metadata={"scope": "call"})
    """Several processes compute together. Any of coordinator, num_processes and process_id implies it; JAX finds the
    others in its environment (Slurm, Open MPI, cloud TPUs, Kubernetes)."""
    coordinator: str | None = dataclasses.field(default=None, metadata={"scope": "call"})
    """Host and port of process 0."""
    num_processes: int | None = dataclasses.field(default=None, metadata={"scope": "call"})
    """Number of processes."""
    process_id: int | None = dataclasses.field(default=None, metadata={"scope": "call"})
    """Index of this process, from 0."""

    def __post_init__(self):
        super().__post_init__()
        check_counts(self, 1, "devices", "num_processes")
        check_counts(self, 0, "process_id")

    @property
    def has_processes(self) -> bool:
        """Whether several processes compute together."""
        return self.distributed or any(x is not None for x in (self.coordinator, self.num_processes, self.process_id))


def launch(config: DeviceConfig, layout: Layout = Layout()) -> Placement:  # noqa: B008
    """Connects the processes, and places a layout on their devices. Call it before anything touches a device."""
    import jax  # here: settings are read without JAX

    from jvarlen.distributed.mesh import split_cpu, split_hint
    from jvarlen.distributed.placement import place
    from jvarlen.distributed.processes import initialize_processes

    if config.devices is not None:
        split_cpu(config.devices)
    if config.has_processes and not jax.distributed.is_initialized():
        initialize_processes(config.coordinator, config.num_processes, config.process_id)
    devices, num_devices = jax.devices(), config.devices
    by_process = [[device for device in devices if device.process_index == p] for p in range(jax.process_count())]
    if few := [f"process {p} has {len(own)}" for p, own in enumerate(by_process) if len(own) < (num_devices or 1)]:
        fewest = min(map(len, by_process))
        hint = split_hint(devices, num_devices or 1)
        raise UserError(f"devices must be between 1 and {fewest}, not {num_devices}: {list_first(few)}{hint}")
    return place(layout, [device for own in by_process for device in own[:num_devices]])


def keep_memory_of_steps() -> None:
    """Lets steps on one CPU device reuse memory of earlier steps, up to 2 GiB, instead of page-faulting it in again.

    This changes the whole process: a call of a step waits for its end. Call it before anything touches a device.
    """
    import jax

    # glibc keeps large memory for the main thread alone. So steps run in the thread that calls them.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES)
        mallopt(_M_TOP_PAD, _HEAP_BYTES)
