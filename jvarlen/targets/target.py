"""Devices that are not here, by XLA's compilers for GPUs and TPUs, which run on a CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from typing import ClassVar

import jax

from jvarlen._common.checks import UserError
from jvarlen.estimates.cluster import PRESETS, Cluster

__all__ = ["Target"]

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class _Gpu:
    """A GPU as XLA's compiler wants it described; figures of https://github.com/openxla/xla, target_config/specs."""

    name: str
    cluster: str  # the preset of its rates
    memory_bytes: int
    visible_gib: float  # the least of these that drivers report
    bytes_per_second: int
    capability: int  # the major number
    num_cores: int
    units_per_core: int  # for products of float32
    clock_ghz: float
    shared_bytes_per_core: int
    l2_bytes: int

    @property
    def text(self) -> str:
        """The description, a GpuTargetConfigProto as text."""
        limits = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 48 * 2**10,
            "shared_memory_per_core": self.shared_bytes_per_core,
            "threads_per_core_limit": 2048,
            "core_count": self.num_cores,
            "fpus_per_core": self.units_per_core,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 2**16 - 1,
            "block_dim_limit_z": 2**16 - 1,
            "memory_bandwidth": self.bytes_per_second,
            "l2_cache_size": self.l2_bytes,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": self.memory_bytes,
            "shared_memory_per_block_optin": self.shared_bytes_per_core - 2**10,
            "registers_per_core_limit": 2**16,
            "registers_per_block_limit": 2**16,
        }
        # Without them XLA takes the driver for one that knows no loops in CUDA graphs.
        versions = dict.fromkeys(("driver_version", "runtime_version", "compile_time_toolkit_version"), '"12.9.0"')
        of_device = "\n".join(f"  {name}: {value}" for name, value in (limits | versions).items())
        return (
            f"gpu_device_info {{\n{of_device}\n  cuda_compute_capability {{ major: {self.capability} }}\n}}\n"
            'platform_name: "CUDA"\ndnn_version_info { major: 9 minor: 7 }\n'
            f'device_description_str: "{self.name}"\n'
        )


_H100 = _Gpu(
    name="NVIDIA H100 80GB HBM3", cluster="dgx-h100", memory_bytes=84_942_979_072, visible_gib=79.1,
    bytes_per_second=3_352_320_000_000, capability=9, num_cores=132, units_per_core=128, clock_ghz=1.98,
    shared_bytes_per_core=228 * 2**10, l2_bytes=50 * 2**20,
)  # fmt: skip
_A100 = _Gpu(
    name="NVIDIA A100-SXM4-80GB", cluster="dgx-a100", memory_bytes=85_100_068_864, visible_gib=79.1,
    bytes_per_second=2_039_040_000_000, capability=8, num_cores=108, units_per_core=64, clock_ghz=1.41,
    shared_bytes_per_core=164 * 2**10, l2_bytes=40 * 2**20,
)  # fmt: skip
_H200 = dataclasses.replace(
    _H100, name="NVIDIA H200 141GB HBM3e", cluster="dgx-h200", memory_bytes=151_397_597_184, visible_gib=139.7,
    bytes_per_second=4_800_000_000_000,
)  # fmt: skip
_GPUS = {"a100": _A100, "h100": _H100, "h200": _H200}
# Memory of a device that programs can have, in GiB, by the errors of libtpu 0.0.42; and the preset of its rates.
_TPUS = {
    "v5e": (15.75, "tpu-v5e-256"),  # in two dimensions
    "v5p": (95.74, "tpu-v5p"),  # in three
    "v6e": (31.25, "tpu-v6e-256"),
}
_NUMBER = r"[1-9]\d*"
_OF_GPUS = re.compile(rf"(?:({_NUMBER})x)?({_NUMBER})x({'|'.join(_GPUS)})")
_OF_TPUS = re.compile(rf"(?:v5e:|v6e:|v5p:{_NUMBER}x){_NUMBER}x{_NUMBER}")
_CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
# Settings that libtpu wants from a host; it may be any kind of TPU.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices to compile for, which need not be here.

    Attributes:
      name: as given.
      devices: JAX's; those of other hosts belong to other processes. Nothing can be placed on them.
      memory_bytes: that this process could have on one device: three quarters of a GPU, or the share in
        `XLA_CLIENT_MEM_FRACTION`, as in JAX. None where it is unknown.
      is_here: whether they are the devices of this process.
      cluster: rates of the devices and their links, by their makers; None for those that are here.

    Example:
      >>> Target.parse("here").is_here
      True
    """

    name: str
    devices: tuple[jax.Device, ...]
    memory_bytes: int | None
    is_here: bool
    cluster: Cluster | None = None

    FORMS: ClassVar[str] = (
        f"8xh100 or 2x8xh100, hosts × devices, of {', '.join(_GPUS)}; v5e:2x4, v6e:2x4 or v5p:2x2x2; or here"
    )

    @property
    def xla_options(self) -> tuple[str, ...]:
        """XLA's options for devices that are not here: products are not tuned by timing them."""
        return () if self.is_here or self.devices[0].platform == "tpu" else ("xla_gpu_autotune_level=0",)

    @classmethod
    def parse(cls, text: str) -> Target:
        """The devices that a text names.

        Args:
          text: `8xh100` for a host of eight, `2x8xh100` for two of them; `v5e:2x4` for a slice of TPUs by its
            dimensions; `here` for `jax.devices()`.

        Returns:
          `Target`.

        Raises:
          ValueError: no such devices are known.
          ModuleNotFoundError: their compiler is not installed; the message says how to install it.
        """
        if text == "here":
            memory_bytes = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
            return cls(text, tuple(jax.devices()), memory_bytes, is_here=True)
        if found := _OF_GPUS.fullmatch(text):
            num_hosts, num_devices, gpu = int(found[1] or 1), int(found[2]), _GPUS[found[3]]
            _check_installed(text, _CUDA_PLUGINS, "target-gpu")
            with _environment({"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}):
                options = {"target_config": gpu.text, "topology": f"{num_hosts}x1x{num_devices}"}
                devices = _topology(text, "cuda", gpu.name, **options)
            gib, cluster = _share_of_gpus() * gpu.visible_gib, PRESETS[gpu.cluster]
            cluster = dataclasses.replace(cluster, num_hosts=num_hosts, devices_per_host=num_devices)
        elif _OF_TPUS.fullmatch(text):
            _check_installed(text, ("libtpu",), "target-tpu")
            with _environment(_TPU_ENVIRONMENT):
                devices = _topology(text, "tpu", text)
            gib, preset = _TPUS[text.partition(":")[0]]
            cluster = PRESETS[preset]
        else:
            raise UserError(f"{text!r} names no devices: it is {cls.FORMS}")
        return cls(text, devices, int(gib * _GIB), is_here=False, cluster=cluster)


@functools.cache  # so that a target always has the same devices
def _topology(text: str, platform: str, topology_name: str, **options: str) -> tuple[jax.Device, ...]:
    from jax.experimental import topologies

    try:
        try:
            return tuple(topologies.get_topology_desc(topology_name, platform, **options).devices)
        except NotImplementedError:
            if platform != "cuda":
                raise
            # Where JAX has been used before, it found no driver and left its plugin out.
            name = next(filter(importlib.util.find_spec, _CUDA_PLUGINS))
            importlib.import_module(f"jax_plugins.xla_{name.removeprefix('jax_').removesuffix('_plugin')}").initialize()
            return tuple(topologies.get_topology_desc(topology_name, platform, **options).devices)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise UserError(f"JAX {jax.__version__} has no devices for target {text!r}: {error}") from error


def _share_of_gpus() -> float:
    """The share of a GPU's memory that JAX gives a process."""
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        if given := os.environ.get(name):
            with contextlib.suppress(ValueError):
                if 0 < (share := float(given)) <= 1:
                    return share
            raise UserError(f"{name}={given!r} is not a number above 0 and at most 1")
    return 0.75


def _check_installed(text: str, modules: tuple[str, ...], extra: str) -> None:
    if not any(importlib.util.find_spec(module) for module in modules):
        raise ModuleNotFoundError(
            f"the compiler for target {text!r} is not installed: pip install 'jvarlen[{extra}]'", name=modules[0]
        )


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables that are not set, and unsets them after the block."""
    new = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)
