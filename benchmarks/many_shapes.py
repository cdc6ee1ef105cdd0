"""What do steps of many shapes leave as padding, in how many groups, and how long do planning and training take?

Lengths are log-normal, median 300, σ 1, at most 4,096; microbatches hold at most 8,192 tokens, of at most 16 shapes of
multiples of 64. Run `python benchmarks/many_shapes.py [--quick]`. Prints tables and writes them, with versions and
hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from support.timing import best_seconds, report, table, versions_and_hardware

import jvarlen
from jvarlen.batches import BatchShapes, StepBatch
from jvarlen.models import DecoderConfig, init_params, make_loss_fn

BUDGET: dict[str, Any] = {"max_tokens": 8192, "max_shapes": 16, "length_multiple": 64}
PACKED: dict[str, Any] = {"max_tokens": 8192, "packing": "best_fit", "row_lengths": [4096]}
UNCACHED = jvarlen.CompileOptions(cache_dir=None, num_threads=1)


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
    of_step = lengths[:1024]
    for name, buckets, packing in (("padded", plan.buckets, "padded"), ("packed", [(1, 4096), (2, 4096)], "best_fit")):
        for _ in range(100):  # kernels are compiled once there were samples enough
            jvarlen.plan_step(of_step, buckets, packing=packing)
        seconds, _ = best_seconds(lambda b=buckets, p=packing: jvarlen.plan_step(of_step, b, packing=p))  # type: ignore[misc]
        rows.append([f"`plan_step` of {len(of_step):,} samples in given shapes, {name}", f"{1e3 * seconds:.2f} ms"])
    return ["## Planning", "", *table("work|time", rows)]


def median_ratios(cases: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, tuple[float, float]]:
    """The median CPU seconds of each case, and of their ratios to those of the first; cases take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(repeats + 1):
        for name, run in cases.items():
            start = time.process_time()
            jax.block_until_ready(run())
            if turn:  # the first does not count
                seconds[name].append(time.process_time() - start)
    first = next(iter(seconds.values()))
    return {
        name: (statistics.median(each), statistics.median(s / base for s, base in zip(each, first, strict=True)))
        for name, each in seconds.items()
    }


def training(config: DecoderConfig, repeats: int, num_microbatches: int) -> list[str]:
    """CPU seconds of eight groups of a decoder, as steps of one group and of four."""
    optimizer, rng = optax.adamw(1e-3), np.random.default_rng(0)
    lengths = rng.integers(20, 129, 64 * num_microbatches)
    plan = jvarlen.make_plan(lengths, [(8, 128)], num_microbatches=num_microbatches)
    groups = list(jvarlen.load(plan, [rng.integers(0, 256, n).astype(np.int32) for n in lengths]))
    fours = [
        StepBatch(tuple(four), np.float32(sum(each.num_sequences for each in four)))
        for four in (groups[first : first + 4] for first in range(0, len(groups), 4))
    ]
    train_step = jvarlen.make_train_step(make_loss_fn(config), optimizer)

    def trainer(batches: list[Any], has_many_groups: bool) -> Callable[[], object]:
        state = train_step.init(init_params(config, seed=0), seed=0)
        shapes = BatchShapes(plan.buckets.shapes, num_microbatches=num_microbatches, has_many_groups=has_many_groups)
        compiled = jvarlen.compile_buckets(train_step, state, shapes, progress=False, options=UNCACHED)

        def run() -> object:
            nonlocal state
            for batch in batches:
                state, _ = compiled(state, batch)
            return state

        return run

    found = median_ratios(
        {
            "one group a step, in one program": trainer(groups, False),
            "one group a step, by halves": trainer(groups, True),
            "four groups a step, by halves": trainer(fours, True),
        },
        repeats,
    )
    rows = [[name, f"{seconds:.2f} s", f"{ratio:.3f}"] for name, (seconds, ratio) in found.items()]
    return [
        f"## Training, M = {num_microbatches}",
        "",
        f"CPU seconds of {len(groups)} groups of the demo model, medians of {repeats} turns.",
        "",
        *table("steps|CPU time|over one program a step", rows),
    ]


def compiling(config: DecoderConfig, repeats: int, num_shapes: int) -> list[str]:
    """CPU seconds of compiling the shapes of a decoder."""
    optimizer = optax.adamw(1e-3)
    train_step = jvarlen.make_train_step(make_loss_fn(config), optimizer)
    state = train_step.init(init_params(config, seed=0), seed=0)
    buckets = [(1024 // length, length) for length in range(32, 32 * num_shapes + 1, 32)]

    def compile_step(has_many_groups: bool) -> None:
        shapes = BatchShapes(buckets, num_microbatches=4, has_many_groups=has_many_groups)
        jvarlen.compile_buckets(train_step, state, shapes, progress=False, options=UNCACHED)

    found = median_ratios(
        {
            f"{num_shapes} steps": lambda: compile_step(False),
            f"{num_shapes} accumulations and an update": lambda: compile_step(True),
        },
        repeats,
    )
    rows = [[name, f"{seconds:.2f} s", f"{ratio:.3f}"] for name, (seconds, ratio) in found.items()]
    return ["## Compiling", "", "The demo model, M = 4.", "", *table("programs|CPU time|over the steps", rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few samples, and no report")
    quick = parser.parse_args().quick
    config = DecoderConfig(num_layers=1, width=16, num_heads=1) if quick else DecoderConfig()  # the demo
    lines = [
        f"# Steps of many shapes, {datetime.date.today()}",
        "",
        *padding(20_000 if quick else 200_000),
        "",
        *planning(20_000 if quick else 1_000_000),
        "",
        *training(config, 1 if quick else 7, 4),
        "",
        *training(config, 1 if quick else 7, 1),
        "",
        *compiling(config, 1 if quick else 5, 2 if quick else 8),
        "",
        versions_and_hardware(),
    ]
    report("many-shapes", lines, write=not quick)


if __name__ == "__main__":
    main()
