"""Which keys a query sees, from the data: as masks, and as the blocks that a block meets.

Letters: B rows, Q queries of a row, T keys, I blocks of queries, J blocks of keys.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Integer

from jvarlen._common.answers import find_answers
from jvarlen._common.checks import UserError

__all__ = [
    "UNSEEN", "Inputs", "MaskArrays", "StaticMask", "block_ranges", "is_seen", "masks_of_answers", "padding_mask",
    "query_places", "resolve_window", "segment_mask", "varying_axes",
]  # fmt: skip

UNSEEN = float(np.finfo(np.float32).min)  # the logarithm of the sum of no powers; finite, so that there is no NaN


class StaticMask(NamedTuple):
    """The part of a mask that is known when a program is compiled, the same for all rows, and how to compute it."""

    causal: bool
    scale: float  # of the products of queries and keys
    window: int | None  # how many keys a causal query sees at most; None: as `MaskArrays.window`
    offset: int | None  # the position of the first query; None: as `MaskArrays.offset`
    is_rows: bool  # whether a row is one sample of queries and keys alike, from its first position
    implementation: str
    precision: str | None = None  # `jax_default_matmul_precision` where `attend` was called
    num_samples: int | None = None  # the most of a row, whose keys are its queries and whose ids are 1 to this


class MaskArrays(NamedTuple):
    """The part of a mask that is data: a query sees keys of the same id, up to its position, within its window."""

    query_ids: Int32[Array, "B Q"]  # 0: no token, which sees nothing
    key_ids: Int32[Array, "B T"]
    # The position of the first query, where that of the first key is 0; or of each query, less its place.
    offset: Int32[Array, " B"] | Int32[Array, "B Q"]
    window: Int32[Array, ""] | None  # at least 1; None: all


class Inputs(NamedTuple):
    """The arrays that attention is computed from."""

    query: Float[Array, "B Q H K"]
    key: Float[Array, "B T N K"]
    value: Float[Array, "B T N K"]
    masks: MaskArrays


def query_places(masks: MaskArrays, length: int) -> Int32[Array, "B _"]:
    """The positions of the queries of rows that are filled up to a length."""
    offset = masks.offset
    offset = offset[:, None] if offset.ndim == 1 else jnp.pad(offset, ((0, 0), (0, length - offset.shape[1])))
    return offset + jnp.arange(length, dtype=jnp.int32)


def masks_of_answers(masks: MaskArrays, answer_ids: Int32[Array, "B Q"]) -> tuple[MaskArrays, MaskArrays]:
    """The keys that each query sees of its own answer or prompt, and those of the prompt that its answer follows."""
    ids, is_answer = masks.query_ids, answer_ids != 0
    own_ids, shifts = find_answers(ids, answer_ids)
    # As if the answer came right after its prompt.
    prompt = MaskArrays(jnp.where(is_answer, ids, 0), jnp.where(is_answer, 0, ids), -shifts, masks.window)
    return masks._replace(query_ids=own_ids, key_ids=own_ids), prompt


def is_seen(
    static: StaticMask,
    window: Int32[Array, ""] | None,
    query_ids: Int32[Array, "... Q"],
    key_ids: Int32[Array, "... T"],
    query_places: Int32[Array, "... Q"],
    key_places: Int32[Array, "... T"],
    *,
    keys_first: bool = False,
) -> Bool[Array, "... Q T"]:
    """Whether queries of these ids and positions see such keys; `keys_first` gives [..., T, Q]."""
    expand_query, expand_key = (
        functools.partial(jnp.expand_dims, axis=axis) for axis in ((-2, -1) if keys_first else (-1, -2))
    )
    is_same = (expand_query(query_ids) == expand_key(key_ids)) & expand_query(query_ids != 0)
    if not static.causal:
        return is_same
    distance = expand_query(query_places) - expand_key(key_places)
    most = window if static.window is None else static.window
    return is_same & (distance >= 0) & (True if most is None else distance < most)


@functools.partial(jax.jit, static_argnums=(0, 2, 3), static_argnames="of")
def block_ranges(
    static: StaticMask,
    masks: MaskArrays,
    query_block: int,
    key_block: int,
    *,
    of: Literal["queries", "keys"] = "queries",
) -> tuple[Int32[Array, "B I"], Int32[Array, "B I"]]:
    """The first block of keys that each block of queries meets, and the end of the blocks; or the other way round.

    The end is 0 for a block that meets none. All blocks that share a pair are within; those between the first and the
    last share one too where the ids of a row ascend.
    """
    queries = _Blocks.of(masks.query_ids, masks, query_block)
    keys = _Blocks.of(masks.key_ids, masks._replace(offset=jnp.zeros(len(masks.key_ids), jnp.int32)), key_block)
    q, k = (jax.tree.map(lambda leaf, i=i: jnp.expand_dims(leaf, i), x) for x, i in ((queries, 2), (keys, 1)))
    meets = (q.least_id <= k.largest_id) & (k.least_id <= q.largest_id) & q.has_tokens & k.has_tokens
    if static.causal:
        meets &= k.first <= q.last
        window = masks.window if static.window is None else static.window
        if window is not None:
            meets &= q.first - k.last < window
    if of == "keys":
        meets = jnp.swapaxes(meets, 1, 2)
    places = jnp.arange(meets.shape[2], dtype=jnp.int32)
    # Neither depends on the other, so that one kernel finds both.
    first = jnp.min(jnp.where(meets, places, meets.shape[2]), axis=2)
    return first, jnp.max(jnp.where(meets, places + 1, 0), axis=2)


class _Blocks(NamedTuple):
    """Limits of the tokens of each block, int32[B, blocks]."""

    least_id: Array
    largest_id: Array
    first: Array  # positions
    last: Array
    has_tokens: Array

    @classmethod
    def of(cls, ids: Int32[Array, "B T"], masks: MaskArrays, size: int) -> _Blocks:
        padded = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % size)))
        places = query_places(masks, padded.shape[1])
        ids_BxIxC, places_BxIxC = (x.reshape(len(ids), -1, size) for x in (padded, places))
        is_token = ids_BxIxC != 0
        limits = jnp.iinfo(jnp.int32)

        def least(values: Array) -> Array:
            return jnp.min(jnp.where(is_token, values, limits.max), axis=2)

        def largest(values: Array) -> Array:
            return jnp.max(jnp.where(is_token, values, limits.min), axis=2)

        return cls(
            least(ids_BxIxC), largest(ids_BxIxC), least(places_BxIxC), largest(places_BxIxC), is_token.any(axis=2)
        )


def varying_axes(array: Array) -> frozenset[str]:
    """The mesh axes over which an array varies, inside a `shard_map` that checks it; else none."""
    axes: frozenset[str] = jax.typeof(array).manual_axis_type.varying
    return axes


def resolve_window(
    window: int | np.integer | Integer[Array, ""] | None, seq_length: int, *, causal: bool = True
) -> int | Int32[Array, ""] | None:
    """The window of rows of this length: None if it hides nothing, an int, or an array of at least 1."""
    window = int(window) if isinstance(window, np.integer) else window
    if window is None or (isinstance(window, int) and not 0 < window < seq_length):
        return None
    if not causal:
        raise UserError("a window is for causal attention: leave window= out, or causal=False")
    return window if isinstance(window, int) else jnp.where(window > 0, window, jnp.int32(seq_length)).astype(jnp.int32)


def padding_mask(lengths: Integer[Array, " B"], seq_length: int) -> Bool[Array, "B T"]:
    """Which positions hold tokens.

    Args:
      lengths: int[B] of any integer type, tokens a row; 0 for a padding row.
      seq_length: T.

    Returns:
      bool[B, T], True on tokens.

    Example:
      >>> padding_mask(jnp.array([2, 0]), 3).tolist()
      [[True, True, False], [False, False, False]]
    """
    return jnp.arange(seq_length) < lengths[:, None]


def segment_mask(
    query_segments: Integer[Array, "B Q"],
    key_segments: Integer[Array, "B T"],
    *,
    causal: bool = True,
    window: int | Integer[Array, ""] | None = None,
) -> Bool[Array, "B Q T"]:
    """Which positions (last axis) the queries (middle axis) of packed rows may attend to: those of their sample.

    `mask[:, None]` has the axis of heads that `jax.nn.dot_product_attention` expects. For padded rows, pass
    `padding_mask(lengths, seq_length).astype(int)` as segments.

    Args:
      query_segments: int[B, Q] of any integer type, the segments of the first positions; of any without `causal`.
      key_segments: int[B, T], the segments of all positions.
      causal: whether a position sees only itself and what comes before it.
      window: how many keys a causal query sees at most, as in `attend`.

    Returns:
      bool[B, Q, T].

    Example:
      >>> segments = jnp.array([[1, 1, 2, 0]])
      >>> segment_mask(segments, segments).astype(int).tolist()
      [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]]
    """
    is_same_BxQxT = query_segments[:, :, None] == key_segments[:, None, :]
    window = resolve_window(window, key_segments.shape[1], causal=causal)
    if not causal:
        return is_same_BxQxT
    distance_QxT = jnp.arange(query_segments.shape[1])[:, None] - jnp.arange(key_segments.shape[1])
    is_before_QxT = (distance_QxT >= 0) if window is None else (distance_QxT >= 0) & (distance_QxT < window)
    return is_same_BxQxT & is_before_QxT
