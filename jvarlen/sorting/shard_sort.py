"""The sort of one shard: takes its rows, returns its block of the sorted whole. Runs in `shard_map`.

Letters: N rows, p shards, n rows of a shard, b rows of a block, k samples, r runs, g ranks. All shapes are static:

1. *Local sort.* Every shard sorts its rows into a run. All rows differ, at least by index, so the order is unique.
2. *Cuts.* Block d begins at the global rank `starts[d]`. How many rows of each run come before it is found exactly:
   every shard proposes k regular samples of its bracket, all samples are ranked by counting in all runs, and a bracket
   shrinks to the range between two of its neighbouring samples. After ⌊log n / log(k+1)⌋ + 1 rounds all are empty.
3. *Deal.* Row j of a run goes to shard j mod p: n/p rows for each pair of shards, whatever the keys.
4. *Send.* A shard was dealt at most ⌈L_r/p⌉ of the L_r rows which run r has for a block. As Σ L_r ≤ b, that is at most
   b/p + p − 1 rows a pair: a capacity that no input exceeds. A ragged all-to-all, where there is one, replaces 3 and 4.
5. *Merge.* A shard sorts the p·(b/p + p − 1) places that arrive; the first `starts[d+1]` − `starts[d]` are its block.

References:
  Regular samples: Shi and Schaeffer 1992, "Parallel sorting by regular sampling". Exact cuts: Varman, Scheufler, Iyer
  and Ricard 1991, "Merging multiple lists on hierarchical-memory multiprocessors". Dealing out sorted columns: Leighton
  1985, "Tight bounds on the complexity of parallel sorting".
"""

from __future__ import annotations

import functools
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int, Shaped

from jvarlen._common.types import PyTree

__all__ = [
    "Shards", "Words", "deal_ranks", "exchange", "from_words", "gap", "has_ragged", "index_dtype", "num_rounds",
    "send_capacity", "sort_blocks", "sort_rows", "to_words", "word_dtypes", "words_of_shard",
]  # fmt: skip

Words: TypeAlias = tuple[jax.Array, ...]  # unsigned integers, the most significant first; rows compare as they do

_LARGEST_SHORT_INDEX = 2**31 - 2  # shifted by one, it is still below the largest uint32, which marks a gap


class Shards(NamedTuple):
    """The shards that sort together."""

    axis_name: str
    num_shards: int
    oversampling: int  # k, samples that a shard proposes for each block in a round
    ragged: bool  # whether the backend has a ragged all-to-all


def words_of_shard(keys: jax.Array, sizes: jax.Array, d: jax.Array, num_shards: int) -> Words:
    """Sortable rows of one shard; a row's index counts the rows before it, and places without a row sort last."""
    place = jnp.arange(len(keys))
    first_index = jnp.where(jnp.arange(num_shards) < d, sizes, 0).sum()
    words = to_words(keys, first_index + place, num_shards * len(keys))
    return tuple(jnp.where(place < sizes[d], word, gap(word)) for word in words)


def sort_blocks(
    words: Words, columns: PyTree, starts: Int[Array, " p_plus_1"], block: int, shards: Shards
) -> tuple[Words, PyTree]:
    """Sorts the rows of all shards; this shard, d, gets the global ranks `starts[d]` to `starts[d+1]` − 1."""
    # What follows its rows in the b places is meaningless. Neighbours of `starts` are at most b apart.
    words, columns = sort_rows(words, columns)
    if shards.num_shards > 1:
        words, columns = sort_rows(*exchange(words, columns, _cut(words, starts, shards), block, shards))
    return jax.tree.map(functools.partial(_resize, size=block), (words, columns))


def deal_ranks(blocks: PyTree, shards: Shards) -> PyTree:
    """Interleaves consecutive blocks: rank g goes to shard g mod p, slot g // p; p divides b."""
    return jax.tree.map(lambda x: _deal(x, shards).reshape(x.shape), blocks)


def num_rounds(num_rows: int, oversampling: int) -> int:
    """Rounds of samples after which every bracket of at most `num_rows` is empty."""
    rounds = 0
    while num_rows:
        num_rows //= oversampling + 1
        rounds += 1
    return rounds


def send_capacity(block: int, num_shards: int) -> int:
    """The most rows that a shard sends to another one: b/p + p − 1."""
    return block // num_shards + num_shards - 1


def sort_rows(words: Words, columns: PyTree) -> tuple[Words, PyTree]:
    """Sorts the rows of this shard by their words; columns follow."""
    if not jax.tree.leaves(columns):
        return tuple(lax.sort(words, num_keys=len(words), is_stable=False)), columns
    place = lax.iota(jnp.int32, len(words[0]))
    *sorted_words, place = lax.sort((*words, place), num_keys=len(words), is_stable=False)
    return tuple(sorted_words), jax.tree.map(lambda column: column[place], columns)


def _cut(run: Words, starts: Int[Array, " p_plus_1"], shards: Shards) -> Int[Array, " p_plus_1"]:
    """integers[p+1], how many rows of this shard's run are of ranks below each start."""
    k, num_rows = shards.oversampling, len(run[0])
    targets = starts[1:]
    is_own = (jnp.arange(shards.num_shards) == lax.axis_index(shards.axis_name))[:, None, None].astype(starts.dtype)
    sample = jnp.arange(1, k + 1, dtype=jnp.int64)

    def narrow(_: Array, bracket: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first, last = bracket
        # Regular samples, always below `last`; a bracket that is empty already proposes what changes nothing.
        width = (last - first)[:, None].astype(jnp.int64)
        place_pxk = first[:, None] + (width * sample // (k + 1)).astype(starts.dtype)
        is_open = (first < last)[:, None]
        proposed = tuple(jnp.where(is_open, word.at[place_pxk].get(mode="clip"), gap(word)) for word in run)
        samples_pxpxk = lax.all_gather(proposed, shards.axis_name)
        below_pxpxk = _count_less(run, samples_pxpxk, starts.dtype)
        rank_pxpxk = lax.psum(below_pxpxk, shards.axis_name)
        is_before = rank_pxpxk < targets[:, None]
        # A sample before the start is itself before it, as well as all that is less.
        first = jnp.maximum(first, jnp.where(is_before, below_pxpxk + is_own, 0).max(axis=(0, 2)))
        last = jnp.minimum(last, jnp.where(is_before, num_rows, below_pxpxk).min(axis=(0, 2)))
        return first, last

    first, _ = lax.fori_loop(
        0, num_rounds(num_rows, k), narrow, (jnp.zeros_like(targets), jnp.full_like(targets, num_rows))
    )
    return jnp.concatenate([jnp.zeros(1, starts.dtype), first])


def _count_less(run: Words, rows: Words, dtype: np.dtype) -> Int[Array, "*shape"]:
    """How many rows of a sorted run are less than each of the given ones, by bisection."""
    num_rows = len(run[0])

    def halve(_: Array, bracket: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first, last = bracket
        middle = (first + last) // 2
        is_less = (first < last) & _is_less(tuple(word.at[middle].get(mode="clip") for word in run), rows)
        return jnp.where(is_less, middle + 1, first), jnp.where(is_less, last, middle)

    shape = rows[0].shape
    bracket = jnp.zeros(shape, dtype), jnp.full(shape, num_rows, dtype)
    first, _ = lax.fori_loop(0, num_rows.bit_length(), halve, bracket)
    return first


def _is_less(rows: Words, others: Words) -> Bool[Array, "*shape"]:
    """Lexicographic comparison."""
    is_less = rows[-1] < others[-1]
    for row, other in zip(reversed(rows[:-1]), reversed(others[:-1]), strict=True):
        is_less = (row < other) | ((row == other) & is_less)
    return is_less


def exchange(
    words: Words, columns: PyTree, cuts: Int[Array, " p_plus_1"], block: int, shards: Shards
) -> tuple[Words, PyTree]:
    """Sends the rows of a sorted run to their blocks; block d begins at row `cuts[d]` of this shard's run."""
    cuts_pxp1 = lax.all_gather(cuts, shards.axis_name)
    send = _exchange_ragged if shards.ragged else _exchange_dense
    return send(words, columns, cuts_pxp1, block, shards)


def _exchange_dense(
    words: Words, columns: PyTree, cuts_pxp1: Int[Array, "p p_plus_1"], block: int, shards: Shards
) -> tuple[Words, PyTree]:
    """Deals the runs out, then sends each dealt row to its block: two all-to-alls whose shapes no key changes."""
    p = shards.num_shards
    per_run = -(-len(words[0]) // p)
    # What is beyond the last cut goes nowhere. To leave it out makes this exchange wait for the cuts: XLA's CPU backend
    # (JAX 0.10) reorders a collective and a loop of collectives in programs that it loads, and then devices deadlock.
    is_sent = jnp.arange(len(words[0])) < cuts_pxp1[lax.axis_index(shards.axis_name), -1]

    def deal(rows: jax.Array) -> jax.Array:
        sent = jnp.where(is_sent.reshape(-1, *[1] * (rows.ndim - 1)), rows, jnp.zeros((), rows.dtype))
        return _deal(_resize(sent, per_run * p), shards)

    dealt = jax.tree.map(deal, (words, columns))
    # Row q of what was dealt from a run was its row q·p + d.
    first_rxp1 = (cuts_pxp1 - lax.axis_index(shards.axis_name) + p - 1) // p
    count_pxr = jnp.diff(first_rxp1).T
    end_pxr = jnp.cumsum(count_pxr, axis=1)
    # Row s of what goes to a block is row s + shift of all that was dealt.
    shift_pxr = jnp.arange(p) * per_run + first_rxp1[:, :-1].T - (end_pxr - count_pxr)
    slot = jnp.arange(send_capacity(block, p))
    run_pxs = jax.vmap(lambda end: jnp.searchsorted(end, slot, side="right"))(end_pxr)
    is_row_pxs = run_pxs < p
    place_pxs = slot + jnp.take_along_axis(shift_pxr, jnp.minimum(run_pxs, p - 1), axis=1)

    words, columns = jax.tree.map(lambda x: _flat(x).at[place_pxs].get(mode="clip"), dealt)
    words = tuple(jnp.where(is_row_pxs, word, gap(word)) for word in words)

    def send(rows_pxs: jax.Array) -> jax.Array:
        return _flat(lax.all_to_all(rows_pxs, shards.axis_name, split_axis=0, concat_axis=0))

    return jax.tree.map(send, (words, columns))


def _exchange_ragged(
    words: Words, columns: PyTree, cuts_pxp1: Int[Array, "p p_plus_1"], block: int, shards: Shards
) -> tuple[Words, PyTree]:
    """Sends each row directly to its block."""
    d = lax.axis_index(shards.axis_name)
    count_rxp = jnp.diff(cuts_pxp1)
    before_rxp = jnp.cumsum(count_rxp, axis=0) - count_rxp  # where a run's rows begin in each block
    sizes = [cuts_pxp1[d, :-1], count_rxp[d], before_rxp[d], count_rxp[:, d]]
    input_offsets, send_sizes, output_offsets, recv_sizes = (size.astype(jnp.int32) for size in sizes)

    def send(column: jax.Array, gap: np.ndarray) -> jax.Array:
        output = jnp.full((block, *column.shape[1:]), gap, column.dtype)
        return lax.ragged_all_to_all(
            column, output, input_offsets, send_sizes, output_offsets, recv_sizes, axis_name=shards.axis_name
        )

    columns = jax.tree.map(lambda column: send(column, np.zeros((), column.dtype)), columns)
    return tuple(send(word, gap(word)) for word in words), columns


def _deal(rows: jax.Array, shards: Shards) -> jax.Array:
    """[p, n/p, …]: of every shard the rows whose place, mod p, is this shard; p divides n."""
    by_place = rows.reshape(len(rows) // shards.num_shards, shards.num_shards, *rows.shape[1:])
    return lax.all_to_all(by_place, shards.axis_name, split_axis=1, concat_axis=0)


def _flat(rows: jax.Array) -> jax.Array:
    """The first two axes as one."""
    return rows.reshape(rows.shape[0] * rows.shape[1], *rows.shape[2:])


def gap(word: jax.Array) -> np.ndarray:
    """The value of a place without a row; it sorts after all rows."""
    return np.array(np.iinfo(word.dtype).max, word.dtype)


def _resize(rows: jax.Array, size: int) -> jax.Array:
    """The first rows, or all and zeros after them."""
    missing = max(0, size - len(rows))
    return jnp.pad(rows[:size], [(0, missing)] + [(0, 0)] * (rows.ndim - 1))


def has_ragged(mesh: Mesh) -> bool:
    """Whether the backend has a ragged all-to-all: not that of CPUs."""
    return mesh.devices.flat[0].platform != "cpu"


# Keys and row indices as unsigned integers that sort like the rows, and back. These sort several times faster than
# pairs, and a row with a 32-bit key fits into one of them. Only bits are handled, so no backend can flush a subnormal
# number to zero. Where 64-bit types are enabled.


def index_dtype(num_rows: int) -> np.dtype:
    """int32 if it can number all rows, otherwise int64."""
    return np.dtype(np.int32 if num_rows <= _LARGEST_SHORT_INDEX else np.int64)


def word_dtypes(key_dtype: np.dtype, num_rows: int) -> tuple[np.dtype, ...]:
    """The types of the words of a row: one uint64 if it holds a key and an index, otherwise two words."""
    key_bits = np.dtype(_unsigned_type(_wide_type(key_dtype))).itemsize * 8
    index_bits = index_dtype(num_rows).itemsize * 8
    if key_bits == index_bits == 32:
        return (np.dtype(np.uint64),)
    return np.dtype(f"uint{key_bits}"), np.dtype(f"uint{index_bits}")


def to_words(keys: Shaped[Array, " n"], index: Int[Array, " n"], num_rows: int) -> Words:
    """Words of rows that sort by key, then by index; the lowest bit of all says whether the key is −0.0."""
    dtypes = word_dtypes(keys.dtype, num_rows)
    bits, is_negative_zero = _sortable_bits(keys)
    last = (index.astype(dtypes[-1]) << 1) | is_negative_zero.astype(dtypes[-1])
    if len(dtypes) == 1:
        return (bits.astype(dtypes[0]) << 32 | last,)
    return bits, last


def from_words(words: Words, key_dtype: np.dtype) -> tuple[Shaped[Array, " n"], Int[Array, " n"]]:
    """Keys and indices of words; those of the largest words, which stand for no row, are meaningless."""
    if len(words) == 1:
        bits, last = (words[0] >> 32).astype(jnp.uint32), words[0].astype(jnp.uint32)
    else:
        bits, last = words
    index = (last >> 1).astype(jnp.int32 if last.dtype == jnp.uint32 else jnp.int64)
    wide = _wide_type(key_dtype)
    sign = _sign_bit(_unsigned_type(wide))
    if jnp.issubdtype(wide, jnp.signedinteger):
        bits ^= sign
    elif jnp.issubdtype(wide, jnp.floating):
        bits = jnp.where(bits >= sign, bits ^ sign, ~bits)
        bits = jnp.where((last & 1).astype(bool), sign, bits)
    return lax.bitcast_convert_type(bits, wide).astype(key_dtype), index


def _wide_type(dtype: np.dtype) -> np.dtype:
    """The type of 32 or 64 bits that holds all values of a type."""
    if np.dtype(dtype).itemsize >= 4:
        return np.dtype(dtype)
    kinds = ((jnp.floating, np.float32), (jnp.signedinteger, np.int32), (jnp.unsignedinteger, np.uint32))
    return np.dtype(next(wide for kind, wide in kinds if jnp.issubdtype(dtype, kind)))


def _unsigned_type(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"uint{np.dtype(dtype).itemsize * 8}")


def _sign_bit(unsigned: np.dtype) -> np.ndarray:
    return np.array(1 << (unsigned.itemsize * 8 - 1), unsigned)


def _sortable_bits(keys: Shaped[Array, " n"]) -> tuple[Shaped[Array, " n"], Bool[Array, " n"]]:
    """Unsigned integers in the order of the keys, and which keys are −0.0, which those do not tell from 0.0."""
    wide = keys.astype(_wide_type(keys.dtype))
    unsigned = _unsigned_type(wide.dtype)
    sign = _sign_bit(unsigned)
    bits = lax.bitcast_convert_type(wide, unsigned)
    is_negative_zero = jnp.zeros(bits.shape, bool)
    if jnp.issubdtype(wide.dtype, jnp.signedinteger):
        bits ^= sign
    elif jnp.issubdtype(wide.dtype, jnp.floating):
        infinity = np.array(np.inf, wide.dtype).view(unsigned)
        magnitude = bits & ~sign
        is_negative_zero = bits == sign
        # One NaN for all, positive, so that it comes after infinity and only the index orders them.
        bits = jnp.where(magnitude > infinity, np.array(np.nan, wide.dtype).view(unsigned) & ~sign, bits)
        bits = jnp.where(is_negative_zero, 0, bits)
        bits = jnp.where(bits >= sign, ~bits, bits | sign)
    return bits, is_negative_zero
