"""Which way of following the batch size takes the fewest tokens and seconds to a held-out loss, and what do ramps save?

The built-in corpus and a decoder of one layer. First, steps of constant tokens in length-sorted buckets, whose samples
vary: AdamW by each rule, `adamw_by_batch_size`, and steps of a fixed number of samples. Then batches that grow instead
of the decay of the rate. Each way has its own best rate, found with a seed of its own. Run `python
benchmarks/batch_size_rules.py [--quick] [--cache FILE]`; with `--cache`, an interrupted benchmark resumes. It computes
in one thread. Prints tables and writes them, with versions and hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support.timing import report, table, versions_and_hardware

import jvarlen
from jvarlen.data.split import split_held_out
from jvarlen.data.stdlib_corpus import stdlib_functions
from jvarlen.data.tokens import Subset
from jvarlen.models import DecoderConfig, init_params, make_loss_fn
from jvarlen.planning import BatchSizeStages
from jvarlen.training import adamw_by_batch_size, seesaw

ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
SEED_OF_TUNING = 1_000  # no other run has it
RATES = [2.0**power for power in range(-9, -4)]  # tried first; more where the best is at an end
LARGE = [(64, 64), (32, 128), (16, 256), (8, 512), (4, 1024)]  # of steps of constant tokens
SMALL = [(16, 64), (8, 128), (4, 256), (2, 512), (1, 1024)]  # of groups, where a step has a given number of samples
WEIGHT_DECAY, MAX_NORM, B1 = 0.1, 1.0, 0.9
NUM_EVALUATIONS = 12
CONSTANT, MOST = 8, 64  # samples a step before and after a ramp


Curve = list[tuple[int, float]]  # tokens, loss


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much a run computes."""

    num_tokens: int = 500_000
    num_held_out: int = 64
    max_length: int = 1024
    width: int = 64
    num_seeds: int = 5
    num_turns: int = 3


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to follow the batch size: its steps, and what of the optimizer follows them."""

    name: str
    steps: str  # "sorted": of constant tokens, in buckets; or shuffled, of so many "tokens" or samples: see `plan`
    rule: Any = "sqrt"
    moments: bool = False  # whether they follow as well
    b2: float = 0.95
    unit: str = "sequences"  # of the batch size that is followed


RULES = [
    Way("AdamW, square-root rule", "sorted", "sqrt"),
    Way("AdamW, linear rule", "sorted", "linear"),
    Way("AdamW, no rule", "sorted", None),
    Way("AdamW, square-root rule, tokens", "sorted", "sqrt", unit="tokens"),
    Way("`adamw_by_batch_size`", "sorted", "sqrt", moments=True),
    Way("`adamw_by_batch_size`, tokens", "sorted", "sqrt", moments=True, unit="tokens"),
    Way("AdamW, no rule, shuffled steps of as many tokens", "tokens", None),
    Way("AdamW, no rule, shuffled steps of as many samples", "samples", None),
]
SLOW_RULES = [dataclasses.replace(way, b2=0.999) for way in (RULES[0], *RULES[4:6])]
RAMPS = [
    Way("cosine, constant batch", "constant", None),
    Way("cosine, late switch, square-root rule", "late"),
    Way("Seesaw", "seesaw"),
]


class Bench:
    """The data, the model, and the programs that all ways share."""

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        corpus = stdlib_functions(progress=False)
        short = Subset(corpus, np.flatnonzero(np.diff(corpus.offsets) <= sizes.max_length))
        self.data, held_out = split_held_out(short, 0.05)
        every = max(1, len(held_out) // sizes.num_held_out)
        self.held_out = Subset(held_out, np.arange(0, len(held_out), every))
        self.lengths = np.array([len(self.data[i]) for i in range(len(self.data))])
        self.shapes = [shape for shape in LARGE if shape[1] <= sizes.max_length]
        self.small = [shape for shape in SMALL if shape[1] <= sizes.max_length]
        self.config = DecoderConfig(num_layers=1, width=sizes.width, num_heads=1)
        loss_fn = make_loss_fn(self.config)
        summed = jax.value_and_grad(lambda params, batch: loss_fn(params, batch), has_aux=True)

        def accumulate(params: Any, sums: Any, batch: Any) -> Any:
            (_, weight), grads = summed(params, batch)
            return jax.tree.map(jnp.add, sums, (grads, weight))

        self.accumulate = jax.jit(accumulate, donate_argnums=1)
        self.loss = jax.jit(loss_fn)
        eval_plan = jvarlen.make_plan([len(sample) for sample in self.held_out], self.shapes)
        self.eval_batches = list(jvarlen.load(eval_plan, self.held_out, microbatches=False))
        self.updates: dict[Any, Callable[..., Any]] = {}

    def schedule(self, count: Any) -> Any:
        """Warm-up and cosine decay as `jvarlen train` has them, by tokens, with a peak of 1."""
        total = self.sizes.num_tokens
        return optax.warmup_cosine_decay_schedule(0.05, 1.0, total // 10, total, 0.05)(count)

    @functools.cached_property
    def of_sorted(self) -> tuple[float, float]:
        """Mean samples and tokens of a step of constant tokens; rates and moments are for so many samples."""
        plan = self.plan(RULES[0], 0)
        return float(plan.num_sequences.mean()), float(plan.num_tokens.mean())

    @functools.cached_property
    def seesaw(self) -> Any:
        """The ramp of that schedule."""
        return seesaw(self.schedule, self.sizes.num_tokens, CONSTANT, max_batch_size=MOST)

    def plan(self, way: Way, seed: int) -> Any:
        """The plan of a run; the seed is that of its order."""
        if way.steps == "sorted":
            order = jvarlen.Order("length", shuffle_steps=True)
            return jvarlen.make_plan(self.lengths, self.shapes, order=order, seed=seed)
        sizes: dict[str, Callable[[], Any]] = {
            "tokens": lambda: {"tokens_per_step": round(self.of_sorted[1])},
            "samples": lambda: {"sequences_per_step": round(self.of_sorted[0])},
            "constant": lambda: {"sequences_per_step": CONSTANT},
            "late": lambda: {
                "sequences_per_step": BatchSizeStages([(0, CONSTANT), (self.sizes.num_tokens // 2, MOST)])
            },
            "seesaw": lambda: {"sequences_per_step": self.seesaw.batch_sizes},
        }
        return jvarlen.make_plan(self.lengths, self.small, seed=seed, **sizes[way.steps]())

    def num_steps(self, way: Way, seed: int) -> int:
        """So many that the tokens of a run are as near to those asked for as can be."""
        return int(np.abs(np.cumsum(self.plan(way, seed).num_tokens) - self.sizes.num_tokens).argmin()) + 1

    def optimizer(self, way: Way, plan: Any, rate: float) -> Any:
        """The optimizer of a run; the peak of its rate is in its state, so that programs serve all rates."""
        base = CONSTANT if way in RAMPS else self.of_sorted[way.unit == "tokens"]
        schedule = self.seesaw.schedule if way.steps == "seesaw" else self.schedule
        decays = {"b1": B1, "b2": way.b2, "weight_decay": WEIGHT_DECAY}
        follows: dict[str, Any] = {"rule": way.rule, "unit": way.unit, "counted_in": "tokens"}
        if way.moments:
            scaled = adamw_by_batch_size(schedule, base, plan=plan, **follows, **decays)
        else:
            rates = jvarlen.scale_by_planned_rate(plan, schedule, base, **follows)
            scaled = optax.chain(optax.adamw(1.0, **decays), rates)
        peak = optax.inject_hyperparams(optax.scale)(step_size=rate)
        return optax.chain(optax.clip_by_global_norm(MAX_NORM), scaled, peak)

    def update(self, way: Way, optimizer: Any) -> Callable[..., Any]:
        """One program for all seeds, rates and rules, whose tables are in the state."""

        def update(params: Any, state: Any, sums: Any) -> Any:
            grads = jax.tree.map(lambda grad: grad / sums[1], sums[0])
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return self.updates.setdefault((way.moments, way.b2), jax.jit(update, donate_argnums=(0, 1)))

    def steps(self, way: Way, seed: int, rate: float) -> Iterator[tuple[int, Any]]:
        """Trains: real tokens so far, and the parameters, after every step."""
        plan = self.plan(way, seed)
        optimizer = self.optimizer(way, plan, rate)
        update = self.update(way, optimizer)
        params = init_params(self.config, seed=seed)
        state = optimizer.init(params)
        zeros = jax.tree.map(jnp.zeros_like, (params, jnp.zeros(())))
        seen = np.cumsum(plan.num_tokens)[: self.num_steps(way, seed)]
        with contextlib.closing(jvarlen.load(plan, self.data, microbatches=False)) as batches:
            for tokens, batch in zip(seen.tolist(), batches, strict=False):
                sums = jax.tree.map(jnp.copy, zeros)
                for group in getattr(batch, "groups", (batch,)):
                    sums = self.accumulate(params, sums, group)
                params, state = update(params, state, sums)
                yield tokens, params

    def evaluate(self, params: Any) -> float:
        """The held-out loss."""
        sums = [self.loss(params, batch) for batch in self.eval_batches]
        return float(sum(loss for loss, _ in sums) / sum(weight for _, weight in sums))

    def run(self, way: Way, seed: int, rate: float) -> Curve:
        """The held-out loss by real tokens."""
        every, last = self.sizes.num_tokens / NUM_EVALUATIONS, self.num_steps(way, seed)
        curve: Curve = []
        for step, (tokens, params) in enumerate(self.steps(way, seed, rate), 1):
            if step == last or tokens >= every * (len(curve) + 1):
                curve.append((tokens, self.evaluate(params)))
        return curve


class Cache:
    """Results of runs as JSON lines, so that an interrupted benchmark resumes."""

    def __init__(self, bench: Bench, path: Path | None):
        self.bench, self.path, self.known = bench, path, {}
        if path and path.exists():
            self.known = dict(map(json.loads, path.read_text().splitlines()))

    def get(self, key: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        """A result, computed or as it was kept."""
        name = repr((*key, dataclasses.replace(self.bench.sizes, num_seeds=0)))
        if name not in self.known:
            self.known[name] = compute()
            if self.path:
                with self.path.open("a") as out:
                    out.write(json.dumps([name, self.known[name]]) + "\n")
        return self.known[name]

    def run(self, way: Way, seed: int, rate: float) -> Curve:
        """The held-out loss by real tokens."""
        curve = self.get((dataclasses.replace(way, name=""), seed, rate), lambda: self.bench.run(way, seed, rate))
        print(f"{way.name}, β₂ {way.b2}, seed {seed}, rate {rate:.4f}: {final(curve):.4f}", file=sys.stderr, flush=True)
        return curve


def final(curve: Curve) -> float:
    """The last loss; infinite where training diverged."""
    return curve[-1][1] if math.isfinite(curve[-1][1]) else math.inf


@dataclasses.dataclass
class Measured:
    """A way at its best rate."""

    way: Way
    tried: dict[float, float]  # the final loss by rate
    curves: list[Curve]
    seconds_per_token: float = math.nan

    @property
    def rate(self) -> float:
        """The best rate."""
        return best_of(self.tried)

    @property
    def finals(self) -> np.ndarray:
        """The final loss of each seed."""
        return np.array([final(curve) for curve in self.curves])

    def tokens_to(self, target: float) -> float:
        """The mean over runs of the tokens at which the loss, linear between evaluations, reaches the target."""
        return statistics.fmean(tokens_at(curve, target) for curve in self.curves)


def best_of(tried: dict[float, float]) -> float:
    return min(tried, key=lambda rate: tried[rate])


def tokens_at(curve: Curve, target: float) -> float:
    for (before, above), (tokens, loss) in itertools.pairwise(curve):
        if loss <= target < above:
            return before + (tokens - before) * (above - target) / (above - loss)
    return float(curve[0][0] if curve[0][1] <= target else math.nan)


def measure(cache: Cache, ways: list[Way], rates: list[float]) -> list[Measured]:
    """Each way with rates by factors of 2 until the best is at no end of them, then with every seed at the best."""
    found = []
    for way in ways:
        tried: dict[float, float] = {}
        missing = rates
        while missing:
            tried |= {rate: final(cache.run(way, SEED_OF_TUNING, rate)) for rate in missing}
            best, least, most = best_of(tried), min(tried), max(tried)
            missing = [least / 2] * (best == least) + [most * 2] * (best == most)
        curves = [cache.run(way, seed, best_of(tried)) for seed in range(cache.bench.sizes.num_seeds)]
        found.append(Measured(way, dict(sorted(tried.items())), curves))
    return found


def time_in_turns(cache: Cache, measured: list[Measured]) -> None:
    """CPU seconds a real token of a whole run without evaluations: the least of several, in which ways take turns."""
    kinds = {(each.way.steps, each.way.moments): each for each in measured}  # of others the programs are the same
    least = dict.fromkeys(kinds, math.inf)

    def seconds_per_token(each: Measured) -> float:
        start = time.process_time()
        *_, (tokens, params) = cache.bench.steps(each.way, 0, each.rate)
        jax.block_until_ready(params)
        return (time.process_time() - start) / tokens

    for turn in range(cache.bench.sizes.num_turns):
        for kind, each in kinds.items():
            least[kind] = min(least[kind], cache.get((kind, turn), functools.partial(seconds_per_token, each)))
    for each in measured:
        each.seconds_per_token = least[each.way.steps, each.way.moments]


def in_table(bench: Bench, measured: list[Measured], reference: int) -> list[str]:
    """A row for each way; the last columns are of the loss that all runs reach."""
    target = max(each.finals.max() for each in measured)
    rows = []
    for index, each in enumerate(measured):
        seeds = range(len(each.curves))
        counts = [bench.plan(each.way, seed).num_sequences[: bench.num_steps(each.way, seed)] for seed in seeds]
        samples = f"{min(map(min, counts))} to {max(map(max, counts))}"
        gaps, tokens = each.finals - measured[reference].finals, each.tokens_to(target)
        rows.append(
            [
                each.way.name,
                samples,
                f"{statistics.fmean(map(len, counts)):.0f}",
                f"{statistics.fmean(curve[-1][0] for curve in each.curves):,.0f}",
                f"{each.rate:.4f}",
                f"{each.finals.mean():.3f} ± {each.finals.std(ddof=1):.3f}",
                "" if index == reference else f"{gaps.mean():+.3f} ± {gaps.std(ddof=1) / len(gaps) ** 0.5:.3f}",
                f"{tokens:,.0f}",
                f"{tokens * each.seconds_per_token:.1f}",
            ]
        )
    name = measured[reference].way.name
    header = f"way|samples a step|steps|tokens|best rate|final loss|over {name}|tokens to {target:.3f}|CPU s to it"
    return table(header, rows)


def rates_table(measured: list[Measured]) -> list[str]:
    rates = sorted({rate for each in measured for rate in each.tried})
    cells = [[f"{each.tried[rate]:.3f}" if rate in each.tried else "" for rate in rates] for each in measured]
    names = [f"{each.way.name}, β₂ = {each.way.b2}" for each in measured]
    return table(
        "|".join(["way", *(f"{rate:.4f}" for rate in rates)]), [[n, *c] for n, c in zip(names, cells, strict=True)]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few short runs of a tiny model, and no report")
    parser.add_argument("--cache", type=Path, help="a file of JSON lines that keeps the results of runs")
    options = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}"  # before JAX starts
    quick = options.quick
    sizes = Sizes(5_000, 8, 128, 16, num_seeds=2, num_turns=1) if quick else Sizes()
    bench = Bench(sizes)
    cache = Cache(bench, options.cache)
    kinds = [RULES, RAMPS, SLOW_RULES]
    found = [measure(cache, ways, RATES[2:4] if quick else RATES) for ways in kinds]
    everything = list(itertools.chain(*found))
    time_in_turns(cache, everything)
    rules, ramps, slow_rules = found
    samples, tokens = bench.of_sorted
    lines = [
        f"# Rules for the batch size, {datetime.date.today()}",
        "",
        f"Functions of the standard library of at most {sizes.max_length:,} bytes, and a decoder of one layer of "
        f"width {sizes.width}. Runs of {sizes.num_tokens:,} tokens, below an epoch; warm-up and cosine decay to 5 % "
        f"by tokens, β₁ = {B1}, weight decay {WEIGHT_DECAY}, gradients of a norm of at most {MAX_NORM:g}. Each way has "
        f"its best rate of those below; figures are of {sizes.num_seeds} further seeds, which are those of parameters "
        "and order, the same for all ways: means ± standard deviations, and of paired differences ± standard errors. "
        "Losses are of held-out samples, in nats a byte. CPU seconds are without evaluations, in one thread.",
        "",
        "## Samples of a step that vary, β₂ = 0.95",
        "",
        f"Steps of at most {LARGE[-1][0] * LARGE[-1][1]:,} tokens with padding, in {len(bench.shapes)} buckets, sorted "
        f"by length; steps in shuffled order. Base batch size {samples:.1f}, the mean; {tokens:,.0f} tokens a step.",
        "",
        *in_table(bench, rules, 0),
        "",
        "## Samples of a step that vary, β₂ = 0.999",
        "",
        *in_table(bench, slow_rules, 0),
        "",
        "## Batches that grow",
        "",
        f"Shuffled samples. The late switch is after half of the tokens. Seesaw's sizes by tokens: "
        f"{bench.seesaw.batch_sizes}.",
        "",
        *in_table(bench, ramps, 0),
        "",
        "## Rates",
        "",
        "Final losses with a seed of their own.",
        "",
        *rates_table(everything),
        "",
        versions_and_hardware("jax", "optax"),
    ]
    report("batch-size-rules", lines, write=not quick)


if __name__ == "__main__":
    main()
