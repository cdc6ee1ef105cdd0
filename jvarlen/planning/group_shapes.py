"""Shapes for plans of given steps: lengths, and numbers of rows for them, that cost these very steps the least.

A set of shapes costs the tokens of all groups, padding included, and the launch of a program for each group. What a
launch is in tokens depends on the device and the model; here one group of each of `max_shapes` shapes, about what a
step has, costs an eighth of the tokens of a step. The bubble of a pipeline adds nothing: it is as long as some
microbatches of the group, hence the same share of every group. With a `cost` of microbatches, their sum decides
instead, and `compile_seconds` for every shape.

Groups are counted as `step_groups` forms them, in up to 128 steps, evenly spaced over the epoch. Counts of samples by
length do not tell what a shape costs: rows that it leaves free, which shorter samples take, depend on all longer
shapes. So the set is found by local search:

- Shapes to choose from: up to 64 lengths, at equal steps of the integral of √density, at which a quantizer wastes the
  least, each with rows from the most that fit down, four numbers an octave.
- Start: lengths evenly spaced among these, each with rows for about two groups a step.
- Descent: in turns, every shape becomes the best one between its neighbours; then one of those that are missed least
  leaves, and the best other comes.
- Ruin and recreate: four neighbours leave, the set is filled up and descends. The search ends when that helps nowhere,
  or at a fixed number of counted shapes.

Where the lengths are given, by a strategy, as lengths of packed rows or as those of samples of several, only rows are
searched. Samples of several are counted as if a bucket held all samples of those before it.

Letters: N samples, n in the plan, S steps that count, L lengths, O shapes to choose from, C sets of K shapes that are
compared, M microbatches of a group.

References:
  Panter and Dite 1951, "Quantization distortion in pulse-count modulation with nonuniform spacing of levels". Schrimpf
  et al. 2000, "Record breaking optimization results using the ruin and recreate principle".
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from jvarlen.planning.buckets import AnyBucket, Buckets, Histogram, bucket_of
from jvarlen.planning.budget import Budget, caps_of, evaluate_cost, round_up
from jvarlen.planning.cost_model import warn_beyond_measured
from jvarlen.planning.grouping import first_buckets
from jvarlen.planning.lengths import sample_sizes

__all__ = ["choose_group_shapes", "spread_lengths"]

_MOST_STEPS = 128  # that are counted
_MOST_LENGTHS = 64  # to choose from
_ROWS_PER_OCTAVE = 4  # to choose from
_GROUPS_SHARE = 1 / 8  # of the tokens of a step, what one group of every shape costs beyond its tokens
_MOST_COUNTED = 2**19  # shapes of all sets together
_AT_ONCE = 2**15  # values of an array that stays in a processor's cache
_LEAST_GAIN = 1e-7  # of a logarithm, so that rounding decides nothing
_NUM_LEAVING = 4  # neighbours, at once
_NUM_TRIED = 4  # of those that are missed least


def choose_group_shapes(
    buckets: Buckets[AnyBucket],
    lengths: Int64[np.ndarray, " n *sides"],
    step_offsets: Int64[np.ndarray, " S_plus_1"],
    limits: Budget,
    *,
    lengths_given: bool,
) -> Buckets[AnyBucket]:
    """Shapes of the lengths of these buckets, which hold all samples or rows, or of some of these lengths.

    Steps have samples of consecutive `lengths`. There are at most `max_shapes` of them, or as many as buckets if all
    their lengths are needed.
    """
    caps = caps_of(limits, buckets.lengths).tolist()
    classes = tuple(bucket_of(cap, *each.lengths) for each, cap in zip(buckets.shapes, caps, strict=True))
    largest = Buckets(classes, limits.num_microbatches, limits.size)
    num_steps = len(step_offsets) - 1
    steps = np.unique(np.linspace(0, num_steps - 1, min(num_steps, _MOST_STEPS)).round().astype(np.int64))
    held, tokens = _count_samples(largest, lengths, step_offsets, steps)
    options, share_of_steps = _list_options(largest, int(held.sum(axis=1).max()), limits), len(steps) / num_steps
    search = _Search(options, held, limits, tokens=tokens, share_of_steps=share_of_steps, lengths_given=lengths_given)
    chosen = search.run()[::-1]  # lengths ascend, and rows where they are equal
    shapes = tuple(
        bucket_of(rows, *largest.shapes[length].lengths)
        for length, rows in zip(options.length[chosen].tolist(), options.rows[chosen].tolist(), strict=True)
    )
    for model in (limits.cost, limits.memory):
        warn_beyond_measured(model, shapes)
    return Buckets(shapes, limits.num_microbatches, limits.size)


def spread_lengths(histogram: Histogram, max_shapes: int) -> Int64[np.ndarray, " L"]:
    """The rounded lengths to choose from: at equal steps of the integral of √density, the longest included."""
    counts, gaps = np.diff(histogram.samples_below), np.diff(histogram.rounded, prepend=0)
    most = max(_MOST_LENGTHS, 2 * max_shapes)
    if len(counts) <= most:
        return histogram.rounded
    integral = np.cumsum(np.sqrt(counts * gaps))
    ends = np.searchsorted(integral, integral[-1] * np.arange(1, most + 1) / most)
    return histogram.rounded[np.unique(np.minimum(ends, len(counts) - 1))]


def _count_samples(
    largest: Buckets[AnyBucket],
    lengths: Int64[np.ndarray, " n *sides"],
    step_offsets: Int64[np.ndarray, " S_plus_1"],
    steps: Int64[np.ndarray, " S"],
) -> tuple[Int64[np.ndarray, "S L"], int]:
    """How many samples of these steps each of the lengths is the first to hold, and the tokens of all of them."""
    counts, tokens = np.empty((len(steps), len(largest.shapes)), np.int64), 0
    for place, step in enumerate(steps.tolist()):
        of_step = lengths[step_offsets[step] : step_offsets[step + 1]]
        counts[place] = np.bincount(first_buckets(of_step, largest.lengths, "error"), minlength=len(largest.shapes))
        tokens += int(sample_sizes(of_step, largest.size).sum())
    return counts, tokens


class _Options(NamedTuple):
    """All shapes to choose from: lengths descending, and rows where they are equal."""

    length: Int64[np.ndarray, " O"]  # which of the lengths
    rows: Int64[np.ndarray, " O"]  # of a microbatch
    cost: Float64[np.ndarray, " O"]  # of a group: tokens with padding, or what `cost` says


def _list_options(largest: Buckets[AnyBucket], most_samples: int, limits: Budget) -> _Options:
    """The shapes to choose from, with no more rows than a step fills."""
    num_microbatches, multiple = limits.num_microbatches, limits.row_multiple
    which: list[int] = []
    rows: list[int] = []
    for length in range(len(largest.shapes) - 1, -1, -1):
        cap = largest.shapes[length].rows
        most = min(cap, round_up(-(-most_samples // num_microbatches), multiple))
        num_octaves = math.log2(most)
        fewer = most / 2 ** np.linspace(0, num_octaves, math.ceil(_ROWS_PER_OCTAVE * num_octaves) + 1)
        allowed = np.minimum(cap, round_up(fewer.round().astype(np.int64), multiple))
        distinct = np.unique(allowed)[::-1].tolist()
        which += [length] * len(distinct)
        rows += distinct
    length_O, rows_O = np.array(which), np.array(rows)
    if limits.cost is None:
        cost = rows_O * largest.row_sizes[length_O].astype(np.float64)
    else:
        cost = evaluate_cost(limits.cost, rows_O, *np.atleast_2d(largest.lengths.T)[:, length_O])
    return _Options(length_O, rows_O, num_microbatches * cost)


class _Search:
    """The local search. A set of shapes is a row of ascending indices of the options, hence the longest come first."""

    def __init__(
        self,
        options: _Options,
        held: Int64[np.ndarray, "S L"],
        limits: Budget,
        *,
        tokens: int,
        share_of_steps: float,
        lengths_given: bool,
    ):
        num_steps, self._num_lengths = held.shape
        self._options, self._lengths_given = options, lengths_given
        self._most_shapes = max(limits.max_shapes, self._num_lengths) if lengths_given else limits.max_shapes
        self._group_rows = (limits.num_microbatches * options.rows).astype(np.float32)
        up_to = held.cumsum(axis=1).T.astype(np.float32)
        self._up_to = np.concatenate([up_to, np.zeros((1, num_steps), np.float32)])  # the last: below all lengths
        self._group_cost = 0.0 if limits.cost else _GROUPS_SHARE * tokens / num_steps / limits.max_shapes
        self._shape_cost = (limits.compile_seconds or 0.0) * share_of_steps
        self._num_counted = 0

    def run(self) -> Int64[np.ndarray, " K"]:
        """The best set that was found."""
        best, least = self._descend(self._start())
        is_better = True
        while is_better and not self._is_over:
            is_better = False
            for begin in range(0, len(best) - 1, _NUM_LEAVING - 1):
                left = np.delete(best, np.s_[begin : begin + _NUM_LEAVING])
                if len(left) and len(self._allowed(left[None])):
                    found, cost = self._descend(left)
                    if cost < least - _LEAST_GAIN:
                        best, least, is_better = found, cost, True
                if self._is_over:
                    break
        return best

    @property
    def _is_over(self) -> bool:
        return self._num_counted >= _MOST_COUNTED

    def _start(self) -> Int64[np.ndarray, " K"]:
        """Lengths evenly spaced, each with rows for about two groups a step."""
        num_taken = min(self._num_lengths, self._most_shapes)
        taken = np.linspace(self._num_lengths - 1, 0, num_taken).round().astype(np.int64)
        samples = -np.diff(self._up_to[np.append(taken, -1)].mean(axis=1))
        chosen = []
        for length, wanted in zip(taken.tolist(), np.maximum(samples / 2, 1).tolist(), strict=True):
            of_length = np.flatnonzero(self._options.length == length)
            chosen.append(of_length[np.abs(np.log(self._group_rows[of_length] / wanted)).argmin()])
        return np.array(chosen)

    def _descend(self, chosen: Int64[np.ndarray, " K"]) -> tuple[Int64[np.ndarray, " K"], float]:
        """Fills a set up, and changes it as long as that makes it cheaper."""
        least = float(self._costs(chosen[None])[0])
        is_better = True
        while is_better and not self._is_over:
            before = least
            while len(chosen) < self._most_shapes:
                more, cost = self._add(chosen)
                if cost >= least - _LEAST_GAIN:
                    break
                chosen, least = more, cost
            for place in range(len(chosen)):
                chosen, least = self._replace(chosen, place, least)
            chosen, least = self._swap(chosen, least)
            is_better = least < before - _LEAST_GAIN
        return chosen, least

    def _add(self, chosen: Int64[np.ndarray, " K"]) -> tuple[Int64[np.ndarray, " K"], float]:
        """The set with the best further shape, and its cost; infinite where there is none."""
        others = np.delete(np.arange(len(self._options.rows)), chosen)
        sets = np.sort(np.column_stack([np.tile(chosen, (len(others), 1)), others]), axis=1)
        return self._cheapest(self._allowed(sets))

    def _replace(
        self, chosen: Int64[np.ndarray, " K"], place: int, least: float
    ) -> tuple[Int64[np.ndarray, " K"], float]:
        """The set with the best shape between both neighbours at this place."""
        ends = np.concatenate([[-1], chosen, [len(self._options.rows)]])
        between = np.arange(ends[place] + 1, ends[place + 2])
        sets = np.repeat(chosen[None], len(between), axis=0)
        sets[:, place] = between
        found, cost = self._cheapest(self._allowed(sets))
        return (found, cost) if cost < least - _LEAST_GAIN else (chosen, least)

    def _swap(self, chosen: Int64[np.ndarray, " K"], least: float) -> tuple[Int64[np.ndarray, " K"], float]:
        """The set without a shape that it does not need, or with another for one of those that are missed least."""
        if len(chosen) == 1:
            return chosen, least
        fewer = self._allowed(np.stack([np.delete(chosen, place) for place in range(len(chosen))]))
        costs = self._costs(fewer)
        ascending = np.argsort(costs, kind="stable")[:_NUM_TRIED]
        if len(costs) and costs[ascending[0]] <= least:
            return fewer[ascending[0]], float(costs[ascending[0]])
        for place in ascending:
            found, cost = self._add(fewer[place])
            if cost < least - _LEAST_GAIN:
                return found, cost
        return chosen, least

    def _allowed(self, sets: Int64[np.ndarray, "C K"]) -> Int64[np.ndarray, "c K"]:
        """The sets that hold the longest samples, and have all lengths where these are given."""
        length = self._options.length[sets]
        if self._lengths_given:
            return sets[(np.diff(length, axis=1) != 0).sum(axis=1) + 1 == self._num_lengths]
        return sets[length[:, 0] == self._num_lengths - 1]

    def _cheapest(self, sets: Int64[np.ndarray, "C K"]) -> tuple[Int64[np.ndarray, " K"], float]:
        """The first of the cheapest sets, and its cost."""
        if not len(sets):
            return np.empty(0, np.int64), math.inf
        costs = self._costs(sets)
        return sets[costs.argmin()], float(costs.min())

    def _costs(self, sets: Int64[np.ndarray, "C K"]) -> Float64[np.ndarray, " C"]:
        """The logarithm of what each set costs."""
        self._num_counted += sets.size
        at_once = max(1, _AT_ONCE // self._up_to.shape[1])
        parts = [self._sum_groups(sets[begin : begin + at_once]) for begin in range(0, len(sets), at_once)]
        costs, num_groups = np.concatenate(parts, axis=1) if parts else np.empty((2, 0))
        return np.log(costs + self._group_cost * num_groups + self._shape_cost * sets.shape[1])

    def _sum_groups(self, sets: Int64[np.ndarray, "C K"]) -> Float64[np.ndarray, "2 C"]:
        """What the groups of each set cost in all steps, and their number."""
        num_sets, num_shapes = sets.shape
        length, rows, cost = self._options.length[sets], self._group_rows[sets], self._options.cost[sets]
        is_same = np.zeros((num_sets, num_shapes + 1), bool)  # as the length before
        is_same[:, 1:-1] = length[:, 1:] == length[:, :-1]
        shorter = np.full((num_sets, num_shapes), -1)  # the next shorter length
        for k in range(num_shapes - 2, -1, -1):
            shorter[:, k] = np.where(is_same[:, k + 1], shorter[:, k + 1], length[:, k + 1])
        is_shared = (sets == sets[0]).all(axis=0) & (shorter == shorter[0]).all(axis=0)
        num_shared = int(np.append(is_shared, False).argmin())  # shapes that all sets begin with are counted once
        sums = np.zeros((2, num_sets))
        # Free rows take the longest samples left, so that those left are always the shortest ones: a number a step.
        left = self._up_to[None, -2].copy()
        rest = np.zeros_like(left)  # of the samples of the length, those in its last group
        for k in range(num_shapes):
            if k == num_shared:
                left, rest = (np.repeat(values, num_sets, axis=0) for values in (left, rest))
            here = slice(len(left))
            same, of_group = np.flatnonzero(is_same[here, k]), rows[here, k, None]
            own = left - self._up_to[shorter[here, k]]
            np.maximum(own, 0, out=own)
            own[same] = 0
            groups = own / of_group
            np.ceil(groups, out=groups)
            num_groups = groups.sum(axis=1)
            sums += num_groups * cost[here, k], num_groups
            groups *= of_group
            left -= groups
            if len(same):  # the last group has these fewer rows where they hold what is in it
                fits = (rest[same] > 0) & (rest[same] <= of_group[same])
                left[same] += fits * (rows[same, k - 1] - rows[same, k])[:, None]
                saved = np.zeros(len(left))
                saved[same] = fits.sum(axis=1) * (cost[same, k - 1] - cost[same, k])
                sums[0] -= saved
            if is_same[:, k + 1].any():
                rest = np.where(is_same[here, k, None], rest, own - groups + of_group * (own > 0))
        return sums
