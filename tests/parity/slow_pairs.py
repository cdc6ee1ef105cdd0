"""Buckets of pairs transcribed into plain Python: every chain and every nested set of edges tried."""

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import slow

Pair = tuple[int, int]
Bucket = tuple[int, int, int]  # rows, source edge, target edge


def choose_count(size: str) -> Callable[[Any, Any], Any]:
    """Return the function that counts a pair."""
    return {"sum": operator.add, "larger": max, "product": operator.mul}[size]


def list_subsets(values: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield all subsets, ascending inside."""
    for size in range(len(values) + 1):
        yield from itertools.combinations(values, size)


def list_chains(sources: Sequence[int], targets: Sequence[int], max_shapes: int) -> Iterator[tuple[Pair, ...]]:
    """Yield all lists of pairs of edges that ascend on both sides and end with the largest pair."""
    cells = [(source, target) for source in sources for target in targets]
    for size in range(min(max_shapes, len(sources) + len(targets) - 1)):
        for chosen in itertools.combinations(cells[:-1], size):
            chain = (*chosen, cells[-1])
            if all(one[0] <= other[0] and one[1] <= other[1] for one, other in itertools.pairwise(chain)):
                yield chain


def list_nested_sets(
    lengths: Sequence[Pair], sources: Sequence[int], targets: Sequence[int], max_shapes: int
) -> Iterator[list[tuple[Pair, ...]]]:
    """Yield all lists of classes by ascending source edge, each with its pairs of edges."""
    for lower in list_subsets(sources[:-1]):
        edges = [*lower, sources[-1]]
        options = []
        for shorter, edge in zip([0, *edges], edges, strict=False):
            longest = max(target for source, target in lengths if shorter < source <= edge)
            last = next(target for target in targets if target >= longest)
            below = [target for target in targets if target < last]
            options.append([tuple((edge, target) for target in (*chosen, last)) for chosen in list_subsets(below)])
        for classes in itertools.product(*options):
            if sum(map(len, classes)) <= max_shapes:
                yield list(classes)


def choose_pair_buckets(
    lengths: Sequence[Pair],
    max_tokens: int,
    *,
    size: str = "sum",
    cost: Callable[..., Any] | None = None,
    compile_seconds: float = 0.0,
    max_shapes: int = 16,
    max_candidates: int = 64,
    num_microbatches: int = 1,
    row_multiple: int = 1,
    length_multiple: int = 1,
    max_sequences: int = 10**9,
) -> list[Bucket] | None:
    """Return the buckets by trying everything, or None where nothing fits."""
    counts = choose_count(size)
    by_length = size in ("sum", "larger")
    if by_length and slow.round_up(max(map(max, lengths)), length_multiple) > max_tokens:
        return None
    sources, targets = (
        [
            edge
            for _, edge in slow.choose_best_buckets(
                side,
                max_tokens if by_length else slow.round_up(max(side), length_multiple),
                max_shapes=max_candidates,
                num_microbatches=num_microbatches if by_length else 1,
                row_multiple=row_multiple,
                length_multiple=length_multiple,
                max_sequences=max_sequences if by_length else 1,
            )
        ]
        for side in ([max(1, length) for length in side] for side in zip(*lengths, strict=True))
    )

    def fill(edges: Sequence[Pair]) -> tuple[float, list[Bucket]] | None:
        """Return the cost of all buckets and these, or None where one has no row."""
        owners = [next(edge for edge in edges if s <= edge[0] and t <= edge[1]) for s, t in lengths]
        total, buckets = 0, []
        for source, target in edges:
            row_size = max(1, counts(source, target))
            cap = min(max_tokens // row_size, max_sequences)
            if cap < 1:
                return None
            held = owners.count((source, target))
            rows, steps = slow.count_rows_and_steps(held, cap, num_microbatches, row_multiple)
            each = rows * row_size if cost is None else float(cost(rows, source, target))
            total += steps * num_microbatches * each + compile_seconds
            buckets.append((rows, source, target))
        return total, buckets

    # (cost, 0 for chains and 1 for nested sets, buckets, what settles the rest), buckets
    found: list[tuple[tuple[float, int, int, Any], list[Bucket]]] = []
    for chain in list_chains(sources, targets, max_shapes):
        filled = fill(chain)
        if filled is not None:
            found.append(((filled[0], 0, len(chain), chain[::-1]), filled[1]))
    for classes in list_nested_sets(lengths, sources, targets, max_shapes):
        filled = fill([edge for group in classes for edge in group])
        if filled is not None:
            # Class by class from the last: the source edge below it (0 for none), its number of target edges, and these
            # from the longest down.
            lower = [0, *(group[0][0] for group in classes)]
            ties = [(lower[c], len(classes[c]), classes[c][::-1]) for c in range(len(classes) - 1, -1, -1)]
            found.append(((filled[0], 1, len(filled[1]), ties), filled[1]))
    return min(found, key=lambda choice: choice[0])[1] if found else None
