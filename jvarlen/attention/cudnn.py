"""Attention by cuDNN on NVIDIA GPUs, for rows of one sample: it takes lengths, but no segments."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jvarlen.attention.seen import How, Seen

__all__ = ["backward", "forward", "supports"]


def supports(how: How, query: Array, key: Array, seen: Seen) -> bool:
    """Whether cuDNN is found here and takes such rows."""
    del key
    return (
        how.is_rows
        and seen.window is None
        and query.dtype in (jnp.bfloat16, jnp.float16)
        and _can_be_traced(query.shape[3], query.dtype)
    )


@functools.cache
def _can_be_traced(head_size: int, dtype: Any) -> bool:
    """JAX looks for the library, and at what the GPU here is able to do, while it traces."""
    array = jax.ShapeDtypeStruct((1, 1, 1, head_size), dtype)
    try:
        jax.eval_shape(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), array, array, array)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def forward(how: How, query: Array, key: Array, value: Array, seen: Seen) -> tuple[Array, Array]:
    """Outputs [B, Q, H, K] in the dtype of the queries and the logarithms of the sums float32[B, H, Q]."""
    out, vjp = jax.vjp(functools.partial(_attend, how, seen), query, key, value)
    # The public function has them in 16 bits alone.
    (lse,) = (leaf for leaf in jax.tree.leaves(vjp) if _is_lse(leaf, query))
    return _of_tokens(seen.query_ids, out), lse


def backward(
    how: How, query: Array, key: Array, value: Array, seen: Seen, out: Array, lse: Array, grad: Array
) -> tuple[Array, Array, Array]:
    """Gradients of queries, keys and values in their dtypes."""

    def known(leaf: Array) -> Array:
        if _is_lse(leaf, query):
            return lse
        is_input = any(leaf is x for x in (query, key, value))
        return out.astype(leaf.dtype) if leaf.shape == out.shape and not is_input else leaf

    # With what the forward pass found, what this one begins with is dead code.
    _, vjp = jax.vjp(functools.partial(_attend, how, seen), query, key, value)
    grad = _of_tokens(seen.query_ids, grad.astype(query.dtype))
    dq, dk, dv = (_of_tokens(seen.query_ids, x) for x in jax.tree.map(known, vjp)(grad))
    return dq, dk, dv


def _attend(how: How, seen: Seen, query: Array, key: Array, value: Array) -> Array:
    options: dict[str, Any] = {}
    if how.window is None:
        # What sees nothing must be finite.
        lengths = jnp.maximum(jnp.sum(seen.query_ids != 0, axis=1, dtype=jnp.int32), 1)
        options = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    else:  # not with lengths; no token sees padding, which comes last
        options = {"local_window_size": (how.window - 1, 0)}
    return jax.nn.dot_product_attention(
        query, key, value, scale=how.scale, is_causal=how.causal, implementation="cudnn", **options
    )


def _is_lse(leaf: Array, query: Array) -> bool:
    num_rows, num_queries, num_heads, _ = query.shape
    return leaf.shape == (num_rows, num_heads, num_queries) and leaf.dtype == jnp.float32


def _of_tokens(ids: Array, array: Array) -> Array:
    return jnp.where(ids[:, :, None, None] != 0, array, 0)
