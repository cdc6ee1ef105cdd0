"""Which samples go to which microbatch of a distributed plan.

Letters: N samples, p shards, M microbatches a step, A = M / p of them on a shard, m on this process, B rows of a
microbatch, S steps, K buckets, U rows of a microbatch in all steps together.

Counting padding rows, a plan in canonical order has U·M places: place v belongs to microbatch v mod M, and so to shard
(v mod M) // A. Bucket k begins at place P_k and at rank R_k and has n_k samples; its place v holds the sample of rank
R_k + (v − P_k) if v − P_k < n_k, and otherwise a padding row. So each shard sorts the ranks of one block of places,
moves them to their places, and deals these out, A to each shard in turn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Int64

from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import NO_MESH, num_shards_of
from jvarlen.distributed.placement import place
from jvarlen.planning.grouping import CanonicalSteps
from jvarlen.sorting.shard_sort import (
    Shards,
    deal_ranks,
    from_words,
    has_ragged,
    index_dtype,
    sort_blocks,
    words_of_shard,
)
from jvarlen.sorting.sharded_rows import own_parts, shard_local_rows

__all__ = ["Places", "make_places", "sort_to_places"]

LengthsOf = Callable[[jax.Array, jax.Array | None], jax.Array]  # from sorted keys and payload to int64 lengths

_OVERSAMPLING = 4


class Places(NamedTuple):
    """Where samples go.

    Attributes:
      first_rows: int64[S], the row of a microbatch at which each canonical step begins.
      num_rows: U.
      block: places of a shard's block, a multiple of M.
      starts: int64[p+1], the rank at which each block begins.
      place_of_bucket: int64[K+1], P_k and the end.
      rank_of_bucket: int64[K], R_k.
      num_samples: int64[K], n_k.
      num_microbatches: M.
    """

    first_rows: Int64[np.ndarray, " S"]
    num_rows: int
    block: int
    starts: Int64[np.ndarray, " p_plus_1"]
    place_of_bucket: Int64[np.ndarray, " K_plus_1"]
    rank_of_bucket: Int64[np.ndarray, " K"]
    num_samples: Int64[np.ndarray, " K"]
    num_microbatches: int


def make_places(
    steps: CanonicalSteps,
    num_samples: Int64[np.ndarray, " K"],
    rows: Int64[np.ndarray, " K"],
    num_microbatches: int,
    num_shards: int,
) -> Places:
    """Where the samples of canonical steps go.

    Args:
      steps: canonical steps.
      num_samples: int64[K], samples of each bucket.
      rows: int64[K], rows of each bucket.
      num_microbatches: M, a multiple of p.
      num_shards: p.

    Returns:
      `Places`.
    """
    ends = np.cumsum(rows[steps.bucket])
    num_rows = int(ends[-1])
    num_steps = np.bincount(steps.bucket, minlength=len(rows))
    place_of_bucket = np.cumulative_sum(num_steps * rows * num_microbatches, include_initial=True)
    rank_of_bucket = np.cumsum(num_samples) - num_samples
    block = -(-num_rows // num_shards) * num_microbatches
    first_place = np.minimum(np.arange(num_shards + 1) * block, place_of_bucket[-1])
    bucket = np.minimum(np.searchsorted(place_of_bucket, first_place, side="right") - 1, len(rows) - 1)
    in_bucket = np.minimum(first_place - place_of_bucket[bucket], num_samples[bucket])
    starts = rank_of_bucket[bucket] + in_bucket
    first_rows = ends - rows[steps.bucket]
    return Places(first_rows, num_rows, block, starts, place_of_bucket, rank_of_bucket, num_samples, num_microbatches)


def sort_to_places(
    keys: np.ndarray,
    payload: np.ndarray | None,
    places: Places,
    mesh: Mesh,
    axis_name: str,
    lengths_of: LengthsOf,
    longest: int,
) -> tuple[Int64[np.ndarray, "U m"], Int64[np.ndarray, " S"], Int64[np.ndarray, " S"]]:
    """Sorts the samples of all processes to their places.

    Args:
      keys: unsigned[n], the keys of this process's samples; they sort by bucket, and within it as ordered.
      payload: arrays that follow the keys, if `lengths_of` needs them.
      places: where they go.
      mesh: has the axis.
      axis_name: the axis of the shards.
      lengths_of: gives the tokens of samples.
      longest: what samples are cut to, in tokens.

    Returns:
      int64[U, m], the sample ids of this process's microbatches, −1 for a padding row; int64[S], the tokens of each
      canonical step in these; and int64[S], in all microbatches.
    """
    num_shards = num_shards_of(mesh, axis_name)
    shards = Shards(axis_name, num_shards, _OVERSAMPLING, num_shards > 1 and has_ragged(mesh))
    step_of_row = np.zeros(places.block * num_shards // places.num_microbatches, np.int32)
    step_of_row[places.first_rows[1:]] = 1
    step_of_row = np.cumsum(step_of_row, dtype=np.int32)
    with jax.enable_x64(True), jax.set_mesh(NO_MESH):
        columns, sizes = shard_local_rows((keys, payload), place(Layout(), mesh, axes={"data": axis_name}))
        num_steps = len(places.first_rows)
        program = _program(mesh, shards, places.block, places.num_microbatches, num_steps, longest, lengths_of)
        of_buckets = places.place_of_bucket, places.rank_of_bucket, places.num_samples
        ids, shard_tokens, num_tokens = program(*columns, sizes, places.starts, *of_buckets, step_of_row)
        own_ids = np.concatenate(own_parts(ids), axis=1)
        own_tokens = np.sum(own_parts(shard_tokens), axis=0)
        return own_ids[: places.num_rows].astype(np.int64), own_tokens, np.asarray(num_tokens.addressable_data(0))


@functools.lru_cache(maxsize=32)
def _program(
    mesh: Mesh, shards: Shards, block: int, num_microbatches: int, num_steps: int, longest: int, lengths_of: LengthsOf
) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    """A jitted function of the rows and of their places."""
    body = functools.partial(
        _place_shard,
        shards=shards,
        block=block,
        num_microbatches=num_microbatches,
        num_steps=num_steps,
        longest=longest,
        lengths_of=lengths_of,
    )
    axis, everywhere = PartitionSpec(shards.axis_name), PartitionSpec()
    in_specs, out_specs = (axis, axis, *[everywhere] * 6), (axis, axis, everywhere)
    # The sum of tokens is the same on all shards, which is not to be seen after the sort.
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def _place_shard(
    keys: jax.Array,
    payload: jax.Array | None,
    sizes: jax.Array,
    starts: jax.Array,
    place_of_bucket: jax.Array,
    rank_of_bucket: jax.Array,
    num_samples: jax.Array,
    step_of_row: jax.Array,
    *,
    shards: Shards,
    block: int,
    num_microbatches: int,
    num_steps: int,
    longest: int,
    lengths_of: LengthsOf,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What one shard does: the sample ids of its microbatches, the tokens of the steps in these, and in all."""
    d, per_shard = lax.axis_index(shards.axis_name), num_microbatches // shards.num_shards
    words = words_of_shard(keys, sizes, d, shards.num_shards)
    starts = starts.astype(index_dtype(shards.num_shards * len(keys)))
    words, payload = sort_blocks(words, payload, starts, block, shards)
    ordered, ids = from_words(words, keys.dtype)
    lengths = lengths_of(ordered, payload)

    place = d * block + jnp.arange(block)
    bucket = jnp.minimum(jnp.searchsorted(place_of_bucket, place, side="right") - 1, len(num_samples) - 1)
    in_bucket = place - place_of_bucket[bucket]
    is_row = in_bucket < num_samples[bucket]
    row = rank_of_bucket[bucket] + in_bucket - starts[d]
    ids = jnp.where(is_row, ids.at[row].get(mode="clip"), -1)
    lengths = jnp.where(is_row, jnp.minimum(lengths.at[row].get(mode="clip"), longest), 0)

    ids, lengths = (column.reshape(-1, per_shard) for column in (ids, lengths))
    if shards.num_shards > 1:
        ids, lengths = deal_ranks((ids, lengths), shards)
    num_tokens = jax.ops.segment_sum(lengths.sum(axis=1), step_of_row, num_steps, indices_are_sorted=True)
    return ids, num_tokens, lax.psum(num_tokens, shards.axis_name)
