"""How many tokens a second does `load` give of samples of named fields, beside those of tokens alone?

Arrays in memory, without a training: tokens; and tokens, a label a token, and a label a sample or a number a token. All
take turns. Run `python benchmarks/named_fields.py [--quick] [--turns N]`. Prints a table and writes it, with versions
and hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from typing import Any

import jax
import numpy as np
from support.timing import report, table, versions_and_hardware

import jvarlen

GOAL = 0.8  # of the tokens a second of tokens alone


def tokens_per_second(num_samples: int, num_turns: int) -> list[tuple[str, ...]]:
    """Rows of the report: tokens a second of processor time, of tokens alone and of three fields, in turns."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.5, 0.6, num_samples).astype(int), 16, 1024)
    tokens = [rng.integers(0, 30_000, length).astype(np.int32) for length in lengths]
    labelled = [{"tokens": each, "labels": each.copy()} for each in tokens]
    kinds: dict[str, Any] = {
        "tokens alone": tokens,
        "tokens, a label a token, a label a sample": [each | {"label": i % 7} for i, each in enumerate(labelled)],
        "tokens, a label a token, a float a token": [
            each | {"score": np.ones(len(each["tokens"]), np.float32)} for each in labelled
        ],
    }
    rows = []
    for packing in (None, "best_fit"):
        plan = jvarlen.make_plan(lengths, max_tokens=32_768, max_shapes=4, packing=packing)
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(num_turns + 1):
            for kind, samples in kinds.items():
                start = time.process_time()
                for batch in jvarlen.load(plan, samples):
                    jax.block_until_ready(batch)
                if turn:
                    seconds[kind].append(time.process_time() - start)
        for kind, of_kind in seconds.items():
            pairs = zip(seconds["tokens alone"], of_kind, strict=True)
            ratio = statistics.median(alone / named for alone, named in pairs)
            speed = int(lengths.sum()) / statistics.median(of_kind)
            rows.append((packing or "padded", kind, f"{speed / 1e6:,.1f} million", f"{ratio:.2f}"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few samples, and no report")
    parser.add_argument("--turns", type=int, default=9, help="passes over each dataset")
    args = parser.parse_args()
    rows = tokens_per_second(100, 1) if args.quick else tokens_per_second(8_000, args.turns)
    lines = [
        f"# Loading named fields, {datetime.date.today()}",
        "",
        f"Mean length 290, steps of 32,768 tokens; {args.turns} turns, medians. Ratios are within a turn; goal {GOAL}.",
        "",
        *table("rows|fields|tokens a second of processor time|over tokens alone", rows),
        "",
        versions_and_hardware("jax"),
    ]
    report("named-fields", lines, write=not args.quick)


if __name__ == "__main__":
    main()
