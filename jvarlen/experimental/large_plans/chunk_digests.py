"""Digests of a plan whose sample ids are spread over processes: each shard hashes the chunks that it owns.

Letters: N sample ids of the plan, n of this process, p shards, C chunks, q chunks of a shard, b ids of a shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int, Int64

from jvarlen._common.checks import check_at_least_one
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import NO_MESH, local_shards, num_shards_of
from jvarlen.distributed.placement import place
from jvarlen.distributed.processes import gather_arrays
from jvarlen.experimental.large_plans.columns import run_ahead
from jvarlen.planning.plan_file import DIGEST_CHUNK, chunk_digest
from jvarlen.sorting.shard_sort import Shards, exchange, gap, has_ragged, index_dtype, send_capacity, sort_rows
from jvarlen.sorting.sharded_rows import own_parts, shard_local_rows

__all__ = ["chunk_digests", "digest_volume"]

_DIGEST = np.dtype([("chunk", np.int64), ("digest", np.uint8, 32)])


def _digest_block(num_ids: int, num_shards: int) -> int:
    """b, the sample ids whose chunks a shard owns: q = ⌈C/p⌉ chunks, or all N ids if they are fewer."""
    return min(-(-num_ids // (DIGEST_CHUNK * num_shards)) * DIGEST_CHUNK, num_ids)


def chunk_digests(
    positions: Int64[np.ndarray, " n"],
    sample_ids: Int64[np.ndarray, " n"],
    num_ids: int,
    num_samples: int,
    mesh: Mesh,
    axis_name: str,
) -> list[bytes]:
    """The digests of all chunks of a plan's sample ids. All processes call it.

    One exchange brings every id to the shard that owns its chunk. Only digests are gathered.

    Args:
      positions: where the ids of this process are among those of the plan; each position is on one process.
      sample_ids: the ids.
      num_ids: N.
      num_samples: all sample ids are below it.
      mesh: has the axis.
      axis_name: the axis of the shards.

    Returns:
      C digests, in order; the same on all processes.
    """
    num_shards = num_shards_of(mesh, axis_name)
    shards = Shards(axis_name, num_shards, 0, num_shards > 1 and has_ragged(mesh))
    block, index = _digest_block(num_ids, num_shards), index_dtype(num_samples)
    starts = np.minimum(np.arange(num_shards + 1) * block, num_ids).astype(index)
    with jax.enable_x64(True), jax.set_mesh(NO_MESH):
        rows = positions.astype(f"u{index.itemsize}"), sample_ids.astype(index)
        (ranks, ids), sizes = shard_local_rows(rows, place(Layout(), mesh, axes={"data": axis_name}))
        del rows
        blocks = own_parts(_program(mesh, shards, block)(ranks, ids, sizes, starts))
    chunks = {
        start // DIGEST_CHUNK: ids[start - starts[d] :][: min(DIGEST_CHUNK, num_ids - start)]
        for d, ids in zip(local_shards(mesh, axis_name), blocks, strict=True)
        for start in range(starts[d], starts[d + 1], DIGEST_CHUNK)
    }
    most = int(gather_arrays(np.array([len(chunks)])).max())
    own = np.full(most, -1, _DIGEST)
    own["chunk"][: len(chunks)] = list(chunks)
    for i, digest in enumerate(run_ahead(lambda chunk: chunk_digest(chunks[chunk]), chunks)):
        own["digest"][i] = np.frombuffer(digest, np.uint8)
    gathered = gather_arrays(own).ravel()
    gathered = gathered[gathered["chunk"] >= 0]
    return [digest.tobytes() for digest in gathered["digest"][np.argsort(gathered["chunk"])]]


def digest_volume(num_samples: int, num_shards: int) -> tuple[int, int]:
    """What a shard sends to other shards for the digest of `plan_distributed`, by the dense exchange.

    With i an index (4 bytes, or 8 from 2**31 − 1 samples on), n = ⌈N/p⌉, and b the ids of ⌈⌈N/2**20⌉/p⌉ chunks, or N if
    that is fewer, a shard sends p − 1 times

      (⌈n/p⌉ (deal) + ⌊b/p⌋ + p − 1 (send)) · 2i (position and id) + (p + 1)·i (cuts)

    Then every process receives the digests of all chunks, 40 bytes each with their numbers.

    Args:
      num_samples: N ≥ 1, none of them dropped, spread evenly.
      num_shards: p ≥ 1.

    Returns:
      Point-to-point messages, and bytes in all of them.

    Raises:
      ValueError: arguments that are not as described.

    Example:
      >>> digest_volume(1_000_000, 2)
      (5, 6000020)
    """
    check_at_least_one(num_samples=num_samples, num_shards=num_shards)
    p, index_bytes = num_shards, index_dtype(num_samples).itemsize
    rows = -(-num_samples // p**2) + send_capacity(_digest_block(num_samples, p), p)
    return 5 * (p - 1), (p - 1) * (rows * 2 + p + 1) * index_bytes


@functools.lru_cache(maxsize=32)
def _program(mesh: Mesh, shards: Shards, block: int) -> Callable[..., jax.Array]:
    """A jitted function of the rows, the rows of each shard, and where the blocks start; returns their ids."""
    axis, everywhere = PartitionSpec(shards.axis_name), PartitionSpec()
    body = functools.partial(_own_ids, shards=shards, block=block)
    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(axis, axis, everywhere, everywhere), out_specs=axis, check_vma=False)
    )


def _own_ids(
    ranks: jax.Array, ids: jax.Array, sizes: jax.Array, starts: jax.Array, *, shards: Shards, block: int
) -> jax.Array:
    is_row = jnp.arange(len(ranks)) < sizes[lax.axis_index(shards.axis_name)]
    return _send_to_ranks(jnp.where(is_row, ranks, gap(ranks)), ids, starts, block, shards)


def _send_to_ranks(ranks: jax.Array, columns: Any, starts: Int[Array, " p_plus_1"], block: int, shards: Shards) -> Any:
    """Brings rows whose global ranks are known to their blocks; zeros are where there is none."""
    if shards.num_shards > 1:
        (ranks,), columns = sort_rows((ranks,), columns)
        cuts = jnp.searchsorted(ranks, starts.astype(ranks.dtype)).astype(starts.dtype)
        (ranks,), columns = exchange((ranks,), columns, cuts, block, shards)
    place = ranks.astype(starts.dtype) - starts[lax.axis_index(shards.axis_name)]
    place = jnp.where(ranks == gap(ranks), block, place)

    def put(column: jax.Array) -> jax.Array:
        return jnp.zeros((block, *column.shape[1:]), column.dtype).at[place].set(column, mode="drop")

    return jax.tree.map(put, columns)
