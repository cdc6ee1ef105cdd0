"""Brute force: every set of bucket lengths tried, rows counted up one by one."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any

Cost = Callable[[Any, Any], Any]


def ceil_div(numerator: int, denominator: int) -> int:
    """Return the quotient rounded up."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int, offset: int = 0) -> int:
    """Return the smallest multiple plus the offset that is at least the value, by counting up."""
    return next(each for each in range(value, value + multiple) if each % multiple == offset)


@lru_cache
def count_most_rows(
    length: int,
    max_tokens: int,
    cost: Cost | None = None,
    max_cost: float = math.inf,
    memory: Cost | None = None,
    max_bytes: float = math.inf,
    max_sequences: float = math.inf,
) -> int:
    """Return the most rows inside all limits, by counting up."""
    rows = 0
    while (
        (rows + 1) * length <= max_tokens
        and rows < max_sequences
        and (cost is None or cost(rows + 1, length) <= max_cost)
        and (memory is None or memory(rows + 1, length) <= max_bytes)
    ):
        rows += 1
    return rows


def count_rows_and_steps(num_samples: int, cap: int, num_microbatches: int, row_multiple: int) -> tuple[int, int]:
    """Return the rows and steps of a bucket with these samples, with at most `cap` rows."""
    if cap >= row_multiple:
        cap = cap // row_multiple * row_multiple
    assert cap >= 1
    if num_samples == 0:
        return cap, 0
    steps = ceil_div(num_samples, num_microbatches * cap)
    return min(cap, round_up(ceil_div(num_samples, num_microbatches * steps), row_multiple)), steps


def list_edge_sets(
    lengths: Sequence[int], max_shapes: int, max_length: int | None, length_multiple: int, length_offset: int = 0
) -> Iterator[list[int]]:
    """Yield every set of rounded lengths that "optimal" chooses among."""
    clipped = [length if max_length is None else min(length, max_length) for length in lengths]
    distinct = sorted({round_up(length, length_multiple, length_offset) for length in clipped})
    for size in range(min(max_shapes, len(distinct))):
        for chosen in combinations(distinct[:-1], size):
            yield [*chosen, distinct[-1]]


def fill_buckets(
    lengths: Sequence[int],
    edges: Sequence[int],
    max_tokens: int,
    num_microbatches: int = 1,
    row_multiple: int = 1,
    cost: Cost | None = None,
    compile_seconds: float | None = None,
    **limits: Any,
) -> tuple[float, list[tuple[int, int]]]:
    """Return what "optimal" minimises, summed from the shortest bucket upwards, and the buckets."""
    owners = [next(k for k, edge in enumerate(edges) if length <= edge) for length in lengths]
    total: float = 0
    buckets = []
    for k, length in enumerate(edges):
        cap = count_most_rows(length, max_tokens, cost if "max_cost" in limits else None, **limits)
        rows, steps = count_rows_and_steps(owners.count(k), cap, num_microbatches, row_multiple)
        if cost is None:
            total += steps * num_microbatches * rows * length
        else:
            total += float(steps * num_microbatches) * float(cost(rows, length)) + (compile_seconds or 0.0)
        buckets.append((rows, length))
    return total, buckets


def choose_best_buckets(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    max_shapes: int = 16,
    max_length: int | None = None,
    overlong: str = "truncate",
    num_microbatches: int = 1,
    row_multiple: int = 1,
    length_multiple: int = 1,
    length_offset: int = 0,
    **options: Any,
) -> list[tuple[int, int]]:
    """Return the cheapest buckets; ties: the fewest, then the smaller lengths from the longest down."""
    limit = max(lengths) if max_length is None else max_length
    counted = [min(length, limit) for length in lengths if length <= limit or overlong == "truncate"]

    def rank(edges: list[int]) -> tuple[float, int, list[int]]:
        total, _ = fill_buckets(counted, edges, max_tokens, num_microbatches, row_multiple, **options)
        return total, len(edges), edges[::-1]

    best = min(list_edge_sets(counted, max_shapes, None, length_multiple, length_offset), key=rank)
    return fill_buckets(counted, best, max_tokens, num_microbatches, row_multiple, **options)[1]


def choose_row_length(longest: int, max_tokens: int, max_length: int | None = None, length_multiple: int = 1) -> int:
    """Return the length of packed rows for samples up to the longest, by counting rows down."""
    if max_length is not None:
        return max_length // length_multiple * length_multiple
    for least in (2 * longest, longest):
        for num_rows in range(max_tokens, 0, -1):
            length = max_tokens // num_rows // length_multiple * length_multiple
            if length >= least:
                return length
    raise AssertionError("the longest sample needs more than max_tokens")


def choose_block_size(num_rows: Callable[[int | None], int], num_samples: int, least: int = 256) -> int | None:
    """Return the samples of a block, from the rows of epoch 0 with blocks of some size; None for all at once."""
    at_once = num_rows(None)
    sizes = [least * 2**k for k in range(num_samples) if least * 2**k < num_samples]
    for size in sizes:
        if num_rows(size) <= at_once + ceil_div(at_once, 100):
            return size
    for size in reversed(sizes):
        if 2 * size <= num_samples and 20 * num_rows(size) <= 21 * at_once:
            return size
    return None
