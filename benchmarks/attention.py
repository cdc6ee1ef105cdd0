"""How long does attention take, forward and backward, against PyTorch's?

`attend` and `attend_within_segments` against `scaled_dot_product_attention`, causal, in float32 with two heads of 64;
memory is kept from call to call, as in `jvarlen train`. Forms take turns, and PyTorch comes after them. Run `python
benchmarks/attention.py [--quick]`. Prints a table and writes it, with versions and hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from support.timing import digits, report, table, versions_and_hardware

import jvarlen
from jvarlen.distributed.launch import keep_memory_of_steps

NUM_HEADS, HEAD_SIZE = 2, 64


def jax_ways(shape: tuple[int, ...]) -> dict[str, tuple[Callable[[], object], float]]:
    """Calls that wait for the gradient, by form, each with its compile seconds."""
    rows, length = shape[:2]
    qkv = [jax.random.normal(jax.random.key(i), shape) for i in range(3)]
    lengths = jnp.full(rows, length)
    segment_ids = jnp.broadcast_to(1 + 3 * jnp.arange(length) // length, (rows, length))
    forms = {
        "`attend`": functools.partial(jvarlen.attend, lengths=lengths),
        "`attend`, xla": functools.partial(jvarlen.attend, lengths=lengths, implementation="xla"),
        "`attend_within_segments`": functools.partial(
            jvarlen.attention.attend_within_segments, segment_ids=segment_ids
        ),
        "`attend_within_segments`, xla": functools.partial(
            jvarlen.attention.attend_within_segments, segment_ids=segment_ids, implementation="xla"
        ),
    }
    ways = {}
    for name, form in forms.items():

        def loss(*qkv: jax.Array, form: Callable[..., jax.Array] = form) -> jax.Array:
            return jnp.sum(form(*qkv) * qkv[2])

        begun = time.perf_counter()
        program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(*qkv).compile()
        compile_s = time.perf_counter() - begun

        def call(program: Callable[..., object] = program) -> object:
            return jax.block_until_ready(program(*qkv))

        ways[name] = call, compile_s
    return ways


def torch_way(shape: tuple[int, ...]) -> Callable[[], object] | None:
    """The same by PyTorch; None where it is not installed."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    generator = torch.Generator().manual_seed(0)
    rows, length, num_heads, head_size = shape
    qkv = [torch.randn(rows, num_heads, length, head_size, generator=generator).requires_grad_() for _ in range(3)]

    def call() -> object:
        attended = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        return torch.autograd.grad((attended * qkv[2]).sum(), qkv)

    return call


def measure(shape: tuple[int, ...], rounds: int) -> list[list[str]]:
    """Best seconds of every way, in turn."""
    found = jax_ways(shape)
    calls = {name: call for name, (call, _) in found.items()}
    of_torch = torch_way(shape)
    seconds: dict[str, list[float]] = {name: [] for name in [*calls, *["PyTorch"] * (of_torch is not None)]}

    def time_call(name: str, call: Callable[[], object]) -> None:
        begun = time.perf_counter()
        call()
        seconds[name].append(time.perf_counter() - begun)

    for _ in range(rounds):
        for name, call in calls.items():
            time_call(name, call)
    for _ in range(rounds if of_torch is not None else 0):  # apart: its threads wait busily for the next call
        time_call("PyTorch", of_torch)
    best = {name: min(values) for name, values in seconds.items()}
    theirs = best.get("PyTorch", np.nan)
    return [
        [
            f"{shape[0]} × {shape[1]:,}",
            name,
            f"{1e3 * value:.1f}",
            digits(value / theirs),
            f"{found[name][1]:.2f}" if name in found else "",
        ]
        for name, value in best.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small shape, and no report")
    quick = parser.parse_args().quick
    keep_memory_of_steps()
    sizes = [(2, 64)] if quick else [(16, 64), (4, 256), (8, 512), (4, 1024), (2, 2048), (1, 4096)]
    rows = [row for size in sizes for row in measure((*size, NUM_HEADS, HEAD_SIZE), 2 if quick else 12)]
    report(
        "attention",
        [
            f"# Attention, {datetime.date.today()}",
            "",
            f"Forward and backward on {jax.devices()[0].platform}, {NUM_HEADS} heads of {HEAD_SIZE}, float32, causal. "
            "Packed rows hold three samples. The best of all rounds.",
            "",
            *table("rows × length|way|ms|of PyTorch's|compile s", rows),
            "",
            versions_and_hardware("jax", "torch"),
        ],
        write=not quick,
    )


if __name__ == "__main__":
    main()
