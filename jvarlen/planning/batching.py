"""Greedy token batches over a given order, of any number of shapes or of fixed ones.

Letters: N samples, n of them in the order, b batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from jaxtyping import Int32, Int64

from jvarlen._common.checks import UserError, check_at_least_one, check_choices, if_given, is_integer
from jvarlen._common.keywords import check_keywords
from jvarlen.planning._kernels import close_by_budget, close_by_capacity
from jvarlen.planning.lengths import check_lengths, fit_lengths
from jvarlen.planning.order import as_order, check_seed, order_samples

__all__ = ["BatchBudget", "Batches", "batch_by_tokens"]

BatchBudget = Literal["padded", "sum"]

_NO_LIMIT = np.iinfo(np.int64).max


class Batches(NamedTuple):
    """The batches of an order of samples.

    Attributes:
      sample_ids: int64[n], the order; batch i holds `sample_ids[offsets[i]:offsets[i+1]]`.
      offsets: int64[b+1], ascending from 0 to n.
      shape_index: int32[b], the shape of each batch, an index into `shapes`; None where none were given.
    """

    sample_ids: Int64[np.ndarray, " n"]
    offsets: Int64[np.ndarray, " b_plus_1"]
    shape_index: Int32[np.ndarray, " b"] | None = None

    @property
    def num_batches(self) -> int:
        """b, the number of batches."""
        return len(self.offsets) - 1

    @property
    def num_sequences(self) -> Int64[np.ndarray, " b"]:
        """int64[b], samples of each batch."""
        return np.diff(self.offsets)


@check_keywords
def batch_by_tokens(
    lengths: npt.ArrayLike,
    max_tokens: int,
    *,
    order: str | npt.ArrayLike = "dataset",
    budget: BatchBudget = "padded",
    max_sequences: int | None = None,
    sequence_multiple: int = 1,
    shapes: Sequence[tuple[int, int]] | None = None,
    seed: int = 0,
    epoch: int = 0,
) -> Batches:
    """Cuts an order of samples into batches within a token budget. Every sample of the order comes exactly once.

    A batch takes the next sample as long as it stays inside its limits. When the next sample would break them, the
    batch is closed at the largest allowed size; the fewer than `sequence_multiple` samples beyond start the next. If
    the sample that closed it does not fit with them, they are a batch by themselves.

    Args:
      lengths: integers[N], tokens per sample.
      max_tokens: budget of a batch in tokens.
      order: as in `sample_order`.
      budget: what the budget counts: `"padded"`, sequences × longest, as memory holds, or `"sum"`, real tokens.
      max_sequences: the most samples in a batch; None for no limit.
      sequence_multiple: the number of samples in a batch is below it or a multiple of it.
      shapes: (rows, length) pairs. Each batch then goes into the smallest shape that holds it (least rows × length,
        then least length, then the first), and the limits above do not apply.
      seed: 0 ≤ seed < 2**63.
      epoch: 0 ≤ epoch < 2**63.

    Returns:
      `Batches`.

    Raises:
      ValueError: arguments that are not as described; samples longer than `max_tokens`, or than all shapes, are listed
        as id, value, limit.

    Example:
      >>> batch_by_tokens([3, 4, 2, 9], 12).offsets
      array([0, 3, 4])

    References:
      The greedy rule and its treatment of the tail are those of fairseq (Ott et al. 2019). The budget by sum is that of
      DeepSpeed's variable batch sizes.
    """
    check_choices(budget=(budget, BatchBudget))
    check_at_least_one(
        max_tokens=max_tokens, **if_given(max_sequences=max_sequences), sequence_multiple=sequence_multiple
    )
    check_seed(seed, epoch)
    checked = check_lengths(lengths)
    ids = order_samples(checked, as_order(order), seed=seed, epoch=epoch)
    ordered = checked if isinstance(order, str) and order == "dataset" else checked[ids]
    if shapes is not None:
        return _batch_by_shapes(ids, ordered, shapes)
    fit_lengths(ordered, max_tokens, "error", ids, problem="samples longer than max_tokens")
    if int(ordered.max()) * len(ordered) >= 2**63:
        raise UserError(f"{len(ordered):,} samples of up to {ordered.max():,} tokens are more than int64 counts")
    most = _NO_LIMIT if max_sequences is None else int(max_sequences)
    ends = close_by_budget(ordered, int(max_tokens), most, int(sequence_multiple), budget == "padded")
    return Batches(ids, np.append(0, ends))


def _batch_by_shapes(
    ids: Int64[np.ndarray, " n"], ordered: Int64[np.ndarray, " n"], shapes: Sequence[tuple[int, int]]
) -> Batches:
    """Each batch in the smallest shape that holds it."""
    pairs = [tuple(shape) for shape in shapes]
    if {len(pair) for pair in pairs} != {2} or not all(is_integer(value) and value >= 1 for value in sum(pairs, ())):
        raise UserError(f"shapes must be at least one (rows, length) pair of integers ≥ 1, not {shapes!r}")
    rows, length = np.array(pairs, np.int64).T
    fit_lengths(ordered, int(length.max()), "error", ids, problem="samples longer than the longest shape")
    by_length = np.argsort(length, kind="stable")
    # The most rows of any shape that is at least so long.
    most_rows = np.maximum.accumulate(rows[by_length][::-1])[::-1]
    ends = close_by_capacity(most_rows[np.searchsorted(length[by_length], ordered)])
    offsets = np.append(0, ends)
    count, longest = np.diff(offsets), np.maximum.reduceat(ordered, offsets[:-1])
    shape_index = np.empty(len(count), np.int32)
    sizes = [(row * tokens, tokens, index) for index, (row, tokens) in enumerate(pairs)]
    for *_, index in sorted(sizes, reverse=True):  # the smallest is written last
        shape_index[(count <= rows[index]) & (longest <= length[index])] = index
    return Batches(ids, offsets, shape_index)
