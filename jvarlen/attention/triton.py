"""Attention on GPUs: Pallas Triton kernels, in which a block of a row meets only the blocks of its samples.

Letters: B rows, Q queries of a row, T keys, H heads of queries, N of keys, G = H / N, K head size, C positions of a
block. Each program of a kernel has block i of head h of row b, and loops over the blocks j of the other side.

The backward kernels compute 7 products where 5 do. Sums of dQ by key block would take 120 / C of the time of the two
on an H200, and the gradients of the logits in 16 bits 60 / K of it and T² bytes a head; atomic sums differ by run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array

from jvarlen.attention.masks import UNSEEN, Inputs, MaskArrays, StaticMask, block_ranges, is_seen, query_places
from jvarlen.attention.platforms import Devices

__all__ = ["backward", "forward", "supports"]

_LOG2_E = math.log2(math.e)  # GPUs have powers of 2


def supports(static: StaticMask, inputs: Inputs, devices: Devices) -> bool:
    """Whether the kernels support such arrays."""
    del static, devices
    query, key, *_ = inputs
    return (
        query.dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
        and _head_bytes(query) <= 512  # more needs more memory than some multiprocessors have
        and max(query.size, key.size) < 2**31  # what kernels count with int32
    )


def forward(static: StaticMask, inputs: Inputs, *, interpret: bool = False) -> tuple[Array, Array]:
    """Outputs [B, Q, H, K] and the logarithms of the sums float32[B, H, Q]."""
    query, key, value, masks = inputs
    q, k, v = (_pad(x, _block_size(query)) for x in (query, key, value))
    lse_shape = (q.shape[0], q.shape[2], q.shape[1])
    out, lse = _call(
        _forward_kernel, static, masks, q, k, "queries", [(q, "block"), (k, "others"), (v, "others")],
        [(q.shape, q.dtype, "block"), (lse_shape, jnp.float32, "lines")], interpret,
    )  # fmt: skip
    return _cut(out, query), lse[:, :, : query.shape[1]]


def backward(
    static: StaticMask, inputs: Inputs, out: Array, lse: Array, grad: Array, *, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """Gradients of queries, keys and values in their dtypes."""
    query, key, value, masks = inputs
    size = _block_size(query)
    inner = jnp.moveaxis(jnp.sum(out.astype(jnp.float32) * grad.astype(jnp.float32), axis=3), 1, 2)
    q, k, v, g = (_pad(x, size) for x in (query, key, value, grad.astype(query.dtype)))
    lse, inner = (_add_zeros(x, (q.shape[0], q.shape[2], q.shape[1])) for x in (lse, inner))
    query_inputs = [(g, "block"), (lse, "lines"), (inner, "lines")]
    (dq,) = _call(
        _dq_kernel, static, masks, q, k, "queries", [(q, "block"), (k, "others"), (v, "others"), *query_inputs],
        [(q.shape, q.dtype, "block")], interpret,
    )  # fmt: skip
    query_inputs = [(g, "others"), (lse, "lines"), (inner, "lines")]
    dk, dv = _call(
        _dkv_kernel, static, masks, q, k, "keys", [(q, "others"), (k, "block"), (v, "block"), *query_inputs],
        [(k.shape, k.dtype, "block"), (v.shape, v.dtype, "block")], interpret,
    )  # fmt: skip
    return _cut(dq, query), _cut(dk, key), _cut(dv, value)


def _block_size(query: Array) -> int:
    """Positions of a block: few, as samples have hundreds, and as blocks must fit in registers."""
    return 64 if _head_bytes(query) <= 256 else 32


def _head_bytes(query: Array) -> int:
    return pl.next_power_of_2(query.shape[3]) * query.dtype.itemsize


def _pad(array: Array, size: int) -> Array:
    """Fills up to whole blocks, and to a head size that is a power of 2."""
    num_rows, length, num_heads, head_size = array.shape
    head_size = max(16, pl.next_power_of_2(head_size))  # products are of 16 at least
    return _add_zeros(array, (num_rows, pl.cdiv(length, size) * size, num_heads, head_size))


def _add_zeros(array: Array, shape: tuple[int, ...]) -> Array:
    """Fills up to this shape with zeros at the ends."""
    if array.shape == shape:
        return array
    return jnp.pad(array, [(0, size - given) for size, given in zip(shape, array.shape, strict=True)])


def _cut(array: Array, like: Array) -> Array:
    return array[:, : like.shape[1], :, : like.shape[3]]


def _call(
    kernel: Callable[..., None],
    static: StaticMask,
    masks: MaskArrays,
    q: Array,
    k: Array,
    of: Literal["queries", "keys"],
    inputs: Sequence[tuple[Array, str]],
    outputs: Sequence[tuple[tuple[int, ...], DTypeLike, str]],
    interpret: bool,
) -> Sequence[Array]:
    """Runs a kernel for all blocks of one side, each with all of the other side."""
    size = _block_size(q)
    (num_rows, num_queries, num_heads, head_size), (_, num_keys, num_kv_heads, _) = q.shape, k.shape
    group = num_heads // num_kv_heads
    query_ids, key_ids = (
        _add_zeros(x, (num_rows, n)) for x, n in ((masks.query_ids, num_queries), (masks.key_ids, num_keys))
    )
    windows = [] if masks.window is None or static.window is not None else [jnp.reshape(masks.window, 1)]
    ranges = block_ranges(static, masks, size, size, of=of)
    of_block = pl.BlockSpec((None, size), lambda i, h, b: (b, i))
    # Kernels count positions where the first of a row tells all, as XLA would store them for every layer of a loop.
    is_run = masks.offset.ndim == 1
    places = [masks.offset if is_run else query_places(masks, num_queries)]
    places = [] if is_run and static.offset is not None else places
    specs = {"block": pl.BlockSpec((None, size, None, head_size), lambda i, h, b: (b, i, h, 0))}
    if of == "queries":
        grid = (num_queries // size, num_heads, num_rows)
        specs["others"] = pl.BlockSpec((None, num_keys, None, head_size), lambda i, h, b: (b, 0, h // group, 0))
        specs["lines"] = pl.BlockSpec((None, None, size), lambda i, h, b: (b, h, i))
        of_query_ids, of_key_ids = of_block, pl.BlockSpec((None, num_keys), lambda i, h, b: (b, 0))
    else:  # the query heads of a key head are others
        grid = (num_keys // size, num_kv_heads, num_rows)
        specs["others"] = pl.BlockSpec((None, num_queries, group, head_size), lambda i, h, b: (b, 0, h, 0))
        specs["lines"] = pl.BlockSpec((None, group, num_queries), lambda i, h, b: (b, h, 0))
        of_query_ids, of_key_ids = pl.BlockSpec((None, num_queries), lambda i, h, b: (b, 0)), of_block

    def run(first: Ref, end: Ref, *refs: Ref) -> None:
        given = iter(refs)
        optional = (next(given) if array else None for array in (windows, places))
        kernel(static, *optional, first, end, *given)

    return pl.pallas_call(
        run,
        grid=grid,
        in_specs=[
            *(pl.BlockSpec((None, None), lambda i, h, b: (b, i)) for _ in ranges),
            *(pl.BlockSpec((None,), lambda i, h, b: (0,)) for _ in windows),
            *(pl.BlockSpec((None,), lambda i, h, b: (b,)) if is_run else of_query_ids for _ in places),
            of_query_ids,
            of_key_ids,
            *(specs[kind] for _, kind in inputs),
        ],
        out_specs=[specs[kind] for *_, kind in outputs],
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in outputs],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name=kernel.__name__,
    )(*ranges, *windows, *places, query_ids, key_ids, *(array for array, _ in inputs))


def _forward_kernel(
    static: StaticMask, window: Ref | None, places: Ref | None, first: Ref, end: Ref, query_ids: Ref, key_ids: Ref,
    q_ref: Ref, k_ref: Ref, v_ref: Ref, out_ref: Ref, lse_ref: Ref,
) -> None:  # fmt: skip
    size = q_ref.shape[0]
    q, of_queries = q_ref[...], (query_ids[...], _places(static, places, pl.program_id(0), size))

    def add(j: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        largest, total, out = sums
        at = pl.ds(j * size, size)
        mask = _mask(static, window, of_queries, key_ids[at], j)
        logits = jnp.where(mask, _product(q, k_ref[at, :].T) * (static.scale * _LOG2_E), UNSEEN)
        larger = jnp.maximum(largest, jnp.max(logits, 1))
        # A query that has seen nothing yet gives hidden keys the power 2^0.
        powers = jnp.where(mask, jnp.exp2(logits - larger[:, None]), 0)
        shrink = jnp.exp2(largest - larger)
        v = v_ref[at, :]
        out = out * shrink[:, None] + _product(powers.astype(v.dtype), v)
        return larger, total * shrink + jnp.sum(powers, 1), out

    zeros = jnp.zeros(q.shape, jnp.float32)
    largest, total, out = lax.fori_loop(
        first[...], end[...], add, (jnp.full(size, UNSEEN, jnp.float32), jnp.zeros(size, jnp.float32), zeros)
    )
    sees = total > 0
    total = jnp.where(sees, total, 1)
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    lse_ref[...] = jnp.where(sees, (largest + jnp.log2(total)) / _LOG2_E, UNSEEN)


def _dq_kernel(
    static: StaticMask, window: Ref | None, places: Ref | None, first: Ref, end: Ref, query_ids: Ref, key_ids: Ref,
    q_ref: Ref, k_ref: Ref, v_ref: Ref, grad_ref: Ref, lse_ref: Ref, inner_ref: Ref, dq_ref: Ref,
) -> None:  # fmt: skip
    size = q_ref.shape[0]
    of_queries = query_ids[...], _places(static, places, pl.program_id(0), size)
    q, grad, lse, inner = q_ref[...], grad_ref[...], lse_ref[...], inner_ref[...]

    def add(j: Array, dq: Array) -> Array:
        at = pl.ds(j * size, size)
        k = k_ref[at, :]
        mask = _mask(static, window, of_queries, key_ids[at], j)
        powers = _powers(static, mask, _product(q, k.T), lse[:, None])
        dlogits = powers * (_product(grad, v_ref[at, :].T) - inner[:, None]) * static.scale
        return dq + _product(dlogits.astype(k.dtype), k)

    dq_ref[...] = lax.fori_loop(first[...], end[...], add, jnp.zeros(q.shape, jnp.float32)).astype(dq_ref.dtype)


def _dkv_kernel(
    static: StaticMask, window: Ref | None, places: Ref | None, first: Ref, end: Ref, query_ids: Ref, key_ids: Ref,
    q_ref: Ref, k_ref: Ref, v_ref: Ref, grad_ref: Ref, lse_ref: Ref, inner_ref: Ref, dk_ref: Ref, dv_ref: Ref,
) -> None:  # fmt: skip
    size, group, j = k_ref.shape[0], q_ref.shape[1], pl.program_id(0)
    k, v, ids = k_ref[...], v_ref[...], key_ids[...]
    start = first[...]
    num_blocks = end[...] - start

    def add(step: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        dk, dv = sums
        head, i = lax.div(step, num_blocks), start + lax.rem(step, num_blocks)
        at = pl.ds(i * size, size)
        q, grad = q_ref[at, head, :], grad_ref[at, head, :]
        of_queries = query_ids[at], _places(static, places, i, size, at)
        mask = _mask(static, window, of_queries, ids, j, keys_first=True)
        powers = _powers(static, mask, _product(k, q.T), lse_ref[head, at][None])
        dlogits = powers * (_product(v, grad.T) - inner_ref[head, at][None]) * static.scale
        return dk + _product(dlogits.astype(q.dtype), q), dv + _product(powers.astype(grad.dtype), grad)

    zeros = jnp.zeros(k.shape, jnp.float32)
    dk, dv = lax.fori_loop(0, group * num_blocks, add, (zeros, zeros))
    dk_ref[...], dv_ref[...] = dk.astype(dk_ref.dtype), dv.astype(dv_ref.dtype)


def _places(
    static: StaticMask, places: Ref | None, block: Array, size: int, at: slice | pl.Slice | None = None
) -> Array:
    """The positions of a block of queries."""
    if places is not None and places.shape:
        return places[...] if at is None else places[at]
    first = static.offset if places is None else places[...]
    assert first is not None
    return first + block * size + jnp.arange(size, dtype=jnp.int32)


def _mask(
    static: StaticMask, window: Ref | None, of_queries: tuple[Array, Array], key_ids: Array, j: Array, *,
    keys_first: bool = False,
) -> Array:  # fmt: skip
    """bool[C, C], of a block of the queries, by their ids and positions, and block j of the keys."""
    query_ids, query_places = of_queries
    key_places = j * len(key_ids) + jnp.arange(len(key_ids), dtype=jnp.int32)
    most = None if window is None else window[...]
    return is_seen(static, most, query_ids, key_ids, query_places, key_places, keys_first=keys_first)


def _powers(static: StaticMask, mask: Array, logits: Array, lse: Array) -> Array:
    """The weights of attention."""
    return jnp.where(mask, jnp.exp2(logits * (static.scale * _LOG2_E) - lse * _LOG2_E), 0)


def _product(a: Array, b: Array) -> Array:
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
