"""How do jvarlen's batches and rows compare with what users have today, on the same lengths?

Run `pip install -e '.[benchmarks]'` and `python benchmarks/peers.py [--quick]`. Prints tables and writes them, with
versions and hardware, to `benchmarks/results/`. A peer that is not installed is listed as such.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from support.timing import REPEATS, best_seconds, digits, report, table, versions_and_hardware

import jvarlen

ROW_LENGTH = 4_096
LIMIT_S = 20.0  # a call that takes long is not repeated after this

# What is timed, and what then reads its result as `Batches` or `Pieces`.
Work = tuple[Callable[[], Any], Callable[[Any], Any]]


class Batches(NamedTuple):
    """Batch i is `sample_ids[offsets[i]:offsets[i+1]]`, padded to `rows[i]` × `longest[i]` positions."""

    sample_ids: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray
    longest: np.ndarray


class Pieces(NamedTuple):
    """What packed rows hold: piece i is `num_tokens[i]` tokens of sample `sample_ids[i]`."""

    sample_ids: np.ndarray
    num_tokens: np.ndarray
    num_rows: int


class Peer(NamedTuple):
    """A way to batch or to pack.

    `found` names what the peer gives, as "module" or "module:name". `work(given, lengths, limit)` takes that and
    prepares the peer's own objects, outside of what is timed.
    """

    name: str
    found: str
    work: Callable[[Any, np.ndarray, int], Work]
    is_slow: bool = False


class Lengths(NamedTuple):
    """Lengths to compare on, with the budget of a batch in tokens."""

    name: str
    values: np.ndarray
    max_tokens: int


def batch_by_plan(num_shapes: int) -> Callable[..., Work]:
    def work(given: Any, lengths: np.ndarray, max_tokens: int) -> Work:
        def call() -> jvarlen.Plan:
            return given.make_plan(lengths, given.make_buckets(lengths, max_tokens, max_shapes=num_shapes))

        return call, read

    def read(plan: jvarlen.Plan) -> Batches:
        rows, longest = np.array(plan.buckets)[plan.step_bucket].T
        return Batches(plan.sample_ids, plan.step_offsets, rows, longest)

    return work


def batch_by_tokens(budget: str) -> Callable[..., Work]:
    def work(given: Any, lengths: np.ndarray, max_tokens: int) -> Work:
        def read(batches: jvarlen.Batches) -> Batches:
            return with_longest(lengths, batches.sample_ids, batches.offsets)

        return lambda: given(lengths, max_tokens, order="length", budget=budget), read

    return work


def batch_by_deepspeed(given: Any, lengths: np.ndarray, max_tokens: int) -> Work:
    values = lengths.tolist()

    def read(result: tuple[Any, ...]) -> Batches:
        return from_lists(lengths, [ids for _, ids in result[0]])

    return lambda: given(values, max_tokens, sequence_picking_order="seqlen"), read


def batch_by_lhotse(num_buckets: int) -> Callable[..., Work]:
    def work(given: Any, lengths: np.ndarray, max_tokens: int) -> Work:
        cuts = lhotse_cuts(lengths)

        def call() -> list[Any]:
            sampler = given.DynamicBucketingSampler
            return list(sampler(cuts, max_duration=max_tokens, num_buckets=num_buckets, shuffle=True, seed=0))

        return call, lambda batches: from_lhotse(lengths, batches)

    return work


def batch_by_lhotse_sizes(num_buckets: int) -> Callable[..., Work]:
    def work(given: Any, lengths: np.ndarray, max_tokens: int) -> Work:
        cuts = lhotse_cuts(lengths)

        def call() -> list[Any]:
            edges = [*given.estimate_duration_buckets(cuts[:10_000], num_buckets), float(lengths.max())]
            constraint = given.FixedBucketBatchSizeConstraint(edges, [int(max_tokens // edge) for edge in edges])
            sampler = given.DynamicBucketingSampler
            return list(sampler(cuts, constraint=constraint, duration_bins=edges[:-1], shuffle=True, seed=0))

        return call, lambda batches: from_lhotse(lengths, batches)

    return work


def lhotse_cuts(lengths: np.ndarray) -> list[Any]:
    """A cut a sample, a second a token."""
    from lhotse import MonoCut

    return [MonoCut(str(i), start=0.0, duration=float(n), channel=0) for i, n in enumerate(lengths.tolist())]


def from_lhotse(lengths: np.ndarray, batches: Iterable[Iterable[Any]]) -> Batches:
    return from_lists(lengths, ([int(cut.id) for cut in batch] for batch in batches))


def batch_by_transformers(given: Any, lengths: np.ndarray, max_tokens: int) -> Work:
    import torch

    values = lengths.tolist()
    batch_size = max_tokens // max(values)

    def call() -> list[list[int]]:
        sampler = given(batch_size, lengths=values, generator=torch.Generator().manual_seed(0))
        return list(torch.utils.data.BatchSampler(sampler, batch_size, drop_last=False))

    return call, lambda batches: from_lists(lengths, batches)


def from_lists(lengths: np.ndarray, batches: Iterable[Sequence[int]]) -> Batches:
    arrays = [np.array(batch, np.int64) for batch in batches]
    return with_longest(lengths, np.concatenate(arrays), np.cumsum([0, *map(len, arrays)]))


def with_longest(lengths: np.ndarray, sample_ids: np.ndarray, offsets: np.ndarray) -> Batches:
    """Batches that are padded to their own longest sample."""
    longest = np.maximum.reduceat(lengths[sample_ids], offsets[:-1])
    return Batches(sample_ids, offsets, np.diff(offsets), longest)


def pack_by_best_fit(given: Any, lengths: np.ndarray, row_length: int) -> Work:
    def read(packing: jvarlen.Packing) -> Pieces:
        return Pieces(packing.sample_ids, packing.sample_lengths, packing.num_rows)

    return lambda: given(lengths, row_length), read


def pack_by_grain(**options: Any) -> Callable[..., Work]:
    def work(given: Any, lengths: np.ndarray, row_length: int) -> Work:
        import grain

        # Sample i is its number, lengths[i] times, without memory of its own: a row then tells what it holds.
        samples = [{"tokens": np.broadcast_to(np.int32(i), n)} for i, n in enumerate(lengths.tolist())]
        # What is in memory comes faster without threads that read ahead.
        reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        dataset = grain.MapDataset.source(samples).to_iter_dataset(reading)
        rows = given(dataset, length_struct={"tokens": row_length}, **options)

        def read(num_rows: int) -> Pieces:
            ids, num_tokens = [], []
            for row in rows:
                used = np.flatnonzero(row["tokens_segment_ids"])
                starts = np.flatnonzero(np.diff(row["tokens_segment_ids"][used], prepend=0))
                ids.append(row["tokens"][used][starts])
                num_tokens.append(np.diff(starts, append=len(used)))
            return Pieces(np.concatenate(ids), np.concatenate(num_tokens), num_rows)

        return lambda: sum(1 for _ in rows), read

    return work


DEEPSPEED = "deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr:batch_by_seqlens"
LHOTSE = "lhotse.dataset.sampling.dynamic_bucketing"
BATCHING = [
    Peer("jvarlen: make_buckets and make_plan, 16 shapes", "jvarlen", batch_by_plan(16)),
    Peer("jvarlen: make_buckets and make_plan, 32 shapes", "jvarlen", batch_by_plan(32)),
    Peer("jvarlen: batch_by_tokens, sorted (fairseq's rule)", "jvarlen:batch_by_tokens", batch_by_tokens("padded")),
    Peer("jvarlen: batch_by_tokens, sorted, sum of lengths", "jvarlen:batch_by_tokens", batch_by_tokens("sum")),
    Peer("DeepSpeed: batch_by_seqlens, sorted, sum of lengths", DEEPSPEED, batch_by_deepspeed, is_slow=True),
    Peer("Lhotse: DynamicBucketingSampler, 10 buckets", LHOTSE, batch_by_lhotse(10)),
    Peer("Lhotse: DynamicBucketingSampler, 30 buckets", LHOTSE, batch_by_lhotse(30)),
    Peer("Lhotse: 16 buckets with a batch size each", LHOTSE, batch_by_lhotse_sizes(16)),
    Peer(
        "Transformers: LengthGroupedSampler",
        "transformers.trainer_pt_utils:LengthGroupedSampler",
        batch_by_transformers,
    ),
]
PACKING = [
    Peer("jvarlen: pack_samples", "jvarlen:pack_samples", pack_by_best_fit),
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


def measure(peers: list[Peer], lengths: np.ndarray, limit: int, figures: Callable[[Any], list[str]]) -> list[list[str]]:
    """Rows of a table: name, seconds, ratio to the first peer, figures of the result."""
    rows: list[list[str]] = []
    first_s = None
    for peer in peers:
        if importlib.util.find_spec(peer.found.partition(":")[0].partition(".")[0]) is None:
            rows.append([peer.name, "not installed"])
            continue
        try:
            given = pkgutil.resolve_name(peer.found)
        except Exception as error:  # peers of other versions or for other machines raise what they like
            rows.append([peer.name, f"cannot be imported: {error}"])
            continue
        call, read = peer.work(given, lengths, limit)
        seconds, result = best_seconds(call, limit_s=LIMIT_S)
        first_s = first_s or seconds
        rows.append([peer.name, digits(seconds), digits(seconds / first_s), *figures(read(result))])
    num_columns = max(map(len, rows))
    return [row + [""] * (num_columns - len(row)) for row in rows]


def compare_batches(peers: list[Peer], lengths: Lengths) -> list[str]:
    def figures(batches: Batches) -> list[str]:
        positions = batches.rows * batches.longest
        times_seen = np.bincount(batches.sample_ids, minlength=len(lengths.values))
        return [
            f"{1 - lengths.values[batches.sample_ids].sum() / positions.sum():.2%}",
            f"{len(set(zip(batches.rows.tolist(), batches.longest.tolist(), strict=True))):,}",
            f"{len(batches.rows):,}",
            f"{positions.max() / lengths.max_tokens:.3f}",
            f"{(times_seen == 0).sum():,}",
            f"{(times_seen > 1).sum():,}",
        ]

    rows = measure(peers, lengths.values, lengths.max_tokens, figures)
    return [
        f"### {lengths.name}: {len(lengths.values):,} samples, budget {lengths.max_tokens:,}",
        "",
        *table("work|seconds|ratio|padding|shapes|batches|largest / budget|samples lost|repeated", rows),
        "",
    ]


def compare_packing(lengths: Lengths) -> list[str]:
    def figures(pieces: Pieces) -> list[str]:
        times_seen = np.bincount(pieces.sample_ids, minlength=len(lengths.values))
        tokens_seen = np.bincount(pieces.sample_ids, weights=pieces.num_tokens, minlength=len(lengths.values))
        return [
            f"{pieces.num_tokens.sum() / (pieces.num_rows * ROW_LENGTH):.2%}",
            f"{pieces.num_rows:,}",
            f"{(tokens_seen < lengths.values).sum():,}",
            f"{(tokens_seen > lengths.values).sum():,}",
            f"{(times_seen > 1).sum():,}",
        ]

    rows = measure(PACKING, lengths.values, ROW_LENGTH, figures)
    return [
        f"### {lengths.name}: {len(lengths.values):,} samples",
        "",
        *table("work|seconds|ratio|fill|rows|samples lost|repeated|cut", rows),
        "",
    ]


def lengths_to_compare(num_samples: int) -> list[Lengths]:
    uniform = np.random.RandomState(2023).randint(128, 4096, num_samples)
    sentences = np.random.default_rng(2023).lognormal(3.1, 0.6, num_samples)
    return [
        Lengths("Uniform lengths", uniform, 500_000),
        Lengths("Sentences", np.clip(np.rint(sentences), 1, 512).astype(np.int64), 8_192),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few samples, and no report")
    options = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed then looks for no other, and does not say that it did
    num_samples, num_few = (2_000, 500) if options.quick else (200_000, 8_000)
    many = lengths_to_compare(num_samples)
    few = [lengths._replace(values=lengths.values[:num_few]) for lengths in many]
    quick_peers = [peer for peer in BATCHING if not peer.is_slow]
    lines = [
        f"# Peers, {datetime.date.today()}",
        "",
        f"The same lengths for all. Best of {REPEATS} in one run (of at least 2, where {REPEATS} would take more than "
        f"{LIMIT_S:.0f} s); ratios to the first row of a table. Uniform lengths: `np.random.seed(2023); "
        "np.random.randint(128, 4096, 200000)`. Sentences: lognormal, median 22 tokens, at most 512.",
        "",
        "## Batches",
        "",
        "Padding: the share of positions, dummy rows included, that hold no token. Shapes: distinct (rows, length), "
        "each of which XLA compiles. A plan's batches have the shape of their bucket; all others are padded to their "
        "longest sample. Largest / budget: rows × length of the largest batch over the budget.",
        "",
        "fairseq cannot be installed on Python 3.11; `batch_by_tokens` has its rule. DeepSpeed and the row above it "
        "count the sum of lengths, not positions. Lhotse has cuts of a second a token and `shuffle=True`; its seconds "
        "are those of iterating over all batches, which hold the cuts. Its buckets with a batch size each have the "
        "edges that it estimates itself, and the budget over the edge as batch size. Transformers has one batch size, "
        "the budget over the longest sample, in a `torch.utils.data.BatchSampler`.",
        "",
        *(line for lengths in many for line in compare_batches(quick_peers, lengths)),
        f"DeepSpeed's function tries every end for every batch, so that its time grows with the cube of the samples: "
        f"all again on the first {num_few:,}.",
        "",
        *(line for lengths in few for line in compare_batches(BATCHING, lengths)),
        f"## Packing into rows of {ROW_LENGTH:,}",
        "",
        "`pack_samples` plans, with all lengths known. Grain packs as samples come, in dataset order, and its seconds "
        "include copying them into rows (from memory, without threads). Fill: the share of positions that hold a "
        "token. Samples cut: those in more than one row.",
        "",
        *(line for lengths in many for line in compare_packing(lengths)),
        versions_and_hardware("lhotse", "transformers", "deepspeed", "grain", "torch"),
    ]
    report("peers", lines, write=not options.quick)


if __name__ == "__main__":
    main()
