"""How evenly a sort spreads its rows over the shards, and how much it sends.

Letters: N rows, p shards, n rows a shard, k samples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float64, Int64, Integer, Shaped

from jvarlen._common.checks import UserError, check_at_least_one, check_choices, is_integer
from jvarlen._common.terminal import text_table
from jvarlen.distributed.mesh import NO_MESH
from jvarlen.sorting.sample_sort import Result
from jvarlen.sorting.shard_sort import index_dtype, num_rounds, send_capacity, word_dtypes

__all__ = ["ExchangeVolume", "ShardBalance", "balance_table", "exchange_volume", "shard_balance"]


class ExchangeVolume(NamedTuple):
    """The messages that a shard sends to other shards in one exchange.

    Attributes:
      messages: point-to-point messages; an all-to-all or an all-gather is p − 1 of them, an all-reduce 2(p − 1).
      num_bytes: bytes in all of them.
    """

    messages: int
    num_bytes: int


def exchange_volume(
    num_rows: int,
    num_shards: int,
    *,
    dtype: npt.DTypeLike = np.int32,
    result: Result = "interleaved",
    oversampling: int = 4,
) -> ExchangeVolume:
    """What `sample_sort` sends by the dense exchange, without payload; it does not depend on the keys.

    With w bytes a row and i an index (4, or 8 from 2**31 − 1 rows on), n = ⌈N/p⌉, n' = n rounded up to a multiple of p,
    b = n' (block result: n), c = ⌊b/p⌋ + p − 1 and R = ⌊log n / log(k+1)⌋ + 1 rounds, a shard sends p − 1 times

      n'/p·w (deal) + c·w (send) + b/p·w (interleave) + R·(p·k·w + 2·p·k·i) (samples, and a ring all-reduce of their
      ranks) + (p + 1)·i (cuts)

    and, for floats, 48 bytes more to report NaN keys.

    Args:
      num_rows: N ≥ 0.
      num_shards: p ≥ 1.
      dtype: of the keys, integers or floats of at most 64 bits.
      result: as in `sample_sort`.
      oversampling: k ≥ 1.

    Returns:
      `ExchangeVolume`.

    Raises:
      ValueError: arguments that are not as described.

    Example:
      >>> exchange_volume(1_000_000, 2)
      ExchangeVolume(messages=31, num_bytes=6001172)
    """
    check_at_least_one(num_shards=num_shards, oversampling=oversampling)
    check_choices(result=(result, Result))
    if not is_integer(num_rows) or num_rows < 0:
        raise UserError(f"num_rows must be an integer of at least 0, not {num_rows!r}")
    dtype = np.dtype(dtype)
    is_float = jnp.issubdtype(dtype, jnp.floating)
    if not (is_float or jnp.issubdtype(dtype, jnp.integer)) or dtype.itemsize > 8:
        raise UserError(f"keys are integers or floats of at most 64 bits, not {dtype}")
    p, n = num_shards, -(-num_rows // num_shards)
    if n == 0 or p == 1:
        return ExchangeVolume(0, 0)
    words = word_dtypes(dtype, p * n)
    is_interleaved = result == "interleaved"
    per_run = -(-n // p)
    block = per_run * p if is_interleaved else n
    rounds = num_rounds(n, oversampling)
    rows = per_run + send_capacity(block, p) + per_run * is_interleaved + rounds * p * oversampling
    index_bytes = index_dtype(p * n).itemsize
    other_bytes = (rounds * 2 * p * oversampling + p + 1) * index_bytes + 48 * is_float
    columns = len(words) * (2 + is_interleaved + rounds)
    return ExchangeVolume(
        messages=(p - 1) * (columns + 2 * rounds + 1 + is_float),
        num_bytes=(p - 1) * (rows * sum(word.itemsize for word in words) + other_bytes),
    )


class ShardBalance(NamedTuple):
    """How evenly sorted samples lie on shards that work synchronously, one slot after the other.

    Attributes:
      rows: int64[p], samples of each shard.
      work: float64[p], the sum of each shard's keys: its tokens, if keys are lengths. NaN if some key is negative or
        not finite, and so is not work, or if the sum is not finite.
      waiting: the share of the shards' time spent waiting for the one with the most work at the same slot, in [0, 1);
        NaN likewise.
    """

    rows: Int64[np.ndarray, " p"]
    work: Float64[np.ndarray, " p"]
    waiting: float


def shard_balance(
    keys: Shaped[jax.Array | np.ndarray, " places"],
    indices: Integer[jax.Array | np.ndarray, " places"],
    num_shards: int,
) -> ShardBalance:
    """How evenly the result of `sample_sort` is spread over its shards.

    Args:
      keys: integers or floats[p·n], of JAX or NumPy: the work of each sample.
      indices: integers[p·n], −1 where there is no sample.
      num_shards: p ≥ 1.

    Returns:
      `ShardBalance`.

    Raises:
      ValueError: keys and indices do not have p·n places each.
    """
    check_at_least_one(num_shards=num_shards)
    if keys.shape != indices.shape or keys.ndim != 1 or keys.size % num_shards:
        shapes = f"{list(keys.shape)} and {list(indices.shape)}"
        raise UserError(f"keys and indices must have as many places on each of {num_shards} shards, not {shapes}")
    sharding = getattr(keys, "sharding", None)
    everywhere = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    with jax.enable_x64(True), jax.set_mesh(NO_MESH):
        rows, work, longest, is_work = map(np.asarray, _balance_program(num_shards, everywhere)(keys, indices))
    if not is_work:
        return ShardBalance(rows, np.full(num_shards, np.nan), float("nan"))
    busy = float(longest) * num_shards
    return ShardBalance(rows, work, 1.0 - float(work.sum()) / busy if busy else 0.0)


def balance_table(balances: dict[str, ShardBalance]) -> str:
    """A table of balances: rows and work of the emptiest and of the fullest shard, and the waiting.

    Args:
      balances: the balances to show, by name.

    Returns:
      Lines of text.
    """
    cells = [("", "rows a shard", "work a shard", "waiting")]
    for name, balance in balances.items():
        is_work = not np.isnan(balance.waiting)
        work = f"{balance.work.min():,.0f} to {balance.work.max():,.0f}" if is_work else "–"
        waiting = f"{balance.waiting:.2%}" if is_work else "–"
        cells.append((name, f"{balance.rows.min():,} to {balance.rows.max():,}", work, waiting))
    return text_table(cells)


@functools.lru_cache(maxsize=32)
def _balance_program(num_shards: int, everywhere: NamedSharding | None) -> Callable[..., tuple[jax.Array, ...]]:
    return jax.jit(functools.partial(_balance, num_shards=num_shards), out_shardings=everywhere)


def _balance(keys: jax.Array, indices: jax.Array, num_shards: int) -> tuple[jax.Array, ...]:
    """Rows and work of each shard, the sum over the slots of the most work in any shard, and whether it is work."""
    is_row = indices.reshape(num_shards, indices.size // num_shards) >= 0
    work = jnp.where(is_row, keys.reshape(num_shards, keys.size // num_shards), 0).astype(jnp.float64)
    longest = work.max(axis=0, initial=0.0).sum()
    # No sum is above that of p shards that all have the most work in every slot.
    is_work = (work >= 0).all() & jnp.isfinite(longest * num_shards)
    return is_row.sum(axis=1), work.sum(axis=1), longest, is_work
