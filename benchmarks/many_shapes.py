"""What do steps of many shapes leave as padding, in how many groups, and how long does planning them take?

Lengths are log-normal, median 300, σ 1, at most 4,096; microbatches hold at most 8,192 tokens, of at most 16 shapes of
multiples of 64. Run `python benchmarks/many_shapes.py [--quick]`. Prints tables and writes them, with versions and
hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
from typing import Any

import numpy as np
from support.timing import best_seconds, report, table, versions_and_hardware

import jvarlen

BUDGET: dict[str, Any] = {"max_tokens": 8192, "max_shapes": 16, "length_multiple": 64}
PACKED: dict[str, Any] = {"max_tokens": 8192, "packing": "best_fit", "row_lengths": [4096]}


def log_normal_lengths(num_samples: int) -> np.ndarray:
    drawn = np.random.default_rng(0).lognormal(np.log(300), 1, num_samples)
    return np.clip(np.round(drawn), 1, 4096).astype(np.int64)


def padding(num_samples: int) -> list[str]:
    """The padding of plans of an epoch, samples in the order of the dataset."""
    lengths = log_normal_lengths(num_samples)
    rows = []
    for name, options in (("padded", BUDGET), ("packed, rows of 4,096", PACKED)):
        for per_step, num_microbatches in ((256, 1), (256, 8), (1024, 1), (1024, 8)):
            plan = jvarlen.make_plan(
                lengths, num_microbatches=num_microbatches, sequences_per_step=per_step, order="dataset", **options
            )
            groups = plan.num_groups / plan.num_steps
            figures = f"{per_step:,}", f"{num_microbatches}", f"{len(plan.buckets.shapes)}", f"{groups:.1f}"
            rows.append([name, *figures, f"{plan.padding:.1%}"])
    return [
        "## Padding",
        "",
        f"{num_samples:,} samples.",
        "",
        *table("samples|a step|M|shapes|groups a step|padding", rows),
    ]


def planning(num_samples: int) -> list[str]:
    """Seconds of planning an epoch."""
    lengths = log_normal_lengths(num_samples)
    seconds, plan = best_seconds(lambda: jvarlen.make_plan(lengths, sequences_per_step=256, **BUDGET))
    again, _ = best_seconds(lambda: jvarlen.make_plan(lengths, plan.buckets, sequences_per_step=256))
    rows = [
        [f"`make_plan`, {num_samples:,} samples in steps of 256", f"{seconds:.2f} s"],
        ["the same in given shapes", f"{again:.2f} s"],
    ]
    return ["## Planning", "", *table("work|time", rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few samples, and no report")
    quick = parser.parse_args().quick
    lines = [
        f"# Steps of many shapes, {datetime.date.today()}",
        "",
        *padding(20_000 if quick else 200_000),
        "",
        *planning(20_000 if quick else 1_000_000),
        "",
        versions_and_hardware(),
    ]
    report("many-shapes", lines, write=not quick)


if __name__ == "__main__":
    main()
