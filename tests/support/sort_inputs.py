"""Keys to sort, by what is hard about them, and the order in which they belong: shared by the tests of sorting."""

import numpy as np


def keys_of_kind(kind, num_rows, rng):
    """int32 or float32 keys."""
    uniform = rng.integers(-(2**31), 2**31, num_rows).astype(np.int32)
    match kind:
        case "uniform":
            return uniform
        case "constant":
            return np.full(num_rows, 7, np.int32)
        case "90 % duplicates":
            return np.where(rng.random(num_rows) < 0.9, 5, uniform).astype(np.int32)
        case "sorted":
            return np.sort(uniform)
        case "reversed":
            return np.sort(uniform)[::-1].copy()
        case "two values":
            return rng.integers(0, 2, num_rows).astype(np.int32)
        case "zipf":
            return np.minimum(rng.zipf(1.3, num_rows), 2**31 - 1).astype(np.int32)
        case "unequal ranges":  # every quarter in a range of its own, the highest first
            return (uniform // 16 - np.arange(num_rows) * 8 // max(1, num_rows) * 2**27).astype(np.int32)
        case "extremes":
            return rng.choice(np.array([-(2**31), 2**31 - 1, 0, -1], np.int64), num_rows).astype(np.int32)
        case "floats":
            return rng.normal(size=num_rows).astype(np.float32)
        case "special floats":
            special = np.array([np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38], np.float32)
            return rng.choice(special, num_rows)
    raise ValueError(kind)


KINDS = (
    "uniform", "constant", "90 % duplicates", "sorted", "reversed", "two values", "zipf", "unequal ranges", "extremes",
    "floats", "special floats",
)  # fmt: skip


def order_of(keys):
    """Indices in the order of (key, index)."""
    return np.lexsort((np.arange(len(keys)), keys))


def by_rank(array, num_shards, result):
    """A sorted array in the order of global ranks, from its layout on shards; padding comes last."""
    array = np.asarray(array)
    if result == "block" or not len(array):
        return array
    return array.reshape(num_shards, len(array) // num_shards, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)
