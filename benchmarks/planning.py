"""How long does planning take, against one `np.sort` of as many packed 64-bit keys in the same run?

Run `python benchmarks/planning.py [--num-samples 10000000] [--quick]`. Prints a table and writes it, with versions and
hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import jvarlen

RESULTS = Path(__file__).parent / "results"
MAX_TOKENS = 500_000
REPEATS = 5


def best_seconds(call: Callable[[], object]) -> float:
    """The fastest of some calls: what the work takes on a machine that does other things as well."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


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
    return [(name, best_seconds(call)) for name, call in calls.items()]


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
        "| work | seconds | ratio |",
        "|---|---|---|",
        *(f"| {name} | {seconds:.3f} | {seconds / sort_s:.2f} |" for name, seconds in rows),
        "",
        f"{os.cpu_count()} cores, {platform.machine()}; Python {platform.python_version()}, NumPy {np.__version__}, "
        f"jvarlen {jvarlen.__version__}, numba {'yes' if importlib.util.find_spec('numba') else 'no'}.",
    ]
    print("\n".join(lines))
    if not options.quick:
        (RESULTS / f"{datetime.date.today()}-planning.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
