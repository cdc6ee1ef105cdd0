"""Greedy batches of neighbours in a given order, as large as the limits allow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torch_ref.checks import INT64_MAX, check_integer, known_keywords, list_offenders
from torch_ref.planning.lengths import check_lengths
from torch_ref.planning.order import sample_order

__all__ = ["BUDGETS", "Batches", "batch_by_tokens"]

BUDGETS = ("padded", "sum")


@dataclass(frozen=True, kw_only=True, eq=False)
class Batches:
    """Samples in order, cut into batches.

    Attributes:
        sample_ids: int64[n], the samples in order.
        offsets: int64[num_batches + 1]; batch b holds `sample_ids[offsets[b]:offsets[b + 1]]`.
        shape_index: int32[num_batches], the shape of each batch, or None where no shapes were given.
    """

    sample_ids: NDArray[np.int64]
    offsets: NDArray[np.int64]
    shape_index: NDArray[np.int32] | None

    @property
    def num_batches(self) -> int:
        """The number of batches."""
        return len(self.offsets) - 1

    @property
    def num_sequences(self) -> NDArray[np.int64]:
        """int64[num_batches], the samples of each batch."""
        return np.diff(self.offsets)


@known_keywords
def batch_by_tokens(
    lengths: ArrayLike,
    max_tokens: int,
    *,
    order: str | ArrayLike = "dataset",
    budget: str = "padded",
    max_sequences: int | None = None,
    sequence_multiple: int = 1,
    shapes: Sequence[tuple[int, int]] | None = None,
    seed: int = 0,
    epoch: int = 0,
) -> Batches:
    """Cut an order into batches: each takes the next sample while it stays inside its limits.

    Args:
        lengths: [N] integers >= 1, in tokens.
        max_tokens: the budget of a batch.
        order: as in `sample_order`: a name, or an array [n] of unique sample ids, which may leave samples out.
        budget: what counts: "padded" (samples times the longest of them, as memory sees it) or "sum" (real tokens).
        max_sequences: at most this many samples a batch; None sets no limit.
        sequence_multiple: every batch has fewer samples than this or a multiple of it. Samples above the last multiple
            start the next batch.
        shapes: K static shapes (rows, length) in any order, in place of all limits above: a batch takes the next
            sample while some shape holds it, and then goes into the smallest, by rows times length, then by length,
            then by index.
        seed: 0 <= seed < 2**63, for the order.
        epoch: 0 <= epoch < 2**63, likewise.

    Returns:
        The batches. Every sample of the order is in exactly one of them.

    Raises:
        ValueError: if an argument is out of its range, or if samples of the order are longer than `max_tokens` or than
            all shapes (the first are listed).

    Example:
        >>> batch_by_tokens([2, 3, 1, 9, 4], 10).offsets
        array([0, 3, 4, 5])
        >>> batch_by_tokens([2, 3, 1, 9, 4], 10, shapes=[(1, 10), (2, 4)]).shape_index
        array([1, 1, 0, 1], dtype=int32)

    References:
        fairseq's `batch_by_size` for the padded budget and the multiple; DeepSpeed's variable batch size for the sum.
    """
    lengths = check_lengths(lengths)
    max_tokens = check_integer("max_tokens", max_tokens)
    max_sequences = INT64_MAX if max_sequences is None else check_integer("max_sequences", max_sequences)
    multiple = check_integer("sequence_multiple", sequence_multiple)
    if budget not in BUDGETS:
        raise ValueError(f"budget must be one of {', '.join(BUDGETS)}, got {budget!r}")
    checked_shapes = [] if shapes is None else _check_shapes(shapes)
    sample_ids = sample_order(lengths, order, seed=seed, epoch=epoch)
    ordered = lengths[sample_ids]

    def fits(longest: int, total: int, num_samples: int) -> bool:
        """Return whether such samples may be a batch; if so, they may be one without the last of them too."""
        if checked_shapes:
            return any(num_samples <= rows and longest <= length for rows, length in checked_shapes)
        return num_samples <= max_sequences and (total if budget == "sum" else num_samples * longest) <= max_tokens

    limit = max(length for _, length in checked_shapes) if checked_shapes else max_tokens
    _refuse_longer(sample_ids, ordered, limit, "all shapes" if checked_shapes else "max_tokens")
    offsets = _cut(ordered.tolist(), fits, 1 if checked_shapes else multiple)
    if not checked_shapes:
        return Batches(sample_ids=sample_ids, offsets=offsets, shape_index=None)
    longest = np.maximum.reduceat(ordered, offsets[:-1])
    shape_index = _smallest_shapes(checked_shapes, np.diff(offsets), longest)
    return Batches(sample_ids=sample_ids, offsets=offsets, shape_index=shape_index)


def _cut(lengths: list[int], fits: Callable[[int, int, int], bool], multiple: int) -> NDArray[np.int64]:
    """Return where batches start and where the last one ends."""
    offsets = [0]
    while offsets[-1] < len(lengths):
        start, size, longest, total = offsets[-1], 0, 0, 0
        while start + size < len(lengths):
            length = lengths[start + size]
            longest, total = max(longest, length), total + length
            if not fits(longest, total, size + 1):
                break
            size += 1
        # What follows the last multiple starts the next batch, and is smaller than the multiple where that is cut too.
        offsets.append(start + (size if size < multiple else size - size % multiple))
    return np.array(offsets, dtype=np.int64)


def _smallest_shapes(
    shapes: Sequence[tuple[int, int]], num_sequences: NDArray[np.int64], longest: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Return int32[num_batches], the smallest shape that holds each batch."""

    def size(index: int) -> tuple[int, int, int]:
        rows, length = shapes[index]
        return rows * length, length, index

    shape_index = np.full(len(longest), -1, dtype=np.int32)
    for index in sorted(range(len(shapes)), key=size, reverse=True):
        rows, length = shapes[index]
        shape_index[(num_sequences <= rows) & (longest <= length)] = index
    assert (shape_index >= 0).all()
    return shape_index


def _check_shapes(shapes: Any) -> list[tuple[int, int]]:
    try:
        given = list(shapes)
    except TypeError:
        raise ValueError(f"shapes must be a list of pairs (rows, length), got {shapes!r}") from None
    if not given:
        raise ValueError("shapes must be at least one pair (rows, length), got none")
    checked = []
    for index, pair in enumerate(given):
        try:
            rows, length = pair
        except (TypeError, ValueError):
            raise ValueError(f"shape {index} must be a pair (rows, length), got {pair!r}") from None
        checked.append(
            (check_integer(f"rows of shape {index}", rows), check_integer(f"length of shape {index}", length))
        )
    return checked


def _refuse_longer(sample_ids: NDArray[np.int64], ordered: NDArray[np.int64], limit: int, name: str) -> None:
    too_long = np.flatnonzero(ordered > limit)
    if len(too_long):
        # By id, not by place in the order: the first offenders are then the same whatever the order.
        too_long = too_long[np.argsort(sample_ids[too_long])]
        listed = list_offenders(sample_ids[too_long], ordered[too_long], limit)
        raise ValueError(f"{len(too_long)} samples are longer than {name}: {listed}; raise the limit or leave them out")
