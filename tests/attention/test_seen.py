"""Which blocks meet: all that share a pair, and where samples lie one after another no other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvarlen.attention.seen import How, Seen, block_ranges
from tests.attention.inputs import packings, rows_of_ids
from tests.attention.reference import rule

Q, T = 11, 14
QUERY_BLOCK, KEY_BLOCK = 4, 3  # neither divides its side
OFFSETS = st.lists(st.integers(-T, T), min_size=2, max_size=2)
WINDOWS = st.integers(1, T + 1)


@functools.cache
def ranges(causal, query_block, key_block):
    how = How(causal=causal, scale=1.0, window=None, offset=None, is_rows=False, implementation="blocks")

    @jax.jit
    def both(seen):
        return [block_ranges(how, seen, query_block, key_block, of=side) for side in ("queries", "keys")]

    return both


def blocks_within(query_ids, key_ids, *, offset=(0, 0), window=None, causal, blocks):
    """Pairs of blocks within the ranges of a side: (row, block of queries, block of keys)."""
    # A window that hides nothing is no window.
    window = jnp.int32(window or 10_000) if causal else None
    seen = Seen(jnp.asarray(query_ids, jnp.int32), jnp.asarray(key_ids, jnp.int32), jnp.array(offset), window)
    within = []
    for first, end in ranges(causal, *blocks)(seen):
        assert first.dtype == end.dtype == jnp.int32
        within.append(
            {
                (row, block, other)
                for row, block in np.ndindex(first.shape)
                for other in range(int(first[row, block]), int(end[row, block]))
            }
        )
    return within[0], {(row, i, j) for row, j, i in within[1]}


def blocks_with_a_pair(query_ids, key_ids, *, offset=(0, 0), window=None, causal, blocks):
    sees = rule(query_ids, key_ids, offset=offset, causal=causal, window=window)
    shape = (len(query_ids), len(query_ids[0]), len(key_ids[0]))
    return {(row, i // blocks[0], j // blocks[1]) for row, i, j in np.ndindex(shape) if sees(row, i, j)}


@pytest.mark.parametrize("causal", [True, False])
@settings(max_examples=30)
@given(query_ids=rows_of_ids(2, Q), key_ids=rows_of_ids(2, T), offset=OFFSETS, window=WINDOWS)
def test_every_block_that_shares_a_pair_is_within_the_ranges_of_both_sides(query_ids, key_ids, offset, window, causal):
    options = {"offset": offset, "window": window if causal else None, "causal": causal}
    options["blocks"] = (QUERY_BLOCK, KEY_BLOCK)
    needed = blocks_with_a_pair(query_ids, key_ids, **options)
    for within in blocks_within(query_ids, key_ids, **options):
        assert needed <= within


@pytest.mark.parametrize(("causal", "windowed"), [(True, False), (True, True), (False, False)])
@settings(max_examples=30)
@given(ids=packings(2, T), window=WINDOWS)
def test_as_many_blocks_are_visited_as_packed_samples_need(ids, window, causal, windowed):
    options = {"causal": causal, "window": window if windowed else None, "blocks": (QUERY_BLOCK, KEY_BLOCK)}
    needed = blocks_with_a_pair(ids, ids, **options)
    assert blocks_within(ids, ids, **options) == (needed, needed)


@settings(max_examples=20)
@given(query_ids=packings(2, Q), key_ids=packings(2, T))
def test_as_many_blocks_are_visited_as_packed_pairs_need(query_ids, key_ids):
    # Targets of samples that have a source: without one, what lies between its neighbors is visited.
    key_ids = [[id if id in ids else 0 for id in row] for row, ids in zip(key_ids, query_ids, strict=True)]
    query_ids = [[id if id in ids else 0 for id in row] for row, ids in zip(query_ids, key_ids, strict=True)]
    options = {"causal": False, "blocks": (QUERY_BLOCK, KEY_BLOCK)}
    needed = blocks_with_a_pair(query_ids, key_ids, **options)
    assert blocks_within(query_ids, key_ids, **options) == (needed, needed)
