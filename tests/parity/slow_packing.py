"""Packing transcribed into plain Python: one sample at a time, a queue of rows for every space left.

With a limit on the samples of a row: one row at a time, ids in a list for every length.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from operator import le, mul, sub
from typing import Any, NamedTuple

import numpy as np

from . import slow


class Row(NamedTuple):
    """A row: the length it was opened with, and its samples as (id, cut length) in order of placing."""

    capacity: int
    samples: list[tuple[int, int]]

    @property
    def num_tokens(self) -> int:
        """The tokens in it."""
        return sum(length for _, length in self.samples)


def pack_samples(
    lengths: Sequence[int],
    row_lengths: Sequence[int],
    *,
    max_samples_per_row: int | None = None,
    order: str | Sequence[int] = "dataset",
    seed: int = 0,
    epoch: int = 0,
    overlong: str = "error",
) -> list[Row]:
    """Return the rows in the order of opening."""
    shuffled = order == "shuffle"
    ids = slow.random_order(seed, epoch, 0, len(lengths), stream=1) if shuffled else slow.sample_order(lengths, order)
    longest = row_lengths[-1]
    if overlong == "drop":
        ids = [i for i in ids if lengths[i] <= longest]
    cut = {i: min(lengths[i], longest) for i in ids}
    if max_samples_per_row is not None:
        return limited_rows(ids, cut, row_lengths, max_samples_per_row)
    rows: list[Row] = []
    queues: dict[int, list[int]] = {}  # rows by the space they have left, the one that has had it longest first
    for i in sorted(ids, key=lambda i: -cut[i]):
        spaces = [space for space, queue in queues.items() if queue and space >= cut[i]]
        if spaces:
            space = min(spaces)
            row = queues[space].pop(0)
        else:
            space = next(length for length in row_lengths if length >= cut[i])
            row = len(rows)
            rows.append(Row(space, []))
        rows[row].samples.append((i, cut[i]))
        if space > cut[i]:
            queues.setdefault(space - cut[i], []).append(row)
    return rows


def pack_in_blocks(
    pack: Callable[..., list[Any]], lengths: Sequence[Any], row_lengths: Sequence[int], block_size: int, **options: Any
) -> list[Any]:
    """Return the rows of shuffled samples in blocks, where `pack` makes those of a block."""
    ids = slow.random_order(options.pop("seed"), options.pop("epoch"), 0, len(lengths), stream=1)
    blocks = [ids[begin : begin + block_size] for begin in range(0, len(ids), block_size)]
    if options["overlong"] == "drop":
        limit = row_lengths if isinstance(lengths[0], Sequence) else row_lengths[-1]
        blocks = [[i for i in block if np.all(np.array(lengths[i]) <= limit)] for block in blocks]
    rows: list[Any] = []
    for block in filter(None, blocks):
        last = {i for i, _ in rows.pop().samples} if rows else set()
        order = [i for i in ids if i in last or i in block]
        rows += pack(lengths, row_lengths, order=order, **options)
    return rows


class JointRow(NamedTuple):
    """A row of several features: its samples as (id, cut lengths) in order of placing."""

    samples: list[tuple[int, tuple[int, ...]]]


def pack_jointly(
    lengths: Sequence[Sequence[int]],
    row_lengths: Sequence[int],
    *,
    max_samples_per_row: int | None = None,
    order: str | Sequence[int] = "dataset",
    seed: int = 0,
    epoch: int = 0,
    overlong: str = "error",
) -> list[JointRow]:
    """Return rows of samples of several features, in the order of opening."""
    sums = [sum(sample) for sample in lengths]
    shuffled = order == "shuffle"
    ids = slow.random_order(seed, epoch, 0, len(lengths), stream=1) if shuffled else slow.sample_order(sums, order)
    if overlong == "drop":
        ids = [i for i in ids if all(map(le, lengths[i], row_lengths))]
    left: dict[tuple[int, ...], list[int]] = {}
    for i in ids:
        left.setdefault(tuple(map(min, lengths[i], row_lengths)), []).append(i)
    rows = []
    while left:
        row = next_joint_row({kind: len(waiting) for kind, waiting in left.items()}, row_lengths, max_samples_per_row)
        while all(len(left.get(kind, [])) >= row.count(kind) for kind in row):
            rows.append(JointRow([(left[kind].pop(0), kind) for kind in row]))
        left = {kind: waiting for kind, waiting in left.items() if waiting}
    return rows


def next_joint_row(
    counts: dict[tuple[int, ...], int], row_lengths: Sequence[int], most: int | None
) -> list[tuple[int, ...]]:
    """Return the lengths of the samples of the next row of several features."""
    counts, space = dict(counts), list(row_lengths)
    num_left = sum(counts.values())
    most = num_left if most is None else most
    tokens = [sum(kind[d] * count for kind, count in counts.items()) for d in range(len(space))]
    many = num_left > most and all(-(-num_left // most) * t > w for t, w in zip(row_lengths, tokens, strict=True))
    row: list[tuple[int, ...]] = []
    while len(row) < most:
        factors = [2**40 * s // t**2 for s, t in zip(space, row_lengths, strict=True)]
        fitting = [kind for kind, count in counts.items() if count and all(map(le, kind, space))]
        even = [s // (most - len(row)) for s in space]
        if many and row and any(all(map(le, kind, even)) for kind in fitting):
            fitting = [kind for kind in fitting if all(map(le, kind, even))]
        if not fitting:
            break
        row.append(max(fitting, key=lambda kind: (sum(map(mul, kind, factors)), kind)))
        counts[row[-1]] -= 1
        space = list(map(sub, space, row[-1]))
    return row


def split_samples(lengths: Sequence[int], longest: int, ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the pieces of some samples in order, as (id, start, length)."""
    return [(i, start, min(longest, lengths[i] - start)) for i in ids for start in range(0, lengths[i], longest)]


def wrapped_rows(lengths: Sequence[int], row_length: int, ids: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Return rows of pieces (id, start, length) of samples that lie end to end, token by token."""
    tokens = [(i, place) for i in ids for place in range(lengths[i])]
    rows = []
    for first in range(0, len(tokens), row_length):
        in_row = tokens[first : first + row_length]
        places = {i: [place for j, place in in_row if j == i] for i, _ in in_row}
        rows.append([(i, min(held), len(held)) for i, held in places.items()])
    return rows


def after_earlier_pieces(groups: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
    """Return groups of pieces (id, start) in order, where last pieces wait for the others of their samples."""
    last: dict[int, int] = {}
    for i, start in (piece for group in groups for piece in group):
        last[i] = max(start, last.get(i, 0))
    ordered: list[int] = []
    waiting: list[int] = []
    for g in range(len(groups)):
        still_to_come = {i for later in groups[g + 1 :] for i, start in later if start < last[i]}
        free = [h for h in (g, *waiting) if not any(start == last[i] and i in still_to_come for i, start in groups[h])]
        ordered += free
        waiting = [h for h in (*waiting, g) if h not in free]
    return ordered


def limited_rows(ids: Sequence[int], lengths: dict[int, int], row_lengths: Sequence[int], most: int) -> list[Row]:
    """Return rows of at most so many samples."""
    left: dict[int, list[int]] = {}
    for i in ids:
        left.setdefault(lengths[i], []).append(i)
    rows: list[Row] = []
    while left:
        counts = {length: len(waiting) for length, waiting in left.items()}
        row = next_limited_row(counts, row_lengths, most)
        while all(len(left.get(length, [])) >= row.count(length) for length in row):
            samples = [(left[length].pop(0), length) for length in sorted(row, reverse=True)]
            rows.append(Row(next(size for size in row_lengths if size >= sum(row)), samples))
        left = {length: waiting for length, waiting in left.items() if waiting}
    return rows


def next_limited_row(counts: dict[int, int], row_lengths: Sequence[int], most: int) -> list[int]:
    """Return the lengths of the samples of the next row."""
    everything = [length for length, count in counts.items() for _ in range(count)]
    capacity = next(size for size in row_lengths if size >= max(everything))

    def longest(of: list[int], limit: int) -> list[int]:
        return [max(length for length in of if length <= limit)] if any(length <= limit for length in of) else []

    def without(row: list[int]) -> list[int]:
        rest = list(everything)
        for length in row:
            rest.remove(length)
        return rest

    row: list[int] = []
    while len(row) < most and (taken := longest(without(row), capacity - sum(row))):
        row += taken
    if len(without(row)) * row_lengths[0] <= most * sum(without(row)):
        return row
    mean = Fraction(sum(everything), len(everything))
    row = [max(everything) if max(everything) - mean >= mean - min(everything) else min(everything)]
    while len(row) < most:
        rest, space, missing = without(row), capacity - sum(row), most - len(row)
        pairs = {a: min(rest.count(a), rest.count(space - a)) for a in set(rest) if 2 * a < space}
        if space // 2 in rest and space % 2 == 0:
            pairs[space // 2] = rest.count(space // 2) // 2
        shortest = min(pairs, key=lambda a: (-pairs[a], a), default=0)
        if missing == 2 and pairs.get(shortest):
            return [*row, shortest, space - shortest]
        if not (taken := longest(rest, space // missing) or longest(rest, space)):
            return row
        row += taken
    return row


def rows_held(lengths: Sequence[int], edges: Sequence[int], max_samples_per_row: int | None = None) -> list[int]:
    """Return how many of the rows that the samples are packed into each edge holds in a plan."""
    rows = pack_samples(lengths, edges, max_samples_per_row=max_samples_per_row)
    return slow.samples_per_edge([row.num_tokens for row in rows], edges)


def choose_row_lengths(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    max_shapes: int = 4,
    max_length: int | None = None,
    max_samples_per_row: int | None = None,
    overlong: str = "truncate",
    microbatches_per_step: int = 1,
    row_multiple: int = 1,
    length_multiple: int = 1,
    cost: slow.Cost | None = None,
    compile_seconds: float | None = None,
    **limits: Any,
) -> list[int]:
    """Return the cheapest lengths by trying every set."""
    clipped = slow.clip(lengths, max_length, overlong)
    rule = (microbatches_per_step, row_multiple)
    held = partial(rows_held, max_samples_per_row=max_samples_per_row)
    return slow.best_edges(
        clipped, max_tokens, max_shapes, length_multiple, *rule, cost, compile_seconds, held=held, **limits
    )


def make_steps(
    rows: Sequence[Row], buckets: Sequence[tuple[int, int]], **options: Any
) -> tuple[list[slow.Step], list[list[list[int]]], list[int]]:
    """Return the steps of a packing with their samples, the samples row by row of each step, and the row offsets."""
    steps = slow.make_steps([row.num_tokens for row in rows], buckets, **options)
    rows_of_step = [[[i for i, _ in rows[r].samples] for r in held] for _, held in steps]
    offsets = [0]
    for held in rows_of_step:
        for row in held:
            offsets.append(offsets[-1] + len(row))
    unpacked = [(k, [i for row in held for i in row]) for (k, _), held in zip(steps, rows_of_step, strict=True)]
    return unpacked, rows_of_step, offsets
