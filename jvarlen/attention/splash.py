"""Attention on TPUs by JAX's splash kernel, which visits the blocks that a table names; the table comes from the data.

All rows are one sequence to the kernel, so that one call serves them.
Letters: as in `masks`; S positions of all rows together, H query heads, N key/value heads, K head size.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as mask_info
from jaxtyping import Array, Float

from jvarlen.attention.masks import UNSEEN, Inputs, MaskArrays, StaticMask, block_ranges, query_places
from jvarlen.attention.platforms import Devices

__all__ = ["backward", "forward", "supports"]

_LANES = 128  # blocks are multiples of it
_LARGEST_BLOCK = 512
_LARGEST_HEAD = 256
_LARGEST_TABLE = 96 * 1024  # numbers in scalar memory, two a block; it has room for 2**18 in all
_BITS = 32  # of the integer that the kernel has of each query

_Options: TypeAlias = dict[str, Any]  # of JAX's kernel


def supports(static: StaticMask, inputs: Inputs, devices: Devices) -> bool:
    """Whether the kernel supports these: floats of TPUs, heads, and tables and windows that fit."""
    del devices
    query, key, _, masks = inputs
    num_queries, num_keys = query.shape[1], key.shape[1]
    query_table = len(query) * _num_blocks(num_queries), _width(static, masks, num_queries, num_keys)
    key_table = _width(static, masks, num_keys, num_queries), len(key) * _num_blocks(num_keys)
    table = max(height * _LANES * math.ceil(width / _LANES) for height, width in (query_table, key_table))
    return (
        query.dtype == key.dtype
        and query.dtype in (jnp.bfloat16, jnp.float32)
        and query.shape[3] <= _LARGEST_HEAD
        and table <= _LARGEST_TABLE
        and (masks.window is None or _num_bits(len(key), num_keys) <= _BITS)
    )


def _num_bits(num_rows: int, num_keys: int) -> int:
    """Bits for a place among the keys of all rows and for how many keys of a row are seen."""
    length = _padded_length(num_keys)
    return (num_rows * length).bit_length() + length.bit_length()


@jax.enable_x64(False)  # with it, JAX's kernel multiplies int32 by int64
def forward(
    static: StaticMask, inputs: Inputs, *, interpret: bool = False
) -> tuple[Float[Array, "B Q H K"], Float[Array, "B H Q"]]:
    """Outputs, and logarithms of the sums of the softmax, in float32; 0 and `UNSEEN` where no key is seen."""
    query, key, value, masks = inputs
    table, options = _table(static, masks, "queries"), _options(static, masks, interpret=interpret)
    kernel = kernels.SplashAttentionKernel(table, None, None, save_residuals=True, **options)
    query_key_value = (_one_sequence(x) for x in (_scale(static, query), key, value))
    output_HxSxK, (log_sums_HxS,) = kernel(*query_key_value, segment_ids=_ids(masks))
    log_sums_BxQxH = _rows(log_sums_HxS, query)
    # The kernel treats padding as one more sample, and gives means, or divides 0 by 0, where no key is seen.
    sees_BxQxH = (masks.query_ids != 0)[..., None] & (log_sums_BxQxH > UNSEEN / 2)
    output = jnp.where(sees_BxQxH[..., None], _rows(output_HxSxK, query).astype(jnp.float32), 0)
    return output, jnp.moveaxis(jnp.where(sees_BxQxH, log_sums_BxQxH, UNSEEN), 2, 1)


@jax.enable_x64(False)
def backward(
    static: StaticMask, inputs: Inputs, output: Array, log_sums: Array, grad: Array, *, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """Gradients of queries, in float32, and of keys and values."""
    query, key, value, masks = inputs
    log_sums_BxQxH = jnp.moveaxis(log_sums, 1, 2)
    sees_BxQxH = (masks.query_ids != 0)[..., None] & (log_sums_BxQxH > UNSEEN / 2)
    log_sums_BxQxH = jnp.where(sees_BxQxH, log_sums_BxQxH, -UNSEEN)  # so that all weights are 0
    grad = jnp.where(sees_BxQxH[..., None], grad, 0).astype(query.dtype)
    query_HxSxK, key_NxSxK, value_NxSxK, output_HxSxK, log_sums_HxSx1, grad_HxSxK = (
        _one_sequence(x) for x in (_scale(static, query), key, value, output, log_sums_BxQxH[..., None], grad)
    )
    kept = (
        query_HxSxK, key_NxSxK, value_NxSxK, _ids(masks), None, output_HxSxK, log_sums_HxSx1[..., 0],
        _table(static, masks, "queries"), _table(static, masks, "keys"),
    )  # fmt: skip
    # JAX has no public function for the gradient of a forward pass that another program made.
    options = _options(static, masks, interpret=interpret)
    grads = kernels._splash_attention_bwd(save_residuals=False, res=kept, do=grad_HxSxK, **options)[3:6]
    query_grad, key_grad, value_grad = (_rows(x, like) for x, like in zip(grads, (query, key, value), strict=True))
    return query_grad.astype(jnp.float32) * static.scale, key_grad, value_grad


def _options(static: StaticMask, masks: MaskArrays, *, interpret: bool) -> _Options:
    """Options of the kernel in both directions."""
    q, k = _block(masks.query_ids.shape[1]), _block(masks.key_ids.shape[1])
    # A single kernel for the backward pass would hold gradients of all queries for each block of keys.
    block_sizes = kernels.BlockSizes(
        block_q=q, block_kv=k, block_q_dq=q, block_kv_dq=k, block_q_dkv=q, block_kv_dkv=k, block_kv_dkv_compute=k
    )
    return {
        "block_sizes": block_sizes, "mask_function": _mask_function(static, masks),
        "mask_value": UNSEEN, "is_mqa": False, "attn_logits_soft_cap": None, "residual_checkpoint_name": None,
        "interpret": interpret,
    }  # fmt: skip


def _mask_function(static: StaticMask, masks: MaskArrays) -> _CausalMask | _EncodedMask | None:
    if masks.window is not None:
        return _EncodedMask(_padded_length(masks.key_ids.shape[1]).bit_length())
    return _CausalMask(static.window) if static.causal else None


class _CausalMask(NamedTuple):
    """Whether queries at some positions see keys at others; equal ones are one function to JAX."""

    window: int | None

    def __call__(self, queries: Array, keys: Array) -> Array:
        return (queries >= keys) if self.window is None else (queries >= keys) & (queries - keys < self.window)


class _EncodedMask(NamedTuple):
    """The same with the window as data: one integer of a query holds where its keys end, and in low bits how many."""

    num_bits: int

    @staticmethod
    def encode(masks: MaskArrays, places_BxQ: Array, length: int) -> Array:
        """The integers of queries at these positions of rows of so many keys."""
        assert masks.window is not None
        after = jnp.maximum(places_BxQ + 1, 0)
        first, end = after - jnp.minimum(masks.window, after), jnp.minimum(after, length)
        starts_Bx1 = length * jnp.arange(len(after), dtype=jnp.int32)[:, None]
        return (starts_Bx1 + end) << length.bit_length() | jnp.maximum(end - first, 0)

    def __call__(self, queries: Array, keys: Array) -> Array:
        end = jax.lax.shift_right_logical(queries, self.num_bits)
        return (keys < end) & (keys >= end - (queries & (2**self.num_bits - 1)))


def _block(length: int) -> int:
    """The size of blocks: as even as lanes allow."""
    return _LANES * math.ceil(length / math.ceil(length / _LARGEST_BLOCK) / _LANES)


def _num_blocks(length: int) -> int:
    return math.ceil(length / _block(length))


def _width(static: StaticMask, masks: MaskArrays, length: int, other: int) -> int:
    """The most blocks of the other side that a block meets."""
    block, other_block = _block(length), _block(other)
    is_run = np.ndim(masks.offset) < 2  # else the positions of a block's queries may lie apart
    num_places = block + static.window - 1 if static.window is not None and is_run else other
    return min(_num_blocks(other), (num_places + other_block - 2) // other_block + 1)


def _table(static: StaticMask, masks: MaskArrays, of: Literal["queries", "keys"]) -> mask_info.MaskInfo:
    """Which blocks of all rows' keys each block of all rows' queries visits, and in which order; or the reverse."""
    lengths = {"queries": masks.query_ids.shape[1], "keys": masks.key_ids.shape[1]}
    length, other = lengths[of], lengths["keys" if of == "queries" else "queries"]
    first, end = block_ranges(static, masks, _block(lengths["queries"]), _block(lengths["keys"]), of=of)
    visited_BxIxW = first[..., None] + jnp.arange(_width(static, masks, length, other), dtype=jnp.int32)
    # A block that is not visited is not fetched either if it has the number of the last one that was.
    fetched_BxIxW = jnp.minimum(visited_BxIxW, jnp.maximum(end - 1, 0)[..., None])
    fetched_BxIxW += _num_blocks(other) * jnp.arange(len(first), dtype=jnp.int32)[:, None, None]

    def as_table(array: Array) -> Array:
        table = array.astype(jnp.int32).reshape(1, -1, array.shape[2])
        return table if of == "queries" else jnp.swapaxes(table, 1, 2)

    places: Any = None  # an array of NumPy, by the annotations of JAX
    if static.causal:
        num_keys, places = _padded_length(lengths["keys"]), query_places(masks, _padded_length(lengths["queries"]))
        if masks.window is not None:
            places = _EncodedMask.encode(masks, places, num_keys)
        else:
            places += num_keys * jnp.arange(len(first), dtype=jnp.int32)[:, None]
        places = places.reshape(-1)
    return mask_info.MaskInfo(
        data_next=as_table(fetched_BxIxW), mask_next=None, block_mask=as_table(visited_BxIxW < end[..., None]),
        partial_mask_blocks=None, q_sequence=places,
    )  # fmt: skip


def _padded_length(length: int) -> int:
    return _num_blocks(length) * _block(length)


def _one_sequence(array: Array) -> Array:
    """[B, T, H, K] as [H, S, K], each row filled up to whole blocks with zeros."""
    filled = jnp.pad(array, ((0, 0), (0, _padded_length(array.shape[1]) - array.shape[1]), (0, 0), (0, 0)))
    return jnp.moveaxis(filled, 2, 0).reshape(array.shape[2], -1, array.shape[3])


def _rows(array: Array, like: Array) -> Array:
    """[H, S, ...] as [B, T, H, ...] of the rows of another array."""
    rows, length, *_ = like.shape
    return jnp.moveaxis(array.reshape(len(array), rows, -1, *array.shape[2:])[:, :, :length], 0, 2)


def _ids(masks: MaskArrays) -> kernels.SegmentIds:
    """The samples of all positions; 0 for the zeros that fill the rows up."""
    return kernels.SegmentIds(*(_one_sequence(x[..., None, None])[0, :, 0] for x in (masks.query_ids, masks.key_ids)))


def _scale(static: StaticMask, query: Array) -> Array:
    return (query.astype(jnp.float32) * static.scale).astype(query.dtype)
