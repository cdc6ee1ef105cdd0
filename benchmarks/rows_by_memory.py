"""Do the rows that memory allows fit, is there no room for more, and how many programs does it take to know?

A Llama of 0.9 billion parameters, with AdamW and clipping, on 8 H100 and 8 TPU v5e: XLA's compilers for them, which
run on a CPU, compile the programs by which `choose_rows` chooses rows; then those with eight rows more, where memory
was the limit. Nothing runs. A compiler that is not installed (extras `target-gpu` and `target-tpu`) is left out by
name. Run `python benchmarks/rows_by_memory.py [--quick] [target ...]`; the full form takes some minutes of CPU time
for each target. `--quick` compiles a tiny model for the CPU. Prints tables and writes them, with versions and
hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from support.timing import COMPILE_FAST, digits, report, table, versions_and_hardware

from jvarlen import Budget, Layout, compile_for, make_plan
from jvarlen.distributed.mesh import split_cpu
from jvarlen.models import DecoderConfig, init_params, layered
from jvarlen.planning.buckets import Bucket
from jvarlen.targets import choose_rows
from jvarlen.targets.report import SOURCE, TargetRow

NO_LIMIT = 2**40  # of tokens
ROW_MULTIPLE = 8
LLAMA = DecoderConfig(
    num_layers=16, width=2048, mlp_width=5632, num_heads=16, num_kv_heads=4, vocab_size=32_000,
    compute_dtype="bfloat16", begins_samples=False,
)  # fmt: skip
TINY = DecoderConfig(num_layers=2, width=16, num_heads=2)


def lengths_of(num_samples: int, longest: int) -> np.ndarray:
    """Log-normal lengths, as of sentences and documents, cut at the longest."""
    drawn = np.random.default_rng(0).lognormal(np.log(longest / 8), 0.8, num_samples)
    return np.minimum(drawn.astype(np.int64) + 1, longest)


def measure(
    target: str, layout: str, config: DecoderConfig, lengths: np.ndarray, max_shapes: int, max_bytes: float | None
) -> tuple[list[list[str]], str]:
    """Cells of all buckets, and a summary."""
    params = jax.eval_shape(lambda: init_params(config, 0))
    how: dict[str, Any] = {"layout": layout, "params": params, "progress": False}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
    budget = Budget(
        max_tokens=NO_LIMIT,
        max_shapes=max_shapes,
        num_microbatches=Layout.parse(layout).data,
        length_multiple=64,
        row_multiple=ROW_MULTIPLE,
    )
    make = functools.partial(make_plan, lengths)
    chosen = choose_rows(layered(config), optimizer, make, budget=budget, target=target, max_bytes=max_bytes, **how)
    limit = chosen.budget.max_bytes
    assert limit is not None
    of_memory = [each for each in chosen.rows if each.limit == "memory"]
    more = {each.bucket.length: Bucket(each.most_rows + ROW_MULTIPLE, each.bucket.length) for each in of_memory}
    buckets = [more[each.bucket.length] for each in of_memory]
    larger: Sequence[TargetRow] = ()
    if buckets:
        plan = dataclasses.replace(chosen.plan, buckets=buckets)
        larger = compile_for(layered(config), optimizer, plan, target=target, **how)
    of_more = {row.bucket.length: row.total_bytes for row in larger}
    cells = [
        [
            target,
            str(each.bucket),
            f"{each.num_bytes / 1e9:.2f}",
            f"{each.num_bytes / limit:.1%}",
            each.limit,
            f"{each.most_rows:,}",
            f"{of_more[each.bucket.length] / limit:.1%}" if each.bucket.length in of_more else "–",
            str(each.num_programs),
        ]
        for each in chosen.rows
    ]
    assert all(each.num_bytes <= limit for each in chosen.rows)
    tight = sum(num_bytes > limit for num_bytes in of_more.values())
    by_tokens = f"a budget of {chosen.token_budget.max_tokens:,} tokens, the largest that fits"
    plans = [
        f"{plan.padding:.2%} padding, {plan.num_steps:,} steps and "
        f"{'–' if seconds is None else digits(seconds)} s by {name}"
        for plan, seconds, name in (
            (chosen.plan, chosen.epoch_s, "memory"),
            (chosen.token_plan, chosen.token_epoch_s, by_tokens),
        )
    ]
    summary = (
        f"{target}, `{chosen.report.layout}`, {limit / 1e9:.2f} GB: all {len(chosen.rows)} buckets fit; "
        f"with {ROW_MULTIPLE} rows more {tight} of the {len(of_memory)} that memory limits would not; "
        f"{sum(each.num_programs for each in chosen.rows) / len(chosen.rows):.1f} programs a bucket, "
        f"{max(each.num_programs for each in chosen.rows)} at most. Estimated: {'; '.join(plans)}."
    )
    return cells, summary


def tables(targets: list[str], config: DecoderConfig, lengths: np.ndarray, how: dict[str, Any]) -> list[str]:
    cells, summaries = [], []
    for target in targets:
        try:
            of_target, summary = measure(target, "data8.zero3", config, lengths, **how)
        except ModuleNotFoundError as error:
            summaries.append(f"- {target}: {error}.")
            continue
        cells += of_target
        summaries.append(f"- {summary}")
    header = "target|bucket|GB|of the limit|limited by|most rows|with 8 more|programs"
    return [
        f"A decoder of {config.num_layers} layers of width {config.width:,} and {config.vocab_size:,} values of a "
        f"token, AdamW, clipping; {len(lengths):,} samples of up to {lengths.max():,} tokens, one a row, rows "
        f"in multiples of {ROW_MULTIPLE}. **{SOURCE}** "
        "GB are 10⁹ bytes, of one device. A bucket has fewer rows than memory allows where its samples fill whole "
        "steps of fewer.",
        "",
        *summaries,
        "",
        *table(header, cells),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=["8xh100", "v5e:2x4"])
    parser.add_argument("--quick", action="store_true", help="a tiny model for the CPU, and no report")
    options = parser.parse_args()
    if options.quick:
        os.environ["XLA_FLAGS"] = COMPILE_FAST
        split_cpu(8)
        lines = tables(["here"], TINY, lengths_of(2000, 256), {"max_shapes": 3, "max_bytes": 5e7})
    else:
        jax.config.update("jax_platforms", "cpu")  # nothing looks for devices, whose drivers may not be here
        lines = tables(options.targets, LLAMA, lengths_of(5_000_000, 2048), {"max_shapes": 5, "max_bytes": None})
    title = f"# Rows by memory, {datetime.date.today()}"
    lines = [title, "", *lines, "", versions_and_hardware("jax", "jaxlib", "optax")]
    report("rows-by-memory", lines, write=not options.quick)


if __name__ == "__main__":
    main()
