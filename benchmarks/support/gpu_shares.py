"""Part of the JAX process of the GPU benchmark: the shares of a device's peak in `Cluster`, measured on it."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from support.gpu_sizes import SEED, Sizes
from support.gpu_worker import Answer, say

import jvarlen
from jvarlen.estimates.cluster import PRESETS, Cluster

LIMIT_S = 60.0  # what comes later is left out
NUM_KERNELS = 200
NUM_HEADS, HEAD_SIZE = 8, 128


def cluster_of(kind: str) -> Cluster | None:
    """The known machine with such devices."""
    return next((each for name, each in PRESETS.items() if name.removeprefix("dgx-").upper() in kind), None)


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
    a = jax.random.normal(key, (size, size), jnp.bfloat16)
    product_s = fastest(lambda: jax.jit(jnp.matmul)(a, a), num_in_turn=5, repeats=sizes.repeats)
    note(f"products, {size:,}³", 2 * size**3 / product_s, peaks[0], known and known.efficiency)
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
        x = jnp.ones(4 * sizes.max_tokens * sizes.width, jnp.float32)  # 1 GB, which no cache holds
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
