"""How do seconds and memory of planning grow with the samples, and what follows for 10¹¹ of them on 1,000 hosts?

One device of one process plans 10⁶ to 3·10⁷ lengths, each size in a process of its own. The exponent of growth is
fitted, and what a host would take for its 10⁸ of 10¹¹ samples is extrapolated. Run `python benchmarks/scale.py
[--quick]`. Prints tables and writes them, with versions and hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from support.timing import digits, report, table, versions_and_hardware

import jvarlen
from jvarlen.distributed.layout import Layout
from jvarlen.experimental import large_plans
from jvarlen.experimental.large_plans.chunk_digests import digest_volume
from jvarlen.experimental.ordered_file import exchange_volume

SIZES = (1_000_000, 3_000_000, 10_000_000, 30_000_000)
QUICK_SIZES = (1_000, 3_000)
TOTAL, HOSTS = 10**11, 1_000
WORKS = ("count_lengths", "make_plan", "digest of the plan", "plan_distributed")


@functools.cache
def make_buckets() -> tuple[jvarlen.Bucket, ...]:
    """Those of all plans."""
    return jvarlen.make_buckets(np.arange(128, 4096), 500_000, max_shapes=16, microbatches_per_step=8)


def measure(work: str, num_samples: int) -> tuple[float, float]:
    """Seconds of the faster of two calls, and bytes a sample at the peak, beyond the int64 lengths."""
    lengths = np.random.default_rng(0).integers(128, 4096, num_samples)
    buckets = make_buckets()
    mesh = Layout(data=1).on().mesh

    def make(part: np.ndarray) -> jvarlen.Plan:
        return jvarlen.make_plan(part, buckets, microbatches_per_step=8, order="shuffle")

    def distributed(part: np.ndarray) -> object:
        return large_plans.plan_distributed(part, buckets, mesh, microbatches_per_step=8, order="shuffle")

    calls: dict[str, Callable[[np.ndarray], object]] = {
        "count_lengths": large_plans.count_lengths,
        "make_plan": make,
        "plan_distributed": distributed,
    }
    if work == "digest of the plan":
        plans = [make(lengths), make(lengths)]
        call: Callable[[np.ndarray], object] = lambda part: plans.pop().digest  # noqa: E731  # a plan keeps its digest
    else:
        call = calls[work]
        call(lengths[:1000])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(2):
        begun = time.perf_counter()
        call(lengths)
        seconds.append(time.perf_counter() - begun)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return min(seconds), 1024 * (peak - before) / num_samples


def measure_apart(work: str, num_samples: int) -> tuple[float, float]:
    command = [sys.executable, __file__, "--one", work, str(num_samples)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return tuple(json.loads(run.stdout.splitlines()[-1]))


def growth(
    sizes: tuple[int, ...], of: Callable[[str, int], tuple[float, float]]
) -> tuple[list[str], dict[str, tuple[float, float]]]:
    """The table, and seconds and bytes of a host's part by work."""
    own = TOTAL // HOSTS
    rows, of_part = [], {}
    for work in WORKS:
        measured = [of(work, num) for num in sizes]
        seconds = np.array([each for each, _ in measured])
        exponent = np.polyfit(np.log(sizes), np.log(seconds), 1)[0]
        bytes_a_sample = measured[-1][1]
        of_part[work] = float(seconds[-1] * (own / sizes[-1]) ** max(exponent, 1)), bytes_a_sample * own
        cells = [digits(each) for each in seconds]
        ns = f"{1e9 * seconds[-1] / sizes[-1]:.0f}"
        rows.append([f"`{work}`", *cells, f"{exponent:.2f}", ns, f"{bytes_a_sample:.0f}"])
    header = "|".join(["work", *(f"{num:,}" for num in sizes), "exponent", "ns a sample", "bytes a sample"])
    return table(header, rows), of_part


def on_paper(of_part: dict[str, tuple[float, float]]) -> list[str]:
    """What a host does for its part of 10¹¹ samples."""
    own = TOTAL // HOSTS
    begun = time.perf_counter()
    distinct = np.arange(128, 4096)
    counts = np.full(len(distinct), TOTAL // len(distinct))
    buckets = jvarlen.make_buckets(distinct, 500_000, counts=counts, max_shapes=16, microbatches_per_step=8 * HOSTS)
    buckets_s = time.perf_counter() - begun
    sent = exchange_volume(TOTAL, HOSTS, dtype=np.uint64).num_bytes
    samples_a_step = 8 * HOSTS * np.mean([bucket.rows for bucket in buckets])
    num_steps = TOTAL / samples_a_step

    def gigabytes(num_bytes: float) -> str:
        return digits(num_bytes / 1e9)

    counted, made = of_part["count_lengths"], of_part["plan_distributed"]
    rows = [
        ["own lengths, int64", "computed", "", gigabytes(8 * own), ""],
        ["`count_lengths`", "extrapolated", digits(counted[0]), gigabytes(counted[1]), ""],
        ["`make_buckets` from the counts of all samples", "measured", digits(buckets_s), "", ""],
        ["`plan_distributed`: sort, places, hash", "extrapolated", digits(made[0]), gigabytes(made[1]), ""],
        ["the exchange of the sort", "computed", "", "", gigabytes(sent)],
        ["the exchange for the digest", "computed", "", "", gigabytes(digest_volume(TOTAL, HOSTS)[1])],
        [f"the steps of all, about {digits(num_steps)}", "computed", "", gigabytes(20 * num_steps), ""],
    ]
    return [
        f"## {TOTAL:,} samples on {HOSTS:,} hosts",
        "",
        f"Of one host, with {own:,} samples and one device. Extrapolated: the seconds of the largest size by the "
        "fitted exponent, at least 1, and its bytes a sample. Computed: from the formulas of what is held and sent. "
        "The sort sends keys and ids, here without the lengths that go along.",
        "",
        *table("part|how|seconds|GB held|GB sent or received", rows),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="1,000 and 3,000 samples, and no report")
    parser.add_argument("--one", nargs=2, metavar=("WORK", "SAMPLES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], int(options.one[1]))))
        return
    lines, of_part = growth(QUICK_SIZES, measure) if options.quick else growth(SIZES, measure_apart)
    lines = [
        f"# Growth of planning, {datetime.date.today()}",
        "",
        "Lengths uniform from 128 to 4,095, 16 shapes, 8 microbatches a step, random order. Seconds of the faster of "
        "two calls on one device of one process. Exponent: of seconds over samples, least squares of logarithms. "
        "Bytes: at the peak, beyond the int64 lengths, of the largest size.",
        "",
        *lines,
        "",
        *on_paper(of_part),
        "",
        versions_and_hardware("jax", "jaxlib"),
    ]
    report("scale", lines, write=not options.quick)


if __name__ == "__main__":
    main()
