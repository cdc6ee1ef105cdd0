"""What does a step take where answers share their prompt, over the same step where each repeats it?

A decoder of 4 layers and width 256 trains on two prompts of P tokens with G answers of R each. The prompts are in the
rows once, by `share_prompts`, or again in each answer's sample, either one a row or several a row, and always without
padding. Steps take turns. Run `python benchmarks/shared_prompts.py [--quick] [--turns N]`. Prints a table and writes
it, with versions and hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from typing import Any

import jax
import numpy as np
import optax
from support.timing import report, table, versions_and_hardware

import jvarlen
from jvarlen.data import WeightedTokens, share_prompts
from jvarlen.models import DecoderConfig, init_params, make_loss_fn

GOAL = 0.45  # of the seconds of the faster rows that repeat prompts, where P = 4 R and G = 8
NUM_PROMPTS = 2
SIZES = (512, 128, 8), (512, 128, 2), (128, 128, 8)


def samples_of(prompt: int, answer: int, num_answers: int) -> dict[str, tuple[list[Any], tuple[int, int], str]]:
    """The same tokens in three forms: samples, a bucket that they fill, and the packing."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, prompt) for _ in range(NUM_PROMPTS)]
    answers = [[rng.integers(0, 256, answer) for _ in range(num_answers)] for _ in prompts]
    weights = np.repeat([0.0, 1.0], [prompt, answer])
    alone = [
        WeightedTokens(np.append(tokens, each), weights)
        for tokens, of_prompt in zip(prompts, answers, strict=True)
        for each in of_prompt
    ]
    shared, _ = share_prompts(prompts, answers)
    a_row = min(4, len(alone))
    return {
        "shared": (shared, (NUM_PROMPTS, len(shared[0]["tokens"])), "best_fit"),
        "repeated, one a row": (alone, (len(alone), prompt + answer), "padded"),
        f"repeated, {a_row} a row": (alone, (len(alone) // a_row, a_row * (prompt + answer)), "best_fit"),
    }


def seconds_of_steps(model: DecoderConfig, sizes: tuple[int, int, int], num_turns: int) -> list[tuple[str, ...]]:
    """Rows of the report: tokens and seconds of a step, and their ratios over the faster rows that repeat prompts."""
    seconds: dict[str, list[tuple[float, float]]] = {}
    steps, tokens, losses = {}, {}, []
    for name, (samples, bucket, packing) in samples_of(*sizes).items():
        lengths = [len(sample["tokens"] if isinstance(sample, dict) else sample) for sample in samples]
        plan = jvarlen.make_plan(lengths, [bucket], packing=packing)
        # Samples of one length do not show which axis has it.
        fields = {"tokens": "length", "answer_ids": "length"} if name == "shared" else None
        loaded = jvarlen.load(plan, samples, fields=fields)
        step = jvarlen.make_train_step(make_loss_fn(model), optax.adamw(1e-3))
        state = step.init(init_params(model, seed=0))
        compiled = jvarlen.compile_buckets(step, state, loaded, progress=False, donate=False)
        steps[name], tokens[name] = (compiled, state, next(iter(loaded))), int(plan.num_tokens.sum())
    for turn in range(num_turns + 1):
        for name, (compiled, state, batch) in steps.items():
            starts = time.perf_counter(), time.process_time()
            _, metrics = jax.block_until_ready(compiled(state, batch))
            if turn:
                seconds.setdefault(name, []).append((time.perf_counter() - starts[0], time.process_time() - starts[1]))
            else:
                losses.append(float(metrics.loss))
    assert np.allclose(losses, losses[0], rtol=1e-5), losses
    medians = {name: tuple(map(statistics.median, zip(*of_steps, strict=True))) for name, of_steps in seconds.items()}
    faster = min([*medians][1:], key=lambda name: medians[name])
    ratios = {
        name: [statistics.median(np.divide(of_steps, seconds[faster])[:, clock].tolist()) for clock in (0, 1)]
        for name, of_steps in seconds.items()
    }
    return [
        (
            " × ".join(map(str, sizes)), name, f"{tokens[name]:,}", f"{tokens[name] / tokens[faster]:.2f}",
            f"{1e3 * medians[name][0]:,.0f}", *(f"{ratio:.2f}" for ratio in ratios[name]),
        )
        for name in steps
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model, and no report")
    parser.add_argument("--turns", type=int, default=9, help="steps of each form")
    args = parser.parse_args()
    model = DecoderConfig(num_layers=4, width=256, num_heads=4, begins_samples=False, vocab_size=256)
    if args.quick:
        tiny = DecoderConfig(num_layers=1, width=16, num_heads=1, begins_samples=False, vocab_size=256)
        rows = seconds_of_steps(tiny, (32, 8, 4), 1)
    else:
        rows = [row for sizes in SIZES for row in seconds_of_steps(model, sizes, args.turns)]
    lines = [
        f"# Shared prompts, {datetime.date.today()}",
        "",
        f"{NUM_PROMPTS} prompts of P tokens with G answers of R, a decoder of 4 layers and width 256, one device; "
        f"{args.turns} turns, medians. Ratios are within a turn, over the faster rows that repeat prompts; goal {GOAL} "
        "at 512 × 128 × 8.",
        "",
        *table("P × R × G|prompts|tokens|over repeated|ms a step|over repeated|CPU seconds over repeated", rows),
        "",
        versions_and_hardware("jax"),
    ]
    report("shared-prompts", lines, write=not args.quick)


if __name__ == "__main__":
    main()
