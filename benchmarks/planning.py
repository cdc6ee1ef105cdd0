"""What does planning take: seconds against one `np.sort` of as many packed 64-bit keys, bytes a sample, and padding?

Run `python benchmarks/planning.py [--num-samples 10000000] [--quick]`. Prints tables and writes them, with versions and
hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import tracemalloc
from collections.abc import Callable

import numpy as np
from support.timing import REPEATS, best_seconds, report, table, versions_and_hardware

import jvarlen

MAX_TOKENS = 500_000


def measure(num_samples: int) -> list[tuple[str, float]]:
    lengths = np.random.default_rng(0).integers(128, 4096, num_samples)
    ascending = np.sort(lengths)
    keys = lengths << 32 | np.arange(num_samples)
    buckets = jvarlen.make_buckets(lengths, MAX_TOKENS, max_shapes=16)
    jvarlen.batch_by_tokens(lengths[:1000], MAX_TOKENS)  # compiles the kernels
    jvarlen.make_plan(lengths[:1000], buckets, order="shuffle")
    plan, blocks = jvarlen.make_plan, jvarlen.Order("shuffle", block_size=4096)
    calls: dict[str, Callable[[], object]] = {
        "np.sort of packed keys": lambda: np.sort(keys),
        "make_buckets, optimal, 16 shapes": lambda: jvarlen.make_buckets(lengths, MAX_TOKENS, max_shapes=16),
        "make_buckets, optimal, 32 shapes": lambda: jvarlen.make_buckets(lengths, MAX_TOKENS, max_shapes=32),
        'make_plan, order="length"': lambda: plan(lengths, buckets, order="length"),
        'make_plan, order="length", with digest': lambda: plan(lengths, buckets, order="length").digest,
        'make_plan, order="shuffle"': lambda: plan(lengths, buckets, order="shuffle"),
        'make_plan, order="dataset"': lambda: plan(lengths, buckets, order="dataset"),
        'make_plan, order="shuffle", blocks of 4,096': lambda: plan(lengths, buckets, order=blocks),
        "make_plan, competence pacing": lambda: plan(
            lengths, buckets, order="length", pacing=jvarlen.planning.competence_pacing(1_000)
        ),
        "pack_samples into rows of 4,096": lambda: jvarlen.pack_samples(lengths, 4096),
        "pack_samples, wrapped, shuffled": lambda: jvarlen.pack_samples(
            lengths, 4096, method="wrapped", order="shuffle"
        ),
    }
    for name, values in (("sorted", ascending), ("unsorted", lengths)):
        for max_tokens in (500_000, 32_768):
            for multiple in (1, 8):
                calls[f"batch_by_tokens, {name}, {max_tokens:,} tokens, multiple {multiple}"] = (
                    lambda values=values, max_tokens=max_tokens, multiple=multiple: jvarlen.batch_by_tokens(
                        values, max_tokens, sequence_multiple=multiple
                    )
                )
    return [(name, best_seconds(call)[0]) for name, call in calls.items()]


def measure_fixed(num_samples: int, longest: int) -> list[tuple[str, float]]:
    """Seconds of what does not grow with the samples, or has a size of its own."""
    rng = np.random.default_rng(0)
    lengths = np.concatenate([np.arange(96, longest), rng.integers(96, longest, num_samples)])
    source = np.clip(rng.lognormal(3, 0.6, num_samples), 1, 250).astype(int)
    pairs = np.stack([source, np.clip(source * rng.lognormal(0, 0.25, num_samples), 1, 250).astype(int)], axis=1)
    cost = jvarlen.CostModel(0.0, 15e-6, 0.22e-6)
    uniform = uniform_lengths(num_samples)
    make_buckets = functools.partial(jvarlen.make_buckets, lengths, MAX_TOKENS, max_shapes=32)
    calls: dict[str, Callable[[], object]] = {
        f"make_buckets, {longest - 96:,} distinct lengths, 32 shapes": lambda: jvarlen.make_buckets(
            lengths, MAX_TOKENS, max_shapes=32
        ),
        "the same with a cost in seconds": lambda: make_buckets(cost=cost),
        f"choose_row_lengths, {longest - 96:,} distinct lengths, 4 rows": lambda: jvarlen.planning.choose_row_lengths(
            lengths, MAX_TOKENS, max_shapes=4
        ),
        f"make_buckets, {num_samples:,} pairs, 16 shapes": lambda: jvarlen.make_buckets(pairs, 16_384),
        f"choose_row_lengths, {num_samples:,} pairs": lambda: jvarlen.planning.choose_row_lengths(pairs, 16_384),
        f"pack_samples, {num_samples:,} samples into rows of 4,096": lambda: jvarlen.pack_samples(uniform, 4096).starts,
    }
    return [(name, best_seconds(call)[0]) for name, call in calls.items()]


def uniform_lengths(num_samples: int) -> np.ndarray:
    return np.random.RandomState(2023).randint(128, 4096, num_samples)


def measure_padding(num_samples: int) -> list[tuple[str, float]]:
    """Padding of `num_samples` lengths in microbatches of 500,000 tokens, 8 a step."""
    lengths = uniform_lengths(num_samples)
    padding = {}
    for max_shapes in (4, 16, 32):
        buckets = jvarlen.make_buckets(
            lengths, MAX_TOKENS, max_shapes=max_shapes, num_microbatches=8, length_multiple=16
        )
        padding[f"{max_shapes} shapes"] = jvarlen.make_plan(
            lengths, buckets, order="length", num_microbatches=8
        ).padding
    for row_lengths in ((4096,), (512, 1024, 2048, 4096)):
        packed = {"packing": "best_fit", "row_lengths": row_lengths, "order": "length"}
        plan = jvarlen.make_plan(lengths, max_tokens=MAX_TOKENS, num_microbatches=8, **packed)
        name = f"packed rows of {', '.join(f'{length:,}' for length in row_lengths)}"
        padding[name] = plan.padding
    return list(padding.items())


def measure_peaks(num_samples: int) -> list[tuple[str, float]]:
    """Bytes a sample at the peak, beyond the lengths."""
    lengths = np.random.default_rng(0).integers(128, 4096, num_samples)
    buckets = jvarlen.make_buckets(lengths, MAX_TOKENS)
    peaks = {}
    for order in ("length", "shuffle"):
        tracemalloc.start()
        jvarlen.make_plan(lengths, buckets, order=order)
        peaks[f'make_plan, order="{order}"'] = tracemalloc.get_traced_memory()[1] / num_samples
        tracemalloc.stop()
    return list(peaks.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-samples", type=int, default=10_000_000)
    parser.add_argument("--quick", action="store_true", help="10,000 samples, and no report")
    options = parser.parse_args()
    num_samples = 10_000 if options.quick else options.num_samples
    num_fixed, longest = (10_000, 144) if options.quick else (200_000, 4096)
    num_for_peaks = 10_000 if options.quick else 100_000_000
    rows = measure(num_samples)
    sort_s = rows[0][1]
    lines = [
        f"# Planning, {datetime.date.today()}",
        "",
        f"{num_samples:,} lengths, uniform from 128 to 4,095. Best of {REPEATS} in one run; ratios to the first.",
        "",
        *table("work|seconds|ratio", ((name, f"{value:.3f}", f"{value / sort_s:.2f}") for name, value in rows)),
        "",
        *table("work|seconds", ((name, f"{value:.3f}") for name, value in measure_fixed(num_fixed, longest))),
        "",
        f"Padding of `np.random.seed(2023); np.random.randint(128, 4096, {num_fixed})`: 500,000 tokens a microbatch, "
        "8 a step.",
        "",
        *table("shapes|padding", ((name, f"{value:.2%}") for name, value in measure_padding(num_fixed))),
        "",
        f"Memory at the peak beyond the int64 lengths, {num_for_peaks:,} samples.",
        "",
        *table("work|bytes a sample", ((name, f"{value:.2f}") for name, value in measure_peaks(num_for_peaks))),
        "",
        versions_and_hardware(),
    ]
    report("planning", lines, write=not options.quick)


if __name__ == "__main__":
    main()
