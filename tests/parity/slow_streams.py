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
    max_shapes: int,
    microbatches_per_step: int,
    row_multiple: int,
    length_multiple: int,
    strategy: str | list[int] = "optimal",
    cost: slow.Cost | None = None,
    compile_seconds: float | None = None,
    **limits: Any,
) -> list[tuple[int, int]]:
    """Return the buckets that a stream chooses from its first lengths."""
    known = lengths[:num_estimate]
    top = None if max_length is None else slow.round_up(max_length, length_multiple)
    rules = (microbatches_per_step, row_multiple)
    multiples: dict[str, Any] = {"row_multiple": row_multiple, "length_multiple": length_multiple}
    costs: dict[str, Any] = {"cost": cost, "compile_seconds": compile_seconds} | multiples

    def estimated(most: int) -> list[int]:
        options = {"max_length": top, "strategy": strategy, "microbatches_per_step": microbatches_per_step}
        return [edge for _, edge in slow.make_buckets(known, max_tokens, max_shapes=most, **options, **costs, **limits)]

    def total(edges: list[int]) -> float:
        return slow.total_cost(known, edges, max_tokens, *rules, cost, compile_seconds, **limits)

    edges = estimated(max_shapes)
    if top is not None and edges[-1] < top:
        choices = [[*edges[:-1], top]]
        if isinstance(strategy, list):
            choices = [[*edges, top]]
        elif max_shapes > 1 and strategy != "pad_to_max":
            choices.append([*estimated(max_shapes - 1), top])
        edges = min(choices, key=lambda edges: (total(edges), len(edges)))
    caps = [slow.most_rows(edge, max_tokens, cost if "max_cost" in limits else None, **limits) for edge in edges]
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
