"""Clusters: devices, their memory and speed, and the links between them. Read without JAX."""

from __future__ import annotations

import dataclasses
import os
from typing import Literal

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64, Int64

from jvarlen._common.checks import UserError, check_above, check_at_least, check_at_least_one, list_first
from jvarlen._common.files import load_dataclass, save_dataclass
from jvarlen._common.settings import Settings

__all__ = ["PRESETS", "Cluster", "Kind", "Link"]

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "send"]


@dataclasses.dataclass(frozen=True)
class Link(Settings):
    """The connection of each device to the network. It sends and receives at the same time.

    Attributes:
      bytes_per_second: bandwidth in each direction, above 0.
      latency_s: seconds before the first byte of a message arrives, at least 0.
    """

    bytes_per_second: int | float
    latency_s: int | float = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above(self, 0, "bytes_per_second")
        check_at_least(self, 0, "latency_s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster(Settings):
    """Hosts of equal devices. Devices are numbered host by host.

    Attributes:
      name: such as that of the machine.
      num_hosts: a host is what the fast links connect; a pod of TPUs counts as one.
      devices_per_host: of each host.
      memory_bytes: memory of one device.
      flops_per_second: peak FLOP/s of one device, in the dtype of the matrix multiplications.
      efficiency: the share of the peak that the matrix multiplications of a step reach, above 0 and at most 1.
      attention_efficiency: that of attention, whose backward pass counts 5 products to 2 of the forward pass.
      memory_bytes_per_second: bytes that a device reads or writes per second.
      memory_efficiency: the share of it that elementwise kernels reach.
      kernel_s: seconds of every kernel beside its work.
      link: from each device to others of its host.
      host_link: from each device to those of other hosts.
      overlap: the share of the communication of gradients and parameters that passes hide at ZeRO-3, where layers are
        gathered early, 0 to 1.
      sources: where the figures are from.

    Raises:
      ValueError: a figure that is not finite or out of range.

    Example:
      >>> cluster = Cluster.named("dgx-h100:4")
      >>> cluster.num_devices, cluster.link.bytes_per_second
      (32, 450000000000.0)
    """

    name: str
    num_hosts: int = 1
    devices_per_host: int
    memory_bytes: int
    flops_per_second: float
    efficiency: float = 0.6
    attention_efficiency: float = 0.45
    memory_bytes_per_second: float
    memory_efficiency: float = 0.9
    kernel_s: float = 6e-6
    link: Link
    host_link: Link
    overlap: float = 0.0
    sources: str = ""

    def __post_init__(self):
        super().__post_init__()
        check_at_least_one(num_hosts=self.num_hosts, devices_per_host=self.devices_per_host)
        check_at_least_one(memory_bytes=self.memory_bytes)
        shares = "efficiency", "attention_efficiency", "memory_efficiency", "overlap"
        check_above(self, 0, "flops_per_second", "memory_bytes_per_second", *shares[:3])
        check_at_least(self, 0, "kernel_s", "overlap")
        if above := [f"{name} {value}" for name in shares if (value := getattr(self, name)) > 1]:
            raise UserError(f"these shares of a cluster must be at most 1: {list_first(above)}")

    @property
    def products_per_second(self) -> float:
        """FLOP/s of matrix products."""
        return self.flops_per_second * self.efficiency

    @property
    def attention_per_second(self) -> float:
        """FLOP/s of attention."""
        return self.flops_per_second * self.attention_efficiency

    @property
    def elementwise_bytes_per_second(self) -> float:
        """Bytes that elementwise kernels read or write per second."""
        return self.memory_bytes_per_second * self.memory_efficiency

    @property
    def num_devices(self) -> int:
        """Devices of all hosts."""
        return self.num_hosts * self.devices_per_host

    def members_in_host(self, size: npt.ArrayLike, stride: npt.ArrayLike) -> Int64[np.ndarray, ...]:
        """Devices of one host in a group at equal distances; 1 where hosts hold different numbers of them.

        Args:
          size: devices of the group.
          stride: between the numbers of neighbours. `size` and `stride` broadcast.

        Returns:
          int64, at least 1.
        """
        size, stride = np.broadcast_arrays(np.asarray(size, np.int64), np.asarray(stride, np.int64))
        if self.num_hosts == 1:
            return size
        is_inside, fills = self.devices_per_host % (size * stride) == 0, size * stride % self.devices_per_host == 0
        in_each = np.maximum(self.devices_per_host // stride, 1)
        return np.where(is_inside, size, np.where(fills, np.minimum(size, in_each), 1))

    def collective_seconds(
        self, kind: Kind, num_bytes: npt.ArrayLike, size: npt.ArrayLike, in_host: npt.ArrayLike
    ) -> Float64[np.ndarray, ...]:
        """Seconds of a collective that sends the fewest bytes in the fewest rounds, by recursive halving and doubling.

        Inside a host it uses its links. Through several hosts, data leave each by the links of all its members.

        Args:
          kind: `"all_reduce"`, `"all_gather"`, `"reduce_scatter"`, or `"send"` to one other device.
          num_bytes: of the whole array: the result of an all-gather, the argument of a reduce-scatter.
          size: devices of the group; one device takes no time. All these arguments broadcast.
          in_host: how many of them are in one host, by `members_in_host`.

        Returns:
          float64, seconds.

        References:
          Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH".
        """
        size, in_host = np.asarray(size), np.asarray(in_host)
        across = np.minimum(self.link.bytes_per_second, in_host * self.host_link.bytes_per_second)
        bytes_per_second = np.where(in_host == size, self.link.bytes_per_second, across)
        latency_s = np.where(in_host == size, self.link.latency_s, self.host_link.latency_s)
        times = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "send": 1}[kind]
        if kind == "send":
            rounds, sent = np.ones_like(size), np.asarray(num_bytes)
        else:
            rounds, sent = np.ceil(np.log2(size)), np.asarray(num_bytes) * (size - 1) / size
        return np.where(size > 1, times * (rounds * latency_s + sent / bytes_per_second), 0.0)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the cluster as JSON, atomically.

        Args:
          path: the file; its directory must exist, and an existing file is replaced.

        Raises:
          OSError: it cannot be written; an existing file stays.
        """
        save_dataclass(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cluster:
        """Reads a cluster from a JSON file with the attributes of a cluster.

        Args:
          path: the file.

        Returns:
          The cluster.

        Raises:
          ValueError: it holds no cluster; the message says what is wrong.
        """
        return load_dataclass(cls, path, "cluster")

    @classmethod
    def named(cls, text: str) -> Cluster:
        """A cluster by its file, or a preset.

        Args:
          text: a path, or a name such as `dgx-h100`, or `dgx-h100:4` for four hosts.

        Returns:
          The cluster.

        Raises:
          FileNotFoundError: neither a preset nor a file has this name.
          ValueError: as `load`, or no hosts.
        """
        name, _, num_hosts = text.partition(":")
        if name in PRESETS and (num_hosts.isdecimal() or not num_hosts):
            return dataclasses.replace(PRESETS[name], num_hosts=int(num_hosts or 1))
        try:
            return cls.load(text)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error}, and no preset; there are {', '.join(PRESETS)}") from None


# Elementwise kernels reach 0.9 of the bandwidth, as in steps of an H200. At ZeRO-3, TorchTitan and MaxText hide 0.8 of
# the traffic and more, by what their published steps leave for it.
_A100 = Cluster(
    name="dgx-a100",
    devices_per_host=8,
    memory_bytes=80 * 10**9,
    flops_per_second=312e12,
    efficiency=0.7,
    attention_efficiency=0.6,
    memory_bytes_per_second=2.039e12,
    link=Link(300e9, 3e-6),
    host_link=Link(25e9, 8e-6),
    overlap=0.8,
    sources="NVIDIA A100 (80 GB SXM, bfloat16 without sparsity) and DGX A100 datasheets (8 × 200 Gbit/s). Products by "
    "the steps of Narayanan et al. 2021 and Korthikanti et al. 2022; attention by Dao 2023. Latencies are assumptions.",
)
_H100 = dataclasses.replace(
    _A100,
    name="dgx-h100",
    flops_per_second=989.4e12,
    efficiency=0.6,
    attention_efficiency=0.53,
    memory_bytes_per_second=3.35e12,
    link=Link(450e9, 3e-6),
    host_link=Link(50e9, 8e-6),
    sources="NVIDIA H100 or H200 (SXM, bfloat16 without sparsity) and DGX datasheets (8 × 400 Gbit/s). Shares by steps "
    "of an H200, attention by cuDNN: benchmarks/results/2026-11-27-gpu.md. Latencies are assumptions.",
)
_H200 = dataclasses.replace(_H100, name="dgx-h200", memory_bytes=141 * 10**9, memory_bytes_per_second=4.8e12)
_V5E = Cluster(
    name="tpu-v5e-256",
    devices_per_host=256,
    memory_bytes=16 * 2**30,
    flops_per_second=197e12,
    efficiency=0.9,
    attention_efficiency=0.5,
    memory_bytes_per_second=819e9,
    kernel_s=1.2e-6,
    link=Link(100e9, 2e-6),
    host_link=Link(3.1e9, 20e-6),
    overlap=0.8,
    sources="Google Cloud documentation of the TPU (chips a pod, bfloat16, links of a chip, of which a ring uses two). "
    "Products by MaxText's steps on v5e; a kernel by libtpu's model. Attention, latencies and links between pods are "
    "assumptions.",
)
_V5P = dataclasses.replace(
    _V5E,
    name="tpu-v5p",
    devices_per_host=8960,
    memory_bytes=95 * 10**9,
    flops_per_second=459e12,
    memory_bytes_per_second=2.765e12,
    link=Link(200e9, 2e-6),
)
_V6E = dataclasses.replace(
    _V5E,
    name="tpu-v6e-256",
    memory_bytes=32 * 2**30,
    flops_per_second=918e12,
    memory_bytes_per_second=1.638e12,
    link=Link(200e9, 2e-6),
)
PRESETS = {each.name: each for each in (_A100, _H100, _H200, _V5E, _V5P, _V6E)}
