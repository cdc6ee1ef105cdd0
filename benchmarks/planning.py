"""How long does planning take, against one `np.sort` of as many packed 64-bit keys in the same run?

Run `python benchmarks/planning.py [--num-samples 10000000] [--quick]`. Prints a table and writes it, with versions and
hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable

import numpy as np
from timing import REPEATS, best_seconds, report, table, versions_and_hardware

import jvarlen

MAX_TOKENS = 500_000


def measure(num_samples: int) -> list[tuple[str, float]]:
    lengths = np.random.default_rng(0).integers(128, 4096, num_samples)
    ascending = np.sort(lengths)
    keys = lengths << 32 | np.arange(num_samples)
    buckets = jvarlen.make_buckets(lengths, MAX_TOKENS, max_shapes=16)
    jvarlen.batch_by_tokens(lengths[:1000], MAX_TOKENS)  # compiles the kernels
    jvarlen.make_plan(lengths[:1000], buckets, order="shuffle")
    plan = jvarlen.make_plan
    calls: dict[str, Callable[[], object]] = {
        "np.sort of packed keys": lambda: np.sort(keys),
        "make_buckets, optimal, 16 shapes": lambda: jvarlen.make_buckets(lengths, MAX_TOKENS, max_shapes=16),
        "make_buckets, optimal, 32 shapes": lambda: jvarlen.make_buckets(lengths, MAX_TOKENS, max_shapes=32),
        'make_plan, order="length"': lambda: plan(lengths, buckets),
        'make_plan, order="length", with digest': lambda: plan(lengths, buckets).digest,
        'make_plan, order="shuffle"': lambda: plan(lengths, buckets, order="shuffle"),
        'make_plan, order="dataset"': lambda: plan(lengths, buckets, order="dataset"),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-samples", type=int, default=10_000_000)
    parser.add_argument("--quick", action="store_true", help="100,000 samples, and no report")
    options = parser.parse_args()
    num_samples = 100_000 if options.quick else options.num_samples
    rows = measure(num_samples)
    sort_s = rows[0][1]
    lines = [
        f"# Planning, {datetime.date.today()}",
        "",
        f"{num_samples:,} lengths, uniform from 128 to 4,095. Best of {REPEATS} in one run; ratios to the first.",
        "",
        *table("work|seconds|ratio", ((name, f"{value:.3f}", f"{value / sort_s:.2f}") for name, value in rows)),
        "",
        versions_and_hardware(),
    ]
    report("planning", lines, write=not options.quick)


if __name__ == "__main__":
    main()
