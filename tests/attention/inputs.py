"""Random rows: ids as samples are packed, and ids as no packing makes them."""

import numpy as np
from hypothesis import strategies as st


def _row(runs, length):
    ids = [id for id, n in runs for _ in range(n)][:length]
    return ids + [0] * (length - len(ids))


def rows_of_ids(num_rows, length):
    """Lists of ids in any order: they come again after others, are negative, and padding lies anywhere."""
    run = st.tuples(st.sampled_from([0, 0, 1, 2, 3, 7, -1]), st.integers(1, length))
    row = st.lists(run, max_size=6).map(lambda runs: _row(runs, length))
    return st.lists(row, min_size=num_rows, max_size=num_rows)


def packings(num_rows, length):
    """Lists of the ids of samples one after another, some of length 0, and padding behind them."""
    lengths = st.lists(st.integers(0, length // 2) | st.integers(0, 3), max_size=8)
    row = lengths.map(lambda lengths: _row(list(enumerate(lengths, start=1)), length))
    return st.lists(row, min_size=num_rows, max_size=num_rows)


def random_qkv(rows=2, queries=13, keys=None, heads=4, kv_heads=2, size=3, dtype="float64"):
    """Queries, keys, values, and weights of the outputs."""
    rng = np.random.default_rng(0)
    keys = queries if keys is None else keys
    shapes = [(rows, queries, heads, size), *[(rows, keys, kv_heads, size)] * 2, (rows, queries, heads, size)]
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]
