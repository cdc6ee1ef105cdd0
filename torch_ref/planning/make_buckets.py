"""Static shapes from lengths and a budget, for samples of one length or of several."""

from typing import Unpack

from numpy.typing import ArrayLike

from torch_ref.checks import as_array
from torch_ref.planning.buckets import Buckets, choose_of_one_length
from torch_ref.planning.budget import Budget, BudgetFields, as_budget, takes_budget
from torch_ref.planning.lengths import check_several_lengths
from torch_ref.planning.several_lengths import choose_of_several_lengths

__all__ = ["make_buckets"]


@takes_budget
def make_buckets(
    lengths: ArrayLike,
    max_tokens: int | Budget,
    *,
    max_candidates: int | None = None,
    overlong: str = "error",
    **budget: Unpack[BudgetFields],
) -> Buckets:
    """Choose the static shapes for a list of lengths, one of each sample or several.

    "optimal" takes the cheapest of all sets of rounded lengths. If there are more than 5,000, it tries every k-th, from
    the longest down, for the least k that leaves at most 5,000.

    Args:
        lengths: [N] integers >= 1, in tokens. Or [N, D] integers, the first >= 1 and the others >= 0: the cheapest
            buckets are then chosen in which all lengths ascend together, or in which the first length cuts the samples
            into classes, the second cuts each class, and so on.
        max_tokens: rows times length, or times `size`, of a microbatch never exceed it; or a `Budget`.
        max_candidates: at most this many of each of several lengths are tried: the buckets of that length alone. None
            is the most of which D to the power make at most 4,096.
        overlong: samples above `max_length`: "error" | "drop" (not counted) | "truncate" (counted as cut to it,
            not of several lengths).
        budget: other fields of `Budget` as keywords; for several lengths no strategy, `max_cost` and `memory`.

    Returns:
        The buckets: `shapes` by strictly ascending length, of several lengths by the first, then the second and so on;
        one that holds no sample has the most rows that the budgets allow. And their `num_microbatches`, which
        `make_plan` takes unless it gets another.

    Raises:
        ValueError: if an argument is out of its range, if a sample does not fit the budgets or `overlong` refuses it
            (the first are listed), or if `max_length` cannot hold the longest length rounded up to `length_multiple`.

    Example:
        >>> make_buckets([2, 2, 3, 9], 18, max_shapes=2).shapes
        (Bucket(rows=3, length=3), Bucket(rows=1, length=9))
        >>> make_buckets([2, 2, 3, 9], 18, strategy=[4, 9]).shapes
        (Bucket(rows=3, length=4), Bucket(rows=1, length=9))
        >>> make_buckets([[2, 3], [2, 9], [8, 3], [2, 3]], 24, max_shapes=2).shapes
        (MultiLengthBucket(rows=2, lengths=(2, 3)), MultiLengthBucket(rows=1, lengths=(8, 9)))
    """
    limits = as_budget(max_tokens, budget)
    if as_array("lengths", lengths).ndim == 2:
        return choose_of_several_lengths(check_several_lengths(lengths), limits, overlong, max_candidates)
    if max_candidates is not None:
        raise ValueError(f"max_candidates={max_candidates} is of samples of several lengths")
    return choose_of_one_length(lengths, limits, overlong)
