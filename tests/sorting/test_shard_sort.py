"""Sort of one shard: the bounds that its docstring claims, on the keys that are worst for them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jvarlen.sorting.shard_sort import Shards, _cut, deal_ranks, send_capacity, sort_blocks
from tests.support.meshes import data_mesh

AXIS = PartitionSpec("data")


def on_shards(function, num_shards):
    """A function of arrays whose leading axes are spread over shards: what the given one gives on every shard."""
    mesh = data_mesh(num_shards)
    program = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=AXIS, out_specs=AXIS, check_vma=False))

    def run(*arrays):
        with jax.enable_x64(True):
            return jax.tree.map(np.asarray, program(*arrays))

    return run


def distinct(num_rows, rng):
    """Distinct words on the shards, in three orders."""
    words = rng.permutation(num_rows * 10)[:num_rows].astype(np.uint64)
    return words, np.sort(words), np.sort(words)[::-1].copy()


@pytest.mark.parametrize("oversampling", [1, 4, 31])
@pytest.mark.parametrize("num_shards", [2, 3, 4])
def test_cuts_are_exact(num_shards, oversampling):
    rng = np.random.default_rng(0)
    in_any_order = distinct(num_shards * 37, rng)
    starts = np.sort(rng.integers(0, num_shards * 37 + 1, num_shards + 1))
    starts[0] = 0
    shards = Shards("data", num_shards, oversampling, ragged=False)
    cut = on_shards(lambda run: _cut((jnp.sort(run),), jnp.asarray(starts), shards), num_shards)
    for words in in_any_order:
        in_order = np.append(np.sort(words), np.iinfo(np.uint64).max)
        expected = [[(run < in_order[start]).sum() for start in starts] for run in words.reshape(num_shards, -1)]
        assert (cut(words).reshape(num_shards, -1) == expected).all()


@pytest.mark.parametrize("num_shards", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("case", ["own", "spread", "one run", "random"])
def test_no_keys_exceed_the_send_capacity(num_shards, case):
    """Rows dealt to a shard from runs that have L_r of a block's b rows: never more than the capacity."""
    rng = np.random.default_rng(1)
    fullest = 0
    for _ in range(300):
        block = int(rng.integers(1, 20)) * num_shards
        if case == "one run":
            of_run = np.eye(num_shards, dtype=int)[rng.integers(num_shards)] * block
        elif case == "spread":  # the worst: one row more than a multiple of p in all runs but one
            of_run = np.full(num_shards, 1)
            of_run[0] = max(0, block - num_shards + 1)
        else:
            of_run = rng.multinomial(block, rng.dirichlet(np.full(num_shards, 0.3 if case == "own" else 3.0)))
        first = rng.integers(0, 3 * num_shards, num_shards)
        if case == "spread":
            first = np.zeros(num_shards, int)
        dealt = [
            sum(len(range(f + (d - f) % num_shards, f + n, num_shards)) for f, n in zip(first, of_run, strict=True))
            for d in range(num_shards)
        ]
        fullest = max(fullest, max(dealt) - block // num_shards)
        assert max(dealt) <= send_capacity(block, num_shards)
    if case == "spread":
        assert fullest == num_shards - 1  # the capacity is reached, so it cannot be smaller


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4])
def test_blocks_are_the_ranks_that_were_asked_for(num_shards):
    starts = np.array([0, 3, 3, 61, 100][: num_shards + 1])  # an empty block, and ranks that nobody gets
    block = int(np.diff(starts).max())
    shards = Shards("data", num_shards, 4, ragged=False)

    def sort(words, payload):
        (words,), payload = sort_blocks((words,), payload, jnp.asarray(starts), block, shards)
        return words, payload

    sort_on_shards = on_shards(sort, num_shards)
    for words in distinct(num_shards * 50, np.random.default_rng(2)):
        words_out, payload_out = sort_on_shards(words, (words * 2).astype(np.int64))
        for d in range(num_shards):
            size = starts[d + 1] - starts[d]
            expected = np.sort(words)[starts[d] : starts[d + 1]]
            assert (words_out.reshape(num_shards, -1)[d, :size] == expected).all()
            assert (payload_out.reshape(num_shards, -1)[d, :size] == expected * 2).all()


def test_two_words_compare_as_one_number():
    rng = np.random.default_rng(3)
    high, low = rng.integers(0, 3, 80).astype(np.uint64), rng.permutation(80).astype(np.uint32)
    shards = Shards("data", 4, 2, ragged=False)

    def sort(high, low):
        return sort_blocks((high, low), None, jnp.arange(5) * 20, 20, shards)[0]

    sorted_high, sorted_low = on_shards(sort, 4)(high, low)
    order = np.lexsort((low, high))
    assert (sorted_high == high[order]).all()
    assert (sorted_low == low[order]).all()


def test_consecutive_blocks_are_dealt_like_cards():
    ranks = np.arange(32)
    dealt = on_shards(functools.partial(deal_ranks, shards=Shards("data", 4, 1, ragged=False)), 4)(ranks)
    assert (dealt.reshape(4, 8) == ranks.reshape(8, 4).T).all()


def emulated_ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """What the documentation of the real one says, by gathering everything."""
    gather = functools.partial(jax.lax.all_gather, axis_name=axis_name)
    operands, starts, sizes, places = map(gather, (operand, input_offsets, send_sizes, output_offsets))
    d = jax.lax.axis_index(axis_name)
    row = jnp.arange(len(output))
    for source in range(len(recv_sizes)):
        start, size, place = starts[source, d], sizes[source, d], places[source, d]
        # Only what the receiver expects arrives.
        is_from = (row >= place) & (row < place + jnp.minimum(size, recv_sizes[source]))
        taken = operands[source].at[start + row - place].get(mode="clip")
        output = jnp.where(is_from.reshape(-1, *[1] * (output.ndim - 1)), taken, output)
    return output


@pytest.mark.parametrize("num_shards", [2, 3, 4])
def test_the_ragged_exchange_gives_the_same(num_shards, monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated_ragged_all_to_all)
    num_rows = num_shards * 40 - 5
    starts = jnp.asarray(np.minimum(np.arange(num_shards + 1) * 40, num_rows))

    def sort(words, payload, ragged):
        shards = Shards("data", num_shards, 4, ragged)
        (words,), payload = sort_blocks((words,), payload, starts, 40, shards)
        return words, payload

    dense, ragged = (on_shards(functools.partial(sort, ragged=r), num_shards) for r in (False, True))
    for words in distinct(num_shards * 40, np.random.default_rng(4)):
        payload = np.stack([words, words + 1], axis=1)
        for one, other in zip(dense(words, payload), ragged(words, payload), strict=True):
            assert (one[:num_rows] == other[:num_rows]).all()
