"""Collectives inside `jax.shard_map`, as messages of one `ppermute` each, by ring, tree and star.

- `shard_map`: all of them. `wire`: the bytes that they send, and the seconds that they take.
"""

from jvarlen.experimental.collectives.shard_map import (
    all_gather,
    all_reduce,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)

__all__ = ["all_gather", "all_reduce", "broadcast", "gather", "reduce", "reduce_scatter", "scatter"]
