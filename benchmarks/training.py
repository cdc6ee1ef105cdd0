"""How much speed of the bare compiled step does a whole training keep, and what do rates and moments by samples cost?

The demo of `make train`, shortened: `fit` with its loading, metrics, log, progress and checkpoints, against the same
steps called in a loop with their batches already on the device. Then the step of AdamW against those whose rate, or
whose moments as well, follow the samples. All take turns in one run. Run `python benchmarks/training.py [--quick]`.
Prints tables and writes them, with versions and hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax
from support.timing import report, table, versions_and_hardware

import jvarlen
from jvarlen.batches import token_batch_spec
from jvarlen.data.split import HELD_OUT, Split, split_held_out
from jvarlen.data.stdlib_corpus import stdlib_functions
from jvarlen.models import DecoderConfig, init_params, make_loss_fn
from jvarlen.runs.config import CheckpointConfig, DirectoryConfig, FitConfig, PlanConfig
from jvarlen.runs.settings import resolve
from jvarlen.runs.training_plan import TrainingPlan
from jvarlen.training import adamw_by_batch_size


class BareLoop:
    """The steps of a training, compiled, with their batches on the device: nothing but calls of executables."""

    def __init__(self, config: FitConfig, training: TrainingPlan, data: Split):
        step = jvarlen.make_train_step(make_loss_fn(config.decoder), training.optimizer)
        self._init = lambda: step.init(init_params(config.decoder, config.seed))
        plan = training.plan_of_epoch(0)
        self.num_steps = training.num_steps
        self.num_tokens = int(plan.num_tokens[: training.num_steps].sum())
        batches = jvarlen.load(plan, data.train)
        self._batches = [next(batches) for _ in range(training.num_steps)]
        specs = [token_batch_spec(bucket, plan.num_microbatches) for bucket in plan.buckets.shapes]
        self._executables = {
            spec.tokens.shape: jax.jit(step, donate_argnums=0).lower(self._init(), spec).compile() for spec in specs
        }

    def seconds(self) -> float:
        """Seconds of all steps, from a fresh state."""
        state = jax.block_until_ready(self._init())
        executables = [self._executables[batch.tokens.shape] for batch in self._batches]
        start = time.perf_counter()
        for executable, batch in zip(executables, self._batches, strict=True):
            state, _ = executable(state, batch)
        jax.block_until_ready(state)
        return time.perf_counter() - start


def fit_seconds(config: FitConfig, data: Split) -> float:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        summary = jvarlen.fit(
            dataclasses.replace(config, directory=DirectoryConfig(runs_dir=Path(folder))), data
        ).summary
    return summary.train_s


def compiled_step(
    model: DecoderConfig, optimizer: optax.GradientTransformation, bucket: jvarlen.Bucket
) -> Callable[[], Any]:
    """One step of the model in a bucket, to be called again and again."""
    step = jvarlen.make_train_step(make_loss_fn(model), optimizer)
    state = step.init(init_params(model, seed=0))
    spec = token_batch_spec(bucket, 1)
    batch = jax.device_put(jvarlen.batches.full_batch(spec))
    executable = jax.jit(step, donate_argnums=0).lower(state, spec).compile()

    def call() -> None:
        nonlocal state
        state, metrics = executable(state, batch)
        jax.block_until_ready(metrics)

    return call


def take_turns(calls: list[Callable[[], Any]], num_turns: int) -> list[list[float]]:
    """Seconds of every call, called one after the other, each turn in the other order."""
    seconds: list[list[float]] = [[] for _ in calls]
    for turn in range(num_turns):
        for k in range(len(calls)) if turn % 2 else reversed(range(len(calls))):
            start = time.perf_counter()
            calls[k]()
            seconds[k].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps, and no report")
    quick = parser.parse_args().quick
    plan = PlanConfig(overlong="truncate", packing="padded")
    config = FitConfig(max_steps=120, checkpoints=CheckpointConfig(checkpoint_every=100), progress=False, plan=plan)
    if quick:
        tiny = DecoderConfig(num_layers=1, width=16, num_heads=1)
        plan = dataclasses.replace(plan, max_tokens=256, max_shapes=1, max_length=64)
        config = dataclasses.replace(config, max_steps=4, plan=plan, decoder=tiny)
    data = split_held_out(stdlib_functions(progress=False), config.data.held_out_fraction)
    lengths, held_out_lengths = (jvarlen.measure_lengths(part, progress=False) for part in data)
    bare = BareLoop(config, TrainingPlan(resolve(config), lengths, {HELD_OUT: held_out_lengths}), data)
    if not quick:
        fit_seconds(config, data)  # compiles, for those that follow
    turns = [(fit_seconds(config, data), bare.seconds()) for _ in range(1 if quick else 9)]
    ratios = sorted(loop / fitted for fitted, loop in turns)
    quartiles = f"{ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f}"

    rows, length = (4, 64) if quick else (16, 256)
    optimizers = {
        "AdamW": optax.adamw(1e-3),
        "AdamW and `scale_by_batch_size`": optax.chain(optax.adamw(1e-3), jvarlen.scale_by_batch_size(8, rule="sqrt")),
        "`adamw_by_batch_size`": adamw_by_batch_size(1e-3, 8),
        "`adamw_by_batch_size(plan=)`": adamw_by_batch_size(1e-3, 8, plan=[rows] * 1000),
    }
    steps = [compiled_step(config.decoder, each, jvarlen.Bucket(rows, length)) for each in optimizers.values()]
    take_turns(steps, 2)
    plain, *_ = turns_of_steps = take_turns(steps, 2 if quick else 300)
    lines = [
        f"# Training against the bare step, {datetime.date.today()}",
        "",
        f"{bare.num_steps} steps of the demo, {bare.num_tokens:,} real tokens; `fit` and the loop take turns, "
        f"{len(turns)} each. Seconds of `fit` are those of its summary, from its first step to its last. The best of "
        "each, and the median of the turns' ratios, with quartiles.",
        "",
        *table(
            "what runs|real tokens a second, best|of the bare loop, best|median of turns",
            [
                ("bare loop", f"{bare.num_tokens / min(loop for _, loop in turns):,.0f}", "1", "1"),
                (
                    "`fit`",
                    f"{bare.num_tokens / min(fitted for fitted, _ in turns):,.0f}",
                    f"{min(loop for _, loop in turns) / min(fitted for fitted, _ in turns):.3f}",
                    f"{statistics.median(ratios):.3f} ({quartiles})",
                ),
            ],
        ),
        "",
        f"One step in {rows} × {length}, {len(plain)} turns:",
        "",
        *table(
            "optimizer|median, ms|fastest, ms|median / AdamW|fastest / AdamW|median of turns / AdamW",
            [
                (
                    name,
                    f"{statistics.median(seconds) * 1e3:.2f}",
                    f"{min(seconds) * 1e3:.2f}",
                    f"{statistics.median(seconds) / statistics.median(plain):.4f}",
                    f"{min(seconds) / min(plain):.4f}",
                    f"{statistics.median(a / b for a, b in zip(seconds, plain, strict=True)):.4f}",
                )
                for name, seconds in zip(optimizers, turns_of_steps, strict=True)
            ],
        ),
        "",
        versions_and_hardware("jax", "optax"),
    ]
    report("training", lines, write=not quick)


if __name__ == "__main__":
    main()
