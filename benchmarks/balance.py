"""How much of their time do ranks compute, if packed rows are dealt to them by what they cost?

Attention within samples alone makes a row of one long sample cost more than one of many short samples. The ranks of a
step wait for the slowest. Counted on many ranks, against the rule of TorchTitan's balancer, and measured on the steps
of 8 devices. Run `python benchmarks/balance.py [--quick]`. Prints tables and writes them, with versions and hardware,
to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import math
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support.timing import COMPILE_FAST, REPEATS, best_seconds, digits, report, table, versions_and_hardware

import jvarlen
from jvarlen.data.tokens import TokenDataset
from jvarlen.distributed.mesh import split_cpu
from jvarlen.models import DecoderConfig, init_params, layered, make_loss_fn
from jvarlen.planning.balance import rank_costs

ROW_LENGTH = 8_192
CROSSOVER_LENGTH = 4_096
ROWS_PER_RANK = 4
NUM_DEVICES = 8
TINY = DecoderConfig(num_layers=1, width=16, num_heads=1)
PAIRS = jvarlen.CostModel(constant=0, linear=0, quadratic=1)


def balanced(num_samples: int, num_ranks: int) -> list[str]:
    """The table of efficiencies: of the mean rank's time in that of the slowest one."""
    drawn = np.random.default_rng(0).lognormal(6, 1.2, num_samples)
    lengths = np.clip(drawn, 1, ROW_LENGTH).astype(np.int64)
    buckets = [(ROWS_PER_RANK, ROW_LENGTH)]
    plan = jvarlen.make_plan(lengths, buckets, packing="best_fit", num_microbatches=num_ranks)
    cost = jvarlen.CostModel(constant=0, linear=1, quadratic=1 / CROSSOVER_LENGTH)
    costs_of = functools.partial(jvarlen.planning.packed_row_costs, lengths=lengths, cost=cost)
    costs = costs_of(plan)
    deal = functools.partial(jvarlen.balance_plan, plan, costs, num_ranks)
    deal()  # numba compiles, or reads what it compiled before
    ways = {"in the order of the plan": lambda: plan, "dealt": deal}
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
        f"to {ROW_LENGTH:,}, in {plan.num_rows:,} rows of {ROW_LENGTH:,} "
        f"({lengths.sum() / plan.num_rows / ROW_LENGTH:.2%} full), shuffled into "
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


def waited(work_SxM: np.ndarray, num_ranks: int, sync_every: str) -> np.ndarray:
    """What each step waits for, from the work of its microbatches."""
    work = work_SxM.reshape(len(work_SxM), num_ranks, -1)
    return work.sum(axis=2).max(axis=1) if sync_every == "step" else work.max(axis=1).sum(axis=1)


def by_cohorts(costs: np.ndarray, num_ranks: int, num_turns: int) -> float:
    """What a step waits for by the rule of TorchTitan: the costliest rows first, each to the emptiest rank."""
    costs = costs.reshape(-1, num_ranks, num_turns)
    total, falling = 0.0, np.sort(costs, axis=None)[::-1].reshape(num_turns, -1).tolist()
    for shared in falling:
        load, room = [0.0] * num_ranks, [len(costs)] * num_ranks
        for cost in shared:
            rank = min((rank for rank in range(num_ranks) if room[rank]), key=load.__getitem__)
            load[rank], room[rank] = load[rank] + cost, room[rank] - 1
        total += max(load)
    return min(total, float(costs.sum(axis=0).max(axis=0).sum()))


def beside_torchtitan(num_steps: int) -> list[str]:
    """The table of what steps wait for if ranks meet in every microbatch, by our rules and by TorchTitan's."""
    cells = []
    for num_turns, rows in ((1, 4), (2, 1), (2, 4)):
        size = NUM_DEVICES * num_turns
        drawn = np.random.default_rng(3).lognormal(np.log(300), 1, 9 * size * rows * num_steps)
        lengths = drawn.clip(1, 2048).astype(np.int64)
        plan = jvarlen.make_plan(lengths, [(rows, 2048)], packing="wrapped", num_microbatches=size)
        costs = jvarlen.planning.packed_row_costs(plan, lengths, PAIRS)
        first = np.searchsorted(plan.row_offsets, plan.step_offsets)
        is_full = np.flatnonzero(np.diff(first) == rows * size)
        mean = sum(costs[first[step] : first[step + 1]].sum() for step in is_full) / NUM_DEVICES
        theirs = np.array(
            [by_cohorts(costs[first[step] : first[step + 1]], NUM_DEVICES, num_turns) for step in is_full]
        )
        plans = [plan, jvarlen.balance_plan(plan, costs, NUM_DEVICES), jvarlen.balance_plan(plan, costs)]
        found = []
        for each in plans:
            work = rank_costs(each, jvarlen.planning.packed_row_costs(each, lengths, PAIRS), size)
            found.append(waited(work, NUM_DEVICES, "microbatch")[is_full])
        longer = [f"{np.count_nonzero(ours > theirs * (1 + 1e-9)):,}" for ours in found[1:]]
        ratios = [f"{each.sum() / mean:.4f}" for each in (found[0], theirs, *found[1:])]
        cells.append([f"{num_turns}", f"{rows}", f"{len(is_full):,}", *ratios, longer[0]])
    return [
        "## Beside TorchTitan's balancer",
        "",
        f"Pairs of tokens that {NUM_DEVICES} ranks wait for over those of the mean rank, summed over the steps, where "
        "ranks meet in every microbatch. Lognormal lengths (median 300, sigma 1) in rows of 2,048. TorchTitan's rule "
        "(`torchtitan/components/data/load_balancing`, 2026) moves rows within a step for that. "
        "Ours, in the two columns after it, does so for ranks that meet once a step.",
        "",
        *table(
            "microbatches of a rank|rows of each|steps|in the order of the plan|TorchTitan's rule|for these ranks|"
            "for any number of ranks|steps of ours that wait longer than by TorchTitan's rule",
            cells,
        ),
        "",
    ]


def on_devices(model: DecoderConfig, row_length: int, rows: int, num_steps: int, repeats: int) -> list[str]:
    """The tables of what steps take on 8 devices, predicted and measured."""
    size = 2 * NUM_DEVICES
    random = np.random.default_rng(5)
    num_samples = 2 * size * rows * num_steps * row_length // 490
    lengths = random.lognormal(np.log(300), 1, num_samples).clip(2, row_length).astype(np.int64)
    dataset = TokenDataset.from_bytes([random.integers(97, 123, length, np.uint8).tobytes() for length in lengths])
    in_order = jvarlen.make_plan(lengths, [(rows, row_length)], packing="best_fit", num_microbatches=size)
    dealt = jvarlen.balance_plan(in_order, jvarlen.planning.packed_row_costs(in_order, lengths, PAIRS))
    batches = {plan: list(itertools.islice(jvarlen.load(plan, dataset), num_steps)) for plan in (in_order, dealt)}
    optimizer = optax.adamw(1e-3)
    train_step = jvarlen.make_train_step(make_loss_fn(model), optimizer)
    state = train_step.init(init_params(model, seed=0))
    step = jax.jit(train_step)

    def cpu_seconds(batch: Any) -> float:
        start = time.process_time()
        jax.block_until_ready(step(state, batch))
        return time.process_time() - start

    # One sample a row, as for `jvarlen measure`.
    shapes = [(1, row_length // 4), (1, row_length), (2, row_length // 2), (rows, row_length), (rows, row_length // 4)]
    of_shapes = []
    for shape in dict.fromkeys(shapes):
        full = jvarlen.make_plan(np.full(shape[0], shape[1]), [shape], order="dataset")
        texts = TokenDataset.from_bytes([random.integers(97, 123, shape[1], np.uint8).tobytes()] * shape[0])
        (batch,) = jvarlen.load(full, texts)
        cpu_seconds(batch)  # compiles
        of_shapes.append((shape, min(cpu_seconds(batch) for _ in range(repeats))))
    cost = jvarlen.fit_cost_model(*zip(*of_shapes, strict=True))

    def one(batch: Any, m: int) -> Any:
        return jax.tree.map(lambda leaf: leaf[m : m + 1] if np.ndim(leaf) else leaf, batch)

    cpu_seconds(one(batches[dealt][0], 0))  # compiles
    measured = {plan: np.full((num_steps, size), np.inf) for plan in batches}
    for _ in range(repeats):  # in turns
        for s, m in np.ndindex(num_steps, size):
            for plan, found in measured.items():
                found[s, m] = min(found[s, m], cpu_seconds(one(batches[plan][s], m)))
    predicted = {}
    for plan in batches:
        of_rows = rank_costs(plan, jvarlen.planning.packed_row_costs(plan, lengths, PAIRS), size)[:num_steps]
        predicted[plan] = cost(rows, row_length, pairs=of_rows)
    cells = []
    for layout, sync_every in (("data8, data8.zero1", "step"), ("data8.zero2, data8.zero3", "microbatch")):
        row = [layout]
        for work in (predicted, measured):
            before, after = (waited(work[plan], NUM_DEVICES, sync_every).sum() for plan in (in_order, dealt))
            ideal = work[in_order].sum() / NUM_DEVICES
            row += [digits(before), digits(after), f"{after / before:.3f}", f"{ideal / before:.3f}"]
        cells.append(row)
    error = np.concatenate([(predicted[plan] / measured[plan] - 1).ravel() for plan in batches])
    lines = [
        f"## Steps of {NUM_DEVICES} devices",
        "",
        f"{num_steps} steps of the demo's decoder, AdamW, {size} microbatches of {rows} × {row_length:,}, float32, "
        "lognormal lengths (median 300, sigma 1). Every microbatch is measured by itself as a compiled step on one "
        f"device, in CPU seconds, the best of {repeats}, as cores are shared here; these are combined to what "
        f"{NUM_DEVICES} devices would wait for, updates and communication left out. Predicted by a cost model of one "
        f"sample a row ({cost}): microbatches are predicted {error.min():+.0%} to {error.max():+.0%}, on average "
        f"{error.mean():+.1%}. Dealt by `balance_plan(plan, pairs)`, for any number of ranks, as runs do. The last "
        "column is the least that any dealing could reach.",
        "",
        *table(
            "layout|predicted s, in the order of the plan|dealt|dealt / in order|mean rank / in order|"
            "measured s, in the order of the plan|dealt|dealt / in order|mean rank / in order",
            cells,
        ),
        "",
    ]
    return [*lines, *taking_turns(model, batches, in_order, dealt, max(1, num_steps // 2))]


def taking_turns(model: DecoderConfig, batches: Any, in_order: Any, dealt: Any, num_steps: int) -> list[str]:
    """The table of whole steps on 8 CPU devices, which take turns on the cores: the same losses, the same total."""
    cells = []
    for layout in ("data8",) if model == TINY else ("data8", "data8.zero3"):
        train_step = jvarlen.make_train_step(layered(model), optax.adamw(1e-3), layout=layout)
        step = jax.jit(train_step)
        seconds, losses = {}, {}
        for plan in (in_order, dealt, in_order, dealt):  # the first two compile
            state = train_step.init(init_params(model, seed=0))
            start, of_steps = time.process_time(), []
            for batch in batches[plan][:num_steps]:
                placed = jax.device_put(batch, train_step.placement.batch_shardings(batch))
                state, metrics = step(state, placed)
                of_steps.append(float(metrics.loss))
            seconds[plan], losses[plan] = time.process_time() - start, np.array(of_steps)
        apart = np.abs(losses[dealt] / losses[in_order] - 1).max()
        cells.append([layout, digits(seconds[in_order]), digits(seconds[dealt])])
        cells[-1] += [f"{seconds[dealt] / seconds[in_order]:.3f}", f"{apart:.0e}"]
    return [
        f"{num_steps} whole steps on {NUM_DEVICES} CPU devices of one process, which take turns on the cores: CPU "
        "seconds show the sum of all ranks, which dealing leaves alone, and losses are the same.",
        "",
        *table("layout|CPU s, in the order of the plan|dealt|ratio|largest relative difference of a loss", cells),
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few samples, and no report")
    quick = parser.parse_args().quick
    split_cpu(NUM_DEVICES)
    if quick:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {COMPILE_FAST}"
    lines = [
        f"# Rows dealt to ranks, {datetime.date.today()}",
        "",
        f"Work is counted, but measured in the last two tables. Seconds are of `balance_plan`, best of {REPEATS}, and "
        f"of attention, best of {10 * REPEATS} in turns.",
        "",
        *(balanced(10_000, 8) if quick else balanced(200_000, 64)),
        *beside_torchtitan(20 if quick else 1_000),
        *attention(512 if quick else 4_096),
        *(on_devices(TINY, 64, 2, 1, 1) if quick else on_devices(DecoderConfig(), 2_048, 2, 4, 2)),
        versions_and_hardware("jax"),
    ]
    report("balance", lines, write=not quick)


if __name__ == "__main__":
    main()
