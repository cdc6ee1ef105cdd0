"""Order: in go lengths or difficulties and a seed, out comes the order in which samples come, int64[N].

NumPy only. Every random choice is a value of one counter-based stream keyed by (seed, epoch), never by a process, a
device or the clock, so that the order is the same everywhere.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from jaxtyping import Int64, Shaped, UInt64

from jvarlen.lengths import check_lengths, list_offenders

__all__ = ["ORDERS", "check_difficulty", "check_order_array", "random_keys", "sample_order", "stable_argsort"]

ORDERS = ("dataset", "length", "length_descending", "shuffle")

_VALUES_PER_PHILOX_BLOCK = 4


def sample_order(
    lengths: npt.ArrayLike,
    order: str | npt.ArrayLike = "length",
    *,
    difficulty: npt.ArrayLike | None = None,
    seed: int = 0,
    epoch: int = 0,
) -> Int64[np.ndarray, " n"]:
    """The order in which samples come.

    Args:
      lengths: integers[N], tokens a sample.
      order: `"dataset"` (by id), `"length"` (ascending difficulty, ties by id), `"length_descending"` (descending
        difficulty, ties by ascending id), `"shuffle"` (random, from `seed` and `epoch` only), or an array of unique
        sample ids, which may be a subset.
      difficulty: ints or floats[N] without NaN, what the two sorted orders go by; the length where None.
      seed: 0 ≤ seed < 2**63.
      epoch: 0 ≤ epoch < 2**63.

    Returns:
      int64[n] of sample ids; n = N, or the size of a given order.

    Raises:
      ValueError: lengths, difficulty, order, seed or epoch that are not as described; offenders are listed.

    Example:
      >>> sample_order([5, 2, 5, 1], "length_descending")
      array([0, 2, 1, 3])

    References:
      Curriculum by length: Bengio et al. 2009, "Curriculum Learning". The random stream is Philox4x64-10 of Salmon et
      al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3".
    """
    lengths = check_lengths(lengths)
    check_seed(seed, epoch)
    num_samples = len(lengths)
    if not isinstance(order, str):
        return check_order_array(order, num_samples)
    by = lengths if difficulty is None else check_difficulty(difficulty, num_samples)
    if order == "dataset":
        return np.arange(num_samples, dtype=np.int64)
    if order == "length":
        return stable_argsort(by)
    if order == "length_descending":
        # Reversing before and after keeps ties ascending, and needs no negation, which overflows at the least integer.
        return num_samples - 1 - stable_argsort(by[::-1])[::-1]
    if order == "shuffle":
        return stable_argsort(random_keys(num_samples, seed=seed, epoch=epoch))
    raise ValueError(f"order must be one of {', '.join(ORDERS)} or an array of sample ids, not {order!r}")


def random_keys(count: int, *, seed: int, epoch: int, start: int = 0) -> UInt64[np.ndarray, " count"]:
    """Values `start` to `start + count - 1` of the 32-bit stream of (seed, epoch).

    Args:
      count: how many values.
      seed: 0 ≤ seed < 2**63.
      epoch: 0 ≤ epoch < 2**63.
      start: the place of the first value; a process can compute its own part of the stream.

    Returns:
      uint64[count], each below 2**32.

    Raises:
      ValueError: seed or epoch out of range.
    """
    check_seed(seed, epoch)
    stream = np.random.Philox(key=np.array([seed, epoch], np.uint64))
    blocks, skipped = divmod(start, _VALUES_PER_PHILOX_BLOCK)
    stream.advance(blocks)
    values = stream.random_raw(skipped + count)[skipped:]
    values >>= np.uint64(32)
    return values


def stable_argsort(keys: Shaped[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
    """`np.argsort(keys, kind="stable")`, several times faster for integers of a moderate range.

    Such a key and its index fit one integer, and sorting plain integers is what NumPy does fastest.
    """
    num_keys = len(keys)
    if num_keys and np.issubdtype(keys.dtype, np.integer):
        smallest = int(keys.min())
        index_bits = max(1, (num_keys - 1).bit_length())
        if int(keys.max()) - smallest < 2 ** (63 - index_bits):
            # uint64 wraps, so the difference is right whatever the signs.
            packed = keys.astype(np.uint64)
            packed -= np.uint64(smallest % 2**64)
            packed <<= np.uint64(index_bits)
            packed |= np.arange(num_keys, dtype=np.uint64)
            packed.sort()
            packed &= np.uint64(2**index_bits - 1)
            return packed.view(np.int64)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def check_seed(seed: int, epoch: int) -> None:
    """Raises ValueError where seed or epoch is not in [0, 2**63)."""
    for name, value in (("seed", seed), ("epoch", epoch)):
        if not 0 <= value < 2**63:
            raise ValueError(f"{name} must be at least 0 and below 2**63, not {value}")


def check_difficulty(difficulty: npt.ArrayLike, num_samples: int) -> Shaped[np.ndarray, " N"]:
    """Checks a difficulty: ints or floats[num_samples] without NaN; raises ValueError that lists the offenders."""
    array = np.asarray(difficulty)
    if array.shape != (num_samples,):
        raise ValueError(f"difficulty must have shape ({num_samples},), one value a sample, not {array.shape}")
    if not (np.issubdtype(array.dtype, np.integer) or np.issubdtype(array.dtype, np.floating)):
        raise ValueError(f"difficulty must be integers or floats, not {array.dtype}")
    is_nan = np.isnan(array)
    if is_nan.any():
        raise ValueError(f"difficulty must not be NaN: {list_offenders(np.flatnonzero(is_nan))}")
    return array


def check_order_array(order: npt.ArrayLike, num_samples: int) -> Int64[np.ndarray, " n"]:
    """Checks an order given as ids: 1-D, unique, in [0, num_samples); raises ValueError that lists the offenders."""
    ids = np.asarray(order)
    if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"an order must be a non-empty 1-D array of integer sample ids, not {ids.dtype} of shape {ids.shape}"
        )
    outside = (ids < 0) | (ids >= num_samples)
    if outside.any():
        raise ValueError(f"sample ids in the order must be in [0, {num_samples}): {list_offenders(ids[outside])}")
    ids = ids.astype(np.int64, copy=False)
    times = np.bincount(ids, minlength=num_samples)
    if times.max() > 1:
        raise ValueError(f"sample ids in the order must be unique: {list_offenders(np.flatnonzero(times > 1))} repeat")
    return ids
