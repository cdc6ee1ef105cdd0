"""How much of their time do ranks compute, if packed rows are dealt to them by what they cost?

Attention that skips the blocks between samples makes a row of one long sample cost more than one of many short samples.
The ranks of a step wait for the slowest. Run `python benchmarks/balance.py [--quick]`. Prints tables and writes them,
with versions and hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
from support.timing import REPEATS, best_seconds, digits, report, table, versions_and_hardware

import jvarlen
from jvarlen.planning.balance import rank_costs

ROW_LENGTH = 8_192
CROSSOVER_LENGTH = 4_096
ROWS_PER_RANK = 4


def balanced(num_samples: int, num_ranks: int) -> list[str]:
    """The table of efficiencies: of the mean rank's time in that of the slowest one."""
    drawn = np.random.default_rng(0).lognormal(6, 1.2, num_samples)
    lengths = np.clip(drawn, 1, ROW_LENGTH).astype(np.int64)
    packing = jvarlen.pack_samples(lengths, ROW_LENGTH)
    buckets = [(ROWS_PER_RANK, ROW_LENGTH)]
    plan = jvarlen.make_plan(packing, buckets, microbatches_per_step=num_ranks, order="shuffle")
    cost = jvarlen.CostModel(constant=0, linear=1, quadratic=1 / CROSSOVER_LENGTH)
    costs_of = functools.partial(jvarlen.planning.packed_row_costs, lengths=lengths, cost=cost)
    costs = costs_of(plan)
    deal = functools.partial(jvarlen.balance_plan, plan, costs, num_ranks, lengths=lengths)
    deal(over="epoch")  # numba compiles, or reads what it compiled before
    ways = {
        "in the order of the plan": lambda: plan,
        "dealt within a step": functools.partial(deal, over="step"),
        "dealt over the epoch": functools.partial(deal, over="epoch"),
    }
    cells = []
    for name, call in ways.items():
        seconds, dealt = best_seconds(call)
        work = rank_costs(dealt, costs_of(dealt), num_ranks)
        efficiency = work.mean(axis=1) / work.max(axis=1)
        is_full = np.diff(np.searchsorted(dealt.row_offsets, dealt.step_offsets)) == num_ranks * ROWS_PER_RANK
        full_work = work[is_full].sum(axis=1)
        row = [
            name,
            f"{efficiency.mean():.4f}",
            f"{efficiency[is_full].mean():.4f}",
            f"{efficiency[is_full].min():.4f}",
        ]
        row += [f"{work.max(axis=1).sum() / work.mean(axis=1).sum():.4f}", f"{full_work.max() / full_work.mean():.4f}"]
        cells.append([*row, "–" if dealt is plan else digits(seconds)])
    return [
        f"## {num_ranks} ranks × {ROWS_PER_RANK} rows a step",
        "",
        f"{num_samples:,} samples of lengths `numpy.random.default_rng(0).lognormal(6, 1.2, {num_samples})` cut to 1 "
        f"to {ROW_LENGTH:,}, in {packing.num_rows:,} rows of {ROW_LENGTH:,} ({packing.fill:.2%} full), shuffled into "
        f"{plan.num_steps} steps, of which the last one is not full. A row costs {ROW_LENGTH:,} + Σ l² / "
        f"{CROSSOVER_LENGTH:,}; rows cost {costs.min():,.0f} to {costs.max():,.0f}, on average {costs.mean():,.0f}. "
        "Efficiency: the mean rank's work over that of the slowest rank, averaged over the steps.",
        "",
        *table(
            "rows|efficiency|of full steps|least of them|slowest / mean, of the epoch|largest full step / mean|seconds",
            cells,
        ),
        "",
    ]


def attention(length: int) -> list[str]:
    """The table of what `attend` takes, by how many samples share a row."""
    heads = jax.random.normal(jax.random.key(0), (3, 1, length, 2, 64))
    attend = jax.jit(lambda q, k, v, ids: jvarlen.attend(q, k, v, segment_ids=ids))
    segments = {1: jnp.ones((1, length), jnp.int32)}
    for num_samples in (4, 64):
        segments[num_samples] = jnp.repeat(jnp.arange(num_samples) + 1, length // num_samples)[None]
    attend(*heads, segments[1]).block_until_ready()  # compiles
    seconds = dict.fromkeys(segments, math.inf)
    for _ in range(10 * REPEATS):  # in turns: other work on the machine slows them all
        for num_samples, ids in segments.items():
            start = time.perf_counter()
            attend(*heads, ids).block_until_ready()
            seconds[num_samples] = min(seconds[num_samples], time.perf_counter() - start)
    cells = [
        [str(num_samples), digits(best), f"{best / seconds[1]:.2f}", f"{1 / num_samples:.3f}"]
        for num_samples, best in seconds.items()
    ]
    return [
        f"## Attention of one row of {length:,} positions, by its samples",
        "",
        "`attend`, forward, 2 heads of 64. The last column is the share of the pairs of positions that "
        "attention which skips the blocks between samples would compute.",
        "",
        *table("samples|seconds|ratio|share of pairs", cells),
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few samples, and no report")
    quick = parser.parse_args().quick
    lines = [
        f"# Rows dealt to ranks, {datetime.date.today()}",
        "",
        f"Work is counted, not measured. Seconds are of `balance_plan`, best of {REPEATS}, and of attention, best of "
        f"{10 * REPEATS} in turns.",
        "",
        *(balanced(10_000, 8) if quick else balanced(200_000, 64)),
        *attention(512 if quick else 4_096),
        versions_and_hardware("jax"),
    ]
    report("balance", lines, write=not quick)


if __name__ == "__main__":
    main()
