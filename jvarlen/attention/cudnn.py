"""Attention by cuDNN on NVIDIA GPUs: rows of one sample and, from Hopper on, packed rows by where samples begin.

XLA runs cuDNN for calls of its names, with its `CudnnfMHABackendConfig` as JSON. JAX's function for packed rows is
private, asks for the GPU while it traces, and took the stride of queries for that of grouped keys until July 2026.
Letters: B rows, T positions, H heads of queries, N of keys, K head size, P samples of a row, the first has id 1.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jvarlen.attention.masks import Inputs, StaticMask
from jvarlen.attention.platforms import Devices

__all__ = ["backward", "call_cudnn", "find_samples", "forward", "is_best", "supports"]

# Operations and bytes a second of an H200: of Triton's kernels, 9 products in a training step; of cuDNN's, 7; and of
# memory. For its sums of the queries' gradients XLA gives cuDNN room for P whole rows, in float32, which it clears.
_TRITON_PER_S, _CUDNN_PER_S, _BYTES_PER_S = 0.26 * 989e12, 0.45 * 989e12, 0.9 * 4.8e12


def supports(static: StaticMask, inputs: Inputs, devices: Devices) -> bool:
    """Whether cuDNN supports such rows, on devices of a capability that is unknown or suffices."""
    query, window, capability = inputs.query, inputs.masks.window, devices.capability
    is_packed = not static.is_rows and static.num_samples is not None and static.window is None
    since = 9.0 if is_packed or query.shape[3] > 128 else 8.0
    return (
        (static.is_rows or is_packed)
        and window is None
        and query.dtype in (jnp.bfloat16, jnp.float16)
        and query.shape[3] % 8 == 0
        and query.shape[3] <= 256
        and query.size < 2**31  # offsets are int32
        and not devices.is_split
        and (capability is None or capability >= since)
    )


def is_best(static: StaticMask, inputs: Inputs, devices: Devices) -> bool:
    """Whether cuDNN is what known devices compute such rows by in the least time, if packed rows are full."""
    if devices.capability is None or _is_missing() or static.is_rows:
        return devices.capability is not None and not _is_missing()
    assert static.num_samples is not None
    # A number of a query at one position is multiplied by so many keys of its sample, half of them where it is causal.
    product, room = inputs.query.shape[1] / static.num_samples * (1 if static.causal else 2), 4 * static.num_samples
    return 7 * product / _CUDNN_PER_S + room / _BYTES_PER_S < 9 * product / _TRITON_PER_S


@functools.cache
def _is_missing() -> bool:
    """Whether this process has GPUs and JAX finds no cuDNN; devices that are not here are taken to have it."""
    array = jax.ShapeDtypeStruct((1, 1, 1, 64), jnp.bfloat16)
    try:
        if jax.default_backend() == "gpu":
            jax.eval_shape(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), array, array, array)
    except (RuntimeError, NotImplementedError):
        return True
    return False


def forward(static: StaticMask, inputs: Inputs) -> tuple[Array, Array]:
    """Outputs [B, T, H, K] in the dtype of the queries and the logarithms of the sums float32[B, H, T]."""
    query, key, value, _ = inputs
    rows = _Rows.of(static, inputs)
    num_rows, length, num_heads, _ = query.shape
    like_sums = jax.ShapeDtypeStruct((num_rows * rows.most, num_heads, length), jnp.float32)
    out, sums = _run("__cudnn$fmhaSoftmax", static, inputs, rows, (query, key, value), (query, like_sums))
    return rows.known(out), rows.by_position(sums)


def backward(static: StaticMask, inputs: Inputs, out: Array, lse: Array, grad: Array) -> tuple[Array, Array, Array]:
    """Gradients of queries, keys and values in their dtypes."""
    query, key, value, masks = inputs
    rows = _Rows.of(static, inputs)
    grad = jnp.where(masks.query_ids[:, :, None, None] != 0, grad, 0).astype(query.dtype)
    arrays = query, key, value, rows.by_sample(lse), grad, out.astype(query.dtype)
    dq, dk, dv = _run("__cudnn$fmhaSoftmaxBackward", static, inputs, rows, arrays, (query, key, value))
    return rows.known(dq), rows.known(dk), rows.known(dv)


class _Rows(NamedTuple):
    """Where samples lie in rows, of one sample from the first position where there is one a row."""

    ids: Int32[Array, "B T"]
    lengths: Int32[Array, "B P"] | None  # None: all positions are tokens, or see none after them
    starts: Int32[Array, "B P"] | None  # None: rows of one sample; ascending, T for samples that there are not
    fits: Bool[Array, " B"] | None

    @classmethod
    def of(cls, static: StaticMask, inputs: Inputs) -> _Rows:
        ids = inputs.masks.query_ids
        if static.is_rows:
            # With a window it takes no lengths. Padding comes last, so that no token sees it.
            lengths = None if static.window is not None else jnp.sum(ids != 0, axis=1, keepdims=True, dtype=jnp.int32)
            return cls(ids, lengths if lengths is None else jnp.maximum(lengths, 1), None, None)  # 0 gives no number
        assert static.num_samples is not None
        return cls(ids, *find_samples(ids, max(static.num_samples, 2)))  # XLA takes 1 for rows of one sample

    @property
    def most(self) -> int:
        """P."""
        return 1 if self.starts is None else self.starts.shape[1]

    def offsets(self, array: Float[Array, "B T _ _"]) -> Int32[Array, "B _"]:
        """Where the samples of all rows begin in the memory of an array, and where it ends."""
        num_rows, length, *sizes = array.shape
        assert self.starts is not None
        begins = (self.starts + length * jnp.arange(num_rows, dtype=jnp.int32)[:, None]) * (sizes[0] * sizes[1])
        ends = [(0, num_rows)]  # one is read
        return jnp.pad(begins.reshape(-1), ends, constant_values=array.size).reshape(num_rows, -1)

    def by_position(self, sums: Float[Array, "_ H T"]) -> Float[Array, "B H T"]:
        """The numbers of each sample's tokens at their positions."""
        if self.starts is None:
            return sums
        num_rows, length = self.ids.shape
        sample = jnp.clip(self.ids - 1, 0, self.most - 1)
        place = jnp.arange(length, dtype=jnp.int32) - jnp.take_along_axis(self.starts, sample, axis=1)
        row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
        by_sample = sums.reshape(num_rows, self.most, *sums.shape[1:])
        return jnp.moveaxis(by_sample[row, sample, :, jnp.clip(place, 0, length - 1)], 2, 1)

    def by_sample(self, sums: Float[Array, "B H T"]) -> Float[Array, "_ H T"]:
        """The inverse of `by_position`, with any numbers past the tokens of a sample."""
        if self.starts is None:
            return sums
        num_rows, num_heads, length = sums.shape
        places = jnp.minimum(self.starts[..., None] + jnp.arange(length, dtype=jnp.int32), length - 1)
        row = jnp.arange(num_rows, dtype=jnp.int32)[:, None, None]
        by_sample_BxPxTxH = sums[row, :, places]
        return jnp.moveaxis(by_sample_BxPxTxH, 3, 2).reshape(-1, num_heads, length)

    def known(self, array: Float[Array, "B T _ _"]) -> Float[Array, "B T _ _"]:
        """0 at padding, where cuDNN leaves anything, and NaN in rows of other ids."""
        if self.fits is not None:
            array = jnp.where(self.fits[:, None, None, None], array, jnp.nan)
        return jnp.where(self.ids[:, :, None, None] != 0, array, 0)


def find_samples(
    ids: Int32[Array, "B T"], most: int
) -> tuple[Int32[Array, "B P"], Int32[Array, "B P"], Bool[Array, " B"]]:
    """Lengths and starts of the samples 1 to `most` of rows, and whether a row has each in one piece, and no others."""
    length, ids_Bx1xT = ids.shape[1], ids[:, None]
    numbers_Px1 = jnp.arange(1, most + 2, dtype=jnp.int32)[:, None]  # the last for ids that are no samples
    places = jnp.arange(length, dtype=jnp.int32)
    is_of_BxPxT = jnp.where(numbers_Px1 <= most, ids_Bx1xT == numbers_Px1, (ids_Bx1xT > most) | (ids_Bx1xT < 0))
    lengths = jnp.sum(is_of_BxPxT, axis=2, dtype=jnp.int32)
    starts = jnp.min(jnp.where(ids_Bx1xT >= numbers_Px1, places, length), axis=2)
    ends = jnp.max(jnp.where(is_of_BxPxT, places + 1, 0), axis=2)
    fits = (lengths == 0) | (ends - starts == lengths)
    return lengths[:, :most], starts[:, :most], jnp.all(fits[:, :most], axis=1) & (lengths[:, most] == 0)


# The products of each pass: the dimensions that they sum over, and those of the batch. Queries and the like are
# [B, T, H, K], and weights [B, H, T, T].
_PRODUCTS = {
    "__cudnn$fmhaSoftmax": {"bmm1": (3, 3, (0, 2), (0, 2)), "bmm2": (3, 1, (0, 1), (0, 2))},
    "__cudnn$fmhaSoftmaxBackward": {
        "bmm1_grad_gemm1": (2, 1, (0, 1), (0, 2)),
        "bmm1_grad_gemm2": (3, 1, (0, 1), (0, 2)),
        "bmm2_grad_gemm1": (2, 1, (0, 1), (0, 2)),
        "bmm2_grad_gemm2": (3, 3, (0, 2), (0, 2)),
    },
}


def _config(name: str, static: StaticMask, query: Array, rows: _Rows) -> str:
    """The configuration of a pass; as JAX's own functions give it."""
    num_rows, length, num_heads, _ = query.shape
    of_type = {
        "element_type": {"bfloat16": "BF16", "float16": "F16"}[query.dtype.name],
        "dimensions": [str(size) for size in (num_rows, num_heads, length, length)],
        "tuple_shapes": [],
        "layout": {
            "dim_level_types": [], "dim_unique": [], "dim_ordered": [], "minor_to_major": ["3", "2", "1", "0"],
            "tiles": [], "element_size_in_bits": "0", "memory_space": "0",
            "index_primitive_type": "PRIMITIVE_TYPE_INVALID", "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
            "dynamic_shape_metadata_prefix_bytes": "0",
        },
        "is_dynamic_dimension": [False] * 4,
    }  # fmt: skip
    products = {
        f"{product}_dot_dimension_numbers": {
            "lhs_contracting_dimensions": [str(left)],
            "rhs_contracting_dimensions": [str(right)],
            "lhs_batch_dimensions": [str(dim) for dim in left_batch],
            "rhs_batch_dimensions": [str(dim) for dim in right_batch],
        }
        for product, (left, right, left_batch, right_batch) in _PRODUCTS[name].items()
    }
    algorithm = {
        "algo_id": "0", "math_type": "TENSOR_OP_MATH", "tuning_knobs": {"17": "1", "24": "0"},
        "is_cudnn_frontend": True, "workspace_size": "0",
    }  # fmt: skip
    mask = [each for each, holds in (("PADDING", rows.lengths is not None), ("CAUSAL", static.causal)) if holds]
    of_pass = {
        "algorithm": algorithm, "fmha_scale": static.scale, "intermediate_tensor_shape": of_type,
        "is_flash_attention": True, "mask_type": "_".join(mask) or "NO_MASK", **products,
        "dropout_rate": 0.0, "seed": 42, "sliding_window_length": static.window or 0,
        "max_seg_per_batch": rows.most, "is_paged_attention": False,
    }  # fmt: skip
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": of_pass})


def _run(
    name: str,
    static: StaticMask,
    inputs: Inputs,
    rows: _Rows,
    arrays: Sequence[Array],
    results: Sequence[Array | jax.ShapeDtypeStruct],
) -> list[Array]:
    """What a pass makes of arrays, of the shapes of others."""
    lengths = [] if rows.lengths is None else [rows.lengths if rows.starts is not None else rows.lengths[:, 0]] * 2
    offsets = [] if rows.starts is None else [rows.offsets(inputs.query), rows.offsets(inputs.key)]
    config = _config(name, static, inputs.query, rows)
    return call_cudnn(name, config, [*arrays, *lengths, *offsets], results)


def call_cudnn(
    name: str, config: str, arrays: Sequence[Array], results: Sequence[Array | jax.ShapeDtypeStruct]
) -> list[Array]:
    """Runs cuDNN, which stores heads after positions, though they come first in the shape that it is told."""
    shapes: list[jax.ShapeDtypeStruct] = []
    layouts: list[tuple[int, ...]] = []
    for result in results:
        shape, layout = result.shape, tuple(range(len(result.shape)))
        if len(shape) == 4:
            shape, layout = (shape[0], shape[2], shape[1], shape[3]), (0, 2, 1, 3)
        shapes.append(jax.ShapeDtypeStruct(shape, result.dtype))
        layouts.append(layout)
    room = jax.ShapeDtypeStruct((0,), jnp.uint8)  # for which XLA puts what it takes
    made = jax.ffi.ffi_call(
        name,
        [*shapes, room],
        vmap_method="sequential",
        output_layouts=[*layouts, (0,)],
        custom_call_api_version=2,
        legacy_backend_config=config,
    )(*arrays)
    return [jnp.swapaxes(array, 1, 2) if array.ndim == 4 else array for array in made[:-1]]
