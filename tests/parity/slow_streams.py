"""Streams transcribed into plain Python: one sample at a time."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from . import slow


class Step(NamedTuple):
    """A step: its bucket, and its samples as (id, cut length)."""

    bucket: int
    samples: list[tuple[int, int]]


def choose_buckets(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    num_estimate: int,
    max_length: int | None,
    row_multiple: int,
    length_multiple: int,
    max_sequences: int | None,
    **options: Any,
) -> list[tuple[int, int]]:
    """Return the buckets that a stream chooses from its first lengths."""
    known = lengths[:num_estimate]
    if max_length is not None:
        max_length = slow.round_up(max_length, length_multiple)
    multiples: dict[str, Any] = {"row_multiple": row_multiple, "length_multiple": length_multiple}
    if max_sequences is not None:
        multiples["max_sequences"] = max_sequences
    edges = [edge for _, edge in slow.make_buckets(known, max_tokens, max_length=max_length, **multiples, **options)]
    if max_length is not None:
        edges[-1] = max_length
    caps = [min(max_tokens // edge, max_sequences or max_tokens) for edge in edges]
    rounded = [cap // row_multiple * row_multiple if cap >= row_multiple else cap for cap in caps]
    return list(zip(rounded, edges, strict=True))


def drawn_order(num_samples: int, shuffle_buffer: int | None, seed: int, epoch: int) -> list[int]:
    """Return the samples in the order in which a shuffle buffer gives them."""
    if shuffle_buffer is None:
        return list(range(num_samples))
    keys = [word >> 32 for word in slow.philox_words(seed, epoch, num_samples, 2)]
    left, buffered, drawn = list(range(num_samples)), [], []
    for key in keys:
        while left and len(buffered) < shuffle_buffer:
            buffered.append(left.pop(0))
        place = key * len(buffered) >> 32
        drawn.append(buffered[place])
        buffered[place] = buffered[-1]
        buffered.pop()
    return drawn


def make_steps(
    lengths: Sequence[int],
    buckets: Sequence[tuple[int, int]],
    *,
    microbatches_per_step: int = 1,
    max_waiting: int | None = None,
    shuffle_buffer: int | None = None,
    seed: int = 0,
    epoch: int = 0,
    overlong: str = "error",
) -> list[Step]:
    """Return the steps of a stream that ends."""
    queues: list[list[tuple[int, int]]] = [[] for _ in buckets]
    capacity = [microbatches_per_step * rows for rows, _ in buckets]
    longest = buckets[-1][1]
    steps = []
    for i in drawn_order(len(lengths), shuffle_buffer, seed, epoch):
        length = lengths[i]
        if length > longest and overlong == "drop":
            continue
        cut = min(length, longest)
        k = next(k for k, (_, edge) in enumerate(buckets) if cut <= edge)
        queues[k].append((i, cut))
        if len(queues[k]) == capacity[k]:
            steps.append(Step(k, queues[k]))
            queues[k] = []
        if max_waiting is not None and sum(map(len, queues)) > max_waiting:
            k = max(range(len(buckets)), key=lambda k: (Fraction(len(queues[k]), capacity[k]), -k))
            steps.append(Step(k, queues[k]))
            queues[k] = []
    return steps + [Step(k, queue) for k, queue in enumerate(queues) if queue]
