"""How do jvarlen's batches compare with what users have today, on the same lengths?

Run `pip install -e '.[benchmarks]'` and `python benchmarks/peers.py [--quick]`. Prints tables and writes them, with
versions and hardware, to `benchmarks/results/`. A peer that is not installed is listed as such.
"""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from support.peer_calls import LIMIT_S, Lengths, Peer, Work, measure
from support.timing import REPEATS, report, table, versions_and_hardware

import jvarlen


class Batches(NamedTuple):
    """Batch i is `sample_ids[offsets[i]:offsets[i+1]]`, padded to `rows[i]` × `longest[i]` positions."""

    sample_ids: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray
    longest: np.ndarray


def batch_by_plan(num_shapes: int) -> Callable[..., Work]:
    def work(given: Any, lengths: Lengths) -> Work:
        def call() -> jvarlen.Plan:
            buckets = given.make_buckets(lengths.values, lengths.max_tokens, max_shapes=num_shapes)
            return given.make_plan(lengths.values, buckets, order="length")

        return call, read

    def read(plan: jvarlen.Plan) -> Batches:
        rows, longest = np.array(plan.buckets.shapes)[plan.step_bucket].T
        return Batches(plan.sample_ids, plan.step_offsets, rows, longest)

    return work


def batch_by_tokens(budget: str) -> Callable[..., Work]:
    def work(given: Any, lengths: Lengths) -> Work:
        def read(batches: jvarlen.planning.Batches) -> Batches:
            return with_longest(lengths.values, batches.sample_ids, batches.offsets)

        return lambda: given(lengths.values, lengths.max_tokens, order="length", budget=budget), read

    return work


def batch_by_deepspeed(given: Any, lengths: Lengths) -> Work:
    values = lengths.values.tolist()

    def read(result: tuple[Any, ...]) -> Batches:
        return from_lists(lengths.values, [ids for _, ids in result[0]])

    return lambda: given(values, lengths.max_tokens, sequence_picking_order="seqlen"), read


def batch_by_lhotse(num_buckets: int) -> Callable[..., Work]:
    def work(given: Any, lengths: Lengths) -> Work:
        cuts = lhotse_cuts(lengths.values)

        def call() -> list[Any]:
            sampler = given.DynamicBucketingSampler
            return list(sampler(cuts, max_duration=lengths.max_tokens, num_buckets=num_buckets, shuffle=True, seed=0))

        return call, lambda batches: from_lhotse(lengths.values, batches)

    return work


def batch_by_lhotse_sizes(num_buckets: int) -> Callable[..., Work]:
    def work(given: Any, lengths: Lengths) -> Work:
        cuts = lhotse_cuts(lengths.values)

        def call() -> list[Any]:
            edges = [*given.estimate_duration_buckets(cuts[:10_000], num_buckets), float(lengths.values.max())]
            constraint = given.FixedBucketBatchSizeConstraint(
                edges, [int(lengths.max_tokens // edge) for edge in edges]
            )
            sampler = given.DynamicBucketingSampler
            return list(sampler(cuts, constraint=constraint, duration_bins=edges[:-1], shuffle=True, seed=0))

        return call, lambda batches: from_lhotse(lengths.values, batches)

    return work


def lhotse_cuts(lengths: np.ndarray) -> list[Any]:
    """A cut a sample, a second a token."""
    from lhotse import MonoCut

    return [MonoCut(str(i), start=0.0, duration=float(n), channel=0) for i, n in enumerate(lengths.tolist())]


def from_lhotse(lengths: np.ndarray, batches: Iterable[Iterable[Any]]) -> Batches:
    return from_lists(lengths, ([int(cut.id) for cut in batch] for batch in batches))


def batch_by_transformers(given: Any, lengths: Lengths) -> Work:
    import torch

    values = lengths.values.tolist()
    batch_size = lengths.max_tokens // max(values)

    def call() -> list[list[int]]:
        sampler = given(batch_size, lengths=values, generator=torch.Generator().manual_seed(0))
        return list(torch.utils.data.BatchSampler(sampler, batch_size, drop_last=False))

    return call, lambda batches: from_lists(lengths.values, batches)


def from_lists(lengths: np.ndarray, batches: Iterable[Sequence[int]]) -> Batches:
    arrays = [np.array(batch, np.int64) for batch in batches]
    return with_longest(lengths, np.concatenate(arrays), np.cumsum([0, *map(len, arrays)]))


def with_longest(lengths: np.ndarray, sample_ids: np.ndarray, offsets: np.ndarray) -> Batches:
    """Batches that are padded to their own longest sample."""
    longest = np.maximum.reduceat(lengths[sample_ids], offsets[:-1])
    return Batches(sample_ids, offsets, np.diff(offsets), longest)


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

    rows = measure(peers, lengths, figures)
    return [
        f"### {lengths.name}: {len(lengths.values):,} samples, budget {lengths.max_tokens:,}",
        "",
        *table("work|seconds|ratio|padding|shapes|batches|largest / budget|samples lost|repeated", rows),
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
        "Padding: the share of positions, padding rows included, that hold no token. Shapes: distinct (rows, length), "
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
        versions_and_hardware("lhotse", "transformers", "deepspeed", "torch"),
    ]
    report("peers", lines, write=not options.quick)


if __name__ == "__main__":
    main()
