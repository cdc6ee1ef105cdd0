"""How long do steps wait if shapes are compiled in the background, and what does the whole run take?

The built-in corpus up to 1,024 bytes and the built-in model. First with steps that sleep instead of computing, as on an
accelerator, where computing takes no core from the compiler; then with the real steps on this machine. No caches. Run
`python benchmarks/background.py [--quick]`. Prints two tables and writes them, with versions and hardware, to
`benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from support.timing import COMPILE_FAST, REPEATS, digits, report, table, versions_and_hardware

import jvarlen
from jvarlen.compiling.compile_options import When
from jvarlen.data.stdlib_corpus import stdlib_functions
from jvarlen.models import DecoderConfig, init_params, make_loss_fn

SPACING = 1.1  # sleep × onset spacing, over the mean seconds of compiling a shape
STEPS_A_SHAPE = 8
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


class Setting(NamedTuple):
    """What is trained."""

    dataset: Any
    lengths: np.ndarray
    model: DecoderConfig
    max_tokens: int
    num_shapes: int
    num_steps: int


class Timed(NamedTuple):
    """Seconds until the first step was dispatched and until it ended, of waiting afterwards, and of all; the report."""

    dispatched_s: float
    first_s: float
    stall_s: float
    total_s: float
    report: jvarlen.compiling.CompileReport

    @property
    def first_compile_s(self) -> float:
        """Seconds of lowering and compiling the shape of the first step."""
        return self.report[0].lower_s + self.report[0].compile_s


def plan_of(setting: Setting, new_shape_every: int) -> jvarlen.Plan:
    buckets = jvarlen.make_buckets(
        setting.lengths, setting.max_tokens, max_shapes=setting.num_shapes, length_multiple=8
    )
    return jvarlen.make_plan(setting.lengths, buckets, order=jvarlen.Order(new_shape_every=new_shape_every))


def train_step_of(setting: Setting) -> jvarlen.parallel.TrainStep:
    return jvarlen.make_train_step(make_loss_fn(setting.model), OPTIMIZER)


def init_state(setting: Setting) -> Any:
    return jax.block_until_ready(train_step_of(setting).init(init_params(setting.model, seed=0)))


def compile_for(setting: Setting, state: Any, plan: jvarlen.Plan, when: When) -> jvarlen.compiling.CompiledBuckets:
    options = jvarlen.CompileOptions(cache_dir=None, when=when)
    step = train_step_of(setting)
    return jvarlen.compile_buckets(step, state, plan, progress=False, options=options)


def sleep_through(setting: Setting, plan: jvarlen.Plan, sleep_s: float) -> Timed:
    """Steps that take no core: each is dispatched when its program is there, and the host waits a step late."""
    state = init_state(setting)
    start = time.perf_counter()
    step = compile_for(setting, state, plan, "background")
    ends = [0.0]
    stall_s, dispatched_s = 0.0, 0.0
    for t, bucket in enumerate(plan.step_bucket[: setting.num_steps]):
        asked = time.perf_counter()
        step.wait(plan.buckets.shapes[bucket])
        now = time.perf_counter()
        if t == 0:
            dispatched_s = now - start
        else:
            stall_s += max(0.0, now - max(asked, ends[-1]))  # until then a step ran
        ends.append(max(now, ends[-1]) + sleep_s)
        step.advance()
        time.sleep(max(0.0, ends[-2] - time.perf_counter()))
    time.sleep(max(0.0, ends[-1] - time.perf_counter()))
    total_s = time.perf_counter() - start
    return Timed(dispatched_s, dispatched_s + sleep_s, stall_s, total_s, step.report)


def train(setting: Setting, plan: jvarlen.Plan, when: When) -> Timed:
    state = init_state(setting)
    start = time.perf_counter()
    step = compile_for(setting, state, plan, when)
    first_s = dispatched_s = 0.0
    for t, batch in zip(range(setting.num_steps), jvarlen.load(plan, setting.dataset), strict=False):
        state, metrics = step(state, batch)
        if t == 0:
            dispatched_s = time.perf_counter() - start
            jax.block_until_ready(metrics)
            first_s = time.perf_counter() - start
    jax.block_until_ready(state)
    total_s = time.perf_counter() - start
    rows = step.report
    return Timed(dispatched_s, first_s, rows.stall_s - rows[0].stall_s, total_s, rows)


def median(runs: list[Timed], value: Callable[[Timed], float]) -> float:
    return statistics.median(map(value, runs))


def sleeping_rows(setting: Setting, spacings: Sequence[int]) -> list[list[str]]:
    plan = plan_of(setting, 1)
    step = compile_for(setting, init_state(setting), plan, "background")
    compile_s = statistics.mean(row.lower_s + row.compile_s for row in step.report)
    rows = []
    for steps_a_shape in spacings:
        sleep_s = SPACING * compile_s / steps_a_shape
        timed = sleep_through(setting, plan_of(setting, steps_a_shape), sleep_s)
        steps_s = setting.num_steps * sleep_s
        rows.append(
            [
                f"{len(timed.report)}",
                f"{sleep_s * 1e3:.0f}",
                f"{steps_a_shape}",
                digits(timed.first_compile_s),
                digits(timed.dispatched_s),
                f"{timed.stall_s / timed.total_s:.1%}",
                digits(timed.total_s),
                f"{timed.total_s / (timed.first_compile_s + steps_s):.3f}",
            ]
        )
    return rows


def training_rows(setting: Setting, ways: Sequence[str]) -> list[list[str]]:
    """A row for each of `ways`, which begin with "ahead"."""
    plans = {way: plan_of(setting, STEPS_A_SHAPE if way == "spaced" else 0) for way in ways}
    runs: dict[str, list[Timed]] = {name: [] for name in plans}
    for _ in range(min(3, REPEATS)):  # in turns
        for name, plan in plans.items():
            runs[name].append(train(setting, plan, "ahead" if name == "ahead" else "background"))
    names = {
        "ahead": "before the first step",
        "background": "in the background",
        "spaced": f"in the background, a new shape every {STEPS_A_SHAPE} steps",
    }
    ahead_s = median(runs["ahead"], lambda run: run.total_s)
    return [
        [
            names[name],
            digits(median(of_name, lambda run: run.first_s)),
            f"{median(of_name, lambda run: run.dispatched_s / run.first_compile_s):.2f}",
            digits(median(of_name, lambda run: run.stall_s)),
            digits(median(of_name, lambda run: run.total_s)),
            f"{median(of_name, lambda run: run.total_s) / ahead_s:.2f}",
        ]
        for name, of_name in runs.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few shapes, and no report")
    quick = parser.parse_args().quick
    if quick:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {COMPILE_FAST}"
    dataset = stdlib_functions(progress=False)
    lengths = np.minimum(jvarlen.measure_lengths(dataset, progress=False), 64 if quick else 1024)
    dataset = [dataset[i][:longest] for i, longest in enumerate(lengths.tolist())]
    if quick:
        dataset, lengths = dataset[:300], lengths[:300]
    tiny = DecoderConfig(num_layers=1, width=16, num_heads=1)
    setting = Setting(
        dataset,
        lengths,
        tiny if quick else DecoderConfig(),
        256 if quick else 4096,
        2 if quick else 12,
        12 if quick else 200,
    )
    lines = [
        f"# Compiling in the background, {datetime.date.today()}",
        "",
        "The built-in corpus up to 1,024 bytes and the built-in model, 4,096 tokens a step, "
        f"{setting.num_steps} steps, no caches.",
        "",
        "Steps that sleep instead of computing; the host reads metrics a step late. The sleep of one step times the "
        f"steps between two new shapes is {SPACING} times the mean seconds of lowering and compiling a shape. Waited: "
        "the share of the run in which no step ran although one was asked for, after the first. The ratio is to the "
        "first shape's lowering and compiling plus all steps.",
        "",
        *table(
            "shapes|ms a step|steps between new shapes|first shape, s|first step after, s|waited|in all, s|ratio",
            sleeping_rows(setting, [STEPS_A_SHAPE] if quick else [STEPS_A_SHAPE, 2 * STEPS_A_SHAPE]),
        ),
        "",
        f"The real steps on this machine, whose cores compile as well; medians of {min(3, REPEATS)} runs in turns. "
        "First step: until it has ended, and until it was dispatched over the seconds of lowering and compiling its "
        "own shape.",
        "",
        *table(
            "compiled|first step after, s|over its own shape|waited later, s|in all, s|ratio",
            training_rows(setting, ["ahead", "spaced"] if quick else ["ahead", "background", "spaced"]),
        ),
        "",
        versions_and_hardware("jax", "flax", "optax"),
    ]
    report("background", lines, write=not quick)


if __name__ == "__main__":
    main()
