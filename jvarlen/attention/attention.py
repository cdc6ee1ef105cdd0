"""Attention that computes only pairs of a sample with itself, on the platform that is compiled for.

Letters: B rows, Q queries of a row, T keys, H query heads, N key/value heads, K head size.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Concatenate, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from jvarlen._common.checks import UserError, check_choices
from jvarlen._common.keywords import check_keywords
from jvarlen._common.pytree import describe
from jvarlen._common.types import AttentionImplementation
from jvarlen.attention.masks import (
    Inputs,
    MaskArrays,
    StaticMask,
    masks_of_answers,
    padding_mask,
    resolve_window,
    varying_axes,
)
from jvarlen.attention.platforms import PLATFORMS, Devices, by_platform

__all__ = ["WHOLE_BELOW", "attend", "backward", "forward", "merge"]

WHOLE_BELOW = 512  # keys, below which a CPU is faster with whole rows than with blocks of them
_FEW = 32  # queries: kernels would fill up a block of them, as for one token after a cache
_FEW_LOGITS = 2**26  # for rows of one sample
# The first that supports the arrays serves a platform.
_KERNELS: dict[str, tuple[str, ...]] = {"cuda": ("cudnn", "triton"), "tpu": ("splash",)}
_ANYWHERE = ("blocks", "dense")
_UNKNOWN = Devices()

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Parts: TypeAlias = tuple[MaskArrays, ...]  # of the keys that queries see
_Saved: TypeAlias = tuple[Array, Array, Array, _Parts, Array, Array]


@check_keywords
def attend(
    query: Float[Array, "B Q H K"],
    key: Float[Array, "B T N K"],
    value: Float[Array, "B T N K"],
    *,
    lengths: Integer[Array, " B"] | None = None,
    key_lengths: Integer[Array, " B"] | None = None,
    segment_ids: Integer[Array, "B Q"] | None = None,
    key_segment_ids: Integer[Array, "B T"] | None = None,
    answer_ids: Integer[Array, "B Q"] | None = None,
    samples_per_row: int | None = None,
    query_offset: int | Integer[Array, ""] | Integer[Array, " B"] = 0,
    causal: bool = True,
    window: int | Integer[Array, ""] | None = None,
    scale: float | None = None,
    implementation: AttentionImplementation = "auto",
) -> Float[Array, "B Q H K"]:
    """Attention within the samples of padded or packed rows; no position sees another sample or padding.

    Only pairs of blocks of positions that share a sample are computed; causal attention also skips the blocks above
    the diagonal. The gradient computes the weights again from the logarithms of their sums: memory grows with Q + T.
    Some rows are computed whole, with the logits of all pairs in memory: on a CPU rows of fewer than 512 keys, and
    longer ones of one sample with at most 2**26 logits; on a GPU rows that no kernel supports. Padding may hold any
    finite numbers; it gets no gradient and gives none. Second derivatives work as `jax.jvp` of a gradient.

    Args:
      query: float[B, Q, H, K].
      key: float[B, T, N, K], in the dtype of the queries; N divides H, and head h of the queries attends to head
        h // (H / N).
      value: float[B, T, N, K], in the same dtype.
      lengths: int[B] of any integer type, the tokens of rows of one sample each; 0 for a padding row. With neither
        lengths nor segments, all positions are tokens of one sample.
      key_lengths: int[B], the tokens of the keys where they differ from the queries: cross-attention, or a cache.
      segment_ids: int[B, Q] of any integer type, the sample of each position of packed rows; 0 where there is no token.
        Ids must fit int32 and may come in any order; ascending ids are computed without waste.
      key_segment_ids: int[B, T], the samples of the keys where they differ from the queries, such as
        `source_segment_ids` of a packed batch of pairs.
      answer_ids: int[B, Q], which of the answers of its sample each position belongs to: 0 in the prompt that they
        share, then another number in each answer, where the tokens of a sample lie together. An answer sees the prompt
        and itself, and a window spans what the answer would have before it if it came right after the prompt.
      samples_per_row: the most samples of packed rows whose ids are 1, 2, … in this order, the tokens of each together,
        as in a `PackedBatch`. cuDNN takes packed rows where it is known; other ids then give NaN.
      query_offset: the position of the first query, when the first key has position 0: an int, int32[] or int32[B].
      causal: whether a position sees only itself and what comes before it.
      window: how many keys a causal query sees at most: its position and those right before it, as in Mistral. An
        int, or int32[], such as the window of each layer in a scan, or of a step; None and numbers below 1: all. The
        time follows an array too. For it, auto takes Triton rather than cuDNN on a GPU, and on a TPU splash where
        B · T² is below 2**31, and else blocks.
      scale: factor of the products of queries and keys; None: K ** −0.5.
      implementation: `"auto"` follows the platform that is compiled for. `"blocks"` are loops over blocks, on any
        platform; `"xla"` holds the logits of all pairs; `"triton"` and `"cudnn"` are kernels for NVIDIA GPUs, the
        second for 16-bit floats and rows of one sample or, from Hopper on, of few samples; and `"splash"` for TPUs.

    Returns:
      float[B, Q, H, K] in the dtype of the queries; 0 where there is no token, or it sees none.

    Raises:
      ValueError: shapes do not fit, for example the heads of queries are not a multiple of those of keys; dtypes
        differ, or are integers; both lengths and segments are given, or segments of keys alone, or segments of queries
        alone with other numbers of queries and keys; a window or answers without causal attention; answers with other
        keys than queries; an implementation that is unknown or does not support the arrays.

    Example:
      >>> values = jnp.arange(4.0).reshape(1, 4, 1, 1)
      >>> zeros = jnp.zeros((1, 4, 1, 1))  # so that each position gets the mean of the values it sees
      >>> attend(zeros, zeros, values, segment_ids=jnp.array([[1, 1, 2, 0]])).ravel().tolist()
      [0.0, 0.5, 2.0, 0.0]

    References:
      Dao et al. 2022, "FlashAttention", for blocks and the gradient. Krell et al. 2021, "Efficient Sequence Packing
      without Cross-contamination", for packed rows.
    """
    check_choices(implementation=(implementation, AttentionImplementation))
    _check_shapes(query, key, value)
    (num_rows, num_queries), num_keys = query.shape[:2], key.shape[1]
    is_rows = segment_ids is None and key_segment_ids is None
    _check_given(is_rows, lengths, key_lengths, segment_ids, samples_per_row)
    samples, key_samples = (lengths, key_lengths) if is_rows else (segment_ids, key_segment_ids)
    if key_samples is None and samples is not None and num_queries != num_keys:
        name = "lengths" if is_rows else "segment_ids"
        raise UserError(f"{num_queries} queries and {num_keys} keys: {name}= needs key_{name}= beside it")
    _check_integers((num_rows,), lengths=lengths, key_lengths=key_lengths)
    _check_integers((num_rows, num_queries), segment_ids=segment_ids)
    _check_integers((num_rows, num_keys), key_segment_ids=key_segment_ids)
    _check_integers((num_rows,) if jnp.ndim(query_offset) else (), query_offset=query_offset)
    _check_integers((), window=window)
    query_ids = _ids(samples, num_rows, num_queries)
    key_ids = query_ids if key_samples is None and num_keys == num_queries else _ids(key_samples, num_rows, num_keys)
    static_offset = int(query_offset) if isinstance(query_offset, (int, np.integer)) else None
    is_self = key_ids is query_ids and static_offset == 0
    # A window hides nothing if it spans all positions up to the last query's.
    end = np.iinfo(np.int32).max if static_offset is None else static_offset + num_queries
    window = resolve_window(window, end, causal=causal)
    static = StaticMask(
        causal,
        query.shape[3] ** -0.5 if scale is None else float(scale),
        window if isinstance(window, int) else None,
        static_offset,
        is_rows and is_self,
        implementation,
        jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
        samples_per_row if is_self else None,
    )
    offset = jnp.broadcast_to(jnp.asarray(query_offset, jnp.int32), (num_rows,))
    masks = MaskArrays(query_ids, key_ids, offset, None if isinstance(window, int) else window)
    parts: _Parts = (masks,)
    if answer_ids is not None:
        _check_integers((num_rows, num_queries), answer_ids=answer_ids)
        if not causal or not is_self:
            raise UserError("answer_ids= are for causal attention of a row to itself: leave out keys' ids and offsets")
        if implementation == "cudnn":
            raise UserError('cuDNN supports no answer_ids=: leave implementation= out, or take "triton"')
        static = static._replace(is_rows=False, num_samples=None)
        parts = masks_of_answers(masks, answer_ids.astype(jnp.int32))
    return _attend(static, *_vary_equally((query, key, value, parts)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: StaticMask, query: Array, key: Array, value: Array, parts: _Parts) -> Array:
    return _attend_forward(static, query, key, value, parts)[0]


def _attend_forward(static: StaticMask, query: Array, key: Array, value: Array, parts: _Parts) -> tuple[Array, _Saved]:
    dtype = query.dtype if len(parts) == 1 else jnp.promote_types(query.dtype, jnp.float32)
    of_parts = (forward(static, dtype, Inputs(query, key, value, masks)) for masks in parts)
    output, log_sums = functools.reduce(merge, of_parts)
    output = output.astype(query.dtype)
    return output, (query, key, value, parts, output, log_sums)


def _attend_backward(static: StaticMask, saved: _Saved, grad: Array) -> tuple[Array | None, ...]:
    query, key, value, parts, output, log_sums = saved
    dtypes = tuple(x.dtype for x in saved[:3])
    wide = dtypes if len(parts) == 1 else tuple(jnp.promote_types(dtype, jnp.float32) for dtype in dtypes)
    inputs = (Inputs(query, key, value, masks) for masks in parts)
    of_parts = [backward(static, wide, part, output, log_sums, grad) for part in inputs]
    grads = (functools.reduce(jnp.add, of_array) for of_array in zip(*of_parts, strict=True))
    return *(x.astype(dtype) for x, dtype in zip(grads, dtypes, strict=True)), None


_attend.defvjp(_attend_forward, _attend_backward)


def merge(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    """Outputs [B, Q, H, K] and the logarithms of sums [B, H, Q] for two parts of the keys together."""
    log_sums = jnp.logaddexp(one[1], other[1])
    share, share_other = (jnp.moveaxis(jnp.exp(x - log_sums), 1, 2)[..., None] for x in (one[1], other[1]))
    return share * one[0] + share_other * other[0], log_sums


def _jit_by_name(
    function: Callable[Concatenate[StaticMask, _P], _R],
) -> Callable[Concatenate[StaticMask, _P], _R]:
    """Compiles a function under a name that `count_operations` knows, as the data decide how often loops turn."""

    @functools.cache
    def jitted(name: str) -> Callable[Concatenate[StaticMask, _P], _R]:
        def call(static: StaticMask, *args: _P.args, **options: _P.kwargs) -> _R:
            return function(static, *args, **options)

        call.__name__ = name
        return jax.jit(call, static_argnums=(0, 1))

    @functools.wraps(function)
    def by_name(static: StaticMask, *args: _P.args, **options: _P.kwargs) -> _R:
        causal = "causal_" if static.causal and static.offset == 0 else ""
        return jitted(f"{causal}attention_{function.__name__}")(static, *args, **options)

    return by_name


@_jit_by_name
def forward(static: StaticMask, dtype: DTypeLike, inputs: Inputs) -> tuple[Array, Array]:
    """Outputs in this dtype, and logarithms of the softmax's sums, by the platform's implementation."""

    def run(module: ModuleType, inputs: Inputs, **options: bool) -> tuple[Array, Array]:
        output, log_sums = module.forward(static, inputs, **options)
        return output.astype(dtype), log_sums

    return _by_platform(static, run, inputs)


@_jit_by_name
def backward(
    static: StaticMask,
    dtypes: tuple[DTypeLike, ...],
    inputs: Inputs,
    output: Array,
    log_sums: Array,
    grad: Array,
) -> tuple[Array, ...]:
    """Gradients of queries, keys and values in these dtypes, by the platform's implementation."""

    def run(module: ModuleType, *args: Inputs | Array, **options: bool) -> tuple[Array, ...]:
        grads = module.backward(static, *args, **options)
        return tuple(grad.astype(dtype) for grad, dtype in zip(grads, dtypes, strict=True))

    return _by_platform(static, run, inputs, output, log_sums, grad)


def _by_platform(static: StaticMask, run: Callable[..., _R], *args: Inputs | Array) -> _R:
    """`run(module, *args)` with the module for the platform that is compiled for."""

    def run_on(platform: str, inputs: Inputs, *others: Array, devices: Devices = _UNKNOWN) -> _R:
        name = _choose(platform, static, inputs, devices)
        # Backward passes and kernels are traced later, out of the context that a caller may have set.
        with jax.default_matmul_precision(static.precision):
            options = {"together": True} if devices.is_split and name == "blocks" else {}
            return run(_module(name), inputs, *others, **options)

    functions = {platform: functools.partial(run_on, platform) for platform in ("default", *PLATFORMS)}
    return by_platform(*args, **functions)


def _choose(platform: str, static: StaticMask, inputs: Inputs, devices: Devices) -> str:
    """The implementation for a platform; no kernel where the compiler shares operations between devices."""
    query, key, _, masks = inputs
    if static.implementation != "auto":
        name = "dense" if static.implementation == "xla" else static.implementation
        if name in _ANYWHERE or _module(name).supports(static, inputs, devices):
            return name
        window = static.window if masks.window is None else "an array"
        raise UserError(
            f"implementation={name!r} does not support query {describe(query)} and key {describe(key)}, with "
            f"causal={static.causal}, window={window}, samples_per_row={static.num_samples}: leave it out, or take "
            '"blocks", or on a GPU "triton"'
        )
    is_few = query.shape[1] < _FEW
    for name in () if devices.is_split or is_few else _KERNELS.get(platform, ()):
        module = _module(name)
        if module.supports(static, inputs, devices) and (name != "cudnn" or module.is_best(static, inputs, devices)):
            return name
    is_explicit = any(axes is not None for axes in jax.typeof(query).sharding.spec)  # blocks merge rows of devices
    # Loops over blocks take one core of a CPU, and could skip little in rows of one sample each.
    sees_all = static.is_rows and static.window is None and masks.window is None
    is_whole = sees_all and query.size // query.shape[3] * key.shape[1] <= _FEW_LOGITS
    is_short = is_few or is_whole or is_explicit or key.shape[1] < WHOLE_BELOW
    return "dense" if is_short or platform == "cuda" else "blocks"


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"jvarlen.attention.{name}")


def _ids(samples: Array | None, num_rows: int, length: int) -> Array:
    """int32[B, length], from lengths, segments or nothing."""
    if samples is None:
        return jnp.ones((num_rows, length), jnp.int32)
    return (padding_mask(samples, length) if samples.ndim == 1 else samples).astype(jnp.int32)


def _vary_equally(arrays: _R) -> _R:
    """Makes arrays vary over the same mesh axes, so that their gradients do, inside a `shard_map` that checks it."""
    axes = {axis for leaf in jax.tree.leaves(arrays) for axis in varying_axes(leaf)}

    def vary(leaf: Array) -> Array:
        missing = tuple(axes - varying_axes(leaf))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(vary, arrays) if axes else arrays


def _check_given(
    is_rows: bool,
    lengths: Array | None,
    key_lengths: Array | None,
    segment_ids: Array | None,
    samples_per_row: int | None,
) -> None:
    if not is_rows and (lengths is not None or key_lengths is not None):
        raise UserError("rows have either lengths= and key_lengths=, or segment_ids= and key_segment_ids=")
    if not is_rows and segment_ids is None:
        raise UserError("key_segment_ids= needs segment_ids= beside it: the samples of the queries")
    if samples_per_row is not None and (samples_per_row < 1 or segment_ids is None):
        raise UserError(f"samples_per_row={samples_per_row} is at least 1, and needs segment_ids= beside it")


def _check_integers(shape: tuple[int, ...], **given: int | Array | None) -> None:
    for name, values in given.items():
        if values is None:
            continue
        if jnp.shape(values) != shape or not jnp.issubdtype(jnp.result_type(values), jnp.integer):
            raise UserError(f"{name}= must be integers of shape {list(shape)}, not {describe(values)}")


def _check_shapes(query: Array, key: Array, value: Array) -> None:
    given = {"query": query, "key": key, "value": value}
    shapes = [jnp.shape(array) for array in given.values()]
    fits = all(len(shape) == 4 for shape in shapes) and shapes[1] == shapes[2]
    listed = ", ".join(f"{name} {describe(array)}" for name, array in given.items())
    if not fits or (shapes[0][0], shapes[0][3]) != (shapes[1][0], shapes[1][3]):
        raise UserError(f"attention takes query [B, Q, H, K], and key and value [B, T, N, K], not {listed}")
    dtypes = {array.dtype for array in given.values()}
    if len(dtypes) > 1 or not jnp.issubdtype(query.dtype, jnp.floating):
        raise UserError(f"attention takes query, key and value of one type of floats, not {listed}")
    if 0 in shapes[0] or 0 in shapes[1]:
        raise UserError(f"attention of no rows, positions or heads: query {list(shapes[0])}, key {list(shapes[1])}")
    if shapes[0][2] % shapes[1][2]:
        raise UserError(f"{shapes[0][2]} heads of queries must be a multiple of the {shapes[1][2]} of keys and values")
