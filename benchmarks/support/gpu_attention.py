"""Part of the JAX process of the GPU benchmark: attention by each implementation and peer, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.gpu_sizes import SEED, Sizes
from support.gpu_worker import Answer, Save, said, say

import jvarlen
from jvarlen.attention import segment_mask

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 8, 2, 128

Attention = Callable[..., jax.Array]  # of queries, keys, values and lengths or segments


def by_attend(implementation: str, q: jax.Array, k: jax.Array, v: jax.Array, samples: jax.Array) -> jax.Array:
    name = "lengths" if samples.ndim == 1 else "segment_ids"
    return jvarlen.attend(q, k, v, **{name: samples}, implementation=implementation)  # type: ignore[arg-type]


def by_mask(q: jax.Array, k: jax.Array, v: jax.Array, samples: jax.Array) -> jax.Array:
    """By cuDNN with a mask of all pairs."""
    ids = segments_of(samples, q.shape[1])
    return jax.nn.dot_product_attention(q, k, v, mask=segment_mask(ids, ids)[:, None], implementation="cudnn")


def by_transformer_engine(q: jax.Array, k: jax.Array, v: jax.Array, samples: jax.Array) -> jax.Array:
    from transformer_engine.jax.attention import SequenceDescriptor
    from transformer_engine.jax.flax import DotProductAttention

    ids = segments_of(samples, q.shape[1])
    positions = jnp.arange(ids.shape[1])
    begins = jnp.where(jnp.diff(ids, axis=1, prepend=-1) != 0, positions, 0)
    descriptor = SequenceDescriptor.from_segment_ids_and_pos(ids, positions - jax.lax.cummax(begins, axis=1))
    layer = DotProductAttention(
        head_dim=HEAD_SIZE, num_attention_heads=NUM_HEADS, num_gqa_groups=NUM_KV_HEADS,
        attn_mask_type="padding_causal", qkv_layout="thd_thd_thd", transpose_batch_sequence=False,
        max_segments_per_seq=ids.shape[1] // 8, dtype=q.dtype,
    )  # fmt: skip
    return layer.apply({}, q, k, v, descriptor, deterministic=True)


def segments_of(samples: jax.Array, length: int) -> jax.Array:
    return samples if samples.ndim == 2 else (jnp.arange(length) < samples[:, None]).astype(jnp.int32)


WAYS: dict[str, Attention] = {
    **{name: functools.partial(by_attend, name) for name in ("triton", "cudnn", "xla")},
    "cuDNN with a mask": by_mask,
    "Transformer Engine": by_transformer_engine,
}


def make_cases(sizes: Sizes) -> dict[str, tuple[int, int, np.ndarray]]:
    """Rows, their length, and lengths or segments of samples."""
    rng = np.random.default_rng(SEED)
    found = {}
    for rows, length in sizes.packed_rows:
        ends = np.cumsum(
            np.clip(rng.lognormal(np.log(min(300, length / 4)), 1.0, (rows, length)), 8, length).astype(int), axis=1
        )
        ids = 1 + np.stack([np.searchsorted(of_row, np.arange(length), side="right") for of_row in ends])
        found[f"packed {rows}×{length:,}"] = (rows, length, ids.astype(np.int32))
    for rows, length in sizes.padded_rows:
        lengths = rng.integers(length // 2, length + 1, rows).astype(np.int32)
        found[f"padded {rows}×{length:,}"] = (rows, length, lengths)
    return found


def compare_attention(
    sizes: Sizes, answer: Answer, save: Save, fastest: Callable[..., float], ways: dict[str, Attention] = WAYS
) -> None:
    """Milliseconds, temporaries and the largest difference from float32, over the largest number of each array."""
    for name, (rows, length, samples) in make_cases(sizes).items():
        keys = jax.random.split(jax.random.key(SEED), 4)
        heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)
        arrays = [
            jax.random.normal(key, (rows, length, n, HEAD_SIZE), jnp.bfloat16)
            for key, n in zip(keys, heads, strict=True)
        ]
        is_token = np.asarray(segments_of(jnp.asarray(samples), length)) != 0
        arrays[3] = jnp.where(is_token[..., None, None], arrays[3], 0)
        with jax.default_matmul_precision("highest"):
            wide = [array.astype(jnp.float32) for array in arrays]
            expected = compiled(functools.partial(by_attend, "xla"), wide, samples)(*wide, samples)
        answer[name] = {}
        for way, attention in ways.items():
            try:
                program = compiled(attention, arrays, samples)
                found = program(*arrays, samples)
                of_way: dict[str, Any] = {
                    "difference": max(difference(a, b, is_token) for a, b in zip(found, expected, strict=True)),
                    "temporaries_bytes": program.memory_analysis().temp_size_in_bytes,
                    "seconds": fastest(
                        lambda program=program, arrays=arrays, samples=samples: program(*arrays, samples),
                        num_in_turn=10,
                        repeats=sizes.repeats,
                    ),
                }
            except Exception as error:  # what is not installed, not for such rows or not for this device says so
                of_way = {"error": said(error)}
            answer[name][way] = of_way
            say(f"{name}, {way}: {of_way}")
            save()


def compiled(attention: Attention, arrays: list[jax.Array], samples: np.ndarray) -> Any:
    """Outputs and the gradients of queries, keys and values."""

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, grad: jax.Array, samples: jax.Array) -> tuple[jax.Array, ...]:
        out, vjp = jax.vjp(lambda *qkv: attention(*qkv, samples), q, k, v)
        return (out, *vjp(grad))

    return run.lower(*arrays, samples).compile()


def difference(found: jax.Array, expected: jax.Array, is_token: np.ndarray) -> float:
    """At tokens."""
    a, b = (np.asarray(x.astype(jnp.float32))[is_token] for x in (found, expected))
    return float(np.abs(a - b).max() / np.abs(b).max())
