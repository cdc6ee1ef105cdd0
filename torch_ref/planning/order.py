"""The order of samples by length, difficulty or random keys."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from torch_ref.checks import (
    MAX_LISTED,
    check_bool,
    check_integer,
    integer_array,
    known_keywords,
    list_offenders,
    to_tensor,
)
from torch_ref.planning.lengths import check_lengths

__all__ = [
    "BUFFER_STREAM",
    "ORDERS",
    "ROWS_STREAM",
    "Order",
    "as_order",
    "check_difficulty",
    "random_keys",
    "sample_order",
    "stable_argsort",
]

ORDERS = ("dataset", "length", "length_descending", "shuffle")
_BLOCK_KEYS = 2**62
# Orders and plans draw from stream 0.
ROWS_STREAM = 1
BUFFER_STREAM = 2


@known_keywords
@dataclass(frozen=True, eq=False)
class Order:
    """In which order samples come, and the steps that they make.

    Attributes:
        by: "dataset" (by id), "length" (ascending difficulty), "length_descending", "shuffle" (ascending random key),
            or an array [n] of unique sample ids, which may leave samples out. Ties go by ascending id.
        block_size: shuffle within blocks of this many consecutive places, so that the order is kept roughly. With
            "shuffle" these are blocks of ids, and the blocks come in random order: neighbours in storage stay near each
            other. Where shuffled samples are packed, it is how many of them are packed at a time, as `pack_samples`
            says. "auto" is no blocks, but for these.
        shuffle_steps: shuffle the steps as well, whatever the order of the samples.
        longest_first: swap the first step of the longest bucket in use to the front.
        new_shape_every: number the buckets in use by their first step; step t is then the earliest one left of those
            whose bucket has a number of at most t / new_shape_every, or the lowest number with steps left. 0 leaves the
            steps as they are.

    Raises:
        ValueError: if a value is out of its range, or does not go with another.
    """

    by: str | ArrayLike = "shuffle"
    _: KW_ONLY
    block_size: int | str | None = "auto"
    shuffle_steps: bool = False
    longest_first: bool = False
    new_shape_every: int = 0

    def __post_init__(self) -> None:
        """Check what does not depend on the samples."""
        if isinstance(self.by, str) and self.by not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)} or an array of sample ids, got {self.by!r}")
        if self.block_size is not None and self.block_size != "auto":
            object.__setattr__(self, "block_size", check_integer("block_size", self.block_size))
        every = check_integer("new_shape_every", self.new_shape_every, minimum=0)
        object.__setattr__(self, "new_shape_every", every)
        for name in ("shuffle_steps", "longest_first"):
            object.__setattr__(self, name, check_bool(name, getattr(self, name)))

    @property
    def blocks(self) -> int | None:
        """The block size of samples that are not packed: None for "auto"."""
        return self.block_size if isinstance(self.block_size, int) else None

    @property
    def name(self) -> str:
        """The word, or "array"."""
        return self.by if isinstance(self.by, str) else "array"


def as_order(order: "str | Order | ArrayLike") -> Order:
    """Return the order of a word or an array, or the given one."""
    return order if isinstance(order, Order) else Order(order)


@known_keywords
def sample_order(
    lengths: ArrayLike,
    order: str | Order | ArrayLike = "length",
    *,
    difficulty: ArrayLike | None = None,
    seed: int = 0,
    epoch: int = 0,
) -> NDArray[np.int64]:
    """Put the samples in order.

    Args:
        lengths: [N] integers >= 1, in tokens.
        order: a word, an array [n] of unique sample ids, or an `Order`.
        difficulty: [N] integers or floats to sort by in place of the lengths; integers are compared as integers.
        seed: 0 <= seed < 2**63, chooses the random keys.
        epoch: 0 <= epoch < 2**63, likewise.

    Returns:
        int64[N] sample ids, or int64[n] for an order array.

    Raises:
        ValueError: if an argument is out of its range; arrays list the first offenders.

    Example:
        >>> sample_order([5, 2, 5, 1], "length_descending")
        array([0, 2, 1, 3])
    """
    lengths = check_lengths(lengths)
    seed = check_integer("seed", seed, minimum=0)
    epoch = check_integer("epoch", epoch, minimum=0)
    values = check_difficulty(difficulty, lengths)
    order = as_order(order)
    if not isinstance(order.by, str):
        ids = _check_order_array(order.by, len(lengths))
    elif order.by == "dataset" or (order.by == "shuffle" and order.blocks is not None):
        ids = np.arange(len(lengths), dtype=np.int64)
    elif order.by == "shuffle":
        ids = stable_argsort(random_keys(seed, epoch, 0, len(lengths)))
    else:
        ids = stable_argsort(values, descending=order.by == "length_descending")
    if order.blocks is None:
        return ids
    keys = random_keys(seed, epoch, 0, len(lengths))
    block = np.arange(len(ids), dtype=np.int64) // order.blocks
    columns = [ids, keys[ids], block]
    if order.name == "shuffle":
        columns.append(random_keys(seed, epoch, _BLOCK_KEYS, int(block[-1]) + 1)[block])
    return ids[np.lexsort(columns)]


def random_keys(seed: int, epoch: int, start: int, count: int, stream: int = 0) -> NDArray[np.int64]:
    """Return the random keys of an epoch at places start, start + 1, ... of a stream, int64[count] in [0, 2**32).

    Sample i has place i, step s place N + s, and block j place 2**62 + j. Keys are the upper halves of NumPy's raw
    Philox stream, which never changes between versions and depends on no process or device; `stream` is the last word
    of its counter.
    """
    philox = np.random.Philox(
        key=np.array([seed, epoch], dtype=np.uint64), counter=np.array([0, 0, 0, stream], dtype=np.uint64)
    )
    # A unit of `advance` is four values.
    philox.advance(start // 4)
    return (philox.random_raw(start % 4 + count)[start % 4 :] >> np.uint64(32)).astype(np.int64)


def stable_argsort(values: NDArray[Any], *, descending: bool = False) -> NDArray[np.int64]:
    """Return int64[N] that sorts integers or floats without NaN; equal values keep their order in both directions."""
    if values.dtype.newbyteorder("=") not in (np.int8, np.int16, np.int32, np.int64, np.uint8, np.float32, np.float64):
        # torch cannot sort the rest (uint64, say): their dense ranks sort alike and lose nothing.
        values = np.unique(values, return_inverse=True)[1]
    native = values.astype(values.dtype.newbyteorder("="), copy=False)
    return torch.sort(to_tensor(native), stable=True, descending=descending).indices.numpy()


def check_difficulty(difficulty: ArrayLike | None, lengths: NDArray[np.int64]) -> NDArray[Any]:
    """Return what "length" orders sort by, [N] in its dtype, so that integers above 2**53 stay apart.

    Raises:
        ValueError: if the size, the dimensions or the dtype is wrong (bools and complex numbers are), or for NaN.
    """
    if difficulty is None:
        return lengths
    values = np.asarray(difficulty)
    if values.shape != lengths.shape:
        raise ValueError(f"difficulty must have one value a sample, shape {lengths.shape}, got {values.shape}")
    # NumPy turns a list of integers into floats where some exceed int64, and near ones would become equal.
    rounded = (
        values.dtype.kind == "f"
        and isinstance(difficulty, list | tuple)
        and all(isinstance(value, int) for value in difficulty)
    )
    if values.dtype.kind not in "iuf" or rounded:
        raise ValueError(f"difficulty must be integers that fit 64 bits or floats, got dtype {values.dtype}")
    unordered = np.flatnonzero(np.isnan(values)) if values.dtype.kind == "f" else np.empty(0, dtype=np.int64)
    if len(unordered):
        raise ValueError(f"difficulty must not be NaN: ids {unordered[:MAX_LISTED].tolist()}, {len(unordered)} in all")
    return values


def _check_order_array(order: ArrayLike, num_samples: int) -> NDArray[np.int64]:
    ids = integer_array("order", order)
    outside = np.flatnonzero((ids < 0) | (ids >= num_samples))
    if len(outside):
        listed = list_offenders(outside, ids[outside], num_samples - 1)
        raise ValueError(f"order must hold sample ids from 0 to {num_samples - 1}; by position: {listed}")
    ids = ids.astype(np.int64)
    repeated = np.flatnonzero(np.bincount(ids, minlength=num_samples) > 1)
    if len(repeated):
        raise ValueError(
            f"order must hold each id once; repeated: {repeated[:MAX_LISTED].tolist()}, {len(repeated)} in all"
        )
    return ids
