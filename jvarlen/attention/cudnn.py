"""Attention by cuDNN on NVIDIA GPUs, for rows of one sample: it supports lengths, but no segments."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from jvarlen.attention.masks import Inputs, MaskArrays, StaticMask

__all__ = ["backward", "forward", "supports"]


def supports(static: StaticMask, inputs: Inputs) -> bool:
    """Whether cuDNN is found here and supports such rows."""
    return (
        static.is_rows
        and inputs.masks.window is None
        and inputs.query.dtype in (jnp.bfloat16, jnp.float16)
        and _can_be_traced(inputs.query.shape[3], inputs.query.dtype)
    )


@functools.cache
def _can_be_traced(head_size: int, dtype: DTypeLike) -> bool:
    """Whether JAX, which looks for the library and at the abilities of this GPU while it traces, finds both."""
    array = jax.ShapeDtypeStruct((1, 1, 1, head_size), dtype)
    try:
        jax.eval_shape(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), array, array, array)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def forward(static: StaticMask, inputs: Inputs) -> tuple[Array, Array]:
    """Outputs [B, Q, H, K] in the dtype of the queries and the logarithms of the sums float32[B, H, Q]."""
    *qkv, masks = inputs
    out, vjp = jax.vjp(functools.partial(_attend, static, masks), *qkv)
    # The public function returns the logarithms in 16 bits only.
    (lse,) = (leaf for leaf in jax.tree.leaves(vjp) if _is_lse(leaf, inputs.query))
    return _zero_padding(masks.query_ids, out), lse


def backward(static: StaticMask, inputs: Inputs, out: Array, lse: Array, grad: Array) -> tuple[Array, Array, Array]:
    """Gradients of queries, keys and values in their dtypes."""
    query, key, value, masks = inputs

    def replace(leaf: Array) -> Array:
        if _is_lse(leaf, query):
            return lse
        is_input = any(leaf is x for x in (query, key, value))
        return out.astype(leaf.dtype) if leaf.shape == out.shape and not is_input else leaf

    # The results of the forward pass replace those that this one computes, whose code is then dead.
    _, vjp = jax.vjp(functools.partial(_attend, static, masks), query, key, value)
    grad = _zero_padding(masks.query_ids, grad.astype(query.dtype))
    dq, dk, dv = (_zero_padding(masks.query_ids, x) for x in jax.tree.map(replace, vjp)(grad))
    return dq, dk, dv


def _attend(static: StaticMask, masks: MaskArrays, query: Array, key: Array, value: Array) -> Array:
    call = functools.partial(
        jax.nn.dot_product_attention, scale=static.scale, is_causal=static.causal, implementation="cudnn"
    )
    if static.window is not None:  # excludes lengths; padding comes last, so that no token sees it
        return call(query, key, value, local_window_size=(static.window - 1, 0))
    # At least 1, since a row that sees nothing must be finite.
    lengths = jnp.maximum(jnp.sum(masks.query_ids != 0, axis=1, dtype=jnp.int32), 1)
    return call(query, key, value, query_seq_lengths=lengths, key_value_seq_lengths=lengths)


def _is_lse(leaf: Array, query: Array) -> bool:
    num_rows, num_queries, num_heads, _ = query.shape
    return leaf.shape == (num_rows, num_heads, num_queries) and leaf.dtype == jnp.float32


def _zero_padding(ids: Array, array: Array) -> Array:
    return jnp.where(ids[:, :, None, None] != 0, array, 0)
