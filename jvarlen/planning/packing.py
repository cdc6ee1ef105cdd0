"""Packs several samples into each row, and puts the samples in place of rows in the plan of these rows.

Letters: N samples, n of them (or of their chunks) packed, D features, R rows, G distinct rows, S steps, P places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, Int64, Integer

from jvarlen._common.checks import (
    UserError,
    check_at_least_one,
    check_choices,
    if_given,
    is_integer,
    list_offenders,
    offenders_where,
)
from jvarlen.planning._kernels import fill_blocks, take_segments
from jvarlen.planning.buckets import AnyBucket
from jvarlen.planning.budget import check_bucket_lengths
from jvarlen.planning.lengths import (
    PackedOverlong,
    check_feature_lengths,
    check_lengths,
    check_lengths_for,
    ends_to_offsets,
    fit_lengths,
)
from jvarlen.planning.order import (
    PACKING_STREAM,
    Order,
    as_order,
    block_size_of,
    check_seed,
    is_by,
    random_keys,
    sample_order,
    stable_argsort,
)
from jvarlen.planning.packings import Packing, PackingMethod, feature_histograms
from jvarlen.planning.placing import distinct_joint_rows, place_samples

if TYPE_CHECKING:
    from jvarlen.planning.plan import Plan

__all__ = [
    "MAX_ROW_LENGTH",
    "lengths_of_rows",
    "order_of_wrapped_rows",
    "orders_of_packing",
    "pack_samples",
    "rows_in_chunk_order",
    "split_lengths",
    "steps_in_chunk_order",
    "with_samples",
]

_LEAST_BLOCK = 256  # samples
_MOST_SLOW = 2**16  # samples, if rules without a kernel for blocks pack them; of more, few rows recur without blocks
_MOST_TRIED = 2**20  # samples that tell the block size
MAX_ROW_LENGTH = 2**23 - 1  # of several features: so that products of lengths and factors fit int64
_TOO_LONG_JOINTLY = 'samples longer than the rows (overlong="drop" or "truncate" allows them)'
_TOO_LONG = 'samples longer than the longest row (overlong="drop", "truncate" or "split" allows them)'


def pack_samples(
    lengths: npt.ArrayLike,
    row_lengths: int | Sequence[int],
    *,
    method: PackingMethod = "best_fit",
    max_samples_per_row: int | None = None,
    order: str | Order | npt.ArrayLike = "dataset",
    seed: int = 0,
    epoch: int = 0,
    overlong: PackedOverlong = "error",
) -> Packing:
    """Packs several samples into each row.

    Wrapped, samples lie end to end in their order, and are cut at the end of every row, so that all rows but the last
    are full. Each chunk is packed as a sample of its own, and counted as one.

    Best fit keeps samples whole. Without `max_samples_per_row`, samples come by descending length, ties as in `order`,
    each into the open row with the least free space that holds it; of several such rows, into the one that has had this
    space longest. If no open row holds it, a new one is opened with the smallest length that does.

    With `max_samples_per_row`, rows come one after the other. A row takes the longest sample that is left, and then
    repeatedly the longest that fits, up to the limit. Its length is the smallest that holds its first sample. If the
    samples left after it are too many even for full rows of the shortest length, the row takes as many as it may
    instead: the shortest or the longest sample, whichever is farther from the mean; then repeatedly the longest up to
    an even share of the space; and, as the last two, the pair that fills it exactly of which most are left. The same
    row is repeated as often as its samples last.

    Samples of several features, such as source and target, share rows with a length T_d for each feature d. A row
    repeatedly takes, of the samples that fit it in all features, the one with the largest Σ_d l_d · ⌊2**40 · s_d /
    T_d²⌋, where l_d are its lengths and s_d the space that is left; of equal sums the larger l_1 wins, then the larger
    l_2 and so on. With `max_samples_per_row` = m, if L > m samples with W_d tokens are left and ⌈L / m⌉ · T_d > W_d for
    every d, then, after the first sample, only those of at most ⌊s_d / k⌋ tokens are considered, if there are any,
    where k is how many samples the row may still take. The same row is repeated as often as its samples last.

    Best fit packs shuffled samples in blocks, so that every epoch has other rows. A block is `Order.block_size` samples
    that follow each other in the shuffled order, and the samples of the last row of the block before, which is not
    kept. A block size of `"auto"` is the least power of two, from 256 on and below the number of samples, with
    which the rows of epoch 0 (for more than 2**20 samples, of the first 2**20) are at most 0.1 %, rounded up, more
    than without blocks. If there is none, and for more than 2**16 samples with `max_samples_per_row` or several
    features, there are no blocks. Without blocks, and in other orders, the sizes of the rows depend only on the
    lengths.

    Args:
      lengths: integers[N], tokens a sample; or integers[N, D], those of each of D features.
      row_lengths: the lengths that rows may have: one integer, or several, strictly ascending, as from
        `choose_row_lengths`; wrapped, one. For D features: D integers, the length of a row in each, below 2**23.
      method: `"best_fit"`, or `"wrapped"`, of one feature, without `max_samples_per_row`, in blocks of no size, and
        with the default `overlong`, since every sample may be cut.
      max_samples_per_row: the most samples in a row; None: any number.
      order: a word, an array of sample ids or an `Order`, of which `by` and, of `"shuffle"`, `block_size` count;
        `"shuffle"` draws from a stream that is independent of that of plans.
      seed: as in `sample_order`.
      epoch: as in `sample_order`.
      overlong: what happens to samples longer than the longest row: `"error"`, `"drop"`, `"truncate"` (in every
        feature), or `"split"`, of one feature: into chunks as long as that row and a shorter last one.

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
      descending size: Johnson et al. 1974. Features: Panigrahy et al. 2011, "Heuristics for Vector Bin Packing".
    """
    check_at_least_one(**if_given(max_samples_per_row=max_samples_per_row))
    check_choices(overlong=(overlong, PackedOverlong), method=(method, PackingMethod))
    is_joint = np.ndim(lengths) == 2
    given = check_feature_lengths(lengths) if is_joint else check_lengths(lengths)
    if is_joint and method == "wrapped":
        raise UserError("wrapped packing is for samples of one length each: chunks of others would not go together")
    if is_joint:
        sizes = _check_feature_row_lengths(row_lengths, given.shape[1])
        if overlong == "split":
            raise UserError('overlong="split" is for samples of one feature: chunks of others would not go together')
    else:
        sizes = check_bucket_lengths([row_lengths] if is_integer(row_lengths) else row_lengths)  # type: ignore[list-item, arg-type]
    if method == "wrapped":
        given_too = {"max_samples_per_row": max_samples_per_row}
        return _wrapped(given, sizes, as_order(order), seed, epoch, overlong, given_too)
    check_seed(seed, epoch)
    order = as_order(order)
    if not is_by(order, "shuffle"):
        if block_size_of(order) is not None:
            raise UserError(f"block_size ({order.block_size}) is for order 'shuffle': others are packed all at once")
        ids = sample_order(given.sum(axis=1) if is_joint else given, order)
        fitted = _fit(given[ids], sizes, overlong, ids)
        rows = _pack(fitted.lengths, None, sizes, max_samples_per_row)
    else:
        ids = _shuffled_ids(len(given), seed, epoch)
        fitted = _fit(given[ids], sizes, overlong, ids)
        block_size = order.block_size
        if block_size == "auto":
            first = ids if epoch == 0 else _shuffled_ids(len(given), seed, 0, _MOST_TRIED)
            tried = fitted if epoch == 0 else _fit(given[first], sizes, overlong, first)
            block_size = _least_block_size(tried, len(ids), sizes, max_samples_per_row)
        rows = _pack(fitted.lengths, _block_ends(fitted.place, block_size), sizes, max_samples_per_row)
    which, row_offsets, capacity = rows
    histograms = None
    if len(ids) < len(given):  # another epoch may take others
        histograms = feature_histograms(_fit(given, sizes, "drop" if overlong == "error" else overlong).lengths)
    return Packing(
        sample_ids=ids[fitted.which][which],
        row_offsets=row_offsets,
        sample_lengths=fitted.lengths[which],
        capacity=capacity,
        piece_starts=None if fitted.starts is None else fitted.starts[which],
        row_lengths=tuple(sizes.tolist()),
        overlong=overlong,
        num_dropped=fitted.num_dropped,
        num_truncated=fitted.num_truncated,
        max_samples_per_row=max_samples_per_row,
        histograms=histograms,
    )


class _Rows(NamedTuple):
    """What rows hold: indices of what is packed, row by row, where each row begins, and the length of each."""

    which: Int64[np.ndarray, " n"]
    offsets: Int64[np.ndarray, " R_plus_1"]
    capacity: Int64[np.ndarray, " R *features"]


def _shuffled_ids(num_samples: int, seed: int, epoch: int, most: int | None = None) -> Int64[np.ndarray, " m"]:
    """The ids of shuffled samples; at most so many."""
    keys = random_keys(num_samples, seed=seed, epoch=epoch, stream=PACKING_STREAM)
    if most is None or most >= num_samples:
        return stable_argsort(keys)
    first = np.flatnonzero(keys <= np.partition(keys, most - 1)[most - 1])
    return first[stable_argsort(keys[first])][:most]


def _wrapped(
    lengths: Int64[np.ndarray, " N"],
    sizes: Int64[np.ndarray, " K"],
    order: Order,
    seed: int,
    epoch: int,
    overlong: PackedOverlong,
    options: dict[str, Any],
) -> Packing:
    """`pack_samples` end to end, cut at the end of every row."""
    refused = [f"{name}={value!r}" for name, value in options.items() if value is not None]
    refused += [f"block_size={order.block_size}"] if block_size_of(order) is not None else []
    refused += [f"overlong={overlong!r}"] if overlong != "error" else []
    refused += [f"several row lengths, {sizes.tolist()}"] if len(sizes) > 1 else []
    if refused:
        raise UserError(f"wrapped packing fills rows of one length to their end, and excludes {'; '.join(refused)}")
    check_seed(seed, epoch)
    ids = _shuffled_ids(len(lengths), seed, epoch) if is_by(order, "shuffle") else sample_order(lengths, order)
    ordered = lengths[ids]
    if ordered.sum(dtype=np.float64) >= 2**62:
        raise UserError("all samples together have 2**62 tokens or more, too many to lie end to end")
    row_length = int(sizes[0])
    begins = ends_to_offsets(np.cumsum(ordered))  # of each sample, and the end of the last
    row_begins = np.arange(0, begins[-1], row_length)
    place = np.searchsorted(begins, row_begins)
    is_cut = begins[place] != row_begins
    place, cuts = place[is_cut], row_begins[is_cut]
    which = np.insert(np.arange(len(ids)), place, place - 1)
    chunk_begins = np.insert(begins[:-1], place, cuts)
    return Packing(
        sample_ids=ids[which],
        row_offsets=np.append(np.searchsorted(chunk_begins, row_begins), len(which)),
        sample_lengths=np.diff(chunk_begins, append=begins[-1]),
        capacity=np.full(len(row_begins), row_length),
        piece_starts=chunk_begins - begins[which],
        row_lengths=(row_length,),
        overlong="split",
        method="wrapped",
        histograms=feature_histograms(lengths),
    )


def _least_block_size(
    fitted: _Fitted, num_samples: int, sizes: Int64[np.ndarray, " K"], max_samples_per_row: int | None
) -> int | None:
    """The block size of `"auto"`; None for no blocks."""
    block_size, num_tried = _LEAST_BLOCK, min(num_samples, _MOST_TRIED)
    if num_samples > _MOST_SLOW and (fitted.lengths.ndim == 2 or max_samples_per_row is not None):
        return None
    lengths, place = (column[fitted.place < num_tried] for column in (fitted.lengths, fitted.place))
    if block_size >= num_tried or not len(lengths):
        return None
    num_rows = len(_pack(lengths, None, sizes, max_samples_per_row).capacity)
    most_rows = num_rows - (-num_rows // 1000)
    while block_size < num_tried:
        rows = _pack(lengths, _block_ends(place, block_size), sizes, max_samples_per_row, most_rows)
        if 0 < len(rows.capacity) <= most_rows:
            return block_size
        block_size *= 2
    return None


def _block_ends(place: Int64[np.ndarray, " n"], block_size: int | None) -> Int64[np.ndarray, " b"] | None:
    """Where blocks of so many samples end; None where there are none, or one."""
    if block_size is None or block_size > place[-1]:
        return None
    return np.append(np.flatnonzero(np.diff(place // block_size)) + 1, len(place))


def _pack(
    lengths: Int64[np.ndarray, " n *features"],
    block_ends: Int64[np.ndarray, " b"] | None,
    sizes: Int64[np.ndarray, " K"],
    max_samples_per_row: int | None,
    most_rows: int = 2**62,
) -> _Rows:
    """Packs all at once, or block by block; not to the end where the rows are more than `most_rows`."""
    if block_ends is not None and lengths.ndim == 1 and max_samples_per_row is None:
        block = np.repeat(np.arange(len(block_ends)), np.diff(block_ends, prepend=0))
        longest = int(lengths.max())
        if len(block_ends) * (longest + 1) < 2**62:
            descending = stable_argsort(block * (longest + 1) + (longest - lengths))
        else:
            descending = np.lexsort([-lengths, block])
        which, ends, capacity = fill_blocks(lengths, descending, block_ends, sizes, most_rows)
        return _Rows(which, ends_to_offsets(ends), capacity)
    if block_ends is not None:
        return _pack_blocks(lengths, block_ends, sizes, max_samples_per_row, most_rows)
    if lengths.ndim == 2:
        joint, kind = distinct_joint_rows(lengths, sizes, max_samples_per_row)
        which, offsets = joint.filled(kind)
        return _Rows(which, offsets, np.tile(sizes, (len(offsets) - 1, 1)))
    descending = stable_argsort(-lengths)
    ordered = lengths[descending]
    first = np.flatnonzero(np.diff(ordered, prepend=-1))  # of each distinct length
    num_of_each = np.diff(first, append=len(ordered))
    placed = place_samples(ordered[first].tolist(), num_of_each.tolist(), sizes.tolist(), max_samples_per_row)
    row, capacity = placed.row_of_samples(), placed.capacity()
    offsets = ends_to_offsets(np.cumsum(np.bincount(row, minlength=len(capacity))))
    return _Rows(descending[stable_argsort(row)], offsets, capacity)


def _pack_blocks(
    lengths: Int64[np.ndarray, " n *features"],
    block_ends: Int64[np.ndarray, " b"],
    sizes: Int64[np.ndarray, " K"],
    max_samples_per_row: int | None,
    most_rows: int,
) -> _Rows:
    """`_pack` of blocks by the rules that have no kernel for it."""
    parts = []
    carried, begin, num_rows = np.empty(0, np.int64), 0, 0
    for end in block_ends.tolist():
        samples = np.concatenate([carried, np.arange(begin, end)])
        rows = _pack(lengths[samples], None, sizes, max_samples_per_row)
        num_kept = len(rows.capacity) - (end < len(lengths))
        placed, last = np.split(samples[rows.which], rows.offsets[num_kept : num_kept + 1])
        parts.append((placed, np.diff(rows.offsets[: num_kept + 1]), rows.capacity[:num_kept]))
        carried, begin, num_rows = np.sort(last), end, num_rows + num_kept
        if num_rows > most_rows:
            break
    which, num_in_row, capacity = map(np.concatenate, zip(*parts, strict=True))
    return _Rows(which, ends_to_offsets(np.cumsum(num_in_row)), capacity)


class _Fitted(NamedTuple):
    """What is packed, in order: samples, or chunks of them."""

    which: Integer[np.ndarray, " n"] | Bool[np.ndarray, " N"] | slice
    lengths: Int64[np.ndarray, " n *features"]
    starts: Int64[np.ndarray, " n"] | None  # the token with which each begins; None where no sample is split
    num_dropped: int = 0
    num_truncated: int = 0

    @property
    def place(self) -> Int64[np.ndarray, " n"]:
        """The place of each in the order of samples."""
        if isinstance(self.which, slice):
            return np.arange(len(self.lengths))
        return np.flatnonzero(self.which) if self.which.dtype == bool else self.which


def _fit(
    lengths: Int64[np.ndarray, " N *features"],
    row_lengths: Int64[np.ndarray, " K"],
    overlong: PackedOverlong,
    ids: Int64[np.ndarray, " N"] | None = None,
) -> _Fitted:
    """Applies the rule for samples that are longer than the longest row, or a row in any feature."""
    is_joint = lengths.ndim == 2
    limit = row_lengths if is_joint else int(row_lengths[-1])
    if overlong == "split" and lengths.max() > row_lengths[-1]:
        which, starts, of_chunks = split_lengths(lengths, int(row_lengths[-1]))
        return _Fitted(which, of_chunks, starts)
    problem = _TOO_LONG_JOINTLY if is_joint else _TOO_LONG
    fitted = fit_lengths(lengths, limit, "error" if overlong == "split" else overlong, ids, problem=problem)
    return _Fitted(fitted.kept, fitted.lengths, None, fitted.num_dropped, fitted.num_truncated)


def _check_feature_row_lengths(row_lengths: int | Sequence[int], num_features: int) -> Int64[np.ndarray, " D"]:
    """Checks the length of rows in each of D features: integers from 1 to 2**23 − 1."""
    given: list[Any] = [row_lengths] if isinstance(row_lengths, int) else list(row_lengths)
    if len(given) != num_features:
        raise UserError(f"lengths of {num_features} features need a row length for each, not {given}")
    wrong = [f"feature {d}: {t!r}" for d, t in enumerate(given) if not is_integer(t) or not 1 <= t <= MAX_ROW_LENGTH]
    if wrong:
        raise UserError(f"row lengths must be integers from 1 to {MAX_ROW_LENGTH}: {', '.join(wrong)}")
    return np.array(given, np.int64)


def split_lengths(
    lengths: Int64[np.ndarray, " N"], longest: int
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
    """The chunks of samples: the index of the sample, the token with which the chunk begins, and its length."""
    num_chunks = -(-lengths // longest)
    which = np.repeat(np.arange(len(lengths)), num_chunks)
    starts = longest * (np.arange(len(which)) - (np.cumsum(num_chunks) - num_chunks)[which])
    return which, starts, np.minimum(lengths[which] - starts, longest)


def lengths_of_rows(
    packing: Packing, buckets: Sequence[AnyBucket], overlong: PackedOverlong
) -> Int64[np.ndarray, " R *sides"]:
    """The tokens of packed rows; raises ValueError where no bucket holds them."""
    if overlong != "error":
        raise UserError(f"overlong={overlong!r}: a packing has cut or dropped samples by its own rule already")
    num_tokens = check_lengths_for(buckets, packing.num_tokens)
    if num_tokens.ndim == 1:
        problem = "packed rows longer than the longest bucket; of the rows"
        return fit_lengths(num_tokens, buckets[-1].lengths[0], "error", problem=problem).lengths
    bucket_lengths = np.array([bucket.lengths for bucket in buckets])
    is_held = np.any(np.all(num_tokens[:, None] <= bucket_lengths, axis=2), axis=1)
    if not np.all(is_held):
        longest = bucket_lengths.max(axis=0).tolist()
        offenders = list_offenders(*offenders_where(np.logical_not(is_held), num_tokens), longest)
        raise UserError(f"packed rows that no bucket holds; of the rows: {offenders}")
    return num_tokens


def with_samples(plan_of_rows: Plan, packing: Packing) -> Plan:
    """The plan with the samples of each row in place of the row."""
    _check_cuts(packing, plan_of_rows.buckets)
    rows = plan_of_rows.sample_ids
    row_offsets = ends_to_offsets(np.cumsum(np.diff(packing.row_offsets)[rows]))

    def of_rows(values: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " m"]:
        return take_segments(values, packing.row_offsets, rows, row_offsets)

    return dataclasses.replace(
        plan_of_rows,
        sample_ids=of_rows(packing.sample_ids),
        piece_starts=None if packing.piece_starts is None else of_rows(packing.piece_starts),
        step_offsets=row_offsets[plan_of_rows.step_offsets],
        row_offsets=row_offsets,
        overlong=packing.overlong,
        num_dropped=packing.num_dropped,
        num_truncated=packing.num_truncated,
        samples_per_row=packing.samples_per_row([bucket.lengths for bucket in plan_of_rows.buckets]),
    )


def orders_of_packing(order: Order, method: PackingMethod) -> tuple[Order, Order]:
    """The order in which the samples of a plan are packed, and that of the rows."""
    of_rows = dataclasses.replace(order, block_size=None)
    if is_by(order, "shuffle"):
        return order, of_rows
    if method == "wrapped" or not isinstance(order.by, str):
        return Order(order.by, block_size=order.block_size), dataclasses.replace(of_rows, by="dataset")
    return Order("dataset", block_size=order.block_size), of_rows  # in which best fit makes rows of the same sizes


def order_of_wrapped_rows(order: Order, num_rows: int) -> Order:
    """The order of wrapped rows in a plan; ValueError for one that leaves out rows, and so parts of samples."""
    if not isinstance(order.by, str) and np.size(order.by) < num_rows:
        raise UserError(
            f"order has {np.size(order.by):,} of {num_rows:,} wrapped rows, but samples reach from row to row: leave "
            "samples out, by an order for pack_samples"
        )
    # Nearly every row begins with the rest of a sample.
    return dataclasses.replace(order, by="dataset") if order.chunks_in_order else order


def rows_in_chunk_order(packing: Packing, rows: Int64[np.ndarray, " R"]) -> Int64[np.ndarray, " R"]:
    """Ordered rows, each after the rows that hold earlier chunks of its samples."""
    assert packing.piece_starts is not None
    place_of_row = np.full(packing.num_rows, -1)
    place_of_row[rows] = np.arange(len(rows))
    place = np.repeat(place_of_row, np.diff(packing.row_offsets))
    is_in = place >= 0  # an order array can leave rows out
    ids, starts = packing.sample_ids[is_in], packing.piece_starts[is_in]
    return rows[_after_earlier_chunks(ids, starts, place[is_in], len(rows))]


def steps_in_chunk_order(plan: Plan, longest_first: bool) -> Plan:
    """The plan with each step after those that hold earlier chunks of its samples, and with chunks in their order."""
    assert plan.piece_starts is not None
    assert plan.row_offsets is not None
    step_of_chunk = np.repeat(np.arange(plan.num_steps), plan.num_sequences)
    emitted = _after_earlier_chunks(plan.sample_ids, plan.piece_starts, step_of_chunk, plan.num_steps)
    if longest_first:
        longest = plan.step_bucket[emitted] == plan.step_bucket.max()
        first = int(longest.argmax())
        emitted[[0, first]] = emitted[[first, 0]]
    first_row = np.searchsorted(plan.row_offsets, plan.step_offsets)
    num_rows = np.diff(first_row)[emitted]
    row_of = take_segments(np.arange(plan.num_rows), first_row, emitted, ends_to_offsets(np.cumsum(num_rows)))
    offsets = ends_to_offsets(np.cumsum(plan.num_sequences[emitted]))
    ids = take_segments(plan.sample_ids, plan.step_offsets, emitted, offsets)
    starts = take_segments(plan.piece_starts, plan.step_offsets, emitted, offsets)
    in_sample = np.lexsort([starts, ids])
    starts[stable_argsort(ids)] = starts[in_sample]
    return dataclasses.replace(
        plan,
        step_bucket=plan.step_bucket[emitted],
        step_offsets=offsets,
        num_tokens=plan.num_tokens[emitted],
        sample_ids=ids,
        piece_starts=starts,
        row_offsets=ends_to_offsets(np.cumsum(np.diff(plan.row_offsets)[row_of])),
    )


def _after_earlier_chunks(
    ids: Int64[np.ndarray, " n"], starts: Int64[np.ndarray, " n"], place: Int64[np.ndarray, " n"], num_places: int
) -> Int64[np.ndarray, " P"]:
    """Places in order, but one with the last chunk of a sample follows all that hold other chunks of it."""
    last_start = np.zeros(ids.max() + 1, np.int64)
    np.maximum.at(last_start, ids, starts)
    is_last = starts == last_start[ids]
    last_of_others = np.full(len(last_start), -1)
    np.maximum.at(last_of_others, ids[~is_last], place[~is_last])
    waits_for = np.full(num_places, -1)
    np.maximum.at(waits_for, place[is_last], last_of_others[ids[is_last]])
    own = np.arange(num_places)
    return np.lexsort([own, waits_for > own, np.maximum(own, waits_for)])


def _check_cuts(packing: Packing, buckets: Sequence[AnyBucket]) -> None:
    """Raises ValueError if a bucket would hold more of a cut or split sample than was packed."""
    if packing.method == "wrapped" and len(buckets) > 1:
        raise UserError(f"wrapped packing has one row length, so one bucket, not {[tuple(each) for each in buckets]}")
    is_split = packing.piece_starts is not None
    if not packing.num_truncated and not is_split:
        return
    longest = tuple(np.max([bucket.lengths for bucket in buckets], axis=0).tolist())
    # Of several features, a sample that was cut fills its row in that feature, so that buckets are never shorter.
    is_wrong = (
        longest != packing.row_lengths[-1:] if len(longest) == 1 else any(np.greater(longest, packing.row_lengths))
    )
    if is_wrong:
        raise UserError(
            f"the packing {'splits' if is_split else 'cuts'} samples at {packing.row_lengths} tokens, so the longest "
            f"bucket must have the same length, not {longest}"
        )
