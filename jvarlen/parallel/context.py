"""Context parallelism: causal attention over rows whose positions are spread over a mesh axis.

Letters: N devices of the axis, T positions of a row, S = T / N those of this device, B rows, H heads of queries, J of
keys and values, K head size.
"""

# A row is cut into 2N chunks, and device d of N holds chunks d and 2N − 1 − d: "zigzag". Early positions see few keys
# and late ones many, so that each device has the same work: 2N + 1 of the pairs of chunks that causal attention looks
# at. Losses are sums over the positions of a device, so that the sum of all devices' losses is the loss.

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32, Integer

from jvarlen._common.checks import UserError, check_at_least_one, list_first
from jvarlen._common.pytree import describe, leaves_by_name
from jvarlen._common.types import Batch, Microbatch, Params, PyTree
from jvarlen.attention.attention import attend
from jvarlen.attention.masks import StaticMask, resolve_window
from jvarlen.attention.zigzag import attend_zigzag, halves
from jvarlen.parallel.layers import Axes, LayeredModel, bind_axes

__all__ = ["CONTEXT_AXIS", "attend_over_axis", "context_model", "context_positions", "row_length", "shard_positions"]

CONTEXT_AXIS = "context"  # the mesh axis that positions are spread over


def context_positions(seq_length: int, num_shards: int) -> Int32[np.ndarray, "N S"]:
    """int32[N, S], the positions of a row that each shard holds; ValueError if 2N chunks are not equal."""
    check_at_least_one(seq_length=seq_length, num_shards=num_shards)
    multiple = 2 * num_shards
    if seq_length % multiple:
        below = seq_length // multiple * multiple
        nearest = f"{below} and {below + multiple}" if below else f"{multiple}"
        raise UserError(
            f"a row of {seq_length} positions cannot be spread over {num_shards} shards in {multiple} equal chunks: "
            f"nearest are {nearest} positions, and length_multiple={multiple} makes only such buckets"
        )
    chunks = np.arange(seq_length, dtype=np.int32).reshape(multiple, -1)
    return np.concatenate([chunks[:num_shards], chunks[num_shards:][::-1]], axis=1)


def shard_positions(seq_length: int) -> Int32[Array, " S"]:
    """int32[S], the positions of this device, inside `shard_map`: `positions` of `Axes`."""
    return jnp.asarray(context_positions(seq_length, lax.axis_size(CONTEXT_AXIS)))[lax.axis_index(CONTEXT_AXIS)]


def row_length(model: LayeredModel, ends: Params, batch: Batch) -> int:
    """T: what `embed` returns for whole rows is `[B, T, …]`; raises ValueError if it returns something else."""

    def embed(ends: Params, batch: Batch) -> PyTree:
        microbatch = jax.tree.map(lambda leaf: leaf[0] if leaf.ndim else leaf, batch)
        return jax.tree.map(jnp.asarray, model.embed(ends, microbatch, Axes(key=jax.random.key(0))))

    x = jax.eval_shape(embed, ends, batch)
    lengths = {leaf.shape[1] if leaf.ndim > 1 else 0 for leaf in jax.tree.leaves(x)}
    if len(lengths) != 1 or 0 in lengths:
        listed = [f"{name or 'x'} {describe(leaf)}" for name, leaf in leaves_by_name(x).items()]
        raise UserError(f"a model by positions has x of arrays [B, T, …] for T positions, not {list_first(listed)}")
    return int(lengths.pop())


def context_model(model: LayeredModel, seq_length: int) -> LayeredModel:
    """A model whose functions compute the positions of this device, inside `shard_map` over the context axis."""
    bound = bind_axes(model, lambda own: own._replace(context=CONTEXT_AXIS, positions=shard_positions(seq_length)))

    def embed(ends: Params, microbatch: Microbatch, axes: Axes) -> PyTree:
        x = bound.embed(ends, microbatch, axes)
        positions = seq_length // lax.axis_size(CONTEXT_AXIS)
        if axes.sequence_parallel and axes.tensor is not None:
            positions //= lax.axis_size(axes.tensor)
        wrong = [leaf for leaf in jax.tree.leaves(x) if np.shape(leaf)[1:2] != (positions,)]
        if wrong:
            raise UserError(
                f"embed returned {describe(wrong[0])} for {positions} of {seq_length} positions: arrays of a model by "
                "positions are [B, S, …] for the S of axes.positions"
            )
        return x

    return bound._replace(embed=embed)


def attend_over_axis(
    query: Float[Array, "B S H K"],
    key: Float[Array, "_ _ J K"],
    value: Float[Array, "_ _ J K"],
    *,
    axes: Axes,
    lengths: Integer[Array, " _"] | None = None,
    segment_ids: Integer[Array, "_ _"] | None = None,
    window: int | Integer[Array, ""] | None = None,
) -> Float[Array, "B S H K"]:
    """Causal attention of this device's queries to the keys and values of all devices of an axis.

    Equal to `attend` on whole rows, and computed by the same implementations, a pair of chunks of T / 2N positions at a
    time. Only pairs of positions that share a sample cost something.

    Args:
      query: float[B, S, H, K], at the positions of `shard_positions`.
      key: float[B, S, J, K]; J divides H, and head h of the queries attends to head h // (H / J).
      value: float[B, S, J, K].
      axes: `axes.context` is the mesh axis; None means whole rows, S = T.
      lengths: int[B] of any integer type, the tokens of whole rows of one sample each. With neither lengths nor
        segments, all positions are tokens of one sample.
      segment_ids: int[B, S] of any integer type, the sample of each position of packed rows, 0 where there is no token.
      window: how many keys a query sees at most, as in `attend`.

    Returns:
      float[B, S, H, K]; 0 where there is no token.

    Raises:
      ValueError: an odd S, heads of queries that are not a multiple of those of keys,
        arrays that do not have the same B and S, or both lengths and segments.

    References:
      Dubey et al. 2024, "The Llama 3 Herd of Models", for gathered keys and values. Dao et al. 2022, "FlashAttention",
      for the gradient.
    """
    given = {"query": query, "key": key, "value": value, "segment_ids": segment_ids}
    arrays = {name: array for name, array in given.items() if array is not None}
    if len({array.shape[:2] for array in arrays.values()}) > 1 or key.shape != value.shape:
        listed = ", ".join(f"{name} {describe(array)}" for name, array in arrays.items())
        raise UserError(f"queries, keys, values and segments must be of the same rows and positions: {listed}")
    if query.shape[2] % key.shape[2]:
        raise UserError(
            f"{query.shape[2]} heads of queries must be a multiple of the {key.shape[2]} of keys and values"
        )
    if axes.context is None:
        return attend(query, key, value, lengths=lengths, segment_ids=segment_ids, window=window)
    if lengths is not None and segment_ids is not None:
        raise UserError("rows have either lengths= or segment_ids=")
    num_devices = lax.axis_size(axes.context)
    seq_length = query.shape[1] * num_devices
    context_positions(seq_length, num_devices)  # an odd S is refused
    if segment_ids is not None:
        ids = lax.all_gather(halves(segment_ids), axes.context)
    else:
        ids = jnp.full(len(query), seq_length) if lengths is None else lengths
    window = resolve_window(window, seq_length)
    static_window = window if isinstance(window, int) else None
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    static = StaticMask(True, query.shape[3] ** -0.5, static_window, None, False, "auto", precision)
    traced_window = None if window is static_window else jnp.asarray(window, jnp.int32)
    return attend_zigzag(static, axes.context, query, key, value, ids.astype(jnp.int32), traced_window)
