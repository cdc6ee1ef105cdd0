"""Packing transcribed into plain Python: one sample at a time, a queue of rows for every space left."""

from collections.abc import Sequence
from typing import Any, NamedTuple

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


def rows_held(lengths: Sequence[int], edges: Sequence[int]) -> list[int]:
    """Return how many of the rows that the samples are packed into each edge holds in a plan."""
    return slow.samples_per_edge([row.num_tokens for row in pack_samples(lengths, edges)], edges)


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
    """Return the cheapest lengths by trying every set."""
    clipped = slow.clip(lengths, max_length, overlong)
    rule = (microbatches_per_step, row_multiple)
    return slow.best_edges(
        clipped, max_tokens, max_shapes, length_multiple, *rule, cost, compile_seconds, held=rows_held, **limits
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
