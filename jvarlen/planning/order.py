"""The order of samples, the counter-based stream keyed by (seed, epoch) that all randomness comes from, and pacing.

Pacing is the share of the samples, easiest first, that each of S steps may draw from.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64, Int64, Shaped, UInt64

from jvarlen._common import checks
from jvarlen._common.checks import UserError, check_at_least_one, check_at_least_zero, check_choices, list_offenders
from jvarlen._common.keywords import check_keywords
from jvarlen._common.settings import Settings
from jvarlen.planning.lengths import check_lengths

__all__ = [
    "BUFFER_STREAM", "CHUNK", "ROWS_STREAM", "Order", "OrderSettings", "OrderWord", "Pacing", "as_order", "block_order",
    "check_difficulty", "check_seed", "competence_pacing", "linear_pacing", "order_samples", "random_key_chunks",
    "random_keys", "sample_order", "stable_argsort",
]  # fmt: skip

Pacing = Callable[[npt.ArrayLike], Float64[np.ndarray, "..."]]
OrderWord = Literal["dataset", "length", "length_descending", "shuffle"]

CHUNK = 2**18  # samples; what is done in chunks needs no other array of all samples, and stays in the cache
_VALUES_PER_PHILOX_BLOCK = 4
_FIRST_BLOCK_KEY = 2**62  # far beyond the keys of samples and steps

BUFFER_STREAM = 2  # of the shuffle buffers of streams
ROWS_STREAM = 1  # 0 is the plan's; with the same keys for both, rows would follow from the samples in them


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrderSettings(Settings):
    """The fields of an `Order` that are plain values, which the settings of runs have as well."""

    block_size: int | Literal["auto"] | None = "auto"
    """Shuffle within blocks of this many places of the order, so that a sorted order gets local disorder.
    With order shuffle these are blocks of consecutive ids in random order, which keeps reading local.
    Packed and shuffled: pack blocks of this many shuffled samples, so that rows differ in every epoch; auto for as few
    as fill rows nearly as well as all at once, None for all at once. Elsewhere auto means no blocks."""
    shuffle_steps: bool = False
    """Shuffle the steps, whatever the order of the samples."""
    longest_first: bool = False
    """Start with a step of the longest bucket, so that running out of memory shows at once."""
    new_shape_every: int = 0
    """Shape n comes no earlier than step n times this, unless those before it are used up.
    0: shapes come as the order has them."""


@check_keywords
@dataclasses.dataclass(frozen=True, eq=False)
class Order(OrderSettings):
    """The order of samples, and of the steps that they form.

    With `new_shape_every` k, shapes are numbered 0, 1, … by their first step in the order so far. Step t is then the
    earliest step left, in that order, among those of shapes whose number c has c·k ≤ t or is the lowest that has steps
    left.

    Attributes:
      by: `"dataset"` (by id), `"length"` (ascending difficulty, ties by id), `"length_descending"` (descending
        difficulty, ties by ascending id), `"shuffle"` (random, from `seed` and `epoch` only), or an array of unique
        sample ids, which may be a subset.

    Raises:
      ValueError: values that are not as described.

    Example:
      >>> Order("length", block_size=4).by
      'length'
    """

    by: OrderWord | npt.ArrayLike = "shuffle"

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.by, str):
            check_choices(order=(self.by, OrderWord))
        if self.block_size != "auto":
            check_at_least_one(**checks.if_given(block_size=self.block_size))
        check_at_least_zero(new_shape_every=self.new_shape_every)

    @property
    def sample_blocks(self) -> int | None:
        """The places of a block in which single samples, or rows, are shuffled; None for no blocks."""
        return None if self.block_size is None or self.block_size == "auto" else int(self.block_size)

    def is_by(self, *words: OrderWord) -> bool:
        """Whether samples come by one of these words, and not by an array.

        Args:
          words: these.

        Returns:
          True or False.
        """
        return isinstance(self.by, str) and self.by in words


def as_order(order: str | Order | npt.ArrayLike) -> Order:
    """The order as an `Order`."""
    return order if isinstance(order, Order) else Order(order)


@check_keywords
def sample_order(
    lengths: npt.ArrayLike,
    order: str | Order | npt.ArrayLike = "length",
    *,
    difficulty: npt.ArrayLike | None = None,
    seed: int = 0,
    epoch: int = 0,
) -> Int64[np.ndarray, " n"]:
    """The order in which samples come.

    Args:
      lengths: integers[N], tokens per sample.
      order: a word, an array of sample ids, or an `Order`, whose `by` and `block_size` count.
      difficulty: ints or floats[N] without NaN, the key of the two sorted orders; None for the length.
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
    checked = check_lengths(lengths)
    check_seed(seed, epoch)
    return order_samples(checked, as_order(order), difficulty=difficulty, seed=seed, epoch=epoch)


def order_samples(
    sizes: Int64[np.ndarray, " N"],
    order: Order,
    *,
    difficulty: npt.ArrayLike | None = None,
    seed: int = 0,
    epoch: int = 0,
) -> Int64[np.ndarray, " n"]:
    """The ids of samples of checked lengths, or sizes, in an order."""
    num_samples = len(sizes)
    by = sizes if difficulty is None else check_difficulty(difficulty, num_samples)
    is_shuffle, block_size = order.is_by("shuffle"), order.sample_blocks
    if not isinstance(order.by, str):
        ids = _check_order_array(order.by, num_samples)
    elif order.by == "dataset" or (is_shuffle and block_size is not None):
        ids = np.arange(num_samples, dtype=np.int64)
    elif order.by == "length":
        ids = stable_argsort(by)
    elif order.by == "length_descending":
        # Reversing before and after keeps ties ascending, and needs no negation, which overflows at the least integer.
        ids = num_samples - 1 - stable_argsort(by[::-1])[::-1]
    else:
        ids = stable_argsort(random_keys(num_samples, seed=seed, epoch=epoch))
    if block_size is None:
        return ids
    return _shuffle_within_blocks(ids, num_samples, block_size, is_shuffle, seed, epoch)


def _shuffle_within_blocks(
    ids: Int64[np.ndarray, " n"], num_samples: int, block_size: int, shuffle_blocks: bool, seed: int, epoch: int
) -> Int64[np.ndarray, " n"]:
    """Sorts each block of consecutive places by (key, id), as rows of a matrix whose last row is filled up."""
    block_size = min(block_size, len(ids))
    num_blocks = -(-len(ids) // block_size)
    index_bits = max(1, (num_samples - 1).bit_length())
    filler = np.iinfo(np.uint64).max  # above every key and id, so that it comes last in its block
    packed = np.full(num_blocks * block_size, filler, np.uint64)
    packed[: len(ids)] = random_keys(num_samples, seed=seed, epoch=epoch)[ids] << np.uint64(index_bits)
    packed[: len(ids)] |= ids.view(np.uint64)
    blocks = packed.reshape(num_blocks, block_size)
    blocks.sort(axis=1)
    if shuffle_blocks:
        blocks = blocks[block_order(num_blocks, seed=seed, epoch=epoch)]
    packed = blocks.reshape(-1)
    if len(ids) < len(packed):
        packed = packed[packed != filler]
    packed &= np.uint64(2**index_bits - 1)
    return packed.view(np.int64)


def block_order(num_blocks: int, *, seed: int, epoch: int) -> Int64[np.ndarray, " blocks"]:
    """int64[num_blocks], the random order of blocks of consecutive samples."""
    return stable_argsort(random_keys(num_blocks, seed=seed, epoch=epoch, start=_FIRST_BLOCK_KEY))


def random_keys(count: int, *, seed: int, epoch: int, start: int = 0, stream: int = 0) -> UInt64[np.ndarray, " count"]:
    """Values `start` to `start + count - 1` of a 32-bit stream of (seed, epoch)."""
    values = np.empty(count, np.uint64)
    for first, chunk in random_key_chunks(count, seed=seed, epoch=epoch, start=start, stream=stream):
        values[first : first + len(chunk)] = chunk
    return values


def random_key_chunks(
    count: int, *, seed: int, epoch: int, start: int = 0, stream: int = 0
) -> Iterator[tuple[int, UInt64[np.ndarray, " chunk"]]]:
    """The values of `random_keys` in chunks that stay in the cache, each with the place of its first in the result."""
    philox = np.random.Philox(key=np.array([seed, epoch], np.uint64), counter=np.array([0, 0, 0, stream], np.uint64))
    blocks, skipped = divmod(start, _VALUES_PER_PHILOX_BLOCK)
    philox.advance(blocks)
    philox.random_raw(skipped)
    for first in range(0, count, CHUNK):
        yield first, philox.random_raw(min(CHUNK, count - first)) >> np.uint64(32)


def stable_argsort(keys: Shaped[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
    """`np.argsort(keys, kind="stable")`, several times faster for integers of a moderate range."""
    # Such a key and its index fit one integer, and sorting plain integers is what NumPy does fastest. Short keys it
    # sorts by radix.
    if not len(keys) or not np.issubdtype(keys.dtype, np.integer) or keys.dtype.itemsize <= 2:
        return np.argsort(keys, kind="stable").astype(np.int64, copy=False)
    smallest, largest = int(keys.min()), int(keys.max())
    index_bits = max(1, (len(keys) - 1).bit_length())
    limit = 2 ** (63 - index_bits)
    if largest - smallest >= limit:
        return np.argsort(keys, kind="stable").astype(np.int64, copy=False)
    if smallest >= 0 and largest < limit:
        packed = keys.astype(np.int64, copy=False).view(np.uint64)  # they fit as they are
    else:
        packed = keys.astype(np.uint64) - np.uint64(smallest % 2**64)  # it wraps, so this is right whatever the signs
    packed = packed << np.uint64(index_bits)
    for start in range(0, len(keys), CHUNK):
        part = packed[start : start + CHUNK]
        part |= np.arange(start, start + len(part), dtype=np.uint64)
    packed.sort()
    packed &= np.uint64(2**index_bits - 1)
    return packed.view(np.int64)


def check_seed(seed: int, epoch: int) -> None:
    """Raises ValueError where seed or epoch is not in [0, 2**63)."""
    check_at_least_zero(seed=seed, epoch=epoch)


def check_difficulty(difficulty: npt.ArrayLike, num_samples: int) -> Shaped[np.ndarray, " N"]:
    """Checks a difficulty: ints or floats[N] without NaN."""
    array = np.asarray(difficulty)
    if array.shape != (num_samples,) or array.dtype.kind not in "iuf":
        raise UserError(
            f"difficulty must be {num_samples} integers or floats, one a sample, not {array.dtype}{list(array.shape)}"
        )
    if np.isnan(array).any():
        raise UserError(f"difficulty must not be NaN: {list_offenders(np.flatnonzero(np.isnan(array)))}")
    return array


def _check_order_array(order: npt.ArrayLike, num_samples: int) -> Int64[np.ndarray, " n"]:
    """Checks an order given as ids: 1-D, unique, in [0, num_samples); raises ValueError that lists the offenders."""
    ids = np.asarray(order)
    if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise UserError(
            f"an order must be a non-empty 1-D array of integer sample ids, not {ids.dtype} of shape {ids.shape}"
        )
    outside = (ids < 0) | (ids >= num_samples)
    if outside.any():
        raise UserError(f"sample ids in the order must be in [0, {num_samples}): {list_offenders(ids[outside])}")
    ids = ids.astype(np.int64, copy=False)
    times = np.bincount(ids, minlength=num_samples)
    if times.max() > 1:
        raise UserError(f"sample ids in the order must be unique: {list_offenders(np.flatnonzero(times > 1))} repeat")
    return ids


@check_keywords
def linear_pacing(num_steps: int, initial: float = 0.1) -> Pacing:
    """The admitted share grows by the same amount every step.

    It is initial + (1 − initial)·x, where x = min(step / num_steps, 1).

    Args:
      num_steps: the step from which on all samples are admitted, at least 1.
      initial: the share at step 0, above 0 and at most 1.

    Returns:
      A function from the step, an integer or integers[...] of at least 0, to the admitted share, float64[...] in
      [0, 1], which never falls.

    Raises:
      ValueError: options that are not as described; from the function, steps that are not.

    Example:
      >>> linear_pacing(10, initial=0.5)(np.array([0, 5, 10, 99]))
      array([0.5 , 0.75, 1.  , 1.  ])

    References:
      Bengio et al. 2009, "Curriculum Learning"; `fixed_linear` of DeepSpeed's curriculum learning.
    """
    return competence_pacing(num_steps, initial, degree=1)


@check_keywords
def competence_pacing(num_steps: int, initial: float = 0.1, degree: float = 2) -> Pacing:
    """The admitted share grows so that its power `degree` grows linearly.

    It is (initial^degree + (1 − initial^degree)·x)^(1/degree), where x = min(step / num_steps, 1). With degree 2, the
    default, new samples come at a rate inverse to the share, so that every sample gets about the same time.

    Args:
      num_steps: as in `linear_pacing`.
      initial: as in `linear_pacing`.
      degree: finite and above 0; 1 is linear.

    Returns:
      As in `linear_pacing`.

    Raises:
      ValueError: as in `linear_pacing`.

    Example:
      >>> competence_pacing(100, initial=0.5)(np.array([0, 75, 100])).round(3)
      array([0.5  , 0.901, 1.   ])

    References:
      Platanios et al. 2019, "Competence-based Curriculum Learning for Neural Machine Translation".
    """
    check_at_least_one(num_steps=num_steps)
    if not checks.is_number(initial) or not 0 < initial <= 1:
        raise UserError(f"initial must be above 0 and at most 1, not {initial!r}")
    if not checks.is_number(degree) or not 0 < degree < math.inf:
        raise UserError(f"degree must be finite and above 0, not {degree!r}")
    start = initial**degree

    def pacing(step: npt.ArrayLike) -> Float64[np.ndarray, ...]:
        steps = np.asarray(step)
        if steps.dtype.kind not in "iu" or (steps < 0).any():
            raise UserError(f"steps must be integers of at least 0, not {step!r}")
        # One axis, for a power of a NumPy scalar may be rounded otherwise than that of an array.
        reached = np.minimum(steps.reshape(-1) / num_steps, 1.0)
        shares = np.where(reached == 1, 1.0, np.minimum((start + (1 - start) * reached) ** (1 / degree), 1.0))
        return shares.reshape(steps.shape)[()]

    return pacing
