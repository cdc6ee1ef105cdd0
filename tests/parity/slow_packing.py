"""Packing transcribed into plain Python: one sample at a time, a queue of rows for every space left."""

from collections.abc import Callable, Sequence
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
    """A row of pairs: its samples as (id, cut lengths) in order of placing."""

    samples: list[tuple[int, tuple[int, ...]]]


def pack_jointly(
    lengths: Sequence[Sequence[int]],
    row_lengths: Sequence[int],
    *,
    order: str | Sequence[int] = "dataset",
    seed: int = 0,
    epoch: int = 0,
    overlong: str = "error",
) -> list[JointRow]:
    """Return rows of few pairs, which are one block, in the order of opening."""
    epoch = epoch if order == "shuffle" else 0
    left = slow.random_order(seed, epoch, 0, len(lengths), stream=1) if isinstance(order, str) else list(order)
    if overlong == "drop":
        left = [i for i in left if all(map(le, lengths[i], row_lengths))]
    cut = {i: tuple(map(min, lengths[i], row_lengths)) for i in left}
    rows = []
    while left:
        row, space = [], list(row_lengths)
        while fitting := [i for i in left if all(map(le, cut[i], space))]:
            factors = [2**40 * s // t**2 for s, t in zip(space, row_lengths, strict=True)]
            best = max(fitting, key=lambda i: (sum(map(mul, cut[i], factors)), cut[i]))  # the first of equals
            row.append((best, cut[best]))
            space = list(map(sub, space, cut[best]))
            left.remove(best)
        rows.append(JointRow(row))
    return rows


def choose_row_lengths(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    max_shapes: int = 4,
    max_length: int | None = None,
    overlong: str = "truncate",
    microbatches_per_step: int = 1,
    row_multiple: int = 1,
    length_multiple: int = 1,
    cost: slow.Cost | None = None,
    compile_seconds: float | None = None,
    **limits: Any,
) -> list[int]:
    """Return the longest length, and those that are added to it one by one."""
    clipped = slow.clip(lengths, max_length, overlong)
    distinct = sorted({slow.round_up(length, length_multiple) for length in clipped})
    chosen: list[int] = distinct[-1:]

    def total(edges: Sequence[int]) -> float:
        rows = [row.num_tokens for row in pack_samples(clipped, edges)]
        rule = (microbatches_per_step, row_multiple)
        return slow.total_cost(rows, edges, max_tokens, *rule, cost, compile_seconds, **limits)

    least = total(chosen)
    while len(chosen) < max_shapes:
        costs = [(total(sorted([*chosen, length])), length) for length in distinct if length not in chosen]
        cost_of_best, best = min(costs, default=(least, 0))
        if cost_of_best >= least:
            break
        chosen, least = sorted([*chosen, best]), cost_of_best
    return chosen


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
