"""How full does packing make rows, what does it cost, and how many tokens, with padding, does an epoch compute?

`pack_samples` into rows of one length, of four lengths, and of chosen lengths, against Grain's packers and a plain
first-fit-decreasing. Run `python benchmarks/packing.py [--quick]`. Prints tables and writes them, with versions and
hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from support.peer_calls import LIMIT_S, Lengths, Peer, Work, measure
from support.timing import REPEATS, digits, report, table, versions_and_hardware

import jvarlen
from jvarlen.data.stdlib_corpus import stdlib_functions

LENGTH_MULTIPLE = 256 if "--quick" in sys.argv else 32  # of rows whose lengths are chosen
COST = jvarlen.CostModel(0.0, 15e-6, 0.22e-6)  # the built-in model's on two cores, rounded


class Chunks(NamedTuple):
    """What rows hold: chunk i, `num_tokens[i]` tokens of `sample_ids[i]`; row k is `row_lengths[k]` tokens long."""

    sample_ids: np.ndarray
    num_tokens: np.ndarray
    row_lengths: np.ndarray


def longest_row(lengths: Lengths) -> int:
    """The power of two that holds all samples."""
    return 1 << (int(lengths.values.max()) - 1).bit_length()


def pack_by_jvarlen(choose: Callable[[Lengths], tuple[int, ...]]) -> Callable[..., Work]:
    def work(given: Any, lengths: Lengths) -> Work:
        return lambda: given(lengths.values, choose(lengths)), read

    def read(packing: jvarlen.Packing) -> Chunks:
        return Chunks(packing.sample_ids, packing.sample_lengths, packing.capacity)

    return work


def one_length(lengths: Lengths) -> tuple[int, ...]:
    return (longest_row(lengths),)


def four_lengths(lengths: Lengths) -> tuple[int, ...]:
    return tuple(longest_row(lengths) // part for part in (8, 4, 2, 1))


def chosen_lengths(lengths: Lengths) -> tuple[int, ...]:
    return jvarlen.planning.choose_row_lengths(
        lengths.values, lengths.max_tokens, max_shapes=4, length_multiple=LENGTH_MULTIPLE, cost=COST
    )


def pad_to_buckets(given: Any, lengths: Lengths) -> Work:
    def read(buckets: jvarlen.planning.Buckets) -> Chunks:
        edges = np.array(buckets.shapes)[:, 1]
        row_lengths = edges[np.searchsorted(edges, lengths.values)]
        return Chunks(np.arange(len(row_lengths)), lengths.values, row_lengths)

    return lambda: given(lengths.values, lengths.max_tokens, max_shapes=12), read


def pack_first_fit_decreasing(given: Any, lengths: Lengths) -> Work:
    row_length = longest_row(lengths)

    def read(rows: list[list[int]]) -> Chunks:
        ids = np.concatenate([np.array(row) for row in rows])
        return Chunks(ids, lengths.values[ids], np.full(len(rows), row_length))

    return lambda: first_fit_decreasing(lengths.values.tolist(), row_length), read


def first_fit_decreasing(lengths: list[int], row_length: int) -> list[list[int]]:
    """Rows of samples: the longest sample first, each into the first row that has room for it."""
    num_leaves = 1 << max(0, len(lengths) - 1).bit_length()
    # Room in the roomiest row below each node of a binary tree; leaf `num_leaves` + k is row k.
    room = [row_length] * (2 * num_leaves)
    rows: list[list[int]] = [[] for _ in lengths]
    for sample in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[sample]
        node = 1
        while node < num_leaves:
            node *= 2
            node += room[node] < length
        rows[node - num_leaves].append(sample)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [row for row in rows if row]


def pack_by_grain(**options: Any) -> Callable[..., Work]:
    def work(given: Any, lengths: Lengths) -> Work:
        import grain

        row_length = longest_row(lengths)
        # Sample i is its number, as often as it is long, without memory of its own: a row then shows what it holds.
        samples = [{"tokens": np.broadcast_to(np.int32(i), n)} for i, n in enumerate(lengths.values.tolist())]
        # What is in memory comes faster without threads that read ahead.
        reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        dataset = grain.MapDataset.source(samples).to_iter_dataset(reading)
        rows = given(dataset, length_struct={"tokens": row_length}, **options)

        def read(num_rows: int) -> Chunks:
            ids, num_tokens = [], []
            for row in rows:
                used = np.flatnonzero(row["tokens_segment_ids"])
                starts = np.flatnonzero(np.diff(row["tokens_segment_ids"][used], prepend=0))
                ids.append(row["tokens"][used][starts])
                num_tokens.append(np.diff(starts, append=len(used)))
            return Chunks(np.concatenate(ids), np.concatenate(num_tokens), np.full(num_rows, row_length))

        return lambda: sum(1 for _ in rows), read

    return work


PACKING = [
    Peer("jvarlen: pack_samples, rows of one length", "jvarlen:pack_samples", pack_by_jvarlen(one_length)),
    Peer("jvarlen: pack_samples, rows of four lengths", "jvarlen:pack_samples", pack_by_jvarlen(four_lengths)),
    Peer("jvarlen: pack_samples, lengths chosen", "jvarlen:pack_samples", pack_by_jvarlen(chosen_lengths)),
    Peer("jvarlen: make_buckets, 12 shapes, not packed", "jvarlen:make_buckets", pad_to_buckets),
    Peer("first-fit-decreasing in Python", "builtins", pack_first_fit_decreasing),
    *(
        Peer(
            f"Grain: {name}, {num_bins:,} bins",
            f"grain:experimental.{name}PackIterDataset",
            pack_by_grain(num_packing_bins=num_bins),
        )
        for name in ("FirstFit", "BestFit")
        for num_bins in (64, 1_024)
    ),
    Peer("Grain: ConcatThenSplit", "grain:experimental.ConcatThenSplitIterDataset", pack_by_grain()),
]


def positions_by_length(row_lengths: np.ndarray, max_tokens: int) -> dict[int, int]:
    """Positions of an epoch in rows of each length, in whole batches of as many rows as the budget holds."""
    lengths, counts = np.unique(row_lengths, return_counts=True)
    rows = max_tokens // lengths
    return dict(zip(lengths.tolist(), (-(-counts // rows) * rows * lengths).tolist(), strict=True))


def compare(lengths: Lengths) -> list[str]:
    num_tokens = lengths.values.sum()

    def figures(chunks: Chunks) -> list[str]:
        times_seen = np.bincount(chunks.sample_ids, minlength=len(lengths.values))
        tokens_seen = np.bincount(chunks.sample_ids, weights=chunks.num_tokens, minlength=len(lengths.values))
        positions = positions_by_length(chunks.row_lengths, lengths.max_tokens)
        return [
            f"{chunks.num_tokens.sum() / chunks.row_lengths.sum():.2%}",
            f"{len(chunks.row_lengths):,}",
            f"{sum(positions.values()) / num_tokens:.4f}",
            digits(sum(number * length for length, number in positions.items()) / num_tokens),
            f"{(tokens_seen < lengths.values).sum():,}",
            f"{(tokens_seen > lengths.values).sum():,}",
            f"{(times_seen > 1).sum():,}",
        ]

    chosen = ", ".join(f"{length:,}" for length in chosen_lengths(lengths))
    return [
        f"## {lengths.name}: {len(lengths.values):,} samples, rows of {longest_row(lengths):,}",
        "",
        f"Budget {lengths.max_tokens:,}. Four lengths: {', '.join(f'{length:,}' for length in four_lengths(lengths))}; "
        f"chosen: {chosen}.",
        "",
        *table(
            "work|seconds|ratio|fill|rows|positions / tokens|pairs / tokens|samples lost|repeated|cut",
            measure(PACKING, lengths, figures),
        ),
        "",
    ]


def lengths_to_compare(num_samples: int) -> list[Lengths]:
    uniform = np.random.RandomState(2023).randint(128, 4096, num_samples)
    corpus = jvarlen.measure_lengths(stdlib_functions(progress=False), progress=False)
    drawn = np.random.default_rng(2023).lognormal(np.log(300), 1.2, 2 * num_samples)
    long_tailed = np.ceil(drawn).astype(np.int64)
    return [
        Lengths("Uniform lengths", uniform, 500_000),
        Lengths("The built-in corpus up to 1,024 bytes", corpus[corpus <= 1_024][:num_samples], 8_192),
        Lengths("Long-tailed lengths", long_tailed[long_tailed <= 4_096][:num_samples], 65_536),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few samples, and no report")
    quick = parser.parse_args().quick
    num_samples = 100 if quick else 200_000
    lines = [
        f"# Packing, {datetime.date.today()}",
        "",
        f"Best of {REPEATS} in one run (of at least 2, where {REPEATS} would take more than {LIMIT_S:.0f} s); ratios "
        "to the first row of a table. `pack_samples` and first-fit-decreasing plan, with all lengths known; choosing "
        "lengths, for a cost of 15 µs + 0.22 µs·T a token, is part of the seconds. Grain packs as samples come, in "
        "dataset order, and its seconds include copying them into rows (from memory, without threads).",
        "",
        "Fill: the share of the rows' positions that hold a token. Positions: of an epoch in batches of as many rows "
        "as the budget holds, the last one of each length filled up with padding rows. Pairs: positions times their "
        "row's length, which is what attention grows with. Cut: samples in more than one row.",
        "",
        f"Uniform lengths: `np.random.seed(2023); np.random.randint(128, 4096, {num_samples})`. Long-tailed: "
        "lognormal, median 300, σ 1.2, those up to 4,096.",
        "",
        *(line for lengths in lengths_to_compare(num_samples) for line in compare(lengths)),
        versions_and_hardware("grain"),
    ]
    report("packing", lines, write=not quick)


if __name__ == "__main__":
    main()
