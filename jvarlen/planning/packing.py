"""Packs several samples into each row.

NumPy only. Best fit, longest samples first, on the histogram: samples of one length are placed together, and rows with
the same free space are kept together, so the time depends on the number of distinct lengths and hardly on the number of
samples. Letters: N samples, n of them packed, R rows, D distinct lengths.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from jaxtyping import Int64

from jvarlen._common.checks import is_integer
from jvarlen.planning.edges import check_edges
from jvarlen.planning.lengths import Overlong, check_lengths, ends_to_offsets, fit_lengths
from jvarlen.planning.order import PACKING_STREAM, check_seed, random_keys, sample_order, stable_argsort

__all__ = ["Packing", "pack_samples", "rows_by_tokens"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Samples packed into rows. `make_plan` takes it in place of lengths and plans the rows.

    Attributes:
      sample_ids: int64[n], row by row, each row from its beginning.
      row_offsets: int64[R+1]; row r holds `sample_ids[row_offsets[r]:row_offsets[r+1]]`.
      sample_lengths: int64[n], tokens of each sample; a truncated sample counts with its cut length.
      capacity: int64[R], the length of each row.
      row_lengths: the lengths that rows may have, ascending.
      overlong: the rule for samples longer than the longest row.
      num_dropped: samples left out by that rule.
      num_truncated: samples cut by that rule.
    """

    sample_ids: Int64[np.ndarray, " n"]
    row_offsets: Int64[np.ndarray, " R_plus_1"]
    sample_lengths: Int64[np.ndarray, " n"]
    capacity: Int64[np.ndarray, " R"]
    row_lengths: tuple[int, ...]
    overlong: Overlong = "error"
    num_dropped: int = 0
    num_truncated: int = 0

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.capacity)

    @property
    def num_tokens(self) -> Int64[np.ndarray, " R"]:
        """int64[R], tokens in each row, which a plan takes as the length of the row."""
        return np.add.reduceat(self.sample_lengths, self.row_offsets[:-1])

    @property
    def starts(self) -> Int64[np.ndarray, " n"]:
        """int64[n], the position in its row at which each sample begins."""
        ends = np.cumsum(self.sample_lengths)
        starts = ends - self.sample_lengths
        return starts - np.repeat(starts[self.row_offsets[:-1]], np.diff(self.row_offsets))

    @property
    def fill(self) -> float:
        """The share of all positions that hold a token, in (0, 1]."""
        return int(self.sample_lengths.sum()) / int(self.capacity.sum())


def pack_samples(
    lengths: npt.ArrayLike,
    row_lengths: int | Sequence[int],
    *,
    order: str | npt.ArrayLike = "dataset",
    seed: int = 0,
    epoch: int = 0,
    overlong: Overlong = "error",
) -> Packing:
    """Packs several samples into each row, by best fit.

    Samples are placed by descending length, ties as in `order`. Each goes into the open row with the least free space
    that still holds it; of several such rows, into the one that has had this space longest. If no open row holds it, a
    new one is opened with the smallest length that does. The sizes of the rows depend only on the lengths: with
    `order="shuffle"`, another epoch fills rows of the same sizes with other samples, so the buckets stay the same.

    Args:
      lengths: integers[N], tokens a sample.
      row_lengths: the lengths that rows may have: one integer, or several, strictly ascending, as from
        `choose_row_lengths`.
      order: as in `sample_order`, except that `"shuffle"` draws from a separate random stream, so that a plan of the
        rows with the same seed is independent of it.
      seed: as in `sample_order`.
      epoch: as in `sample_order`.
      overlong: what happens to samples longer than the longest row: `"error"`, `"drop"` or `"truncate"`.

    Returns:
      `Packing`.

    Raises:
      ValueError: arguments that are not as described; offending samples are listed as id, value, limit.

    Example:
      >>> packing = pack_samples([3, 6, 2, 5, 4], 10)
      >>> packing.sample_ids.tolist(), packing.row_offsets.tolist(), packing.starts.tolist()
      ([1, 4, 3, 0, 2], [0, 2, 5], [0, 6, 0, 5, 8])

    References:
      Packing by histogram: Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination". Best fit by
      descending size is within 11/9 of the optimum plus a constant: Johnson et al. 1974.
    """
    lengths = check_lengths(lengths)
    capacities = check_edges([row_lengths] if is_integer(row_lengths) else row_lengths)  # type: ignore[list-item, arg-type]
    check_seed(seed, epoch)
    if isinstance(order, str) and order == "shuffle":
        ids = stable_argsort(random_keys(len(lengths), seed=seed, epoch=epoch, stream=PACKING_STREAM))
    else:
        ids = sample_order(lengths, order)
    problem = 'samples longer than the longest row (overlong="drop" or "truncate" allows them)'
    fitted = fit_lengths(lengths[ids], int(capacities[-1]), overlong, ids, problem=problem)

    descending = stable_argsort(-fitted.lengths)
    ids, ordered = ids[fitted.kept][descending], fitted.lengths[descending]
    first = np.flatnonzero(np.diff(ordered, prepend=-1))  # of each distinct length
    counts = np.diff(first, append=len(ordered))
    placed = _best_fit(ordered[first].tolist(), counts.tolist(), capacities.tolist())
    row, capacity = placed.row_of_samples(), placed.capacity()
    by_row = stable_argsort(row)
    return Packing(
        sample_ids=ids[by_row],
        row_offsets=ends_to_offsets(np.cumsum(np.bincount(row, minlength=len(capacity)))),
        sample_lengths=ordered[by_row],
        capacity=capacity,
        row_lengths=tuple(capacities.tolist()),
        overlong=overlong,
        num_dropped=fitted.num_dropped,
        num_truncated=fitted.num_truncated,
    )


def rows_by_tokens(lengths: list[int], counts: list[int], capacities: Sequence[int]) -> dict[int, int]:
    """The histogram of tokens in the rows of `pack_samples`.

    Args:
      lengths: distinct lengths of samples, descending, each at most the last capacity.
      counts: samples of each.
      capacities: the lengths that rows may have, ascending.

    Returns:
      Numbers of rows by their tokens; some may be 0.
    """
    placed = _best_fit(lengths, counts, capacities)
    num_rows: collections.Counter[int] = collections.Counter()
    for capacity, opened in placed.opened:
        num_rows[capacity] += opened
    for capacity, space, num_alike in placed.unfilled:
        num_rows[capacity] -= num_alike
        num_rows[capacity - space] += num_alike
    return num_rows


class _Placed(NamedTuple):
    """Samples in the order of placing, as runs: `num_samples` of a length, `per_row` a row, from `first_row` on.

    Rows in the order of opening as (capacity, number), and those with space left as (capacity, space, number).
    """

    first_row: list[int]
    per_row: list[int]
    num_samples: list[int]
    opened: list[tuple[int, int]]
    unfilled: list[tuple[int, int, int]]

    def capacity(self) -> Int64[np.ndarray, " R"]:
        """int64[R], the tokens that each row has room for."""
        return np.repeat(*np.array(self.opened).T)

    def row_of_samples(self) -> Int64[np.ndarray, " n"]:
        """int64[n], the row of each sample."""
        num_samples = np.array(self.num_samples)
        run = np.repeat(np.arange(len(num_samples)), num_samples)
        place_in_run = np.arange(len(run)) - (np.cumsum(num_samples) - num_samples)[run]
        return np.array(self.first_row)[run] + place_in_run // np.array(self.per_row)[run]


def _best_fit(lengths: list[int], counts: list[int], capacities: Sequence[int]) -> _Placed:
    """Places `counts` samples of each of the descending `lengths`.

    A row that took a sample and still holds another of that length is again the one with the least space that does, so
    each row takes as many as it holds before the next one is looked at.
    """
    runs: list[tuple[int, int, int]] = []
    opened: list[tuple[int, int]] = []
    num_rows = 0
    spaces: list[int] = []  # of open rows, ascending, distinct
    rows_with: dict[int, collections.deque[tuple[int, int, int]]] = {}  # by space: first row, number, capacity
    for length, count in zip(lengths, counts, strict=True):
        while count:
            place = bisect.bisect_left(spaces, length)
            if place < len(spaces):
                space = spaces[place]
                rows = rows_with[space]
                first, num_alike, capacity = rows.popleft()
                per_row = space // length
                used = min(num_alike, -(-count // per_row))
                if used < num_alike:
                    rows.appendleft((first + used, num_alike - used, capacity))
                elif not rows:
                    del spaces[place], rows_with[space]
            else:
                space = capacity = capacities[bisect.bisect_left(capacities, length)]
                per_row = space // length
                first, used = num_rows, -(-count // per_row)
                num_rows += used
                opened.append((capacity, used))
            num_placed = min(count, used * per_row)
            count -= num_placed
            runs.append((first, per_row, num_placed))
            num_full, rest = divmod(num_placed, per_row)
            for row, num_alike, left in (
                (first, num_full, space - per_row * length),
                (first + num_full, int(rest > 0), space - rest * length),
            ):
                if num_alike and left:
                    if left not in rows_with:
                        bisect.insort(spaces, left)
                        rows_with[left] = collections.deque()
                    rows_with[left].append((row, num_alike, capacity))
    first_row, per_rows, num_samples = map(list, zip(*runs, strict=True))
    unfilled = [(capacity, space, number) for space, rows in rows_with.items() for _, number, capacity in rows]
    return _Placed(first_row, per_rows, num_samples, opened, unfilled)
