"""A cluster from measurements of the devices of this host: products, memory, and links."""

from __future__ import annotations

import datetime
import math
import os
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jvarlen.estimates.cluster import Cluster, Link

LEAST_S = 0.03  # of a timed call, compared with which starting a program is short
PRODUCT, COPY_BYTES, COLLECTIVE_BYTES = 512, 2**24, (2**12, 2**16, 2**20, 2**22)


def measure_cluster(repeats: int) -> Cluster:
    """Products in float32, memory and links, with all devices at work at once; medians of `repeats` runs.

    Links are fitted to the seconds of all-reduces (`psum`) and sends to the next device (`ppermute`) of some sizes, by
    least squares of relative errors.
    """
    num_devices = jax.device_count()
    mesh = jax.make_mesh((num_devices,), ("device",), (AxisType.Auto,))

    def seconds_of(work: Callable[[jax.Array], jax.Array], *shape: int) -> float:
        return median_seconds(program(work, mesh, shape), repeats)

    product_s = seconds_of(lambda x: (x @ x) / PRODUCT, PRODUCT, PRODUCT)  # of ones, which stay ones
    copy_s = seconds_of(lambda x: 0.5 * x + 0.5, COPY_BYTES // 4)
    to_next = [(i, (i + 1) % num_devices) for i in range(num_devices)]
    measured = []  # rounds, bytes that a device sends, and seconds
    for num_bytes in COLLECTIVE_BYTES:
        reduced_s = seconds_of(lambda x: lax.psum(x, "device") / num_devices, num_bytes // 4)
        sent = 2 * num_bytes * (num_devices - 1) / num_devices
        measured.append((2 * math.ceil(math.log2(num_devices)), sent, reduced_s))
        measured.append((1, num_bytes, seconds_of(lambda x: lax.ppermute(x, "device", to_next), num_bytes // 4)))
    link, error = fit_link(np.array(measured, np.float64))
    return Cluster(
        name=f"{num_devices} {jax.devices()[0].device_kind}",
        devices_per_host=num_devices,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_devices,
        flops_per_second=2 * PRODUCT**3 / product_s,
        efficiency=1.0,
        attention_efficiency=1.0,
        memory_efficiency=1.0,
        kernel_s=0.0,
        memory_bytes_per_second=2 * COPY_BYTES / copy_s,
        link=link,
        host_link=link,
        sources=f"Measured on {datetime.date.today()}; fitted links are off by {100 * error:.0f} % at most.",
    )


def program(
    work: Callable[[jax.Array], jax.Array], mesh: jax.sharding.Mesh, shape: tuple[int, ...]
) -> Callable[[int], None]:
    """A call that does some work this many times on every device, on ones of this shape, and waits for it."""
    spec = PartitionSpec("device")
    x = jax.device_put(jnp.ones((mesh.size * shape[0], *shape[1:]), "float32"), NamedSharding(mesh, spec))
    looped = jax.shard_map(
        lambda x, count: lax.fori_loop(0, count, lambda _, x: work(x), x),
        mesh=mesh,
        in_specs=(spec, PartitionSpec()),
        out_specs=spec,
        check_vma=False,
    )
    compiled = jax.jit(looped).lower(x, np.int32(1)).compile()
    return lambda count: jax.block_until_ready(compiled(x, np.int32(count)))


def median_seconds(call: Callable[[int], None], repeats: int) -> float:
    """The median seconds of the work once."""
    count = 1
    timed(call, count)
    while (taken := timed(call, count)) < LEAST_S:
        count *= min(max(2, math.ceil(1.2 * LEAST_S / taken)), 100)
    return statistics.median(timed(call, count) for _ in range(repeats)) / count


def timed(call: Callable[[int], None], count: int) -> float:
    begun = time.perf_counter()
    call(count)
    return time.perf_counter() - begun


def fit_link(measured: np.ndarray) -> tuple[Link, float]:
    """The link with the least squares of relative errors, and the largest of them."""
    rounds, sent_bytes, seconds = measured.T
    terms = np.stack([rounds, sent_bytes], axis=1)
    scale = terms.max(axis=0)
    latency, per_byte = scipy.optimize.nnls(terms / scale / seconds[:, None], np.ones(len(seconds)))[0] / scale
    if not per_byte:  # of times that do not grow with bytes, the least bandwidth
        per_byte = (seconds / sent_bytes).min()
    errors = np.abs(terms @ [latency, per_byte] / seconds - 1)
    return Link(float(1 / per_byte), float(latency)), float(errors.max())
