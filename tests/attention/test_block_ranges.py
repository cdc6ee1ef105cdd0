"""Which blocks meet: all that share a pair, and where samples lie one after another no other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvarlen.attention import blocks, dense, splash, triton
from jvarlen.attention.masks import UNSEEN, Inputs, MaskArrays, StaticMask, block_ranges
from tests.attention.inputs import packings, random_qkv, rows_of_ids
from tests.attention.reference import rule

Q, T = 11, 14
QUERY_BLOCK, KEY_BLOCK = 4, 3  # neither divides its side
OFFSETS = st.lists(st.integers(-T, T), min_size=2, max_size=2)
WINDOWS = st.integers(1, T + 1)


@functools.cache
def ranges(causal, query_block, key_block):
    static = StaticMask(causal=causal, scale=1.0, window=None, offset=None, is_rows=False, implementation="blocks")

    @jax.jit
    def both(masks):
        return [block_ranges(static, masks, query_block, key_block, of=side) for side in ("queries", "keys")]

    return both


def blocks_within(query_ids, key_ids, *, offset=(0, 0), window=None, causal, blocks):
    """Pairs of blocks within the ranges of a side: (row, block of queries, block of keys)."""
    # A window that hides nothing is no window.
    window = jnp.int32(window or 10_000) if causal else None
    masks = MaskArrays(jnp.asarray(query_ids, jnp.int32), jnp.asarray(key_ids, jnp.int32), jnp.array(offset), window)
    within = []
    for first, end in ranges(causal, *blocks)(masks):
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


@pytest.mark.parametrize(
    ("module", "options"),
    [(blocks, {}), (dense, {}), (triton, {"interpret": True}), (splash, {"interpret": True})],
    ids=["blocks", "xla", "triton", "splash"],
)
def test_outputs_for_parts_of_the_keys_merge_by_the_logarithms_of_their_sums(module, options):
    """As devices in a ring do: a query may see no key of a part, which then counts for nothing."""
    query, key, value, _ = random_qkv(1, 256, heads=2, size=8, dtype="float32")
    ids = np.repeat([1, 2, 0, 3], [100, 60, 10, 86])[None].astype(np.int32)
    static = StaticMask(True, 0.3, None, None, False, "auto")

    def part(start, end):
        masks = MaskArrays(jnp.asarray(ids), jnp.asarray(ids[:, start:end]), jnp.full(1, -start, jnp.int32), None)
        arrays = map(jnp.asarray, (query, key[:, start:end], value[:, start:end]))
        return module.forward(static, Inputs(*arrays, masks), **options)

    @jax.jit
    def merged():
        (first, first_sums), (second, second_sums), whole = part(0, 128), part(128, 256), part(0, 256)
        log_sums = jnp.logaddexp(first_sums, second_sums)
        weights = (jnp.exp(sums - log_sums).swapaxes(1, 2)[..., None] for sums in (first_sums, second_sums))
        return sum(w * x for w, x in zip(weights, (first, second), strict=True)), log_sums, *whole

    output, log_sums, expected, expected_sums = map(np.asarray, merged())
    np.testing.assert_allclose(output, expected, atol=1e-5)
    np.testing.assert_allclose(log_sums, expected_sums, rtol=1e-5)
    is_padding = ids[0] == 0
    assert np.all(output[:, is_padding] == 0)
    assert np.all(log_sums[:, :, is_padding] <= UNSEEN / 2)
