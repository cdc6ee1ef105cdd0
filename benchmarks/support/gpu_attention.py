"""Section of the GPU benchmark: attention of packed rows by the length of their samples, by each kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.gpu_jax import fastest
from support.gpu_sizes import SEED, Sizes
from support.gpu_worker import Answer, Save, run_section, said, say

import jvarlen

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 8, 2, 128

Attention = Callable[..., jax.Array]  # of queries, keys, values, segments and the most samples of a row


def by_attend(
    implementation: str, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, most: int | None
) -> jax.Array:
    return jvarlen.attend(q, k, v, segment_ids=ids, samples_per_row=most, implementation=implementation)  # type: ignore[arg-type]


def ways() -> dict[str, Attention]:
    """The kernels of the device; only cuDNN's programs depend on the samples of a row."""
    if jax.default_backend() != "gpu":
        return {"blocks": lambda q, k, v, ids, most: by_attend("blocks", q, k, v, ids, None)}
    return {
        "triton": lambda q, k, v, ids, most: by_attend("triton", q, k, v, ids, None),
        "cudnn": lambda q, k, v, ids, most: by_attend("cudnn", q, k, v, ids, most),
    }


def compare_attention(
    sizes: Sizes,
    answer: Answer,
    save: Save,
    fastest: Callable[..., float] = fastest,
    attentions: dict[str, Attention] | None = None,
) -> None:
    """Seconds forward, and with the gradient; and the largest difference of the first row from dense float32."""
    rows, length = sizes.kernel_rows
    keys = jax.random.split(jax.random.key(SEED), 4)
    heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)
    arrays = [
        jax.random.normal(key, (rows, length, n, HEAD_SIZE), jnp.bfloat16) for key, n in zip(keys, heads, strict=True)
    ]
    wide = [array[:1].astype(jnp.float32) for array in arrays]
    programs: dict[tuple[str, int], Any] = {}
    for of_sample in sizes.sample_lengths:
        most, ids = length // of_sample, jnp.asarray(np.tile(np.arange(length) // of_sample + 1, (rows, 1)), jnp.int32)
        with jax.default_matmul_precision("highest"):
            if not programs:
                programs["dense", 0] = both_ways(by_dense, wide, ids[:1], 0)[1]
            expected = programs["dense", 0](*wide, ids[:1])
        for way, attention in (attentions or ways()).items():
            key = (way, most if way == "cudnn" else 0)
            try:
                programs[key] = programs.get(key) or both_ways(attention, arrays, ids, most)
                forward, both = programs[key]
                found = both(*arrays, ids)
                calls = {"forward_s": lambda f=forward, ids=ids: f(*arrays[:3], ids)}
                calls["both_s"] = lambda b=both, ids=ids: b(*arrays, ids)
                pairs = rows * most * of_sample * (of_sample + 1) / 2
                of_way: dict[str, Any] = {
                    "difference": max(difference(a[:1], b) for a, b in zip(found, expected, strict=True)),
                    "temporaries_bytes": both.memory_analysis().temp_size_in_bytes,
                    "forward_flops": 4 * HEAD_SIZE * NUM_HEADS * pairs,
                    **{name: fastest(call, num_in_turn=5, repeats=sizes.repeats) for name, call in calls.items()},
                }
            except Exception as error:  # what is not for such rows or not for this device says so
                of_way = {"error": said(error)}
            answer.setdefault(str(of_sample), {})[way] = of_way
            say(f"samples of {of_sample}, {way}: {of_way}")
            save()


def by_dense(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, most: int) -> jax.Array:
    """All pairs, of those of a sample."""
    is_seen = jnp.tril(ids[:, :, None] == ids[:, None, :])[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=is_seen, implementation="xla")


def both_ways(attention: Attention, arrays: list[jax.Array], ids: jax.Array, most: int) -> tuple[Any, Any]:
    """Programs of the outputs, and of them and the gradients of queries, keys and values."""

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        return attention(q, k, v, ids, most)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, grad: jax.Array, ids: jax.Array) -> tuple[jax.Array, ...]:
        out, vjp = jax.vjp(lambda *qkv: attention(*qkv, ids, most), q, k, v)
        return (out, *vjp(grad))

    return jax.jit(forward).lower(*arrays[:3], ids).compile(), jax.jit(both).lower(*arrays, ids).compile()


def difference(found: jax.Array, expected: jax.Array) -> float:
    """The largest, over the largest number."""
    a, b = (np.asarray(x.astype(jnp.float32)) for x in (found, expected))
    return float(np.abs(a - b).max() / np.abs(b).max())


SECTIONS = {"kernels": compare_attention}

if __name__ == "__main__":
    sys.exit(run_section(SECTIONS))
