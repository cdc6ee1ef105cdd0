"""How long does it take to simulate a plan on a cluster of 10,000 devices, and in how much memory?

Each layout is simulated in a process of its own, with jitter, stragglers and failures, on a plan that repeats. Run
`python benchmarks/simulate.py [--quick]`. Prints a table and writes it, with versions and hardware, to
`benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import subprocess
import sys
import time

import numpy as np
from support.timing import digits, report, table, versions_and_hardware

import jvarlen
from jvarlen.estimates.cluster import Cluster
from jvarlen.estimates.step_seconds import StepSeconds
from jvarlen.experimental.simulation import Failures, Noise, simulate
from jvarlen.parallel import Layout

# Layouts, microbatches of a step, and steps.
FULL = (
    ("data1250.tensor8", 5_000, 10_000),
    ("data1250.tensor8", 20_000, 10_000),
    ("data156.stage8.tensor8", 4_992, 10_000),
    ("data10000", 10_000, 10_000),
    ("data10000", 20_000, 10_000),
    ("data1250.tensor8", 5_000, 100_000),
)
QUICK = (("data2.tensor2", 4, 50), ("data4", 4, 50), ("data4", 8, 50))


def measure(layout: str, num_microbatches: int, num_steps: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    lengths = rng.geometric(1 / 500, 100_000).clip(16, 4096)
    buckets = jvarlen.make_buckets(lengths, 8192, max_shapes=6, num_microbatches=num_microbatches)
    plan = jvarlen.make_plan(lengths, buckets, num_microbatches=num_microbatches, order="shuffle")
    num_shapes = len(buckets.shapes)
    seconds = StepSeconds(np.linspace(1, 2, num_shapes), *np.full((6, num_shapes), 0.05))
    begun = time.perf_counter()
    run = simulate(
        plan,
        Layout.parse(layout),
        Cluster.named("dgx-h100:1300"),
        seconds=seconds,
        num_steps=num_steps,
        noise=Noise(jitter=0.05, straggler_share=0.001, straggler_slowdown=1.1),
        failures=Failures(mean_seconds_between=1e7, restart_s=300),
        checkpoint_every_steps=100,
        checkpoint_s=5,
    )
    return {
        "seconds": time.perf_counter() - begun,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "failures": run.num_failures,
        "waiting": run.share("jitter") + run.share("stragglers"),
    }


def measure_apart(layout: str, num_microbatches: int, num_steps: int) -> dict[str, float]:
    given = json.dumps([layout, num_microbatches, num_steps])
    one_core = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--one", given]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | one_core)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few devices and steps, and no report")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*json.loads(options.one))))
        return
    rows = []
    for layout, num_microbatches, num_steps in QUICK if options.quick else FULL:
        # A process of its own shows in the quick form that it works, and is not needed again.
        ask = measure if options.quick and rows else measure_apart
        found = ask(layout, num_microbatches, num_steps)
        devices = Layout.parse(layout).num_devices
        rows.append(
            [
                f"`{layout}`",
                f"{devices:,}",
                f"{num_microbatches:,}",
                f"{num_steps:,}",
                digits(found["seconds"]),
                digits(found["peak_bytes"] / 1e9),
                f"{found['waiting']:.1%}",
                f"{found['failures']:,}",
            ]
        )
    header = "layout|devices|microbatches|steps|seconds|GB at the peak|waiting|failures"
    lines = [
        f"# Simulated runs, {datetime.date.today()}",
        "",
        "One call of `simulate` on one core. GB: of the whole process, which also makes the plan. Waiting: for jitter "
        "(5 %) and stragglers (one device of 1,000 takes 1.1 times as long), a share of all seconds.",
        "",
        *table(header, rows),
        "",
        versions_and_hardware("scipy"),
    ]
    report("simulate", lines, write=not options.quick)


if __name__ == "__main__":
    main()
