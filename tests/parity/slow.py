"""The planning contract transcribed into plain Python: loops over samples, Python integers, no arrays."""

import hashlib
import math
import operator
import struct
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from typing import Any

Step = tuple[int, list[int]]  # (bucket, sample ids)
Batch = tuple[list[int], int | None]  # (sample ids, index of the shape)
Cost = Callable[[Any, Any], Any]
Length = int | tuple[int, int]  # of a sample, or source and target of a pair
_WORD = 2**64


def ceil_div(numerator: int, denominator: int) -> int:
    """Return the quotient rounded up."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is at least the value."""
    return ceil_div(value, multiple) * multiple


def philox_words(seed: int, epoch: int, count: int, stream: int = 0) -> list[int]:
    """Return the raw 64-bit words of Philox 4x64 with ten rounds, whose counter starts at 1, its last word apart."""
    words: list[int] = []
    block = 0
    while len(words) < count:
        block += 1
        words += _philox_block(seed, epoch, block, stream)
    return words[:count]


def _philox_block(seed: int, epoch: int, counter: int, stream: int = 0) -> list[int]:
    c0, c1, c2, c3, k0, k1 = counter, 0, 0, stream, seed, epoch
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * c0, _WORD)
        high1, low1 = divmod(0xCA5A826395121157 * c2, _WORD)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) % _WORD, (k1 + 0xBB67AE8584CAA73B) % _WORD
    return [c0, c1, c2, c3]


def random_key(seed: int, epoch: int, position: int) -> int:
    """Return one key of the stream, however far along."""
    return _philox_block(seed, epoch, position // 4 + 1)[position % 4] >> 32


def random_order(seed: int, epoch: int, start: int, count: int, stream: int = 0) -> list[int]:
    """Return 0..count-1 ascending by (key, i), where i has the key at `start + i` of the stream."""
    keys = [word >> 32 for word in philox_words(seed, epoch, start + count, stream)[start:]]
    return sorted(range(count), key=lambda i: (keys[i], i))


def sample_order(
    lengths: Sequence[int],
    order: str | Sequence[int] = "length",
    *,
    difficulty: Sequence[Any] | None = None,
    seed: int = 0,
    epoch: int = 0,
    block_size: int | None = None,
) -> list[int]:
    """Return the ids of the samples in order."""
    values: Sequence[Any] = lengths if difficulty is None else difficulty
    if difficulty is not None and isinstance(difficulty[0], list):
        values = list(zip(*difficulty, strict=True))
    if block_size is not None:
        base = "dataset" if order == "shuffle" else order
        ordered = sample_order(lengths, base, difficulty=difficulty, seed=seed, epoch=epoch)
        blocks = [ordered[start : start + block_size] for start in range(0, len(ordered), block_size)]
        if order == "shuffle":
            keys = [random_key(seed, epoch, 2**62 + j) for j in range(len(blocks))]
            blocks = [blocks[j] for j in sorted(range(len(blocks)), key=lambda j: (keys[j], j))]
        return [i for block in blocks for i in sorted(block, key=lambda i: (random_key(seed, epoch, i), i))]
    ids = range(len(lengths))
    if order == "dataset":
        return list(ids)
    if order == "shuffle":
        return random_order(seed, epoch, 0, len(lengths))
    if order == "length":
        return sorted(ids, key=lambda i: (values[i], i))
    if order == "length_descending":
        # Ascending by (value, -id), read backwards: descending values, ascending ids.
        return sorted(ids, key=lambda i: (values[i], -i))[::-1]
    return [int(i) for i in order]


def batch_by_tokens(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    order: str | Sequence[int] = "dataset",
    budget: str = "padded",
    max_sequences: int | None = None,
    sequence_multiple: int = 1,
    shapes: Sequence[tuple[int, int]] | None = None,
    seed: int = 0,
    epoch: int = 0,
) -> list[Batch]:
    """Return the batches, sample by sample; their shapes are None where none are given."""
    ids = sample_order(lengths, order, seed=seed, epoch=epoch)
    if shapes is not None:
        return shaped_batches(lengths, ids, shapes)

    def cost(batch: list[int]) -> int:
        values = [lengths[i] for i in batch]
        return len(values) * max(values) if budget == "padded" else sum(values)

    batches: list[list[int]] = []
    # The open batch up to the last place where it had an allowed size, and the tail after that.
    batch: list[int] = []
    tail: list[int] = []
    for i in ids:
        longer = [*batch, *tail, i]
        if cost(longer) > max_tokens or (max_sequences is not None and len(longer) > max_sequences):
            batches.append(batch)
            if cost([*tail, i]) > max_tokens:
                batches.append(tail)
                tail = []
            batch, tail = [*tail, i], []
        elif len(longer) < sequence_multiple or len(longer) % sequence_multiple == 0:
            batch, tail = longer, []
        else:
            tail.append(i)
    batches += [batch, tail] if tail else [batch]
    return [(batch, None) for batch in batches]


def shaped_batches(lengths: Sequence[int], ids: Sequence[int], shapes: Sequence[tuple[int, int]]) -> list[Batch]:
    """Return batches that take the next sample while some shape holds them, each with the index of its shape."""
    batches: list[list[int]] = [[]]
    for i in ids:
        if not holding_shapes([*(lengths[j] for j in batches[-1]), lengths[i]], shapes):
            batches.append([])
        batches[-1].append(i)
    return [(batch, holding_shapes([lengths[i] for i in batch], shapes)[0]) for batch in batches]


def holding_shapes(lengths: Sequence[int], shapes: Sequence[tuple[int, int]]) -> list[int]:
    """Return the indices of the shapes that hold a batch of these lengths, the smallest shape first."""
    holding = [k for k, (rows, length) in enumerate(shapes) if len(lengths) <= rows and max(lengths) <= length]
    return sorted(holding, key=lambda k: (shapes[k][0] * shapes[k][1], shapes[k][1], k))


@lru_cache
def most_rows(
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


def capped_rows_and_steps(num_samples: int, cap: int, num_microbatches: int, row_multiple: int) -> tuple[int, int]:
    """Return the same for a given number of rows that fit."""
    if cap >= row_multiple:
        cap = cap // row_multiple * row_multiple
    assert cap >= 1
    if num_samples == 0:
        return cap, 0
    steps = ceil_div(num_samples, num_microbatches * cap)
    return min(cap, round_up(ceil_div(num_samples, num_microbatches * steps), row_multiple)), steps


def samples_per_edge(lengths: Sequence[int], edges: Sequence[int]) -> list[int]:
    """Return how many samples have each edge as the smallest that holds them."""
    owners = [next(k for k, edge in enumerate(edges) if length <= edge) for length in lengths]
    return [owners.count(k) for k in range(len(edges))]


def raw_edges(strategy: str, lengths: Sequence[int], max_shapes: int) -> list[int]:
    """Return the edges of a closed-form strategy, before rounding."""
    ordered, shortest, longest = sorted(lengths), min(lengths), max(lengths)
    shapes = range(1, max_shapes + 1)
    if strategy == "pad_to_max":
        return [longest]
    if strategy == "powers_of_two":
        first = next(2**i for i in range(64) if 2**i >= shortest)
        edges = [first]
        while edges[-1] < longest:
            edges.append(2 * edges[-1])
        return [*edges[:-1], longest]
    if strategy == "geometric":
        targets = [shortest ** (max_shapes - k) * longest**k for k in shapes]
        return [next(e for e in range(1, longest + 1) if e**max_shapes >= target) for target in targets]
    if strategy == "quantile":
        return [ordered[ceil_div(k * len(ordered), max_shapes) - 1] for k in shapes]
    assert strategy == "equal_tokens"
    cumulative = [sum(ordered[: i + 1]) for i in range(len(ordered))]
    return [
        next(ordered[i] for i, tokens in enumerate(cumulative) if tokens * max_shapes >= k * cumulative[-1])
        for k in shapes
    ]


def edge_sets(
    lengths: Sequence[int], max_shapes: int, max_length: int | None, length_multiple: int
) -> Iterator[list[int]]:
    """Yield every set of rounded lengths that "optimal" chooses among."""
    clipped = [length if max_length is None else min(length, max_length) for length in lengths]
    distinct = sorted({round_up(length, length_multiple) for length in clipped})
    for size in range(min(max_shapes, len(distinct))):
        for chosen in combinations(distinct[:-1], size):
            yield [*chosen, distinct[-1]]


def total_cost(
    lengths: Sequence[int],
    edges: Sequence[int],
    max_tokens: int,
    num_microbatches: int,
    row_multiple: int,
    cost: Cost | None,
    compile_seconds: float | None,
    **limits: Any,
) -> float:
    """Return the total that "optimal" minimises, summed from the shortest bucket upwards."""
    longest = edges[-1]
    counts = samples_per_edge([min(length, longest) for length in lengths], edges)
    total: float = 0
    for num_samples, length in zip(counts, edges, strict=True):
        cap = most_rows(length, max_tokens, cost if "max_cost" in limits else None, **limits)
        rows, steps = capped_rows_and_steps(num_samples, cap, num_microbatches, row_multiple)
        if cost is None:
            total += steps * num_microbatches * rows * length
        else:
            total += float(steps * num_microbatches) * float(cost(rows, length)) + (compile_seconds or 0.0)
    return total


def clip(lengths: Sequence[int], max_length: int | None, overlong: str = "truncate") -> list[int]:
    """Return the lengths that count, those above the limit cut or left out."""
    limit = max(lengths) if max_length is None else max_length
    return [min(length, limit) for length in lengths if length <= limit or overlong == "truncate"]


def make_buckets(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    strategy: str | Sequence[int] = "optimal",
    max_shapes: int = 16,
    max_length: int | None = None,
    overlong: str = "truncate",
    microbatches_per_step: int = 1,
    row_multiple: int = 1,
    length_multiple: int = 1,
    cost: Cost | None = None,
    compile_seconds: float | None = None,
    **limits: Any,
) -> list[tuple[int, int]]:
    """Return the buckets; "optimal" by trying every set; limits are max_cost, memory, max_bytes, max_sequences."""
    if isinstance(strategy, str):
        clipped = clip(lengths, max_length, overlong)
        if strategy == "optimal":
            row_rule = (microbatches_per_step, row_multiple)
            edges = best_edges(
                clipped, max_tokens, max_shapes, length_multiple, *row_rule, cost, compile_seconds, **limits
            )
        else:
            edges = sorted({round_up(edge, length_multiple) for edge in raw_edges(strategy, clipped, max_shapes)})
    else:
        edges = sorted({round_up(edge, length_multiple) for edge in strategy})
        clipped = clip(lengths, edges[-1], overlong)
    caps = [most_rows(edge, max_tokens, cost if "max_cost" in limits else None, **limits) for edge in edges]
    return [
        (capped_rows_and_steps(count, cap, microbatches_per_step, row_multiple)[0], edge)
        for count, cap, edge in zip(samples_per_edge(clipped, edges), caps, edges, strict=True)
    ]


def best_edges(
    lengths: Sequence[int],
    max_tokens: int,
    max_shapes: int,
    length_multiple: int,
    num_microbatches: int,
    row_multiple: int,
    cost: Cost | None,
    compile_seconds: float | None,
    **options: Any,
) -> list[int]:
    """Return the cheapest of all sets of edges; ties: the fewest, then the smaller from the longest down."""

    def rank(edges: list[int]) -> tuple[float, int, list[int]]:
        total = total_cost(lengths, edges, max_tokens, num_microbatches, row_multiple, cost, compile_seconds, **options)
        return total, len(edges), edges[::-1]

    return min(edge_sets(lengths, max_shapes, None, length_multiple), key=rank)


def first_holding(length: Length, buckets: Sequence[tuple[int, ...]]) -> int | None:
    """Return the first bucket that holds a sample of this length, or pair of these lengths."""
    sizes = (length,) if isinstance(length, int) else length
    holding = (k for k, (_, *limits) in enumerate(buckets) if all(n <= m for n, m in zip(sizes, limits, strict=True)))
    return next(holding, None)


def count_of(pair_size: str | Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the function that counts a pair."""
    if callable(pair_size):
        return pair_size
    return {"sum": operator.add, "larger": max, "product": operator.mul}[pair_size]


def make_steps(
    lengths: Sequence[Length],
    buckets: Sequence[tuple[int, ...]],
    *,
    microbatches_per_step: int = 1,
    order: str | Sequence[int] = "length",
    difficulty: Sequence[Any] | None = None,
    seed: int = 0,
    epoch: int = 0,
    block_size: int | None = None,
    pacing: Callable[[int], Any] | None = None,
    value_bound: Callable[[int], float] | None = None,
    shuffle_steps: bool = False,
    longest_first: bool = False,
    new_shape_every: int = 0,
    overlong: str = "error",
    pair_size: str | Callable[[Any, Any], Any] = "sum",
) -> list[Step]:
    """Return the steps in the order in which they are emitted."""
    counts = count_of(pair_size)
    sums = [length if isinstance(length, int) else counts(*length) for length in lengths]
    ids = sample_order(sums, order, difficulty=difficulty, seed=seed, epoch=epoch, block_size=block_size)
    if overlong == "truncate":
        lengths = [min(length, buckets[-1][1]) for length in sums]
    bucket_of = [first_holding(length, buckets) for length in lengths]
    if overlong == "drop":
        ids = [i for i in ids if bucket_of[i] is not None]
    capacity = [microbatches_per_step * rows for rows, *_ in buckets]
    if value_bound is not None:
        first = sums if difficulty is None else difficulty[0] if isinstance(difficulty[0], list) else difficulty
        ordered = [first[i] for i in ids]

        def pacing(step: int) -> Fraction:
            bound = value_bound(step)
            bound = bound.item() if hasattr(bound, "item") else bound  # NumPy's floats compare with integers as floats
            return Fraction(sum(value <= bound for value in ordered), len(ordered))

    if pacing is not None:
        ids = paced_order(ids, [bucket_of[i] for i in ids], capacity, pacing, seed, epoch)
    by_arrival = (
        not isinstance(order, str)
        or order == "dataset"
        or (difficulty is not None and list(difficulty) not in (sums, [sums]))
        or block_size is not None
        or pacing is not None
    )
    open_steps: list[list[int]] = [[] for _ in buckets]
    arrived: list[Step] = []
    for i in ids:
        k = bucket_of[i]
        assert k is not None
        open_steps[k].append(i)
        if len(open_steps[k]) == capacity[k]:
            arrived.append((k, open_steps[k]))
            open_steps[k] = []
    arrived += [(k, step) for k, step in enumerate(open_steps) if step]
    # Within a bucket steps arrive by position, and Python's sort is stable.
    steps = arrived if by_arrival else sorted(arrived, key=lambda s: -s[0] if order == "length_descending" else s[0])
    if shuffle_steps or (order == "shuffle" and not by_arrival):
        steps = [steps[i] for i in random_order(seed, epoch, len(lengths), len(steps))]
    if longest_first:
        top = max((sum(buckets[k][1:]) if len(buckets[k]) < 3 else counts(*buckets[k][1:]), k) for k, _ in steps)[1]
        place = next(i for i, (k, _) in enumerate(steps) if k == top)
        steps[0], steps[place] = steps[place], steps[0]
    return one_by_one(steps, new_shape_every) if new_shape_every else steps


def one_by_one(steps: Sequence[Step], spacing: int) -> list[Step]:
    """Return the steps with their shapes one by one, each step looked for among all that are left."""
    number = {k: c for c, k in enumerate(dict.fromkeys(k for k, _ in steps))}
    left, result = list(steps), []
    while left:
        lowest = min(number[k] for k, _ in left)
        may_come = [number[k] * spacing <= len(result) or number[k] == lowest for k, _ in left]
        result.append(left.pop(may_come.index(True)))
    return result


def paced_order(
    ids: Sequence[int],
    bucket_of: Sequence[int | None],
    capacity: Sequence[int],
    pacing: Callable[[int], Any],
    seed: int,
    epoch: int,
) -> list[int]:
    """Return the samples, given easiest first, in the order in which the pacing lets them arrive."""
    num_samples = len(ids)
    num_steps = sum(ceil_div(bucket_of.count(k), capacity[k]) for k in range(len(capacity)))
    admitted = [math.ceil(pacing(epoch * num_steps + t) * num_samples) for t in range(num_steps)]
    admitted = [max(admitted[: t + 1]) for t in range(num_steps)]
    keys = [word >> 32 for word in philox_words(seed, epoch, num_samples)]
    pool, emitted, waiting = list(range(num_samples)), 0, [0] * len(capacity)
    for p in range(num_samples):
        a = min(max(admitted[min(emitted, num_steps - 1)], p + 1), num_samples)
        j = p + ((keys[p] * (a - p)) >> 32)
        pool[p], pool[j] = pool[j], pool[p]
        k = bucket_of[pool[p]]
        assert k is not None
        waiting[k] += 1
        if waiting[k] % capacity[k] == 0:
            emitted += 1
    return [ids[rank] for rank in pool]


def step_rows(ids: Sequence[int], rows: int, num_microbatches: int) -> list[list[int]]:
    """Return the [M, B] sample ids of a step, -1 for a padding row."""
    microbatches = [[-1] * rows for _ in range(num_microbatches)]
    for j, sample_id in enumerate(ids):
        microbatches[j % num_microbatches][j // num_microbatches] = sample_id
    return microbatches


def offsets(steps: Sequence[Step]) -> list[int]:
    """Return where each step starts among the real samples, and their number."""
    result = [0]
    for _, ids in steps:
        result.append(result[-1] + len(ids))
    return result


def digest(
    steps: Sequence[Step],
    buckets: Sequence[tuple[int, ...]],
    num_microbatches: int,
    row_offsets: Sequence[int] | None = None,
    piece_starts: Sequence[int] | None = None,
) -> str:
    """Return the plan's digest; with row offsets that of a plan of packed rows, also with starts of split samples."""
    ids = [i for _, step in steps for i in step]
    kind = b"plan" if row_offsets is None else b"packed-plan" if piece_starts is None else b"split-plan"
    total = hashlib.sha256(b"jvarlen-" + kind + b"-1\0")
    total.update(pack([num_microbatches, len(buckets), len(steps), len(ids)]))
    total.update(pack([number for bucket in buckets for number in bucket]))
    total.update(struct.pack(f"<{len(steps)}i", *(k for k, _ in steps)))
    total.update(pack(offsets(steps)))
    if row_offsets is not None:
        total.update(pack([len(row_offsets) - 1]))
        total.update(pack(row_offsets))
    if piece_starts is not None:
        total.update(pack(piece_starts))
    for start in range(0, len(ids), 2**20):
        total.update(hashlib.sha256(pack(ids[start : start + 2**20])).digest())
    return total.hexdigest()


def checksum(
    plan_digest: str,
    num_tokens: Sequence[int],
    num_dropped: int,
    num_truncated: int,
    overlong: str,
    samples_per_row: Sequence[int] = (),
) -> str:
    """Return the plan file's checksum over what the digest leaves out."""
    counts = pack(num_tokens) + pack([num_dropped, num_truncated]) + pack(samples_per_row)
    return hashlib.sha256(plan_digest.encode() + counts + overlong.encode()).hexdigest()


def pack(numbers: Sequence[int]) -> bytes:
    """Return the numbers as little-endian int64."""
    return struct.pack(f"<{len(numbers)}q", *numbers)
