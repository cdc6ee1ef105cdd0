"""A cluster from measurements of the devices at hand: products, memory, and links."""

from __future__ import annotations

import datetime
import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jvarlen._common.checks import UserError, check_at_least_one, check_choices, list_first
from jvarlen._common.progress import progress_bar
from jvarlen.distributed.mesh import LayoutLike, shards_on
from jvarlen.distributed.processes import gather_arrays, gather_texts
from jvarlen.targets.cluster import Cluster, Link

ProductType = Literal["float32", "bfloat16"]

_LEAST_S = 0.03  # of a timed call, beside which starting a program is short


class _Sizes(NamedTuple):
    """What is measured: n of n × n products, bytes of a copy, and bytes of collectives; of a device."""

    product: int
    copy_bytes: int
    collective_bytes: tuple[int, ...]


_ON_CPU = _Sizes(512, 2**24, (2**12, 2**16, 2**20, 2**22))
_ELSEWHERE = _Sizes(8192, 2**29, (2**14, 2**18, 2**22, 2**26))


class _Measured(NamedTuple):
    """A collective of `Cluster.collective_seconds`: its rounds, the bytes that a device sends, and seconds."""

    rounds: int
    sent_bytes: float
    seconds: float


def measure_cluster(
    layout: LayoutLike = "data", *, dtype: ProductType = "float32", repeats: int = 5, progress: bool = True
) -> Cluster:
    """Measures products, memory and links, with all devices at work at once.

    Links are measured by all-reduces (`psum`) and sends to the next device (`ppermute`) of some sizes, inside hosts and
    between them. `Cluster.collective_seconds` is fitted to their seconds by least squares of relative errors, of which
    `sources` has the largest. It is large on parts of one CPU, whose links are its memory and caches. With several
    processes, every process calls this; those with one host name are on one host, and the slowest counts.

    Args:
      layout: the devices, at least 2, as many on each host.
      dtype: of the products, `"float32"` or `"bfloat16"`.
      repeats: timed runs of each program.
      progress: whether to show a progress bar.

    Returns:
      The cluster. `flops_per_second` is the measured rate, and `efficiency` 1: products of a step that are smaller
      reach less. `memory_bytes` is what JAX may use of a device, or the machine's memory over the devices of a host.
      `overlap` is not measured. With one host, `host_link` is as `link`, and with one device a host the reverse.

    Raises:
      ValueError: fewer than 2 devices, different numbers on hosts, an unknown dtype, or fewer than one repeat.

    Example:
      >>> measure_cluster().save("cluster.json")  # doctest: +SKIP
    """
    check_choices(dtype=(dtype, ProductType))
    check_at_least_one(repeats=repeats)
    hosts = _mesh_of_hosts(shards_on(layout).mesh)
    num_devices, device = hosts.size, hosts.devices.flat[0]
    sizes = _ON_CPU if device.platform == "cpu" else _ELSEWHERE
    axes = [name for name in ("device", "host") if hosts.shape[name] > 1]
    num_programs = 2 + 2 * len(axes) * len(sizes.collective_bytes)
    with progress_bar(total=num_programs, desc="measuring", unit="program", disable=not progress) as bar:

        def seconds_of(work: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], dtype: str) -> float:
            seconds = _median_seconds(_program(work, hosts, shape, dtype), repeats)
            bar.update()
            return seconds

        n, num_copied = sizes.product, sizes.copy_bytes // 4
        product_s = seconds_of(lambda x: (x @ x) / n, (n, n), dtype)  # of ones, which stay ones
        copy_s = seconds_of(lambda x: 0.5 * x + 0.5, (num_copied,), "float32")
        fitted = {axis: _fit_link(_collectives(seconds_of, axis, hosts.shape[axis], sizes)) for axis in axes}
    (first, _), error = fitted[axes[0]], max(error for _, error in fitted.values())
    return Cluster(
        name=f"{num_devices} {device.device_kind}",
        num_hosts=hosts.shape["host"],
        devices_per_host=hosts.shape["device"],
        memory_bytes=_memory_bytes(hosts),
        flops_per_second=2 * n**3 / product_s,
        efficiency=1.0,
        memory_bytes_per_second=2 * sizes.copy_bytes / copy_s,
        link=first,
        host_link=fitted["host"][0] if "host" in fitted else first,
        sources=f"Measured on {datetime.date.today()} with JAX {jax.__version__}, all devices at once: {n} × {n} "
        f"products in {dtype}; collectives of {sizes.collective_bytes[0]:,} to {sizes.collective_bytes[-1]:,} bytes, "
        f"from which the fitted links are off by {100 * error:.0f} % at most.",
    )


def _mesh_of_hosts(mesh: Mesh) -> Mesh:
    """The devices of a mesh along "host" and "device"."""
    devices = mesh.devices.flatten().tolist()
    if len(devices) < 2:
        raise UserError("one device has no links to measure: take at least 2 devices")
    names = gather_texts("host name", socket.gethostname())
    by_host = _by_host(devices, [names[device.process_index] for device in devices])
    return Mesh(by_host, ("host", "device"), axis_types=(AxisType.Auto,) * 2)


def _by_host(devices: Sequence[jax.Device], hosts: Sequence[str]) -> np.ndarray:
    """Devices by host and place, [H, D]."""
    groups: dict[str, list[jax.Device]] = {}
    for device, host in zip(devices, hosts, strict=True):
        groups.setdefault(host, []).append(device)
    if len({len(group) for group in groups.values()}) > 1:
        counts = [f"{host} {len(group)}" for host, group in groups.items()]
        raise UserError(f"hosts of a cluster have the same number of devices, but these have: {list_first(counts)}")
    return np.array(list(groups.values()))


def _collectives(seconds_of: Callable[..., float], axis: str, size: int, sizes: _Sizes) -> list[_Measured]:
    """All-reduces and sends along an axis."""
    to_next = [(i, (i + 1) % size) for i in range(size)]
    measured = []
    for num_bytes in sizes.collective_bytes:
        shape = (num_bytes // 4,)
        seconds = seconds_of(lambda x: lax.psum(x, axis) / size, shape, "float32")
        measured.append(_Measured(2 * math.ceil(math.log2(size)), 2 * num_bytes * (size - 1) / size, seconds))
        seconds = seconds_of(lambda x: lax.ppermute(x, axis, to_next), shape, "float32")
        measured.append(_Measured(1, num_bytes, seconds))
    return measured


def _program(
    work: Callable[[jax.Array], jax.Array], mesh: Mesh, shape: tuple[int, ...], dtype: str
) -> Callable[[int], None]:
    """A call that does some work this many times on every device, on ones of this shape, and waits for it."""
    spec = PartitionSpec(mesh.axis_names)
    x = jax.jit(lambda: jnp.ones((mesh.size * shape[0], *shape[1:]), dtype), out_shardings=NamedSharding(mesh, spec))()
    looped = jax.shard_map(
        lambda x, count: lax.fori_loop(0, count, lambda _, x: work(x), x),
        mesh=mesh,
        in_specs=(spec, PartitionSpec()),
        out_specs=spec,
        check_vma=False,
    )
    program = jax.jit(looped).lower(x, np.int32(1)).compile()
    return lambda count: jax.block_until_ready(program(x, np.int32(count)))


def _median_seconds(call: Callable[[int], None], repeats: int) -> float:
    """Of the work once. Counts are the same on all processes, as their times are."""
    count = 1
    _timed(call, count)
    while (taken := _timed(call, count)) < _LEAST_S:
        count *= min(max(2, math.ceil(1.2 * _LEAST_S / taken)), 100)
    return statistics.median(_timed(call, count) for _ in range(repeats)) / count


def _timed(call: Callable[[int], None], count: int) -> float:
    """Seconds on the slowest process."""
    begun = time.perf_counter()
    call(count)
    return float(gather_arrays(np.array([time.perf_counter() - begun])).max())


def _fit_link(measured: Sequence[_Measured]) -> tuple[Link, float]:
    """The link with the least squares of relative errors, and the largest of them."""
    import scipy.optimize  # here: importing it takes long

    rounds, sent_bytes, seconds = np.array(measured, np.float64).T
    terms = np.stack([rounds, sent_bytes], axis=1)
    scale = terms.max(axis=0)
    latency, per_byte = scipy.optimize.nnls(terms / scale / seconds[:, None], np.ones(len(seconds)))[0] / scale
    if not per_byte:  # of times that do not grow with bytes, the least bandwidth
        per_byte = (seconds / sent_bytes).min()
    errors = np.abs(terms @ [latency, per_byte] / seconds - 1)
    return Link(float(1 / per_byte), float(latency)), float(errors.max())


def _memory_bytes(mesh: Mesh) -> int:
    """The least of any device."""
    own = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in own]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // mesh.shape["device"]
    least = min((limit for limit in limits if limit), default=machine)
    return int(gather_arrays(np.array([least])).min())
