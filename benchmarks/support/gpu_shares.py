"""Section of the GPU benchmark: the device, its matrix rate, and the shares of its peak that `Cluster` assumes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from support.gpu_jax import fastest
from support.gpu_sizes import FULL, SEED, Sizes
from support.gpu_worker import Answer, Save, run_section, say

import jvarlen
from jvarlen.estimates.cluster import PRESETS, Cluster

LIMIT_S = 25.0  # what comes later is left out
NUM_KERNELS = 200
NUM_HEADS, HEAD_SIZE = 8, 128


def cluster_of(kind: str) -> Cluster | None:
    """The known machine with such devices."""
    return next((each for name, each in PRESETS.items() if name.removeprefix("dgx-").upper() in kind), None)


def measure_device(sizes: Sizes, answer: Answer, save: Save) -> None:
    """What it is, operations a second of products of square matrices in bfloat16, and its shares."""
    device = jax.devices()[0]
    answer |= {"device": device.device_kind, "platform": device.platform, "matrices": {}, "shares": {}}
    answer["bytes"] = (device.memory_stats() or {}).get("bytes_limit")
    if sizes is FULL and device.platform != "gpu":
        raise RuntimeError("no GPU")
    for size in sizes.matrix_sizes:
        answer["matrices"][str(size)] = product_rate(size, fastest, sizes.repeats)
        say(f"matrices of {size:,}: {answer['matrices'][str(size)] / 1e12:.4g} TFLOP/s")
        save()
    measure_shares(sizes, answer["shares"], fastest)


def product_rate(size: int, fastest: Callable[..., float], repeats: int) -> float:
    """Operations a second of the product of two square matrices."""
    a, b = (jax.random.normal(jax.random.key(seed), (size, size), jnp.bfloat16) for seed in (0, 1))
    product = jax.jit(jnp.matmul)
    return 2 * size**3 / fastest(lambda: product(a, b), num_in_turn=10, repeats=repeats)


def measure_shares(sizes: Sizes, answer: Answer, fastest: Callable[..., float]) -> None:
    """Rates of a large product, of attention, of x + y, and seconds of each of many small kernels in one program."""
    began, key = time.perf_counter(), jax.random.key(SEED)
    known = cluster_of(jax.devices()[0].device_kind)
    peaks = (known.flops_per_second, known.memory_bytes_per_second) if known else (None, None)

    def note(name: str, figure: float, peak: float | None, assumed: float | None) -> None:
        answer[name] = {"figure": figure, "peak": peak, "assumed": assumed}
        say(f"{name}: {answer[name]}")

    def is_late(name: str) -> bool:
        if late := time.perf_counter() - began > LIMIT_S:
            answer[name] = {"left_out": f"{LIMIT_S:.0f} s were over"}
        return late

    size = sizes.matrix_sizes[-1]
    rate = product_rate(size, fastest, sizes.repeats)
    note(f"products, {size:,}³", rate, peaks[0], known and known.efficiency)
    for length in (sizes.longest, 2 * sizes.longest):
        if is_late(name := f"attention, {length:,}"):
            continue
        rows = max(sizes.max_tokens // length // 4, 1)
        q = jax.random.normal(key, (rows, length, NUM_HEADS, HEAD_SIZE), jnp.bfloat16)
        grads = jax.jit(jax.grad(lambda q, k, v: jvarlen.attend(q, k, v).astype(jnp.float32).sum(), argnums=(0, 1, 2)))
        attention_s = fastest(lambda q=q, grads=grads: grads(q, q, q), num_in_turn=3, repeats=sizes.repeats)
        flops = 7 * 2 * q.size * length / 2  # 2 products forward and 5 backward, of half of the pairs
        note(name, flops / attention_s, peaks[0], known and known.attention_efficiency)
    if not is_late(name := "bytes of x + y"):
        x = jnp.ones(4 * sizes.max_tokens * sizes.model.width, jnp.float32)  # 1 GB, which no cache holds
        add_s = fastest(lambda y=x + 1: jax.jit(jnp.add)(x, y), num_in_turn=5, repeats=sizes.repeats)
        note(name, 3 * x.nbytes / add_s, peaks[1], known and known.memory_efficiency)
    if not is_late(name := "seconds of a kernel"):
        kernel_s = fastest(lambda: many_kernels(jnp.ones(128)), repeats=sizes.repeats) / NUM_KERNELS
        note(name, kernel_s, None, known and known.kernel_s)


@jax.jit
def many_kernels(x: jax.Array) -> jax.Array:
    """Kernels that are not fused."""
    for _ in range(NUM_KERNELS):
        x = jax.lax.optimization_barrier(jnp.sin(x))
    return x


SECTIONS = {"device": measure_device}

if __name__ == "__main__":
    sys.exit(run_section(SECTIONS))
