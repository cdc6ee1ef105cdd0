"""How much of the ranks' time do mixed steps use, against ordinary ones, and what does their program cost?

Ordinary steps: all microbatches of one shape, as many on each rank; the last step of every shape is filled up with
empty ones. Mixed steps: any shapes, spread over the ranks by cost; ranks wait for the busiest. The first table plans
both. The second measures them on four host devices that wait instead of computing, because devices that share cores
cannot all compute at once. The third trains the demo model on one device with the same microbatches by both. Run
`python benchmarks/mixed.py [--quick]`. Prints tables and writes them, with versions and hardware, to
`benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support.timing import COMPILE_FAST, REPEATS, report, table, versions_and_hardware

import jvarlen
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import split_cpu
from jvarlen.distributed.placement import place
from jvarlen.experimental.mixed import MixedPlan, load_mixed, make_mixed_plan, make_mixed_train_step
from jvarlen.models import DecoderConfig, init_params, make_loss_fn

COST = jvarlen.CostModel(constant=2e-4, linear=2e-7, quadratic=1e-10)
NUM_RANKS = 4  # that are measured


class Plans(NamedTuple):
    """The same samples in ordinary steps and in mixed ones, with as many microbatches in each."""

    lengths: np.ndarray
    ordinary: jvarlen.Plan
    mixed: MixedPlan

    @property
    def useful_s(self) -> float:
        """Seconds of all samples in full microbatches of their shapes."""
        plan = self.mixed.plan
        rows, lengths = np.array(plan.buckets.shapes)[plan.step_bucket].T
        return float(np.sum(COST(rows, lengths) * plan.num_sequences / rows))

    def planned_s(self, num_ranks: int) -> tuple[float, float]:
        """Seconds of an epoch: by ordinary steps, and by mixed ones, which take as long as their busiest rank."""
        shapes = np.array(self.ordinary.buckets.shapes)
        costs_K = COST(*shapes.T)
        each = self.ordinary.num_microbatches // num_ranks
        ordinary = each * costs_K[self.ordinary.step_bucket].sum()
        costs, ranks = costs_K[self.mixed.plan.step_bucket], self.mixed.ranks(num_ranks, COST)
        busiest = [
            np.bincount(ranks[start:end], costs[start:end]).max()
            for start, end in itertools.pairwise(self.mixed.step_offsets.tolist())
        ]
        return float(ordinary), float(sum(busiest))


def make_plans(num_samples: int, max_tokens: int, num_microbatches: int, *, max_shapes: int = 8) -> Plans:
    """Plans of log-normal lengths, median 180, at most 2,048."""
    lengths = np.clip(np.random.default_rng(0).lognormal(5.2, 0.9, num_samples), 1, 2048).astype(np.int64)
    buckets = jvarlen.make_buckets(lengths, max_tokens, max_shapes=max_shapes)
    make = functools.partial(jvarlen.make_plan, lengths, buckets, order="shuffle")
    ordinary = make(num_microbatches=num_microbatches)
    return Plans(lengths, ordinary, make_mixed_plan(make(), num_microbatches))


def planned(num_samples: int, numbers_of_ranks: Sequence[int]) -> list[list[str]]:
    rows = []
    for num_ranks, per_rank in itertools.product(numbers_of_ranks, (1, 4)):
        plans = make_plans(num_samples, 8192, num_ranks * per_rank)
        shares = [plans.useful_s / num_ranks / seconds for seconds in plans.planned_s(num_ranks)]
        rows.append(
            [
                f"{num_ranks}",
                f"{num_ranks * per_rank}",
                f"{plans.ordinary.num_steps}",
                f"{plans.mixed.num_steps}",
                *(f"{share:.3f}" for share in shares),
            ]
        )
    return rows


def waiting_loss(scale: float) -> Any:
    """A loss that waits as long as its microbatch costs."""

    def wait(x: Any, *, seconds: float) -> np.ndarray:
        time.sleep(seconds)
        return np.zeros(x.shape, x.dtype)

    def loss_fn(params: jax.Array, microbatch: jvarlen.batches.Batch) -> tuple[jax.Array, jax.Array]:
        seconds = scale * float(COST(*microbatch.tokens.shape))
        sleep = functools.partial(wait, seconds=seconds)
        total = jnp.sum(microbatch.weights)
        waited = jax.pure_callback(sleep, jax.ShapeDtypeStruct(total.shape, total.dtype), total)
        return params * total, total + waited

    return loss_fn


def epoch_seconds(step: Any, state: Any, batches: Sequence[Any]) -> float:
    """Seconds of these steps, one after the other; batches are on their devices."""
    begun = time.perf_counter()
    for batch in batches:  # one by one: callbacks of steps that are on their way together can wait for each other
        state, _ = jax.block_until_ready(step(state, batch))
    return time.perf_counter() - begun


def measured(num_samples: int, scale: float, *, max_shapes: int, each_per_rank: Sequence[int]) -> list[list[str]]:
    mesh, optimizer = place(Layout(data=NUM_RANKS)).mesh, optax.sgd(0.1)
    rows = []
    for per_rank in each_per_rank:
        plans = make_plans(num_samples, 2048, NUM_RANKS * per_rank, max_shapes=max_shapes)
        samples = [np.ones(length, np.int32) for length in plans.lengths]
        train_step = jvarlen.make_train_step(waiting_loss(scale), optimizer, layout=mesh)
        state, ordinary = train_step.init(jnp.float32(1)), jax.jit(train_step)
        mixed = jax.jit(make_mixed_train_step(waiting_loss(scale), optimizer, plans.mixed.buckets, layout=mesh))
        loaded = (
            (ordinary, list(jvarlen.load(plans.ordinary, samples, layout=mesh))),
            (mixed, list(load_mixed(plans.mixed, samples, layout=mesh, cost=COST))),
        )
        for name, (step, batches), seconds in zip(
            ("ordinary", "mixed"), loaded, plans.planned_s(NUM_RANKS), strict=True
        ):
            epoch_seconds(step, state, batches)  # which compiles
            taken = epoch_seconds(step, state, batches)
            share = scale * plans.useful_s / NUM_RANKS / taken
            planned_share = plans.useful_s / NUM_RANKS / seconds
            figures = (f"{scale * seconds:.2f}", f"{taken:.2f}", f"{planned_share:.3f}", f"{share:.3f}")
            rows.append([name, f"{NUM_RANKS * per_rank}", f"{len(batches)}", *figures])
    return rows


def program_cost(config: DecoderConfig, num_microbatches: int, buckets: Sequence[jvarlen.Bucket]) -> list[list[str]]:
    """Seconds of the same microbatches by both programs, on one device."""
    mesh, optimizer, loss_fn = place(Layout(data=1)).mesh, optax.adamw(1e-3), make_loss_fn(config)
    train_step = jvarlen.make_train_step(loss_fn, optimizer, layout=mesh)
    state, ordinary = train_step.init(init_params(config, seed=0)), jax.jit(train_step)
    mixed = jax.jit(make_mixed_train_step(loss_fn, optimizer, buckets, layout=mesh))
    lengths = np.repeat([bucket.length for bucket in buckets], [num_microbatches * bucket.rows for bucket in buckets])
    samples = [np.ones(length, np.int32) for length in lengths]
    of_ordinary = jvarlen.make_plan(lengths, buckets, order="length", num_microbatches=num_microbatches)
    of_mixed = make_mixed_plan(jvarlen.make_plan(lengths, buckets, order="length"), num_microbatches)
    steps = zip(
        buckets,
        jvarlen.load(of_ordinary, samples, layout=mesh),
        load_mixed(of_mixed, samples, layout=mesh),
        strict=True,
    )
    rows = []
    for bucket, *batches in steps:
        seconds = [np.inf, np.inf]
        for turn in range(2 if REPEATS == 1 else 8):  # in turns, as the machine may do other things as well
            for i, (step, batch) in enumerate(zip((ordinary, mixed), batches, strict=True)):
                taken = epoch_seconds(step, state, [batch])
                seconds[i] = min(seconds[i], taken if turn else np.inf)  # the first compiles
        rows.append([f"{bucket}", *(f"{1e3 * each:.1f}" for each in seconds), f"{seconds[1] / seconds[0]:.2f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few samples, and no report")
    quick = parser.parse_args().quick
    if quick:
        os.environ["XLA_FLAGS"] = COMPILE_FAST
    split_cpu(NUM_RANKS)
    num_samples = 2_000 if quick else 50_000
    buckets = [jvarlen.Bucket(32, 32), jvarlen.Bucket(8, 128), jvarlen.Bucket(2, 512)]
    lines = [
        f"# Mixed steps against ordinary ones, {datetime.date.today()}",
        "",
        f"Log-normal lengths, {num_samples:,} samples where planned, 8 shapes. Cost of a microbatch: "
        f"{COST.constant:g} s + {COST.linear:g} s a token + {COST.quadratic:g} s a token and position of its row. "
        "Used: the seconds that all samples take in full "
        "microbatches of their shapes, over the seconds of all ranks.",
        "",
        "## Planned",
        "",
        *table(
            "ranks|microbatches a step|ordinary steps|mixed steps|used, ordinary|used, mixed",
            planned(num_samples, (4, 16) if quick else (4, 16, 64, 256)),
        ),
        "",
        f"## Measured, {NUM_RANKS} ranks that wait",
        "",
        *table(
            "steps|microbatches a step|steps an epoch|planned, s|measured, s|used, planned|used, measured",
            (
                measured(50, 2.0, max_shapes=2, each_per_rank=(1,))
                if quick
                else measured(2_000, 20.0, max_shapes=8, each_per_rank=(1, 4))
            ),
        ),
        "",
        "## The same full microbatches, demo model, one device",
        "",
        *table(
            "shape|ordinary step, ms|mixed step, ms|ratio",
            program_cost(
                DecoderConfig(num_layers=1, width=16) if quick else DecoderConfig(num_layers=4),
                2 if quick else 4,
                buckets[: 2 if quick else 3],
            ),
        ),
        "",
        versions_and_hardware("jax"),
    ]
    report("mixed", lines, write=not quick)


if __name__ == "__main__":
    main()
