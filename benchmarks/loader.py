"""How long does the training loop wait for its batches?

The demo model with the settings of `FitConfig`, steps compiled ahead of time, batches of the built-in corpus from
`load`: read in a thread or by a worker process, in turns. Measured from the second batch on: the share of the loop
spent inside `next(batches)`. And how much faster `load` reads a Hugging Face dataset a step at a time, by its
`__getitems__`, than sample by sample, and what a dataset of Grain costs over the same `PlanSource` in a loop. Run
`python benchmarks/loader.py [--quick] [--steps N] [--turns N]`. Prints tables and writes them, with versions and
hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from support.timing import report, table, versions_and_hardware

import jvarlen
from jvarlen.batches import BatchShapes
from jvarlen.data.split import HELD_OUT, Split, split_held_out
from jvarlen.data.stdlib_corpus import stdlib_functions
from jvarlen.loading import PlanSource, grain_dataset
from jvarlen.models import DecoderConfig, init_params, make_loss_fn
from jvarlen.runs.config import FitConfig, PlanConfig
from jvarlen.runs.settings import resolve
from jvarlen.runs.training_plan import TrainingPlan

GOAL = 0.03  # most of the loop's time that it may wait with one worker
MOST_OF_GRAIN = 1.1  # time of Grain for an epoch, as a ratio


class Loop(NamedTuple):
    """Seconds of a loop after its first batch.

    Attributes:
      wait_s: inside `next(batches)`.
      all_s: until the last step has been computed.
      num_tokens: real tokens of its steps.
    """

    wait_s: float
    all_s: float
    num_tokens: int


class Training:
    """A training of some steps that can be run again and again with other ways of loading."""

    def __init__(self, config: FitConfig, training: TrainingPlan, data: Split, num_steps: int):
        step = jvarlen.make_train_step(make_loss_fn(config.decoder), training.optimizer)
        self._init = lambda: step.init(init_params(config.decoder, config.seed))
        self._plan = training.plan_of_epoch(0)
        self._dataset = data.train
        self.num_steps = min(num_steps, self._plan.num_steps)
        self._step = jvarlen.compile_buckets(
            step,
            self._init(),
            BatchShapes(self._plan.buckets.shapes, num_microbatches=self._plan.num_microbatches, has_many_groups=False),
            progress=False,
        )

    def run(self, num_workers: int) -> Loop:
        """Takes the steps from a fresh state."""
        state: Any = self._init()
        batches = jvarlen.load(self._plan, self._dataset, num_workers=num_workers)
        state, _ = self._step(state, next(batches))
        jax.block_until_ready(state)
        start = time.perf_counter()
        wait_s = 0.0
        loss = None
        for _ in range(1, self.num_steps):
            asked = time.perf_counter()
            batch = next(batches)
            wait_s += time.perf_counter() - asked
            state, metrics = self._step(state, batch)
            if loss is not None:
                float(loss)  # a step late, as a training that logs its losses does
            loss = metrics.loss_sum
        jax.block_until_ready(state)
        all_s = time.perf_counter() - start
        batches.close()
        return Loop(wait_s, all_s, int(self._plan.num_tokens[1 : self.num_steps].sum()))


class OneByOne:
    """A dataset without its `__getitems__`."""

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


def read_seconds(num_samples: int, num_turns: int) -> dict[str, list[float]]:
    """Seconds of an epoch of tokens in a Hugging Face dataset, in turns; the batches are the same."""
    import datasets
    import grain

    rng = np.random.default_rng(0)
    lengths = rng.integers(16, 257, num_samples)
    texts = np.split(rng.integers(0, 50_000, lengths.sum(), np.int32), np.cumsum(lengths)[:-1])
    table = datasets.Dataset.from_dict({"tokens": texts}).with_format("numpy")
    plan = jvarlen.make_plan(lengths, max_tokens=16_384, max_shapes=4)
    fields = {"tokens": "length"}
    kinds: dict[str, Callable[[], Iterable[Any]]] = {
        "`load`, sample by sample": lambda: jvarlen.load(plan, OneByOne(table), fields=fields, lengths=lengths),
        "`load`, a step at a time": lambda: jvarlen.load(plan, table, fields=fields, lengths=lengths),
        "`PlanSource` in a loop": lambda: map(
            PlanSource(plan, table, fields=fields, lengths=lengths).__getitem__, range(plan.num_steps)
        ),
        "`grain_dataset`, a thread": lambda: grain_dataset(plan, table, fields=fields, lengths=lengths).to_iter_dataset(
            grain.ReadOptions(num_threads=1)
        ),
        "`grain_dataset`, its 16 threads": lambda: grain_dataset(
            plan, table, fields=fields, lengths=lengths
        ).to_iter_dataset(),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(-1, num_turns):  # what is made once is made in turn −1, which does not count
        sums = set()
        for kind in list(kinds)[:: 1 if turn % 2 else -1]:
            start = time.perf_counter()
            sums.add(sum(int(batch["tokens"].sum()) * (step + 1) for step, batch in enumerate(kinds[kind]())))
            seconds[kind] += [time.perf_counter() - start] * (turn >= 0)
        assert len(sums) == 1, "the batches differ"
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps, and no report")
    parser.add_argument("--steps", type=int, default=120, help="steps of each loop")
    parser.add_argument("--turns", type=int, default=5, help="loops of each kind")
    args = parser.parse_args()
    plan = PlanConfig(overlong="truncate", packing="padded")
    config = FitConfig(max_steps=args.steps, progress=False, plan=plan)
    num_turns = args.turns
    if args.quick:
        tiny = DecoderConfig(num_layers=1, width=16, num_heads=1)
        plan = PlanConfig(max_tokens=256, max_shapes=1, max_length=64, overlong="truncate", packing="padded")
        config = FitConfig(max_steps=4, progress=False, plan=plan, decoder=tiny)
        num_turns = 1
    data = split_held_out(stdlib_functions(progress=False), config.data.held_out_fraction)
    lengths, held_out_lengths = (jvarlen.measure_lengths(part, progress=False) for part in data)
    training = Training(
        config,
        TrainingPlan(resolve(config), lengths, {HELD_OUT: held_out_lengths}),
        data,
        config.max_steps or args.steps,
    )
    if not args.quick:
        training.run(0)  # what is made once, for those that follow
    loops: dict[int, list[Loop]] = {0: [], 1: []}  # by workers
    for turn in range(num_turns):
        for num_workers in (0, 1) if turn % 2 else (1, 0):
            loops[num_workers].append(training.run(num_workers))

    num_samples = 200 if args.quick else 30_000
    seconds = read_seconds(num_samples, num_turns)
    one_by_one, at_once, in_a_loop, by_grain, by_threads = map(np.array, seconds.values())
    faster, of_grain = np.median(one_by_one / at_once), np.median(by_grain / in_a_loop)
    waited = statistics.median(loop.wait_s / loop.all_s for loop in loops[1])
    verdicts = ["reached" if is_so else "**missed**" for is_so in (waited < GOAL, of_grain <= MOST_OF_GRAIN)]
    if args.quick:
        verdicts = ["too little was measured to tell"] * 2
    lines = [
        f"# Waiting for batches, {datetime.date.today()}",
        "",
        f"{training.num_steps} steps of the demo, {loops[0][0].num_tokens:,} real tokens after the first; loops "
        f"take turns, {num_turns} each. Medians of the turns.",
        "",
        *table(
            "workers|time in `next(batches)`|longest of turns|real tokens a second",
            [
                (
                    str(num_workers),
                    f"{statistics.median(loop.wait_s / loop.all_s for loop in of_kind):.2%}",
                    f"{max(loop.wait_s / loop.all_s for loop in of_kind):.2%}",
                    f"{statistics.median(loop.num_tokens / loop.all_s for loop in of_kind):,.0f}",
                )
                for num_workers, of_kind in loops.items()
            ],
        ),
        "",
        f"Goal: less than {GOAL:.0%} with one worker: {verdicts[0]}.",
        "",
        f"A Hugging Face dataset of {num_samples:,} samples of 16 to 256 tokens, without workers and without a model: "
        f"medians of {num_turns} turns.",
        "",
        *table("read|seconds", [(kind, f"{statistics.median(of_kind):.2f}") for kind, of_kind in seconds.items()]),
        "",
        f"A step at a time is {faster:.2f} times as fast as sample by sample. Grain's thread takes {of_grain:.2f} "
        f"times as long as `PlanSource` in a loop, and its 16 threads {np.median(by_threads / in_a_loop):.2f} times. "
        f"Goal of one: at most {MOST_OF_GRAIN}: {verdicts[1]}.",
        "",
        versions_and_hardware("jax", "grain", "datasets"),
    ]
    report("loader", lines, write=not args.quick)


if __name__ == "__main__":
    main()
