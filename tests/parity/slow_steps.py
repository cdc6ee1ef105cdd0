"""Brute force: samples cut into steps one by one, and the groups of a step opened one by one."""

from collections.abc import Callable, Sequence
from typing import Any


def cut_steps(counted: Sequence[int], size_of: Callable[[int, int], int], tokens: Sequence[int]) -> list[list[int]]:
    """Return the places of each step, as many as what they count, one or their tokens, stays within its size."""
    steps: list[list[int]] = []
    seen, left = 0, 0
    for place, count in enumerate(counted):
        if not steps or count > left:
            left = size_of(len(steps), seen)
            steps.append([])
        assert count <= left
        steps[-1].append(place)
        left -= count
        seen += tokens[place]
    return steps


def group_step(
    lengths: Sequence[tuple[int, ...]],
    sizes: Sequence[int],
    buckets: Sequence[tuple[int, ...]],
    num_microbatches: int,
    most_samples: Sequence[int] | None = None,
    num_samples: Sequence[int] | None = None,
) -> list[tuple[int, list[int]]]:
    """Return the groups of a step: the bucket of each, and the places of its samples, or rows, in the step."""

    def holds(bucket: int, place: int) -> bool:
        within = all(length <= limit for length, limit in zip(lengths[place], buckets[bucket][1:], strict=True))
        if most_samples is None or num_samples is None:
            return within
        return within and num_samples[place] <= most_samples[bucket]

    own_length = [next(b for k, b in enumerate(buckets) if holds(k, place))[1:] for place in range(len(lengths))]
    left = list(range(len(lengths)))
    groups: list[tuple[int, list[int]]] = []
    for length in sorted({bucket[1:] for bucket in buckets}, reverse=True):
        of_length = [k for k, bucket in enumerate(buckets) if bucket[1:] == length]
        while own := [place for place in left if own_length[place] == length]:
            rows = {k: num_microbatches * buckets[k][0] for k in of_length}
            bucket = next((k for k in of_length if rows[k] >= len(own)), of_length[-1])
            taken = own[: rows[bucket]]
            others = [place for place in left if place not in own and holds(bucket, place)]
            taken += sorted(others, key=lambda place: -sizes[place])[: rows[bucket] - len(taken)]
            groups.append((bucket, sorted(taken)))
            left = [place for place in left if place not in taken]
    return sorted(groups, key=lambda group: group[0])


def plan_steps(
    ids: Sequence[int],
    lengths: Sequence[Any],
    buckets: Sequence[tuple[int, ...]],
    num_microbatches: int,
    size_of: Callable[[int, int], int],
    counts_tokens: bool,
) -> list[list[tuple[int, list[int]]]]:
    """Return the groups of each step, with ids, of samples that all fit, in this order."""
    as_tuples = [length if isinstance(length, tuple) else (length,) for length in lengths]
    sizes = [sum(as_tuples[i]) for i in ids]
    steps = cut_steps(sizes if counts_tokens else [1] * len(ids), size_of, sizes)
    planned = []
    for places in steps:
        groups = group_step([as_tuples[ids[p]] for p in places], [sizes[p] for p in places], buckets, num_microbatches)
        planned.append([(bucket, [ids[places[p]] for p in group]) for bucket, group in groups])
    return planned


def pack_best_fit(lengths: Sequence[int], row_lengths: Sequence[int], most: Sequence[int]) -> list[list[int]]:
    """Return the places in each row, placed one by one; a row that holds the most samples of its length is full."""
    rows: list[list[int]] = []
    spaces: list[int] = []
    limits: list[int] = []
    since: list[int] = []  # when a row got the space that it has
    for time, place in enumerate(sorted(range(len(lengths)), key=lambda place: -lengths[place])):
        open_rows = [r for r, row in enumerate(rows) if spaces[r] >= lengths[place] and len(row) < limits[r]]
        if not open_rows:
            size = next(k for k, length in enumerate(row_lengths) if length >= lengths[place])
            open_rows = [len(rows)]
            rows.append([])
            spaces.append(row_lengths[size])
            limits.append(most[size])
            since.append(time)
        best = min(open_rows, key=lambda r: (spaces[r], since[r]))
        rows[best].append(place)
        spaces[best] -= lengths[place]
        since[best] = time
    return rows


def pack_pairs(pairs: Sequence[tuple[int, int]], row_lengths: Sequence[int], most: int) -> list[list[int]]:
    """Return the places in each row, one row after the other."""
    left = list(range(len(pairs)))
    rows: list[list[int]] = []
    spaces = list(row_lengths)
    while left:
        fitting = [p for p in left if all(n <= space for n, space in zip(pairs[p], spaces, strict=True))]
        if not rows or not fitting or len(rows[-1]) == most:
            rows.append([])
            spaces = list(row_lengths)
            fitting = left
        factors = [(space << 40) // length**2 for space, length in zip(spaces, row_lengths, strict=True)]

        def rank(p: int, factors: Sequence[int] = tuple(factors)) -> tuple[int, tuple[int, int]]:
            return sum(n * factor for n, factor in zip(pairs[p], factors, strict=True)), pairs[p]

        best = max(fitting, key=rank)
        rows[-1].append(best)
        spaces = [space - n for space, n in zip(spaces, pairs[best], strict=True)]
        left.remove(best)
    return rows


def wrap(lengths: Sequence[int], row_length: int, most: int, size_of: Callable[[int, int], int]) -> list[Any]:
    """Return the rows of each step, of chunks (place, first token, tokens), laid token by token."""
    steps: list[list[list[tuple[int, int, int]]]] = []
    seen = left = 0
    for place, length in enumerate(lengths):
        for token in range(length):
            if left == 0:
                left = size_of(len(steps), seen)
                steps.append([[]])
            row = steps[-1][-1]
            goes_on = bool(row) and row[-1][0] == place
            if sum(tokens for *_, tokens in row) == row_length or (not goes_on and len(row) == most):
                row, goes_on = [], False
                steps[-1].append(row)
            if goes_on:
                row[-1] = (place, row[-1][1], row[-1][2] + 1)
            else:
                row.append((place, token, 1))
            seen, left = seen + 1, left - 1
    return steps
