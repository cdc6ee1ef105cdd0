"""Buckets of several lengths transcribed into plain Python: every chain and every nested set of edges tried."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import slow

Lengths = tuple[int, ...]
Bucket = tuple[int, ...]  # rows, an edge of each length
Tree = list[tuple[int, int, Any]]  # of each class the edge below, its edge, and how the other lengths cut it


def choose_count(size: str) -> Callable[..., Any]:
    """Return the function that counts the lengths of a sample."""
    return {
        "sum": lambda *lengths: sum(lengths),
        "larger": lambda *lengths: max(lengths),
        "product": lambda *lengths: math.prod(lengths),
    }[size]


def list_subsets(values: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield all subsets, ascending inside."""
    for size in range(len(values) + 1):
        yield from itertools.combinations(values, size)


def list_chains(candidates: Sequence[Sequence[int]], max_shapes: int) -> Iterator[tuple[Lengths, ...]]:
    """Yield all lists of edges that ascend in all lengths and end with the largest ones."""
    cells = list(itertools.product(*candidates))
    for size in range(min(max_shapes, sum(map(len, candidates)) - len(candidates) + 1)):
        for chosen in itertools.combinations(cells[:-1], size):
            chain = (*chosen, cells[-1])
            pairs = itertools.pairwise(chain)
            if all(before <= after for one, other in pairs for before, after in zip(one, other, strict=True)):
                yield chain


def list_nested_sets(
    lengths: Sequence[Lengths], candidates: Sequence[Sequence[int]], max_shapes: int
) -> Iterator[Tree | None]:
    """Yield all ways to cut samples into classes by their first length, and each class by the others likewise."""
    if not candidates:
        yield None
        return
    longest = max(first for first, *_ in lengths)
    last = next(edge for edge in candidates[0] if edge >= longest)
    for lower in list_subsets([edge for edge in candidates[0] if edge < last]):
        edges, options = [0, *lower, last], []
        if len(edges) - 1 > max_shapes:
            continue
        for below, edge in itertools.pairwise(edges):
            others = [tuple(rest) for first, *rest in lengths if below < first <= edge]
            if not others:
                break
            options.append([(below, edge, cut) for cut in list_nested_sets(others, candidates[1:], max_shapes)])
        else:
            for tree in itertools.product(*options):
                if count_leaves(list(tree)) <= max_shapes:
                    yield list(tree)


def count_leaves(tree: Tree | None) -> int:
    """Return how many buckets a nested set has."""
    return 1 if tree is None else sum(count_leaves(cut) for _, _, cut in tree)


def edges_of(tree: Tree | None) -> list[Lengths]:
    """Return the edges of all buckets of a nested set."""
    return [()] if tree is None else [(edge, *rest) for _, edge, cut in tree for rest in edges_of(cut)]


def rank(tree: Tree | None) -> list[Any]:
    """Return what settles ties: class by class from the last, the edge below, its number of buckets, and its own."""
    return [] if tree is None else [(below, count_leaves(cut), rank(cut)) for below, _, cut in tree[::-1]]


def of_each(value: Any, num_lengths: int) -> list[int]:
    """Return a number for each length."""
    return [value] * num_lengths if isinstance(value, int) else list(value)


def choose_pair_buckets(
    lengths: Sequence[Lengths],
    max_tokens: int,
    *,
    size: str = "sum",
    cost: Callable[..., Any] | None = None,
    compile_seconds: float = 0.0,
    max_shapes: int = 16,
    max_candidates: int = 64,
    num_microbatches: int = 1,
    row_multiple: int = 1,
    length_multiple: Any = 1,
    length_offset: Any = 0,
    max_sequences: int = 10**9,
) -> list[Bucket] | None:
    """Return the buckets by trying everything, or None where nothing fits."""
    counts, num_lengths = choose_count(size), len(lengths[0])
    by_length = size in ("sum", "larger")
    candidates = []
    for side, multiple, offset in zip(
        zip(*lengths, strict=True),
        of_each(length_multiple, num_lengths),
        of_each(length_offset, num_lengths),
        strict=True,
    ):
        longest = slow.round_up(max(1, *side) if len(side) > 1 else max(1, side[0]), multiple, offset)
        if by_length and longest > max_tokens:
            return None
        best = slow.choose_best_buckets(
            [max(1, length) for length in side],
            max_tokens if by_length else longest,
            max_shapes=max_candidates,
            num_microbatches=num_microbatches if by_length else 1,
            row_multiple=row_multiple,
            length_multiple=multiple,
            length_offset=offset,
            max_sequences=max_sequences if by_length else 1,
        )
        candidates.append([edge for _, edge in best])

    def fill(edges: Sequence[Lengths]) -> tuple[float, list[Bucket]] | None:
        """Return the cost of all buckets and these, or None where one has no row."""
        owners = [
            next(edge for edge in edges if all(n <= most for n, most in zip(sample, edge, strict=True)))
            for sample in lengths
        ]
        total, buckets = 0, []
        for edge in edges:
            row_size = max(1, counts(*edge))
            cap = min(max_tokens // row_size, max_sequences)
            if cap < 1:
                return None
            rows, steps = slow.count_rows_and_steps(owners.count(edge), cap, num_microbatches, row_multiple)
            each = rows * row_size if cost is None else float(cost(rows, *edge))
            total += steps * num_microbatches * each + compile_seconds
            buckets.append((rows, *edge))
        return total, buckets

    # (cost, 0 for chains and 1 for nested sets, buckets, what settles the rest), buckets
    found: list[tuple[tuple[float, int, int, Any], list[Bucket]]] = []
    for chain in list_chains(candidates, max_shapes):
        filled = fill(chain)
        if filled is not None:
            found.append(((filled[0], 0, len(chain), chain[::-1]), filled[1]))
    for tree in list_nested_sets(lengths, candidates, max_shapes):
        filled = fill(edges_of(tree))
        if filled is not None:
            found.append(((filled[0], 1, len(filled[1]), rank(tree)), filled[1]))
    return min(found, key=lambda choice: choice[0])[1] if found else None
