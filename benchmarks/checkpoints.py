"""What does a checkpoint a minute cost the training loop, and how fast does a long plan resume?

The demo of `make train`: compiled steps with their batches on the device, in stretches of some seconds, alternately
with and without a checkpoint at the start. The time that a checkpoint adds to a stretch, divided by a minute, is its
share at one checkpoint a minute. Then a state of 100 MB, which compresses little. Then a plan of a million samples,
resumed at step 10,000. Run `python benchmarks/checkpoints.py [--quick]`. Prints tables and writes them, with versions
and hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.timing import report, table, versions_and_hardware

import jvarlen
from jvarlen.batches import token_batch_spec
from jvarlen.data.split import HELD_OUT, split_held_out
from jvarlen.data.stdlib_corpus import stdlib_functions
from jvarlen.data.tokens import TokenDataset
from jvarlen.models import DecoderConfig, init_params, make_loss_fn
from jvarlen.runs.config import FitConfig, PlanConfig
from jvarlen.runs.settings import resolve
from jvarlen.runs.training_plan import TrainingPlan
from jvarlen.training.checkpoint import Checkpoints, Place, open_checkpoints


class TrainingLoop:
    """Steps of the demo, compiled, with their batches on the device, and checkpoints as `fit` makes them."""

    def __init__(self, config: FitConfig, num_steps: int):
        data = split_held_out(stdlib_functions(progress=False), config.data.held_out_fraction)
        lengths, held_out_lengths = (jvarlen.measure_lengths(part, progress=False) for part in data)
        training = TrainingPlan(resolve(config), lengths, {HELD_OUT: held_out_lengths})
        plan = training.plan_of_epoch(0)
        batches = jvarlen.load(plan, data.train)
        self._batches = [next(batches) for _ in range(num_steps)]
        step = jvarlen.make_train_step(make_loss_fn(config.decoder), training.optimizer)
        self.state = step.init(init_params(config.decoder, config.seed))
        specs = [token_batch_spec(bucket, plan.num_microbatches) for bucket in plan.buckets.shapes]
        self._executables = {
            spec.tokens.shape: jax.jit(step, donate_argnums=0).lower(self.state, spec).compile() for spec in specs
        }

    def seconds(self, before: Callable[[Any], None] | None = None) -> float:
        """Seconds of all steps from where the last ones ended, what is called with the state before them included."""
        jax.block_until_ready(self.state)
        start = time.perf_counter()
        if before is not None:
            before(self.state)
        for batch in self._batches:
            self.state, metrics = self._executables[batch.tokens.shape](self.state, batch)
            jax.block_until_ready(metrics)  # as `fit` reads them, so that no more than a step is in flight
        return time.perf_counter() - start


class Saves:
    """Checkpoints of a state, and the seconds that each took."""

    def __init__(self, checkpoints: Checkpoints):
        self._checkpoints = checkpoints
        self._numbers = itertools.count()
        self.blocking_s: list[float] = []

    def __call__(self, state: Any) -> None:
        """Saves the state as the next one."""
        place = Place(num_steps_done=next(self._numbers), epoch=0, step=0, plan_digest="")
        start = time.perf_counter()
        self._checkpoints.save(state, place)
        self.blocking_s.append(time.perf_counter() - start)

    def whole_s(self, state: Any, num_saves: int) -> list[float]:
        """Seconds from the call of `save` to the name of the checkpoint, with nothing else going on."""
        seconds = []
        for _ in range(num_saves):
            start = time.perf_counter()
            self(state)
            assert self._checkpoints.steps
            seconds.append(time.perf_counter() - start)
        return seconds


def loop_rows(loop: TrainingLoop, saves: Saves, num_turns: int) -> list[tuple[str, ...]]:
    """What checkpoints add to stretches of training, one of each kind a turn, each turn in the other order."""
    loop.seconds(saves), loop.seconds()
    del saves.blocking_s[:]
    without, added = [], []
    for turn in range(num_turns):
        pair = [loop.seconds(saves if with_save else None) for with_save in (turn % 2 == 0, turn % 2 == 1)]
        with_s, without_s = pair if turn % 2 == 0 else pair[::-1]
        without.append(without_s)
        added.append(with_s - without_s)
    rows = (
        ("a stretch without a checkpoint, s", without, 1, ".2f"),
        ("`save` keeps the loop waiting, ms", saves.blocking_s, 1e3, ".1f"),
        ("a checkpoint adds to its stretch, ms", added, 1e3, ".0f"),
        ("of the time at one a minute, %", added, 100 / 60, ".2f"),
    )
    return [(name, *quartiles([value * unit for value in values], form)) for name, values, unit, form in rows]


def quartiles(values: list[float], form: str) -> tuple[str, str, str]:
    """The median and the quartiles."""
    if len(values) < 2:
        return (f"{values[0]:{form}}",) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:{form}}", f"{low:{form}}", f"{high:{form}}"


def resume_rows(num_samples: int, step: int) -> list[tuple[str, str]]:
    """Seconds of what lies between opening a run and its first batch, but for the state."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.3, 0.7, num_samples), 1, 256).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    dataset = TokenDataset(rng.integers(0, 256, offsets[-1], np.uint8), offsets)
    seconds: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        seconds[name] = time.perf_counter() - start
        return result

    max_tokens = 1_024 if num_samples < 100_000 else 2_048

    def make_plan() -> jvarlen.Plan:
        buckets = jvarlen.make_buckets(lengths, max_tokens, max_shapes=8)
        plan = jvarlen.make_plan(lengths, buckets, order="shuffle")
        assert plan.digest  # computed when it is asked for, as `fit` does
        return plan

    make_plan()  # what numba compiles once is no part of the question
    with tempfile.TemporaryDirectory() as folder:
        plan = timed("choosing the shapes and planning again", make_plan)
        plan.save(Path(folder) / "plan.npz")
        saved = timed(
            "loading and checking the plan that was saved", lambda: jvarlen.Plan.load(Path(folder) / "plan.npz")
        )
    assert saved.digest == plan.digest
    assert plan.num_steps > step, plan.num_steps
    first = timed(f"the batch of step {step:,}", lambda: next(jvarlen.load(saved, dataset, start_step=step)))
    rows = plan.rows(step)
    assert first.tokens.shape[:2] == rows.shape
    assert np.asarray(first.lengths).tolist() == np.where(rows < 0, 0, lengths[rows]).tolist()
    return [(name, f"{value:.3f}") for name, value in seconds.items()] + [("all", f"{sum(seconds.values()):.3f}")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps, and no report")
    quick = parser.parse_args().quick
    plan = PlanConfig(overlong="truncate", packing="padded")
    config = FitConfig(progress=False, plan=plan)
    if quick:
        tiny = DecoderConfig(num_layers=1, width=16, num_heads=1)
        plan = dataclasses.replace(plan, max_tokens=256, max_shapes=1, max_length=64)
        config = dataclasses.replace(config, plan=plan, decoder=tiny)
    num_turns, num_steps = (2, 4) if quick else (16, 20)
    loop = TrainingLoop(config, num_steps)
    num_samples, step = (20_000, 100) if quick else (1_000_000, 10_000)
    with tempfile.TemporaryDirectory() as folder:
        with open_checkpoints(Path(folder) / "demo") as checkpoints:
            saves = Saves(checkpoints)
            loop_table = loop_rows(loop, saves, num_turns)
            demo_whole_s = saves.whole_s(loop.state, num_turns)
        normal = np.random.default_rng(0).standard_normal((50, 10_000 if quick else 500_000), np.float32)
        large = {f"layer_{i}": jnp.asarray(values) for i, values in enumerate(normal)}
        with open_checkpoints(Path(folder) / "large") as checkpoints:
            saves = Saves(checkpoints)
            saves.whole_s(large, 1)
            del saves.blocking_s[:]
            large_whole_s = saves.whole_s(large, num_turns)
        num_bytes = [sum(leaf.nbytes for leaf in jax.tree.leaves(state)) for state in (loop.state, large)]
        states = [
            (f"the demo, {num_bytes[0] / 1e6:,.1f} MB, written", *quartiles([1e3 * s for s in demo_whole_s], ".0f")),
            (f"{num_bytes[1] / 1e6:,.0f} MB, `save` alone", *quartiles([1e3 * s for s in saves.blocking_s], ".1f")),
            (f"{num_bytes[1] / 1e6:,.0f} MB, written", *quartiles([1e3 * s for s in large_whole_s], ".0f")),
        ]
    lines = [
        f"# Checkpoints and resuming, {datetime.date.today()}",
        "",
        f"Stretches of {num_steps} steps of the demo, with a checkpoint at the start and without, in {num_turns} "
        "turns. The checkpoint is written, hashed and named while the steps run. What it adds is the difference of the "
        "two stretches of a turn; below zero, other things on the machine took more. To reach: less than 2 % of the "
        "time at one a minute.",
        "",
        *table("of the training loop|median|lower quartile|upper quartile", loop_table),
        "",
        "Checkpoints with nothing else going on, to the moment in which they have their names:",
        "",
        *table("state|median, ms|lower quartile, ms|upper quartile, ms", states),
        "",
        f"Resuming at step {step:,} of a plan of {num_samples:,} samples, but for restoring the state and compiling. "
        "To reach: less than 1 s.",
        "",
        *table("what|s", resume_rows(num_samples, step)),
        "",
        versions_and_hardware("jax", "orbax-checkpoint"),
    ]
    report("checkpoints", lines, write=not quick)


if __name__ == "__main__":
    main()
